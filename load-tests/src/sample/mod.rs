//! Samples of the broker, its PostgreSQL and this process, and the difference of two.

pub mod machine;
pub mod postgres;
pub mod proc;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use sqlx::postgres::PgConnection;

use crate::args::Common;
use crate::client::{Connection, Endpoint, Request};
use postgres::PgSample;

const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);
const QUIET_WAIT_MAX: Duration = Duration::from_secs(10);
/// This long without more is the end of what a load leaves to be done.
const SETTLED: Duration = Duration::from_secs(25);
const QUIET_SLICE: Duration = Duration::from_millis(200);
/// Cores in use by broker and PostgreSQL below which they count as quiet.
const QUIET_CORES: f64 = 0.1;

/// Everything that is sampled at one moment.
#[derive(Debug, Clone)]
pub struct Sample {
    at: Instant,
    own_cpu: f64,
    broker_cpu: Option<f64>,
    postgres_cpu: Option<f64>,
    /// Resident bytes of the broker.
    pub broker_rss: Option<u64>,
    broker_peak_rss: Option<u64>,
    postgres_pss: Option<u64>,
    /// PostgreSQL's counters.
    pub postgres: Option<PgSample>,
    metrics: BTreeMap<String, f64>,
}

/// What happened between two samples.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Resources {
    /// Length in seconds.
    pub seconds: f64,
    /// CPU seconds of this process.
    pub own_cpu_seconds: f64,
    /// CPU seconds of the broker.
    pub broker_cpu_seconds: Option<f64>,
    /// CPU seconds of PostgreSQL with all its backends.
    pub postgres_cpu_seconds: Option<f64>,
    /// Resident bytes of the broker at the end.
    pub broker_rss_bytes: Option<u64>,
    /// Highest resident bytes since the broker started.
    pub broker_peak_rss_bytes: Option<u64>,
    /// Proportional bytes of PostgreSQL at the end.
    pub postgres_pss_bytes: Option<u64>,
    /// WAL written.
    pub wal_bytes: Option<i64>,
    /// Commits, those that only read included.
    pub commits: Option<i64>,
    /// Transactions that wrote.
    pub write_commits: Option<i64>,
    /// Rollbacks.
    pub rollbacks: Option<i64>,
    /// WAL fsyncs.
    pub wal_syncs: Option<i64>,
    /// Table bytes of schema `queen` at the end.
    pub table_bytes: Option<i64>,
    /// Index bytes of schema `queen` at the end.
    pub index_bytes: Option<i64>,
    /// Growth of tables and indexes.
    pub grown_bytes: Option<i64>,
    /// Bytes by table at the end.
    pub tables: BTreeMap<String, i64>,
    /// The broker's own counters: growth of everything named `…_total`, `…_count` or `…_sum`.
    pub broker_metrics: BTreeMap<String, f64>,
}

/// CPU seconds at one instant: cheap, for windows that are much shorter than what a [`Sample`] costs.
#[derive(Debug, Clone, Copy)]
pub struct CpuClock {
    at: Instant,
    own: f64,
    broker: Option<f64>,
    postgres: Option<f64>,
}

/// Takes samples; finds the processes by itself where it can.
pub struct Sampler {
    broker: Option<i32>,
    postmaster: Option<i32>,
    sql: Option<PgConnection>,
    scrape: Connection,
    versions: Value,
}

impl Sampler {
    /// Looks for the broker, its postmaster and a way to the statistics. What is not found is not measured.
    pub async fn find(common: &Common, endpoint: Arc<Endpoint>, pid: Option<i32>, data_dir: Option<PathBuf>) -> Self {
        let local = endpoint.address.ip().is_loopback();
        let port = endpoint.address.port();
        let broker = pid.or(common.broker_pid).or_else(|| local.then(|| proc::listener_on(port)).flatten());
        let found = || {
            let broker = broker?;
            proc::postmaster_of(broker).and_then(proc::data_dir_of).or_else(|| proc::data_dir_below(broker))
        };
        let data_dir = data_dir.or_else(|| common.pg_data_dir.clone()).or_else(found);
        let file = data_dir.as_deref().and_then(proc::read_postmaster_file);
        let mut sql = None;
        if let Some(url) = &common.database_url {
            match postgres::connect(url).await {
                Ok(connection) => sql = Some(connection),
                Err(error) => eprintln!("no statistics of PostgreSQL: {error:#}"),
            }
        }
        if let (None, Some(file)) = (&sql, &file) {
            sql = postgres::connect_local(file).await;
        }
        let postgres_version = match sql.as_mut() {
            Some(sql) => postgres::version(sql).await.ok(),
            None => None,
        };
        let mut sampler = Self {
            broker,
            postmaster: file.map(|file| file.pid),
            sql,
            scrape: Connection::new(endpoint, 0),
            versions: Value::Null,
        };
        let health = sampler.get("/health").await.and_then(|body| serde_json::from_str::<Value>(&body).ok());
        sampler.versions = json!({
            "generator": env!("CARGO_PKG_VERSION"),
            "broker": health.as_ref().and_then(|health| health.get("version")),
            "engine": health.as_ref().and_then(|health| health.get("engine")),
            "broker_command": broker.and_then(proc::command_line),
            "postgres": postgres_version,
        });
        sampler
    }

    /// Versions, for the record.
    pub fn versions(&self) -> Value {
        self.versions.clone()
    }

    /// What is measured, in a line.
    pub fn describe(&self) -> String {
        let pid = |pid: Option<i32>| pid.map_or("not found".to_owned(), |pid| format!("pid {pid}"));
        let sql = if self.sql.is_some() { "connected" } else { "not reached" };
        format!("broker {}, postmaster {}, statistics {sql}", pid(self.broker), pid(self.postmaster))
    }

    async fn get(&mut self, path: &str) -> Option<String> {
        let request = Request::get(self.scrape.endpoint(), path);
        let head = self.scrape.call(&request, SCRAPE_TIMEOUT).await.ok()?;
        (head.status == 200).then(|| String::from_utf8_lossy(self.scrape.body()).into_owned())
    }

    /// Takes one sample. Table sizes and the broker's own metrics cost a little and are left out of quick ones.
    pub async fn take(&mut self, full: bool) -> Sample {
        let postgres = match self.sql.as_mut() {
            Some(sql) => postgres::read(sql, full).await.ok(),
            None => None,
        };
        let metrics = if full { self.get("/metrics/prometheus").await.map(|text| parse_metrics(&text)) } else { None };
        let broker_rss = self.broker.and_then(proc::rss_bytes);
        let broker_peak_rss = self.broker.and_then(proc::peak_rss_bytes);
        let postgres_pss = self.postmaster.filter(|_| full).and_then(proc::family_pss_bytes);
        // CPU last, and the caller reads its counters right after: what is slow above must not fall between the two.
        Sample {
            postgres,
            metrics: metrics.unwrap_or_default(),
            broker_rss,
            broker_peak_rss,
            postgres_pss,
            own_cpu: proc::own_cpu_seconds(),
            broker_cpu: self.broker.and_then(proc::cpu_seconds),
            postgres_cpu: self.postmaster.and_then(proc::family_cpu_seconds),
            at: Instant::now(),
        }
    }

    /// Reads the CPU clocks.
    pub fn cpu(&self) -> CpuClock {
        CpuClock {
            own: proc::own_cpu_seconds(),
            broker: self.broker.and_then(proc::cpu_seconds),
            postgres: self.postmaster.and_then(proc::family_cpu_seconds),
            at: Instant::now(),
        }
    }

    /// Waits until broker and PostgreSQL have finished what was asked of them before, at most `QUIET_WAIT_MAX`.
    pub async fn quiet(&self) {
        let begun = Instant::now();
        while begun.elapsed() < QUIET_WAIT_MAX {
            if self.is_quiet_for(QUIET_SLICE).await {
                return;
            }
        }
    }

    /// Waits until they have been quiet for longer than the pause between two looks of autovacuum; how long that took.
    pub async fn settled(&self, wait_max: Duration) -> Duration {
        let begun = Instant::now();
        let mut quiet_since = Instant::now();
        while quiet_since.elapsed() < SETTLED && begun.elapsed() < wait_max {
            if !self.is_quiet_for(Duration::from_secs(1)).await {
                quiet_since = Instant::now();
            }
        }
        begun.elapsed()
    }

    async fn is_quiet_for(&self, slice: Duration) -> bool {
        let before = self.cpu();
        tokio::time::sleep(slice).await;
        let mut seen = Resources::default();
        seen.add_cpu(&before, &self.cpu());
        let used = seen.broker_cpu_seconds.unwrap_or_default() + seen.postgres_cpu_seconds.unwrap_or_default();
        used < seen.seconds * QUIET_CORES
    }

    /// Ends the session with PostgreSQL.
    pub async fn close(self) {
        if let Some(sql) = self.sql {
            postgres::close(sql).await;
        }
    }
}

impl Resources {
    /// Adds length and CPU of a window.
    pub fn add_cpu(&mut self, from: &CpuClock, to: &CpuClock) {
        let more = |sum: &mut Option<f64>, from: Option<f64>, to: Option<f64>| {
            if let Some((from, to)) = from.zip(to) {
                *sum = Some(sum.unwrap_or_default() + to - from);
            }
        };
        self.seconds += to.at.duration_since(from.at).as_secs_f64();
        self.own_cpu_seconds += to.own - from.own;
        more(&mut self.broker_cpu_seconds, from.broker, to.broker);
        more(&mut self.postgres_cpu_seconds, from.postgres, to.postgres);
    }

    /// Adds everything else of a window: growth is summed, states are those of the later one.
    pub fn add_counters(&mut self, window: Resources) {
        let more = |sum: Option<i64>, more: Option<i64>| more.map(|more| sum.unwrap_or_default() + more);
        let mut broker_metrics = std::mem::take(&mut self.broker_metrics);
        for (name, growth) in window.broker_metrics {
            *broker_metrics.entry(name).or_default() += growth;
        }
        *self = Resources {
            seconds: self.seconds,
            own_cpu_seconds: self.own_cpu_seconds,
            broker_cpu_seconds: self.broker_cpu_seconds,
            postgres_cpu_seconds: self.postgres_cpu_seconds,
            wal_bytes: more(self.wal_bytes, window.wal_bytes),
            commits: more(self.commits, window.commits),
            write_commits: more(self.write_commits, window.write_commits),
            rollbacks: more(self.rollbacks, window.rollbacks),
            wal_syncs: more(self.wal_syncs, window.wal_syncs),
            grown_bytes: more(self.grown_bytes, window.grown_bytes),
            broker_metrics,
            ..window
        };
    }
}

impl Sample {
    /// What happened since an earlier sample.
    pub fn since(&self, earlier: &Self) -> Resources {
        let grown = |now: Option<f64>, before: Option<f64>| Some(now? - before?).filter(|seconds| *seconds >= 0.0);
        let (now, before) = (self.postgres.as_ref(), earlier.postgres.as_ref());
        let pg = |read: fn(&PgSample) -> i64| Some(read(now?) - read(before?));
        let mut broker_metrics = BTreeMap::new();
        for (name, value) in &self.metrics {
            let growth = value - earlier.metrics.get(name).copied().unwrap_or_default();
            if growth != 0.0 {
                broker_metrics.insert(name.clone(), growth);
            }
        }
        Resources {
            seconds: self.at.duration_since(earlier.at).as_secs_f64(),
            own_cpu_seconds: self.own_cpu - earlier.own_cpu,
            broker_cpu_seconds: grown(self.broker_cpu, earlier.broker_cpu),
            postgres_cpu_seconds: grown(self.postgres_cpu, earlier.postgres_cpu),
            broker_rss_bytes: self.broker_rss,
            broker_peak_rss_bytes: self.broker_peak_rss,
            postgres_pss_bytes: self.postgres_pss,
            wal_bytes: pg(|sample| sample.wal_bytes),
            commits: pg(|sample| sample.commits),
            write_commits: pg(|sample| sample.writes),
            rollbacks: pg(|sample| sample.rollbacks),
            wal_syncs: pg(|sample| sample.wal_syncs.unwrap_or_default())
                .filter(|_| now.is_some_and(|sample| sample.wal_syncs.is_some())),
            table_bytes: now.map(|sample| sample.table_bytes),
            index_bytes: now.map(|sample| sample.index_bytes),
            grown_bytes: pg(|sample| sample.table_bytes + sample.index_bytes),
            tables: now.map(|sample| sample.tables.clone()).unwrap_or_default(),
            broker_metrics,
        }
    }
}

fn parse_metrics(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            let family = name.split('{').next()?;
            let counts = ["_total", "_count", "_sum"].iter().any(|end| family.ends_with(end));
            counts.then(|| Some((name.to_owned(), value.parse().ok()?)))?
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_counters_are_read() {
        let text = "# HELP a_total x\na_total{k=\"v w\"} 3\nb_gauge 7\nc_seconds_sum 0.5\nbroken\n";
        let metrics = parse_metrics(text);
        assert_eq!(metrics.len(), 2);
        assert_eq!(metrics["a_total{k=\"v w\"}"], 3.0);
    }
}
