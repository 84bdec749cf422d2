//! Maintenance modes: switches that every broker of a database obeys (`spec/admin.md` §13.3).
//!
//! The flags of this process rule; a table carries them to other brokers and over a restart. Each broker reads it twice a
//! second. A switch that could not be written is written as soon as it can be.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::BrokerResult;
use super::spool::Spool;
use crate::store::{Store, StoreResult};

/// Pause between two looks at what other brokers were told.
const EVERY: Duration = Duration::from_millis(500);

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
    pop: AtomicBool,
    pop_changes: watch::Sender<bool>,
    unwritten: Mutex<Unwritten>,
}

/// What was set here, and whether the table knows.
#[derive(Debug, Default)]
struct Unwritten {
    changes: u64,
    values: [Option<bool>; 2],
}

impl Maintenance {
    /// With both modes off until the table is read.
    pub fn new(store: Store, spool: Spool) -> Maintenance {
        let inner = Inner {
            store,
            spool,
            pop: AtomicBool::new(false),
            pop_changes: watch::channel(false).0,
            unwritten: Mutex::default(),
        };
        Maintenance { inner: Arc::new(inner) }
    }

    /// Whether a mode is on in this process.
    pub fn is_on(&self, mode: Mode) -> bool {
        match mode {
            Mode::Push => self.inner.spool.maintenance(),
            Mode::Pop => self.inner.pop.load(Ordering::Relaxed),
        }
    }

    /// Waits until pops are paused.
    pub async fn pops_paused(&self) {
        let mut changes = self.inner.pop_changes.subscribe();
        // The sender lives as long as this.
        let _ = changes.wait_for(|paused| *paused).await;
    }

    /// Switches a mode here at once, and for everybody as soon as the table can be written.
    pub async fn switch(&self, mode: Mode, on: bool) {
        {
            let mut unwritten = self.unwritten();
            unwritten.changes += 1;
            unwritten.values[mode as usize] = Some(on);
        }
        self.apply(mode, on);
        if let Err(error) = self.write().await {
            tracing::warn!(%error, "a maintenance mode is on record in this process only, for now");
        }
    }

    /// Reads what is on record, unless something was switched here meanwhile.
    pub async fn refresh(&self) -> StoreResult<()> {
        self.write().await?;
        let before = self.unwritten().changes;
        let values = self.inner.store.switches(&MODES.map(|(_, key)| key)).await?;
        if self.unwritten().changes == before {
            MODES.iter().zip(values).for_each(|((mode, _), on)| self.apply(*mode, on));
        }
        Ok(())
    }

    /// Follows the table until `stop`.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
            let read = self.refresh().await;
            crate::shutdown::count_pass("maintenance", read.is_ok());
            if let Err(error) = read {
                tracing::debug!(%error, "maintenance modes could not be read");
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
            Mode::Pop => {
                self.inner.pop.store(on, Ordering::Relaxed);
                self.inner.pop_changes.send_replace(on);
            }
        }
    }

    fn unwritten(&self) -> std::sync::MutexGuard<'_, Unwritten> {
        self.inner.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
