//! Queues as the hot path knows them: a bounded cache of rows, made on demand.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;

use super::contact::QueueContacts;
use super::error::BrokerResult;
use super::label_news::LabelNews;
use crate::ids::QueueId;
use crate::store::Store;
use crate::store::queues::{QueueOptions, QueueRow};

/// Cached queues before the cache is cleared as a whole.
const CACHED_QUEUES_MAX: usize = 200_000;
/// Lease length where neither pop nor queue says anything usable (`spec/push-pop.md` §7.6).
const LEASE_SECONDS_DEFAULT: i64 = 60;

/// A queue row, shared by every request that uses it.
pub type Queue = Arc<QueueRow>;

/// A row, and when it was read: one of an earlier generation still tells the key, but no options.
#[derive(Clone, Debug)]
struct Known {
    queue: Queue,
    generation: u64,
}

/// Queue rows by name. Stale entries are dropped by configure, by delete, by what other brokers announce, and by
/// whoever finds the key gone.
#[derive(Clone, Debug)]
pub struct QueueDirectory {
    store: Store,
    contacts: QueueContacts,
    by_name: Arc<DashMap<Arc<str>, Known>>,
    /// Moves on whenever everything must be read again.
    generation: Arc<AtomicU64>,
    by_id: Arc<DashMap<QueueId, Queue>>,
    label_news: Arc<LabelNews>,
}

impl QueueDirectory {
    /// An empty cache over the store.
    pub fn new(store: Store) -> QueueDirectory {
        let label_news = Arc::default();
        let contacts = QueueContacts::over(&store, &label_news);
        QueueDirectory {
            store,
            contacts,
            by_name: Arc::default(),
            by_id: Arc::default(),
            generation: Arc::default(),
            label_news,
        }
    }

    /// The queue, if it exists.
    pub async fn find(&self, name: &str) -> BrokerResult<Option<Queue>> {
        if let Some(queue) = self.cached_named(name) {
            return Ok(Some(queue));
        }
        let generation = self.generation();
        let found = Box::pin(self.contacts.find(vec![name.to_owned()], false)).await?;
        Ok(found.into_iter().next().map(|queue| self.remember(queue, generation)))
    }

    /// The queues of these names; those that do not exist are made (`spec/push-pop.md` §4).
    pub async fn find_or_create(&self, names: &[&str]) -> BrokerResult<HashMap<String, Queue>> {
        let mut found = HashMap::with_capacity(names.len());
        let mut missing: Vec<String> = Vec::new();
        for name in names {
            match self.cached_named(name) {
                Some(queue) => {
                    found.insert((*name).to_owned(), queue);
                }
                None => missing.push((*name).to_owned()),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let generation = self.generation();
        for queue in Box::pin(self.contacts.find(missing, true)).await? {
            found.insert(queue.name.clone(), self.remember(queue, generation));
        }
        Ok(found)
    }

    /// The queue of this key, if it exists.
    pub async fn find_by_id(&self, id: QueueId) -> BrokerResult<Option<Queue>> {
        if let Some(queue) = self.cached(id) {
            return Ok(Some(queue));
        }
        let generation = self.generation();
        let row = Box::pin(self.store.find_queue_by_id(id)).await?;
        Ok(row.map(|row| self.remember(Arc::new(row), generation)))
    }

    /// Look-ups that wait, for the background tasks that run them.
    pub fn contacts(&self) -> &QueueContacts {
        &self.contacts
    }

    /// Word of queues that were made or configured.
    pub fn label_news(&self) -> &LabelNews {
        &self.label_news
    }

    /// Key of a queue that was cached, for counting: what is cached is read again, what happened is counted once.
    pub fn cached_id(&self, name: &str) -> Option<QueueId> {
        self.by_name.get(name).map(|known| known.queue.id)
    }

    /// A cached queue by name.
    pub fn cached_named(&self, name: &str) -> Option<Queue> {
        let known = self.by_name.get(name)?;
        (known.generation == self.generation()).then(|| known.queue.clone())
    }

    /// A cached queue by key.
    pub fn cached(&self, id: QueueId) -> Option<Queue> {
        self.by_id.get(&id).map(|queue| queue.clone())
    }

    /// Writes options and refreshes the cache, so that the next push and pop here obey them.
    pub async fn configure<E>(
        &self,
        name: &str,
        change: impl FnOnce(Option<QueueOptions>) -> Result<QueueOptions, E>,
    ) -> BrokerResult<Result<Queue, E>> {
        let generation = self.generation();
        let row = self.store.configure_queue(name, change).await?;
        self.label_news.changed();
        Ok(row.map(|row| self.remember(Arc::new(row), generation)))
    }

    /// Forgets what is cached under a name. Answers the key it had.
    pub fn forget(&self, name: &str) -> Option<QueueId> {
        let (_, known) = self.by_name.remove(name)?;
        self.by_id.remove(&known.queue.id);
        Some(known.queue.id)
    }

    /// Forgets everything: what other brokers changed may have been missed.
    pub fn forget_all(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.by_id.clear();
        self.label_news.changed();
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// `generation` is that of before the row was read.
    fn remember(&self, queue: Queue, generation: u64) -> Queue {
        if self.by_name.len() >= CACHED_QUEUES_MAX {
            self.by_name.clear();
            self.by_id.clear();
        }
        self.label_news.saw(queue.id);
        let known = Known { queue: queue.clone(), generation };
        if let Some(old) = self.by_name.insert(queue.name.as_str().into(), known)
            && old.queue.id != queue.id
        {
            self.by_id.remove(&old.queue.id);
        }
        self.by_id.insert(queue.id, queue.clone());
        queue
    }
}

/// Lease seconds of a claim: the request's if positive, else the queue's, else 60.
pub fn lease_seconds(requested: Option<i64>, options: &QueueOptions) -> i64 {
    requested
        .filter(|s| *s > 0)
        .or_else(|| Some(i64::from(options.lease_time)).filter(|s| *s > 0))
        .unwrap_or(LEASE_SECONDS_DEFAULT)
        .min(crate::store::cursors::LEASE_SECONDS_MAX)
}
