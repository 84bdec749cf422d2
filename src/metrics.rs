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
}

/// Describes every metric and brings every unlabelled one to zero.
pub fn register() {
    for metric in ALL {
        match metric.kind {
            Kind::Counter => {
                describe_counter!(metric.name, metric.help);
                metrics::counter!(metric.name).absolute(0);
            }
            Kind::Gauge => {
                describe_gauge!(metric.name, metric.help);
                metrics::gauge!(metric.name).set(0.0);
            }
            Kind::Histogram => describe_histogram!(metric.name, metric.help),
        }
    }
}
