//! `POST /api/v1/configure` (`spec/push-pop.md` §5).

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::{Value, json};

use crate::harness::{Pop, TestBroker, assert_left, keys_of, member};

const OPTIONS: [&str; 19] = [
    "leaseTime",
    "retryLimit",
    "deadLetterQueue",
    "dlqAfterMaxRetries",
    "delayedProcessing",
    "windowBuffer",
    "minPopWaitTime",
    "retentionEnabled",
    "retentionSeconds",
    "completedRetentionSeconds",
    "maxWaitTimeSeconds",
    "encryptionEnabled",
    "dedupWindowSeconds",
    "retentionSinkHold",
    "retentionSinkHoldMaxSeconds",
    "priority",
    "ttl",
    "maxSize",
    "retryDelay",
];

fn defaults() -> Value {
    json!({
        "leaseTime": 300, "retryLimit": 3, "deadLetterQueue": true, "dlqAfterMaxRetries": true,
        "delayedProcessing": 0, "windowBuffer": 0, "minPopWaitTime": 0, "retentionEnabled": false,
        "retentionSeconds": 0, "completedRetentionSeconds": 0, "maxWaitTimeSeconds": 0, "encryptionEnabled": false,
        "dedupWindowSeconds": 3600, "retentionSinkHold": "", "retentionSinkHoldMaxSeconds": 604_800, "priority": 0,
        "ttl": 3600, "maxSize": 0, "retryDelay": 0,
    })
}

/// Values that differ from every default.
fn unusual() -> Value {
    json!({
        "leaseTime": 17, "retryLimit": 9, "deadLetterQueue": false, "dlqAfterMaxRetries": false,
        "delayedProcessing": 1, "windowBuffer": 2, "minPopWaitTime": 3, "retentionEnabled": true,
        "retentionSeconds": 4, "completedRetentionSeconds": 5, "maxWaitTimeSeconds": 600, "encryptionEnabled": true,
        "dedupWindowSeconds": 7, "retentionSinkHold": "sink-1_a.b", "retentionSinkHoldMaxSeconds": 61, "priority": 8,
        "ttl": 9, "maxSize": 10, "retryDelay": 11,
    })
}

/// §5.3: the answer's shape, all options in it, integers as integer tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_echoes_every_stored_option() {
    let broker = TestBroker::start().await;
    let reply = broker.configure_reply(&json!({ "queue": "q", "options": {} })).await.expect(200);
    let keys = ["configured", "queueId", "partitionId", "queue", "namespace", "task", "storage", "options"];
    assert_eq!(keys_of(&reply.text).into_iter().collect::<BTreeSet<_>>(), keys.map(str::to_owned).into());
    let body = reply.json();
    assert_eq!((&body["configured"], &body["partitionId"]), (&true.into(), &Value::Null));
    assert_eq!((&body["queue"], &body["storage"]), (&"q".into(), &"segments".into()));
    assert_eq!((&body["namespace"], &body["task"]), (&"".into(), &"".into()));
    uuid::Uuid::parse_str(body["queueId"].as_str().unwrap()).unwrap();
    let options = member(&reply.text, "options");
    assert_eq!(keys_of(&options).into_iter().collect::<BTreeSet<_>>(), OPTIONS.map(str::to_owned).into());
    assert_eq!(body["options"], defaults());
    assert!(!options.contains('.'), "integers are integer tokens: {options}");
}

/// §5.4: every option is stored and read back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_option_round_trips() {
    let broker = TestBroker::start().await;
    assert_eq!(broker.configure("q", unusual()).await, unusual());
    let merged = json!({ "queue": "q", "mode": "merge", "options": {} });
    assert_eq!(broker.configure_reply(&merged).await.expect(200).json()["options"], unusual(), "it was stored");
}

/// §5.2: replace is the default: every omitted or null key returns to its default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_omitted_option_returns_to_its_default() {
    let broker = TestBroker::start().await;
    for mode in [json!(null), json!("replace")] {
        broker.configure("q", unusual()).await;
        let body = json!({ "queue": "q", "mode": mode, "options": { "leaseTime": 5, "retryLimit": null } });
        let mut expected = defaults();
        expected["leaseTime"] = json!(5);
        assert_eq!(broker.configure_reply(&body).await.expect(200).json()["options"], expected, "{mode}");
    }
    broker.configure("q", unusual()).await;
    assert_eq!(broker.configure("q", json!({})).await, defaults());
}

/// §5.2: merge keeps what is absent and resets what is null.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merge_keeps_the_absent_and_resets_the_null() {
    let broker = TestBroker::start().await;
    let create = json!({ "queue": "new", "mode": "merge", "options": { "ttl": 5 } });
    let mut expected = defaults();
    expected["ttl"] = json!(5);
    assert_eq!(broker.configure_reply(&create).await.expect(200).json()["options"], expected, "creating is the same");

    let mut options = unusual();
    options["namespace"] = json!("ns");
    options["task"] = json!("t");
    broker.configure("q", options).await;
    let body = json!({
        "queue": "q", "mode": "merge",
        "options": { "leaseTime": 99, "retryLimit": null, "deadLetterQueue": null, "dedupWindowSeconds": 1, "task": null },
    });
    let answer = broker.configure_reply(&body).await.expect(200).json();
    let mut expected = unusual();
    expected["leaseTime"] = json!(99);
    expected["retryLimit"] = json!(3);
    expected["deadLetterQueue"] = json!(true);
    expected["dedupWindowSeconds"] = json!(1);
    assert_eq!(answer["options"], expected);
    assert_eq!((&answer["namespace"], &answer["task"]), (&"ns".into(), &"".into()));
}

/// §5.2: a push-made queue keeps its options under merge and gets the defaults of configure under replace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pushed_queue_is_rewritten_or_merged() {
    let broker = TestBroker::start().await;
    for queue in ["ns.a", "ns.b"] {
        broker.push_ids(queue, "p", ["m"]).await;
    }
    let merged = json!({ "queue": "ns.a", "mode": "merge", "options": { "ttl": 1 } });
    let merged = broker.configure_reply(&merged).await.expect(200).json();
    assert_eq!(
        (&merged["options"]["leaseTime"], &merged["namespace"], &merged["task"]),
        (&60.into(), &"ns".into(), &"a".into())
    );
    let replaced =
        broker.configure_reply(&json!({ "queue": "ns.b", "options": { "ttl": 1 } })).await.expect(200).json();
    assert_eq!((&replaced["options"]["leaseTime"], &replaced["namespace"]), (&300.into(), &"".into()));
    assert_eq!(broker.pop(&Pop::queue("ns.b")).await.ids(), ["m"], "nothing else happens to the queue");
}

/// §5.1: options at the top level when there is no `options`; then they are ignored when there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_may_stand_at_the_top() {
    let broker = TestBroker::start().await;
    let body = json!({ "queue": "q", "leaseTime": 44, "namespace": "n", "unknown": [1] });
    let answer = broker.configure_reply(&body).await.expect(200).json();
    assert_eq!((&answer["options"]["leaseTime"], &answer["namespace"]), (&44.into(), &"n".into()));
    let body = json!({ "queue": "q", "leaseTime": 44, "options": { "retryLimit": 1, "unknown": {} } });
    let answer = broker.configure_reply(&body).await.expect(200).json();
    assert_eq!((&answer["options"]["leaseTime"], &answer["options"]["retryLimit"]), (&300.into(), &1.into()));
}

/// §5.1: labels from both places; only a non-empty string at the top counts, and it wins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_come_from_options_or_the_top() {
    let broker = TestBroker::start().await;
    for (body, namespace, task) in [
        (json!({ "queue": "q", "options": { "namespace": "in", "task": "ti" } }), "in", "ti"),
        (json!({ "queue": "q", "namespace": "top", "task": "tt", "options": {} }), "top", "tt"),
        (json!({ "queue": "q", "namespace": "top", "options": { "namespace": "in", "task": "ti" } }), "top", "ti"),
        (json!({ "queue": "q", "namespace": null, "task": null, "options": { "namespace": "in" } }), "in", ""),
        (json!({ "queue": "q", "namespace": "", "options": { "namespace": "in" } }), "in", ""),
        (json!({ "queue": "q", "options": {} }), "", ""),
    ] {
        let answer = broker.configure_reply(&body).await.expect(200).json();
        assert_eq!((&answer["namespace"], &answer["task"]), (&namespace.into(), &task.into()), "{body}");
    }
}

/// §5.4 "stored as": what is clamped, and what is stored as it came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clamps() {
    let broker = TestBroker::start().await;
    for (option, sent, stored) in [
        ("minPopWaitTime", 90_000, 60_000),
        ("minPopWaitTime", -5, 0),
        ("minPopWaitTime", 60_000, 60_000),
        ("dedupWindowSeconds", -1, 0),
        ("dedupWindowSeconds", 0, 0),
        ("leaseTime", 0, 0),
        ("leaseTime", -3, -3),
        ("delayedProcessing", -1, -1),
        ("retryLimit", 0, 0),
        ("retentionSinkHoldMaxSeconds", 60, 60),
        ("retentionSinkHoldMaxSeconds", 31_536_000, 31_536_000),
    ] {
        assert_eq!(broker.configure("q", json!({ option: sent })).await[option], stored, "{option}={sent}");
    }
}

/// §5.1, §14 no. 28: numeric strings and boolean words are cast.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strings_are_cast() {
    let broker = TestBroker::start().await;
    let stored = broker
        .configure(
            "q",
            json!({ "leaseTime": "45", "retryLimit": "-2", "deadLetterQueue": "false", "retentionEnabled": "true" }),
        )
        .await;
    assert_eq!((&stored["leaseTime"], &stored["retryLimit"]), (&45.into(), &(-2).into()));
    assert_eq!((&stored["deadLetterQueue"], &stored["retentionEnabled"]), (&false.into(), &true.into()));
    for (word, value) in [
        ("t", true),
        ("f", false),
        ("yes", true),
        ("no", false),
        ("on", true),
        ("off", false),
        ("1", true),
        ("0", false),
    ] {
        let stored = broker.configure("q", json!({ "retentionEnabled": word })).await;
        assert_eq!(stored["retentionEnabled"], value, "{word}");
    }
}

/// §5.1: what cannot be cast is a `400` with `invalid`, and nothing is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_cast_names_the_option() {
    let broker = TestBroker::start().await;
    broker.configure("q", unusual()).await;
    let before = broker.db.row_counts().await;
    for (option, value) in [
        ("leaseTime", json!("soon")),
        ("leaseTime", json!(1.5)),
        ("leaseTime", json!("1.5")),
        ("leaseTime", json!("")),
        ("leaseTime", json!(true)),
        ("leaseTime", json!([])),
        ("leaseTime", json!({})),
        ("leaseTime", json!(99_999_999_999_i64)),
        ("retryLimit", json!("99999999999")),
        ("retryLimit", json!("1e3")),
        ("deadLetterQueue", json!("maybe")),
        ("deadLetterQueue", json!([])),
        ("encryptionEnabled", json!("")),
        ("namespace", json!(5)),
        ("task", json!({})),
        ("retentionSinkHold", json!("has space")),
        ("retentionSinkHold", json!("x".repeat(65))),
        ("retentionSinkHold", json!("é")),
        ("retentionSinkHoldMaxSeconds", json!(59)),
        ("retentionSinkHoldMaxSeconds", json!(31_536_001)),
    ] {
        for queue in ["q", "fresh"] {
            let body = json!({ "queue": queue, "options": { "ttl": 1, option: value } });
            println!("{body}");
            let reply = broker.configure_reply(&body).await.expect(400);
            assert_eq!(reply.json()["invalid"], option, "{}", reply.text);
            assert!(reply.json()["error"].is_string());
        }
    }
    assert_eq!(broker.db.row_counts().await, before);
    let merged = json!({ "queue": "q", "mode": "merge", "options": {} });
    assert_eq!(broker.configure_reply(&merged).await.expect(200).json()["options"], unusual(), "untouched");
}

/// §5.1: the queue's name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queue_is_required() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    for body in [
        json!({}),
        json!({ "options": {} }),
        json!({ "queue": null }),
        json!({ "queue": 5 }),
        json!({ "queue": ["q"] }),
    ] {
        let reply = broker.configure_reply(&body).await.expect(400);
        assert_eq!(reply.text, r#"{"error":"queue is required"}"#, "{body}");
    }
    for body in ["", "{", "not json"] {
        broker.post("/api/v1/configure", body).await.expect_refusal(&["bad body: "]);
    }
    broker.configure_reply(&json!({ "queue": "a\0b" })).await.expect_refusal(&["queue"]);
    broker.configure_reply(&json!({ "queue": "x".repeat(1025) })).await.expect_refusal(&["queue"]);
    broker.configure_reply(&json!({ "queue": "q", "options": { "namespace": "a\0b" } })).await.expect(400);
    assert_eq!(broker.db.row_counts().await, before);
    broker.configure("", json!({})).await;
    assert_eq!(broker.db.queue_names().await, [""], "the empty string is legal");
}

/// §5.1: `mode` is one of two words; a `replace` key inside `options` is ignored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_mode_is_refused() {
    let broker = TestBroker::start().await;
    broker.configure("q", unusual()).await;
    for mode in [json!("patch"), json!(""), json!("Merge"), json!(7), json!(true)] {
        let body = json!({ "queue": "q", "mode": mode, "options": {} });
        let reply = broker.configure_reply(&body).await.expect(400);
        let text = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(text.starts_with("mode must be \"merge\" or \"replace\", got "), "{text}");
    }
    let body = json!({ "queue": "q", "mode": "merge", "options": { "replace": true } });
    assert_eq!(broker.configure_reply(&body).await.expect(200).json()["options"], unusual());
}

/// §4, §5.3: configuring again keeps the queue's id; configure makes no partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configuring_again_keeps_the_queue() {
    let broker = TestBroker::start().await;
    let body = json!({ "queue": "q", "options": {} });
    let first = broker.configure_reply(&body).await.expect(200).json();
    let second = broker.configure_reply(&body).await.expect(200).json();
    assert_eq!(first["queueId"], second["queueId"]);
    let counts = broker.db.row_counts().await;
    assert_eq!((counts["queues"], counts["log_partitions"]), (1, 0));
}

/// §5.3: running leases keep their expiry; the next pop takes the new length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_lease_time_holds_for_the_next_pop() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let asked = Instant::now();
    let popped = broker.pop(&Pop::queue("q")).await;
    broker.configure("q", json!({ "leaseTime": 20 })).await;
    assert_left(broker.db.cursor("q", "p", "__QUEUE_MODE__").await.lease_left.unwrap(), 60.0, asked);
    broker.ack("", popped.items("retry")).await;
    let asked = Instant::now();
    broker.pop(&Pop::queue("q")).await;
    assert_left(broker.db.cursor("q", "p", "__QUEUE_MODE__").await.lease_left.unwrap(), 20.0, asked);
}
