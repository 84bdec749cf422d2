//! State among brokers, and the wake-up from outside (`spec/admin.md` §13.5, §13.6).

use serde_json::{Value, json};

use crate::harness::{PATIENCE, Pop, TestBroker, comes_true, eventually};

/// §13.5: a literal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_state_says_that_there_is_none() {
    let broker = TestBroker::start().await;
    let body = broker.get("/api/v1/system/shared-state").await.expect(200).json();
    assert_eq!(
        body,
        json!({ "enabled": false, "reason": "single_node_segments_broker", "maintenance_mode": false, "pop_maintenance_mode": false })
    );
}

/// §13.6: alone, and with another broker; both paths are one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_link_to_other_brokers_is_told() {
    let broker = TestBroker::start().await;
    let told =
        async |path: &str| -> Value { broker.get(&format!("/internal/api/{path}/stats")).await.expect(200).json() };
    let alone =
        json!({ "enabled": false, "reason": "no_peers", "maintenance_mode": false, "pop_maintenance_mode": false });
    assert_eq!(told("shared-state").await, alone);
    assert_eq!(told("inter-instance").await, alone);
    let _other = broker.another().await;
    eventually(PATIENCE, async || told("inter-instance").await["servers_alive"] == 1).await;
    let body = told("shared-state").await;
    assert_eq!((&body["enabled"], &body["peer_count"]), (&json!(true), &json!(1)));
    assert_eq!(body["peers"][0]["connected"], true);
}

/// §13.6: a message that the broker was not told of is delivered once somebody says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notification_wakes_parked_pops() {
    let broker = TestBroker::start().await;
    for partition in [Some("p"), None] {
        broker.push_ids("q", "p", [format!("{partition:?}")]).await;
        let pop = Pop::queue("q").group("g").all();
        let popped = broker.pop(&pop).await;
        broker.ack("g", popped.items("completed")).await;
        let parked = pop.clone().wait_ms(20_000);
        let waiting = broker.pop_reply(&parked);
        let told = async {
            // The cursor goes back without the broker hearing of it.
            broker.db.seek(-1).await;
            comes_true(PATIENCE, async || {
                let body = json!({ "queue": "q", "partition": partition });
                let answer = broker.post_json("/internal/api/notify", &body).await.expect(200).json();
                assert_eq!(answer, json!({ "status": "ok" }));
                broker.db.live_leases().await == 1
            })
            .await
        };
        let (reply, came) = futures_util::join!(waiting, told);
        assert!(came && reply.status == 200, "{partition:?}");
        let again: crate::harness::Popped = reply.decode();
        broker.ack("g", again.items("completed")).await;
    }
    broker.post_json("/internal/api/notify", &json!({ "queue": "unknown", "partition": "p" })).await.expect(200);
    for body in [json!({}), json!({ "queue": "" })] {
        broker.post_json("/internal/api/notify", &body).await.expect_refusal(&["queue"]);
    }
}
