//! What each route reads from the query string, for the OpenAPI document (`spec/push-pop.md` §7.2, `spec/admin.md`). A test
//! holds this against what the handlers read.

use utoipa::openapi::schema::{KnownFormat, Object, ObjectBuilder, SchemaFormat, Type};

use super::routes::{Method, Route};

/// A query parameter; none is required but where its text says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its key.
    pub name: &'static str,
    /// What its value is.
    pub kind: Kind,
    /// One line for readers: meaning, unit, default.
    pub about: &'static str,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// true/false, 1/0, yes/no or on/off.
    Boolean,
    /// ISO-8601.
    Instant,
    /// One of these.
    OneOf(&'static [&'static str]),
}

impl Kind {
    /// As a schema.
    pub fn schema(self) -> Object {
        let of = |kind| ObjectBuilder::new().schema_type(kind);
        match self {
            Kind::Text => of(Type::String),
            Kind::Integer => of(Type::Integer),
            Kind::Number => of(Type::Number),
            Kind::Boolean => of(Type::Boolean),
            Kind::Instant => of(Type::String).format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime))),
            Kind::OneOf(words) => of(Type::String).enum_values(Some(words.iter().copied())),
        }
        .build()
    }
}

macro_rules! parameter {
    ($name:literal, $kind:expr, $about:literal $(,)?) => {
        Parameter { name: $name, kind: $kind, about: $about }
    };
}

const QUEUE: Parameter = parameter!("queue", Kind::Text, "Only this queue");
const NAMESPACE: Parameter = parameter!("namespace", Kind::Text, "Only queues with this namespace");
const TASK: Parameter = parameter!("task", Kind::Text, "Only queues with this task");
const CONSUMER_GROUP: Parameter = parameter!("consumerGroup", Kind::Text, "Only this group");
const LIMIT: Parameter = parameter!("limit", Kind::Integer, "Most rows of the answer");
const OFFSET: Parameter = parameter!("offset", Kind::Integer, "Rows to skip; default 0");
const FROM: Parameter = parameter!("from", Kind::Instant, "Start of the time range");
const TO: Parameter = parameter!("to", Kind::Instant, "End of the time range; default now");

const FILTER: &[Parameter] = &[QUEUE, NAMESPACE, TASK];
const PAGING: &[Parameter] = &[LIMIT, OFFSET];
const WINDOW: &[Parameter] = &[FROM, TO];
const BROKER: &[Parameter] = &[
    parameter!("hostname", Kind::Text, "Only the broker of this name"),
    parameter!("workerId", Kind::Integer, "Only this worker; a broker has one, number 0"),
];
const POP: &[Parameter] = &[
    parameter!("batch", Kind::Integer, "Most messages of the answer, over all partitions; default 200, at most 10000"),
    parameter!(
        "partitions",
        Kind::Integer,
        "Most partitions to claim; default 1, 0 and less: no cap. Ignored for one partition",
    ),
    parameter!("autoAck", Kind::Boolean, "Commit on delivery, without a lease; default false"),
    parameter!("wait", Kind::Boolean, "Park until something comes; default false"),
    parameter!("timeout", Kind::Integer, "Longest wait in milliseconds; default 30000"),
    parameter!("leaseSeconds", Kind::Integer, "Lease of this call; default the queue's `leaseTime`, else 60"),
    parameter!("consumerGroup", Kind::Text, "Reading group, created by use; default queue mode"),
    parameter!("subscriptionMode", Kind::Text, "Where a new group starts: `new` (from now on, the default) or `all`"),
    parameter!("subscriptionFrom", Kind::Text, "The same as an instant, `now` or ISO-8601; wins over the mode"),
    parameter!(
        "conflation",
        Kind::Boolean,
        "Only the newest message of each partition; needs a group, not with `autoAck`",
    ),
    parameter!("autopilot", Kind::Boolean, "Let the broker choose the sizes that are not given; default false"),
];

/// What a route reads, in groups.
pub fn of(route: &Route) -> &'static [&'static [Parameter]] {
    const LABELS: &[Parameter] = &[NAMESPACE, TASK];
    const BY_LABEL: Parameter = parameter!("groupBy", Kind::OneOf(&["namespace", "task", "queue"]), "What a row is");
    match (route.method, route.path) {
        (Method::Get, "/api/v1/pop") => &[LABELS, POP],
        (Method::Get, "/api/v1/pop/queue/{queue}" | "/api/v1/pop/queue/{queue}/partition/{partition}") => &[POP],
        (Method::Get, "/api/v1/resources/queues") => &[&[parameter!(
            "stats",
            Kind::OneOf(&["cached"]),
            "The stored counts, not brought up to date for this call",
        )]],
        (Method::Get, "/api/v1/resources/queues/{queue}/depth") => {
            &[&[parameter!("group", Kind::Text, "What this group owes; default the whole queue")]]
        }
        (Method::Get, "/api/v1/messages") => &[
            FILTER,
            &[
                parameter!("ns", Kind::Text, "Another spelling of `namespace`"),
                parameter!("partition", Kind::Text, "Only partitions of this name"),
                parameter!("status", Kind::Text, "Only messages in this state"),
            ],
            WINDOW,
            PAGING,
        ],
        (Method::Get, "/api/v1/dlq") => &[&[QUEUE, CONSUMER_GROUP], PAGING],
        (Method::Delete, "/api/v1/dlq") => {
            &[&[parameter!("queue", Kind::Text, "Whose dead letters; required"), CONSUMER_GROUP]]
        }
        (Method::Get, "/api/v1/consumer-groups/lagging") => {
            &[&[parameter!("minLagSeconds", Kind::Number, "Least lag in seconds; default 3600")]]
        }
        (Method::Delete, "/api/v1/consumer-groups/{group}" | "/api/v1/consumer-groups/{group}/queues/{queue}") => {
            &[&[parameter!("deleteMetadata", Kind::Boolean, "Forget where the group starts, too; default true")]]
        }
        (Method::Get, "/api/v1/traces/names" | "/api/v1/traces/by-name/{name}") => &[PAGING],
        (Method::Get, "/api/v1/status") => &[FILTER, WINDOW],
        (Method::Get, "/api/v1/status/queues") => &[FILTER, PAGING],
        (Method::Get, "/api/v1/status/analytics") => &[
            FILTER,
            WINDOW,
            &[parameter!("interval", Kind::OneOf(&["minute", "hour", "day"]), "Length of a bucket; default `hour`")],
        ],
        (Method::Get, "/api/v1/analytics/queue-lag" | "/api/v1/analytics/queue-ops") => &[&[QUEUE], WINDOW],
        (Method::Get, "/api/v1/analytics/queue-parked-replicas") => &[&[QUEUE], WINDOW],
        (Method::Get, "/api/v1/analytics/retention") => &[&[QUEUE, BY_LABEL], WINDOW],
        (Method::Get, "/api/v1/analytics/workload") => &[FILTER, &[BY_LABEL], WINDOW],
        (Method::Get, "/api/v1/analytics/dlq-signatures") => {
            &[&[parameter!("queue", Kind::Text, "Whose dead letters; required")], PAGING]
        }
        (Method::Get, "/api/v1/analytics/partition-liveness") => &[FILTER, PAGING],
        (Method::Get, "/api/v1/analytics/system-metrics") => &[BROKER, WINDOW],
        (Method::Get, "/api/v1/analytics/worker-metrics") => &[BROKER, &[QUEUE], WINDOW],
        _ => &[],
    }
}
