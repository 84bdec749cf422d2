//! Handles of the metrics of push and pop, looked up once. Help texts are in `metrics.rs`.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use super::delivery::Delivered;
use super::error::BrokerResult;
use super::pop::{PopRequest, Popped, Scope};
use super::push::{PushItem, PushResult, PushStatus};
use crate::metrics as names;
use crate::store::claims::ClaimOutcome;

static METER: LazyLock<Meter> = LazyLock::new(Meter::new);

/// Messages in push requests so far: counters cannot be read back.
pub static PUSHED: AtomicU64 = AtomicU64::new(0);

/// The handles of this process. The recorder must have been installed before the first call.
pub fn meter() -> &'static Meter {
    &METER
}

/// See the fields; help texts are in `metrics.rs`.
pub struct Meter {
    push_requests: Counter,
    push_messages: Counter,
    push_payload_bytes: Counter,
    push_queued: Counter,
    push_duplicate: Counter,
    push_buffered: Counter,
    push_failed: Counter,
    push_flushes: Counter,
    push_flushed_groups: Counter,
    flush_groups: Histogram,
    flush_messages: Histogram,
    flush_seconds: Histogram,
    /// Flushes that are tried again.
    pub flush_retries: Counter,
    /// Flushes that failed for good.
    pub flush_failures: Counter,
    /// Segments stored.
    pub segments: Counter,
    /// Offsets that PostgreSQL is asked about.
    pub dedup_candidates: Counter,
    /// Partitions whose whole window is read.
    pub dedup_window_reads: Counter,
    /// Partitions whose window is read from an offset on.
    pub dedup_offset_reads: Counter,
    /// Partitions whose memory cannot answer.
    pub dedup_ambiguous_reads: Counter,
    /// Partitions where memory named candidates.
    pub dedup_candidate_reads: Counter,
    pop_requests: Counter,
    pop_messages: Counter,
    pop_targeted: Counter,
    pop_wildcard: Counter,
    /// By scope, then by result, in the order of their declared values.
    pops: [[Counter; 3]; 3],
    delivered_first: Counter,
    delivered_again: Counter,
    delivery_age: Histogram,
    fill_waits: Counter,
    fill_wait_microseconds: Counter,
    /// Time of one claim.
    pub claim_seconds: Histogram,
    /// Time until a claim's turn.
    pub claim_wait_seconds: Histogram,
    claims: [Counter; 7],
    /// Pops in one claim statement.
    pub claim_flush_pops: Histogram,
    /// Spans delivered without a read of the database.
    pub spans_read_from_memory: Counter,
    /// Spans read from PostgreSQL.
    pub spans_read_from_database: Counter,
    /// Queues that groups met by label.
    pub queues_met: Counter,
    /// Queues that discovery pops claimed from.
    pub queues_visited: Counter,
    /// Partitions seen by seeding walks.
    pub partitions_walked: Counter,
    /// Calls of the ack routes.
    pub ack_requests: Counter,
    /// Items of those calls.
    pub ack_messages: Counter,
    /// Notifications sent.
    pub notifications_sent: Counter,
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}

impl Meter {
    fn new() -> Meter {
        let status = |value| counter!(names::PUSH_ITEMS, "status" => value);
        let read = |kind| counter!(names::DEDUP_READS_TOTAL, "kind" => kind);
        let attempt = |value| counter!(names::POP_DELIVERIES, "attempt" => value);
        let pops = |scope| {
            ["messages", "empty", "error"].map(|result| counter!(names::POPS, "scope" => scope, "result" => result))
        };
        Meter {
            push_requests: counter!(names::PUSH_REQUESTS),
            push_messages: counter!(names::PUSH_MESSAGES),
            push_payload_bytes: counter!(names::PUSH_PAYLOAD_BYTES),
            push_queued: status("queued"),
            push_duplicate: status("duplicate"),
            push_buffered: status("buffered"),
            push_failed: status("failed"),
            push_flushes: counter!(names::BATCHES_FIRED, "op" => "push"),
            push_flushed_groups: counter!(names::BATCH_ITEMS_FIRED, "op" => "push"),
            flush_groups: histogram!(names::PUSH_FLUSH_GROUPS),
            flush_messages: histogram!(names::PUSH_FLUSH_MESSAGES),
            flush_seconds: histogram!(names::PUSH_FLUSH_SECONDS),
            flush_retries: counter!(names::PUSH_FLUSH_RETRIES),
            flush_failures: counter!(names::PUSH_FLUSH_FAILURES),
            segments: counter!(names::PUSH_SEGMENTS),
            dedup_candidates: counter!(names::DEDUP_CANDIDATES),
            dedup_window_reads: read("window"),
            dedup_offset_reads: read("from_offset"),
            dedup_ambiguous_reads: read("ambiguous"),
            dedup_candidate_reads: read("candidates"),
            pop_requests: counter!(names::POP_REQUESTS),
            pop_messages: counter!(names::POP_MESSAGES),
            pop_targeted: counter!(names::POP_TARGETED),
            pop_wildcard: counter!(names::POP_WILDCARD),
            pops: ["queue", "partition", "labels"].map(pops),
            delivered_first: attempt("first"),
            delivered_again: attempt("again"),
            delivery_age: histogram!(names::POP_DELIVERY_AGE),
            fill_waits: counter!(names::POP_FILL_WAITS),
            fill_wait_microseconds: counter!(names::POP_FILL_WAIT_MICROSECONDS),
            claim_seconds: histogram!(names::POP_CLAIM_SECONDS),
            claim_wait_seconds: histogram!(names::POP_CLAIM_WAIT_SECONDS),
            claim_flush_pops: histogram!(names::POP_CLAIM_FLUSH_POPS),
            spans_read_from_memory: counter!(names::POP_SPANS_READ, "from" => "memory"),
            spans_read_from_database: counter!(names::POP_SPANS_READ, "from" => "database"),
            claims: ["claimed", "empty", "not_yet", "left_over", "gone", "unmet", "emptied"]
                .map(|outcome| counter!(names::POP_CLAIMS, "outcome" => outcome)),
            queues_met: counter!(names::DISCOVERY_MET),
            queues_visited: counter!(names::DISCOVERY_VISITED),
            partitions_walked: counter!(names::PARTITIONS_SEEDED),
            ack_requests: counter!(names::ACK_REQUESTS),
            ack_messages: counter!(names::ACK_MESSAGES),
            notifications_sent: counter!(names::PEER_NOTIFICATIONS_SENT),
        }
    }

    /// A push request came in.
    pub fn push_asked(&self, items: &[PushItem<'_>]) {
        self.push_requests.increment(1);
        self.push_messages.increment(items.len() as u64);
        PUSHED.fetch_add(items.len() as u64, Ordering::Relaxed);
        self.push_payload_bytes.increment(items.iter().map(|item| item.payload.len() as u64).sum());
    }

    /// A push request was answered; `None` if it failed as a whole.
    pub fn push_answered(&self, results: Option<&[PushResult]>, items: usize) {
        let Some(results) = results else { return self.push_failed.increment(items as u64) };
        let (mut queued, mut duplicate, mut buffered) = (0, 0, 0);
        for result in results {
            match result.status {
                PushStatus::Queued { .. } => queued += 1,
                PushStatus::Duplicate { .. } => duplicate += 1,
                PushStatus::Buffered => buffered += 1,
                PushStatus::Failed { .. } => {}
            }
        }
        self.push_queued.increment(queued);
        self.push_duplicate.increment(duplicate);
        self.push_failed.increment((items as u64).saturating_sub(queued + duplicate + buffered));
        self.push_buffered.increment(buffered);
    }

    /// A flush committed.
    pub fn flushed(&self, groups: usize, messages: usize, took: Duration) {
        self.push_flushes.increment(1);
        self.push_flushed_groups.increment(groups as u64);
        self.flush_groups.record(groups as f64);
        self.flush_messages.record(messages as f64);
        self.flush_seconds.record(took.as_secs_f64());
    }

    /// A pop was answered.
    pub fn popped(&self, request: &PopRequest, popped: &BrokerResult<Popped>) {
        self.pop_requests.increment(1);
        let scope = match request.scope {
            Scope::Queue(_) => 0,
            Scope::Partition(..) => 1,
            Scope::Labels(_) => 2,
        };
        if scope == 1 {
            self.pop_targeted.increment(1)
        } else {
            self.pop_wildcard.increment(1)
        }
        let result = match popped {
            Ok(Popped { answer: Some(answer), .. }) => {
                self.delivered(&answer.delivered);
                0
            }
            Ok(Popped { answer: None, .. }) => 1,
            Err(_) => 2,
        };
        self.pops[scope][result].increment(1);
    }

    fn delivered(&self, delivered: &[Delivered]) {
        let now = chrono::Utc::now();
        let (mut first, mut again) = (0, 0);
        for part in delivered {
            let count = part.hashes.len() as u64;
            // Attempts of an automatic ack do not count up: it delivers once.
            if part.span.claimed.attempt > 1 {
                again += count
            } else {
                first += count
            }
            if let Some(run) = part.runs.first() {
                let age = now - run.created_at;
                self.delivery_age.record(age.to_std().unwrap_or_default().as_secs_f64());
            }
        }
        self.pop_messages.increment(first + again);
        self.delivered_first.increment(first);
        self.delivered_again.increment(again);
    }

    /// What a claim found.
    pub fn claimed<P>(&self, outcomes: &[(P, ClaimOutcome)]) {
        for (_, outcome) in outcomes {
            let nth = match outcome {
                ClaimOutcome::Claimed(..) => 0,
                ClaimOutcome::Empty => 1,
                ClaimOutcome::NotYet(_) => 2,
                ClaimOutcome::LeftOver => 3,
                ClaimOutcome::Gone => 4,
                ClaimOutcome::Unmet => 5,
                ClaimOutcome::Emptied => 6,
            };
            self.claims[nth].increment(1);
        }
    }

    /// A pop was held back for more messages to come.
    pub fn fill_waited(&self, took: Duration) {
        self.fill_waits.increment(1);
        self.fill_wait_microseconds.increment(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }
}
