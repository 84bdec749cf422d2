//! The pop path: claim, read, deliver; or park until something may be there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::autopilot::Autopilot;
use super::claim::{Budget, Claimer, Claims};
use super::claim_fusion::ClaimFusion;
use super::delivery::{self, Delivered};
use super::discovery::Discovery;
use super::error::{BrokerError, BrokerResult};
use super::feed::Feed;
pub use super::feed::Labels;
use super::grants::Grants;
use super::group::GroupDirectory;
use super::meter::meter;
use super::parking::Parking;
use super::pop_call::PopCall;
pub use super::pop_request::{BATCH_MAX, Delegated, Policy, PopAnswer, PopRequest, Popped, Scope, Sizes, TIMEOUT_MAX};
use super::queue::{self, Queue, QueueDirectory};
use super::reads::{self, Reads};
use super::ready::{ReadyGroup, ReadyIndex, WakeKey};
use super::ready_group::Release;
use super::settings::BrokerSettings;
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};
use crate::store::Store;
use crate::store::cursors::AutoAckTx;
use crate::store::groups::StartAt;

/// The pop path of one broker.
#[derive(Clone, Debug)]
pub struct PopPath {
    /// The store.
    pub store: Store,
    /// Queue rows.
    pub queues: QueueDirectory,
    /// Group keys.
    pub groups: GroupDirectory,
    /// Ready partitions.
    pub ready: ReadyIndex,
    /// Told of every lease that was granted.
    pub grants: Grants,
    /// Chooses the sizes that pops leave open.
    pub autopilot: Autopilot,
    /// Queues by label.
    pub discovery: Discovery,
    /// Bounds of parked and claiming pops.
    pub parking: Parking,
    /// Claims of leasing pops.
    pub claim_fusion: ClaimFusion,
    /// Reads of what was claimed.
    pub reads: Reads,
    /// `autoAck` pops that claim at the same time.
    pub claims: Arc<Semaphore>,
    /// Fires when parked pops are to be answered.
    pub stop: CancellationToken,
    /// Limits.
    pub settings: Arc<BrokerSettings>,
}

/// What one look found to wait for.
pub(super) struct Miss {
    policy: Policy,
    groups: Vec<Arc<ReadyGroup>>,
    keys: Vec<WakeKey>,
    feed: Option<Arc<Feed>>,
    again_after: Option<Duration>,
}

/// What one look came to.
pub(super) enum Attempt {
    Served(Popped),
    Nothing(Miss),
    /// The group was deleted under the pop: its next look is a first contact.
    FirstContact,
}

/// Looks of one pop that may find its group deleted, one after the other.
const GONE_MAX: usize = 8;

impl PopPath {
    /// Answers the pop (without messages at its deadline), or parks it: `None`, and [`PopCall::due`] says when to ask again.
    /// Dropping the call (the client hung up) parks, claims and leaks nothing; a claim already sent ends by expiry (I15).
    /// What a look needs lives in a box of its own, gone while the pop is parked.
    pub async fn advance(&self, call: &mut PopCall) -> BrokerResult<Option<Popped>> {
        let create = call.begin_look();
        let miss = match self.look(&call.request, create, call.deadline).await? {
            Ok(popped) => return Ok(Some(popped)),
            Err(miss) => miss,
        };
        if !call.request.wait || Instant::now() >= call.deadline || self.stop.is_cancelled() {
            return Ok(Some(Popped { policy: miss.policy, ..Popped::default() }));
        }
        let parked = self.parking.park(miss.groups, &self.ready, miss.keys, miss.feed)?;
        // A pop that waits by name was not listed while it looked: look once more now that it is.
        let mut again_after = miss.again_after;
        if parked.is_keyed() {
            match self.look(&call.request, false, call.deadline).await? {
                Ok(popped) => return Ok(Some(popped)),
                Err(miss) => again_after = miss.again_after,
            }
        }
        call.park(parked, again_after, self.stop.clone());
        Ok(None)
    }

    /// One look, repeated if the group turns out to have been deleted.
    async fn look(&self, request: &PopRequest, create: bool, deadline: Instant) -> BrokerResult<Result<Popped, Miss>> {
        for _ in 0..GONE_MAX {
            match Box::pin(self.attempt(request, create, deadline)).await? {
                Attempt::Served(popped) => return Ok(Ok(popped)),
                Attempt::Nothing(miss) => return Ok(Err(miss)),
                Attempt::FirstContact => {}
            }
        }
        Err(BrokerError::Failed(format!("connection kept: group {:?} is deleted again and again", request.group)))
    }

    pub(super) fn forget_group(&self, group: GroupId) -> Attempt {
        self.groups.forget_groups(&[group]);
        self.ready.forget_group(group);
        Attempt::FirstContact
    }

    async fn attempt(&self, request: &PopRequest, create: bool, deadline: Instant) -> BrokerResult<Attempt> {
        match &request.scope {
            Scope::Queue(name) => {
                let queue = match Box::pin(self.queues.find(name)).await? {
                    Some(queue) => Some(queue),
                    None if create => Box::pin(self.queues.find_or_create(&[name])).await?.remove(name),
                    None => None,
                };
                let Some(queue) = queue else {
                    return Ok(Attempt::nothing_but(request, vec![WakeKey::Queue(name.clone())]));
                };
                self.attempt_queue(request, queue, deadline).await
            }
            Scope::Labels(labels) => self.attempt_labels(request, labels).await,
            Scope::Partition(name, partition) => {
                let unknown = || Attempt::nothing_but(request, vec![WakeKey::Queue(name.clone())]);
                let Some(queue) = Box::pin(self.queues.find(name)).await? else { return Ok(unknown()) };
                let Some(partition) = self.store.find_partition(queue.id, partition).await? else {
                    return Ok(unknown());
                };
                self.attempt_partition(request, queue, partition).await
            }
        }
    }

    /// Wildcard: the ready partitions of one queue.
    async fn attempt_queue(&self, request: &PopRequest, queue: Queue, deadline: Instant) -> BrokerResult<Attempt> {
        let start = request.subscription.start(&request.group, self.settings.subscription_default);
        let conflation = request.conflation == Some(true);
        let Some(row) = self.groups.register(queue.id, &request.group, start, conflation).await? else {
            self.queues.forget(&queue.name);
            return Ok(Attempt::nothing_but(request, vec![WakeKey::Queue(queue.name.clone())]));
        };
        let mut policy = Policy::default();
        policy.add(request, row.conflation);
        let group = self.ready.group(queue.id, row.id);
        let mut sizes = request.sizes;
        if !row.conflation {
            sizes = self.autopilot.sizes(request, &group);
            Box::pin(self.wait_for_more(request, sizes, &queue, &group, deadline)).await?;
        }
        let _permit = self.permit(request).await?;
        let mut auto = Box::pin(self.begin(request)).await?;
        let widest = sizes.width(row.conflation);
        let worker = (widest > 1).then(|| self.store.ids().lease_on_many());
        let mut claims = Claims::default();
        let mut budget = Budget { messages: sizes.batch, partitions: widest };
        let claimer = self.claimer(request, &queue, worker, start, row.conflation);
        claimer.claim_ready(&queue, &group, &mut budget, &mut auto, &mut claims).await?;
        let gone = claims.gone;
        match Box::pin(self.serve(request, claims, auto, worker)).await? {
            Some(answer) => {
                let chosen = if row.conflation { None } else { self.autopilot.chosen(request, sizes, &group) };
                Ok(Attempt::Served(Popped { answer: Some(answer), policy, chosen }))
            }
            None => Ok(match gone {
                Some(group) => self.forget_group(group),
                None => Attempt::Nothing(Miss { groups: vec![group], ..Miss::new(policy) }),
            }),
        }
    }

    async fn attempt_partition(
        &self,
        request: &PopRequest,
        queue: Queue,
        partition: PartitionId,
    ) -> BrokerResult<Attempt> {
        let start = request.subscription.start(&request.group, self.settings.subscription_default);
        // Only a declared policy registers a group here (`spec/push-pop.md` §7.12).
        let found = match request.conflation {
            None => self.groups.find_or_create(&queue, &request.group).await?,
            Some(declared) => self.groups.register(queue.id, &request.group, start, declared).await?,
        };
        let Some(row) = found else {
            self.queues.forget(&queue.name);
            return Ok(Attempt::nothing_but(request, vec![WakeKey::Known(partition)]));
        };
        let mut policy = Policy::default();
        policy.add(request, row.conflation);
        let group = row.id;
        let _permit = self.permit(request).await?;
        let claimer = self.claimer(request, &queue, None, start, row.conflation);
        let mut budget = Budget { messages: request.sizes.batch, partitions: 1 };
        let mut auto = Box::pin(self.begin(request)).await?;
        let mut claims = Claims::default();
        let again_after =
            claimer.claim_partition(&queue, group, partition, &mut budget, &mut auto, &mut claims).await?;
        let gone = claims.gone;
        match Box::pin(self.serve(request, claims, auto, None)).await? {
            Some(answer) => Ok(Attempt::Served(Popped { answer: Some(answer), policy, chosen: None })),
            None => {
                if let Some(group) = gone {
                    return Ok(self.forget_group(group));
                }
                let keys = vec![WakeKey::Known(partition)];
                Ok(Attempt::Nothing(Miss { keys, again_after, ..Miss::new(policy) }))
            }
        }
    }

    /// The turn of an `autoAck` pop, which holds a connection from its claim to its commit.
    pub(super) async fn permit(&self, request: &PopRequest) -> BrokerResult<Option<OwnedSemaphorePermit>> {
        Ok(if request.auto_ack { Some(self.parking.claim_permit(&self.claims).await?) } else { None })
    }

    pub(super) async fn begin(&self, request: &PopRequest) -> BrokerResult<Option<AutoAckTx>> {
        Ok(if request.auto_ack { Some(self.store.begin_auto_ack().await?) } else { None })
    }

    pub(super) fn claimer(
        &self,
        request: &PopRequest,
        queue: &Queue,
        worker: Option<LeaseId>,
        start: StartAt,
        conflating: bool,
    ) -> Claimer<'_> {
        Claimer {
            store: &self.store,
            fusion: &self.claim_fusion,
            ready: &self.ready,
            has_peers: self.parking.has_peers(),
            shared_worker: worker,
            start,
            lease_seconds: queue::lease_seconds(request.lease_seconds, &queue.options),
            conflating,
        }
    }

    /// Reads what was claimed and makes the answer; `None` if nothing was, or if retention took it meanwhile.
    pub(super) async fn serve(
        &self,
        request: &PopRequest,
        mut claims: Claims<'_>,
        auto: Option<AutoAckTx>,
        shared_worker: Option<LeaseId>,
    ) -> BrokerResult<Option<PopAnswer>> {
        if claims.spans.is_empty() {
            // Nothing depends on the commit: what was learned holds, or an `autoAck` pop would look again for ever.
            claims.settle();
            return Ok(None);
        }
        let spans = delivery::spans(&claims.spans);
        let owned = std::mem::take(&mut claims.spans);
        let mut delivered = match auto {
            None => {
                let segments = self.reads.read(spans).await?;
                let delivered = delivery::deliver(owned, segments)?;
                self.shrink_leases(&delivered).await?;
                delivered
            }
            Some(mut tx) => {
                let segments = match self.reads.remembered(&spans) {
                    Some(segments) => segments,
                    None => {
                        let rows = tx.read_segments(&spans, delivery::DELIVERY_BYTES_MAX as i64).await?;
                        rows.into_iter().map(reads::unpack).collect::<BrokerResult<_>>()?
                    }
                };
                let delivered = delivery::deliver(owned, segments)?;
                for (group, ends) in by_group(&delivered) {
                    let back: Vec<_> = ends.iter().map(|s| (s.partition, s.end.unwrap_or(s.committed))).collect();
                    tx.shrink(group, &back).await?;
                }
                tx.commit().await?;
                claims.settle();
                for part in delivered.iter().filter(|d| d.shrunk().is_some()) {
                    self.ready.mark(part.span.queue.id, part.span.claimed.partition);
                }
                delivered
            }
        };
        delivered.retain(|part| part.end.is_some());
        let Some(first) = delivered.first() else { return Ok(None) };
        if request.auto_ack {
            return Ok(Some(PopAnswer { lease: None, delivered }));
        }
        let lease = shared_worker.unwrap_or(first.span.claimed.worker);
        let seconds = queue::lease_seconds(request.lease_seconds, &first.span.queue.options);
        if shared_worker.is_some() {
            let partitions: Vec<PartitionId> = delivered.iter().map(|d| d.span.claimed.partition).collect();
            self.store.record_lease(lease, &partitions, seconds).await?;
        }
        let group: Arc<str> = request.group.as_str().into();
        for part in &delivered {
            let seconds = queue::lease_seconds(request.lease_seconds, &part.span.queue.options);
            self.grants.granted(&group, part, Duration::from_secs(seconds as u64));
        }
        Ok(Some(PopAnswer { lease: Some(lease), delivered }))
    }

    async fn shrink_leases(&self, delivered: &[Delivered]) -> BrokerResult<()> {
        for (group, ends) in by_group(delivered) {
            let worker = delivered.iter().find(|d| d.span.group == group).map(|d| d.span.claimed.worker);
            let ends: Vec<_> = ends.iter().map(|s| (s.partition, s.end)).collect();
            if let Some(worker) = worker {
                self.store.shrink_leases(group, worker, &ends).await?;
            }
            for part in delivered.iter().filter(|d| d.span.group == group && d.shrunk().is_some()) {
                if part.end.is_none() {
                    self.ready.released(group, part.span.claimed.partition, Release::Redeliver);
                }
            }
        }
        Ok(())
    }

    /// `minPopWaitTime`: an under-full waiting pop of several messages gives more of them time to come. It holds no
    /// lease, no connection, no lock and no turn to claim meanwhile (`spec/push-pop.md` §6.3).
    async fn wait_for_more(
        &self,
        request: &PopRequest,
        sizes: Sizes,
        queue: &Queue,
        group: &Arc<ReadyGroup>,
        deadline: Instant,
    ) -> BrokerResult<()> {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let wait = Duration::from_millis(u64::try_from(queue.options.min_pop_wait_time).unwrap_or(0));
        if wait.is_zero() || !request.wait || sizes.batch <= 1 {
            return Ok(());
        }
        let started = Instant::now();
        let end = deadline.min(started + wait);
        let mut waited = false;
        loop {
            let candidates = {
                let taken = self.ready.take(group, sizes.width(false).min(64) as usize).await?;
                taken.partitions().to_vec()
            };
            if candidates.is_empty() {
                return Ok(());
            }
            let deliverable = self.store.count_deliverable(group.id, &candidates).await?;
            if deliverable == 0 || deliverable >= sizes.batch || Instant::now() >= end || self.stop.is_cancelled() {
                if waited {
                    meter().fill_waited(started.elapsed());
                }
                return Ok(());
            }
            waited = true;
            tokio::time::sleep_until(end.min(Instant::now() + LOOK_EVERY).into()).await;
        }
    }
}

/// A span whose delivery ended early.
struct Shrunk {
    partition: PartitionId,
    /// Last offset delivered, if any.
    end: Option<Offset>,
    /// Cursor at the claim.
    committed: Offset,
}

/// The spans whose delivery ended early, by group.
fn by_group(delivered: &[Delivered]) -> Vec<(GroupId, Vec<Shrunk>)> {
    let mut groups: Vec<(GroupId, Vec<Shrunk>)> = Vec::new();
    for part in delivered {
        let Some(end) = part.shrunk() else { continue };
        let claimed = &part.span.claimed;
        let row = Shrunk { partition: claimed.partition, end, committed: claimed.committed };
        match groups.iter_mut().find(|(id, _)| *id == part.span.group) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((part.span.group, vec![row])),
        }
    }
    groups
}

impl Attempt {
    /// Nothing, of a group that is not known yet: it would be what the request declares.
    fn nothing_but(request: &PopRequest, keys: Vec<WakeKey>) -> Attempt {
        let policy = Policy { conflation: request.conflation == Some(true), conflict: false };
        Attempt::Nothing(Miss { keys, ..Miss::new(policy) })
    }
}

impl Miss {
    fn new(policy: Policy) -> Miss {
        Miss { policy, groups: Vec::new(), keys: Vec::new(), feed: None, again_after: None }
    }

    /// Nothing in the queues of a label.
    pub(super) fn on_feed(policy: Policy, feed: Arc<Feed>) -> Miss {
        Miss { feed: Some(feed), ..Miss::new(policy) }
    }
}
