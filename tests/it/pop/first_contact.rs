//! First contact: who registers, what is seeded, and races with pushes (`spec/push-pop.md` §4, §7.10).

use std::collections::BTreeSet;

use futures_util::future::{join, join_all};

use crate::harness::{PATIENCE, Pop, TestBroker, eventually};

/// §7.10: a targeted pop seeds only its partition and registers nothing; the later wildcard pop decides the rest
/// (§10 no. 5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_targeted_first_pop_decides_for_its_partition_only() {
    let broker = TestBroker::start().await;
    for partition in ["p1", "p2"] {
        broker.push_ids("q", partition, [format!("{partition}-old")]).await;
    }
    assert!(broker.pop(&Pop::partition("q", "p1").group("g").set("subscriptionMode", "new")).await.is_empty());
    let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(0)).await;
    assert_eq!(popped.ids(), ["p2-old"]);
    broker.push_ids("q", "p1", ["p1-new"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g").partitions(0)).await.ids(), ["p1-new"]);
}

/// §7.10: and the other way round: a registered group's record rules a later targeted pop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registered_group_rules_later_targeted_pops() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p1", ["old"]).await;
    assert!(broker.pop(&Pop::queue("q").group("g")).await.is_empty());
    broker.push_ids("q", "p2", ["born later"]).await;
    let popped = broker.pop(&Pop::partition("q", "p2").group("g").set("subscriptionMode", "new")).await;
    assert_eq!(popped.ids(), ["born later"], "by the record, not by the request");
}

/// §7.10: a later registration never moves an existing cursor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_moves_no_existing_cursor() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p1", ["a", "b", "c"]).await;
    let popped = broker.pop(&Pop::partition("q", "p1").group("g").all().batch(1)).await;
    broker.ack("g", popped.items("completed")).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g").set("subscriptionMode", "new")).await.ids(), ["b", "c"]);
}

/// §4: a wildcard pop makes an unknown queue with defaults; a targeted or discovery pop makes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_wildcard_route_makes_a_queue() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    assert!(broker.pop(&Pop::partition("t.x", "p").group("g").all()).await.is_empty());
    assert!(broker.pop(&Pop::discover().set("namespace", "t").group("g")).await.is_empty());
    assert_eq!(broker.db.row_counts().await, before);
    assert!(broker.pop(&Pop::queue("w.x")).await.is_empty());
    let row: (String, String, String, i32) =
        sqlx::query_as("SELECT name, namespace, task, lease_time FROM queen.queues")
            .fetch_one(&broker.db.pool)
            .await
            .unwrap();
    assert_eq!(row, ("w.x".to_owned(), "w".to_owned(), "x".to_owned(), 60));
    let counts = broker.db.row_counts().await;
    assert_eq!((counts["queues"], counts["log_partitions"]), (1, 0));
    broker.push_ids("known", "p", ["m"]).await;
    let before = broker.db.row_counts().await;
    assert!(broker.pop(&Pop::partition("known", "unknown")).await.is_empty());
    assert_eq!(broker.db.row_counts().await["log_partitions"], before["log_partitions"]);
}

/// §10 no. 6: racing first pops of a *new* group against a push: skipped or delivered, once, never lost afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_racing_a_first_contact_is_delivered_at_most_once() {
    let broker = TestBroker::start().await;
    for round in 0..20 {
        let (queue, pop) = (format!("q{round}"), Pop::queue(&format!("q{round}")).group("g").partitions(0).auto_ack());
        broker.push_ids(&queue, "p", ["before"]).await;
        let (first, _) = join(broker.pop(&pop), broker.push_ids(&queue, "p", ["racing"])).await;
        broker.push_ids(&queue, "p", ["after"]).await;
        let mut seen: Vec<String> = first.ids().into_iter().map(str::to_owned).collect();
        seen.extend(broker.pop(&pop).await.ids().into_iter().map(str::to_owned));
        let expected = [vec!["after".to_owned()], vec!["racing".to_owned(), "after".to_owned()]];
        assert!(expected.contains(&seen), "round {round}: {seen:?}");
    }
}

/// §10 no. 6: with many partitions being born during the registration, what is pushed after the pop's answer is
/// delivered exactly once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_after_the_registration_are_all_delivered() {
    let broker = TestBroker::start().await;
    for n in 0..10 {
        broker.push_ids("q", &format!("p{n}"), ["before"]).await;
    }
    let pop = Pop::queue("q").group("g").partitions(0).auto_ack();
    let during = (0..10).map(|n| {
        let client = broker.clone();
        async move { client.push_ids("q", &format!("p{}", n + 5), [format!("during{n}")]).await }
    });
    let (first, _) = join(broker.pop(&pop), join_all(during)).await;
    for n in 0..20 {
        broker.push_ids("q", &format!("p{n}"), [format!("after{n}")]).await;
    }
    let mut seen: Vec<String> = first.ids().into_iter().map(str::to_owned).collect();
    eventually(PATIENCE, async || {
        let popped = broker.pop(&pop).await;
        seen.extend(popped.ids().into_iter().map(str::to_owned));
        seen.iter().filter(|id| id.starts_with("after")).count() == 20
    })
    .await;
    let distinct: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len(), "nothing twice: {seen:?}");
    assert!(!seen.contains(&"before".to_owned()));
}

/// §7.5 no. 2, §7.10: many first pops of one group at once register it once and hand each message out once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_first_pops_register_once() {
    let broker = TestBroker::start().await;
    for n in 0..6 {
        broker.push_ids("q", &format!("p{n}"), ["x"]).await;
    }
    let pops = (0..12).map(|_| {
        let client = broker.clone();
        async move { client.pop(&Pop::queue("q").group("g").all().auto_ack()).await }
    });
    let mut seen: Vec<String> = join_all(pops).await.iter().map(|popped| popped.partition.clone()).collect();
    seen.retain(|partition| !partition.is_empty());
    loop {
        let popped = broker.pop(&Pop::queue("q").group("g").auto_ack()).await;
        if popped.is_empty() {
            break;
        }
        seen.push(popped.partition);
    }
    seen.sort_unstable();
    assert_eq!(seen, ["p0", "p1", "p2", "p3", "p4", "p5"]);
    assert_eq!(broker.db.row_counts().await["consumer_groups"], 1);
}

/// A crowd that appears at once is met in a few transactions, whoever comes first, and a push is not behind all of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_new_queues_shares_commits() {
    const CROWD: usize = 400;
    let broker = TestBroker::start().await;
    let pops = (0..CROWD).map(|n| {
        let client = broker.clone();
        async move { client.pop(&Pop::queue(&format!("q{n}")).group("g").all().auto_ack().wait_ms(20_000)).await }
    });
    let pushes = (0..CROWD).map(|n| {
        let client = broker.clone();
        async move { client.push_ids(&format!("q{n}"), "p", ["m"]).await }
    });
    let (popped, _) = join(join_all(pops), join_all(pushes)).await;
    assert!(popped.iter().all(|popped| popped.ids() == ["m"]));
    for table in ["queues", "consumer_groups"] {
        let sql = format!("SELECT count(*), count(DISTINCT xmin::text) FROM queen.{table}");
        let (rows, transactions): (i64, i64) =
            sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_one(&broker.db.pool).await.unwrap();
        assert_eq!(rows, CROWD as i64);
        assert!(transactions < 100, "{transactions} transactions made the {table}");
    }
}
