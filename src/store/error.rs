//! What can go wrong between the broker and PostgreSQL, sorted by what the caller may do about it.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use metrics::{Histogram, histogram};
use thiserror::Error;

use crate::metrics::{OTHER, STATEMENT_SECONDS_TOTAL, STATEMENTS, STORE_ERRORS};

/// A failed statement, commit or checkout.
#[derive(Debug, Error)]
pub enum StoreError {
    /// No connection: refused, lost before anything was sent, or no pooled one within the checkout timeout.
    /// Nothing happened.
    #[error("no database connection")]
    Unavailable(#[source] sqlx::Error),
    /// The connection broke while a statement or commit was under way: it may have happened or not.
    #[error("connection lost during {during}")]
    OutcomeUnknown {
        /// What was sent.
        during: &'static str,
        /// The transport's error.
        #[source]
        source: sqlx::Error,
    },
    /// PostgreSQL refused the statement; the transaction was rolled back.
    #[error("{source}")]
    Refused {
        /// SQLSTATE, five characters, empty if none was given.
        sqlstate: String,
        /// The server's error.
        #[source]
        source: sqlx::Error,
    },
    /// Somebody else made a partition that this transaction was about to make with its messages. It was rolled back.
    #[error("a partition was made by somebody else meanwhile")]
    Overtaken,
    /// A stored row breaks an invariant (a torn hash column, a frame that does not decode).
    #[error("corrupt row in {table}: {what}")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// Which rule it breaks, with the key.
        what: String,
    },
}

impl StoreError {
    /// Classifies a driver error met while doing `during`.
    pub fn from_sqlx(during: &'static str, error: sqlx::Error) -> StoreError {
        match error {
            sqlx::Error::Database(ref db) => {
                let sqlstate = db.code().map(|c| c.into_owned()).unwrap_or_default();
                // 57P01-57P03: the server went away under the statement. 53300: too many connections.
                match sqlstate.as_str() {
                    "57P01" | "57P02" => StoreError::OutcomeUnknown { during, source: error },
                    "57P03" | "53300" => StoreError::Unavailable(error),
                    _ => StoreError::Refused { sqlstate, source: error },
                }
            }
            sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Configuration(_) => {
                StoreError::Unavailable(error)
            }
            sqlx::Error::Io(ref io)
                if matches!(
                    io.kind(),
                    std::io::ErrorKind::ConnectionRefused
                        | std::io::ErrorKind::NotFound
                        | std::io::ErrorKind::AddrNotAvailable
                ) =>
            {
                StoreError::Unavailable(error)
            }
            source => StoreError::OutcomeUnknown { during, source },
        }
    }

    /// Counts it by kind.
    pub(crate) fn count(&self) {
        ERRORS.fetch_add(1, Ordering::Relaxed);
        let kind = match self {
            StoreError::Unavailable(_) => "unavailable",
            StoreError::OutcomeUnknown { .. } => "outcome_unknown",
            StoreError::Refused { .. } => "refused",
            StoreError::Overtaken => "overtaken",
            StoreError::Corrupt { .. } => "corrupt",
        };
        metrics::counter!(STORE_ERRORS, "kind" => kind).increment(1);
    }

    /// A statement that was sent and never answered.
    pub fn no_answer(during: &'static str) -> StoreError {
        let source = sqlx::Error::Io(std::io::Error::from(std::io::ErrorKind::TimedOut));
        StoreError::OutcomeUnknown { during, source }
    }

    /// Whether the same call may simply be sent again: nothing was committed and the cause is passing
    /// (SQLSTATE classes 08, 53, 57, 58 and `40001`, `40P01`; `spec/push-pop.md` §2.9).
    pub fn is_transient(&self) -> bool {
        match self {
            StoreError::Unavailable(_) | StoreError::Overtaken => true,
            StoreError::OutcomeUnknown { .. } | StoreError::Corrupt { .. } => false,
            StoreError::Refused { sqlstate, .. } => {
                matches!(sqlstate.as_str(), "40001" | "40P01")
                    || ["08", "53", "57", "58"].iter().any(|class| sqlstate.starts_with(class))
            }
        }
    }

    /// What to show a client: the server's own words where it spoke, without the driver's.
    pub fn message(&self) -> String {
        match self {
            StoreError::Refused { source: sqlx::Error::Database(db), .. } => db.message().to_owned(),
            other => other.to_string(),
        }
    }

    /// Whether another transaction was in the way and the same call, sent again, would find it gone (`40001`, `40P01`).
    pub fn is_conflict(&self) -> bool {
        matches!(self, StoreError::Refused { sqlstate, .. } if matches!(sqlstate.as_str(), "40001" | "40P01"))
    }

    /// Whether PostgreSQL could not be reached (`503` and `Retry-After` on the wire).
    pub fn is_connection(&self) -> bool {
        matches!(self, StoreError::Unavailable(_) | StoreError::OutcomeUnknown { .. })
    }
}

/// Failed statements since somebody asked.
static ERRORS: AtomicU64 = AtomicU64::new(0);

/// Hands the number of failed statements of this process out and sets it to zero.
pub fn take_errors() -> u64 {
    ERRORS.swap(0, Ordering::Relaxed)
}

/// Shorthand of every store function.
pub type StoreResult<T> = Result<T, StoreError>;

/// Adds what was being done to a driver error.
pub(crate) trait During<T> {
    /// Classifies the error as one met while doing `during`.
    fn during(self, during: &'static str) -> StoreResult<T>;
}

impl<T> During<T> for Result<T, sqlx::Error> {
    fn during(self, during: &'static str) -> StoreResult<T> {
        self.map_err(|error| {
            let error = StoreError::from_sqlx(during, error);
            error.count();
            error
        })
    }
}

/// Adds to a round trip what it does, and how long it takes to the histogram of that.
pub(crate) trait Timed<T>: Future<Output = Result<T, sqlx::Error>> + Sized {
    /// Runs the round trip; classifies its error as one met while doing `during`, one of `metrics::STATEMENTS`.
    fn timed(self, during: &'static str) -> impl Future<Output = StoreResult<T>> {
        async move {
            let started = Instant::now();
            let span = crate::spans::statement(during);
            let done = self.await;
            span.done(&done);
            let statements = &*STATEMENT_SECONDS;
            if let Some(seconds) = statements.get(during).or_else(|| statements.get(OTHER)) {
                seconds.record(started.elapsed().as_secs_f64());
            }
            done.during(during)
        }
    }
}

impl<T, F: Future<Output = Result<T, sqlx::Error>>> Timed<T> for F {}

static STATEMENT_SECONDS: LazyLock<HashMap<&'static str, Histogram>> = LazyLock::new(|| {
    let handle = |name: &&'static str| (*name, histogram!(STATEMENT_SECONDS_TOTAL, "statement" => *name));
    STATEMENTS.iter().map(handle).collect()
});
