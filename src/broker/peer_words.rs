//! What brokers say to each other, and what of it waits to be said: one message for many partitions of a queue, numbered by
//! its sender, within what PostgreSQL takes as the payload of a notification.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use uuid::Uuid;

use super::push_flush::Appended;
use crate::ids::{PartitionId, QueueId};

/// PostgreSQL refuses payloads of 8,000 bytes.
const PAYLOAD_BYTES_MAX: usize = 7_900;
/// Partitions per message: their ids fit the payload whatever their length.
const PARTITIONS_PER_MESSAGE: usize = 350;
/// Groups per message, likewise.
pub const GROUPS_PER_MESSAGE: usize = 500;
/// Partitions that may wait to be announced; more and the whole queue is announced instead.
const PENDING_PARTITIONS_MAX: usize = 20_000;

/// One announcement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// I have just started: answer by remembering me.
    Hello,
    /// I am here, and this is the number of my last word.
    Beat,
    /// Messages landed in these partitions of a queue.
    Landed(i32, Vec<i64>),
    /// Messages landed somewhere in a queue: too many partitions to name.
    LandedWidely(i32),
    /// The options of a queue changed.
    Configured(String),
    /// A queue was deleted.
    Deleted(String, i32),
    /// The cursors or the registration of these groups were moved or deleted.
    GroupsChanged(Vec<i32>),
    /// One cursor was moved: queue, group, partition.
    CursorMoved(i32, i32, i64),
    /// A switch was turned and is on record: read it, and say so with this number.
    SwitchTurned(u64),
    /// The switches were read after this broker's question of that number.
    SwitchesRead(Uuid, u64),
}

/// A word on its way.
#[derive(Serialize, Deserialize)]
pub struct Envelope {
    /// Its sender.
    pub from: Uuid,
    /// Its place among the words of its sender, from 1.
    pub number: u64,
    /// What it says.
    pub word: Word,
}

/// What waits to be said.
#[derive(Debug)]
pub struct Outbox {
    from: Uuid,
    pending: Mutex<Pending>,
    filled: Notify,
    /// Number of the last word.
    said: AtomicU64,
    /// Something landed while nobody else was known of: whoever comes later has missed it.
    kept_to_itself: AtomicBool,
}

#[derive(Debug, Default)]
struct Pending {
    landed: BTreeMap<QueueId, Option<BTreeSet<PartitionId>>>,
    partitions: usize,
    words: Vec<Word>,
}

impl Outbox {
    /// Of a broker that has said nothing yet.
    pub fn new(from: Uuid) -> Outbox {
        Outbox {
            from,
            pending: Mutex::default(),
            filled: Notify::new(),
            said: AtomicU64::new(0),
            kept_to_itself: AtomicBool::new(false),
        }
    }

    /// Takes a word in.
    pub fn say(&self, word: Word) {
        self.pending().words.push(word);
        self.filled.notify_one();
    }

    /// Messages were committed here; past a bound the queue is named, not its partitions.
    pub fn landed(&self, appended: &[Appended]) {
        let mut pending = self.pending();
        for append in appended {
            if pending.partitions >= PENDING_PARTITIONS_MAX {
                pending.landed.insert(append.queue, None);
            } else if let Some(set) = pending.landed.entry(append.queue).or_insert_with(|| Some(BTreeSet::new()))
                && set.insert(append.partition)
            {
                pending.partitions += 1;
            }
        }
        drop(pending);
        self.filled.notify_one();
    }

    /// Messages were committed here and nobody is told: the next word shows a gap.
    pub fn keep_to_itself(&self) {
        self.kept_to_itself.store(true, Ordering::Release);
    }

    /// Waits until something was taken in.
    pub async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Everything that waits, numbered and ready to be sent.
    pub fn take(&self) -> Vec<String> {
        let Pending { landed, words, .. } = std::mem::take(&mut *self.pending());
        let mut all = words;
        for (queue, partitions) in landed {
            match partitions {
                None => all.push(Word::LandedWidely(queue.0)),
                Some(set) => {
                    let ids: Vec<i64> = set.into_iter().map(|p| p.0).collect();
                    all.extend(ids.chunks(PARTITIONS_PER_MESSAGE).map(|chunk| Word::Landed(queue.0, chunk.to_vec())));
                }
            }
        }
        if all.is_empty() {
            return Vec::new();
        }
        if self.kept_to_itself.swap(false, Ordering::AcqRel) {
            // A number that nobody hears.
            self.said.fetch_add(1, Ordering::AcqRel);
        }
        let from = self.from;
        let payloads = all.into_iter().filter_map(|word| {
            let number = self.said.fetch_add(1, Ordering::AcqRel) + 1;
            serde_json::to_string(&Envelope { from, number, word }).ok()
        });
        payloads.filter(|payload| payload.len() <= PAYLOAD_BYTES_MAX).collect()
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_word_survives_the_wire_and_fits_the_payload() {
        for word in [
            Word::Hello,
            Word::Beat,
            Word::Landed(i32::MAX, vec![i64::MAX; PARTITIONS_PER_MESSAGE]),
            Word::LandedWidely(1),
            Word::Configured("q".repeat(1024)),
            Word::Deleted("\"".repeat(1024), 2),
            Word::GroupsChanged(vec![i32::MAX; GROUPS_PER_MESSAGE]),
            Word::CursorMoved(i32::MAX, i32::MAX, i64::MAX),
            Word::SwitchTurned(u64::MAX),
            Word::SwitchesRead(Uuid::max(), u64::MAX),
        ] {
            let envelope = Envelope { from: Uuid::nil(), number: u64::MAX, word: word.clone() };
            let text = serde_json::to_string(&envelope).unwrap();
            assert!(text.len() <= PAYLOAD_BYTES_MAX, "{}", text.len());
            assert_eq!(serde_json::from_str::<Envelope>(&text).unwrap().word, word);
        }
    }
}
