//! Statistics: how often they are made and how long they are kept.

use clap::Args;

/// The background work behind the admin routes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Statistics")]
pub struct StatisticsConfig {
    /// Pause between two cycles that bring the counts per queue up to date, in milliseconds
    #[arg(long, env = "STATS_INTERVAL_MS", value_name = "MS", default_value_t = 10_000)]
    pub stats_interval_ms: u64,

    /// Pause between two passes over the sizes of retained segments, in milliseconds
    #[arg(long, env = "RETAINED_BYTES_INTERVAL_MS", value_name = "MS", default_value_t = 600_000)]
    pub retained_bytes_interval_ms: u64,

    /// Pause between two writes of the minute buckets, in milliseconds
    #[arg(long, env = "METRICS_FLUSH_MS", value_name = "MS", default_value_t = 60_000)]
    pub metrics_flush_ms: u64,

    /// Days that minute buckets and the history of deletions are kept
    #[arg(long, env = "METRICS_RETENTION_DAYS", value_name = "DAYS", default_value_t = 90)]
    pub metrics_retention_days: u32,

    /// Queues with minute buckets of their own per write, the busiest first; the others share one
    #[arg(long, env = "REGENT_METRICS_QUEUES_MAX", value_name = "N", default_value_t = 1_000)]
    pub metrics_queues_max: usize,

    /// How far safeTime lies back when other sessions of the database cannot be seen, in milliseconds
    #[arg(long, env = "QUEEN_FETCH_SAFE_FLOOR_MS", value_name = "MS", default_value_t = 30_000)]
    pub safe_floor_ms: u64,
}
