//! Every metric: name, kind, help. Registered once, at zero; `docs/metrics.md` has a row for each.

use metrics::{describe_counter, describe_gauge, describe_histogram};

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution.
    Histogram,
}

/// One declared metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Family name.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Help text.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($const:ident = $kind:ident $name:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $const: &str = $name;
        )*
        /// Every metric that the broker exposes.
        pub const ALL: &[Metric] = &[$(Metric { name: $name, kind: Kind::$kind, help: $help }),*];
    };
}

metrics! {
    PUSH_FLUSH_SECONDS = Histogram "regent_push_flush_seconds", "Time of one push flush, from its first statement to its commit.";
    PUSH_FLUSH_GROUPS = Histogram "regent_push_flush_groups", "Groups (request and partition) that shared one push flush.";
    PEER_NOTIFICATIONS_HEARD = Counter "regent_peer_notifications_heard_total", "Notifications of other brokers that this one acted on.";
    PEER_NOTIFICATIONS_LOST = Counter "regent_peer_notifications_lost_total", "Notifications that could not be sent; other brokers find out by their own walks.";
    PUSH_FLUSH_FAILURES = Counter "regent_push_flush_failures_total", "Push flushes that failed for good; their items answered failed.";

    // The ack path.
    ACK_HITS = Counter "regent_ack_hits_total", "Acks that covered exactly what was delivered under their lease.";
    ACK_MISSES = Counter "regent_ack_misses_total", "Acks that took full hash resolution, by reason.";
    ACK_FLUSH_ROWS = Histogram "regent_ack_flush_rows", "Cursor rows that shared one ack flush.";
    ACK_FLUSH_SECONDS = Histogram "regent_ack_flush_seconds", "Time of one ack flush, until its outcome was known.";
    ACK_REFUSED = Counter "regent_ack_refused_total", "Positional advances that PostgreSQL refused; they took full hash resolution.";
    ACK_FLUSH_FAILURES = Counter "regent_ack_flush_failures_total", "Ack flushes whose statement failed.";
    ACK_QUEUE_DEPTH = Gauge "regent_ack_queue_depth", "Positional advances that wait for a flush.";
    ACK_ACTORS = Gauge "regent_ack_partition_actors", "Partitions with a lease in the registry of this broker.";
    ACK_REGISTRY_BYTES = Gauge "regent_ack_registry_bytes", "Memory of the lease registry.";
    ACK_UNREGISTERED = Counter "regent_ack_unregistered_total", "Leases that the registry had no room for.";
    ACK_SECONDS = Histogram "regent_ack_seconds", "Time from request to answer of the acks of one lease, by path.";
    ACK_ITEMS = Counter "regent_ack_items_total", "Acknowledged messages, by result.";
}

/// Families that exist only with labels; whoever counts them brings them to zero.
const LABELLED: &[&str] = &[ACK_MISSES, ACK_SECONDS, ACK_ITEMS];

/// Describes every metric and brings every unlabelled one to zero.
pub fn register() {
    for metric in ALL {
        match metric.kind {
            Kind::Counter => {
                describe_counter!(metric.name, metric.help);
                if !LABELLED.contains(&metric.name) {
                    metrics::counter!(metric.name).absolute(0);
                }
            }
            Kind::Gauge => {
                describe_gauge!(metric.name, metric.help);
                metrics::gauge!(metric.name).set(0.0);
            }
            Kind::Histogram => describe_histogram!(metric.name, metric.help),
        }
    }
}
