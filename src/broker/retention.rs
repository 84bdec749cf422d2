//! Retention: one broker at a time deletes what the rules of the queues let go (`spec/admin.md` §8).
//!
//! Every cycle asks two indexes: which queues can hold something due, and which of their partitions do. What is due goes in
//! bounded steps; a backlog takes many cycles and shows as lag. A crash in the middle loses nothing but the step under way.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream;
use metrics::{counter, gauge, histogram};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::activity::Activity;
use super::age_walk::AgeWalk;
use super::error::{BrokerError, BrokerResult};
use super::step_size::StepSize;
use crate::ids::PartitionId;
use crate::metrics as names;
use crate::shutdown::count_pass;
use crate::store::Store;
use crate::store::age_lists::AgeList;
use crate::store::retention::{Aged, Deleted, RULES};

/// The work's name among brokers. Those of before the lists know it as `retention`, and are kept from it.
const LEASE: &str = "age_lists";
/// Its name in metrics.
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
    size: Arc<StepSize>,
    id: Uuid,
}

/// What the broker that does the work knows between two cycles.
#[derive(Default)]
struct Progress {
    /// The work is ours until then.
    held_until: Option<Instant>,
    /// When empty partitions and old history are looked at next.
    cleanup_at: Option<Instant>,
    walk: AgeWalk,
}

impl Retention {
    /// Over an open store; `activity` hears of queues that lost messages.
    pub fn new(store: Store, activity: Arc<Activity>, settings: RetentionSettings) -> Retention {
        let size = Arc::new(StepSize::new(settings.batch_size));
        Retention { store, activity, settings: Arc::new(settings), size, id: Uuid::new_v4() }
    }

    /// Runs until `stop`. Errors are logged and the next cycle comes as planned.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let mut progress = Progress::default();
        loop {
            let pause = match self.cycle(&mut progress, stop).await {
                Ok(true) => self.settings.interval.min(CYCLE_MAX),
                Ok(false) => {
                    progress = Progress::default();
                    STANDBY
                }
                Err(error) => {
                    tracing::warn!(%error, "retention cycle failed; next one as planned");
                    count_pass(LOOP, false);
                    progress.held_until = None;
                    progress.walk.read_again();
                    AFTER_FAILURE
                }
            };
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                if progress.held_until.is_some() {
                    self.store.release_loop(LEASE, self.id).await?;
                }
                return Ok(());
            }
        }
    }

    /// One cycle; `false`: the work is another broker's.
    async fn cycle(&self, progress: &mut Progress, stop: &CancellationToken) -> BrokerResult<bool> {
        if !self.hold(&mut progress.held_until).await? {
            gauge!(names::RETENTION_LAG).set(0.0);
            return Ok(false);
        }
        for what in [Aged::Segments, Aged::Hashes] {
            self.sweep(what, progress, stop).await?;
            progress.walk.pack_behind(&self.store).await?;
        }
        let walked = progress.walk.page(&self.store, LEASE, self.settings.safety_walk).await?;
        counter!(names::RETENTION_WALKED).increment(walked);
        if progress.cleanup_at.is_none_or(|at| at <= Instant::now()) {
            progress.cleanup_at = Some(Instant::now() + CLEANUP_EVERY.min(self.settings.interval * 12));
            self.clean_up(&mut progress.held_until, stop).await?;
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
        let held = self.store.hold_loop(LEASE, self.id, HELD_FOR).await?;
        *held_until = held.then_some(now + HELD_FOR);
        Ok(held)
    }

    /// Deletes what is due of one kind, within the bounds of a cycle.
    async fn sweep(&self, what: Aged, progress: &mut Progress, stop: &CancellationToken) -> BrokerResult<()> {
        let queues = self.store.due_queues(what, QUEUES_MAX).await?;
        if what == Aged::Segments {
            let lag = queues.iter().map(|due| due.overdue).max().unwrap_or_default();
            gauge!(names::RETENTION_LAG).set(lag.as_secs_f64());
        }
        if queues.is_empty() {
            return Ok(());
        }
        let due = self.store.due_lists(what, &queues, self.settings.due_max as usize).await?;
        let steps = in_steps(due, self.size.partitions()).into_iter().map(|lists| async move {
            let partitions: usize = lists.iter().map(|list| list.partitions).sum();
            Ok::<_, BrokerError>((partitions, self.step(what, lists).await?))
        });
        let mut steps = stream::iter(steps).buffer_unordered(self.settings.parallelism.max(1));
        let (mut has_deleted, mut interrupted) = (false, false);
        while let Some(done) = steps.next().await {
            let (partitions, deleted) = done?;
            // At once: what fails later in the cycle must not lose it.
            progress.walk.stepped_over(partitions);
            count(deleted);
            has_deleted |= deleted.segments != [0; 3];
            if stop.is_cancelled() || !self.hold(&mut progress.held_until).await? {
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

    /// Steps over a few lists until they are done, and one step for each partition that was locked.
    async fn step(&self, what: Aged, mut lists: Vec<AgeList>) -> BrokerResult<Deleted> {
        let mut deleted = Deleted::default();
        let mut busy: Vec<(AgeList, PartitionId)> = Vec::new();
        let mut skipped: HashSet<PartitionId> = HashSet::new();
        while !lists.is_empty() {
            let started = Instant::now();
            let step = self.store.delete_aged(what, &lists, &skipped, self.size.bounds()).await?;
            histogram!(names::RETENTION_STEP_SECONDS).record(started.elapsed().as_secs_f64());
            self.size.took(step.held);
            deleted.add(step.deleted);
            skipped.extend(step.busy.iter().map(|(_, partition)| *partition));
            busy.extend(step.busy);
            lists = step.unfinished;
        }
        for (list, partition) in busy {
            let started = Instant::now();
            deleted.add(self.store.delete_aged_alone(what, list, partition, self.size.bounds()).await?);
            histogram!(names::RETENTION_STEP_SECONDS).record(started.elapsed().as_secs_f64());
        }
        Ok(deleted)
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

/// Lists in the order given, together as many partitions as one step takes; a longer list is a step of its own.
fn in_steps(lists: Vec<AgeList>, partitions_max: usize) -> Vec<Vec<AgeList>> {
    let mut steps: Vec<Vec<AgeList>> = Vec::new();
    let mut room = 0;
    for list in lists {
        match steps.last_mut() {
            Some(step) if list.partitions <= room => {
                room -= list.partitions;
                step.push(list);
            }
            _ => {
                room = partitions_max.saturating_sub(list.partitions);
                steps.push(vec![list]);
            }
        }
    }
    steps
}

fn count(deleted: Deleted) {
    for (rule, (segments, messages)) in RULES.iter().zip(deleted.segments.into_iter().zip(deleted.messages)) {
        counter!(names::RETENTION_SEGMENTS, "rule" => *rule).increment(segments);
        counter!(names::RETENTION_MESSAGES, "rule" => *rule).increment(messages);
    }
    counter!(names::RETENTION_HASH_ROWS).increment(deleted.hash_rows);
}
