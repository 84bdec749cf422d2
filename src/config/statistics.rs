//! Statistics: how often they are made and how long they are kept.

use clap::Args;

use super::ConfigError;

/// Most queues with metrics of their own.
const WATCHED_MAX: usize = 100;

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

    /// Queues with metrics of their own, by name, separated by commas; at most 100
    #[arg(long, env = "REGENT_WATCHED_QUEUES", value_name = "NAMES", value_delimiter = ',')]
    pub watched_queues: Vec<String>,

    /// How many of the busiest queues of a minute get metrics of their own from then on, until 100 have; 0 for none
    #[arg(long, env = "REGENT_WATCHED_QUEUES_BUSIEST", value_name = "N", default_value_t = 0)]
    pub watched_queues_busiest: usize,

    /// How far safeTime lies back when other sessions of the database cannot be seen, in milliseconds
    #[arg(long, env = "QUEEN_FETCH_SAFE_FLOOR_MS", value_name = "MS", default_value_t = 30_000)]
    pub safe_floor_ms: u64,
}

impl StatisticsConfig {
    /// Names without blanks around them, each once.
    pub(super) fn resolve(&mut self) {
        let names = std::mem::take(&mut self.watched_queues);
        for name in names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()) {
            if !self.watched_queues.iter().any(|known| known == name) {
                self.watched_queues.push(name.to_owned());
            }
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (flag, count) in
            [("watched-queues", self.watched_queues.len()), ("watched-queues-busiest", self.watched_queues_busiest)]
        {
            if count > WATCHED_MAX {
                return Err(ConfigError::invalid(
                    flag,
                    count,
                    "must not be more than 100: each is a set of time series",
                ));
            }
        }
        Ok(())
    }
}
