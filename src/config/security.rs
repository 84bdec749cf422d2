//! Encryption at rest, tenancy and token authentication.

use clap::Args;

use super::secret::{EncryptionKey, Secret};
use super::{ConfigError, boolean};

/// Encryption at rest and tenancy.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Encryption and tenancy")]
pub struct SecurityConfig {
    /// AES-256 key for queues with encryptionEnabled, as 64 hex characters.
    /// With the broker's own database one is made at first start and kept in --data-dir
    #[arg(long = "encryption-key", env = "QUEEN_ENCRYPTION_KEY", value_name = "HEX")]
    pub encryption_key_hex: Option<Secret>,

    /// The key that is in force: given, or made and kept by the embedded database.
    #[arg(skip)]
    pub encryption_key: Option<EncryptionKey>,

    /// Take the tenant of a request from its x-queen-tenant header. Needs --kv-trusted-proxy
    #[arg(long, env = "QUEEN_TENANCY_HEADER", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub tenancy_header: bool,

    /// Confirms that a proxy in front removes x-queen-tenant from what clients send
    #[arg(long, env = "QUEEN_KV_TRUSTED_PROXY", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub kv_trusted_proxy: bool,
}

impl SecurityConfig {
    pub(super) fn resolve(&mut self) -> Result<(), ConfigError> {
        if let Some(text) = &self.encryption_key_hex {
            self.encryption_key = Some(EncryptionKey::parse(text.expose()).map_err(ConfigError::EncryptionKey)?);
        }
        if self.tenancy_header && !self.kv_trusted_proxy {
            return Err(ConfigError::invalid(
                "tenancy-header",
                "true",
                "needs --kv-trusted-proxy (QUEEN_KV_TRUSTED_PROXY): without a proxy that strips the header, \
                 any client could name any tenant",
            ));
        }
        Ok(())
    }
}

/// Bearer tokens (security-operations §2).
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Authentication (JWT)")]
pub struct AuthConfig {
    /// Require a bearer token
    #[arg(long, env = "JWT_ENABLED", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub jwt_enabled: bool,

    /// Accepted algorithm: HS256, HS384, HS512, RS256, RS384, RS512, EdDSA or auto
    #[arg(long, env = "JWT_ALGORITHM", value_name = "NAME", default_value = "HS256")]
    pub jwt_algorithm: String,

    /// Key of the HS algorithms, raw bytes
    #[arg(long, env = "JWT_SECRET", value_name = "TEXT")]
    pub jwt_secret: Option<Secret>,

    /// RSA or Ed25519 public key, PEM text
    #[arg(long, env = "JWT_PUBLIC_KEY", value_name = "PEM")]
    pub jwt_public_key: Option<String>,

    /// Where to fetch public keys
    #[arg(long, env = "JWT_JWKS_URL", value_name = "URL")]
    pub jwt_jwks_url: Option<String>,

    /// How often to fetch them again, in seconds
    #[arg(long, env = "JWT_JWKS_REFRESH_INTERVAL", value_name = "S", default_value_t = 3600)]
    pub jwt_jwks_refresh_interval_s: u64,

    /// How long one fetch may take, in milliseconds
    #[arg(long, env = "JWT_JWKS_TIMEOUT_MS", value_name = "MS", default_value_t = 5_000)]
    pub jwt_jwks_timeout_ms: u64,

    /// Required issuer; unset accepts any
    #[arg(long, env = "JWT_ISSUER", value_name = "TEXT")]
    pub jwt_issuer: Option<String>,

    /// Required audience; unset accepts any
    #[arg(long, env = "JWT_AUDIENCE", value_name = "TEXT")]
    pub jwt_audience: Option<String>,

    /// Allowed difference between clocks, in seconds
    #[arg(long, env = "JWT_CLOCK_SKEW", value_name = "S", default_value_t = 30)]
    pub jwt_clock_skew_s: u64,

    /// Claim that holds one role
    #[arg(long, env = "JWT_ROLES_CLAIM", value_name = "CLAIM", default_value = "role")]
    pub jwt_roles_claim: String,

    /// Claim that holds a list of roles
    #[arg(long, env = "JWT_ROLES_ARRAY_CLAIM", value_name = "CLAIM", default_value = "roles")]
    pub jwt_roles_array_claim: String,

    /// Role value that may do everything
    #[arg(long, env = "JWT_ROLE_ADMIN", value_name = "TEXT", default_value = "admin")]
    pub jwt_role_admin: String,

    /// Role value that may produce, consume and read
    #[arg(long, env = "JWT_ROLE_READ_WRITE", value_name = "TEXT", default_value = "read-write")]
    pub jwt_role_read_write: String,

    /// Role value that may read
    #[arg(long, env = "JWT_ROLE_READ_ONLY", value_name = "TEXT", default_value = "read-only")]
    pub jwt_role_read_only: String,

    /// Role value that may produce
    #[arg(long, env = "JWT_ROLE_WRITE_ONLY", value_name = "TEXT", default_value = "write-only")]
    pub jwt_role_write_only: String,

    /// Paths that need no token, separated by commas
    #[arg(
        long,
        env = "JWT_SKIP_PATHS",
        value_name = "PATHS",
        default_value = "/health,/metrics/prometheus,/metrics,/"
    )]
    pub jwt_skip_paths: String,
}

impl AuthConfig {
    /// Every algorithm that may be asked for.
    pub const ALGORITHMS: [&str; 8] = ["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "EdDSA", "auto"];

    /// The paths that need no token.
    pub fn skip_paths(&self) -> impl Iterator<Item = &str> {
        self.jwt_skip_paths.split(',').map(str::trim).filter(|path| !path.is_empty())
    }

    /// The key material must fit the algorithm (security-operations §2.1).
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if !self.jwt_enabled {
            return Ok(());
        }
        let invalid = |why: &str| Err(ConfigError::invalid("jwt-algorithm", &self.jwt_algorithm, why));
        let public = self.jwt_public_key.is_some() || self.jwt_jwks_url.is_some();
        match self.jwt_algorithm.as_str() {
            "HS256" | "HS384" | "HS512" | "auto" if self.jwt_secret.is_none() && !public => {
                invalid("needs JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL, and none is set")
            }
            "RS256" | "RS384" | "RS512" | "EdDSA" if !public => {
                invalid("needs JWT_PUBLIC_KEY or JWT_JWKS_URL, and neither is set")
            }
            known if Self::ALGORITHMS.contains(&known) => Ok(()),
            _ => invalid("is none of HS256, HS384, HS512, RS256, RS384, RS512, EdDSA, auto"),
        }
    }
}
