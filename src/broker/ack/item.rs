//! Ack items and their answers.

use std::sync::Arc;

use thiserror::Error;
use uuid::Uuid;

use crate::broker::ack_decision::AckStatus;
use crate::ids::{GroupId, LeaseId, PartitionId, TransactionHash};

pub use crate::broker::ready_group::Release;
pub use crate::store::acks::LeaseClaim;

impl LeaseClaim {
    /// Reads a `leaseId`; empty is absent.
    pub fn parse(text: &str) -> LeaseClaim {
        if text.is_empty() {
            return LeaseClaim::Absent;
        }
        LeaseId::parse(text).map_or(LeaseClaim::Foreign, LeaseClaim::Id)
    }
}

/// The `partitionId` of an item.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AckTarget {
    /// A UUID, of this database or not.
    Partition(Uuid),
    /// Any other text.
    NotUuid(Arc<str>),
}

impl AckTarget {
    /// Reads a `partitionId`.
    pub fn parse(text: &str) -> AckTarget {
        Uuid::try_parse(text).map_or_else(|_| AckTarget::NotUuid(text.into()), AckTarget::Partition)
    }
}

/// One acknowledgement.
#[derive(Clone, Debug)]
pub struct AckItem {
    /// Where.
    pub target: AckTarget,
    /// Under which lease.
    pub lease: LeaseClaim,
    /// Which message; `None` for an empty id, which resolves to nothing.
    pub transaction: Option<TransactionHash>,
    /// What about it.
    pub status: AckStatus,
    /// Why not, for the dead-letter row. Not empty.
    pub reason: Option<Box<str>>,
}

/// Why an item was not carried out. The texts are the wire's (`spec/ack.md` §6).
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum AckError {
    /// The group has no cursor on that partition.
    #[error("consumer not found")]
    ConsumerNotFound,
    /// A lease id came that is not the live lease.
    #[error("invalid or expired lease")]
    InvalidLease,
    /// A signal below the cursor.
    #[error("already committed: the cursor moved past this message before this ack")]
    AlreadyCommitted,
    /// The id is nowhere in the window.
    #[error(
        "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers"
    )]
    Unresolvable,
    /// The commit that carried it failed, or its outcome stayed unknown.
    #[error("ack flush failed; lease will expire and redeliver")]
    FlushFailed,
    /// No connection within the checkout timeout, or more acks than the broker holds.
    #[error("pool")]
    Pool,
    /// Retention deleted the message that was to be filed.
    #[error("dlq rejected: the message was deleted by retention")]
    DlqRejected,
    /// `partitionId` is no UUID.
    #[error("invalid input syntax for type uuid: \"{0}\"")]
    NotUuid(Arc<str>),
    /// The database refused.
    #[error("{0}")]
    Database(Arc<str>),
}

/// How an item was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acked {
    /// As told.
    Done {
        /// A dead-letter row was filed for the message of this item.
        dlq: bool,
    },
    /// A completed that was already committed.
    Noop,
}

/// The answer to one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AckAnswer {
    /// What became of it.
    pub outcome: Result<Acked, AckError>,
    /// Whether this call ended the lease of that (partition, group).
    pub lease_released: bool,
    /// Positions retired without a delivery, on the item that closed a conflating lease.
    pub conflated: Option<i64>,
}

impl AckAnswer {
    /// An answer to an item that did nothing.
    pub fn refused(error: AckError) -> AckAnswer {
        AckAnswer { outcome: Err(error), lease_released: false, conflated: None }
    }
}

/// Told, after COMMIT, whenever an ack made a (partition, group) claimable, so that parked pops wake.
///
/// Called from the ack path: it must not block.
pub trait ReleaseListener: Send + Sync + 'static {
    /// See the trait.
    fn released(&self, partition: PartitionId, group: GroupId, release: Release);
}

impl<F: Fn(PartitionId, GroupId, Release) + Send + Sync + 'static> ReleaseListener for F {
    fn released(&self, partition: PartitionId, group: GroupId, release: Release) {
        self(partition, group, release);
    }
}
