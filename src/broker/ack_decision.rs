//! Pure: what one group of ack items does to one cursor, and what each item is answered (`spec/ack.md` §5).
//!
//! A *group* is the items of one call that share (partition, lease). [`decide`] looks only at the items that resolved
//! inside the ackable span: the others move nothing, so where they lie may be found out after the commit
//! ([`Place::BelowCursor`] or [`Place::Unresolvable`]) and is only needed by [`verdict`].

use std::time::Duration;

use crate::ids::Offset;

#[cfg(test)]
mod tests;

/// An explicit statement that a message was not processed. The order is the precedence at one offset (I4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// Not now: redeliver, charge nothing.
    Retry,
    /// Processing broke: redeliver while the retry budget lasts.
    Failed,
    /// Give up now.
    Dlq,
}

/// What the client says about one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AckStatus {
    /// Processed.
    Completed,
    /// Not processed.
    Signal(Signal),
}

impl AckStatus {
    /// The status that a word stands for: exact and case-sensitive, anything unknown is a nack (`spec/ack.md` §1).
    pub fn of_word(word: &str) -> AckStatus {
        match word {
            "completed" | "success" | "acked" | "ok" => AckStatus::Completed,
            "retry" => AckStatus::Signal(Signal::Retry),
            "dlq" => AckStatus::Signal(Signal::Dlq),
            _ => AckStatus::Signal(Signal::Failed),
        }
    }

    /// The status of a JSON boolean, a client convention.
    pub fn of_flag(ok: bool) -> AckStatus {
        if ok { AckStatus::Completed } else { AckStatus::Signal(Signal::Failed) }
    }
}

/// Where a transaction id was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Inside the ackable span, above the cursor. The two differ only for an id that is stored twice.
    Span {
        /// Its lowest offset in the span: what a signal means.
        first: Offset,
        /// Its highest offset in the span: what a completed means.
        last: Offset,
    },
    /// At or below the cursor.
    BelowCursor,
    /// Nowhere, or only above the leased span.
    Unresolvable,
}

/// One item, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedItem {
    /// What the client said.
    pub status: AckStatus,
    /// Where the message is.
    pub place: Place,
}

/// The cursor row that the items are judged against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Last finished offset.
    pub committed: Offset,
    /// End of the span that the row names, of a live lease or of one that expired and was not claimed again.
    pub batch_end: Option<Offset>,
    /// Failed acks charged so far.
    pub retry_count: i32,
}

/// The queue options that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Failed acks that are redelivered; the next one finds the budget exhausted.
    pub retry_limit: i32,
    /// Whether an exhausted message is kept as a dead letter.
    pub dead_letters: bool,
    /// Pause before a charged `failed` comes back.
    pub retry_delay: Option<Duration>,
}

/// What happens to the cursor row. Every variant except the first two also ends the lease, if one is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// No item lies above the cursor.
    Nothing,
    /// The cursor moves inside the batch; the lease stays.
    Advance {
        /// New cursor.
        to: Offset,
    },
    /// The cursor reaches the end of the batch.
    Finish {
        /// New cursor.
        to: Offset,
    },
    /// A signal: everything above the cursor comes back.
    Redeliver {
        /// New cursor: the highest completed below the signal, else where it was.
        to: Offset,
        /// The offset of the signal.
        at: Offset,
        /// Whether it costs one unit of the retry budget, and so the retry delay.
        charged: bool,
    },
    /// The message is given up and the cursor passes it.
    GiveUp {
        /// The message; also the new cursor.
        at: Offset,
        /// Where the cursor would be without it.
        prefix: Offset,
        /// Filed as a dead letter, or dropped.
        filed: bool,
    },
    /// The message was to be filed, but retention has deleted it: nothing filed, the cursor stays below it.
    Unfileable {
        /// The message.
        at: Offset,
        /// New cursor: the highest completed below it, else where it was.
        to: Offset,
    },
}

impl Effect {
    /// The cursor after it.
    pub fn cursor(&self, before: Offset) -> Offset {
        match *self {
            Effect::Nothing => before,
            Effect::Advance { to }
            | Effect::Finish { to }
            | Effect::Redeliver { to, .. }
            | Effect::Unfileable { to, .. } => to,
            Effect::GiveUp { at, .. } => at,
        }
    }

    /// Whether a lease on the row ends.
    pub fn releases(&self) -> bool {
        !matches!(self, Effect::Nothing | Effect::Advance { .. })
    }

    /// The retry count after it.
    pub fn retry_count(&self, before: i32) -> i32 {
        match self {
            Effect::Nothing | Effect::Advance { .. } | Effect::Redeliver { charged: false, .. } => before,
            Effect::Redeliver { charged: true, .. } => before.saturating_add(1),
            Effect::Finish { .. } | Effect::GiveUp { .. } | Effect::Unfileable { .. } => 0,
        }
    }

    /// The message that must be filed as a dead letter, if any.
    pub fn dead_letter(&self) -> Option<Offset> {
        match *self {
            Effect::GiveUp { at, filed: true, .. } => Some(at),
            _ => None,
        }
    }

    /// What remains of it when that message no longer exists.
    pub fn without_message(self) -> Effect {
        match self {
            Effect::GiveUp { at, prefix, filed: true } => Effect::Unfileable { at, to: prefix },
            other => other,
        }
    }
}

/// What one item is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Carried out; `dlq` if this item's message was filed.
    Done {
        /// A dead-letter row was filed for the message of this item.
        dlq: bool,
    },
    /// A completed at or below the cursor.
    Noop,
    /// A signal at or below the cursor.
    AlreadyCommitted,
    /// Not to be found.
    Unresolvable,
    /// The message was to be filed, but no longer exists.
    DlqRejected,
}

/// Decides one group (I1, I4).
pub fn decide(position: Position, policy: RetryPolicy, items: impl Iterator<Item = ResolvedItem> + Clone) -> Effect {
    let committed = position.committed;
    let in_span = items.filter_map(|item| match item.place {
        Place::Span { first, last } if last > committed => Some((item.status, first, last)),
        _ => None,
    });
    // The lowest offset wins, then the strongest signal.
    let signal = in_span
        .clone()
        .filter_map(|(status, first, _)| match status {
            AckStatus::Signal(signal) => Some((first, signal)),
            AckStatus::Completed => None,
        })
        .min_by_key(|(offset, signal)| (*offset, std::cmp::Reverse(*signal)));
    let ceiling = signal.map(|(offset, _)| offset);
    let completed = in_span
        .filter(|(status, ..)| *status == AckStatus::Completed)
        .map(|(_, _, last)| last)
        .filter(|last| ceiling.is_none_or(|ceiling| *last < ceiling))
        .max();
    let to = completed.unwrap_or(committed);
    match signal {
        Some((at, Signal::Retry)) => Effect::Redeliver { to, at, charged: false },
        Some((at, Signal::Failed)) if position.retry_count < policy.retry_limit => {
            Effect::Redeliver { to, at, charged: true }
        }
        Some((at, Signal::Failed)) => Effect::GiveUp { at, prefix: to, filed: policy.dead_letters },
        Some((at, Signal::Dlq)) => Effect::GiveUp { at, prefix: to, filed: true },
        None if completed.is_none() => Effect::Nothing,
        None if position.batch_end.is_some_and(|end| to >= end) => Effect::Finish { to },
        None => Effect::Advance { to },
    }
}

/// What an item of that group is told (I5).
pub fn verdict(effect: &Effect, item: ResolvedItem) -> Verdict {
    match (item.place, item.status) {
        (Place::Unresolvable, _) => Verdict::Unresolvable,
        (Place::BelowCursor, AckStatus::Completed) => Verdict::Noop,
        (Place::BelowCursor, AckStatus::Signal(_)) => Verdict::AlreadyCommitted,
        (Place::Span { .. }, AckStatus::Completed) => Verdict::Done { dlq: false },
        (Place::Span { first, .. }, AckStatus::Signal(_)) => match effect {
            Effect::GiveUp { at, filed, .. } if first == *at => Verdict::Done { dlq: *filed },
            Effect::Unfileable { at, .. } if first == *at => Verdict::DlqRejected,
            _ => Verdict::Done { dlq: false },
        },
    }
}

/// The reason on the dead-letter row: the nack of that very message, else the first nack with a reason, else
/// `Retries exhausted` (`spec/ack.md` §5.5).
pub fn dead_letter_reason<'a>(
    at: Offset,
    items: impl Iterator<Item = (ResolvedItem, Option<&'a str>)> + Clone,
) -> &'a str {
    let mut nacks = items.filter(|(item, reason)| reason.is_some() && matches!(item.status, AckStatus::Signal(_)));
    let own = nacks.clone().find(|(item, _)| matches!(item.place, Place::Span { first, .. } if first == at));
    own.or_else(|| nacks.next()).and_then(|(_, reason)| reason).unwrap_or("Retries exhausted")
}
