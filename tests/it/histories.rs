//! I6: the fast path never changes a verdict. Random histories of pushes, pops, acks of every kind, expiries,
//! extensions, seeks and retention run in lockstep over four brokers, one per road of the ack path; after every step the answers
//! and the rows of each must be those of the one that settles one at a time, by full resolution. I1 is watched along the way.
//!
//! A failure names its seed; `REGENT_IT_SEED=<seed>` runs that history alone, `REGENT_IT_HISTORIES=<n>` runs more.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{PATIENCE, Pop, Popped, Road, TestBroker, eventually, number};

/// The first is the oracle.
const ROADS: [Road; 4] = [Road::Serial, Road::ResolutionOnly, Road::RegistryOnly, Road::Fused];
const PARTITIONS: [&str; 3] = ["a", "b", "c"];
const GROUPS: [&str; 2] = ["g", "h"];
const STEPS: usize = 16;

/// How an ack names its lease.
#[derive(Clone, Copy, Debug)]
enum Lease {
    Own,
    None,
    /// That of the batch with this number.
    Of(usize),
}

/// One ack item: a message of a batch popped earlier.
#[derive(Clone, Debug)]
struct Item {
    batch: usize,
    message: usize,
    status: &'static str,
    lease: Lease,
    reason: Option<String>,
    /// Whether it names an id that was never pushed instead.
    is_ghost: bool,
}

/// Where a seek goes.
#[derive(Clone, Copy, Debug)]
enum Destination {
    Beginning,
    End,
    /// The commit time of a delivered message: batch and index.
    MessageOf(usize, usize),
}

#[derive(Clone, Debug)]
enum Step {
    Configure(Value),
    Push {
        partition: &'static str,
        ids: Vec<String>,
    },
    Pop {
        partition: &'static str,
        group: &'static str,
        batch: i64,
        auto_ack: bool,
    },
    PopAll {
        group: &'static str,
    },
    Ack {
        group: &'static str,
        items: Vec<Item>,
    },
    AckOne {
        group: &'static str,
        item: Item,
    },
    Extend {
        batch: usize,
        seconds: i64,
    },
    Expire,
    /// Every `retryDelay` is over.
    Release,
    Seek {
        group: &'static str,
        partition: Option<&'static str>,
        to: Destination,
    },
    DeleteGroup {
        group: &'static str,
        keep_registration: bool,
    },
    /// Time passes, and retention does what it may.
    Retain {
        seconds: i32,
    },
}

/// One road of one history.
struct Lane<'a> {
    broker: &'a TestBroker,
    queue: String,
    /// Every batch handed out so far.
    batches: Vec<Popped>,
}

impl Lane<'_> {
    /// Carries out a step and answers what came of it, without the ids that differ from road to road.
    async fn take(&mut self, step: &Step) -> Value {
        match step {
            Step::Configure(options) => {
                let answer = self.broker.configure(&self.queue, options.clone()).await;
                // A shorter window makes things due; they go in the background, on each road in its own time.
                self.swept().await;
                answer
            }
            Step::Push { partition, ids } => {
                let item =
                    |id| json!({ "queue": self.queue, "partition": partition, "transactionId": id, "payload": id });
                let results = self.broker.push(ids.iter().map(item).collect()).await;
                results.iter().map(|r| json!([r.status, r.offset])).collect()
            }
            Step::Pop { partition, group, batch, auto_ack } => {
                let pop = Pop::partition(&self.queue, partition).group(group).all().batch(*batch).lease(600);
                self.pop(if *auto_ack { pop.auto_ack() } else { pop }).await
            }
            Step::PopAll { group } => {
                self.pop(Pop::queue(&self.queue).group(group).all().partitions(0).lease(600)).await
            }
            Step::Ack { group, items } => {
                let items = items.iter().map(|item| self.body(item)).collect();
                self.broker.ack(group, items).await.iter().map(|r| json!(format!("{r:?}"))).collect()
            }
            Step::AckOne { group, item } => {
                let result = self.broker.ack_one(group, self.body(item)).await;
                json!(format!("{result:?}"))
            }
            Step::Extend { batch, seconds } => {
                let answer = self.broker.extend(&self.batches[*batch].lease_id, *seconds).await;
                json!([answer["success"], answer["renewed"]])
            }
            Step::Expire => self.touch("lease_expires_at = now() - interval '1 minute'", "worker_id IS NOT NULL").await,
            Step::Release => self.touch("not_before = NULL", "not_before IS NOT NULL").await,
            Step::Seek { group, partition, to } => {
                let body = match to {
                    Destination::Beginning => json!({ "timestamp": "1970-01-01T00:00:00Z" }),
                    Destination::End => json!({ "toEnd": true }),
                    Destination::MessageOf(batch, message) => {
                        json!({ "timestamp": self.batches[*batch].messages[*message].created_at })
                    }
                };
                let partition = partition.map(|p| format!("/partitions/{p}")).unwrap_or_default();
                let target = format!("/api/v1/consumer-groups/{group}/queues/{}{partition}/seek", self.queue);
                let reply = self.broker.post_json(&target, &body).await;
                json!([reply.status, reply.json()["partitionsUpdated"]])
            }
            Step::DeleteGroup { group, keep_registration } => {
                let query = format!("?deleteMetadata={}", !keep_registration);
                let target = format!("/api/v1/consumer-groups/{group}/queues/{}{query}", self.queue);
                let reply = self.broker.try_send(Method::DELETE, &target, None).await.unwrap().expect(200);
                reply.json()["deletedPartitions"].clone()
            }
            Step::Retain { seconds } => self.retain(*seconds).await,
        }
    }

    async fn retain(&self, seconds: i32) -> Value {
        self.broker.db.age_queue(&self.queue, seconds).await;
        self.swept().await;
        Value::Null
    }

    async fn swept(&self) {
        eventually(PATIENCE, || self.broker.db.is_queue_swept(&self.queue)).await;
    }

    async fn pop(&mut self, pop: Pop) -> Value {
        let mut popped = self.broker.pop(&pop).await;
        // Which partition comes first is free.
        popped.messages.sort_by(|x, y| x.partition.cmp(&y.partition));
        let seen = popped.messages.iter().map(|m| json!([m.partition, m.transaction_id, m.delivery_attempt])).collect();
        self.batches.push(popped);
        seen
    }

    fn body(&self, item: &Item) -> Value {
        let batch = &self.batches[item.batch];
        let message = &batch.messages[item.message];
        let lease = match item.lease {
            Lease::Own => &batch.lease_id,
            Lease::None => "",
            Lease::Of(other) => &self.batches[other].lease_id,
        };
        let id = if item.is_ghost { "never pushed" } else { &message.transaction_id };
        json!({
            "transactionId": id, "partitionId": message.partition_id, "leaseId": lease,
            "status": item.status, "error": item.reason,
        })
    }

    async fn touch(&self, set: &str, which: &str) -> Value {
        let sql = format!(
            "UPDATE queen.log_consumers c SET {set} FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
              WHERE c.partition_id = p.id AND q.name = $1 AND {which}"
        );
        let done = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(&self.queue).execute(&self.broker.db.pool).await.unwrap();
        json!(done.rows_affected())
    }

    /// The rows of the queue: cursors by (partition, group), bounds of the log, and dead letters.
    async fn rows(&self) -> BTreeMap<String, Value> {
        let mut rows = BTreeMap::new();
        for partition in PARTITIONS {
            rows.insert(format!("log {partition}"), json!(self.broker.db.log_bounds(&self.queue, partition).await));
            for group in GROUPS {
                let Some(cursor) = self.broker.db.find_cursor(&self.queue, partition, group).await else { continue };
                let worker = self.batches.iter().position(|b| cursor.worker.as_ref() == Some(&b.lease_id));
                assert_eq!(worker.is_some(), cursor.worker.is_some(), "a lease that no pop was told of");
                // Until when it is held back differs by the moment of the ack; that it is does not.
                let row = json!([
                    cursor.committed,
                    cursor.batch_end,
                    cursor.leased,
                    cursor.batch_retry_count,
                    worker,
                    cursor.held_for.is_some(),
                    cursor.consumed,
                    cursor.attempts,
                    cursor.attempt_start,
                    cursor.attempt_end
                ]);
                rows.insert(format!("{partition}/{group}"), row);
            }
        }
        for letter in self.broker.db.dead_letters().await.into_iter().filter(|l| l.queue_name == self.queue) {
            let key = format!("dead {}/{}/{}", letter.partition_name, letter.log_offset, letter.group_name);
            let row = json!([letter.transaction_id, letter.reason, letter.retry_count]);
            // A seek may bring one message here twice.
            rows.entry(key).or_insert_with(|| json!([])).as_array_mut().unwrap().push(row);
        }
        rows
    }
}

/// Draws the next step from what has been handed out so far.
fn draw(rng: &mut StdRng, batches: &[Popped], fresh: &mut usize, is_calm: &mut bool) -> Step {
    let partition = PARTITIONS[rng.random_range(0..PARTITIONS.len())];
    let group = GROUPS[rng.random_range(0..GROUPS.len())];
    let full: Vec<usize> = (0..batches.len()).filter(|n| !batches[*n].is_empty()).collect();
    let step = rng.random_range(0..100);
    if step < 20 || full.is_empty() && step < 50 {
        let ids = (0..rng.random_range(1..6)).map(|_| {
            *fresh += 1;
            // Now and then an old id: a duplicate, or a second copy where the window is off.
            if rng.random_ratio(1, 6) { format!("m{}", rng.random_range(0..*fresh)) } else { format!("m{fresh}") }
        });
        return Step::Push { partition, ids: ids.collect() };
    }
    if step < 50 || full.is_empty() {
        // The ready index is not told of what SQL did behind its back; a targeted pop looks for itself.
        return match rng.random_range(0..10) {
            0..3 if *is_calm => Step::PopAll { group },
            3 => Step::Pop { partition, group, batch: 2, auto_ack: true },
            _ => Step::Pop { partition, group, batch: rng.random_range(1..8), auto_ack: false },
        };
    }
    // Mostly the newest batch: it is the one whose lease lives.
    let at = if rng.random_ratio(3, 4) { full[full.len() - 1] } else { full[rng.random_range(0..full.len())] };
    let owner: &'static str = GROUPS.into_iter().find(|g| *g == batches[at].consumer_group).unwrap_or(group);
    match step {
        50..84 => {
            let mut items = items_of(rng, batches, at);
            if rng.random_ratio(1, 6) {
                let other = full[rng.random_range(0..full.len())];
                items.extend(items_of(rng, batches, other));
            }
            if rng.random_ratio(1, 8) {
                items.reverse();
            }
            let group = if rng.random_ratio(1, 12) { group } else { owner };
            match items.len() {
                1 if rng.random_bool(0.5) => Step::AckOne { group, item: items.remove(0) },
                _ => Step::Ack { group, items },
            }
        }
        // Windows are 900 seconds and more: what is due is so by hundreds of seconds, on every road.
        84..88 => Step::Retain { seconds: 400 },
        88..91 => Step::Extend { batch: at, seconds: 900 },
        91..94 => {
            *is_calm = false;
            if rng.random_bool(0.5) { Step::Expire } else { Step::Release }
        }
        94..99 => {
            if rng.random_ratio(1, 4) {
                return Step::DeleteGroup { group: owner, keep_registration: rng.random_bool(0.5) };
            }
            let to = match rng.random_range(0..4) {
                0 => Destination::Beginning,
                1 => Destination::End,
                _ => Destination::MessageOf(at, rng.random_range(0..batches[at].messages.len())),
            };
            Step::Seek { group: owner, partition: rng.random_bool(0.5).then_some(partition), to }
        }
        _ => Step::Configure(json!({ "retryLimit": rng.random_range(0..3), "dedupWindowSeconds": 0 })),
    }
}

/// Ack items for one batch: often the whole of it completed, which is what the fast path is for.
fn items_of(rng: &mut StdRng, batches: &[Popped], batch: usize) -> Vec<Item> {
    let count = batches[batch].messages.len();
    let lease = match rng.random_range(0..10) {
        0 => Lease::None,
        1 => Lease::Of(rng.random_range(0..batches.len())),
        _ => Lease::Own,
    };
    let whole = rng.random_bool(0.5);
    let chosen: Vec<usize> = if whole || count == 1 {
        (0..count).collect()
    } else {
        (0..rng.random_range(1..=count + 1)).map(|_| rng.random_range(0..count)).collect()
    };
    let spoiled = if rng.random_bool(0.6) { None } else { Some(rng.random_range(0..chosen.len())) };
    let mut items = Vec::new();
    for (n, message) in chosen.into_iter().enumerate() {
        let status = match spoiled {
            Some(at) if at == n => ["failed", "retry", "dlq", "completed"][rng.random_range(0..4)],
            Some(_) if rng.random_ratio(1, 5) => ["failed", "retry", "dlq"][rng.random_range(0..3)],
            _ => "completed",
        };
        let reason = rng.random_ratio(1, 3).then(|| format!("reason {n}"));
        items.push(Item { batch, message, status, lease, reason, is_ghost: rng.random_ratio(1, 25) });
    }
    items
}

/// Runs one history over all roads.
async fn run(brokers: &[TestBroker], seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let lane = |broker| Lane { broker, queue: format!("q{seed}"), batches: Vec::new() };
    let mut lanes: Vec<Lane> = brokers.iter().map(lane).collect();
    let window = if rng.random_bool(0.5) { 0 } else { 3600 };
    let options = json!({ "retryLimit": rng.random_range(0..4), "dedupWindowSeconds": window, "deadLetterQueue": rng.random_bool(0.8),
        "dlqAfterMaxRetries": false, "retryDelay": if rng.random_bool(0.3) { 3_600_000 } else { 0 },
        "retentionEnabled": rng.random_bool(0.5),
        "retentionSeconds": if rng.random_bool(0.3) { 1500 } else { 0 },
        "completedRetentionSeconds": if rng.random_bool(0.5) { 1000 } else { 0 },
        "maxWaitTimeSeconds": if rng.random_bool(0.3) { 1000 } else { 0 } });
    let (mut fresh, mut is_calm) = (0, true);
    let mut story = Vec::new();
    let mut before: BTreeMap<String, Value> = BTreeMap::new();
    for n in 0..=STEPS {
        let step = if n == 0 {
            Step::Configure(options.clone())
        } else {
            draw(&mut rng, &lanes[0].batches, &mut fresh, &mut is_calm)
        };
        story.push(format!("{step:?}"));
        let answers = join_all(lanes.iter_mut().map(|lane| lane.take(&step))).await;
        let rows = join_all(lanes.iter().map(Lane::rows)).await;
        for (road, (answer, row)) in ROADS.iter().zip(answers.iter().zip(&rows)).skip(1) {
            let same = *answer == answers[0] && *row == rows[0];
            assert!(
                same,
                "seed {seed}, step {n}: {road:?} differs from {:?}\n{}\nanswers {:#}\n    and {answer:#}\nrows {:#?}\n and {row:#?}",
                ROADS[0],
                story.join("\n"),
                answers[0],
                rows[0],
            );
        }
        if !matches!(step, Step::Seek { .. }) {
            for (key, row) in rows[0].iter().filter(|(key, _)| key.contains('/') && !key.starts_with("dead ")) {
                let was = before.get(key).map_or(-1, |row| row[0].as_i64().unwrap());
                assert!(
                    row[0].as_i64().unwrap() >= was,
                    "I1: seed {seed}, step {n}: {key} went back\n{}",
                    story.join("\n")
                );
            }
        }
        before.clone_from(&rows[0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_road_tells_the_same_story() {
    let seeds: Vec<u64> = match number("REGENT_IT_SEED") {
        Some(seed) => vec![seed],
        None => {
            let first = rand::random_range(0..1_000_000_000);
            (first..first + number("REGENT_IT_HISTORIES").unwrap_or(200)).collect()
        }
    };
    let brokers = join_all(ROADS.map(TestBroker::sweeping)).await;
    for some in seeds.chunks(8) {
        join_all(some.iter().map(|seed| run(&brokers, *seed))).await;
    }
}
