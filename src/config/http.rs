//! The HTTP listener.

use std::net::Ipv6Addr;

use clap::Args;

use super::ConfigError;

/// Where the broker listens and how much of a request it reads.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub struct HttpConfig {
    /// Address to listen on, without a port. Use 0.0.0.0 to serve other machines
    #[arg(long, env = "QUEEN_BIND_ADDR", value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,

    /// TCP port to listen on; 0 takes any free one
    #[arg(long, env = "PORT", value_name = "PORT", default_value_t = 6632)]
    pub port: u16,

    /// Largest request body in bytes; a larger one is answered with 413
    #[arg(long = "body-bytes-max", env = "QUEEN_MAX_BODY_BYTES", value_name = "BYTES", default_value_t = 64 * 1024 * 1024)]
    pub body_bytes_max: usize,

    /// How long a shutdown may drain before what is in flight is dropped, in milliseconds
    #[arg(long = "drain-ms-max", env = "REGENT_DRAIN_MS_MAX", value_name = "MS", default_value_t = 30_000)]
    pub drain_ms_max: u64,
}

impl HttpConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let bare = self.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&self.host);
        if bare.contains(':') && bare.parse::<Ipv6Addr>().is_err() {
            return Err(ConfigError::invalid(
                "host",
                &self.host,
                "must be an address or name without a port (see --port)",
            ));
        }
        if self.host.trim().is_empty() {
            return Err(ConfigError::invalid("host", &self.host, "must not be empty"));
        }
        Ok(())
    }
}
