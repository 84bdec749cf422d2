//! The newest segments that this broker stored, unpacked: a consumer that keeps up reads nothing from PostgreSQL.
//!
//! A segment never changes and its partition's key is never used again, so an entry cannot go stale. It is only ever
//! read for offsets that a claim has just granted, under the cursor row: what the database no longer has is not asked
//! for. A new connection may lead to a standby that lacks the newest commits: each makes it forget everything. Bounded in
//! bytes, oldest out first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};

use super::segment::Frames;
use crate::ids::{Offset, PartitionId};
use crate::store::Generation;
use crate::store::messages::Span;

const SHARDS: usize = 16;
/// What an entry costs beside its frames: its places in the map and in the order of eviction.
const ENTRY_BYTES: usize = 192;

/// One segment, unpacked.
#[derive(Clone, Debug)]
pub struct OpenSegment {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of its first message.
    pub base_offset: Offset,
    /// Messages in it.
    pub message_count: usize,
    /// Commit time.
    pub created_at: DateTime<Utc>,
    /// Its messages.
    pub frames: Frames,
}

impl OpenSegment {
    /// Offset of its last message.
    pub fn last(&self) -> Offset {
        Offset(self.base_offset.0 + self.message_count as i64 - 1)
    }
}

/// A cheap clone.
#[derive(Clone, Debug)]
pub struct SegmentCache {
    shards: Arc<[Mutex<Shard>]>,
    shard_bytes_max: usize,
    generation: Generation,
}

#[derive(Debug, Default)]
struct Shard {
    partitions: HashMap<PartitionId, VecDeque<OpenSegment>>,
    /// The partition of every entry, oldest entry first.
    order: VecDeque<PartitionId>,
    bytes: usize,
    /// What is here was committed in this generation.
    generation: u64,
}

impl SegmentCache {
    /// With room for so many bytes; 0 keeps nothing. Whenever `generation` moves everything is forgotten.
    pub fn new(bytes_max: usize, generation: Generation) -> SegmentCache {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        SegmentCache { shards, shard_bytes_max: bytes_max / SHARDS, generation }
    }

    /// Adds a segment that was committed by a transaction that began in this generation.
    pub fn add(&self, segment: OpenSegment, generation: u64) {
        let bytes = cost(&segment);
        if bytes > self.shard_bytes_max {
            return;
        }
        let mut shard = self.shard(segment.partition);
        if shard.generation != generation {
            return;
        }
        while shard.bytes + bytes > self.shard_bytes_max {
            shard.evict();
        }
        shard.bytes += bytes;
        shard.order.push_back(segment.partition);
        shard.partitions.entry(segment.partition).or_default().push_back(segment);
    }

    /// The segments that cover the span, if all of them are here. Stops like a read of the database: once `bytes_max`
    /// bytes of frames are covered, but not before the first segment.
    pub fn find(&self, span: Span, bytes_max: usize) -> Option<Vec<OpenSegment>> {
        let shard = self.shard(span.partition);
        let segments = shard.partitions.get(&span.partition)?;
        let from = segments.partition_point(|s| s.last() < span.first);
        let mut found = Vec::new();
        let (mut next, mut bytes) = (span.first, 0);
        for segment in segments.range(from..) {
            if segment.base_offset > next {
                return None;
            }
            next = Offset(segment.last().0 + 1);
            bytes += segment.frames.bytes();
            found.push(segment.clone());
            if next > span.last || bytes > bytes_max {
                return Some(found);
            }
        }
        None
    }

    /// What it holds, in bytes.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).bytes).sum()
    }

    fn shard(&self, partition: PartitionId) -> MutexGuard<'_, Shard> {
        let nth = partition.0.rem_euclid(SHARDS as i64) as usize;
        // `rem_euclid` keeps it inside.
        #[allow(clippy::indexing_slicing)]
        let mut shard = self.shards[nth].lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.generation.now();
        if shard.generation != generation {
            *shard = Shard { generation, ..Shard::default() };
        }
        shard
    }
}

impl Shard {
    fn evict(&mut self) {
        let Some(partition) = self.order.pop_front() else {
            self.bytes = 0;
            return;
        };
        let Some(segments) = self.partitions.get_mut(&partition) else { return };
        if let Some(segment) = segments.pop_front() {
            self.bytes = self.bytes.saturating_sub(cost(&segment));
        }
        if segments.is_empty() {
            self.partitions.remove(&partition);
        }
    }
}

fn cost(segment: &OpenSegment) -> usize {
    segment.frames.bytes() + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::broker::segment::Frame;

    fn segment(partition: i64, base: i64, messages: usize, payload: usize) -> OpenSegment {
        let payload = vec![b'7'; payload];
        let mut body = Vec::new();
        for nth in 0..messages {
            let id = Uuid::from_u128(nth as u128);
            let frame = Frame {
                id,
                transaction_id: None,
                trace_id: None,
                producer_sub: None,
                encrypted: false,
                payload: &payload,
            };
            frame.pack(&mut body);
        }
        OpenSegment {
            partition: PartitionId(partition),
            base_offset: Offset(base),
            message_count: messages,
            created_at: DateTime::UNIX_EPOCH,
            frames: Frames::of_body(body.into()),
        }
    }

    fn bases(cache: &SegmentCache, first: i64, last: i64) -> Option<Vec<i64>> {
        let span = Span { partition: PartitionId(5), first: Offset(first), last: Offset(last) };
        cache.find(span, usize::MAX).map(|found| found.iter().map(|s| s.base_offset.0).collect())
    }

    #[test]
    fn a_span_is_found_only_if_every_offset_of_it_is_here() {
        let cache = SegmentCache::new(1 << 20, Generation::default());
        for (base, messages) in [(10, 3), (13, 2), (20, 5)] {
            cache.add(segment(5, base, messages, 10), 0);
        }
        assert_eq!(bases(&cache, 10, 14), Some(vec![10, 13]));
        assert_eq!(bases(&cache, 11, 12), Some(vec![10]));
        assert_eq!(bases(&cache, 14, 14), Some(vec![13]));
        assert_eq!(bases(&cache, 20, 24), Some(vec![20]));
        for (first, last) in [(9, 10), (14, 15), (13, 20), (15, 15), (24, 25), (25, 30)] {
            assert_eq!(bases(&cache, first, last), None, "{first}..={last}");
        }
    }

    #[test]
    fn a_new_connection_makes_it_forget_and_refuse_what_was_committed_before() {
        let generation = Generation::default();
        let cache = SegmentCache::new(1 << 20, generation.clone());
        cache.add(segment(5, 10, 3, 10), 0);
        assert_eq!(bases(&cache, 10, 10), Some(vec![10]));
        generation.advance();
        assert_eq!((bases(&cache, 10, 10), cache.bytes()), (None, 0));
        cache.add(segment(5, 10, 3, 10), 0);
        assert_eq!(bases(&cache, 10, 10), None);
        cache.add(segment(5, 10, 3, 10), 1);
        assert_eq!(bases(&cache, 10, 10), Some(vec![10]));
    }

    #[test]
    fn a_read_stops_at_its_byte_limit_but_not_before_the_first_segment() {
        let cache = SegmentCache::new(1 << 20, Generation::default());
        (0..4).for_each(|nth| cache.add(segment(5, nth, 1, 100), 0));
        let span = Span { partition: PartitionId(5), first: Offset(0), last: Offset(3) };
        assert_eq!(cache.find(span, 0).map(|found| found.len()), Some(1));
        assert_eq!(cache.find(span, 150).map(|found| found.len()), Some(2));
    }

    #[test]
    fn the_oldest_go_first_and_the_bound_holds() {
        let cache = SegmentCache::new(16 * 4096, Generation::default());
        for base in 0..100 {
            cache.add(segment(5, base, 1, 200), 0);
            cache.add(segment(21, base, 1, 200), 0);
        }
        assert!(cache.bytes() <= 4096 && cache.bytes() > 3000, "{}", cache.bytes());
        assert_eq!(bases(&cache, 99, 99), Some(vec![99]));
        assert_eq!(bases(&cache, 0, 0), None);
        cache.add(segment(5, 100, 1, 1 << 20), 0);
        assert_eq!(bases(&cache, 100, 100), None, "larger than its share");
        assert_eq!(bases(&cache, 99, 99), Some(vec![99]));
    }
}
