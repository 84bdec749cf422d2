//! `dense`: few partitions, large batches. What a message costs when nothing is thin.

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
        lanes: 200,
        producers: 16,
        consumers: 8,
        push_batch: 100,
        pop_batch: 1_000,
        pop_partitions: 10,
        rate: None,
        backlog: 100_000,
    };
    let run = bench.run("dense", traffic(&bench.common, one_queue("dense"), &defaults), true);
    bench.prepare(&run).await?;
    let workers = Workers::plain(&run);
    bench.measure("dense", &run, workers).await
}
