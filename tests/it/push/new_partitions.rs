//! Partitions are made by the transaction that stores their first messages, and written once (I7, I8).

use std::collections::BTreeSet;

use futures_util::future::{join, join_all};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Row};

use crate::harness::{Broker, Client, Cut, Database, PATIENCE, Pop, Road, TestBroker, eventually};

fn item(partition: &str, id: &str) -> Value {
    json!({ "queue": "q", "partition": partition, "transactionId": id, "payload": id })
}

async fn count(db: &Database, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(&db.pool).await.unwrap()
}

/// Rows of the log whose partition, and partitions whose queue, do not exist.
async fn orphans(db: &Database) -> i64 {
    count(
        db,
        "SELECT (SELECT count(*) FROM queen.log_partitions WHERE queue_id NOT IN (SELECT id FROM queen.queues))
              + (SELECT count(*) FROM queen.log_segments WHERE partition_id NOT IN (SELECT id FROM queen.log_partitions))
              + (SELECT count(*) FROM queen.log_txns WHERE partition_id NOT IN (SELECT id FROM queen.log_partitions))",
    )
    .await
}

async fn partition_names(db: &Database) -> Vec<String> {
    sqlx::query_scalar("SELECT name FROM queen.log_partitions ORDER BY name").fetch_all(&db.pool).await.unwrap()
}

/// When a partition was made and when its newest message was stored, as the inspection route tells.
async fn times(client: &Client, partition: &str) -> (String, String) {
    let status = client.get("/api/v1/status/queues/q").await.expect(200).json();
    let rows = status["partitions"].as_array().into_iter().flatten();
    let row = rows.into_iter().find(|row| row["name"] == partition).unwrap_or_else(|| panic!("{partition}: {status}"));
    let time = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{row}")).to_owned();
    (time(&row["createdAt"]), time(&row["newestMessage"]))
}

/// Writes what it counts soon.
async fn hasty() -> TestBroker {
    TestBroker::tuned(Road::Fused, |config| config.statistics.metrics_flush_ms = 200).await
}

/// Partitions that are counted as made.
async fn counted(client: &Client) -> i64 {
    let ops = client.get("/api/v1/analytics/queue-ops").await.expect(200).json();
    let made = |point: &Value| point["partitionsCreated"].as_i64();
    ops["series"].as_array().into_iter().flatten().filter_map(made).sum()
}

/// One version per row: inserted with its last offset, never updated, with one time for the row and its first segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_partition_is_written_once() {
    let broker = hasty().await;
    let items: Vec<Value> = (0..600).map(|n| item(&format!("p{}", n % 300), &format!("t{n}"))).collect();
    let results = broker.push(json!(items)).await;
    assert!(results.iter().all(|r| r.status == "queued"));
    let db = &broker.db;
    let row = sqlx::query(
        "SELECT count(*) AS rows, count(*) FILTER (WHERE p.last_offset = 1 AND p.last_write_at = s.created_at
                  AND s.created_at = t.created_at AND s.message_count = 2) AS right
           FROM queen.log_partitions p JOIN queen.log_segments s ON s.partition_id = p.id
           JOIN queen.log_txns t ON t.partition_id = p.id",
    )
    .fetch_one(&db.pool)
    .await
    .unwrap();
    assert_eq!((row.get::<i64, _>("rows"), row.get::<i64, _>("right")), (300, 300));
    let written = "SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables
                    WHERE schemaname = 'queen' AND relname = 'log_partitions'";
    eventually(PATIENCE, async || {
        let row = sqlx::query(written).fetch_one(&db.pool).await.unwrap();
        let (made, moved): (i64, i64) = (row.get("n_tup_ins"), row.get("n_tup_upd"));
        assert_eq!(moved, 0, "updates of {made} rows");
        made == 300
    })
    .await;
    // The next ones move it, and when it was made is then kept apart from when it was last written.
    let (made, written) = times(&broker, "p7").await;
    assert_eq!(made, written);
    broker.push_ids("q", "p7", ["later"]).await;
    assert_eq!(db.last_offset("q", "p7").await, Some(2));
    let (still, written) = times(&broker, "p7").await;
    assert_eq!(still, made);
    assert!(written > made, "{written} after {made}");
    broker.push_ids("q", "p7", ["later still"]).await;
    assert_eq!(times(&broker, "p7").await.0, made);
    eventually(PATIENCE, async || counted(&broker).await == 300).await;
}

/// Two brokers make the same thousands of names at once, in any order, some of them in transactions: nothing deadlocks,
/// every message is stored once, offsets are dense (I7), and each partition is counted once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_brokers_make_the_same_partitions_at_once() {
    const NAMES: usize = 2_000;
    let a = hasty().await;
    let b = a.another_tuned(|config| config.statistics.metrics_flush_ms = 200).await;
    let mut rng = StdRng::seed_from_u64(rand::random());
    let names: Vec<String> = (0..NAMES).map(|n| format!("p{n:04}")).collect();
    let mut pushes = Vec::new();
    let mut nth = 0;
    for _ in 0..24 {
        let mut some = names.clone();
        some.shuffle(&mut rng);
        some.truncate(rng.random_range(1..NAMES / 4));
        let mut items = Vec::new();
        for name in some {
            nth += 1;
            items.push(item(&name, &format!("m{nth}")));
        }
        let client: Client = if rng.random() { (*a).clone() } else { (*b).clone() };
        let bundled = rng.random_ratio(1, 4);
        pushes.push(async move {
            if bundled {
                let body = json!({ "operations": [{ "type": "push", "items": items }] });
                let reply = client.post_json("/api/v1/transaction", &body).await.expect(200).json();
                assert_eq!(reply["success"], true, "{reply}");
            } else {
                let results = client.push(Value::Array(items)).await;
                assert!(results.iter().all(|r| r.status == "queued"), "{results:?}");
            }
        });
    }
    join_all(pushes).await;
    let db = &a.db;
    assert_eq!(db.deadlocks().await, 0);
    assert_eq!(count(db, "SELECT sum(message_count)::bigint FROM queen.log_segments").await, nth);
    let gaps = count(
        db,
        "SELECT count(*) FROM (SELECT s.base_offset, lag(s.base_offset + s.message_count, 1, 0::bigint)
             OVER (PARTITION BY s.partition_id ORDER BY s.base_offset) AS expected FROM queen.log_segments s) o
         WHERE o.base_offset <> o.expected",
    )
    .await;
    assert_eq!((gaps, orphans(db).await), (0, 0));
    let made = partition_names(db).await;
    assert_eq!(made.len(), made.iter().collect::<BTreeSet<_>>().len());
    eventually(PATIENCE, async || counted(&a).await == made.len() as i64).await;
}

/// Whoever is overtaken by another maker stores its messages behind the other's; whoever waits for one that gives up makes
/// the partition itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_made_by_another_meanwhile_is_used() {
    let broker = hasty().await;
    broker.push_ids("q", "first", ["x"]).await;
    for (nth, commits) in [true, false].into_iter().enumerate() {
        for bundled in [false, true] {
            let name = format!("p{nth}{bundled}");
            let mut other = broker.db.pool.begin().await.unwrap();
            let insert = "INSERT INTO queen.log_partitions (queue_id, name) SELECT id, $1 FROM queen.queues";
            sqlx::query(insert).bind(&name).execute(&mut *other).await.unwrap();
            let client = (*broker).clone();
            let items = json!([item(&name, "a"), item(&format!("{name}-too"), "b")]);
            let pushed = tokio::spawn(async move {
                if bundled {
                    let body = json!({ "operations": [{ "type": "push", "items": items }] });
                    let reply = client.post_json("/api/v1/transaction", &body).await.expect(200).json();
                    assert_eq!(reply["success"], true, "{reply}");
                } else {
                    let results = client.push(items).await;
                    assert!(results.iter().all(|r| r.status == "queued"), "{results:?}");
                }
            });
            eventually(PATIENCE, async || {
                count(&broker.db, "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
                    .await
                    > 0
            })
            .await;
            if commits {
                other.commit().await.unwrap()
            } else {
                other.rollback().await.unwrap()
            }
            pushed.await.unwrap();
            for name in [name.clone(), format!("{name}-too")] {
                assert_eq!(broker.db.last_offset("q", &name).await, Some(0), "{name}");
                assert_eq!(broker.pop(&Pop::partition("q", &name)).await.messages.len(), 1);
            }
        }
    }
    eventually(PATIENCE, async || counted(&broker).await == 9).await;
}

/// Queues come and go under pushes that make partitions: nothing deadlocks, and no partition outlives its queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_deleted_meanwhile_keeps_no_partition() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    let push = async |broker: &Client, tag: &str| {
        for round in 0..12 {
            let items: Vec<Value> =
                (0..60).map(|n| item(&format!("p{}", n + 20 * round), &format!("{tag}{round}-{n}"))).collect();
            let results = broker.push(Value::Array(items)).await;
            for result in results {
                let gone = result.error.as_deref() == Some("the queue is being deleted");
                assert!(result.status == "queued" || gone, "{result:?}");
            }
        }
    };
    let delete = async {
        for _ in 0..12 {
            a.delete_queue("q").await;
        }
    };
    join(join(push(&a, "a"), push(&b, "b")), delete).await;
    assert_eq!((a.db.deadlocks().await, orphans(&a.db).await), (0, 0));
    a.delete_queue("q").await;
    assert_eq!((partition_names(&a.db).await.len(), orphans(&a.db).await), (0, 0));
}

/// What fails leaves no partition, and the others are stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_fails_makes_no_partition() {
    let broker = hasty().await;
    broker.push_ids("q", "first", ["x"]).await;
    let db = &broker.db;
    db.execute(
        "CREATE FUNCTION queen.refuse_poison() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'this name is poison'; END $$",
    )
    .await;
    db.execute(
        "CREATE TRIGGER refuse_poison BEFORE INSERT ON queen.log_partitions FOR EACH ROW WHEN (new.name = 'poison')
         EXECUTE FUNCTION queen.refuse_poison()",
    )
    .await;
    let results = broker.push(json!([item("good", "g"), item("poison", "p"), item("also", "a")])).await;
    let bundle = json!({ "operations": [{ "type": "push", "items": [item("bundled", "c"), item("poison", "d")] }] });
    let refused = broker.post_json("/api/v1/transaction", &bundle).await.json();
    db.execute("DROP FUNCTION queen.refuse_poison() CASCADE").await;
    let statuses: Vec<&str> = results.iter().map(|r| r.status.as_str()).collect();
    assert_eq!(statuses, ["queued", "failed", "queued"]);
    assert_eq!(refused["success"], false, "{refused}");
    assert_eq!(partition_names(db).await, ["also", "first", "good"]);
    assert_eq!(orphans(db).await, 0);
    eventually(PATIENCE, async || counted(&broker).await == 3).await;
    assert_eq!(broker.push(json!([item("poison", "p")])).await[0].status, "queued");
}

/// A connection that breaks between the insertion and the end of the commit: the partition is there once, with its message
/// once, or not at all.
async fn cut_while_making(cut: Cut) {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("q", "first", ["x"]).await;
    proxy.arm(cut, b"COMMIT");
    let told = broker.push(json!([item("new", "m")])).await.remove(0);
    assert!(!proxy.is_armed(), "the push met the cut");
    eventually(PATIENCE, async || {
        ["queued", "duplicate"].contains(&broker.push(json!([item("new", "m")])).await[0].status.as_str())
    })
    .await;
    assert_eq!(broker.db.last_offset("q", "new").await, Some(0), "{told:?}");
    assert_eq!((partition_names(&broker.db).await.len(), orphans(&broker.db).await), (2, 0));
    assert_eq!(broker.pop(&Pop::partition("q", "new")).await.ids(), ["m"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrives_leaves_no_partition_twice() {
    cut_while_making(Cut::Before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_makes_a_partition_once() {
    cut_while_making(Cut::After).await;
}

/// PostgreSQL forgets keys that were allotted and not committed when it crashes, and allots them again: what a broker
/// remembers of them must not be taken for the new owner's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_allotted_again_is_nobodys() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "first", ["x"]).await;
    let db = &broker.db;
    let next: i64 = count(db, "SELECT last_value + 1 FROM queen.log_partitions_id_seq").await;
    db.execute(
        "CREATE FUNCTION queen.refuse_poison() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not now'; END $$",
    )
    .await;
    db.execute(
        "CREATE TRIGGER refuse_poison BEFORE INSERT ON queen.log_partitions FOR EACH ROW
         EXECUTE FUNCTION queen.refuse_poison()",
    )
    .await;
    assert_eq!(broker.push(json!([item("old", "m")])).await[0].status, "failed");
    db.execute("DROP FUNCTION queen.refuse_poison() CASCADE").await;
    let again = AssertSqlSafe(format!("SELECT setval('queen.log_partitions_id_seq', {next}, false)"));
    sqlx::query(again).execute(&db.pool).await.unwrap();
    let other: Broker = broker.another().await;
    other.push_ids("q", "new", ["m"]).await;
    let told = broker.push(json!([item("new", "m"), item("new", "n"), item("old", "m")])).await;
    let told: Vec<_> = told.iter().map(|r| (r.status.as_str(), r.offset)).collect();
    assert_eq!(told, [("duplicate", Some(0)), ("queued", Some(1)), ("queued", Some(0))]);
}
