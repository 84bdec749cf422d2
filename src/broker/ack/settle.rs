//! Full hash resolution: read, resolve, decide, write. The road of every ack that the fast path does not take, and the
//! definition of what the fast path must answer (I6).
//!
//! Nothing is locked between reading and writing; the write is guarded by everything the decision rested on, and a write
//! that loses starts over (`store::acks`). Ids that are not in the ackable span move nothing, so they are looked for
//! below the cursor *after* the write, newest first, without holding anything up.

use std::time::{Duration, Instant};

use tokio::sync::{Mutex, MutexGuard, Semaphore};
use uuid::Uuid;

use super::item::{AckAnswer, AckError, AckItem, Acked, Release};
use super::plan::{Call, Group};
use crate::broker::ack_decision::{
    AckStatus, Effect, Place, Position, ResolvedItem, RetryPolicy, Verdict, dead_letter_reason, decide, verdict,
};
use crate::broker::resolver::{Resolver, TornRow, Window};
use crate::broker::segment::Frames;
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};
use crate::store::acks::{
    CursorRow, CursorWrite, Guard, HashRow, NotBefore, OPEN_PAGE_OFFSETS, PAGE_OFFSETS_MAX, SpanRead, torn_hashes,
};
use crate::store::dead_letters::NewDeadLetter;
use crate::store::{Store, StoreError, StoreResult};

/// Acks of one partition take turns here, so that they do not lose writes to each other.
const LANES: usize = 1024;
/// Searches that go past their first page, in the whole broker: an id that was never pushed must not cost much.
const DEEP_SEARCHES_MAX: usize = 2;
/// Lost writes in a row before the call gives up. Each means that another broker's ack on the same cursor landed.
const ATTEMPTS_MAX: u32 = 64;
/// Connections lost in a row while reading.
const READ_ATTEMPTS_MAX: u32 = 3;
/// Longest reason on a dead letter, in bytes.
const REASON_BYTES_MAX: usize = 65_536;

/// Runs groups through full hash resolution.
pub struct Settler {
    store: Store,
    lanes: Box<[Mutex<()>]>,
    deep: Semaphore,
    checkout_timeout: Duration,
    lookup_timeout: Duration,
}

/// What a settled group leaves to be done.
#[derive(Debug)]
pub struct Settled {
    /// One answer per item of the group.
    pub answers: Vec<AckAnswer>,
    /// What was committed, if anything.
    pub change: Option<Change>,
}

/// A committed effect on a cursor row.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The cursor's group.
    pub group: GroupId,
    /// Who held the lease before.
    pub holder: Option<LeaseId>,
    /// Set if the row became claimable.
    pub release: Option<Release>,
}

/// What became of a guarded write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Landed,
    /// The row is no longer what the decision was made from; nothing happened.
    Raced,
    /// The connection broke, and now the row is another: by this write or by someone else.
    InDoubt,
}

impl Settler {
    /// `checkout_timeout` bounds the wait for a turn, `lookup_timeout` the search for a lost answer.
    pub fn new(store: Store, checkout_timeout: Duration, lookup_timeout: Duration) -> Settler {
        Settler {
            store,
            lanes: (0..LANES).map(|_| Mutex::new(())).collect(),
            deep: Semaphore::new(DEEP_SEARCHES_MAX),
            checkout_timeout,
            lookup_timeout,
        }
    }

    /// Settles one group. `in_doubt`: an advance of this very lease may have been committed unseen, so that a lease that
    /// is gone proves nothing.
    pub async fn settle(&self, call: &Call, group: &Group, in_doubt: bool) -> Settled {
        let turn = tokio::time::timeout(self.checkout_timeout, self.turn(group.partition)).await;
        let Ok(_turn) = turn else { return refuse(group, AckError::Pool) };
        for _ in 0..ATTEMPTS_MAX {
            match self.attempt(call, group, in_doubt).await {
                Ok(Some(settled)) => return settled,
                Ok(None) => {}
                Err(error) => return refuse(group, error_of(error)),
            }
        }
        refuse(group, AckError::Database("too many concurrent acks of one partition".into()))
    }

    async fn turn(&self, partition: PartitionId) -> MutexGuard<'_, ()> {
        self.lanes[(partition.0 as u64 % LANES as u64) as usize].lock().await
    }

    /// One round of read, decide, write. `None`: the write lost.
    async fn attempt(&self, call: &Call, group: &Group, in_doubt: bool) -> StoreResult<Option<Settled>> {
        let Some(read) = self.read(call, group).await? else {
            return Ok(Some(refuse(group, AckError::ConsumerNotFound)));
        };
        let row = &read.row;
        if !row.admits(group.lease) {
            let error = if in_doubt { AckError::FlushFailed } else { AckError::InvalidLease };
            return Ok(Some(refuse(group, error)));
        }
        let (mut resolver, slots) = Resolver::new(group.items(call).map(|item| item.transaction));
        self.search_span(&mut resolver, group.partition, &read).await?;

        let items = resolved(group.items(call), &slots, &resolver);
        let mut effect = decide(position_of(row), policy_of(row), items.iter().copied());
        let mut letter = None;
        if let Some(at) = effect.dead_letter() {
            let reasons = items.iter().copied().zip(group.items(call).map(|item| item.reason.as_deref()));
            letter = self.letter(group.partition, at, &call.group_name, dead_letter_reason(at, reasons)).await?;
            if letter.is_none() {
                effect = effect.without_message();
            }
        }

        let written = match effect {
            Effect::Nothing => Written::Landed,
            _ => self.write(&row.guard(group.partition), &write_of(&effect, row), letter.as_ref()).await?,
        };
        if written == Written::Raced {
            return Ok(None);
        }
        let below = self.search_below(&mut resolver, group.partition, row).await;
        let items = resolved(group.items(call), &slots, &resolver);
        let answers = answers_of(row, &effect, &items, written, below.err().map(error_of));
        let change = (effect != Effect::Nothing).then(|| change_of(row, &effect));
        Ok(Some(Settled { answers, change }))
    }

    /// Reading changes nothing, so a broken connection is simply replaced.
    async fn read(&self, call: &Call, group: &Group) -> StoreResult<Option<SpanRead>> {
        let mut attempt = 1;
        loop {
            match self.store.read_span(group.partition, &call.group_name, group.lease).await {
                Err(StoreError::OutcomeUnknown { .. }) if attempt < READ_ATTEMPTS_MAX => attempt += 1,
                other => return other,
            }
        }
    }

    /// Looks through the ackable span: the leased one, and above it only if the lease is not live.
    async fn search_span(&self, resolver: &mut Resolver, partition: PartitionId, read: &SpanRead) -> StoreResult<()> {
        let (row, from) = (&read.row, read.from.0);
        let span_end = row.batch_end.map(|end| end.0).filter(|end| *end >= from);
        let (window, first_end) = match span_end {
            Some(end) => (Window::Leased, end.min(read.read_to.0)),
            None if row.leased() => return Ok(()),
            None => (Window::Open, read.read_to.0),
        };
        scan(resolver, partition, &read.hashes, (from, first_end), window)?;
        let mut next = first_end + 1;
        if let Some(end) = span_end {
            while next <= end {
                next = self.page(resolver, partition, (next, end.min(next + PAGE_OFFSETS_MAX - 1)), window).await?;
            }
        }
        if row.leased() {
            return Ok(());
        }
        let mut size = OPEN_PAGE_OFFSETS;
        let mut permit = None;
        while !resolver.complete() && next <= row.last_offset.0 {
            if permit.is_none() && size > OPEN_PAGE_OFFSETS {
                permit = self.deep.acquire().await.ok();
            }
            next = self.page(resolver, partition, (next, next + size - 1), Window::Open).await?;
            size = (size * 4).min(PAGE_OFFSETS_MAX);
        }
        Ok(())
    }

    /// Reads and scans one page upwards; answers where the next one starts.
    async fn page(
        &self,
        resolver: &mut Resolver,
        partition: PartitionId,
        (from, to): (i64, i64),
        window: Window,
    ) -> StoreResult<i64> {
        let rows = self.store.read_hashes(partition, Offset(from), Offset(to)).await?;
        scan(resolver, partition, &rows, (from, to), window)?;
        Ok(to + 1)
    }

    /// Looks for what is still missing at and below the cursor, newest first, down to what was purged.
    async fn search_below(&self, resolver: &mut Resolver, partition: PartitionId, row: &CursorRow) -> StoreResult<()> {
        let floor = row.txns_start.0.max(0);
        let (mut to, mut size) = (row.committed.0, OPEN_PAGE_OFFSETS);
        let mut permit = None;
        while !resolver.complete() && to >= floor {
            if permit.is_none() && size > OPEN_PAGE_OFFSETS {
                permit = self.deep.acquire().await.ok();
            }
            let from = (to - size + 1).max(floor);
            let rows = self.store.read_hashes(partition, Offset(from), Offset(to)).await?;
            scan(resolver, partition, &rows, (floor, to), Window::Below)?;
            to = rows.first().map_or(from, |row| from.min(row.base.0)) - 1;
            size = (size * 4).min(PAGE_OFFSETS_MAX);
        }
        Ok(())
    }

    async fn letter(
        &self,
        partition: PartitionId,
        at: Offset,
        group_name: &str,
        reason: &str,
    ) -> StoreResult<Option<NewDeadLetter>> {
        let Some(source) = self.store.letter_source(partition, at).await? else { return Ok(None) };
        let corrupt = |what: String| StoreError::Corrupt { table: "log_segments", what };
        let frames = Frames::open(&source.frames).map_err(|e| corrupt(format!("{partition}/{}: {e}", source.base)))?;
        let nth = usize::try_from(at.0 - source.base.0).unwrap_or(usize::MAX);
        let frame = frames
            .iter()
            .nth(nth)
            .ok_or_else(|| corrupt(format!("{partition}/{} ends before offset {at}", source.base)))?
            .map_err(|e| corrupt(format!("{partition}/{}: {e}", source.base)))?;
        Ok(Some(NewDeadLetter {
            id: Uuid::now_v7(),
            tenant: source.tenant,
            queue: source.queue,
            queue_name: source.queue_name,
            partition_name: source.partition_name,
            group_name: group_name.to_owned(),
            offset: at,
            message_id: frame.id,
            transaction_id: frame.transaction_text().into_owned(),
            payload: frame.payload.to_vec(),
            reason: storable(reason),
            message_created_at: source.created_at,
        }))
    }

    /// Writes a decision. A lost answer is found out by writing again: the guard lets it land once. If it then does not
    /// hold, the first attempt may have landed or another writer was there, and nobody can tell which.
    async fn write(&self, guard: &Guard, write: &CursorWrite, letter: Option<&NewDeadLetter>) -> StoreResult<Written> {
        match self.store.settle(guard, write, letter).await {
            Ok(true) => Ok(Written::Landed),
            Ok(false) => Ok(Written::Raced),
            // A timeout is no race: somebody holds the row, and trying again would only wait again.
            Err(error) if error.is_conflict() => Ok(Written::Raced),
            Err(StoreError::OutcomeUnknown { .. }) => {
                let looked_up = tokio::time::timeout(self.lookup_timeout, self.write_again(guard, write, letter)).await;
                Ok(looked_up.unwrap_or(Written::InDoubt))
            }
            Err(error) => Err(error),
        }
    }

    async fn write_again(&self, guard: &Guard, write: &CursorWrite, letter: Option<&NewDeadLetter>) -> Written {
        let mut pause = Duration::from_millis(20);
        loop {
            tokio::time::sleep(pause).await;
            match self.store.settle(guard, write, letter).await {
                Ok(true) => return Written::Landed,
                Ok(false) => return Written::InDoubt,
                Err(error) if error.is_connection() || error.is_transient() => pause *= 2,
                Err(_) => return Written::InDoubt,
            }
        }
    }
}

fn scan(
    resolver: &mut Resolver,
    partition: PartitionId,
    rows: &[HashRow],
    (from, to): (i64, i64),
    window: Window,
) -> StoreResult<()> {
    for row in rows {
        resolver.scan(row, from..=to, window).map_err(|TornRow { base }| torn_hashes(partition, base))?;
    }
    Ok(())
}

fn resolved<'a>(
    items: impl Iterator<Item = &'a AckItem>,
    slots: &[Option<usize>],
    resolver: &Resolver,
) -> Vec<ResolvedItem> {
    items.zip(slots).map(|(item, slot)| ResolvedItem { status: item.status, place: resolver.place(*slot) }).collect()
}

fn position_of(row: &CursorRow) -> Position {
    Position { committed: row.committed, batch_end: row.batch_end, retry_count: row.retry_count }
}

fn policy_of(row: &CursorRow) -> RetryPolicy {
    let delay = u64::try_from(row.retry_delay_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis);
    RetryPolicy { retry_limit: row.retry_limit, dead_letters: row.dead_letters, retry_delay: delay }
}

fn write_of(effect: &Effect, row: &CursorRow) -> CursorWrite {
    let not_before = match effect {
        Effect::Nothing | Effect::Advance { .. } | Effect::Redeliver { charged: false, .. } => NotBefore::Keep,
        Effect::Redeliver { charged: true, .. } => policy_of(row).retry_delay.map_or(NotBefore::Keep, NotBefore::After),
        Effect::Finish { .. } | Effect::GiveUp { .. } | Effect::Unfileable { .. } => NotBefore::Clear,
    };
    CursorWrite {
        committed: effect.cursor(row.committed),
        retry_count: effect.retry_count(row.retry_count),
        release: effect.releases(),
        not_before,
    }
}

fn change_of(row: &CursorRow, effect: &Effect) -> Change {
    let release = match effect {
        Effect::Nothing | Effect::Advance { .. } => None,
        Effect::Finish { .. } => Some(Release::Finished),
        Effect::Redeliver { charged: true, .. } => Some(
            policy_of(row).retry_delay.map_or(Release::Redeliver, |delay| Release::RedeliverAt(Instant::now() + delay)),
        ),
        Effect::Redeliver { .. } | Effect::GiveUp { .. } | Effect::Unfileable { .. } => Some(Release::Redeliver),
    };
    Change { group: row.group, holder: row.lease.map(|lease| lease.worker), release }
}

fn answers_of(
    row: &CursorRow,
    effect: &Effect,
    items: &[ResolvedItem],
    written: Written,
    below_failed: Option<AckError>,
) -> Vec<AckAnswer> {
    let landed = written == Written::Landed;
    let released = landed && effect.releases() && row.leased();
    let mut conflated = match effect {
        Effect::Finish { to } if released && row.conflation => Some((*to, to.0 - row.committed.0 - 1)),
        _ => None,
    };
    let answer = |item: &ResolvedItem| {
        let outcome = match verdict(effect, *item) {
            Verdict::Done { .. } | Verdict::DlqRejected if !landed => Err(AckError::FlushFailed),
            Verdict::Done { dlq } => Ok(Acked::Done { dlq }),
            Verdict::Noop => Ok(Acked::Noop),
            Verdict::AlreadyCommitted => Err(AckError::AlreadyCommitted),
            Verdict::DlqRejected => Err(AckError::DlqRejected),
            Verdict::Unresolvable => Err(below_failed.clone().unwrap_or(AckError::Unresolvable)),
        };
        let closes = matches!((item.status, item.place), (AckStatus::Completed, Place::Span { last, .. })
            if conflated.is_some_and(|(to, _)| last == to));
        let conflated = if closes { conflated.take().map(|(_, count)| count) } else { None };
        AckAnswer { outcome, lease_released: released && item.place != Place::Unresolvable, conflated }
    };
    items.iter().map(answer).collect()
}

fn refuse(group: &Group, error: AckError) -> Settled {
    Settled { answers: vec![AckAnswer::refused(error); group.len()], change: None }
}

/// A failed read or a refused write: nothing was committed.
fn error_of(error: StoreError) -> AckError {
    if error.is_connection() { AckError::Pool } else { AckError::Database(error.message().into()) }
}

/// Text that PostgreSQL can hold, of bounded length.
fn storable(reason: &str) -> String {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].replace('\0', "\u{fffd}")
}
