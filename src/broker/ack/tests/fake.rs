//! A store in memory: one log and cursor table behind the [`AckStore`] trait, a clock that is set by hand, and faults on
//! demand. It states what the SQL must do; the SQL itself is tested against PostgreSQL in `tests/it`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use futures_util::future::{BoxFuture, FutureExt};
use uuid::Uuid;

use crate::broker::ack::port::AckStore;
use crate::broker::segment::{Frame, seal};
use crate::ids::{GroupId, IdSpace, LeaseId, Offset, PartitionId, QueueId, TransactionHash};
use crate::store::acks::{
    CursorRow, CursorWrite, Guard, HashRow, LeaseClaim, NotBefore, OnLocked, PositionalAdvance, RowLease, SpanRead,
};
use crate::store::dead_letters::{LetterSource, NewDeadLetter};
use crate::store::{StoreError, StoreResult};

/// Queue options of one partition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) retry_limit: i32,
    pub(crate) retry_delay_ms: i32,
    pub(crate) dead_letters: bool,
}

/// One partition's log: transaction ids by offset, in stored rows.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    pub(crate) rows: Vec<(i64, Vec<String>)>,
    pub(crate) log_start: i64,
    pub(crate) txns_start: i64,
    pub(crate) options: Options,
}

impl Log {
    pub(crate) fn next(&self) -> i64 {
        self.rows.last().map_or(0, |(base, ids)| base + ids.len() as i64)
    }

    pub(crate) fn id(&self, offset: i64) -> Option<&String> {
        let (base, ids) = self.rows.iter().rev().find(|(base, _)| *base <= offset)?;
        ids.get(usize::try_from(offset - base).ok()?)
    }
}

/// One cursor row; times in milliseconds of the fake clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) committed: i64,
    pub(crate) consumed: i64,
    pub(crate) retry_count: i32,
    pub(crate) batch_end: Option<i64>,
    pub(crate) worker: Option<LeaseId>,
    pub(crate) expires: Option<i64>,
    pub(crate) not_before: Option<i64>,
}

impl Row {
    pub(crate) fn live(&self, now: i64) -> bool {
        self.expires.is_some_and(|expires| expires > now)
    }

    fn release(&mut self) {
        (self.batch_end, self.worker, self.expires) = (None, None, None);
    }
}

/// A filed message: offset, group, reason, retry count.
pub(crate) type Letter = (i64, String, String, i32);

#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    pub(crate) now: i64,
    pub(crate) logs: BTreeMap<i64, Log>,
    pub(crate) rows: BTreeMap<(i64, i32), Row>,
    pub(crate) letters: BTreeMap<i64, Vec<Letter>>,
    /// Sizes of the advances that were sent, and how many statements wrote at all.
    pub(crate) advances: Vec<usize>,
    pub(crate) settles: usize,
    pub(crate) reads: usize,
}

/// What happens to the next writing statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No connection.
    Unavailable,
    /// Lost before it reached the server.
    LostBefore,
    /// Committed, and the answer lost.
    LostAfter,
    /// Refused with this SQLSTATE.
    Refused(&'static str),
}

/// A deliberate mistake, to prove that the checkers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// An advance does not compare the cursor with its value at the claim.
    CursorIgnored,
    /// An advance does not ask whether the lease expired.
    LapsedAccepted,
    /// An advance does not ask whether hashes were purged.
    PurgeMissed,
}

pub(crate) struct FakeStore {
    world: Mutex<World>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    /// Any advance that holds a row of this partition is refused.
    pub(crate) poison: Mutex<Option<i64>>,
    pub(crate) flaw: Option<Flaw>,
    /// Held by a test to keep advances from running.
    pub(crate) gate: tokio::sync::Mutex<()>,
}

pub(crate) const IDS: fn() -> IdSpace = || IdSpace::new(11, 12);

/// `g3` is group 3.
pub(crate) fn group_id(name: &str) -> i32 {
    name.trim_start_matches('g').parse().unwrap_or(-1)
}

impl FakeStore {
    pub(crate) fn new(flaw: Option<Flaw>) -> FakeStore {
        FakeStore {
            world: Mutex::default(),
            faults: Mutex::default(),
            poison: Mutex::default(),
            flaw,
            gate: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    pub(crate) fn create(&self, partition: i64, options: Options) {
        let log = Log { rows: Vec::new(), log_start: 0, txns_start: 0, options };
        self.world().logs.insert(partition, log);
    }

    pub(crate) fn push(&self, partition: i64, ids: Vec<String>) {
        let mut world = self.world();
        let log = world.logs.get_mut(&partition).unwrap();
        let base = log.next();
        log.rows.push((base, ids));
    }

    /// Leases up to `batch` messages; answers the cursor, the offsets and the transaction ids.
    pub(crate) fn claim(
        &self,
        partition: i64,
        group: i32,
        worker: LeaseId,
        batch: i64,
        lease_ms: i64,
    ) -> Option<(i64, i64, Vec<String>)> {
        let world = &mut *self.world();
        let log = world.logs.get(&partition)?;
        let row = world.rows.entry((partition, group)).or_insert_with(|| Row {
            committed: log.log_start - 1,
            consumed: 0,
            retry_count: 0,
            batch_end: None,
            worker: None,
            expires: None,
            not_before: None,
        });
        let first = (row.committed + 1).max(log.log_start);
        let last = (first + batch - 1).min(log.next() - 1);
        if row.live(world.now) || row.not_before.is_some_and(|at| at > world.now) || last < first {
            return None;
        }
        row.worker = Some(worker);
        row.batch_end = Some(last);
        row.expires = Some(world.now + lease_ms);
        row.not_before = None;
        let ids = (first..=last).filter_map(|offset| log.id(offset).cloned()).collect();
        Some((row.committed, last, ids))
    }

    pub(crate) fn extend(&self, partition: i64, worker: LeaseId, lease_ms: i64) -> bool {
        let mut world = self.world();
        let now = world.now;
        let mut rows = world.rows.iter_mut().filter(|((p, _), row)| *p == partition && row.worker == Some(worker));
        match rows.next() {
            Some((_, row)) if row.live(now) => {
                row.expires = row.expires.max(Some(now + lease_ms));
                true
            }
            _ => false,
        }
    }

    pub(crate) fn seek(&self, partition: i64, group: i32, committed: i64) {
        if let Some(row) = self.world().rows.get_mut(&(partition, group)) {
            row.release();
            (row.committed, row.retry_count, row.not_before) = (committed, 0, None);
        }
    }

    fn next_fault(&self) -> Option<Fault> {
        self.faults.lock().unwrap().pop_front()
    }

    fn faulty<T>(&self, fault: Option<Fault>, run: impl FnOnce(&FakeStore) -> T) -> StoreResult<T> {
        match fault {
            None => Ok(run(self)),
            Some(Fault::Unavailable) => Err(StoreError::fake_unavailable()),
            Some(Fault::LostBefore) => Err(StoreError::no_answer("test")),
            Some(Fault::LostAfter) => {
                run(self);
                Err(StoreError::no_answer("test"))
            }
            Some(Fault::Refused(state)) => Err(StoreError::fake_refusal(state)),
        }
    }

    fn read_span_now(&self, partition: PartitionId, group: &str, lease: LeaseClaim) -> Option<SpanRead> {
        let mut world = self.world();
        world.reads += 1;
        let log = world.logs.get(&partition.0)?;
        let row = world.rows.get(&(partition.0, group_id(group)))?;
        let live = row.live(world.now);
        let from = (row.committed + 1).max(log.txns_start);
        let read_to = match row.batch_end {
            Some(end) if live || end >= from => end.min(from + 16_383),
            _ => from + 1023,
        };
        let cursor = CursorRow {
            group: GroupId(group_id(group)),
            committed: Offset(row.committed),
            batch_end: row.batch_end.map(Offset),
            lease: row.worker.map(|worker| RowLease { worker, live }),
            retry_count: row.retry_count,
            txns_start: Offset(log.txns_start),
            last_offset: Offset(log.next() - 1),
            retry_limit: log.options.retry_limit,
            retry_delay_ms: log.options.retry_delay_ms,
            dead_letters: log.options.dead_letters,
            conflation: false,
        };
        let hashes = if cursor.admits(lease) { pages(log, from, read_to) } else { Vec::new() };
        Some(SpanRead { row: cursor, hashes, from: Offset(from), read_to: Offset(read_to) })
    }

    fn settle_now(&self, guard: &Guard, write: &CursorWrite, letter: Option<&NewDeadLetter>) -> bool {
        let world = &mut *self.world();
        world.settles += 1;
        let Some(row) = world.rows.get_mut(&(guard.partition.0, guard.group.0)) else { return false };
        let same = row.committed == guard.committed.0
            && row.retry_count == guard.retry_count
            && row.batch_end == guard.batch_end.map(|end| end.0)
            && row.worker == guard.lease.map(|lease| lease.worker)
            && row.live(world.now) == guard.lease.is_some_and(|lease| lease.live);
        if !same {
            return false;
        }
        if let Some(letter) = letter {
            let (group, reason) = (letter.group_name.clone(), letter.reason.clone());
            let filed = (letter.offset.0, group, reason, row.retry_count);
            world.letters.entry(guard.partition.0).or_default().push(filed);
        }
        row.consumed += write.committed.0 - row.committed;
        row.committed = write.committed.0;
        row.retry_count = write.retry_count;
        if write.release {
            row.release();
        }
        match write.not_before {
            NotBefore::Keep => {}
            NotBefore::Clear => row.not_before = None,
            NotBefore::After(delay) => row.not_before = Some(world.now + delay.as_millis() as i64),
        }
        true
    }

    fn advance_now(&self, rows: &[PositionalAdvance]) -> Vec<bool> {
        let world = &mut *self.world();
        world.advances.push(rows.len());
        let mut landed = Vec::new();
        for advance in rows {
            let log = world.logs.get(&advance.partition.0);
            let Some((row, log)) = world.rows.get_mut(&(advance.partition.0, advance.group.0)).zip(log) else {
                landed.push(false);
                continue;
            };
            let valid = row.worker == Some(advance.worker)
                && row.batch_end == Some(advance.batch_end.0)
                && (row.live(world.now) || self.flaw == Some(Flaw::LapsedAccepted))
                && (row.committed == advance.committed.0 || self.flaw == Some(Flaw::CursorIgnored))
                && (log.txns_start <= row.committed + 1 || self.flaw == Some(Flaw::PurgeMissed));
            if valid {
                row.consumed += advance.batch_end.0 - row.committed;
                (row.committed, row.retry_count, row.not_before) = (advance.batch_end.0, 0, None);
                row.release();
            }
            landed.push(valid);
        }
        landed
    }
}

/// The rows that hold the offsets `from..=to`.
fn pages(log: &Log, from: i64, to: i64) -> Vec<HashRow> {
    let container = log.rows.iter().map(|(base, _)| *base).filter(|base| *base <= from).max().unwrap_or(from);
    let within = log.rows.iter().filter(|(base, _)| *base >= container && *base <= to);
    let pack = |ids: &Vec<String>| ids.iter().flat_map(|id| TransactionHash::of(id).to_bytes()).collect();
    within.map(|(base, ids)| HashRow { base: Offset(*base), packed: pack(ids) }).collect()
}

impl AckStore for FakeStore {
    fn ids(&self) -> IdSpace {
        IDS()
    }

    fn read_span<'a>(
        &'a self,
        partition: PartitionId,
        group: &'a str,
        lease: LeaseClaim,
    ) -> BoxFuture<'a, StoreResult<Option<SpanRead>>> {
        async move { Ok(self.read_span_now(partition, group, lease)) }.boxed()
    }

    fn read_hashes(
        &self,
        partition: PartitionId,
        from: Offset,
        to: Offset,
    ) -> BoxFuture<'_, StoreResult<Vec<HashRow>>> {
        async move { Ok(self.world().logs.get(&partition.0).map_or_else(Vec::new, |log| pages(log, from.0, to.0))) }
            .boxed()
    }

    fn letter_source(
        &self,
        partition: PartitionId,
        offset: Offset,
    ) -> BoxFuture<'_, StoreResult<Option<LetterSource>>> {
        async move {
            let world = self.world();
            let log = world.logs.get(&partition.0).filter(|log| log.log_start <= offset.0);
            let id = log.and_then(|log| log.id(offset.0));
            Ok(id.map(|id| {
                let mut body = Vec::new();
                let frame = Frame {
                    id: Uuid::nil(),
                    transaction_id: Some(id),
                    trace_id: None,
                    producer_sub: None,
                    encrypted: false,
                    payload: b"{}",
                };
                frame.pack(&mut body);
                LetterSource {
                    base: offset,
                    frames: seal(&body, 1),
                    created_at: chrono::DateTime::UNIX_EPOCH,
                    tenant: Uuid::nil(),
                    queue: QueueId(1),
                    queue_name: "q".into(),
                    partition_name: "p".into(),
                }
            }))
        }
        .boxed()
    }

    fn settle<'a>(
        &'a self,
        guard: &'a Guard,
        write: &'a CursorWrite,
        dead_letter: Option<&'a NewDeadLetter>,
    ) -> BoxFuture<'a, StoreResult<bool>> {
        async move { self.faulty(self.next_fault(), |store| store.settle_now(guard, write, dead_letter)) }.boxed()
    }

    fn advance<'a>(&'a self, rows: &'a [PositionalAdvance], _: OnLocked) -> BoxFuture<'a, StoreResult<Vec<bool>>> {
        async move {
            let _open = self.gate.lock().await;
            let poison = *self.poison.lock().unwrap();
            if rows.iter().any(|row| Some(row.partition.0) == poison) {
                return Err(StoreError::fake_refusal("22003"));
            }
            self.faulty(self.next_fault(), |store| store.advance_now(rows))
        }
        .boxed()
    }
}
