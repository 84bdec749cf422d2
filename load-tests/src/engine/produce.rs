//! A producer: one connection, its own lanes, one push in flight.
//!
//! A lane belongs to one producer, and a push is repeated until it is answered before the next one is made. So the
//! numbers of a lane are its order of commit, which is what the ledger judges.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::args::Pattern;
use crate::client::{Connection, Request};
use crate::figures::add;
use crate::ledger::Violation;
use crate::run::{Phase, Run, Sent};
use crate::wire::{Part, PushStatus, Pushed, end_items, push_items};

const PUSH_TIMEOUT: Duration = Duration::from_secs(60);
const BACKLOG_PAUSE: Duration = Duration::from_millis(2);
const FAILED_PAUSE: Duration = Duration::from_millis(100);
const LATE: Duration = Duration::from_millis(10);

/// Instants at which one producer's pushes are due.
pub struct Pacer {
    next: Instant,
    every: Option<Duration>,
}

impl Pacer {
    /// The schedule of producer `index` of `producers` that together send `rate` messages a second.
    pub fn new(rate: Option<f64>, batch: usize, index: usize, producers: usize) -> Self {
        let every = rate.map(|rate| Duration::from_secs_f64(producers as f64 * batch as f64 / rate.max(0.001)));
        let offset = every.map_or(Duration::ZERO, |every| every.mul_f64(index as f64 / producers as f64));
        Self { next: Instant::now() + offset, every }
    }

    /// Waits for the next instant and answers it. It lies in the past when the producer is behind: the schedule does
    /// not wait for the broker.
    async fn due(&mut self) -> Instant {
        let Some(every) = self.every else { return Instant::now() };
        let due = self.next;
        self.next += every;
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        due
    }

    fn is_open_loop(&self) -> bool {
        self.every.is_some()
    }
}

/// Which lane a producer writes to next.
pub struct LaneChoice {
    index: u32,
    producers: u32,
    lanes: u32,
    turn: u32,
    active: Option<(u32, Pattern)>,
    stride: u64,
    rng: SmallRng,
}

impl LaneChoice {
    /// The choice of producer `index` of `producers`; it owns the lanes with `lane % producers == index`.
    pub fn new(run: &Run, index: usize) -> Self {
        let lanes = run.traffic.lanes;
        Self {
            index: index as u32,
            producers: run.traffic.producers as u32,
            lanes,
            turn: 0,
            active: run.traffic.active,
            stride: coprime_stride(u64::from(lanes)),
            rng: SmallRng::seed_from_u64(run.seed ^ ((index as u64 + 1) << 32)),
        }
    }

    fn next(&mut self, second: u32) -> u32 {
        let owned = (self.lanes - self.index).div_ceil(self.producers);
        match self.active {
            None => {
                self.turn = (self.turn + 1) % owned;
                self.turn * self.producers + self.index
            }
            Some((active, pattern)) => {
                // This producer's share of the second's window, over the lanes that it owns.
                let share = active.div_ceil(self.producers).clamp(1, owned);
                let base = (u64::from(second) * u64::from(share)) % u64::from(owned);
                let place = (base + u64::from(self.rng.random_range(0..share))) % u64::from(owned);
                let lane = place as u32 * self.producers + self.index;
                match pattern {
                    Pattern::Rotating => lane,
                    // A bijection of all lanes, so it still gives each lane to one producer.
                    Pattern::Scattered => (u64::from(lane) * self.stride % u64::from(self.lanes)) as u32,
                }
            }
        }
    }
}

fn coprime_stride(lanes: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let mut stride = (lanes as f64 * 0.618_033_988_7) as u64 | 1;
    while gcd(stride, lanes) != 1 {
        stride += 2;
    }
    stride
}

/// Pushes until the run stops producing.
pub async fn produce(run: Arc<Run>, index: usize) -> Result<()> {
    let traffic = &run.traffic;
    if index as u32 >= traffic.lanes {
        return Ok(());
    }
    let mut connection = Connection::new(run.push_endpoint(), index);
    let mut pacer = Pacer::new(traffic.rate, traffic.push_batch, index, traffic.producers);
    let mut choice = LaneChoice::new(&run, index);
    let mut push = Push::default();
    let each = (traffic.push_batch / traffic.push_lanes).max(1) as u32;
    while run.is_producing() {
        let due = pacer.due().await;
        if pacer.is_open_loop() {
            if due.elapsed() > LATE && run.is_measuring() {
                add(&run.figures.counters.late, 1);
            }
        } else if run.ledger.backlog() > traffic.backlog {
            tokio::time::sleep(BACKLOG_PAUSE).await;
            continue;
        }
        let due = if pacer.is_open_loop() { due } else { Instant::now() };
        push.parts.clear();
        let second = (run.micros_of(due) / 1_000_000) as u32;
        for _ in 0..traffic.push_lanes {
            let lane = choice.next(second);
            // Twice the same lane in one push: still consecutive numbers, but simpler to send as two parts.
            push.parts.push(Part { lane, first: run.ledger.take_numbers(lane, each), count: each });
        }
        if !push.send(&run, &mut connection, due).await? {
            break;
        }
    }
    Ok(())
}

/// Pushes `per_lane` messages to each of the producer's lanes once, `lanes_per_push` lanes at a time.
pub async fn fill(run: Arc<Run>, index: usize, per_lane: u32, lanes_per_push: usize) -> Result<()> {
    let mut connection = Connection::new(run.push_endpoint(), index);
    let mut push = Push::default();
    let owned: Vec<u32> = (index as u32..run.traffic.lanes).step_by(run.traffic.producers).collect();
    for lanes in owned.chunks(lanes_per_push.max(1)) {
        push.parts.clear();
        for &lane in lanes {
            push.parts.push(Part { lane, first: run.ledger.take_numbers(lane, per_lane), count: per_lane });
        }
        if !push.send(&run, &mut connection, Instant::now()).await? {
            break;
        }
    }
    Ok(())
}

/// One push, kept to reuse its memory.
#[derive(Default)]
pub struct Push {
    /// What it carries.
    pub parts: Vec<Part>,
    request: Request,
    address: Vec<u8>,
}

impl Push {
    /// Sends the parts until the broker has taken all of them; `false` when the run ended first.
    pub async fn send(&mut self, run: &Run, connection: &mut Connection, due: Instant) -> Result<bool> {
        let due_us = run.micros_of(due);
        self.request.begin_post().extend_from_slice(b"{\"items\":[");
        for &part in &self.parts {
            self.address.clear();
            run.traffic.layout.write_address(&mut self.address, part.lane);
            push_items(self.request.body(), &self.address, &run.nonce, part, due_us, &run.payloads);
        }
        end_items(self.request.body());
        self.request.finish_post(connection.endpoint(), "/api/v1/push");
        let mut repeated = false;
        loop {
            let sent = run.send(connection, &self.request, PUSH_TIMEOUT).await?;
            if sent.status == 0 {
                return Ok(false);
            }
            if self.settle(run, connection.body(), sent, repeated)? {
                break;
            }
            // Some item is stored nowhere: the same body again; what was stored answers `duplicate`.
            repeated = true;
            if run.phase() == Phase::Stop {
                return Ok(false);
            }
            tokio::time::sleep(FAILED_PAUSE).await;
        }
        add(&run.figures.counters.push_calls, 1);
        if run.is_measuring() {
            run.figures.push.record(due.elapsed());
        }
        Ok(true)
    }

    /// Books the answer; `false` when it must be sent again.
    fn settle(&self, run: &Run, body: &[u8], sent: Sent, repeated: bool) -> Result<bool> {
        let items: Vec<Pushed> = serde_json::from_slice(body).context("answer of a push")?;
        let expected: u32 = self.parts.iter().map(|part| part.count).sum();
        if items.len() != expected as usize {
            bail!("a push of {expected} items was answered with {}", items.len());
        }
        if items.iter().any(|item| item.status == PushStatus::Failed) {
            run.refused("push item failed", 1);
            return Ok(false);
        }
        let first_try = !sent.uncertain && !repeated;
        let (mut duplicates, mut buffered) = (0, 0);
        let numbers =
            self.parts.iter().flat_map(|part| (part.first..part.first + part.count).map(|seq| (part.lane, seq)));
        for (place, (item, (lane, seq))) in items.iter().zip(numbers).enumerate() {
            if item.index as usize != place {
                bail!("item {place} of a push was answered with index {}", item.index);
            }
            match item.status {
                PushStatus::Duplicate => {
                    duplicates += 1;
                    if first_try {
                        run.ledger.violation(Violation::FalseDuplicate, 1, || format!("lane {lane} message {seq}"));
                    }
                }
                PushStatus::Buffered => buffered += 1,
                PushStatus::Queued | PushStatus::Failed => {}
            }
            if let Some(offset) = item.offset.filter(|offset| *offset != u64::from(seq)) {
                run.ledger.violation(Violation::WrongOffset, 1, || format!("lane {lane} message {seq} is at {offset}"));
            }
        }
        for part in &self.parts {
            run.ledger.stored(part.lane, part.first + part.count);
        }
        add(&run.figures.counters.pushed, u64::from(expected));
        add(&run.figures.counters.duplicates, duplicates);
        add(&run.figures.counters.buffered, buffered);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattering_is_a_bijection() {
        for lanes in [1_u64, 2, 7, 1_000, 99_999, 1_000_000] {
            let stride = coprime_stride(lanes);
            let mut seen = vec![false; lanes as usize];
            for lane in 0..lanes {
                seen[(lane * stride % lanes) as usize] = true;
            }
            assert!(seen.into_iter().all(|hit| hit), "{lanes}");
        }
    }
}
