//! Other brokers on the same database: what this one tells them and what it makes of their words.
//!
//! Every notification is a hint that saves time. A lost one shows as a gap in the numbers of its sender, an ended sender
//! as silence, a dead connection as a missing echo ([`super::hearing`]): whatever may have been missed is walked for at
//! once ([`super::ready_walk`]). What is said, and how it travels, is in [`super::peer_words`].

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::error::BrokerResult;
use super::group_admin::GroupMemory;
use super::hearing::{BEAT_EVERY, Hearing};
use super::parking::Parking;
use super::peer_words::{Envelope, GROUPS_PER_MESSAGE, Outbox, Word};
use super::push_flush::Appended;
use super::queue::QueueDirectory;
use super::ready_walk::ReadyWalks;
use super::switch_rounds::SwitchRounds;
use crate::ids::{GroupId, PartitionId, QueueId};
use crate::store::brokers::Notifications;
use crate::store::{Store, StoreResult};

/// Pause between two heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(2);
/// Pause before a lost listener is tried again; while listening is no use, it doubles up to the next.
const LISTEN_RETRY: Duration = Duration::from_millis(500);
const LISTEN_RETRY_MAX: Duration = Duration::from_secs(60);
/// How long a stopping broker tries to say the rest.
const LAST_WORDS_PATIENCE: Duration = Duration::from_secs(1);

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
    outbox: Outbox,
    switch_rounds: SwitchRounds,
    hearing: Mutex<Hearing>,
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
            outbox: Outbox::new(id),
            switch_rounds: SwitchRounds::default(),
            hearing: Mutex::new(Hearing::new(id)),
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
            self.inner.outbox.keep_to_itself();
            return;
        }
        self.inner.outbox.landed(appended);
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
        self.inner.outbox.say(word);
    }

    /// Sends what is pending, for ever: one statement at a time, whatever gathers meanwhile goes with the next. While other
    /// brokers are known of it says something every second.
    pub async fn run_sender(&self, stop: &CancellationToken) -> BrokerResult<()> {
        loop {
            let pending = tokio::time::timeout(BEAT_EVERY, self.inner.outbox.filled());
            let pending = stop.run_until_cancelled(pending).await;
            if matches!(pending, Some(Err(_))) && self.inner.parking.has_peers() {
                self.say(Word::Beat);
            }
            if pending.is_none() {
                let _ = tokio::time::timeout(LAST_WORDS_PATIENCE, self.send()).await;
                return Ok(());
            }
            self.send().await;
        }
    }

    async fn send(&self) {
        let payloads = self.inner.outbox.take();
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

    fn hearing(&self) -> std::sync::MutexGuard<'_, Hearing> {
        self.inner.hearing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
