//! Full hash resolution: read, resolve, decide, write. The road of every ack that the fast path does not take, and the
//! definition of what the fast path must answer (I6).
//!
//! Nothing is locked between reading and writing; the write is guarded by everything the decision rested on, and a write
//! that loses starts over (`store::acks`). Ids that are not in the ackable span move nothing, so they are looked for
//! below the cursor *after* the write, newest first, when its effect has been announced and nothing is held any more.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use super::gates::Gates;
use super::item::{AckAnswer, AckError, Acked};
use super::outcome::{Change, change_of, letter_of, policy_of, position_of, resolved, write_of};
use super::plan::{Call, Group};
use super::search::Search;
use crate::broker::ack_decision::{
    AckStatus, Effect, Place, ResolvedItem, Verdict, dead_letter_reason, decide, verdict,
};
use crate::broker::resolver::Resolver;
use crate::ids::{GroupId, PartitionId};
use crate::store::acks::{CursorRow, CursorWrite, Guard, SpanRead};
use crate::store::dead_letters::NewDeadLetter;
use crate::store::{Store, StoreError, StoreResult};

/// Lost writes in a row before the call gives up. Each means that another broker's ack on the same cursor landed.
const ATTEMPTS_MAX: u32 = 64;
/// Connections lost in a row while reading.
const READ_ATTEMPTS_MAX: u32 = 3;

/// Runs groups through full hash resolution.
pub struct Settler {
    store: Store,
    /// Acks of one group on one partition take turns here, so that they do not lose writes to each other. The group by the hash
    /// of its name: its id is not known yet.
    turns: Gates<(PartitionId, u64)>,
    /// One group's writes hold half of the connections at most: while an operator moves all of its cursors, each of them waits for
    /// a row.
    rooms: Gates<GroupId>,
    search: Search,
    checkout_timeout: Duration,
    lookup_timeout: Duration,
}

/// What a settled group leaves to be done.
#[derive(Debug)]
pub struct Settled {
    /// One answer per item of the group.
    pub answers: Vec<AckAnswer>,
    /// The cursor's group, if something was committed.
    pub changed: Option<GroupId>,
}

/// How one round of read, decide, write ended.
enum Attempt {
    /// The write lost.
    Lost,
    /// Nothing was written.
    Refused(AckError),
    /// The answers are known but for the items that were not in the ackable span.
    Written(Box<Decided>),
}

/// A decision, written.
struct Decided {
    row: CursorRow,
    resolver: Resolver,
    slots: Vec<Option<usize>>,
    effect: Effect,
    written: Written,
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
    /// `checkout_timeout` bounds the wait for a turn and that for a room, `lookup_timeout` the search for a lost answer.
    pub fn new(store: Store, search: Search, checkout_timeout: Duration, lookup_timeout: Duration) -> Settler {
        let (turns, rooms) = (Gates::new(1), Gates::new(store.durable_max() as usize / 2));
        Settler { store, turns, rooms, search, checkout_timeout, lookup_timeout }
    }

    /// Settles one group. `in_doubt`: an advance of this very lease may have been committed unseen, so that a lease that
    /// is gone proves nothing. `announce` hears of what was committed, at once.
    pub async fn settle(&self, call: &Call, group: &Group, in_doubt: bool, announce: impl FnOnce(Change)) -> Settled {
        let turn = self.turns.pass((group.partition, xxh3_64(call.group_name.as_bytes())));
        let Ok(turn) = tokio::time::timeout(self.checkout_timeout, turn).await else {
            return refuse(group, AckError::Pool);
        };
        for _ in 0..ATTEMPTS_MAX {
            let decided = match self.attempt(call, group, in_doubt).await {
                Ok(Attempt::Lost) => continue,
                Ok(Attempt::Refused(error)) => return refuse(group, error),
                Ok(Attempt::Written(decided)) => decided,
                Err(error) => return refuse(group, error_of(error)),
            };
            drop(turn);
            let change = (decided.effect != Effect::Nothing).then(|| change_of(&decided.row, &decided.effect));
            if let Some(change) = change {
                announce(change);
            }
            let answers = self.answers(call, group, *decided).await;
            return Settled { answers, changed: change.map(|change| change.group) };
        }
        refuse(group, AckError::Database("too many concurrent acks of one partition".into()))
    }

    /// One round of read, decide, write.
    async fn attempt(&self, call: &Call, group: &Group, in_doubt: bool) -> StoreResult<Attempt> {
        let Some(read) = self.read(call, group).await? else {
            return Ok(Attempt::Refused(AckError::ConsumerNotFound));
        };
        let row = &read.row;
        if !row.admits(group.lease) {
            let error = if in_doubt { AckError::FlushFailed } else { AckError::InvalidLease };
            return Ok(Attempt::Refused(error));
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
            _ => {
                let Ok(_room) = tokio::time::timeout(self.checkout_timeout, self.rooms.pass(row.group)).await else {
                    return Ok(Attempt::Refused(AckError::Pool));
                };
                self.write(&row.guard(group.partition), &write_of(&effect, row), letter.as_ref()).await?
            }
        };
        Ok(match written {
            Written::Raced => Attempt::Lost,
            written => Attempt::Written(Box::new(Decided { row: read.row, resolver, slots, effect, written })),
        })
    }

    /// Looks for what is still missing, and answers.
    async fn answers(&self, call: &Call, group: &Group, decided: Decided) -> Vec<AckAnswer> {
        let Decided { row, mut resolver, slots, effect, written } = decided;
        let below = self.search.search_below(&mut resolver, group.partition, &row).await;
        let items = resolved(group.items(call), &slots, &resolver);
        answers_of(&row, &effect, &items, written, below.err().map(error_of))
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
    Settled { answers: vec![AckAnswer::refused(error); group.len()], changed: None }
}

/// A failed read or a refused write: nothing was committed.
fn error_of(error: StoreError) -> AckError {
    if error.is_connection() { AckError::Pool } else { AckError::Database(error.message().into()) }
}
