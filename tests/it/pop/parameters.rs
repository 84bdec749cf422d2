//! How a pop reads its address and query (`spec/push-pop.md` §1.1, §7.2).

use crate::harness::{Pop, TestBroker, exchange};

/// §1.1: a known parameter of the wrong type is a `400` that names it, and registers nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parameter_of_the_wrong_type_is_refused_by_name() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    let before = broker.db.row_counts().await;
    let wrong = [
        ("batch", "abc"),
        ("batch", ""),
        ("batch", "1.5"),
        ("batch", "1e3"),
        ("batch", "99999999999999999999"),
        ("partitions", "many"),
        ("partitions", ""),
        ("timeout", "soon"),
        ("timeout", ""),
        ("leaseSeconds", "a minute"),
        ("leaseSeconds", ""),
        ("wait", "maybe"),
        ("wait", "2"),
        ("autoAck", "sure"),
        ("conflation", "perhaps"),
        ("autopilot", "5"),
    ];
    for pop in [Pop::queue("q"), Pop::partition("q", "p"), Pop::discover().set("namespace", "q")] {
        for (parameter, value) in wrong {
            let pop = pop.clone().group("g").set(parameter, value);
            println!("{}", pop.target());
            broker.pop_reply(&pop).await.expect_refusal(&[parameter]);
        }
    }
    assert_eq!(broker.db.row_counts().await, before);
    assert_eq!(broker.db.live_leases().await, 0);
}

/// §1.1: booleans in the spellings that clients use, any case; unknown parameters are ignored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn booleans_have_many_spellings_and_unknown_parameters_none() {
    let broker = TestBroker::start().await;
    for (n, yes) in ["true", "TRUE", "1", "yes", "Yes", "on", "ON"].into_iter().enumerate() {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
        let popped = broker.pop(&Pop::queue("q").set("autoAck", yes).set("fancy", "abc")).await;
        assert_eq!((popped.messages.len(), popped.lease_id.as_str()), (1, ""), "{yes}");
    }
    for (n, no) in ["false", "False", "0", "no", "off", "OFF"].into_iter().enumerate() {
        let id = format!("n{n}");
        broker.push_ids("r", &id, [&id]).await;
        let popped = broker.pop(&Pop::queue("r").set("autoAck", no).set("wait", no).set("autopilot", no)).await;
        assert_eq!(popped.ids(), [id.as_str()]);
        assert_ne!(popped.lease_id, "", "{no}");
    }
}

/// §1.1: empty strings count as absent; the queue-mode name given outright is queue mode (§7.10).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_or_explicit_queue_mode_group_is_queue_mode() {
    let broker = TestBroker::start().await;
    for (n, group) in ["", "__QUEUE_MODE__"].into_iter().enumerate() {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
        let pop = Pop::queue("q").group(group).set("subscriptionMode", "new").set("subscriptionFrom", "").auto_ack();
        let popped = broker.pop(&pop).await;
        assert_eq!(popped.consumer_group, "__QUEUE_MODE__");
        assert_eq!(popped.ids(), [format!("m{n}")]);
    }
    broker.push_ids("q", "p", ["last"]).await;
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["last"], "one cursor for all three spellings");
}

/// §1.1: segments are split first and decoded afterwards; a broken escape is a `400`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_escapes_are_refused() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    for target in [
        "/api/v1/pop/queue/a%zz",
        "/api/v1/pop/queue/a%2",
        "/api/v1/pop/queue/%ff%fe",
        "/api/v1/pop/queue/q/partition/%",
        "/api/v1/pop/queue/a%00b",
        "/api/v1/pop/queue/q/partition/%00",
        "/api/v1/pop/queue/q?consumerGroup=a%00b",
    ] {
        let request = format!("GET {target} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n");
        let reply = exchange(broker.address, request.as_bytes()).await;
        assert_eq!(reply.status, 400, "{target}: {}", String::from_utf8_lossy(&reply.body));
    }
    assert_eq!(broker.db.row_counts().await, before);
    assert!(broker.is_healthy().await);
}

/// §9: names above 1024 bytes are refused on the way out too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_above_1024_bytes_are_refused() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    let long = "n".repeat(1025);
    for pop in [Pop::queue(&long), Pop::partition("q", &long), Pop::queue("q").group(&long)] {
        broker.pop_reply(&pop).await.expect_refusal(&[]);
    }
    assert_eq!(broker.db.row_counts().await, before);
}

/// §1.1: a raw path with characters that clients leave unencoded is still split at the raw slashes only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unencoded_path_addresses_the_same_names() {
    let broker = TestBroker::start().await;
    broker.push_ids("a:b@c+d", "x'y", ["m"]).await;
    let request = "GET /api/v1/pop/queue/a:b@c+d/partition/x'y HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n";
    let reply = exchange(broker.address, request.as_bytes()).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
}

/// §14 no. 24: `HEAD` must not claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_claims_nothing() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    for target in [Pop::queue("q"), Pop::partition("q", "p"), Pop::discover().set("namespace", "q")] {
        let reply = broker.try_send(reqwest::Method::HEAD, &target.target(), None).await.unwrap();
        assert!(matches!(reply.status, 404 | 405), "{}", reply.status);
    }
    assert_eq!(broker.db.live_leases().await, 0);
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["a"]);
}

/// §7.3: discovery without a label is refused with its own body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovery_without_a_label_is_refused() {
    let broker = TestBroker::start().await;
    for pop in [Pop::discover(), Pop::discover().set("namespace", "").set("task", "").group("g")] {
        let reply = broker.pop_reply(&pop).await.expect(400);
        assert_eq!(reply.text, r#"{"success":false,"error":"namespace or task is required","messages":[]}"#);
    }
}

/// §7.12: conflation without a group, or with autoAck, is refused with its own body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_conflation_is_refused() {
    let broker = TestBroker::start().await;
    let reply = broker.pop_reply(&Pop::queue("q").set("conflation", "true")).await.expect(400);
    assert_eq!(reply.text, r#"{"success":false,"error":"conflation requires a consumerGroup","messages":[]}"#);
    let pop = Pop::queue("q").group("g").set("conflation", "true").auto_ack();
    let reply = broker.pop_reply(&pop).await.expect(400);
    assert_eq!(reply.text, r#"{"success":false,"error":"conflation cannot be combined with autoAck","messages":[]}"#);
}

/// §7.13: outside a grouped wildcard pop autopilot is accepted; the defaults hold and nothing is echoed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn autopilot_is_accepted_on_every_route() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b"] {
        broker.push_ids("q", partition, ["1", "2"]).await;
    }
    let popped = broker.pop(&Pop::queue("q").set("autopilot", "true")).await;
    assert_eq!((popped.partitions_claimed, popped.messages.len()), (1, 2));
    let pop = Pop::partition("q", "a").group("g").all().set("autopilot", "true");
    assert_eq!(broker.pop(&pop).await.ids(), ["1", "2"]);
    let pop = Pop::discover().set("namespace", "q").group("h").all().set("autopilot", "true").batch(1).partitions(1);
    assert_eq!(broker.pop(&pop).await.ids(), ["1"]);
}
