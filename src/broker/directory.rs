//! The directory: partition to actor address. Actors start on demand and leave by themselves; the memory of all lease
//! registries together is bounded here.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use actix::dev::SendError;
use actix::{Actor, Addr, Handler, Message};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::oneshot;

use super::ack::meter::AckMeter;
use super::arbiters::Arbiters;
use super::expiry;
use super::fusion::{Covered, Pending, Room, Shard};
use super::lease::{Fingerprint, LeaseGrant, Miss};
use super::lease_order::{LeaseOrder, LeaseTicket};
use super::partition::{
    Cover, Dropped, Evicted, Expired, Extended, Granted, MAILBOX_MAX, PartitionActor, QueueGone, Reserved,
};
use crate::ids::{GroupId, LeaseId, PartitionId, QueueId};

#[cfg(test)]
mod tests;

/// What an actor costs without its leases: context, mailbox, task, directory entry. Measured (`docs/benchmarks.md`).
const ACTOR_BYTES: usize = 1152;
/// What a lease costs, without the group's name.
const LEASE_BYTES: usize = 288;
/// The part of the bound that is kept free: what is evicted gives its memory back a moment later, on its own thread.
const HEADROOM: usize = 16;

/// Where partition actors live. Shared by the pipeline and by every actor.
#[derive(Debug)]
pub struct Home {
    actors: DashMap<PartitionId, Addr<PartitionActor>>,
    arbiters: Arbiters,
    shards: Vec<Arc<Shard>>,
    bytes: AtomicUsize,
    bytes_max: usize,
    /// Never held while an entry of `actors` is being asked for.
    order: Mutex<LeaseOrder>,
    meter: Arc<AckMeter>,
}

impl Home {
    /// A directory without actors. `shards` may be empty: then nothing is fused.
    pub fn new(arbiters: Arbiters, shards: Vec<Arc<Shard>>, bytes_max: usize, meter: Arc<AckMeter>) -> Arc<Home> {
        let home = Arc::new(Home {
            actors: DashMap::new(),
            arbiters,
            shards,
            bytes: AtomicUsize::new(0),
            bytes_max,
            order: Mutex::default(),
            meter,
        });
        expiry::start(&home, home.arbiters.threads());
        home
    }

    /// Registers a lease. Near the memory bound the least recently used one makes room. When actors do not keep up with
    /// that, or the mailbox is full, the lease stays unknown, which only costs it the fast path.
    pub fn granted(self: &Arc<Home>, grant: LeaseGrant) {
        let partition = grant.partition;
        let bytes = LEASE_BYTES + grant.group_name.len();
        self.make_room(bytes + ACTOR_BYTES);
        let Some(mut reserved) = self.reserve(bytes) else {
            self.meter.unregistered.increment(1);
            return;
        };
        reserved.ticket = Some(self.order().enter(partition));
        let granted = Granted { grant, reserved };
        match self.actors.entry(partition) {
            Entry::Vacant(place) => {
                if let Some(actor) = self.start(partition, granted) {
                    place.insert(actor);
                }
            }
            Entry::Occupied(mut place) => match place.get().try_send(granted) {
                Ok(()) => {}
                Err(SendError::Full(_)) => self.meter.unregistered.increment(1),
                Err(SendError::Closed(granted)) => {
                    // It died without leaving: only a panic does that.
                    match self.start(partition, granted) {
                        Some(actor) => place.insert(actor),
                        None => place.remove(),
                    };
                }
            },
        }
    }

    /// Evicts what was used least recently if this many bytes more would reach into the headroom: one for one.
    fn make_room(&self, bytes: usize) {
        let wanted = self.bytes.load(Ordering::Relaxed).saturating_add(bytes);
        if wanted <= self.bytes_max - self.bytes_max / HEADROOM {
            return;
        }
        let oldest = self.order().oldest();
        if let Some((ticket, partition)) = oldest {
            self.meter.evicted.increment(1);
            self.tell(partition, Evicted(ticket));
        }
    }

    fn order(&self) -> MutexGuard<'_, LeaseOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Home>, partition: PartitionId, first: Granted) -> Option<Addr<PartitionActor>> {
        let Some(reserved) = self.reserve(ACTOR_BYTES) else {
            self.meter.unregistered.increment(1);
            return None;
        };
        let home = self.clone();
        Some(PartitionActor::start_in_arbiter(self.arbiters.of(self.slot(partition)), move |ctx| {
            ctx.set_mailbox_capacity(MAILBOX_MAX);
            PartitionActor::new(partition, home, reserved, first)
        }))
    }

    /// Whether a lease of this partition may be known here: saves the cost of a fingerprint.
    pub fn knows(&self, partition: PartitionId) -> bool {
        self.actors.contains_key(&partition)
    }

    /// Asks whether an ack covers exactly what was delivered. With `room`, a hit is fused and answered after COMMIT.
    pub fn cover(
        &self,
        partition: PartitionId,
        group_name: Arc<str>,
        worker: LeaseId,
        fingerprint: Fingerprint,
        room: Option<Room>,
    ) -> Result<oneshot::Receiver<Covered>, Miss> {
        let (reply, answer) = oneshot::channel();
        let actor = self.actors.get(&partition).ok_or(Miss::Unknown)?;
        match actor.try_send(Cover { group_name, worker, fingerprint, room, reply }) {
            Ok(()) => Ok(answer),
            Err(SendError::Full(_)) => Err(Miss::Busy),
            Err(SendError::Closed(_)) => Err(Miss::Unknown),
        }
    }

    /// A worker's leases on these partitions were extended.
    pub fn extended(&self, worker: LeaseId, partitions: &[PartitionId], expires: Instant) {
        for partition in partitions {
            self.tell(*partition, Extended { worker, expires });
        }
    }

    /// The lease of one (partition, group) ended or changed. `worker`: only that worker's.
    pub fn dropped(&self, partition: PartitionId, group: GroupId, worker: Option<LeaseId>) {
        self.tell(partition, Dropped { group, worker });
    }

    /// A lease of this partition has expired. `false`: the actor could not be told.
    pub(super) fn expired(&self, partition: PartitionId) -> bool {
        let told = self.actors.get(&partition).map(|actor| actor.try_send(Expired));
        !matches!(told, Some(Err(SendError::Full(_))))
    }

    /// Every lease of the group is void.
    pub fn forget_group(&self, group: GroupId) {
        self.tell_all(|| Dropped { group, worker: None });
    }

    /// Every lease of the queue is void.
    pub fn forget_queue(&self, queue: QueueId) {
        self.tell_all(|| QueueGone(queue));
    }

    /// Costs as much as there are live leases: for seeks and deletes only.
    fn tell_all<M>(&self, message: impl Fn() -> M)
    where
        M: Message<Result = ()> + Send + 'static,
        PartitionActor: Handler<M>,
    {
        for actor in &self.actors {
            let _ = actor.try_send(message());
        }
    }

    fn tell<M>(&self, partition: PartitionId, message: M)
    where
        M: Message<Result = ()> + Send + 'static,
        PartitionActor: Handler<M>,
    {
        // A full mailbox loses the message: the entry is then stale, and PostgreSQL refuses what it claims.
        let _ = self.actors.get(&partition).map(|actor| actor.try_send(message));
    }

    /// Takes an actor out, if it is the one that is listed. Afterwards nothing is sent to it.
    pub(super) fn delist(&self, partition: PartitionId, actor: &Addr<PartitionActor>) -> bool {
        self.actors.remove_if(&partition, |_, listed| listed == actor).is_some()
    }

    /// Puts a delisted actor back, if its place is still free.
    pub(super) fn relist(&self, partition: PartitionId, actor: Addr<PartitionActor>) -> bool {
        match self.actors.entry(partition) {
            Entry::Vacant(place) => {
                place.insert(actor);
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Hands a hit to the shard of its partition.
    pub(super) fn fuse(&self, partition: PartitionId, pending: Pending) {
        if let Some(shard) = self.shards.get(self.slot(partition)) {
            shard.push(pending);
        }
    }

    /// A place in the shard of this partition, if there are shards.
    pub fn shard(&self, partition: PartitionId) -> Option<&Arc<Shard>> {
        self.shards.get(self.slot(partition))
    }

    /// All shards.
    pub fn shards(&self) -> &[Arc<Shard>] {
        &self.shards
    }

    /// Live actors now.
    pub fn actors(&self) -> usize {
        self.actors.len()
    }

    /// Ends every actor and the threads they live on.
    pub fn stop(&self) {
        self.actors.clear();
        self.arbiters.stop();
    }

    /// Neighbouring keys go to different shards.
    fn slot(&self, partition: PartitionId) -> usize {
        let mixed = (partition.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        (mixed as usize) % self.shards.len().max(1)
    }

    fn reserve(self: &Arc<Home>, bytes: usize) -> Option<Reserved> {
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.bytes_max);
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        self.meter.registry_bytes.increment(bytes as f64);
        Some(Reserved { home: self.clone(), bytes, ticket: None })
    }

    /// A registered lease was extended.
    pub(super) fn used(&self, ticket: LeaseTicket) {
        self.order().used(ticket);
    }

    pub(super) fn give_back(&self, bytes: usize, ticket: Option<LeaseTicket>) {
        if let Some(ticket) = ticket {
            self.order().leave(ticket);
        }
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.meter.registry_bytes.decrement(bytes as f64);
    }

    pub(super) fn actor_started(&self) {
        self.meter.actors.increment(1.0);
    }

    pub(super) fn actor_stopped(&self) {
        self.meter.actors.decrement(1.0);
    }
}
