//! The ack path: groups the items of a call, picks the road of each group, and answers after COMMIT.
//!
//! ```text
//! ack ── plan ──┬─ all completed, lease known here, all of it acked ── fusion ── one commit for many
//!               │        (partition actor: hit or miss)                   │ refused
//!               └─ anything else ── settle: full hash resolution ─────────┘
//! ```
//! The fast path and fusion can be switched off; the answers stay the same (I6).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

pub mod gates;
pub mod item;
pub mod meter;
pub mod outcome;
pub mod plan;
pub mod search;
pub mod settings;
pub mod settle;

pub use crate::broker::lease::{Fingerprint, LeaseGrant};
pub use item::{AckAnswer, AckError, AckItem, AckTarget, Acked, LeaseClaim, Release, ReleaseListener};
pub use settings::AckSettings;

use crate::broker::ack_decision::AckStatus;
use crate::broker::activity::Activity;
use crate::broker::arbiters::Arbiters;
use crate::broker::directory::Home;
use crate::broker::fusion::flush::{Flushed, Flusher};
use crate::broker::fusion::{Covered, Shard, ShardTools};
use crate::broker::fusion_batch::Caps;
use crate::broker::lease::{Hit, Miss};
use crate::broker::minutes::Count;
use crate::broker::persistent::Persistent;
use crate::ids::{GroupId, LeaseId, PartitionId, QueueId};
use crate::spans;
use crate::store::Store;
use crate::store::advances::OnLocked;
use meter::{AckMeter, Road};
use outcome::Change;
use plan::{Call, Group};
use search::Search;
use settle::Settler;

/// Partitions of one call that are under way at once.
const LANES_PER_CALL_MAX: usize = 1024;
/// Groups of one call in full resolution at once: one call must not take the whole pool.
const RESOLVED_PER_CALL_MAX: usize = 16;
/// What an item holds in memory while it is under way: itself, its part of the body, its answer.
const ITEM_BYTES: usize = 256;
/// Admission counts in these.
const ADMISSION_UNIT_BYTES: usize = 1024;
/// Longest wait for the last flushes at shutdown.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// The ack path of this broker. A cheap clone.
#[derive(Clone)]
pub struct AckPipeline {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    settler: Settler,
    search: Search,
    flusher: Arc<Flusher>,
    /// The lease registry, unless it is switched off.
    home: Option<Arc<Home>>,
    closing: AtomicBool,
    /// Memory of the calls under way, in units: a client that hangs up leaves its call behind.
    admission: Arc<Semaphore>,
    admission_units: usize,
    /// Held by the one group that is under way, in serial mode.
    serial: Option<Mutex<()>>,
    listener: Arc<dyn ReleaseListener>,
    meter: Arc<AckMeter>,
    activity: Arc<Activity>,
    checkout_timeout: Duration,
}

/// How far the fast path got.
enum Fast {
    Answered(Road, Vec<AckAnswer>),
    Resolve { in_doubt: bool },
}

impl fmt::Debug for AckPipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AckPipeline").field("home", &self.inner.home).finish_non_exhaustive()
    }
}

impl AckPipeline {
    /// Starts the path, and the threads of its actors. `listener` hears of every (partition, group) that an ack made
    /// claimable, after COMMIT; `activity` of what was acknowledged. Must be called on the runtime of the database connections.
    pub fn start(
        store: Store,
        settings: AckSettings,
        listener: Arc<dyn ReleaseListener>,
        activity: Arc<Activity>,
    ) -> AckPipeline {
        let meter = Arc::new(AckMeter::new());
        let (flush, lookup) = (settings.flush_timeout, settings.lookup_timeout);
        let flusher = Arc::new(Flusher::new(store.clone(), flush, lookup, meter.clone()));
        let home = (settings.registry && !settings.serial)
            .then(|| start_home(&settings, &flusher, &listener, &meter))
            .flatten();
        let search = Search::new(store.clone());
        let settler = Settler::new(store.clone(), search.clone(), settings.checkout_timeout, settings.lookup_timeout);
        let admission_units = (settings.inflight_bytes_max / ADMISSION_UNIT_BYTES).max(1);
        let inner = Inner {
            store,
            settler,
            search,
            flusher,
            home,
            closing: AtomicBool::new(false),
            admission: Arc::new(Semaphore::new(admission_units)),
            admission_units,
            serial: settings.serial.then(|| Mutex::new(())),
            listener,
            meter,
            activity,
            checkout_timeout: settings.checkout_timeout,
        };
        AckPipeline { inner: Arc::new(inner) }
    }

    /// Acknowledges. One answer per item, in request order; errors are per item, never of the call (I5).
    ///
    /// The work goes on if the caller stops waiting, so that whoever waits for a released lease hears of it (I15). Past the bound
    /// on the memory of all calls under way every item answers `pool`.
    pub async fn ack(&self, group_name: &str, items: Vec<AckItem>) -> Vec<AckAnswer> {
        let count = items.len();
        let Some(admitted) = self.inner.admit(&items) else {
            return vec![AckAnswer::refused(AckError::Pool); count];
        };
        let call = Call { group_name: group_name.into(), items };
        let inner = self.inner.clone();
        let work = Persistent::new(spans::carried(async move {
            let _admitted = admitted;
            inner.run(call).await
        }));
        work.await.unwrap_or_else(|error| {
            tracing::error!(%error, "an ack call was aborted");
            vec![AckAnswer::refused(AckError::FlushFailed); count]
        })
    }

    /// Bytes of the calls under way, and the bound past which they are refused.
    pub fn inflight_bytes(&self) -> (usize, usize) {
        let units = self.inner.admission_units;
        let used = units.saturating_sub(self.inner.admission.available_permits());
        (used * ADMISSION_UNIT_BYTES, units * ADMISSION_UNIT_BYTES)
    }

    /// Whether granted leases are wanted here: without, their fingerprints need not be made.
    pub fn wants_grants(&self) -> bool {
        self.inner.home.is_some()
    }

    /// A pop leased a partition. Call it after the claim and before the lease id leaves the broker: the ack must not
    /// come first.
    pub fn granted(&self, grant: LeaseGrant) {
        if let Some(home) = &self.inner.home {
            home.granted(grant);
        }
    }

    /// The leases of this worker on these partitions live at least until `expires`.
    pub fn extended(&self, worker: LeaseId, partitions: &[PartitionId], expires: Instant) {
        if let Some(home) = &self.inner.home {
            home.extended(worker, partitions, expires);
        }
    }

    /// A transaction moved a cursor. Call it after COMMIT.
    pub fn settled(&self, partition: PartitionId, change: Change) {
        self.inner.announce(partition, change);
    }

    /// Searches stored hashes within the bounds of this path.
    pub fn search(&self) -> Search {
        self.inner.search.clone()
    }

    /// A seek or delete ended whatever lease this group holds on this partition.
    pub fn forget_lease(&self, partition: PartitionId, group: GroupId) {
        if let Some(home) = &self.inner.home {
            home.dropped(partition, group, None);
        }
    }

    /// The queue is gone. Costs as much as there are live leases.
    pub fn forget_queue(&self, queue: QueueId) {
        if let Some(home) = &self.inner.home {
            home.forget_queue(queue);
        }
    }

    /// The group is gone, or was moved on every partition. Costs as much as there are live leases.
    pub fn forget_group(&self, group: GroupId) {
        if let Some(home) = &self.inner.home {
            home.forget_group(group);
        }
    }

    /// Flushes what was taken in and ends the actors. Acks that come later still work, by full resolution.
    pub async fn shutdown(&self) {
        self.inner.closing.store(true, Ordering::Release);
        if let Some(home) = &self.inner.home {
            let drained = async {
                for shard in home.shards() {
                    shard.drain().await;
                }
            };
            if tokio::time::timeout(DRAIN_MAX, drained).await.is_err() {
                tracing::warn!("ack flushes were still under way at shutdown; their leases will expire and redeliver");
            }
            home.stop();
        }
    }
}

/// `None`, with a log line, if the system gives no thread: acks then take full resolution.
fn start_home(
    settings: &AckSettings,
    flusher: &Arc<Flusher>,
    listener: &Arc<dyn ReleaseListener>,
    meter: &Arc<AckMeter>,
) -> Option<Arc<Home>> {
    let started = Arbiters::start(settings.threads)
        .and_then(|arbiters| Ok((arbiters, tokio::runtime::Handle::try_current().map_err(std::io::Error::other)?)));
    let (arbiters, runtime) = match started {
        Ok(started) => started,
        Err(error) => {
            tracing::error!(%error, "no thread for the lease registry; acks take full resolution");
            return None;
        }
    };
    let tools = ShardTools {
        flusher: flusher.clone(),
        listener: listener.clone(),
        meter: meter.clone(),
        runtime,
        caps: Caps { rows_max: settings.rows_max, bytes_max: settings.bytes_max },
    };
    let count = if settings.fusion { settings.shards.max(1) } else { 0 };
    let shards = (0..count).map(|nth| Shard::start(arbiters.of(nth), settings.queue_rows_max, tools.clone())).collect();
    Some(Home::new(arbiters, shards, settings.registry_bytes_max, meter.clone()))
}

impl Inner {
    fn admit(&self, items: &[AckItem]) -> Option<OwnedSemaphorePermit> {
        let reasons: usize = items.iter().filter_map(|item| item.reason.as_ref()).map(|reason| reason.len()).sum();
        let units = (items.len() * ITEM_BYTES + reasons).div_ceil(ADMISSION_UNIT_BYTES);
        self.admission.clone().try_acquire_many_owned(units.clamp(1, self.admission_units) as u32).ok()
    }

    async fn run(&self, call: Call) -> Vec<AckAnswer> {
        let plan = plan::plan(&call, self.store.ids());
        let mut answers = plan.answers;
        let resolved = Semaphore::new(RESOLVED_PER_CALL_MAX);
        let (call, resolved) = (&call, &resolved);
        let mut told = |done: Vec<(Group, Vec<AckAnswer>)>| {
            for (group, told) in done {
                for (nth, answer) in group.members().zip(told) {
                    answers[nth] = Some(answer);
                }
            }
        };
        let run_lane = |lane: Vec<Group>| async move {
            let mut done = Vec::with_capacity(lane.len());
            for group in lane {
                let answers = self.run_group(call, &group, resolved).await;
                done.push((group, answers));
            }
            done
        };
        let mut lanes = plan.lanes;
        if lanes.len() == 1
            && let Some(only) = lanes.pop()
        {
            // Most calls: a set of futures would cost more than the rest of the bookkeeping.
            told(run_lane(only).await);
        } else {
            let lanes_max = if self.serial.is_some() { 1 } else { LANES_PER_CALL_MAX };
            let mut lanes = stream::iter(lanes.into_iter().map(run_lane)).buffer_unordered(lanes_max);
            while let Some(done) = lanes.next().await {
                told(done);
            }
        }
        let answers: Vec<AckAnswer> =
            answers.into_iter().map(|a| a.unwrap_or_else(|| AckAnswer::refused(AckError::FlushFailed))).collect();
        let done = answers.iter().filter(|answer| answer.outcome.is_ok()).count();
        self.meter.items_done.increment(done as u64);
        self.meter.items_failed.increment((answers.len() - done) as u64);
        answers
    }

    async fn run_group(&self, call: &Call, group: &Group, resolved: &Semaphore) -> Vec<AckAnswer> {
        let started = Instant::now();
        let (road, answers) = match self.fast(call, group).await {
            Fast::Answered(road, answers) => (road, answers),
            Fast::Resolve { in_doubt } => {
                let _permit = resolved.acquire().await;
                // Boxed: inline it would make every group of every call some 30 KB, resolved or not.
                (Road::Resolved, Box::pin(self.resolve(call, group, in_doubt)).await)
            }
        };
        self.meter.answered(road, started.elapsed());
        answers
    }

    async fn resolve(&self, call: &Call, group: &Group, in_doubt: bool) -> Vec<AckAnswer> {
        let _alone = match &self.serial {
            Some(serial) => Some(serial.lock().await),
            None => None,
        };
        let announce = |change| self.announce(group.partition, change);
        let settled = self.settler.settle(call, group, in_doubt, announce).await;
        if let Some(id) = settled.changed {
            self.note(call, group, id, &settled.answers);
        }
        settled.answers
    }

    /// Counts for the minute buckets; a nack counts as failed, whether or not it was answered with success.
    fn note(&self, call: &Call, group: &Group, id: GroupId, answers: &[AckAnswer]) {
        let pairs = group.items(call).zip(answers);
        let done = pairs.filter(|(item, answer)| item.status == AckStatus::Completed && answer.outcome.is_ok()).count();
        let dead = answers.iter().filter(|answer| matches!(answer.outcome, Ok(Acked::Done { dlq: true }))).count();
        self.activity.count(Count::DeadLetters, dead as u64);
        self.activity.acked(id, done as u64, (answers.len() - done) as u64);
        self.activity.conflated(id, answers.iter().filter_map(|answer| answer.conflated).sum());
    }

    /// After COMMIT: the registry entry is stale, and who waits for the partition may look.
    fn announce(&self, partition: PartitionId, Change { group, holder, release }: Change) {
        if let (Some(home), Some(holder)) = (&self.home, holder) {
            home.dropped(partition, group, Some(holder));
        }
        if let Some(release) = release {
            self.listener.released(partition, group, release);
        }
    }

    async fn fast(&self, call: &Call, group: &Group) -> Fast {
        let (home, worker) = match self.eligible(call, group) {
            Ok(found) => found,
            Err(miss) => return self.missed(miss),
        };
        let fingerprint = Fingerprint::of(group.items(call).filter_map(|item| item.transaction));
        // Nothing is held while waiting for a place, no connection and no lock.
        let room = match home.shard(group.partition) {
            None => None,
            Some(shard) => match shard.room(self.checkout_timeout).await {
                Some(room) => Some(room),
                None => return Fast::Answered(Road::Fused, refused(group, AckError::Pool)),
            },
        };
        match home.cover(group.partition, call.group_name.clone(), worker, fingerprint, room) {
            Err(miss) => self.missed(miss),
            Ok(answer) => match answer.await {
                Ok(Covered::Miss(miss)) => self.missed(miss),
                Ok(Covered::Hit(hit)) => {
                    let flushed =
                        Box::pin(self.flusher.advance(std::slice::from_ref(&hit.advance), OnLocked::Wait)).await;
                    let flushed = flushed.first().copied().unwrap_or(Flushed::Failed);
                    if flushed == Flushed::Committed {
                        self.listener.released(group.partition, hit.advance.group, Release::Finished);
                    }
                    self.flushed(Road::Positional, group, &hit, flushed)
                }
                Ok(Covered::Flushed(hit, flushed)) => self.flushed(Road::Fused, group, &hit, flushed),
                // An actor or a flush was torn down with the question in hand.
                Err(_) => Fast::Resolve { in_doubt: true },
            },
        }
    }

    /// What can be said without the actor (`spec/ack.md` §7).
    fn eligible(&self, call: &Call, group: &Group) -> Result<(&Arc<Home>, LeaseId), Miss> {
        let home = self.home.as_ref().filter(|_| !self.closing.load(Ordering::Acquire)).ok_or(Miss::Off)?;
        let worker = match group.lease {
            LeaseClaim::Id(worker) => worker,
            LeaseClaim::Absent => return Err(Miss::NoLease),
            LeaseClaim::Foreign => return Err(Miss::Unknown),
        };
        if group.items(call).any(|item| item.status != AckStatus::Completed || item.transaction.is_none()) {
            return Err(Miss::Signal);
        }
        if home.knows(group.partition) { Ok((home, worker)) } else { Err(Miss::Unknown) }
    }

    fn missed(&self, miss: Miss) -> Fast {
        self.meter.missed(miss);
        Fast::Resolve { in_doubt: false }
    }

    fn flushed(&self, road: Road, group: &Group, hit: &Hit, flushed: Flushed) -> Fast {
        self.meter.hits.increment(1);
        match flushed {
            Flushed::Committed => {
                self.activity.acked(hit.advance.group, group.len() as u64, 0);
                self.activity.conflated(hit.advance.group, hit.conflated.unwrap_or(0));
                let done = AckAnswer { outcome: Ok(Acked::Done { dlq: false }), lease_released: true, conflated: None };
                let mut answers = vec![done; group.len()];
                if let Some(first) = answers.first_mut() {
                    first.conflated = hit.conflated;
                }
                Fast::Answered(road, answers)
            }
            Flushed::Refused => Fast::Resolve { in_doubt: false },
            Flushed::InDoubt => Fast::Resolve { in_doubt: true },
            Flushed::Failed => Fast::Answered(road, refused(group, AckError::FlushFailed)),
            Flushed::NoConnection => Fast::Answered(road, refused(group, AckError::Pool)),
        }
    }
}

fn refused(group: &Group, error: AckError) -> Vec<AckAnswer> {
    vec![AckAnswer::refused(error); group.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of<'a, F>(_: fn(&'a Inner, &'a Call, &'a Group, &'a Semaphore) -> F) -> usize {
        size_of::<F>()
    }

    /// A call may have hundreds of groups under way at once (`LANES_PER_CALL_MAX`).
    #[test]
    fn a_group_under_way_is_small() {
        let bytes = bytes_of(Inner::run_group);
        assert!(bytes < 2048, "{bytes}");
    }
}
