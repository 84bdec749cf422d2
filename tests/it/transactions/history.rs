//! Random bundles against a small model (I10): what each is answered, and every row after it. The model of acks is the one
//! of `ack_history`; a bundle that any part of it refuses must leave the model, and the rows, as they were.
//!
//! A failure prints its seed and the shortest history that proptest finds. `REGENT_IT_SEED=<seed>` tells the same
//! histories again, `REGENT_IT_HISTORIES=<n>` tells more.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use serde_json::{Value, json};

use crate::ack_history::model::{Claim, Model, NO_CONSUMER, Options, PASSED, STALE, Said, Status, UNRESOLVABLE};
use crate::ack_history::watched::{GROUPS, PARTITIONS, Watched, name};
use crate::harness::{Road, TestBroker, tell};

const HISTORIES: u32 = 150;

#[derive(Clone, Debug)]
enum Op {
    Bundle { pushes: Vec<(usize, u8)>, acks: Vec<Ack>, fencing: u8, order: u64 },
    Pop { partition: usize, group: usize, batch: usize },
    Expire,
}

/// An ack of the bundle: of a delivered batch, counted from the latest, and which message of it, or any id.
#[derive(Clone, Debug)]
struct Ack {
    nth_last: usize,
    pick: Option<usize>,
    any_id: u8,
    kind: u8,
}

fn op() -> impl Strategy<Value = Op> {
    let pushes = prop::collection::vec((0..PARTITIONS, 0u8..60), 0..5);
    let nth_last = prop_oneof![5 => Just(0usize), 2 => Just(1), 1 => 2usize..4];
    let pick = prop_oneof![9 => (0usize..6).prop_map(Some), 1 => Just(None)];
    let ack = (nth_last, pick, 0u8..60, any::<u8>()).prop_map(|(nth_last, pick, any_id, kind)| Ack {
        nth_last,
        pick,
        any_id,
        kind,
    });
    let acks = prop::collection::vec(ack, 0..5);
    prop_oneof![
        10 => (pushes, acks, 0u8..12, any::<u64>())
            .prop_map(|(pushes, acks, fencing, order)| Op::Bundle { pushes, acks, fencing, order }),
        6 => (0..PARTITIONS, 0..GROUPS.len(), 1usize..6)
            .prop_map(|(partition, group, batch)| Op::Pop { partition, group, batch }),
        1 => Just(Op::Expire),
    ]
}

struct Run<'a> {
    watched: Watched<'a>,
    /// Stored ids per partition, in order.
    stored: Vec<Vec<String>>,
}

/// How a bundle names its leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// Not at all.
    Nothing,
    /// In each ack.
    Own,
    /// In `requiredLeases`.
    Hints,
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
            Op::Bundle { pushes, acks, fencing, order } => self.bundle(pushes, acks, *fencing, *order).await?,
            // A refused bundle may have made the partition, empty: the model knows no such thing.
            Op::Pop { partition, .. } if self.stored[*partition].is_empty() => {}
            Op::Pop { partition, group, batch } => self.pop(*partition, *group, *batch).await?,
            Op::Expire => {
                self.model.expire();
                self.broker.db.expire_leases().await;
            }
        }
        self.compare_rows().await?;
        for partition in 0..PARTITIONS {
            let last = self.broker.db.last_offset(&self.queue, &name(partition)).await.unwrap_or(-1);
            prop_assert_eq!(last, self.stored[partition].len() as i64 - 1, "messages in {}", partition);
        }
        Ok(())
    }

    async fn bundle(
        &mut self,
        pushes: &[(usize, u8)],
        acks: &[Ack],
        fencing: u8,
        order: u64,
    ) -> Result<(), TestCaseError> {
        let naming = match fencing {
            0 => Naming::Nothing,
            1..4 => Naming::Hints,
            _ => Naming::Own,
        };
        let mut operations: Vec<Value> = pushes
            .iter()
            .map(|(partition, id)| super::push_op(&self.queue, &name(*partition), &format!("m{id}")))
            .collect();
        let mut hints = BTreeSet::new();
        let mut parts: BTreeMap<(usize, usize), Vec<Said>> = BTreeMap::new();
        for ack in acks {
            let Some((nth, (group, partition, popped))) =
                self.pops.iter().enumerate().rev().nth(ack.nth_last).filter(|_| !self.pops.is_empty())
            else {
                continue;
            };
            let id = match ack.pick {
                Some(pick) => popped.messages[pick % popped.messages.len()].transaction_id.clone(),
                None => format!("m{}", ack.any_id),
            };
            let status = Status::drawn(ack.kind, 12);
            let claim = if naming == Naming::Nothing { Claim::None } else { Claim::Of(nth) };
            let mut op = json!({ "type": "ack", "transactionId": id, "partitionId": popped.partition_id,
                                 "consumerGroup": GROUPS[*group], "status": status.word() });
            match naming {
                Naming::Nothing => {}
                Naming::Own => op["leaseId"] = json!(popped.lease_id),
                Naming::Hints => drop(hints.insert(popped.lease_id.clone())),
            }
            operations.push(op);
            parts.entry((*partition, *group)).or_default().push(Said {
                partition: *partition,
                id,
                claim,
                status,
                reason: None,
            });
        }
        // Request order decides what comes first of pushes into one partition, and nothing else.
        let split = operations.len() - operations.iter().filter(|op| op["type"] == "ack").count();
        if split > 0 && operations.len() > split {
            let (len, by) = (operations.len(), order as usize);
            let ack = operations.remove(split + by % (len - split));
            operations.insert(by % (split + 1), ack);
        }
        let expected = self.expect(pushes, parts, naming, &hints);
        let body = json!({ "operations": operations, "requiredLeases": hints });
        let before = super::dump(&self.broker.db).await;
        let answer = self.broker.post_json("/api/v1/transaction", &body).await.expect(200).json();
        let told = if answer["success"] == true { "committed" } else { answer["reason"].as_str().unwrap() };
        prop_assert_eq!(told, expected, "{} to {}", answer, body);
        if told != "committed" {
            let mut after = super::dump(&self.broker.db).await;
            // Missing partitions are made before (docs/adr), and stay.
            let mut before = before;
            before.remove("log_partitions");
            after.remove("log_partitions");
            prop_assert_eq!(before, after, "a refused bundle changed a row");
        }
        Ok(())
    }

    /// The answer, and the model after it.
    fn expect(
        &mut self,
        pushes: &[(usize, u8)],
        parts: BTreeMap<(usize, usize), Vec<Said>>,
        naming: Naming,
        hints: &BTreeSet<String>,
    ) -> &'static str {
        let mut model = self.model.clone();
        let mut stored = self.stored.clone();
        for (nth, (partition, id)) in pushes.iter().enumerate() {
            let id = format!("m{id}");
            if pushes[..nth].contains(&pushes[nth]) {
                continue;
            }
            if self.stored[*partition].contains(&id) {
                return "duplicate";
            }
            model.push(*partition, std::slice::from_ref(&id));
            stored[*partition].push(id);
        }
        for ((partition, group), mut said) in parts {
            let row = model.rows().get(&(partition, group)).copied();
            let holder = row.and_then(|(_, _, pop, live, ..)| pop.filter(|_| live));
            let admitted = match naming {
                Naming::Nothing => true,
                Naming::Own => said.iter().all(|said| holder.is_some_and(|pop| said.claim == Claim::Of(pop))),
                Naming::Hints => holder.is_some_and(|pop| hints.contains(&self.pops[pop].2.lease_id)),
            };
            if !admitted {
                return "ack_rejected";
            }
            let claim = holder.filter(|_| naming != Naming::Nothing).map_or(Claim::None, Claim::Of);
            said.iter_mut().for_each(|said| said.claim = claim);
            for (outcome, ..) in model.ack(group, GROUPS[group], &said) {
                match outcome {
                    Ok(()) | Err(PASSED) => {}
                    Err(NO_CONSUMER | STALE | UNRESOLVABLE) => return "ack_rejected",
                    Err(other) => panic!("the model says {other}"),
                }
            }
        }
        (self.model, self.stored) = (model, stored);
        "committed"
    }
}

#[test]
fn a_bundle_happens_whole_or_not_at_all() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let options = (0i32..3, prop::bool::weighted(0.7));
    // A fresh database from time to time: the whole of it is compared after every refused bundle.
    let broker = std::cell::RefCell::new(runtime.block_on(TestBroker::on(Road::Fused)));
    tell(HISTORIES, &(options, prop::collection::vec(op(), 1..30)), |nth, (options, ops)| {
        let (retry_limit, dead_letters) = options;
        if nth % 25 == 24 {
            let fresh = runtime.block_on(TestBroker::on(Road::Fused));
            let old = broker.replace(fresh);
            runtime.block_on(async move { drop(old) });
        }
        let broker = broker.borrow();
        let model = Model::new(Options { retry_limit, holds: false, dead_letters }, PARTITIONS);
        let stored = vec![Vec::new(); PARTITIONS];
        let mut run = Run { watched: Watched::new(&broker, format!("q{nth}"), model), stored };
        runtime.block_on(async {
            let options =
                json!({ "retryLimit": retry_limit, "deadLetterQueue": dead_letters, "dlqAfterMaxRetries": false });
            run.broker.configure(&run.queue, options).await;
            for op in &ops {
                run.step(op).await?;
            }
            Ok(())
        })
    });
    runtime.block_on(async move { drop(broker) });
}
