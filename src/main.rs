//! The `regent` binary: reads the configuration, runs the broker, says how it ended.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use regent::app::App;
use regent::config::{Config, ConfigError, Database};
use regent::embedded::{EmbeddedPostgres, encryption_key};
use regent::shutdown::Shutdown;
use regent::{spans, telemetry};

/// Requests allocate and free small pieces on different threads all the time; glibc's allocator took a fifth of the
/// broker's CPU time at high rates (docs/benchmarks.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    regent::process::started();
    let config = match Config::from_process() {
        Ok(config) => config,
        Err(ConfigError::CommandLine(answer)) => {
            let _ = answer.print();
            return if answer.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
        Err(error) => return fatal(&error),
    };
    if let Err(error) = telemetry::init(&config.log) {
        return fatal(&error);
    }
    config.log_boot();
    let open_files_max = regent::process::raise_open_files();
    if open_files_max < config.pop.long_polls_max as u64 {
        tracing::warn!(
            open_files_max,
            long_polls_max = config.pop.long_polls_max,
            "fewer files may be open than pops may wait: raise the hard limit (LimitNOFILE, ulimit -Hn) to park that many"
        );
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fatal(&error),
    };
    let ended = runtime.block_on(run(config));
    drop(runtime);
    match ended {
        Ok(()) => {
            tracing::info!("shutdown complete");
            ExitCode::SUCCESS
        }
        Err(error) => fatal(&format_args!("{error:#}")),
    }
}

fn fatal(error: &dyn Display) -> ExitCode {
    // Not through the log: it may be filtered, or not be there yet.
    let _ = writeln!(std::io::stderr(), "FATAL: {error}");
    ExitCode::FAILURE
}

async fn run(mut config: Config) -> anyhow::Result<()> {
    let shutdown = Shutdown::new();
    shutdown.listen_for_signals(config.http.drain_ms_max).context("cannot listen for signals")?;
    let traces = spans::start(&config.traces, &config.server_id).context("cannot send traces")?;
    let embedded = match config.postgres.database() {
        Database::Outside(_) => None,
        Database::Embedded => {
            let started = tokio::select! {
                started = EmbeddedPostgres::start(&config) => started?,
                () = shutdown.soft().cancelled() => return Ok(()),
            };
            config.use_embedded(started.url(), encryption_key(&config.data_dir)?);
            Some(started)
        }
    };
    let served = serve(config, shutdown).await;
    if let Some(traces) = traces {
        traces.stop().await;
    }
    if let Some(postgres) = embedded
        && let Err(error) = postgres.stop().await
    {
        tracing::error!(%error, "embedded PostgreSQL");
    }
    served
}

async fn serve(config: Config, shutdown: Shutdown) -> anyhow::Result<()> {
    let app = App::start_with(config, shutdown).await?;
    let _ = writeln!(std::io::stdout(), "regent serves on http://{}", app.local_addr());
    app.run().await;
    Ok(())
}
