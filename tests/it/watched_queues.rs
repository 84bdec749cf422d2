//! Metrics of single queues (`spec/admin.md` §14): the queues that the operator names, and no others.

use serde_json::json;

use crate::harness::{Broker, Client, Database, PATIENCE, Pop, comes_true, eventually};

/// The figure of one series of the exposition.
fn figure(exposition: &str, series: &str) -> Option<f64> {
    let line = exposition.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(line.parse().unwrap_or_else(|_| panic!("{series} {line}")))
}

async fn scrape(client: &Client) -> String {
    client.get("/metrics/prometheus").await.expect(200).text
}

/// Waits until each series shows its figure; `None` for no such series.
async fn shows(client: &Client, wanted: &[(String, Option<f64>)]) {
    let found = async || {
        let text = scrape(client).await;
        wanted.iter().all(|(series, value)| figure(&text, series) == *value)
    };
    if !comes_true(PATIENCE, found).await {
        let text = scrape(client).await;
        let found: Vec<_> = wanted.iter().map(|(series, _)| (series, figure(&text, series))).collect();
        panic!("wanted {wanted:?}\nfound {found:?}");
    }
}

async fn broker(db: &Database, watched: (&str, &str)) -> Broker {
    let hasty = [("DATABASE_URL", &*db.url), ("STATS_INTERVAL_MS", "200"), ("METRICS_FLUSH_MS", "300"), watched];
    Broker::from_environment(hasty).await.unwrap()
}

/// The counters of a process are shared by all tests of this run: their queues have names of their own.
fn own(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::new_v4().simple())
}

/// Six messages; four delivered, two of them acknowledged, one dead; the fourth delivered again and still leased.
async fn traffic(client: &Client, queue: &str) {
    client.configure(queue, json!({})).await;
    let ids = ["m0", "m1", "m2", "m3", "m4", "m5"];
    client.push_ids(queue, "p", ids).await;
    let popped = client.pop(&Pop::queue(queue).group("g").all().batch(4)).await;
    let mut items = popped.items("completed");
    items[2] = popped.messages[2].item("dlq");
    items.truncate(3);
    client.ack("g", items).await;
    assert_eq!(client.pop(&Pop::queue(queue).group("g").batch(1)).await.ids(), ["m3"]);
}

/// A named queue has counters from the start and every gauge once there is something to tell; another queue has no series.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watched_queue_has_series_and_no_other_queue_has() {
    let db = Database::migrated().await;
    let (watched, plain) = (own("watched"), own("plain"));
    let broker = broker(&db, ("REGENT_WATCHED_QUEUES", &watched)).await;
    let of = |family: &str, labels: &str| format!("{family}{{queue=\"{watched}\"{labels}}}");
    let text = scrape(&broker).await;
    assert_eq!(figure(&text, &of("regent_queue_pushed_messages_total", "")), Some(0.0));
    assert_eq!(figure(&text, &of("regent_queue_acked_messages_total", ",result=\"failure\"")), Some(0.0));
    let others = |text: &str| figure(text, "regent_queue_pushed_messages_total{queue=\"(other)\"}").unwrap();
    let others_before = others(&text);

    broker.configure(&watched, json!({})).await;
    // The counters are there at once; a queue counts from the look that finds it.
    shows(&broker, &[(of("regent_queue_pending_messages", ""), Some(0.0))]).await;
    traffic(&broker, &watched).await;
    traffic(&broker, &plain).await;

    shows(
        &broker,
        &[
            (of("regent_queue_pushed_messages_total", ""), Some(6.0)),
            (of("regent_queue_popped_messages_total", ""), Some(5.0)),
            (of("regent_queue_acked_messages_total", ",result=\"success\""), Some(2.0)),
            (of("regent_queue_acked_messages_total", ",result=\"failure\""), Some(1.0)),
            (of("regent_queue_retained_messages", ""), Some(6.0)),
            (of("regent_queue_pending_messages", ""), Some(3.0)),
            (of("regent_queue_leased_messages", ""), Some(1.0)),
            (of("queen_dlq_depth_by_queue", ""), Some(1.0)),
            (of("queen_queue_push_messages_per_minute", ""), Some(6.0)),
            (of("queen_queue_push_requests_per_minute", ""), Some(1.0)),
            (of("queen_queue_pop_messages_per_minute", ""), Some(5.0)),
            (of("queen_queue_ack_per_minute", ",result=\"success\""), Some(2.0)),
            (of("queen_queue_conflated_per_minute", ""), Some(0.0)),
        ],
    )
    .await;
    // The gauge of the whole database is shared by the brokers of this process; what it is set from is not.
    let config = regent::config::Config::with_database(&db.url).unwrap();
    let store = regent::app::open_store(&config).await.unwrap();
    eventually(PATIENCE, async || store.dead_letter_depth().await.unwrap() == 2).await;
    let text = scrape(&broker).await;
    assert!(figure(&text, "queen_dlq_depth{scope=\"cluster\"}").is_some());
    assert!(figure(&text, &of("regent_queue_oldest_pending_seconds", "")).unwrap() > 0.0);
    assert!(figure(&text, &of("queen_queue_metrics_age_seconds", "")).unwrap() < 300.0);
    assert!(figure(&text, &of("queen_queue_pop_lag_milliseconds", ",stat=\"max\"")).is_some());
    assert!(!text.contains(&plain), "a queue that is not watched is no label");
    assert!(others(&text) >= others_before + 6.0, "it counts among the others");
    for metric in regent::metrics::ALL {
        assert!(text.contains(&format!("# HELP {} ", metric.name)), "{}", metric.name);
    }
}

/// Parked pops are shown while they wait, and a deleted queue's gauges leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_pops_are_shown_and_a_deleted_queue_leaves() {
    let db = Database::migrated().await;
    let watched = own("quiet");
    let broker = broker(&db, ("REGENT_WATCHED_QUEUES", &watched)).await;
    let parked = format!("regent_queue_parked_pops{{queue=\"{watched}\"}}");
    broker.configure(&watched, json!({})).await;
    shows(&broker, &[(parked.clone(), Some(0.0))]).await;
    let waiting = Client::new(broker.address);
    let pop = Pop::queue(&watched).wait_ms(20_000);
    let waiting = tokio::spawn(async move { waiting.pop(&pop).await });
    shows(&broker, &[(parked.clone(), Some(1.0))]).await;
    broker.push_ids(&watched, "p", ["m"]).await;
    waiting.await.unwrap();
    shows(&broker, &[(parked.clone(), Some(0.0))]).await;
    broker.delete_queue(&watched).await;
    shows(&broker, &[(parked, None)]).await;
}

/// With `REGENT_WATCHED_QUEUES_BUSIEST`, the busiest queue of a minute is watched from then on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_busiest_queue_becomes_a_watched_one() {
    let db = Database::migrated().await;
    let busy = own("busy");
    let broker = broker(&db, ("REGENT_WATCHED_QUEUES_BUSIEST", "1")).await;
    let pushed = format!("regent_queue_pushed_messages_total{{queue=\"{busy}\"}}");
    broker.push_ids(&busy, "p", ["m0", "m1", "m2"]).await;
    shows(&broker, &[(format!("regent_queue_retained_messages{{queue=\"{busy}\"}}"), Some(3.0))]).await;
    // What came before counted among the others.
    shows(&broker, &[(pushed.clone(), Some(0.0))]).await;
    broker.push_ids(&busy, "p", ["m3"]).await;
    shows(&broker, &[(pushed, Some(1.0))]).await;
}

/// What a look costs follows the watched queues, and those with dead letters, not the queues that exist (design §5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_reads_no_other_queues() {
    let db = Database::migrated().await;
    for fill in [
        "INSERT INTO queen.queues (name) SELECT 'q' || n FROM generate_series(1, 3000) n",
        "INSERT INTO queen.stats (queue_id, partitions, appended, evicted, pending, processing, leases, \
           leased_partitions, consumed, dead_letters, computed_at) \
         SELECT id, 1, 5, 0, 5, 0, 0, 0, 0, CASE WHEN name IN ('q7', 'q8') THEN 4 ELSE 0 END, now() FROM queen.queues",
        "INSERT INTO queen.queue_minutes (bucket, broker, queue_id, push_messages) \
         SELECT date_trunc('minute', now()), 'one', id, 3 FROM queen.queues",
        "INSERT INTO queen.consumer_groups (queue_id, name) SELECT id, 'g' FROM queen.queues",
        // An earlier test's rows leave entries in the indexes.
        "VACUUM ANALYZE queen.queues, queen.stats, queen.queue_minutes, queen.consumer_groups",
    ] {
        db.execute(fill).await;
    }
    // Backends report what they read when they end.
    db.disconnect_all().await;
    db.execute("SELECT pg_stat_reset()").await;
    let config = regent::config::Config::with_database(&db.url).unwrap();
    let store = regent::app::open_store(&config).await.unwrap();
    assert_eq!(store.dead_letter_depth().await.unwrap(), 8);
    let snapshots = store.watched_snapshots(&["q1".into(), "q2".into(), "absent".into()]).await.unwrap();
    let ids: Vec<_> = snapshots.iter().map(|snapshot| regent::ids::QueueId(snapshot.queue_id)).collect();
    assert_eq!(snapshots.iter().map(|snapshot| snapshot.pending).collect::<Vec<_>>(), [5, 5]);
    let minutes = store.watched_minutes(&ids).await.unwrap();
    assert_eq!(minutes.iter().map(|minute| minute.push_messages).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(store.watched_groups(&ids).await.unwrap().len(), 2);
    store.close().await;
    db.disconnect_all().await;
    let read: Vec<(String, i64)> = sqlx::query_as(
        "SELECT t.relname::text, (t.seq_tup_read + (SELECT sum(i.idx_tup_read) FROM pg_stat_user_indexes i \
           WHERE i.relid = t.relid))::bigint FROM pg_stat_user_tables t WHERE t.schemaname = 'queen' AND t.relname = ANY ($1)",
    )
    .bind(["queues", "stats", "queue_minutes", "consumer_groups"].map(str::to_owned).to_vec())
    .fetch_all(&db.pool)
    .await
    .unwrap();
    assert_eq!(read.len(), 4);
    assert!(read.iter().all(|(_, rows)| (1..50).contains(rows)), "{read:?}");
}
