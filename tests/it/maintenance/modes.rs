//! The two switches, and what pushes and pops do under them.

use serde_json::json;
use tempfile::TempDir;

use super::{Client, bytes_on_disk, drained, holds, modes, pop_mode, push, push_mode, read, spooling};
use crate::harness::{PATIENCE, Pop, TestBroker, eventually, numbered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_switches_are_independent_and_answer_in_their_words() {
    let broker = TestBroker::start().await;
    let on = push_mode(&broker, true).await;
    assert_eq!(on["message"], "Maintenance mode ENABLED. All PUSHes routing to file buffer.");
    assert_eq!((&on["maintenanceMode"], on.get("popMaintenanceMode")), (&json!(true), None));
    assert_eq!(push_mode(&broker, true).await["maintenanceMode"], true, "again is no error");
    let seen = modes(&broker).await;
    assert_eq!((&seen["maintenanceMode"], &seen["popMaintenanceMode"]), (&json!(true), &json!(false)));
    assert_eq!(seen["bufferStats"]["failedFiles"]["qos0Count"], 0);
    let pop = broker.get("/api/v1/system/maintenance/pop").await.expect(200).json();
    assert_eq!(
        pop,
        json!({ "popMaintenanceMode": false, "message": "Pop maintenance mode is OFF. Normal operation." })
    );
    let off = push_mode(&broker, false).await;
    assert_eq!(off["message"], "Maintenance mode DISABLED. Background processor will drain buffer to DB.");
    assert_eq!(
        pop_mode(&broker, true).await,
        json!({ "popMaintenanceMode": true, "message": "Pop maintenance mode ENABLED. All POP operations will return empty arrays." })
    );
    assert_eq!(modes(&broker).await["popMaintenanceMode"], true);
    let shared = broker.get("/api/v1/system/shared-state").await.expect(200).json();
    assert_eq!((&shared["maintenance_mode"], &shared["pop_maintenance_mode"]), (&json!(false), &json!(true)));
    for route in ["/api/v1/system/maintenance", "/api/v1/system/maintenance/pop"] {
        for body in [json!({}), json!({ "enabled": "yes" }), json!([])] {
            let reply = broker.post_json(route, &body).await.expect(400);
            assert_eq!(reply.json(), json!({ "error": "enabled (boolean) is required" }));
        }
    }
}

/// §13.3: buffered, then stored with the answered ids, in order, once; pops and acks go on meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_under_maintenance_are_stored_afterwards_in_order_under_their_answered_ids() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    push(&broker, "p", ["before"]).await;
    push_mode(&broker, true).await;
    let mut told = Vec::new();
    for round in 0..3 {
        for result in push(&broker, "p", numbered(&format!("r{round}-"), 0..5)).await {
            assert_eq!((result.status.as_str(), result.offset), ("buffered", None));
            told.push((result.message_id, result.transaction_id));
        }
    }
    assert_eq!(modes(&broker).await["bufferedMessages"], 15);
    let buffers = broker.get("/api/v1/status/buffers").await.expect(200).json();
    assert_eq!(buffers, json!({ "pending": 15, "failed": 0, "dbHealthy": true, "worker": 0 }));
    assert_eq!(read(&broker, "p").await.len(), 1, "what is stored can be read, what is spooled cannot");
    push_mode(&broker, false).await;
    // It goes behind, or finds the spool empty.
    told.extend(push(&broker, "p", ["after"]).await.into_iter().map(|r| (r.message_id, r.transaction_id)));
    drained(&broker).await;
    let stored = read(&broker, "p").await;
    assert_eq!(stored[1..], told);
}

/// §2.5, §2.6: repeated keys of a request collapse, and a key that is stored is stored once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spool_keeps_deduplication_exact() {
    let broker = TestBroker::start().await;
    push(&broker, "p", ["stored"]).await;
    push_mode(&broker, true).await;
    let item = |id: &str, n: i64| json!({ "queue": "q", "partition": "p", "transactionId": id, "payload": n });
    let results = broker.push(json!([item("a", 1), item("a", 2), item("stored", 3)])).await;
    assert!(results.iter().all(|result| result.status == "buffered"), "{results:?}");
    assert_eq!(results[0].message_id, results[1].message_id);
    broker.push(json!([item("a", 4), item("b", 5)])).await;
    push_mode(&broker, false).await;
    drained(&broker).await;
    let ids: Vec<String> = read(&broker, "p").await.into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids, ["stored", "a", "b"]);
}

/// A parked pop is woken by what the drain stores, and a queue that did not exist comes to be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_drain_wakes_parked_pops() {
    let broker = TestBroker::start().await;
    push(&broker, "p", ["before"]).await;
    broker.pop(&Pop::queue("q").auto_ack()).await;
    push_mode(&broker, true).await;
    push(&broker, "p", ["m"]).await;
    let client = broker.clone();
    let parked = tokio::spawn(async move { client.pop(&Pop::queue("q").wait_ms(20_000)).await });
    push_mode(&broker, false).await;
    assert_eq!(parked.await.unwrap().ids(), ["m"]);
}

/// §13.3 behind a balancer without affinity: once a switch is answered, every live broker obeys it, both modes, both ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answered_switch_holds_on_every_broker() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    let known = async |client: &Client| {
        let stats = client.get("/internal/api/shared-state/stats").await.json();
        stats["servers_alive"].as_i64() == Some(1)
    };
    eventually(PATIENCE, async || known(&a).await && known(&b).await).await;
    for turn in 0..10 {
        let (one, other): (&Client, &Client) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
        push_mode(one, true).await;
        assert_eq!(push(other, "spooled", [format!("m{turn}")]).await[0].status, "buffered", "turn {turn}");
        push_mode(other, false).await;
        assert_eq!(push(one, "stored", [format!("n{turn}")]).await[0].status, "queued", "turn {turn}");
        pop_mode(one, true).await;
        assert_eq!(other.get("/api/v1/system/maintenance/pop").await.json()["popMaintenanceMode"], true, "turn {turn}");
        pop_mode(other, false).await;
        assert_eq!(one.get("/api/v1/system/maintenance/pop").await.json()["popMaintenanceMode"], false, "turn {turn}");
    }
}

/// Other brokers obey, and a broker that starts later at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_broker_obeys_and_a_restart_forgets_nothing() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    push_mode(&a, true).await;
    pop_mode(&a, true).await;
    eventually(PATIENCE, async || {
        let pop = b.get("/api/v1/system/maintenance/pop").await.json();
        pop["popMaintenanceMode"] == true && push(&b, "p", ["probe"]).await[0].status == "buffered"
    })
    .await;
    let c = a.another().await;
    assert_eq!(push(&c, "p", ["m"]).await[0].status, "buffered");
    assert_eq!(c.pop_reply(&Pop::queue("q")).await.status, 204);
    for broker in [&b, &c] {
        push_mode(broker, false).await;
        drained(broker).await;
    }
}

/// §13.3: a paused pop is a bare 204, parked ones included, and everything is there afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_pops_are_empty_and_nothing_is_lost() {
    let broker = TestBroker::start().await;
    push(&broker, "p", ["m"]).await;
    let client = broker.clone();
    let parked = tokio::spawn(async move { client.pop_reply(&Pop::queue("other").wait_ms(20_000)).await });
    pop_mode(&broker, true).await;
    for pop in [Pop::queue("q"), Pop::partition("q", "p").auto_ack(), Pop::discover().set("namespace", "x")] {
        let reply = broker.pop_reply(&pop).await.expect(204);
        assert_eq!(reply.text, "");
    }
    assert_eq!(parked.await.unwrap().status, 204);
    assert_eq!(broker.db.find_cursor("q", "p", "__QUEUE_MODE__").await, None, "nothing was read or registered");
    let conflating = Pop::queue("q").group("g").set("conflation", "true");
    let reply = broker.pop_reply(&conflating).await.expect(200);
    assert_eq!(reply.json(), json!({ "messages": [], "paused": true, "conflation": true }));
    assert_eq!(push(&broker, "p", ["n"]).await[0].status, "queued", "pushes go on");
    pop_mode(&broker, false).await;
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["m", "n"]);
}

/// Replays cannot be spooled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_wait_for_the_end_of_maintenance() {
    let broker = TestBroker::start().await;
    push_mode(&broker, true).await;
    let target = format!("/api/v1/dlq/{}/replay", uuid::Uuid::new_v4());
    let reply = broker.post_json(&target, &json!({})).await.expect(503).json();
    assert_eq!((&reply["result"], &reply["dlqRowRemoved"]), (&json!("maintenance"), &json!(false)));
    push_mode(&broker, false).await;
}

/// A directory that cannot be written: the items fail, and under maintenance the request does too. It heals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spool_that_cannot_be_written_fails_the_items() {
    let dir = TempDir::with_prefix("regent-it-spool-").unwrap();
    let spool = dir.path().join("spool");
    let broker = spooling(&spool).await;
    push_mode(&broker, true).await;
    std::fs::rename(&spool, dir.path().join("aside")).unwrap();
    let item = json!({ "items": [{ "queue": "q", "partition": "p", "transactionId": "a", "payload": 1 }] });
    let reply = broker.post_json("/api/v1/push", &item).await.expect(500).json();
    assert_eq!(reply[0]["status"], "failed");
    assert!(reply[0]["error"].is_string(), "{reply}");
    assert_eq!(broker.get("/api/v1/status/buffers").await.json()["failed"], 1);
    std::fs::rename(dir.path().join("aside"), &spool).unwrap();
    assert_eq!(push(&broker, "p", ["b"]).await[0].status, "buffered");
    push_mode(&broker, false).await;
    drained(&broker).await;
    let ids: Vec<String> = read(&broker, "p").await.into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids, ["b"], "failed means stored nowhere");
}

/// Bounded: beyond its size the spool takes nothing more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_spool_refuses() {
    let broker = TestBroker::tuned(crate::harness::Road::Fused, |config| config.spool.mib_max = 1).await;
    push_mode(&broker, true).await;
    let item = |id: &str| json!({ "items": [{ "queue": "q", "transactionId": id, "payload": "x".repeat(600_000) }] });
    broker.post_json("/api/v1/push", &item("a")).await.expect(201);
    let reply = broker.post_json("/api/v1/push", &item("b")).await.expect(500).json();
    assert_eq!((&reply[0]["status"], &reply[0]["error"]), (&json!("failed"), &json!("the spool is full")));
    push_mode(&broker, false).await;
    drained(&broker).await;
    assert_eq!(broker.pop(&Pop::queue("q").batch(10)).await.ids(), ["a"]);
}

/// Ruling 4: no plaintext on disk where the queue encrypts, nor where this broker does not know whether it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_queue_is_never_plain_on_disk() {
    for has_key in [true, false] {
        let dir = TempDir::with_prefix("regent-it-spool-").unwrap();
        let spool = dir.path().to_owned();
        let broker = TestBroker::tuned(crate::harness::Road::Fused, |config| {
            config.spool.file_buffer_dir = Some(spool);
            if has_key {
                let env = [("QUEEN_ENCRYPTION_KEY", "ab".repeat(32))];
                let env = [(env[0].0, env[0].1.as_str())];
                let keyed = regent::config::Config::from_parts(["regent"], &env.into()).unwrap();
                config.security = keyed.security;
            }
        })
        .await;
        // Options that were cached before would be unknown again, and their messages sealed instead of refused.
        broker.db.listened_to().await;
        broker.configure("secret", json!({ "encryptionEnabled": true })).await;
        broker.configure("open", json!({})).await;
        push_mode(&broker, true).await;
        for queue in ["secret", "unknown", "open"] {
            let item =
                json!({ "items": [{ "queue": queue, "transactionId": queue, "payload": format!("text of {queue}") }] });
            let reply = broker.post_json("/api/v1/push", &item).await;
            let expected = if queue == "secret" && !has_key { "failed" } else { "buffered" };
            assert_eq!(reply.json()[0]["status"], expected, "{queue}");
        }
        let bytes = bytes_on_disk(dir.path());
        assert!(!holds(&bytes, "text of secret") && !holds(&bytes, "text of unknown"));
        assert!(holds(&bytes, "text of open"));
        push_mode(&broker, false).await;
        drained(&broker).await;
        for queue in ["secret", "unknown", "open"].into_iter().skip(usize::from(!has_key)) {
            let popped = broker.pop(&Pop::queue(queue)).await;
            assert_eq!(popped.messages[0].data, json!(format!("text of {queue}")));
        }
        let encrypted: Vec<u8> = bytes_on_disk(dir.path());
        assert!(!holds(&encrypted, "text of"), "drained files are gone");
    }
}
