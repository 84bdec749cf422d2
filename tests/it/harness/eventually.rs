//! The only place where a test may wait by the clock: poll until true, with a deadline.

use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(15);

/// Polls until `condition` answers true; fails the test at the deadline.
#[track_caller]
pub fn eventually(deadline: Duration, condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let place = std::panic::Location::caller();
    async move {
        let came_true = comes_true(deadline, condition).await;
        assert!(came_true, "not true within {deadline:?}: the condition at {place}");
    }
}

/// Polls until `condition` answers true; answers whether it did before the deadline.
pub async fn comes_true(deadline: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    while !condition().await {
        if Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(PAUSE).await;
    }
    true
}

/// Polls until `attempt` answers a value, and hands it back.
#[track_caller]
pub fn eventually_some<T>(deadline: Duration, mut attempt: impl AsyncFnMut() -> Option<T>) -> impl Future<Output = T> {
    let place = std::panic::Location::caller();
    async move {
        let end = Instant::now() + deadline;
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
            assert!(Instant::now() < end, "nothing within {deadline:?}: the attempt at {place}");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The same for code outside a runtime (starting servers, reaping processes). Answers whether it became true.
pub fn eventually_blocking(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// A moment between two attempts of a loop that somebody else ends.
pub async fn between_attempts() {
    tokio::time::sleep(PAUSE).await;
}
