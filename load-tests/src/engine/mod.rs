//! The course of a run: prepare, warm up, measure, drain, judge. Scenarios choose the traffic and the workers.

pub mod consume;
pub mod produce;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::args::Common;
use crate::client::{Connection, Endpoint, Request};
use crate::figures::Counts;
use crate::ledger::Ledger;
use crate::payload::PayloadPool;
use crate::progress::Progress;
use crate::report::Report;
use crate::run::{Layout, Phase, Run, Traffic};
use crate::sample::{Sample, Sampler};
use consume::Source;

const TICK: Duration = Duration::from_millis(200);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Consumers go on for this long after everything was acknowledged, to catch what comes once too often.
const LINGER: Duration = Duration::from_millis(700);
/// Past the lease, with nothing delivered or acknowledged for this long, a drain has found all that there is.
const QUIET_BEYOND_LEASE: Duration = Duration::from_secs(5);

/// What the runs of one invocation share.
pub struct Bench {
    /// Common flags.
    pub common: Common,
    /// Where the broker is.
    pub endpoint: Arc<Endpoint>,
    /// Where the broker is that producers push to.
    pub push_endpoint: Arc<Endpoint>,
    /// Samples of broker and PostgreSQL.
    pub sampler: Sampler,
    /// Payloads.
    pub payloads: Arc<PayloadPool>,
    /// Length of a window.
    pub duration: Duration,
    /// Time between two progress lines.
    pub every: Duration,
    /// Lines also on a terminal, each with a sample.
    pub lines: bool,
    interrupted: bool,
}

/// The workers of a run.
#[derive(Default)]
pub struct Workers {
    /// Those that end by themselves when production ends.
    pub producers: JoinSet<Result<()>>,
    /// Those that go on until everything is acknowledged.
    pub consumers: JoinSet<Result<()>>,
}

impl Workers {
    /// Producers and consumers of a plain run.
    pub fn plain(run: &Arc<Run>) -> Self {
        let mut workers = Self::default();
        workers.consume(run);
        workers.produce(run);
        workers
    }

    /// Starts the producers.
    pub fn produce(&mut self, run: &Arc<Run>) {
        for index in 0..run.traffic.producers {
            self.producers.spawn(produce::produce(run.clone(), index));
        }
    }

    /// Starts the consumers of every group on the one queue.
    pub fn consume(&mut self, run: &Arc<Run>) {
        for group in 0..run.traffic.groups.len() {
            for _ in 0..run.traffic.consumers {
                let source = match run.traffic.layout {
                    Layout::OneQueue { .. } => Source::Queue(0),
                    Layout::QueuePerLane { .. } => Source::Discovery,
                };
                self.consumers.spawn(consume::consume(run.clone(), group, source, 0, false));
            }
        }
    }

    /// Waits until all have ended.
    pub async fn join(mut self) -> Result<()> {
        for set in [&mut self.producers, &mut self.consumers] {
            while let Some(ended) = set.join_next().await {
                ended.context("a worker died")??;
            }
        }
        Ok(())
    }

    /// The first error of a worker that ended.
    fn check(&mut self) -> Result<()> {
        for set in [&mut self.producers, &mut self.consumers] {
            while let Some(ended) = set.try_join_next() {
                ended.context("a worker died")??;
            }
        }
        Ok(())
    }
}

impl Bench {
    /// Looks at the broker and gets ready.
    pub async fn open(common: &Common, duration_default: f64) -> Result<Self> {
        let endpoint = Arc::new(Endpoint::resolve(&common.url, common.token.as_deref()).await?);
        let sampler = Sampler::find(common, endpoint.clone(), None, None).await;
        Ok(Self::with(common, endpoint, sampler, duration_default))
    }

    /// The same with a broker that this tool started.
    pub fn with(common: &Common, endpoint: Arc<Endpoint>, sampler: Sampler, duration_default: f64) -> Self {
        eprintln!("driving http://{} ({})", endpoint.host, sampler.describe());
        Self {
            payloads: Arc::new(PayloadPool::new(common.seed, common.payload)),
            duration: Duration::from_secs_f64(common.duration.unwrap_or(duration_default)),
            every: Duration::from_secs_f64(common.every.unwrap_or(5.0)),
            common: common.clone(),
            push_endpoint: endpoint.clone(),
            endpoint,
            sampler,
            lines: false,
            interrupted: false,
        }
    }

    /// A run with this traffic. `check_leases` is off where a database crash may lose a lease.
    pub fn run(&self, scenario: &'static str, traffic: Traffic, check_leases: bool) -> Arc<Run> {
        let lease = if check_leases { traffic.lease_seconds } else { 0 };
        let ledger = Ledger::new(traffic.lanes, traffic.groups.len(), lease);
        Run::new(
            scenario,
            traffic,
            (self.endpoint.clone(), self.push_endpoint.clone()),
            self.common.seed,
            self.payloads.clone(),
            ledger,
        )
    }

    /// Sends the queue's options, and registers the groups with one pop each. Queues of their own per lane are
    /// registered by their consumers.
    pub async fn prepare(&self, run: &Arc<Run>) -> Result<()> {
        let Layout::OneQueue { queue } = &run.traffic.layout else { return Ok(()) };
        if let Some(options) = &self.common.queue_options {
            configure(&run.endpoint(), queue, options).await?;
        }
        for group in 0..run.traffic.groups.len() {
            let mut connection = Connection::new(run.endpoint(), 0);
            let path = consume::pop_path(run, group, &Source::Queue(0), 0);
            let request = Request::get(connection.endpoint(), &path);
            run.send(&mut connection, &request, CALL_TIMEOUT).await.context("register a group")?;
        }
        Ok(())
    }

    /// Waits until `done`, shows progress, and fails with the first worker that fails.
    pub async fn watch(
        &mut self,
        title: &str,
        run: &Arc<Run>,
        workers: &mut Workers,
        length: Duration,
        mut done: impl FnMut(Duration) -> bool,
        series: &mut Vec<Value>,
    ) -> Result<()> {
        let begun = Instant::now();
        let mut progress = Progress::new(title, length, self.every, self.lines);
        let mut before: Option<(Sample, Counts)> = None;
        while !done(begun.elapsed()) && !self.interrupted {
            tokio::select! {
                () = tokio::time::sleep(TICK) => {}
                _ = tokio::signal::ctrl_c() => {
                    eprintln!("interrupted: draining");
                    self.interrupted = true;
                }
            }
            workers.check()?;
            let Some(mut line) = progress.tick(run, begun.elapsed()) else { continue };
            if self.lines {
                let (sample, counts) = (self.sampler.take(true).await, run.figures.counters.snapshot());
                if let Some((earlier, counted)) = &before {
                    let entry = interval(run, &sample, earlier, counts.since(counted));
                    line.push_str(&format!(
                        "  rss {} MiB  tables {} MiB",
                        mib(&entry["broker_rss_bytes"]),
                        mib(&entry["relation_bytes"])
                    ));
                    series.push(entry);
                }
                before = Some((sample, counts));
            }
            eprintln!("{line}");
        }
        progress.finish();
        Ok(())
    }

    /// Warm-up, window, drain, judgement.
    pub async fn measure(&mut self, title: &str, run: &Arc<Run>, workers: Workers) -> Result<Report> {
        self.measure_chain(title, run, &[], workers).await
    }

    /// The same for a run that feeds others: the drain waits for all of them.
    pub async fn measure_chain(
        &mut self,
        title: &str,
        run: &Arc<Run>,
        fed: &[Arc<Run>],
        mut workers: Workers,
    ) -> Result<Report> {
        let mut series = Vec::new();
        let warmup = Duration::from_secs_f64(self.common.warmup);
        self.watch("warm-up", run, &mut workers, warmup, |t| t >= warmup, &mut series).await?;
        let before = self.sampler.take(true).await;
        run.enter(Phase::Measure);
        let counted = run.figures.counters.snapshot();
        let length = self.duration;
        self.watch(title, run, &mut workers, length, |t| t >= length, &mut series).await?;
        let after = self.sampler.take(true).await;
        let counts = run.figures.counters.snapshot().since(&counted);
        self.drain(run, fed, workers).await?;
        let mut report = Report::new(title, run, counts, after.since(&before), run.ledger.close());
        report.versions = self.sampler.versions();
        report.series = series;
        Ok(report)
    }

    /// Lets producers end, waits until everything is acknowledged or nothing comes any more, and ends the consumers.
    pub async fn drain(&mut self, run: &Arc<Run>, fed: &[Arc<Run>], mut workers: Workers) -> Result<()> {
        let is_settled = || run.ledger.is_settled() && fed.iter().all(|run| run.ledger.is_settled());
        run.enter(Phase::Drain);
        let limit = Duration::from_secs_f64(self.common.drain_timeout);
        let quiet_max = Duration::from_secs(u64::from(run.traffic.lease_seconds)) + QUIET_BEYOND_LEASE;
        let begun = Instant::now();
        let (mut seen, mut seen_at) = (0, Instant::now());
        let mut late = false;
        while !(workers.producers.is_empty() && is_settled()) {
            tokio::time::sleep(TICK / 4).await;
            workers.check()?;
            let moved = fed
                .iter()
                .chain([run])
                .map(|run| run.figures.counters.snapshot())
                .fold(0, |sum, counts| sum + counts.pushed + counts.delivered + counts.acked + counts.forwarded);
            if moved != seen {
                (seen, seen_at) = (moved, Instant::now());
            }
            if begun.elapsed() > limit || (workers.producers.is_empty() && seen_at.elapsed() > quiet_max) {
                late = true;
                break;
            }
        }
        if late {
            eprintln!("the drain ended after {:.0?} with {} unsettled", begun.elapsed(), run.ledger.backlog());
        }
        tokio::time::sleep(LINGER).await;
        workers.check()?;
        run.enter(Phase::Stop);
        let producers_end = async { while workers.producers.join_next().await.is_some() {} };
        // A producer that still has no answer repeats for a few seconds more, then gives up.
        tokio::time::timeout(Duration::from_secs(15), producers_end).await.ok();
        workers.producers.shutdown().await;
        workers.consumers.shutdown().await;
        Ok(())
    }
}

/// Sends options of a queue.
pub async fn configure(endpoint: &Arc<Endpoint>, queue: &str, options: &str) -> Result<()> {
    let options: Value = serde_json::from_str(options).context("--queue-options")?;
    let mut request = Request::default();
    let body = serde_json::to_vec(&json!({ "queue": queue, "options": options }))?;
    request.begin_post().extend_from_slice(&body);
    request.finish_post(endpoint, "/api/v1/configure");
    let mut connection = Connection::new(endpoint.clone(), 0);
    let head = connection.call(&request, CALL_TIMEOUT).await.context("configure the queue")?;
    if head.status >= 300 {
        bail!("configure was answered with {}: {}", head.status, String::from_utf8_lossy(connection.body()));
    }
    Ok(())
}

fn interval(run: &Run, sample: &Sample, earlier: &Sample, counts: Counts) -> Value {
    let resources = sample.since(earlier);
    json!({
        "at_ms": run.now_ms(),
        "counts": counts,
        "seconds": resources.seconds,
        "broker_rss_bytes": resources.broker_rss_bytes,
        "broker_cpu_seconds": resources.broker_cpu_seconds,
        "postgres_cpu_seconds": resources.postgres_cpu_seconds,
        "wal_bytes": resources.wal_bytes,
        "commits": resources.commits,
        "relation_bytes": resources.table_bytes.zip(resources.index_bytes).map(|(table, index)| table + index),
        "backlog": run.ledger.backlog(),
        "latency_us": run.figures.latencies_json(),
    })
}

fn mib(value: &Value) -> String {
    value.as_f64().map_or("-".to_owned(), |bytes| format!("{:.0}", bytes / 1_048_576.0))
}
