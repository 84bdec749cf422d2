//! What one broker does to a group, the others know (`spec/admin.md` §7.5, §7.6).

use std::time::{Duration, Instant};

use super::{GROUP, STALE, beginning, delete_group, drain, end, seek, seek_partition};
use crate::harness::{PATIENCE, Pop, TestBroker, eventually, numbered};

/// §7.5: after a backward seek a pop on any broker finds the messages: 3 of 3 within 3.75 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_on_one_is_popped_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for lane in 0..10 {
        a.push_ids("q", &format!("p{lane}"), [format!("m{lane}")]).await;
    }
    for client in [&*a, &*b] {
        drain(client, "q", GROUP).await;
    }
    for (seeker, reader) in [(&*a, &*b), (&*b, &*a), (&*a, &*a)] {
        assert_eq!(seek(seeker, GROUP, "q", beginning()).await, 10);
        let (start, mut count) = (Instant::now(), 0);
        eventually(PATIENCE, async || {
            count += drain(reader, "q", GROUP).await.len();
            count == 10
        })
        .await;
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    }
}

/// Waiting pops are woken, whichever way they wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_wakes_pops_that_wait_on_either_broker() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("ns.task", "p", ["m0", "m1"]).await;
    drain(&a, "ns.task", GROUP).await;
    for by_partition in [false, true] {
        for client in [(*a).clone(), (*b).clone()] {
            for pop in [
                Pop::queue("ns.task").group(GROUP),
                Pop::partition("ns.task", "p").group(GROUP),
                Pop::discover().set("namespace", "ns").group(GROUP),
            ] {
                let waiting = {
                    let (client, pop) = (client.clone(), pop.batch(10).wait_ms(20_000));
                    tokio::spawn(async move { (client.pop(&pop).await, Instant::now()) })
                };
                assert!(client.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty(), "it parks meanwhile");
                assert!(!waiting.is_finished());
                let sent = Instant::now();
                if by_partition {
                    seek_partition(&a, GROUP, "ns.task", "p", beginning()).await;
                } else {
                    seek(&a, GROUP, "ns.task", beginning()).await;
                }
                let (popped, at) = waiting.await.unwrap();
                assert_eq!(popped.ids(), ["m0", "m1"]);
                assert!(at.saturating_duration_since(sent) < Duration::from_secs(2), "{:?}", at - sent);
                client.ack(GROUP, popped.items("completed")).await;
            }
        }
    }
}

/// The lease is of one broker, the seek of the other: the ack is refused on both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_one_is_void_after_a_seek_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("q", "p", numbered("m", 0..3)).await;
    for by_partition in [false, true] {
        let popped = a.pop(&Pop::queue("q").group(GROUP).all().batch(10).lease(3600)).await;
        assert_eq!(popped.ids().len(), 3);
        if by_partition {
            seek_partition(&b, GROUP, "q", "p", beginning()).await;
        } else {
            seek(&b, GROUP, "q", beginning()).await;
        }
        // At once, before any word of it can have come; and again.
        for client in [&*a, &*b, &*a] {
            let results = client.ack(GROUP, popped.items("completed")).await;
            assert!(results.iter().all(|r| r.error.as_deref() == Some(STALE)), "{results:?}");
        }
        // The holder's own index believed the partition leased for an hour.
        let mut again = Vec::new();
        eventually(Duration::from_secs(3), async || {
            again = drain(&a, "q", GROUP).await;
            !again.is_empty()
        })
        .await;
        assert_eq!(again, ["m0", "m1", "m2"]);
        seek(&a, GROUP, "q", beginning()).await;
    }
}

/// A seek to the end frees a leased partition; what comes next is delivered at once on the other broker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_seek_to_the_end_the_next_message_is_delivered_everywhere() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("q", "p", ["m0"]).await;
    assert_eq!(b.pop(&Pop::queue("q").group(GROUP).all().lease(3600)).await.ids(), ["m0"]);
    seek(&a, GROUP, "q", end()).await;
    let client = (*b).clone();
    let waiting = tokio::spawn(async move { client.pop(&Pop::queue("q").group(GROUP).wait_ms(20_000)).await });
    assert!(b.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty());
    let start = Instant::now();
    a.push_ids("q", "p", ["m1"]).await;
    assert_eq!(waiting.await.unwrap().ids(), ["m1"]);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// A group that is deleted on one broker is a stranger on the other, which has its key, its marks and its leases cached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_deleted_on_one_is_a_first_contact_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for lane in 0..3 {
        a.push_ids("q", &format!("p{lane}"), [format!("m{lane}")]).await;
    }
    for query in ["", "?deleteMetadata=false", ""] {
        assert_eq!(drain(&b, "q", GROUP).await.len(), 3, "{query}");
        assert!(b.pop(&Pop::partition("q", "p1").group(GROUP).all()).await.is_empty());
        assert_eq!(delete_group(&a, GROUP, None, query).await, 3);
        let mut ids = Vec::new();
        eventually(Duration::from_secs(3), async || {
            ids.extend(drain(&b, "q", GROUP).await);
            ids.len() == 3
        })
        .await;
        ids.sort();
        assert_eq!(ids, ["m0", "m1", "m2"]);
        delete_group(&b, GROUP, Some("q"), "").await;
    }
    // By partition, where no index is asked.
    assert_eq!(b.pop(&Pop::partition("q", "p1").group(GROUP).all().auto_ack()).await.ids(), ["m1"]);
    delete_group(&a, GROUP, None, "").await;
    assert_eq!(b.pop(&Pop::partition("q", "p1").group(GROUP).all()).await.ids(), ["m1"], "at once, heard of it or not");
}

/// The word of a deletion may be lost: whoever finds the group gone starts anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_nobody_was_told_of_is_found_out() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0"]).await;
    let behind_its_back = async || {
        broker.db.execute("DELETE FROM queen.log_consumers").await;
        broker.db.execute("DELETE FROM queen.consumer_groups").await;
    };
    drain(&broker, "q", GROUP).await;
    behind_its_back().await;
    assert_eq!(broker.pop(&Pop::partition("q", "p").group(GROUP).all()).await.ids(), ["m0"]);
    behind_its_back().await;
    assert_eq!(drain(&broker, "q", GROUP).await, ["m0"]);
    behind_its_back().await;
    let client = (*broker).clone();
    let waiting =
        tokio::spawn(async move { client.pop(&Pop::queue("q").group(GROUP).all().batch(10).wait_ms(20_000)).await });
    assert!(broker.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty());
    broker.push_ids("q", "p", ["m1"]).await;
    let start = Instant::now();
    assert_eq!(waiting.await.unwrap().ids(), ["m0", "m1"], "a first contact");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}
