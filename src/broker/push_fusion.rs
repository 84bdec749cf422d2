//! Push fusion: the groups of concurrent pushes share transactions.
//!
//! Fire on idle: a shard with nothing in flight flushes at once; what arrives meanwhile forms the next flush. A
//! partition always belongs to one shard, so at most one flush per partition is in flight and commit order is arrival
//! order. A flush that fails is tried again partition by partition, so that a poison group fails alone.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use uuid::Uuid;

use super::append::Writing;
use super::coalesce::{Batch, Bounds, Coalescer};
use super::dedup::DedupMemory;
use super::error::{BrokerError, BrokerResult};
use super::meter::meter;
use super::peers::Peers;
use super::push::{JobError, JobOutcome, Packed};
use super::push_flush::{self, PartitionBatch};
use super::ready::ReadyIndex;
use super::settings::BrokerSettings;
use crate::store::partitions::PartitionKey;
use crate::store::{Store, StoreError, StoreResult};

/// Admission counts in units of this many bytes.
const ADMISSION_UNIT_BYTES: usize = 1024;
/// Groups that may queue in front of one shard; the byte admission is the real bound.
const SHARD_QUEUE_MAX: usize = 8192;

/// How long a database that cannot be reached is tried again before pushes go to the spool.
const AWAY_PATIENCE: Duration = Duration::from_secs(1);
/// How long the outcome of a commit is looked up before that.
const LOOK_UP_PATIENCE: Duration = Duration::from_secs(10);

/// One group on its way.
#[derive(Debug)]
pub struct PushJob {
    /// Where to.
    pub key: PartitionKey,
    /// Deduplication window of the queue, seconds, 0 = off.
    pub window_seconds: i32,
    /// The messages.
    pub packed: Packed,
    /// The dead letter that the job's one message replaces: it is stored if that still exists, which goes with the commit.
    pub replaces: Option<Uuid>,
    /// Who waits.
    pub reply: oneshot::Sender<JobOutcome>,
}

/// Handle to the shards. A cheap clone.
#[derive(Clone, Debug)]
pub struct PushFusion {
    shards: Arc<[PushShard]>,
    admission: Arc<Semaphore>,
    admission_units: usize,
}

/// The intake of one shard, with its one worker.
pub type PushShard = Coalescer<Shard>;

impl PushFusion {
    /// The shards that `settings` ask for.
    pub fn new(
        store: &Store,
        ready: &ReadyIndex,
        peers: &Peers,
        writing: &Writing,
        settings: &BrokerSettings,
    ) -> PushFusion {
        let units = (settings.push_inflight_bytes_max / ADMISSION_UNIT_BYTES).max(1);
        let bounds = Bounds {
            workers: 1,
            waiting_max: SHARD_QUEUE_MAX,
            jobs_max: settings.push_groups_max.max(1),
            weight_max: settings.push_bytes_max,
        };
        let shard =
            Shard { store: store.clone(), ready: ready.clone(), peers: peers.clone(), writing: writing.clone() };
        let shards = (0..settings.push_shards.max(1)).map(|_| Coalescer::new(shard.clone(), bounds)).collect();
        PushFusion { shards, admission: Arc::new(Semaphore::new(units)), admission_units: units }
    }

    /// What is to be run in the background.
    pub fn shards(&self) -> &[PushShard] {
        &self.shards
    }

    /// Bytes of requests under way, and the bound past which they are refused.
    pub fn inflight_bytes(&self) -> (usize, usize) {
        let used = self.admission_units.saturating_sub(self.admission.available_permits());
        (used * ADMISSION_UNIT_BYTES, self.admission_units * ADMISSION_UNIT_BYTES)
    }

    /// Reserves room for a request, or refuses it: waiting pushes are bounded by bytes.
    pub fn admit(&self, bytes: usize) -> BrokerResult<OwnedSemaphorePermit> {
        let units = bytes.div_ceil(ADMISSION_UNIT_BYTES).clamp(1, self.admission_units) as u32;
        self.admission
            .clone()
            .try_acquire_many_owned(units)
            .map_err(|_| BrokerError::overloaded("too many pushes under way", 1))
    }

    /// Hands a group to its shard, waiting while the shard's queue is full.
    pub async fn submit(&self, job: PushJob) -> BrokerResult<()> {
        let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
        job.key.hash(&mut hasher);
        let shard = (hasher.finish() % self.shards.len() as u64) as usize;
        match self.shards.get(shard) {
            Some(shard) => shard.submit_when_free(job).await,
            None => Err(BrokerError::Stopping),
        }
    }
}

/// What the worker of a shard does.
#[derive(Clone, Debug)]
pub struct Shard {
    store: Store,
    ready: ReadyIndex,
    peers: Peers,
    writing: Writing,
}

impl Batch for Shard {
    type Job = PushJob;
    type State = DedupMemory;
    const SPAN: &'static str = "flush of pushes";
    const OVERLOADED: &'static str = "too many pushes under way";

    fn state(&self) -> DedupMemory {
        DedupMemory::new(&self.writing.dedup)
    }

    fn weight(job: &PushJob) -> usize {
        job.packed.body.len()
    }

    async fn run(&self, memory: &mut DedupMemory, jobs: Vec<PushJob>) -> Vec<PushJob> {
        self.flush(memory, jobs).await;
        Vec::new()
    }
}

impl Shard {
    async fn flush(&self, memory: &mut DedupMemory, jobs: Vec<PushJob>) {
        let partitions = push_flush::by_partition(jobs);
        if partitions.len() == 1 {
            self.flush_until_known(memory, partitions, false).await;
            return;
        }
        match self.try_flush(memory, &partitions, false).await {
            Ok(outcomes) => answer(partitions, outcomes),
            Err(error) => {
                meter().flush_retries.increment(1);
                tracing::warn!(%error, partitions = partitions.len(), "push flush failed; trying each partition alone");
                let look_up = is_unknown(&error);
                for partition in partitions {
                    self.flush_until_known(memory, vec![partition], look_up).await;
                }
            }
        }
    }

    /// Tries one batch again while the cause is passing. A commit whose outcome is unknown is looked up by the next
    /// try: a stored message that carries an id minted here is this push, not a duplicate (README ruling 7). `look_up`:
    /// such a commit may have happened already.
    async fn flush_until_known(&self, memory: &mut DedupMemory, partitions: Vec<PartitionBatch>, mut look_up: bool) {
        const PAUSES_MS: [u64; 5] = [0, 20, 100, 400, 1000];
        let mut last = None;
        let started = std::time::Instant::now();
        for pause in PAUSES_MS {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            match self.try_flush(memory, &partitions, look_up).await {
                Ok(outcomes) => return answer(partitions, outcomes),
                Err(error) => {
                    let unknown = is_unknown(&error);
                    look_up |= unknown;
                    let patience = if look_up { LOOK_UP_PATIENCE } else { AWAY_PATIENCE };
                    let passing = (unknown || error.is_transient()) && started.elapsed() < patience;
                    last = Some(error);
                    if !passing {
                        break;
                    }
                    meter().flush_retries.increment(1);
                }
            }
        }
        let is_away = last.as_ref().is_some_and(StoreError::is_connection);
        let error = last.map(|e| e.to_string()).unwrap_or_default();
        tracing::error!(%error, "push flush failed");
        meter().flush_failures.increment(1);
        let error: Arc<str> = error.into();
        for job in partitions.into_iter().flat_map(|p| p.jobs) {
            let told = match (look_up, is_away) {
                (true, _) => JobError::Unknown(error.clone()),
                (false, true) => JobError::Away(error.clone()),
                (false, false) => JobError::Failed(error.clone()),
            };
            // A producer that hung up does not care.
            let _ = job.reply.send(Err(told));
        }
    }

    async fn try_flush(
        &self,
        memory: &mut DedupMemory,
        partitions: &[PartitionBatch],
        look_up: bool,
    ) -> StoreResult<Vec<Vec<JobOutcome>>> {
        let started = std::time::Instant::now();
        let flushed = push_flush::flush(&self.store, memory, &self.writing, partitions, look_up).await?;
        let jobs = partitions.iter().flat_map(|p| &p.jobs);
        let (groups, messages) = jobs.fold((0, 0), |(groups, messages), job| (groups + 1, messages + job.packed.len()));
        meter().flushed(groups, messages, started.elapsed());
        self.ready.appended(&flushed.appended);
        self.peers.landed(&flushed.appended);
        Ok(flushed.outcomes)
    }
}

fn is_unknown(error: &StoreError) -> bool {
    matches!(error, StoreError::OutcomeUnknown { .. })
}

fn answer(partitions: Vec<PartitionBatch>, outcomes: Vec<Vec<JobOutcome>>) {
    for (partition, outcomes) in partitions.into_iter().zip(outcomes) {
        for (job, outcome) in partition.jobs.into_iter().zip(outcomes) {
            let _ = job.reply.send(outcome);
        }
    }
}
