//! Logs: what is written, in which shape, and where to (standard error, so that standard output stays for answers).

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::LogConfig;

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Something in this process has installed a subscriber already.
    #[error("cannot set up logging: {0}")]
    AlreadySet(String),
}

/// Installs the process-wide log subscriber: one line per event, text or JSON.
///
/// # Errors
/// A subscriber is installed already.
pub fn init(config: &LogConfig) -> Result<(), TelemetryError> {
    let (filter, complaint) = filter(&config.level);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let installed = if config.json {
        builder.json().flatten_event(true).with_current_span(false).try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    installed.map_err(|error| TelemetryError::AlreadySet(error.to_string()))?;
    if let Some(error) = complaint {
        tracing::warn!(level = config.level, error, "log filter not understood, using info");
    }
    Ok(())
}

/// The filter that `level` describes; text that is no filter means `info` (security-operations §16.7).
fn filter(level: &str) -> (EnvFilter, Option<String>) {
    if level.trim().is_empty() {
        return (EnvFilter::new("info"), None);
    }
    match EnvFilter::builder().parse(level) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_none_falls_back_to_info() {
        assert_eq!(filter("").0.to_string(), "info");
        let (fallback, complaint) = filter("regent=loud");
        assert_eq!(fallback.to_string(), "info");
        assert!(complaint.is_some());
        assert_eq!(filter("warn,regent::http=debug").1, None);
    }
}
