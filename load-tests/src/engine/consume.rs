//! A consumer: one connection that pops, books what it got, and acknowledges.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::client::{Connection, Request};
use crate::figures::add;
use crate::ledger::{AckFate, Violation};
use crate::run::{Layout, Phase, Run, Sent};
use crate::wire::{Acked, Popped, PoppedMessage, begin_acks, end_items, push_ack, read_id};

const ACK_TIMEOUT: Duration = Duration::from_secs(60);
/// What a pop may take beyond its own long-poll time.
const POP_GRACE: Duration = Duration::from_secs(30);
const EMPTY_PAUSE: Duration = Duration::from_millis(5);
/// Past the lease, with nothing delivered for this long, there is nothing left to find.
const QUIET_BEYOND_LEASE: Duration = Duration::from_secs(5);
const ACK_PATH: &str = "/api/v1/ack/batch";

/// Texts of ack errors that cannot be true of a message that was just delivered.
const IMPOSSIBLE: [&str; 2] = ["consumer not found", "unresolvable"];
/// Text of the ack error that is true only when a lease ran out or was ended.
const LEASE_GONE: &str = "invalid or expired lease";
/// Texts of ack errors after which the ack may have landed.
const UNCERTAIN: [&str; 1] = ["ack flush failed"];

/// Where a consumer pops from.
#[derive(Debug, Clone)]
pub enum Source {
    /// The queue of this lane.
    Queue(u32),
    /// All queues of the run, by their namespace.
    Discovery,
}

/// Path of a pop.
pub fn pop_path(run: &Run, group: usize, source: &Source, wait_ms: u64) -> String {
    shaped_pop_path(run, group, source, wait_ms, (run.traffic.pop_batch, run.traffic.pop_partitions))
}

fn shaped_pop_path(
    run: &Run,
    group: usize,
    source: &Source,
    wait_ms: u64,
    (batch, partitions): (usize, usize),
) -> String {
    let traffic = &run.traffic;
    let query = format!(
        "batch={batch}&partitions={partitions}&wait={}&timeout={wait_ms}&consumerGroup={}&subscriptionMode=all\
         &leaseSeconds={}",
        wait_ms > 0,
        traffic.groups[group],
        traffic.lease_seconds
    );
    match (source, &traffic.layout) {
        (Source::Discovery, Layout::QueuePerLane { namespace }) => {
            format!("/api/v1/pop?namespace={namespace}&{query}")
        }
        (Source::Discovery, Layout::OneQueue { queue }) => format!("/api/v1/pop/queue/{queue}?{query}"),
        (Source::Queue(lane), layout) => format!("/api/v1/pop/queue/{}?{query}", layout.queue(*lane)),
    }
}

/// One popped batch and its ack, kept to reuse their memory.
#[derive(Default)]
pub struct Claim {
    /// Lane and number of each message, in the order of the answer.
    pub items: Vec<(u32, u32)>,
    /// The ack of all of them.
    pub ack: Request,
    /// Until then, in milliseconds of the run, its leases surely run: counted from before the pop was sent.
    held_until_ms: u32,
}

/// A consumer's connection and its prepared pop.
pub struct Consumer {
    run: Arc<Run>,
    group: usize,
    connection: Connection,
    pop: Request,
    wait: Duration,
}

impl Consumer {
    /// A consumer of one group. A lean one holds no buffers while it waits.
    pub fn new(run: &Arc<Run>, group: usize, source: &Source, number: usize, wait_ms: u64, lean: bool) -> Self {
        let endpoint = run.endpoint();
        let pop = Request::get(&endpoint, &pop_path(run, group, source, wait_ms));
        let connection = if lean { Connection::lean(endpoint, number) } else { Connection::new(endpoint, number) };
        Self { run: run.clone(), group, connection, pop, wait: Duration::from_millis(wait_ms) }
    }

    /// The same with another batch and number of partitions than the run's.
    pub fn shaped(run: &Arc<Run>, group: usize, wait_ms: u64, batch: usize, partitions: usize) -> Self {
        let mut consumer = Self::new(run, group, &Source::Queue(0), 0, wait_ms, false);
        let path = shaped_pop_path(run, group, &Source::Queue(0), wait_ms, (batch, partitions));
        consumer.pop = Request::get(consumer.connection.endpoint(), &path);
        consumer
    }

    /// One pop. Books the messages and prepares their ack; `false` when there were none.
    pub async fn claim(&mut self, claim: &mut Claim) -> Result<bool> {
        let run = &self.run;
        claim.items.clear();
        let begun = Instant::now();
        let asked_ms = run.now_ms();
        let sent = run.send(&mut self.connection, &self.pop, self.wait + POP_GRACE).await?;
        if sent.status != 200 {
            add(&run.figures.counters.pop_empty, 1);
            return Ok(false);
        }
        // A repeated pop began its lease with the last try, which is later than `asked_ms`: the safe side.
        let popped: Popped<'_> = serde_json::from_slice(self.connection.body()).context("answer of a pop")?;
        if popped.messages.is_empty() {
            add(&run.figures.counters.pop_empty, 1);
            return Ok(false);
        }
        if run.is_measuring() {
            run.figures.pop.record(begun.elapsed());
        }
        book(run, self.group, &popped.messages, asked_ms, &mut claim.items);
        claim.held_until_ms = asked_ms.saturating_add(run.traffic.lease_seconds.saturating_mul(1000));
        begin_acks(claim.ack.begin_post(), &run.traffic.groups[self.group]);
        for message in &popped.messages {
            push_ack(claim.ack.body(), message);
        }
        end_items(claim.ack.body());
        claim.ack.finish_post(self.connection.endpoint(), ACK_PATH);
        Ok(true)
    }

    /// Pops and acknowledges the first `singles` messages one by one, then the rest in one call.
    pub async fn claim_and_settle_singly(&mut self, singles: usize) -> Result<bool> {
        let mut whole = Claim::default();
        if !self.claim(&mut whole).await? {
            return Ok(false);
        }
        let body = self.connection.body().to_vec();
        let popped: Popped<'_> = serde_json::from_slice(&body).context("answer of a pop")?;
        let singles = singles.min(popped.messages.len());
        for (message, item) in popped.messages.iter().zip(&whole.items).take(singles) {
            let mut single = self.ack_of(std::slice::from_ref(message), std::slice::from_ref(item));
            single.held_until_ms = whole.held_until_ms;
            self.acknowledge(&mut single, true).await?;
        }
        let mut rest = self.ack_of(&popped.messages[singles..], &whole.items[singles..]);
        rest.held_until_ms = whole.held_until_ms;
        if !rest.items.is_empty() {
            self.settle(&mut rest).await?;
        }
        Ok(true)
    }

    fn ack_of(&self, messages: &[PoppedMessage<'_>], items: &[(u32, u32)]) -> Claim {
        let mut claim = Claim { items: items.to_vec(), ..Claim::default() };
        begin_acks(claim.ack.begin_post(), &self.run.traffic.groups[self.group]);
        for message in messages {
            push_ack(claim.ack.body(), message);
        }
        end_items(claim.ack.body());
        claim.ack.finish_post(self.connection.endpoint(), ACK_PATH);
        claim
    }

    /// Acknowledges a claim and books the answers.
    pub async fn settle(&mut self, claim: &mut Claim) -> Result<()> {
        self.acknowledge(claim, false).await
    }

    /// Acknowledges a claim and keeps the answer, so that reading it is no part of what is measured.
    pub async fn settle_unread(&mut self, claim: Claim) -> Result<Answered> {
        let sent = self.send_ack(&claim, false).await?;
        Ok(Answered { claim, sent, body: self.connection.body().to_vec() })
    }

    async fn acknowledge(&mut self, claim: &mut Claim, single: bool) -> Result<()> {
        let sent = self.send_ack(claim, single).await?;
        book_acks(&self.run, self.group, claim, self.connection.body(), sent)
    }

    async fn send_ack(&mut self, claim: &Claim, single: bool) -> Result<Sent> {
        let run = &self.run;
        for_each_lane(&claim.items, |lane, last| run.ledger.ack_sent(self.group, lane, last));
        let begun = Instant::now();
        let sent = run.send(&mut self.connection, &claim.ack, ACK_TIMEOUT).await?;
        if run.is_measuring() {
            let latency = if single { &run.figures.ack_single } else { &run.figures.ack };
            latency.record(begun.elapsed());
        }
        Ok(sent)
    }
}

/// An ack and its answer, still to be read.
pub struct Answered {
    claim: Claim,
    sent: Sent,
    body: Vec<u8>,
}

impl Answered {
    /// Books it for the consumers of this group.
    pub fn book(&self, run: &Run, group: usize) -> Result<()> {
        book_acks(run, group, &self.claim, &self.body, self.sent)
    }
}

/// Books delivered messages; fills in their lanes and numbers. What is not ours gets a place outside all lanes.
pub fn book(run: &Run, group: usize, messages: &[PoppedMessage<'_>], asked_ms: u32, items: &mut Vec<(u32, u32)>) {
    let now_ms = run.now_ms();
    let now_us = run.micros_of(Instant::now());
    let measuring = run.is_measuring();
    let mut ages = Vec::with_capacity(if measuring { messages.len() } else { 0 });
    for message in messages {
        let Some((lane, seq)) = read_id(message.transaction_id, &run.nonce) else {
            run.ledger.violation(Violation::Phantom, 1, || format!("id {}", message.transaction_id));
            items.push((u32::MAX, 0));
            continue;
        };
        match run.payloads.read(message.data.get().as_bytes()) {
            Some(stamp) if stamp.lane == lane && stamp.seq == seq => {
                if measuring {
                    ages.push(now_us.saturating_sub(stamp.due_us));
                }
            }
            _ => run.ledger.violation(Violation::Corrupt, 1, || format!("payload of {}", message.transaction_id)),
        }
        items.push((lane, seq));
    }
    add(&run.figures.counters.delivered, messages.len() as u64);
    add(&run.figures.counters.pop_calls, 1);
    run.figures.delivery.record_all(ages.into_iter());
    let mut seqs: Vec<u32> = Vec::with_capacity(items.len());
    for part in items.chunk_by(|a, b| a.0 == b.0).filter(|part| part[0].0 != u32::MAX) {
        seqs.clear();
        seqs.extend(part.iter().map(|item| item.1));
        run.ledger.delivered(group, part[0].0, &seqs, asked_ms, now_ms);
    }
}

/// Calls `act` with each lane of some items and its highest number.
pub fn for_each_lane(items: &[(u32, u32)], mut act: impl FnMut(u32, u32)) {
    for part in items.chunk_by(|a, b| a.0 == b.0).filter(|part| part[0].0 != u32::MAX) {
        act(part[0].0, part.iter().map(|item| item.1).max().unwrap_or_default());
    }
}

fn book_acks(run: &Run, group: usize, claim: &Claim, body: &[u8], sent: Sent) -> Result<()> {
    if sent.status == 0 {
        for_each_lane(&claim.items, |lane, last| run.ledger.ack_ended(group, lane, last, AckFate::Unknown));
        return Ok(());
    }
    add(&run.figures.counters.ack_calls, 1);
    let answers: Vec<Acked> = serde_json::from_slice(body).context("answer of an ack")?;
    if answers.len() != claim.items.len() {
        bail!("an ack of {} items was answered with {}", claim.items.len(), answers.len());
    }
    let (mut done, mut noop, mut refused) = (0, 0, 0);
    let mut at = 0;
    for part in claim.items.chunk_by(|a, b| a.0 == b.0) {
        let lane = part[0].0;
        let mut highest: Option<u32> = None;
        for (item, answer) in part.iter().zip(&answers[at..]) {
            if answer.success {
                done += 1;
                noop += u64::from(answer.noop);
                highest = highest.max(Some(item.1));
                continue;
            }
            refused += 1;
            let text = answer.error.as_deref().unwrap_or("no text");
            run.refused(text, 1);
            // A lease may be gone because an earlier try, or an expired and repeated claim, has ended it.
            let fate = if sent.uncertain || UNCERTAIN.iter().any(|known| text.starts_with(known)) {
                AckFate::Unknown
            } else {
                AckFate::Refused
            };
            // Nobody but the ack itself may end a lease before its time.
            let taken_away = text.starts_with(LEASE_GONE)
                && !sent.uncertain
                && run.ledger.checks_leases()
                && sent.answered_ms < claim.held_until_ms;
            if taken_away || IMPOSSIBLE.iter().any(|known| text.starts_with(known)) {
                run.ledger
                    .violation(Violation::WronglyRefused, 1, || format!("lane {lane} message {}: {text}", item.1));
            }
            run.ledger.ack_ended(group, lane, item.1, fate);
        }
        if let Some(last) = highest {
            run.ledger.ack_ended(group, lane, last, AckFate::Done);
        }
        at += part.len();
    }
    if let Some((place, answer)) = answers.iter().enumerate().find(|(place, answer)| answer.index as usize != *place) {
        bail!("item {place} of an ack was answered with index {}", answer.index);
    }
    add(&run.figures.counters.acked, done);
    add(&run.figures.counters.ack_noop, noop);
    add(&run.figures.counters.ack_refused, refused);
    Ok(())
}

/// Pops and acknowledges until everything stored is acknowledged, or nothing came for longer than a lease.
pub async fn empty_out(mut consumer: Consumer, singles: Option<usize>) -> Result<()> {
    let run = consumer.run.clone();
    let quiet_max = Duration::from_secs(u64::from(run.traffic.lease_seconds)) + QUIET_BEYOND_LEASE;
    let mut claim = Claim::default();
    let mut last = Instant::now();
    while !run.ledger.is_settled() && last.elapsed() < quiet_max {
        let found = match singles {
            Some(singles) => consumer.claim_and_settle_singly(singles).await?,
            None => {
                let found = consumer.claim(&mut claim).await?;
                if found {
                    consumer.settle(&mut claim).await?;
                }
                found
            }
        };
        if found {
            last = Instant::now();
        } else {
            tokio::time::sleep(EMPTY_PAUSE).await;
        }
    }
    Ok(())
}

/// Pops and acknowledges until the run stops.
pub async fn consume(run: Arc<Run>, group: usize, source: Source, number: usize, lean: bool) -> Result<()> {
    let mut consumer = Consumer::new(&run, group, &source, number, run.traffic.wait_ms, lean);
    let mut claim = Claim::default();
    while run.phase() < Phase::Stop {
        if consumer.claim(&mut claim).await? {
            consumer.settle(&mut claim).await?;
            if lean {
                claim = Claim::default();
            }
        }
    }
    Ok(())
}
