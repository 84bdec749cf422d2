//! The `regent` binary: reads the configuration, runs the broker, says how it ended.

use std::process::ExitCode;

use regent::app::App;
use regent::config::{Config, ConfigError};
use regent::shutdown::Shutdown;

fn main() -> ExitCode {
    let config = match Config::from_process() {
        Ok(config) => config,
        Err(ConfigError::CommandLine(error)) => error.exit(),
        Err(error) => return fatal(&error),
    };
    if let Err(error) = regent::telemetry::init(&config.log) {
        return fatal(&error);
    }
    config.log_boot();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fatal(&error),
    };
    runtime.block_on(async {
        let shutdown = Shutdown::new();
        if let Err(error) = shutdown.listen_for_signals(config.http.drain_ms_max) {
            return fatal(&error);
        }
        match App::start_with(config, shutdown).await {
            Ok(app) => {
                println!("regent: serving on http://{}", app.local_addr());
                app.run().await;
                ExitCode::SUCCESS
            }
            Err(error) => fatal(&error),
        }
    })
}

fn fatal(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("FATAL: {error}");
    ExitCode::FAILURE
}
