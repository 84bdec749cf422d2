//! What a seek or a delete does to a lease, on every road of an ack (I1, I6, I13).

use super::{GROUP, STALE, beginning, delete_group, end, seek, seek_partition};
use crate::harness::{Pop, Popped, TestBroker, numbered, on_every_road};

on_every_road!(
    an_ack_of_a_lease_released_by_a_seek_is_refused,
    a_seek_in_the_middle_of_a_batch_abandons_it,
    an_ack_after_a_seek_without_a_lease_lands_where_the_cursor_is,
    an_ack_after_a_delete_finds_no_consumer,
    a_new_lease_after_a_seek_is_acked,
    acks_and_seeks_at_once_leave_one_of_their_orders,
);

async fn leased(broker: &TestBroker, count: usize) -> Popped {
    broker.push_ids("q", "p", numbered("m", 0..count)).await;
    pop(broker).await
}

async fn pop(broker: &TestBroker) -> Popped {
    broker.pop(&Pop::queue("q").group(GROUP).all().batch(100).lease(600)).await
}

async fn an_ack_of_a_lease_released_by_a_seek_is_refused(broker: &TestBroker) {
    let mut popped = leased(broker, 3).await;
    for (to, by_partition) in [(beginning(), false), (end(), false), (beginning(), true), (end(), true)] {
        if by_partition {
            seek_partition(broker, GROUP, "q", "p", to.clone()).await;
        } else {
            seek(broker, GROUP, "q", to.clone()).await;
        }
        let before = broker.db.cursor("q", "p", GROUP).await;
        assert_eq!((before.worker.clone(), before.batch_end, before.leased), (None, None, false));
        for status in ["completed", "failed", "dlq", "retry"] {
            let results = broker.ack(GROUP, popped.items(status)).await;
            assert!(results.iter().all(|r| !r.success && r.error.as_deref() == Some(STALE)), "{status}: {results:?}");
            assert!(results.iter().all(|r| !r.lease_released && !r.dlq && !r.noop), "{results:?}");
        }
        assert_eq!(broker.extend(&popped.lease_id, 60).await["renewed"], 0);
        assert_eq!(broker.db.cursor("q", "p", GROUP).await, before, "nothing moved");
        seek(broker, GROUP, "q", beginning()).await;
        popped = pop(broker).await;
        assert_eq!(popped.ids(), ["m0", "m1", "m2"]);
    }
    assert!(broker.db.dead_letters().await.is_empty());
}

async fn a_seek_in_the_middle_of_a_batch_abandons_it(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    assert!(broker.ack_one(GROUP, popped.messages[1].item("completed")).await.success);
    seek(broker, GROUP, "q", beginning()).await;
    let again = pop(broker).await;
    assert_eq!(again.ids(), ["m0", "m1", "m2", "m3"]);
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| r.error.as_deref() == Some(STALE)), "{results:?}");
    let results = broker.ack(GROUP, again.items("completed")).await;
    assert!(results.iter().all(|r| r.success && r.lease_released && !r.noop), "{results:?}");
}

async fn an_ack_after_a_seek_without_a_lease_lands_where_the_cursor_is(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    seek(broker, GROUP, "q", end()).await;
    let result = broker.ack_one(GROUP, popped.messages[0].leaseless("completed")).await;
    assert!(result.success && result.noop, "{result:?}");
    seek(broker, GROUP, "q", beginning()).await;
    let result = broker.ack_one(GROUP, popped.messages[1].leaseless("completed")).await;
    assert!(result.success && !result.noop, "{result:?}");
    assert_eq!(broker.db.cursor("q", "p", GROUP).await.committed, 1);
    assert_eq!(pop(broker).await.ids(), ["m2"]);
}

async fn an_ack_after_a_delete_finds_no_consumer(broker: &TestBroker) {
    for (n, query) in ["", "?deleteMetadata=false"].into_iter().enumerate() {
        broker.push_ids("q", "p", [format!("n{n}")]).await;
        let popped = pop(broker).await;
        assert_eq!(delete_group(broker, GROUP, Some("q"), query).await, 1);
        for status in ["completed", "failed"] {
            let results = broker.ack(GROUP, popped.items(status)).await;
            assert!(results.iter().all(|r| r.error.as_deref() == Some("consumer not found")), "{results:?}");
        }
        // The next lease is another: the old one stays void.
        let again = pop(broker).await;
        assert_eq!(again.ids().len(), n + 1);
        let results = broker.ack(GROUP, popped.items("completed")).await;
        assert!(results.iter().all(|r| r.error.as_deref() == Some(STALE)), "{results:?}");
        let results = broker.ack(GROUP, again.items("completed")).await;
        assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
        assert_eq!(delete_group(broker, GROUP, None, "").await, 1);
    }
}

async fn a_new_lease_after_a_seek_is_acked(broker: &TestBroker) {
    leased(broker, 2).await;
    for _ in 0..3 {
        seek(broker, GROUP, "q", beginning()).await;
        let popped = pop(broker).await;
        let results = broker.ack(GROUP, popped.items("completed")).await;
        assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
        assert_eq!(broker.db.cursor("q", "p", GROUP).await.committed, 1);
    }
}

/// A seek while an ack is under way: the ack came first and was undone, or came second and was refused. Never half.
async fn acks_and_seeks_at_once_leave_one_of_their_orders(broker: &TestBroker) {
    const LANES: usize = 12;
    for round in 0..8 {
        let queue = format!("q{round}");
        for lane in 0..LANES {
            broker.push_ids(&queue, &format!("p{lane}"), numbered("m", 0..3)).await;
        }
        let popped =
            broker.pop(&Pop::queue(&queue).group(GROUP).all().batch(1000).partitions(LANES as i64).lease(600)).await;
        assert_eq!(popped.messages.len(), LANES * 3);
        let to = if round % 2 == 0 { beginning() } else { end() };
        let acks = futures_util::future::join_all(
            popped
                .messages
                .chunk_by(|a, b| a.partition == b.partition)
                .map(|lane| broker.ack(GROUP, lane.iter().map(|m| m.item("completed")).collect())),
        );
        let (answers, moved) = tokio::join!(acks, seek(broker, GROUP, &queue, to.clone()));
        assert_eq!(moved, LANES as i64);
        let expected = if round % 2 == 0 { -1 } else { 2 };
        for lane in 0..LANES {
            let cursor = broker.db.cursor(&queue, &format!("p{lane}"), GROUP).await;
            assert_eq!((cursor.committed, cursor.leased, cursor.batch_end), (expected, false, None), "lane {lane}");
        }
        for result in answers.into_iter().flatten() {
            assert!(result.success || result.error.as_deref() == Some(STALE), "{result:?}");
        }
    }
    assert_eq!(broker.db.deadlocks().await, 0);
}
