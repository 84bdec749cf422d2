//! Handles of the metrics of transactions, looked up once. Help texts are in `metrics.rs`.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use crate::metrics as names;

static METER: LazyLock<TransactionMeter> = LazyLock::new(TransactionMeter::new);

/// The handles of this process. The recorder must have been installed before the first call.
pub fn meter() -> &'static TransactionMeter {
    &METER
}

/// See the fields; help texts are in `metrics.rs`.
pub struct TransactionMeter {
    outcomes: HashMap<&'static str, Counter>,
    /// Pushed items of bundles.
    pub pushes: Counter,
    /// Acks of bundles.
    pub acks: Counter,
    flushes: Counter,
    flushed: Counter,
    flush_bundles: Histogram,
    flush_seconds: Histogram,
    /// Flushes that failed and were tried again, in parts or as a whole.
    pub retries: Counter,
    /// Bundles that searched outside the flush.
    pub searches: Counter,
    /// Signals at or below the cursor.
    pub signals_below: Counter,
    /// Commits whose answer was lost.
    pub lost_answers: Counter,
}

impl std::fmt::Debug for TransactionMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransactionMeter").finish_non_exhaustive()
    }
}

impl TransactionMeter {
    fn new() -> TransactionMeter {
        let outcome = |word: &&'static str| (*word, counter!(names::TRANSACTIONS, "outcome" => *word));
        TransactionMeter {
            outcomes: names::TRANSACTION_OUTCOMES.iter().map(outcome).collect(),
            pushes: counter!(names::TRANSACTION_OPERATIONS, "type" => "push"),
            acks: counter!(names::TRANSACTION_OPERATIONS, "type" => "ack"),
            flushes: counter!(names::BATCHES_FIRED, "op" => "transaction"),
            flushed: counter!(names::BATCH_ITEMS_FIRED, "op" => "transaction"),
            flush_bundles: histogram!(names::TRANSACTION_FLUSH_BUNDLES),
            flush_seconds: histogram!(names::TRANSACTION_FLUSH_SECONDS),
            retries: counter!(names::TRANSACTION_FLUSH_RETRIES),
            searches: counter!(names::TRANSACTION_SEARCHES),
            signals_below: counter!(names::TRANSACTION_SIGNALS_BELOW),
            lost_answers: counter!(names::TRANSACTION_LOST_ANSWERS),
        }
    }

    /// A bundle was answered.
    pub fn answered(&self, outcome: &str) {
        if let Some(counter) = self.outcomes.get(outcome) {
            counter.increment(1);
        }
    }

    /// A flush has ended, whatever became of its bundles.
    pub fn flushed(&self, bundles: usize, took: Duration) {
        self.flushes.increment(1);
        self.flushed.increment(bundles as u64);
        self.flush_bundles.record(bundles as f64);
        self.flush_seconds.record(took.as_secs_f64());
    }
}
