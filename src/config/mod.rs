//! Everything that can be set. One file per section; each setting is a command-line flag and an environment variable.
//!
//! The flag wins over the variable, the variable over the default. How variables are read is in `environment.rs`. What
//! does not fit together is refused here, once, at boot; the rest of the broker trusts what it is given.

mod autopilot;
mod environment;
mod fusion;
mod http;
mod limits;
mod log;
mod pop;
mod postgres;
mod push;
mod report;
mod retention;
mod secret;
mod security;
mod spool;
mod statistics;
#[cfg(test)]
mod tests;
mod traces;
mod transaction;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser};

use report::BootReport;

pub use autopilot::{AutopilotConfig, PopAutopilot};
pub use environment::Environment;
pub use fusion::FusionConfig;
pub use http::HttpConfig;
pub use limits::LimitsConfig;
pub use log::LogConfig;
pub use pop::{PopConfig, SubscriptionMode};
pub use postgres::{Database, PostgresConfig};
pub use push::PushConfig;
pub use retention::RetentionConfig;
pub use secret::{EncryptionKey, Secret};
pub use security::SecurityConfig;
pub use spool::SpoolConfig;
pub use statistics::StatisticsConfig;
pub use traces::TracesConfig;
pub use transaction::TransactionConfig;

const AFTER_HELP: &str = "\
Without --database-url (or a --pg-... connection flag) the broker runs a PostgreSQL of its
own under --data-dir. It needs the server programs of PostgreSQL 15 or newer (on Debian:
apt-get install postgresql), and starts, watches and stops that server itself.

Each flag can be given as the environment variable in its brackets instead; the flag wins.
An empty variable counts as unset. Booleans are true/false, 1/0, yes/no, on/off.

This version neither authenticates nor separates tenants. With JWT_ENABLED=true or
QUEEN_TENANCY_HEADER=true it refuses to start, rather than serve everybody.

Examples:
  Try it: own database under ./data, listening on http://127.0.0.1:6632
    regent
  Serve other machines, and keep the data elsewhere
    regent --host 0.0.0.0 --data-dir /srv/regent
  Use a database that somebody else runs
    regent --database-url postgres://regent:secret@db:5432/regent
  The same with the variables of an existing deployment
    PG_HOST=db PG_USER=queen PG_PASSWORD=secret DB_POOL_SIZE=60 regent
  Log more
    RUST_LOG=info,regent::http=debug regent";

/// Why the configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line is wrong, or asks for help or the version: print it, exit with its code.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// A boolean variable holds something else.
    #[error("{name}=\"{value}\" is not a boolean (expected true/false, 1/0, yes/no, on/off)")]
    NotABoolean {
        /// The variable.
        name: String,
        /// What it holds.
        value: String,
    },
    /// A value is out of range, or does not fit the others.
    #[error("--{flag} ({variable}) is {value}: {why}")]
    Invalid {
        /// The flag, without dashes.
        flag: String,
        /// The environment variable of the same setting.
        variable: String,
        /// Its value; dots where it may be secret.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// A protection is asked for that this version does not give.
    #[error("{variable}=true, but this version does not {missing}; it refuses to start rather than serve everybody")]
    Unprotected {
        /// What asks for it.
        variable: &'static str,
        /// What is not done.
        missing: &'static str,
    },
    /// The encryption key is malformed. Never says the key.
    #[error("{0}")]
    EncryptionKey(&'static str),
}

impl ConfigError {
    fn invalid(flag: &str, value: impl ToString, why: impl Into<String>) -> Self {
        let variable = environment::variable_of(flag);
        Self::Invalid { flag: flag.to_owned(), variable, value: value.to_string(), why: why.into() }
    }
}

/// The whole configuration, defaults filled in and checked.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "regent",
    version,
    about = "A message broker on PostgreSQL that speaks the Queen MQ 1.x HTTP protocol",
    after_help = AFTER_HELP,
    max_term_width = 120,
    args_override_self = true
)]
pub struct Config {
    /// Directory for what this broker keeps on disk: its own database, generated keys. Never shared
    #[arg(long, env = "REGENT_DATA_DIR", value_name = "DIR", default_value = "./data")]
    pub data_dir: PathBuf,

    /// Name of this broker among others, in logs and to its peers [default: a random one]
    #[arg(long, env = "QUEEN_SERVER_ID", value_name = "NAME", default_value = "", hide_default_value = true)]
    pub server_id: String,

    /// The listener.
    #[command(flatten)]
    pub http: HttpConfig,
    /// The database and its pools.
    #[command(flatten)]
    pub postgres: PostgresConfig,
    /// The push path.
    #[command(flatten)]
    pub push: PushConfig,
    /// The pop path.
    #[command(flatten)]
    pub pop: PopConfig,
    /// The ack path.
    #[command(flatten)]
    pub fusion: FusionConfig,
    /// The transaction path.
    #[command(flatten)]
    pub transaction: TransactionConfig,
    /// The disk spool.
    #[command(flatten)]
    pub spool: SpoolConfig,
    /// Deletion in the background.
    #[command(flatten)]
    pub retention: RetentionConfig,
    /// Admission.
    #[command(flatten)]
    pub limits: LimitsConfig,
    /// Encryption at rest.
    #[command(flatten)]
    pub security: SecurityConfig,
    /// Statistics.
    #[command(flatten)]
    pub statistics: StatisticsConfig,
    /// Logs.
    #[command(flatten)]
    pub log: LogConfig,
    /// Traces.
    #[command(flatten)]
    pub traces: TracesConfig,

    /// What to say about the configuration once the log works.
    #[arg(skip)]
    report: BootReport,
}

impl Config {
    /// Reads the command line and the environment of this process.
    ///
    /// # Errors
    /// See [`ConfigError`]; asking for help or the version is one.
    pub fn from_process() -> Result<Self, ConfigError> {
        Self::from_parts(std::env::args_os(), &Environment::of_process())
    }

    /// Reads `args` (the program name first) and `env`, and nothing else.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn from_parts<A>(args: impl IntoIterator<Item = A>, env: &Environment) -> Result<Self, ConfigError>
    where
        A: Into<OsString>,
    {
        let documented = Self::command();
        let mut command = environment::command(&documented);
        let read = environment::read(&documented, env)?;
        let mut args = args.into_iter().map(Into::into);
        let program = args.next().unwrap_or_else(|| "regent".into());
        let line = std::iter::once(program).chain(read.arguments).chain(args);
        let matches = command.try_get_matches_from_mut(line)?;
        let mut config = Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        refuse_zeros(&documented, &matches)?;
        if matches.value_source("ack_fusion_shards") == Some(ValueSource::DefaultValue) {
            config.fusion.fit_default_shards(config.postgres.pool_size);
        }
        config.resolve()?;
        config.validate()?;
        let warnings = read.warnings.into_iter().chain(config.fusion.warnings()).collect();
        config.report = BootReport::new(&documented, &matches, warnings);
        Ok(config)
    }

    /// Defaults, the database at `url`, and any free port on the loopback address: a broker for a test.
    ///
    /// # Errors
    /// `url` is no PostgreSQL URL.
    pub fn with_database(url: &str) -> Result<Self, ConfigError> {
        Self::from_parts(["regent", "--port", "0", "--database-url", url], &Environment::default())
    }

    /// Defaults, an embedded database under `data_dir`, and any free port on the loopback address.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn with_data_dir(data_dir: impl Into<PathBuf>) -> Result<Self, ConfigError> {
        let data_dir = data_dir.into().into_os_string();
        let args = ["regent".into(), "--port".into(), "0".into(), "--data-dir".into(), data_dir];
        Self::from_parts::<OsString>(args, &Environment::default())
    }

    /// Takes the database that the broker runs itself, and its key unless one was given.
    pub fn use_embedded(&mut self, url: &str, key: EncryptionKey) {
        self.postgres.database_url = Some(Secret::from(url));
        // Its socket is out of reach for others, and speaks no TLS.
        self.postgres.pg_use_ssl = false;
        self.postgres.pg_ssl_root_cert = None;
        self.security.encryption_key.get_or_insert(key);
    }

    /// Logs what was set, what looks like a mistake in it, and what came of it.
    pub fn log_boot(&self) {
        self.report.log();
        let database = match self.postgres.database() {
            Database::Embedded => "embedded",
            Database::Outside(_) => "outside",
        };
        let connections_max = self.postgres.connections_max();
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            server_id = self.server_id,
            database,
            connections_max,
            "boot"
        );
    }

    fn resolve(&mut self) -> Result<(), ConfigError> {
        self.postgres.resolve();
        self.security.resolve()?;
        self.statistics.resolve();
        if self.server_id.is_empty() {
            self.server_id = format!("regent-{:08x}", rand::random::<u32>());
        }
        Ok(())
    }

    /// Relations between settings; a section checks its own.
    fn validate(&self) -> Result<(), ConfigError> {
        self.http.validate()?;
        self.postgres.validate()?;
        self.push.validate()?;
        self.pop.autopilot.validate()?;
        self.fusion.validate(self.postgres.pool_size)?;
        self.transaction.validate()?;
        self.limits.validate(self.http.body_bytes_max)?;
        self.security.validate()?;
        self.retention.validate()?;
        self.statistics.validate()?;
        self.traces.validate()?;
        if self.push.fusion_bytes_max > self.limits.request_bytes_max() {
            return Err(ConfigError::invalid(
                "push-fusion-bytes-max",
                self.push.fusion_bytes_max,
                "must not be above --request-memory-mb, or no commit could ever be full",
            ));
        }
        Ok(())
    }
}

/// One for every two cores, at most 8: commits and statements in flight beyond that only become smaller.
fn per_two_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2).min(8))
}

/// Reads a boolean as the published broker does (security-operations §13.1).
fn boolean(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err("expected true/false, 1/0, yes/no, on/off".to_owned()),
    }
}

/// A zero from the environment was raised to one; typed by hand it is a mistake to be told about.
fn refuse_zeros(documented: &Command, matches: &ArgMatches) -> Result<(), ConfigError> {
    for arg in documented.get_arguments().filter(|arg| environment::counts_above_zero(arg)) {
        let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten().last();
        if raw.and_then(|raw| raw.to_str()).and_then(|text| text.parse::<u64>().ok()) == Some(0) {
            return Err(ConfigError::invalid(arg.get_long().unwrap_or_default(), 0, "must be at least 1"));
        }
    }
    Ok(())
}
