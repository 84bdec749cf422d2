//! `ordinary`: a thousand partitions, batches as services make them.

use anyhow::Result;

use super::{Defaults, one_queue, traffic};
use crate::args::Common;
use crate::engine::{Bench, Workers};
use crate::report::Report;

/// Runs it.
pub async fn execute(common: &Common) -> Result<Report> {
    let mut bench = Bench::open(common, 30.0).await?;
    measure(&mut bench).await
}

pub(super) async fn measure(bench: &mut Bench) -> Result<Report> {
    let defaults = Defaults {
        lanes: 1_000,
        producers: 32,
        consumers: 16,
        push_batch: 10,
        pop_batch: 100,
        pop_partitions: 10,
        rate: None,
        backlog: 20_000,
    };
    let run = bench.run("ordinary", traffic(&bench.common, one_queue("ordinary"), &defaults), true);
    bench.prepare(&run).await?;
    let workers = Workers::plain(&run);
    bench.measure("ordinary", &run, workers).await
}
