//! Resident memory per live lease, its actor and its place in the directory included: `cargo bench --bench lease_memory`.
//!
//! Every lease is on a partition of its own, so each has an actor to itself: the dearest case. The load generator's
//! `ack --lease-memory` measures the same from outside, where caches and buffers of the broker move by more than that.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use regent::broker::ack::meter::AckMeter;
use regent::broker::ack::{Fingerprint, LeaseGrant};
use regent::broker::arbiters::Arbiters;
use regent::broker::directory::Home;
use regent::ids::{GroupId, LeaseId, Offset, PartitionId, QueueId, TransactionHash};
use regent::process::usage;
use uuid::Uuid;

/// The broker's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LEASES: i64 = 500_000;
/// Registered before anything is compared: tables and pages of the allocator exist then.
const BEFORE: i64 = 50_000;
/// Different batches whose fingerprints are dealt out.
const BATCHES: usize = 32;
/// Unbounded for this purpose.
const REGISTRY_BYTES: usize = 64 << 30;

/// A size of batch, for a process of its own: what one leaves free another would fill.
const BATCH: &str = "REGENT_BENCH_BATCH";

fn main() {
    if let Ok(batch) = std::env::var(BATCH) {
        let batch = batch.parse().unwrap();
        return println!("| {batch} | {} |", bytes_per_lease(batch));
    }
    println!("| messages per lease | bytes per live lease |\n|---|---|");
    for batch in [10, 10_000] {
        let itself = std::env::current_exe().unwrap();
        let ended = std::process::Command::new(itself).env(BATCH, batch.to_string()).status().unwrap();
        assert!(ended.success());
    }
}

fn bytes_per_lease(batch: usize) -> i64 {
    let prints: Vec<Fingerprint> = (0..BATCHES)
        .map(|nth| Fingerprint::of((0..batch).map(|n| TransactionHash::of(&format!("order-{nth}-{n}")))))
        .collect();
    let name: Arc<str> = "group".into();
    let home = Home::new(Arbiters::start(1).unwrap(), Vec::new(), REGISTRY_BYTES, Arc::new(AckMeter::new()));
    let grant = |partition: i64| LeaseGrant {
        partition: PartitionId(partition),
        queue: QueueId(1),
        group: GroupId(1),
        group_name: name.clone(),
        worker: LeaseId(Uuid::from_u128(partition as u128)),
        committed: Offset(-1),
        batch_end: Offset(batch as i64 - 1),
        expires: Instant::now() + Duration::from_secs(3600),
        fingerprint: prints[partition as usize % BATCHES],
        conflating: false,
    };
    (0..BEFORE).for_each(|partition| home.granted(grant(partition)));
    let before = settled_rss();
    (BEFORE..BEFORE + LEASES).for_each(|partition| home.granted(grant(partition)));
    let after = settled_rss();
    assert_eq!(home.actors(), (BEFORE + LEASES) as usize);
    home.stop();
    (after - before) / LEASES
}

/// Resident memory once it has stopped to move: actors start on their own thread.
fn settled_rss() -> i64 {
    let mut last = 0;
    loop {
        std::thread::sleep(Duration::from_secs(2));
        let now = usage().resident_bytes as i64;
        if (now - last).abs() < 1 << 20 {
            return now;
        }
        last = now;
    }
}
