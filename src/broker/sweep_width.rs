//! How many partitions a pop of one group takes when it leaves that to the broker (`spec/push-pop.md` §7.13). Pure.
//!
//! A group starts at one partition and widens only from evidence: more partitions were ready than one pop takes, and the
//! oldest of them had waited longer than the target, at no less than half of the pops since the last decision. It narrows
//! when so few were ready at every one of them that half the width would have done. Width doubles and halves, so that it is
//! found in a few steps, and what widens it can never be what narrows it.

use std::time::{Duration, Instant};

/// Widest sweep: beyond it a claim is split into several statements anyway, and its lease keeps others out for longer.
pub const WIDTH_MAX: i64 = 256;

/// When a width may change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Wait of the oldest ready partition past which a pop was late.
    pub target_age: Duration,
    /// Least time between two changes.
    pub dwell: Duration,
    /// Least number of pops between two changes.
    pub dwell_pops: u32,
}

/// What one pop finds before it takes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Ready partitions.
    pub ready: usize,
    /// How long the first of them has been ready.
    pub oldest: Duration,
}

/// A change of width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Twice as many.
    Wider,
    /// Half as many.
    Narrower,
}

/// The controller of one group.
#[derive(Clone, Debug)]
pub struct SweepWidth {
    width: i64,
    decided: Instant,
    pops: u32,
    late: u32,
    ready_most: usize,
}

impl SweepWidth {
    /// One partition, from now on.
    pub fn new(now: Instant) -> SweepWidth {
        SweepWidth { width: 1, decided: now, pops: 0, late: 0, ready_most: 0 }
    }

    /// Partitions that a pop takes at most.
    pub fn get(&self) -> i64 {
        self.width
    }

    /// A pop is about to take something. `batch`: its messages, and so the most partitions that it could serve.
    pub fn observe(&mut self, sight: Sight, batch: i64, pace: &Pace, now: Instant) -> Option<Change> {
        if sight.ready == 0 {
            return None;
        }
        let ready = i64::try_from(sight.ready).unwrap_or(i64::MAX);
        self.pops = self.pops.saturating_add(1);
        self.ready_most = self.ready_most.max(sight.ready);
        if sight.oldest >= pace.target_age && ready > self.width && batch > self.width {
            self.late += 1;
        }
        if self.pops < pace.dwell_pops.max(1) || now.saturating_duration_since(self.decided) < pace.dwell {
            return None;
        }
        let wider = (self.width * 2).min(WIDTH_MAX);
        let change = if self.late * 2 >= self.pops && wider > self.width {
            self.width = wider;
            Some(Change::Wider)
        } else if self.width > 1 && i64::try_from(self.ready_most).unwrap_or(i64::MAX) <= self.width / 2 {
            self.width /= 2;
            Some(Change::Narrower)
        } else {
            None
        };
        (self.decided, self.pops, self.late, self.ready_most) = (now, 0, 0, 0);
        change
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACE: Pace =
        Pace { target_age: Duration::from_millis(25), dwell: Duration::from_millis(500), dwell_pops: 16 };

    fn sight(ready: usize, oldest_ms: u64) -> Sight {
        Sight { ready, oldest: Duration::from_millis(oldest_ms) }
    }

    /// Pops every `every_ms`; answers the widths in force.
    fn run(width: &mut SweepWidth, start: Instant, pops: u64, every_ms: u64, seen: Sight) -> (Vec<i64>, Instant) {
        let mut now = start;
        let mut widths = Vec::new();
        for _ in 0..pops {
            now += Duration::from_millis(every_ms);
            width.observe(seen, 10_000, &PACE, now);
            widths.push(width.get());
        }
        (widths, now)
    }

    #[test]
    fn a_group_starts_at_one_and_stays_there_until_both_dwells_are_over() {
        let start = Instant::now();
        let mut width = SweepWidth::new(start);
        let (widths, _) = run(&mut width, start, 15, 1_000, sight(5, 10_000));
        assert!(widths.iter().all(|width| *width == 1), "15 pops are not enough, however long they take");
        let mut width = SweepWidth::new(start);
        let (widths, _) = run(&mut width, start, 499, 1, sight(5, 10_000));
        assert!(widths.iter().all(|width| *width == 1), "499 ms are not enough, however many pops");
    }

    #[test]
    fn a_flood_widens_by_doubling_and_quiet_brings_it_back() {
        let start = Instant::now();
        let mut width = SweepWidth::new(start);
        let (widths, now) = run(&mut width, start, 16 * 8, 50, sight(1_000, 30));
        assert_eq!(widths.iter().step_by(16).skip(1).copied().collect::<Vec<_>>(), [2, 4, 8, 16, 32, 64, 128]);
        let (widths, _) = run(&mut width, now, 16 * 12, 50, sight(1, 0));
        assert_eq!(widths.last(), Some(&1));
    }

    #[test]
    fn what_is_served_in_time_changes_nothing() {
        let start = Instant::now();
        let mut width = SweepWidth::new(start);
        let (widths, _) = run(&mut width, start, 500, 50, sight(1_000, 24));
        assert!(widths.iter().all(|width| *width == 1), "many are ready, none waits too long");
        let (widths, _) = run(&mut width, start, 500, 50, sight(1, 500));
        assert!(widths.iter().all(|width| *width == 1), "one that waits long is not served sooner by a wider pop");
        let mut width = SweepWidth::new(start);
        let (widths, now) = run(&mut width, start, 64, 50, sight(1_000, 30));
        let before = widths[63];
        let (widths, _) = run(&mut width, now, 500, 50, sight(1_000, 5));
        assert!(before > 1 && widths.iter().all(|width| *width == before), "in time thanks to the width");
    }

    #[test]
    fn a_pop_of_few_messages_is_no_evidence_for_more_partitions() {
        let start = Instant::now();
        let mut width = SweepWidth::new(start);
        for n in 1..200_u32 {
            width.observe(sight(1_000, 900), 2, &PACE, start + n * Duration::from_millis(50));
        }
        assert_eq!(width.get(), 2);
    }

    proptest! {
        /// Whatever happens: in bounds, by halves and doubles, no two changes within either dwell, never wider without
        /// a late pop, never narrower while the width was needed.
        #[test]
        fn changes_are_paced_and_have_a_reason(
            pops in proptest::collection::vec((0_usize..400, 0_u64..100, 0_u64..200, 1_i64..500), 1..600),
        ) {
            let start = Instant::now();
            let mut width = SweepWidth::new(start);
            let (mut now, mut changed_at, mut since, mut late, mut most) = (start, start, 0_u32, false, 0);
            for (ready, oldest, pause, batch) in pops {
                now += Duration::from_millis(pause);
                let before = width.get();
                let change = width.observe(sight(ready, oldest), batch, &PACE, now);
                if ready > 0 {
                    since += 1;
                    late |= oldest >= 25 && ready as i64 > before && batch > before;
                    most = most.max(ready);
                }
                prop_assert!((1..=WIDTH_MAX).contains(&width.get()));
                match change {
                    None => prop_assert_eq!(width.get(), before),
                    Some(Change::Wider) => prop_assert!(late && width.get() == before * 2),
                    Some(Change::Narrower) => prop_assert_eq!(width.get(), before / 2),
                }
                if change.is_some() {
                    prop_assert!(now - changed_at >= PACE.dwell && since >= PACE.dwell_pops);
                    (changed_at, since, late, most) = (now, 0, false, 0);
                }
            }
            let _ = most;
        }
    }
}
