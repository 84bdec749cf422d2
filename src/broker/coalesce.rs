//! Concurrent requests that share round trips: a bounded intake and workers that fire on idle.
//!
//! A worker with nothing in flight starts at once; what arrives meanwhile forms its next batch. No request waits for
//! company. The workers are run by the supervisor.

use std::sync::Arc;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Mutex, mpsc};
use tokio_util::sync::CancellationToken;

use super::error::{BrokerError, BrokerResult};
use crate::spans::{self, Place};
use crate::store::{StoreError, StoreResult};

/// What is done with a batch.
pub trait Batch: Send + Sync + 'static {
    /// One request. If its batch panics it is dropped; whoever waits hears that no answer will come.
    type Job: std::fmt::Debug + Send + 'static;
    /// What one worker keeps from batch to batch.
    type State: Send;
    /// What its batches are called in traces.
    const SPAN: &'static str;
    /// Why a job is refused when too many wait.
    const OVERLOADED: &'static str;
    /// The state of a worker that starts.
    fn state(&self) -> Self::State;
    /// Share of a batch's weight that the job takes.
    fn weight(job: &Self::Job) -> usize;
    /// Answers the jobs; those it gives back open the worker's next batch.
    fn run(&self, state: &mut Self::State, jobs: Vec<Self::Job>) -> impl Future<Output = Vec<Self::Job>> + Send;
}

/// The bounds of a coalescer.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Batches in flight at the same time.
    pub workers: usize,
    /// Jobs that may wait.
    pub waiting_max: usize,
    /// Most jobs of one batch.
    pub jobs_max: usize,
    /// Weight at which a batch is full; a single heavier job still runs, alone.
    pub weight_max: usize,
}

/// The intake and its workers. A cheap clone.
#[derive(Debug)]
pub struct Coalescer<B: Batch> {
    inner: Arc<Inner<B>>,
}

#[derive(Debug)]
struct Inner<B: Batch> {
    batch: B,
    bounds: Bounds,
    intake: mpsc::Sender<(B::Job, Place)>,
    outlet: Mutex<mpsc::Receiver<(B::Job, Place)>>,
}

impl<B: Batch> Clone for Coalescer<B> {
    fn clone(&self) -> Coalescer<B> {
        Coalescer { inner: self.inner.clone() }
    }
}

impl<B: Batch> Coalescer<B> {
    /// An intake; nothing is served before a worker runs.
    pub fn new(batch: B, bounds: Bounds) -> Coalescer<B> {
        let (intake, outlet) = mpsc::channel(bounds.waiting_max.max(1));
        Coalescer { inner: Arc::new(Inner { batch, bounds, intake, outlet: Mutex::new(outlet) }) }
    }

    /// Workers to be run.
    pub fn workers(&self) -> usize {
        self.inner.bounds.workers.max(1)
    }

    /// Jobs that wait now.
    pub fn waiting(&self) -> usize {
        self.inner.intake.max_capacity().saturating_sub(self.inner.intake.capacity())
    }

    /// Takes a job in, or refuses it when too many wait. Never waits.
    pub fn submit(&self, job: B::Job) -> BrokerResult<()> {
        self.inner.intake.try_send((job, spans::here())).map_err(|error| match error {
            TrySendError::Full(_) => BrokerError::overloaded(B::OVERLOADED, 1),
            TrySendError::Closed(_) => BrokerError::Stopping,
        })
    }

    /// Takes a job in, waiting while too many others wait.
    pub async fn submit_when_free(&self, job: B::Job) -> BrokerResult<()> {
        self.inner.intake.send((job, spans::here())).await.map_err(|_| BrokerError::Stopping)
    }

    /// Runs one worker until `stop` fires and everything taken in is answered.
    pub async fn run(&self, stop: &CancellationToken) {
        let mut state = self.inner.batch.state();
        let mut carried = Vec::new();
        while let Some((jobs, places)) = self.next_batch(carried, stop).await {
            carried = spans::shared(B::SPAN, places, self.inner.batch.run(&mut state, jobs)).await;
        }
    }

    /// What was carried over, else the next job, and whatever waits beside it; and where those were taken in. What is carried
    /// over has left its trace.
    async fn next_batch(&self, carried: Vec<B::Job>, stop: &CancellationToken) -> Option<(Vec<B::Job>, Vec<Place>)> {
        let Bounds { jobs_max, weight_max, .. } = self.inner.bounds;
        let (mut jobs, mut places) = (carried, Vec::new());
        let mut outlet = if jobs.is_empty() {
            let mut outlet = self.inner.outlet.lock().await;
            let first = tokio::select! {
                biased;
                job = outlet.recv() => job,
                () = stop.cancelled() => {
                    // What was accepted is still served; nothing new gets in.
                    outlet.close();
                    outlet.recv().await
                }
            };
            let (job, place) = first?;
            jobs.push(job);
            places.extend(place.if_traced());
            outlet
        } else {
            // An idle worker holds the outlet until the next job comes: what was carried over must not wait for that.
            let Ok(outlet) = self.inner.outlet.try_lock() else { return Some((jobs, places)) };
            outlet
        };
        let mut weight: usize = jobs.iter().map(B::weight).sum();
        while jobs.len() < jobs_max && weight < weight_max {
            let Ok((job, place)) = outlet.try_recv() else { break };
            weight += B::weight(&job);
            jobs.push(job);
            places.extend(place.if_traced());
        }
        Some((jobs, places))
    }
}

/// Whether what befell a batch of so many jobs would befall each of them alone: there was only one, or no connection.
/// Otherwise one of them may be the cause for all.
pub fn concerns_each(error: &StoreError, jobs: usize) -> bool {
    jobs == 1 || error.is_connection()
}

/// Answers the jobs of a batch that failed as a whole: with its error where that concerns each of them, else with what
/// each of them meets `alone`.
pub async fn answer_failed<J, T, Alone: Future<Output = (J, StoreResult<T>)>>(
    error: StoreError,
    jobs: Vec<J>,
    alone: impl Fn(J) -> Alone,
    tell: impl Fn(J, Result<T, Arc<StoreError>>),
) {
    if concerns_each(&error, jobs.len()) {
        let error = Arc::new(error);
        jobs.into_iter().for_each(|job| tell(job, Err(error.clone())));
        return;
    }
    tracing::warn!(%error, jobs = jobs.len(), "a shared statement failed; trying each of its jobs alone");
    for job in jobs {
        let (job, outcome) = alone(job).await;
        tell(job, outcome.map_err(Arc::new));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    /// Gives every job back once, then answers with the size of its batch.
    #[derive(Debug)]
    struct Twice;

    #[derive(Debug)]
    struct Job {
        seen: bool,
        reply: oneshot::Sender<usize>,
    }

    impl Batch for Twice {
        type Job = Job;
        type State = ();
        const SPAN: &'static str = "twice";
        const OVERLOADED: &'static str = "too many jobs";
        fn state(&self) {}
        fn weight(_: &Job) -> usize {
            1
        }
        async fn run(&self, _: &mut (), jobs: Vec<Job>) -> Vec<Job> {
            let size = jobs.len();
            let (again, new): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.seen);
            for job in again {
                job.reply.send(size).unwrap();
            }
            new.into_iter().map(|job| Job { seen: true, ..job }).collect()
        }
    }

    fn coalescer(workers: usize, waiting_max: usize, jobs_max: usize) -> Coalescer<Twice> {
        Coalescer::new(Twice, Bounds { workers, waiting_max, jobs_max, weight_max: usize::MAX })
    }

    fn submit(to: &Coalescer<Twice>) -> BrokerResult<oneshot::Receiver<usize>> {
        let (reply, answer) = oneshot::channel();
        to.submit(Job { seen: false, reply }).map(|()| answer)
    }

    #[tokio::test]
    async fn what_is_carried_over_does_not_wait_for_an_idle_worker() {
        let coalescer = coalescer(2, 8, 8);
        let stop = CancellationToken::new();
        for _ in 0..coalescer.workers() {
            let (worker, stop) = (coalescer.clone(), stop.clone());
            tokio::spawn(async move { worker.run(&stop).await });
        }
        for _ in 0..20 {
            let answer = submit(&coalescer).unwrap();
            let answer = tokio::time::timeout(Duration::from_secs(5), answer).await;
            assert!(matches!(answer, Ok(Ok(1))), "{answer:?}");
        }
    }

    fn refused() -> StoreError {
        StoreError::Refused { sqlstate: "22003".into(), source: sqlx::Error::RowNotFound }
    }

    /// What jobs of these numbers hear when their batch failed with `error`; the seventh fails alone, too.
    async fn heard(error: StoreError, jobs: Vec<u32>) -> Vec<(u32, bool)> {
        let heard = std::sync::Mutex::new(Vec::new());
        let alone = async |job| (job, if job == 7 { Err(refused()) } else { Ok(()) });
        answer_failed(error, jobs, alone, |job, outcome| heard.lock().unwrap().push((job, outcome.is_ok()))).await;
        heard.into_inner().unwrap()
    }

    #[tokio::test]
    async fn a_job_that_fails_its_batch_fails_alone_unless_the_database_is_away() {
        assert_eq!(heard(refused(), vec![6, 7, 8]).await, [(6, true), (7, false), (8, true)]);
        assert_eq!(heard(refused(), vec![6]).await, [(6, false)]);
        let away = StoreError::Unavailable(sqlx::Error::PoolTimedOut);
        assert_eq!(heard(away, vec![6, 8]).await, [(6, false), (8, false)]);
        assert_eq!(heard(StoreError::no_answer("a test"), vec![6, 8]).await, [(6, false), (8, false)]);
    }

    #[tokio::test]
    async fn the_bounds_hold_and_a_stopped_worker_answers_what_it_took_in() {
        let coalescer = coalescer(1, 5, 3);
        let answers: Vec<_> = (0..5).map(|_| submit(&coalescer).unwrap()).collect();
        assert!(matches!(submit(&coalescer), Err(BrokerError::Overloaded { .. })));
        assert_eq!(coalescer.waiting(), 5);
        let stop = CancellationToken::new();
        stop.cancel();
        coalescer.run(&stop).await;
        for answer in answers {
            assert!(answer.await.unwrap() <= 3, "no batch is larger than its bound");
        }
        assert!(matches!(submit(&coalescer), Err(BrokerError::Stopping)));
    }
}
