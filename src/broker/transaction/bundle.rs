//! One transaction bundle: what a request asks for, and what it is answered (`spec/transactions-kv-timers.md` §2).

use std::sync::Arc;

use thiserror::Error;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::broker::ack::{AckItem, LeaseClaim};
use crate::broker::push::{Packed, PushItem};
use crate::broker::resolver::Resolver;
use crate::ids::{Offset, PartitionId};
use crate::store::acks::CursorRow;
use crate::store::partitions::PartitionKey;

/// One ack operation.
#[derive(Clone, Debug)]
pub struct BundleAck {
    /// Its consumer group.
    pub group: Arc<str>,
    /// The rest.
    pub item: AckItem,
}

/// A decoded request.
#[derive(Debug)]
pub struct Bundle<'a> {
    /// Pushed items in request order.
    pub pushes: Vec<PushItem<'a>>,
    /// Acks in request order.
    pub acks: &'a [BundleAck],
    /// `requiredLeases`, without the empty ones.
    pub hints: &'a [LeaseClaim],
}

/// What a committed bundle says about one pushed item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BundlePushed {
    /// Id of the stored message.
    pub message_id: Uuid,
    /// The id that stands for a transaction id that the request left out.
    pub minted_id: Uuid,
    /// An earlier item of the same bundle has the same key; this one wrote nothing.
    pub duplicate: bool,
}

/// A committed bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Per pushed item.
    pub pushes: Vec<BundlePushed>,
    /// Per ack: whether it filed a dead letter.
    pub dead_lettered: Vec<bool>,
}

/// Why a bundle was rolled back. The texts are the wire's (`spec/transactions-kv-timers.md` §2.7).
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A pushed id is stored inside the window.
    #[error("QDUP duplicate messages in queue \"{queue}\" partition \"{partition}\"; transaction rolled back")]
    Duplicate {
        /// Queue of the first such item.
        queue: Arc<str>,
        /// Its partition.
        partition: Arc<str>,
    },
    /// An acked id resolves nowhere, or above the leased batch.
    #[error("QTXN ack references unknown transactionId; transaction rolled back")]
    UnknownTransaction,
    /// Not the live lease.
    #[error("QTXN invalid or expired lease; transaction rolled back")]
    InvalidLease,
    /// The group has no cursor there.
    #[error("QTXN consumer not found; transaction rolled back")]
    ConsumerNotFound,
    /// No partition of this database.
    #[error("QTXN unknown partition; transaction rolled back")]
    UnknownPartition,
    /// Retention deleted the message that was to be filed.
    #[error("QTXN dlq rejected: the message was deleted by retention; transaction rolled back")]
    DlqRejected,
    /// Anything else.
    #[error("{0}")]
    Database(Arc<str>),
}

impl Refusal {
    /// The closed list that clients branch on.
    pub fn reason(&self) -> &'static str {
        match self {
            Refusal::Duplicate { .. } => "duplicate",
            Refusal::Database(_) => "db_error",
            _ => "ack_rejected",
        }
    }
}

/// Which lease the cursor must be under (§2.4, and harder where the request only hints, §11 Q4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The request names no lease at all: no check.
    None,
    /// Every one of these must be the live lease.
    All(Vec<LeaseClaim>),
    /// The live lease must be among these.
    Any(Arc<[LeaseClaim]>),
}

impl Fence {
    /// Whether the row lets the acks through.
    pub fn admits(&self, row: &CursorRow) -> bool {
        match self {
            Fence::None => true,
            Fence::All(claims) => claims.iter().all(|claim| row.admits(*claim)),
            Fence::Any(claims) => claims.iter().any(|claim| row.admits(*claim)),
        }
    }
}

/// The messages of one bundle for one partition.
#[derive(Debug)]
pub struct PushPart {
    /// Where to.
    pub key: PartitionKey,
    /// Name of the queue.
    pub queue: Arc<str>,
    /// Deduplication window of the queue, seconds, 0 = off.
    pub window_seconds: i32,
    /// The messages.
    pub packed: Packed,
}

/// The acks of one bundle on one cursor, decided together.
#[derive(Debug)]
pub struct AckPart {
    /// The partition.
    pub partition: PartitionId,
    /// The group.
    pub group: Arc<str>,
    /// The lease that it needs.
    pub fence: Fence,
    /// The items in request order.
    pub items: Vec<AckItem>,
    /// Their places in the request.
    pub places: Vec<usize>,
    /// What a search outside the flush found.
    pub searched: Option<Searched>,
}

/// Where the ids of a part are, as long as its cursor is where it was.
#[derive(Debug)]
pub struct Searched {
    /// The cursor at the time.
    pub committed: Offset,
    /// Its span at the time.
    pub batch_end: Option<Offset>,
    /// Whether the span was leased.
    pub leased: bool,
    /// The finds; what is missing is nowhere.
    pub resolver: Resolver,
    /// Slot of each item.
    pub slots: Vec<Option<usize>>,
}

impl Searched {
    /// Whether it still says the truth about this row.
    pub fn holds(&self, row: &CursorRow) -> bool {
        (self.committed, self.batch_end, self.leased) == (row.committed, row.batch_end, row.leased())
    }
}

/// A bundle on its way into a flush.
#[derive(Debug)]
pub struct Job {
    /// Messages, by partition, in request order.
    pub pushes: Vec<PushPart>,
    /// Acks, ascending by partition, then group.
    pub acks: Vec<AckPart>,
    /// Known already: an ack that cannot be carried out. A duplicate is reported before it.
    pub doomed: Option<Refusal>,
}

impl Job {
    /// Bytes that it stores.
    pub fn bytes(&self) -> usize {
        self.pushes.iter().map(|part| part.packed.body.len()).sum()
    }
}

/// What became of a job.
#[derive(Debug)]
pub enum Verdict {
    /// Durable. Per ack part, per item: whether it filed a dead letter.
    Committed(Vec<Vec<bool>>),
    /// Rolled back; it left nothing.
    Refused(Refusal),
    /// Rolled back: ids of these parts are not in the pages that a flush reads; search for them and come again.
    Search(Vec<usize>),
    /// Rolled back: a queue was deleted while the bundle was on its way; resolve it again.
    QueueGone,
    /// Not committed: no connection.
    NoDatabase,
    /// The answer to the commit was lost, and its outcome could not be found out.
    Unknown,
}

/// A job that waits for its verdict; it comes back with it.
#[derive(Debug)]
pub struct Waiting {
    /// The job.
    pub job: Job,
    /// Who waits.
    pub reply: oneshot::Sender<(Job, Verdict)>,
}

impl Waiting {
    /// Hands the job back.
    pub fn answer(self, verdict: Verdict) {
        // A client that hung up does not care.
        let _ = self.reply.send((self.job, verdict));
    }
}
