//! What one push shard remembers of recent transaction ids, so that most pushes need not ask PostgreSQL.
//!
//! A memory says "surely new" or "look at these offsets"; PostgreSQL decides the rest, under the partition lock, in the
//! same transaction (I9). Per partition it covers a run of offsets without gaps, up to `next`; what other brokers pushed
//! above that is read before it is used. It keeps 64 of the 128 bits of a hash, for one to two windows. A partition that
//! gets no pushes is dropped after that, and past the bound whole partitions are dropped: their next push reads the
//! window again.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::ids::{Offset, PartitionId, TransactionHash};

/// Bytes that one remembered id costs about: key, offset, table slack.
const ENTRY_BYTES: usize = 24;
/// Bytes that one remembered partition costs beside its ids.
const PARTITION_BYTES: usize = 256;
/// Windows are judged by the database clock, ages here by ours: keep ids a little longer.
const CLOCK_SLACK: Duration = Duration::from_secs(30);

/// Hashes are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 << 8) | u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type Ids = HashMap<u64, i64, BuildHasherDefault<Identity>>;

/// Two generations: a rotation drops ids that are older than a window and never one that is younger.
#[derive(Debug)]
struct Memory {
    older: Ids,
    newer: Ids,
    newer_since: Instant,
    /// Every stored message committed since then and below `next` is remembered.
    covers_since: Option<Instant>,
    next: i64,
    used: Instant,
    /// How long after its last use nothing of it is inside the window any more.
    keep: Duration,
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

/// The memory of one push shard or transaction lane.
#[derive(Debug)]
pub struct DedupMemory {
    partitions: HashMap<PartitionId, Memory>,
    expiry: VecDeque<(Instant, PartitionId)>,
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
        DedupMemory { partitions: HashMap::new(), expiry: VecDeque::new(), entries: 0, budget, counted: 0 }
    }

    /// What to read before the partition's memory may be used: its last offset is `last`, its window `window_seconds`.
    pub fn refresh(&mut self, partition: PartitionId, last: Offset, window_seconds: i32, now: Instant) -> Refresh {
        let window = Duration::from_secs(u64::from(window_seconds.unsigned_abs()));
        let Some(memory) = self.partitions.get_mut(&partition) else { return Refresh::Window };
        if memory.ambiguous || memory.covers_since.is_some_and(|since| since + window > now) {
            return Refresh::Window;
        }
        if now.saturating_duration_since(memory.newer_since) > window + CLOCK_SLACK {
            self.entries -= memory.older.len();
            memory.older = std::mem::take(&mut memory.newer);
            // What the older generation holds was committed after its own start.
            memory.covers_since = Some(memory.newer_since);
            memory.newer_since = now;
        }
        if memory.next > last.0 { Refresh::Nothing } else { Refresh::From(Offset(memory.next)) }
    }

    /// Starts a memory of the partition from what the whole window holds: the hashes at `rows` and nothing else.
    pub fn start(&mut self, partition: PartitionId, last: Offset, window_seconds: i32, now: Instant) {
        self.forget(partition);
        let window = Duration::from_secs(u64::from(window_seconds.unsigned_abs()));
        let keep = (window + CLOCK_SLACK) * 2;
        let covers_since = if last == Offset::NONE { None } else { Some(now.checked_sub(window).unwrap_or(now)) };
        let memory = Memory {
            older: Ids::default(),
            newer: Ids::default(),
            newer_since: now,
            covers_since,
            next: last.0 + 1,
            used: now,
            keep,
            ambiguous: false,
        };
        self.partitions.insert(partition, memory);
        self.expiry.push_back((now + keep, partition));
    }

    /// Adds stored hashes, in offset order.
    pub fn add(&mut self, partition: PartitionId, base: Offset, hashes: &[TransactionHash], now: Instant) {
        let Some(memory) = self.partitions.get_mut(&partition) else { return };
        for (offset, hash) in (base.0..).zip(hashes) {
            if memory.newer.insert(hash.0 as u64, offset).is_some_and(|before| before != offset) {
                memory.ambiguous = true;
            }
        }
        self.entries += hashes.len();
        memory.next = memory.next.max(base.0 + hashes.len() as i64);
        memory.used = now;
    }

    /// The offsets at which this hash may be stored; none = surely new.
    pub fn candidates(&self, partition: PartitionId, hash: TransactionHash) -> impl Iterator<Item = Offset> + '_ {
        let key = hash.0 as u64;
        let memory = self.partitions.get(&partition);
        memory.into_iter().flat_map(move |m| [m.older.get(&key), m.newer.get(&key)]).flatten().map(|o| Offset(*o))
    }

    /// Whether it answers for this partition.
    pub fn covers(&self, partition: PartitionId) -> bool {
        self.partitions.get(&partition).is_some_and(|memory| !memory.ambiguous)
    }

    /// Drops the partition: what was stored is not known for certain.
    pub fn forget(&mut self, partition: PartitionId) {
        if let Some(memory) = self.partitions.remove(&partition) {
            self.entries = self.entries.saturating_sub(memory.older.len() + memory.newer.len());
        }
    }

    /// Drops what is out of date, and whole partitions while the bound is exceeded.
    pub fn trim(&mut self, now: Instant) {
        while self.expiry.front().is_some_and(|(at, _)| *at <= now) {
            let Some((_, partition)) = self.expiry.pop_front() else { break };
            let Some(memory) = self.partitions.get(&partition) else { continue };
            if memory.used + memory.keep > now {
                self.expiry.push_back((memory.used + memory.keep, partition));
            } else {
                self.forget(partition);
            }
        }
        self.count();
        while self.budget.is_exceeded_by(self.counted) {
            let Some(partition) = self.partitions.keys().next().copied() else { break };
            self.forget(partition);
            self.count();
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
