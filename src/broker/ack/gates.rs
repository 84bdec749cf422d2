//! Gates: at most so many at once for each key, first come first served. A key that nobody uses costs nothing, and keys never
//! share a gate: one that is held for long holds up nobody else.

use std::hash::Hash;
use std::sync::Arc;

use dashmap::DashMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The gates of one kind of key.
#[derive(Debug)]
pub struct Gates<K: Eq + Hash> {
    width: usize,
    gates: DashMap<K, Arc<Semaphore>>,
}

/// A place in the gate of a key; given back on drop.
#[derive(Debug)]
pub struct Passage<'a, K: Copy + Eq + Hash> {
    gates: &'a Gates<K>,
    key: K,
    gate: Option<Arc<Semaphore>>,
    permit: Option<OwnedSemaphorePermit>,
}

impl<K: Copy + Eq + Hash> Gates<K> {
    /// Gates that let `width` pass at once, at least one.
    pub fn new(width: usize) -> Gates<K> {
        Gates { width: width.max(1), gates: DashMap::new() }
    }

    /// Waits for a place. May be abandoned at any moment.
    pub async fn pass(&self, key: K) -> Passage<'_, K> {
        let gate = self.gates.entry(key).or_insert_with(|| Arc::new(Semaphore::new(self.width))).clone();
        // Made before it waits: whoever gives up leaves nothing behind either.
        let mut passage = Passage { gates: self, key, gate: Some(gate.clone()), permit: None };
        // It is never closed.
        passage.permit = gate.acquire_owned().await.ok();
        passage
    }
}

impl<K: Copy + Eq + Hash> Drop for Passage<'_, K> {
    fn drop(&mut self) {
        drop(self.permit.take());
        drop(self.gate.take());
        // Nobody takes the gate up while its entry is locked for this look.
        self.gates.gates.remove_if(&self.key, |_, gate| Arc::strong_count(gate) == 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn so_many_pass_at_once_and_only_for_that_key() {
        let gates = Gates::new(2);
        let first = gates.pass(1).await;
        let _second = gates.pass(1).await;
        let mut third = Box::pin(gates.pass(1));
        assert!(poll!(third.as_mut()).is_pending());
        let _other = gates.pass(2).await;
        drop(first);
        assert!(poll!(third.as_mut()).is_ready());
    }

    #[tokio::test]
    async fn nothing_is_left_behind_not_even_by_who_gave_up() {
        let gates = Gates::new(1);
        let first = gates.pass(1).await;
        let mut second = Box::pin(gates.pass(1));
        let mut third = Box::pin(gates.pass(1));
        assert!(poll!(second.as_mut()).is_pending() && poll!(third.as_mut()).is_pending());
        drop(second);
        drop(first);
        assert!(poll!(third.as_mut()).is_ready());
        drop(third);
        assert!(gates.gates.is_empty());
    }
}
