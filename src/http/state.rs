//! What every handler gets: one broker handle, no pool.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;

use super::error::ApiError;
use crate::broker::Broker;
use crate::broker::error::BrokerError;
use crate::broker::spool::Spool;

/// Shared by all requests. A cheap clone: axum makes several for each request.
#[derive(Clone)]
pub struct AppState(Arc<Shared>);

/// See the fields.
pub struct Shared {
    /// The domain, once the database has been reached (README ruling 3).
    pub broker: Arc<OnceLock<Broker>>,
    /// Takes pushes while the database cannot.
    pub spool: Spool,
    /// Renders the metrics of this process.
    pub metrics: PrometheusHandle,
    /// Largest request body in bytes.
    pub body_bytes_max: usize,
    /// How long a parked pop keeps its connection's buffers ([`super::resting`]).
    pub rest_after: Duration,
}

impl std::ops::Deref for AppState {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl From<Shared> for AppState {
    fn from(shared: Shared) -> AppState {
        AppState(Arc::new(shared))
    }
}

impl AppState {
    /// The broker, or the 503 of one that is still waiting for its database.
    pub fn broker(&self) -> Result<&Broker, ApiError> {
        self.broker.get().ok_or(ApiError::Broker(BrokerError::NotYet))
    }
}
