//! Concurrent requests that share round trips: a bounded intake and workers that fire on idle.
//!
//! A worker with nothing in flight starts at once; what arrives meanwhile forms its next batch. No request waits for
//! company.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::{Mutex, mpsc};
use tokio_util::sync::CancellationToken;

use super::error::{BrokerError, BrokerResult};
use super::pop::overloaded;

/// What is done with a batch.
pub trait Batch: Send + Sync + 'static {
    /// One request.
    type Job: Send + 'static;
    /// Names it in logs.
    const NAME: &'static str;
    /// Why a job is refused when too many wait.
    const OVERLOADED: &'static str;
    /// Share of a batch's capacity that the job takes.
    fn weight(job: &Self::Job) -> usize;
    /// Answers the jobs; those it gives back open the next batch.
    fn run(&self, jobs: Vec<Self::Job>) -> impl Future<Output = Vec<Self::Job>> + Send;
}

/// The intake. A cheap clone; the workers end when the token fires and the intake is empty.
#[derive(Debug)]
pub struct Coalescer<J> {
    intake: mpsc::Sender<J>,
    overloaded: &'static str,
}

impl<J> Clone for Coalescer<J> {
    fn clone(&self) -> Coalescer<J> {
        Coalescer { intake: self.intake.clone(), overloaded: self.overloaded }
    }
}

/// The bounds of a coalescer.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Batches in flight at the same time.
    pub workers: usize,
    /// Jobs that may wait; more are refused.
    pub waiting_max: usize,
    /// Weight at which a batch is full; a single heavier job still runs, alone.
    pub weight_max: usize,
}

impl<J: Send + 'static> Coalescer<J> {
    /// Starts the workers.
    pub fn start<B: Batch<Job = J>>(batch: B, bounds: Bounds, stop: &CancellationToken) -> Coalescer<J> {
        let (intake, jobs) = mpsc::channel(bounds.waiting_max.max(1));
        let (batch, jobs) = (Arc::new(batch), Arc::new(Mutex::new(jobs)));
        for _ in 0..bounds.workers.max(1) {
            tokio::spawn(work(batch.clone(), jobs.clone(), bounds.weight_max, stop.clone()));
        }
        Coalescer { intake, overloaded: B::OVERLOADED }
    }

    /// Queues a job, or refuses it when too many wait.
    pub fn submit(&self, job: J) -> BrokerResult<()> {
        self.intake.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => overloaded(self.overloaded, 1),
            mpsc::error::TrySendError::Closed(_) => BrokerError::Stopping,
        })
    }

    /// Jobs that wait now.
    pub fn waiting(&self) -> usize {
        self.intake.max_capacity() - self.intake.capacity()
    }
}

async fn work<B: Batch>(
    batch: Arc<B>,
    intake: Arc<Mutex<mpsc::Receiver<B::Job>>>,
    weight_max: usize,
    stop: CancellationToken,
) {
    let mut carried: Vec<B::Job> = Vec::new();
    loop {
        let mut jobs = std::mem::take(&mut carried);
        let mut weight: usize = jobs.iter().map(B::weight).sum();
        {
            let mut intake = intake.lock().await;
            if jobs.is_empty() {
                let first = tokio::select! {
                    biased;
                    job = intake.recv() => job,
                    () = stop.cancelled() => {
                        // What was accepted is still served; nothing new gets in.
                        intake.close();
                        intake.recv().await
                    }
                };
                let Some(first) = first else { return };
                weight += B::weight(&first);
                jobs.push(first);
            }
            while weight < weight_max {
                let Ok(job) = intake.try_recv() else { break };
                weight += B::weight(&job);
                jobs.push(job);
            }
        }
        match AssertUnwindSafe(batch.run(jobs)).catch_unwind().await {
            Ok(left) => carried = left,
            // The jobs are gone: each of them hears that its answer will not come.
            Err(_) => tracing::error!(batch = B::NAME, "a batch panicked; its requests failed"),
        }
    }
}
