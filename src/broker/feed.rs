//! The queues of one label as one group sees them: which it has met, which of those have something, and which pops wait.
//!
//! A group's ready index tells its feeds of every partition that becomes ready, under its own lock; a feed never asks back
//! while it holds its lock. Queues that have something take turns: whoever is visited stands last.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pop_request::{Policy, PopRequest};
use super::ready::ReadyGroup;
use super::ready_group::Listener;
use super::waiter::Waiter;
use crate::ids::QueueId;

/// What a discovery pop names; at least one is given.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Labels {
    /// Exact namespace.
    pub namespace: Option<String>,
    /// Exact task.
    pub task: Option<String>,
}

impl Labels {
    /// Whether a queue with these labels is meant.
    pub fn matches(&self, namespace: &str, task: &str) -> bool {
        self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
            && self.task.as_ref().is_none_or(|wanted| wanted == task)
    }
}

/// A label as one group sees it.
#[derive(Debug)]
pub struct Feed {
    /// Which queues.
    pub labels: Labels,
    /// The group.
    pub group: String,
    state: Mutex<State>,
    /// Held by whoever meets the next queues.
    pub(super) meeting: tokio::sync::Mutex<()>,
    /// When a pop last used it, in seconds of its owner's clock.
    pub(super) used_seconds: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    met: HashMap<QueueId, Met>,
    /// Queues that carry the label and that the group has not met here.
    fresh: BTreeSet<QueueId>,
    /// Met queues that may have something, by turn.
    ready: BTreeMap<u64, QueueId>,
    turns: u64,
    conflating: usize,
    waiters: BTreeMap<u64, Arc<Waiter>>,
}

#[derive(Debug)]
struct Met {
    group: Arc<ReadyGroup>,
    conflating: bool,
    turn: Option<u64>,
}

impl Feed {
    /// A feed that has met nobody yet.
    pub fn new(labels: Labels, group: String, queues: impl IntoIterator<Item = QueueId>) -> Feed {
        let state = State { fresh: queues.into_iter().collect(), ..State::default() };
        Feed {
            labels,
            group,
            state: Mutex::new(state),
            meeting: tokio::sync::Mutex::default(),
            used_seconds: AtomicU64::default(),
        }
    }

    /// A queue has these labels now.
    pub fn labelled(&self, queue: QueueId, namespace: &str, task: &str) {
        let mut state = self.state();
        if !self.labels.matches(namespace, task) {
            state.remove(queue);
        } else if !state.met.contains_key(&queue) && state.fresh.insert(queue) {
            state.wake_one();
        }
    }

    /// Queues to meet next, at most so many.
    pub fn fresh(&self, count: usize) -> Vec<QueueId> {
        self.state().fresh.iter().take(count).copied().collect()
    }

    /// Whether there are queues to meet.
    pub fn has_fresh(&self) -> bool {
        !self.state().fresh.is_empty()
    }

    /// The group has met this queue; if it still carries the label, what is ready there is offered from now on.
    pub fn meet(self: &Arc<Feed>, queue: QueueId, group: Arc<ReadyGroup>, conflating: bool) {
        {
            let mut state = self.state();
            if !state.fresh.remove(&queue) {
                return;
            }
            state.conflating += usize::from(conflating);
            state.met.insert(queue, Met { group: group.clone(), conflating, turn: None });
        }
        let listener: Arc<dyn Listener> = self.clone();
        group.listen(Arc::downgrade(&listener));
    }

    /// There is no such queue.
    pub fn remove(&self, queue: QueueId) {
        self.state().remove(queue);
    }

    /// Queues that may have something now.
    pub fn ready(&self) -> usize {
        self.state().ready.len()
    }

    /// The queue whose turn it is, and whether its group conflates. It keeps being listed, behind all others.
    pub fn next_ready(&self) -> Option<(Arc<ReadyGroup>, bool)> {
        let state = &mut *self.state();
        let (_, queue) = state.ready.pop_first()?;
        let met = state.met.get_mut(&queue)?;
        state.turns += 1;
        met.turn = Some(state.turns);
        state.ready.insert(state.turns, queue);
        Some((met.group.clone(), met.conflating))
    }

    /// Nothing is ready in this queue. Only its group says so, under its own lock.
    pub fn unlist(&self, queue: QueueId) {
        let state = &mut *self.state();
        if let Some(turn) = state.met.get_mut(&queue).and_then(|met| met.turn.take()) {
            state.ready.remove(&turn);
        }
    }

    /// What an answer says about conflation.
    pub fn policy(&self, request: &PopRequest) -> Policy {
        let state = self.state();
        let mut policy = Policy::default();
        if state.conflating > 0 {
            policy.add(request, true);
        }
        if state.met.len() > state.conflating {
            policy.add(request, false);
        }
        if state.met.is_empty() {
            policy.conflation = request.conflation == Some(true);
        }
        policy
    }

    /// Parks a pop; it is woken at once if something is to be looked at.
    pub fn park(&self, waiter: &Arc<Waiter>) {
        let mut state = self.state();
        state.waiters.insert(waiter.ticket(), waiter.clone());
        if !state.is_idle() {
            state.wake_one();
        }
    }

    /// Removes a parked pop. If it was woken and never got to look, the next one is woken in its place.
    pub fn unpark(&self, waiter: &Waiter, pass_on: bool) {
        let mut state = self.state();
        state.waiters.remove(&waiter.ticket());
        if pass_on && !state.is_idle() {
            state.wake_one();
        }
    }

    /// Notes that it is in use.
    pub(super) fn used(&self, second: u64) {
        self.used_seconds.store(second, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every method leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for Feed {
    fn became_ready(&self, queue: QueueId) {
        let state = &mut *self.state();
        let Some(met) = state.met.get_mut(&queue) else { return };
        if met.turn.is_none() {
            state.turns += 1;
            met.turn = Some(state.turns);
            state.ready.insert(state.turns, queue);
        }
        state.wake_one();
    }

    fn went_away(&self, queue: QueueId) {
        let mut state = self.state();
        if state.remove(queue) {
            state.fresh.insert(queue);
            state.wake_one();
        }
    }
}

impl State {
    /// Whether it was known.
    fn remove(&mut self, queue: QueueId) -> bool {
        let Some(met) = self.met.remove(&queue) else { return self.fresh.remove(&queue) };
        self.conflating -= usize::from(met.conflating);
        if let Some(turn) = met.turn {
            self.ready.remove(&turn);
        }
        true
    }

    fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.fresh.is_empty()
    }

    /// Wakes the pop that has waited longest.
    fn wake_one(&mut self) {
        while let Some((_, waiter)) = self.waiters.pop_first() {
            if waiter.wake() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::ready::ReadyGroup;
    use crate::ids::{GroupId, PartitionId};

    fn feed(queues: i32) -> Arc<Feed> {
        let labels = Labels { namespace: Some("ns".into()), task: None };
        Arc::new(Feed::new(labels, "g".into(), (0..queues).map(QueueId)))
    }

    fn met(feed: &Arc<Feed>, queue: i32) -> Arc<ReadyGroup> {
        let group = Arc::new(ReadyGroup::new(QueueId(queue), GroupId(queue), 0));
        group.walked_for_test();
        feed.meet(QueueId(queue), group.clone(), false);
        group
    }

    /// What a pop does with the queue whose turn it is: takes one partition.
    fn visit(feed: &Feed) -> Option<i32> {
        let (group, _) = feed.next_ready()?;
        let taken = group.take_for_test(1);
        group.settle_listing(feed);
        (!taken.is_empty()).then_some(group.queue.0)
    }

    #[test]
    fn queues_with_something_take_turns_and_the_others_are_not_looked_at() {
        let feed = feed(1_000);
        let groups: Vec<_> = (0..1_000).map(|queue| met(&feed, queue)).collect();
        assert_eq!((feed.ready(), visit(&feed)), (0, None));
        for partition in 0..3 {
            groups[7].mark_for_test(PartitionId(partition));
        }
        groups[900].mark_for_test(PartitionId(9));
        assert_eq!(feed.ready(), 2);
        let visits: Vec<_> = std::iter::from_fn(|| visit(&feed)).collect();
        assert_eq!(visits, [7, 900, 7, 7]);
        assert_eq!(feed.ready(), 0);
    }

    #[test]
    fn what_is_ready_when_a_queue_is_met_is_offered() {
        let feed = feed(1);
        let group = Arc::new(ReadyGroup::new(QueueId(0), GroupId(0), 0));
        group.mark_for_test(PartitionId(1));
        feed.meet(QueueId(0), group, false);
        assert_eq!(visit(&feed), Some(0));
    }

    #[test]
    fn a_queue_that_is_not_walked_through_yet_is_looked_at_until_it_is() {
        let feed = feed(1);
        let group = Arc::new(ReadyGroup::new(QueueId(0), GroupId(0), 0));
        feed.meet(QueueId(0), group.clone(), false);
        assert_eq!((visit(&feed), feed.ready()), (None, 1));
        group.walked_for_test();
        assert_eq!((visit(&feed), feed.ready()), (None, 0));
    }

    #[test]
    fn labels_come_and_go() {
        let feed = feed(1);
        let group = met(&feed, 0);
        assert!(!feed.has_fresh());
        feed.labelled(QueueId(0), "ns", "any");
        feed.labelled(QueueId(5), "other", "");
        assert!(!feed.has_fresh(), "met already, and not meant");
        feed.labelled(QueueId(0), "other", "");
        group.mark_for_test(PartitionId(1));
        assert_eq!(feed.ready(), 0, "it does not carry the label any more");
        feed.labelled(QueueId(0), "ns", "");
        assert_eq!(feed.fresh(9), [QueueId(0)]);
        feed.meet(QueueId(0), group, false);
        assert_eq!(visit(&feed), Some(0));
    }

    #[test]
    fn a_group_that_goes_away_is_met_again() {
        let feed = feed(2);
        let group = met(&feed, 0);
        group.mark_for_test(PartitionId(1));
        group.close_for_test();
        assert_eq!((feed.ready(), feed.fresh(9)), (0, vec![QueueId(0), QueueId(1)]));
        feed.meet(QueueId(0), group, false);
        assert_eq!(feed.fresh(9), [QueueId(0), QueueId(1)], "one that is closed is not kept");
    }

    #[test]
    fn a_parked_pop_is_woken_by_what_concerns_it_and_one_at_a_time() {
        let feed = feed(1);
        let group = met(&feed, 0);
        let (first, second) = (Waiter::new(), Waiter::new());
        feed.park(&first);
        feed.park(&second);
        assert!(!first.was_woken());
        group.mark_for_test(PartitionId(1));
        assert!(first.was_woken() && !second.was_woken());
        feed.unpark(&first, true);
        assert!(second.was_woken(), "the wake-up that the first did not use is passed on");
        assert_eq!(visit(&feed), Some(0));
        let third = Waiter::new();
        feed.park(&third);
        assert!(!third.was_woken());
        feed.labelled(QueueId(9), "ns", "");
        assert!(third.was_woken(), "a queue to meet");
    }
}
