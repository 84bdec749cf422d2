//! What one push shard remembers of recent transaction ids, so that most pushes need not ask PostgreSQL.
//!
//! A memory says "surely new" or "look at these offsets"; PostgreSQL decides the rest, under the partition lock, in the
//! same transaction (I9). Per partition it covers a run of offsets without gaps, up to `next`; what other brokers pushed
//! above that is read before it is used. It keeps 64 of the 128 bits of a hash, for one to two windows. A partition that
//! gets no pushes is dropped after that, and past the bound whole partitions are dropped: their next push reads the
//! window again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indexmap::IndexMap;

use super::dedup_ids::Ids;
use crate::ids::{Offset, PartitionId, TransactionHash};

/// Bytes that one remembered id costs about: key, offset, table slack.
const ENTRY_BYTES: usize = 24;
/// Bytes that one remembered partition costs beside its ids.
const PARTITION_BYTES: usize = 144;
/// Windows are judged by the database clock, ages here by ours: keep ids a little longer.
const CLOCK_SLACK: Duration = Duration::from_secs(30);

/// Whole seconds since the memory was made, rounded up: what is kept since then is kept a little longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Second(u32);

/// Two generations: a rotation drops ids that are older than a window and never one that is younger. There may be a
/// million of these: 88 bytes each.
#[derive(Debug)]
struct Memory {
    older: Ids,
    newer: Ids,
    /// Every stored message committed since then and below `next` is remembered: nanoseconds since the memory was made.
    covers_since: i64,
    next: i64,
    newer_since: Second,
    used: Second,
    /// How long after its last use nothing of it is inside the window any more, in seconds.
    keep: u32,
    /// Two ids share their 64 bits: nothing can be called surely new.
    ambiguous: bool,
}

/// How a flush must prepare the memory of a partition before it may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refresh {
    /// It is complete.
    Nothing,
    /// Read the hashes from this offset on: another broker pushed.
    From(Offset),
    /// Read the whole window.
    Window,
}

/// The bound that all memories of a broker share: pushes and transactions take of it what they need.
#[derive(Debug)]
pub struct DedupBudget {
    used: AtomicUsize,
    members: AtomicUsize,
    bytes_max: usize,
}

impl DedupBudget {
    /// A bound in bytes; 0 remembers nothing.
    pub fn new(bytes_max: usize) -> Arc<DedupBudget> {
        Arc::new(DedupBudget { used: AtomicUsize::new(0), members: AtomicUsize::new(0), bytes_max })
    }

    /// Bytes held by all, about, as of each one's last flush.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether a memory of this size must give some of it up: nobody is driven below an equal share.
    fn is_exceeded_by(&self, bytes: usize) -> bool {
        self.used() > self.bytes_max && bytes > self.bytes_max / self.members.load(Ordering::Relaxed).max(1)
    }
}

/// From `made` to so long before `at`.
fn nanoseconds(made: Instant, at: Instant, before: Duration) -> i64 {
    let whole = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    whole(at.saturating_duration_since(made)).saturating_sub(whole(before))
}

impl Second {
    fn instant(self, made: Instant) -> Instant {
        made + Duration::from_secs(u64::from(self.0))
    }

    fn is_ahead_of(self, made: Instant, now: Instant) -> bool {
        self.instant(made) > now
    }
}

impl Memory {
    fn expires(&self) -> Second {
        Second(self.used.0.saturating_add(self.keep))
    }
}

/// The memory of one push shard or transaction lane.
#[derive(Debug)]
pub struct DedupMemory {
    /// Entries lie packed: a table of them would be half empty after each doubling.
    partitions: IndexMap<PartitionId, Memory>,
    expiry: VecDeque<(Second, PartitionId)>,
    made: Instant,
    entries: usize,
    budget: Arc<DedupBudget>,
    /// What the budget knows of it.
    counted: usize,
}

impl Drop for DedupMemory {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.counted, Ordering::Relaxed);
        self.budget.members.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DedupMemory {
    /// An empty memory that takes its share of the budget.
    pub fn new(budget: &Arc<DedupBudget>) -> DedupMemory {
        budget.members.fetch_add(1, Ordering::Relaxed);
        let budget = budget.clone();
        DedupMemory {
            partitions: IndexMap::new(),
            expiry: VecDeque::new(),
            made: Instant::now(),
            entries: 0,
            budget,
            counted: 0,
        }
    }

    fn second(&self, at: Instant) -> Second {
        let whole = at.saturating_duration_since(self.made).as_secs();
        Second(u32::try_from(whole).unwrap_or(u32::MAX).saturating_add(1))
    }

    /// What to read before the partition's memory may be used: its last offset is `last`, its window `window_seconds`.
    pub fn refresh(&mut self, partition: PartitionId, last: Offset, window_seconds: i32, now: Instant) -> Refresh {
        let window = Duration::from_secs(u64::from(window_seconds.unsigned_abs()));
        let (made, this_second) = (self.made, self.second(now));
        let Some(memory) = self.partitions.get_mut(&partition) else { return Refresh::Window };
        if memory.ambiguous || memory.covers_since > nanoseconds(made, now, window) {
            return Refresh::Window;
        }
        if memory.newer_since.instant(made) + window + CLOCK_SLACK < now {
            self.entries -= memory.older.len();
            memory.older = std::mem::take(&mut memory.newer);
            // What the older generation holds was committed after its own start.
            memory.covers_since = nanoseconds(made, memory.newer_since.instant(made), Duration::ZERO);
            memory.newer_since = this_second;
        }
        if memory.next > last.0 { Refresh::Nothing } else { Refresh::From(Offset(memory.next)) }
    }

    /// Starts a memory of the partition from what the whole window holds: the hashes at `rows` and nothing else.
    pub fn start(&mut self, partition: PartitionId, last: Offset, window_seconds: i32, now: Instant) {
        self.forget(partition);
        let window = Duration::from_secs(u64::from(window_seconds.unsigned_abs()));
        let this_second = self.second(now);
        let memory = Memory {
            older: Ids::default(),
            newer: Ids::default(),
            newer_since: this_second,
            covers_since: if last == Offset::NONE { i64::MIN } else { nanoseconds(self.made, now, window) },
            used: this_second,
            keep: u32::try_from(((window + CLOCK_SLACK) * 2).as_secs()).unwrap_or(u32::MAX),
            next: last.0 + 1,
            ambiguous: false,
        };
        self.expiry.push_back((memory.expires(), partition));
        self.partitions.insert(partition, memory);
    }

    /// Adds stored hashes, in offset order.
    pub fn add(&mut self, partition: PartitionId, base: Offset, hashes: &[TransactionHash], now: Instant) {
        let this_second = self.second(now);
        let Some(memory) = self.partitions.get_mut(&partition) else { return };
        memory.newer.reserve(hashes.len());
        for (offset, hash) in (base.0..).zip(hashes) {
            if memory.newer.insert(hash.0 as u64, offset).is_some_and(|before| before != offset) {
                memory.ambiguous = true;
            }
        }
        self.entries += hashes.len();
        memory.next = memory.next.max(base.0 + hashes.len() as i64);
        memory.used = this_second;
    }

    /// The offsets at which this hash may be stored; none = surely new.
    pub fn candidates(&self, partition: PartitionId, hash: TransactionHash) -> impl Iterator<Item = Offset> + '_ {
        let key = hash.0 as u64;
        let memory = self.partitions.get(&partition);
        memory.into_iter().flat_map(move |m| [m.older.get(key), m.newer.get(key)]).flatten().map(Offset)
    }

    /// Whether it answers for this partition.
    pub fn covers(&self, partition: PartitionId) -> bool {
        self.partitions.get(&partition).is_some_and(|memory| !memory.ambiguous)
    }

    /// Drops the partition: what was stored is not known for certain.
    pub fn forget(&mut self, partition: PartitionId) {
        if let Some(memory) = self.partitions.swap_remove(&partition) {
            self.entries = self.entries.saturating_sub(memory.older.len() + memory.newer.len());
        }
    }

    /// Drops what is out of date, and whole partitions while the bound is exceeded.
    pub fn trim(&mut self, now: Instant) {
        while self.expiry.front().is_some_and(|(at, _)| !at.is_ahead_of(self.made, now)) {
            let Some((_, partition)) = self.expiry.pop_front() else { break };
            let Some(memory) = self.partitions.get(&partition) else { continue };
            let expires = memory.expires();
            if expires.is_ahead_of(self.made, now) {
                self.expiry.push_back((expires, partition));
            } else {
                self.forget(partition);
            }
        }
        self.give_back();
        self.count();
        while self.budget.is_exceeded_by(self.counted) {
            if self.partitions.is_empty() {
                break;
            }
            // Any: whichever it is, its next push reads the window again.
            let victim = self.partitions.get_index(rand::random_range(0..self.partitions.len()));
            let Some(partition) = victim.map(|(partition, _)| *partition) else { break };
            self.forget(partition);
            self.count();
        }
    }

    /// Gives room back that a crowd has left behind.
    fn give_back(&mut self) {
        const ROOM_MIN: usize = 4096;
        if self.partitions.capacity() > ROOM_MIN.max(4 * self.partitions.len()) {
            self.partitions.shrink_to(2 * self.partitions.len());
        }
        if self.expiry.capacity() > ROOM_MIN.max(4 * self.expiry.len()) {
            self.expiry.shrink_to(2 * self.expiry.len());
        }
    }

    fn count(&mut self) {
        let bytes = self.bytes();
        self.budget.used.fetch_add(bytes.wrapping_sub(self.counted), Ordering::Relaxed);
        self.counted = bytes;
    }

    /// Bytes held, about.
    pub fn bytes(&self) -> usize {
        self.entries * ENTRY_BYTES + self.partitions.len() * PARTITION_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PartitionId = PartitionId(1);

    fn hash(text: &str) -> TransactionHash {
        TransactionHash::of(text)
    }

    fn found(memory: &DedupMemory, text: &str) -> Vec<i64> {
        memory.candidates(P, hash(text)).map(|o| o.0).collect()
    }

    /// `PARTITION_BYTES` counts this, its key and hash, a slot of the index, its place in the expiry, and slack.
    #[test]
    fn a_partition_is_small() {
        assert_eq!(size_of::<Memory>(), 80);
    }

    #[test]
    fn a_memory_is_read_once_and_then_follows_what_is_stored() {
        let now = Instant::now();
        let mut memory = DedupMemory::new(&DedupBudget::new(1 << 20));
        assert_eq!(memory.refresh(P, Offset(4), 60, now), Refresh::Window);
        memory.start(P, Offset(4), 60, now);
        memory.add(P, Offset(3), &[hash("a"), hash("b")], now);
        assert_eq!(memory.refresh(P, Offset(4), 60, now), Refresh::Nothing);
        assert_eq!(found(&memory, "b"), [4]);
        assert_eq!(found(&memory, "c"), [0; 0]);
        // Another broker stored two more.
        assert_eq!(memory.refresh(P, Offset(6), 60, now), Refresh::From(Offset(5)));
        memory.add(P, Offset(5), &[hash("c"), hash("d")], now);
        assert_eq!(memory.refresh(P, Offset(6), 60, now), Refresh::Nothing);
        assert_eq!(found(&memory, "c"), [5]);
    }

    #[test]
    fn a_wider_window_is_read_again_and_a_narrower_one_is_not() {
        let now = Instant::now() + Duration::from_secs(10_000);
        let mut memory = DedupMemory::new(&DedupBudget::new(1 << 20));
        memory.start(P, Offset(9), 60, now);
        assert_eq!(memory.refresh(P, Offset(9), 30, now), Refresh::Nothing);
        assert_eq!(memory.refresh(P, Offset(9), 61, now), Refresh::Window);
        assert_eq!(memory.refresh(P, Offset(9), 61, now + Duration::from_secs(2)), Refresh::Nothing);
    }

    #[test]
    fn rotation_never_drops_what_the_window_still_holds() {
        let mut now = Instant::now() + Duration::from_secs(10_000);
        let mut memory = DedupMemory::new(&DedupBudget::new(1 << 20));
        memory.start(P, Offset::NONE, 60, now);
        let mut stored: Vec<(Instant, String)> = Vec::new();
        for n in 0..400_i64 {
            now += Duration::from_secs(7);
            assert_eq!(memory.refresh(P, Offset(n - 1), 60, now), Refresh::Nothing, "{n}");
            let text = format!("t{n}");
            memory.add(P, Offset(n), &[hash(&text)], now);
            stored.push((now, text));
            for (at, text) in stored.iter().filter(|(at, _)| now - *at <= Duration::from_secs(60)) {
                assert_eq!(found(&memory, text).len(), 1, "{text} stored {:?} ago", now - *at);
            }
        }
        assert!(memory.entries < 40, "{} ids kept", memory.entries);
    }

    #[test]
    fn what_is_over_the_bound_or_idle_is_forgotten_and_read_again() {
        let now = Instant::now();
        let mut memory = DedupMemory::new(&DedupBudget::new(10 * PARTITION_BYTES));
        for id in 0..100 {
            memory.start(PartitionId(id), Offset(0), 60, now);
        }
        memory.trim(now);
        assert!(memory.bytes() <= 10 * PARTITION_BYTES);
        memory.trim(now + Duration::from_secs(1000));
        assert_eq!((memory.bytes(), memory.partitions.len(), memory.budget.used()), (0, 0, 0));
        assert_eq!(memory.refresh(P, Offset(0), 60, now), Refresh::Window);
    }

    #[test]
    fn memories_share_one_bound_and_none_is_driven_below_an_equal_share() {
        let now = Instant::now();
        let budget = DedupBudget::new(20 * PARTITION_BYTES);
        let (mut large, mut small) = (DedupMemory::new(&budget), DedupMemory::new(&budget));
        for id in 0..16 {
            large.start(PartitionId(id), Offset(0), 60, now);
        }
        large.trim(now);
        assert_eq!(large.partitions.len(), 16, "more than half, while nobody else needs it");
        for id in 0..9 {
            small.start(PartitionId(id), Offset(0), 60, now);
        }
        small.trim(now);
        assert_eq!(small.partitions.len(), 9);
        large.trim(now);
        assert_eq!((large.partitions.len(), budget.used()), (11, 20 * PARTITION_BYTES));
        drop(large);
        assert_eq!(budget.used(), 9 * PARTITION_BYTES);
    }
}
