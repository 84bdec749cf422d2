//! Last value per partition (`spec/push-pop.md` §7.12, `spec/streams-ephemeral-locks-reads.md` §6).

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Pop, TestBroker, numbered, on_every_road};

on_every_road!(
    only_the_newest_message_is_delivered_and_its_ack_finishes_all,
    what_comes_during_the_handler_comes_next,
    a_nack_delivers_whatever_is_newest_then,
    an_older_id_of_the_batch_is_not_ackable,
    an_exhausted_budget_files_the_message_of_the_last_attempt,
);

fn conflating() -> Pop {
    Pop::queue("q").group("g").all().set("conflation", "true")
}

async fn ack_all(broker: &TestBroker, body: &Value, status: &str) -> Value {
    let messages = body["messages"].as_array().unwrap();
    let items: Vec<Value> = messages
        .iter()
        .map(|m| {
            json!({"transactionId": m["transactionId"], "partitionId": m["partitionId"], "leaseId": m["leaseId"],
                   "status": status, "error": "no"})
        })
        .collect();
    let acks = json!({"consumerGroup": "g", "acknowledgments": items});
    broker.post_json("/api/v1/ack/batch", &acks).await.expect(200).json()
}

async fn only_the_newest_message_is_delivered_and_its_ack_finishes_all(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..10)).await;
    let body = broker.pop_reply(&conflating().batch(100)).await.expect(200).json();
    let ids: Vec<_> = body["messages"].as_array().unwrap().iter().map(|m| m["transactionId"].clone()).collect();
    assert_eq!(ids, [json!("m9")]);
    assert_eq!((&body["conflation"], &body["partitionsClaimed"]), (&json!(true), &json!(1)));
    assert!(body.get("conflationConflict").is_none());
    let acks = ack_all(broker, &body, "completed").await;
    assert_eq!((&acks[0]["conflated"], &acks[0]["leaseReleased"]), (&json!(9), &json!(true)), "{acks}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 9);
    let group = broker.get("/api/v1/consumer-groups/g").await.expect(200).json();
    assert_eq!(group["q"]["partitions"][0]["totalConsumed"], json!(10), "every position counts as retired: {group}");
    // Another group reads everything.
    assert_eq!(broker.pop(&Pop::queue("q").group("other").all()).await.messages.len(), 10);
    // Nothing skipped is said as well.
    broker.push_ids("q", "p", ["alone"]).await;
    let body = broker.pop_reply(&conflating()).await.expect(200).json();
    assert_eq!(ack_all(broker, &body, "completed").await[0]["conflated"], json!(0));
}

async fn what_comes_during_the_handler_comes_next(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let body = broker.pop_reply(&conflating()).await.expect(200).json();
    broker.push_ids("q", "p", numbered("late", 0..2)).await;
    let acks = ack_all(broker, &body, "completed").await;
    assert_eq!(acks[0]["conflated"], json!(2));
    assert_eq!(broker.pop(&conflating()).await.ids(), ["late1"]);
}

async fn a_nack_delivers_whatever_is_newest_then(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let body = broker.pop_reply(&conflating()).await.expect(200).json();
    let acks = ack_all(broker, &body, "retry").await;
    assert!(acks[0].get("conflated").is_none(), "{acks}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, -1);
    broker.push_ids("q", "p", ["newer"]).await;
    let again = broker.pop_reply(&conflating()).await.expect(200).json();
    assert_eq!(again["messages"][0]["transactionId"], json!("newer"));
    assert_eq!(ack_all(broker, &again, "completed").await[0]["conflated"], json!(3));
}

async fn an_older_id_of_the_batch_is_not_ackable(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let mut body = broker.pop_reply(&conflating()).await.expect(200).json();
    body["messages"][0]["transactionId"] = json!("m1");
    let acks = ack_all(broker, &body, "completed").await;
    assert_eq!(acks[0]["success"], json!(false), "{acks}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, -1);
}

async fn an_exhausted_budget_files_the_message_of_the_last_attempt(broker: &TestBroker) {
    broker.post_json("/api/v1/configure", &json!({"queue": "q", "options": {"retryLimit": 1}})).await.expect(200);
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    for newest in ["m2", "m3"] {
        let body = broker.pop_reply(&conflating()).await.expect(200).json();
        assert_eq!(body["messages"][0]["transactionId"], json!(newest));
        let acks = ack_all(broker, &body, "failed").await;
        assert!(acks[0].get("conflated").is_none(), "{acks}");
        if newest == "m2" {
            broker.push_ids("q", "p", ["m3"]).await;
        }
    }
    let letters = broker.get("/api/v1/dlq?queue=q").await.expect(200).json();
    assert_eq!(letters["messages"][0]["transactionId"], json!("m3"), "{letters}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 3);
}

/// The width is the batch unless it is given, and 64 at most; one message each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_message_of_many_partitions() {
    let broker = TestBroker::start().await;
    for partition in 0..70 {
        broker.push_ids("q", &format!("p{partition}"), numbered(&format!("m{partition}-"), 0..3)).await;
    }
    let popped = broker.pop(&conflating().batch(5)).await;
    assert_eq!(popped.messages.len(), 5);
    assert!(popped.ids().iter().all(|id| id.ends_with("-2")), "{:?}", popped.ids());
    assert_eq!(broker.pop(&conflating().batch(5).partitions(2)).await.messages.len(), 2);
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks.iter().all(|ack| ack.success && ack.lease_released), "{acks:?}");
    // 70 less the five and the two.
    assert_eq!(broker.pop(&conflating().batch(1000).partitions(1000)).await.messages.len(), 63);
    let rest = broker.pop_reply(&conflating().batch(1000)).await.expect(200).json();
    assert_eq!(rest["messages"], json!([]));
}

/// The stored policy wins; a request that declares another one is told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policy_is_the_groups() {
    let broker = TestBroker::start().await;
    let keys = |reply: &Value| (reply.get("conflation").cloned(), reply.get("conflationConflict").cloned());
    let yes = Some(json!(true));
    // Idle, even unknown: the empty answer carries the key.
    let reply = broker.pop_reply(&conflating()).await.expect(200).json();
    assert_eq!((&reply["messages"], &reply["partitionsClaimed"]), (&json!([]), &json!(0)));
    assert_eq!(keys(&reply), (yes.clone(), None));
    let reply = broker.pop_reply(&Pop::partition("q", "unknown").group("g").set("conflation", "true")).await;
    assert_eq!(keys(&reply.expect(200).json()), (yes.clone(), None));
    // Saying nothing is no declaration, saying false is one.
    assert_eq!(keys(&broker.pop_reply(&Pop::queue("q").group("g")).await.expect(200).json()), (yes.clone(), None));
    let reply = broker.pop_reply(&Pop::queue("q").group("g").set("conflation", "false")).await.expect(200).json();
    assert_eq!(keys(&reply), (yes.clone(), yes.clone()));
    // An ordinary group stays one.
    broker.pop_reply(&Pop::queue("q").group("plain").all()).await.expect(204);
    let declared = Pop::queue("q").group("plain").set("conflation", "true");
    assert_eq!(keys(&broker.pop_reply(&declared).await.expect(200).json()), (None, yes.clone()));
    broker.push_ids("q", "p", numbered("m", 0..4)).await;
    let reply = broker.pop_reply(&declared.batch(10)).await.expect(200).json();
    assert_eq!((reply["messages"].as_array().unwrap().len(), keys(&reply)), (4, (None, yes.clone())));
    broker.pop_reply(&Pop::queue("q").group("plain").set("conflation", "false")).await.expect(204);
    // The targeted route stores a declared policy, and only that.
    let targeted = Pop::partition("q", "p").group("lane");
    let reply = broker.pop_reply(&targeted.clone().all().set("conflation", "true")).await.expect(200).json();
    assert_eq!((reply["messages"][0]["transactionId"].clone(), keys(&reply)), (json!("m3"), (yes.clone(), None)));
    assert_eq!(keys(&broker.pop_reply(&Pop::queue("q").group("lane")).await.expect(200).json()), (yes, None));
    // It shows where groups are listed, and goes with the group.
    let depth = broker.get("/api/v1/resources/queues/q/depth?group=g").await.expect(200).json();
    assert_eq!((&depth["conflation"], &depth["effectivePending"]), (&json!(true), &depth["partitionsPending"]));
    broker.try_send(Method::DELETE, "/api/v1/consumer-groups/g", None).await.unwrap().expect(200);
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    assert_eq!(popped.messages.len(), 4);
}

/// A parked conflating pop is woken by a push, here and by another broker, and delivers the newest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parked_pop_wakes_and_another_broker_knows_the_policy() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    broker.pop_reply(&conflating()).await.expect(200);
    let waiting = conflating().wait_ms(10_000);
    let (popped, _) = tokio::join!(broker.pop(&waiting), broker.push_ids("q", "p", numbered("m", 0..3)));
    assert_eq!(popped.ids(), ["m2"]);
    broker.ack("g", popped.items("completed")).await;
    broker.push_ids("q", "p", numbered("n", 0..3)).await;
    let popped = other.pop(&Pop::queue("q").group("g").wait_ms(10_000)).await;
    assert_eq!(popped.ids(), ["n2"]);
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks[0].success && acks[0].lease_released, "{acks:?}");
}
