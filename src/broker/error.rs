//! What can go wrong, in domain words.

use std::sync::Arc;

use thiserror::Error;

use crate::store::StoreError;

/// Why a call did not do its work.
#[derive(Debug, Error)]
pub enum BrokerError {
    /// The request breaks a rule of the protocol; the text names the field (400).
    #[error("{0}")]
    Invalid(String),
    /// A bounded queue is full (429 and `Retry-After`).
    #[error("overloaded: {what}")]
    Overloaded {
        /// Which bound.
        what: &'static str,
        /// Seconds after which the client may try again.
        retry_after_seconds: u32,
    },
    /// PostgreSQL cannot be reached (503 and `Retry-After`).
    #[error("no database connection")]
    NoDatabase(#[source] Arc<StoreError>),
    /// The database has not been reached since this broker started (503 and `Retry-After`).
    #[error("no database connection")]
    NotYet,
    /// The answer to a commit was lost, and its outcome with it (503 and `Retry-After`).
    #[error("the outcome of the commit is unknown: the connection to the database was lost")]
    OutcomeUnknown,
    /// PostgreSQL refused, or stored data does not decode (500).
    #[error("{0}")]
    Failed(String),
    /// The broker is stopping (503 and `Retry-After`).
    #[error("shutting down, connection closing")]
    Stopping,
}

impl BrokerError {
    /// A bounded queue is full; the client may try again after so many seconds.
    pub fn overloaded(what: &'static str, retry_after_seconds: u32) -> BrokerError {
        BrokerError::Overloaded { what, retry_after_seconds }
    }
}

impl From<StoreError> for BrokerError {
    fn from(error: StoreError) -> BrokerError {
        BrokerError::from(Arc::new(error))
    }
}

/// The error of a statement that several requests shared.
impl From<Arc<StoreError>> for BrokerError {
    fn from(error: Arc<StoreError>) -> BrokerError {
        if error.is_connection() { BrokerError::NoDatabase(error) } else { BrokerError::Failed(error.to_string()) }
    }
}

/// Result of a domain call.
pub type BrokerResult<T> = Result<T, BrokerError>;
