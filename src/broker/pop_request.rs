//! What a pop asks for and how it ends.

use std::time::Duration;

use super::autopilot::Chosen;
use super::delivery::Delivered;
use super::feed::Labels;
use super::group::Subscription;
use crate::ids::LeaseId;

/// Most messages of one answer (`spec/push-pop.md` §9).
pub const BATCH_MAX: i64 = 10_000;
/// Longest long poll (`spec/push-pop.md` §7.2).
pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// Which partitions a pop may serve (`spec/push-pop.md` §7.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Any of one queue.
    Queue(String),
    /// Exactly this one of a queue.
    Partition(String, String),
    /// Any of every queue whose labels match; at least one is given.
    Labels(Labels),
}

/// One pop.
#[derive(Clone, Debug)]
pub struct PopRequest {
    /// Where from.
    pub scope: Scope,
    /// Reading group.
    pub group: String,
    /// How much it takes, as it says or by default.
    pub sizes: Sizes,
    /// What of that it leaves to the broker.
    pub delegated: Delegated,
    /// Commit at once instead of leasing.
    pub auto_ack: bool,
    /// Park when there is nothing.
    pub wait: bool,
    /// How long at most, from arrival.
    pub timeout: Duration,
    /// Lease length of this call, seconds, if positive.
    pub lease_seconds: Option<i64>,
    /// Where the group starts at first contact.
    pub subscription: Subscription,
    /// What the request declares about conflation; absent is no declaration (`spec/push-pop.md` §7.12).
    pub conflation: Option<bool>,
}

/// Most partitions of a conflating pop (`spec/push-pop.md` §7.12).
const CONFLATED_MAX: i64 = 64;

/// How much one pop takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Message budget, 1 to [`BATCH_MAX`].
    pub batch: i64,
    /// Partition budget, at least 1, if there is one.
    pub partitions: Option<i64>,
}

impl Sizes {
    /// Partitions to take at most.
    pub fn width(&self, conflating: bool) -> i64 {
        if conflating { self.partitions.unwrap_or(self.batch).min(CONFLATED_MAX) } else { self.partitions.unwrap_or(1) }
    }
}

/// The sizes that a request leaves to the broker (`spec/push-pop.md` §7.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delegated {
    /// The number of messages.
    pub batch: bool,
    /// The number of partitions.
    pub partitions: bool,
}

impl Delegated {
    /// Whether there is anything to choose.
    pub fn any(&self) -> bool {
        self.batch || self.partitions
    }
}

/// How a pop ended.
#[derive(Debug, Default)]
pub struct Popped {
    /// What was delivered, if anything.
    pub answer: Option<PopAnswer>,
    /// What to tell about conflation.
    pub policy: Policy,
    /// What to tell about sizes that the broker chose.
    pub chosen: Option<Chosen>,
}

/// What an answer tells about conflation; with either it has a body even when empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// It was applied.
    pub conflation: bool,
    /// The request declares another policy than the group has.
    pub conflict: bool,
}

impl Policy {
    /// Takes the policy of one group in.
    pub fn add(&mut self, request: &PopRequest, stored: bool) {
        self.conflation |= stored;
        self.conflict |= request.conflation.is_some_and(|declared| declared != stored);
    }
}

/// What was delivered.
#[derive(Debug)]
pub struct PopAnswer {
    /// Lease id of all messages; `None` with `autoAck`.
    pub lease: Option<LeaseId>,
    /// The messages by partition, in claim order; every one has some.
    pub delivered: Vec<Delivered>,
}
