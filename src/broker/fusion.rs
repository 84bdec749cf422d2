//! *Fusion*: the group commit of cursor advances. A shard of partitions collects what its partition actors recognise
//! as fully covered batches and commits many of them in one statement.
//!
//! **Fire on idle.** A shard with nothing in flight flushes at once, so a lone ack waits for nobody; while a flush is in
//! flight, arrivals gather and form the next one. Batch size follows load, and there is no timer.
//!
//! **Bounds.** An advance holds a place ([`Room`]) from before it is asked for until it is answered; there are as many
//! places as the shard's channel is long, so the channel never overflows and a full shard makes callers wait, holding
//! nothing. The flush itself runs on the runtime of the database connections and answers every waiter after COMMIT.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use actix::{Actor, Addr, ArbiterHandle, AsyncContext, Context, Handler, Message, Supervised, Supervisor};
use crossbeam_channel::{Receiver, Sender, TrySendError};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::ack::item::{Release, ReleaseListener};
use super::ack::meter::AckMeter;
use super::fusion_batch::{Batch, Caps, Fused};
use super::lease::{Hit, Miss};
use crate::spans::{self, Place};
use crate::store::advances::OnLocked;

pub mod flush;
#[cfg(test)]
mod tests;

use flush::{Flushed, Flusher};

/// What became of the question whether an ack covers its lease.
#[derive(Debug)]
pub enum Covered {
    /// It does not; nothing was done.
    Miss(Miss),
    /// It does; the caller advances.
    Hit(Hit),
    /// It does, and the shard flushed it.
    Flushed(Hit, Flushed),
}

/// A place in a shard; given back on drop.
#[derive(Debug)]
pub struct Room {
    _permit: OwnedSemaphorePermit,
    /// Where in a trace it was taken.
    asked: Place,
}

/// An advance on its way into a flush.
#[derive(Debug)]
pub struct Pending {
    /// The advance.
    pub hit: Hit,
    /// Who waits.
    pub reply: oneshot::Sender<Covered>,
    /// Its place, given back with the answer.
    pub room: Room,
}

impl Pending {
    fn answer(self, flushed: Flushed) {
        // A caller that stopped waiting needs no answer.
        let _ = self.reply.send(Covered::Flushed(self.hit, flushed));
        drop(self.room);
    }
}

/// What every shard works with.
#[derive(Clone)]
pub struct ShardTools {
    /// Runs the statements.
    pub flusher: Arc<Flusher>,
    /// Hears of released leases.
    pub listener: Arc<dyn ReleaseListener>,
    /// Metrics.
    pub meter: Arc<AckMeter>,
    /// Where flushes run: the runtime of the database connections.
    pub runtime: Handle,
    /// Bounds of one flush.
    pub caps: Caps,
}

/// The handle of one shard.
pub struct Shard {
    intake: Sender<Pending>,
    outlet: Receiver<Pending>,
    room: Arc<Semaphore>,
    rows_max: usize,
    /// Whether the actor knows, or will find out, that there is work.
    awake: AtomicBool,
    actor: Mutex<Option<Addr<FusionActor>>>,
    arbiter: ArbiterHandle,
    tools: ShardTools,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("waiting", &self.outlet.len()).finish_non_exhaustive()
    }
}

impl Shard {
    /// A shard with `rows_max` places on this thread.
    pub fn start(arbiter: &ArbiterHandle, rows_max: usize, tools: ShardTools) -> Arc<Shard> {
        let rows_max = rows_max.max(1);
        let (intake, outlet) = crossbeam_channel::bounded(rows_max);
        let shard = Arc::new(Shard {
            intake,
            outlet,
            room: Arc::new(Semaphore::new(rows_max)),
            rows_max,
            awake: AtomicBool::new(false),
            actor: Mutex::new(None),
            arbiter: arbiter.clone(),
            tools,
        });
        *shard.actor() = Some(shard.start_actor());
        shard
    }

    /// Waits for a place, at most that long. `None`: the shard is full.
    pub async fn room(&self, wait_max: Duration) -> Option<Room> {
        if let Ok(_permit) = self.room.clone().try_acquire_owned() {
            return Some(Room { _permit, asked: spans::here() });
        }
        tokio::time::timeout(wait_max, self.room.clone().acquire_owned())
            .await
            .ok()?
            .ok()
            .map(|_permit| Room { _permit, asked: spans::here() })
    }

    /// Takes an advance in. Never waits.
    pub(super) fn push(self: &Arc<Shard>, pending: Pending) {
        self.tools.meter.queue_depth.increment(1.0);
        if let Err(TrySendError::Full(pending) | TrySendError::Disconnected(pending)) = self.intake.try_send(pending) {
            // Cannot be: there is a place for each. Resolution answers it.
            self.tools.meter.queue_depth.decrement(1.0);
            return pending.answer(Flushed::Refused);
        }
        self.wake();
    }

    fn wake(self: &Arc<Shard>) {
        if self.awake.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut actor = self.actor();
        let told = actor.as_ref().is_some_and(|actor| actor.try_send(Wake).is_ok());
        if !told {
            // Its supervisor restarts an actor that stops; one that panicked is gone for good and is replaced here.
            let fresh = self.start_actor();
            fresh.do_send(Wake);
            *actor = Some(fresh);
        }
    }

    fn start_actor(self: &Arc<Shard>) -> Addr<FusionActor> {
        let shard = self.clone();
        Supervisor::start_in_arbiter(&self.arbiter, move |_| FusionActor { shard, in_flight: false })
    }

    fn actor(&self) -> MutexGuard<'_, Option<Addr<FusionActor>>> {
        self.actor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until everything taken in is answered; nothing more gets in afterwards.
    pub async fn drain(&self) {
        let all = u32::try_from(self.rows_max).unwrap_or(u32::MAX);
        if let Ok(permits) = self.room.acquire_many(all).await {
            permits.forget();
        }
        self.room.close();
        *self.actor() = None;
    }
}

/// Owner of one shard's flushes: at most one in flight.
#[derive(Debug)]
pub struct FusionActor {
    shard: Arc<Shard>,
    in_flight: bool,
}

/// There is work.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Wake;

/// The flush in flight has been answered.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Done;

/// Says so on drop: a flush that panics must not hold the shard for ever.
struct SayDone(Addr<FusionActor>);

impl Drop for SayDone {
    fn drop(&mut self) {
        self.0.do_send(Done);
    }
}

impl FusionActor {
    /// Flushes what has gathered; goes to sleep if nothing has.
    fn fire(&mut self, ctx: &mut Context<Self>) {
        while !self.in_flight {
            let batch = self.gather();
            if !batch.is_empty() {
                self.in_flight = true;
                let (tools, done) = (self.shard.tools.clone(), SayDone(ctx.address()));
                self.shard.tools.runtime.spawn(flush_batch(tools, batch, done));
                return;
            }
            // A swap, not a store: what came before it and woke nobody is then seen by the look that follows.
            self.shard.awake.swap(false, Ordering::AcqRel);
            if self.shard.outlet.is_empty() || self.shard.awake.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }

    fn gather(&self) -> Batch<Pending> {
        let mut batch = Batch::new(self.shard.tools.caps);
        while batch.has_room() {
            let Ok(pending) = self.shard.outlet.try_recv() else { break };
            self.shard.tools.meter.queue_depth.decrement(1.0);
            batch.add(pending.hit.advance, pending);
        }
        batch
    }
}

impl Drop for FusionActor {
    /// If a panic took it, a fresh one takes what waits: nobody else would be told.
    fn drop(&mut self) {
        // Its mailbox may outlive it by a moment: nobody must be content with a message to that.
        *self.shard.actor() = None;
        self.shard.awake.store(false, Ordering::Release);
        if !self.shard.outlet.is_empty() {
            self.shard.wake();
        }
    }
}

impl Actor for FusionActor {
    type Context = Context<Self>;
}

impl Supervised for FusionActor {
    fn restarting(&mut self, ctx: &mut Context<Self>) {
        self.fire(ctx);
    }
}

impl Handler<Wake> for FusionActor {
    type Result = ();

    fn handle(&mut self, _: Wake, ctx: &mut Context<Self>) {
        self.fire(ctx);
    }
}

impl Handler<Done> for FusionActor {
    type Result = ();

    fn handle(&mut self, _: Done, ctx: &mut Context<Self>) {
        self.in_flight = false;
        self.fire(ctx);
    }
}

async fn flush_batch(tools: ShardTools, batch: Batch<Pending>, done: SayDone) {
    let rows = batch.into_rows();
    let advances: Vec<_> = rows.iter().map(|row| row.advance).collect();
    let started = Instant::now();
    let asked = rows.iter().flat_map(|row| std::iter::once(&row.waiter).chain(&row.followers));
    let asked: Vec<Place> = asked.filter_map(|pending| pending.room.asked.clone().if_traced()).collect();
    let outcomes = spans::shared("flush of acks", asked, tools.flusher.advance(&advances, OnLocked::Skip)).await;
    tools.meter.flushed(advances.len(), started.elapsed());
    // The next flush is on its way while these answers are given.
    drop(done);
    for (Fused { advance, waiter, followers }, flushed) in rows.into_iter().zip(outcomes) {
        if flushed == Flushed::Committed {
            // Before the answer: a pop sent next must find what is left.
            tools.listener.released(advance.partition, advance.group, Release::Finished);
        }
        waiter.answer(flushed);
        for follower in followers {
            follower.answer(Flushed::Refused);
        }
    }
}
