//! The `regent-load` binary: drives a broker and checks that it keeps its promises.
//!
//! Exit code 0: every promise was kept. 1: the ledger found violations. 2: the run could not be carried out.

mod args;
mod broker_process;
mod client;
mod engine;
mod figures;
mod ledger;
mod payload;
mod progress;
mod report;
mod round_robin;
mod run;
mod sample;
mod scenario;
mod wire;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(cli.common.threads.max(1)).enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(scenario::execute(cli)),
        Err(error) => Err(error.into()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("regent-load: the broker broke promises, see VIOLATION above");
            ExitCode::from(1)
        }
        Err(error) => {
            eprintln!("regent-load: {error:#}");
            ExitCode::from(2)
        }
    }
}
