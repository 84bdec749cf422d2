//! Pop autopilot: sizes that a pop leaves to the broker (`spec/push-pop.md` §7.13).

use clap::{Args, ValueEnum};

use super::ConfigError;

/// Messages that one pop may be given at most.
const BATCH_MAX: u32 = 10_000;
/// Longest wait that makes a pop late.
const TARGET_AGE_MS_MAX: f64 = 3_600_000.0;

/// Whether the broker chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PopAutopilot {
    /// It chooses, and says so in the answer.
    On,
    /// It decides and counts, and pops keep their defaults.
    Shadow,
    /// Pops keep their defaults.
    Off,
}

/// When and how it chooses.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pop autopilot")]
pub struct AutopilotConfig {
    /// Whether the broker sizes pops that ask for it: on, shadow (decide and count only) or off
    #[arg(
        long = "pop-autopilot",
        env = "QUEEN_POP_AUTOPILOT",
        value_name = "MODE",
        value_enum,
        ignore_case = true,
        hide_possible_values = true,
        default_value = "on"
    )]
    pub mode: PopAutopilot,

    /// Messages of a pop that leaves their number to the broker
    #[arg(
        id = "pop_autopilot_batch",
        long = "pop-autopilot-batch",
        env = "QUEEN_POP_AUTOPILOT_BATCH",
        value_name = "N",
        default_value_t = 100
    )]
    pub batch: u32,

    /// How long a partition may be ready before a pop that could take no more partitions counts as late, in milliseconds
    #[arg(
        long = "pop-autopilot-target-age-ms",
        env = "QUEEN_POP_AUTOPILOT_TARGET_AGE_MS",
        value_name = "MS",
        default_value_t = 25.0
    )]
    pub target_age_ms: f64,

    /// Least time between two changes of a width, in milliseconds
    #[arg(
        long = "pop-autopilot-dwell-ms",
        env = "QUEEN_POP_AUTOPILOT_DWELL_MS",
        value_name = "MS",
        default_value_t = 500
    )]
    pub dwell_ms: u64,

    /// Least number of pops between two changes of a width
    #[arg(
        long = "pop-autopilot-dwell-pops",
        env = "QUEEN_POP_AUTOPILOT_DWELL_POPS",
        value_name = "N",
        default_value_t = 16
    )]
    pub dwell_pops: u32,

    /// Consumer groups of queues with a width of their own; those beyond take one partition
    #[arg(
        long = "pop-autopilot-lanes-max",
        env = "QUEEN_POP_AUTOPILOT_MAX_LANES",
        value_name = "N",
        default_value_t = 50_000
    )]
    pub lanes_max: usize,
}

impl AutopilotConfig {
    /// # Errors
    /// A number out of range.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if !(1..=BATCH_MAX).contains(&self.batch) {
            let why = format!("must be 1 to {BATCH_MAX}");
            return Err(ConfigError::invalid("pop-autopilot-batch", self.batch, why));
        }
        if !(self.target_age_ms > 0.0 && self.target_age_ms <= TARGET_AGE_MS_MAX) {
            let why = format!("must be above 0 and at most {TARGET_AGE_MS_MAX}");
            return Err(ConfigError::invalid("pop-autopilot-target-age-ms", self.target_age_ms, why));
        }
        Ok(())
    }
}
