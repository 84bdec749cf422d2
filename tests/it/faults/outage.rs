//! PostgreSQL is away for a while (`design.md` §6, README ruling 3, `spec/security-operations.md` §10.6).

use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{Broker, Database, PATIENCE, Pop, Proxy, Road, TestBroker, eventually, numbered};

/// Every verb says so quickly, in the words that clients survive; and everything heals by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_reports_an_outage_and_heals() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all().lease(300)).await;
    proxy.go_down();
    let start = Instant::now();

    let health = broker.get("/health").await.expect(503).json();
    assert_eq!((&health["status"], &health["database"]), (&"unhealthy".into(), &"disconnected".into()));
    for pop in [Pop::queue("q"), Pop::partition("q", "p"), Pop::discover().set("namespace", "q")] {
        let reply = broker.pop_reply(&pop.group("h").all()).await.expect(503);
        assert!(reply.headers.contains_key("retry-after"), "{reply:?}");
        assert!(reply.json()["error"].as_str().unwrap().contains("connection"), "{}", reply.text);
    }
    let configure = broker.configure_reply(&json!({ "queue": "other", "options": {} })).await.expect(503);
    assert!(configure.headers.contains_key("retry-after"));
    let extend = broker.post_json(&format!("/api/v1/lease/{}/extend", popped.lease_id), &json!({})).await.expect(503);
    assert!(extend.headers.contains_key("retry-after"));
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks.iter().all(|r| !r.success && r.error.is_some()), "{acks:?}");
    let item = json!([{ "queue": "q", "partition": "p", "transactionId": "during", "payload": 1 }]);
    let pushed = broker.push(item).await.remove(0);
    assert_eq!(pushed.status, "buffered", "{pushed:?}");
    assert!(start.elapsed() < Duration::from_secs(25), "quickly: {:?}", start.elapsed());

    proxy.come_back();
    eventually(PATIENCE, || broker.is_healthy()).await;
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks.iter().all(|r| r.success), "the lease outlived the outage: {acks:?}");
    // What the spool holds goes first.
    eventually(PATIENCE, async || broker.get("/api/v1/status/buffers").await.json()["pending"] == 0).await;
    broker.push_ids("q", "p", ["after"]).await;
    let mut seen = Vec::new();
    eventually(PATIENCE, async || {
        let popped = broker.pop(&Pop::queue("q").group("g").auto_ack()).await;
        seen.extend(popped.ids().into_iter().map(str::to_owned));
        seen.contains(&"after".to_owned())
    })
    .await;
    assert_eq!(seen, ["during", "after"]);
}

/// A pop that is parked when the database goes away survives the outage, or is told of it; the next one works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parked_pop_outlives_an_outage() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    let client = broker.clone();
    let target = Pop::queue("q").wait_ms(20_000).target();
    let parked = tokio::spawn(async move { client.get(&target).await });
    assert!(broker.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty());
    proxy.go_down();
    eventually(PATIENCE, async || !broker.is_healthy().await).await;
    proxy.come_back();
    eventually(PATIENCE, || broker.is_healthy()).await;
    broker.push_ids("q", "p", ["m"]).await;
    let reply = parked.await.unwrap();
    match reply.status {
        200 => assert!(reply.text.contains("\"m\"")),
        // A pooled connection that died unnoticed may still cost a request.
        503 => eventually(PATIENCE, async || broker.pop_reply(&Pop::queue("q")).await.text.contains("\"m\"")).await,
        other => panic!("{other} {}", reply.text),
    }
}

/// README ruling 3: a broker that starts while PostgreSQL is away serves, says 503, and finishes booting later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_starts_without_its_database() {
    let db = Database::migrated().await;
    let proxy = Proxy::to(&db).await;
    proxy.go_down();
    let broker = Broker::start_impatient(&proxy.url, Road::Fused).await;
    assert_eq!(broker.get("/health").await.status, 503);
    let reply = broker.pop_reply(&Pop::queue("q")).await.expect(503);
    assert!(reply.headers.contains_key("retry-after"));
    proxy.come_back();
    eventually(Duration::from_secs(20), || broker.is_healthy()).await;
    broker.push_ids("q", "p", ["m"]).await;
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["m"]);
}

/// Stopping does not hang on a database that is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_stops_without_its_database() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("q", "p", ["m"]).await;
    proxy.go_down();
    eventually(PATIENCE, async || !broker.is_healthy().await).await;
    drop(broker); // fails the test if it takes too long
}
