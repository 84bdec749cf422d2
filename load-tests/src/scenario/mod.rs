//! The scenarios: a file each. This one holds what they share: the flags with their defaults.

mod ack;
mod ack_waves;
mod chaos;
mod dense;
mod fanout;
mod million;
mod ordinary;
mod parked;
mod relay;
mod soak;
mod thin;

use anyhow::Result;
use serde_json::Value;

use crate::args::{Cli, Common, Scenario};
use crate::report::{Report, write_json};
use crate::round_robin;
use crate::run::{Layout, Traffic};

/// Runs the chosen scenario, prints its tables, writes its file, and says whether every promise was kept.
pub async fn execute(cli: Cli) -> Result<bool> {
    let common = &cli.common;
    let (name, settings, reports): (&str, Value, Vec<Report>) = match &cli.scenario {
        Scenario::Dense => ("dense", Value::Null, vec![dense::execute(common).await?]),
        Scenario::Ordinary => ("ordinary", Value::Null, vec![ordinary::execute(common).await?]),
        Scenario::Thin(args) => ("thin", serde_json::to_value(args)?, vec![thin::execute(common, args).await?]),
        Scenario::Ack(args) => ("ack", serde_json::to_value(args)?, ack::execute(common, args).await?),
        Scenario::Million(args) => {
            ("million", serde_json::to_value(args)?, vec![million::execute(common, args).await?])
        }
        Scenario::Parked(args) => ("parked", serde_json::to_value(args)?, vec![parked::execute(common, args).await?]),
        Scenario::Fanout(args) => ("fanout", serde_json::to_value(args)?, vec![fanout::execute(common, args).await?]),
        Scenario::Relay => ("relay", Value::Null, vec![relay::execute(common).await?]),
        Scenario::Soak(args) => ("soak", serde_json::to_value(args)?, vec![soak::execute(common, args).await?]),
        Scenario::Chaos(args) => ("chaos", serde_json::to_value(args)?, vec![chaos::execute(common, args).await?]),
        Scenario::RoundRobin(args) => return round_robin::serve(args).await.map(|()| true),
    };
    for report in &reports {
        println!("{}", report.table());
    }
    if let Some(path) = &common.json {
        write_json(path, name, common, settings, &reports)?;
    }
    Ok(reports.iter().all(|report| report.verdict.holds()))
}

/// What a scenario starts from before flags are applied.
struct Defaults {
    lanes: u32,
    producers: usize,
    consumers: usize,
    push_batch: usize,
    pop_batch: usize,
    pop_partitions: usize,
    rate: Option<f64>,
    backlog: u64,
}

/// Multiplies by --scale; never below one.
fn scaled(common: &Common, count: usize) -> usize {
    ((count as f64 * common.scale).round() as usize).max(1)
}

/// The traffic of a scenario: its defaults under the flags. Connections, rate and backlog grow with --scale.
fn traffic(common: &Common, layout: Layout, d: &Defaults) -> Traffic {
    Traffic {
        lanes: common.partitions.unwrap_or(d.lanes).max(1),
        layout,
        groups: vec!["load".to_owned()],
        producers: common.producers.unwrap_or_else(|| scaled(common, d.producers)).max(1),
        consumers: common.consumers.unwrap_or_else(|| scaled(common, d.consumers)),
        push_batch: common.push_batch.unwrap_or(d.push_batch).max(1),
        push_lanes: 1,
        pop_batch: common.pop_batch.unwrap_or(d.pop_batch).max(1),
        pop_partitions: common.pop_partitions.unwrap_or(d.pop_partitions).max(1),
        rate: match common.rate {
            Some(rate) => (rate > 0.0).then_some(rate),
            None => d.rate.map(|rate| rate * common.scale),
        },
        backlog: common.backlog.unwrap_or_else(|| scaled(common, d.backlog as usize) as u64),
        lease_seconds: common.lease_seconds.unwrap_or(30),
        wait_ms: 2_000,
        active: None,
    }
}

/// A queue name that no earlier run has used.
fn fresh_queue(scenario: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("load-{scenario}-{:x}-{}", now.as_millis(), std::process::id())
}

/// One queue of the scenario's own.
fn one_queue(scenario: &str) -> Layout {
    Layout::OneQueue { queue: fresh_queue(scenario) }
}
