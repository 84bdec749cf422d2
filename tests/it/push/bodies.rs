//! Bodies that a push refuses whole, naming the item and the field (`spec/push-pop.md` §2.1).

use serde_json::json;

use crate::harness::{Pop, TestBroker};

async fn refuses_all(bodies: &[(&str, &[&str])]) {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    for (body, words) in bodies {
        println!("{body}");
        let reply = broker.push_body(body.to_string()).await.expect_refusal(words);
        assert!(reply.json()["error"].as_str().unwrap().starts_with("bad body: "), "{}", reply.text);
        assert_eq!(reply.json().as_object().unwrap().len(), 1, "only `error`: {}", reply.text);
    }
    assert_eq!(broker.db.row_counts().await, before, "nothing is stored");
    assert!(broker.is_healthy().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_without_an_array_of_items_is_refused() {
    refuses_all(&[
        ("", &[]),
        ("{", &[]),
        ("{\"items\":[{\"queue\":\"q\",\"payload\":1}]", &[]),
        ("{\"items\":[{\"queue\":\"q\",\"payload\":1}]} trailing", &[]),
        ("[]", &[]),
        ("null", &[]),
        ("7", &[]),
        ("\"items\"", &[]),
        ("{}", &["items"]),
        (r#"{"items":null}"#, &["items"]),
        (r#"{"items":{}}"#, &["items"]),
        (r#"{"items":"x"}"#, &["items"]),
        (r#"{"items":3}"#, &["items"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_with_a_missing_or_mistyped_field_is_named() {
    refuses_all(&[
        (r#"{"items":[7]}"#, &["0"]),
        (r#"{"items":[null]}"#, &["0"]),
        (r#"{"items":[["q",1]]}"#, &["0"]),
        (r#"{"items":[{"payload":1}]}"#, &["0", "queue"]),
        (r#"{"items":[{"queue":null,"payload":1}]}"#, &["0", "queue"]),
        (r#"{"items":[{"queue":5,"payload":1}]}"#, &["0", "queue"]),
        (r#"{"items":[{"queue":"q"}]}"#, &["0", "payload"]),
        (r#"{"items":[{"queue":"q","data":1}]}"#, &["0", "payload"]),
        (r#"{"items":[{"queue":"q","partition":3,"payload":1}]}"#, &["0", "partition"]),
        (r#"{"items":[{"queue":"q","partition":["p"],"payload":1}]}"#, &["0", "partition"]),
        (r#"{"items":[{"queue":"q","transactionId":7,"payload":1}]}"#, &["0", "transactionId"]),
        (r#"{"items":[{"queue":"q","transactionId":true,"payload":1}]}"#, &["0", "transactionId"]),
    ])
    .await;
}

/// One bad item refuses the good ones around it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_of_the_bad_item_is_named_and_its_neighbours_are_not_stored() {
    refuses_all(&[
        (
            r#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":2},{"queue":"q","partition":3,"payload":1}]}"#,
            &["2", "partition"],
        ),
        (r#"{"items":[{"queue":"q","payload":1},{"queue":"q"},{"queue":"q","payload":1}]}"#, &["1", "payload"]),
    ])
    .await;
}

/// §9 and §14 no. 4: PostgreSQL text cannot hold NUL, and names end at 1024 bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_with_nul_or_above_1024_bytes_are_refused() {
    let long = "é".repeat(512) + "x";
    assert_eq!(long.len(), 1025);
    let with_long = |field: &str| {
        let mut item = json!({ "queue": "q", "payload": 1 });
        item[field] = json!(long);
        json!({ "items": [{ "queue": "q", "payload": 0 }, item] }).to_string()
    };
    refuses_all(&[
        (r#"{"items":[{"queue":"a\u0000b","payload":1}]}"#, &["0", "queue"]),
        (r#"{"items":[{"queue":"q","partition":"\u0000","payload":1}]}"#, &["0", "partition"]),
        (r#"{"items":[{"queue":"q","transactionId":"x\u0000","payload":1}]}"#, &["0", "transactionId"]),
        (&with_long("queue"), &["1", "queue"]),
        (&with_long("partition"), &["1", "partition"]),
        (&with_long("transactionId"), &["1", "transactionId"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_exactly_1024_bytes_are_taken() {
    let broker = TestBroker::start().await;
    let name = "é".repeat(512);
    let results = broker.push_ids(&name, &name, [&name]).await;
    assert_eq!(results[0].transaction_id, name);
    assert_eq!(broker.pop(&Pop::partition(&name, &name)).await.ids(), [name.as_str()]);
}

/// A body that is not UTF-8 is not JSON.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_not_utf8_is_refused() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    let mut body = br#"{"items":[{"queue":"q","payload":""#.to_vec();
    body.extend([0xff, 0xfe]);
    body.extend(br#""}]}"#);
    broker.push_body(body).await.expect_refusal(&["bad body"]);
    let mut body = br#"{"items":[{"payload":1,"queue":""#.to_vec();
    body.extend([0xc3, 0x28]);
    body.extend(br#""}]}"#);
    broker.push_body(body).await.expect_refusal(&["bad body"]);
    assert_eq!(broker.db.row_counts().await, before);
}
