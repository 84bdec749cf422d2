//! `parked`: many consumers wait on quiet queues, and now and then a message comes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;

use super::{Defaults, fresh_queue, scaled, traffic};
use crate::args::{Common, ParkedArgs};
use crate::client::Endpoint;
use crate::engine::consume::{Source, consume};
use crate::engine::{Bench, Workers};
use crate::report::Report;
use crate::run::{Layout, Traffic};

/// Connections opened at once; a storm of connects would measure the kernel's backlog.
const RAMP: usize = 500;
const RAMP_PAUSE: Duration = Duration::from_millis(20);
/// Descriptors that are not consumers.
const OTHER_FILES: u64 = 500;
/// Long-poll time: re-polls are to be rare beside the trickle.
const WAIT_MS: u64 = 60_000;

/// Runs it.
pub async fn execute(common: &Common, args: &ParkedArgs) -> Result<Report> {
    let mut bench = Bench::open(common, 30.0).await?;
    if let Some(url) = &args.push_url {
        bench.push_endpoint = Arc::new(Endpoint::resolve(url, common.token.as_deref()).await?);
    }
    measure(&mut bench, args).await
}

pub(super) async fn measure(bench: &mut Bench, args: &ParkedArgs) -> Result<Report> {
    let waiting = scaled(&bench.common, args.waiting);
    let defaults = Defaults {
        lanes: (waiting as u32 / 10).max(1),
        producers: 8,
        consumers: 0,
        push_batch: 1,
        pop_batch: 10,
        pop_partitions: 1,
        rate: Some(100.0 / bench.common.scale),
        backlog: 0,
    };
    let traffic = traffic(&bench.common, Layout::QueuePerLane { namespace: fresh_queue("parked") }, &defaults);
    measure_waiting(bench, "parked", traffic, Some(waiting)).await
}

/// A run whose consumers wait, each on one queue: `waiting` of them, or one per queue.
pub(super) async fn measure_waiting(
    bench: &mut Bench,
    scenario: &'static str,
    mut traffic: Traffic,
    waiting: Option<usize>,
) -> Result<Report> {
    let waiting = waiting.unwrap_or(traffic.lanes as usize);
    raise_file_limit(waiting as u64)?;
    traffic.wait_ms = WAIT_MS;
    traffic.consumers = waiting;
    let run = bench.run(scenario, traffic, true);
    let mut workers = Workers::default();
    let begun = Instant::now();
    let mut series = Vec::new();
    for first in (0..waiting).step_by(RAMP) {
        for number in first..(first + RAMP).min(waiting) {
            let lane = (number % run.traffic.lanes as usize) as u32;
            workers.consumers.spawn(consume(run.clone(), 0, Source::Queue(lane), number, true));
        }
        bench.watch("parking", &run, &mut workers, RAMP_PAUSE, |t| t >= RAMP_PAUSE, &mut series).await?;
    }
    let parked_in = begun.elapsed().as_secs_f64();
    let parked = bench.sampler.take(true).await;
    workers.produce(&run);
    let mut report = bench.measure(scenario, &run, workers).await?;
    report.extra.insert("waiting_consumers".to_owned(), json!(waiting));
    report.extra.insert("parked_in_seconds".to_owned(), json!(parked_in));
    report.extra.insert("rss_parked_bytes".to_owned(), json!(parked.broker_rss));
    Ok(report)
}

fn raise_file_limit(connections: u64) -> Result<()> {
    let wanted = connections + OTHER_FILES;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft >= wanted || setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard).max(soft), hard).is_ok() && hard >= wanted
    {
        return Ok(());
    }
    // Only with the privilege to do so.
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_err() {
        bail!("{connections} connections need {wanted} open files, and the limit is {hard}: raise `ulimit -n`");
    }
    Ok(())
}
