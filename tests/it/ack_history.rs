//! Random histories against a model that keeps the fate of every message (I1, I4, I5): what is delivered, what every ack
//! is answered, and the rows after each step, on every road of the ack path. `histories.rs` compares the roads with each
//! other; this one says that the story they agree on is the right one.
//!
//! A failure prints its seed and the shortest history that proptest finds. `REGENT_IT_SEED=<seed>` tells the same
//! histories again, `REGENT_IT_HISTORIES=<n>` tells more.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use reqwest::Method;
use serde_json::json;

use crate::harness::{Aged, PATIENCE, Road, TestBroker, eventually, tell};
use model::{Claim, Letter, Model, Options, Said, Status, Told};
use watched::{GROUPS, PARTITIONS, Watched, name};

pub mod model;
pub mod watched;

const HISTORIES: u32 = 100;
/// What the queues keep: longer than a test takes. Hashes are kept for 900 s.
const KEPT_SECONDS: i32 = 3000;

#[derive(Clone, Debug)]
enum Op {
    Push { partition: usize, ids: Vec<u8> },
    Pop { partition: usize, group: usize, batch: usize },
    Ack { group: usize, leases: Vec<LeaseRef>, picks: Vec<Pick> },
    Extend { nth_last: usize },
    Expire,
    ReleaseHeld,
    Seek { group: usize, partition: Option<usize>, to: Destination },
    DeleteGroup { group: usize, keep_registration: bool },
    Purge { partition: usize, to: usize },
    Retain { partition: usize, to: usize },
}

/// Where a seek goes.
#[derive(Clone, Copy, Debug)]
enum Destination {
    Beginning,
    End,
    /// The commit time of the message that was pushed as this one, over all partitions.
    MessageOf(usize),
}

/// A batch that the group has popped, counted from the latest, and how the ack names its lease.
#[derive(Clone, Copy, Debug)]
struct LeaseRef {
    nth_last: usize,
    naming: u8,
}

/// What the ack says of it.
#[derive(Clone, Debug)]
enum Pick {
    /// Everything delivered, as completed: what the fast path is for.
    Whole,
    /// One message of the batch.
    One(usize, u8),
    /// Any id.
    Id(u8, u8),
}

fn op() -> impl Strategy<Value = Op> {
    let partition = 0..PARTITIONS;
    let group = 0..GROUPS.len();
    let nth_last = prop_oneof![6 => Just(0usize), 2 => Just(1), 1 => 2usize..5];
    let lease = (nth_last, 0u8..14).prop_map(|(nth_last, naming)| LeaseRef { nth_last, naming });
    let leases = prop_oneof![4 => prop::collection::vec(lease.clone(), 1), 1 => prop::collection::vec(lease, 2)];
    let pick = prop_oneof![
        1 => Just(Pick::Whole),
        6 => (0usize..8, any::<u8>()).prop_map(|(nth, kind)| Pick::One(nth, kind)),
        1 => (0u8..40, any::<u8>()).prop_map(|(id, kind)| Pick::Id(id, kind)),
    ];
    let picks = prop_oneof![2 => Just(vec![Pick::Whole]), 3 => prop::collection::vec(pick, 1..4)];
    let ids = prop::collection::vec(0u8..40, 1..6);
    let to = prop_oneof![
        2 => Just(Destination::Beginning),
        1 => Just(Destination::End),
        3 => (0usize..30).prop_map(Destination::MessageOf),
    ];
    prop_oneof![
        4 => (partition.clone(), ids).prop_map(|(partition, ids)| Op::Push { partition, ids }),
        8 => (partition.clone(), group.clone(), 1usize..7).prop_map(|(partition, group, batch)| Op::Pop { partition, group, batch }),
        12 => (group.clone(), leases, picks).prop_map(|(group, leases, picks)| Op::Ack { group, leases, picks }),
        1 => (0usize..3).prop_map(|nth_last| Op::Extend { nth_last }),
        1 => Just(Op::Expire),
        1 => Just(Op::ReleaseHeld),
        2 => (group.clone(), prop::option::of(partition.clone()), to).prop_map(|(group, partition, to)| Op::Seek { group, partition, to }),
        1 => (group, any::<bool>()).prop_map(|(group, keep_registration)| Op::DeleteGroup { group, keep_registration }),
        1 => (partition.clone(), 0usize..12).prop_map(|(partition, to)| Op::Purge { partition, to }),
        1 => (partition, 0usize..12).prop_map(|(partition, to)| Op::Retain { partition, to }),
    ]
}

/// One history on a queue of its own.
struct Run<'a> {
    watched: Watched<'a>,
    /// Every push in its order: partition, and the offset there.
    pushed: Vec<(usize, usize)>,
}

impl<'a> Deref for Run<'a> {
    type Target = Watched<'a>;

    fn deref(&self) -> &Watched<'a> {
        &self.watched
    }
}

impl DerefMut for Run<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.watched
    }
}

impl Run<'_> {
    async fn step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Push { partition, ids } => {
                // One request is one segment, and it collapses equal ids; so each message is pushed on its own.
                for id in ids {
                    let id = format!("m{id}");
                    self.broker.push_ids(&self.queue, &name(*partition), [&id]).await;
                    self.pushed.push((*partition, self.model.count(*partition)));
                    self.model.push(*partition, &[id]);
                }
            }
            Op::Pop { partition, group, batch } => self.pop(*partition, *group, *batch).await?,
            Op::Ack { group, leases, picks } => self.ack(*group, leases, picks).await?,
            Op::Extend { nth_last } => {
                if let Some((.., popped)) = self.pops.iter().rev().nth(*nth_last) {
                    self.broker.extend(&popped.lease_id, 7200).await;
                }
            }
            Op::Expire => {
                self.model.expire();
                self.cursors("SET lease_expires_at = now() - interval '1 minute' WHERE c.worker_id IS NOT NULL AND")
                    .await;
            }
            Op::ReleaseHeld => {
                self.model.release_held();
                self.cursors("SET not_before = NULL WHERE").await;
            }
            Op::Seek { group, partition, to } => self.seek(*group, *partition, *to).await?,
            Op::DeleteGroup { group, keep_registration } => {
                let target = format!(
                    "/api/v1/consumer-groups/{}/queues/{}?deleteMetadata={}",
                    GROUPS[*group], self.queue, !keep_registration
                );
                let reply = self.broker.try_send(Method::DELETE, &target, None).await.unwrap().expect(200).json();
                let expected = self.model.delete_group(*group);
                prop_assert_eq!(reply["deletedPartitions"].as_u64(), Some(expected as u64), "cursors deleted");
            }
            Op::Purge { partition, to } => {
                self.age_out(*partition, Aged::Hashes, *to).await;
                let to = (*to).min(self.model.count(*partition));
                self.model.purge(*partition, to);
            }
            Op::Retain { partition, to } => {
                self.age_out(*partition, Aged::Segments, *to).await;
                let to = (*to).min(self.model.count(*partition));
                self.model.retain(*partition, to);
            }
        }
        self.compare_rows().await?;
        for partition in 0..PARTITIONS {
            let bounds = self.broker.db.log_bounds(&self.queue, &name(partition)).await;
            prop_assert_eq!(bounds, self.model.bounds(partition), "log of {}", partition);
        }
        prop_assert_eq!(&self.letters().await, self.model.letters(), "dead letters");
        Ok(())
    }

    async fn seek(&mut self, group: usize, partition: Option<usize>, to: Destination) -> Result<(), TestCaseError> {
        let (mut first, mut body) = (0, json!({ "timestamp": "1970-01-01T00:00:00Z" }));
        match to {
            Destination::Beginning => {}
            Destination::End => (first, body) = (usize::MAX, json!({ "toEnd": true })),
            Destination::MessageOf(nth) => {
                let Some((of, offset)) = self.pushed.get(nth).copied() else { return Ok(()) };
                // Retention may have deleted it: then nobody knows its time.
                let Some(at) = self.committed_at(of, offset).await else { return Ok(()) };
                (first, body) = (nth, json!({ "timestamp": at }));
            }
        }
        let mut target = format!("/api/v1/consumer-groups/{}/queues/{}", GROUPS[group], self.queue);
        if let Some(partition) = partition {
            target.push_str(&format!("/partitions/{}", name(partition)));
        }
        let reply = self.broker.post_json(&format!("{target}/seek"), &body).await;
        let named: Vec<usize> =
            (0..PARTITIONS).filter(|p| partition.is_none_or(|only| only == *p) && self.model.count(*p) > 0).collect();
        prop_assert_eq!(reply.status, if named.is_empty() { 404 } else { 200 }, "{}", reply.text);
        for partition in named {
            let later = self.pushed.iter().enumerate().find(|(nth, (of, _))| *nth >= first && *of == partition);
            let next = later.map_or(self.model.count(partition), |(_, (_, offset))| *offset);
            self.model.seek(partition, group, next);
        }
        Ok(())
    }

    /// When a message was committed, as its segment says.
    async fn committed_at(&self, partition: usize, offset: usize) -> Option<String> {
        sqlx::query_scalar(
            "SELECT s.created_at::text FROM queen.log_segments s JOIN queen.log_partitions p ON p.id = s.partition_id
               JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1 AND p.name = $2 AND s.base_offset = $3",
        )
        .bind(&self.queue)
        .bind(name(partition))
        .bind(offset as i64)
        .fetch_optional(&self.broker.db.pool)
        .await
        .unwrap()
    }

    async fn ack(&mut self, group: usize, leases: &[LeaseRef], picks: &[Pick]) -> Result<(), TestCaseError> {
        let mine: Vec<usize> = (0..self.pops.len()).filter(|nth| self.pops[*nth].0 == group).collect();
        let mut said = Vec::new();
        for LeaseRef { nth_last, naming } in leases {
            let Some(pop) = mine.iter().rev().nth(*nth_last).copied() else { continue };
            let claim = match naming {
                0 => Claim::None,
                1 => Claim::Of(usize::from(*naming) % self.pops.len()),
                _ => Claim::Of(pop),
            };
            let partition = self.pops[pop].1;
            let ids = self.pops[pop].2.ids();
            let mut say = |id: &str, status| {
                let reason = (said.len() % 3 == 0).then(|| format!("reason {}", said.len()));
                said.push(Said { partition, id: id.to_owned(), claim, status, reason });
            };
            for pick in picks {
                match pick {
                    Pick::Whole => ids.iter().for_each(|id| say(id, Status::Completed)),
                    Pick::One(nth, kind) => say(ids[nth % ids.len()], Status::drawn(*kind, 10)),
                    Pick::Id(id, kind) => say(&format!("m{id}"), Status::drawn(*kind, 10)),
                }
            }
        }
        if said.is_empty() {
            return Ok(());
        }
        let partition_id =
            |partition: usize| self.pops.iter().find(|(_, p, _)| *p == partition).unwrap().2.partition_id.clone();
        let items = said.iter().map(|item| {
            let lease = match item.claim {
                Claim::None => "",
                Claim::Of(pop) => &self.pops[pop].2.lease_id,
            };
            json!({ "transactionId": item.id, "partitionId": partition_id(item.partition), "leaseId": lease,
                    "status": item.status.word(), "error": item.reason })
        });
        let results = self.broker.ack(GROUPS[group], items.collect()).await;
        let told: Vec<Told> = results
            .iter()
            .map(|r| {
                let outcome = match &r.error {
                    None => Ok(()),
                    Some(error) => Err(KNOWN.into_iter().find(|known| known == error).unwrap_or("some other error")),
                };
                assert_eq!(r.success, outcome.is_ok(), "{r:?}");
                (outcome, r.lease_released, r.dlq, r.noop)
            })
            .collect();
        let expected = self.model.ack(group, GROUPS[group], &said);
        prop_assert_eq!(told, expected, "answers to {:?}", said);
        Ok(())
    }

    async fn cursors(&self, what: &str) {
        let sql = format!(
            "UPDATE queen.log_consumers c {what} c.partition_id IN (SELECT p.id FROM queen.log_partitions p
               JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1)"
        );
        sqlx::query(sqlx::AssertSqlSafe(sql)).bind(&self.queue).execute(&self.broker.db.pool).await.unwrap();
    }

    /// Makes what a partition stores of a kind below an offset too old for the queue, and lets the broker's own retention
    /// delete it. Every message is a segment of its own, so that what goes is whole segments from the front.
    async fn age_out(&self, partition: usize, what: Aged, to: usize) {
        self.broker.db.age_front(&self.queue, &name(partition), what, to as i64, 2 * KEPT_SECONDS).await;
        eventually(PATIENCE, || self.broker.db.is_queue_swept(&self.queue)).await;
    }

    async fn letters(&self) -> BTreeMap<(usize, usize), Vec<Letter>> {
        let filed: Vec<(String, String, i64, String, String, i32)> = sqlx::query_as(
            "SELECT partition_name, group_name, log_offset, transaction_id, reason, retry_count
               FROM queen.dead_letters WHERE queue_name = $1 ORDER BY failed_at, id",
        )
        .bind(&self.queue)
        .fetch_all(&self.broker.db.pool)
        .await
        .unwrap();
        let mut letters: BTreeMap<_, Vec<Letter>> = BTreeMap::new();
        for (partition, group, offset, id, reason, retries) in filed {
            let partition = (0..PARTITIONS).find(|p| name(*p) == partition).unwrap();
            let group = GROUPS.iter().position(|g| *g == group).unwrap();
            letters.entry((partition, group)).or_default().push((offset, id, reason, retries));
        }
        letters
    }
}

const KNOWN: [&str; 5] = [model::NO_CONSUMER, model::STALE, model::PASSED, model::UNRESOLVABLE, model::REJECTED];

const ROADS: [Road; 3] = [Road::Fused, Road::RegistryOnly, Road::ResolutionOnly];

/// Each history is told on every road, side by side: what agrees with the model on each agrees between them (I6).
#[test]
fn the_story_is_that_of_per_message_receipts_on_every_road() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let brokers = runtime.block_on(join_all(ROADS.map(TestBroker::sweeping)));
    let options = (0i32..3, prop::bool::weighted(0.3), prop::bool::weighted(0.7));
    tell(HISTORIES, &(options, prop::collection::vec(op(), 1..40)), |number, (options, ops)| {
        let roads = ROADS.iter().zip(&brokers).map(async |(road, broker)| {
            let told = tell_on(broker, number, options, &ops).await;
            told.map_err(|error| match error {
                TestCaseError::Fail(why) => TestCaseError::fail(format!("{road:?}: {why}")),
                rejected => rejected,
            })
        });
        runtime.block_on(join_all(roads)).into_iter().collect()
    });
    runtime.block_on(async move { drop(brokers) });
}

/// One history on one road, beside a model of its own.
async fn tell_on(
    broker: &TestBroker,
    number: u64,
    (retry_limit, holds, dead_letters): (i32, bool, bool),
    ops: &[Op],
) -> Result<(), TestCaseError> {
    let model = Model::new(Options { retry_limit, holds, dead_letters }, PARTITIONS);
    let mut run = Run { watched: Watched::new(broker, format!("q{number}"), model), pushed: Vec::new() };
    let delay = if holds { 3_600_000 } else { 0 };
    let options = json!({ "retryLimit": retry_limit, "retryDelay": delay, "dedupWindowSeconds": 0,
                          "deadLetterQueue": dead_letters, "dlqAfterMaxRetries": false,
                          "retentionEnabled": true, "retentionSeconds": KEPT_SECONDS });
    run.broker.configure(&run.queue, options).await;
    for op in ops {
        run.step(op).await?;
    }
    Ok(())
}
