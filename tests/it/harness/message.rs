//! What a pop delivers, decoded strictly: an unknown or missing key fails the test.

use serde::Deserialize;
use serde_json::{Value, json};

/// One delivered message (`spec/push-pop.md` §7.11).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Message {
    pub id: String,
    pub transaction_id: String,
    pub trace_id: Option<String>,
    pub data: Value,
    pub producer_sub: Option<String>,
    pub created_at: String,
    pub partition_id: String,
    pub partition: String,
    pub lease_id: String,
    pub consumer_group: String,
    pub delivery_attempt: i64,
}

impl Message {
    /// Its ack item, with the lease.
    pub fn item(&self, status: &str) -> Value {
        json!({
            "transactionId": self.transaction_id,
            "partitionId": self.partition_id,
            "leaseId": self.lease_id,
            "status": status,
        })
    }

    /// Its ack item with a reason.
    pub fn failed(&self, reason: &str) -> Value {
        let mut item = self.item("failed");
        item["error"] = json!(reason);
        item
    }

    /// Its ack item without a lease.
    pub fn leaseless(&self, status: &str) -> Value {
        json!({ "transactionId": self.transaction_id, "partitionId": self.partition_id, "status": status })
    }
}

/// The answer of one pop; a 204 is the empty one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Popped {
    pub success: bool,
    pub queue: String,
    pub partition: String,
    pub partition_id: String,
    pub lease_id: String,
    pub consumer_group: String,
    pub messages: Vec<Message>,
    pub partitions_claimed: i64,
    /// Only when it was applied.
    #[serde(default)]
    pub conflation: bool,
    /// Only when the request declared another policy.
    #[serde(default)]
    pub conflation_conflict: bool,
    /// Only when the broker chose a size.
    #[serde(default)]
    pub autopilot: Option<Autopilot>,
}

/// The sizes that the broker chose (`spec/push-pop.md` §7.13).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Autopilot {
    pub partitions: i64,
    pub batch: i64,
    #[serde(default)]
    pub wait_ms: Option<i64>,
}

impl Popped {
    /// The transaction ids, in order of delivery.
    pub fn ids(&self) -> Vec<&str> {
        self.messages.iter().map(|m| m.transaction_id.as_str()).collect()
    }

    /// Ack items for all of it, of one status.
    pub fn items(&self, status: &str) -> Vec<Value> {
        self.messages.iter().map(|m| m.item(status)).collect()
    }

    /// Whether nothing was delivered.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}
