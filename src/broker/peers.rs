//! Other brokers on the same database: what this one tells them and what it makes of their words.
//!
//! Every notification is a hint that saves time. A lost one shows as a gap in the numbers of its sender, an ended sender
//! as silence, a dead connection as a missing echo ([`super::hearing`]): whatever may have been missed is walked for at
//! once ([`super::ready_walk`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::error::BrokerResult;
use super::group_admin::GroupMemory;
use super::hearing::{BEAT_EVERY, Hearing};
use super::parking::Parking;
use super::push_flush::Appended;
use super::queue::QueueDirectory;
use super::ready_walk::ReadyWalks;
use super::switch_rounds::SwitchRounds;
use crate::ids::{GroupId, PartitionId, QueueId};
use crate::store::brokers::Notifications;
use crate::store::{Store, StoreResult};

/// PostgreSQL refuses payloads of 8,000 bytes.
const PAYLOAD_BYTES_MAX: usize = 7_900;
/// Partitions per message: their ids fit the payload whatever their length.
const PARTITIONS_PER_MESSAGE: usize = 350;
/// Groups per message, likewise.
const GROUPS_PER_MESSAGE: usize = 500;
/// Partitions that may wait to be announced; more and the whole queue is announced instead.
const PENDING_PARTITIONS_MAX: usize = 20_000;
/// Pause between two heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(2);
/// Pause before a lost listener is tried again; while listening is no use, it doubles up to the next.
const LISTEN_RETRY: Duration = Duration::from_millis(500);
const LISTEN_RETRY_MAX: Duration = Duration::from_secs(60);
/// How long a stopping broker tries to say the rest.
const LAST_WORDS_PATIENCE: Duration = Duration::from_secs(1);

/// One announcement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Word {
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

#[derive(Serialize, Deserialize)]
struct Envelope {
    from: Uuid,
    /// Its place among the words of its sender, from 1.
    number: u64,
    word: Word,
}

/// Why a listener listens no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The connection was lost.
    Lost,
    /// What this broker says does not come back.
    Deaf,
}

/// The link to the other brokers. A cheap clone.
#[derive(Clone, Debug)]
pub struct Peers {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    id: Uuid,
    name: String,
    store: Store,
    queues: QueueDirectory,
    memory: GroupMemory,
    parking: Parking,
    walks: ReadyWalks,
    pending: Mutex<Pending>,
    something_pending: Notify,
    switch_rounds: SwitchRounds,
    hearing: Mutex<Hearing>,
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

impl Peers {
    /// A link that knows nobody yet.
    pub fn new(
        name: String,
        store: Store,
        queues: QueueDirectory,
        memory: GroupMemory,
        parking: Parking,
        walks: ReadyWalks,
    ) -> Peers {
        let id = Uuid::new_v4();
        let inner = Inner {
            id,
            name,
            store,
            queues,
            memory,
            parking,
            walks,
            pending: Mutex::default(),
            something_pending: Notify::new(),
            switch_rounds: SwitchRounds::default(),
            hearing: Mutex::new(Hearing::new(id)),
            said: AtomicU64::new(0),
            kept_to_itself: AtomicBool::new(false),
        };
        Peers { inner: Arc::new(inner) }
    }

    /// What walks when a word may have been lost.
    pub fn walks(&self) -> &ReadyWalks {
        &self.inner.walks
    }

    /// Messages were committed here.
    pub fn landed(&self, appended: &[Appended]) {
        self.inner.memory.activity.appended(appended);
        if !self.inner.parking.has_peers() {
            self.inner.kept_to_itself.store(true, Ordering::Release);
            return;
        }
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
        self.inner.something_pending.notify_one();
    }

    /// Something may be in any partition of a queue.
    pub fn landed_widely(&self, queue: QueueId) {
        self.say(Word::LandedWidely(queue.0));
    }

    /// What this broker is to the others.
    pub fn id(&self) -> Uuid {
        self.inner.id
    }

    /// The options of a queue changed here.
    pub fn configured(&self, queue: &str) {
        self.say(Word::Configured(queue.to_owned()));
    }

    /// A queue was deleted here.
    pub fn deleted(&self, queue: &str, id: QueueId) {
        self.say(Word::Deleted(queue.to_owned(), id.0));
    }

    /// Cursors or registrations of these groups were moved or deleted here.
    pub fn groups_changed(&self, ids: &[GroupId]) {
        for ids in ids.chunks(GROUPS_PER_MESSAGE) {
            self.say(Word::GroupsChanged(ids.iter().map(|id| id.0).collect()));
        }
    }

    /// One cursor was moved here.
    pub fn cursor_moved(&self, queue: QueueId, group: GroupId, partition: PartitionId) {
        self.say(Word::CursorMoved(queue.0, group.0, partition.0));
    }

    /// A switch was turned here and is on record: waits until every other live broker has read it, at most `patience`
    /// for the slowest. A broker that died within the last ten seconds still counts as live. Whether all have.
    pub async fn switch_turned(&self, patience: Duration) -> StoreResult<bool> {
        let others = self.inner.store.list_brokers(self.inner.id).await?;
        let others: BTreeSet<Uuid> = others.into_iter().filter(|peer| peer.is_alive).map(|peer| peer.id).collect();
        if others.is_empty() {
            return Ok(true);
        }
        let round = self.inner.switch_rounds.open();
        self.say(Word::SwitchTurned(round.number()));
        Ok(round.confirmed_by(&others, patience).await)
    }

    /// Questions of other brokers whether this one has read the switches.
    pub fn switch_rounds(&self) -> &SwitchRounds {
        &self.inner.switch_rounds
    }

    /// The switches were read here after that question.
    pub fn switches_read(&self, asker: Uuid, round: u64) {
        self.say(Word::SwitchesRead(asker, round));
    }

    fn say(&self, word: Word) {
        self.pending().words.push(word);
        self.inner.something_pending.notify_one();
    }

    /// Sends what is pending, for ever: one statement at a time, whatever gathers meanwhile goes with the next. While other
    /// brokers are known of it says something every second.
    pub async fn run_sender(&self, stop: &CancellationToken) -> BrokerResult<()> {
        loop {
            let pending = tokio::time::timeout(BEAT_EVERY, self.inner.something_pending.notified());
            let pending = stop.run_until_cancelled(pending).await;
            if matches!(pending, Some(Err(_))) && self.inner.parking.has_peers() {
                self.pending().words.push(Word::Beat);
            }
            if pending.is_none() {
                let _ = tokio::time::timeout(LAST_WORDS_PATIENCE, self.send()).await;
                return Ok(());
            }
            self.send().await;
        }
    }

    async fn send(&self) {
        let payloads = self.take_payloads();
        if payloads.is_empty() {
            return;
        }
        match self.inner.store.notify(&payloads).await {
            Ok(()) => {
                self.hearing().said(Instant::now());
                super::meter::meter().notifications_sent.increment(payloads.len() as u64);
            }
            Err(error) => {
                metrics::counter!(crate::metrics::PEER_NOTIFICATIONS_LOST).increment(payloads.len() as u64);
                tracing::debug!(%error, "notifications lost; other brokers find out by their own walks");
            }
        }
    }

    /// Keeps this broker on the list and knows whether it is alone.
    pub async fn run_heartbeat(&self, stop: &CancellationToken) -> BrokerResult<()> {
        loop {
            let beat = self.inner.store.heartbeat(self.inner.id, &self.inner.name).await;
            crate::shutdown::count_pass("peer_heartbeat", beat.is_ok());
            match beat {
                Ok(others) => {
                    metrics::gauge!(crate::metrics::PEERS).set(others as f64);
                    self.set_peers(others > 0);
                }
                // Alone or not cannot be known: speak, in case.
                Err(error) => {
                    tracing::debug!(%error, "heartbeat failed");
                    self.set_peers(true);
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(HEARTBEAT_EVERY)).await.is_none() {
                break;
            }
        }
        self.inner.store.sign_off(self.inner.id).await?;
        Ok(())
    }

    fn set_peers(&self, any: bool) {
        if self.inner.parking.set_peers(any) && any {
            // Leases that only this broker could have ended may be ended by others from now on.
            self.inner.memory.ready.reconsider_all();
        }
        self.note_deafness();
    }

    fn note_deafness(&self) {
        self.inner.walks.set_deaf(self.inner.parking.has_peers() && self.hearing().is_deaf());
    }

    /// Listens to the others, for ever.
    pub async fn run_listener(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let listening = async {
            let mut pause = LISTEN_RETRY;
            loop {
                match self.inner.store.listen().await {
                    Ok(mut notifications) => {
                        self.hearing().listens();
                        self.say(Word::Hello);
                        self.catch_up();
                        let end = self.listen(&mut notifications).await;
                        pause = if self.hearing().is_deaf() { (pause * 2).min(LISTEN_RETRY_MAX) } else { LISTEN_RETRY };
                        tracing::info!(?end, "lost the notification connection; listening again");
                        if end == End::Deaf {
                            metrics::counter!(crate::metrics::PEER_SILENCES).increment(1);
                            if let Err(error) = self.inner.store.hang_up(notifications).await {
                                tracing::debug!(%error, "the dead notification connection ends by itself");
                            }
                        }
                    }
                    Err(error) => tracing::debug!(%error, "cannot listen for notifications"),
                }
                self.hearing().lost();
                self.note_deafness();
                tokio::time::sleep(pause).await;
            }
        };
        stop.run_until_cancelled(listening).await.unwrap_or(Ok(()))
    }

    /// Hears until the connection is lost or found dead.
    async fn listen(&self, notifications: &mut Notifications) -> End {
        let mut look = tokio::time::interval(BEAT_EVERY);
        loop {
            let mut next = std::pin::pin!(notifications.next());
            let heard = loop {
                tokio::select! {
                    heard = &mut next => break heard,
                    _ = look.tick() => {
                        let (silent, is_unechoed) = {
                            let (mut hearing, now) = (self.hearing(), Instant::now());
                            (hearing.fallen_silent(now), hearing.is_unechoed(now))
                        };
                        if silent > 0 {
                            metrics::counter!(crate::metrics::PEER_SILENCES).increment(silent as u64);
                            tracing::info!(silent, "other brokers fell silent: what they may not have said is looked up");
                            self.catch_up();
                        }
                        if is_unechoed {
                            return End::Deaf;
                        }
                    }
                }
            };
            match heard {
                Ok(Some(payload)) => self.hear(&payload),
                Ok(None) | Err(_) => return End::Lost,
            }
        }
    }

    /// What may have been said and not heard is looked up: options are read again, ready partitions walked again.
    fn catch_up(&self) {
        self.inner.queues.forget_all();
        self.inner.queues.label_news().changed();
        self.inner.memory.groups.forget_all();
        self.inner.walks.everything();
    }

    fn hear(&self, payload: &str) {
        let Ok(Envelope { from, number, word }) = serde_json::from_str(payload) else {
            tracing::warn!(payload, "a notification that this version does not understand");
            return;
        };
        let missed = self.hearing().heard(from, number, Instant::now());
        if missed > 0 {
            metrics::counter!(crate::metrics::PEER_NOTIFICATIONS_MISSED).increment(missed);
            tracing::debug!(%from, missed, "notifications never came: what they said is looked up");
            self.catch_up();
        }
        if from == self.inner.id {
            self.note_deafness();
            return;
        }
        metrics::counter!(crate::metrics::PEER_NOTIFICATIONS_HEARD).increment(1);
        self.set_peers(true);
        match word {
            Word::Hello | Word::Beat => {}
            Word::Landed(queue, partitions) => {
                self.inner.queues.label_news().heard_of(QueueId(queue));
                let appended: Vec<Appended> = partitions
                    .into_iter()
                    .map(|id| Appended { queue: QueueId(queue), partition: PartitionId(id), is_new: false })
                    .collect();
                self.inner.memory.activity.appended(&appended);
                self.inner.memory.ready.appended(&appended);
            }
            Word::LandedWidely(queue) => {
                self.inner.queues.label_news().heard_of(QueueId(queue));
                self.inner.walks.queue(QueueId(queue));
            }
            Word::Configured(name) => {
                self.inner.queues.label_news().changed();
                if let Some(id) = self.inner.queues.forget(&name) {
                    self.inner.memory.ready.reconsider(id);
                }
            }
            Word::Deleted(name, id) => {
                for id in [self.inner.queues.forget(&name), Some(QueueId(id))].into_iter().flatten() {
                    self.inner.memory.forget_queue(id);
                }
            }
            Word::GroupsChanged(ids) => {
                let ids: Vec<GroupId> = ids.into_iter().map(GroupId).collect();
                self.inner.memory.forget_groups(&ids);
            }
            Word::CursorMoved(queue, group, partition) => {
                self.inner.memory.forget_cursor(QueueId(queue), GroupId(group), PartitionId(partition));
            }
            Word::SwitchTurned(round) => self.inner.switch_rounds.ask(from, round),
            Word::SwitchesRead(asker, round) if asker == self.inner.id => {
                self.inner.switch_rounds.confirm(from, round);
            }
            Word::SwitchesRead(..) => {}
        }
    }

    fn take_payloads(&self) -> Vec<String> {
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
        if self.inner.kept_to_itself.swap(false, Ordering::AcqRel) {
            // A number that nobody hears.
            self.inner.said.fetch_add(1, Ordering::AcqRel);
        }
        let from = self.inner.id;
        let payloads = all.into_iter().filter_map(|word| {
            let number = self.inner.said.fetch_add(1, Ordering::AcqRel) + 1;
            serde_json::to_string(&Envelope { from, number, word }).ok()
        });
        payloads.filter(|payload| payload.len() <= PAYLOAD_BYTES_MAX).collect()
    }

    fn hearing(&self) -> std::sync::MutexGuard<'_, Hearing> {
        self.inner.hearing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.inner.pending.lock().unwrap_or_else(PoisonError::into_inner)
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
