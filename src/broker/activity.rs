//! What has happened since somebody last looked, by queue: which snapshots are out of date, the counters of the minute
//! buckets, and the partitions written last. Bounded; what has no room is found by the background walk.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use dashmap::DashMap;
use dashmap::mapref::one::Ref;

use super::Broker;
use super::delivery::Delivered;
use super::error::BrokerResult;
use super::minutes::{Count, Totals};
use super::pop::{PopAnswer, PopRequest, Popped, Scope};
use super::push::{PushItem, PushResult, PushStatus};
use super::push_flush::Appended;
use super::watched_queues::{WatchSettings, WatchedQueues};
use crate::ids::{GroupId, PartitionId, QueueId};
use crate::store::minutes::Operations;

/// Queues and groups that are followed at once. A queue costs some 120 bytes here, from its first use to the next write
/// of the minute buckets in which it did nothing.
const FOLLOWED_MAX: usize = 100_000;
/// Recently written partitions that are remembered.
const RECENT_MAX: usize = 16_384;

/// Counters of one queue since the last write.
#[derive(Debug, Default)]
pub struct QueueActivity {
    stale: AtomicBool,
    /// Push requests that stored something here.
    pub push_requests: AtomicU64,
    /// Messages stored.
    pub push_messages: AtomicU64,
    /// Messages delivered.
    pub pop_messages: AtomicU64,
    /// Pops answered without a message.
    pub pop_empty: AtomicU64,
    /// Transactions that pushed here.
    pub transactions: AtomicU64,
    /// Partitions that got their first messages.
    pub partitions_created: AtomicU64,
    /// Partitions that were deleted because nobody used them.
    pub partitions_deleted: AtomicU64,
    /// Deliveries whose lag was measured.
    pub lag_count: AtomicU64,
    /// Sum of their lags, milliseconds.
    pub lag_ms_sum: AtomicU64,
    /// The longest, milliseconds.
    pub lag_ms_max: AtomicU64,
}

/// Counters of one group since the last write.
#[derive(Debug, Default)]
pub struct GroupActivity {
    stale: AtomicBool,
    /// Ack calls.
    pub ack_requests: AtomicU64,
    /// Items acknowledged.
    pub ack_success: AtomicU64,
    /// Items refused.
    pub ack_failed: AtomicU64,
    /// Transactions that acknowledged for it.
    pub transactions: AtomicU64,
    /// Positions retired without a delivery.
    pub conflated: AtomicU64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Activity {
    queues: DashMap<QueueId, QueueActivity>,
    groups: DashMap<GroupId, GroupActivity>,
    recent: Mutex<Recent>,
    totals: Totals,
    watched: WatchedQueues,
}

/// Two halves: when the younger is full, the older is dropped. What was written last is always among them.
#[derive(Debug, Default)]
struct Recent {
    young: HashSet<(QueueId, PartitionId)>,
    old: HashSet<(QueueId, PartitionId)>,
}

impl Recent {
    fn note(&mut self, key: (QueueId, PartitionId)) {
        if self.young.insert(key) && self.young.len() >= RECENT_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
        }
    }
}

impl Activity {
    /// Nothing has happened yet.
    pub fn new(watch: WatchSettings) -> Activity {
        Activity { watched: WatchedQueues::new(watch), ..Activity::default() }
    }

    /// Queues with metrics of their own.
    pub fn watched(&self) -> &WatchedQueues {
        &self.watched
    }

    /// Something about a queue changed that its snapshot shows.
    pub fn touched(&self, queue: QueueId) {
        self.with_queue(queue, |_| {});
    }

    /// Messages were committed, here or on another broker.
    pub fn appended(&self, appended: &[Appended]) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        for append in appended {
            recent.note((append.queue, append.partition));
        }
        drop(recent);
        for (queue, created) in created_by_queue(appended) {
            self.with_queue(queue, |activity| {
                activity.partitions_created.fetch_add(created, Ordering::Relaxed);
            });
        }
    }

    /// A push stored messages in a queue.
    pub fn pushed(&self, queue: QueueId, messages: u64) {
        self.count(Count::PushMessages, messages);
        self.watched.pushed(queue, messages);
        self.with_queue(queue, |activity| {
            activity.push_requests.fetch_add(1, Ordering::Relaxed);
            activity.push_messages.fetch_add(messages, Ordering::Relaxed);
        });
    }

    /// A pop delivered.
    pub fn delivered(&self, delivered: &[Delivered]) {
        let now = chrono::Utc::now();
        for part in delivered {
            let lag = part.runs.first().map(|run| (now - run.created_at).num_milliseconds().max(0).unsigned_abs());
            let messages = part.hashes.len() as u64;
            self.count(Count::PopMessages, messages);
            self.watched.popped(part.span.queue.id, part.span.group, messages);
            self.with_queue(part.span.queue.id, |activity| {
                activity.pop_messages.fetch_add(messages, Ordering::Relaxed);
                if let Some(lag) = lag {
                    activity.lag_count.fetch_add(1, Ordering::Relaxed);
                    activity.lag_ms_sum.fetch_add(lag, Ordering::Relaxed);
                    activity.lag_ms_max.fetch_max(lag, Ordering::Relaxed);
                }
            });
        }
    }

    /// A pop of one queue found nothing.
    pub fn popped_nothing(&self, queue: QueueId) {
        if let Some(activity) = followed(&self.queues, queue) {
            activity.pop_empty.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An ack call was settled for a group.
    pub fn acked(&self, group: GroupId, success: u64, failed: u64) {
        self.count(Count::AckRequests, 1);
        self.count(Count::AckSuccess, success);
        self.count(Count::AckFailed, failed);
        self.watched.acked(group, success, failed);
        if let Some(activity) = followed(&self.groups, group) {
            activity.ack_requests.fetch_add(1, Ordering::Relaxed);
            activity.ack_success.fetch_add(success, Ordering::Relaxed);
            activity.ack_failed.fetch_add(failed, Ordering::Relaxed);
            activity.stale.store(true, Ordering::Release);
        }
    }

    /// An ack retired positions of a conflating group without a delivery.
    pub fn conflated(&self, group: GroupId, positions: i64) {
        if positions > 0
            && let Some(activity) = followed(&self.groups, group)
        {
            activity.conflated.fetch_add(positions.unsigned_abs(), Ordering::Relaxed);
        }
    }

    /// Partitions of a queue were deleted.
    pub fn removed(&self, queue: QueueId, partitions: u64) {
        self.with_queue(queue, |activity| {
            activity.partitions_deleted.fetch_add(partitions, Ordering::Relaxed);
        });
    }

    /// A transaction was committed that pushed to these queues and acknowledged for these groups, each named once.
    pub fn transacted(&self, queues: impl IntoIterator<Item = QueueId>, groups: impl IntoIterator<Item = GroupId>) {
        self.count(Count::Transactions, 1);
        for queue in queues {
            self.with_queue(queue, |activity| {
                activity.transactions.fetch_add(1, Ordering::Relaxed);
            });
        }
        for activity in groups.into_iter().filter_map(|group| followed(&self.groups, group)) {
            activity.transactions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts an operation of this process.
    pub fn count(&self, what: Count, by: u64) {
        self.totals.add(what, by);
    }

    /// Hands the operations of this process out and sets them to zero.
    pub fn take_totals(&self) -> Operations {
        self.totals.take()
    }

    /// Takes the queues and groups whose snapshots are out of date.
    pub fn take_stale(&self) -> (Vec<QueueId>, Vec<GroupId>) {
        let queues = self.queues.iter().filter(|e| e.stale.swap(false, Ordering::AcqRel)).map(|e| *e.key()).collect();
        let groups = self.groups.iter().filter(|e| e.stale.swap(false, Ordering::AcqRel)).map(|e| *e.key()).collect();
        (queues, groups)
    }

    /// Whether any snapshot is out of date.
    pub fn is_stale(&self) -> bool {
        self.queues.iter().any(|e| e.stale.load(Ordering::Acquire))
            || self.groups.iter().any(|e| e.stale.load(Ordering::Acquire))
    }

    /// Hands every queue's counters out and sets them to zero; who did nothing is forgotten.
    pub fn take_queues(&self, mut each: impl FnMut(QueueId, &QueueActivity)) {
        self.queues.retain(|queue, activity| {
            each(*queue, activity);
            activity.is_busy() || activity.stale.load(Ordering::Acquire)
        });
    }

    /// The same for groups.
    pub fn take_groups(&self, mut each: impl FnMut(GroupId, &GroupActivity)) {
        self.groups.retain(|group, activity| {
            each(*group, activity);
            activity.is_busy() || activity.stale.load(Ordering::Acquire)
        });
    }

    /// Partitions written lately, of one queue or of all.
    pub fn recent(&self, queue: Option<QueueId>) -> Vec<PartitionId> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let all = recent.young.union(&recent.old);
        all.filter(|(of, _)| queue.is_none_or(|queue| *of == queue)).map(|(_, partition)| *partition).collect()
    }

    /// Forgets a deleted queue.
    pub fn forget_queue(&self, queue: QueueId) {
        self.queues.remove(&queue);
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.young.retain(|(of, _)| *of != queue);
        recent.old.retain(|(of, _)| *of != queue);
    }

    fn with_queue(&self, queue: QueueId, change: impl FnOnce(&QueueActivity)) {
        if let Some(activity) = followed(&self.queues, queue) {
            change(&activity);
            activity.stale.store(true, Ordering::Release);
        }
    }
}

/// How many of the partitions are new, queue by queue; neighbours of one queue count together.
fn created_by_queue(appended: &[Appended]) -> Vec<(QueueId, u64)> {
    let mut created: Vec<(QueueId, u64)> = Vec::new();
    for append in appended.iter().filter(|append| append.is_new) {
        match created.last_mut() {
            Some((queue, count)) if *queue == append.queue => *count += 1,
            _ => created.push((append.queue, 1)),
        }
    }
    created
}

/// The counters of a queue or group, if it is followed or there is room for one more. The length of the map, which visits
/// every shard, is asked for only of those that are new.
fn followed<K: Copy + Eq + Hash, V: Default>(map: &DashMap<K, V>, key: K) -> Option<Ref<'_, K, V>> {
    if let Some(activity) = map.get(&key) {
        return Some(activity);
    }
    (map.len() < FOLLOWED_MAX).then(|| map.entry(key).or_default().downgrade())
}

fn is_any(counters: &[&AtomicU64]) -> bool {
    counters.iter().any(|counter| counter.load(Ordering::Relaxed) > 0)
}

impl QueueActivity {
    fn is_busy(&self) -> bool {
        is_any(&[
            &self.push_requests,
            &self.push_messages,
            &self.pop_messages,
            &self.pop_empty,
            &self.transactions,
            &self.partitions_created,
            &self.partitions_deleted,
            &self.lag_count,
            &self.lag_ms_sum,
            &self.lag_ms_max,
        ])
    }
}

impl GroupActivity {
    fn is_busy(&self) -> bool {
        is_any(&[&self.ack_requests, &self.ack_success, &self.ack_failed, &self.transactions, &self.conflated])
    }
}

impl Broker {
    /// Counts a push by queue. Neighbours of one queue count together.
    pub(super) fn note_push(&self, items: &[PushItem<'_>], results: &[PushResult]) {
        self.activity.count(Count::PushRequests, 1);
        let mut run: Option<(&str, u64)> = None;
        let stored = items.iter().zip(results).filter(|(_, result)| matches!(result.status, PushStatus::Queued { .. }));
        for (item, _) in stored {
            match &mut run {
                Some((queue, count)) if *queue == item.queue => *count += 1,
                _ => {
                    let before = run.replace((item.queue, 1));
                    before.into_iter().for_each(|(queue, count)| self.note_run(queue, count));
                }
            }
        }
        run.into_iter().for_each(|(queue, count)| self.note_run(queue, count));
    }

    fn note_run(&self, queue: &str, messages: u64) {
        match self.queues.cached_id(queue) {
            Some(id) => self.activity.pushed(id, messages),
            // Deleted meanwhile: no queue to count it for.
            None => self.activity.count(Count::PushMessages, messages),
        }
    }

    /// An automatic ack counts as an ack.
    fn note_automatic_acks(&self, answer: &PopAnswer) {
        for part in &answer.delivered {
            self.activity.acked(part.span.group, part.hashes.len() as u64, 0);
        }
    }

    /// Counts a pop by queue.
    pub(super) fn note_pop(&self, request: &PopRequest, popped: &BrokerResult<Popped>) {
        self.activity.count(Count::PopRequests, 1);
        match (popped, &request.scope) {
            (Ok(Popped { answer: Some(answer), .. }), _) => {
                self.activity.delivered(&answer.delivered);
                if request.auto_ack {
                    self.note_automatic_acks(answer);
                }
            }
            (Ok(Popped { answer: None, .. }), Scope::Queue(name) | Scope::Partition(name, _)) => {
                if let Some(queue) = self.queues.cached_id(name) {
                    self.activity.popped_nothing(queue);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_partitions_are_bounded_and_the_last_ones_stay() {
        let activity = Activity::default();
        for n in 0..40_000 {
            activity.appended(&[Appended { queue: QueueId(1), partition: PartitionId(n), is_new: false }]);
        }
        let recent = activity.recent(Some(QueueId(1)));
        assert!(recent.len() <= RECENT_MAX && recent.len() >= RECENT_MAX / 2, "{}", recent.len());
        assert!((39_000..40_000).all(|n| recent.contains(&PartitionId(n))));
        assert!(activity.recent(Some(QueueId(2))).is_empty());
    }

    #[test]
    fn a_snapshot_is_out_of_date_once_per_change() {
        let activity = Activity::default();
        activity.pushed(QueueId(1), 3);
        activity.acked(GroupId(7), 1, 0);
        assert!(activity.is_stale());
        assert_eq!(activity.take_stale(), (vec![QueueId(1)], vec![GroupId(7)]));
        assert_eq!(activity.take_stale(), (vec![], vec![]));
        let mut seen = 0;
        activity.take_queues(|_, queue| seen += queue.push_messages.swap(0, Ordering::Relaxed));
        assert_eq!(seen, 3);
    }
}
