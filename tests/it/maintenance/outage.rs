//! The spool while PostgreSQL is away (design §6, README rulings 2 and 3).

use serde_json::json;

use super::{drained, push, read};
use crate::harness::{Broker, Database, PATIENCE, Proxy, Road, TestBroker, eventually, numbered};

/// Pushes of an outage answer `buffered`, and reach PostgreSQL in order, once, under their answered ids; also at window 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_of_an_outage_arrive_once_and_in_order() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    push(&broker, "p", ["before"]).await;
    proxy.go_down();
    let mut told = Vec::new();
    for round in 0..4 {
        for result in push(&broker, "p", numbered(&format!("r{round}-"), 0..3)).await {
            assert_eq!(result.status, "buffered", "{result:?}");
            told.push((result.message_id, result.transaction_id));
        }
    }
    assert_eq!(broker.get("/api/v1/status/buffers").await.expect(200).json()["dbHealthy"], false);
    proxy.come_back();
    eventually(PATIENCE, || broker.is_healthy()).await;
    for round in 4..8 {
        for result in push(&broker, "p", numbered(&format!("r{round}-"), 0..3)).await {
            assert!(matches!(result.status.as_str(), "buffered" | "queued"), "{result:?}");
            told.push((result.message_id, result.transaction_id));
        }
    }
    drained(&broker).await;
    assert_eq!(read(&broker, "p").await[1..], told);
    assert_eq!(push(&broker, "p", ["direct"]).await[0].status, "queued", "direct again");
}

/// README ruling 3: a broker that has not reached its database yet takes pushes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_starts_without_its_database_spools() {
    let db = Database::migrated().await;
    let proxy = Proxy::to(&db).await;
    proxy.go_down();
    let broker = Broker::start_impatient(&proxy.url, Road::Fused).await;
    let told = push(&broker, "p", numbered("m", 0..3)).await;
    assert!(told.iter().all(|result| result.status == "buffered"), "{told:?}");
    assert_eq!(super::modes(&broker).await["bufferedMessages"], 3);
    proxy.come_back();
    drained(&broker).await;
    let told: Vec<_> = told.into_iter().map(|r| (r.message_id, r.transaction_id)).collect();
    assert_eq!(read(&broker, "p").await, told);
}
