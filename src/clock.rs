//! Time, as an argument. Nothing outside this file asks the operating system what time it is.
//!
//! The database clock judges leases and stamps messages; this one only guesses (cache ages, backoff, log cadence).

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of wall-clock and monotonic time.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Wall-clock time in microseconds since the Unix epoch, UTC. May jump in either direction.
    fn now_us(&self) -> i64;

    /// Time since some fixed moment of this process. Never goes back; the only one to measure spans with.
    fn monotonic(&self) -> Duration;

    /// Wall-clock time in milliseconds since the Unix epoch, UTC.
    fn now_ms(&self) -> i64 {
        self.now_us().div_euclid(1_000)
    }
}

/// A clock that is handed around.
pub type SharedClock = Arc<dyn Clock>;

/// The clock of the operating system.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock whose monotonic time starts now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }

    /// The same, ready to be handed around.
    pub fn shared() -> SharedClock {
        Arc::new(Self::new())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now_us(&self) -> i64 {
        match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |us| -us),
        }
    }

    fn monotonic(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// A clock for tests: it stands still until it is told to move.
#[derive(Debug)]
pub struct ManualClock {
    wall_us: AtomicI64,
    monotonic_us: AtomicU64,
}

impl ManualClock {
    /// A clock that shows `wall_us` microseconds since the Unix epoch, and monotonic zero.
    pub fn at_us(wall_us: i64) -> Arc<Self> {
        Arc::new(Self { wall_us: AtomicI64::new(wall_us), monotonic_us: AtomicU64::new(0) })
    }

    /// Lets `by` pass on both clocks.
    pub fn advance(&self, by: Duration) {
        let us = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        self.wall_us.fetch_add(i64::try_from(us).unwrap_or(i64::MAX), Ordering::SeqCst);
        self.monotonic_us.fetch_add(us, Ordering::SeqCst);
    }

    /// Sets the wall clock, as an operator or NTP would: monotonic time does not notice.
    pub fn set_wall_us(&self, wall_us: i64) {
        self.wall_us.store(wall_us, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_us(&self) -> i64 {
        self.wall_us.load(Ordering::SeqCst)
    }

    fn monotonic(&self) -> Duration {
        Duration::from_micros(self.monotonic_us.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_shows_this_century_and_never_goes_back() {
        let clock = SystemClock::new();
        assert!(clock.now_us() > 1_700_000_000_000_000);
        let first = clock.monotonic();
        assert!(clock.monotonic() >= first);
    }

    #[test]
    fn the_manual_clock_moves_only_when_told() {
        let clock = ManualClock::at_us(5_000_000);
        assert_eq!(clock.now_us(), 5_000_000);
        clock.advance(Duration::from_millis(1_500));
        assert_eq!(clock.now_us(), 6_500_000);
        assert_eq!(clock.now_ms(), 6_500);
        clock.set_wall_us(-1);
        assert_eq!(clock.now_ms(), -1, "rounds towards the past");
        assert_eq!(clock.monotonic(), Duration::from_millis(1_500));
    }
}
