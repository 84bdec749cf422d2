//! The ack path: groups the items of a call, picks the road of each group, and answers after COMMIT.
//!
//! ```text
//! ack ── plan ──┬─ every item completed, lease known here, all of it acked ── fusion ── one commit for many
//!               └─ anything else, and whatever fusion refuses ── settle (full hash resolution)
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

pub mod item;
pub mod plan;
pub mod port;
pub mod settle;

pub use item::{AckAnswer, AckError, AckItem, AckTarget, Acked, LeaseClaim, Release, ReleaseListener};
use plan::{Call, Group};
use port::AckStore;
use settle::Settler;

/// Lanes of one call that are under way at once.
const LANES_PER_CALL_MAX: usize = 1024;
/// Groups of one call in full resolution at once: one call must not take the whole pool.
const RESOLVED_PER_CALL_MAX: usize = 16;

/// Switches and bounds of the ack path.
#[derive(Clone, Debug)]
pub struct AckSettings {
    /// Longest wait for a turn or for room.
    pub checkout_timeout: Duration,
    /// Longest search for the outcome of a commit whose answer was lost.
    pub lookup_timeout: Duration,
}

impl Default for AckSettings {
    fn default() -> AckSettings {
        AckSettings { checkout_timeout: Duration::from_secs(5), lookup_timeout: Duration::from_secs(2) }
    }
}

/// The ack path of this broker. A cheap clone.
#[derive(Clone)]
pub struct AckPipeline {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn AckStore>,
    settler: Settler,
    listener: Arc<dyn ReleaseListener>,
}

impl std::fmt::Debug for AckPipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AckPipeline").finish_non_exhaustive()
    }
}

impl AckPipeline {
    /// Starts the path. `listener` hears of every (partition, group) that an ack made claimable, after COMMIT.
    pub fn start(store: Arc<dyn AckStore>, settings: AckSettings, listener: Arc<dyn ReleaseListener>) -> AckPipeline {
        let settler = Settler::new(store.clone(), settings.checkout_timeout, settings.lookup_timeout);
        AckPipeline { inner: Arc::new(Inner { store, settler, listener }) }
    }

    /// Acknowledges. One answer per item, in request order; errors are per item, never of the call (I5).
    ///
    /// The work goes on if the caller stops waiting, so that no lease stays behind a commit that nobody saw (I15).
    pub async fn ack(&self, group_name: &str, items: Vec<AckItem>) -> Vec<AckAnswer> {
        let count = items.len();
        let call = Call { group_name: group_name.into(), items };
        let inner = self.inner.clone();
        let work = tokio::spawn(async move { inner.run(call).await });
        work.await.unwrap_or_else(|error| {
            tracing::error!(%error, "an ack call was aborted");
            vec![AckAnswer::refused(AckError::FlushFailed); count]
        })
    }
}

impl Inner {
    async fn run(&self, call: Call) -> Vec<AckAnswer> {
        let plan = plan::plan(&call, self.store.ids());
        let mut answers = plan.answers;
        let resolved = tokio::sync::Semaphore::new(RESOLVED_PER_CALL_MAX);
        let (call, resolved) = (&call, &resolved);
        let lanes = stream::iter(plan.lanes.into_iter().map(|lane| async move {
            let mut done = Vec::with_capacity(lane.len());
            for group in lane {
                let answers = self.run_group(call, &group, resolved).await;
                done.push((group, answers));
            }
            done
        }));
        let mut lanes = lanes.buffer_unordered(LANES_PER_CALL_MAX);
        while let Some(done) = lanes.next().await {
            for (group, told) in done {
                for (nth, answer) in group.members().zip(told) {
                    answers[nth] = Some(answer);
                }
            }
        }
        answers.into_iter().map(|a| a.unwrap_or_else(|| AckAnswer::refused(AckError::FlushFailed))).collect()
    }

    async fn run_group(&self, call: &Call, group: &Group, resolved: &tokio::sync::Semaphore) -> Vec<AckAnswer> {
        let _permit = resolved.acquire().await;
        let settled = self.settler.settle(call, group).await;
        if let Some(change) = settled.change {
            if let Some(release) = change.release {
                self.listener.released(group.partition, change.group, release);
            }
        }
        settled.answers
    }
}
