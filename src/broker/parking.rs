//! Bounds of waiting pops, and the guard of a parked one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::{BrokerError, BrokerResult};
use super::feed::Feed;
use super::meter::meter;
use super::ready::{ReadyGroup, ReadyIndex, WakeKey};
use super::waiter::Waiter;

/// Counters shared by all pops of a broker. A cheap clone.
#[derive(Clone, Debug)]
pub struct Parking {
    parked: Arc<AtomicUsize>,
    parked_max: usize,
    waiting: Arc<AtomicUsize>,
    waiting_max: usize,
    has_peers: Arc<AtomicBool>,
}

/// A parked pop: listed wherever something may happen for it. Dropping it takes it off every list, and passes a wake-up
/// that it did not use on to the next.
#[derive(Debug)]
pub struct Parked {
    waiter: Arc<Waiter>,
    groups: Vec<Arc<ReadyGroup>>,
    keys: Vec<WakeKey>,
    feed: Option<Arc<Feed>>,
    ready: ReadyIndex,
    parked: Arc<AtomicUsize>,
    looked: bool,
}

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Parking {
    /// With room for so many parked and so many waiting pops.
    pub fn new(parked_max: usize, waiting_max: usize) -> Parking {
        Parking { parked: Arc::default(), parked_max, waiting: Arc::default(), waiting_max, has_peers: Arc::default() }
    }

    /// Whether other brokers work on this database.
    pub fn has_peers(&self) -> bool {
        self.has_peers.load(Ordering::Relaxed)
    }

    /// Notes whether other brokers work on this database; answers whether it was the other way before.
    pub fn set_peers(&self, any: bool) -> bool {
        self.has_peers.swap(any, Ordering::Relaxed) != any
    }

    /// Parked pops now.
    pub fn parked(&self) -> usize {
        self.parked.load(Ordering::Relaxed)
    }

    /// Pops that wait for their turn to claim now.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Waits for a turn to claim, unless too many wait already.
    pub async fn claim_permit(&self, claims: &Arc<Semaphore>) -> BrokerResult<OwnedSemaphorePermit> {
        if let Ok(permit) = claims.clone().try_acquire_owned() {
            return Ok(permit);
        }
        if self.waiting.fetch_add(1, Ordering::AcqRel) >= self.waiting_max {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            return Err(BrokerError::overloaded("too many pops under way", 1));
        }
        let _counted = Counted(self.waiting.clone());
        let started = std::time::Instant::now();
        let permit = claims.clone().acquire_owned().await.map_err(|_| BrokerError::Stopping)?;
        meter().claim_wait_seconds.record(started.elapsed().as_secs_f64());
        Ok(permit)
    }

    /// Parks a pop, unless too many are parked already.
    pub fn park(
        &self,
        groups: Vec<Arc<ReadyGroup>>,
        ready: &ReadyIndex,
        keys: Vec<WakeKey>,
        feed: Option<Arc<Feed>>,
    ) -> BrokerResult<Parked> {
        if self.parked.fetch_add(1, Ordering::AcqRel) >= self.parked_max {
            self.parked.fetch_sub(1, Ordering::AcqRel);
            return Err(BrokerError::overloaded("too many parked pops", 5));
        }
        let waiter = Waiter::new();
        for group in &groups {
            group.park(&waiter);
        }
        for key in &keys {
            ready.keyed().park(key.clone(), &waiter);
        }
        if let Some(feed) = &feed {
            feed.park(&waiter);
        }
        Ok(Parked { waiter, groups, keys, feed, ready: ready.clone(), parked: self.parked.clone(), looked: false })
    }
}

impl Parked {
    /// Whether it waits by name rather than in a group's list.
    pub fn is_keyed(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Resolves once something may be there.
    pub async fn woken(&self) {
        self.waiter.woken().await;
    }

    /// Ends the waiting with a look: a wake-up that has come is used.
    pub fn looks(mut self) {
        self.looked = true;
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.parked.fetch_sub(1, Ordering::AcqRel);
        let unused = self.waiter.was_woken() && !self.looked;
        for group in &self.groups {
            group.unpark(&self.waiter, unused);
        }
        if let Some(feed) = &self.feed {
            feed.unpark(&self.waiter, unused);
        }
        for key in &self.keys {
            self.ready.keyed().unpark(key, &self.waiter);
        }
    }
}
