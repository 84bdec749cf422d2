//! The push path: fusion of pushes into commits, deduplication.

use clap::Args;

use super::{ConfigError, boolean};

/// How pushes reach the database.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Push")]
pub struct PushConfig {
    /// Push fusion shards; each has at most one commit in flight. One per two cores by default, at most 8: more only make the
    /// commits smaller
    #[arg(long = "push-fusion-shards", env = "QUEEN_V2_FUSION_SHARDS", value_name = "N", default_value_t = super::per_two_cores())]
    pub fusion_shards: usize,

    /// Most payload bytes in one fused push commit (a larger single request still goes alone)
    #[arg(long = "push-fusion-bytes-max", env = "REGENT_PUSH_FUSION_BYTES_MAX", value_name = "BYTES", default_value_t = 16 * 1024 * 1024)]
    pub fusion_bytes_max: usize,

    /// Requests that wait for one push fusion shard before it pushes back
    #[arg(
        long = "push-fusion-queue-max",
        env = "REGENT_PUSH_FUSION_QUEUE_MAX",
        value_name = "N",
        default_value_t = 1_024
    )]
    pub fusion_queue_max: usize,

    /// zstd level of stored segments, 1 to 19
    #[arg(long = "zstd-level", env = "QUEEN_V2_ZSTD_LEVEL", value_name = "N", default_value_t = 3)]
    pub zstd_level: u8,

    /// Keep recent message ids in memory to narrow the deduplication probe; it never decides
    #[arg(long, env = "QUEEN_DEDUP_CACHE", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub dedup_cache: bool,

    /// Memory for that, in MiB
    #[arg(long = "dedup-cache-mb", env = "QUEEN_DEDUP_CACHE_MB", value_name = "MIB", default_value_t = 512)]
    pub dedup_cache_mib_max: usize,
}

impl PushConfig {
    /// Memory for the deduplication cache, in bytes.
    pub fn dedup_cache_bytes_max(&self) -> usize {
        self.dedup_cache_mib_max.saturating_mul(1024 * 1024)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if !(1..=19).contains(&self.zstd_level) {
            return Err(ConfigError::invalid("zstd-level", self.zstd_level, "must be 1 to 19"));
        }
        if self.fusion_shards > 256 {
            return Err(ConfigError::invalid("push-fusion-shards", self.fusion_shards, "must be at most 256"));
        }
        Ok(())
    }
}
