//! Full hash resolution: read, resolve, decide, write. The road of every ack that the fast path does not take, and the
//! definition of what the fast path must answer (I6).
//!
//! Nothing is locked between reading and writing; the write is guarded by everything the decision rested on, and a write
//! that loses starts over (`store::acks`). Ids that are not in the ackable span move nothing, so they are looked for
//! below the cursor *after* the write, newest first, without holding anything up.

use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, Semaphore, SemaphorePermit};
use xxhash_rust::xxh3::xxh3_64;

use super::item::{AckAnswer, AckError, Acked};
use super::outcome::{Change, change_of, letter_of, policy_of, position_of, resolved, write_of};
use super::plan::{Call, Group};
use super::search::Search;
use crate::broker::ack_decision::{
    AckStatus, Effect, Place, ResolvedItem, Verdict, dead_letter_reason, decide, verdict,
};
use crate::broker::resolver::Resolver;
use crate::ids::PartitionId;
use crate::store::acks::{CursorRow, CursorWrite, Guard, SpanRead};
use crate::store::dead_letters::NewDeadLetter;
use crate::store::{Store, StoreError, StoreResult};

/// Acks of one partition take turns here, so that they do not lose writes to each other.
const LANES: usize = 1024;
/// Groups that share [`Settler::rooms`].
const ROOMS: usize = 64;
/// Lost writes in a row before the call gives up. Each means that another broker's ack on the same cursor landed.
const ATTEMPTS_MAX: u32 = 64;
/// Connections lost in a row while reading.
const READ_ATTEMPTS_MAX: u32 = 3;

/// Runs groups through full hash resolution.
pub struct Settler {
    store: Store,
    lanes: Box<[Mutex<()>]>,
    /// One group's acks hold half of the connections at most: while an operator moves all of its cursors, each of them waits
    /// for a row.
    rooms: Box<[Semaphore]>,
    search: Search,
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
    pub fn new(store: Store, search: Search, checkout_timeout: Duration, lookup_timeout: Duration) -> Settler {
        let room = (store.durable_max() as usize / 2).max(1);
        let lanes = (0..LANES).map(|_| Mutex::new(())).collect();
        let rooms = (0..ROOMS).map(|_| Semaphore::new(room)).collect();
        Settler { store, lanes, rooms, search, checkout_timeout, lookup_timeout }
    }

    /// Settles one group. `in_doubt`: an advance of this very lease may have been committed unseen, so that a lease that
    /// is gone proves nothing.
    pub async fn settle(&self, call: &Call, group: &Group, in_doubt: bool) -> Settled {
        let turn = async { (self.turn(group.partition).await, self.room(&call.group_name).await) };
        let Ok(_held) = tokio::time::timeout(self.checkout_timeout, turn).await else {
            return refuse(group, AckError::Pool);
        };
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

    /// `None`: closed, which it never is.
    async fn room(&self, group: &str) -> Option<SemaphorePermit<'_>> {
        self.rooms[(xxh3_64(group.as_bytes()) % ROOMS as u64) as usize].acquire().await.ok()
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
        self.search.search_span(&mut resolver, group.partition, &read).await?;

        let items = resolved(group.items(call), &slots, &resolver);
        let mut effect = decide(position_of(row), policy_of(row), items.iter().copied());
        let mut letter = None;
        if let Some(at) = effect.dead_letter() {
            let reasons = items.iter().copied().zip(group.items(call).map(|item| item.reason.as_deref()));
            match self.store.letter_source(group.partition, at).await? {
                None => effect = effect.without_message(),
                Some(source) => {
                    let reason = dead_letter_reason(at, reasons);
                    letter = Some(letter_of(source, group.partition, at, &call.group_name, reason)?);
                }
            }
        }

        let written = match effect {
            Effect::Nothing => Written::Landed,
            _ => self.write(&row.guard(group.partition), &write_of(&effect, row), letter.as_ref()).await?,
        };
        if written == Written::Raced {
            return Ok(None);
        }
        let below = self.search.search_below(&mut resolver, group.partition, row).await;
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
