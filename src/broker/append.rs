//! What every flush that stores messages does (pushes, transactions): lock the partitions, find what is stored already
//! inside the deduplication window, pack segments.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use chrono::{DateTime, Utc};

use super::dedup::{DedupBudget, DedupMemory, Refresh};
use super::meter::meter;
use super::push::Packed;
use super::segment::{self, Frames};
use super::segment_cache::{OpenSegment, SegmentCache};
use crate::ids::{Offset, PartitionId, TransactionHash};
use crate::store::messages::{AppendTx, NewSegment, Opening, StoredHashes};
use crate::store::partitions::{LockedPartition, PartitionKey};
use crate::store::{Store, StoreResult};

/// How segments are made, and where the newest are kept.
#[derive(Clone, Debug)]
pub struct Writing {
    /// zstd level.
    pub zstd_level: i32,
    /// Takes what was committed.
    pub cache: SegmentCache,
    /// What memories of transaction ids may take.
    pub dedup: Arc<DedupBudget>,
}

/// What a flush wants to store in one partition, as far as deduplication is concerned.
#[derive(Debug)]
pub struct Asked<'a> {
    /// The partition, locked.
    pub partition: &'a LockedPartition,
    /// Its window, 0 = no deduplication.
    pub window_seconds: i32,
    /// The hashes, in parts.
    pub hashes: Vec<&'a [TransactionHash]>,
}

/// Where each hash of the flush is stored, if it is, per partition that deduplicates.
pub type Known = HashMap<PartitionId, HashMap<TransactionHash, Offset>>;

/// Where partitions that do not exist are made. At first with their first messages, in one transaction. That fails as
/// [`StoreError::Overtaken`](crate::store::StoreError::Overtaken) when somebody else makes one meanwhile, and is tried
/// again (`until_made!`); after some tries they are made beforehand, in a transaction of their own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Making {
    overtaken: u32,
}

impl Making {
    /// Times that a flush may be overtaken before it makes its partitions beforehand.
    const OVERTAKEN_MAX: u32 = 3;

    /// After being overtaken.
    pub fn again(self) -> Making {
        Making { overtaken: self.overtaken.saturating_add(1) }
    }

    fn is_with_messages(self) -> bool {
        self.overtaken < Making::OVERTAKEN_MAX
    }
}

/// Runs `$flush`, again each time that somebody else makes one of its partitions meanwhile. `$making` says to it where to make
/// them. (No function: rustc cannot tell that the future of an async closure which borrows can be sent.)
macro_rules! until_made {
    (|$making:ident| $flush:expr) => {{
        let mut $making = $crate::broker::append::Making::default();
        loop {
            match $flush.await {
                Err($crate::store::StoreError::Overtaken) => $making = $making.again(),
                flushed => break flushed,
            }
        }
    }};
}
pub(in crate::broker) use until_made;

/// Locks every partition that can exist, in id order, and allots keys to missing ones, which are made when their first
/// messages are stored. `keys` come sorted.
pub async fn lock_all(
    store: &Store,
    keys: &[PartitionKey],
    opening: Opening,
    making: Making,
) -> StoreResult<(AppendTx, HashMap<PartitionKey, LockedPartition>)> {
    let mut tx = store.begin_append(opening).await?;
    if keys.is_empty() {
        return Ok((tx, HashMap::new()));
    }
    let mut locked: HashMap<_, _> = tx.lock_partitions(keys).await?.into_iter().map(|p| (p.key.clone(), p)).collect();
    if locked.len() < keys.len() {
        let missing: Vec<PartitionKey> = keys.iter().filter(|k| !locked.contains_key(k)).cloned().collect();
        if making.is_with_messages()
            && let Some(new) = tx.allot_partitions(&missing).await?
        {
            locked.extend(new.into_iter().map(|p| (p.key.clone(), p)));
            return Ok((tx, locked));
        }
        tx.rollback().await?;
        store.create_partitions(&missing).await?;
        tx = store.begin_append(opening).await?;
        locked = tx.lock_partitions(keys).await?.into_iter().map(|p| (p.key.clone(), p)).collect();
    }
    Ok((tx, locked))
}

/// Finds the hashes of the flush that are stored inside their windows: the memory names candidates, and rows read under
/// the partition locks decide (I9).
pub async fn probe(tx: &mut AppendTx, memory: &mut DedupMemory, asked: &[Asked<'_>]) -> StoreResult<Known> {
    let now = Instant::now();
    let mut reads = Vec::new();
    for Asked { partition, window_seconds: window, .. } in asked {
        if *window == 0 {
            // What is stored now goes unrecorded, so nothing can be called new afterwards.
            memory.forget(partition.id);
            continue;
        }
        if partition.is_new {
            continue;
        }
        match memory.refresh(partition.id, partition.last_offset, *window, now) {
            Refresh::Nothing => {}
            Refresh::From(offset) => {
                meter().dedup_offset_reads.increment(1);
                reads.push((partition.id, offset, *window));
            }
            Refresh::Window => {
                memory.start(partition.id, partition.last_offset, *window, now);
                if partition.last_offset > Offset::NONE {
                    meter().dedup_window_reads.increment(1);
                    reads.push((partition.id, Offset(0), *window));
                }
            }
        }
    }
    if !reads.is_empty() {
        for stored in tx.hashes_within(&reads).await? {
            memory.add(stored.partition, stored.base_offset, &stored.hashes, now);
        }
    }
    let mut candidates = Vec::new();
    let mut ambiguous = Vec::new();
    let stored = asked.iter().filter(|asked| asked.window_seconds > 0 && !asked.partition.is_new);
    for Asked { partition, window_seconds: window, hashes } in stored {
        if !memory.covers(partition.id) {
            meter().dedup_ambiguous_reads.increment(1);
            ambiguous.push((partition.id, Offset(0), *window));
            continue;
        }
        let before = candidates.len();
        for hash in hashes.iter().copied().flatten() {
            candidates.extend(memory.candidates(partition.id, *hash).map(|at| (partition.id, at, *window)));
        }
        if candidates.len() > before {
            meter().dedup_candidate_reads.increment(1);
            meter().dedup_candidates.increment((candidates.len() - before) as u64);
        }
    }
    let mut known = Known::new();
    if !candidates.is_empty() {
        add_known(&mut known, tx.hashes_at(&candidates).await?);
    }
    if !ambiguous.is_empty() {
        add_known(&mut known, tx.hashes_within(&ambiguous).await?);
    }
    Ok(known)
}

/// The earliest occurrence of a hash counts (`spec/push-pop.md` §2.6).
fn add_known(known: &mut Known, rows: Vec<StoredHashes>) {
    for stored in rows {
        let of_partition = known.entry(stored.partition).or_default();
        for (offset, hash) in (stored.base_offset.0..).zip(stored.hashes) {
            let at = of_partition.entry(hash).or_insert(Offset(offset));
            *at = (*at).min(Offset(offset));
        }
    }
}

/// Takes what was committed into the memories. Only then: what a failed flush may have stored shows as offsets above what
/// the deduplication memory covers, and a partition that it was to make is not known at all. `generation` is the store's
/// when the transaction began.
pub fn remember(
    memory: &mut DedupMemory,
    cache: &SegmentCache,
    asked: &[Asked<'_>],
    segments: &[NewSegment],
    stamps: &HashMap<PartitionId, DateTime<Utc>>,
    generation: u64,
) {
    let now = Instant::now();
    for Asked { partition, window_seconds, .. } in asked {
        if partition.is_new && *window_seconds > 0 && stamps.contains_key(&partition.id) {
            memory.start(partition.id, Offset::NONE, *window_seconds, now);
        }
    }
    for segment in segments {
        memory.add(segment.partition, segment.base_offset, &segment.hashes, now);
        if let Some(created_at) = stamps.get(&segment.partition) {
            let segment = OpenSegment {
                partition: segment.partition,
                base_offset: segment.base_offset,
                message_count: segment.hashes.len(),
                created_at: *created_at,
                frames: Frames::of_body(segment.body.clone()),
            };
            cache.add(segment, generation);
        }
    }
    memory.trim(now);
}

/// Packs messages of one partition, at consecutive offsets, into segments of bounded size.
#[derive(Debug)]
pub struct Segments {
    partition: PartitionId,
    zstd_level: i32,
    done: Vec<NewSegment>,
    open: Option<NewSegment>,
    body: Vec<u8>,
}

impl Segments {
    /// None yet.
    pub fn new(partition: PartitionId, zstd_level: i32) -> Segments {
        Segments { partition, zstd_level, done: Vec::new(), open: None, body: Vec::new() }
    }

    /// Appends the message `index` of `packed` at `offset`.
    pub fn add(&mut self, offset: Offset, packed: &Packed, index: usize) {
        let segment = self.open.get_or_insert_with(|| NewSegment {
            partition: self.partition,
            base_offset: offset,
            hashes: Vec::new(),
            payload_bytes: 0,
            body: Bytes::new(),
            frames: Vec::new(),
        });
        self.body.extend_from_slice(packed.frame(index));
        segment.hashes.extend(packed.hashes.get(index));
        segment.payload_bytes += packed.payload_bytes.get(index).copied().unwrap_or(0);
        if self.body.len() >= segment::SEGMENT_BYTES_MAX || segment.hashes.len() >= segment::SEGMENT_MESSAGES_MAX {
            self.close();
        }
    }

    /// The segments.
    pub fn finish(mut self) -> Vec<NewSegment> {
        self.close();
        self.done
    }

    fn close(&mut self) {
        if let Some(mut segment) = self.open.take() {
            segment.frames = segment::seal(&self.body, self.zstd_level);
            segment.body = std::mem::take(&mut self.body).into();
            self.done.push(segment);
        }
    }
}
