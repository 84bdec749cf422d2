//! Sizes: of a body, of a batch, and names that need quoting somewhere (`spec/push-pop.md` §2.7, §9).

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{Pop, PushResult, TestBroker, exchange, numbered, open};

const BODY_BYTES_MAX: usize = 64 * 1024 * 1024;

/// §2.7: exactly 64 MiB passes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_of_exactly_64_mib_is_taken() {
    let broker = TestBroker::start().await;
    let (head, tail) = (r#"{"items":[{"queue":"q","transactionId":"big","payload":""#, r#""}]}"#);
    let mut body = String::with_capacity(BODY_BYTES_MAX);
    body.push_str(head);
    body.push_str(&"x".repeat(BODY_BYTES_MAX - head.len() - tail.len()));
    body.push_str(tail);
    let results: Vec<PushResult> = broker.push_body(body).await.expect(201).decode();
    assert_eq!((results.len(), results[0].status.as_str()), (1, "queued"));
    assert_eq!(broker.db.last_offset("q", "Default").await, Some(0));
}

/// §2.7, §14 no. 19: one byte more is a 413 from the length alone, in plain text, and nothing is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_length_above_64_mib_is_a_413_in_plain_text() {
    let broker = TestBroker::start().await;
    for path in ["/api/v1/push", "/api/v1/ack/batch", "/api/v1/configure"] {
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            BODY_BYTES_MAX + 1
        );
        let reply = exchange(broker.address, request.as_bytes()).await;
        assert_eq!(reply.status, 413, "{path}");
        assert!(!reply.body.starts_with(b"{"), "not the JSON envelope");
        assert!(reply.header("content-type").is_none_or(|t| t.starts_with("text/plain")), "{reply:?}");
    }
    assert!(broker.is_healthy().await);
}

/// §2.7: also without a declared length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunked_body_above_64_mib_is_a_413() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    let head = b"POST /api/v1/push HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut stream = open(broker.address, head).await;
    let mut chunk = format!("{:x}\r\n", 1 << 20).into_bytes();
    chunk.extend(std::iter::repeat_n(b' ', 1 << 20));
    chunk.extend(b"\r\n");
    for _ in 0..65 {
        if stream.write_all(&chunk).await.is_err() {
            break; // the broker has closed its side: what counts is what it said
        }
    }
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while !answer.windows(4).any(|w| w == b"\r\n\r\n") {
        match stream.read(&mut buffer).await {
            Ok(n) if n > 0 => answer.extend(&buffer[..n]),
            _ => break,
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert_eq!(broker.db.row_counts().await, before);
    assert!(broker.is_healthy().await);
}

/// §9: items per push are bounded by the body alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_items_in_one_push() {
    let broker = TestBroker::start().await;
    let results = broker.push_ids("q", "p", numbered("m", 0..10_000)).await;
    assert!(results.iter().enumerate().all(|(n, r)| r.index == n as i64 && r.offset == Some(n as i64)));
    let popped = broker.pop(&Pop::queue("q").batch(10_000)).await;
    assert_eq!(popped.ids(), numbered("m", 0..10_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_items_over_a_thousand_partitions() {
    let broker = TestBroker::start().await;
    let items: Vec<_> = (0..10_000)
        .map(|n| json!({ "queue": "q", "partition": format!("p{}", n % 1000), "transactionId": format!("m{n}"), "payload": n }))
        .collect();
    let results = broker.push(json!(items)).await;
    assert!(results.iter().enumerate().all(|(n, r)| r.status == "queued" && r.offset == Some(n as i64 / 1000)));
    assert_eq!(broker.db.row_counts().await["log_partitions"], 1000);
}

/// §1.1: names with anything in them are addressable on every route.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn awkward_names_round_trip() {
    let broker = TestBroker::start().await;
    let long = "p".repeat(200);
    let names = [
        "with space",
        "a/b",
        "a%2Fb",
        "100%",
        "it's",
        r#"say "hi""#,
        r"back\slash",
        "semi;colon--",
        "a:b",
        "?x=1&y=2#z",
        "日本語",
        "naïve",
        "😀🚀",
        "tab\there",
        "line\nbreak",
        "$1",
        "{queue}",
        &long,
    ];
    for name in names {
        let id = format!("{name}/id");
        let pushed = broker.push_ids(name, name, [&id]).await;
        assert_eq!(pushed[0].queue, name);
        let popped = broker.pop(&Pop::queue(name).group(name).all()).await;
        assert_eq!((popped.queue.as_str(), popped.partition.as_str()), (name, name));
        assert_eq!((popped.consumer_group.as_str(), popped.ids()), (name, vec![id.as_str()]));
        let popped_again = broker.pop(&Pop::partition(name, name).group("targeted").all()).await;
        assert_eq!(popped_again.ids(), [id.as_str()], "{name:?}");
        let acks = broker.ack(name, popped.items("completed")).await;
        assert!(acks[0].success && acks[0].lease_released, "{name:?}: {acks:?}");
        assert_eq!(broker.delete_queue(name).await["deleted"], true, "{name:?}");
    }
    assert!(broker.db.queue_names().await.is_empty());
}
