//! The ack path: the in-memory lease registry, and the fusion (group commit) of cursor advances.

use clap::Args;

use super::{ConfigError, boolean};

/// How acks reach the database.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Ack")]
pub struct FusionConfig {
    /// Remember the leases granted, so that an ack of a whole batch needs no lookup. Answers are the same without
    #[arg(long, env = "QUEEN_ACK_REGISTRY", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub ack_registry: bool,

    /// Memory for that, in MiB
    #[arg(long = "ack-registry-mb", env = "QUEEN_ACK_REGISTRY_MB", value_name = "MIB", default_value_t = 64)]
    pub ack_registry_mib_max: usize,

    /// Commit the acks of many requests together. Answers are the same without
    #[arg(long, env = "QUEEN_ACK_FUSION", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub ack_fusion: bool,

    /// Settle one partition of one group at a time, without registry and fusion: a baseline to compare with. Answers are the
    /// same without
    #[arg(long, env = "REGENT_ACK_SERIAL", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub ack_serial: bool,

    /// Ack fusion shards; each has at most one commit in flight. One per two cores by default, at most 8 and --pool-size:
    /// more only make the commits smaller. QUEEN_V2_FUSION_SHARDS counts where this is unset
    #[arg(long, env = "QUEEN_ACK_FUSION_SHARDS", value_name = "N", default_value_t = super::per_two_cores())]
    pub ack_fusion_shards: usize,

    /// Most cursor rows in one fused ack commit
    #[arg(long, env = "REGENT_ACK_FUSION_ROWS_MAX", value_name = "N", default_value_t = 1_000)]
    pub ack_fusion_rows_max: usize,

    /// Most bytes of parameters in one fused ack commit
    #[arg(long, env = "REGENT_ACK_FUSION_BYTES_MAX", value_name = "BYTES", default_value_t = 1024 * 1024)]
    pub ack_fusion_bytes_max: usize,

    /// Advances that wait for one ack fusion shard before it pushes back
    #[arg(long, env = "REGENT_ACK_FUSION_QUEUE_MAX", value_name = "N", default_value_t = 8_192)]
    pub ack_fusion_queue_max: usize,
}

impl FusionConfig {
    /// Bytes of parameters of one cursor row.
    pub const ACK_ROW_BYTES: usize = 44;

    /// Memory for the lease registry, in bytes.
    pub fn ack_registry_bytes_max(&self) -> usize {
        self.ack_registry_mib_max.saturating_mul(1024 * 1024)
    }

    /// A default that is more than `connections` is lowered to them.
    pub(super) fn fit_default_shards(&mut self, connections: u32) {
        self.ack_fusion_shards = self.ack_fusion_shards.min(connections as usize).max(1);
    }

    /// What is set and has no effect beside the rest.
    pub(super) fn warnings(&self) -> Vec<String> {
        if self.ack_serial {
            let idle = [("--ack-registry", self.ack_registry), ("--ack-fusion", self.ack_fusion)];
            let idle: Vec<&str> = idle.into_iter().filter_map(|(flag, on)| on.then_some(flag)).collect();
            let and = if idle.is_empty() { String::new() } else { format!("; without effect: {}", idle.join(", ")) };
            return vec![format!("--ack-serial settles one ack at a time, which is slow{and}")];
        }
        if self.ack_fusion && !self.ack_registry {
            return vec!["--ack-fusion is without effect while --ack-registry is off".to_owned()];
        }
        Vec::new()
    }

    /// `connections` are those that flushes commit on.
    pub(super) fn validate(&self, connections: u32) -> Result<(), ConfigError> {
        if self.ack_fusion_shards > 256 {
            return Err(ConfigError::invalid("ack-fusion-shards", self.ack_fusion_shards, "must be at most 256"));
        }
        if self.ack_fusion_shards > connections as usize {
            return Err(ConfigError::invalid(
                "ack-fusion-shards",
                self.ack_fusion_shards,
                "must not be above --pool-size, or not every shard could have a commit in flight",
            ));
        }
        if self.ack_fusion_bytes_max < Self::ACK_ROW_BYTES {
            let why = format!("must be at least {}, or no row would fit", Self::ACK_ROW_BYTES);
            return Err(ConfigError::invalid("ack-fusion-bytes-max", self.ack_fusion_bytes_max, why));
        }
        if self.ack_fusion_queue_max < self.ack_fusion_rows_max {
            return Err(ConfigError::invalid(
                "ack-fusion-queue-max",
                self.ack_fusion_queue_max,
                "must be at least --ack-fusion-rows-max, or no commit could ever be full",
            ));
        }
        Ok(())
    }
}
