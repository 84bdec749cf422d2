//! Maintenance modes: switches that every broker of a database obeys (`spec/admin.md` §13.3).
//!
//! The flags of this process rule; a table carries them to other brokers and over a restart. Whoever turns a switch is
//! answered when every live broker has read it: his next request may meet any of them. Besides, each broker reads twice
//! a second. A switch that could not be written is written as soon as it can be.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::BrokerResult;
use super::peers::Peers;
use super::spool::Spool;
use crate::store::{Store, StoreResult};

/// Pause between two looks at what other brokers were told.
const EVERY: Duration = Duration::from_millis(500);
/// How long a switch waits for the other brokers: by then, those that did not hear of it have looked by themselves.
const OTHERS_PATIENCE: Duration = Duration::from_millis(1_000);

/// One of the modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Pushes go to the disk spool, and the spool waits.
    Push,
    /// Pops answer that there is nothing.
    Pop,
}

const MODES: [(Mode, &str); 2] = [(Mode::Push, "maintenance_mode"), (Mode::Pop, "pop_maintenance_mode")];

/// The modes of this broker. A cheap clone.
#[derive(Clone, Debug)]
pub struct Maintenance {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    spool: Spool,
    peers: Peers,
    pop: Pause,
    unwritten: Mutex<Unwritten>,
}

/// A switch that a hundred thousand parked pops wait for.
#[derive(Debug)]
struct Pause {
    on: AtomicBool,
    changes: watch::Sender<bool>,
}

impl Default for Pause {
    fn default() -> Pause {
        Pause { on: AtomicBool::new(false), changes: watch::channel(false).0 }
    }
}

impl Pause {
    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Wakes whoever waits if this is news: it is set as it was twice a second.
    fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
        self.changes.send_if_modified(|was| std::mem::replace(was, on) != on);
    }

    async fn comes_on(&self) {
        // The sender lives as long as this.
        let _ = self.changes.subscribe().wait_for(|on| *on).await;
    }
}

/// What was set here, and whether the table knows.
#[derive(Debug, Default)]
struct Unwritten {
    changes: u64,
    values: [Option<bool>; 2],
    /// Reads of the table that have begun.
    reads: u64,
    /// The latest begun of the reads that were applied.
    applied: u64,
}

impl Maintenance {
    /// With both modes off until the table is read.
    pub fn new(store: Store, spool: Spool, peers: Peers) -> Maintenance {
        let inner = Inner { store, spool, peers, pop: Pause::default(), unwritten: Mutex::default() };
        Maintenance { inner: Arc::new(inner) }
    }

    /// Whether a mode is on in this process.
    pub fn is_on(&self, mode: Mode) -> bool {
        match mode {
            Mode::Push => self.inner.spool.maintenance(),
            Mode::Pop => self.inner.pop.is_on(),
        }
    }

    /// Waits until pops are paused.
    pub async fn pops_paused(&self) {
        self.inner.pop.comes_on().await;
    }

    /// Switches a mode here at once, and for everybody as soon as the table can be written. Returns when the other live
    /// brokers obey, or have had time to.
    pub async fn switch(&self, mode: Mode, on: bool) {
        {
            let mut unwritten = self.unwritten();
            unwritten.changes += 1;
            unwritten.values[mode as usize] = Some(on);
            self.apply(mode, on);
        }
        if let Err(error) = self.write().await {
            tracing::warn!(%error, "a maintenance mode is on record in this process only, for now");
            return;
        }
        match self.inner.peers.switch_turned(OTHERS_PATIENCE).await {
            Ok(true) => {}
            Ok(false) => tracing::warn!(?mode, on, "not every broker has confirmed a maintenance mode"),
            Err(error) => tracing::warn!(%error, "the other brokers are not known; they read a maintenance mode later"),
        }
    }

    /// Reads what is on record, unless something was switched here meanwhile.
    pub async fn refresh(&self) -> StoreResult<()> {
        self.write().await?;
        let (before, begun) = {
            let mut unwritten = self.unwritten();
            unwritten.reads += 1;
            (unwritten.changes, unwritten.reads)
        };
        let values = self.inner.store.switches(&MODES.map(|(_, key)| key)).await?;
        let mut unwritten = self.unwritten();
        // A read that was overtaken by a later one may hold what was true before.
        if unwritten.changes == before && unwritten.applied < begun {
            unwritten.applied = begun;
            MODES.iter().zip(values).for_each(|((mode, _), on)| self.apply(*mode, on));
        }
        Ok(())
    }

    /// Follows the table until `stop`, and tells those who ask that it has.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let rounds = self.inner.peers.switch_rounds();
        while stop.run_until_cancelled(tokio::time::timeout(EVERY, rounds.asked())).await.is_some() {
            let questions = rounds.take_questions();
            let read = self.refresh().await;
            crate::shutdown::count_pass("maintenance", read.is_ok());
            match read {
                Ok(()) => questions.into_iter().for_each(|(asker, round)| self.inner.peers.switches_read(asker, round)),
                Err(error) => tracing::debug!(%error, "maintenance modes could not be read"),
            }
        }
        Ok(())
    }

    async fn write(&self) -> StoreResult<()> {
        for (mode, key) in MODES {
            let Some(on) = self.unwritten().values[mode as usize] else { continue };
            self.inner.store.set_switch(key, on).await?;
            let mut unwritten = self.unwritten();
            if unwritten.values[mode as usize] == Some(on) {
                unwritten.values[mode as usize] = None;
            }
        }
        Ok(())
    }

    fn apply(&self, mode: Mode, on: bool) {
        if self.is_on(mode) != on {
            tracing::info!(?mode, on, "maintenance mode");
        }
        match mode {
            Mode::Push => self.inner.spool.set_maintenance(on),
            Mode::Pop => self.inner.pop.set(on),
        }
    }

    fn unwritten(&self) -> std::sync::MutexGuard<'_, Unwritten> {
        self.inner.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_news_wakes_nobody() {
        let pause = Pause::default();
        let waiting = pause.changes.subscribe();
        pause.set(false);
        assert!(!waiting.has_changed().unwrap_or(true));
        pause.set(true);
        assert!(waiting.has_changed().unwrap_or(false) && pause.is_on());
    }
}
