//! Splitting a call into groups: pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::item::{AckAnswer, AckError, AckItem, AckTarget, LeaseClaim};
use crate::ids::{IdSpace, NAME_BYTES_MAX, PartitionId};

/// One ack call.
#[derive(Debug)]
pub struct Call {
    /// The consumer group's name.
    pub group_name: Arc<str>,
    /// The items in request order.
    pub items: Vec<AckItem>,
}

/// The items of one call on one partition under one lease, decided together (`spec/ack.md` §3.2).
#[derive(Debug)]
pub struct Group {
    /// Partition.
    pub partition: PartitionId,
    /// Lease.
    pub lease: LeaseClaim,
    members: Vec<u32>,
}

impl Group {
    /// Items of the group.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Never true: a group exists through its items.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Their positions in the call.
    pub fn members(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().map(|nth| *nth as usize)
    }

    /// The items themselves.
    pub fn items<'a>(&'a self, call: &'a Call) -> impl Iterator<Item = &'a AckItem> + Clone {
        self.members.iter().map(|nth| &call.items[*nth as usize])
    }
}

/// A call, split.
#[derive(Debug)]
pub struct Plan {
    /// Answers that need no database, in request order; `None` for the items of `lanes`.
    pub answers: Vec<Option<AckAnswer>>,
    /// Groups by partition. Lanes run concurrently; the groups of one lane keep request order.
    pub lanes: Vec<Vec<Group>>,
}

/// Splits a call.
pub fn plan(call: &Call, ids: IdSpace) -> Plan {
    // Such a name cannot have a cursor, and PostgreSQL would refuse the NUL with an error of its own.
    let nameable = call.group_name.len() <= NAME_BYTES_MAX && !call.group_name.contains('\0');
    let mut answers = vec![None; call.items.len()];
    let mut lanes = Lanes::default();
    let mut last: Option<(&AckItem, (usize, usize))> = None;
    for (nth, item) in call.items.iter().enumerate() {
        let at = match last {
            // Whole batches share both ids: no look-up for those.
            Some((before, at)) if before.lease == item.lease && before.target == item.target => at,
            _ => {
                let partition = match &item.target {
                    AckTarget::NotUuid(text) => Err(AckError::NotUuid(text.clone())),
                    AckTarget::Partition(wire) => {
                        ids.partition_of(*wire).filter(|_| nameable).ok_or(AckError::ConsumerNotFound)
                    }
                };
                match partition {
                    Ok(partition) => lanes.place_of(partition, item.lease, call.items.len() - nth),
                    Err(error) => {
                        answers[nth] = Some(AckAnswer::refused(error));
                        continue;
                    }
                }
            }
        };
        lanes.lanes[at.0][at.1].members.push(nth as u32);
        last = Some((item, at));
    }
    Plan { answers, lanes: lanes.lanes }
}

/// The groups of a call while it is being split. Most calls have one; the maps are made for the others.
#[derive(Default)]
struct Lanes {
    lanes: Vec<Vec<Group>>,
    lane_of: HashMap<PartitionId, usize>,
    group_of: HashMap<(PartitionId, LeaseClaim), (usize, usize)>,
}

impl Lanes {
    /// Lane and place of a group, made if it is new. The first one gets room for all that is to come.
    fn place_of(&mut self, partition: PartitionId, lease: LeaseClaim, items: usize) -> (usize, usize) {
        if self.lanes.is_empty() {
            self.lanes.push(vec![Group { partition, lease, members: Vec::with_capacity(items) }]);
            return (0, 0);
        }
        let group = || Group { partition, lease, members: Vec::new() };
        if self.group_of.is_empty() {
            let first = &self.lanes[0][0];
            self.lane_of.insert(first.partition, 0);
            self.group_of.insert((first.partition, first.lease), (0, 0));
        }
        let lanes = &mut self.lanes;
        *self.group_of.entry((partition, lease)).or_insert_with(|| {
            let lane = *self.lane_of.entry(partition).or_insert_with(|| {
                lanes.push(Vec::new());
                lanes.len() - 1
            });
            lanes[lane].push(group());
            (lane, lanes[lane].len() - 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::ack_decision::AckStatus;
    use crate::ids::LeaseId;

    fn item(target: AckTarget, lease: LeaseClaim) -> AckItem {
        AckItem { target, lease, transaction: None, status: AckStatus::Completed, reason: None }
    }

    #[test]
    fn groups_keep_request_order_within_a_partition() {
        let ids = IdSpace::new(1, 2);
        let on = |key: i64| AckTarget::Partition(ids.partition(PartitionId(key)));
        let lease = |n: u128| LeaseClaim::Id(LeaseId(uuid::Uuid::from_u128(n)));
        let items = vec![
            item(on(5), lease(1)),
            item(on(6), lease(1)),
            item(on(5), lease(2)),
            item(AckTarget::parse("nonsense"), lease(1)),
            item(on(5), lease(1)),
            item(AckTarget::Partition(uuid::Uuid::nil()), LeaseClaim::Absent),
        ];
        let call = Call { group_name: "g".into(), items };
        let plan = plan(&call, ids);
        let shape: Vec<Vec<(i64, Vec<usize>)>> = plan
            .lanes
            .iter()
            .map(|lane| lane.iter().map(|g| (g.partition.0, g.members().collect())).collect())
            .collect();
        assert_eq!(shape, [vec![(5, vec![0, 4]), (5, vec![2])], vec![(6, vec![1])]]);
        let told: Vec<_> = plan.answers.iter().flatten().map(|a| a.outcome.clone()).collect();
        assert_eq!(told, [Err(AckError::NotUuid("nonsense".into())), Err(AckError::ConsumerNotFound)]);
    }

    #[test]
    fn a_name_that_no_cursor_can_have_never_reaches_the_database() {
        let ids = IdSpace::new(1, 2);
        for name in ["a\0b".to_owned(), "x".repeat(NAME_BYTES_MAX + 1)] {
            let target = AckTarget::Partition(ids.partition(PartitionId(1)));
            let call = Call { group_name: name.into(), items: vec![item(target, LeaseClaim::Absent)] };
            assert!(plan(&call, ids).lanes.is_empty());
        }
    }
}
