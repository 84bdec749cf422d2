//! `chaos`: produce and consume while the broker and its database are killed with `kill -9` and come back.
//!
//! Nothing answered `queued` may get lost, nothing answered `success` may come back, whatever dies when.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tokio::sync::Mutex;

use super::{Defaults, one_queue, traffic};
use crate::args::{ChaosArgs, Common};
use crate::broker_process::{BrokerProcess, kill_postmaster};
use crate::engine::{Bench, Workers};
use crate::report::Report;
use crate::run::Run;
use crate::sample::Sampler;

const POLL: Duration = Duration::from_millis(50);

/// Runs it.
pub async fn execute(common: &Common, args: &ChaosArgs) -> Result<Report> {
    let broker = BrokerProcess::prepare(&args.broker_cmd, args.broker_dir.as_deref())?;
    let broker = Arc::new(Mutex::new(broker));
    let report = disturbed(&broker, common, args).await;
    // Whatever happens, the broker is stopped in an orderly way: killed, it would leave its database running.
    let failed = report.as_ref().map_or(true, |report| !report.verdict.holds());
    broker.lock().await.finish(failed).await?;
    report
}

async fn disturbed(shared: &Arc<Mutex<BrokerProcess>>, common: &Common, args: &ChaosArgs) -> Result<Report> {
    let mut broker = shared.lock().await;
    broker.start(&[]).await?;
    let mut common = common.clone();
    common.lease_seconds.get_or_insert(5);
    let database = match &common.pg_data_dir {
        _ if args.spare_database => None,
        Some(dir) => Some(dir.clone()),
        // Below the directory that this broker was given: it is this broker's own.
        None => broker.pg_data_dir(),
    };
    let data_dir = database.clone().or_else(|| broker.pg_data_dir());
    let sampler = Sampler::find(&common, broker.endpoint(), broker.pid(), data_dir).await;
    let mut bench = Bench::with(&common, broker.endpoint(), sampler, 60.0);
    drop(broker);
    let defaults = Defaults {
        lanes: 100,
        producers: 8,
        consumers: 8,
        push_batch: 10,
        pop_batch: 50,
        pop_partitions: 5,
        rate: None,
        backlog: 5_000,
    };
    // A crash of the database may lose a lease that was committed asynchronously: legal, so leases are not judged.
    let run = bench.run("chaos", traffic(&common, one_queue("chaos"), &defaults), database.is_none());
    bench.prepare(&run).await?;

    let kills = Arc::new(Mutex::new(Kills::default()));
    let mut workers = Workers::plain(&run);
    workers.producers.spawn(disturb(run.clone(), shared.clone(), kills.clone(), database, args.clone(), common.seed));
    let mut report = bench.measure("chaos", &run, workers).await?;
    let kills = kills.lock().await;
    report.extra.insert("broker_kills".to_owned(), json!(kills.broker));
    report.extra.insert("database_kills".to_owned(), json!(kills.database));
    report.extra.insert("longest_outage_ms".to_owned(), json!(kills.longest.as_millis() as u64));
    Ok(report)
}

#[derive(Default)]
struct Kills {
    broker: u64,
    database: u64,
    longest: Duration,
}

/// Kills and restarts until production ends; leaves everything running.
async fn disturb(
    run: Arc<Run>,
    broker: Arc<Mutex<BrokerProcess>>,
    kills: Arc<Mutex<Kills>>,
    database: Option<PathBuf>,
    args: ChaosArgs,
    seed: u64,
) -> Result<()> {
    let mut rng = SmallRng::seed_from_u64(seed);
    loop {
        let pause = Duration::from_secs_f64(args.kill_every.max(0.1) * rng.random_range(0.2..1.8));
        let until = std::time::Instant::now() + pause;
        while std::time::Instant::now() < until {
            if !run.is_producing() {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
        let begun = std::time::Instant::now();
        let mut broker = broker.lock().await;
        // 0: the broker; 1: the database; 2: both.
        let victim = if database.is_some() { rng.random_range(0..3) } else { 0 };
        let absence = Duration::from_millis(rng.random_range(0..1_000));
        let mut counted = kills.lock().await;
        if let Some(dir) = database.as_deref().filter(|_| victim > 0) {
            // It may still be down from a kill of both, if the broker was not asked to wait for it.
            match kill_postmaster(dir) {
                Ok(()) => counted.database += 1,
                Err(error) => eprintln!("database not killed: {error:#}"),
            }
        }
        if victim != 1 {
            broker.kill().await?;
            counted.broker += 1;
            tokio::time::sleep(absence).await;
            broker.spawn(&[])?;
        }
        broker.wait_ready().await.with_context(|| format!("after kill {victim} (seed {seed})"))?;
        counted.longest = counted.longest.max(begun.elapsed());
    }
}
