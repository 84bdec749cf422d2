//! Dead letters: listed, deleted, and replayed (`spec/admin.md` §5.3, §6).
//!
//! A replay is a *move*: one push job that names the dead letter. The flush that stores the message locks the row first and
//! deletes it in the same transaction, so it is stored once however many ask, and never lost.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use thiserror::Error;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::activity::Activity;
use super::encryption::Encryption;
use super::error::{BrokerError, BrokerResult};
use super::push::{JobError, Packed};
use super::push_fusion::{PushFusion, PushJob};
use super::queue::QueueDirectory;
use super::segment::Frame;
use super::spool::Spool;
use crate::ids::{IdSpace, Offset, PartitionId, QueueId};
use crate::store::Store;
use crate::store::dead_letters::{DeadLetter, LetterAddress, LetterFilter};
use crate::store::partitions::PartitionKey;

/// Group of dead letters that a timer left; they cannot be replayed (`spec/transactions-kv-timers.md` Q12).
const TIMER_GROUP: &str = "__timer__";
/// Most rows of one listing.
pub const LIST_ROWS_MAX: i64 = 10_000;
/// Payload bytes after which a listing stops; one row is always answered.
const LIST_BYTES_MAX: i64 = 64 << 20;
/// Rows per transaction of a purge.
const PURGE_ROWS: i64 = 1_000;
/// Times that a replay follows a queue that is deleted and made again under it.
const QUEUE_GONE_RETRIES: usize = 3;

/// A listing (`spec/admin.md` §6.2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListRequest {
    /// Exact queue name.
    pub queue: Option<String>,
    /// Exact group name.
    pub group: Option<String>,
    /// Most rows, 0 to [`LIST_ROWS_MAX`].
    pub limit: i64,
    /// Rows to skip.
    pub offset: i64,
}

/// One row of a listing.
#[derive(Clone, Debug)]
pub struct ListedLetter {
    /// Its id.
    pub id: Uuid,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Partition of the message.
    pub partition: PartitionId,
    /// Name of its queue.
    pub queue_name: String,
    /// Name of its partition.
    pub partition_name: String,
    /// The group that gave up.
    pub group_name: String,
    /// Why.
    pub reason: String,
    /// Failed acks charged when it was filed.
    pub retry_count: i32,
    /// JSON text: opened if it was encrypted and the key fits, else as stored.
    pub data: Vec<u8>,
    /// Whether it was opened for this answer.
    pub was_encrypted: bool,
    /// When it was filed.
    pub failed_at: DateTime<Utc>,
}

/// Which dead letter to replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// By row id, as the client wrote it.
    Id(String),
    /// The newest of a message: partition id and transaction id, as the client wrote them.
    Message(String, String),
}

/// Where a replay goes; each half defaults to where the message came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Destination {
    /// Queue name.
    pub queue: Option<String>,
    /// Partition name.
    pub partition: Option<String>,
}

/// A replay that was carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// The dead letter.
    pub letter: Uuid,
    /// The group that had given up.
    pub group_name: String,
    /// Transaction id of the dead letter.
    pub original_transaction_id: String,
    /// Where it was to go.
    pub queue: String,
    /// Where it was to go.
    pub partition: String,
    /// Transaction id under which it is stored.
    pub transaction_id: String,
    /// Id of the stored message; `None`: that transaction id was stored before, so nothing was written and the row stays.
    pub message_id: Option<Uuid>,
    /// Where it, or what was stored before, is.
    pub offset: Offset,
}

/// Why nothing was replayed.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// No such dead letter, or somebody else has moved it.
    #[error("Message not found")]
    Gone,
    /// It is a timer's.
    #[error("timer dead letters cannot be replayed")]
    Timer,
    /// It could not be looked up; nothing happened.
    #[error("dlq lookup failed: {0}")]
    Lookup(String),
    /// The move was refused; nothing happened.
    #[error("dlq move failed: {0}")]
    Refused(String),
    /// The connection broke in the commit and what became of it could not be found out.
    #[error("dlq move failed: {0}")]
    Unknown(String),
    /// No database, no room, not booted: nothing happened.
    #[error("{0}")]
    Broker(#[from] BrokerError),
}

/// The dead letters of one broker. A cheap clone.
#[derive(Clone, Debug)]
pub struct DeadLetters {
    store: Store,
    queues: QueueDirectory,
    fusion: PushFusion,
    encryption: Encryption,
    spool: Spool,
    activity: Arc<Activity>,
}

impl DeadLetters {
    /// Over the queues and the push fusion of this broker.
    pub fn new(
        store: Store,
        queues: QueueDirectory,
        fusion: PushFusion,
        encryption: Encryption,
        spool: Spool,
        activity: Arc<Activity>,
    ) -> DeadLetters {
        DeadLetters { store, queues, fusion, encryption, spool, activity }
    }

    /// One page, newest first. A page of large payloads ends early.
    pub async fn list(&self, request: &ListRequest) -> BrokerResult<Vec<ListedLetter>> {
        let mut filter = LetterFilter { queue: None, group: request.group.clone() };
        if let Some(name) = &request.queue {
            let Some(queue) = self.find_queue(name).await? else { return Ok(Vec::new()) };
            filter.queue = Some(queue);
        }
        let limit = request.limit.clamp(0, LIST_ROWS_MAX);
        let rows = self.store.list_dead_letters(&filter, limit, request.offset.max(0), LIST_BYTES_MAX).await?;
        Ok(rows.into_iter().map(|row| self.listed(row)).collect())
    }

    /// Past the cache: what another broker has just made again must be found.
    async fn find_queue(&self, name: &str) -> BrokerResult<Option<QueueId>> {
        Ok(self.store.find_queues(&[name.to_owned()]).await?.first().map(|queue| queue.id))
    }

    fn listed(&self, row: DeadLetter) -> ListedLetter {
        let opened = self.encryption.open(&row.payload);
        ListedLetter {
            id: row.id,
            transaction_id: row.transaction_id,
            partition: row.partition,
            queue_name: row.queue_name,
            partition_name: row.partition_name,
            group_name: row.group_name,
            reason: row.reason,
            retry_count: row.retry_count,
            was_encrypted: opened.is_some(),
            data: opened.unwrap_or(row.payload),
            failed_at: row.failed_at,
        }
    }

    /// Deletes every dead letter of a message: whether there was one. Both names are as the client wrote them.
    pub async fn delete(&self, partition: &str, transaction: &str) -> BrokerResult<bool> {
        let Some(partition) = partition_of(self.store.ids(), partition) else { return Ok(false) };
        if transaction.contains('\0') {
            return Ok(false);
        }
        let queue = self.store.delete_dead_letters_of(partition, transaction).await?;
        queue.into_iter().for_each(|queue| self.activity.touched(queue));
        Ok(queue.is_some())
    }

    /// Deletes the dead letters of a queue, of one group or of all, filed until now: how many. In steps of bounded size.
    pub async fn purge(&self, queue: &str, group: Option<&str>) -> BrokerResult<i64> {
        let Some(queue) = self.find_queue(queue).await? else { return Ok(0) };
        let (mut deleted, mut until) = (0, None);
        loop {
            let step = self.store.purge_dead_letters(queue, group, until, PURGE_ROWS).await;
            // Whatever became of it; after it, so that no snapshot from before counts as new.
            self.activity.touched(queue);
            let (gone, at) = step?;
            deleted += gone;
            until = Some(at);
            if gone < PURGE_ROWS {
                return Ok(deleted);
            }
        }
    }

    /// Moves one dead letter back into a queue. Goes on if the caller stops waiting.
    pub async fn replay(&self, wanted: &Wanted, to: &Destination) -> Result<Replayed, ReplayError> {
        let address = address_of(self.store.ids(), wanted).ok_or(ReplayError::Gone)?;
        let letter = self.store.find_dead_letter(&address).await.map_err(|error| match BrokerError::from(error) {
            BrokerError::Failed(text) => ReplayError::Lookup(text),
            other => ReplayError::Broker(other),
        })?;
        let letter = letter.ok_or(ReplayError::Gone)?;
        if letter.group_name == TIMER_GROUP {
            return Err(ReplayError::Timer);
        }
        let replayed = self.move_to(&letter, to).await;
        count(&replayed);
        replayed
    }

    async fn move_to(&self, letter: &DeadLetter, to: &Destination) -> Result<Replayed, ReplayError> {
        let queue_name = to.queue.as_deref().unwrap_or(&letter.queue_name);
        let partition = to.partition.as_deref().unwrap_or(&letter.partition_name);
        let transaction_id = format!("dlq:{}", letter.id);
        let id = Uuid::now_v7();
        let _admitted = self.fusion.admit(letter.payload.len() + 64)?;
        self.spool.let_pass(&[(queue_name, partition)]).await?;
        for _ in 0..=QUEUE_GONE_RETRIES {
            let mut found = self.queues.find_or_create(&[queue_name]).await?;
            let Some(queue) = found.remove(queue_name) else { continue };
            let packed = self.pack(letter, id, &transaction_id, queue.options.encryption_enabled)?;
            let (reply, outcome) = oneshot::channel();
            let key = PartitionKey { queue: queue.id, name: partition.to_owned() };
            let window_seconds = queue.options.dedup_window_seconds;
            self.fusion.submit(PushJob { key, window_seconds, packed, replaces: Some(letter.id), reply }).await?;
            let stored = match outcome.await {
                // A shard that was torn down with the job in hand.
                Err(_) => return Err(ReplayError::Unknown("the push flush stopped".to_owned())),
                Ok(Err(JobError::QueueGone)) => {
                    self.queues.forget(queue_name);
                    continue;
                }
                Ok(Err(JobError::LetterGone)) => return Err(ReplayError::Gone),
                Ok(Err(JobError::Failed(text) | JobError::Away(text))) => {
                    return Err(ReplayError::Refused(text.to_string()));
                }
                Ok(Err(JobError::Unknown(text))) => return Err(ReplayError::Unknown(text.to_string())),
                Ok(Ok(items)) => items.into_iter().next(),
            };
            self.activity.touched(letter.queue);
            self.activity.pushed(queue.id, stored.iter().filter(|item| item.original.is_none()).count() as u64);
            let stored = stored.ok_or_else(|| ReplayError::Refused("no outcome".to_owned()))?;
            return Ok(Replayed {
                letter: letter.id,
                group_name: letter.group_name.clone(),
                original_transaction_id: letter.transaction_id.clone(),
                queue: queue_name.to_owned(),
                partition: partition.to_owned(),
                transaction_id,
                message_id: stored.original.is_none().then_some(id),
                offset: stored.offset,
            });
        }
        Err(ReplayError::Refused("the queue is being deleted".to_owned()))
    }

    /// The snapshot as a message: opened, and sealed again only if the destination asks for it.
    fn pack(&self, letter: &DeadLetter, id: Uuid, transaction_id: &str, encrypt: bool) -> Result<Packed, ReplayError> {
        let opened = self.encryption.open(&letter.payload);
        let plain = opened.as_deref().unwrap_or(&letter.payload);
        let sealed = self.encryption.seal_if(encrypt, plain).map_err(|why| ReplayError::Refused(why.to_owned()))?;
        let frame = Frame {
            id,
            transaction_id: Some(transaction_id),
            trace_id: None,
            producer_sub: None,
            encrypted: encrypt,
            payload: sealed.as_deref().unwrap_or(plain),
        };
        let mut packed = Packed::default();
        packed.add(&frame, frame.transaction_hash());
        Ok(packed)
    }
}

fn address_of(ids: IdSpace, wanted: &Wanted) -> Option<LetterAddress> {
    match wanted {
        Wanted::Id(text) => Uuid::try_parse(text).ok().map(LetterAddress::Id),
        Wanted::Message(_, transaction) if transaction.contains('\0') => None,
        Wanted::Message(partition, transaction) => {
            Some(LetterAddress::Message(partition_of(ids, partition)?, transaction.clone()))
        }
    }
}

fn partition_of(ids: IdSpace, text: &str) -> Option<PartitionId> {
    ids.partition_of(Uuid::try_parse(text).ok()?)
}

fn count(replayed: &Result<Replayed, ReplayError>) {
    let result = match replayed {
        Ok(Replayed { message_id: Some(_), .. }) => "moved",
        Ok(_) => "duplicate",
        Err(ReplayError::Gone) => "gone",
        Err(_) => "failed",
    };
    metrics::counter!(crate::metrics::DEAD_LETTER_MOVES, "result" => result).increment(1);
}
