//! Encryption at rest, and the switches for protection that this version does not give.

use clap::Args;

use super::secret::{EncryptionKey, Secret};
use super::{ConfigError, boolean};

/// Encryption at rest; authentication and tenancy, which are refused.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Encryption")]
pub struct SecurityConfig {
    /// AES-256 key for queues with encryptionEnabled, as 64 hex characters.
    /// With the broker's own database one is made at first start and kept in --data-dir
    #[arg(long = "encryption-key", env = "QUEEN_ENCRYPTION_KEY", value_name = "HEX")]
    pub encryption_key_hex: Option<Secret>,

    /// The key that is in force: given, or made and kept by the embedded database.
    #[arg(skip)]
    pub encryption_key: Option<EncryptionKey>,

    /// Refused: this version does not separate tenants.
    #[arg(long, env = "QUEEN_TENANCY_HEADER", value_name = "BOOL", default_value = "false", hide = true,
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub tenancy_header: bool,

    /// Refused: this version does not authenticate.
    #[arg(long, env = "JWT_ENABLED", value_name = "BOOL", default_value = "false", hide = true,
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub jwt_enabled: bool,
}

impl SecurityConfig {
    pub(super) fn resolve(&mut self) -> Result<(), ConfigError> {
        if let Some(text) = &self.encryption_key_hex {
            self.encryption_key = Some(EncryptionKey::parse(text.expose()).map_err(ConfigError::EncryptionKey)?);
        }
        Ok(())
    }

    /// A broker that was told to keep somebody out must not serve everybody instead.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.jwt_enabled {
            return Err(ConfigError::Unprotected { variable: "JWT_ENABLED", missing: "authenticate requests" });
        }
        if self.tenancy_header {
            return Err(ConfigError::Unprotected { variable: "QUEEN_TENANCY_HEADER", missing: "separate tenants" });
        }
        Ok(())
    }
}
