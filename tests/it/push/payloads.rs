//! Payload bytes go through unparsed (`spec/push-pop.md` §2.1): in as `payload`, out as `data`, byte for byte.

use serde_json::value::RawValue;

use crate::harness::{Pop, TestBroker, member};

/// Pushes each text as a payload and answers the `data` bytes of a pop, in order.
async fn round_trip(payloads: &[String]) -> Vec<String> {
    let broker = TestBroker::start().await;
    let items: Vec<String> = payloads.iter().map(|p| format!(r#"{{"queue":"q","payload":{p}}}"#)).collect();
    broker.push_body(format!(r#"{{"items":[{}]}}"#, items.join(","))).await.expect(201);
    let reply = broker.pop_reply(&Pop::queue("q").batch(10_000)).await.expect(200);
    let messages: Vec<Box<RawValue>> = serde_json::from_str(&member(&reply.text, "messages")).unwrap();
    messages.iter().map(|message| member(message.get(), "data")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_value_comes_back_byte_for_byte() {
    let payloads: Vec<String> = [
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-1.50",
        "1e3",
        "1E+03",
        "0.10",
        "9007199254740991",
        "9007199254740993",
        "123456789012345678901234567890",
        "1.000000000000000000000000001",
        r#""""#,
        r#""text""#,
        r#""\u00e9 é \/ \\ \" \n \u0000 \ud83d\ude00""#,
        r#""😀 naïve 漢字 𝄞""#,
        "[]",
        "{}",
        r#"{"b":1,"a":2,"c":{"z":0,"y":[]}}"#,
        r#"{"same":1,"same":2}"#,
        r#"{ "spaced" :  [ 1 ,2,   3 ] ,	"tab":	null }"#,
        "{\n  \"pretty\": true\n}",
        r#"{"":"empty key"}"#,
        r#"{"payload":{"data":{"payload":1}}}"#,
        r#"{"leaseId":"not a lease","id":1,"messages":[]}"#,
    ]
    .map(str::to_owned)
    .to_vec();
    assert_eq!(round_trip(&payloads).await, payloads);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_of_one_mebibyte_survives() {
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let text: String = std::iter::repeat_with(|| {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'!' + ((noise >> 33) % 90) as u8)
    })
    .filter(|c| !matches!(c, '"' | '\\'))
    .take(1 << 20)
    .collect();
    let payloads = [format!("\"{text}\""), "1".to_owned()];
    assert_eq!(round_trip(&payloads).await, payloads);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_arrays_and_deep_nesting_survive() {
    let long: Vec<String> = (0..10_000).map(|n| n.to_string()).collect();
    let deep = format!("{}{}{}", "[".repeat(100), "1", "]".repeat(100));
    let payloads = [format!("[{}]", long.join(",")), deep];
    assert_eq!(round_trip(&payloads).await, payloads);
}

/// A key spelled with escapes is the same key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn escaped_keys_and_names_are_read_as_what_they_spell() {
    let broker = TestBroker::start().await;
    let body = r#"{"\u0069tems":[{"queu\u0065":"q\"\u00e9\\","pa\u0079load":"as is: \u0041",
        "partition":"\u0070","transactionId":"\/t"}]}"#;
    broker.push_body(body).await.expect(201);
    let reply = broker.pop_reply(&Pop::partition("q\"é\\", "p")).await.expect(200);
    let messages: Vec<Box<RawValue>> = serde_json::from_str(&member(&reply.text, "messages")).unwrap();
    assert_eq!(member(messages[0].get(), "data"), r#""as is: \u0041""#);
    assert_eq!(member(messages[0].get(), "transactionId"), r#""/t""#);
}
