//! Micro-benchmarks of the ack path, without a database. `cargo bench --bench ack`; figures in `docs/benchmarks.md`.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use regent::broker::ack::meter::AckMeter;
use regent::broker::ack::{Fingerprint, LeaseGrant};
use regent::broker::ack_decision::{AckStatus, Place, Position, ResolvedItem, RetryPolicy, decide};
use regent::broker::arbiters::Arbiters;
use regent::broker::directory::Home;
use regent::broker::fusion_batch::{Batch, Caps};
use regent::broker::resolver::{Resolver, Window};
use regent::ids::{GroupId, LeaseId, Offset, PartitionId, QueueId, TransactionHash};
use regent::store::acks::HashRow;
use regent::store::advances::PositionalAdvance;
use uuid::Uuid;

/// The broker's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn hashes(count: usize) -> Vec<TransactionHash> {
    (0..count).map(|n| TransactionHash::of(&format!("order-{n}-created"))).collect()
}

fn grant(partition: i64, fingerprint: Fingerprint, group_name: &Arc<str>) -> LeaseGrant {
    LeaseGrant {
        partition: PartitionId(partition),
        queue: QueueId(1),
        group: GroupId(1),
        group_name: group_name.clone(),
        worker: LeaseId(Uuid::from_u128(7)),
        committed: Offset(-1),
        batch_end: Offset(9),
        expires: Instant::now() + Duration::from_secs(600),
        fingerprint,
        conflating: false,
    }
}

fn advance(partition: i64) -> PositionalAdvance {
    PositionalAdvance {
        partition: PartitionId(partition),
        group: GroupId(1),
        worker: LeaseId(Uuid::from_u128(7)),
        committed: Offset(-1),
        batch_end: Offset(9),
    }
}

fn pure(c: &mut Criterion) {
    let thousand = hashes(1000);
    c.bench_function("fingerprint of 1000 ids", |b| {
        b.iter(|| Fingerprint::of(black_box(&thousand).iter().copied()));
    });

    let position = Position { committed: Offset(-1), batch_end: Some(Offset(999)), retry_count: 0 };
    let policy = RetryPolicy { retry_limit: 3, dead_letters: true, retry_delay: None };
    let items: Vec<ResolvedItem> = (0..1000)
        .map(|n| ResolvedItem {
            status: AckStatus::Completed,
            place: Place::Span { first: Offset(n), last: Offset(n) },
        })
        .collect();
    c.bench_function("decision on 1000 items", |b| {
        b.iter(|| decide(position, policy, black_box(&items).iter().copied()));
    });

    let rows: Vec<HashRow> = thousand
        .chunks(100)
        .enumerate()
        .map(|(nth, chunk)| HashRow {
            base: Offset(nth as i64 * 100),
            packed: chunk.iter().flat_map(|hash| hash.to_bytes()).collect(),
        })
        .collect();
    for wanted in [1, 1000] {
        c.bench_function(&format!("resolving {wanted} of a batch of 1000"), |b| {
            b.iter(|| {
                let ids = thousand.iter().rev().take(wanted).map(|hash| Some(*hash));
                let (mut resolver, slots) = Resolver::new(ids);
                for row in black_box(&rows) {
                    resolver.scan(row, 0..=999, Window::Leased).expect("whole rows");
                }
                (resolver.complete(), slots.len())
            });
        });
    }

    let caps = Caps { rows_max: 1000, bytes_max: 1 << 20 };
    let advances: Vec<PositionalAdvance> = (0..1000).map(|n| advance(n * 7919 % 1000)).collect();
    c.bench_function("fold of 1000 advances", |b| {
        b.iter_batched(
            || advances.clone(),
            |advances| {
                let mut batch = Batch::new(caps);
                advances.into_iter().enumerate().for_each(|(nth, advance)| batch.add(advance, nth));
                batch.into_rows()
            },
            BatchSize::SmallInput,
        );
    });
}

fn actors(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    let name: Arc<str> = "billing".into();
    for batch in [10, 10_000] {
        println!("memory per live lease, batch {batch}: {} bytes", lease_bytes(batch, &name));
    }
    let home = Home::new(Arbiters::start(1).expect("threads"), Vec::new(), usize::MAX, Arc::new(AckMeter::new()));
    let print = Fingerprint::of(hashes(10));
    c.bench_function("grant, then ask the actor and be told a hit", |b| {
        b.to_async(&runtime).iter(|| async {
            home.granted(grant(1, print, &name));
            let asked = home.cover(PartitionId(1), name.clone(), LeaseId(Uuid::from_u128(7)), print, None);
            asked.expect("an actor").await.expect("an answer")
        });
    });
    home.stop();
}

/// Resident bytes per lease of many, each on its own partition and so in its own actor: what as many again add to the
/// first ones, so that neither threads nor what fingerprints leave behind count.
fn lease_bytes(batch: usize, name: &Arc<str>) -> usize {
    const LEASES: i64 = 20_000;
    let home = Home::new(Arbiters::start(1).expect("threads"), Vec::new(), usize::MAX, Arc::new(AckMeter::new()));
    let hashes = hashes(batch);
    let resident_with = |leases: std::ops::Range<i64>| {
        let last = PartitionId(leases.end - 1);
        for partition in leases {
            home.granted(grant(partition, Fingerprint::of(hashes.iter().copied()), name));
        }
        // The last actor answers only when those before it have started: they share a thread.
        let asked = home.cover(last, name.clone(), LeaseId(Uuid::nil()), Fingerprint::default(), None);
        asked.expect("an actor").blocking_recv().expect("an answer");
        resident_bytes()
    };
    let (first, all) = (resident_with(0..LEASES), resident_with(LEASES..2 * LEASES));
    home.stop();
    all.saturating_sub(first) / LEASES as usize
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: usize = statm.split(' ').nth(1).and_then(|text| text.parse().ok()).expect("a number");
    pages * 4096
}

criterion_group!(benches, pure, actors);
criterion_main!(benches);
