//! From a cursor row to a decision, and from a decision to what is written and announced: what acks and transactions
//! have in common.

use std::time::{Duration, Instant};

use uuid::Uuid;

use super::item::{AckItem, Release};
use crate::broker::ack_decision::{Effect, Position, ResolvedItem, RetryPolicy};
use crate::broker::resolver::Resolver;
use crate::broker::segment::Frames;
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};
use crate::store::acks::{CursorRow, CursorWrite, NotBefore};
use crate::store::dead_letters::{LetterSource, NewDeadLetter};
use crate::store::{StoreError, StoreResult};

/// Longest reason on a dead letter, in bytes.
const REASON_BYTES_MAX: usize = 65_536;

/// A committed effect on a cursor row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The cursor's group.
    pub group: GroupId,
    /// Who held the lease before.
    pub holder: Option<LeaseId>,
    /// Set if the row became claimable.
    pub release: Option<Release>,
}

/// The items of a group with what was found of them.
pub fn resolved<'a>(
    items: impl Iterator<Item = &'a AckItem>,
    slots: &[Option<usize>],
    resolver: &Resolver,
) -> Vec<ResolvedItem> {
    items.zip(slots).map(|(item, slot)| ResolvedItem { status: item.status, place: resolver.place(*slot) }).collect()
}

/// What a row is decided by.
pub fn position_of(row: &CursorRow) -> Position {
    Position { committed: row.committed, batch_end: row.batch_end, retry_count: row.retry_count }
}

/// The queue options of a row.
pub fn policy_of(row: &CursorRow) -> RetryPolicy {
    let delay = u64::try_from(row.retry_delay_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis);
    RetryPolicy { retry_limit: row.retry_limit, dead_letters: row.dead_letters, retry_delay: delay }
}

/// The new values of the row.
pub fn write_of(effect: &Effect, row: &CursorRow) -> CursorWrite {
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

/// What the effect leaves to be announced.
pub fn change_of(row: &CursorRow, effect: &Effect) -> Change {
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

/// The dead letter of the message at `at`, which the segment of `source` holds.
pub fn letter_of(
    source: LetterSource,
    partition: PartitionId,
    at: Offset,
    group_name: &str,
    reason: &str,
) -> StoreResult<NewDeadLetter> {
    let corrupt = |what: String| StoreError::Corrupt { table: "log_segments", what };
    let frames = Frames::open(&source.frames).map_err(|e| corrupt(format!("{partition}/{}: {e}", source.base)))?;
    let nth = usize::try_from(at.0 - source.base.0).unwrap_or(usize::MAX);
    let frame = frames
        .iter()
        .nth(nth)
        .ok_or_else(|| corrupt(format!("{partition}/{} ends before offset {at}", source.base)))?
        .map_err(|e| corrupt(format!("{partition}/{}: {e}", source.base)))?;
    Ok(NewDeadLetter {
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
    })
}

/// Text that PostgreSQL can hold, of bounded length.
fn storable(reason: &str) -> String {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].replace('\0', "\u{fffd}")
}
