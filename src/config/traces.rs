//! Traces.

use clap::Args;

use super::{ConfigError, boolean};

/// OpenTelemetry traces of pushes, pops, acks and transactions. The rest is set by the standard variables of
/// OpenTelemetry: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_BSP_…`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Traces")]
pub struct TracesConfig {
    /// Whether spans are sent to an OpenTelemetry collector (OTLP over HTTP)
    #[arg(long, env = "REGENT_TRACES", value_name = "BOOL", default_value = "false",
          num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = boolean)]
    pub traces: bool,

    /// Share of the requests without a traceparent of their own that are traced, 0 to 1
    #[arg(long, env = "REGENT_TRACES_RATIO", value_name = "SHARE", default_value_t = 0.01)]
    pub traces_ratio: f64,

    /// Where spans are sent, the whole URL [default: OTEL_EXPORTER_OTLP_ENDPOINT and /v1/traces]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", value_name = "URL")]
    pub traces_endpoint: Option<String>,
}

impl TracesConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if (0.0..=1.0).contains(&self.traces_ratio) {
            return Ok(());
        }
        Err(ConfigError::invalid("traces-ratio", self.traces_ratio, "must be between 0 and 1"))
    }
}
