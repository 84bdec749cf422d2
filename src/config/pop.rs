//! The pop path: defaults of a pop, long polls, the index of ready partitions, claim fusion.

use clap::{Args, ValueEnum};

use super::{ConfigError, boolean};

/// Where a consumer group begins when nothing else says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SubscriptionMode {
    /// Behind the messages that exist when the group first appears.
    #[value(alias = "new-only")]
    New,
    /// At the oldest message that is kept.
    #[value(alias = "from_beginning", alias = "from-beginning", alias = "earliest")]
    All,
}

/// Whether the broker chooses the width of a pop that names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Autopilot {
    /// It chooses.
    On,
    /// It reckons and reports, and serves the fixed defaults.
    Shadow,
    /// Fixed defaults.
    Off,
}

/// How messages leave.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pop")]
pub struct PopConfig {
    /// Where a consumer group starts when neither the request nor the queue says: new or all
    #[arg(
        long = "default-subscription-mode",
        env = "DEFAULT_SUBSCRIPTION_MODE",
        value_name = "MODE",
        value_enum,
        ignore_case = true,
        hide_possible_values = true,
        default_value = "new"
    )]
    pub subscription_mode_default: SubscriptionMode,

    /// How long a waiting pop without a timeout waits, in milliseconds
    #[arg(long = "pop-timeout-ms", env = "DEFAULT_TIMEOUT", value_name = "MS", default_value_t = 30_000)]
    pub timeout_ms_default: u64,

    /// Most pops that wait at once; the next is answered with 429
    #[arg(long, env = "REGENT_LONG_POLLS_MAX", value_name = "N", default_value_t = 20_000)]
    pub long_polls_max: usize,

    /// First interval at which a waiting pop looks again unprompted, in milliseconds
    #[arg(long = "pop-wait-ms-min", env = "POP_WAIT_INITIAL_INTERVAL_MS", value_name = "MS", default_value_t = 100)]
    pub wait_ms_min: u64,

    /// Longest such interval, in milliseconds
    #[arg(long = "pop-wait-ms-max", env = "POP_WAIT_MAX_INTERVAL_MS", value_name = "MS", default_value_t = 1_000)]
    pub wait_ms_max: u64,

    /// Empty looks before the interval grows
    #[arg(
        long = "pop-wait-backoff-threshold",
        env = "POP_WAIT_BACKOFF_THRESHOLD",
        value_name = "N",
        default_value_t = 3
    )]
    pub wait_backoff_threshold: u32,

    /// Factor by which it grows
    #[arg(
        long = "pop-wait-backoff-multiplier",
        env = "POP_WAIT_BACKOFF_MULTIPLIER",
        value_name = "X",
        default_value_t = 2.0
    )]
    pub wait_backoff_multiplier: f64,

    /// Look in memory before a waiting pop asks the database again
    #[arg(long = "pop-pending-gate", env = "QUEEN_POP_PENDING_GATE", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub pending_gate: bool,

    /// Keep the ready partitions in memory; false looks for them in the database at every pop
    #[arg(long = "ready-index", env = "QUEEN_HOTLIST", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub ready_index: bool,

    /// How often the ready partitions are reconciled with the database, in milliseconds
    #[arg(
        long = "ready-index-reconcile-ms",
        env = "QUEEN_HOTLIST_RESEED_MS",
        value_name = "MS",
        default_value_t = 30_000
    )]
    pub ready_index_reconcile_ms: u64,

    /// Commit the claims of many pops together
    #[arg(long = "pop-fusion", env = "QUEEN_POP_FUSION", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub fusion: bool,

    /// Claim fusion shards; each has --pop-fusion-concurrency commits in flight at most
    #[arg(
        id = "pop_fusion_shards",
        long = "pop-fusion-shards",
        env = "QUEEN_POP_FUSION_SHARDS",
        value_name = "N",
        default_value_t = 4
    )]
    pub fusion_shards: usize,

    /// Commits in flight per claim fusion shard
    #[arg(
        long = "pop-fusion-concurrency",
        env = "QUEEN_POP_FUSION_CONCURRENCY",
        value_name = "N",
        default_value_t = 1
    )]
    pub fusion_concurrency: usize,

    /// Liveness tick of claim fusion in milliseconds; not a linger
    #[arg(
        id = "pop_fusion_hold_ms",
        long = "pop-fusion-hold-ms",
        env = "QUEEN_POP_FUSION_HOLD_MS",
        value_name = "MS",
        default_value_t = 3
    )]
    pub fusion_hold_ms: u64,

    /// Most claims in one fused commit
    #[arg(long = "pop-fusion-jobs-max", env = "QUEEN_POP_FUSION_MAX_JOBS", value_name = "N", default_value_t = 16)]
    pub fusion_jobs_max: usize,

    /// Choose the width of a pop that names none: on, shadow or off
    #[arg(
        long = "pop-autopilot",
        env = "QUEEN_POP_AUTOPILOT",
        value_name = "MODE",
        value_enum,
        ignore_case = true,
        hide_possible_values = true,
        default_value = "on"
    )]
    pub autopilot: Autopilot,

    /// Messages of a pop whose width was chosen
    #[arg(long = "pop-autopilot-batch", env = "QUEEN_POP_AUTOPILOT_BATCH", value_name = "N", default_value_t = 100)]
    pub autopilot_batch: usize,
}

impl PopConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.wait_ms_max < self.wait_ms_min {
            return Err(ConfigError::invalid(
                "pop-wait-ms-max",
                self.wait_ms_max,
                "must be at least --pop-wait-ms-min",
            ));
        }
        if !self.wait_backoff_multiplier.is_finite() || self.wait_backoff_multiplier < 1.0 {
            return Err(ConfigError::invalid(
                "pop-wait-backoff-multiplier",
                self.wait_backoff_multiplier,
                "must be a number from 1 up",
            ));
        }
        if self.autopilot_batch > 100_000 {
            return Err(ConfigError::invalid("pop-autopilot-batch", self.autopilot_batch, "must be at most 100000"));
        }
        Ok(())
    }
}
