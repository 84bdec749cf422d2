//! A pop whose connection breaks (I11, I15).

use crate::harness::{Cut, PATIENCE, Pop, Road, TestBroker, eventually, numbered};

/// A claim in doubt is an error, never a silent `204`, and its lease ends by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_claim_is_an_error_and_redelivers() {
    for cut in [Cut::Before, Cut::After] {
        let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
        broker.push_ids("q", "p", numbered("m", 0..3)).await;
        let pop = Pop::queue("q").group("g").all().lease(1);
        let warm = broker.pop(&pop).await;
        broker.ack("g", warm.items("retry")).await;
        proxy.arm(cut, b"COMMIT");
        // A claim in one statement has no COMMIT of its own; then nothing is cut and this is a plain pop.
        let reply = broker.pop_reply(&pop).await;
        assert!(matches!(reply.status, 200 | 500 | 503), "{cut:?}: {} {}", reply.status, reply.text);
        if reply.status != 200 {
            let text = reply.json()["error"].as_str().unwrap_or_default().to_owned();
            assert!(text.contains("connection"), "§9: a consume loop must survive it: {text}");
        }
        eventually(PATIENCE, async || {
            let popped = broker.pop(&pop).await;
            let acks = broker.ack("g", popped.items("completed")).await;
            popped.messages.len() == 3 && acks.iter().all(|r| r.success)
        })
        .await;
    }
}

/// `autoAck` around its COMMIT: what was delivered is committed, what is not committed comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_auto_ack_pop_delivers_at_most_once() {
    for cut in [Cut::Before, Cut::After] {
        let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
        broker.push_ids("q", "p", numbered("m", 0..3)).await;
        let pop = Pop::queue("q").group("g").all().batch(1).auto_ack();
        assert_eq!(broker.pop(&pop).await.ids(), ["m0"]);
        proxy.arm(cut, b"COMMIT");
        let reply = broker.pop_reply(&pop).await;
        assert!(!proxy.is_armed(), "the pop met the cut");
        assert!(matches!(reply.status, 200 | 500 | 503), "{cut:?}: {} {}", reply.status, reply.text);
        let committed = broker.db.cursor("q", "p", "g").await.committed;
        if reply.status == 200 {
            assert_eq!(committed, 1, "delivered, so committed");
        }
        // The server may still hold the row for the transaction that lost its client: a waiting pop looks again.
        let next = broker.pop(&pop.clone().wait_ms(5_000)).await;
        assert_eq!(next.ids(), [format!("m{}", committed + 1)], "{cut:?}");
    }
}
