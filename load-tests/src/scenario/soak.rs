//! `soak`: another scenario for hours, with a line and a sample per interval, on a queue whose retention keeps the
//! database from growing, so that growth that remains is a leak.

use std::time::Duration;

use anyhow::Result;

use super::{dense, fanout, million, ordinary, parked, relay, thin};
use crate::args::{Common, Consume, FanoutArgs, MillionArgs, ParkedArgs, Pattern, SoakArgs, SoakOf, ThinArgs};
use crate::engine::Bench;
use crate::report::Report;

/// Completed messages go after five minutes; so do the hashes, as far as the protocol lets them.
const OPTIONS: &str = r#"{"retentionEnabled":true,"completedRetentionSeconds":300,"dedupWindowSeconds":300}"#;

/// Runs it.
pub async fn execute(common: &Common, args: &SoakArgs) -> Result<Report> {
    let mut common = common.clone();
    common.queue_options.get_or_insert_with(|| OPTIONS.to_owned());
    let mut bench = Bench::open(&common, 3_600.0).await?;
    bench.lines = true;
    bench.every = Duration::from_secs_f64(common.every.unwrap_or(60.0));
    match args.of {
        SoakOf::Dense => dense::measure(&mut bench).await,
        SoakOf::Ordinary => ordinary::measure(&mut bench).await,
        SoakOf::Thin => thin::measure(&mut bench, &ThinArgs { consume: Consume::Parked }).await,
        SoakOf::Fanout => fanout::measure(&mut bench, &FanoutArgs { groups: 4 }).await,
        SoakOf::Relay => relay::measure(&mut bench).await,
        SoakOf::Parked => parked::measure(&mut bench, &ParkedArgs { waiting: 10_000, push_url: None }).await,
        SoakOf::Million => {
            let args = MillionArgs {
                pattern: Pattern::Rotating,
                active: 1_000,
                idle: 0.0,
                settle: 0,
                broker_cmd: None,
                broker_dir: None,
            };
            million::measure(&mut bench, &args, None).await
        }
    }
}
