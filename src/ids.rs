//! Newtypes for everything that is addressed: parsed once, at the edge.
//!
//! Database keys are small integers; the wire shows partitions and queues as UUIDs. The two are one bijection
//! ([`IdSpace`]), so no look-up table exists and an id of another database is recognised as foreign.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;

/// The group of a pop or ack that names none (`spec/push-pop.md` §1.3). An ordinary group with real cursors.
pub const QUEUE_MODE_GROUP: &str = "__QUEUE_MODE__";
/// The partition of a push that names none (`spec/push-pop.md` §2.1).
pub const DEFAULT_PARTITION: &str = "Default";
/// Longest queue, partition, group or transaction id in bytes (`spec/push-pop.md` §9).
pub const NAME_BYTES_MAX: usize = 1024;

macro_rules! integer_id {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

integer_id!(
    /// Key of a queue row.
    QueueId(i32)
);
integer_id!(
    /// Key of a partition row; `Ord` is the global lock order.
    PartitionId(i64)
);
integer_id!(
    /// Key of one consumer group of one queue.
    GroupId(i32)
);
integer_id!(
    /// Position of a message in its partition, dense from 0 (I7). A cursor of -1 has finished nothing.
    Offset(i64)
);

impl Offset {
    /// The cursor of a group that has finished nothing, and the last offset of an empty partition.
    pub const NONE: Offset = Offset(-1);

    /// The offset after this one.
    pub fn next(self) -> Offset {
        Offset(self.0 + 1)
    }
}

/// The worker of a lease: one id per pop, shared by every partition that the pop claimed.
///
/// A UUIDv7 whose "random" 62 bits name the claimed partition (scrambled), so that a lease is found again by key and
/// not by search; a lease over several partitions is flagged and listed in `queen.leases`. It is an address, not a
/// secret: whoever may ack at all may also ack without a lease (`spec/ack.md` §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub Uuid);

/// Where the rows of a lease are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseScope {
    /// One partition, named in the id.
    One(PartitionId),
    /// Several partitions, listed in `queen.leases`.
    Many,
}

impl LeaseId {
    /// Reads the exact text that a pop rendered. Any other spelling is some other worker's id, so `None`.
    pub fn parse(text: &str) -> Option<LeaseId> {
        parse_canonical(text).map(LeaseId)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

fn parse_canonical(text: &str) -> Option<Uuid> {
    let id = Uuid::try_parse(text).ok()?;
    let mut canonical = Uuid::encode_buffer();
    (id.as_hyphenated().encode_lower(&mut canonical) == text).then_some(id)
}

/// xxh3-128 of a transaction id, 16 bytes big-endian in storage (`spec/ack.md` §3). SQL never sees the string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionHash(pub u128);

impl TransactionHash {
    /// Bytes of one stored hash.
    pub const BYTES: usize = 16;

    /// Hashes a transaction id.
    pub fn of(transaction_id: &str) -> TransactionHash {
        TransactionHash(xxhash_rust::xxh3::xxh3_128(transaction_id.as_bytes()))
    }

    /// Storage form.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Reads a packed column of hashes; `None` if its length is no multiple of 16.
    pub fn unpack(packed: &[u8]) -> Option<impl ExactSizeIterator<Item = TransactionHash> + '_> {
        let (chunks, rest) = packed.as_chunks::<16>();
        rest.is_empty().then(|| chunks.iter().map(|c| TransactionHash(u128::from_be_bytes(*c))))
    }
}

/// The mapping between database keys and the UUIDs of the wire, for one database.
///
/// Layout of a partition or queue id (UUID version 8): 48 bits tag of the database, 4 bits version, 12 bits kind,
/// 2 bits variant, 62 bits scrambled key. Tag and secret are drawn once, when the schema is made (`queen.meta`): an
/// id minted over another database never addresses a row of this one, and the order in which partitions were made
/// does not show (I14; a keyed permutation, no cryptography).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdSpace {
    tag: u64,
    secret: u64,
}

const KIND_PARTITION: u16 = 0x1a7;
const KIND_QUEUE: u16 = 0x0ce;
const KEY_MASK: u64 = (1 << 62) - 1;
const HALF_MASK: u64 = (1 << 31) - 1;
const LEASE_MANY: u64 = 1 << 11;
static LEASES_MINTED: AtomicU64 = AtomicU64::new(0);

impl IdSpace {
    /// The space of the database with this tag (low 48 bits count) and secret.
    pub fn new(tag: i64, secret: i64) -> IdSpace {
        IdSpace { tag: (tag as u64) & 0xffff_ffff_ffff, secret: secret as u64 }
    }

    /// The wire id of a partition.
    pub fn partition(&self, id: PartitionId) -> Uuid {
        self.encode(KIND_PARTITION, id.0 as u64)
    }

    /// The wire id of a queue.
    pub fn queue(&self, id: QueueId) -> Uuid {
        self.encode(KIND_QUEUE, id.0 as u64)
    }

    /// The partition that a wire id names, or `None` for any id that this database never minted.
    pub fn partition_of(&self, wire: Uuid) -> Option<PartitionId> {
        self.decode(KIND_PARTITION, wire).map(|key| PartitionId(key as i64))
    }

    /// A fresh lease id for a claim of exactly this partition.
    pub fn lease_on(&self, partition: PartitionId) -> LeaseId {
        self.mint_lease(0, self.scramble(partition.0 as u64))
    }

    /// A fresh lease id for a claim that may span several partitions.
    pub fn lease_on_many(&self) -> LeaseId {
        self.mint_lease(LEASE_MANY, Uuid::new_v4().as_u64_pair().1 & KEY_MASK)
    }

    /// Where to look for the rows of a lease.
    pub fn scope_of(&self, lease: LeaseId) -> LeaseScope {
        let (high, low) = lease.0.as_u64_pair();
        if high & LEASE_MANY == 0 {
            LeaseScope::One(PartitionId(self.unscramble(low & KEY_MASK) as i64))
        } else {
            LeaseScope::Many
        }
    }

    /// Milliseconds and an 11-bit counter keep two leases of one partition apart.
    fn mint_lease(&self, flag: u64, low: u64) -> LeaseId {
        let (now, _) = Uuid::now_v7().as_u64_pair();
        let count = LEASES_MINTED.fetch_add(1, Ordering::Relaxed) & (LEASE_MANY - 1);
        let high = (now & !0x0fff) | flag | count;
        LeaseId(Uuid::from_u64_pair(high, (0b10 << 62) | low))
    }

    fn encode(&self, kind: u16, key: u64) -> Uuid {
        let high = (self.tag << 16) | 0x8000 | u64::from(kind);
        Uuid::from_u64_pair(high, (0b10 << 62) | self.scramble(key))
    }

    fn decode(&self, kind: u16, wire: Uuid) -> Option<u64> {
        let (_, low) = wire.as_u64_pair();
        let key = self.unscramble(low & KEY_MASK);
        (self.encode(kind, key) == wire).then_some(key)
    }

    /// Four Feistel rounds over two halves of 31 bits.
    fn scramble(&self, key: u64) -> u64 {
        let (mut left, mut right) = ((key >> 31) & HALF_MASK, key & HALF_MASK);
        for round in 0..4 {
            (left, right) = (right, left ^ self.round(round, right));
        }
        (left << 31) | right
    }

    fn unscramble(&self, key: u64) -> u64 {
        let (mut left, mut right) = ((key >> 31) & HALF_MASK, key & HALF_MASK);
        for round in (0..4).rev() {
            (left, right) = (right ^ self.round(round, left), left);
        }
        (left << 31) | right
    }

    fn round(&self, round: u64, half: u64) -> u64 {
        let mut mixed = half ^ self.secret.rotate_left(round as u32 * 16 + 1) ^ (round << 40);
        mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 32) & HALF_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_ids_round_trip_and_foreign_ones_are_refused() {
        let here = IdSpace::new(0x1234_5678_9abc_def0, 99);
        let there = IdSpace::new(7, 99);
        for key in [0, 1, 77, i64::from(i32::MAX), (1 << 61) + 5] {
            let wire = here.partition(PartitionId(key));
            assert_eq!(here.partition_of(wire), Some(PartitionId(key)));
            assert_eq!(there.partition_of(wire), None);
            assert_eq!(wire.get_version_num(), 8);
        }
        assert_eq!(here.partition_of(here.queue(QueueId(3))), None);
        assert_eq!(here.partition_of(Uuid::now_v7()), None);
    }

    #[test]
    fn a_lease_id_leads_back_to_its_partition() {
        let here = IdSpace::new(1, -5);
        let lease = here.lease_on(PartitionId(123_456));
        assert_eq!(lease.0.get_version_num(), 7);
        assert_eq!(here.scope_of(lease), LeaseScope::One(PartitionId(123_456)));
        assert_ne!(lease, here.lease_on(PartitionId(123_456)));
        assert_eq!(here.scope_of(here.lease_on_many()), LeaseScope::Many);
    }

    #[test]
    fn a_lease_id_is_only_its_canonical_text() {
        let id = IdSpace::new(1, 2).lease_on(PartitionId(3));
        assert_eq!(LeaseId::parse(&id.to_string()), Some(id));
        assert_eq!(LeaseId::parse(&id.to_string().to_uppercase()), None);
        assert_eq!(LeaseId::parse(&format!("{{{id}}}")), None);
        assert_eq!(LeaseId::parse("not-a-lease"), None);
    }

    #[test]
    fn hashes_unpack_in_order_and_refuse_a_torn_column() {
        let ids = ["a", "b", "c"].map(TransactionHash::of);
        let packed: Vec<u8> = ids.iter().flat_map(|h| h.to_bytes()).collect();
        let back: Vec<_> = TransactionHash::unpack(&packed).into_iter().flatten().collect();
        assert_eq!(back, ids);
        assert!(TransactionHash::unpack(&packed[1..]).is_none());
    }
}
