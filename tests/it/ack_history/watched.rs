//! A queue of a running broker beside its model: deliveries and cursor rows are compared as they happen.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::model::{Model, Row};
use crate::harness::{Pop, Popped, TestBroker};

/// Partitions of the queue.
pub const PARTITIONS: usize = 2;
/// Its groups.
pub const GROUPS: [&str; 2] = ["g", "h"];

/// Name of a partition.
pub fn name(partition: usize) -> String {
    format!("p{partition}")
}

pub struct Watched<'a> {
    pub broker: &'a TestBroker,
    pub queue: String,
    pub model: Model,
    /// Every delivery: (group, partition, what).
    pub pops: Vec<(usize, usize, Popped)>,
}

impl<'a> Watched<'a> {
    pub fn new(broker: &'a TestBroker, queue: String, model: Model) -> Watched<'a> {
        Watched { broker, queue, model, pops: Vec::new() }
    }

    /// Pops from the oldest message on, and delivers what the model says.
    pub async fn pop(&mut self, partition: usize, group: usize, batch: usize) -> Result<(), TestCaseError> {
        let pop = Pop::partition(&self.queue, &name(partition)).group(GROUPS[group]).all();
        let popped = self.broker.pop(&pop.batch(batch as i64).lease(3600)).await;
        let expected = self.model.pop(partition, group, self.pops.len(), batch);
        prop_assert_eq!(popped.ids(), expected, "delivered");
        if !popped.is_empty() {
            self.pops.push((group, partition, popped));
        }
        Ok(())
    }

    /// The cursor rows are those of the model.
    pub async fn compare_rows(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.rows().await, self.model.rows(), "rows");
        Ok(())
    }

    async fn rows(&self) -> BTreeMap<(usize, usize), Row> {
        let mut rows = BTreeMap::new();
        for partition in 0..PARTITIONS {
            for (group, group_name) in GROUPS.iter().enumerate() {
                let found = self.broker.db.find_cursor(&self.queue, &name(partition), group_name).await;
                let Some(cursor) = found else { continue };
                let pop = cursor.worker.map(|worker| {
                    self.pops
                        .iter()
                        .position(|(.., popped)| popped.lease_id == worker)
                        .expect("a lease that no pop was told of")
                });
                let held = cursor.held_for.is_some_and(|seconds| seconds > 0.0);
                let row = (cursor.committed, cursor.batch_end, pop, cursor.leased, cursor.batch_retry_count, held);
                rows.insert((partition, group), row);
            }
        }
        rows
    }
}
