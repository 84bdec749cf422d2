//! `GET /api/v1/dlq` (`spec/admin.md` §6.2).

use serde_json::{Value, json};

use super::{give_up, give_up_next, listed, listing};
use crate::harness::TestBroker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_holds_the_delivery_and_nothing_else() {
    let broker = TestBroker::start().await;
    let empty = listing(&broker, "").await;
    assert_eq!(empty, json!({"messages": [], "pagination": {"limit": 100, "offset": 0}, "total": 0}));
    let partition_id = give_up(&broker, "q \"1\"", "p/é", "g", &["t/1"]).await;
    let body = listing(&broker, "").await;
    let mut row = body["messages"][0].clone();
    let filed = row["failedAt"].as_str().unwrap().to_owned();
    assert!(filed.len() == 24 && filed.ends_with('Z'), "milliseconds, UTC: {filed}");
    let id = row["id"].as_str().unwrap().to_owned();
    assert!(uuid::Uuid::try_parse(&id).is_ok());
    assert!(row["retryCount"].is_i64());
    for key in ["id", "createdAt", "failedAt"] {
        row.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(
        row,
        json!({"transactionId": "t/1", "partitionId": partition_id, "queue": "q \"1\"", "partition": "p/é",
               "consumerGroup": "g", "errorMessage": "no use for t/1", "retryCount": 0, "producerSub": null,
               "data": {"id": "t/1"}})
    );
    assert_eq!(body["messages"][0]["createdAt"], filed.as_str());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filters_filter_and_pages_page_newest_first() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q1", "p", "g", &["a", "b"]).await;
    give_up(&broker, "q2", "p", "g", &["c"]).await;
    give_up_next(&broker, "q1", "p", "h", 1).await;
    give_up(&broker, "q3", "p", "", &["d"]).await;
    assert_eq!(listed(&broker, "").await, ["d", "a", "c", "b", "a"]);
    assert_eq!(listed(&broker, "?queue=q1").await, ["a", "b", "a"]);
    assert_eq!(listed(&broker, "?consumerGroup=g").await, ["c", "b", "a"]);
    assert_eq!(listed(&broker, "?queue=q1&consumerGroup=g").await, ["b", "a"]);
    assert_eq!(listed(&broker, "?queue=q1&consumerGroup=h").await, ["a"]);
    assert_eq!(listed(&broker, "?consumerGroup=__QUEUE_MODE__").await, ["d"]);
    for foreign in ["?queue=none", "?consumerGroup=none", "?queue=q2&consumerGroup=h", "?queue=q"] {
        assert!(listed(&broker, foreign).await.is_empty(), "{foreign}");
    }
    // Sent by clients, and ignored.
    assert_eq!(listed(&broker, "?queue=q2&partition=none&from=2099-01-01&to=1970-01-01&x=1").await, ["c"]);
    assert_eq!(listed(&broker, "?queue=&consumerGroup=&limit=&offset=").await.len(), 5, "empty is absent");
    assert_eq!(listed(&broker, "?limit=2").await, ["d", "a"]);
    assert_eq!(listed(&broker, "?limit=2&offset=1").await, ["a", "c"]);
    assert_eq!(listed(&broker, "?queue=q1&limit=1&offset=1").await, ["b"]);
    assert!(listed(&broker, "?offset=5").await.is_empty());
    assert!(listed(&broker, "?limit=0").await.is_empty());
    let body = listing(&broker, "?limit=2&offset=1").await;
    assert_eq!(body["pagination"], json!({"limit": 2, "offset": 1}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_numbers_are_named() {
    let broker = TestBroker::start().await;
    for key in ["limit", "offset"] {
        for value in ["x", "1.5", "-1"] {
            broker.get(&format!("/api/v1/dlq?{key}={value}")).await.expect_refusal(&[key]);
        }
    }
}

/// A page never outgrows the memory that it may take: it ends after 64 MiB of payloads, and always has one row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_large_payloads_ends_early() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["small"]).await;
    broker
        .db
        .execute(
            "INSERT INTO queen.dead_letters (id, queue_id, partition_id, log_offset, group_name, queue_name, \
               partition_name, message_id, transaction_id, payload, reason, retry_count, message_created_at, failed_at) \
             SELECT gen_random_uuid(), queue_id, partition_id, n, group_name, queue_name, partition_name, message_id, \
               'large' || n, convert_to('\"' || repeat('x', 30 << 20) || '\"', 'UTF8'), reason, 0, message_created_at, \
               failed_at + make_interval(secs => n) \
             FROM queen.dead_letters, generate_series(1, 4) n",
        )
        .await;
    assert_eq!(listed(&broker, "").await, ["large4", "large3", "large2"], "what passes the limit is the last");
    assert_eq!(listed(&broker, "?offset=3").await, ["large1", "small"]);
}

/// §6.1: retention never removes a row, and the row needs nothing of the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_outlives_its_segment() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.db.execute("DELETE FROM queen.log_txns").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 1, txns_start = 1").await;
    let body = listing(&broker, "?queue=q").await;
    assert_eq!(body["messages"][0]["data"], json!({"id": "m"}));
    broker.delete_queue("q").await;
    assert!(listed(&broker, "").await.is_empty(), "queue deletion removes them");
}

/// Every listing reads a range of an index, never the table (design §5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_listing_sorts_or_scans_the_table() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    broker
        .db
        .execute(
            "INSERT INTO queen.dead_letters (id, queue_id, partition_id, log_offset, group_name, queue_name, \
               partition_name, message_id, transaction_id, payload, reason, retry_count, message_created_at, failed_at) \
             SELECT gen_random_uuid(), queue_id + n % 7, partition_id, n, 'g' || n % 5, queue_name, partition_name, \
               message_id, 't' || n, '1', reason, 0, message_created_at, failed_at - make_interval(secs => n) \
             FROM queen.dead_letters, generate_series(1, 20000) n",
        )
        .await;
    broker.db.execute("ANALYZE queen.dead_letters").await;
    let mut connection = broker.db.pool.acquire().await.unwrap();
    for setting in ["enable_seqscan = off", "plan_cache_mode = force_generic_plan"] {
        sqlx::query(sqlx::AssertSqlSafe(format!("SET {setting}"))).execute(&mut *connection).await.unwrap();
    }
    for (nth, which) in [
        "tenant = queen.default_tenant() AND $1::int IS NULL AND $2::text IS NULL",
        "queue_id = $1 AND $2::text IS NULL",
        "tenant = queen.default_tenant() AND $1::int IS NULL AND group_name = $2",
        "queue_id = $1 AND group_name = $2",
    ]
    .into_iter()
    .enumerate()
    {
        let prepare = format!(
            "PREPARE listing{nth} (int, text, bigint, bigint) AS SELECT id FROM queen.dead_letters WHERE {which} \
             ORDER BY failed_at DESC, id DESC LIMIT $3 OFFSET $4"
        );
        let explain = format!("EXPLAIN (FORMAT JSON) EXECUTE listing{nth} (1, 'g', 100, 0)");
        sqlx::raw_sql(sqlx::AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
        let rows = sqlx::raw_sql(sqlx::AssertSqlSafe(explain)).fetch_one(&mut *connection).await.unwrap();
        let plan: String = sqlx::Row::get::<Value, _>(&rows, 0).to_string();
        assert!(plan.contains("Index") && !plan.contains("Sort") && !plan.contains("Seq Scan"), "{which}: {plan}");
    }
}
