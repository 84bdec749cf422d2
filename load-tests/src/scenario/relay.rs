//! `relay`: consume from one queue, forward to another and acknowledge in one transaction, consume there.

use std::sync::Arc;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use super::{Defaults, one_queue, traffic};
use crate::args::Common;
use crate::client::{Connection, Request};
use crate::engine::consume::{Source, book, for_each_lane, pop_path};
use crate::engine::{Bench, Workers};
use crate::figures::add;
use crate::ledger::{AckFate, Ledger};
use crate::report::Report;
use crate::run::{Phase, Run};
use crate::wire::{Popped, PoppedMessage, Transacted, push_id};

const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs it.
pub async fn execute(common: &Common) -> Result<Report> {
    let mut bench = Bench::open(common, 30.0).await?;
    measure(&mut bench).await
}

pub(super) async fn measure(bench: &mut Bench) -> Result<Report> {
    let defaults = Defaults {
        lanes: 200,
        producers: 8,
        consumers: 8,
        push_batch: 20,
        pop_batch: 100,
        pop_partitions: 1,
        rate: None,
        backlog: 10_000,
    };
    let first = bench.run("relay", traffic(&bench.common, one_queue("relay-in"), &defaults), true);
    let mut second_traffic = first.traffic.clone();
    second_traffic.layout = one_queue("relay-out");
    let ledger = Ledger::new(second_traffic.lanes, 1, second_traffic.lease_seconds);
    let second = first.beside(second_traffic, ledger);
    bench.prepare(&first).await?;
    bench.prepare(&second).await?;

    let mut workers = Workers::default();
    for _ in 0..first.traffic.consumers {
        workers.consumers.spawn(forward(first.clone(), second.clone()));
    }
    workers.consume(&second);
    workers.produce(&first);
    let mut report = bench.measure_chain("relay", &first, std::slice::from_ref(&second), workers).await?;
    // What was acknowledged in the first queue was forwarded in the same commit, also where the answer was lost.
    for lane in 0..first.traffic.lanes {
        second.ledger.stored(lane, first.ledger.stored_of(lane));
    }
    report.verdict = report.verdict.and(second.ledger.close());
    let end_to_end = second.figures.delivery.quantiles();
    report.latencies.push(("through_both", end_to_end));
    report.extra.insert("end_acked_total".to_owned(), json!(second.figures.counters.snapshot().acked));
    let refusals = second.refusals.lock().unwrap_or_else(PoisonError::into_inner);
    report.extra.insert("end_refusals".to_owned(), json!(*refusals));
    Ok(report)
}

/// Pops, and moves each batch on in one transaction.
async fn forward(first: Arc<Run>, second: Arc<Run>) -> Result<()> {
    let mut connection = Connection::new(first.endpoint(), 0);
    let pop = Request::get(connection.endpoint(), &pop_path(&first, 0, &Source::Queue(0), first.traffic.wait_ms));
    let wait = Duration::from_millis(first.traffic.wait_ms);
    let mut bundle = Request::default();
    let mut items = Vec::new();
    while first.phase() < Phase::Stop {
        items.clear();
        let begun = Instant::now();
        let asked_ms = first.now_ms();
        if first.send(&mut connection, &pop, wait + CALL_TIMEOUT).await?.status != 200 {
            add(&first.figures.counters.pop_empty, 1);
            continue;
        }
        let popped: Popped<'_> = serde_json::from_slice(connection.body()).context("answer of a pop")?;
        if first.is_measuring() {
            first.figures.pop.record(begun.elapsed());
        }
        book(&first, 0, &popped.messages, asked_ms, &mut items);
        write_bundle(&first, &second, &popped.messages, &items, &mut bundle);
        bundle.finish_post(connection.endpoint(), "/api/v1/transaction");
        for_each_lane(&items, |lane, last| {
            first.ledger.ack_sent(0, lane, last);
            second.ledger.announce(lane, last + 1);
        });
        settle(&first, &second, &mut connection, &bundle, &items).await?;
    }
    Ok(())
}

fn write_bundle(first: &Run, second: &Run, messages: &[PoppedMessage<'_>], items: &[(u32, u32)], bundle: &mut Request) {
    let out = bundle.begin_post();
    out.extend_from_slice(b"{\"operations\":[{\"type\":\"push\",\"items\":[");
    for (message, (lane, seq)) in messages.iter().zip(items) {
        if out.last() != Some(&b'[') {
            out.push(b',');
        }
        out.push(b'{');
        second.traffic.layout.write_address(out, *lane);
        out.extend_from_slice(b",\"transactionId\":\"");
        push_id(out, &second.nonce, *lane, *seq);
        out.extend_from_slice(b"\",\"payload\":");
        out.extend_from_slice(message.data.get().as_bytes());
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
    for message in messages {
        out.extend_from_slice(b",{\"type\":\"ack\",\"transactionId\":\"");
        out.extend_from_slice(message.transaction_id.as_bytes());
        out.extend_from_slice(b"\",\"partitionId\":\"");
        out.extend_from_slice(message.partition_id.as_bytes());
        out.extend_from_slice(b"\",\"leaseId\":\"");
        out.extend_from_slice(message.lease_id.as_bytes());
        out.extend_from_slice(b"\",\"consumerGroup\":\"");
        out.extend_from_slice(first.traffic.groups[0].as_bytes());
        out.extend_from_slice(b"\",\"status\":\"completed\"}");
    }
    out.extend_from_slice(b"]}");
}

async fn settle(
    first: &Run,
    second: &Run,
    connection: &mut Connection,
    bundle: &Request,
    items: &[(u32, u32)],
) -> Result<()> {
    let begun = Instant::now();
    let sent = first.send(connection, bundle, CALL_TIMEOUT).await?;
    if first.is_measuring() {
        first.figures.transaction.record(begun.elapsed());
    }
    let counters = &first.figures.counters;
    let mut fate = AckFate::Unknown;
    if sent.status != 0 {
        let answer: Transacted = serde_json::from_slice(connection.body()).context("answer of a transaction")?;
        if answer.success {
            fate = AckFate::Done;
            add(&counters.transactions, 1);
            add(&counters.forwarded, items.len() as u64);
            add(&counters.acked, items.len() as u64);
        } else {
            add(&counters.rolled_back, 1);
            let reason = answer.reason.as_deref().unwrap_or("no reason");
            first.refused(&format!("{reason}: {}", answer.error.as_deref().unwrap_or_default()), 1);
            // A rollback after a try without an answer may follow a commit of that try.
            if !sent.uncertain {
                fate = AckFate::Refused;
            }
        }
    }
    for_each_lane(items, |lane, last| {
        if fate == AckFate::Done {
            second.ledger.stored(lane, last + 1);
        }
        first.ledger.ack_ended(0, lane, last, fate);
    });
    Ok(())
}
