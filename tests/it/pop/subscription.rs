//! Where a group starts: the request's intent (`spec/push-pop.md` §7.10).

use crate::harness::{Pop, TestBroker, numbered};

fn pop(group: &str) -> Pop {
    Pop::queue("q").group(group)
}

/// *new* is the default: the first pop is empty, later messages come, earlier ones never.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_group_skips_the_backlog_and_gets_what_follows() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old"]).await;
    for (group, query) in [
        ("default", vec![]),
        ("new", vec![("subscriptionMode", "new")]),
        ("legacy", vec![("subscriptionMode", "new-only")]),
        ("now", vec![("subscriptionFrom", "now")]),
        ("now-beats-all", vec![("subscriptionMode", "all"), ("subscriptionFrom", "now")]),
        ("garbage", vec![("subscriptionFrom", "yesterday-ish")]),
        ("empty", vec![("subscriptionMode", ""), ("subscriptionFrom", "")]),
    ] {
        let first = query.iter().fold(pop(group), |pop, (key, value)| pop.set(key, value));
        assert!(broker.pop(&first).await.is_empty(), "{group}: the first pop");
        broker.push_ids("q", "p", [format!("after-{group}")]).await;
        let popped = broker.pop(&first).await;
        assert_eq!(popped.ids().first(), Some(&format!("after-{group}").as_str()), "{group}");
    }
}

/// *all* and any other word: from the oldest retained message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_or_any_other_word_starts_at_the_beginning() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old1", "old2"]).await;
    for mode in ["all", "from_beginning", "earliest", "NEW-ish", "0"] {
        let popped = broker.pop(&pop(mode).set("subscriptionMode", mode)).await;
        assert_eq!(popped.ids(), ["old1", "old2"], "{mode}");
    }
    let unparsable = pop("u").all().set("subscriptionFrom", "not-a-date");
    assert_eq!(broker.pop(&unparsable).await.ids(), ["old1", "old2"], "an unparsable subscriptionFrom is ignored");
}

/// Queue mode never skips backlog, whatever is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_mode_starts_at_the_beginning() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old"]).await;
    let popped = broker.pop(&Pop::queue("q").set("subscriptionMode", "new").set("subscriptionFrom", "now")).await;
    assert_eq!(popped.ids(), ["old"]);
    broker.push_ids("r", "p", ["old"]).await;
    let popped = broker.pop(&Pop::partition("r", "p").set("subscriptionMode", "new")).await;
    assert_eq!(popped.ids(), ["old"]);
}

/// *timestamp* t: from the first segment with `created_at >= t`, whatever the mode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timestamp_starts_at_the_first_segment_not_older() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["s0a", "s0b"]).await;
    broker.db.age(100).await;
    broker.push_ids("q", "p", ["s1"]).await;
    broker.db.age(100).await;
    broker.push_ids("q", "p", ["s2"]).await;
    let stamp = async |ago: f64| {
        let sql = "SELECT to_char((now() - make_interval(secs => $1)) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')";
        sqlx::query_scalar::<_, String>(sql).bind(ago).fetch_one(&broker.db.pool).await.unwrap()
    };
    let before_all = stamp(1000.0).await;
    let middle = stamp(150.0).await;
    let newest = stamp(50.0).await;
    let future = stamp(-1000.0).await;
    let offset_form = middle.replace('Z', "+00:00");
    for (group, mode, from, expected) in [
        ("t0", "all", &before_all, &["s0a", "s0b", "s1", "s2"][..]),
        ("t1", "new", &middle, &["s1", "s2"]),
        ("t2", "", &newest, &["s2"]),
        ("t3", "new", &offset_form, &["s1", "s2"]),
        ("t4", "all", &future, &[]),
    ] {
        let popped = broker.pop(&pop(group).set("subscriptionMode", mode).set("subscriptionFrom", from)).await;
        assert_eq!(popped.ids(), expected, "{group}: {from}");
    }
    broker.push_ids("q", "p", ["later"]).await;
    assert_eq!(broker.pop(&pop("t4")).await.ids(), ["later"], "a future t means from now");
}

/// A stamp that equals a segment's own instant includes it, to the microsecond.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timestamp_includes_the_segment_of_that_very_instant() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.db.age(10).await;
    broker.push_ids("q", "p", ["b"]).await;
    let all = broker.pop(&pop("look").all()).await;
    let popped = broker.pop(&pop("exact").set("subscriptionFrom", &all.messages[1].created_at)).await;
    assert_eq!(popped.ids(), ["b"]);
}

/// What a group skipped is not counted as consumed, whether its cursor was made by the claim or beforehand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_skipped_was_not_consumed() {
    let broker = TestBroker::start().await;
    let consumed = async || {
        let status = broker.get("/api/v1/status/queues/q").await.expect(200).json();
        status["partitions"][0]["cursor"]["totalConsumed"].as_i64().unwrap()
    };
    for (before, query) in [(0, Pop::queue("q").group("g")), (2, Pop::partition("q", "p").group("h").auto_ack())] {
        broker.push_ids("q", "p", [format!("old{before}"), format!("older{before}")]).await;
        assert!(broker.pop(&query).await.is_empty());
        broker.push_ids("q", "p", [format!("new{before}"), format!("newer{before}")]).await;
        let popped = broker.pop(&query.clone().batch(10)).await;
        assert_eq!(popped.ids(), [format!("new{before}"), format!("newer{before}")]);
        if before == 0 {
            assert_eq!(consumed().await, 0);
            broker.ack("g", popped.items("completed")).await;
        }
        assert_eq!(consumed().await, before + 2);
    }
}

/// The choice is stored at first contact; later modes are ignored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_modes_are_ignored() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old"]).await;
    assert!(broker.pop(&pop("g").set("subscriptionMode", "new")).await.is_empty());
    assert!(broker.pop(&pop("g").all()).await.is_empty());
    assert!(broker.pop(&pop("g").set("subscriptionFrom", "2020-01-01T00:00:00Z")).await.is_empty());
    assert!(broker.pop(&Pop::partition("q", "p").group("g").all()).await.is_empty());
    broker.push_ids("q", "p2", ["in a later partition"]).await;
    assert_eq!(broker.pop(&pop("g").all()).await.ids(), ["in a later partition"]);
    let broker = broker.restart().await;
    assert!(broker.pop(&Pop::partition("q", "p").group("g").all()).await.is_empty(), "also after a restart");
}

/// A partition born after the registration is delivered whole, to *new* and *timestamp* groups too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_born_later_is_delivered_whole() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "old", ["o"]).await;
    assert!(broker.pop(&pop("new")).await.is_empty());
    assert!(broker.pop(&pop("future").set("subscriptionFrom", "2099-01-01T00:00:00Z")).await.is_empty());
    for n in 0..3 {
        broker.push_ids("q", "born", [format!("b{n}")]).await;
    }
    assert_eq!(broker.pop(&pop("new")).await.ids(), ["b0", "b1", "b2"]);
    assert_eq!(broker.pop(&pop("new")).await.ids(), Vec::<&str>::new());
}

/// A group may subscribe before the queue exists; *all* of a later queue is everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_may_come_before_the_queue() {
    let broker = TestBroker::start().await;
    assert!(broker.pop(&pop("early")).await.is_empty());
    assert!(broker.pop(&pop("early-all").all()).await.is_empty());
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    assert_eq!(broker.pop(&pop("early")).await.ids(), ["m0", "m1", "m2"]);
    assert_eq!(broker.pop(&pop("early-all")).await.ids(), ["m0", "m1", "m2"]);
}

/// *all* starts at the oldest retained message when retention has taken the head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_starts_at_the_oldest_retained() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["gone"]).await;
    broker.push_ids("q", "p", ["kept"]).await;
    broker.db.execute("DELETE FROM queen.log_segments WHERE base_offset = 0").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 1").await;
    assert_eq!(broker.pop(&pop("g").all()).await.ids(), ["kept"]);
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 0, "just below the oldest retained offset");
}
