//! What can go wrong with the embedded database, in words for an operator.

use std::io;
use std::path::{Path, PathBuf};

/// Why the embedded PostgreSQL could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// Another process holds the data directory.
    #[error("data directory {dir} is in use by another broker ({holder}); give this one its own --data-dir")]
    DataDirInUse {
        /// The data directory.
        dir: PathBuf,
        /// What the holder wrote into the lock file.
        holder: String,
    },
    /// No usable PostgreSQL programs on this machine.
    #[error(
        "no PostgreSQL {wanted} found{looked}. Install it (Debian, Ubuntu: apt-get install postgresql; Fedora, RHEL: \
         dnf install postgresql-server; macOS: brew install postgresql), name its directory with --pg-bin-dir, or use \
         a database that runs elsewhere with --database-url"
    )]
    NoPrograms {
        /// The versions that would do.
        wanted: String,
        /// What was found instead, if anything.
        looked: String,
    },
    /// PostgreSQL refuses to run as root, and there is no account to run it as.
    #[error(
        "PostgreSQL does not run as root and there is no OS user 'postgres' or 'nobody'; start the broker as another user"
    )]
    NoAccount,
    /// The user that the broker runs as has no name.
    #[error("user id {uid} has no name in the password database, and PostgreSQL needs one")]
    NamelessUser {
        /// The numeric id.
        uid: u32,
    },
    /// The account that runs PostgreSQL cannot get at the cluster.
    #[error(
        "OS user '{account}', who runs PostgreSQL, cannot enter {path}; check the permissions of it and its parents"
    )]
    Unreachable {
        /// The account.
        account: String,
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds something that is no cluster.
    #[error("{path} is neither empty nor a PostgreSQL cluster")]
    NotACluster {
        /// The directory.
        path: PathBuf,
    },
    /// A helper program failed.
    #[error("{program} failed: {output}")]
    Program {
        /// initdb or postgres.
        program: &'static str,
        /// The end of what it printed.
        output: String,
    },
    /// The server ended while it was starting.
    #[error("PostgreSQL did not start ({status}); the end of {log}:\n{tail}")]
    DidNotStart {
        /// How it ended.
        status: String,
        /// Its log file.
        log: PathBuf,
        /// The last lines of that.
        tail: String,
    },
    /// The server took too long to accept connections.
    #[error("PostgreSQL was not ready after {seconds} s; see {log}")]
    NotReady {
        /// How long it was given.
        seconds: u64,
        /// Its log file.
        log: PathBuf,
    },
    /// Processes of a previous run would not end.
    #[error("PostgreSQL processes of a previous run do not end: {pids:?} on {path}")]
    StillRunning {
        /// Their ids.
        pids: Vec<i32>,
        /// The cluster.
        path: PathBuf,
    },
    /// The server had to be killed.
    #[error("PostgreSQL did not stop in time and was killed; it recovers at its next start")]
    Killed,
    /// A file operation failed.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was attempted.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Adds what was attempted, and on what, to an I/O error.
pub(super) trait Attempt<T> {
    fn attempt(self, what: &'static str, path: &Path) -> Result<T, EmbeddedError>;
}

impl<T> Attempt<T> for io::Result<T> {
    fn attempt(self, what: &'static str, path: &Path) -> Result<T, EmbeddedError> {
        self.map_err(|source| EmbeddedError::File { what, path: path.to_owned(), source })
    }
}
