//! `ack`: a pre-filled queue, and nothing but pops and acks.
//!
//! With `--broker-cmd` the broker is restarted for each variant of its switches, in alternation, so that the ratios
//! come from one run on one machine.

use std::sync::Arc;

use anyhow::Result;
use serde_json::{Value, json};

use super::{Defaults, ack_waves, one_queue, scaled, traffic};
use crate::args::{AckArgs, Common};
use crate::broker_process::BrokerProcess;
use crate::engine::consume::{Consumer, Source, empty_out};
use crate::engine::{Bench, Workers, produce};
use crate::figures::Counts;
use crate::report::Report;
use crate::run::{Phase, Run};
use crate::sample::{Resources, Sample, Sampler};

/// Messages of one push while filling.
const FILL_BATCH: u64 = 1_000;
/// Single acks on each batch of `--partial`.
const SINGLES: usize = 20;
const HITS: &str = "regent_ack_hits_total";
const MISSES: &str = "regent_ack_misses_total";
const BULK_BATCH: usize = 1_000;
const BULK_PARTITIONS: usize = 10;

/// The broker's switches, by name.
const VARIANTS: [(&str, &[(&str, &str)]); 4] = [
    ("fused", &[("QUEEN_ACK_FUSION", "true"), ("QUEEN_ACK_REGISTRY", "true")]),
    ("fusion off", &[("QUEEN_ACK_FUSION", "false"), ("QUEEN_ACK_REGISTRY", "true")]),
    ("both off", &[("QUEEN_ACK_FUSION", "false"), ("QUEEN_ACK_REGISTRY", "false")]),
    ("one at a time", &[("QUEEN_ACK_FUSION", "false"), ("QUEEN_ACK_REGISTRY", "false"), ("REGENT_ACK_SERIAL", "true")]),
];

/// Runs it; one report per round and variant.
pub async fn execute(common: &Common, args: &AckArgs) -> Result<Vec<Report>> {
    let Some(command) = &args.broker_cmd else {
        let mut bench = Bench::open(common, 0.0).await?;
        return Ok(vec![measure(&mut bench, "ack", args).await?]);
    };
    let mut broker = BrokerProcess::prepare(command, args.broker_dir.as_deref())?;
    // Whatever happens, the broker is stopped in an orderly way: killed, it would leave its database running.
    let reports = alternate(&mut broker, common, args).await;
    broker.finish(reports.is_err()).await?;
    let mut reports = reports?;
    let comparison = compare(&reports);
    println!("{}", comparison_table(&comparison));
    if let Some(last) = reports.last_mut() {
        last.extra.insert("comparison".to_owned(), comparison);
    }
    Ok(reports)
}

async fn alternate(broker: &mut BrokerProcess, common: &Common, args: &AckArgs) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    for round in 0..args.rounds.max(1) {
        for turn in 0..VARIANTS.len() {
            // Another one begins each round: what a variant leaves behind must not always meet the same next one.
            let (name, environment) = VARIANTS[(turn + round) % VARIANTS.len()];
            broker.start(environment).await?;
            let sampler = Sampler::find(common, broker.endpoint(), broker.pid(), broker.pg_data_dir()).await;
            let mut bench = Bench::with(common, broker.endpoint(), sampler, 0.0);
            let mut report = measure(&mut bench, name, args).await?;
            report.extra.insert("round".to_owned(), json!(round));
            reports.push(report);
            bench.sampler.close().await;
            broker.stop().await?;
        }
    }
    Ok(reports)
}

async fn measure(bench: &mut Bench, title: &str, args: &AckArgs) -> Result<Report> {
    let messages = scaled(&bench.common, args.messages as usize) as u64;
    let pop_batch = if args.partial { 1_000 } else { 10 };
    let pop_batch = bench.common.pop_batch.unwrap_or(pop_batch);
    // With everything claimed first, a partition can be claimed once: one batch each.
    // A batch of the resolution path must be one partition's.
    let is_claimed_first = args.claim_first || args.lease_memory;
    let whole_batches = is_claimed_first || args.partial;
    let lanes = if whole_batches { messages.div_ceil(pop_batch as u64) } else { 1_000.min(messages) };
    let defaults = Defaults {
        lanes: lanes as u32,
        producers: 8,
        consumers: if args.partial { 4 } else { 64 },
        push_batch: FILL_BATCH as usize,
        pop_batch,
        pop_partitions: 1,
        rate: None,
        backlog: u64::MAX,
    };
    let mut common = bench.common.clone();
    common.lease_seconds.get_or_insert(if is_claimed_first { 600 } else { 60 });
    let mut traffic = traffic(&common, one_queue("ack"), &defaults);
    if args.lone {
        traffic.consumers = 1;
    }
    let run = bench.run("ack", traffic, true);
    bench.prepare(&run).await?;
    if args.retained > 0 {
        fill(&run, args.retained).await?;
        empty(&run).await?;
    }
    fill(&run, messages).await?;
    if args.claim_first {
        ack_waves::acks_only(bench, title, &run, messages, args.waves).await
    } else if args.lease_memory {
        ack_waves::lease_memory(bench, title, &run, messages).await
    } else {
        pops_and_acks(bench, title, &run, args).await
    }
}

/// Pops and acknowledges everything in bulk.
pub(super) async fn empty(run: &Arc<Run>) -> Result<()> {
    let mut workers = Workers::default();
    for _ in 0..8 {
        let consumer = Consumer::shaped(run, 0, run.traffic.wait_ms, BULK_BATCH, BULK_PARTITIONS);
        workers.consumers.spawn(empty_out(consumer, None));
    }
    workers.join().await
}

/// Pushes this many messages, evenly over the partitions.
pub(super) async fn fill(run: &Arc<Run>, messages: u64) -> Result<()> {
    let lanes = u64::from(run.traffic.lanes);
    let mut left = messages.div_ceil(lanes);
    while left > 0 {
        let per_lane = left.min(FILL_BATCH);
        let lanes_per_push = (FILL_BATCH / per_lane).max(1) as usize;
        let mut workers = Workers::default();
        for index in 0..run.traffic.producers {
            workers.producers.spawn(produce::fill(run.clone(), index, per_lane as u32, lanes_per_push));
        }
        workers.join().await?;
        left -= per_lane;
    }
    Ok(())
}

async fn pops_and_acks(bench: &mut Bench, title: &str, run: &Arc<Run>, args: &AckArgs) -> Result<Report> {
    let before = bench.sampler.take(true).await;
    let counted = run.figures.counters.snapshot();
    run.enter(Phase::Measure);
    let mut workers = Workers::default();
    for number in 0..run.traffic.consumers {
        let consumer = Consumer::new(run, 0, &Source::Queue(0), number, 0, false);
        workers.consumers.spawn(empty_out(consumer, args.partial.then_some(SINGLES)));
    }
    workers.join().await?;
    finish(bench, title, run, &before, counted).await
}

async fn finish(bench: &mut Bench, title: &str, run: &Arc<Run>, before: &Sample, counted: Counts) -> Result<Report> {
    let resources = bench.sampler.take(true).await.since(before);
    let counts = run.figures.counters.snapshot().since(&counted);
    close(bench, title, run, counts, resources).await
}

/// Drains, judges, and reports what was measured.
pub(super) async fn close(
    bench: &mut Bench,
    title: &str,
    run: &Arc<Run>,
    counts: Counts,
    resources: Resources,
) -> Result<Report> {
    run.enter(Phase::Drain);
    // What could not be popped at once, because a lease had to run out, is fetched before the books are closed.
    empty_out(Consumer::shaped(run, 0, 0, BULK_BATCH, BULK_PARTITIONS), None).await?;
    let mut report = Report::new(title, run, counts, resources, run.ledger.close());
    // From the filling to the pop: says nothing here.
    report.latencies.retain(|(name, _)| *name != "push_to_delivery");
    report.versions = bench.sampler.versions();
    Ok(report)
}

/// Share of the acks that the lease registry recognised.
fn fast_path_hits(report: &Report) -> Option<f64> {
    let sum = |family: &str| -> f64 {
        let of_family = |name: &str| name == family || name.starts_with(&format!("{family}{{"));
        report.resources.broker_metrics.iter().filter(|(name, _)| of_family(name)).map(|(_, growth)| growth).sum()
    };
    let (hits, misses) = (sum(HITS), sum(MISSES));
    (hits + misses > 0.0).then(|| hits / (hits + misses))
}

/// Medians over the rounds, and the ratios of the first variant to the others.
fn compare(reports: &[Report]) -> Value {
    let median = |name: &str, read: &dyn Fn(&Report) -> Option<f64>| {
        let mut values: Vec<f64> = reports.iter().filter(|report| report.title == name).filter_map(read).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let latency = |report: &Report, pick: fn(&crate::figures::Quantiles) -> f64| {
        let wanted = ["ack_single", "ack"];
        let found = wanted.iter().find_map(|name| report.latencies.iter().find(|(known, _)| known == name));
        found.map(|(_, quantiles)| pick(quantiles))
    };
    let figures = |name: &str| {
        let per_second = |count: u64, report: &Report| Some(count as f64 / report.resources.seconds);
        json!({
            "acks_per_second": median(name, &|r| per_second(r.counts.ack_calls, r)),
            "acked_messages_per_second": median(name, &|r| per_second(r.counts.acked, r)),
            "ack_p50_us": median(name, &|r| latency(r, |q| q.p50_us as f64)),
            "ack_p99_us": median(name, &|r| latency(r, |q| q.p99_us as f64)),
            "postgres_cpu_us_per_message": median(name, &|r| r.cpu_us_per_message(r.resources.postgres_cpu_seconds)),
            "broker_cpu_us_per_message": median(name, &|r| r.cpu_us_per_message(r.resources.broker_cpu_seconds)),
            "fast_path_hits": median(name, &fast_path_hits),
            "acks_per_writing_commit":
                median(name, &|r| r.resources.write_commits.filter(|c| *c > 0).map(|c| r.counts.ack_calls as f64 / c as f64)),
        })
    };
    let all: Vec<(&str, Value)> = VARIANTS.iter().map(|(name, _)| (*name, figures(name))).collect();
    let base = all[0].1.clone();
    Value::Object(
        all.into_iter()
            .map(|(name, figures)| {
                let ratios = figures.as_object().into_iter().flatten().map(|(key, value)| {
                    let ratio = base[key].as_f64().zip(value.as_f64()).filter(|(_, v)| *v != 0.0).map(|(b, v)| b / v);
                    (key.clone(), json!(ratio))
                });
                let ratios: serde_json::Map<_, _> = ratios.collect();
                (name.to_owned(), json!({ "median": figures, "fused_to_this": ratios }))
            })
            .collect(),
    )
}

fn comparison_table(comparison: &Value) -> String {
    let mut out = String::from("\n== comparison: medians over the rounds (ratio of fused to this) ==\n");
    for (name, entry) in comparison.as_object().into_iter().flatten() {
        out.push_str(&format!("{name}\n"));
        for (key, value) in entry["median"].as_object().into_iter().flatten() {
            let number = |value: &Value| value.as_f64().map_or("-".to_owned(), |v| format!("{v:.3}"));
            out.push_str(&format!("  {key:<30} {:>12}   ({})\n", number(value), number(&entry["fused_to_this"][key])));
        }
    }
    out
}
