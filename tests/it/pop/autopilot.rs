//! Sizes that a pop leaves to the broker (`spec/push-pop.md` §7.13).

use serde_json::{Value, json};

use crate::harness::{Broker, Client, PATIENCE, Pop, Road, TestBroker, eventually, numbered};

fn pop(group: &str) -> Pop {
    Pop::queue("q").group(group).all().set("autopilot", "true")
}

/// A broker whose widths may change at every second pop.
async fn restless(lanes_max: usize) -> TestBroker {
    TestBroker::tuned(Road::Fused, |config| {
        config.pop.autopilot.dwell_ms = 1;
        config.pop.autopilot.dwell_pops = 2;
        config.pop.autopilot.target_age_ms = 1.0;
        config.pop.autopilot.lanes_max = lanes_max;
    })
    .await
}

async fn fill(client: &Client, partitions: usize) {
    let item = |n| json!({ "queue": "q", "partition": format!("p{n}"), "payload": n });
    let items: Vec<Value> = (0..partitions).map(item).collect();
    assert!(client.push(json!(items)).await.iter().all(|result| result.status == "queued"));
}

/// The first pop of a group takes one partition, whatever is ready; the answer ends with what was chosen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_starts_with_one_partition_and_the_answer_ends_with_the_choice() {
    let broker = TestBroker::start().await;
    for n in 0..5 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..150)).await;
    }
    let reply = broker.pop_reply(&pop("wide").batch(500).wait_ms(1_000)).await.expect(200);
    assert!(
        reply.text.ends_with(r#""partitionsClaimed":1,"autopilot":{"partitions":1,"batch":500}}"#),
        "{}",
        reply.text
    );
    let popped = broker.pop(&pop("open")).await;
    assert_eq!((popped.partitions_claimed, popped.messages.len()), (1, 100), "the delegated batch");
    let chosen = popped.autopilot.unwrap();
    assert_eq!((chosen.partitions, chosen.batch, chosen.wait_ms), (1, 100, None), "four partitions are ready");
    let last = broker.pop(&pop("all at once").partitions(0).batch(10_000)).await;
    assert_eq!((last.messages.len(), last.autopilot), (750, None), "nothing was left open");
}

/// A value that was sent is never changed; a non-waiting loop is told to pause once nothing is ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_request_names_stays_as_it_is() {
    let broker = restless(10).await;
    fill(&broker, 40).await;
    for _ in 0..10 {
        let popped = broker.pop(&pop("pinned").partitions(1)).await;
        let chosen = popped.autopilot.unwrap();
        assert_eq!((popped.partitions_claimed, chosen.partitions, chosen.batch), (1, 1, 100), "never widened");
        let popped = broker.pop(&pop("budget").batch(2)).await;
        assert!(popped.messages.len() <= 2 && popped.autopilot.unwrap().batch == 2);
    }
    let popped = broker.pop(&pop("three").partitions(3)).await;
    assert_eq!((popped.partitions_claimed, popped.autopilot.unwrap().partitions), (3, 3));
    let rest = broker.pop(&pop("rest").partitions(40)).await;
    assert_eq!((rest.messages.len(), rest.autopilot.unwrap().wait_ms), (40, Some(1)));
}

/// Width follows from evidence: it grows while more wait than one pop takes, and a deleted queue takes it along.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_of_partitions_widens_the_sweep() {
    let broker = restless(10).await;
    fill(&broker, 400).await;
    let mut widest = 0;
    let mut served = 0;
    eventually(PATIENCE, async || {
        let popped = broker.pop(&pop("g")).await;
        served += popped.messages.len();
        let Some(chosen) = popped.autopilot else { return true };
        assert!(popped.partitions_claimed <= chosen.partitions, "{chosen:?}");
        widest = widest.max(popped.partitions_claimed);
        served == 400
    })
    .await;
    assert_eq!(served, 400);
    assert!((8..=100).contains(&widest), "{widest}: wider than at first, never more than the batch could fill");
    broker.delete_queue("q").await;
    fill(&broker, 20).await;
    assert_eq!(broker.pop(&pop("g")).await.partitions_claimed, 1, "a new queue is a new beginning");
}

/// The number of groups with a width of their own is bounded; those beyond take one partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_beyond_the_bound_keep_to_one_partition() {
    let broker = restless(1).await;
    fill(&broker, 120).await;
    let mut widest = [0, 0];
    for _ in 0..20 {
        for (widest, group) in widest.iter_mut().zip(["first", "second"]) {
            *widest = broker.pop(&pop(group)).await.partitions_claimed.max(*widest);
        }
    }
    assert!(widest[0] > 1 && widest[1] == 1, "{widest:?}");
}

/// Only a wildcard pop with a group that does not conflate; elsewhere, and when it is off, the defaults of §7.2 hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn elsewhere_and_when_off_the_defaults_hold() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..250)).await;
    for elsewhere in [
        Pop::queue("q"),
        Pop::queue("q").group("__QUEUE_MODE__"),
        Pop::partition("q", "p").group("targeted").all(),
        Pop::discover().set("namespace", "q").group("discovery").all(),
    ] {
        let popped = broker.pop(&elsewhere.set("autopilot", "true")).await;
        assert!(popped.autopilot.is_none());
        assert!(popped.is_empty() || popped.messages.len() == 200, "{}", popped.messages.len());
    }
    let conflating = broker.pop(&pop("latest").set("conflation", "true")).await;
    assert!(conflating.conflation && conflating.autopilot.is_none() && conflating.messages.len() == 1);
    broker.ack("latest", conflating.items("completed")).await;
    broker.push_ids("q", "p", ["newer"]).await;
    let stored = broker.pop(&pop("latest")).await;
    assert!(stored.conflation && stored.autopilot.is_none() && stored.ids() == ["newer"], "the stored policy rules");
    for mode in ["off", "shadow"] {
        let variables = [("DATABASE_URL", broker.db.url.as_str()), ("QUEEN_POP_AUTOPILOT", mode)];
        let other = Broker::from_environment(variables).await.unwrap();
        let popped = other.pop(&pop(mode)).await;
        assert_eq!((popped.messages.len(), popped.partitions_claimed, popped.autopilot), (200, 1, None), "{mode}");
    }
}
