//! The end of the process, and the tasks that must outlive their own crashes.
//!
//! ```text
//! running --SIGTERM, SIGINT or begin()--> soft: stop accepting, drain --second signal or deadline--> hard: drop everything
//! ```
//!
//! Invariants: soft comes before hard; neither is ever taken back; a supervised task that crashes is logged, counted and
//! started again after a growing pause, until soft.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::metrics::{LOOP_PASSES, LOOP_RESTARTS, LOOP_RUNNING};

/// First pause before a crashed task is started again.
const RESTART_BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest pause before a crashed task is started again.
const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A task that ran this long before it crashed starts again with the shortest pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// The two stages of the end. Cheap to clone; all clones see the same.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    soft: CancellationToken,
    hard: CancellationToken,
}

impl Shutdown {
    /// A process that is running.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancelled when draining begins: accept nothing new, finish what is in flight.
    pub fn soft(&self) -> &CancellationToken {
        &self.soft
    }

    /// Cancelled when patience is over: drop what is in flight.
    pub fn hard(&self) -> &CancellationToken {
        &self.hard
    }

    /// Begins to drain. Idempotent.
    pub fn begin(&self) {
        self.soft.cancel();
    }

    /// Gives up draining. Idempotent; implies [`Shutdown::begin`].
    pub fn force(&self) {
        self.soft.cancel();
        self.hard.cancel();
    }

    /// Whether draining has begun.
    pub fn has_begun(&self) -> bool {
        self.soft.is_cancelled()
    }

    /// From now on SIGTERM and SIGINT (Ctrl-C) begin the shutdown; a second one, or `drain_ms_max` milliseconds of
    /// draining whoever began it, forces it.
    ///
    /// # Errors
    /// The signal handlers could not be installed.
    pub fn listen_for_signals(&self, drain_ms_max: u64) -> std::io::Result<()> {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let shutdown = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                name = next_signal(&mut term, &mut int) => {
                    tracing::info!(signal = name, "signal received, draining in-flight requests");
                    shutdown.begin();
                }
                () = shutdown.soft.cancelled() => {}
            }
            tokio::select! {
                name = next_signal(&mut term, &mut int) => {
                    tracing::warn!(signal = name, "second signal, not waiting any longer");
                }
                () = sleep(Duration::from_millis(drain_ms_max)) => {
                    tracing::warn!(drain_ms_max, "draining took too long, not waiting any longer");
                }
            }
            shutdown.force();
        });
        Ok(())
    }
}

async fn next_signal(term: &mut Signal, int: &mut Signal) -> &'static str {
    tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = int.recv() => "SIGINT",
    }
}

/// Runs background tasks and starts them again when they crash.
#[derive(Debug, Clone)]
pub struct Supervisor {
    shutdown: Shutdown,
    tasks: TaskTracker,
    restarts: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    running: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

impl Supervisor {
    /// A supervisor whose tasks end with `shutdown`.
    pub fn new(shutdown: Shutdown) -> Self {
        Self {
            shutdown,
            tasks: TaskTracker::new(),
            restarts: Arc::new(Mutex::new(BTreeMap::new())),
            running: Arc::new(Mutex::new(BTreeMap::new())),
        }
    }

    /// Runs `start(soft)` in the background under `name` (a constant: it becomes a metric label).
    ///
    /// The task is expected to run until `soft` is cancelled. Returning `Ok` ends it for good. Returning an error, or
    /// panicking, is logged and counted, and the task is started afresh after a pause of 0.1 s that doubles to 30 s and
    /// falls back once the task has run for a minute. At the hard stage the task is dropped where it stands.
    pub fn spawn<F, Fut, E>(&self, name: &'static str, start: F)
    where
        F: FnMut(CancellationToken) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Display + Send + 'static,
    {
        bump(&self.restarts, name, 0);
        bump(&self.running, name, 1);
        metrics::gauge!(LOOP_RUNNING, "loop" => name).increment(1.0);
        let this = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = this.run(name, start) => {}
                () = this.shutdown.hard.cancelled() => tracing::warn!(task = name, "background task dropped"),
            }
            metrics::gauge!(LOOP_RUNNING, "loop" => name).decrement(1.0);
            let mut running = this.running.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = running.get_mut(name) {
                *count = count.saturating_sub(1);
            }
        });
    }

    async fn run<F, Fut, E>(&self, name: &'static str, mut start: F)
    where
        F: FnMut(CancellationToken) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Display + Send + 'static,
    {
        let mut backoff = RESTART_BACKOFF_MIN;
        loop {
            let started = Instant::now();
            let soft = self.shutdown.soft.clone();
            // Even the call that makes the future may panic; catch that as well.
            let made = std::panic::catch_unwind(AssertUnwindSafe(|| start(soft)));
            let caught = match made {
                Ok(task) => AssertUnwindSafe(task).catch_unwind().await,
                Err(panic) => Err(panic),
            };
            let failure = match caught {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("panic: {}", panic_text(panic.as_ref())),
            };
            if self.shutdown.has_begun() {
                tracing::warn!(task = name, error = failure, "background task failed while stopping");
                return;
            }
            if started.elapsed() >= HEALTHY_AFTER {
                backoff = RESTART_BACKOFF_MIN;
            }
            let restarts = bump(&self.restarts, name, 1);
            metrics::counter!(LOOP_RESTARTS, "loop" => name).increment(1);
            let backoff_ms = u64::try_from(backoff.as_millis()).unwrap_or(u64::MAX);
            tracing::error!(
                task = name,
                error = failure,
                restarts,
                backoff_ms,
                "background task crashed, restarting it"
            );
            tokio::select! {
                () = sleep(backoff) => {}
                () = self.shutdown.soft.cancelled() => return,
            }
            backoff = (backoff * 2).min(RESTART_BACKOFF_MAX);
        }
    }

    /// How often each task was started again since boot. Every task appears, at zero if it never crashed.
    pub fn restarts(&self) -> BTreeMap<&'static str, u64> {
        self.restarts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The names of the tasks that have not ended.
    pub fn running(&self) -> Vec<&'static str> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().filter(|(_, count)| **count > 0).map(|(name, _)| *name).collect()
    }

    /// Begins the shutdown if it has not begun, and waits up to `patience` for the tasks to end; then forces it.
    /// Returns the tasks that did not end by themselves.
    pub async fn stop(&self, patience: Duration) -> Vec<&'static str> {
        self.shutdown.begin();
        self.tasks.close();
        if timeout(patience, self.tasks.wait()).await.is_ok() {
            return Vec::new();
        }
        let late = self.running();
        tracing::warn!(tasks = ?late, "background tasks did not stop in time");
        self.shutdown.force();
        self.tasks.wait().await;
        late
    }
}

/// A periodic task has made one pass.
pub fn count_pass(name: &'static str, done: bool) {
    let result = if done { "done" } else { "failed" };
    metrics::counter!(LOOP_PASSES, "loop" => name, "result" => result).increment(1);
}

fn bump(counts: &Mutex<BTreeMap<&'static str, u64>>, name: &'static str, by: u64) -> u64 {
    let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    let count = counts.entry(name).or_insert(0);
    *count += by;
    *count
}

/// What a panic said, if it said it in text.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "(not text)"
    }
}

#[cfg(test)]
mod tests;
