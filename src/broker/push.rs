//! The push path: items into groups of one partition each, groups into the flush of their shard, outcomes back.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;
use uuid::Uuid;

use super::encryption::Encryption;
use super::error::{BrokerError, BrokerResult};
use super::push_fusion::{PushFusion, PushJob, PushShard};
use super::push_spool::{follow, spool_all, spool_some};
use super::queue::{Queue, QueueDirectory};
use super::segment::Frame;
use super::spool::Spool;
use crate::ids::{Offset, TransactionHash};
use crate::store::partitions::PartitionKey;

/// One message as it was sent.
#[derive(Clone, Copy, Debug)]
pub struct PushItem<'a> {
    /// Queue name, made if missing.
    pub queue: &'a str,
    /// Partition name, made if missing.
    pub partition: &'a str,
    /// Deduplication key; `None` = the message id.
    pub transaction_id: Option<&'a str>,
    /// Kept with the message; only a transaction gives one (`spec/transactions-kv-timers.md` §2.2).
    pub trace_id: Option<Uuid>,
    /// JSON text, kept verbatim.
    pub payload: &'a [u8],
}

/// What became of one item (`spec/push-pop.md` §2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushStatus {
    /// Committed in PostgreSQL (I8).
    Queued {
        /// Where.
        offset: Offset,
    },
    /// Nothing was written: the same key is stored inside the window, or came earlier in this request.
    Duplicate {
        /// Where the original is.
        offset: Offset,
    },
    /// On this broker's disk; it reaches PostgreSQL later, once (I8).
    Buffered,
    /// Exists nowhere; the producer must retry.
    Failed {
        /// Why.
        error: Arc<str>,
    },
}

/// The answer for one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushResult {
    /// Id of the stored message; for a duplicate the original's, nil if that cannot be read any more.
    pub message_id: Uuid,
    /// The id minted for this item: its transaction id, if the producer gave none.
    pub minted_id: Uuid,
    /// Outcome.
    pub status: PushStatus,
}

/// The messages of one request for one partition, packed; the unit of commit.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    /// Per message: what deduplication and acks look for.
    pub hashes: Vec<TransactionHash>,
    /// Per message: its id.
    pub ids: Vec<Uuid>,
    /// Per message: end of its frame in `body`.
    pub ends: Vec<usize>,
    /// Per message: payload bytes.
    pub payload_bytes: Vec<usize>,
    /// The frames one after the other.
    pub body: Vec<u8>,
}

impl Packed {
    /// The frame of one message.
    pub fn frame(&self, index: usize) -> &[u8] {
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.ends.get(index).and_then(|end| self.body.get(start..*end)).unwrap_or_default()
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Appends a message.
    pub fn add(&mut self, frame: &Frame<'_>, hash: TransactionHash) {
        frame.pack(&mut self.body);
        self.hashes.push(hash);
        self.ids.push(frame.id);
        self.ends.push(self.body.len());
        self.payload_bytes.push(frame.payload.len());
    }
}

/// What a flush says about the messages of one job, in their order.
pub type JobOutcome = Result<Vec<StoredItem>, JobError>;

/// Outcome of one stored or deduplicated message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredItem {
    /// Where it, or its original, is.
    pub offset: Offset,
    /// `Some` for a duplicate: the original's id.
    pub original: Option<Uuid>,
}

/// Why a flush stored nothing of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobError {
    /// The queue was deleted while the push was on its way: resolve it again.
    QueueGone,
    /// The dead letter that the job was to replace is gone: nothing was stored.
    LetterGone,
    /// The transaction failed for good.
    Failed(Arc<str>),
    /// PostgreSQL could not be reached: nothing happened.
    Away(Arc<str>),
    /// The connection broke in the commit, and it could not be found out what became of it.
    Unknown(Arc<str>),
}

/// Times that a push follows a queue that is deleted and made again under it.
const QUEUE_GONE_RETRIES: usize = 3;

/// The push path of one broker.
#[derive(Clone, Debug)]
pub struct PushPath {
    queues: QueueDirectory,
    fusion: PushFusion,
    encryption: Encryption,
    spool: Spool,
}

/// The items of one request for one (queue, partition).
#[derive(Debug)]
pub struct Group<'a> {
    /// Queue name.
    pub queue: &'a str,
    /// Partition name.
    pub partition: &'a str,
    /// Leaders, by index of the request.
    pub items: Vec<usize>,
    refused: Option<Arc<str>>,
}

impl PushPath {
    /// Over the queues and the fusion of this broker.
    pub fn new(queues: QueueDirectory, fusion: PushFusion, encryption: Encryption, spool: Spool) -> PushPath {
        PushPath { queues, fusion, encryption, spool }
    }

    /// What is to be run in the background.
    pub fn shards(&self) -> &[PushShard] {
        self.fusion.shards()
    }

    /// Bytes of pushes under way, and the bound past which they are refused.
    pub fn inflight_bytes(&self) -> (usize, usize) {
        self.fusion.inflight_bytes()
    }

    /// Stores the items; answers one result each, in order, once every group has resolved (`spec/push-pop.md` §2.2).
    pub async fn push(&self, items: &[PushItem<'_>], producer_sub: Option<&str>) -> BrokerResult<Vec<PushResult>> {
        let encrypts = |queue: &str| self.queues.cached_named(queue).map(|queue| queue.options.encryption_enabled);
        if self.spool.takes_everything() {
            return Ok(spool_all(&self.spool, &encrypts, items, producer_sub).await);
        }
        let minted: Vec<Uuid> = items.iter().map(|_| Uuid::now_v7()).collect();
        let (groups, followers) = group_items(items);
        let size: usize = items.iter().map(|item| item.payload.len() + 64).sum();
        let _admitted = self.fusion.admit(size)?;
        let mut results: Vec<Option<PushResult>> = vec![None; items.len()];
        // Behind what this broker has spooled of their partitions.
        let (behind, mut groups): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| self.spool.holds(group.queue, group.partition));
        let mut to_spool: Vec<(usize, bool)> =
            behind.iter().flat_map(|group| group.items.iter().map(|index| (*index, false))).collect();
        for attempt in 0..=QUEUE_GONE_RETRIES {
            let names = distinct_queues(&groups);
            let queues = match self.queues.find_or_create(&names).await {
                Ok(queues) => queues,
                Err(BrokerError::NoDatabase(error)) => {
                    tracing::debug!(%error, "queues cannot be looked up; their pushes are spooled");
                    self.spool.set_away(true);
                    to_spool.extend(groups.iter().flat_map(|group| group.items.iter().map(|index| (*index, false))));
                    break;
                }
                Err(error) => return Err(error),
            };
            let outcomes = self.run_groups(items, &minted, &mut groups, &queues, producer_sub).await?;
            let mut again = Vec::new();
            for (mut group, outcome) in groups.into_iter().zip(outcomes) {
                match outcome {
                    Err(JobError::QueueGone) if attempt < QUEUE_GONE_RETRIES => {
                        self.queues.forget(group.queue);
                        group.refused = None;
                        again.push(group);
                    }
                    Err(error @ (JobError::Away(_) | JobError::Unknown(_))) => {
                        let probe = matches!(error, JobError::Unknown(_));
                        self.spool.set_away(true);
                        to_spool.extend(group.items.iter().map(|index| (*index, probe)));
                    }
                    outcome => record(&mut results, &group, &minted, outcome),
                }
            }
            if again.is_empty() {
                break;
            }
            groups = again;
        }
        to_spool.sort_unstable();
        for probe in [false, true] {
            let indexes: Vec<usize> = to_spool.iter().filter(|(_, is)| *is == probe).map(|(index, _)| *index).collect();
            if !indexes.is_empty() {
                let (spool, results) = (&self.spool, &mut results);
                spool_some(spool, &encrypts, items, &minted, &indexes, producer_sub, probe, results).await;
            }
        }
        follow(&mut results, &followers);
        Ok(results
            .into_iter()
            .zip(minted)
            .map(|(result, id)| {
                result.unwrap_or_else(|| PushResult {
                    message_id: id,
                    minted_id: id,
                    status: PushStatus::Failed { error: "no outcome".into() },
                })
            })
            .collect())
    }

    /// Packs every group that may be stored, hands it to its shard, and waits for all.
    async fn run_groups(
        &self,
        items: &[PushItem<'_>],
        minted: &[Uuid],
        groups: &mut [Group<'_>],
        queues: &HashMap<String, Queue>,
        producer_sub: Option<&str>,
    ) -> BrokerResult<Vec<JobOutcome>> {
        let mut waiting = Vec::with_capacity(groups.len());
        for group in groups.iter_mut() {
            let job = match (&group.refused, queues.get(group.queue)) {
                (Some(error), _) => Err(JobError::Failed(error.clone())),
                (None, None) => Err(JobError::QueueGone),
                (None, Some(queue)) => {
                    pack_group(items, minted, group, queue, &self.encryption, producer_sub).map_err(JobError::Failed)
                }
            };
            waiting.push(match job {
                Err(error) => Err(error),
                Ok(packed) => {
                    let queue = queues.get(group.queue).ok_or(BrokerError::Stopping)?;
                    let (reply, outcome) = oneshot::channel();
                    let key = PartitionKey { queue: queue.id, name: group.partition.to_owned() };
                    let window = queue.options.dedup_window_seconds;
                    let job = PushJob { key, window_seconds: window, packed, replaces: None, reply };
                    self.fusion.submit(job).await?;
                    Ok(outcome)
                }
            });
        }
        let mut outcomes = Vec::with_capacity(waiting.len());
        for outcome in waiting {
            outcomes.push(match outcome {
                Err(error) => Err(error),
                Ok(outcome) => outcome.await.unwrap_or_else(|_| Err(JobError::Failed("the push flush stopped".into()))),
            });
        }
        Ok(outcomes)
    }
}

/// Packs the items of one group for their queue, sealed if the queue encrypts. The error is the client's.
pub fn pack_group(
    items: &[PushItem<'_>],
    minted: &[Uuid],
    group: &Group<'_>,
    queue: &Queue,
    encryption: &Encryption,
    producer_sub: Option<&str>,
) -> Result<Packed, Arc<str>> {
    let encrypt = queue.options.encryption_enabled;
    let mut packed = Packed::default();
    let mut trace = Uuid::encode_buffer();
    for index in &group.items {
        let item = &items[*index];
        let sealed = encryption.seal_if(encrypt, item.payload)?;
        let frame = Frame {
            id: minted[*index],
            transaction_id: item.transaction_id,
            trace_id: item.trace_id.map(|id| &*id.as_hyphenated().encode_lower(&mut trace)),
            producer_sub,
            encrypted: encrypt,
            payload: sealed.as_deref().unwrap_or(item.payload),
        };
        packed.add(&frame, frame.transaction_hash());
    }
    Ok(packed)
}

/// Groups by (queue, partition) in body order, and collapses repeated keys onto their first item: answers the groups
/// and the (follower, leader) pairs (`spec/push-pop.md` §2.5).
pub(super) fn group_items<'a>(items: &[PushItem<'a>]) -> (Vec<Group<'a>>, Vec<(usize, usize)>) {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut by_key: HashMap<(&str, &str), usize> = HashMap::new();
    let mut leaders: HashMap<(usize, &str), usize> = HashMap::new();
    let mut followers = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let at = *by_key.entry((item.queue, item.partition)).or_insert_with(|| {
            groups.push(Group { queue: item.queue, partition: item.partition, items: Vec::new(), refused: None });
            groups.len() - 1
        });
        if let Some(transaction) = item.transaction_id {
            match leaders.entry((at, transaction)) {
                std::collections::hash_map::Entry::Occupied(leader) => {
                    followers.push((index, *leader.get()));
                    continue;
                }
                std::collections::hash_map::Entry::Vacant(slot) => {
                    slot.insert(index);
                }
            }
        }
        groups[at].items.push(index);
    }
    (groups, followers)
}

/// The queues of the groups, sorted.
pub fn distinct_queues<'a>(groups: &[Group<'a>]) -> Vec<&'a str> {
    let mut names: Vec<&str> = groups.iter().map(|g| g.queue).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn record(results: &mut [Option<PushResult>], group: &Group<'_>, minted: &[Uuid], outcome: JobOutcome) {
    match outcome {
        Ok(stored) => {
            for (index, item) in group.items.iter().zip(stored) {
                let own = minted[*index];
                let (message_id, status) = match item.original {
                    None => (own, PushStatus::Queued { offset: item.offset }),
                    Some(original) => (original, PushStatus::Duplicate { offset: item.offset }),
                };
                results[*index] = Some(PushResult { message_id, minted_id: own, status });
            }
        }
        Err(error) => {
            let error: Arc<str> = match error {
                JobError::QueueGone => "the queue is being deleted".into(),
                JobError::LetterGone => "the dead letter is gone".into(),
                JobError::Failed(text) | JobError::Away(text) | JobError::Unknown(text) => text,
            };
            for index in &group.items {
                let own = minted[*index];
                let status = PushStatus::Failed { error: error.clone() };
                results[*index] = Some(PushResult { message_id: own, minted_id: own, status });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item<'a>(queue: &'a str, partition: &'a str, transaction_id: Option<&'a str>) -> PushItem<'a> {
        PushItem { queue, partition, transaction_id, trace_id: None, payload: b"1" }
    }

    #[test]
    fn repeated_keys_follow_the_first_item_of_their_partition() {
        let items = [
            item("q", "a", Some("k")),
            item("q", "b", Some("k")),
            item("q", "a", Some("k")),
            item("q", "a", None),
            item("q", "a", None),
            item("q", "b", Some("k")),
        ];
        let (groups, followers) = group_items(&items);
        assert_eq!(groups.iter().map(|g| g.items.clone()).collect::<Vec<_>>(), [vec![0, 3, 4], vec![1]]);
        assert_eq!(followers, [(2, 0), (5, 1)]);
    }
}
