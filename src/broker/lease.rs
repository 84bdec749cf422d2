//! The lease registry of one partition: who holds which span until when, and a fingerprint of what was delivered.
//!
//! Pure and in memory: a hint that decides which acks may skip hash resolution. PostgreSQL re-validates every one of
//! them, so a lost or stale entry costs a slower ack and never a wrong one (I6).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ids::{GroupId, LeaseId, Offset, PartitionId, QueueId, TransactionHash};
use crate::store::advances::PositionalAdvance;

#[cfg(test)]
mod tests;

/// How long past its expiry an entry still counts: this clock is not the one that judges (`spec/ack.md` §7).
pub const EXPIRY_MARGIN: Duration = Duration::from_secs(10);

/// A set of 128-bit hashes in constant space: how many distinct ones, their sum and their xor, both mod 2^128.
///
/// Equal sets have equal fingerprints; different sets of equal size have equal ones with a chance of about 2^-128 per
/// pair. The hash is not secret, so a client could construct such ids, but only for a batch that it holds the lease of
/// and could complete anyway by acking its last message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint {
    distinct: u32,
    sum: u128,
    xor: u128,
}

impl Fingerprint {
    /// The fingerprint of the distinct hashes among these.
    pub fn of(hashes: impl IntoIterator<Item = TransactionHash>) -> Fingerprint {
        let given = hashes.into_iter();
        let mut hashes = Vec::with_capacity(given.size_hint().1.unwrap_or_default());
        hashes.extend(given.map(|hash| hash.0));
        hashes.sort_unstable();
        hashes.dedup();
        if cfg!(feature = "planted-flaw") {
            // Any set of the right size: what the differential histories must notice.
            return Fingerprint { distinct: hashes.len() as u32, ..Fingerprint::default() };
        }
        hashes.iter().fold(Fingerprint::default(), |print, hash| Fingerprint {
            distinct: print.distinct + 1,
            sum: print.sum.wrapping_add(*hash),
            xor: print.xor ^ hash,
        })
    }
}

/// A lease that this broker has just granted.
#[derive(Clone, Debug)]
pub struct LeaseGrant {
    /// The claimed partition.
    pub partition: PartitionId,
    /// Its queue.
    pub queue: QueueId,
    /// The claiming group.
    pub group: GroupId,
    /// Its name, as acks will spell it.
    pub group_name: Arc<str>,
    /// The lease id of the answer.
    pub worker: LeaseId,
    /// The cursor at the claim.
    pub committed: Offset,
    /// The last offset delivered, which is the end of the leased span.
    pub batch_end: Offset,
    /// When the lease ends if nothing extends it.
    pub expires: Instant,
    /// Of everything delivered.
    pub fingerprint: Fingerprint,
    /// Whether the group conflates: the ack that closes the lease tells how many positions it retired unseen.
    pub conflating: bool,
}

/// A fully covered batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The one write that acks it.
    pub advance: PositionalAdvance,
    /// Positions that a conflating lease retires without a delivery.
    pub conflated: Option<i64>,
}

/// Why an ack takes full resolution. Also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Miss {
    /// The registry is switched off.
    Off,
    /// An item is not completed, or names no message.
    Signal,
    /// No lease id.
    NoLease,
    /// No lease of that (partition, group) is known here: granted elsewhere, or before a restart, or dropped.
    Unknown,
    /// Another worker holds it.
    OtherWorker,
    /// It expired, margin included.
    Expired,
    /// Something else than the delivered set.
    Partial,
    /// The actor's mailbox is full.
    Busy,
}

impl Miss {
    /// Every reason.
    pub const ALL: [Miss; 8] = [
        Miss::Off,
        Miss::Signal,
        Miss::NoLease,
        Miss::Unknown,
        Miss::OtherWorker,
        Miss::Expired,
        Miss::Partial,
        Miss::Busy,
    ];

    /// As a label.
    pub fn label(self) -> &'static str {
        match self {
            Miss::Off => "off",
            Miss::Signal => "signal",
            Miss::NoLease => "no_lease",
            Miss::Unknown => "unknown",
            Miss::OtherWorker => "other_worker",
            Miss::Expired => "expired",
            Miss::Partial => "partial",
            Miss::Busy => "busy",
        }
    }
}

/// The live leases of one partition: one per group at most, nearly always one. `R` is what an entry keeps reserved.
#[derive(Debug)]
pub struct Registry<R> {
    entries: Vec<(LeaseGrant, R)>,
}

impl<R> Default for Registry<R> {
    fn default() -> Registry<R> {
        Registry { entries: Vec::new() }
    }
}

impl<R> Registry<R> {
    /// Registers a lease; it replaces an older one of the same group.
    pub fn grant(&mut self, grant: LeaseGrant, reserved: R) {
        self.entries.retain(|(entry, _)| entry.group != grant.group);
        self.entries.reserve_exact(1);
        self.entries.push((grant, reserved));
    }

    /// The entry dies if the acked set is exactly what was delivered under this lease: the next ack of the batch finds
    /// nothing and takes resolution.
    pub fn cover(&mut self, group_name: &str, worker: LeaseId, acked: &Fingerprint, now: Instant) -> Result<Hit, Miss> {
        let found = self.entries.iter().position(|(entry, _)| *entry.group_name == *group_name);
        let at = found.ok_or(Miss::Unknown)?;
        let (entry, _) = self.entries.get(at).ok_or(Miss::Unknown)?;
        if entry.worker != worker {
            return Err(Miss::OtherWorker);
        }
        if now > entry.expires + EXPIRY_MARGIN {
            return Err(Miss::Expired);
        }
        if entry.fingerprint != *acked {
            return Err(Miss::Partial);
        }
        let (entry, _) = self.entries.swap_remove(at);
        Ok(Hit {
            advance: PositionalAdvance {
                partition: entry.partition,
                group: entry.group,
                worker,
                committed: entry.committed,
                batch_end: entry.batch_end,
            },
            conflated: entry.conflating.then(|| entry.batch_end.0 - entry.committed.0 - 1),
        })
    }

    /// A lease of this worker was extended; `used` hears of each. Never shortens.
    pub fn extend(&mut self, worker: LeaseId, expires: Instant, used: impl Fn(&R)) {
        for (entry, reserved) in self.entries.iter_mut().filter(|(entry, _)| entry.worker == worker) {
            entry.expires = entry.expires.max(expires);
            used(reserved);
        }
    }

    /// Drops the entry that this is said of.
    pub fn evict(&mut self, is_meant: impl Fn(&R) -> bool) {
        self.entries.retain(|(_, reserved)| !is_meant(reserved));
    }

    /// Drops the lease of a group; with a worker, only that worker's: a late ack of an old worker must not take the
    /// entry of the present one.
    pub fn drop_lease(&mut self, group: GroupId, worker: Option<LeaseId>) {
        self.entries.retain(|(entry, _)| entry.group != group || worker.is_some_and(|worker| worker != entry.worker));
    }

    /// Drops what belongs to a queue that is gone.
    pub fn forget_queue(&mut self, queue: QueueId) {
        self.entries.retain(|(entry, _)| entry.queue != queue);
    }

    /// Drops what has expired, margin included.
    pub fn expire(&mut self, now: Instant) {
        self.entries.retain(|(entry, _)| now <= entry.expires + EXPIRY_MARGIN);
    }

    /// When the next entry has to go.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.entries.iter().map(|(entry, _)| entry.expires + EXPIRY_MARGIN).min()
    }

    /// Whether no lease is left.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
