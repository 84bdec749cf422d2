//! The gauges of the domain, sampled when somebody scrapes.

use std::sync::atomic::Ordering;

use metrics::gauge;

use super::spool::SpoolFigures;
use super::{Broker, meter};
use crate::metrics as names;

/// How full everything is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Messages in push requests since the start of the process.
    pub pushed: u64,
    /// Bytes of pushes under way.
    pub push_bytes: usize,
    /// Bytes past which pushes are refused.
    pub push_bytes_max: usize,
    /// Bytes of ack calls under way.
    pub ack_bytes: usize,
    /// Bytes past which acks answer `pool`.
    pub ack_bytes_max: usize,
    /// Memory of recent transaction ids, in bytes.
    pub dedup_bytes: usize,
    /// Transactions that wait for a lane.
    pub transactions_waiting: usize,
    /// Parked long polls.
    pub pops_parked: usize,
    /// Memory of the newest segments, in bytes.
    pub segment_cache_bytes: usize,
    /// Pops that wait for their turn to claim or to read.
    pub pops_waiting: usize,
    /// `autoAck` pops that claim and read.
    pub pops_claiming: usize,
    /// Groups with an autopilot.
    pub autopilot_lanes: usize,
    /// Groups that pop by label.
    pub discovery_feeds: usize,
    /// Partitions in the ready index.
    pub ready_entries: usize,
    /// Groups in the ready index.
    pub ready_groups: usize,
    /// Deadlines in the ready index.
    pub ready_deadlines: usize,
    /// The disk spool.
    pub spool: SpoolFigures,
    /// Whether push maintenance is on.
    pub is_maintenance: bool,
    /// Open connections.
    pub connections: u32,
    /// Open connections that nobody uses.
    pub connections_idle: usize,
    /// Connections that may be open.
    pub connections_max: u32,
}

impl Broker {
    /// Looks how full everything is.
    pub fn figures(&self) -> Figures {
        let (connections, connections_idle) = self.store.pool_size();
        let (ready_entries, ready_groups, ready_deadlines) = self.ready.size();
        let (push_bytes, push_bytes_max) = self.push.inflight_bytes();
        let (ack_bytes, ack_bytes_max) = self.ack.inflight_bytes();
        let parking = &self.pop.parking;
        Figures {
            pushed: meter::PUSHED.load(Ordering::Relaxed),
            push_bytes,
            push_bytes_max,
            ack_bytes,
            ack_bytes_max,
            dedup_bytes: self.dedup.used(),
            transactions_waiting: self.transactions.lanes().waiting(),
            pops_parked: parking.parked(),
            segment_cache_bytes: self.pop.reads.cached_bytes(),
            pops_waiting: parking.waiting() + self.pop.claim_fusion.waiting() + self.pop.reads.waiting(),
            pops_claiming: self.pop.settings.pop_claims_max.saturating_sub(self.pop.claims.available_permits()),
            autopilot_lanes: self.pop.autopilot.lanes(),
            discovery_feeds: self.pop.discovery.feeds(),
            ready_entries,
            ready_groups,
            ready_deadlines,
            spool: self.drain.spool.figures(),
            is_maintenance: self.drain.spool.maintenance(),
            connections,
            connections_idle,
            connections_max: self.store.pool_max(),
        }
    }
}

impl Figures {
    /// Writes the gauges.
    pub fn show(&self) {
        let active = (self.connections as usize).saturating_sub(self.connections_idle);
        for (name, value) in [
            (names::PUSH_INFLIGHT_BYTES, self.push_bytes),
            (names::PUSH_INFLIGHT_BYTES_MAX, self.push_bytes_max),
            (names::ACK_INFLIGHT_BYTES, self.ack_bytes),
            (names::ACK_INFLIGHT_BYTES_MAX, self.ack_bytes_max),
            (names::DEDUP_MEMORY_BYTES, self.dedup_bytes),
            (names::TRANSACTIONS_WAITING, self.transactions_waiting),
            (names::PARKED_LONG_POLLS, self.pops_parked),
            (names::SEGMENT_CACHE_BYTES, self.segment_cache_bytes),
            (names::POP_WAITING, self.pops_waiting),
            (names::POP_CLAIMING, self.pops_claiming),
            (names::AUTOPILOT_LANES, self.autopilot_lanes),
            (names::DISCOVERY_FEEDS, self.discovery_feeds),
            (names::READY_ENTRIES, self.ready_entries),
            (names::READY_GROUPS, self.ready_groups),
            (names::READY_DEADLINES, self.ready_deadlines),
            (names::SPOOL_PENDING, self.spool.pending as usize),
            (names::SPOOL_FAILED, self.spool.failed as usize),
            (names::SPOOL_DB_HEALTHY, usize::from(self.spool.db_healthy)),
            (names::MAINTENANCE, usize::from(self.is_maintenance)),
            (names::POOL_SIZE, self.connections as usize),
            (names::POOL_IDLE, self.connections_idle),
            (names::POOL_ACTIVE, active),
            (names::POOL_MAX, self.connections_max as usize),
        ] {
            gauge!(name).set(value as f64);
        }
    }
}
