//! Queues by label (`spec/push-pop.md` §7.1): which there are, and the feeds of the groups that pop by label here.
//!
//! The queues of a label are read once; afterwards what was made or configured since, at once when this broker hears of it
//! and otherwise twice a second, by an index on the changing transaction. A group meets the queues of its label page by
//! page. From then on a pop costs as much as it finds.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::error::{BrokerError, BrokerResult};
use super::feed::{Feed, Labels};
use super::group::GroupDirectory;
use super::meter::meter;
use super::queue::QueueDirectory;
use super::ready::ReadyIndex;
use crate::ids::{GroupId, QueueId};
use crate::store::Store;
use crate::store::groups::StartAt;
use crate::store::labels::LabelPosition;

/// Queues that are met at a time.
const MEET_PAGE: usize = 256;
/// Partitions of each that are looked at with them; the others by its own walk.
const PARTITIONS_EACH: i64 = 16;
/// Feeds of one broker.
const FEEDS_MAX: usize = 10_000;
/// A feed that nobody popped for this long is forgotten; the next pop meets its queues again.
const FEED_IDLE: Duration = Duration::from_secs(120);
/// Pause between two looks at what changed, if nothing was heard.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A cheap clone.
#[derive(Clone, Debug)]
pub struct Discovery {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    queues: QueueDirectory,
    groups: GroupDirectory,
    ready: ReadyIndex,
    feeds: DashMap<(Labels, String), Arc<Feed>>,
    /// How far labels have been read. Held while they are read, so that what is read later is also applied later.
    position: Mutex<Option<LabelPosition>>,
    epoch: Instant,
}

impl Discovery {
    /// Without feeds.
    pub fn new(store: Store, queues: QueueDirectory, groups: GroupDirectory, ready: ReadyIndex) -> Discovery {
        let (feeds, position, epoch) = (DashMap::new(), Mutex::default(), Instant::now());
        Discovery { inner: Arc::new(Inner { store, queues, groups, ready, feeds, position, epoch }) }
    }

    /// The feed of a group, up to date with everything that this broker has heard of.
    pub async fn feed(&self, labels: &Labels, group: &str) -> BrokerResult<Arc<Feed>> {
        let inner = &self.inner;
        let key = (labels.clone(), group.to_owned());
        let now = inner.epoch.elapsed().as_secs();
        let found = inner.feeds.get(&key).map(|feed| feed.clone());
        if let Some(feed) = found {
            feed.used(now);
            if inner.queues.label_news().is_unread() {
                Box::pin(self.read_changes(true)).await?;
            }
            return Ok(feed);
        }
        let mut position = inner.position.lock().await;
        if let Some(feed) = inner.feeds.get(&key) {
            return Ok(feed.clone());
        }
        if inner.feeds.len() >= FEEDS_MAX {
            self.trim(Duration::ZERO);
            if inner.feeds.len() >= FEEDS_MAX {
                return Err(BrokerError::overloaded("too many labels are popped", 5));
            }
        }
        let heard = inner.queues.label_news().heard();
        if position.is_none() || inner.feeds.is_empty() {
            *position = Some(inner.store.label_position().await?);
            inner.queues.label_news().has_read(heard);
        }
        let queues = inner.store.find_queues_by_label(labels.namespace.as_deref(), labels.task.as_deref()).await?;
        queues.iter().for_each(|queue| inner.queues.label_news().saw(*queue));
        let feed = Arc::new(Feed::new(key.0.clone(), key.1.clone(), queues));
        feed.used(now);
        inner.feeds.insert(key, feed.clone());
        Ok(feed)
    }

    /// Lets the group meet the next queues of its label; `false` if it has met all.
    pub async fn meet(&self, feed: &Arc<Feed>, start: StartAt, conflation: bool) -> BrokerResult<bool> {
        if !feed.has_fresh() {
            return Ok(false);
        }
        let _meeting = feed.meeting.lock().await;
        let inner = &self.inner;
        let page = feed.fresh(MEET_PAGE);
        if page.is_empty() {
            return Ok(false);
        }
        let rows = inner.groups.register_all(&page, &feed.group, start, conflation).await?;
        let met: Vec<_> =
            rows.iter().map(|(queue, row)| (inner.ready.unwalked(*queue, row.id), row.conflation)).collect();
        let unwalked: Vec<(QueueId, GroupId)> =
            met.iter().filter(|(group, _)| !group.is_walked()).map(|(group, _)| (group.queue, group.id)).collect();
        if !unwalked.is_empty() {
            let mut candidates = inner.store.first_partitions(&unwalked, PARTITIONS_EACH).await?;
            let unsure: Vec<_> = candidates.iter().filter(|(_, c)| c.pending).map(|(g, c)| (*g, c.id, start)).collect();
            if start == StartAt::End && !unsure.is_empty() {
                // What was written lately looks as if it were there for a group that begins now. Its cursors say.
                inner.store.seed_cursors(&unsure).await?;
                candidates = inner.store.first_partitions(&unwalked, PARTITIONS_EACH).await?;
            }
            inner.ready.walked_first(&unwalked, candidates, PARTITIONS_EACH).await;
        }
        for queue in page.iter().filter(|queue| !rows.iter().any(|(met, _)| met == *queue)) {
            feed.remove(*queue);
        }
        for (group, conflating) in met {
            feed.meet(group.queue, group.clone(), conflating);
        }
        meter().queues_met.increment(page.len() as u64);
        Ok(true)
    }

    /// Reads what was made or configured and tells every feed. `unread`: only if something was heard that nobody has read.
    async fn read_changes(&self, unread: bool) -> BrokerResult<()> {
        let inner = &self.inner;
        let mut position = inner.position.lock().await;
        if unread && !inner.queues.label_news().is_unread() {
            return Ok(());
        }
        let Some(since) = position.as_ref() else { return Ok(()) };
        let heard = inner.queues.label_news().heard();
        let (next, changes) = inner.store.label_changes(since).await?;
        for change in &changes {
            inner.queues.label_news().saw(change.queue);
            for feed in &inner.feeds {
                feed.labelled(change.queue, &change.namespace, &change.task);
            }
        }
        *position = Some(next);
        inner.queues.label_news().has_read(heard);
        Ok(())
    }

    /// Keeps the feeds up to date, for ever: parked pops wait for queues that other brokers make.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let news = self.inner.queues.label_news();
        let pause = async || {
            let _ = tokio::time::timeout(LOOK_EVERY, news.arrives()).await;
        };
        while stop.run_until_cancelled(pause()).await.is_some() {
            if self.inner.feeds.is_empty() {
                continue;
            }
            let read = self.read_changes(false).await;
            crate::shutdown::count_pass("discovery", read.is_ok());
            if let Err(error) = read {
                tracing::debug!(%error, "labels could not be read; next look as planned");
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        Ok(())
    }

    /// Forgets feeds that nobody has used for a while.
    pub fn trim_idle(&self) {
        self.trim(FEED_IDLE);
    }

    fn trim(&self, idle: Duration) {
        let now = self.inner.epoch.elapsed().as_secs();
        self.inner.feeds.retain(|_, feed| {
            // A pop that holds it, parked or not, keeps it.
            let unused = now.saturating_sub(feed.used_seconds.load(Ordering::Relaxed)) >= idle.as_secs();
            !unused || Arc::strong_count(feed) > 1
        });
    }

    /// Feeds now.
    pub fn feeds(&self) -> usize {
        self.inner.feeds.len()
    }
}
