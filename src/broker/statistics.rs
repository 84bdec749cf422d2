//! The reconciler: brings the snapshot of each queue up to date (`spec/admin.md` §3, §11).
//!
//! A cycle costs what happened, up to a bound, whatever the number of partitions: first the queues that this broker saw
//! change, then, on one broker per interval, the next few queues in key order, whoever changed them. A queue with many
//! partitions is walked a few pages per cycle; its snapshot is replaced when the walk is through, never blanked.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio::sync::Mutex;

use super::activity::Activity;
use super::error::BrokerResult;
use super::settings::StatisticsSettings;
use crate::ids::QueueId;
use crate::store::Store;
use crate::store::statistics::{NewStats, Sizes, Sums};

/// Queues of at most so many partitions are summed together in one statement.
const SMALL_PARTITIONS_MAX: i64 = 64;
/// Queues per such statement.
const SMALL_QUEUES_PER_STATEMENT: usize = 100;
/// Partitions per page of a walk.
const PAGE_PARTITIONS: i64 = 2_000;
/// Partitions that one cycle looks at for queues that changed, and again for queues that are walked in pages.
const CYCLE_PARTITIONS_MAX: i64 = 40_000;
/// Partitions that one cycle looks at for no other reason than that it is their turn.
const SWEEP_PARTITIONS_MAX: i64 = 4_000;
/// Queues that one cycle looks at for the same reason.
const SWEEP_QUEUES_MAX: i64 = 1_000;
/// Partitions that a reader waits for.
const FRESHEN_PARTITIONS_MAX: i64 = 2_000;
/// A reader finds snapshots at most so much older than the last change that this broker saw, if few queues changed.
const FRESHEN_EVERY: Duration = Duration::from_millis(250);
/// Partitions per page of the pass over segment sizes.
const SIZES_PAGE_PARTITIONS: i64 = 500;
/// Share of the time that the pass over segment sizes may take: it rests this many times as long as it worked.
const SIZES_REST_FACTOR: u32 = 19;

/// What a refresh did (`spec/admin.md` §17.20).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refreshed {
    /// Partitions looked at.
    pub partitions: i64,
    /// Queues whose snapshot was replaced.
    pub queues: i64,
    /// Time it took, milliseconds.
    pub elapsed_ms: i64,
}

/// See the module. A cheap clone.
#[derive(Clone, Debug)]
pub struct Statistics {
    store: Store,
    activity: Arc<Activity>,
    work: Arc<Mutex<Work>>,
    settings: StatisticsSettings,
}

#[derive(Debug, Default)]
struct Work {
    /// Changed queues that wait for their turn, oldest first.
    changed: VecDeque<QueueId>,
    known: BTreeSet<QueueId>,
    /// Large queues that changed, and those whose turn it is.
    changed_walks: Walks,
    sweep_walks: Walks,
    freshened: Option<Instant>,
    refreshed: Option<(Instant, Refreshed)>,
}

/// Queues that are walked in pages, one after the other.
#[derive(Debug, Default)]
struct Walks {
    line: VecDeque<QueueId>,
    under_way: Option<Walk>,
}

impl Walks {
    fn is_empty(&self) -> bool {
        self.line.is_empty() && self.under_way.is_none()
    }

    fn add(&mut self, queues: impl Iterator<Item = QueueId>) {
        for queue in queues {
            if !self.line.contains(&queue) {
                self.line.push_back(queue);
            }
        }
    }
}

#[derive(Debug)]
struct Walk {
    queue: QueueId,
    after: Option<String>,
    sums: Sums,
    dead_letters: i64,
    at: DateTime<Utc>,
}

fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

impl Statistics {
    /// A reconciler that knows of nothing to do.
    pub fn new(store: Store, activity: Arc<Activity>, settings: StatisticsSettings) -> Statistics {
        Statistics { store, activity, work: Arc::default(), settings }
    }

    /// Pause between two cycles.
    pub fn interval(&self) -> Duration {
        self.settings.interval
    }

    /// Pause between two passes over segment sizes.
    pub fn sizes_interval(&self) -> Duration {
        self.settings.sizes_interval
    }

    /// One pass over segment sizes, if it is this broker's turn.
    pub async fn sizes_turn(&self) -> BrokerResult<()> {
        let interval_ms = millis(self.settings.sizes_interval).saturating_mul(9) / 10;
        match self.store.take_turn("segment_sizes", interval_ms).await? {
            Some(_) => self.sum_sizes().await,
            None => Ok(()),
        }
    }

    /// One cycle.
    pub async fn cycle(&self) -> BrokerResult<()> {
        let mut work = self.work.lock().await;
        self.gather(&mut work).await?;
        self.sum_changed(&mut work, CYCLE_PARTITIONS_MAX).await?;
        let interval_ms = millis(self.settings.interval);
        // A little less than the interval: the brokers' clocks must not skip every other turn.
        if let Some(turn) = self.store.take_turn("statistics", interval_ms.saturating_mul(9) / 10).await? {
            if work.sweep_walks.is_empty() {
                let reached = self.sweep(&mut work, turn.reached, SWEEP_PARTITIONS_MAX).await?;
                self.store.end_turn("statistics", reached).await?;
            }
            self.walk(&mut work.sweep_walks, SWEEP_PARTITIONS_MAX).await?;
        }
        self.walk(&mut work.changed_walks, CYCLE_PARTITIONS_MAX).await?;
        Ok(())
    }

    /// For readers: brings the snapshots of what this broker saw change up to date, within a small bound of work.
    pub async fn freshen(&self) -> BrokerResult<()> {
        if !self.activity.is_stale() {
            return Ok(());
        }
        let mut work = self.work.lock().await;
        if work.freshened.is_some_and(|at| at.elapsed() < FRESHEN_EVERY) {
            return Ok(());
        }
        self.gather(&mut work).await?;
        self.sum_changed(&mut work, FRESHEN_PARTITIONS_MAX).await?;
        work.freshened = Some(Instant::now());
        Ok(())
    }

    /// Brings every snapshot up to date now (`spec/admin.md` §11). Callers that come while one is under way share the
    /// next one.
    pub async fn refresh(&self) -> BrokerResult<Refreshed> {
        let asked = Instant::now();
        let mut work = self.work.lock().await;
        if let Some((started, done)) = work.refreshed.filter(|(started, _)| *started >= asked) {
            tracing::debug!(?started, "a refresh that began after this one was asked for");
            return Ok(done);
        }
        let started = Instant::now();
        self.gather(&mut work).await?;
        work.changed.clear();
        work.known.clear();
        (work.changed_walks, work.sweep_walks) = (Walks::default(), Walks::default());
        let (mut reached, mut done) = (0, Refreshed::default());
        loop {
            let queues = self.store.queues_after(reached, SMALL_QUEUES_PER_STATEMENT as i64).await?;
            let Some(last) = queues.last() else { break };
            reached = last.0;
            let (partitions, saved) = self.sum_small(&mut work.sweep_walks, &queues).await?;
            done.partitions += partitions;
            done.queues += saved;
        }
        let (partitions, saved) = self.walk(&mut work.sweep_walks, i64::MAX).await?;
        done.partitions += partitions;
        done.queues += saved;
        done.elapsed_ms = millis(started.elapsed());
        work.refreshed = Some((started, done));
        Ok(done)
    }

    /// One pass over the sizes of segments: the queues whose segments changed since the last one, with rests.
    pub async fn sum_sizes(&self) -> BrokerResult<()> {
        let mut reached = 0;
        while let Some(queue) = self.store.next_stale_sizes(reached).await? {
            let (mut sizes, mut after) = (Sizes::default(), None::<String>);
            loop {
                let started = Instant::now();
                let (page, last) = self.store.sizes_page(queue, after.as_deref(), SIZES_PAGE_PARTITIONS).await?;
                sizes.add(&page);
                tokio::time::sleep(started.elapsed() * SIZES_REST_FACTOR).await;
                match last {
                    Some(name) => after = Some(name),
                    None => break,
                }
            }
            self.store.save_sizes(queue, &sizes).await?;
            reached = queue.0;
        }
        Ok(())
    }

    /// Queues that changed here since the last look join the end of the line.
    async fn gather(&self, work: &mut Work) -> BrokerResult<()> {
        let (mut queues, groups) = self.activity.take_stale();
        if !groups.is_empty() {
            let groups: Vec<i32> = groups.iter().map(|group| group.0).collect();
            queues.extend(self.store.queues_of_groups(&groups).await?);
        }
        for queue in queues {
            if work.known.insert(queue) {
                work.changed.push_back(queue);
            }
        }
        Ok(())
    }

    async fn sum_changed(&self, work: &mut Work, partitions_max: i64) -> BrokerResult<()> {
        let mut partitions = 0;
        while partitions < partitions_max && !work.changed.is_empty() {
            let count = work.changed.len().min(SMALL_QUEUES_PER_STATEMENT);
            let queues: Vec<QueueId> = work.changed.drain(..count).collect();
            queues.iter().for_each(|queue| {
                work.known.remove(queue);
            });
            partitions += self.sum_small(&mut work.changed_walks, &queues).await?.0;
        }
        Ok(())
    }

    async fn sweep(&self, work: &mut Work, mut reached: i32, partitions_max: i64) -> BrokerResult<i32> {
        let (mut partitions, mut queues_left) = (0, SWEEP_QUEUES_MAX);
        while partitions < partitions_max && queues_left > 0 {
            let queues = self.store.queues_after(reached, SMALL_QUEUES_PER_STATEMENT as i64).await?;
            let Some(last) = queues.last() else { return Ok(0) };
            reached = last.0;
            queues_left -= queues.len() as i64;
            partitions += self.sum_small(&mut work.sweep_walks, &queues).await?.0;
        }
        Ok(reached)
    }

    /// Sums these queues and saves what is complete; the large ones join the line of walks. Answers the partitions looked
    /// at and the snapshots saved.
    async fn sum_small(&self, walks: &mut Walks, queues: &[QueueId]) -> BrokerResult<(i64, i64)> {
        let summed = self.store.sum_queues(queues, SMALL_PARTITIONS_MAX).await?;
        let partitions = summed.iter().map(|queue| queue.stats.sums.partitions).sum();
        let (large, small): (Vec<_>, Vec<_>) = summed.into_iter().partition(|queue| queue.is_large);
        walks.add(large.iter().map(|queue| queue.stats.queue));
        let small: Vec<NewStats> = small.into_iter().map(|queue| queue.stats).collect();
        self.store.save_stats(&small).await?;
        Ok((partitions, small.len() as i64))
    }

    /// Walks large queues for so many partitions, and remembers where it stopped.
    async fn walk(&self, walks: &mut Walks, partitions_max: i64) -> BrokerResult<(i64, i64)> {
        let (mut partitions, mut saved) = (0, 0);
        while partitions < partitions_max {
            let mut walk = match walks.under_way.take() {
                Some(walk) => walk,
                None => {
                    let Some(queue) = walks.line.pop_front() else { break };
                    let (dead_letters, at) = self.store.count_dead_letters(queue).await?;
                    Walk { queue, after: None, sums: Sums::default(), dead_letters, at }
                }
            };
            let page = self.store.sum_page(walk.queue, walk.after.as_deref(), PAGE_PARTITIONS).await?;
            partitions += page.sums.partitions;
            walk.sums.add(&page.sums);
            if page.last.is_some() && page.sums.partitions == PAGE_PARTITIONS {
                walk.after = page.last;
                walks.under_way = Some(walk);
                continue;
            }
            let Walk { queue, sums, dead_letters, at, .. } = walk;
            self.store.save_stats(&[NewStats { queue, sums, dead_letters, at }]).await?;
            saved += 1;
        }
        Ok((partitions, saved))
    }
}
