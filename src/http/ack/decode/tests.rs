#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::broker::ack_decision::Signal;

const PARTITION: &str = "b1c2d3e4-5f60-8180-9a0b-1c2d3e4f5061";

fn refusal(body: &str) -> String {
    batch(body.as_bytes()).unwrap_err().to_string()
}

#[test]
fn a_full_item_is_read() {
    let body = format!(
        r#"{{"consumerGroup":"billing","acknowledgments":[{{"transactionId":"a\"1","partitionId":"{PARTITION}",
        "status":"failed","leaseId":"0198f2c1-9a7b-7d20-8e31-4c5d6e7f8a90","error":"why","consumerGroup":7,"x":[{{}}]}}]}}"#
    );
    let request = batch(body.as_bytes()).unwrap();
    assert_eq!((&*request.group, &*request.ids[0]), ("billing", "a\"1"));
    let item = &request.items[0];
    assert_eq!(item.target, AckTarget::Partition(PARTITION.parse().unwrap()));
    assert!(matches!(item.lease, LeaseClaim::Id(_)));
    assert_eq!(item.transaction, Some(TransactionHash::of("a\"1")));
    assert_eq!(item.status, AckStatus::Signal(Signal::Failed));
    assert_eq!(item.reason.as_deref(), Some("why"));
    assert!(matches!(request.group, Cow::Borrowed(_)));
}

#[test]
fn null_and_empty_are_absent() {
    let null =
        r#"{"transactionId":null,"partitionId":null,"status":null,"consumerGroup":null,"leaseId":null,"error":null}"#;
    for body in ["{}", null, r#"{"consumerGroup":"","leaseId":"","error":""}"#] {
        let request = single(body.as_bytes()).unwrap();
        assert_eq!(request.group, QUEUE_MODE_GROUP);
        assert_eq!(request.ids, [""]);
        let item = &request.items[0];
        assert_eq!(item.target, AckTarget::NotUuid("".into()));
        assert_eq!((item.lease, item.transaction), (LeaseClaim::Absent, None));
        assert_eq!((item.status, &item.reason), (AckStatus::Completed, &None));
    }
    assert!(batch(br#"{"acknowledgments":[]}"#).unwrap().items.is_empty());
}

#[test]
fn statuses_are_words_or_booleans() {
    let body = r#"{"acknowledgments":[{"status":true},{"status":false},{"status":""},{"status":"retry"},{}]}"#;
    let request = batch(body.as_bytes()).unwrap();
    let statuses: Vec<_> = request.items.iter().map(|item| item.status).collect();
    let (done, nack) = (AckStatus::Completed, AckStatus::Signal);
    assert_eq!(statuses, [done, nack(Signal::Failed), nack(Signal::Failed), nack(Signal::Retry), done]);
}

#[test]
fn of_a_repeated_key_the_last_counts() {
    let body = r#"{"acknowledgments":[{},{}],"acknowledgments":[{"status":"dlq","status":"ok"}]}"#;
    let request = batch(body.as_bytes()).unwrap();
    assert_eq!(request.items.len(), 1);
    assert_eq!(request.items[0].status, AckStatus::Completed);
}

#[test]
fn a_wrong_type_names_item_and_field() {
    let wrong = |item: &str| refusal(&format!(r#"{{"acknowledgments":[{{}},{item}]}}"#));
    assert!(wrong(r#"{"transactionId":7}"#).starts_with("acknowledgments[1].transactionId: invalid type: integer `7`"));
    assert!(wrong(r#"{"leaseId":["a"]}"#).starts_with("acknowledgments[1].leaseId: "));
    for error in ["7", "{}", "[\"a\"]", "false"] {
        assert!(wrong(&format!(r#"{{"error":{error}}}"#)).starts_with("acknowledgments[1].error: must be a string"));
    }
    assert!(wrong(r#"{"status":1}"#).contains("acknowledgments[1].status: "));
    assert!(wrong(r#"["a","b"]"#).contains("acknowledgments[1] to be an object"));
    assert!(wrong("null").contains("acknowledgments[1] to be an object"));
    assert!(refusal(r#"{"consumerGroup":3,"acknowledgments":[]}"#).starts_with("consumerGroup: "));
    assert!(single(br#"{"partitionId":3}"#).unwrap_err().to_string().starts_with("partitionId: "));
}

#[test]
fn what_is_no_batch_is_refused() {
    assert!(refusal("{}").contains("missing field `acknowledgments`"));
    for body in ["[]", "7", "\"x\"", "null", "", "{", "{}x", r#"{"acknowledgments":null}"#, r#"{"acknowledgments":{}}"#]
    {
        assert!(batch(body.as_bytes()).is_err(), "{body}");
    }
    assert!(single(b"[]").is_err());
    assert!(single(b"\xff").is_err());
    assert!(single(br#"{"transactionId":"\ud800"}"#).is_err());
}

proptest! {
    #[test]
    fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = (single(&body).is_ok(), batch(&body).is_ok());
    }

    #[test]
    fn any_text_survives(id in any::<String>(), group in ".{1,20}") {
        let body = serde_json::json!({ "consumerGroup": group, "acknowledgments": [{ "transactionId": id }] }).to_string();
        let request = batch(body.as_bytes()).unwrap();
        prop_assert_eq!(&*request.ids[0], &id);
        prop_assert_eq!(&*request.group, &group);
    }
}
