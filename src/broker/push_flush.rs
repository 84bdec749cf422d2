//! One push flush: the transaction that locks partitions, decides duplicates, allocates offsets and stores segments.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use super::append::{self, Asked, Making, Segments, Writing};
use super::dedup::DedupMemory;
use super::meter::meter;
use super::push::{JobError, JobOutcome, StoredItem};
use super::push_fusion::PushJob;
use super::segment::Frames;
use crate::ids::{Offset, PartitionId, QueueId, TransactionHash};
use crate::store::messages::{AppendTx, NewSegment, Opening};
use crate::store::partitions::{LockedPartition, PartitionKey};
use crate::store::queues::corrupt;
use crate::store::{Store, StoreError, StoreResult};

/// Window, in seconds, in which a retried flush looks for its own earlier commit when the queue does not deduplicate.
const LOOK_UP_SECONDS: i32 = 900;

/// The jobs of one partition in one flush, in arrival order.
#[derive(Debug)]
pub struct PartitionBatch {
    /// The partition.
    pub key: PartitionKey,
    /// The jobs.
    pub jobs: Vec<PushJob>,
}

/// A partition that got messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Its queue.
    pub queue: QueueId,
    /// Its key.
    pub partition: PartitionId,
    /// Whether these are its first messages, as far as this broker stored them.
    pub is_new: bool,
}

/// A committed flush.
#[derive(Debug)]
pub struct Flushed {
    /// Per partition, per job.
    pub outcomes: Vec<Vec<JobOutcome>>,
    /// What to announce.
    pub appended: Vec<Appended>,
}

/// Sorts jobs into partitions, by key.
pub fn by_partition(jobs: Vec<PushJob>) -> Vec<PartitionBatch> {
    let mut batches: BTreeMap<PartitionKey, Vec<PushJob>> = BTreeMap::new();
    for job in jobs {
        batches.entry(job.key.clone()).or_default().push(job);
    }
    batches.into_iter().map(|(key, jobs)| PartitionBatch { key, jobs }).collect()
}

/// Stores the batches in one transaction. With `look_up`, an earlier try may have committed: messages found stored
/// under the very ids minted here are reported as stored.
pub async fn flush(
    store: &Store,
    memory: &mut DedupMemory,
    writing: &Writing,
    batches: &[PartitionBatch],
    look_up: bool,
) -> StoreResult<Flushed> {
    append::until_made!(|making| flush_once(store, memory, writing, batches, look_up, making))
}

async fn flush_once(
    store: &Store,
    memory: &mut DedupMemory,
    writing: &Writing,
    batches: &[PartitionBatch],
    look_up: bool,
    making: Making,
) -> StoreResult<Flushed> {
    let generation = store.generation().now();
    let keys: Vec<PartitionKey> = batches.iter().map(|b| b.key.clone()).collect();
    let (mut tx, locked) = append::lock_all(store, &keys, Opening::PUSH, making).await?;
    let mut letters = Letters::lock(&mut tx, batches).await?;
    let asked: Vec<Asked<'_>> = batches
        .iter()
        .filter_map(|batch| {
            let hashes = batch.jobs.iter().map(|job| job.packed.hashes.as_slice()).collect();
            let window_seconds = window_of(batch).max(if look_up { LOOK_UP_SECONDS } else { 0 });
            locked.get(&batch.key).map(|partition| Asked { partition, window_seconds, hashes })
        })
        .collect();
    let known = append::probe(&mut tx, memory, &asked).await?;
    let mut segments = Vec::new();
    let mut decided = Vec::with_capacity(batches.len());
    for batch in batches {
        decided.push(match locked.get(&batch.key) {
            None => None,
            Some(partition) => {
                let dedup = known.get(&partition.id);
                let plan = decide(batch, partition, dedup, &mut letters);
                segments.extend(build_segments(batch, partition, &plan, writing.zstd_level));
                Some((partition, plan))
            }
        });
    }
    let mut outcomes = Vec::with_capacity(batches.len());
    for (batch, decided) in batches.iter().zip(&decided) {
        outcomes.push(match decided {
            None => batch.jobs.iter().map(|_| Err(JobError::QueueGone)).collect(),
            Some((partition, plan)) => settle(&mut tx, batch, partition.id, plan, &letters, look_up).await?,
        });
    }
    if segments.is_empty() {
        tx.rollback().await?;
        return Ok(Flushed { outcomes, appended: Vec::new() });
    }
    let stamps = tx.insert_segments(&segments).await?;
    letters.delete_replaced(&mut tx).await?;
    tx.commit().await?;
    meter().segments.increment(segments.len() as u64);
    append::remember(memory, &writing.cache, &asked, &segments, &stamps, generation);
    let mut appended: Vec<Appended> = Vec::new();
    for (partition, plan) in decided.into_iter().flatten() {
        if plan.iter().flatten().any(|item| matches!(item, Plan::Store(_))) {
            let is_new = partition.last_offset == Offset::NONE;
            appended.push(Appended { queue: partition.key.queue, partition: partition.id, is_new });
        }
    }
    Ok(Flushed { outcomes, appended })
}

/// The dead letters that jobs of a flush replace (`spec/admin.md` §6.3).
#[derive(Default)]
struct Letters {
    /// Locked, and not replaced by a job before.
    present: HashSet<Uuid>,
    /// Their messages are stored by this flush.
    replaced: Vec<Uuid>,
}

impl Letters {
    /// Locks them, after the partitions: the global lock order.
    async fn lock(tx: &mut AppendTx, batches: &[PartitionBatch]) -> StoreResult<Letters> {
        let named: Vec<Uuid> = batches.iter().flat_map(|b| &b.jobs).filter_map(|job| job.replaces).collect();
        if named.is_empty() {
            return Ok(Letters::default());
        }
        let present = tx.lock_dead_letters(&named).await?.into_iter().collect();
        Ok(Letters { present, replaced: Vec::new() })
    }

    /// Whether a job that replaces this one may store its messages: then it is taken.
    fn take(&mut self, replaces: Option<Uuid>) -> bool {
        let Some(id) = replaces else { return true };
        let taken = self.present.remove(&id);
        self.replaced.extend(taken.then_some(id));
        taken
    }

    /// Whether it is there still, or nothing is to be replaced.
    fn stay(&self, replaces: Option<Uuid>) -> bool {
        replaces.is_none_or(|id| self.present.contains(&id))
    }

    async fn delete_replaced(&self, tx: &mut AppendTx) -> StoreResult<()> {
        if self.replaced.is_empty() { Ok(()) } else { tx.delete_dead_letters(&self.replaced).await }
    }
}

/// The widest window that a job of the partition was accepted under: a change of options lags only towards probing
/// more.
fn window_of(batch: &PartitionBatch) -> i32 {
    batch.jobs.iter().map(|job| job.window_seconds).max().unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// A new message at this offset.
    Store(Offset),
    /// Stored before, at this offset.
    Stored(Offset),
    /// The same key is stored by an earlier job of this flush.
    SameFlush(Offset, Uuid),
    /// Not stored: the dead letter that it was to replace is gone.
    LetterGone,
}

fn decide(
    batch: &PartitionBatch,
    partition: &LockedPartition,
    known: Option<&HashMap<TransactionHash, Offset>>,
    letters: &mut Letters,
) -> Vec<Vec<Plan>> {
    let deduplicates = window_of(batch) > 0;
    let mut next = partition.last_offset;
    let mut here: HashMap<TransactionHash, (Offset, Uuid)> = HashMap::new();
    batch
        .jobs
        .iter()
        .map(|job| {
            let items = job.packed.hashes.iter().zip(&job.packed.ids);
            items
                .map(|(hash, id)| {
                    if let Some(offset) = known.and_then(|known| known.get(hash)) {
                        return Plan::Stored(*offset);
                    }
                    if deduplicates
                        && letters.stay(job.replaces)
                        && let Some((offset, original)) = here.get(hash)
                    {
                        return Plan::SameFlush(*offset, *original);
                    }
                    if !letters.take(job.replaces) {
                        return Plan::LetterGone;
                    }
                    next = next.next();
                    if deduplicates {
                        here.insert(*hash, (next, *id));
                    }
                    Plan::Store(next)
                })
                .collect()
        })
        .collect()
}

/// Packs what is to be stored.
fn build_segments(
    batch: &PartitionBatch,
    partition: &LockedPartition,
    plan: &[Vec<Plan>],
    zstd_level: i32,
) -> Vec<NewSegment> {
    let mut segments = Segments::new(partition.id, zstd_level);
    for (job, plan) in batch.jobs.iter().zip(plan) {
        for (index, item) in plan.iter().enumerate() {
            if let Plan::Store(offset) = item {
                segments.add(*offset, &job.packed, index);
            }
        }
    }
    segments.finish()
}

/// Turns the plan into answers; an original's id is read from its segment.
async fn settle(
    tx: &mut AppendTx,
    batch: &PartitionBatch,
    partition: PartitionId,
    plan: &[Vec<Plan>],
    letters: &Letters,
    look_up: bool,
) -> StoreResult<Vec<JobOutcome>> {
    let mut originals = Originals::default();
    let mut outcomes = Vec::with_capacity(plan.len());
    for (job, plan) in batch.jobs.iter().zip(plan) {
        let mut items = Vec::with_capacity(plan.len());
        let mut letter_gone = false;
        for (index, item) in plan.iter().enumerate() {
            items.push(match *item {
                Plan::LetterGone => {
                    letter_gone = true;
                    continue;
                }
                Plan::Store(offset) => StoredItem { offset, original: None },
                Plan::SameFlush(offset, id) => StoredItem { offset, original: Some(id) },
                Plan::Stored(offset) => {
                    let id = originals.id_at(tx, partition, offset).await?;
                    let own = look_up && job.packed.ids.get(index) == Some(&id);
                    // Moved by somebody else, unless it was this job, unseen.
                    letter_gone |= !own && !letters.stay(job.replaces);
                    StoredItem { offset, original: (!own).then_some(id) }
                }
            });
        }
        outcomes.push(if letter_gone { Err(JobError::LetterGone) } else { Ok(items) });
    }
    Ok(outcomes)
}

/// The last segment read for the ids of duplicates: a retried batch finds all of its originals in few of them.
#[derive(Default)]
struct Originals {
    base: i64,
    ids: Vec<Uuid>,
}

impl Originals {
    /// Nil when the original's segment is gone (`spec/push-pop.md` §2.6).
    async fn id_at(&mut self, tx: &mut AppendTx, partition: PartitionId, offset: Offset) -> Result<Uuid, StoreError> {
        let index = |base: i64| usize::try_from(offset.0 - base).unwrap_or(usize::MAX);
        if let Some(id) = self.ids.get(index(self.base)) {
            return Ok(*id);
        }
        let Some(row) = tx.segment_at(partition, offset).await? else { return Ok(Uuid::nil()) };
        let frames = Frames::open(&row.frames).map_err(|e| corrupt("log_segments", e.to_string()))?;
        self.base = row.base_offset.0;
        self.ids = frames
            .iter()
            .map(|frame| frame.map(|f| f.id))
            .collect::<Result<_, _>>()
            .map_err(|e| corrupt("log_segments", e.to_string()))?;
        Ok(self.ids.get(index(self.base)).copied().unwrap_or_else(Uuid::nil))
    }
}
