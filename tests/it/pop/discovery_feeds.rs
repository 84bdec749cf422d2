//! Discovery keeps up with queues that come, go and change their labels, on any broker (`spec/push-pop.md` §7.4, §7.9, §7.10).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Client, PATIENCE, Pop, TestBroker, eventually, eventually_some};

/// What a change may take to reach another broker (design §5).
const SOON: Duration = Duration::from_secs(1);

fn by(namespace: &str) -> Pop {
    Pop::discover().set("namespace", namespace).group("g").all().auto_ack()
}

async fn park(client: &Client, pop: Pop) -> tokio::task::JoinHandle<(Vec<String>, Instant)> {
    let parked = async || {
        let text = client.get("/metrics/prometheus").await.expect(200).text;
        let line = text.lines().find(|line| line.starts_with("queen_parked_long_polls ")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let before = parked().await;
    let waiting = client.clone();
    let task = tokio::spawn(async move {
        let popped = waiting.pop(&pop.wait_ms(20_000)).await;
        (popped.ids().into_iter().map(str::to_owned).collect(), Instant::now())
    });
    // Other brokers of this process park pops as well: seeing it is likely, not needed.
    let _ = crate::harness::comes_true(Duration::from_secs(2), async || parked().await > before).await;
    task
}

/// Every queue of a label is met, page by page, and each is served; nothing comes twice. Each pop has its own time: all of
/// them together take as long as the machine lets them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_queues_than_a_page_are_all_met_and_served() {
    const QUEUES: usize = 700;
    let broker = TestBroker::start().await;
    let items = |round: &str| -> Vec<Value> {
        let item = |n| json!({ "queue": format!("many.q{n}"), "payload": n, "transactionId": format!("{round}{n}") });
        (0..QUEUES).map(item).collect()
    };
    broker.push(json!(items("old"))).await;
    let new = Pop::discover().set("namespace", "many").group("new").partitions(0).batch(1_000).auto_ack();
    assert!(broker.pop(&new).await.is_empty(), "a new group begins on every queue with this pop");
    broker.push(json!(items("fresh"))).await;
    for (group, expected) in [("new", QUEUES), ("all", 2 * QUEUES)] {
        let pop = Pop::discover().set("namespace", "many").group(group).all().partitions(0).batch(1_000).auto_ack();
        let (mut seen, mut delivered) = (BTreeSet::new(), 0);
        while delivered < expected {
            let next = async || Some(broker.pop(&pop).await.messages).filter(|messages| !messages.is_empty());
            let messages = eventually_some(PATIENCE, next).await;
            delivered += messages.len();
            seen.extend(messages.into_iter().map(|m| m.transaction_id));
        }
        assert_eq!((seen.len(), delivered), (expected, expected), "{group}");
        assert!(broker.pop(&pop).await.is_empty());
    }
}

/// What lies behind the first partitions of a queue is found by the very first pop on a broker, not some time later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_pop_looks_at_every_partition() {
    let a = TestBroker::start().await;
    let item = |n| json!({ "queue": "ns.wide", "partition": format!("p{n}"), "payload": n });
    a.push(json!((0..60).map(item).collect::<Vec<Value>>())).await;
    assert_eq!(a.pop(&by("ns").partitions(0)).await.messages.len(), 60);
    a.push_ids("ns.wide", "p9", ["last by name"]).await;
    let b = a.another().await;
    assert_eq!(b.pop(&by("ns")).await.ids(), ["last by name"]);
}

/// A parked pop gets the first message of a queue that did not exist when it parked, from this broker and from another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parked_pop_hears_of_queues_made_later_and_elsewhere() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("ns.first", "p", ["first"]).await;
    assert_eq!(a.pop(&by("ns")).await.ids(), ["first"]);
    for (broker, queue) in [(&*a, "ns.here"), (&*b, "ns.there")] {
        let parked = park(&a, by("ns")).await;
        let pushed = Instant::now();
        broker.push_ids(queue, "p", [queue]).await;
        let (ids, at) = parked.await.unwrap();
        assert_eq!(ids, [queue]);
        assert!(at - pushed < SOON, "{queue}: {:?}", at - pushed);
    }
    b.push_ids("ns.unparked", "p", ["unparked"]).await;
    eventually(SOON, async || a.pop(&by("ns")).await.ids() == ["unparked"]).await;
}

/// What nobody announces is found by looking: a parked pop meets the queue within a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unannounced_queue_is_found_all_the_same() {
    let broker = TestBroker::start().await;
    broker.push_ids("ns.known", "p", ["known"]).await;
    assert_eq!(broker.pop(&by("ns")).await.ids(), ["known"]);
    let parked = park(&broker, by("ns")).await;
    broker.db.execute("INSERT INTO queen.queues (name, namespace) VALUES ('quiet', 'ns')").await;
    let made = Instant::now();
    broker.push_ids("quiet", "p", ["found"]).await;
    let (ids, at) = parked.await.unwrap();
    assert_eq!(ids, ["found"]);
    assert!(at - made < 2 * SOON, "{:?}", at - made);
}

/// Labels that configure gives and takes hold within a second on every broker, at once on the one that answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_labels_take_effect_here_and_elsewhere() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("plain", "p", ["1"]).await;
    for broker in [&*a, &*b] {
        assert!(broker.pop(&by("ns")).await.is_empty());
    }
    a.configure("plain", json!({ "namespace": "ns" })).await;
    assert_eq!(a.pop(&by("ns")).await.ids(), ["1"], "at once here");
    a.push_ids("plain", "p", ["2"]).await;
    eventually(SOON, async || b.pop(&by("ns")).await.ids() == ["2"]).await;
    a.configure("plain", json!({ "namespace": "other" })).await;
    a.push_ids("plain", "p", ["3"]).await;
    assert!(a.pop(&by("ns")).await.is_empty(), "at once here");
    tokio::time::timeout(SOON, park(&b, Pop::discover().set("namespace", "other").group("h").all()).await)
        .await
        .expect("b knows the new label")
        .unwrap();
    assert!(b.pop(&by("ns")).await.is_empty());
    assert_eq!(b.pop(&by("other")).await.ids(), ["3"]);
}

/// §7.10: a deleted group, and a deleted queue that comes back, are met anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_deleted_is_met_anew() {
    let broker = TestBroker::start().await;
    for queue in ["ns.a", "ns.b"] {
        broker.push_ids(queue, "p", [queue]).await;
    }
    let both = || by("ns").partitions(0);
    let ids = |popped: &crate::harness::Popped| {
        popped.messages.iter().map(|m| m.transaction_id.clone()).collect::<BTreeSet<_>>()
    };
    assert_eq!(broker.pop(&both()).await.messages.len(), 2);
    assert!(broker.pop(&both()).await.is_empty());
    let target = "/api/v1/consumer-groups/g?deleteMetadata=true";
    broker.try_send(reqwest::Method::DELETE, target, None).await.unwrap().expect(200);
    let popped = broker.pop(&both()).await;
    assert_eq!(ids(&popped).len(), 2, "from the beginning again");
    broker.delete_queue("ns.a").await;
    assert!(broker.pop(&both()).await.is_empty());
    broker.push_ids("ns.a", "p", ["reborn"]).await;
    assert_eq!(broker.pop(&both()).await.ids(), ["reborn"]);
}

/// Many pops that wait on one label share what comes: each message wakes one of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_pops_of_a_label_share_what_comes() {
    let broker = TestBroker::start().await;
    for n in 0..8 {
        broker.push_ids(&format!("ns.q{n}"), "p", [format!("old{n}")]).await;
    }
    let one = || by("ns").batch(1);
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let (client, pop) = ((*broker).clone(), one().wait_ms(15_000));
            tokio::spawn(async move { client.pop(&pop).await.ids().into_iter().map(str::to_owned).collect::<Vec<_>>() })
        })
        .collect();
    for n in 0..8 {
        broker.push_ids(&format!("ns.q{n}"), "other", [format!("fresh{n}")]).await;
    }
    let started = Instant::now();
    let mut seen = BTreeSet::new();
    for task in tasks {
        seen.extend(task.await.unwrap());
    }
    assert_eq!(seen.len(), 16, "every pop got one: {seen:?}");
    assert!(started.elapsed() < PATIENCE);
}
