//! Background work: retention, partition cleanup, statistics.

use clap::Args;

use super::{ConfigError, boolean};

/// What runs in the background, and how often.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Background work")]
pub struct RetentionConfig {
    /// Pause between retention passes, in milliseconds
    #[arg(long = "retention-interval-ms", env = "RETENTION_INTERVAL", value_name = "MS", default_value_t = 5_000)]
    pub interval_ms: u64,

    /// Most segments deleted in one step
    #[arg(long = "retention-batch-size", env = "RETENTION_BATCH_SIZE", value_name = "N", default_value_t = 1_000)]
    pub batch_max: u32,

    /// Retention workers, at most 16
    #[arg(long = "retention-parallelism", env = "RETENTION_PARALLELISM", value_name = "N", default_value_t = 1)]
    pub parallelism: usize,

    /// Most partitions considered per pass; 0 takes the built-in bound
    #[arg(long = "retention-due-max", env = "QUEEN_RETENTION_DUE_CAP", value_name = "N", default_value_t = 0)]
    pub due_max: u32,

    /// Period of the slow walk that repairs missed retention marks, in milliseconds
    #[arg(
        long = "retention-safety-walk-ms",
        env = "QUEEN_RETENTION_SAFETY_WALK_MS",
        value_name = "MS",
        default_value_t = 86_400_000
    )]
    pub safety_walk_ms: u64,

    /// Delete partitions that have long been empty
    #[arg(long, env = "QUEEN_PARTITION_CLEANUP_ENABLED", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub partition_cleanup: bool,

    /// How long, in days
    #[arg(long, env = "PARTITION_CLEANUP_DAYS", value_name = "DAYS", default_value_t = 30)]
    pub partition_cleanup_days: u32,

    /// Interval of the statistics reconciler in milliseconds, 1000 at least
    #[arg(long, env = "STATS_INTERVAL_MS", value_name = "MS", default_value_t = 10_000)]
    pub stats_interval_ms: u64,

    /// Interval of the retained-bytes statistics in milliseconds, 1000 at least
    #[arg(long, env = "RETAINED_BYTES_INTERVAL_MS", value_name = "MS", default_value_t = 600_000)]
    pub retained_bytes_interval_ms: u64,

    /// Interval at which metrics are stored in milliseconds, 1000 at least
    #[arg(long, env = "METRICS_FLUSH_MS", value_name = "MS", default_value_t = 60_000)]
    pub metrics_flush_ms: u64,

    /// How long stored metrics are kept, in days
    #[arg(long, env = "METRICS_RETENTION_DAYS", value_name = "DAYS", default_value_t = 90)]
    pub metrics_retention_days: u32,
}

impl RetentionConfig {
    /// Intervals are floored, not refused: existing deployments start unchanged (security-operations §13.1).
    pub(super) fn resolve(&mut self) {
        for interval_ms in
            [&mut self.stats_interval_ms, &mut self.retained_bytes_interval_ms, &mut self.metrics_flush_ms]
        {
            *interval_ms = (*interval_ms).max(1_000);
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.parallelism > 16 {
            return Err(ConfigError::invalid("retention-parallelism", self.parallelism, "must be at most 16"));
        }
        Ok(())
    }
}
