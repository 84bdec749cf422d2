//! How much one retention step takes on: its partitions are locked as long as it runs, and pushes to them wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::store::retention::StepBounds;

/// Partitions of one step at most.
const PARTITIONS_MAX: usize = 16;
/// And at least: a commit for few of them would make deletion slower than pushes where it matters, on a busy machine.
const PARTITIONS_MIN: usize = 8;
/// Payload bytes of one step at most.
const BYTES_MAX: i64 = 4 << 20;
/// A step that held its locks longer makes the next one half as large.
const TOO_LONG: Duration = Duration::from_millis(6);
/// One that held them shorter makes the next one larger by a sixteenth of the whole.
const SHORT: Duration = Duration::from_millis(3);
/// Shares of the whole.
const WHOLE: usize = 16;

/// The size of the next step: it follows the time that the last ones took.
#[derive(Debug)]
pub struct StepSize {
    rows_max: usize,
    /// Sixteenths of the most, from one up.
    share: AtomicUsize,
}

impl StepSize {
    /// Begins with the largest step; `rows_max` rows at most in one transaction.
    pub fn new(rows_max: u32) -> StepSize {
        StepSize { rows_max: rows_max as usize, share: AtomicUsize::new(WHOLE) }
    }

    /// Partitions of the next step.
    pub fn partitions(&self) -> usize {
        (PARTITIONS_MAX * self.share() / WHOLE).max(PARTITIONS_MIN)
    }

    /// Bounds of the next step.
    pub fn bounds(&self) -> StepBounds {
        let share = self.share();
        StepBounds {
            partitions_max: self.partitions(),
            rows_max: (self.rows_max * share / WHOLE).max(1) as i64,
            bytes_max: BYTES_MAX * share as i64 / WHOLE as i64,
        }
    }

    /// A step held its locks for so long.
    pub fn took(&self, held: Duration) {
        let share = self.share();
        let next = if held > TOO_LONG {
            (share / 2).max(1)
        } else if held < SHORT {
            (share + 1).min(WHOLE)
        } else {
            share
        };
        self.share.store(next, Ordering::Relaxed);
    }

    fn share(&self) -> usize {
        self.share.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_make_the_next_ones_smaller_and_quick_ones_larger_again() {
        let size = StepSize::new(1_000);
        assert_eq!((size.bounds().partitions_max, size.bounds().rows_max), (16, 1_000));
        size.took(Duration::from_millis(20));
        assert_eq!((size.bounds().partitions_max, size.bounds().rows_max), (8, 500));
        for _ in 0..9 {
            size.took(Duration::from_millis(20));
        }
        assert_eq!((size.bounds().partitions_max, size.bounds().rows_max), (8, 62));
        size.took(Duration::from_millis(4));
        assert_eq!(size.bounds().rows_max, 62);
        for _ in 0..40 {
            size.took(Duration::from_micros(900));
        }
        assert_eq!(size.partitions(), 16);
        let single = StepSize::new(1);
        single.took(Duration::from_secs(1));
        assert_eq!(single.bounds().rows_max, 1, "always one row");
    }
}
