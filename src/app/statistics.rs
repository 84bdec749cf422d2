//! Background loops of what the admin routes show.

use crate::broker::Broker;
use crate::broker::error::BrokerError;
use crate::shutdown::{Supervisor, count_pass};

/// The loops behind the admin routes.
pub(super) fn spawn(supervisor: &Supervisor, broker: &Broker) {
    let statistics = broker.inspection().statistics().clone();
    supervisor.spawn("statistics", move |stop| {
        let statistics = statistics.clone();
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(statistics.interval())).await.is_some() {
                let Some(done) = stop.run_until_cancelled(statistics.cycle()).await else { break };
                count_pass("statistics", done.is_ok());
                if let Err(error) = done {
                    tracing::warn!(%error, "statistics are late; next cycle as planned");
                }
            }
            Ok::<(), BrokerError>(())
        }
    });
    let minutes = broker.clone();
    supervisor.spawn("minutes", move |stop| {
        let broker = minutes.clone();
        async move { broker.run_minutes(&stop).await }
    });
    let watched = broker.clone();
    supervisor.spawn("watched_queues", move |stop| {
        let broker = watched.clone();
        async move {
            loop {
                let Some(done) = stop.run_until_cancelled(broker.look_at_watched_queues()).await else { break };
                count_pass("watched_queues", done.is_ok());
                if let Err(error) = done {
                    tracing::debug!(%error, "metrics of single queues are late; next look as planned");
                }
                let pause = tokio::time::sleep(broker.watched_queues().interval());
                if stop.run_until_cancelled(pause).await.is_none() {
                    break;
                }
            }
            Ok::<(), BrokerError>(())
        }
    });
    let statistics = broker.inspection().statistics().clone();
    supervisor.spawn("segment_sizes", move |stop| {
        let statistics = statistics.clone();
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(statistics.sizes_interval())).await.is_some() {
                let Some(done) = stop.run_until_cancelled(statistics.sizes_turn()).await else { break };
                count_pass("segment_sizes", done.is_ok());
                if let Err(error) = done {
                    tracing::warn!(%error, "segment sizes are late; next pass as planned");
                }
            }
            Ok::<(), BrokerError>(())
        }
    });
}
