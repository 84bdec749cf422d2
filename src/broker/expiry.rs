//! Which lease registries hold something that expires, in the order in which it does: one list per actor thread.
//!
//! A timer per actor would cost more memory than the lease. The list is looked at once a second and only at its head, so
//! an expiry is noticed up to a second late (it has a margin of ten) and nothing ever visits actors that have nothing due.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::directory::Home;
use crate::ids::PartitionId;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Due registries that are told in one go; the rest waits for the next look.
const TOLD_MAX: usize = 10_000;

thread_local! {
    static DUE: RefCell<BTreeSet<(Instant, PartitionId)>> = const { RefCell::new(BTreeSet::new()) };
}

/// Moves a partition of this thread in the list.
pub(super) fn reschedule(partition: PartitionId, old: Option<Instant>, new: Option<Instant>) {
    // A thread that is being torn down has no list any more, and nobody who would read it.
    let _ = DUE.try_with(|due| {
        let mut due = due.borrow_mut();
        if let Some(old) = old {
            due.remove(&(old, partition));
        }
        if let Some(new) = new {
            due.insert((new, partition));
        }
    });
}

/// Takes what is due out of this thread's list.
fn take_due(now: Instant) -> Vec<PartitionId> {
    DUE.with(|due| {
        let mut due = due.borrow_mut();
        let mut taken = Vec::new();
        while taken.len() < TOLD_MAX && due.first().is_some_and(|(at, _)| *at < now) {
            taken.extend(due.pop_first().map(|(_, partition)| partition));
        }
        taken
    })
}

/// Watches this thread's list until the directory is gone. To be spawned on every actor thread.
pub(super) async fn watch(home: Weak<Home>) {
    let mut ticks = actix_rt::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(home) = home.upgrade() else { return };
        let now = Instant::now();
        for partition in take_due(now) {
            if !home.expired(partition) {
                // Its mailbox is full: again at the next look.
                reschedule(partition, None, Some(now));
            }
        }
    }
}

/// Starts the watch on every thread.
pub(super) fn start(home: &Arc<Home>, threads: &[actix::ArbiterHandle]) {
    for thread in threads {
        thread.spawn(watch(Arc::downgrade(home)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_head_is_taken_and_moves_are_followed() {
        let now = Instant::now();
        let at = |seconds| Some(now + Duration::from_secs(seconds));
        let take = |seconds| take_due(now + Duration::from_secs(seconds)).iter().map(|p| p.0).collect::<Vec<_>>();
        for (partition, seconds) in [(1, 5), (2, 1), (3, 3)] {
            reschedule(PartitionId(partition), None, at(seconds));
        }
        assert_eq!(take(2), [2]);
        reschedule(PartitionId(3), at(3), at(9));
        reschedule(PartitionId(1), at(5), None);
        assert_eq!(take(8), Vec::<i64>::new());
        assert_eq!(take(10), [3]);
    }
}
