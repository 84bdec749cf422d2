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

use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message, SpawnHandle};
use tokio::sync::oneshot;

use super::directory::Home;
use super::fusion::{Covered, Pending, Room};
use super::lease::{Fingerprint, LeaseGrant, Registry};
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
    /// When the timer is due, and the timer. One per actor, for the entry that expires first.
    timer: Option<(Instant, SpawnHandle)>,
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

/// A queue is gone: its leases are void.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct QueueGone(pub QueueId);

/// The last message of a delisted actor.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Vacate;

/// Registry memory that is given back on drop.
#[derive(Debug)]
pub struct Reserved {
    pub(super) home: Arc<Home>,
    pub(super) bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.home.give_back(self.bytes);
    }
}

impl PartitionActor {
    /// An actor with its first lease.
    pub(super) fn new(partition: PartitionId, home: Arc<Home>, reserved: Reserved, first: Granted) -> PartitionActor {
        let mut registry = Registry::default();
        registry.grant(first.grant, first.reserved);
        PartitionActor { partition, home, registry, timer: None, _reserved: reserved }
    }

    /// Keeps one timer, for the earliest expiry; leaves if there is none.
    fn settle(&mut self, ctx: &mut Context<Self>) {
        let Some(due) = self.registry.next_expiry() else { return self.leave(ctx) };
        if self.timer.is_some_and(|(at, _)| at <= due) {
            // Early at worst: it looks, finds nothing expired, and is set again.
            return;
        }
        if let Some((_, handle)) = self.timer.take() {
            ctx.cancel_future(handle);
        }
        let wait = due.saturating_duration_since(Instant::now());
        let handle = ctx.run_later(wait, |actor, ctx| {
            actor.timer = None;
            actor.registry.expire(Instant::now());
            actor.settle(ctx);
        });
        self.timer = Some((due, handle));
    }

    fn leave(&mut self, ctx: &mut Context<Self>) {
        if self.home.delist(self.partition, &ctx.address()) {
            // Unbounded, but sent once per listing.
            ctx.address().do_send(Vacate);
        }
    }
}

impl Actor for PartitionActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        self.home.actor_started();
        self.settle(ctx);
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
        // Before the answer: whoever has it and is granted the next lease must not meet an actor that is leaving.
        if self.registry.is_empty() {
            self.leave(ctx);
        }
        match (covered, room) {
            (Err(miss), _) => {
                let _ = reply.send(Covered::Miss(miss));
            }
            (Ok(hit), None) => {
                let _ = reply.send(Covered::Hit(hit));
            }
            (Ok(hit), Some(room)) => self.home.fuse(self.partition, Pending { hit, reply, room }),
        }
    }
}

impl Handler<Extended> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Extended { worker, expires }: Extended, _: &mut Context<Self>) {
        self.registry.extend(worker, expires);
    }
}

impl Handler<Dropped> for PartitionActor {
    type Result = ();

    fn handle(&mut self, Dropped { group, worker }: Dropped, ctx: &mut Context<Self>) {
        self.registry.drop_lease(group, worker);
        if self.registry.is_empty() {
            self.leave(ctx);
        }
    }
}

impl Handler<QueueGone> for PartitionActor {
    type Result = ();

    fn handle(&mut self, QueueGone(queue): QueueGone, ctx: &mut Context<Self>) {
        self.registry.forget_queue(queue);
        if self.registry.is_empty() {
            self.leave(ctx);
        }
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
