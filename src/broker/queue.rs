//! Queues as the hot path knows them: a bounded cache of rows, made on demand.

use std::collections::HashMap;
use std::sync::Arc;

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

/// Queue rows by name. Stale entries are dropped by configure, by delete, by what other brokers announce, and by
/// whoever finds the key gone.
#[derive(Clone, Debug)]
pub struct QueueDirectory {
    store: Store,
    contacts: QueueContacts,
    by_name: Arc<DashMap<Arc<str>, Queue>>,
    by_id: Arc<DashMap<QueueId, Queue>>,
    label_news: Arc<LabelNews>,
}

impl QueueDirectory {
    /// An empty cache over the store.
    pub fn new(store: Store) -> QueueDirectory {
        let label_news = Arc::default();
        let contacts = QueueContacts::over(&store, &label_news);
        QueueDirectory { store, contacts, by_name: Arc::default(), by_id: Arc::default(), label_news }
    }

    /// The queue, if it exists.
    pub async fn find(&self, name: &str) -> BrokerResult<Option<Queue>> {
        if let Some(queue) = self.by_name.get(name) {
            return Ok(Some(queue.clone()));
        }
        let found = Box::pin(self.contacts.find(vec![name.to_owned()], false)).await?;
        Ok(found.into_iter().next().map(|queue| self.remember(queue)))
    }

    /// The queues of these names; those that do not exist are made (`spec/push-pop.md` §4).
    pub async fn find_or_create(&self, names: &[&str]) -> BrokerResult<HashMap<String, Queue>> {
        let mut found = HashMap::with_capacity(names.len());
        let mut missing: Vec<String> = Vec::new();
        for name in names {
            match self.by_name.get(*name) {
                Some(queue) => {
                    found.insert((*name).to_owned(), queue.clone());
                }
                None => missing.push((*name).to_owned()),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        for queue in Box::pin(self.contacts.find(missing, true)).await? {
            found.insert(queue.name.clone(), self.remember(queue));
        }
        Ok(found)
    }

    /// The queue of this key, if it exists.
    pub async fn find_by_id(&self, id: QueueId) -> BrokerResult<Option<Queue>> {
        if let Some(queue) = self.cached(id) {
            return Ok(Some(queue));
        }
        let row = Box::pin(self.store.find_queue_by_id(id)).await?;
        Ok(row.map(|row| self.remember(Arc::new(row))))
    }

    /// Look-ups that wait, for the background tasks that run them.
    pub fn contacts(&self) -> &QueueContacts {
        &self.contacts
    }

    /// Word of queues that were made or configured.
    pub fn label_news(&self) -> &LabelNews {
        &self.label_news
    }

    /// Key of a cached queue.
    pub fn cached_id(&self, name: &str) -> Option<QueueId> {
        self.by_name.get(name).map(|queue| queue.id)
    }

    /// A cached queue by name.
    pub fn cached_named(&self, name: &str) -> Option<Queue> {
        self.by_name.get(name).map(|queue| queue.clone())
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
        let row = self.store.configure_queue(name, change).await?;
        self.label_news.changed();
        Ok(row.map(|row| self.remember(Arc::new(row))))
    }

    /// Forgets what is cached under a name. Answers the key it had.
    pub fn forget(&self, name: &str) -> Option<QueueId> {
        let (_, queue) = self.by_name.remove(name)?;
        self.by_id.remove(&queue.id);
        Some(queue.id)
    }

    /// Forgets everything: what other brokers changed may have been missed.
    pub fn forget_all(&self) {
        self.by_name.clear();
        self.by_id.clear();
        self.label_news.changed();
    }

    fn remember(&self, queue: Queue) -> Queue {
        if self.by_name.len() >= CACHED_QUEUES_MAX {
            self.by_name.clear();
            self.by_id.clear();
        }
        self.label_news.saw(queue.id);
        if let Some(old) = self.by_name.insert(queue.name.as_str().into(), queue.clone())
            && old.id != queue.id
        {
            self.by_id.remove(&old.id);
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
