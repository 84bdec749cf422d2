//! The `regent` binary: reads the configuration, runs the broker, says how it ended.

use std::process::ExitCode;

fn main() -> ExitCode {
    let _ = regent::config::Config::from_process().map_err(|error| match error {
        regent::config::ConfigError::CommandLine(error) => error.exit(),
        error => eprintln!("FATAL: {error}"),
    });
    ExitCode::SUCCESS
}
