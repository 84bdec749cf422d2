//! Removal of empty partitions (`spec/admin.md` §8.5).

use serde_json::json;

use super::{history, pass, starts_at};
use crate::harness::{PATIENCE, Pop, Road, TestBroker, eventually};

/// Makes everything that speaks for a partition a year older, and lets the remover look; `but` holds as soon as that does.
async fn grow_old(broker: &TestBroker, but: Option<&'static str>) {
    let mut tx = broker.db.pool.begin().await.unwrap();
    for sql in [
        "UPDATE queen.log_partitions SET created_at = created_at - interval '1 year', last_write_at = last_write_at - interval '1 year'",
        "UPDATE queen.consumer_groups SET created_at = created_at - interval '1 year'",
        "UPDATE queen.log_consumers SET lease_acquired_at = lease_acquired_at - interval '1 year'",
        "UPDATE queen.empty_partitions SET look_at = look_at - interval '1 year'",
    ]
    .into_iter()
    .chain(but)
    {
        sqlx::query(sql).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
}

/// A queue that evicts at once; partition `p` is emptied.
async fn emptied() -> TestBroker {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "maxWaitTimeSeconds": 50, "retryLimit": 0 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().auto_ack()).await;
    pass(&broker, 60).await;
    starts_at(&broker.db, "p", 1).await;
    broker
}

async fn is_gone(broker: &TestBroker) -> bool {
    broker.db.log_bounds("q", "p").await.is_none()
}

/// Lets the remover look at everything once more, and says whether the partition survived it.
async fn survives(broker: &TestBroker) -> bool {
    broker.db.execute("UPDATE queen.empty_partitions SET look_at = '-infinity'").await;
    eventually(PATIENCE, async || {
        let waiting: i64 =
            sqlx::query_scalar("SELECT count(*) FROM queen.empty_partitions WHERE look_at = '-infinity'")
                .fetch_one(&broker.db.pool)
                .await
                .unwrap();
        waiting == 0
    })
    .await;
    !is_gone(broker).await
}

/// Long empty and unused: the row, its cursors and hashes go; a later push makes a new partition at offset 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_empty_partition_goes_and_comes_back_as_a_new_one() {
    let broker = emptied().await;
    assert!(survives(&broker).await, "too young");
    let before: i64 =
        sqlx::query_scalar("SELECT id FROM queen.log_partitions").fetch_one(&broker.db.pool).await.unwrap();
    grow_old(&broker, None).await;
    eventually(PATIENCE, async || is_gone(&broker).await).await;
    for table in ["log_partitions", "log_consumers", "log_txns"] {
        assert_eq!(broker.db.row_counts().await[table], 0, "{table}");
    }
    // Its hashes went with it, and the list that names it goes when their time would have come.
    broker.db.age(3_600).await;
    eventually(PATIENCE, async || broker.db.row_counts().await["log_age_lists"] == 0).await;
    assert!(history(&broker.db).await.contains(&("__partition_deleted__".into(), 0)));
    let report = broker.get("/api/v1/analytics/retention").await.expect(200).json();
    assert_eq!(report["totals"]["totalMsgs"], 1, "reserved kinds are left out");
    assert_eq!(report["totals"]["eventCount"], 1);

    let again = broker.push_ids("q", "p", ["a"]).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("queued", Some(0)));
    let after: i64 =
        sqlx::query_scalar("SELECT id FROM queen.log_partitions").fetch_one(&broker.db.pool).await.unwrap();
    assert_ne!(before, after);
    assert_eq!(broker.pop(&Pop::queue("q").group("g").all()).await.ids(), ["a"]);
}

/// Each of the vetoes, alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_speaks_for_a_partition_keeps_it() {
    for veto in [
        "UPDATE queen.log_partitions SET last_write_at = now()",
        "UPDATE queen.log_partitions SET created_at = now()",
        "UPDATE queen.consumer_groups SET created_at = now()",
        "UPDATE queen.log_consumers SET lease_acquired_at = now()",
        "UPDATE queen.log_consumers SET lease_expires_at = now() + interval '1 hour', worker_id = gen_random_uuid(), batch_end = 0",
        "UPDATE queen.log_consumers SET lease_expires_at = now() - interval '1 day'",
        "INSERT INTO queen.dead_letters (id, queue_id, partition_id, log_offset, group_name, queue_name, partition_name,
           message_id, transaction_id, payload, reason, retry_count, message_created_at)
         SELECT gen_random_uuid(), queue_id, id, 0, 'g', 'q', 'p', gen_random_uuid(), 't', '1', 'r', 0, now()
           FROM queen.log_partitions",
    ] {
        let broker = emptied().await;
        grow_old(&broker, Some(veto)).await;
        assert!(survives(&broker).await, "{veto}");
    }
}

/// Pushed to again: it stays, and is entered anew when it is empty again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_in_use_again_stays() {
    let broker = emptied().await;
    broker.push_ids("q", "p", ["b"]).await;
    grow_old(&broker, None).await;
    assert!(survives(&broker).await);
    assert_eq!(broker.pop(&Pop::queue("q").group("g")).await.ids(), ["b"]);
}

/// A partition that was made and never written is found by the walk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_was_never_written_is_found_by_the_walk() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 40;
        config.retention.safety_walk_ms = 1;
    })
    .await;
    broker.configure("q", json!({})).await;
    broker
        .db
        .execute(
            "INSERT INTO queen.log_partitions (queue_id, name, created_at, last_write_at)
             SELECT id, 'p', now() - interval '1 year', now() - interval '1 year' FROM queen.queues",
        )
        .await;
    eventually(PATIENCE, async || is_gone(&broker).await).await;
}

/// The walk also finds segments and hashes that are missing from the work list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk_enters_what_is_missing_from_the_work_list() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 40;
        config.retention.safety_walk_ms = 1;
    })
    .await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.db.execute("DELETE FROM queen.log_age_lists").await;
    broker.db.age(60).await;
    // Also without a due time of its own: the queue is looked at every interval at the latest once it holds something.
    eventually(PATIENCE, async || {
        let found: i64 =
            sqlx::query_scalar("SELECT count(*) FROM queen.log_age_lists").fetch_one(&broker.db.pool).await.unwrap();
        let swept = broker.db.log_bounds("q", "p").await == Some((1, 0, 0));
        // A walk beside the ageing above may have entered the age of before it.
        if found == 2 {
            broker.db.age(60).await;
        }
        swept
    })
    .await;
}
