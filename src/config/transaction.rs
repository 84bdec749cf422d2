//! The transaction path: bundles that share commits.

use clap::Args;

use super::{ConfigError, boolean};

/// How transactions reach the database.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Transactions")]
pub struct TransactionConfig {
    /// Commit independent transactions together. Answers are the same without
    #[arg(long = "transaction-fusion", env = "REGENT_TRANSACTION_FUSION", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub fusion: bool,

    /// Shared commits of transactions in flight at once
    #[arg(long = "transaction-lanes", env = "REGENT_TRANSACTION_LANES", value_name = "N", default_value_t = lanes_default())]
    pub lanes: usize,

    /// Most transactions in one shared commit
    #[arg(
        long = "transaction-bundles-max",
        env = "REGENT_TRANSACTION_BUNDLES_MAX",
        value_name = "N",
        default_value_t = 256
    )]
    pub bundles_max: usize,
}

fn lanes_default() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2).min(4))
}

impl TransactionConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.lanes > 64 {
            return Err(ConfigError::invalid("transaction-lanes", self.lanes, "must be at most 64"));
        }
        Ok(())
    }
}
