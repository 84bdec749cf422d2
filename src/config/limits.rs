//! Bounds on what the broker takes on at once (design §6: bounded queues everywhere).

use clap::Args;

use super::ConfigError;

/// Admission of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitsConfig {
    /// Requests that may wait their turn; the next is answered with 429 (an ack: with an error per item)
    #[arg(long, env = "REGENT_REQUESTS_WAITING_MAX", value_name = "N", default_value_t = 8_192)]
    pub requests_waiting_max: usize,

    /// Memory for the bodies of pushes that work or wait, and as much for acks, in MiB; beyond it a push is answered with 429, an
    /// ack with an error per item
    #[arg(long = "request-memory-mb", env = "REGENT_REQUEST_MEMORY_MB", value_name = "MIB", default_value_t = 512)]
    pub request_mib_max: usize,
}

impl LimitsConfig {
    /// Memory for the bodies of requests, in bytes.
    pub fn request_bytes_max(&self) -> usize {
        self.request_mib_max.saturating_mul(1024 * 1024)
    }

    pub(super) fn validate(&self, body_bytes_max: usize) -> Result<(), ConfigError> {
        if self.request_bytes_max() < body_bytes_max {
            return Err(ConfigError::invalid(
                "request-memory-mb",
                self.request_mib_max,
                "must have room for one body of --body-bytes-max",
            ));
        }
        Ok(())
    }
}
