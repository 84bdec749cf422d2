//! Hostile input on every route: a clear 4xx or the specified answer, nothing written, and the broker goes on.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Pop, TestBroker, exchange, numbered, open};

/// A broker with one leased message, and what its tables held then.
struct Scene {
    broker: TestBroker,
    rows: BTreeMap<String, i64>,
}

impl Scene {
    async fn set() -> Scene {
        let broker = TestBroker::start().await;
        broker.push_ids("q", "p", ["m"]).await;
        broker.pop(&Pop::queue("q").group("g").all()).await;
        let rows = broker.db.row_counts().await;
        Scene { broker, rows }
    }

    /// Nothing was written, nothing moved, and the broker answers.
    async fn unharmed(&self, what: &str) {
        assert_eq!(self.broker.db.row_counts().await, self.rows, "{what}");
        let cursor = self.broker.db.cursor("q", "p", "g").await;
        assert_eq!((cursor.committed, cursor.leased, cursor.batch_retry_count), (-1, true, 0), "{what}");
        assert!(self.broker.is_healthy().await, "{what}");
    }
}

const POSTS: [&str; 4] = ["/api/v1/push", "/api/v1/ack", "/api/v1/ack/batch", "/api/v1/configure"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_json_is_refused_on_every_route() {
    let scene = Scene::set().await;
    let deep = "[".repeat(100_000);
    let deep_object = r#"{"items":"#.repeat(50_000);
    for path in POSTS {
        for body in [
            "",
            " ",
            "{",
            "}",
            "[",
            "nul",
            "{\"a\"}",
            "{'queue':'q'}",
            "{\"queue\":\"q\",}",
            "\u{feff}{}",
            "{\"queue\":\"\\x\"}",
            "NaN",
            &deep,
            &deep_object,
        ] {
            let reply = scene.broker.post(path, body.to_owned()).await;
            let start: String = body.chars().take(30).collect();
            assert_eq!(reply.status, 400, "{path} {start}: {}", reply.text);
            assert!(reply.json()["error"].is_string(), "{path} {start}: {}", reply.text);
        }
    }
    scene.unharmed("malformed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_of_the_wrong_shape_is_refused_on_every_route() {
    let scene = Scene::set().await;
    for path in POSTS {
        for body in
            ["[]", "null", "true", "3", "\"text\"", "{}", "[[]]", r#"{"items":7,"acknowledgments":7,"queue":7}"#]
        {
            if (path, body) == ("/api/v1/ack", "{}") || (path.ends_with("/ack") && body.starts_with("{\"items\"")) {
                continue; // a single ack without any field is legal: it resolves to nothing
            }
            let reply = scene.broker.post(path, body).await;
            assert_eq!(reply.status, 400, "{path} {body}: {}", reply.text);
            assert!(reply.json()["error"].is_string(), "{path} {body}: {}", reply.text);
        }
    }
    let reply = scene.broker.post("/api/v1/ack", "{}").await.expect(200).json();
    assert_eq!(reply[0]["success"], false, "{reply}");
    scene.unharmed("wrong shape").await;
}

/// An array is not an object whose keys were left out, however well its elements would fit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_is_no_object() {
    let scene = Scene::set().await;
    for (path, body) in [
        ("/api/v1/push", r#"[[]]"#),
        ("/api/v1/push", r#"[[{"queue":"q","payload":1}]]"#),
        ("/api/v1/push", r#"{"items":[["q","p","t",1]]}"#),
        ("/api/v1/push", r#"{"items":[["q","p",1,"t"]]}"#),
        ("/api/v1/push", r#"{"items":[["q",1]]}"#),
        ("/api/v1/ack/batch", r#"["g",[]]"#),
        ("/api/v1/ack/batch", r#"[[],"g"]"#),
        ("/api/v1/ack/batch", r#"[[]]"#),
        ("/api/v1/ack/batch", r#"{"acknowledgments":[["m","x","completed","g","l","e"]]}"#),
        ("/api/v1/ack/batch", r#"{"acknowledgments":[[]]}"#),
        ("/api/v1/ack", r#"["m","x","completed","g","l","e"]"#),
        ("/api/v1/configure", r#"["fresh",{}]"#),
        ("/api/v1/configure", r#"["fresh"]"#),
        ("/api/v1/configure", r#"{"queue":"fresh","options":[1]}"#),
    ] {
        let reply = scene.broker.post(path, body).await;
        assert_eq!(reply.status, 400, "{path} {body}: {}", reply.text);
    }
    scene.unharmed("arrays").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_uuid_ids_are_answered_per_item() {
    let scene = Scene::set().await;
    let long = "f".repeat(100_000);
    for id in ["x", "", "'; DROP TABLE queen.queues; --", "00000000-0000-0000-0000-00000000000", "\0", "💥", &long] {
        let item = json!({ "transactionId": id, "partitionId": id, "leaseId": id, "status": "completed" });
        let body = json!({ "consumerGroup": "g", "acknowledgments": [item, item] });
        let reply = scene.broker.ack_reply(&body).await;
        assert!(matches!(reply.status, 200 | 400), "{}", reply.status);
        if reply.status == 200 {
            let results = reply.json();
            assert_eq!(results.as_array().unwrap().len(), 2);
            assert!(results.as_array().unwrap().iter().all(|r| r["success"] == false && r["error"].is_string()));
        }
    }
    scene.unharmed("ids").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_in_names_is_only_a_name() {
    let broker = TestBroker::start().await;
    let names =
        ["'; DROP TABLE queen.log_segments; --", "\" OR 1=1 --", "$1", "%s", "\\'; SELECT pg_sleep(9); --", "{}"];
    for name in names {
        broker.push_ids(name, name, [name]).await;
        let popped = broker.pop(&Pop::queue(name).group(name).all()).await;
        assert_eq!(popped.ids(), [name]);
        assert!(broker.ack(name, vec![popped.messages[0].failed(name)]).await[0].success);
        let popped = broker.pop(&Pop::queue(name).group(name)).await;
        assert!(broker.ack(name, vec![popped.messages[0].item("dlq")]).await[0].dlq);
    }
    assert_eq!(broker.db.dead_letters().await.len(), names.len());
}

/// A NUL cannot be stored as text: in an ack's fields it is refused or resolves to nothing, never a 500.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nul_never_reaches_the_database() {
    let scene = Scene::set().await;
    for body in [
        json!({ "consumerGroup": "a\0b", "acknowledgments": [{ "transactionId": "m", "partitionId": uuid::Uuid::nil() }] }),
        json!({ "consumerGroup": "g", "acknowledgments": [{ "transactionId": "\0", "partitionId": uuid::Uuid::nil() }] }),
        json!({ "consumerGroup": "g", "acknowledgments": [{ "transactionId": "m", "partitionId": "\0" }] }),
    ] {
        let reply = scene.broker.ack_reply(&body).await;
        assert!(matches!(reply.status, 200 | 400), "{}: {}", reply.status, reply.text);
    }
    scene.unharmed("NUL in an ack").await;
    // In a reason it can reach the dead-letter row: whatever the broker makes of it, the verdict is a clear one.
    let popped_again = {
        scene.broker.db.expire_leases().await;
        scene.broker.pop(&Pop::partition("q", "p").group("g")).await
    };
    let mut item = popped_again.messages[0].item("dlq");
    item["error"] = json!("because\0of this");
    let reply = scene.broker.ack_reply(&json!({ "consumerGroup": "g", "acknowledgments": [item] })).await;
    assert!(matches!(reply.status, 200 | 400), "{}: {}", reply.status, reply.text);
    let filed = scene.broker.db.dead_letters().await.len();
    let claimed = reply.status == 200 && reply.json()[0]["dlq"] == true;
    assert_eq!(filed == 1, claimed, "the answer is what happened: {}", reply.text);
    assert!(scene.broker.is_healthy().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_items_with_one_bad_one_store_nothing() {
    let scene = Scene::set().await;
    let mut items: Vec<Value> =
        numbered("n", 0..10_000).iter().map(|id| json!({ "queue": "q", "transactionId": id, "payload": 1 })).collect();
    items[9_998]["partition"] = json!(5);
    let reply = scene.broker.push_body(json!({ "items": items }).to_string()).await;
    reply.expect_refusal(&["9998", "partition"]);
    let mut acks: Vec<Value> =
        (0..10_000).map(|n| json!({ "transactionId": "m", "partitionId": format!("{n}") })).collect();
    acks[9_999]["status"] = json!(3);
    let body = json!({ "consumerGroup": "g", "acknowledgments": acks });
    scene.broker.ack_reply(&body).await.expect_refusal(&["9999", "status"]);
    scene.unharmed("10,000 items").await;
}

/// Ten thousand acks that name ten thousand unknown partitions are as many per-item errors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_unknown_addresses_are_as_many_errors() {
    let scene = Scene::set().await;
    let acks: Vec<Value> = (0..10_000)
        .map(|_| json!({ "transactionId": "m", "partitionId": uuid::Uuid::new_v4(), "leaseId": "x" }))
        .collect();
    let results = scene.broker.ack("g", acks).await;
    assert_eq!(results.len(), 10_000);
    assert!(results.iter().all(|r| !r.success && r.error.as_deref() == Some("consumer not found")));
    scene.unharmed("unknown addresses").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn negative_and_absurd_numbers_are_taken_or_refused_cleanly() {
    let scene = Scene::set().await;
    let extremes = [i64::MIN, i64::from(i32::MIN) - 1, -1, 0, i64::from(i32::MAX) + 1, i64::MAX];
    for number in extremes {
        for parameter in ["batch", "partitions", "leaseSeconds", "timeout"] {
            let pop = Pop::queue("q").group("g").set(parameter, number);
            let reply = scene.broker.pop_reply(&pop).await;
            assert!(matches!(reply.status, 204 | 400), "{parameter}={number}: {} {}", reply.status, reply.text);
        }
        scene.broker.extend("unknown", number).await;
    }
    scene.unharmed("numbers").await;
}

/// Requests that are not HTTP, or not quite, end with their connection and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_http_harms_nobody() {
    let scene = Scene::set().await;
    for request in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/v1/push HTTP/1.1\r\nHost: r\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/v1/push HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /api/v1/push HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\0\0\0\0\0\0\0\0",
    ] {
        drop(open(scene.broker.address, request).await);
    }
    scene.unharmed("broken HTTP").await;
}

/// Methods and encodings that the message path does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_methods_are_refused() {
    let scene = Scene::set().await;
    for (method, path) in [
        (Method::GET, "/api/v1/push"),
        (Method::PUT, "/api/v1/push"),
        (Method::GET, "/api/v1/ack"),
        (Method::DELETE, "/api/v1/ack/batch"),
        (Method::POST, "/api/v1/pop/queue/q"),
        (Method::GET, "/api/v1/configure"),
        (Method::GET, "/api/v1/lease/x/extend"),
    ] {
        let reply = scene.broker.try_send(method.clone(), path, None).await.unwrap();
        assert!(matches!(reply.status, 404 | 405), "{method} {path}: {}", reply.status);
    }
    scene.unharmed("methods").await;
}

/// A very long request line is refused, not swallowed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_request_line_is_refused() {
    let scene = Scene::set().await;
    let target = format!("/api/v1/pop/queue/q?consumerGroup={}", "g".repeat(60_000));
    let request = format!("GET {target} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n");
    let reply = exchange(scene.broker.address, request.as_bytes()).await;
    assert!((400..500).contains(&reply.status), "{}", reply.status);
    scene.unharmed("a long line").await;
}
