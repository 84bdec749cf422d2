//! Whatever promise a broker breaks, the run finds it, names it, and ends with exit code 1.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod harness;

use harness::fake_broker::{Fault, Trouble, start};
use harness::{Outcome, regent_load};

async fn run_against(fault: Fault, trouble: Trouble, more: &[&str]) -> Outcome {
    let url = start(0, fault, trouble).await;
    let mut words = vec!["ordinary", "--url", &url];
    let defaults = [
        ("--duration", "0.6"),
        ("--warmup", "0.1"),
        ("--partitions", "10"),
        ("--producers", "3"),
        ("--consumers", "3"),
        ("--backlog", "200"),
        ("--drain-timeout", "20"),
        ("--lease-seconds", "1"),
    ];
    for (flag, value) in defaults.iter().filter(|(flag, _)| !more.contains(flag)) {
        words.extend([*flag, *value]);
    }
    words.extend_from_slice(more);
    regent_load(&words).await
}

async fn is_caught(fault: Fault, kinds: &[&str]) {
    let outcome = run_against(fault, Trouble::default(), &[]).await;
    assert_eq!(outcome.code, 1, "{fault:?}: {}", outcome.output);
    assert!(outcome.violations().iter().any(|found| kinds.contains(&found.as_str())), "{fault:?}: {}", outcome.output);
    assert!(outcome.output.contains("VIOLATION"), "{}", outcome.output);
    assert_eq!(outcome.json["holds"], false);
}

/// `--push-url` is where pushes go: two brokers that share no database lose everything between them.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_pushed_to_a_broker_of_another_database_is_missed() {
    let [url, push_url] =
        [start(0, Fault::None, Trouble::default()).await, start(0, Fault::None, Trouble::default()).await];
    let words = ["parked", "--waiting", "4", "--partitions", "4", "--url", &url, "--push-url", &push_url];
    let quick = ["--duration", "0.6", "--warmup", "0.1", "--drain-timeout", "20", "--lease-seconds", "1"];
    let outcome = regent_load(&[&words[..], &quick[..]].concat()).await;
    assert_eq!((outcome.code, outcome.violations()), (1, vec!["lost".to_owned()]), "{}", outcome.output);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_broker_passes() {
    let outcome = run_against(Fault::None, Trouble::default(), &[]).await;
    assert_eq!(outcome.code, 0, "{}", outcome.output);
    let run = &outcome.json["runs"][0];
    assert!(run["counts"]["acked"].as_u64().unwrap() > 100, "{run:#}");
    assert!(run["latency_us"]["push_to_delivery"]["count"].as_u64().unwrap() > 100, "{run:#}");
    assert_eq!(run["ledger"]["stored"], run["ledger"]["acked"]);
    assert!(run["resources"]["broker_metrics"]["fake_requests_total"].as_f64().unwrap() > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn legal_trouble_is_no_violation() {
    let trouble = Trouble { unanswered_every: 11, overload_every: 13, flush_failed_every: 5 };
    let outcome = run_against(Fault::None, trouble, &["--duration", "3", "--partitions", "60"]).await;
    assert_eq!(outcome.code, 0, "{}", outcome.output);
    let run = &outcome.json["runs"][0];
    assert!(run["counts"]["retries_429"].as_u64().unwrap() > 0, "{run:#}");
    assert!(run["counts"]["retries_5xx"].as_u64().unwrap() > 0, "{run:#}");
    assert!(run["ledger"]["redelivered"].as_u64().unwrap() > 0, "{run:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_push_is_caught() {
    is_caught(Fault::LosePush, &["lost"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_skipped_delivery_is_caught() {
    is_caught(Fault::SkipDelivery, &["lost"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_twice_in_an_answer_is_caught() {
    is_caught(Fault::DoubleInAnswer, &["duplicated"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_stored_twice_is_caught() {
    is_caught(Fault::StoreTwice, &["acked_then_redelivered"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_swapped_messages_are_caught() {
    is_caught(Fault::Swap, &["out_of_order"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_that_moves_back_is_caught() {
    is_caught(Fault::ForgetAck, &["acked_then_redelivered"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ack_that_did_nothing_is_caught() {
    is_caught(Fault::IgnoreAck, &["acked_then_redelivered"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_payload_is_caught() {
    is_caught(Fault::Corrupt, &["corrupt"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_leases_at_once_are_caught() {
    is_caught(Fault::LeaseTwice, &["leased_twice", "wrongly_refused"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_false_duplicate_is_caught() {
    is_caught(Fault::FalseDuplicate, &["false_duplicate"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_that_cannot_be_true_is_caught() {
    is_caught(Fault::WrongRefusal, &["wrongly_refused"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_nobody_sent_is_caught() {
    is_caught(Fault::Phantom, &["phantom"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_broker_is_exit_code_2() {
    let outcome = regent_load(&["dense", "--url", "https://127.0.0.1:1"]).await;
    assert_eq!(outcome.code, 2, "{}", outcome.output);
}
