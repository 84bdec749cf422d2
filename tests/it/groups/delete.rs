//! Deleting a group (`spec/admin.md` §7.6).

use std::time::Duration;

use serde_json::json;

use super::{GROUP, delete_group, delete_reply, drain, group_path};
use crate::harness::{PATIENCE, Pop, TestBroker, eventually, numbered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answers_are_those_of_the_table() {
    let broker = TestBroker::start().await;
    for queue in ["q1", "q2"] {
        broker.push_ids(queue, "p", ["m"]).await;
        drain(&broker, queue, "a group").await;
    }
    let body = delete_reply(&broker, &format!("{}/queues/q1", group_path("a group"))).await.expect(200).json();
    assert_eq!(
        body,
        json!({"success": true, "consumerGroup": "a group", "queueName": "q1", "deletedPartitions": 1, "metadataDeleted": true})
    );
    drain(&broker, "q1", "a group").await;
    let body = delete_reply(&broker, &group_path("a group")).await.expect(200).json();
    assert_eq!(
        body,
        json!({"success": true, "consumerGroup": "a group", "deletedPartitions": 2, "metadataDeleted": true})
    );
    for (group, queue) in [("a group", None), ("never", None), (GROUP, Some("q1")), (GROUP, Some("none"))] {
        assert_eq!(delete_group(&broker, group, queue, "").await, 0);
    }
    for (query, echo) in [
        ("?deleteMetadata=false", false),
        ("?deleteMetadata=No", false),
        ("?deleteMetadata=", true),
        ("?deleteMetadata=on&x=1", true),
    ] {
        let body = delete_reply(&broker, &format!("{}{query}", group_path(GROUP))).await.expect(200).json();
        assert_eq!(body["metadataDeleted"], echo, "{query}");
    }
    delete_reply(&broker, &format!("{}?deleteMetadata=perhaps", group_path(GROUP)))
        .await
        .expect_refusal(&["deleteMetadata"]);
}

/// The next pop is a first contact: `all` gets the whole retained backlog again, `new` only what comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_pop_is_a_first_contact() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b"] {
        broker.push_ids("q", partition, [format!("{partition}0"), format!("{partition}1")]).await;
    }
    for whole in [true, false] {
        let sorted = async || {
            let mut ids = drain(&broker, "q", GROUP).await;
            ids.sort();
            ids
        };
        assert_eq!(sorted().await, ["a0", "a1", "b0", "b1"]);
        assert!(sorted().await.is_empty());
        let queue = (!whole).then_some("q");
        assert_eq!(delete_group(&broker, GROUP, queue, "").await, 2);
    }
    let new = Pop::queue("q").group(GROUP).set("subscriptionMode", "new").batch(10);
    assert!(broker.pop(&new).await.is_empty(), "mode new starts at the tail");
    broker.push_ids("q", "a", ["a2"]).await;
    broker.push_ids("q", "c", ["c0"]).await;
    let mut ids = Vec::new();
    eventually(PATIENCE, async || {
        ids.extend(broker.pop(&new).await.ids().into_iter().map(str::to_owned));
        ids.len() == 2
    })
    .await;
    ids.sort();
    assert_eq!(ids, ["a2", "c0"]);
}

/// §17 no. 6: the surviving registration decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_registration_decides_where_it_starts_again() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0"]).await;
    let from_the_end = Pop::queue("q").group("tail").set("subscriptionMode", "new").batch(10);
    let from_the_start = Pop::queue("q").group("whole").all().batch(10);
    assert!(broker.pop(&from_the_end).await.is_empty());
    broker.push_ids("q", "p", ["m1", "m2"]).await;
    for _ in 0..2 {
        let popped = broker.pop(&from_the_end).await;
        assert_eq!(popped.ids(), ["m1", "m2"], "from its registration on");
        broker.ack("tail", popped.items("completed")).await;
        assert_eq!(delete_group(&broker, "tail", None, "?deleteMetadata=false").await, 1);
        assert_eq!(broker.pop(&from_the_start).await.ids(), ["m0", "m1", "m2"]);
        assert_eq!(delete_group(&broker, "whole", Some("q"), "?deleteMetadata=false").await, 1);
    }
    // What a pop says now is ignored: the registration stands.
    assert_eq!(broker.pop(&Pop::queue("q").group("tail").all().batch(10)).await.ids(), ["m1", "m2"]);
    assert_eq!(delete_group(&broker, "tail", None, "").await, 1);
    assert_eq!(broker.pop(&Pop::queue("q").group("tail").all().batch(10)).await.ids(), ["m0", "m1", "m2"]);
}

/// Only this group; dead letters are not its state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_groups_other_queues_and_dead_letters_stay() {
    let broker = TestBroker::start().await;
    for queue in ["q", "other"] {
        broker.push_ids(queue, "p", numbered("m", 0..2)).await;
    }
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all()).await;
    broker.ack(GROUP, popped.items("dlq")).await;
    for (queue, group) in [("q", GROUP), ("q", "h"), ("other", GROUP)] {
        drain(&broker, queue, group).await;
    }
    assert_eq!(delete_group(&broker, GROUP, Some("q"), "").await, 1);
    for (queue, group) in [("q", "h"), ("other", GROUP)] {
        assert_eq!(broker.db.cursor(queue, "p", group).await.committed, 1);
        assert!(drain(&broker, queue, group).await.is_empty());
    }
    assert_eq!(broker.db.find_cursor("q", "p", GROUP).await, None);
    assert_eq!(broker.db.dead_letters().await.len(), 1);
}

/// The leased partition is free at once, also for a pop that is parked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parked_pop_becomes_the_first_contact() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0"]).await;
    for pop in [
        Pop::queue("q").group(GROUP).all().wait_ms(20_000),
        Pop::partition("q", "p").group(GROUP).all().wait_ms(20_000),
        Pop::discover().set("namespace", "q").group(GROUP).all().wait_ms(20_000),
    ] {
        let held = broker.pop(&Pop::queue("q").group(GROUP).all().lease(3600)).await;
        assert_eq!(held.ids(), ["m0"]);
        let client = (*broker).clone();
        let parked = tokio::spawn(async move { client.pop(&pop).await });
        assert!(broker.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty(), "it parks meanwhile");
        assert!(!parked.is_finished());
        assert_eq!(delete_group(&broker, GROUP, None, "").await, 1);
        let popped = tokio::time::timeout(Duration::from_secs(3), parked).await.expect("woken").unwrap();
        assert_eq!(popped.ids(), ["m0"]);
        broker.ack(GROUP, popped.items("completed")).await;
        delete_group(&broker, GROUP, None, "").await;
    }
}

/// An ack that commits while the deletion waits for its cursor: that cursor goes, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cursor_that_moves_under_the_deletion_goes_with_its_group() {
    let broker = TestBroker::start().await;
    for lane in 0..3 {
        broker.push_ids("q", &format!("p{lane}"), ["m0", "m1"]).await;
    }
    drain(&broker, "q", GROUP).await;
    let mut ack = broker.db.pool.begin().await.unwrap();
    sqlx::query("UPDATE queen.log_consumers SET committed = committed").execute(&mut *ack).await.unwrap();
    let commits = async {
        eventually(PATIENCE, async || broker.db.lock_waits("%").await > 0).await;
        ack.commit().await.unwrap();
    };
    let (deleted, ()) = tokio::join!(delete_group(&broker, GROUP, None, ""), commits);
    assert_eq!(deleted, 3);
    let left: i64 =
        sqlx::query_scalar("SELECT count(*) FROM queen.log_consumers").fetch_one(&broker.db.pool).await.unwrap();
    assert_eq!(left, 0);
}

/// Deleting, popping and seeking one group all at once: no deadlock, no cursor that outlives its group, no lost message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_under_fire_stays_whole() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    for lane in 0..6 {
        broker.push_ids("q", &format!("p{lane}"), ["m0", "m1"]).await;
    }
    let pops = async {
        for round in 0..60 {
            let client = if round % 2 == 0 { &*broker } else { &*other };
            let popped = client.pop(&Pop::queue("q").group(GROUP).all().batch(4).partitions(3).lease(1)).await;
            client.ack(GROUP, popped.items("completed")).await;
        }
    };
    let deletes = async {
        for round in 0..25 {
            let query = if round % 3 == 0 { "?deleteMetadata=false" } else { "" };
            delete_group(&other, GROUP, (round % 2 == 0).then_some("q"), query).await;
        }
    };
    let seeks = async {
        for round in 0..25 {
            let to = if round % 2 == 0 { super::beginning() } else { super::end() };
            super::seek(&broker, GROUP, "q", to).await;
        }
    };
    tokio::join!(pops, deletes, seeks);
    assert_eq!(broker.db.deadlocks().await, 0);
    let orphans: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM queen.log_consumers c WHERE NOT EXISTS (SELECT 1 FROM queen.consumer_groups g WHERE g.id = c.group_id)",
    )
    .fetch_one(&broker.db.pool)
    .await
    .unwrap();
    assert_eq!(orphans, 0);
    delete_group(&broker, GROUP, None, "").await;
    for client in [&*broker, &*other] {
        let mut ids = Vec::new();
        eventually(PATIENCE, async || {
            ids.extend(drain(client, "q", GROUP).await);
            ids.len() == 12
        })
        .await;
        delete_group(&broker, GROUP, None, "").await;
    }
}
