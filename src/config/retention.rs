//! Retention and what else is deleted in the background (`spec/admin.md` §8.6).

use clap::Args;

use super::{ConfigError, boolean};

/// How deletion goes about its work.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Retention")]
pub struct RetentionConfig {
    /// Pause between two looks at a queue in milliseconds; queues with maxWaitTimeSeconds: at most 2000
    #[arg(long = "retention-interval-ms", env = "RETENTION_INTERVAL", value_name = "MS", default_value_t = 5_000)]
    pub interval_ms: u64,

    /// Most segments that one transaction deletes
    #[arg(long = "retention-batch-size", env = "RETENTION_BATCH_SIZE", value_name = "N", default_value_t = 1_000)]
    pub batch_size: u32,

    /// Deleting transactions at the same time, at most 16
    #[arg(long = "retention-parallelism", env = "RETENTION_PARALLELISM", value_name = "N", default_value_t = 1)]
    pub parallelism: u8,

    /// Partitions that one cycle deletes from, oldest first [default: 0 = batch x parallelism x 5]
    #[arg(
        long = "retention-due-max",
        env = "QUEEN_RETENTION_DUE_CAP",
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub due_max: u32,

    /// Pause between two walks that look for partitions missing from the work list, in milliseconds; 0 = only the first
    #[arg(
        long = "retention-safety-walk-ms",
        env = "QUEEN_RETENTION_SAFETY_WALK_MS",
        value_name = "MS",
        default_value_t = 86_400_000
    )]
    pub safety_walk_ms: u64,

    /// Days after which a partition that is empty, unused and unwritten is removed
    #[arg(long, env = "PARTITION_CLEANUP_DAYS", value_name = "DAYS", default_value_t = 30)]
    pub partition_cleanup_days: u32,

    /// Remove such partitions
    #[arg(long = "partition-cleanup", env = "QUEEN_PARTITION_CLEANUP_ENABLED", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub partition_cleanup: bool,
}

impl RetentionConfig {
    /// Partitions of one cycle.
    pub fn due_max(&self) -> u32 {
        match self.due_max {
            0 => self.batch_size.saturating_mul(u32::from(self.parallelism)).saturating_mul(5),
            due_max => due_max,
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.parallelism > 16 {
            return Err(ConfigError::invalid("retention-parallelism", self.parallelism, "must be at most 16"));
        }
        Ok(())
    }
}
