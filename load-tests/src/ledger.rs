//! The ledger: what was stored, delivered and acknowledged, and every promise that the broker broke.
//!
//! A *lane* is a partition of a queue that this run made; one producer at a time writes to it, so the messages of a
//! lane are numbered 0, 1, 2, … in the order in which the broker must deliver them. That keeps the ledger small: a
//! few numbers per lane and group instead of a set of messages. Only what breaks the sequence is remembered one by
//! one, up to a bound.
//!
//! What is legal and what is not:
//! - A message that was delivered and not acknowledged may come again (counted), a message that was acknowledged may not.
//! - An answer starts at the first message that is not acknowledged, and goes on without a gap.
//! - While one lease runs and nothing was sent to end it, the same (lane, group) is not handed out again.
//! - At the end every stored message was delivered to and acknowledged by every group.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

#[cfg(test)]
mod tests;

const SHARDS: usize = 64;
/// Violations of one kind described in words; the rest are only counted.
const NOTES_PER_KIND_MAX: u64 = 5;
/// Single messages remembered as missing; past it they count as lost at once.
const MISSING_MAX: u64 = 1_000_000;

/// A promise that was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Violation {
    /// Stored, and never delivered to a group.
    Lost,
    /// Twice in one answer.
    Duplicated,
    /// Delivered after a later one of its lane.
    OutOfOrder,
    /// Delivered again after its ack was answered with success.
    AckedThenRedelivered,
    /// Handed out again while an earlier lease was running.
    LeasedTwice,
    /// Delivered, and never sent by this run.
    Phantom,
    /// The payload is not the one that was pushed.
    Corrupt,
    /// Answered `duplicate` although it was sent for the first time.
    FalseDuplicate,
    /// Stored at another offset than its place in the lane.
    WrongOffset,
    /// An ack of a delivered message was answered with an error that cannot be true.
    WronglyRefused,
    /// Delivered, and not acknowledged when the drain ended.
    Unsettled,
}

impl Violation {
    const ALL: [Self; 11] = [
        Self::Lost,
        Self::Duplicated,
        Self::OutOfOrder,
        Self::AckedThenRedelivered,
        Self::LeasedTwice,
        Self::Phantom,
        Self::Corrupt,
        Self::FalseDuplicate,
        Self::WrongOffset,
        Self::WronglyRefused,
        Self::Unsettled,
    ];
}

/// What an ack did to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckFate {
    /// Answered with success.
    Done,
    /// No answer, or one that says that the outcome is not known.
    Unknown,
    /// Answered with an error: nothing happened.
    Refused,
}

#[derive(Default, Clone)]
struct Lane {
    /// Numbers given out: the next message has this one.
    sent: u32,
    /// All below are stored.
    stored: u32,
}

#[derive(Clone)]
struct Reader {
    /// All below were delivered at least once, or are remembered as missing.
    next: u32,
    /// All below were acknowledged with success.
    acked: u32,
    /// Acks for all below were sent: the broker may hand out what follows before we have read the answer.
    asked: u32,
    /// Acks for all below had an unknown outcome.
    maybe: u32,
    /// Until then, in milliseconds of the run, a lease surely runs.
    leased_until_ms: u32,
    /// Lowest message that came again while an ack of it was under way and its lease was running. Whether that was
    /// wrong is known when the ack is answered.
    again_from: u32,
}

impl Default for Reader {
    fn default() -> Self {
        Self { next: 0, acked: 0, asked: 0, maybe: 0, leased_until_ms: 0, again_from: u32::MAX }
    }
}

#[derive(Default)]
struct Shard {
    lanes: Vec<Lane>,
    /// `groups` entries per lane.
    readers: Vec<Reader>,
    missing: HashMap<(u32, usize), BTreeSet<u32>>,
}

/// The books of one run. Shared by all its workers.
pub struct Ledger {
    shards: Vec<Mutex<Shard>>,
    groups: usize,
    lease_ms: u32,
    check_leases: bool,
    stored: AtomicU64,
    /// Of the stored ones, those acknowledged; over all groups.
    settled: AtomicU64,
    redelivered: AtomicU64,
    missing: AtomicU64,
    counts: [AtomicU64; Violation::ALL.len()],
    notes: Mutex<Vec<String>>,
}

/// The ledger's judgement at the end.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// Messages that the broker took.
    pub stored: u64,
    /// Of them, acknowledged with success; over all groups.
    pub acked: u64,
    /// Not answered, but acknowledged as far as anyone can tell: their ack had no answer, and they never came back.
    pub acked_unanswered: u64,
    /// Deliveries that were repeats of unacknowledged messages: legal.
    pub redelivered: u64,
    /// Broken promises by kind; only those that occurred.
    pub violations: BTreeMap<Violation, u64>,
    /// The first of them in words.
    pub notes: Vec<String>,
}

impl Verdict {
    /// Whether every promise was kept.
    pub fn holds(&self) -> bool {
        self.violations.is_empty()
    }

    /// Adds the judgement of a run that this one fed.
    pub fn and(mut self, other: Self) -> Self {
        for (kind, count) in other.violations {
            *self.violations.entry(kind).or_default() += count;
        }
        self.notes.extend(other.notes);
        self.redelivered += other.redelivered;
        self
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    /// Books for `lanes` lanes that `groups` groups read. `lease_seconds` is what every pop asks for; 0 switches the
    /// check of running leases off (a database crash may lose a lease, and that is legal).
    pub fn new(lanes: u32, groups: usize, lease_seconds: u32) -> Self {
        let shards = (0..SHARDS)
            .map(|shard| {
                let count = (lanes as usize + SHARDS - 1 - shard) / SHARDS;
                Mutex::new(Shard {
                    lanes: vec![Lane::default(); count],
                    readers: vec![Reader::default(); count * groups],
                    missing: HashMap::new(),
                })
            })
            .collect();
        Self {
            shards,
            groups,
            lease_ms: lease_seconds * 1000,
            check_leases: lease_seconds > 0,
            stored: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            redelivered: AtomicU64::new(0),
            missing: AtomicU64::new(0),
            counts: Default::default(),
            notes: Mutex::new(Vec::new()),
        }
    }

    fn shard(&self, lane: u32) -> Option<(MutexGuard<'_, Shard>, usize)> {
        let (shard, at) = (lane as usize % SHARDS, lane as usize / SHARDS);
        let guard = lock(&self.shards[shard]);
        (at < guard.lanes.len()).then_some((guard, at))
    }

    /// Records a broken promise; `what` is asked for words only while there is room for them.
    pub fn violation(&self, kind: Violation, count: u64, what: impl FnOnce() -> String) {
        // Kinds that come by the thousand must not crowd out the words of the others.
        if self.counts[kind as usize].fetch_add(count, Relaxed) < NOTES_PER_KIND_MAX {
            lock(&self.notes).push(format!("{kind:?}: {}", what()));
        }
    }

    /// Whether leases are judged.
    pub fn checks_leases(&self) -> bool {
        self.check_leases
    }

    /// Gives out the next `count` numbers of a lane, and answers the first. The caller is the lane's only producer.
    pub fn take_numbers(&self, lane: u32, count: u32) -> u32 {
        let Some((mut shard, at)) = self.shard(lane) else { return 0 };
        let first = shard.lanes[at].sent;
        shard.lanes[at].sent += count;
        first
    }

    /// The broker took all messages of the lane below `upto`. Forwarding may report out of turn: never moves back.
    pub fn stored(&self, lane: u32, upto: u32) {
        let Some((mut shard, at)) = self.shard(lane) else { return };
        let lane = &mut shard.lanes[at];
        lane.sent = lane.sent.max(upto);
        if upto <= lane.stored {
            return;
        }
        let before = lane.stored;
        lane.stored = upto;
        self.stored.fetch_add(u64::from(upto - before), Relaxed);
        // An ack can overtake the answer of the push: it counts as settled from here on.
        let readers = &shard.readers[at * self.groups..(at + 1) * self.groups];
        let ahead: u64 = readers.iter().map(|reader| u64::from(reader.acked.clamp(before, upto) - before)).sum();
        self.settled.fetch_add(ahead, Relaxed);
    }

    /// Messages below `upto` are about to be sent by someone who numbers them himself (a relay).
    pub fn announce(&self, lane: u32, upto: u32) {
        if let Some((mut shard, at)) = self.shard(lane) {
            shard.lanes[at].sent = shard.lanes[at].sent.max(upto);
        }
    }

    /// One answer's messages of one lane, in their order. `asked_ms` is when the pop was sent, `now_ms` when it was
    /// answered: the lease began somewhere between.
    pub fn delivered(&self, group: usize, lane: u32, seqs: &[u32], asked_ms: u32, now_ms: u32) {
        let groups = self.groups;
        let Some((mut guard, at)) = self.shard(lane) else {
            self.violation(Violation::Phantom, seqs.len() as u64, || format!("lane {lane} does not exist"));
            return;
        };
        let shard = &mut *guard;
        let sent = shard.lanes[at].sent;
        let reader = &mut shard.readers[at * groups + group];
        if self.check_leases && reader.leased_until_ms > now_ms {
            let first = seqs.first().copied().unwrap_or(u32::MAX);
            if reader.asked <= reader.acked {
                let left = reader.leased_until_ms - now_ms;
                self.violation(Violation::LeasedTwice, 1, || {
                    format!("lane {lane} group {group} came again {left} ms before its lease ended")
                });
            } else if first >= reader.acked && first < reader.asked {
                reader.again_from = reader.again_from.min(first);
            }
        }
        reader.leased_until_ms = asked_ms.saturating_add(self.lease_ms);
        let mut expected = reader.acked.max(reader.asked);
        for (place, &seq) in seqs.iter().enumerate() {
            let what = |text: &str| format!("lane {lane} group {group} message {seq}: {text}");
            if seq >= sent {
                self.violation(Violation::Phantom, 1, || what("was never sent"));
                continue;
            }
            if seq < reader.acked {
                self.violation(Violation::AckedThenRedelivered, 1, || {
                    what(&format!("all below {} were acknowledged", reader.acked))
                });
                continue;
            }
            if seqs[..place].last().is_some_and(|&last| seq <= last) {
                let twice = seqs[..place].contains(&seq);
                let kind = if twice { Violation::Duplicated } else { Violation::OutOfOrder };
                self.violation(kind, 1, || what(&format!("place {place} of an answer, after {}", seqs[place - 1])));
                forget_missing(&mut shard.missing, lane, group, seq);
                continue;
            }
            if forget_missing(&mut shard.missing, lane, group, seq) {
                self.violation(Violation::OutOfOrder, 1, || what("came after a later one"));
            } else if seq > expected {
                self.note_missing(&mut shard.missing, lane, group, expected, seq);
            }
            if seq < reader.next {
                self.redelivered.fetch_add(1, Relaxed);
            }
            reader.next = reader.next.max(seq + 1);
            expected = seq + 1;
        }
    }

    fn note_missing(
        &self,
        missing: &mut HashMap<(u32, usize), BTreeSet<u32>>,
        lane: u32,
        group: usize,
        from: u32,
        to: u32,
    ) {
        let count = u64::from(to - from);
        if self.missing.fetch_add(count, Relaxed) + count > MISSING_MAX {
            self.violation(Violation::Lost, count, || format!("lane {lane} group {group}: {from} to {}", to - 1));
        } else {
            missing.entry((lane, group)).or_default().extend(from..to);
        }
    }

    /// An ack of all up to `last` of the lane is about to be sent.
    pub fn ack_sent(&self, group: usize, lane: u32, last: u32) {
        if let Some((mut shard, at)) = self.shard(lane) {
            let reader = &mut shard.readers[at * self.groups + group];
            reader.asked = reader.asked.max(last + 1);
        }
    }

    /// What became of an ack whose highest message is `last`. The cursor is one number, so success there means
    /// success for all below.
    pub fn ack_ended(&self, group: usize, lane: u32, last: u32, fate: AckFate) {
        let Some((mut shard, at)) = self.shard(lane) else { return };
        let stored = shard.lanes[at].stored;
        let reader = &mut shard.readers[at * self.groups + group];
        let again_from = std::mem::replace(&mut reader.again_from, u32::MAX);
        if fate == AckFate::Done && again_from <= last {
            self.violation(Violation::AckedThenRedelivered, 1, || {
                format!(
                    "lane {lane} group {group} message {again_from}: came again under a running lease, and was acked"
                )
            });
        }
        reader.leased_until_ms = 0;
        match fate {
            AckFate::Done => {
                if last + 1 > reader.acked {
                    let (before, after) = (reader.acked.min(stored), (last + 1).min(stored));
                    self.settled.fetch_add(u64::from(after - before), Relaxed);
                    reader.acked = last + 1;
                }
            }
            AckFate::Unknown => reader.maybe = reader.maybe.max(last + 1),
            AckFate::Refused => {}
        }
    }

    /// Messages stored and not yet acknowledged, averaged over the groups.
    pub fn backlog(&self) -> u64 {
        self.stored.load(Relaxed).saturating_sub(self.settled.load(Relaxed) / self.groups as u64)
    }

    /// Messages that the broker took so far.
    pub fn stored_total(&self) -> u64 {
        self.stored.load(Relaxed)
    }

    /// Whether every stored message was acknowledged by every group.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Relaxed) >= self.stored.load(Relaxed) * self.groups as u64
    }

    /// Violations so far, for the progress line.
    pub fn violations_so_far(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Numbers up to which the lane is stored.
    pub fn stored_of(&self, lane: u32) -> u32 {
        self.shard(lane).map_or(0, |(shard, at)| shard.lanes[at].stored)
    }

    /// Closes the books.
    pub fn close(&self) -> Verdict {
        let mut unanswered = 0;
        for (index, shard) in self.shards.iter().enumerate() {
            let shard = lock(shard);
            for (at, state) in shard.lanes.iter().enumerate() {
                let lane = (at * SHARDS + index) as u32;
                for group in 0..self.groups {
                    let reader = &shard.readers[at * self.groups + group];
                    unanswered += self.close_reader(lane, group, state, reader, shard.missing.get(&(lane, group)));
                }
            }
        }
        let violations = Violation::ALL
            .iter()
            .map(|&kind| (kind, self.counts[kind as usize].load(Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect();
        Verdict {
            stored: self.stored.load(Relaxed),
            acked: self.settled.load(Relaxed),
            acked_unanswered: unanswered,
            redelivered: self.redelivered.load(Relaxed),
            violations,
            notes: lock(&self.notes).clone(),
        }
    }

    fn close_reader(
        &self,
        lane: u32,
        group: usize,
        state: &Lane,
        reader: &Reader,
        missing: Option<&BTreeSet<u32>>,
    ) -> u64 {
        let skipped = missing.map_or(0, |set| set.range(..state.stored).count() as u64);
        let never = u64::from(state.stored.saturating_sub(reader.next));
        if skipped + never > 0 {
            self.violation(Violation::Lost, skipped + never, || {
                let first = missing.and_then(|set| set.first().copied()).unwrap_or(reader.next);
                format!("lane {lane} group {group}: {} of {}, first {first}", skipped + never, state.stored)
            });
        }
        let settled = reader.acked.max(reader.maybe);
        let unsettled = state.stored.min(reader.next).saturating_sub(settled);
        if unsettled > 0 {
            self.violation(Violation::Unsettled, u64::from(unsettled), || {
                format!("lane {lane} group {group}: {settled} to {}", state.stored.min(reader.next) - 1)
            });
        }
        u64::from(reader.maybe.min(state.stored).saturating_sub(reader.acked))
    }
}

fn forget_missing(missing: &mut HashMap<(u32, usize), BTreeSet<u32>>, lane: u32, group: usize, seq: u32) -> bool {
    missing.get_mut(&(lane, group)).is_some_and(|set| set.remove(&seq))
}
