//! The lanes: they take bundles from one bounded intake and flush them.
//!
//! Fire on idle: a lane with nothing in flight flushes at once; what arrives while all lanes are busy forms the next
//! flush. A bundle may touch any partitions, so lanes own none: the row locks of PostgreSQL order flushes that meet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Mutex, mpsc};
use tokio_util::sync::CancellationToken;

use super::bundle::{Job, Refusal, Verdict, Waiting};
use super::flush::{self, Flushed};
use super::meter::meter;
use super::settings::TransactionSettings;
use crate::broker::ack::AckPipeline;
use crate::broker::activity::Activity;
use crate::broker::append::Writing;
use crate::broker::dedup::DedupMemory;
use crate::broker::error::{BrokerError, BrokerResult};
use crate::broker::peers::Peers;
use crate::broker::ready::ReadyIndex;
use crate::store::messages::Opening;
use crate::store::{Store, StoreError, StoreResult};

/// Pauses before each try of a flush whose cause of failure is passing.
const PAUSES_MS: [u64; 4] = [0, 20, 100, 400];

/// The intake and what its lanes work with. A cheap clone.
#[derive(Clone, Debug)]
pub struct Lanes {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    ready: ReadyIndex,
    peers: Peers,
    ack: AckPipeline,
    activity: Arc<Activity>,
    settings: TransactionSettings,
    writing: Writing,
    intake: mpsc::Sender<Waiting>,
    outlet: Mutex<mpsc::Receiver<Waiting>>,
}

impl Lanes {
    /// An intake without lanes; see [`Lanes::run`].
    pub fn new(
        store: Store,
        ready: ReadyIndex,
        peers: Peers,
        ack: AckPipeline,
        activity: Arc<Activity>,
        settings: TransactionSettings,
        writing: Writing,
    ) -> Lanes {
        let (intake, outlet) = mpsc::channel(settings.waiting_max.max(1));
        let outlet = Mutex::new(outlet);
        Lanes { inner: Arc::new(Inner { store, ready, peers, ack, activity, settings, writing, intake, outlet }) }
    }

    /// Lanes to be run.
    pub fn count(&self) -> usize {
        self.inner.settings.lanes.max(1)
    }

    /// Bundles that wait for a lane.
    pub fn waiting(&self) -> usize {
        self.inner.intake.max_capacity().saturating_sub(self.inner.intake.capacity())
    }

    /// Takes a bundle in, or refuses it. Never waits.
    pub fn submit(&self, waiting: Waiting) -> BrokerResult<()> {
        self.inner.intake.try_send(waiting).map_err(|error| match error {
            TrySendError::Full(_) => {
                BrokerError::Overloaded { what: "too many transactions under way", retry_after_seconds: 1 }
            }
            TrySendError::Closed(_) => BrokerError::Stopping,
        })
    }

    /// Runs one lane until `stop` fires and everything taken in is answered.
    pub async fn run(&self, stop: &CancellationToken) {
        let mut memory = DedupMemory::new(&self.inner.writing.dedup);
        while let Some(batch) = self.next_batch(stop).await {
            self.flush(&mut memory, batch).await;
        }
    }

    async fn next_batch(&self, stop: &CancellationToken) -> Option<Vec<Waiting>> {
        let settings = &self.inner.settings;
        let mut outlet = self.inner.outlet.lock().await;
        let first = tokio::select! {
            biased;
            waiting = outlet.recv() => waiting,
            () = stop.cancelled() => {
                // What was accepted is still flushed; nothing new gets in.
                outlet.close();
                outlet.recv().await
            }
        }?;
        let mut bytes = first.job.bytes();
        let mut batch = vec![first];
        while batch.len() < settings.bundles_max && bytes < settings.bytes_max {
            let Ok(waiting) = outlet.try_recv() else { break };
            bytes += waiting.job.bytes();
            batch.push(waiting);
        }
        Some(batch)
    }

    async fn flush(&self, memory: &mut DedupMemory, batch: Vec<Waiting>) {
        match self.flush_until_known(memory, &batch, Opening::TRANSACTION).await {
            Ok(flushed) => answer(batch, flushed),
            Err(error) if batch.len() == 1 || error.is_connection() => fail(batch, &error),
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
        let inner = &*self.inner;
        let mut pauses = PAUSES_MS.into_iter();
        loop {
            tokio::time::sleep(Duration::from_millis(pauses.next().unwrap_or_default())).await;
            let started = Instant::now();
            match flush::flush(&inner.store, memory, &jobs, &inner.writing, opening).await {
                Ok(flushed) => {
                    meter().flushed(jobs.len(), started.elapsed());
                    inner.ready.appended(&flushed.appended);
                    inner.peers.landed(&flushed.appended);
                    for (partition, change) in &flushed.changes {
                        inner.ack.settled(*partition, *change);
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
        let activity = &self.inner.activity;
        for (job, verdict) in jobs.iter().zip(&flushed.verdicts) {
            for part in job.pushes.iter().filter(|_| matches!(verdict, Verdict::Committed(_))) {
                activity.pushed(part.key.queue, part.packed.len() as u64);
            }
        }
        for (group, done, failed) in &flushed.acked {
            activity.acked(*group, *done, *failed);
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
