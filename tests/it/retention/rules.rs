//! The rules, one by one (`spec/admin.md` §8.2, §8.3).

use serde_json::json;

use super::{history, pass, segments, starts_at, swept};
use crate::harness::{Pop, Road, TestBroker, numbered};

/// Three segments: two old ones of three and two messages, a young one.
async fn filled(options: serde_json::Value) -> TestBroker {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", options).await;
    broker.push_ids("q", "p", numbered("a", 0..3)).await;
    broker.push_ids("q", "p", numbered("b", 0..2)).await;
    broker.db.age(100).await;
    broker.push_ids("q", "p", ["c"]).await;
    swept(&broker.db).await;
    broker
}

/// Rule 1: by age alone, unread or not, whole segments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_seconds_drops_what_is_older_read_or_not() {
    let broker = filled(json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    starts_at(&broker.db, "p", 5).await;
    assert_eq!(segments(&broker.db).await, [5]);
    assert_eq!(history(&broker.db).await, [("retention".into(), 5)]);
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["c"]);
}

/// A window without its switch, and the switch without a window, do nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_needs_the_switch_and_the_switch_a_window() {
    for options in [
        json!({ "retentionEnabled": false, "retentionSeconds": 1, "completedRetentionSeconds": 1 }),
        json!({ "retentionEnabled": true }),
        json!({}),
    ] {
        let broker = filled(options).await;
        broker.pop(&Pop::queue("q").auto_ack()).await;
        pass(&broker, 10_000).await;
        assert_eq!(segments(&broker.db).await, [0, 3, 5]);
    }
}

/// Rule 2: never past the slowest group of the partition, and nothing while there is no cursor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completed_retention_waits_for_the_slowest_group() {
    let broker = filled(json!({ "retentionEnabled": true, "completedRetentionSeconds": 50 })).await;
    assert_eq!(segments(&broker.db).await, [0, 3, 5], "no cursor: nothing is completed");
    for (group, batch) in [("fast", 6), ("slow", 4)] {
        broker.pop(&Pop::partition("q", "p").group(group).all().batch(batch).auto_ack()).await;
    }
    pass(&broker, 200).await;
    // The slow group is at offset 3, inside the second segment: that stays whole.
    starts_at(&broker.db, "p", 3).await;
    assert_eq!(segments(&broker.db).await, [3, 5]);
    broker.pop(&Pop::partition("q", "p").group("slow").batch(10).auto_ack()).await;
    pass(&broker, 200).await;
    starts_at(&broker.db, "p", 6).await;
    assert_eq!(history(&broker.db).await.iter().map(|(_, n)| n).sum::<i64>(), 6);
    assert!(history(&broker.db).await.iter().all(|(kind, _)| kind == "completed_retention"));
}

/// Rules 1 and 2 together: the further boundary counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_rules_combine_as_the_further_boundary() {
    let broker =
        filled(json!({ "retentionEnabled": true, "completedRetentionSeconds": 50, "retentionSeconds": 3000 })).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().batch(3).auto_ack()).await;
    pass(&broker, 60).await;
    starts_at(&broker.db, "p", 3).await;
    pass(&broker, 2700).await;
    assert_eq!(segments(&broker.db).await, [3, 5], "2860 of 3000 seconds");
    pass(&broker, 200).await;
    starts_at(&broker.db, "p", 5).await;
    assert_eq!(history(&broker.db).await, [("completed_retention".into(), 3), ("retention".into(), 2)]);
}

/// Rule 3 asks no switch, drops leased data, and dead-letters nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_wait_time_evicts_leased_data_without_the_switch() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "maxWaitTimeSeconds": 50 })).await;
    broker.push_ids("q", "p", numbered("a", 0..3)).await;
    assert_eq!(broker.pop(&Pop::queue("q").lease(600)).await.messages.len(), 3);
    pass(&broker, 60).await;
    starts_at(&broker.db, "p", 3).await;
    assert_eq!(history(&broker.db).await, [("max_wait_time_eviction".into(), 3)]);
    assert_eq!(broker.db.dead_letters().await, []);
    assert!(broker.db.cursor("q", "p", "__QUEUE_MODE__").await.leased, "the lease row stays");
}

/// A sink hold without a readable pointer is its cap alone; max-wait does not care.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sink_hold_holds_rules_one_and_two_up_to_its_cap() {
    let held = json!({ "retentionEnabled": true, "retentionSeconds": 50, "completedRetentionSeconds": 50,
        "retentionSinkHold": "lake", "retentionSinkHoldMaxSeconds": 1000 });
    let broker = filled(held).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().batch(10).auto_ack()).await;
    pass(&broker, 800).await;
    assert_eq!(segments(&broker.db).await, [0, 3, 5], "900 of 1000 seconds");
    pass(&broker, 150).await;
    starts_at(&broker.db, "p", 5).await;

    let broker = filled(json!({ "maxWaitTimeSeconds": 50, "retentionSinkHold": "lake" })).await;
    starts_at(&broker.db, "p", 5).await;
}

/// A segment that straddles the boundary stays whole: its messages outlive the window, and none dies before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_dies_before_its_window() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 1000 })).await;
    for n in 0..4 {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
        broker.db.age(300).await;
    }
    swept(&broker.db).await;
    // Ages 1200, 900, 600, 300.
    starts_at(&broker.db, "p", 1).await;
    assert_eq!(segments(&broker.db).await, [1, 2, 3]);
}

/// A changed window holds from the next cycle on, and restores nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_window_holds_at_once() {
    let broker = filled(json!({})).await;
    pass(&broker, 1000).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 1050 })).await;
    starts_at(&broker.db, "p", 5).await;
    broker.configure("q", json!({})).await;
    pass(&broker, 100_000).await;
    assert_eq!(segments(&broker.db).await, [5]);
    broker.configure("q", json!({ "maxWaitTimeSeconds": 60 })).await;
    starts_at(&broker.db, "p", 6).await;
}

/// A backlog goes in bounded steps, and the queue row stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_goes_in_bounded_steps() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 40;
        config.retention.batch_size = 7;
        config.retention.parallelism = 3;
    })
    .await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    for n in 0..40 {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
    }
    for n in 0..40 {
        broker.push_ids("q", &format!("lane{n}"), ["x"]).await;
    }
    broker.db.age(100).await;
    starts_at(&broker.db, "p", 40).await;
    for n in 0..40 {
        starts_at(&broker.db, &format!("lane{n}"), 1).await;
    }
    assert_eq!(segments(&broker.db).await, [0; 0]);
    let history = history(&broker.db).await;
    assert_eq!(history.iter().map(|(_, messages)| messages).sum::<i64>(), 80);
    // One partition alone, or sixteen with one row each at least.
    assert!(history.iter().all(|(_, messages)| *messages <= 16), "{history:?}");
    assert_eq!(broker.db.queue_names().await, ["q"]);
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM queen.log_age_lists WHERE kind = 0")
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
    assert_eq!(left, 0, "an empty partition is on no list");
}

/// What another queue may delete is not this queue's business, names notwithstanding.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_windows_of_one_queue_touch_no_other() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.push_ids("other", "p", ["a"]).await;
    pass(&broker, 100).await;
    starts_at(&broker.db, "p", 1).await;
    assert_eq!(broker.db.log_bounds("other", "p").await, Some((0, 0, 0)));
    assert_eq!(broker.pop(&Pop::queue("other")).await.ids(), ["a"]);
}

/// A capped partition is looked at again after the cursor moved, and max-wait never waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_waits_for_a_cursor_still_meets_the_other_rules() {
    let broker =
        filled(json!({ "retentionEnabled": true, "completedRetentionSeconds": 50, "maxWaitTimeSeconds": 300 })).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().batch(1).auto_ack()).await;
    pass(&broker, 50).await;
    assert_eq!(segments(&broker.db).await, [0, 3, 5]);
    let shift = "SELECT extract(epoch FROM oldest_at - (SELECT min(created_at) FROM queen.log_segments))::float8
                   FROM queen.log_age_lists WHERE kind = 0";
    let shift: f64 = sqlx::query_scalar(shift).fetch_one(&broker.db.pool).await.unwrap();
    assert!(shift > 50.0, "backed off: {shift}");
    // Its own clock says when max-wait is due: 300 seconds after the commit, whatever the pause would be.
    pass(&broker, 140).await;
    pass(&broker, 20).await;
    starts_at(&broker.db, "p", 5).await;
}
