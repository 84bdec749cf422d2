//! Micro-benchmarks of the message path; the last groups run against a PostgreSQL of their own, with its defaults.
//! `cargo bench --bench message_path`; figures in `docs/benchmarks.md`.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::fmt::Write as _;
use std::hint::black_box;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use regent::app::App;
use regent::broker::Broker;
use regent::broker::append::Writing;
use regent::broker::dedup::{DedupBudget, DedupMemory};
use regent::broker::group::Subscription;
use regent::broker::pop::{Delegated, Policy, PopAnswer, PopRequest, Scope, Sizes};
use regent::broker::pop_call::PopCall;
use regent::broker::push::{Packed, PushItem};
use regent::broker::push_flush::{by_partition, flush};
use regent::broker::push_fusion::PushJob;
use regent::broker::segment::{Frame, Frames, seal};
use regent::broker::segment_cache::SegmentCache;
use regent::config::Config;
use regent::embedded::EmbeddedPostgres;
use regent::http::pop::render;
use regent::http::push::Body;
use regent::ids::{GroupId, LeaseId, Offset, PartitionId, QueueId, TransactionHash};
use regent::store::Store;
use regent::store::advances::{OnLocked, PositionalAdvance};
use regent::store::groups::StartAt;
use regent::store::partitions::PartitionKey;
use sqlx::{Connection, PgConnection};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use uuid::Uuid;

/// Bytes of one payload: a JSON string of random hexadecimal digits, so that compression finds half of it.
const PAYLOAD: usize = 256;
const ZSTD_LEVEL: i32 = 1;
/// Rows of one flush.
const ROWS: [usize; 3] = [1, 16, 256];

fn payload(rng: &mut SmallRng) -> String {
    let mut text = String::from("\"");
    while text.len() < PAYLOAD - 1 {
        let _ = write!(text, "{:x}", rng.random_range(0..16));
    }
    text + "\""
}

struct Message {
    id: Uuid,
    transaction: String,
    payload: String,
}

fn messages(count: usize) -> Vec<Message> {
    let mut rng = SmallRng::seed_from_u64(1);
    (0..count)
        .map(|n| Message {
            id: Uuid::from_u128(rng.random()),
            transaction: format!("order-{n}-created"),
            payload: payload(&mut rng),
        })
        .collect()
}

fn frame(message: &Message) -> Frame<'_> {
    Frame {
        id: message.id,
        transaction_id: Some(&message.transaction),
        trace_id: None,
        producer_sub: None,
        encrypted: false,
        payload: message.payload.as_bytes(),
    }
}

fn pack(messages: &[Message]) -> Vec<u8> {
    let mut body = Vec::new();
    messages.iter().for_each(|message| frame(message).pack(&mut body));
    body
}

fn pure(c: &mut Criterion) {
    let hundred = messages(100);
    let items: Vec<String> = hundred
        .iter()
        .map(|m| {
            let (transaction, payload) = (&m.transaction, &m.payload);
            format!(
                r#"{{"queue":"orders","partition":"customer-7","transactionId":"{transaction}","payload":{payload}}}"#
            )
        })
        .collect();
    let body = format!(r#"{{"items":[{}]}}"#, items.join(","));
    c.bench_function("decode of a push body of 100 items", |b| {
        b.iter(|| {
            let body = Body::parse(black_box(body.as_bytes())).expect("a body");
            body.items().expect("items").len()
        });
    });

    for count in [100, 1000] {
        let messages = messages(count);
        c.bench_function(&format!("pack of {count} messages"), |b| b.iter(|| pack(black_box(&messages))));
        let body = pack(&messages);
        c.bench_function(&format!("seal of {count} messages"), |b| b.iter(|| seal(black_box(&body), ZSTD_LEVEL)));
        let sealed = seal(&body, ZSTD_LEVEL);
        c.bench_function(&format!("open of {count} messages"), |b| {
            b.iter(|| Frames::open(black_box(&sealed)).expect("a segment"));
        });
        let frames = Frames::of_body(Bytes::from(body));
        c.bench_function(&format!("unpack of {count} messages"), |b| {
            b.iter(|| black_box(&frames).iter().map(|frame| frame.expect("a frame").payload.len()).sum::<usize>());
        });
    }

    let thousand = messages(1000);
    c.bench_function("xxh3 of 1000 ids", |b| {
        b.iter(|| {
            for message in black_box(&thousand) {
                black_box(TransactionHash::of(&message.transaction));
            }
        });
    });
}

/// A PostgreSQL with the settings that the broker gives it, and a broker on it.
struct Rig {
    runtime: Runtime,
    postgres: EmbeddedPostgres,
    app: App,
    store: Store,
    directory: tempfile::TempDir,
}

impl Rig {
    fn start() -> Rig {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let directory = tempfile::tempdir().unwrap();
        // As root, the server runs under another account.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut config = Config::with_data_dir(directory.path().join("data")).unwrap();
        let (postgres, app, store) = runtime.block_on(async {
            let postgres = EmbeddedPostgres::start(&config).await.expect("PostgreSQL");
            config.use_embedded(postgres.url(), regent::embedded::encryption_key(&config.data_dir).unwrap());
            let app = App::start(config.clone()).await.expect("a broker");
            let store = regent::app::open_store(&config).await.expect("a store");
            (postgres, app, store)
        });
        Rig { runtime, postgres, app, store, directory }
    }

    fn stop(self) {
        self.runtime.block_on(async {
            self.store.close().await;
            self.app.stop().await;
            self.postgres.stop().await.expect("PostgreSQL ends in order");
        });
        self.directory.close().unwrap();
    }

    /// A queue with partitions, each with its key.
    fn queue(&self, name: &str, partitions: usize) -> (QueueId, Vec<PartitionId>) {
        let names = [name.to_owned()];
        self.runtime.block_on(async {
            self.store.create_queues(&names).await.unwrap();
            let queue = self.store.find_queues(&names).await.unwrap().first().unwrap().id;
            let keys: Vec<PartitionKey> = (0..partitions).map(|nth| key(queue, nth)).collect();
            self.store.create_partitions(&keys).await.unwrap();
            let mut ids = Vec::new();
            for key in keys {
                ids.push(self.store.find_partition(queue, &key.name).await.unwrap().unwrap());
            }
            (queue, ids)
        })
    }
}

/// Names sort as their numbers do.
fn key(queue: QueueId, nth: usize) -> PartitionKey {
    PartitionKey { queue, name: format!("p{nth:04}") }
}

fn with_postgres(c: &mut Criterion) {
    let rig = Rig::start();
    rendering(c, &rig);
    ack_flushes(c, &rig);
    push_flushes(c, &rig);
    rig.stop();
}

fn rendering(c: &mut Criterion, rig: &Rig) {
    let broker = rig.app.broker().expect("booted");
    let request = PopRequest {
        scope: Scope::Queue("rendered".into()),
        group: "billing".into(),
        sizes: Sizes { batch: 1000, partitions: Some(10) },
        delegated: Delegated::default(),
        auto_ack: false,
        wait: false,
        timeout: Duration::from_secs(5),
        lease_seconds: Some(60),
        subscription: Subscription { mode: Some("all".into()), from: None },
        conflation: None,
    };
    let answer = rig.runtime.block_on(popped(broker, &request));
    assert_eq!(answer.delivered.iter().map(|part| part.hashes.len()).sum::<usize>(), 1000);
    c.bench_function("render of a pop answer of 1000 messages of 10 partitions", |b| {
        b.iter(|| render(broker, &request, black_box(&answer), Policy::default(), None));
    });
}

async fn popped(broker: &Broker, request: &PopRequest) -> PopAnswer {
    let thousand = messages(1000);
    let partitions: Vec<String> = (0..10).map(|nth| format!("p{nth}")).collect();
    let items: Vec<PushItem<'_>> = thousand
        .iter()
        .enumerate()
        .map(|(nth, message)| PushItem {
            queue: "rendered",
            partition: &partitions[nth / 100],
            transaction_id: Some(&message.transaction),
            trace_id: None,
            payload: message.payload.as_bytes(),
        })
        .collect();
    broker.push(&items, None).await.expect("pushed");
    let popped = broker.pop(&mut PopCall::new(request.clone())).await.expect("popped").expect("not parked");
    popped.answer.expect("messages")
}

const WORKER: Uuid = Uuid::from_u128(7);

fn ack_flushes(c: &mut Criterion, rig: &Rig) {
    let (queue, partitions) = rig.queue("acked", *ROWS.iter().max().unwrap());
    let (group, mut leasing) = rig.runtime.block_on(async {
        let group = rig.store.create_groups(&[queue], "billing").await.unwrap()[0].1.id;
        let unmet: Vec<_> = partitions.iter().map(|id| (group, *id, StartAt::Beginning)).collect();
        rig.store.seed_cursors(&unmet).await.unwrap();
        (group, PgConnection::connect(rig.postgres.url()).await.unwrap())
    });
    for rows in ROWS {
        let advances: Vec<PositionalAdvance> = partitions[..rows].iter().map(|id| advance(*id, group)).collect();
        c.bench_function(&format!("ack flush of {rows} rows"), |b| {
            b.iter_custom(|times| {
                rig.runtime.block_on(async {
                    let mut spent = Duration::ZERO;
                    for _ in 0..times {
                        lease_again(&mut leasing, &partitions[..rows], group).await;
                        let begun = Instant::now();
                        let advanced = rig.store.advance(&advances, OnLocked::Wait).await.unwrap();
                        spent += begun.elapsed();
                        assert!(advanced.into_iter().all(|done| done));
                    }
                    spent
                })
            });
        });
    }
    rig.runtime.block_on(leasing.close()).unwrap();
}

fn advance(partition: PartitionId, group: GroupId) -> PositionalAdvance {
    PositionalAdvance { partition, group, worker: LeaseId(WORKER), committed: Offset(-1), batch_end: Offset(9) }
}

/// Puts cursors back to where a pop left them.
async fn lease_again(connection: &mut PgConnection, partitions: &[PartitionId], group: GroupId) {
    sqlx::query(
        "UPDATE queen.log_consumers SET committed = -1, batch_end = 9, worker_id = $3, \
         lease_acquired_at = now(), lease_expires_at = now() + interval '1 hour' \
         WHERE partition_id = ANY($1) AND group_id = $2",
    )
    .bind(partitions.iter().map(|id| id.0).collect::<Vec<_>>())
    .bind(group.0)
    .bind(WORKER)
    .execute(connection)
    .await
    .unwrap();
}

/// Ten new messages for every partition, in one flush, without deduplication.
fn push_flushes(c: &mut Criterion, rig: &Rig) {
    let (queue, _) = rig.queue("pushed", *ROWS.iter().max().unwrap());
    let ten = messages(10);
    let mut packed = Packed::default();
    for message in &ten {
        let frame = frame(message);
        packed.add(&frame, frame.transaction_hash());
    }
    let dedup = DedupBudget::new(0);
    let mut memory = DedupMemory::new(&dedup);
    let cache = SegmentCache::new(0, rig.store.generation().clone());
    let writing = Writing { zstd_level: ZSTD_LEVEL, cache, dedup };
    for partitions in ROWS {
        c.bench_function(&format!("push flush of {partitions} partitions, 10 messages each"), |b| {
            b.iter_custom(|times| {
                rig.runtime.block_on(async {
                    let mut spent = Duration::ZERO;
                    for _ in 0..times {
                        let batches = by_partition((0..partitions).map(|nth| job(queue, nth, &packed)).collect());
                        let begun = Instant::now();
                        let flushed = flush(&rig.store, &mut memory, &writing, &batches, false).await.unwrap();
                        spent += begun.elapsed();
                        assert_eq!(flushed.appended.len(), partitions);
                    }
                    spent
                })
            });
        });
    }
}

fn job(queue: QueueId, nth: usize, packed: &Packed) -> PushJob {
    let (reply, _) = oneshot::channel();
    PushJob { key: key(queue, nth), window_seconds: 0, packed: packed.clone(), replaces: None, reply }
}

criterion_group!(benches, pure, with_postgres);
criterion_main!(benches);
