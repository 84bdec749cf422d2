//! The lanes: they take bundles from one bounded intake and flush them.
//!
//! Fire on idle: a lane with nothing in flight flushes at once; what arrives while all lanes are busy forms the next
//! flush. A bundle may touch any partitions, so lanes own none: the row locks of PostgreSQL order flushes that meet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bundle::{Job, Refusal, Verdict, Waiting};
use super::flush::{self, Flushed};
use super::meter::meter;
use super::settings::TransactionSettings;
use crate::broker::ack::AckPipeline;
use crate::broker::activity::Activity;
use crate::broker::append::Writing;
use crate::broker::coalesce::{Batch, Bounds, Coalescer, concerns_each};
use crate::broker::dedup::DedupMemory;
use crate::broker::minutes::Count;
use crate::broker::peers::Peers;
use crate::broker::ready::ReadyIndex;
use crate::ids::{GroupId, QueueId};
use crate::store::messages::Opening;
use crate::store::{Store, StoreError, StoreResult};

/// Pauses before each try of a flush whose cause of failure is passing.
const PAUSES_MS: [u64; 4] = [0, 20, 100, 400];

/// The intake of bundles, with its lanes. A cheap clone.
pub type Lanes = Coalescer<Lane>;

/// What a lane works with.
#[derive(Debug)]
pub struct Lane {
    /// The store.
    pub store: Store,
    /// Told of new messages.
    pub ready: ReadyIndex,
    /// Told of new messages.
    pub peers: Peers,
    /// Told of leases that changed.
    pub ack: AckPipeline,
    /// Counts.
    pub activity: Arc<Activity>,
    /// How segments are made.
    pub writing: Writing,
}

impl Lane {
    /// The intake that `settings` ask for.
    pub fn intake(self, settings: &TransactionSettings) -> Lanes {
        let bounds = Bounds {
            workers: settings.lanes,
            waiting_max: settings.waiting_max,
            jobs_max: settings.bundles_max,
            weight_max: settings.bytes_max,
        };
        Coalescer::new(self, bounds)
    }
}

impl Batch for Lane {
    type Job = Waiting;
    type State = DedupMemory;
    const SPAN: &'static str = "flush of transactions";
    const OVERLOADED: &'static str = "too many transactions under way";

    fn state(&self) -> DedupMemory {
        DedupMemory::new(&self.writing.dedup)
    }

    fn weight(waiting: &Waiting) -> usize {
        waiting.job.bytes()
    }

    async fn run(&self, memory: &mut DedupMemory, batch: Vec<Waiting>) -> Vec<Waiting> {
        self.flush(memory, batch).await;
        Vec::new()
    }
}

impl Lane {
    async fn flush(&self, memory: &mut DedupMemory, batch: Vec<Waiting>) {
        match self.flush_until_known(memory, &batch, Opening::TRANSACTION).await {
            Ok(flushed) => answer(batch, flushed),
            Err(error) if concerns_each(&error, batch.len()) => fail(batch, &error),
            Err(error) => {
                tracing::warn!(%error, bundles = batch.len(), "transaction flush failed; trying each bundle alone");
                // Somebody held a row for a whole statement timeout: whoever needs it must not wait as long again.
                let opening = if is_timeout(&error) { Opening::IMPATIENT_TRANSACTION } else { Opening::TRANSACTION };
                for waiting in batch {
                    let alone = vec![waiting];
                    match self.flush_until_known(memory, &alone, opening).await {
                        Ok(flushed) => answer(alone, flushed),
                        Err(error) => fail(alone, &error),
                    }
                }
            }
        }
    }

    /// Tries a batch again while the cause is passing; an error of a flush means that it was rolled back.
    async fn flush_until_known(
        &self,
        memory: &mut DedupMemory,
        batch: &[Waiting],
        opening: Opening,
    ) -> StoreResult<Flushed> {
        let jobs: Vec<&Job> = batch.iter().map(|waiting| &waiting.job).collect();
        let mut pauses = PAUSES_MS.into_iter();
        loop {
            tokio::time::sleep(Duration::from_millis(pauses.next().unwrap_or_default())).await;
            let started = Instant::now();
            match flush::flush(&self.store, memory, &jobs, &self.writing, opening).await {
                Ok(flushed) => {
                    meter().flushed(jobs.len(), started.elapsed());
                    self.ready.appended(&flushed.appended);
                    self.peers.landed(&flushed.appended);
                    for (partition, change) in &flushed.changes {
                        self.ack.settled(*partition, *change);
                    }
                    self.note(&jobs, &flushed);
                    return Ok(flushed);
                }
                Err(error) => {
                    let passing = match &error {
                        // Whoever waits for a connection has waited enough.
                        StoreError::Unavailable(_) => false,
                        StoreError::OutcomeUnknown { .. } => true,
                        error => error.is_transient() && !is_timeout(error),
                    };
                    if !passing || pauses.len() == 0 {
                        return Err(error);
                    }
                    meter().retries.increment(1);
                    tracing::debug!(%error, bundles = jobs.len(), "transaction flush failed; trying it again");
                }
            }
        }
    }

    /// For the minute buckets.
    fn note(&self, jobs: &[&Job], flushed: &Flushed) {
        let activity = &self.activity;
        for ((job, verdict), acked) in jobs.iter().zip(&flushed.verdicts).zip(&flushed.acked) {
            let Verdict::Committed(filed) = verdict else { continue };
            let queues: BTreeSet<QueueId> = job.pushes.iter().map(|part| part.key.queue).collect();
            let groups: BTreeSet<GroupId> = acked.iter().map(|(group, ..)| *group).collect();
            activity.transacted(queues, groups);
            for part in &job.pushes {
                activity.pushed(part.key.queue, part.packed.len() as u64);
            }
            for (group, done, failed) in acked {
                activity.acked(*group, *done, *failed);
            }
            let dead = filed.iter().flatten().filter(|is_dead| **is_dead).count();
            activity.count(Count::DeadLetters, dead as u64);
        }
    }
}

fn answer(batch: Vec<Waiting>, flushed: Flushed) {
    for (waiting, verdict) in batch.into_iter().zip(flushed.verdicts) {
        waiting.answer(verdict);
    }
}

fn fail(batch: Vec<Waiting>, error: &StoreError) {
    tracing::error!(%error, bundles = batch.len(), "transaction flush failed");
    for waiting in batch {
        waiting.answer(if error.is_connection() {
            Verdict::NoDatabase
        } else {
            Verdict::Refused(Refusal::Database(error.message().into()))
        });
    }
}

/// Cancelled by the server's statement or lock timeout.
fn is_timeout(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { sqlstate, .. } if sqlstate == "57014" || sqlstate == "55P03")
}
