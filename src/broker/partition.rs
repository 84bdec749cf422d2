//! `PartitionActor`: the sole owner of one partition's lease registry.
//!
//! It appears with the first lease that this broker grants on the partition and leaves when it holds none. No handler
//! waits for anything: an ack is answered at once, or handed on to the fusion shard with its reply channel.
//!
//! **Leaving.** Senders reach the actor only through the directory and only while they hold its entry locked. So once the
//! actor has taken itself out of the directory nothing new can come, and what came before is in the mailbox: it puts
//! [`Vacate`] behind that and stops when it gets there. A lease granted in between makes it list itself again.

use std::sync::Arc;
use std::time::Instant;

use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message};
use tokio::sync::oneshot;

use super::directory::Home;
use super::expiry;
use super::fusion::{Covered, Pending, Room};
use super::lease::{Fingerprint, LeaseGrant, Registry};
use super::lease_order::LeaseTicket;
use crate::ids::{GroupId, LeaseId, PartitionId, QueueId};

#[cfg(test)]
mod tests;

/// Messages that wait for one partition; past it grants are dropped and acks take resolution.
pub const MAILBOX_MAX: usize = 256;

/// See the module.
#[derive(Debug)]
pub struct PartitionActor {
    partition: PartitionId,
    home: Arc<Home>,
    registry: Registry<Reserved>,
    /// When the entry that expires first has to go, as told to [`expiry`].
    due: Option<Instant>,
    _reserved: Reserved,
}

/// A lease was granted.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Granted {
    /// The lease.
    pub grant: LeaseGrant,
    /// Its share of the registry's memory.
    pub reserved: Reserved,
}

/// Is this ack exactly the batch that was delivered?
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Cover {
    /// The acking group.
    pub group_name: Arc<str>,
    /// The lease id of the ack.
    pub worker: LeaseId,
    /// Of the acked ids.
    pub fingerprint: Fingerprint,
    /// A place in the fusion shard, or `None` to be told the hit instead of having it fused.
    pub room: Option<Room>,
    /// Where the answer goes, from here or from the shard after COMMIT.
    pub reply: oneshot::Sender<Covered>,
}

/// The leases of a worker were extended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Extended {
    /// The worker.
    pub worker: LeaseId,
    /// At least until then.
    pub expires: Instant,
}

/// A lease ended or changed by other means than this registry.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Dropped {
    /// The group.
    pub group: GroupId,
    /// Only if this worker holds it; `None`: whoever holds it.
    pub worker: Option<LeaseId>,
}

/// A lease has to make room for another one.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Evicted(pub LeaseTicket);

/// A queue is gone: its leases are void.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct QueueGone(pub QueueId);

/// Something has expired.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Expired;

/// The last message of a delisted actor.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Vacate;

/// Registry memory that is given back on drop.
#[derive(Debug)]
pub struct Reserved {
    pub(super) home: Arc<Home>,
    pub(super) bytes: usize,
    /// Of a lease; an actor's own memory has none.
    pub(super) ticket: Option<LeaseTicket>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.home.give_back(self.bytes, self.ticket);
    }
}

impl PartitionActor {
    /// An actor with its first lease. Must be made on the thread that it will live on.
    pub(super) fn new(partition: PartitionId, home: Arc<Home>, reserved: Reserved, first: Granted) -> PartitionActor {
        let mut registry = Registry::default();
        registry.grant(first.grant, first.reserved);
        let mut actor = PartitionActor { partition, home, registry, due: None, _reserved: reserved };
        actor.schedule();
        actor
    }

    /// Tells the thread's expiry list when to come.
    fn schedule(&mut self) {
        let due = self.registry.next_expiry();
        if due != self.due {
            expiry::reschedule(self.partition, self.due, due);
            self.due = due;
        }
    }

    /// After every change of the registry.
    fn settle(&mut self, ctx: &mut Context<Self>) {
        self.schedule();
        if self.registry.is_empty() {
            self.leave(ctx);
        }
    }

    fn leave(&mut self, ctx: &mut Context<Self>) {
        if self.home.delist(self.partition, &ctx.address()) {
            // Unbounded, but sent once per listing.
            ctx.address().do_send(Vacate);
        }
    }
}

impl Drop for PartitionActor {
    fn drop(&mut self) {
        expiry::reschedule(self.partition, self.due, None);
    }
}

impl Actor for PartitionActor {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Context<Self>) {
        self.home.actor_started();
    }

    fn stopped(&mut self, _: &mut Context<Self>) {
        self.home.actor_stopped();
    }
}

impl Handler<Granted> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Granted { grant, reserved }: Granted, ctx: &mut Context<Self>) {
        self.registry.grant(grant, reserved);
        self.settle(ctx);
    }
}

impl Handler<Cover> for PartitionActor {
    type Result = ();

    fn handle(&mut self, cover: Cover, ctx: &mut Context<Self>) {
        let Cover { group_name, worker, fingerprint, room, reply } = cover;
        let covered = self.registry.cover(&group_name, worker, &fingerprint, Instant::now());
        // Before the answer: who hears it may lease the partition again, and must not find an actor that is leaving.
        self.settle(ctx);
        let told = match (covered, room) {
            (Ok(hit), Some(room)) => return self.home.fuse(self.partition, Pending { hit, reply, room }),
            (Ok(hit), None) => Covered::Hit(hit),
            (Err(miss), _) => Covered::Miss(miss),
        };
        let _ = reply.send(told);
    }
}

impl Handler<Extended> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Extended { worker, expires }: Extended, _: &mut Context<Self>) {
        let home = &self.home;
        self.registry.extend(worker, expires, |reserved| reserved.ticket.iter().for_each(|ticket| home.used(*ticket)));
        self.schedule();
    }
}

impl Handler<Expired> for PartitionActor {
    type Result = ();

    fn handle(&mut self, _: Expired, ctx: &mut Context<Self>) {
        // The list has dropped it.
        self.due = None;
        self.registry.expire(Instant::now());
        self.settle(ctx);
    }
}

impl Handler<Dropped> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Dropped { group, worker }: Dropped, ctx: &mut Context<Self>) {
        self.registry.drop_lease(group, worker);
        self.settle(ctx);
    }
}

impl Handler<Evicted> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Evicted(ticket): Evicted, ctx: &mut Context<Self>) {
        self.registry.evict(|reserved| reserved.ticket == Some(ticket));
        self.settle(ctx);
    }
}

impl Handler<QueueGone> for PartitionActor {
    type Result = ();

    fn handle(&mut self, QueueGone(queue): QueueGone, ctx: &mut Context<Self>) {
        self.registry.forget_queue(queue);
        self.settle(ctx);
    }
}

impl Handler<Vacate> for PartitionActor {
    type Result = ();

    fn handle(&mut self, _: Vacate, ctx: &mut Context<Self>) {
        if self.registry.is_empty() || !self.home.relist(self.partition, ctx.address()) {
            // Leases that came in between are lost if another actor has taken the place: they take resolution.
            ctx.stop();
        }
    }
}
