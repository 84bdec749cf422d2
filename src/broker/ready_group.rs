//! The partitions of one consumer group that may have something to deliver. Pure and in memory: a hint that decides
//! which claims are worth sending; PostgreSQL decides what they get.
//!
//! ```text
//! (absent) --mark--> Queued --take--> Taken --empty--> (absent)
//!                      ^                |  \--hold---> Waiting (leased, or held back until an instant)
//!                      |                |                 |
//!                      +---- requeue ---+<-- due, released +
//! ```
//! A mark that meets `Taken` or `Waiting` is remembered, so an "empty" verdict that a push overtook is never believed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use super::sweep_width::Sight;
use super::waiter::Waiter;
use crate::ids::{PartitionId, QueueId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Queued,
    /// `released`: what the claim may find leased is not any more.
    Taken {
        marked: bool,
        released: bool,
    },
    Waiting {
        until: Instant,
        marked: bool,
        eager: bool,
    },
}

/// An instant in four bytes: milliseconds since the first one. There is one for every ready partition.
#[derive(Clone, Copy, Debug)]
struct Stamp(u32);

impl Stamp {
    fn at(now: Instant) -> Stamp {
        static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
        Stamp(now.saturating_duration_since(*FIRST).as_millis() as u32)
    }

    /// Right for ages below 49 days.
    fn age(self, now: Instant) -> Duration {
        Duration::from_millis(u64::from(Stamp::at(now).0.wrapping_sub(self.0)))
    }
}

/// What a claim learned about a partition that it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing to deliver.
    Empty,
    /// Still worth a claim.
    Again,
    /// Not before this instant. `more`: there is something then in any case. `eager`: new messages may end the wait.
    Hold {
        /// When to look again.
        until: Instant,
        /// Whether messages are known to wait.
        more: bool,
        /// Whether an append makes another look worthwhile at once.
        eager: bool,
    },
}

/// How a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Everything leased was finished: only what came since is left.
    Finished,
    /// The span, or a part of it, is to be delivered again.
    Redeliver,
    /// The same, but not before this instant (`retryDelay`).
    RedeliverAt(Instant),
}

/// Who hears of a group, under its lock (`feed.rs`).
pub trait Listener: Send + Sync + std::fmt::Debug {
    /// A partition of this queue became ready.
    fn became_ready(&self, queue: QueueId);
    /// The group is forgotten.
    fn went_away(&self, queue: QueueId);
}

/// Entries, ready queue and parked pops of one group.
#[derive(Debug, Default)]
pub struct GroupState {
    entries: HashMap<PartitionId, Entry>,
    /// Ready, each since when.
    queue: VecDeque<(PartitionId, Stamp)>,
    waiters: BTreeMap<u64, Arc<Waiter>>,
    /// Few: the labels of one queue.
    listeners: Vec<(Weak<dyn Listener>, QueueId)>,
    /// The group is forgotten: whoever comes late must not park here.
    closed: bool,
}

/// A change of the deadlines that the index keeps for the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Wake the group for this partition at this instant.
    Set(Instant),
    /// No longer needed.
    Clear(Instant),
}

impl GroupState {
    /// Notes that a partition may have something. Wakes one parked pop if that is news.
    pub fn mark(&mut self, partition: PartitionId) -> Option<Deadline> {
        match self.entries.get_mut(&partition) {
            None => {
                self.enqueue(partition);
                None
            }
            Some(Entry::Queued) => None,
            Some(Entry::Taken { marked, .. } | Entry::Waiting { marked, eager: false, .. }) => {
                *marked = true;
                None
            }
            Some(Entry::Waiting { until, eager: true, .. }) => {
                let until = *until;
                self.enqueue(partition);
                Some(Deadline::Clear(until))
            }
        }
    }

    /// Takes up to `count` ready partitions for a claim, longest waiting first.
    pub fn take(&mut self, count: usize) -> Vec<PartitionId> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let Some((partition, _)) = self.queue.pop_front() else { break };
            if let Some(entry @ Entry::Queued) = self.entries.get_mut(&partition) {
                *entry = Entry::Taken { marked: false, released: false };
                taken.push(partition);
            }
        }
        taken
    }

    /// Puts a taken partition where the claim's verdict says.
    pub fn settle(&mut self, partition: PartitionId, verdict: Verdict) -> Option<Deadline> {
        let Some(Entry::Taken { marked, released }) = self.entries.get(&partition).copied() else { return None };
        match verdict {
            // The lease that the claim took or met may be the one that has ended since.
            Verdict::Hold { .. } if released => {
                self.enqueue(partition);
                None
            }
            Verdict::Empty if !marked => {
                self.entries.remove(&partition);
                None
            }
            Verdict::Hold { eager: true, .. } if marked => {
                self.enqueue(partition);
                None
            }
            Verdict::Empty | Verdict::Again => {
                self.enqueue(partition);
                None
            }
            Verdict::Hold { until, more, eager } => {
                self.entries.insert(partition, Entry::Waiting { until, marked: marked || more, eager });
                Some(Deadline::Set(until))
            }
        }
    }

    /// A lease of this group ended (by any road that this broker hears of).
    pub fn released(&mut self, partition: PartitionId, release: Release) -> [Option<Deadline>; 2] {
        let clear = match self.entries.get(&partition) {
            Some(Entry::Waiting { until, .. }) => Some(Deadline::Clear(*until)),
            _ => None,
        };
        match (self.entries.get_mut(&partition), release) {
            (Some(Entry::Queued), _) => [None, None],
            (Some(Entry::Taken { marked, released }), _) => {
                (*marked, *released) = (true, true);
                [None, None]
            }
            (Some(Entry::Waiting { marked: false, .. }), Release::Finished) => {
                self.entries.remove(&partition);
                [clear, None]
            }
            (None, Release::Finished) => [None, None],
            (_, Release::RedeliverAt(until)) => {
                self.entries.insert(partition, Entry::Waiting { until, marked: true, eager: false });
                [clear, Some(Deadline::Set(until))]
            }
            (_, Release::Finished | Release::Redeliver) => {
                self.enqueue(partition);
                [clear, None]
            }
        }
    }

    /// A deadline passed: whatever was held may be deliverable now.
    pub fn due(&mut self, partition: PartitionId, now: Instant) {
        if matches!(self.entries.get(&partition), Some(Entry::Waiting { until, .. }) if *until <= now) {
            self.enqueue(partition);
        }
    }

    /// Looks at everything held again at once (options changed). Answers the deadlines that fall away.
    pub fn reconsider(&mut self) -> Vec<(PartitionId, Instant)> {
        let held: Vec<(PartitionId, Instant)> = self
            .entries
            .iter()
            .filter_map(|(p, e)| if let Entry::Waiting { until, .. } = e { Some((*p, *until)) } else { None })
            .collect();
        held.iter().for_each(|(partition, _)| self.enqueue(*partition));
        held
    }

    /// The deadlines of everything held.
    pub fn deadlines(&self) -> impl Iterator<Item = (PartitionId, Instant)> + '_ {
        self.entries
            .iter()
            .filter_map(|(p, e)| if let Entry::Waiting { until, .. } = e { Some((*p, *until)) } else { None })
    }

    /// Parks a pop; it is woken once, in turn.
    pub fn park(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.insert(waiter.ticket(), waiter.clone());
        if self.closed {
            self.wake_all();
        }
        // Something became ready between the pop's last look and now.
        if self.has_ready() {
            self.wake_one();
        }
    }

    /// Removes a parked pop, woken or not.
    pub fn unpark(&mut self, waiter: &Waiter) {
        self.waiters.remove(&waiter.ticket());
    }

    /// Wakes the pop that has waited longest.
    pub fn wake_one(&mut self) {
        while let Some((_, waiter)) = self.waiters.pop_first() {
            if waiter.wake() {
                return;
            }
        }
    }

    /// The group is going away: every parked pop, and whoever parks later, is woken at once to look for its successor.
    pub fn close(&mut self) {
        self.closed = true;
        self.wake_all();
        for (listener, queue) in std::mem::take(&mut self.listeners) {
            if let Some(listener) = listener.upgrade() {
                listener.went_away(queue);
            }
        }
    }

    /// Adds a listener, and tells it at once if something is ready, or if it came too late.
    pub fn listen(&mut self, queue: QueueId, listener: Weak<dyn Listener>) {
        let Some(heard) = listener.upgrade() else { return };
        if self.closed {
            return heard.went_away(queue);
        }
        self.listeners.retain(|(other, _)| other.strong_count() > 0 && !other.ptr_eq(&listener));
        self.listeners.push((listener, queue));
        if self.has_ready() {
            heard.became_ready(queue);
        }
    }

    /// Wakes every parked pop.
    pub fn wake_all(&mut self) {
        for waiter in std::mem::take(&mut self.waiters).into_values() {
            waiter.wake();
        }
    }

    /// Whether a claim would find a candidate.
    pub fn has_ready(&self) -> bool {
        !self.queue.is_empty()
    }

    /// How many are ready, and since when the first of them has been.
    pub fn sight(&self, now: Instant) -> Sight {
        let oldest = self.queue.front().map_or(Duration::ZERO, |(_, since)| since.age(now));
        Sight { ready: self.queue.len(), oldest }
    }

    /// Tracked partitions and parked pops.
    pub fn size(&self) -> (usize, usize) {
        (self.entries.len(), self.waiters.len())
    }

    fn enqueue(&mut self, partition: PartitionId) {
        if !matches!(self.entries.insert(partition, Entry::Queued), Some(Entry::Queued)) {
            self.queue.push_back((partition, Stamp::at(Instant::now())));
            self.wake_one();
            for (listener, queue) in &self.listeners {
                if let Some(listener) = listener.upgrade() {
                    listener.became_ready(*queue);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PartitionId = PartitionId(7);

    fn taken() -> GroupState {
        let mut group = GroupState::default();
        group.mark(P);
        assert_eq!(group.take(5), [P]);
        group
    }

    #[test]
    fn the_age_of_the_first_ready_partition_is_seen() {
        let mut group = GroupState::default();
        let now = Instant::now();
        assert_eq!(group.sight(now), Sight { ready: 0, oldest: Duration::ZERO });
        group.mark(P);
        group.mark(PartitionId(8));
        let sight = group.sight(Instant::now() + Duration::from_secs(5));
        assert_eq!(sight.ready, 2);
        assert!((5..8).contains(&sight.oldest.as_secs()), "{sight:?}");
    }

    #[test]
    fn a_mark_during_a_claim_outlives_the_empty_verdict() {
        let mut group = taken();
        group.mark(P);
        group.settle(P, Verdict::Empty);
        assert_eq!(group.take(1), [P]);
        group.settle(P, Verdict::Empty);
        assert_eq!(group.size(), (0, 0));
    }

    #[test]
    fn a_finished_lease_is_offered_again_only_if_something_is_left() {
        let until = Instant::now() + Duration::from_secs(60);
        for (more, mark, offered) in [(false, false, false), (true, false, true), (false, true, true)] {
            let mut group = taken();
            assert_eq!(group.settle(P, Verdict::Hold { until, more, eager: false }), Some(Deadline::Set(until)));
            if mark {
                group.mark(P);
            }
            assert!(group.take(1).is_empty(), "leased");
            assert_eq!(group.released(P, Release::Finished)[0], Some(Deadline::Clear(until)));
            assert_eq!(!group.take(1).is_empty(), offered);
        }
    }

    #[test]
    fn a_nack_an_expiry_and_a_delay_bring_the_partition_back() {
        let now = Instant::now();
        let mut group = taken();
        group.settle(P, Verdict::Hold { until: now, more: false, eager: false });
        group.due(P, now);
        assert_eq!(group.take(1), [P]);
        group.settle(P, Verdict::Hold { until: now, more: false, eager: false });
        group.released(P, Release::Redeliver);
        assert_eq!(group.take(1), [P]);
        let later = now + Duration::from_secs(1);
        group.settle(P, Verdict::Hold { until: now, more: false, eager: false });
        assert_eq!(group.released(P, Release::RedeliverAt(later))[1], Some(Deadline::Set(later)));
        group.due(P, now);
        assert!(group.take(1).is_empty());
        group.due(P, later);
        assert_eq!(group.take(1), [P]);
    }

    #[test]
    fn a_lease_that_ends_while_a_claim_runs_is_not_waited_for() {
        let until = Instant::now() + Duration::from_secs(300);
        let mut group = taken();
        group.released(P, Release::Redeliver);
        assert_eq!(group.settle(P, Verdict::Hold { until, more: true, eager: false }), None);
        assert_eq!(group.take(1), [P], "one more look");
        assert_eq!(group.settle(P, Verdict::Hold { until, more: true, eager: false }), Some(Deadline::Set(until)));
    }

    #[test]
    fn nobody_parks_in_a_closed_group() {
        let mut group = GroupState::default();
        let (early, late) = (Waiter::new(), Waiter::new());
        group.park(&early);
        group.close();
        assert!(early.was_woken());
        group.park(&late);
        assert!(late.was_woken());
    }

    #[test]
    fn parked_pops_are_woken_in_turn_and_once() {
        let mut group = GroupState::default();
        let (first, second) = (Waiter::new(), Waiter::new());
        group.park(&first);
        group.park(&second);
        group.mark(P);
        assert!(first.was_woken() && !second.was_woken());
        group.mark(PartitionId(8));
        assert!(second.was_woken());
        let late = Waiter::new();
        group.park(&late);
        assert!(late.was_woken(), "something is ready already");
    }
}
