#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const COMPLETED: AckStatus = AckStatus::Completed;
const RETRY: AckStatus = AckStatus::Signal(Signal::Retry);
const FAILED: AckStatus = AckStatus::Signal(Signal::Failed);
const DLQ: AckStatus = AckStatus::Signal(Signal::Dlq);

fn at(offset: i64, status: AckStatus) -> ResolvedItem {
    ResolvedItem { status, place: Place::Span { first: Offset(offset), last: Offset(offset) } }
}

fn row(retry_count: i32) -> Position {
    Position { committed: Offset(9), batch_end: Some(Offset(19)), retry_count }
}

fn policy(retry_limit: i32, dead_letters: bool) -> RetryPolicy {
    RetryPolicy { retry_limit, dead_letters, retry_delay: None }
}

fn effect(items: &[ResolvedItem]) -> Effect {
    decide(row(0), policy(3, true), items.iter().copied())
}

#[test]
fn words_are_exact_and_unknown_ones_are_nacks() {
    for word in ["completed", "success", "acked", "ok"] {
        assert_eq!(AckStatus::of_word(word), COMPLETED);
    }
    for word in ["", "Completed", "FAILED", "nack", "failed", " ok"] {
        assert_eq!(AckStatus::of_word(word), FAILED, "{word:?}");
    }
    assert_eq!((AckStatus::of_word("retry"), AckStatus::of_word("dlq")), (RETRY, DLQ));
    assert_eq!((AckStatus::of_flag(true), AckStatus::of_flag(false)), (COMPLETED, FAILED));
}

#[test]
fn silence_completes_and_the_end_of_the_batch_releases() {
    assert_eq!(effect(&[at(12, COMPLETED)]), Effect::Advance { to: Offset(12) });
    assert_eq!(effect(&[at(19, COMPLETED)]), Effect::Finish { to: Offset(19) });
    assert_eq!(effect(&[]), Effect::Nothing);
    let below = ResolvedItem { status: DLQ, place: Place::BelowCursor };
    assert_eq!(effect(&[below]), Effect::Nothing);
    assert_eq!(verdict(&Effect::Nothing, below), Verdict::AlreadyCommitted);
}

#[test]
fn the_lowest_signal_clamps_and_the_strongest_one_decides() {
    // The example of seed 000.
    let seed = [at(10, COMPLETED), at(11, FAILED), at(12, COMPLETED), at(13, COMPLETED)];
    assert_eq!(effect(&seed), Effect::Redeliver { to: Offset(10), at: Offset(11), charged: true });
    assert!(seed.iter().all(|item| verdict(&effect(&seed), *item) == Verdict::Done { dlq: false }));

    let tie = [at(11, RETRY), at(11, DLQ), at(11, FAILED), at(11, COMPLETED), at(13, DLQ)];
    let gives_up = Effect::GiveUp { at: Offset(11), prefix: Offset(9), filed: true };
    assert_eq!(effect(&tie), gives_up);
    let told: Vec<_> = tie.iter().map(|item| verdict(&gives_up, *item)).collect();
    assert_eq!(told, [true, true, true, false, false].map(|dlq| Verdict::Done { dlq }));
    assert_eq!(effect(&[at(12, RETRY), at(14, FAILED)]), effect(&[at(12, RETRY)]));
}

#[test]
fn the_budget_is_retry_limit_redeliveries() {
    for (count, limit, charged) in [(0, 3, true), (2, 3, true), (3, 3, false), (0, 0, false), (0, -1, false)] {
        let got = decide(row(count), policy(limit, true), [at(10, FAILED)].into_iter());
        assert_eq!(matches!(got, Effect::Redeliver { charged: true, .. }), charged, "{count} of {limit}");
        assert_eq!(got.retry_count(count), if charged { count + 1 } else { 0 });
    }
    let dropped = decide(row(3), policy(3, false), [at(10, FAILED)].into_iter());
    assert_eq!(dropped, Effect::GiveUp { at: Offset(10), prefix: Offset(9), filed: false });
    assert_eq!(dropped.dead_letter(), None);
    let dlq = decide(row(0), policy(3, false), [at(10, DLQ)].into_iter());
    assert_eq!(dlq.dead_letter(), Some(Offset(10)), "an explicit dlq files whatever the options say");
}

#[test]
fn an_id_stored_twice_completes_high_and_fails_low() {
    let twice = |status| ResolvedItem { status, place: Place::Span { first: Offset(11), last: Offset(15) } };
    assert_eq!(effect(&[twice(COMPLETED)]), Effect::Advance { to: Offset(15) });
    assert_eq!(effect(&[twice(RETRY)]), Effect::Redeliver { to: Offset(9), at: Offset(11), charged: false });
}

#[test]
fn a_dead_letter_without_message_keeps_the_completed_prefix() {
    let items = [at(12, COMPLETED), at(13, DLQ), at(14, FAILED)];
    let gone = effect(&items).without_message();
    assert_eq!(gone, Effect::Unfileable { at: Offset(13), to: Offset(12) });
    assert!(gone.releases() && gone.retry_count(2) == 0);
    assert_eq!(verdict(&gone, items[1]), Verdict::DlqRejected);
    assert_eq!(verdict(&gone, items[2]), Verdict::Done { dlq: false });
}

#[test]
fn the_reason_is_the_poison_s_own_then_the_first_nack_s_then_the_default() {
    let reason = |items: &[(ResolvedItem, Option<&'static str>)]| dead_letter_reason(Offset(12), items.iter().copied());
    let own = [(at(10, COMPLETED), Some("a")), (at(14, FAILED), Some("b")), (at(12, FAILED), Some("c"))];
    assert_eq!(reason(&own), "c");
    assert_eq!(reason(&own[..2]), "b");
    assert_eq!(reason(&own[..1]), "Retries exhausted");
}

/// The reference keeps a state per message and walks the log, as a broker with receipts would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Finished,
    Pending,
    Filed,
    Dropped,
}

struct Model {
    fates: Vec<Fate>,
    retry_count: i32,
    released: bool,
}

fn model(
    start: usize,
    batch_end: Option<usize>,
    retry_count: i32,
    policy: RetryPolicy,
    len: usize,
    items: &[ResolvedItem],
) -> Model {
    let mut completed = vec![false; len];
    let mut signals: Vec<Option<Signal>> = vec![None; len];
    for item in items {
        let Place::Span { first, last } = item.place else { continue };
        match item.status {
            AckStatus::Completed => completed[last.0 as usize] = true,
            AckStatus::Signal(signal) => {
                let slot = &mut signals[first.0 as usize];
                *slot = Some(slot.map_or(signal, |old| old.max(signal)));
            }
        }
    }
    let mut fates: Vec<Fate> = (0..len).map(|o| if o < start { Fate::Finished } else { Fate::Pending }).collect();
    let mut out = Model { fates: vec![], retry_count, released: false };
    let mut silent = Vec::new();
    for offset in start..len {
        if let Some(signal) = signals[offset] {
            out.released = true;
            let give_up = signal == Signal::Dlq || (signal == Signal::Failed && retry_count >= policy.retry_limit);
            if give_up {
                // Passing the poison passes the silent gap below it too.
                silent.drain(..).for_each(|o: usize| fates[o] = Fate::Finished);
                let filed = signal == Signal::Dlq || policy.dead_letters;
                fates[offset] = if filed { Fate::Filed } else { Fate::Dropped };
                out.retry_count = 0;
            } else if signal == Signal::Failed {
                out.retry_count += 1;
            }
            out.fates = fates;
            return out;
        }
        silent.push(offset);
        if completed[offset] {
            silent.drain(..).for_each(|o| fates[o] = Fate::Finished);
        }
    }
    let cursor = fates.iter().rposition(|f| *f != Fate::Pending);
    if items.iter().any(|i| matches!(i.place, Place::Span { .. })) && batch_end.is_some_and(|end| cursor >= Some(end)) {
        out.released = true;
        out.retry_count = 0;
    }
    out.fates = fates;
    out
}

prop_compose! {
    fn history()(start in 0usize..6, span in 1usize..12, tail in 0usize..4, lease in prop::option::weighted(0.8, Just(())))
        (items in prop::collection::vec((start..start + span, 0usize..3, 0usize..8, 0u8..10), 0..14),
         start in Just(start), span in Just(span), tail in Just(tail), lease in Just(lease),
         retry_count in 0i32..4, retry_limit in 0i32..4, dead_letters in any::<bool>())
        -> (usize, usize, usize, Option<()>, i32, RetryPolicy, Vec<ResolvedItem>)
    {
        let status = [COMPLETED, COMPLETED, COMPLETED, COMPLETED, RETRY, FAILED, FAILED, DLQ];
        let items = items.into_iter().map(|(first, further, kind, place)| {
            let last = (first + if further == 2 { 1 } else { 0 }).min(start + span - 1);
            let place = match place {
                0 => Place::BelowCursor,
                1 => Place::Unresolvable,
                _ => Place::Span { first: Offset(first as i64), last: Offset(last as i64) },
            };
            ResolvedItem { status: status[kind], place }
        }).collect();
        (start, span, tail, lease, retry_count, policy(retry_limit, dead_letters), items)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_decision_is_what_per_message_state_would_do(
        (start, span, tail, lease, retry_count, policy, items) in history()
    ) {
        let len = start + span + tail;
        let batch_end = lease.map(|()| start + span - 1);
        let position = Position {
            committed: Offset(start as i64 - 1),
            batch_end: batch_end.map(|end| Offset(end as i64)),
            retry_count,
        };
        let effect = decide(position, policy, items.iter().copied());
        let want = model(start, batch_end, retry_count, policy, len, &items);

        let cursor = effect.cursor(position.committed);
        prop_assert!(cursor >= position.committed, "I1");
        for (offset, fate) in want.fates.iter().enumerate() {
            prop_assert_eq!(*fate != Fate::Pending, offset as i64 <= cursor.0, "offset {}", offset);
            prop_assert_eq!(*fate == Fate::Filed, effect.dead_letter() == Some(Offset(offset as i64)));
        }
        prop_assert_eq!(effect.retry_count(retry_count), want.retry_count);
        prop_assert_eq!(effect.releases(), want.released);

        for item in &items {
            let told = verdict(&effect, *item);
            match item.place {
                Place::Unresolvable => prop_assert_eq!(told, Verdict::Unresolvable),
                Place::BelowCursor if item.status == COMPLETED => prop_assert_eq!(told, Verdict::Noop),
                Place::BelowCursor => prop_assert_eq!(told, Verdict::AlreadyCommitted),
                Place::Span { first, .. } => {
                    let filed = want.fates[first.0 as usize] == Fate::Filed && item.status != COMPLETED;
                    prop_assert_eq!(told, Verdict::Done { dlq: filed });
                    // I4: a completed item at or above a signal never takes the signal with it.
                    if let AckStatus::Signal(_) = item.status {
                        let fate = want.fates[first.0 as usize];
                        prop_assert!(fate != Fate::Finished, "I4: a signal was swallowed");
                    }
                }
            }
        }
    }
}
