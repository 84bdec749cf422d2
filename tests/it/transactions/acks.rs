//! Ack operations (§2.3), on every road of the ack path.

use serde_json::{Value, json};

use super::{GROUP, ack_op, ack_ops, commits, leased, leaseless_op, pop, push_op, stored};
use crate::harness::{Pop, TestBroker, on_every_road};

on_every_road!(
    an_ack_and_a_push_move_a_message,
    a_whole_batch_acked_one_by_one_completes_it,
    a_partial_ack_keeps_the_lease,
    the_lowest_signal_clamps_the_cursor,
    failed_charges_the_budget_once_and_redelivers,
    failed_without_budget_dead_letters_and_the_bundle_commits,
    a_queue_without_dead_letters_drops,
    retry_charges_nothing,
    dlq_files_at_once_with_its_reason,
    a_reason_that_is_no_unicode_fails_no_bundle,
    an_id_below_the_cursor_is_a_success,
    one_bundle_acks_for_several_groups_and_queues,
    a_lease_over_several_partitions_is_acked_in_one_bundle,
    a_failed_message_waits_for_the_retry_delay,
    words_are_normalised_as_on_the_ack_route,
    after_a_bundle_the_fast_path_is_asked_afresh,
    the_bundle_may_ack_what_it_pushes,
);

async fn cursor(broker: &TestBroker) -> crate::harness::Cursor {
    broker.db.cursor("in", "p", GROUP).await
}

/// T1.
async fn an_ack_and_a_push_move_a_message(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    commits(broker, &[ack_op(&popped.messages[0], "completed"), push_op("out", "p", "b")]).await;
    assert!(pop(broker, "in", "p").await.is_empty());
    assert_eq!(stored(broker, "out", "p").await, ["b"]);
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_end), (0, false, None));
}

/// T3.
async fn a_whole_batch_acked_one_by_one_completes_it(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b", "c", "d", "e"]).await;
    let mut operations = ack_ops(&popped, "completed");
    operations.push(push_op("out", "p", "x"));
    let results = commits(broker, &operations).await;
    assert!(results[..5].iter().all(|r| r["dlq"] == false && r["error"].is_null()), "{results:?}");
    assert_eq!((cursor(broker).await.committed, cursor(broker).await.leased), (4, false));
}

/// Silent gaps below the highest completed are completed.
async fn a_partial_ack_keeps_the_lease(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b", "c", "d"]).await;
    commits(broker, &[ack_op(&popped.messages[2], "completed")]).await;
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_end, now.worker.as_deref()), (2, Some(3), Some(popped.lease_id.as_str())));
    assert!(now.leased);
    commits(broker, &[ack_op(&popped.messages[3], "completed")]).await;
    assert_eq!((cursor(broker).await.committed, cursor(broker).await.leased), (3, false));
}

/// I4.
async fn the_lowest_signal_clamps_the_cursor(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b", "c", "d"]).await;
    let m = &popped.messages;
    let operations = [
        ack_op(&m[3], "completed"),
        ack_op(&m[2], "failed"),
        ack_op(&m[1], "retry"),
        ack_op(&m[1], "failed"),
        ack_op(&m[0], "completed"),
    ];
    let results = commits(broker, &operations).await;
    assert!(results.iter().all(|r| r["success"] == true && r["dlq"] == false));
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (0, false, 1), "failed beats retry at one offset");
    assert_eq!(pop(broker, "in", "p").await.ids(), ["b", "c", "d"]);
}

async fn failed_charges_the_budget_once_and_redelivers(broker: &TestBroker) {
    broker.configure("in", json!({ "retryLimit": 1 })).await;
    let popped = leased(broker, &["a", "b"]).await;
    commits(broker, &ack_ops(&popped, "failed")).await;
    assert_eq!(cursor(broker).await.batch_retry_count, 1);
    let again = pop(broker, "in", "p").await;
    assert_eq!(again.ids(), ["a", "b"]);
    let results = commits(broker, &ack_ops(&again, "failed")).await;
    assert_eq!(results.iter().map(|r| r["dlq"] == true).collect::<Vec<_>>(), [true, false]);
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count, now.leased), (0, 0, false));
    assert_eq!(broker.db.dead_letters().await[0].reason, "Retries exhausted");
    assert_eq!(broker.db.dead_letters().await[0].retry_count, 1);
}

/// T5.
async fn failed_without_budget_dead_letters_and_the_bundle_commits(broker: &TestBroker) {
    broker.configure("in", json!({ "retryLimit": 0 })).await;
    let popped = leased(broker, &["a"]).await;
    let mut nack = ack_op(&popped.messages[0], "failed");
    nack["error"] = json!("cannot parse");
    let results = commits(broker, &[nack, push_op("errors", "p", "report")]).await;
    assert_eq!(results[0]["dlq"], true);
    assert!(pop(broker, "in", "p").await.is_empty());
    assert_eq!(stored(broker, "errors", "p").await, ["report"]);
    let letters = broker.db.dead_letters().await;
    assert_eq!(letters.len(), 1);
    let letter = &letters[0];
    assert_eq!((letter.transaction_id.as_str(), letter.reason.as_str()), ("a", "cannot parse"));
    assert_eq!(
        (letter.queue_name.as_str(), letter.partition_name.as_str(), letter.group_name.as_str()),
        ("in", "p", GROUP)
    );
    assert_eq!((letter.message_id.as_str(), letter.log_offset), (popped.messages[0].id.as_str(), 0));
}

async fn a_queue_without_dead_letters_drops(broker: &TestBroker) {
    let options = json!({ "retryLimit": 0, "deadLetterQueue": false, "dlqAfterMaxRetries": false });
    broker.configure("in", options).await;
    let popped = leased(broker, &["a", "b"]).await;
    let results = commits(broker, &[ack_op(&popped.messages[0], "failed")]).await;
    assert_eq!(results[0]["dlq"], false);
    assert_eq!(cursor(broker).await.committed, 0);
    assert!(broker.db.dead_letters().await.is_empty());
    assert_eq!(pop(broker, "in", "p").await.ids(), ["b"]);
}

async fn retry_charges_nothing(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    commits(broker, &[ack_op(&popped.messages[0], "completed"), ack_op(&popped.messages[1], "retry")]).await;
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count, now.leased), (0, 0, false));
    assert_eq!(pop(broker, "in", "p").await.ids(), ["b"]);
}

async fn dlq_files_at_once_with_its_reason(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b", "c"]).await;
    let mut nack = ack_op(&popped.messages[1], "dlq");
    nack["error"] = json!("poison");
    let results = commits(broker, &[ack_op(&popped.messages[0], "completed"), nack]).await;
    assert_eq!((&results[0]["dlq"], &results[1]["dlq"]), (&json!(false), &json!(true)));
    assert_eq!(cursor(broker).await.committed, 1);
    assert_eq!(broker.db.dead_letters().await[0].reason, "poison");
    assert_eq!(pop(broker, "in", "p").await.ids(), ["c"]);
}

/// As on the ack routes: a handler's error may quote half a surrogate pair out of a payload.
async fn a_reason_that_is_no_unicode_fails_no_bundle(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    let mut nack = ack_op(&popped.messages[0], "dlq");
    nack["error"] = json!("REASON");
    let body = json!({ "operations": [nack, push_op("out", "p", "x")] }).to_string().replace("REASON", r"cut \ud83d");
    let answer = broker.post("/api/v1/transaction", body).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["results"][0]["dlq"]), (&json!(true), &json!(true)), "{answer}");
    let reason = &broker.db.dead_letters().await[0].reason;
    assert!(reason.starts_with("cut \u{fffd}"), "{reason}");
    assert_eq!(stored(broker, "out", "p").await, ["x"]);
    assert_eq!(pop(broker, "in", "p").await.ids(), ["b"]);
}

/// §2.3 and §11 Q3: it moves nothing, also for a signal.
async fn an_id_below_the_cursor_is_a_success(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b", "c"]).await;
    commits(broker, &[ack_op(&popped.messages[1], "completed")]).await;
    for status in ["completed", "failed", "retry", "dlq"] {
        let before = super::dump(&broker.db).await;
        let results = commits(broker, &[ack_op(&popped.messages[0], status)]).await;
        assert_eq!(
            results[0],
            json!({"index": 0, "type": "ack", "success": true, "transactionId": "a", "error": null, "dlq": false})
        );
        assert_eq!(super::dump(&broker.db).await, before, "{status}");
    }
    let mixed = [ack_op(&popped.messages[0], "failed"), ack_op(&popped.messages[2], "completed")];
    commits(broker, &mixed).await;
    assert_eq!(cursor(broker).await.committed, 2, "a signal below the cursor clamps nothing");
}

/// T4, T7.
async fn one_bundle_acks_for_several_groups_and_queues(broker: &TestBroker) {
    for queue in ["in", "other"] {
        broker.push_ids(queue, "p", ["a", "b"]).await;
    }
    let mut operations = vec![push_op("out", "p", "x")];
    for (queue, group) in [("in", "g"), ("in", "h"), ("other", "g")] {
        let popped = broker.pop(&Pop::partition(queue, "p").group(group).all().batch(10)).await;
        operations.extend(ack_ops(&popped, "completed"));
    }
    commits(broker, &operations).await;
    for (queue, group) in [("in", "g"), ("in", "h"), ("other", "g")] {
        assert_eq!(broker.db.cursor(queue, "p", group).await.committed, 1, "{queue} {group}");
    }
    let untouched = broker.pop(&Pop::partition("in", "p").group("third").all().batch(10)).await;
    assert_eq!(untouched.ids(), ["a", "b"]);
    // Queue mode is the group that nobody names.
    let popped = broker.pop(&Pop::partition("in", "p").batch(10)).await;
    let mut unnamed = ack_op(&popped.messages[1], "completed");
    unnamed.as_object_mut().unwrap().remove("consumerGroup");
    commits(broker, &[unnamed]).await;
    assert_eq!(broker.db.cursor("in", "p", "__QUEUE_MODE__").await.committed, 1);
}

async fn a_lease_over_several_partitions_is_acked_in_one_bundle(broker: &TestBroker) {
    for partition in ["x", "y", "z"] {
        broker.push_ids("in", partition, ["a", "b"]).await;
    }
    let popped = broker.pop(&Pop::queue("in").group(GROUP).all().batch(10).partitions(3)).await;
    assert_eq!(popped.messages.len(), 6);
    let mut operations = ack_ops(&popped, "completed");
    operations.reverse();
    commits(broker, &operations).await;
    for partition in ["x", "y", "z"] {
        assert_eq!(broker.db.cursor("in", partition, GROUP).await.committed, 1);
    }
    assert_eq!(broker.db.live_leases().await, 0);
}

async fn a_failed_message_waits_for_the_retry_delay(broker: &TestBroker) {
    broker.configure("in", json!({ "retryDelay": 3_600_000 })).await;
    let popped = leased(broker, &["a"]).await;
    commits(broker, &[ack_op(&popped.messages[0], "failed")]).await;
    assert!(cursor(broker).await.held_for.is_some_and(|seconds| seconds > 3500.0));
    assert!(pop(broker, "in", "p").await.is_empty());
}

async fn words_are_normalised_as_on_the_ack_route(broker: &TestBroker) {
    for (nth, status) in
        [json!("success"), json!("acked"), json!("ok"), json!(null), json!(true)].into_iter().enumerate()
    {
        let popped = leased(broker, &[format!("m{nth}").as_str()]).await;
        let mut op = ack_op(&popped.messages[0], "");
        op["status"] = status;
        commits(broker, &[op]).await;
        assert_eq!(cursor(broker).await.committed, nth as i64);
    }
    for (nth, status) in [json!("Completed"), json!("nack"), json!(""), json!(false)].into_iter().enumerate() {
        if nth == 0 {
            broker.configure("in", json!({ "retryLimit": 100 })).await;
            broker.push_ids("in", "p", ["last"]).await;
        }
        let popped = pop(broker, "in", "p").await;
        let mut op = ack_op(&popped.messages[0], "");
        op["status"] = status;
        commits(broker, &[op]).await;
        assert_eq!(cursor(broker).await.batch_retry_count, nth as i32 + 1);
    }
}

/// I6: the registry may hold a lease that a bundle ended or moved; the ack route must answer as if it had not.
async fn after_a_bundle_the_fast_path_is_asked_afresh(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    commits(broker, &[ack_op(&popped.messages[0], "completed")]).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert_eq!(results.iter().map(|r| (r.success, r.noop)).collect::<Vec<_>>(), [(true, true), (true, false)]);
    let popped = leased(broker, &["c", "d"]).await;
    commits(broker, &ack_ops(&popped, "completed")).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| r.error.as_deref() == Some("invalid or expired lease")), "{results:?}");
    let popped = leased(broker, &["e", "f"]).await;
    commits(broker, &[ack_op(&popped.messages[0], "retry")]).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| !r.success), "{results:?}");
    assert_eq!(pop(broker, "in", "p").await.ids(), ["e", "f"]);
}

/// Pushes come before acks (§2.6), so a lease-less ack may name what its own bundle stores.
async fn the_bundle_may_ack_what_it_pushes(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    commits(broker, &[leaseless_op(&popped.messages[0], "completed")]).await;
    let mut own: Value = leaseless_op(&popped.messages[0], "completed");
    own["transactionId"] = json!("b");
    commits(broker, &[own, push_op("in", "p", "b"), push_op("in", "p", "c")]).await;
    assert_eq!(cursor(broker).await.committed, 1);
    assert_eq!(pop(broker, "in", "p").await.ids(), ["c"]);
}
