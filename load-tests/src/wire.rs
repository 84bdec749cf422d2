//! Bodies of the protocol: written by appending, read by borrowing. No value trees on the hot path.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::payload::{PayloadPool, push_number, take_number};

/// One lane's part of a push or of an answer: `count` messages from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Partition of this run.
    pub lane: u32,
    /// Number of the first message.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// Appends the items of a push for one part.
pub fn push_items(out: &mut Vec<u8>, address: &[u8], nonce: &str, part: Part, due_us: u64, payloads: &PayloadPool) {
    for seq in part.first..part.first + part.count {
        if out.last() != Some(&b'[') {
            out.push(b',');
        }
        out.extend_from_slice(b"{");
        out.extend_from_slice(address);
        out.extend_from_slice(b",\"transactionId\":\"");
        push_id(out, nonce, part.lane, seq);
        out.extend_from_slice(b"\",\"payload\":");
        payloads.write(out, part.lane, seq, due_us);
        out.push(b'}');
    }
}

/// Appends a transaction id: `<nonce>-<lane>-<seq>`.
pub fn push_id(out: &mut Vec<u8>, nonce: &str, lane: u32, seq: u32) {
    out.extend_from_slice(nonce.as_bytes());
    out.push(b'-');
    push_number(out, u64::from(lane));
    out.push(b'-');
    push_number(out, u64::from(seq));
}

/// Reads a transaction id of this run.
pub fn read_id(id: &str, nonce: &str) -> Option<(u32, u32)> {
    let rest = id.as_bytes().strip_prefix(nonce.as_bytes())?.strip_prefix(b"-")?;
    let (lane, rest) = take_number(rest)?;
    let (seq, rest) = take_number(rest.strip_prefix(b"-")?)?;
    if !rest.is_empty() {
        return None;
    }
    Some((u32::try_from(lane).ok()?, u32::try_from(seq).ok()?))
}

/// What became of a pushed item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PushStatus {
    /// Committed.
    Queued,
    /// Was there already.
    Duplicate,
    /// In the broker's spool.
    Buffered,
    /// Stored nowhere.
    Failed,
}

/// One element of a push's answer.
#[derive(Debug, Deserialize)]
pub struct Pushed {
    /// Place in the request.
    pub index: u32,
    /// What became of it.
    pub status: PushStatus,
    /// Where it is stored.
    pub offset: Option<u64>,
}

/// A pop's answer.
#[derive(Debug, Deserialize)]
pub struct Popped<'a> {
    /// The messages, grouped by partition.
    #[serde(borrow)]
    pub messages: Vec<PoppedMessage<'a>>,
}

/// One delivered message.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoppedMessage<'a> {
    /// The id that we gave it.
    pub transaction_id: &'a str,
    /// The payload.
    #[serde(borrow)]
    pub data: &'a RawValue,
    /// Where to acknowledge it.
    pub partition_id: &'a str,
    /// The lease it came with.
    pub lease_id: &'a str,
}

/// One element of an ack's answer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Acked {
    /// Place in the request.
    pub index: u32,
    /// Whether the instruction was carried out.
    pub success: bool,
    /// Why not.
    pub error: Option<String>,
    /// Nothing changed: it was at or below the cursor.
    #[serde(default)]
    pub noop: bool,
}

/// A transaction's answer.
#[derive(Debug, Deserialize)]
pub struct Transacted {
    /// Whether it committed.
    pub success: bool,
    /// The kind of failure.
    pub reason: Option<String>,
    /// The failure in words.
    pub error: Option<String>,
}

/// Starts the body of a batch ack.
pub fn begin_acks(out: &mut Vec<u8>, group: &str) {
    out.extend_from_slice(b"{\"consumerGroup\":\"");
    out.extend_from_slice(group.as_bytes());
    out.extend_from_slice(b"\",\"acknowledgments\":[");
}

/// Appends one completed ack.
pub fn push_ack(out: &mut Vec<u8>, message: &PoppedMessage<'_>) {
    if out.last() != Some(&b'[') {
        out.push(b',');
    }
    out.extend_from_slice(b"{\"transactionId\":\"");
    out.extend_from_slice(message.transaction_id.as_bytes());
    out.extend_from_slice(b"\",\"partitionId\":\"");
    out.extend_from_slice(message.partition_id.as_bytes());
    out.extend_from_slice(b"\",\"leaseId\":\"");
    out.extend_from_slice(message.lease_id.as_bytes());
    out.extend_from_slice(b"\",\"status\":\"completed\"}");
}

/// Ends the body of a batch ack or of a push.
pub fn end_items(out: &mut Vec<u8>) {
    out.extend_from_slice(b"]}");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn ids_are_read_back() {
        let mut out = Vec::new();
        push_id(&mut out, "r1f", 7, 42);
        assert_eq!(read_id(std::str::from_utf8(&out).unwrap(), "r1f"), Some((7, 42)));
        assert_eq!(read_id("other-7-42", "r1f"), None);
        assert_eq!(read_id("r1f-7-42x", "r1f"), None);
        assert_eq!(read_id("r1f-99999999999-1", "r1f"), None);
    }

    #[test]
    fn a_push_body_is_json() {
        let mut out = b"{\"items\":[".to_vec();
        let pool = PayloadPool::new(1, 64);
        push_items(&mut out, b"\"queue\":\"q\"", "n", Part { lane: 1, first: 5, count: 2 }, 9, &pool);
        end_items(&mut out);
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["items"].as_array().unwrap().len(), 2);
        assert_eq!(value["items"][1]["transactionId"], "n-1-6");
    }

    #[test]
    fn a_pop_of_the_documented_shape_is_read() {
        let text = r#"{"success":true,"queue":"orders","partition":"eu","partitionId":"p1","leaseId":"l1",
            "consumerGroup":"g","messages":[{"id":"m","transactionId":"order-1","traceId":null,
            "data":{"total":19.99},"producerSub":null,"createdAt":"2026-08-04T09:15:00.123456Z","partitionId":"p1",
            "partition":"eu","leaseId":"l1","consumerGroup":"g","deliveryAttempt":1}],"partitionsClaimed":1}"#;
        let popped: Popped<'_> = serde_json::from_str(text).unwrap();
        assert_eq!(popped.messages[0].transaction_id, "order-1");
        assert_eq!(popped.messages[0].data.get(), r#"{"total":19.99}"#);
        let mut body = Vec::new();
        begin_acks(&mut body, "g");
        push_ack(&mut body, &popped.messages[0]);
        push_ack(&mut body, &popped.messages[0]);
        end_items(&mut body);
        let value: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(value["acknowledgments"][1]["partitionId"], "p1");
    }
}
