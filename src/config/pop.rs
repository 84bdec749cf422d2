//! The pop path: defaults of a pop, long polls.

use clap::{Args, ValueEnum};

use super::AutopilotConfig;

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
    #[arg(long, env = "REGENT_LONG_POLLS_MAX", value_name = "N", default_value_t = 200_000)]
    pub long_polls_max: usize,

    /// How long a waiting pop keeps the buffers of its connection, in milliseconds: then it waits with the bare socket, in
    /// a tenth of the memory
    #[arg(long = "pop-rest-after-ms", env = "REGENT_POP_REST_AFTER_MS", value_name = "MS", default_value_t = 100)]
    pub rest_after_ms: u64,

    /// Claim statements, and segment reads, in flight at once; each serves every pop that waits. One per two cores by
    /// default, at most 8: more only make the statements smaller
    #[arg(long, env = "REGENT_POP_WORKERS", value_name = "N", default_value_t = super::per_two_cores())]
    pub pop_workers: usize,

    /// Memory for the newest segments, in MiB: a consumer that keeps up reads nothing from the database
    #[arg(long = "segment-cache-mb", env = "REGENT_SEGMENT_CACHE_MB", value_name = "MIB", default_value_t = 64)]
    pub segment_cache_mib_max: usize,

    /// Sizes that a pop leaves to the broker.
    #[command(flatten)]
    pub autopilot: AutopilotConfig,
}

impl PopConfig {
    /// Memory for the newest segments, in bytes.
    pub fn segment_cache_bytes_max(&self) -> usize {
        self.segment_cache_mib_max.saturating_mul(1024 * 1024)
    }
}
