//! The order in which registered leases were last used, over all partitions: when the registry is full, the one at the
//! front makes room (`spec/ack.md` §7, security-operations §8). Every operation takes constant time.

use std::num::NonZeroU64;

use hashlink::LinkedHashMap;

use crate::ids::PartitionId;

/// Names one registered lease for as long as it is registered. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTicket(NonZeroU64);

/// See the module.
#[derive(Debug)]
pub struct LeaseOrder {
    next: NonZeroU64,
    leases: LinkedHashMap<LeaseTicket, PartitionId>,
}

impl Default for LeaseOrder {
    fn default() -> LeaseOrder {
        LeaseOrder { next: NonZeroU64::MIN, leases: LinkedHashMap::new() }
    }
}

impl LeaseOrder {
    /// A lease of this partition was granted: the last to go.
    pub fn enter(&mut self, partition: PartitionId) -> LeaseTicket {
        let ticket = LeaseTicket(self.next);
        self.next = self.next.saturating_add(1);
        self.leases.insert(ticket, partition);
        ticket
    }

    /// A lease was extended: the last to go again.
    pub fn used(&mut self, ticket: LeaseTicket) {
        self.leases.to_back(&ticket);
    }

    /// A lease is no longer registered.
    pub fn leave(&mut self, ticket: LeaseTicket) {
        self.leases.remove(&ticket);
    }

    /// Takes out the least recently used lease.
    pub fn oldest(&mut self) -> Option<(LeaseTicket, PartitionId)> {
        self.leases.pop_front()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_least_recently_used_lease_goes_first_and_once() {
        let mut order = LeaseOrder::default();
        let tickets: Vec<LeaseTicket> = (0..4).map(|n| order.enter(PartitionId(n))).collect();
        order.used(tickets[0]);
        order.leave(tickets[2]);
        let gone: Vec<i64> = std::iter::from_fn(|| order.oldest()).map(|(_, partition)| partition.0).collect();
        assert_eq!(gone, [1, 3, 0]);
        order.used(tickets[1]);
        assert_eq!(order.oldest(), None, "what was taken out does not come back");
    }
}
