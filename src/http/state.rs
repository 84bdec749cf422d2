//! What every handler gets: one broker handle, no pool.

use metrics_exporter_prometheus::PrometheusHandle;

use crate::broker::Broker;

/// Shared by all requests.
#[derive(Clone)]
pub struct AppState {
    /// The domain.
    pub broker: Broker,
    /// Renders the metrics of this process.
    pub metrics: PrometheusHandle,
    /// Largest request body in bytes.
    pub body_bytes_max: usize,
}
