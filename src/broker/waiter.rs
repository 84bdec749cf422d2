//! A parked pop: no connection, no transaction, no lock; some hundred bytes.

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dashmap::DashMap;
use tokio::sync::Notify;

static TICKETS: AtomicU64 = AtomicU64::new(0);

/// One parked pop. It may stand in several lists; the first to wake it wins.
#[derive(Debug)]
pub struct Waiter {
    ticket: u64,
    woken: AtomicBool,
    notify: Notify,
}

impl Waiter {
    /// A waiter that stands behind all earlier ones.
    pub fn new() -> Arc<Waiter> {
        Arc::new(Waiter {
            ticket: TICKETS.fetch_add(1, Ordering::Relaxed),
            woken: AtomicBool::new(false),
            notify: Notify::new(),
        })
    }

    /// Its place in every list.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Wakes it; `false` if somebody already did.
    pub fn wake(&self) -> bool {
        let first = !self.woken.swap(true, Ordering::AcqRel);
        if first {
            self.notify.notify_one();
        }
        first
    }

    /// Whether it was woken.
    pub fn was_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    /// Resolves once it has been woken. May be asked again.
    pub async fn woken(&self) {
        if !self.was_woken() {
            self.notify.notified().await;
        }
    }
}

/// Waiters by what they wait for; a key exists only while somebody waits.
#[derive(Debug)]
pub struct WaitLists<K: Eq + Hash> {
    lists: DashMap<K, BTreeMap<u64, Arc<Waiter>>>,
}

impl<K: Eq + Hash> Default for WaitLists<K> {
    fn default() -> WaitLists<K> {
        WaitLists { lists: DashMap::default() }
    }
}

impl<K: Eq + Hash> WaitLists<K> {
    /// Whether nobody waits for anything: the common case, checked before a key is built.
    pub fn is_empty(&self) -> bool {
        self.lists.is_empty()
    }

    /// Adds a waiter.
    pub fn park(&self, key: K, waiter: &Arc<Waiter>) {
        self.lists.entry(key).or_default().insert(waiter.ticket(), waiter.clone());
    }

    /// Removes a waiter, woken or not.
    pub fn unpark(&self, key: &K, waiter: &Waiter) {
        if let Some(mut list) = self.lists.get_mut(key) {
            list.remove(&waiter.ticket());
        }
        self.lists.remove_if(key, |_, list| list.is_empty());
    }

    /// Wakes everybody who waits for `key`.
    pub fn wake_all(&self, key: &K) {
        if let Some((_, list)) = self.lists.remove(key) {
            list.into_values().for_each(|waiter| {
                waiter.wake();
            });
        }
    }

    /// Wakes everybody.
    pub fn wake_everybody(&self) {
        self.lists.retain(|_, list| {
            list.values().for_each(|waiter| {
                waiter.wake();
            });
            false
        });
    }
}
