//! The ack path against a store in memory: differential histories (I6), faults, races.

#![allow(clippy::unwrap_used, clippy::panic)]

pub(crate) mod fake;
mod faults;
mod history;
mod model;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::*;
use crate::ids::{Offset, QueueId, TransactionHash};
use fake::{FakeStore, IDS, group_id};

/// What the listener heard: partition, group, how.
pub(crate) type Heard = Arc<Mutex<Vec<(i64, i32, Release)>>>;

/// A pipeline over this store, and what its listener hears.
pub(crate) fn pipeline(store: &Arc<FakeStore>, settings: AckSettings) -> (AckPipeline, Heard) {
    let heard = Heard::default();
    let ears = heard.clone();
    let listener = move |p: PartitionId, g: GroupId, how: Release| ears.lock().unwrap().push((p.0, g.0, how));
    (AckPipeline::start(store.clone(), settings, Arc::new(listener)), heard)
}

/// Everything on, small.
pub(crate) fn fused() -> AckSettings {
    AckSettings { shards: 2, threads: 1, ..AckSettings::default() }
}

pub(crate) fn positional() -> AckSettings {
    AckSettings { fusion: false, ..fused() }
}

pub(crate) fn serial() -> AckSettings {
    AckSettings { serial: true, ..fused() }
}

pub(crate) fn worker(n: u128) -> LeaseId {
    LeaseId(uuid::Uuid::from_u128(n))
}

pub(crate) fn item(partition: i64, id: &str, lease: LeaseClaim, status: AckStatus) -> AckItem {
    AckItem {
        target: AckTarget::Partition(IDS().partition(PartitionId(partition))),
        lease,
        transaction: (!id.is_empty()).then(|| TransactionHash::of(id)),
        status,
        reason: None,
    }
}

/// What the pop path registers after such a claim.
pub(crate) fn grant(partition: i64, group: &str, holder: LeaseId, claim: &(i64, i64, Vec<String>)) -> LeaseGrant {
    let (committed, last, ids) = claim;
    LeaseGrant {
        partition: PartitionId(partition),
        queue: QueueId(1),
        group: GroupId(group_id(group)),
        group_name: group.into(),
        worker: holder,
        committed: Offset(*committed),
        batch_end: Offset(*last),
        expires: Instant::now() + Duration::from_secs(60),
        fingerprint: Fingerprint::of(ids.iter().map(|id| TransactionHash::of(id))),
        conflating: false,
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}
