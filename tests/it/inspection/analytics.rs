//! Status over time and analytics (`spec/admin.md` §9.1, §9.4, §10).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::{are_integers, half_consumed, has_keys};
use crate::harness::{Broker, Client, Database, PATIENCE, Pop, TestBroker, eventually, eventually_some};

async fn get(client: &Client, target: &str) -> Value {
    client.get(&format!("/api/v1/{target}")).await.expect(200).json()
}

/// A broker that writes its minute buckets twice a second.
async fn hasty() -> (Broker, Database) {
    let db = Database::migrated().await;
    let broker =
        Broker::from_environment([("DATABASE_URL", &*db.url), ("METRICS_FLUSH_MS", "500"), ("QUEEN_SERVER_ID", "one")]);
    (broker.await.unwrap(), db)
}

/// Five messages pushed to and delivered from `ns.job`, three completed, two given back; one pop finds nothing.
async fn traffic(client: &Client) {
    client.configure("ns.job", json!({ "namespace": "ns", "task": "job", "retryLimit": 0 })).await;
    client.push_ids("ns.job", "p", ["m0", "m1", "m2", "m3", "m4"]).await;
    let popped = client.pop(&Pop::queue("ns.job").group("g").all()).await;
    let mut items = popped.items("completed");
    items[3] = popped.messages[3].failed("broken at 17");
    items[4] = popped.messages[4].item("retry");
    client.ack("g", items).await;
    client.configure("quiet", json!({})).await;
    assert!(client.pop(&Pop::queue("quiet")).await.is_empty());
}

fn sum(series: &Value, queue: &str, key: &str) -> i64 {
    let points = series.as_array().unwrap().iter().filter(|point| point["queueName"] == queue);
    points.map(|point| point[key].as_i64().unwrap()).sum()
}

/// What is cached of a queue is read again whenever notifications may have been lost; what is pushed meanwhile is counted
/// for it all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_are_counted_while_the_listener_comes_back() {
    let (broker, db) = hasty().await;
    let over = Arc::new(AtomicBool::new(false));
    let pushers: Vec<_> = (0..4)
        .map(|nth| {
            let (client, over) = ((*broker).clone(), over.clone());
            tokio::spawn(async move {
                let mut pushed = 0;
                while !over.load(Ordering::Relaxed) {
                    client.push_ids(&format!("q{nth}"), "p", [format!("m{pushed}")]).await;
                    pushed += 1;
                }
                pushed
            })
        })
        .collect();
    for _ in 0..10 {
        db.listened_to().await;
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND query ILIKE 'LISTEN%'",
        )
        .await;
    }
    db.listened_to().await;
    over.store(true, Ordering::Relaxed);
    for (nth, pusher) in pushers.into_iter().enumerate() {
        let pushed: i64 = pusher.await.unwrap();
        eventually(PATIENCE, async || {
            let ops = get(&broker, "analytics/queue-ops").await;
            sum(&ops["series"], &format!("q{nth}"), "pushMessages") == pushed
        })
        .await;
    }
}

/// §10.1 to §10.5, §10.8, §10.9, §9.1, §4.1: what happened is counted once, in every view of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn minute_buckets_count_what_happened() {
    let (broker, _db) = hasty().await;
    traffic(&broker).await;
    let ops = eventually_some(PATIENCE, async || {
        // What the broker did as a whole is counted for itself, and may be in the write after that of the queues.
        let whole = get(&broker, "analytics/worker-metrics").await["summary"]["ackFailed"] == 2;
        let ops = get(&broker, "analytics/queue-ops").await;
        (whole && sum(&ops["series"], "ns.job", "ackFailed") == 2 && sum(&ops["series"], "quiet", "popEmpty") == 1)
            .then_some(ops)
    })
    .await;
    has_keys(&ops, &["timeRange", "bucketMinutes", "series", "queues"]);
    assert_eq!((&ops["bucketMinutes"], &ops["queues"]), (&json!(1), &json!(["ns.job", "quiet"])));
    for (key, count) in [
        ("pushRequests", 1),
        ("pushMessages", 5),
        ("popMessages", 5),
        ("ackRequests", 1),
        ("ackSuccess", 3),
        ("partitionsCreated", 1),
    ] {
        assert_eq!(sum(&ops["series"], "ns.job", key), count, "{key}");
    }
    let point = ops["series"].as_array().unwrap().iter().find(|point| point["popMessages"] == 5).unwrap();
    has_keys(
        point,
        &[
            "bucket",
            "queueName",
            "pushRequests",
            "pushMessages",
            "popMessages",
            "popEmpty",
            "ackRequests",
            "ackSuccess",
            "ackFailed",
            "transactions",
            "partitionsCreated",
            "partitionsDeleted",
            "partitionCount",
            "avgLagMs",
            "maxLagMs",
            "pushPerSecond",
            "popPerSecond",
            "ackPerSecond",
            "emptyPerSecond",
            "parkedCount",
        ],
    );
    assert!(point["bucket"].as_str().unwrap().ends_with(":00Z") && point["avgLagMs"].is_i64(), "{point}");
    assert!(get(&broker, "analytics/queue-ops?queue=quiet").await["queues"] == json!(["quiet"]));

    let lag = get(&broker, "analytics/queue-lag").await;
    let row = lag.as_array().unwrap().iter().find(|row| row["popCount"] == 5).unwrap();
    has_keys(row, &["queueName", "popCount", "avgLagMs", "maxLagMs", "bucketMinutes", "bucketTime"]);
    let quiet = lag.as_array().unwrap().iter().find(|row| row["queueName"] == "quiet").unwrap();
    assert!(quiet["avgLagMs"].is_null() && quiet["maxLagMs"].is_null(), "no pops, no lag");

    let workers = get(&broker, "analytics/worker-metrics").await;
    has_keys(&workers, &["timeRange", "bucketMinutes", "pointCount", "summary", "timeSeries", "workers", "queues"]);
    assert_eq!((&workers["summary"]["pushMessages"], &workers["summary"]["ackFailed"]), (&json!(5), &json!(2)));
    assert_eq!(workers["workers"][0]["hostname"], "one");
    let point = &workers["timeSeries"][0];
    are_integers(point, &["pushMessages", "popMessages", "ackMessages", "lagCount", "jobsDone", "backoffSize"]);
    assert_eq!(get(&broker, "analytics/worker-metrics?hostname=other").await["timeSeries"], json!([]));

    let system = get(&broker, "analytics/system-metrics").await;
    has_keys(&system, &["timeRange", "bucketMinutes", "pointCount", "replicas"]);
    let metrics = &system["replicas"][0]["timeSeries"][0]["metrics"];
    has_keys(&metrics["memory"]["rss_bytes"], &["avg", "min", "max", "last"]);
    assert!(metrics["memory"]["rss_bytes"]["last"].as_f64().unwrap() > 1e6, "{metrics}");

    let status = get(&broker, "status").await;
    let pushed: i64 =
        status["throughput"].as_array().unwrap().iter().map(|p| p["pushMessages"].as_i64().unwrap()).sum();
    assert_eq!((pushed, &status["errors"]["ackFailed"]), (5, &json!(2)));
    let filtered = get(&broker, "status?queue=quiet").await;
    assert!(filtered["throughput"].as_array().unwrap().iter().all(|p| p["pushMessages"] == 0), "{filtered}");
    let rate = get(&broker, "resources/overview").await["throughput"]["ingestedPerSecond"].as_f64().unwrap();
    assert_eq!(rate, 0.02, "5 messages over 300 seconds, rounded");
}

/// §10.5: rows by label, the whole beside them; a filter narrows the rows only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workload_is_grouped() {
    let (broker, _db) = hasty().await;
    traffic(&broker).await;
    let workload = eventually_some(PATIENCE, async || {
        let body = get(&broker, "analytics/workload").await;
        (body["tenant"]["window"]["ackFailed"] == 2).then_some(body)
    })
    .await;
    has_keys(&workload, &["timeRange", "bucketMinutes", "groupBy", "buckets", "rows", "tenant"]);
    assert_eq!(workload["groupBy"], "namespace");
    let rows = workload["rows"].as_array().unwrap();
    let keys: Vec<&str> = rows.iter().map(|row| row["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["ns", ""], "the busiest first");
    has_keys(&rows[0], &["key", "queues", "window", "series", "now"]);
    has_keys(
        &rows[0]["window"],
        &[
            "pushMessages",
            "pushRequests",
            "popMessages",
            "popEmpty",
            "ackRequests",
            "ackSuccess",
            "ackFailed",
            "transactions",
            "conflated",
            "partitionsCreated",
            "partitionsDeleted",
            "parkedAvg",
            "avgLagMs",
            "maxLagMs",
        ],
    );
    has_keys(
        &rows[0]["now"],
        &[
            "pending",
            "processing",
            "deadLetter",
            "retainedBytes",
            "partitions",
            "groups",
            "queuesWithoutGroup",
            "pendingWithoutGroup",
            "queuesTouched",
            "queuesActive",
        ],
    );
    let (window, now) = (&rows[0]["window"], &rows[0]["now"]);
    assert_eq!((&window["pushMessages"], &window["ackSuccess"]), (&json!(5), &json!(3)));
    assert_eq!((&now["partitions"], &now["groups"], &now["deadLetter"]), (&json!(1), &json!(1), &json!(1)));
    assert!(rows[1]["window"]["avgLagMs"].is_null(), "no pops delivered");
    for key in ["push", "pop", "popEmpty", "ackFailed", "parked", "avgLagMs", "maxLagMs"] {
        let series = rows[0]["series"][key].as_array().unwrap();
        assert_eq!(series.len(), workload["buckets"].as_array().unwrap().len(), "{key}");
    }
    let pushes: Vec<i64> = rows[0]["series"]["push"].as_array().unwrap().iter().filter_map(Value::as_i64).collect();
    assert_eq!(pushes.iter().sum::<i64>(), 5);
    let by_queue = get(&broker, "analytics/workload?groupBy=queue&namespace=ns").await;
    assert_eq!(by_queue["rows"].as_array().unwrap().len(), 1);
    assert_eq!((&by_queue["rows"][0]["key"], &by_queue["rows"][0]["task"]), (&json!("ns.job"), &json!("job")));
    assert_eq!(by_queue["tenant"]["queues"], 2, "filters are ignored for the whole");
    broker.get("/api/v1/analytics/workload?groupBy=colour").await.expect_refusal(&["bad groupBy"]);
}

/// §10.3: a parked pop is counted while it waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_pops_are_sampled() {
    let (broker, _db) = hasty().await;
    broker.configure("q", json!({})).await;
    let parked = Pop::queue("q").group("g").wait_ms(30_000);
    let sampled = async {
        let body = eventually_some(PATIENCE * 2, async || {
            let body = get(&broker, "analytics/queue-parked-replicas").await;
            (!body["series"].as_array().unwrap().is_empty()).then_some(body)
        })
        .await;
        broker.push_ids("q", "p", ["m"]).await;
        body
    };
    let (body, _) = futures_util::join!(sampled, broker.pop(&parked));
    has_keys(&body, &["timeRange", "bucketMinutes", "series", "replicas"]);
    has_keys(&body["series"][0], &["bucket", "queueName", "hostname", "workerId", "parkedCount"]);
    assert_eq!(
        (&body["series"][0]["queueName"], &body["replicas"]),
        (&json!("q"), &json!([{ "hostname": "one", "workerId": 0 }]))
    );
}

/// §9.1: every key, also before anything was written **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_has_its_keys_from_the_start() {
    let broker = TestBroker::start().await;
    let keys = [
        "timeRange",
        "bucketMinutes",
        "pointCount",
        "statsAge",
        "throughput",
        "workers",
        "queues",
        "messages",
        "leases",
        "deadLetterQueue",
        "errors",
    ];
    let status = get(&broker, "status").await;
    has_keys(&status, &keys);
    are_integers(&status, &["bucketMinutes", "pointCount", "statsAge"]);
    assert!(status["throughput"].is_array() && status["workers"].is_array() && status["timeRange"]["from"].is_string());
    half_consumed(&broker, "q").await;
    eventually(PATIENCE, async || get(&broker, "status").await["leases"]["active"] == 1).await;
    let status = get(&broker, "status?from=2026-01-01&to=2026-01-05").await;
    assert_eq!(
        (&status["bucketMinutes"], &status["timeRange"]["from"]),
        (&json!(60), &json!("2026-01-01T00:00:00.000Z"))
    );
    assert_eq!(status["leases"], json!({ "active": 1, "partitionsWithLeases": 1 }));
    assert_eq!((&status["messages"]["pending"], &status["deadLetterQueue"]["totalMessages"]), (&json!(4), &json!(1)));
    let queue = &status["queues"][0];
    has_keys(queue, &["id", "name", "namespace", "task", "partitions", "totalConsumed", "messages"]);
    assert_eq!(queue["totalConsumed"], 3);
    broker.get("/api/v1/status?from=then").await.expect_refusal(&["from"]);
}

/// §9.4: retained messages by the hour, minute or day of their commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_counted_by_age() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    broker.push_ids("r.t", "p", ["c"]).await;
    for (query, interval, count) in [
        ("", "hour", 3),
        ("?interval=minute", "minute", 3),
        ("?interval=day&queue=q", "day", 2),
        ("?interval=x&namespace=r", "hour", 1),
    ] {
        let body = get(&broker, &format!("status/analytics{query}")).await;
        has_keys(&body, &["dataPoints", "interval", "from", "to"]);
        assert_eq!(body["interval"], interval, "{query}");
        let points = body["dataPoints"].as_array().unwrap();
        assert_eq!(points.iter().map(|p| p["messages"].as_i64().unwrap()).sum::<i64>(), count, "{query}");
        assert!(points[0]["timestamp"].as_str().unwrap().ends_with("Z"));
    }
    assert_eq!(get(&broker, "status/analytics?from=2020-01-01&to=2020-01-02").await["dataPoints"], json!([]));
}

/// §10.6: reasons folded, no payload.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasons_of_dead_letters_are_folded() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "retryLimit": 0 })).await;
    broker.push_ids("q", "p", ["a", "b", "c"]).await;
    for (n, reason) in ["order 1 lost", "order 22 lost", "other"].iter().enumerate() {
        let popped = broker.pop(&Pop::queue("q").group("g").all().batch(1)).await;
        let mut item = popped.messages[0].item("dlq");
        item["error"] = json!(reason);
        assert!(broker.ack("g", vec![item]).await[0].dlq, "{n}");
    }
    let body = get(&broker, "analytics/dlq-signatures?queue=q").await;
    has_keys(
        &body,
        &["queue", "rowsNow", "sample", "retryCounts", "groups", "oldest", "newest", "avgBytes", "signatures", "byDay"],
    );
    assert_eq!(
        body["signatures"],
        json!([{ "text": "order <n> lost", "n": 2, "share": 0.67 }, { "text": "other", "n": 1, "share": 0.33 }])
    );
    assert_eq!((&body["rowsNow"], &body["sample"], &body["groups"]), (&json!(3), &json!(3), &json!(["g"])));
    assert_eq!(body["byDay"][0]["n"], 3);
    assert_eq!(get(&broker, "analytics/dlq-signatures?queue=q&limit=1").await["signatures"][0]["text"], "other");
    let refused = broker.get("/api/v1/analytics/dlq-signatures").await.expect(400).json();
    assert_eq!(refused, json!({ "error": "queue required" }));
}

/// §10.7: an explicit empty label selects queues without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_in_use_are_counted() {
    let broker = TestBroker::start().await;
    broker.configure("labelled", json!({ "namespace": "n" })).await;
    broker.configure("bare", json!({})).await;
    broker.push_ids("labelled", "p", ["a"]).await;
    broker.push_ids("labelled", "r", ["b"]).await;
    let body = get(&broker, "analytics/partition-liveness").await;
    has_keys(&body, &["capturedAt", "rows"]);
    let row = &body["rows"][0];
    has_keys(
        row,
        &[
            "queue",
            "namespace",
            "task",
            "partitions",
            "live1h",
            "live24h",
            "live7d",
            "created24h",
            "oldestWriteAt",
            "newestWriteAt",
            "pending",
        ],
    );
    assert_eq!(
        (&row["queue"], &row["partitions"], &row["live1h"], &row["pending"]),
        (&json!("labelled"), &json!(2), &json!(2), &json!(2))
    );
    let bare = get(&broker, "analytics/partition-liveness?namespace=").await;
    assert_eq!((bare["rows"].as_array().unwrap().len(), &bare["rows"][0]["queue"]), (1, &json!("bare")));
    assert!(bare["rows"][0]["newestWriteAt"].is_null());
    assert_eq!(get(&broker, "analytics/partition-liveness?limit=1").await["rows"].as_array().unwrap().len(), 1);
}

/// §10.10: keys and lists **[T]**, of the broker's schema only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_database_reports_on_itself() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let body = get(&broker, "analytics/postgres-stats").await;
    has_keys(
        &body,
        &[
            "timestamp",
            "database",
            "databaseCache",
            "cacheSummary",
            "tableCache",
            "indexCache",
            "activeQueries",
            "tableSizes",
            "deadTuples",
            "hotUpdates",
            "autovacuumStatus",
            "bufferConfig",
            "bufferUsage",
        ],
    );
    for key in ["tableCache", "indexCache", "activeQueries", "tableSizes"] {
        assert!(body[key].is_array(), "{key}");
    }
    let tables: Vec<&str> =
        body["tableSizes"].as_array().unwrap().iter().map(|t| t["table"].as_str().unwrap()).collect();
    assert!(tables.contains(&"log_segments"), "{tables:?}");
}

/// Buckets of what is old go, those of what is young stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_buckets_are_purged() {
    let (broker, db) = hasty().await;
    db.execute(
        "INSERT INTO queen.queue_minutes (bucket, queue_id, broker)
         SELECT date_trunc('minute', now()) - make_interval(days => d), q, 'old'
           FROM generate_series(80, 100) d, generate_series(1, 1000) q",
    )
    .await;
    // The broker took its turn at boot; the next one is due.
    db.execute("DELETE FROM queen.turns WHERE name = 'minutes'").await;
    eventually(PATIENCE, async || {
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM queen.queue_minutes WHERE broker = 'old'")
            .fetch_one(&db.pool)
            .await
            .unwrap();
        left == 10_000
    })
    .await;
    drop(broker);
}

/// §10.2, §10.5, §10.9: a transaction counts in the queue that it pushed to and in the one that it acknowledged in, with its
/// messages; what a conflating group skipped is counted; lag is known of brokers too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_and_skipped_messages_are_counted() {
    let (broker, _db) = hasty().await;
    broker.push_ids("in", "p", ["a"]).await;
    let popped = broker.pop(&Pop::queue("in").group("g").all()).await;
    let message = &popped.messages[0];
    let operations = json!([
        { "type": "ack", "transactionId": message.transaction_id, "partitionId": message.partition_id,
          "consumerGroup": "g", "leaseId": message.lease_id, "status": "completed" },
        { "type": "push", "items": [{ "queue": "out", "partition": "p", "transactionId": "b", "payload": 1 }] },
    ]);
    let answer = broker.post_json("/api/v1/transaction", &json!({ "operations": operations })).await.expect(200).json();
    assert_eq!(answer["success"], true, "{answer}");
    broker.push_ids("last", "p", ["0", "1", "2"]).await;
    let popped = broker.pop(&Pop::queue("last").group("g").all().set("conflation", "true")).await;
    assert_eq!(popped.ids(), ["2"]);
    broker.ack("g", popped.items("completed")).await;

    let rows = eventually_some(PATIENCE, async || {
        let whole = get(&broker, "analytics/worker-metrics").await["summary"]["ackSuccess"] == 2;
        let body = get(&broker, "analytics/workload?groupBy=queue").await;
        let window = &body["tenant"]["window"];
        (whole && window["ackSuccess"] == 2 && window["conflated"] == 2).then_some(body["rows"].clone())
    })
    .await;
    let window = |queue: &str| &rows.as_array().unwrap().iter().find(|row| row["key"] == queue).unwrap()["window"];
    for (queue, transactions, pushed, conflated) in [("in", 1, 1, 0), ("out", 1, 1, 0), ("last", 0, 3, 2)] {
        let window = window(queue);
        assert_eq!(
            (&window["transactions"], &window["pushMessages"], &window["conflated"]),
            (&json!(transactions), &json!(pushed), &json!(conflated)),
            "{queue}"
        );
    }
    let workers = get(&broker, "analytics/worker-metrics").await;
    let summary = &workers["summary"];
    assert_eq!((&summary["transactions"], &summary["pushMessages"]), (&json!(1), &json!(5)), "{summary}");
    let points = workers["timeSeries"].as_array().unwrap();
    assert_eq!(points.iter().map(|point| point["lagCount"].as_i64().unwrap()).sum::<i64>(), 2);
}
