//! `million`: partitions made by push, as many as it takes, then traffic on a thousand of them a second.
//!
//! The same with `--partitions 1000` is the figure to compare with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::{Defaults, one_queue, scaled, traffic};
use crate::args::{Common, MillionArgs};
use crate::broker_process::BrokerProcess;
use crate::client::{Connection, Request};
use crate::engine::consume::{Consumer, Source, empty_out, pop_path};
use crate::engine::{Bench, Workers, produce};
use crate::report::Report;
use crate::run::Run;
use crate::sample::Sampler;

/// Partitions that one push of the creation makes.
const CREATED_PER_PUSH: usize = 1_000;
/// Shape of the pops that consume what the creation pushed.
const SWEEP_BATCH: usize = 1_000;
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
const RESTART_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs it.
pub async fn execute(common: &Common, args: &MillionArgs) -> Result<Report> {
    let Some(command) = &args.broker_cmd else {
        return measure(&mut Bench::open(common, 30.0).await?, args, None).await;
    };
    let mut broker = BrokerProcess::prepare(command, args.broker_dir.as_deref())?;
    // Whatever happens, the broker is stopped in an orderly way: killed, it would leave its database running.
    let report = with_broker(&mut broker, common, args).await;
    broker.finish(report.is_err()).await?;
    report
}

async fn with_broker(broker: &mut BrokerProcess, common: &Common, args: &MillionArgs) -> Result<Report> {
    broker.start(&[]).await?;
    let sampler = Sampler::find(common, broker.endpoint(), broker.pid(), broker.pg_data_dir()).await;
    let mut bench = Bench::with(common, broker.endpoint(), sampler, 30.0);
    measure(&mut bench, args, Some(broker)).await
}

pub(super) async fn measure(
    bench: &mut Bench,
    args: &MillionArgs,
    broker: Option<&mut BrokerProcess>,
) -> Result<Report> {
    let defaults = Defaults {
        lanes: scaled(&bench.common, 1_000_000) as u32,
        producers: 16,
        consumers: 16,
        push_batch: 10,
        pop_batch: 100,
        pop_partitions: 10,
        rate: None,
        backlog: 20_000,
    };
    let mut traffic = traffic(&bench.common, one_queue("million"), &defaults);
    traffic.active = Some((args.active.clamp(1, traffic.lanes), args.pattern));
    let lanes = traffic.lanes;
    let run = bench.run("million", traffic, true);
    bench.prepare(&run).await?;
    let empty = bench.sampler.take(true).await;

    let mut workers = Workers::default();
    for index in 0..run.traffic.producers {
        workers.producers.spawn(produce::fill(run.clone(), index, 1, CREATED_PER_PUSH));
    }
    let created_in =
        finish_step(bench, "creating", &run, workers, |run| run.ledger.stored_total() >= u64::from(lanes)).await?;
    let mut workers = Workers::default();
    for _ in 0..run.traffic.consumers {
        let consumer = Consumer::shaped(&run, 0, run.traffic.wait_ms, SWEEP_BATCH, SWEEP_BATCH);
        workers.consumers.spawn(empty_out(consumer, None));
    }
    let swept_in = finish_step(bench, "sweeping", &run, workers, |run| run.ledger.is_settled()).await?;
    let made = bench.sampler.take(true).await.since(&empty);

    let mut report = bench.measure("million", &run, Workers::plain(&run)).await?;
    let mut extra = |name: &str, value| report.extra.insert(name.to_owned(), value);
    extra("partitions", json!(lanes));
    extra("created_per_second", json!(f64::from(lanes) / created_in.as_secs_f64()));
    extra("swept_per_second", json!(f64::from(lanes) / swept_in.as_secs_f64()));
    extra("rss_bytes_per_partition", json!(made.broker_rss_bytes.map(|bytes| bytes as f64 / f64::from(lanes))));
    for (table, bytes) in &made.tables {
        extra(&format!("bytes_per_partition.{table}"), json!(*bytes as f64 / f64::from(lanes)));
    }
    if args.idle > 0.0 {
        let settled_in = bench.sampler.settled(Duration::from_secs(args.settle)).await;
        extra("idle_after_s", json!(settled_in.as_secs_f64().round()));
        let before = bench.sampler.take(true).await;
        tokio::time::sleep(Duration::from_secs_f64(args.idle)).await;
        let idle = bench.sampler.take(true).await.since(&before);
        let percent = |cpu: Option<f64>| json!(cpu.map(|cpu| cpu / idle.seconds * 100.0));
        extra("idle_broker_percent_of_core", percent(idle.broker_cpu_seconds));
        extra("idle_postgres_percent_of_core", percent(idle.postgres_cpu_seconds));
    }
    extra("first_contact_of_a_group_ms", json!(first_contact(&run).await));
    if let Some(broker) = broker {
        broker.stop().await?;
        let begun = Instant::now();
        broker.spawn(&[])?;
        extra("restart_to_first_pop_ms", json!(first_pop(&run, begun).await));
    }
    Ok(report)
}

/// Waits until a step is done or all its workers ended.
async fn finish_step(
    bench: &mut Bench,
    title: &str,
    run: &Arc<Run>,
    mut workers: Workers,
    done: impl Fn(&Run) -> bool,
) -> Result<Duration> {
    let begun = Instant::now();
    let mut finished = None;
    let check = |elapsed| {
        if done(run) {
            finished.get_or_insert(elapsed);
        }
        finished.is_some()
    };
    let limit = Duration::from_secs(24 * 3_600);
    bench.watch(title, run, &mut workers, limit, check, &mut Vec::new()).await?;
    workers.join().await?;
    Ok(begun.elapsed())
}

/// Milliseconds until a group that nobody knew gets its first message. What it leases is left to expire.
async fn first_contact(run: &Arc<Run>) -> Option<f64> {
    let mut connection = Connection::new(run.endpoint(), 0);
    let known = format!("consumerGroup={}", run.traffic.groups[0]);
    let path = pop_path(run, 0, &Source::Queue(0), 10_000).replace(&known, "consumerGroup=late");
    let request = Request::get(connection.endpoint(), &path);
    let begun = Instant::now();
    let head = connection.call(&request, CALL_TIMEOUT).await.ok()?;
    (head.status == 200).then(|| begun.elapsed().as_secs_f64() * 1e3)
}

/// Milliseconds from the start of the process until a pop is answered as a pop should be.
async fn first_pop(run: &Arc<Run>, begun: Instant) -> Option<f64> {
    let mut connection = Connection::new(run.endpoint(), 0);
    let request = Request::get(connection.endpoint(), &pop_path(run, 0, &Source::Queue(0), 0));
    while begun.elapsed() < RESTART_TIMEOUT {
        if let Ok(head) = connection.call(&request, CALL_TIMEOUT).await
            && head.status < 300
        {
            return Some(begun.elapsed().as_secs_f64() * 1e3);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    None
}
