//! The ready index: which partitions may have something for which group, and which pops wait for it.
//!
//! Fed by the commits of this broker, by what other brokers announce, by ends of leases and deadlines, and by a paged
//! walk when a group is first popped here. It holds only what is ready or held; nothing for groups that nobody pops
//! here (design §5).

mod feeds;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tokio::sync::Notify;

use super::autopilot::Lane;
use super::error::BrokerResult;
use super::push_flush::Appended;
use super::queue::QueueDirectory;
use super::ready_group::{Deadline, GroupState, Release, Verdict};
use super::sweep_width::Sight;
use super::waiter::{WaitLists, Waiter};
use crate::ids::{GroupId, PartitionId, QueueId};
use crate::store::Store;

/// Partitions per page of the walk that seeds a group.
const SEED_PAGE: i64 = 1000;
/// A group that nobody popped here for this long is forgotten; its next pop seeds it again.
const GROUP_IDLE: Duration = Duration::from_secs(120);

/// What a pop without a known group waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WakeKey {
    /// Anything in a queue of this name: the queue, or the wanted partition of it, does not exist yet.
    Queue(String),
    /// Anything that happens to this partition.
    Known(PartitionId),
}

/// The index. A cheap clone.
#[derive(Clone, Debug)]
pub struct ReadyIndex {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    queues: QueueDirectory,
    groups: DashMap<GroupId, Arc<ReadyGroup>>,
    by_queue: DashMap<QueueId, BTreeSet<GroupId>>,
    keyed: WaitLists<WakeKey>,
    deadlines: Mutex<BTreeSet<(Instant, GroupId, PartitionId)>>,
    earlier_deadline: Notify,
    epoch: Instant,
}

/// One group that is popped here.
#[derive(Debug)]
pub struct ReadyGroup {
    /// Key.
    pub id: GroupId,
    /// Its queue.
    pub queue: QueueId,
    state: Mutex<GroupState>,
    /// Name of the last partition that the seeding walk has passed.
    seed_after: tokio::sync::Mutex<Option<String>>,
    seeded: AtomicBool,
    /// The walk found no such group: it has been deleted, and nobody here was told.
    gone: AtomicBool,
    used_seconds: AtomicU64,
    /// Its autopilot, once a pop left its width open.
    lane: Mutex<Option<Box<Lane>>>,
}

/// Partitions taken for one claim. Whatever is not settled when it drops (a client hung up, a claim failed) is ready
/// again.
#[derive(Debug)]
pub struct Taken<'a> {
    index: &'a ReadyIndex,
    group: Arc<ReadyGroup>,
    partitions: Vec<PartitionId>,
}

impl ReadyIndex {
    /// An empty index.
    pub fn new(store: Store, queues: QueueDirectory) -> ReadyIndex {
        ReadyIndex {
            inner: Arc::new(Inner {
                store,
                queues,
                groups: DashMap::new(),
                by_queue: DashMap::new(),
                keyed: WaitLists::default(),
                deadlines: Mutex::default(),
                earlier_deadline: Notify::new(),
                epoch: Instant::now(),
            }),
        }
    }

    /// The group's entry, made at its first pop here.
    pub fn group(&self, queue: QueueId, id: GroupId) -> Arc<ReadyGroup> {
        let (group, is_new) = self.entry(queue, id);
        if is_new {
            self.walk(&group);
        }
        group
    }

    /// The group's entry, and whether it was made just now.
    fn entry(&self, queue: QueueId, id: GroupId) -> (Arc<ReadyGroup>, bool) {
        let now = self.inner.epoch.elapsed().as_secs();
        if let Some(group) = self.inner.groups.get(&id) {
            group.used_seconds.store(now, Ordering::Relaxed);
            return (group.clone(), false);
        }
        let mut is_new = false;
        let make = || {
            is_new = true;
            Arc::new(ReadyGroup::new(queue, id, now))
        };
        let group = self.inner.groups.entry(id).or_insert_with(make).clone();
        // Listed before it is seeded: a push that the walk does not see marks it.
        self.inner.by_queue.entry(queue).or_default().insert(id);
        (group, is_new)
    }

    /// Walks through the group's queue in the background.
    fn walk(&self, group: &Arc<ReadyGroup>) {
        let (index, seeding) = (self.clone(), group.clone());
        tokio::spawn(async move {
            while let Ok(false) = index.seed_page(&seeding).await {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Takes up to `count` candidates, walking on through the queue's partitions while there are none.
    pub async fn take(&self, group: &Arc<ReadyGroup>, count: usize) -> BrokerResult<Taken<'_>> {
        loop {
            // Asked before looking: the walk may find its last partitions and end between the two.
            let seeded = group.seeded.load(Ordering::Acquire);
            let partitions = group.state().take(count);
            if !partitions.is_empty() || seeded {
                return Ok(Taken { index: self, group: group.clone(), partitions });
            }
            self.seed_page(group).await?;
        }
    }

    /// One page of the seeding walk; `true` when it is complete.
    async fn seed_page(&self, group: &Arc<ReadyGroup>) -> BrokerResult<bool> {
        let mut after = group.seed_after.lock().await;
        if group.seeded.load(Ordering::Acquire) {
            return Ok(true);
        }
        let page = self.inner.store.page_partitions(group.queue, group.id, after.as_deref(), SEED_PAGE).await?;
        super::meter::meter().partitions_walked.increment(page.walked);
        let done = page.walked < SEED_PAGE.unsigned_abs();
        if page.walked == 0 && after.is_none() {
            self.check_gone(group).await?;
        }
        self.mark_all(group, &page.pending);
        if page.last.is_some() {
            *after = page.last;
        }
        if done {
            group.seeded.store(true, Ordering::Release);
        }
        Ok(done)
    }

    /// Walks through the group's queue once more: notifications may have been lost. Pops go on meanwhile, with what is known.
    pub async fn walk_again(&self, group: &Arc<ReadyGroup>) -> BrokerResult<()> {
        let mut after: Option<String> = None;
        loop {
            let page = self.inner.store.page_partitions(group.queue, group.id, after.as_deref(), SEED_PAGE).await?;
            super::meter::meter().partitions_walked.increment(page.walked);
            if page.walked == 0 && after.is_none() {
                return self.check_gone(group).await;
            }
            self.mark_all(group, &page.pending);
            if page.walked < SEED_PAGE.unsigned_abs() {
                return Ok(());
            }
            after = page.last;
            tokio::task::yield_now().await;
        }
    }

    async fn check_gone(&self, group: &ReadyGroup) -> BrokerResult<()> {
        if !self.inner.store.group_exists(group.id).await? {
            group.gone.store(true, Ordering::Release);
            // Whoever is parked in its list waits for nothing.
            self.forget_group(group.id);
        }
        Ok(())
    }

    fn mark_all(&self, group: &ReadyGroup, pending: &[PartitionId]) {
        for partition in pending {
            self.apply(group, *partition, group.state().mark(*partition));
        }
    }

    /// Looks at everything held again: leases may have ended elsewhere.
    pub fn reconsider_all(&self) {
        let queues: Vec<QueueId> = self.inner.by_queue.iter().map(|queue| *queue.key()).collect();
        queues.into_iter().for_each(|queue| self.reconsider(queue));
    }

    /// Messages were committed to these partitions.
    pub fn appended(&self, appended: &[Appended]) {
        for append in appended {
            self.mark(append.queue, append.partition);
            self.wake_keyed(append.queue, append.partition);
        }
    }

    /// A partition may have something for every group of its queue.
    pub fn mark(&self, queue: QueueId, partition: PartitionId) {
        for group in self.groups_of(queue) {
            let deadline = group.state().mark(partition);
            self.apply(&group, partition, deadline);
        }
    }

    /// A lease of one group ended.
    pub fn released(&self, group: GroupId, partition: PartitionId, release: Release) {
        let group = self.inner.groups.get(&group).map(|g| g.clone());
        if let Some(group) = &group {
            let changes = group.state().released(partition, release);
            for change in changes {
                self.apply(group, partition, change);
            }
        }
        if !self.inner.keyed.is_empty() {
            match group {
                Some(group) => self.wake_keyed(group.queue, partition),
                None => self.inner.keyed.wake_all(&WakeKey::Known(partition)),
            }
        }
    }

    /// The queue's options changed: look at everything held again.
    pub fn reconsider(&self, queue: QueueId) {
        for group in self.groups_of(queue) {
            let dropped = group.state().reconsider();
            let mut deadlines = self.deadlines();
            for (partition, until) in dropped {
                deadlines.remove(&(until, group.id, partition));
            }
        }
        self.inner.keyed.wake_everybody();
    }

    /// The queue is gone: forget its groups, and let their parked pops look for its successor.
    pub fn forget_queue(&self, queue: QueueId) {
        let groups = self.inner.by_queue.remove(&queue).map(|(_, groups)| groups).unwrap_or_default();
        for id in groups {
            self.forget_group(id);
        }
    }

    /// Forgets one group and wakes its parked pops.
    pub fn forget_group(&self, id: GroupId) {
        let Some((_, group)) = self.inner.groups.remove(&id) else { return };
        if let Some(mut groups) = self.inner.by_queue.get_mut(&group.queue) {
            groups.remove(&id);
        }
        let mut state = group.state();
        let held: Vec<_> = state.deadlines().collect();
        state.close();
        drop(state);
        let mut deadlines = self.deadlines();
        for (partition, until) in held {
            deadlines.remove(&(until, id, partition));
        }
    }

    /// Wakes every parked pop (shutdown, maintenance).
    pub fn wake_everybody(&self) {
        self.inner.keyed.wake_everybody();
        for group in self.inner.groups.iter() {
            group.state().wake_all();
        }
    }

    /// Wakes the pops that wait by name for something in this partition.
    pub fn wake_waiting(&self, queue: QueueId, partition: PartitionId) {
        self.wake_keyed(queue, partition);
    }

    /// The lists of pops that wait by name.
    pub fn keyed(&self) -> &WaitLists<WakeKey> {
        &self.inner.keyed
    }

    /// Every group that is popped here.
    pub fn groups(&self) -> Vec<Arc<ReadyGroup>> {
        self.inner.groups.iter().map(|g| g.clone()).collect()
    }

    /// Parked pops of each queue that has any. Costs as much as there are groups that are popped here.
    pub fn parked_by_queue(&self) -> HashMap<QueueId, usize> {
        let mut parked = HashMap::new();
        for group in self.inner.groups.iter() {
            let (_, waiting) = group.state().size();
            if waiting > 0 {
                *parked.entry(group.queue).or_default() += waiting;
            }
        }
        parked
    }

    /// Tracked partitions, groups and deadlines.
    pub fn size(&self) -> (usize, usize, usize) {
        let entries = self.inner.groups.iter().map(|g| g.state().size().0).sum();
        (entries, self.inner.groups.len(), self.deadlines().len())
    }

    /// Wakes whatever has come due, for ever. One task per broker.
    pub async fn run_deadlines(self) {
        loop {
            let next = self.deadlines().first().map(|(at, ..)| *at);
            let earlier = self.inner.earlier_deadline.notified();
            match next {
                None => earlier.await,
                Some(at) if at <= Instant::now() => self.fire_due(),
                Some(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at.into()) => {}
                        () = earlier => {}
                    }
                }
            }
        }
    }

    fn fire_due(&self) {
        const PER_ROUND: usize = 1024;
        let now = Instant::now();
        let mut due = Vec::new();
        {
            let mut deadlines = self.deadlines();
            while due.len() < PER_ROUND && deadlines.first().is_some_and(|(at, ..)| *at <= now) {
                due.extend(deadlines.pop_first());
            }
        }
        for (_, group, partition) in due {
            if let Some(group) = self.inner.groups.get(&group).map(|g| g.clone()) {
                group.state().due(partition, now);
                self.wake_keyed(group.queue, partition);
            }
        }
    }

    /// Forgets groups that nobody has popped here for a while. One pass; the caller repeats it.
    pub fn trim_idle_groups(&self) {
        let now = self.inner.epoch.elapsed().as_secs();
        let idle: Vec<GroupId> = self
            .inner
            .groups
            .iter()
            .filter(|g| now.saturating_sub(g.used_seconds.load(Ordering::Relaxed)) > GROUP_IDLE.as_secs())
            .map(|g| g.id)
            .collect();
        for id in idle {
            // A pop that holds the group, parked or not, keeps it.
            let unused = |_: &GroupId, g: &Arc<ReadyGroup>| Arc::strong_count(g) == 1;
            if let Some((_, group)) = self.inner.groups.remove_if(&id, unused) {
                if let Some(mut groups) = self.inner.by_queue.get_mut(&group.queue) {
                    groups.remove(&id);
                }
                self.inner.by_queue.remove_if(&group.queue, |_, groups| groups.is_empty());
                let held: Vec<_> = group.state().deadlines().collect();
                let mut deadlines = self.deadlines();
                for (partition, until) in held {
                    deadlines.remove(&(until, id, partition));
                }
            }
        }
    }

    fn groups_of(&self, queue: QueueId) -> Vec<Arc<ReadyGroup>> {
        let Some(ids) = self.inner.by_queue.get(&queue) else { return Vec::new() };
        ids.iter().filter_map(|id| self.inner.groups.get(id).map(|g| g.clone())).collect()
    }

    fn wake_keyed(&self, queue: QueueId, partition: PartitionId) {
        let keyed = &self.inner.keyed;
        if keyed.is_empty() {
            return;
        }
        keyed.wake_all(&WakeKey::Known(partition));
        let Some(queue) = self.inner.queues.cached(queue) else {
            // Rare: waking too many is harmless, waking too few is not.
            return keyed.wake_everybody();
        };
        keyed.wake_all(&WakeKey::Queue(queue.name.clone()));
    }

    fn apply(&self, group: &ReadyGroup, partition: PartitionId, change: Option<Deadline>) {
        match change {
            None => {}
            Some(Deadline::Clear(at)) => {
                self.deadlines().remove(&(at, group.id, partition));
            }
            Some(Deadline::Set(at)) => {
                let mut deadlines = self.deadlines();
                deadlines.insert((at, group.id, partition));
                if deadlines.first().is_some_and(|(_, g, p)| (*g, *p) == (group.id, partition)) {
                    self.inner.earlier_deadline.notify_one();
                }
            }
        }
    }

    fn deadlines(&self) -> MutexGuard<'_, BTreeSet<(Instant, GroupId, PartitionId)>> {
        self.inner.deadlines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadyGroup {
    /// A group that is popped from `now` on, in seconds of the index.
    pub fn new(queue: QueueId, id: GroupId, now: u64) -> ReadyGroup {
        ReadyGroup {
            id,
            queue,
            state: Mutex::default(),
            seed_after: tokio::sync::Mutex::default(),
            seeded: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            used_seconds: AtomicU64::new(now),
            lane: Mutex::default(),
        }
    }

    /// Parks a pop; it is woken at once if something is ready.
    pub fn park(&self, waiter: &Arc<Waiter>) {
        self.state().park(waiter);
    }

    /// Removes a parked pop. If it was woken and never got to look, the next one is woken in its place.
    pub fn unpark(&self, waiter: &Waiter, pass_on: bool) {
        let mut state = self.state();
        state.unpark(waiter);
        if pass_on && state.has_ready() {
            state.wake_one();
        }
    }

    /// Whether the group turned out to have been deleted.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// How many are ready, and since when the first of them has been.
    pub fn sight(&self, now: Instant) -> Sight {
        self.state().sight(now)
    }

    /// Its autopilot.
    pub fn lane(&self) -> MutexGuard<'_, Option<Box<Lane>>> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        // Every method leaves the state whole; a panic between two of them cannot tear it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken<'_> {
    /// The candidates.
    pub fn partitions(&self) -> &[PartitionId] {
        &self.partitions
    }

    /// What the claim learned about one of them.
    pub fn settle(&mut self, partition: PartitionId, verdict: Verdict) {
        self.partitions.retain(|p| *p != partition);
        let change = self.group.state().settle(partition, verdict);
        self.index.apply(&self.group, partition, change);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        for partition in std::mem::take(&mut self.partitions) {
            let change = self.group.state().settle(partition, Verdict::Again);
            self.index.apply(&self.group, partition, change);
        }
    }
}
