//! What the workers of one run share: addresses, books, figures, clock and phase.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::args::Pattern;
use crate::client::{Connection, Endpoint, Head, Request};
use crate::figures::{Figures, add};
use crate::ledger::Ledger;
use crate::payload::PayloadPool;

/// Pause before a request is repeated when the broker names none; doubles up to the second.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a worker keeps repeating its last request after the run was stopped.
const RETRY_AFTER_STOP: Duration = Duration::from_secs(5);

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Workers run, nothing is measured.
    Warmup,
    /// The window is open.
    Measure,
    /// Producers stop, consumers empty the queues.
    Drain,
    /// Everybody goes home.
    Stop,
}

/// How lanes map to queues and partitions.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Layout {
    /// All lanes are partitions of one queue.
    OneQueue {
        /// Its name.
        queue: String,
    },
    /// Each lane is the default partition of a queue of its own.
    QueuePerLane {
        /// First part of the names, and their namespace.
        namespace: String,
    },
}

impl Layout {
    /// The queue of a lane.
    pub fn queue(&self, lane: u32) -> String {
        match self {
            Self::OneQueue { queue } => queue.clone(),
            Self::QueuePerLane { namespace } => format!("{namespace}.q{lane}"),
        }
    }

    /// The JSON fields that address a lane.
    pub fn write_address(&self, out: &mut Vec<u8>, lane: u32) {
        out.extend_from_slice(b"\"queue\":\"");
        match self {
            Self::OneQueue { queue } => {
                out.extend_from_slice(queue.as_bytes());
                out.extend_from_slice(b"\",\"partition\":\"p");
            }
            Self::QueuePerLane { namespace } => {
                out.extend_from_slice(namespace.as_bytes());
                out.extend_from_slice(b".q");
            }
        }
        crate::payload::push_number(out, u64::from(lane));
        out.push(b'"');
    }
}

/// The shape of the traffic.
#[derive(Debug, Clone, Serialize)]
pub struct Traffic {
    /// Partitions.
    pub lanes: u32,
    /// Where they are.
    pub layout: Layout,
    /// Consumer groups.
    pub groups: Vec<String>,
    /// Connections that push.
    pub producers: usize,
    /// Connections that pop and ack, per group.
    pub consumers: usize,
    /// Messages of one push.
    pub push_batch: usize,
    /// Partitions that one push spreads over.
    pub push_lanes: usize,
    /// Messages of one pop at most.
    pub pop_batch: usize,
    /// Partitions of one pop at most.
    pub pop_partitions: usize,
    /// Messages a second, open loop; `None` is closed loop.
    pub rate: Option<f64>,
    /// Producers wait while more than this is stored and not acknowledged.
    pub backlog: u64,
    /// Lease that a pop asks for.
    pub lease_seconds: u32,
    /// Long-poll time of a pop.
    pub wait_ms: u64,
    /// Partitions active in one second, and which; `None`: all.
    pub active: Option<(u32, Pattern)>,
}

/// State shared by the workers of one run.
pub struct Run {
    /// Name of the scenario.
    pub scenario: &'static str,
    /// The shape of the traffic.
    pub traffic: Traffic,
    /// Part of every transaction id, so that runs cannot be confused.
    pub nonce: String,
    /// Seed of the choices.
    pub seed: u64,
    /// Payloads.
    pub payloads: Arc<PayloadPool>,
    /// The books.
    pub ledger: Ledger,
    /// The figures.
    pub figures: Figures,
    /// Answers that were not a success, by text.
    pub refusals: Mutex<BTreeMap<String, u64>>,
    endpoint: Arc<Endpoint>,
    push_endpoint: Arc<Endpoint>,
    started: Instant,
    phase: Arc<AtomicU8>,
}

impl Run {
    /// A run that has not begun: popped from one broker, pushed to another or the same.
    pub fn new(
        scenario: &'static str,
        traffic: Traffic,
        (endpoint, push_endpoint): (Arc<Endpoint>, Arc<Endpoint>),
        seed: u64,
        payloads: Arc<PayloadPool>,
        ledger: Ledger,
    ) -> Arc<Self> {
        Arc::new(Self {
            scenario,
            traffic,
            nonce: nonce(),
            seed,
            payloads,
            ledger,
            figures: Figures::default(),
            refusals: Mutex::default(),
            endpoint,
            push_endpoint,
            started: Instant::now(),
            phase: Arc::new(AtomicU8::new(Phase::Warmup as u8)),
        })
    }

    /// A run beside this one, with traffic, books and figures of its own, and the same clock and phases.
    pub fn beside(&self, traffic: Traffic, ledger: Ledger) -> Arc<Self> {
        Arc::new(Self {
            scenario: self.scenario,
            traffic,
            nonce: format!("{}b", self.nonce),
            seed: self.seed,
            payloads: self.payloads.clone(),
            ledger,
            figures: Figures::default(),
            refusals: Mutex::default(),
            endpoint: self.endpoint.clone(),
            push_endpoint: self.push_endpoint.clone(),
            started: self.started,
            phase: self.phase.clone(),
        })
    }

    /// Where the broker is.
    pub fn endpoint(&self) -> Arc<Endpoint> {
        self.endpoint.clone()
    }

    /// Where the broker is that producers push to.
    pub fn push_endpoint(&self) -> Arc<Endpoint> {
        self.push_endpoint.clone()
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Relaxed) {
            0 => Phase::Warmup,
            1 => Phase::Measure,
            2 => Phase::Drain,
            _ => Phase::Stop,
        }
    }

    /// Goes on to a phase.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
    }

    /// Whether samples count.
    pub fn is_measuring(&self) -> bool {
        self.phase() == Phase::Measure
    }

    /// Whether producers go on.
    pub fn is_producing(&self) -> bool {
        self.phase() <= Phase::Measure
    }

    /// Microseconds since the start of the run.
    pub fn micros_of(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.started).as_micros() as u64
    }

    /// Milliseconds since the start of the run; 49 days fit.
    pub fn now_ms(&self) -> u32 {
        self.started.elapsed().as_millis() as u32
    }

    /// Remembers an answer that was not a success.
    pub fn refused(&self, text: &str, count: u64) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        // Texts may carry ids; a bounded number of kinds is enough to see what happens.
        let room = refusals.len() < 50;
        match refusals.get_mut(text) {
            Some(seen) => *seen += count,
            None if room => {
                refusals.insert(text.to_owned(), count);
            }
            None => *refusals.entry("(other)".to_owned()).or_default() += count,
        }
    }

    /// Sends until there is a final answer: repeats the same request after a broken connection, a 5xx and a 429.
    pub async fn send(&self, connection: &mut Connection, request: &Request, timeout: Duration) -> Result<Sent> {
        let mut sent = Sent { status: 0, tries: 0, uncertain: false, answered_ms: 0 };
        let mut pause = RETRY_PAUSE_MIN;
        let mut stopped_at: Option<Instant> = None;
        loop {
            sent.tries += 1;
            let mut wait = pause;
            match connection.call(request, timeout).await {
                Ok(Head { status: 429, retry_after }) => {
                    add(&self.figures.counters.retries_429, 1);
                    wait = retry_after.unwrap_or(pause);
                }
                Ok(Head { status, retry_after }) if status >= 500 => {
                    add(&self.figures.counters.retries_5xx, 1);
                    self.refused(&format!("{status} {}", brief(connection.body())), 1);
                    sent.uncertain = true;
                    wait = retry_after.unwrap_or(pause).min(RETRY_PAUSE_MAX);
                }
                Ok(Head { status, .. }) if status >= 400 => {
                    bail!("the broker answered {status}: {}", brief(connection.body()));
                }
                Ok(Head { status, .. }) => {
                    (sent.status, sent.answered_ms) = (status, self.now_ms());
                    return Ok(sent);
                }
                Err(error) => {
                    add(&self.figures.counters.retries_io, 1);
                    self.refused(&format!("connection: {}", error.kind()), 1);
                    sent.uncertain = true;
                }
            }
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
            if self.phase() == Phase::Stop {
                let since = *stopped_at.get_or_insert_with(Instant::now);
                if since.elapsed() > RETRY_AFTER_STOP {
                    return Ok(sent);
                }
            }
            tokio::time::sleep(wait).await;
        }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// Status of the final answer; 0 when the run ended without one.
    pub status: u16,
    /// Times it was sent.
    pub tries: u32,
    /// Some try had no answer, or a 5xx: it may have had its effect.
    pub uncertain: bool,
    /// When the final answer came, in milliseconds of the run.
    pub answered_ms: u32,
}

fn brief(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned()
}

fn nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("r{:x}", (now.as_micros() as u64) << 8 | u64::from(std::process::id() & 0xff))
}
