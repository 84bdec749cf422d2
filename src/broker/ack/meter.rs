//! Handles of the ack path's metrics, looked up once.

use std::collections::HashMap;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::broker::lease::Miss;
use crate::metrics as names;

/// The road that an ack took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Road {
    /// Committed together with others.
    Fused,
    /// One positional advance of its own.
    Positional,
    /// Full hash resolution, whether or not the fast path was tried before.
    Resolved,
}

/// See the fields; help texts are in `metrics.rs`.
pub struct AckMeter {
    /// Fast-path hits.
    pub hits: Counter,
    misses: HashMap<Miss, Counter>,
    flushes: Counter,
    flushed_rows: Counter,
    flush_rows: Histogram,
    flush_seconds: Histogram,
    /// Rows that PostgreSQL refused.
    pub refused: Counter,
    /// Flushes that failed.
    pub flush_failures: Counter,
    /// Advances that wait.
    pub queue_depth: Gauge,
    /// Live partition actors.
    pub actors: Gauge,
    /// Memory of the registry.
    pub registry_bytes: Gauge,
    /// Leases that were not registered.
    pub unregistered: Counter,
    /// Leases that made room for others.
    pub evicted: Counter,
    roads: [Histogram; 3],
    /// Items answered with `success: true`.
    pub items_done: Counter,
    /// Items answered with an error.
    pub items_failed: Counter,
}

impl std::fmt::Debug for AckMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AckMeter").finish_non_exhaustive()
    }
}

impl AckMeter {
    /// Looks the handles up; every series exists from then on.
    pub fn new() -> AckMeter {
        let miss = |reason: Miss| {
            let counter = counter!(names::ACK_MISSES, "reason" => reason.label());
            counter.absolute(0);
            (reason, counter)
        };
        AckMeter {
            hits: counter!(names::ACK_HITS),
            misses: Miss::ALL.into_iter().map(miss).collect(),
            flushes: counter!(names::BATCHES_FIRED, "op" => "ack"),
            flushed_rows: counter!(names::BATCH_ITEMS_FIRED, "op" => "ack"),
            flush_rows: histogram!(names::ACK_FLUSH_ROWS),
            flush_seconds: histogram!(names::ACK_FLUSH_SECONDS),
            refused: counter!(names::ACK_REFUSED),
            flush_failures: counter!(names::ACK_FLUSH_FAILURES),
            queue_depth: gauge!(names::ACK_QUEUE_DEPTH),
            actors: gauge!(names::ACK_ACTORS),
            registry_bytes: gauge!(names::ACK_REGISTRY_BYTES),
            unregistered: counter!(names::ACK_UNREGISTERED),
            evicted: counter!(names::ACK_EVICTED),
            roads: ["fused", "positional", "resolved"].map(|road| histogram!(names::ACK_SECONDS, "path" => road)),
            items_done: counter!(names::ACK_ITEMS, "result" => "success"),
            items_failed: counter!(names::ACK_ITEMS, "result" => "failure"),
        }
    }

    /// A group was not for the fast path.
    pub fn missed(&self, reason: Miss) {
        if let Some(counter) = self.misses.get(&reason) {
            counter.increment(1);
        }
    }

    /// A flush has ended.
    pub fn flushed(&self, rows: usize, took: Duration) {
        self.flushes.increment(1);
        self.flushed_rows.increment(rows as u64);
        self.flush_rows.record(rows as f64);
        self.flush_seconds.record(took.as_secs_f64());
    }

    /// A group was answered.
    pub fn answered(&self, road: Road, took: Duration) {
        let nth = match road {
            Road::Fused => 0,
            Road::Positional => 1,
            Road::Resolved => 2,
        };
        self.roads[nth].record(took.as_secs_f64());
    }
}

impl Default for AckMeter {
    fn default() -> AckMeter {
        AckMeter::new()
    }
}
