//! Counters and latency histograms of one run.
//!
//! Counters run from the first request on; a window is the difference of two snapshots. Histograms take samples only
//! while the window is open.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Map, Value, json};

const HIGHEST_US: u64 = 3_600_000_000;

/// A latency histogram in microseconds.
pub struct Latency {
    histogram: Mutex<Option<Histogram<u64>>>,
}

impl Default for Latency {
    fn default() -> Self {
        Self { histogram: Mutex::new(Histogram::new_with_bounds(1, HIGHEST_US, 3).ok()) }
    }
}

impl Latency {
    fn lock(&self) -> MutexGuard<'_, Option<Histogram<u64>>> {
        self.histogram.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one sample.
    pub fn record(&self, took: Duration) {
        self.record_all(std::iter::once(took.as_micros() as u64));
    }

    /// Takes many samples under one lock.
    pub fn record_all(&self, samples_us: impl Iterator<Item = u64>) {
        if let Some(histogram) = self.lock().as_mut() {
            for sample in samples_us {
                histogram.saturating_record(sample);
            }
        }
    }

    /// What is shown of it.
    pub fn quantiles(&self) -> Quantiles {
        self.lock().as_ref().filter(|histogram| !histogram.is_empty()).map_or_else(Quantiles::default, |histogram| {
            let at = |quantile| histogram.value_at_quantile(quantile);
            Quantiles {
                count: histogram.len(),
                mean_us: histogram.mean(),
                p50_us: at(0.5),
                p90_us: at(0.9),
                p99_us: at(0.99),
                p999_us: at(0.999),
                max_us: histogram.max(),
            }
        })
    }
}

/// The usual points of a histogram.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Quantiles {
    /// Samples.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: u64,
    /// 90 %.
    pub p90_us: u64,
    /// 99 %.
    pub p99_us: u64,
    /// 99.9 %.
    pub p999_us: u64,
    /// Highest.
    pub max_us: u64,
}

macro_rules! counters {
    ($($name:ident: $text:literal,)*) => {
        /// Everything that is counted.
        #[derive(Default)]
        pub struct Counters {
            $(#[doc = $text] pub $name: AtomicU64,)*
        }

        /// Counters at one moment, or between two.
        #[derive(Debug, Clone, Copy, Default, Serialize)]
        pub struct Counts {
            $(#[doc = $text] pub $name: u64,)*
        }

        impl Counters {
            /// Reads all of them.
            pub fn snapshot(&self) -> Counts {
                Counts { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl Counts {
            /// What was counted since an earlier snapshot.
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// The sum of two windows.
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    pushed: "Messages that the broker took.",
    push_calls: "Pushes answered.",
    duplicates: "Messages answered `duplicate` (after a retry).",
    buffered: "Messages answered `buffered`.",
    delivered: "Messages delivered.",
    pop_calls: "Pops answered with messages.",
    pop_empty: "Pops answered with none.",
    acked: "Messages acknowledged with success.",
    ack_calls: "Acks answered.",
    ack_noop: "Acks answered `noop`.",
    ack_refused: "Ack items answered with an error.",
    forwarded: "Messages forwarded by committed transactions.",
    transactions: "Transactions committed.",
    rolled_back: "Transactions rolled back.",
    retries_io: "Requests repeated after a broken or silent connection.",
    retries_5xx: "Requests repeated after a 5xx.",
    retries_429: "Requests repeated after a 429.",
    late: "Open loop: pushes sent more than 10 ms after they were due.",
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Relaxed);
}

/// All figures of one run.
#[derive(Default)]
pub struct Figures {
    /// Counted from the first request on.
    pub counters: Counters,
    /// Push, from the instant it was due.
    pub push: Latency,
    /// Pops that delivered, from request to answer (with a long poll: the wait included).
    pub pop: Latency,
    /// Ack calls.
    pub ack: Latency,
    /// Acks of a single message out of a batch.
    pub ack_single: Latency,
    /// Transactions.
    pub transaction: Latency,
    /// From the instant a message's push was due until it was delivered.
    pub delivery: Latency,
}

impl Figures {
    /// The histograms that saw anything.
    pub fn latencies(&self) -> Vec<(&'static str, Quantiles)> {
        [
            ("push", &self.push),
            ("pop", &self.pop),
            ("ack", &self.ack),
            ("ack_single", &self.ack_single),
            ("transaction", &self.transaction),
            ("push_to_delivery", &self.delivery),
        ]
        .into_iter()
        .map(|(name, latency)| (name, latency.quantiles()))
        .filter(|(_, quantiles)| quantiles.count > 0)
        .collect()
    }

    /// The same as JSON.
    pub fn latencies_json(&self) -> Value {
        Value::Object(self.latencies().into_iter().map(|(name, q)| (name.to_owned(), json!(q))).collect::<Map<_, _>>())
    }
}
