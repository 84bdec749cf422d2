//! `thin`: very many queues, one message at a time, nothing to batch but what the broker batches itself.

use anyhow::Result;

use super::{Defaults, fresh_queue, parked, traffic};
use crate::args::{Common, Consume, ThinArgs};
use crate::engine::{Bench, Workers};
use crate::report::Report;
use crate::run::Layout;

/// Runs it.
pub async fn execute(common: &Common, args: &ThinArgs) -> Result<Report> {
    let mut bench = Bench::open(common, 30.0).await?;
    measure(&mut bench, args).await
}

pub(super) async fn measure(bench: &mut Bench, args: &ThinArgs) -> Result<Report> {
    let defaults = Defaults {
        lanes: 10_000,
        producers: 64,
        consumers: 64,
        push_batch: 1,
        pop_batch: 1,
        pop_partitions: 1,
        rate: None,
        backlog: 1_000,
    };
    // Dots would end the namespace, so the name must have none.
    let layout = Layout::QueuePerLane { namespace: fresh_queue("thin") };
    let traffic = traffic(&bench.common, layout, &defaults);
    match args.consume {
        Consume::Parked => parked::measure_waiting(bench, "thin", traffic, None).await,
        Consume::Discovery => {
            let run = bench.run("thin", traffic, true);
            let workers = Workers::plain(&run);
            bench.measure("thin", &run, workers).await
        }
    }
}
