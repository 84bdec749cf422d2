//! The lists by which retention finds its work: complete at any moment, and not more than needed in the end.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::{history, pass, segments, starts_at, swept};
use crate::harness::{Client, Database, PATIENCE, Pop, Road, TestBroker, eventually};

/// What holds something and is in no list that is old enough, in one snapshot: (partition, kind).
const UNLISTED: &str = "
    SELECT h.partition_id, h.kind FROM (
        SELECT partition_id, 0 AS kind, min(created_at) AS oldest_at FROM queen.log_segments GROUP BY partition_id
        UNION ALL
        SELECT partition_id, 1, min(created_at) FROM queen.log_txns GROUP BY partition_id) h
    WHERE NOT EXISTS (SELECT 1 FROM queen.log_age_lists l
        WHERE l.kind = h.kind AND h.partition_id = ANY (l.partition_ids) AND l.oldest_at <= h.oldest_at)";

/// Entries that name a partition which holds nothing of the kind.
const STALE: &str = "
    SELECT i.id, l.kind::int FROM queen.log_age_lists l CROSS JOIN LATERAL unnest(l.partition_ids) AS i (id)
    WHERE NOT CASE l.kind
        WHEN 0 THEN EXISTS (SELECT 1 FROM queen.log_segments s WHERE s.partition_id = i.id)
        ELSE EXISTS (SELECT 1 FROM queen.log_txns t WHERE t.partition_id = i.id) END";

async fn entries(db: &Database, sql: &'static str) -> Vec<(i64, i32)> {
    sqlx::query_as(sql).fetch_all(&db.pool).await.unwrap()
}

/// Lists of segments and of hashes.
async fn lists(db: &Database) -> (i64, i64) {
    let sql = "SELECT count(*) FILTER (WHERE kind = 0), count(*) FILTER (WHERE kind = 1) FROM queen.log_age_lists";
    sqlx::query_as(sql).fetch_one(&db.pool).await.unwrap()
}

/// Lets every broker have the work that asks for it: nobody's hold lasts.
async fn everybodys_work(db: &Database) {
    for sql in [
        "CREATE FUNCTION queen.nobodys() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN NEW.held_until = '-infinity'; RETURN NEW; END $$",
        "CREATE TRIGGER nobodys BEFORE INSERT OR UPDATE ON queen.loop_leases FOR EACH ROW EXECUTE FUNCTION queen.nobodys()",
        "UPDATE queen.loop_leases SET held_until = '-infinity'",
    ] {
        db.execute(sql).await;
    }
}

/// Leaves the database as other tests want it.
async fn as_usual(db: &Database) {
    db.execute("DROP FUNCTION queen.nobodys() CASCADE").await;
}

const QUEUES: [&str; 3] = ["waits", "keeps", "forever"];

fn options(queue: &str) -> Value {
    match queue {
        "waits" => json!({ "maxWaitTimeSeconds": 100, "dedupWindowSeconds": 0 }),
        "keeps" => json!({ "retentionEnabled": true, "retentionSeconds": 1_000 }),
        _ => json!({ "dedupWindowSeconds": 0 }),
    }
}

async fn push_to(client: &Client, queue: &str, lanes: &[usize], serial: &mut usize) {
    let item = |lane: &usize| {
        *serial += 1;
        json!({ "queue": queue, "partition": format!("p{lane}"), "transactionId": format!("t{serial}"), "payload": 0 })
    };
    let items: Vec<Value> = lanes.iter().map(item).collect();
    assert!(client.push(json!(items)).await.iter().all(|result| result.status == "queued"));
}

/// I12: whatever pushes, steps, walks, deletions of queues and two loops at once do, what holds something is listed, with its
/// age or an older one, in every snapshot; and what is listed for nothing goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_holds_something_is_listed_at_every_moment() {
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 20;
        config.retention.batch_size = 5;
        config.retention.parallelism = 4;
        config.retention.safety_walk_ms = 1;
    })
    .await;
    everybodys_work(&broker.db).await;
    let second = broker
        .another_tuned(|config| {
            config.retention.interval_ms = 20;
            config.retention.safety_walk_ms = 1;
        })
        .await;
    for queue in QUEUES {
        broker.configure(queue, options(queue)).await;
    }
    let mut serial = 0;
    for round in 0..60 {
        let queue = QUEUES[rng.random_range(0..QUEUES.len())];
        match rng.random_range(0..10) {
            0 => {
                broker.delete_queue(queue).await;
                broker.configure(queue, options(queue)).await;
            }
            1..4 => broker.db.age(rng.random_range(1..400)).await,
            _ => {
                let width = if rng.random_bool(0.3) { 45 } else { 4 };
                let first = rng.random_range(0..60);
                let lanes: Vec<usize> = (first..first + rng.random_range(1..=width)).collect();
                let client: &Client = if round % 2 == 0 { &broker } else { &second };
                push_to(client, queue, &lanes, &mut serial).await;
            }
        }
        assert_eq!(entries(&broker.db, UNLISTED).await, [], "seed {seed}, round {round}");
    }
    eventually(PATIENCE, async || entries(&broker.db, STALE).await.is_empty()).await;
    broker.db.age(20_000).await;
    eventually(PATIENCE, async || {
        assert_eq!(entries(&broker.db, UNLISTED).await, [], "seed {seed}");
        let held = "SELECT count(*) FROM queen.log_segments s JOIN queen.log_partitions p ON p.id = s.partition_id
                      JOIN queen.queues q ON q.id = p.queue_id WHERE q.name <> 'forever'";
        let held: i64 = sqlx::query_scalar(held).fetch_one(&broker.db.pool).await.unwrap();
        held == 0 && broker.db.row_counts().await["log_txns"] == 0
    })
    .await;
    eventually(PATIENCE, async || lists(&broker.db).await.1 == 0).await;
    assert_eq!(broker.db.deadlocks().await, 0);
    second.stop().await;
    as_usual(&broker.db).await;
}

/// Two loops at once delete each message once, and count it once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_loops_at_once_count_each_message_once() {
    const LANES: usize = 150;
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 20;
        config.retention.batch_size = 3;
    })
    .await;
    everybodys_work(&broker.db).await;
    let second = broker.another_tuned(|config| config.retention.interval_ms = 20).await;
    broker.configure("q", json!({ "maxWaitTimeSeconds": 100_000 })).await;
    let mut serial = 0;
    for _ in 0..5 {
        for from in [0, 40, 100] {
            push_to(&broker, "q", &(from..LANES).collect::<Vec<_>>(), &mut serial).await;
        }
    }
    broker.db.age(1_000).await;
    broker.configure("q", json!({ "maxWaitTimeSeconds": 50 })).await;
    eventually(PATIENCE, async || broker.db.row_counts().await["log_segments"] == 0).await;
    let counted: i64 = history(&broker.db).await.iter().map(|(_, messages)| messages).sum();
    assert_eq!(counted, serial as i64);
    assert_eq!(broker.db.deadlocks().await, 0);
    second.stop().await;
    as_usual(&broker.db).await;
}

/// A partition a flush: as many lists. What is left of them after a sweep shares lists again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_one_partition_merge_when_they_are_swept() {
    const LANES: usize = 160;
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 1_000 })).await;
    for lane in 0..LANES {
        broker.push_ids("q", &format!("p{lane}"), ["a"]).await;
    }
    broker.db.age(500).await;
    for lane in 0..LANES {
        broker.push_ids("q", &format!("p{lane}"), ["b"]).await;
    }
    let (before, _) = lists(&broker.db).await;
    assert!(before > LANES as i64 / 2, "{before} lists");
    pass(&broker, 600).await;
    for lane in 0..LANES {
        starts_at(&broker.db, &format!("p{lane}"), 1).await;
    }
    assert_eq!(entries(&broker.db, UNLISTED).await, []);
    let (after, _) = lists(&broker.db).await;
    assert!(after <= LANES as i64 / 2, "{after} lists");
}

/// What never becomes due is packed by the walk, one queue apart from the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk_packs_what_is_kept() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 40;
        config.retention.safety_walk_ms = 1;
    })
    .await;
    for (queue, lanes) in [("q", 270), ("r", 10)] {
        for lane in 0..lanes {
            broker.push_ids(queue, &format!("p{lane}"), ["a"]).await;
        }
    }
    eventually(PATIENCE, async || {
        assert_eq!(entries(&broker.db, UNLISTED).await, []);
        lists(&broker.db).await == (4, 4)
    })
    .await;
    broker.delete_queue("q").await;
    assert_eq!(lists(&broker.db).await, (1, 1));
    assert_eq!(broker.pop(&Pop::queue("r").all().partitions(0).batch(100)).await.messages.len(), 10);
}

/// Entries of partitions that hold nothing or do not exist are harmless, and go: those of a restore, of a queue that an
/// older broker deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_listed_for_nothing_goes() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 40;
        config.retention.safety_walk_ms = 1;
    })
    .await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    for lists in [
        "SELECT k, q.id, now() + interval '1 hour', ARRAY[p.id, 99999, p.id]
           FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id CROSS JOIN generate_series(0, 1) AS k",
        "VALUES (0, 77777, now(), ARRAY[99998, 99999]), (1, 77777, now(), ARRAY[99999])",
    ] {
        broker.db.add_age_lists(lists).await;
    }
    eventually(PATIENCE, async || entries(&broker.db, STALE).await.is_empty()).await;
    pass(&broker, 60).await;
    starts_at(&broker.db, "p", 1).await;
    pass(&broker, 4_000).await;
    eventually(PATIENCE, async || lists(&broker.db).await == (0, 0)).await;
}

/// A list longer than a step goes in several; what is locked stays listed and holds up no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_list_goes_in_several_steps_around_what_is_locked() {
    const LANES: usize = 32;
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    let mut serial = 0;
    push_to(&broker, "q", &(0..LANES).collect::<Vec<_>>(), &mut serial).await;
    broker.db.walked().await;
    let together = "SELECT queue_id, min(last_write_at), array_agg(id) FROM queen.log_partitions GROUP BY queue_id";
    broker.db.list_segments_by_hand(together).await;
    let mut holder = broker.db.pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM queen.log_partitions WHERE name IN ('p3', 'p20') ORDER BY id FOR NO KEY UPDATE")
        .execute(&mut *holder)
        .await
        .unwrap();
    broker.db.age_beside_locks(60).await;
    for lane in (0..LANES).filter(|lane| ![3, 20].contains(lane)) {
        starts_at(&broker.db, &format!("p{lane}"), 1).await;
    }
    for lane in [3, 20] {
        assert_eq!(broker.db.log_bounds("q", &format!("p{lane}")).await, Some((0, 0, 0)));
    }
    assert_eq!(entries(&broker.db, UNLISTED).await, []);
    holder.rollback().await.unwrap();
    for lane in [3, 20] {
        starts_at(&broker.db, &format!("p{lane}"), 1).await;
    }
    eventually(PATIENCE, async || lists(&broker.db).await.0 == 0).await;
}

/// Design §5: a look for work reads what is due, not what is listed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_for_work_reads_no_list_that_is_not_due() {
    const LISTS: i64 = 5_000;
    const LOOKS: usize = 40;
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 5_000 })).await;
    // The walk at the start would read all lists.
    broker.db.walked().await;
    broker
        .db
        .add_age_lists(
            "SELECT n % 2, q.id, now() - make_interval(secs => n / 10), ARRAY[n]
               FROM queen.queues q CROSS JOIN generate_series(1, 10000) AS n",
        )
        .await;
    for look in 0..LOOKS {
        broker.push_ids("q", &format!("p{look}"), ["a"]).await;
        broker.db.execute("UPDATE queen.retention_queues SET check_at = clock_timestamp()").await;
        swept(&broker.db).await;
    }
    let db = broker.stop_keeping_the_database().await;
    db.disconnect_all().await;
    let read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'log_age_lists_pkey'";
    let read: i64 = sqlx::query_scalar(read).fetch_one(&db.pool).await.unwrap();
    // Looks that read what is listed read eighty times as much as there is of a kind.
    assert!(read > 0 && read < 8 * LISTS, "{read} index entries read by {LOOKS} looks");
}

/// Partitions whose next ages lie scattered hardly share lists with those of the same step: they are packed behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_scattered_ages_are_packed_behind_the_steps() {
    const LANES: usize = 1_100;
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    broker.db.walked().await;
    let mut serial = 0;
    for _ in 0..2 {
        for half in [0..LANES / 2, LANES / 2..LANES] {
            push_to(&broker, "q", &half.collect::<Vec<_>>(), &mut serial).await;
        }
    }
    for sql in [
        "UPDATE queen.log_segments SET created_at = now() - make_interval(secs => 2000) WHERE base_offset = 0",
        "UPDATE queen.log_segments SET created_at = now() - make_interval(secs => random() * 900) WHERE base_offset = 1",
    ] {
        broker.db.execute(sql).await;
    }
    let apart = "SELECT queue_id, now() - make_interval(secs => 2000), ARRAY[id] FROM queen.log_partitions";
    broker.db.list_segments_by_hand(apart).await;
    broker
        .configure("q", json!({ "dedupWindowSeconds": 0, "retentionEnabled": true, "retentionSeconds": 1_000 }))
        .await;
    eventually(6 * PATIENCE, async || segments(&broker.db).await == [1_i64; LANES]).await;
    eventually(PATIENCE, async || lists(&broker.db).await.0 < LANES as i64 / 4).await;
    assert_eq!(entries(&broker.db, UNLISTED).await, []);
}
