//! Walks through the partitions of what is popped here: the safety net under notifications.
//!
//! A walk is asked for whenever a word of another broker may have been lost, and made every few minutes in any case. One
//! runs at a time; what is asked for meanwhile goes with the next. While this broker is deaf to the others, one follows
//! the other, in pauses that grow with what a walk costs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use metrics::counter;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::error::BrokerResult;
use super::ready::{ReadyGroup, ReadyIndex};
use crate::ids::QueueId;
use crate::metrics as names;
use crate::shutdown::count_pass;

/// Pause between two walks that nobody asked for.
const WALK_EVERY: Duration = Duration::from_secs(300);
/// Shortest pause between two walks of a deaf broker.
const DEAF_PAUSE_MIN: Duration = Duration::from_secs(1);
/// How much longer than a walk the pause after it is at least, while deaf.
const DEAF_PAUSE_FACTOR: u32 = 20;
/// Pause before a walk that failed is made again.
const AFTER_FAILURE: Duration = Duration::from_millis(500);
/// Groups whose partitions are walked at the same time.
const GROUPS_AT_ONCE: usize = 2;

/// What is to be walked.
#[derive(Debug, Default)]
struct Wanted {
    everything: bool,
    queues: BTreeSet<QueueId>,
    deaf: bool,
}

/// The walker. A cheap clone.
#[derive(Clone, Debug)]
pub struct ReadyWalks {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    ready: ReadyIndex,
    wanted: Mutex<Wanted>,
    asked: Notify,
}

impl ReadyWalks {
    /// Over the index whose groups it walks for.
    pub fn new(ready: ReadyIndex) -> ReadyWalks {
        ReadyWalks { inner: Arc::new(Inner { ready, wanted: Mutex::default(), asked: Notify::new() }) }
    }

    /// Asks for a walk through everything.
    pub fn everything(&self) {
        self.wanted().everything = true;
        self.inner.asked.notify_one();
    }

    /// Asks for a walk through one queue.
    pub fn queue(&self, queue: QueueId) {
        self.wanted().queues.insert(queue);
        self.inner.asked.notify_one();
    }

    /// Whether other brokers work on this database and cannot be heard.
    pub fn set_deaf(&self, deaf: bool) {
        let news = std::mem::replace(&mut self.wanted().deaf, deaf) != deaf;
        if news && deaf {
            self.everything();
        }
    }

    /// Walks for ever.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let mut pause = WALK_EVERY;
        loop {
            let asked = tokio::time::timeout(pause, self.inner.asked.notified());
            let Some(asked) = stop.run_until_cancelled(asked).await else { return Ok(()) };
            let wanted = {
                let mut wanted = self.wanted();
                let deaf = wanted.deaf;
                std::mem::replace(&mut *wanted, Wanted { deaf, ..Wanted::default() })
            };
            let started = Instant::now();
            let everything = wanted.everything || asked.is_err();
            let Some(walked) = stop.run_until_cancelled(self.walk(everything, &wanted.queues)).await else {
                return Ok(());
            };
            count_pass("ready_reconcile", walked.is_ok());
            pause = match walked {
                Ok(()) if self.wanted().deaf => DEAF_PAUSE_MIN.max(started.elapsed() * DEAF_PAUSE_FACTOR),
                Ok(()) => WALK_EVERY,
                Err(error) => {
                    tracing::debug!(%error, "a walk through the partitions failed; it is made again");
                    let mut again = self.wanted();
                    again.everything |= everything;
                    again.queues.extend(wanted.queues);
                    AFTER_FAILURE
                }
            };
        }
    }

    async fn walk(&self, everything: bool, queues: &BTreeSet<QueueId>) -> BrokerResult<()> {
        let ready = &self.inner.ready;
        counter!(names::READY_WALKS).increment(1);
        // Pops that wait by name or label are in no group's list.
        ready.keyed().wake_everybody();
        let groups: Vec<Arc<ReadyGroup>> =
            ready.groups().into_iter().filter(|group| everything || queues.contains(&group.queue)).collect();
        let mut walks = stream::iter(groups).map(|group| async move { ready.walk_again(&group).await });
        let mut walks = walks.by_ref().buffer_unordered(GROUPS_AT_ONCE);
        while let Some(walked) = walks.next().await {
            walked?;
        }
        Ok(())
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.inner.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
