//! Pop autopilot (`spec/push-pop.md` §7.13): the sizes that a pop leaves to the broker. The decision is in
//! `sweep_width.rs`; what it decides from is in the ready index, and each group's controller lives and goes with its entry
//! there.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use metrics::{Counter, Histogram, counter, histogram};

use super::pop_request::{PopRequest, Sizes};
use super::ready::ReadyGroup;
use super::sweep_width::{Change, Pace, SweepWidth};
use crate::metrics as names;

/// Whether it chooses (`QUEEN_POP_AUTOPILOT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutopilotMode {
    /// It chooses, and says so in the answer.
    On,
    /// It decides and counts, and pops keep their defaults.
    Shadow,
    /// Pops keep their defaults.
    Off,
}

/// See the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutopilotSettings {
    /// Whether it chooses.
    pub mode: AutopilotMode,
    /// Messages of a pop that names no number.
    pub batch: i64,
    /// When a width may change.
    pub pace: Pace,
    /// Groups with a width of their own; those beyond take one partition.
    pub lanes_max: usize,
}

impl Default for AutopilotSettings {
    fn default() -> AutopilotSettings {
        let (target_age, dwell) = (std::time::Duration::from_millis(25), std::time::Duration::from_millis(500));
        let pace = Pace { target_age, dwell, dwell_pops: 16 };
        AutopilotSettings { mode: AutopilotMode::On, batch: 100, pace, lanes_max: 50_000 }
    }
}

/// What an answer tells about the sizes that were chosen: those that the pop used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Partitions at most.
    pub partitions: i64,
    /// Messages at most.
    pub batch: i64,
    /// Milliseconds that a loop of pops that do not wait may pause: nothing more is ready.
    pub wait_ms: Option<u64>,
}

/// The controller of one group, counted among all of them until it goes.
#[derive(Debug)]
pub struct Lane {
    width: SweepWidth,
    count: Arc<AtomicUsize>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Chooses. A cheap clone.
#[derive(Clone)]
pub struct Autopilot {
    settings: AutopilotSettings,
    lanes: Arc<AtomicUsize>,
    wider: Counter,
    narrower: Counter,
    widths: Histogram,
}

impl std::fmt::Debug for Autopilot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Autopilot").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Autopilot {
    /// With no group known yet.
    pub fn new(settings: AutopilotSettings) -> Autopilot {
        let change = |direction| counter!(names::AUTOPILOT_CHANGES, "direction" => direction);
        Autopilot {
            settings,
            lanes: Arc::default(),
            wider: change("wider"),
            narrower: change("narrower"),
            widths: histogram!(names::AUTOPILOT_WIDTH),
        }
    }

    /// Groups with a width of their own.
    pub fn lanes(&self) -> usize {
        self.lanes.load(Ordering::Relaxed)
    }

    /// The sizes of a wildcard pop on a group that does not conflate. What the request names stays as it is.
    pub fn sizes(&self, request: &PopRequest, group: &ReadyGroup) -> Sizes {
        let asked = request.sizes;
        if self.settings.mode == AutopilotMode::Off || !request.delegated.any() {
            return asked;
        }
        let batch = if request.delegated.batch { self.settings.batch } else { asked.batch };
        let partitions =
            if request.delegated.partitions { Some(self.width(group, batch).min(batch)) } else { asked.partitions };
        if self.settings.mode == AutopilotMode::Shadow { asked } else { Sizes { batch, partitions } }
    }

    /// What the answer says about it; nothing if nothing was chosen.
    pub fn chosen(&self, request: &PopRequest, sizes: Sizes, group: &ReadyGroup) -> Option<Chosen> {
        if self.settings.mode != AutopilotMode::On || !request.delegated.any() {
            return None;
        }
        let pause = || u64::try_from(self.settings.pace.target_age.as_millis()).unwrap_or(u64::MAX).max(1);
        let wait_ms = (!request.wait && group.sight(Instant::now()).ready == 0).then(pause);
        Some(Chosen { partitions: sizes.width(false), batch: sizes.batch, wait_ms })
    }

    fn width(&self, group: &ReadyGroup, batch: i64) -> i64 {
        let now = Instant::now();
        let sight = group.sight(now);
        let mut lane = group.lane();
        if lane.is_none() {
            if self.lanes.fetch_add(1, Ordering::AcqRel) >= self.settings.lanes_max {
                self.lanes.fetch_sub(1, Ordering::AcqRel);
                return 1;
            }
            *lane = Some(Box::new(Lane { width: SweepWidth::new(now), count: self.lanes.clone() }));
        }
        let Some(lane) = lane.as_mut() else { return 1 };
        match lane.width.observe(sight, batch, &self.settings.pace, now) {
            Some(Change::Wider) => self.wider.increment(1),
            Some(Change::Narrower) => self.narrower.increment(1),
            None => {}
        }
        if sight.ready > 0 {
            self.widths.record(lane.width.get() as f64);
        }
        lane.width.get()
    }
}
