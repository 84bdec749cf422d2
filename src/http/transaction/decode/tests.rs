#![allow(clippy::unwrap_used)]
use super::*;
use crate::broker::ack_decision::Signal;

fn refusal(body: &str) -> String {
    decode(body.as_bytes()).map(|_| ()).unwrap_err()
}

#[test]
fn the_flat_index_space_has_one_slot_per_item_and_ack() {
    let body = r#"{"operations":[{"type":"push","items":[{"queue":"a"},{"queue":"b"}]},{"type":"ack"},
        {"type":"push","items":[]},{"type":"push","queue":"c"}]}"#;
    let request = decode(body.as_bytes()).unwrap();
    assert_eq!(request.slots, [Slot::Push(0), Slot::Push(1), Slot::Ack(0), Slot::Push(2)]);
}

#[test]
fn a_pushed_item_is_read_leniently() {
    let trace = "0198F0AA-4000-7000-8000-00000000AAAA";
    let body = format!(
        r#"{{"operations":[{{"type":"push","items":[
            {{"queue":"q","partition":7,"transactionId":5,"traceId":"no"}},
            {{"queue":"","partition":"","transactionId":"","data":[ 1 ]}},
            {{"queue":"\u0041","payload":null,"data":1,"traceId":"{trace}","transactionId":"t\n"}}]}}]}}"#
    );
    let request = decode(body.as_bytes()).unwrap();
    let seen: Vec<_> = request
        .bundle()
        .pushes
        .iter()
        .map(|p| {
            let payload = std::str::from_utf8(p.payload).unwrap().to_owned();
            let id = p.transaction_id.map(str::to_owned);
            (p.queue.to_owned(), p.partition.to_owned(), id, p.trace_id.is_some(), payload)
        })
        .collect();
    let expected = [
        ("q", DEFAULT_PARTITION, None, false, "{}"),
        ("", "", None, false, "[ 1 ]"),
        ("A", DEFAULT_PARTITION, Some("t\n"), true, "null"),
    ]
    .map(|(queue, partition, id, trace, payload): (&str, &str, Option<&str>, bool, &str)| {
        (queue.to_owned(), partition.to_owned(), id.map(str::to_owned), trace, payload.to_owned())
    });
    assert_eq!(seen, expected);
}

#[test]
fn an_ack_is_read_as_on_the_ack_route() {
    let body = r#"{"operations":[{"type":"ack","transactionId":"t","consumerGroup":"","status":null,"error":"",
        "leaseId":null,"partitionId":null},{"type":"ack","consumerGroup":"g","status":"nack","error":"e"},
        {"type":"ack","status":true},{"type":"ack","status":"dlq"}],"requiredLeases":[1,"",null,"x","x"]}"#;
    let request = decode(body.as_bytes()).unwrap();
    let groups: Vec<_> = request.acks.iter().map(|ack| &*ack.group).collect();
    assert_eq!(groups, [QUEUE_MODE_GROUP, "g", QUEUE_MODE_GROUP, QUEUE_MODE_GROUP]);
    let status: Vec<_> = request.acks.iter().map(|ack| ack.item.status).collect();
    let signal = AckStatus::Signal;
    assert_eq!(status, [AckStatus::Completed, signal(Signal::Failed), AckStatus::Completed, signal(Signal::Dlq)]);
    let reasons: Vec<_> = request.acks.iter().map(|ack| ack.item.reason.as_deref()).collect();
    assert_eq!(reasons, [None, Some("e"), None, None]);
    assert_eq!(request.hints, [LeaseClaim::Foreign, LeaseClaim::Foreign]);
    assert_eq!(request.ack_ids, ["t", "", "", ""]);
}

#[test]
fn what_is_no_bundle_is_refused_by_name() {
    for (body, words) in [
        ("", "bad body"),
        ("[]", "bad body"),
        ("{", "bad body"),
        (r#"{"operations":[]}x"#, "bad body"),
        ("{}", "operations"),
        (r#"{"operations":null}"#, "operations"),
        (r#"{"operations":{}}"#, "operations"),
        (r#"{"operations":[1]}"#, "operations[0]"),
        (r#"{"operations":[[]]}"#, "operations[0]"),
        (r#"{"operations":[{}]}"#, UNKNOWN_TYPE),
        (r#"{"operations":[{"type":"kv"}]}"#, UNKNOWN_TYPE),
        (r#"{"operations":[{"type":"Push","queue":"q"}]}"#, UNKNOWN_TYPE),
        (r#"{"operations":[{"type":["push"]}]}"#, UNKNOWN_TYPE),
        (r#"{"operations":[{"type":"push"}]}"#, "operations[0].queue"),
        (r#"{"operations":[{"type":"push","queue":1}]}"#, "operations[0].queue"),
        (r#"{"operations":[{"type":"push","items":{}}]}"#, "operations[0].items"),
        (r#"{"operations":[{"type":"push","items":[{"queue":"q"},3]}]}"#, "operations[0].items[1]"),
        (r#"{"operations":[{"type":"push","queue":"q\u0000"}]}"#, "operations[0].queue"),
        (r#"{"operations":[{"type":"push","queue":"\ud83d"}]}"#, "operations[0].queue"),
        (r#"{"operations":[{"type":"push","items":[{"queue":"q","partition":"\ud83d"}]}]}"#, "items[0].partition"),
        (r#"{"operations":[{"type":"push","queue":"q","transactionId":"\ud83d"}]}"#, "operations[0].transactionId"),
        (r#"{"operations":[{"type":"ack","error":3}]}"#, "operations[0].error"),
        (r#"{"operations":[{"type":"ack","leaseId":3}]}"#, "operations[0].leaseId"),
        (r#"{"operations":[{"type":"ack","status":3}]}"#, "operations[0].status"),
        (r#"{"operations":[],"requiredLeases":"x"}"#, "requiredLeases"),
        (r#"{"operations":[],"kv":{}}"#, "kv must be an array"),
        (r#"{"operations":[],"timers":0}"#, "timers must be an array"),
        (r#"{"operations":[],"kv":[{"op":"get"}]}"#, "nothing was written"),
        (r#"{"operations":[],"timers":[{}]}"#, "nothing was written"),
    ] {
        let text = refusal(body);
        assert!(text.contains(words), "{body}: {text}");
    }
    for body in [r#"{"operations":[],"kv":null,"timers":[]}"#, r#"{"operations":[],"requiredLeases":null,"x":1}"#] {
        assert!(decode(body.as_bytes()).unwrap().slots.is_empty());
    }
}
