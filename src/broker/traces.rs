//! Traces: application events on message addresses. Stored and returned; whether the message exists is never asked
//! (`spec/admin.md` §12).

use uuid::Uuid;

use super::Broker;
use super::error::BrokerResult;
use crate::store::traces::NewTrace;
pub use crate::store::traces::{TraceName, TraceRow};

/// Traces of one message that are shown.
const TRACES_PER_MESSAGE_MAX: i64 = 10_000;
/// What stands for the worker: it is never read from a request.
const WORKER: &str = "regent";

/// An event to be recorded.
#[derive(Clone, Debug)]
pub struct TraceEvent {
    /// Partition id as the client has it.
    pub partition: Uuid,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Consumer group.
    pub group: String,
    /// Free text.
    pub event_type: String,
    /// JSON text.
    pub data: String,
    /// Names that it is to be found by.
    pub names: Vec<String>,
}

impl Broker {
    /// Records an event; answers its id.
    pub async fn record_trace(&self, event: TraceEvent) -> BrokerResult<Uuid> {
        let TraceEvent { partition, transaction_id, group, event_type, data, mut names } = event;
        names.sort_unstable();
        names.dedup();
        let (id, partition_id) = (Uuid::now_v7(), self.ids().partition_of(partition));
        let worker = WORKER;
        let trace = NewTrace { id, partition, partition_id, transaction_id, group, event_type, worker, data, names };
        self.store.record_trace(&trace).await?;
        Ok(id)
    }

    /// The events of one message, oldest first.
    pub async fn traces_of(&self, partition: Uuid, transaction: &str) -> BrokerResult<Vec<TraceRow>> {
        Ok(self.store.traces_of(partition, transaction, TRACES_PER_MESSAGE_MAX).await?)
    }

    /// The events of one name, oldest first, and how many there are.
    pub async fn traces_named(&self, name: &str, limit: i64, offset: i64) -> BrokerResult<(Vec<TraceRow>, i64)> {
        let _turn = self.inspection.turn().await?;
        Ok(self.store.traces_named(name, limit, offset).await?)
    }

    /// Names of events, the last used first, and how many there are.
    pub async fn trace_names(&self, limit: i64, offset: i64) -> BrokerResult<(Vec<TraceName>, i64)> {
        Ok(self.store.trace_names(limit, offset).await?)
    }
}
