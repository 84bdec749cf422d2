//! Retention: one broker at a time deletes what the rules of the queues let go (`spec/admin.md` §8).
//!
//! Every cycle asks two indexes: which queues can hold something due, and which of their partitions do. What is due goes in
//! bounded steps; a backlog takes many cycles and shows as lag. A crash in the middle loses nothing but the step under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream;
use metrics::{counter, gauge, histogram};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::activity::Activity;
use super::error::{BrokerError, BrokerResult};
use crate::ids::PartitionId;
use crate::metrics as names;
use crate::shutdown::count_pass;
use crate::store::Store;
use crate::store::retention::{Aged, Deleted, RULES, StepBounds};

/// The work's name among brokers.
const LOOP: &str = "retention";
/// How long the work stays with a broker that falls silent.
const HELD_FOR: Duration = Duration::from_secs(15);
/// Longest pause between two cycles: a queue with `maxWaitTimeSeconds` is looked at every two seconds.
const CYCLE_MAX: Duration = Duration::from_secs(1);
/// Pause of a broker that another one's work keeps idle.
const STANDBY: Duration = Duration::from_secs(3);
/// Pause after a failed cycle.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Queues that one cycle looks at.
const QUEUES_MAX: i64 = 256;
/// Partitions that share one step: their locks are held together, for some milliseconds.
const PARTITIONS_PER_STEP: usize = 16;
/// Payload bytes of one partition in one step.
const STEP_BYTES_MAX: i64 = 4 << 20;
/// Partitions of one page of the safety walk.
const WALK_PAGE: i64 = 1000;
/// Pause between two looks at empty partitions and old history.
const CLEANUP_EVERY: Duration = Duration::from_secs(60);
/// Empty partitions of one transaction.
const CLEANUP_PARTITIONS: i64 = 100;
/// Rows of one deletion of old history.
const HISTORY_ROWS: i64 = 1000;

/// See the fields.
#[derive(Clone, Debug)]
pub struct RetentionSettings {
    /// Pause between two looks at a queue.
    pub interval: Duration,
    /// Rows of one transaction.
    pub batch_size: u32,
    /// Transactions at the same time.
    pub parallelism: usize,
    /// Partitions of one cycle and kind.
    pub due_max: u32,
    /// Pause between two safety walks; `None` = only the first.
    pub safety_walk: Option<Duration>,
    /// Age at which unused empty partitions go; `None` = never.
    pub partition_age: Option<Duration>,
    /// Days that the history is kept.
    pub history_days: u32,
}

impl Default for RetentionSettings {
    fn default() -> RetentionSettings {
        RetentionSettings {
            interval: Duration::from_secs(5),
            batch_size: 1000,
            parallelism: 1,
            due_max: 5000,
            safety_walk: Some(Duration::from_secs(86_400)),
            partition_age: Some(Duration::from_secs(30 * 86_400)),
            history_days: 90,
        }
    }
}

/// The background task.
#[derive(Clone, Debug)]
pub struct Retention {
    store: Store,
    activity: Arc<Activity>,
    settings: Arc<RetentionSettings>,
    id: Uuid,
}

impl Retention {
    /// Over an open store; `activity` hears of queues that lost messages.
    pub fn new(store: Store, activity: Arc<Activity>, settings: RetentionSettings) -> Retention {
        Retention { store, activity, settings: Arc::new(settings), id: Uuid::new_v4() }
    }

    /// Runs until `stop`. Errors are logged and the next cycle comes as planned.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let mut held_until: Option<Instant> = None;
        let mut cleanup_at = Instant::now();
        loop {
            let pause = match self.cycle(&mut held_until, &mut cleanup_at, stop).await {
                Ok(true) => self.settings.interval.min(CYCLE_MAX),
                Ok(false) => STANDBY,
                Err(error) => {
                    tracing::warn!(%error, "retention cycle failed; next one as planned");
                    count_pass(LOOP, false);
                    held_until = None;
                    AFTER_FAILURE
                }
            };
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                if held_until.is_some() {
                    self.store.release_loop(LOOP, self.id).await?;
                }
                return Ok(());
            }
        }
    }

    /// One cycle; `false`: the work is another broker's.
    async fn cycle(
        &self,
        held_until: &mut Option<Instant>,
        cleanup_at: &mut Instant,
        stop: &CancellationToken,
    ) -> BrokerResult<bool> {
        if !self.hold(held_until).await? {
            gauge!(names::RETENTION_LAG).set(0.0);
            return Ok(false);
        }
        for what in [Aged::Segments, Aged::Hashes] {
            self.sweep(what, held_until, stop).await?;
        }
        let walked = self.store.walk_ages(LOOP, self.settings.safety_walk, WALK_PAGE).await?;
        counter!(names::RETENTION_WALKED).increment(walked);
        if *cleanup_at <= Instant::now() {
            *cleanup_at = Instant::now() + CLEANUP_EVERY.min(self.settings.interval * 12);
            self.clean_up(held_until, stop).await?;
        }
        count_pass(LOOP, true);
        Ok(true)
    }

    /// Takes or keeps the work. It is asked for again well before it would pass to another broker.
    async fn hold(&self, held_until: &mut Option<Instant>) -> BrokerResult<bool> {
        let now = Instant::now();
        if held_until.is_some_and(|until| until > now + HELD_FOR / 2) {
            return Ok(true);
        }
        let held = self.store.hold_loop(LOOP, self.id, HELD_FOR).await?;
        *held_until = held.then_some(now + HELD_FOR);
        Ok(held)
    }

    /// Deletes what is due of one kind, within the bounds of a cycle.
    async fn sweep(&self, what: Aged, held_until: &mut Option<Instant>, stop: &CancellationToken) -> BrokerResult<()> {
        let queues = self.store.due_queues(what, QUEUES_MAX).await?;
        if what == Aged::Segments {
            let lag = queues.iter().map(|due| due.overdue).max().unwrap_or_default();
            gauge!(names::RETENTION_LAG).set(lag.as_secs_f64());
        }
        if queues.is_empty() {
            return Ok(());
        }
        let mut due = self.store.due_partitions(what, &queues, i64::from(self.settings.due_max)).await?;
        // In lock order: steps that run at the same time meet no lock twice, and pages are read once.
        due.sort_unstable();
        let steps: Vec<Vec<PartitionId>> = due.chunks(PARTITIONS_PER_STEP).map(<[_]>::to_vec).collect();
        let mut steps = stream::iter(steps.into_iter().map(|step| self.step(what, step)))
            .buffer_unordered(self.settings.parallelism.max(1));
        let (mut has_deleted, mut interrupted) = (false, false);
        while let Some(deleted) = steps.next().await {
            let deleted = deleted?;
            count(deleted);
            has_deleted |= deleted.segments != [0; 3];
            if stop.is_cancelled() || !self.hold(held_until).await? {
                interrupted = true;
                break;
            }
        }
        if has_deleted {
            queues.iter().for_each(|due| self.activity.touched(due.queue));
        }
        if interrupted {
            return Ok(());
        }
        self.store.reschedule_queues(what, &queues, self.settings.interval).await?;
        Ok(())
    }

    /// One step over a few partitions, and one each over those that were locked.
    async fn step(&self, what: Aged, partitions: Vec<PartitionId>) -> BrokerResult<Deleted> {
        let mut deleted = Deleted::default();
        let busy = self.one_transaction(what, &partitions, &mut deleted).await?;
        for partition in busy {
            self.one_transaction(what, &[partition], &mut deleted).await?;
        }
        Ok(deleted)
    }

    async fn one_transaction(
        &self,
        what: Aged,
        partitions: &[PartitionId],
        deleted: &mut Deleted,
    ) -> BrokerResult<Vec<PartitionId>> {
        let started = Instant::now();
        let rows_max = (i64::from(self.settings.batch_size) / partitions.len().max(1) as i64).max(1);
        let bounds = StepBounds { rows_max, bytes_max: STEP_BYTES_MAX / partitions.len().max(1) as i64 };
        let (gone, busy) = self.store.delete_aged(what, partitions, bounds).await.map_err(BrokerError::from)?;
        histogram!(names::RETENTION_STEP_SECONDS).record(started.elapsed().as_secs_f64());
        deleted.add(gone);
        Ok(busy)
    }

    /// Partitions that nobody uses, and history that nobody asks for any more.
    async fn clean_up(&self, held_until: &mut Option<Instant>, stop: &CancellationToken) -> BrokerResult<()> {
        if let Some(age) = self.settings.partition_age {
            loop {
                let (seen, gone) = self.store.remove_empty_partitions(age, CLEANUP_PARTITIONS).await?;
                counter!(names::RETENTION_PARTITIONS).increment(gone.len() as u64);
                gone.into_iter().for_each(|queue| self.activity.removed(queue, 1));
                let more = seen == CLEANUP_PARTITIONS.unsigned_abs();
                if !more || stop.is_cancelled() || !self.hold(held_until).await? {
                    break;
                }
            }
        }
        let rows = HISTORY_ROWS.unsigned_abs();
        while self.store.purge_retention_history(self.settings.history_days, HISTORY_ROWS).await? == rows {
            if stop.is_cancelled() || !self.hold(held_until).await? {
                break;
            }
        }
        Ok(())
    }
}

fn count(deleted: Deleted) {
    for (rule, (segments, messages)) in RULES.iter().zip(deleted.segments.into_iter().zip(deleted.messages)) {
        counter!(names::RETENTION_SEGMENTS, "rule" => *rule).increment(segments);
        counter!(names::RETENTION_MESSAGES, "rule" => *rule).increment(messages);
    }
    counter!(names::RETENTION_HASH_ROWS).increment(deleted.hash_rows);
}
