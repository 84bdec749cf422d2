//! Word that queues may have been made or relabelled: a count that discovery compares with what it has read.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::ids::QueueId;

/// See the module.
#[derive(Debug, Default)]
pub struct LabelNews {
    heard: AtomicU64,
    read: AtomicU64,
    /// The highest queue key that was ever seen here; keys are given out in ascending order.
    highest: AtomicI32,
    notify: Notify,
}

impl LabelNews {
    /// A queue was made or configured, here or elsewhere.
    pub fn changed(&self) {
        self.heard.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_one();
    }

    /// Somebody spoke of this queue. One with a higher key than all that were seen has just been made.
    pub fn heard_of(&self, queue: QueueId) {
        if self.highest.fetch_max(queue.0, Ordering::AcqRel) < queue.0 {
            self.changed();
        }
    }

    /// This queue was read from the database.
    pub fn saw(&self, queue: QueueId) {
        self.highest.fetch_max(queue.0, Ordering::AcqRel);
    }

    /// How much has been heard so far.
    pub fn heard(&self) -> u64 {
        self.heard.load(Ordering::Acquire)
    }

    /// Everything that had been heard by then has been read.
    pub fn has_read(&self, heard: u64) {
        self.read.fetch_max(heard, Ordering::AcqRel);
    }

    /// Whether something was heard that has not been read.
    pub fn is_unread(&self) -> bool {
        self.read.load(Ordering::Acquire) < self.heard()
    }

    /// Resolves once something was heard.
    pub async fn arrives(&self) {
        self.notify.notified().await;
    }
}
