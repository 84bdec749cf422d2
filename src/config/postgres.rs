//! Which database, and how many connections to it.

use std::path::PathBuf;

use clap::Args;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::secret::Secret;
use super::{ConfigError, boolean};

/// Which database the broker uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Database {
    /// One that somebody else runs, by connection URL.
    Outside(Secret),
    /// A cluster under the data directory that the broker runs itself.
    Embedded,
}

/// The database and the connections to it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "PostgreSQL")]
pub struct PostgresConfig {
    /// Connection URL, such as postgres://user:password@host:5432/database. Wins over all --pg-... flags.
    /// Without it and without them the broker runs its own PostgreSQL under --data-dir
    #[arg(long, env = "DATABASE_URL", value_name = "URL")]
    pub database_url: Option<Secret>,

    /// Server name or address [default: localhost, if any other --pg-... connection flag is given]
    #[arg(long, env = "PG_HOST", value_name = "HOST")]
    pub pg_host: Option<String>,

    /// Server port [default: 5432]
    #[arg(long, env = "PG_PORT", value_name = "PORT")]
    pub pg_port: Option<u16>,

    /// Role to connect as [default: postgres]
    #[arg(long, env = "PG_USER", value_name = "NAME")]
    pub pg_user: Option<String>,

    /// Its password [default: postgres]
    #[arg(long, env = "PG_PASSWORD", value_name = "TEXT")]
    pub pg_password: Option<Secret>,

    /// Database name [default: postgres]
    #[arg(long, env = "PG_DATABASE", value_name = "NAME")]
    pub pg_database: Option<String>,

    /// Use TLS to reach the server, and nothing else. An sslmode of disable, require, verify-ca or verify-full in
    /// --database-url wins
    #[arg(long, env = "PG_USE_SSL", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub pg_use_ssl: bool,

    /// A certificate authority to trust beside the public ones: PEM text, not a path ("\n" may stand for a line
    /// break). The --pg-... flags need --pg-use-ssl with it; --database-url does not
    #[arg(long, env = "PG_SSL_ROOT_CERT", value_name = "PEM")]
    pub pg_ssl_root_cert: Option<String>,

    /// With TLS and no certificate authority given: false accepts any certificate, which stops no attacker
    #[arg(long, env = "PG_SSL_REJECT_UNAUTHORIZED", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub pg_ssl_reject_unauthorized: bool,

    /// Directory with initdb and postgres (15 or newer) for the broker's own database [default: searched for]
    #[arg(long, env = "PG_BIN_DIR", value_name = "DIR")]
    pub pg_bin_dir: Option<PathBuf>,

    /// Apply the schema migrations at boot; false leaves that to an operator with more rights, and refuses a schema
    /// that is not the one of this version
    #[arg(long, env = "QUEEN_APPLY_SCHEMA", value_name = "BOOL", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub apply_schema: bool,

    /// Connections for everything that must be durable when it is answered
    #[arg(long, env = "DB_POOL_SIZE", value_name = "N", default_value_t = 24)]
    pub pool_size: u32,

    /// Connections for lease claims, which commit asynchronously (a claim lost in a crash only redelivers)
    #[arg(long, env = "REGENT_CLAIM_POOL_SIZE", value_name = "N", default_value_t = 6)]
    pub claim_pool_size: u32,

    /// How long a request waits for a connection before it is answered with 503, in milliseconds
    #[arg(long, env = "REGENT_POOL_CHECKOUT_TIMEOUT_MS", value_name = "MS", default_value_t = 5_000)]
    pub pool_checkout_timeout_ms: u64,

    /// How long one statement may take before the call is abandoned and cancelled, in milliseconds
    #[arg(long, env = "QUEEN_STMT_TIMEOUT_MS", value_name = "MS", default_value_t = 30_000)]
    pub statement_timeout_ms: u64,
}

impl PostgresConfig {
    /// Which database this configuration names.
    pub fn database(&self) -> Database {
        match &self.database_url {
            Some(url) => Database::Outside(url.clone()),
            None => Database::Embedded,
        }
    }

    /// Connections that one broker may hold at once: its pools, and the one that listens for notifications.
    pub fn connections_max(&self) -> u32 {
        self.pool_size.saturating_add(self.claim_pool_size).saturating_add(1)
    }

    /// The certificate authority as PEM text with real line breaks.
    pub fn root_cert_pem(&self) -> Option<String> {
        self.pg_ssl_root_cert.as_ref().map(|pem| pem.replace("\\n", "\n"))
    }

    /// Turns the `PG_*` parts into a URL, where there are any and no URL was given.
    pub(super) fn resolve(&mut self) {
        let parts_given = self.pg_host.is_some()
            || self.pg_port.is_some()
            || self.pg_user.is_some()
            || self.pg_password.is_some()
            || self.pg_database.is_some();
        if self.database_url.is_some() || !parts_given {
            return;
        }
        let escape = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let host = self.pg_host.as_deref().unwrap_or("localhost");
        // A path is the directory of a Unix socket, as for libpq; a bare IPv6 address needs its brackets.
        let host = match host {
            host if host.starts_with('/') => escape(host),
            host if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
            host => host.to_owned(),
        };
        // There is no mode between: what is asked for is what happens (security-operations §5).
        let sslmode = match (self.pg_use_ssl, &self.pg_ssl_root_cert, self.pg_ssl_reject_unauthorized) {
            (false, _, _) => "disable",
            (true, None, false) => "require",
            (true, _, _) => "verify-full",
        };
        self.database_url = Some(Secret::from(format!(
            "postgres://{}:{}@{host}:{}/{}?sslmode={sslmode}",
            escape(self.pg_user.as_deref().unwrap_or("postgres")),
            escape(self.pg_password.as_ref().map_or("postgres", Secret::expose)),
            self.pg_port.unwrap_or(5432),
            escape(self.pg_database.as_deref().unwrap_or("postgres")),
        )));
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.database_url {
            let scheme = url.expose().split_once("://").map(|(scheme, _)| scheme);
            if !matches!(scheme, Some("postgres" | "postgresql")) {
                // The value is not repeated: it may hold a password.
                return Err(ConfigError::invalid(
                    "database-url",
                    "...",
                    "must begin with postgres:// or postgresql://",
                ));
            }
        }
        if let Some(pem) = self.root_cert_pem() {
            check_pem(&pem).map_err(|why| ConfigError::invalid("pg-ssl-root-cert", "...", why))?;
        }
        Ok(())
    }
}

/// Whether `pem` is one or more whole certificate blocks. It is a usual mistake to give a path instead.
fn check_pem(pem: &str) -> Result<(), &'static str> {
    use base64::Engine;
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let mut blocks = pem.split(BEGIN);
    blocks.next();
    let mut count = 0;
    for block in blocks {
        let Some((body, _)) = block.split_once(END) else {
            return Err("holds a certificate block without its END line");
        };
        let body: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        match base64::engine::general_purpose::STANDARD.decode(body) {
            Ok(der) if !der.is_empty() => count += 1,
            _ => return Err("holds a certificate block that is not base64"),
        }
    }
    if count == 0 { Err("must be PEM text with a BEGIN CERTIFICATE line, not a path") } else { Ok(()) }
}
