//! Logs.

use clap::Args;

use super::boolean;

/// What is logged, and in which shape.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogConfig {
    /// Filter, such as info or info,regent::http=debug
    #[arg(long = "log-level", env = "RUST_LOG", value_name = "FILTER", default_value = "info")]
    pub level: String,

    /// One JSON object per line instead of text
    #[arg(long = "log-json", env = "QUEEN_LOG_JSON", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub json: bool,
}
