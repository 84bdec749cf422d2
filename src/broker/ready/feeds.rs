//! The side of the ready index that discovery sees: groups that are met many at a time, and who listens to them.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::{ReadyGroup, ReadyIndex};
use crate::broker::feed::Feed;
use crate::broker::ready_group::Listener;
use crate::ids::{GroupId, QueueId};
use crate::store::partitions::PartitionCandidate;

impl ReadyIndex {
    /// The group's entry; a new one is not walked yet, nor is anybody set to it.
    pub fn unwalked(&self, queue: QueueId, id: GroupId) -> Arc<ReadyGroup> {
        self.entry(queue, id).0
    }

    /// Takes in the first partitions of groups that were not walked yet. Whoever has more than `each` is walked on from
    /// there.
    pub async fn walked_first(
        &self,
        groups: &[(QueueId, GroupId)],
        candidates: Vec<(GroupId, PartitionCandidate)>,
        each: i64,
    ) {
        super::super::meter::meter().partitions_walked.increment(candidates.len() as u64);
        let mut by_group: HashMap<GroupId, Vec<PartitionCandidate>> = HashMap::new();
        for (group, candidate) in candidates {
            by_group.entry(group).or_default().push(candidate);
        }
        for (queue, id) in groups {
            let group = self.unwalked(*queue, *id);
            let seen = by_group.remove(id).unwrap_or_default();
            let mut after = group.seed_after.lock().await;
            if after.is_some() || group.is_walked() {
                continue;
            }
            for candidate in seen.iter().filter(|candidate| candidate.pending) {
                self.apply(&group, candidate.id, group.state().mark(candidate.id));
            }
            if (seen.len() as i64) < each {
                group.seeded.store(true, Ordering::Release);
            } else {
                *after = seen.into_iter().map(|candidate| candidate.name).max();
                drop(after);
                self.walk(&group);
            }
        }
    }
}

impl ReadyGroup {
    /// Whether its queue has been walked through.
    pub fn is_walked(&self) -> bool {
        self.seeded.load(Ordering::Acquire)
    }

    /// From now on this listener hears of every partition that becomes ready; at once if something is ready, or may turn out
    /// to be when the queue has been walked through: whoever looks then walks on.
    pub fn listen(&self, listener: Weak<dyn Listener>) {
        let mut state = self.state();
        state.listen(self.queue, listener.clone());
        if let Some(listener) = listener.upgrade().filter(|_| !self.is_walked()) {
            listener.became_ready(self.queue);
        }
    }

    /// Takes the group off the feed's list if nothing is ready here.
    pub fn settle_listing(&self, feed: &Feed) {
        // Asked before looking: the walk may find its last partitions and end between the two.
        let is_walked = self.is_walked();
        let state = self.state();
        if is_walked && !state.has_ready() {
            feed.unlist(self.queue);
        }
        drop(state);
    }
}

#[cfg(test)]
impl ReadyGroup {
    /// As after a walk that found nothing.
    pub fn walked_for_test(&self) {
        self.seeded.store(true, Ordering::Release);
    }

    /// Marks a partition.
    pub fn mark_for_test(&self, partition: crate::ids::PartitionId) {
        self.state().mark(partition);
    }

    /// Takes partitions, of which nothing is heard again.
    pub fn take_for_test(&self, count: usize) -> Vec<crate::ids::PartitionId> {
        self.state().take(count)
    }

    /// Closes it, as its deletion does.
    pub fn close_for_test(&self) {
        self.state().close();
    }
}
