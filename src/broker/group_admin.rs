//! What an operator does to consumer groups (`spec/admin.md` §7.4 to §7.6): seek, delete, move the subscription.
//!
//! PostgreSQL is changed first, in one transaction; then everything that this broker remembers of the group is forgotten, and
//! the others are told to do the same. Whoever does not hear of it is only slower: an ack of a stale lease is refused by the
//! row, a claim for a group that is gone says so, and the periodic walk finds what became ready.

use std::sync::Arc;

use chrono::{DateTime, Utc};

use super::ack::AckPipeline;
use super::activity::Activity;
use super::error::{BrokerError, BrokerResult};
use super::group::GroupDirectory;
use super::peers::Peers;
use super::ready::ReadyIndex;
use super::ready_group::Release;
use crate::ids::{GroupId, PartitionId, QueueId};
pub use crate::store::seeks::SeekTo;
use crate::store::seeks::Sought;
use crate::store::{Store, StoreError};

/// Longest text that may be a timestamp.
const TIMESTAMP_BYTES_MAX: usize = 128;

/// What a broker remembers of groups, in one hand. A cheap clone.
#[derive(Clone, Debug)]
pub struct GroupMemory {
    /// Keys by name.
    pub groups: GroupDirectory,
    /// Ready partitions and parked pops.
    pub ready: ReadyIndex,
    /// Leases.
    pub ack: AckPipeline,
    /// Whose snapshots are out of date.
    pub activity: Arc<Activity>,
}

impl GroupMemory {
    /// Every cursor of these groups may have moved or gone: nothing that is remembered of them holds any more.
    pub fn forget_groups(&self, ids: &[GroupId]) {
        self.groups.forget_groups(ids);
        for id in ids {
            self.ack.forget_group(*id);
            self.ready.forget_group(*id);
        }
        // Pops that wait by name or label are in no group's list.
        self.ready.keyed().wake_everybody();
    }

    /// One cursor was moved, and whatever was leased there is free.
    pub fn forget_cursor(&self, queue: QueueId, group: GroupId, partition: PartitionId) {
        self.ack.forget_lease(partition, group);
        self.ready.released(group, partition, Release::Redeliver);
        self.ready.wake_waiting(queue, partition);
    }

    /// A queue is gone.
    pub fn forget_queue(&self, queue: QueueId) {
        self.groups.forget_queue(queue);
        self.ready.forget_queue(queue);
        self.ack.forget_queue(queue);
        self.activity.forget_queue(queue);
    }
}

/// The operator's side of the groups of one broker. A cheap clone.
#[derive(Clone, Debug)]
pub struct GroupAdmin {
    store: Store,
    memory: GroupMemory,
    peers: Peers,
}

impl GroupAdmin {
    /// Over what this broker remembers and whom it tells.
    pub fn new(store: Store, memory: GroupMemory, peers: Peers) -> GroupAdmin {
        GroupAdmin { store, memory, peers }
    }

    /// Reads a timestamp as PostgreSQL does; refuses what is none, naming the field.
    pub async fn timestamp(&self, field: &str, text: &str) -> BrokerResult<DateTime<Utc>> {
        let wrong = || BrokerError::Invalid(format!("{field} is not a timestamp"));
        if text.len() > TIMESTAMP_BYTES_MAX || text.contains('\0') {
            return Err(wrong());
        }
        self.store.read_timestamp(text).await?.ok_or_else(wrong)
    }

    /// Moves the group's cursors of a queue, or of one partition of it. Answers how many partitions that names; `None`:
    /// there are none.
    pub async fn seek(
        &self,
        group: &str,
        queue: &str,
        partition: Option<&str>,
        to: SeekTo,
    ) -> BrokerResult<Option<i64>> {
        let sought = match self.store.seek(queue, partition, group, to).await {
            Ok(None) => return Ok(None),
            Ok(Some(sought)) => sought,
            Err(error) => {
                self.forget_in_doubt(&error, group, Some(queue)).await;
                return Err(error.into());
            }
        };
        match sought {
            Sought { queue, group, partition: Some(partition), .. } => {
                self.memory.activity.touched(queue);
                self.memory.forget_cursor(queue, group, partition);
                self.peers.cursor_moved(queue, group, partition);
            }
            Sought { queue, group, .. } => {
                self.memory.activity.touched(queue);
                self.forget(&[group]);
            }
        }
        Ok(Some(sought.partitions))
    }

    /// Deletes the group's cursors, of one queue or of all, and with `registration` what it subscribed to. Answers how many
    /// cursors there were. Its next pop is a first contact.
    pub async fn delete(&self, group: &str, queue: Option<&str>, registration: bool) -> BrokerResult<i64> {
        match self.store.delete_group(group, queue, registration).await {
            Ok((groups, deleted)) => {
                groups.iter().for_each(|(_, queue)| self.memory.activity.touched(*queue));
                self.forget(&groups.into_iter().map(|(id, _)| id).collect::<Vec<_>>());
                Ok(deleted)
            }
            Err(error) => {
                self.forget_in_doubt(&error, group, queue).await;
                Err(error.into())
            }
        }
    }

    /// Moves the instant from which the group reads partitions that it has not met, on every queue. Answers how many
    /// registrations there are.
    pub async fn move_subscription(&self, group: &str, at: DateTime<Utc>) -> BrokerResult<usize> {
        let ids = self.store.move_subscriptions(group, at).await?;
        self.forget(&ids);
        Ok(ids.len())
    }

    fn forget(&self, ids: &[GroupId]) {
        self.memory.forget_groups(ids);
        self.peers.groups_changed(ids);
    }

    /// A commit whose outcome is unknown may have happened: forgetting costs little. If the groups cannot be found now, the
    /// periodic walk finds what became ready.
    async fn forget_in_doubt(&self, error: &StoreError, group: &str, queue: Option<&str>) {
        if !matches!(error, StoreError::OutcomeUnknown { .. }) {
            return;
        }
        let mut known = self.memory.groups.known(group);
        if let Some(name) = queue
            && let Ok(found) = self.store.find_queues(&[name.to_owned()]).await
            && let Some(queue) = found.first()
        {
            known.retain(|(of, _)| *of == queue.id);
            if let Ok(Some(row)) = self.store.find_group(queue.id, group).await {
                known.push((queue.id, row.id));
            }
        }
        let ids: Vec<GroupId> = known.into_iter().map(|(_, id)| id).collect();
        self.forget(&ids);
    }
}
