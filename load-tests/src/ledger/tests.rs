//! Every promise of the ledger's list, kept and broken.

use super::*;

const LEASE_SECONDS: u32 = 30;

fn books(messages: u32) -> Ledger {
    let ledger = Ledger::new(1, 1, LEASE_SECONDS);
    ledger.take_numbers(0, messages);
    ledger.stored(0, messages);
    ledger
}

fn settle(ledger: &Ledger, last: u32) {
    ledger.ack_sent(0, 0, last);
    ledger.ack_ended(0, 0, last, AckFate::Done);
}

fn only(kind: Violation, count: u64) -> BTreeMap<Violation, u64> {
    BTreeMap::from([(kind, count)])
}

#[test]
fn a_clean_run_holds() {
    let ledger = books(10);
    ledger.delivered(0, 0, &[0, 1, 2, 3, 4], 0, 1);
    settle(&ledger, 4);
    ledger.delivered(0, 0, &[5, 6, 7, 8, 9], 2, 3);
    settle(&ledger, 9);
    assert!(ledger.is_settled());
    assert_eq!(ledger.backlog(), 0);
    let verdict = ledger.close();
    assert!(verdict.holds(), "{verdict:?}");
    assert_eq!((verdict.stored, verdict.acked, verdict.redelivered), (10, 10, 0));
}

#[test]
fn a_message_that_never_comes_is_lost() {
    let ledger = books(10);
    ledger.delivered(0, 0, &[0, 1, 2, 3, 4], 0, 1);
    settle(&ledger, 4);
    assert_eq!(ledger.close().violations, only(Violation::Lost, 5));
}

#[test]
fn a_message_skipped_in_the_middle_is_lost() {
    let ledger = books(5);
    ledger.delivered(0, 0, &[0, 1, 3, 4], 0, 1);
    settle(&ledger, 4);
    assert_eq!(ledger.close().violations, only(Violation::Lost, 1));
}

#[test]
fn an_unacknowledged_message_may_not_be_skipped_after_its_first_delivery() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    // The lease runs out unacknowledged; the next answer must start at 0 again.
    ledger.delivered(0, 0, &[2, 3], 40_000, 40_001);
    settle(&ledger, 3);
    assert_eq!(ledger.close().violations, only(Violation::Lost, 2));
}

#[test]
fn twice_in_one_answer_is_duplicated() {
    let ledger = books(3);
    ledger.delivered(0, 0, &[0, 1, 1, 2], 0, 1);
    settle(&ledger, 2);
    assert_eq!(ledger.close().violations, only(Violation::Duplicated, 1));
}

#[test]
fn two_swapped_in_one_answer_are_out_of_order() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 2, 1, 3], 0, 1);
    settle(&ledger, 3);
    let verdict = ledger.close();
    assert!(verdict.violations.contains_key(&Violation::OutOfOrder), "{verdict:?}");
    assert!(!verdict.violations.contains_key(&Violation::Lost), "{verdict:?}");
}

#[test]
fn a_late_message_of_another_answer_is_out_of_order() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 2, 3], 0, 1);
    ledger.delivered(0, 0, &[1], 40_000, 40_001);
    settle(&ledger, 3);
    assert_eq!(ledger.close().violations, only(Violation::OutOfOrder, 1));
}

#[test]
fn redelivery_of_the_unacknowledged_is_legal_and_counted() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 1, 2, 3], 0, 1);
    ledger.delivered(0, 0, &[0, 1, 2, 3], 40_000, 40_001);
    settle(&ledger, 3);
    let verdict = ledger.close();
    assert!(verdict.holds(), "{verdict:?}");
    assert_eq!(verdict.redelivered, 4);
}

#[test]
fn redelivery_after_success_is_a_violation() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 1, 2, 3], 0, 1);
    settle(&ledger, 3);
    ledger.delivered(0, 0, &[3], 2, 3);
    assert_eq!(ledger.close().violations, only(Violation::AckedThenRedelivered, 1));
}

#[test]
fn a_second_lease_beside_a_running_one_is_a_violation() {
    let ledger = books(2);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    ledger.delivered(0, 0, &[0, 1], 5_000, 5_001);
    settle(&ledger, 1);
    assert_eq!(ledger.close().violations, only(Violation::LeasedTwice, 1));
}

#[test]
fn redelivery_beside_an_ack_under_way_is_judged_by_its_answer() {
    for (fate, wrong) in [(AckFate::Done, true), (AckFate::Refused, false), (AckFate::Unknown, false)] {
        let ledger = books(2);
        ledger.delivered(0, 0, &[0, 1], 0, 1);
        ledger.ack_sent(0, 0, 1);
        ledger.delivered(0, 0, &[0, 1], 2, 3);
        ledger.ack_ended(0, 0, 1, fate);
        settle(&ledger, 1);
        assert_eq!(ledger.close().violations.contains_key(&Violation::AckedThenRedelivered), wrong, "{fate:?}");
    }
}

#[test]
fn what_follows_may_come_before_the_ack_is_answered() {
    let ledger = books(4);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    ledger.ack_sent(0, 0, 1);
    ledger.delivered(0, 0, &[2, 3], 2, 3);
    ledger.ack_ended(0, 0, 1, AckFate::Done);
    settle(&ledger, 3);
    let verdict = ledger.close();
    assert!(verdict.holds(), "{verdict:?}");
}

#[test]
fn an_ack_without_an_answer_may_have_landed_or_not() {
    let landed = books(2);
    landed.delivered(0, 0, &[0, 1], 0, 1);
    landed.ack_sent(0, 0, 1);
    landed.ack_ended(0, 0, 1, AckFate::Unknown);
    let verdict = landed.close();
    assert!(verdict.holds(), "{verdict:?}");
    assert_eq!(verdict.acked_unanswered, 2);

    let came_back = books(2);
    came_back.delivered(0, 0, &[0, 1], 0, 1);
    came_back.ack_sent(0, 0, 1);
    came_back.ack_ended(0, 0, 1, AckFate::Unknown);
    came_back.delivered(0, 0, &[0, 1], 40_000, 40_001);
    settle(&came_back, 1);
    assert!(came_back.close().holds());
}

#[test]
fn a_refused_ack_leaves_its_messages_unsettled() {
    let ledger = books(2);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    ledger.ack_sent(0, 0, 1);
    ledger.ack_ended(0, 0, 1, AckFate::Refused);
    assert_eq!(ledger.close().violations, only(Violation::Unsettled, 2));
}

#[test]
fn what_was_never_sent_is_a_phantom() {
    let ledger = books(1);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    settle(&ledger, 0);
    ledger.delivered(0, 77, &[0], 0, 1);
    assert_eq!(ledger.close().violations, only(Violation::Phantom, 2));
}

#[test]
fn groups_are_judged_apart() {
    let ledger = Ledger::new(100, 2, LEASE_SECONDS);
    ledger.take_numbers(70, 1);
    ledger.stored(70, 1);
    ledger.delivered(0, 70, &[0], 0, 1);
    ledger.ack_sent(0, 70, 0);
    ledger.ack_ended(0, 70, 0, AckFate::Done);
    assert!(!ledger.is_settled());
    assert_eq!(ledger.close().violations, only(Violation::Lost, 1));
}

#[test]
fn a_push_without_an_answer_may_be_delivered_or_not() {
    let ledger = books(1);
    ledger.take_numbers(0, 1);
    ledger.delivered(0, 0, &[0, 1], 0, 1);
    settle(&ledger, 1);
    assert!(ledger.close().holds());

    let other = books(1);
    other.take_numbers(0, 1);
    other.delivered(0, 0, &[0], 0, 1);
    settle(&other, 0);
    assert!(other.close().holds());
}

#[test]
fn the_memory_for_missing_messages_is_bounded() {
    let ledger = books(3_000_000);
    ledger.delivered(0, 0, &[2_999_999], 0, 1);
    settle(&ledger, 2_999_999);
    assert_eq!(lock(&ledger.shards[0]).missing.len(), 0);
    assert_eq!(ledger.close().violations, only(Violation::Lost, 2_999_999));
}
