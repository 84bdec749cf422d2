//! The read side: snapshots of all queues, live rows of one (`spec/admin.md` §4, §9).
//!
//! Nothing that a dashboard polls costs more than the number of queues. What walks the partitions of a queue takes turns,
//! two at a time, and lists a bounded number of them; its sums stay exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use chrono::{DateTime, Utc};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::error::{BrokerError, BrokerResult};
use super::queue::Queue;
use super::statistics::{Refreshed, Statistics};
use crate::ids::{IdSpace, QueueId};
use crate::store::Store;
pub use crate::store::changed_partitions::{ChangedPartition, SafeTime};
pub use crate::store::inspection::{
    Label, LabelSummary, Overview, PartitionDepth, PartitionDetail, QueueFilter, QueueSummary, Spread,
};

/// Partitions that one answer lists.
pub const PARTITIONS_LISTED_MAX: usize = 10_000;
/// Segments that are counted one by one; above, the figure of the last pass over sizes is shown.
const SEGMENTS_COUNTED_MAX: i64 = 10_000;
const PAGE_PARTITIONS: i64 = 1_000;
/// Walks through a queue's partitions at once, and those that may wait for their turn.
const WALKS_MAX: usize = 2;
const WALKS_WAITING_MAX: usize = 64;

/// See the module. A cheap clone.
#[derive(Clone, Debug)]
pub struct Inspection {
    pub(super) store: Store,
    pub(super) statistics: Statistics,
    walks: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    safe_floor_ms: u64,
}

/// A queue with its partitions.
#[derive(Clone, Debug)]
pub struct QueueDetail {
    /// Name, options.
    pub queue: Queue,
    /// The first partitions in name order.
    pub partitions: Vec<PartitionDetail>,
    /// Sums over all partitions.
    pub totals: Totals,
    /// Segments now; past 10,000 as of the last pass over sizes.
    pub segments: i64,
    /// Stored payload bytes, as of the last pass over sizes.
    pub retained_bytes: i64,
}

/// Counts of §3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Retained messages.
    pub total: i64,
    /// Messages above the slowest cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Dead letters.
    pub dead_letters: i64,
    /// Neither pending nor dead.
    pub completed: i64,
}

impl Totals {
    /// From the stored counts.
    pub fn new(total: i64, pending: i64, processing: i64, dead_letters: i64) -> Totals {
        let completed = (total - pending - dead_letters).max(0);
        Totals { total, pending, processing, dead_letters, completed }
    }
}

impl From<&PartitionDetail> for Totals {
    fn from(p: &PartitionDetail) -> Totals {
        Totals::new(p.total, p.pending, p.processing, p.dead_letters)
    }
}

impl From<&QueueSummary> for Totals {
    fn from(q: &QueueSummary) -> Totals {
        Totals::new(q.total, q.pending, q.processing, q.dead_letters)
    }
}

impl From<&Overview> for Totals {
    fn from(o: &Overview) -> Totals {
        let Overview { total, pending, processing, dead_letters, completed, .. } = *o;
        Totals { total, pending, processing, dead_letters, completed }
    }
}

/// What a queue, or a group of it, owes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Messages above the cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Partitions that owe something.
    pub partitions_pending: i64,
    /// Partitions that owe something that nobody has leased.
    pub partitions_ready: i64,
    /// Whether the group is delivered the newest message only.
    pub conflation: bool,
    /// The partitions in name order: all up to [`PARTITIONS_LISTED_MAX`], above that only those that owe something, up to
    /// the same number.
    pub partitions: Vec<PartitionDepth>,
}

impl Depth {
    fn add(&mut self, partition: PartitionDepth, listed: &mut Listed) {
        self.pending += partition.pending;
        self.processing += partition.processing;
        self.partitions_pending += i64::from(partition.pending > 0);
        self.partitions_ready += i64::from(partition.pending > partition.processing);
        if *listed == Listed::All && self.partitions.len() == PARTITIONS_LISTED_MAX {
            *listed = Listed::Pending;
            self.partitions.retain(|partition| partition.pending > 0);
        }
        let is_wanted = *listed == Listed::All || partition.pending > 0;
        if is_wanted && self.partitions.len() < PARTITIONS_LISTED_MAX {
            self.partitions.push(partition);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Listed {
    All,
    Pending,
}

/// Where a page of changed partitions goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// Name order.
    Name(String),
    /// Order of last writes.
    Write(DateTime<Utc>, String),
}

impl Inspection {
    /// Over the store and its snapshots.
    pub fn new(store: Store, statistics: Statistics, safe_floor_ms: u64) -> Inspection {
        let walks = Arc::new(Semaphore::new(WALKS_MAX));
        Inspection { store, statistics, walks, waiting: Arc::default(), safe_floor_ms }
    }

    /// The snapshots, for the tasks that make them.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// The ids of this database on the wire.
    pub fn ids(&self) -> IdSpace {
        self.store.ids()
    }

    /// Totals over these queues.
    pub async fn overview(&self, filter: &QueueFilter) -> BrokerResult<Overview> {
        self.statistics.freshen().await?;
        Ok(self.store.overview(filter).await?)
    }

    /// Queues in name order. `cached`: as the last snapshot has them.
    pub async fn queues(
        &self,
        filter: &QueueFilter,
        cached: bool,
        limit: i64,
        offset: i64,
    ) -> BrokerResult<Vec<QueueSummary>> {
        if !cached {
            self.statistics.freshen().await?;
        }
        Ok(self.store.queue_summaries(filter, limit, offset).await?)
    }

    /// Namespaces or tasks.
    pub async fn labels(&self, label: Label) -> BrokerResult<Vec<LabelSummary>> {
        self.statistics.freshen().await?;
        Ok(self.store.label_summaries(label).await?)
    }

    /// One queue with its partitions, live; `None` if it does not exist.
    pub async fn queue(&self, name: &str) -> BrokerResult<Option<QueueDetail>> {
        let Some(queue) = self.find(name).await? else { return Ok(None) };
        let _turn = self.turn().await?;
        let (mut partitions, mut totals) = (Vec::<PartitionDetail>::new(), Totals::default());
        let mut is_whole = false;
        while !is_whole && partitions.len() < PARTITIONS_LISTED_MAX {
            let after = partitions.last().map(|partition| partition.name.clone());
            let page = self.store.partition_details(queue.id, after.as_deref(), PAGE_PARTITIONS).await?;
            is_whole = (page.len() as i64) < PAGE_PARTITIONS;
            for partition in &page {
                let own = Totals::from(partition);
                totals.total += own.total;
                totals.pending += own.pending;
                totals.processing += own.processing;
                totals.dead_letters += own.dead_letters;
                totals.completed += own.completed;
            }
            partitions.extend(page);
        }
        if !is_whole {
            totals = self.walk_totals(queue.id).await?;
        }
        let filter = QueueFilter { queue: Some(name.to_owned()), ..QueueFilter::default() };
        let sizes = self.store.queue_summaries(&filter, 1, 0).await?.into_iter().next();
        let (segments, retained_bytes) = sizes.map_or((0, 0), |sizes| (sizes.segments, sizes.retained_bytes));
        let counted = self.store.count_segments(queue.id, SEGMENTS_COUNTED_MAX).await?;
        let segments = if counted < SEGMENTS_COUNTED_MAX { counted } else { segments.max(counted) };
        Ok(Some(QueueDetail { queue, partitions, totals, segments, retained_bytes }))
    }

    async fn walk_totals(&self, queue: QueueId) -> BrokerResult<Totals> {
        const PAGE: i64 = 5_000;
        let (dead_letters, _) = self.store.count_dead_letters(queue).await?;
        let mut sums = crate::store::statistics::Sums::default();
        let mut after = None;
        loop {
            let page = self.store.sum_page(queue, after.as_deref(), PAGE).await?;
            sums.add(&page.sums);
            if page.sums.partitions < PAGE {
                break;
            }
            after = page.last;
        }
        Ok(Totals::new(sums.total(), sums.pending, sums.processing, dead_letters))
    }

    /// What a queue owes, or one group of it; `None` if the queue does not exist.
    pub async fn depth(&self, name: &str, group: Option<&str>) -> BrokerResult<Option<Depth>> {
        const PAGE: i64 = 5_000;
        let Some(queue) = self.find(name).await? else { return Ok(None) };
        let policy = match group {
            Some(group) => Some(self.store.group_policy(queue.id, group).await?),
            None => None,
        };
        let _turn = self.turn().await?;
        let conflation = policy.flatten().is_some_and(|(_, conflation)| conflation);
        let key = policy.map(|policy| policy.map(|(id, _)| id));
        let (mut depth, mut listed) = (Depth { conflation, ..Depth::default() }, Listed::All);
        let mut after: Option<String> = None;
        loop {
            let page = self.store.partition_depths(queue.id, key, after.as_deref(), PAGE).await?;
            let is_last = (page.len() as i64) < PAGE;
            after = page.last().map(|partition| partition.name.clone());
            page.into_iter().for_each(|partition| depth.add(partition, &mut listed));
            if is_last {
                return Ok(Some(depth));
            }
        }
    }

    /// An instant before which nothing can become visible any more; ask before [`Inspection::changed`].
    pub async fn safe_time(&self) -> BrokerResult<SafeTime> {
        Ok(self.store.safe_time(self.safe_floor_ms).await?)
    }

    /// One page of a queue's partitions: by name, or by last write since an instant. `None` if the queue does not exist.
    /// The ordering of `after` must be the one asked for.
    pub async fn changed(
        &self,
        name: &str,
        since: Option<DateTime<Utc>>,
        after: Option<&After>,
        limit: i64,
    ) -> BrokerResult<Option<Vec<ChangedPartition>>> {
        let Some(queue) = self.find(name).await? else { return Ok(None) };
        let page = match (since, after) {
            (Some(since), Some(After::Write(at, name))) => {
                let _turn = self.turn().await?;
                self.store.partitions_by_write(queue.id, since, Some((*at, name)), limit).await?
            }
            (Some(since), _) => {
                let _turn = self.turn().await?;
                self.store.partitions_by_write(queue.id, since, None, limit).await?
            }
            (None, Some(After::Name(name))) => self.store.partitions_by_name(queue.id, Some(name), limit).await?,
            (None, _) => self.store.partitions_by_name(queue.id, None, limit).await?,
        };
        Ok(Some(page))
    }

    /// Messages pushed and acknowledged per second over the last five minutes, as far as they are written down.
    pub async fn recent_rates(&self) -> BrokerResult<(f64, f64)> {
        let (pushed, acked) = self.store.recent_operations(300).await?;
        let rate = |count: i64| (count as f64 / 300.0 * 100.0).round() / 100.0;
        Ok((rate(pushed), rate(acked)))
    }

    /// Brings all snapshots up to date.
    pub async fn refresh(&self) -> BrokerResult<(Refreshed, Overview)> {
        let done = self.statistics.refresh().await?;
        Ok((done, self.store.overview(&QueueFilter::default()).await?))
    }

    /// The queue as it is stored now: another broker may have changed or deleted it.
    pub(super) async fn find(&self, name: &str) -> BrokerResult<Option<Queue>> {
        Ok(self.store.find_queues(&[name.to_owned()]).await?.into_iter().next().map(Arc::new))
    }

    /// Waits for a turn to walk partitions, unless too many wait already.
    pub(super) async fn turn(&self) -> BrokerResult<SemaphorePermit<'_>> {
        if let Ok(permit) = self.walks.try_acquire() {
            return Ok(permit);
        }
        let _waiting = Waiting::enter(&self.waiting)?;
        self.walks.acquire().await.map_err(|_| BrokerError::Stopping)
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(count: &'a AtomicUsize) -> BrokerResult<Waiting<'a>> {
        if count.fetch_add(1, Ordering::AcqRel) >= WALKS_WAITING_MAX {
            count.fetch_sub(1, Ordering::AcqRel);
            return Err(BrokerError::overloaded("too many inspections under way", 2));
        }
        Ok(Waiting(count))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_depth_lists_all_partitions_or_only_those_that_owe() {
        for (count, listed) in [(PARTITIONS_LISTED_MAX, PARTITIONS_LISTED_MAX), (PARTITIONS_LISTED_MAX + 1, 1_001)] {
            let (mut depth, mut mode) = (Depth::default(), Listed::All);
            for n in 0..count {
                let pending = i64::from(n % 10 == 0);
                depth.add(PartitionDepth { name: format!("{n:06}"), pending, processing: 0 }, &mut mode);
            }
            assert_eq!(depth.partitions.len(), listed, "{count}");
            assert_eq!(depth.partitions_pending, count.div_ceil(10) as i64);
            assert_eq!((depth.pending, depth.partitions_ready), (depth.partitions_pending, depth.partitions_pending));
        }
    }

    #[test]
    fn completed_is_what_subtraction_leaves() {
        assert_eq!(Totals::new(10, 3, 1, 2).completed, 5);
        assert_eq!(Totals::new(1, 1, 0, 5).completed, 0);
    }
}
