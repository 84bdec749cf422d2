//! Every route of the table with hostile values in path, query and body (`spec/admin.md` §1.3): never a 5xx, never a panic
//! (the harness watches for those). The values are drawn with a fixed seed.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use regent::http::routes::ROUTES;
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::harness::{Pop, TestBroker, encode, exchange};

const ROUNDS: usize = 30;

/// Names that routes look for in a query.
const PARAMETERS: [&str; 24] = [
    "limit",
    "offset",
    "from",
    "to",
    "queue",
    "consumerGroup",
    "namespace",
    "task",
    "partition",
    "batch",
    "partitions",
    "leaseSeconds",
    "subscriptionMode",
    "subscriptionFrom",
    "status",
    "interval",
    "minLagSeconds",
    "search",
    "groupBy",
    "hostname",
    "timeout",
    "autoAck",
    "deleteMetadata",
    "ns",
];

/// Fields that routes look for in a body.
const FIELDS: [&str; 26] = [
    "queue",
    "partition",
    "items",
    "acknowledgments",
    "operations",
    "consumerGroup",
    "transactionId",
    "partitionId",
    "leaseId",
    "status",
    "seconds",
    "enabled",
    "timestamp",
    "toEnd",
    "subscriptionTimestamp",
    "options",
    "payload",
    "traceNames",
    "eventType",
    "data",
    "since",
    "cursor",
    "limit",
    "type",
    "requiredLeases",
    "error",
];

fn texts() -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        "q",
        "p",
        "g",
        "m",
        "0",
        "-1",
        "1e400",
        "NaN",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "99999999999999999999999999",
        "0x10",
        "1.5",
        "true",
        "null",
        "'; DROP TABLE queen.queues; --",
        "%",
        "_",
        "\\",
        "../../etc/passwd",
        "💥\u{202e}",
        "a\0b",
        "\u{feff}",
        "now",
        "infinity",
        "-infinity",
        "294277-01-01T00:00:00Z",
        "0000-00-00",
        "2026-13-45T99:99:99Z",
        "1970-01-01T00:00:00Z",
        "9999-12-31T23:59:59.999999999+14:00",
        "-290308-12-21 BC",
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ]
    .map(str::to_owned)
    .into();
    texts.push("n".repeat(600));
    texts.push("n".repeat(20_000));
    texts
}

fn value(random: &mut StdRng, texts: &[String], depth: usize) -> Value {
    match random.random_range(0..if depth == 0 { 7 } else { 9 }) {
        0 => Value::Null,
        1 => json!(random.random::<bool>()),
        2 => json!(*[i64::MIN, -1, 0, 1, i64::from(i32::MAX) + 1, i64::MAX].choose(random).unwrap()),
        3 => json!(*[f64::MIN, -0.0, 1e308, 5e-324, 0.5, u64::MAX as f64].choose(random).unwrap()),
        4..=6 => json!(texts.choose(random).unwrap()),
        7 => (0..random.random_range(0..4)).map(|_| value(random, texts, depth - 1)).collect(),
        _ => Value::Object(object(random, texts, depth - 1)),
    }
}

fn object(random: &mut StdRng, texts: &[String], depth: usize) -> Map<String, Value> {
    let count = random.random_range(0..8);
    (0..count).map(|_| (FIELDS.choose(random).unwrap().to_string(), value(random, texts, depth))).collect()
}

fn body(random: &mut StdRng, texts: &[String]) -> Vec<u8> {
    match random.random_range(0..10) {
        0 => Vec::new(),
        1 => b"{\"queue\":\"\xff\xfe\"}".to_vec(),
        2 => b"\xc3\x28".to_vec(),
        3 => value(random, texts, 3).to_string().into_bytes(),
        // A lone surrogate, a duplicate key, a number out of every range.
        4 => br#"{"queue":"\ud800","queue":1e999,"items":[{"queue":"\udc00"}]}"#.to_vec(),
        _ => Value::Object(object(random, texts, 4)).to_string().into_bytes(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_answers_hostile_values_with_a_server_error() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m", "n"]).await;
    broker.pop(&Pop::queue("q").group("g").all().batch(1)).await;
    let mut random = StdRng::seed_from_u64(0x5eed);
    let texts = texts();
    let mut failures = Vec::new();
    for route in ROUTES.iter().filter(|route| route.handler.is_some()) {
        for round in 0..ROUNDS {
            let segment = |part: &str, random: &mut StdRng| {
                if !part.starts_with('{') {
                    return part.to_owned();
                }
                // An empty segment is another route.
                let text = texts.choose(random).unwrap();
                if text.is_empty() { "%ff%00".to_owned() } else { encode(text) }
            };
            let parts: Vec<String> = route.path.split('/').map(|part| segment(part, &mut random)).collect();
            let mut target = parts.join("/");
            for nth in 0..random.random_range(0..6) {
                let name = PARAMETERS.choose(&mut random).unwrap();
                let value = if random.random_range(0..12) == 0 {
                    "%ff%fe".to_owned()
                } else {
                    encode(texts.choose(&mut random).unwrap())
                };
                target.push_str(&format!("{}{name}={value}", if nth == 0 { '?' } else { '&' }));
            }
            let method = Method::from_bytes(route.method.name().as_bytes()).unwrap();
            let sent = (method != Method::GET).then(|| body(&mut random, &texts));
            let shown = sent.as_ref().map(|bytes| String::from_utf8_lossy(bytes).chars().take(400).collect::<String>());
            let reply = broker.try_send(method.clone(), &target, sent.map(Into::into)).await;
            match reply {
                Ok(reply) if reply.status < 500 => {}
                Ok(reply) => {
                    let target: String = target.chars().take(400).collect();
                    failures.push(format!("{} {method} {target} {shown:?}: {}", reply.status, reply.text));
                }
                Err(error) => failures.push(format!("{method} {} round {round}: {error}", route.path)),
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(broker.is_healthy().await);
}

/// Ten megabytes where a name is expected are a name that is too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_ten_megabytes_are_refused() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    let rows = broker.db.row_counts().await;
    let long = "n".repeat(10 << 20);
    let partition = &popped.messages[0].partition_id;
    for (path, body) in [
        ("/api/v1/push", json!({ "items": [{ "queue": long, "payload": 1 }] })),
        ("/api/v1/push", json!({ "items": [{ "queue": "q", "partition": long, "payload": 1 }] })),
        ("/api/v1/push", json!({ "items": [{ "queue": "q", "transactionId": long, "payload": 1 }] })),
        (
            "/api/v1/transaction",
            json!({ "operations": [{ "type": "push", "items": [{ "queue": long, "payload": 1 }] }] }),
        ),
        (
            "/api/v1/transaction",
            json!({ "operations": [
            { "type": "ack", "transactionId": long, "partitionId": partition, "consumerGroup": long }] }),
        ),
        ("/api/v1/configure", json!({ "queue": long })),
        ("/api/v1/ack", json!({ "transactionId": long, "partitionId": partition, "consumerGroup": long })),
        ("/api/v1/ack", json!({ "transactionId": "m", "partitionId": long, "leaseId": long })),
        ("/api/v1/traces", json!({ "transactionId": long, "partitionId": partition, "data": {} })),
        ("/api/v1/consumer-groups/g/queues/q/seek", json!({ "timestamp": long })),
        ("/api/v1/consumer-groups/g/subscription", json!({ "subscriptionTimestamp": long })),
        ("/internal/api/notify", json!({ "queue": long })),
    ] {
        let reply = broker.post_json(path, &body).await;
        let refused = reply.status >= 400 && reply.status < 500;
        let answered = reply.status == 200 && reply.text.contains("\"success\":false");
        let text: String = reply.text.chars().take(300).collect();
        assert!(refused || answered || path.starts_with("/internal"), "{path}: {} {text}", reply.status);
        assert!(reply.status < 500, "{path}: {} {text}", reply.status);
    }
    let request = [
        b"POST /api/v1/push HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: 4\r\n\r\n".as_slice(),
        b"\xff\xfe\xfd\xfc",
    ];
    assert_eq!(exchange(broker.address, &request.concat()).await.status, 400);
    assert_eq!(broker.db.row_counts().await, rows);
}
