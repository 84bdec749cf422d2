//! `fanout`: several groups read everything. "Per message" counts each group's acknowledgement.

use anyhow::Result;

use super::{Defaults, one_queue, traffic};
use crate::args::{Common, FanoutArgs};
use crate::engine::{Bench, Workers};
use crate::report::Report;

/// Runs it.
pub async fn execute(common: &Common, args: &FanoutArgs) -> Result<Report> {
    let mut bench = Bench::open(common, 30.0).await?;
    measure(&mut bench, args).await
}

pub(super) async fn measure(bench: &mut Bench, args: &FanoutArgs) -> Result<Report> {
    let defaults = Defaults {
        lanes: 200,
        producers: 8,
        consumers: 4,
        push_batch: 20,
        pop_batch: 200,
        pop_partitions: 10,
        rate: None,
        backlog: 20_000,
    };
    let mut traffic = traffic(&bench.common, one_queue("fanout"), &defaults);
    traffic.groups = (0..args.groups.max(1)).map(|group| format!("group-{group}")).collect();
    let run = bench.run("fanout", traffic, true);
    bench.prepare(&run).await?;
    let workers = Workers::plain(&run);
    bench.measure("fanout", &run, workers).await
}
