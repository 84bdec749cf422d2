//! Every route of the protocol, as data (`spec/admin.md` §2): method, path, access level, tenant scope, what it does and,
//! once it is built, its handler. The router and the OpenAPI document are made from this table and nothing else.
//!
//! A new route is one line here; the templates that metrics count by are listed in `metrics/labels.rs`.

use axum::Router;
use axum::routing::{self, MethodRouter};

use super::error::no_such_route;
use super::state::AppState;
use super::{
    ack, analytics, changed_partitions, dlq, group_listings, groups, health, internal, lease, maintenance, messages,
    metrics, openapi, pop, push, queue, resources, retention, status, system_metrics, traces, transaction, workload,
};

/// Methods that the protocol uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Method {
    Get,
    Post,
    Put,
    Delete,
}

/// Who may call a route once authentication is on (`spec/admin.md` §1.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Anyone, before any token is looked at.
    Public,
    /// Roles `read-only`, `read-write`, `admin`.
    ReadOnly,
    /// Roles `write-only`, `read-write`, `admin`.
    WriteOnly,
    /// Roles `read-write`, `admin`.
    ReadWrite,
    /// Role `admin`.
    Admin,
}

/// What a route may see (`spec/admin.md` §1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// What belongs to the caller's tenant.
    Tenant,
    /// The whole installation.
    Cell,
}

/// One method of one path.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Method.
    pub method: Method,
    /// Path as the router takes it: `{name}` is one segment, `{*name}` the rest.
    pub path: &'static str,
    /// Who may call it.
    pub access: Access,
    /// What it may see.
    pub scope: Scope,
    /// One line for readers.
    pub summary: &'static str,
    /// The handler's path within this module, for the test that compares what it reads with what is documented.
    pub handled_by: Option<&'static str>,
    /// `None`: of a later stage; answers 404 like a route that does not exist.
    pub handler: Option<fn() -> MethodRouter<AppState>>,
}

impl Method {
    /// As on the request line.
    pub fn name(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Delete => "DELETE",
        }
    }
}

impl Access {
    /// The level's name in documents and tokens.
    pub fn name(self) -> &'static str {
        match self {
            Access::Public => "public",
            Access::ReadOnly => "read-only",
            Access::WriteOnly => "write-only",
            Access::ReadWrite => "read-write",
            Access::Admin => "admin",
        }
    }
}

impl Scope {
    /// The scope's name in documents.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Tenant => "tenant",
            Scope::Cell => "cell",
        }
    }
}

macro_rules! handler {
    ($verb:ident) => {
        None
    };
    ($verb:ident $handler:expr) => {
        Some(|| routing::$verb($handler))
    };
}

macro_rules! name {
    () => {
        None
    };
    ($handler:expr) => {
        Some(stringify!($handler))
    };
}

macro_rules! method {
    (get) => {
        Method::Get
    };
    (post) => {
        Method::Post
    };
    (put) => {
        Method::Put
    };
    (delete) => {
        Method::Delete
    };
}

macro_rules! routes {
    ($($verb:ident $path:literal $access:ident $scope:ident $summary:literal $(=> $handler:expr)?;)*) => {
        /// The index of `spec/admin.md` §2, in its order, and `/openapi.json`.
        pub const ROUTES: &[Route] = &[$(Route {
            method: method!($verb),
            path: $path,
            access: Access::$access,
            scope: Scope::$scope,
            summary: $summary,
            handled_by: name!($($handler)?),
            handler: handler!($verb $($handler)?),
        }),*];
    };
}

routes! {
    // The message path.
    post "/api/v1/push" WriteOnly Tenant "Append messages" => push::push;
    get "/api/v1/pop" ReadWrite Tenant "Pop from the queues of a namespace or task" => pop::pop_labels;
    get "/api/v1/pop/queue/{queue}" ReadWrite Tenant "Pop from any partition of a queue" => pop::pop_queue;
    get "/api/v1/pop/queue/{queue}/partition/{partition}" ReadWrite Tenant "Pop from one partition" => pop::pop_partition;
    post "/api/v1/ack" ReadWrite Tenant "Acknowledge one message" => ack::single;
    post "/api/v1/ack/batch" ReadWrite Tenant "Acknowledge messages" => ack::batch;
    post "/api/v1/transaction" ReadWrite Tenant "Push, acknowledge and write state together or not at all" => transaction::transact;
    post "/api/v1/lease/{lease}/extend" ReadWrite Tenant "Extend a lease" => lease::extend;
    post "/api/v1/fetch" ReadOnly Tenant "Read by offset, without a lease";
    post "/api/v1/configure" ReadWrite Tenant "Create a queue or set its options" => queue::configure;

    // Resources.
    get "/api/v1/resources/overview" ReadOnly Tenant "Totals over all queues" => resources::overview;
    get "/api/v1/resources/queues" ReadOnly Tenant "All queues" => resources::queues;
    get "/api/v1/resources/queues/{queue}" ReadOnly Tenant "One queue with its partitions and options" => resources::queue;
    delete "/api/v1/resources/queues/{queue}" Admin Tenant "Delete a queue and everything keyed to it" => queue::delete;
    get "/api/v1/resources/queues/{queue}/depth" ReadOnly Tenant "What a queue, or a group of it, still owes" => resources::depth;
    get "/api/v1/resources/namespaces" ReadOnly Tenant "All namespaces" => resources::namespaces;
    get "/api/v1/resources/tasks" ReadOnly Tenant "All tasks" => resources::tasks;
    post "/api/v1/partitions/changed" ReadOnly Tenant "Partitions written since an instant" => changed_partitions::changed;

    // Messages and dead letters.
    get "/api/v1/messages" ReadOnly Tenant "Recent messages" => messages::list;
    get "/api/v1/messages/{partition}/{transaction}" ReadOnly Tenant "One message" => messages::detail;
    delete "/api/v1/messages/{partition}/{transaction}" ReadWrite Tenant "Delete the dead letters of one message" => dlq::delete;
    post "/api/v1/messages/{partition}/{transaction}/retry" ReadWrite Tenant "Replay the newest dead letter of one message" => dlq::retry;
    get "/api/v1/dlq" ReadOnly Tenant "Dead letters, newest first" => dlq::list;
    delete "/api/v1/dlq" Admin Tenant "Delete the dead letters of a queue" => dlq::purge;
    post "/api/v1/dlq/{id}/replay" ReadWrite Tenant "Replay one dead letter" => dlq::replay;

    // Consumer groups.
    get "/api/v1/consumer-groups" ReadOnly Tenant "All groups, by queue" => group_listings::all;
    get "/api/v1/consumer-groups/lagging" ReadOnly Tenant "Cursors that lag" => group_listings::lagging;
    get "/api/v1/consumer-groups/{group}" ReadOnly Tenant "The cursors of one group" => group_listings::one;
    delete "/api/v1/consumer-groups/{group}" Admin Tenant "Delete a group everywhere" => groups::delete;
    delete "/api/v1/consumer-groups/{group}/queues/{queue}" Admin Tenant "Delete a group of one queue" => groups::delete_of_queue;
    post "/api/v1/consumer-groups/{group}/subscription" ReadWrite Tenant "Move a group's subscription instant" => groups::subscription;
    post "/api/v1/consumer-groups/{group}/queues/{queue}/seek" ReadWrite Tenant "Move a group's cursors on a queue" => groups::seek_queue;
    post "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek" ReadWrite Tenant "Move a group's cursor on a partition" => groups::seek_partition;

    // Traces.
    post "/api/v1/traces" ReadWrite Tenant "Record an event on a message" => traces::record;
    get "/api/v1/traces/names" ReadOnly Tenant "Names that traces carry" => traces::names;
    get "/api/v1/traces/by-name/{name}" ReadOnly Tenant "Traces of one name" => traces::by_name;
    get "/api/v1/traces/{partition}/{transaction}" ReadOnly Tenant "Traces of one message" => traces::of_message;

    // Status and analytics.
    get "/api/v1/status" ReadOnly Cell "Throughput, health and totals of a time range" => system_metrics::status;
    get "/api/v1/status/queues" ReadOnly Tenant "Queues with their counts, paged" => status::queues;
    get "/api/v1/status/queues/{queue}" ReadOnly Tenant "One queue with its partitions and cursors" => status::queue;
    get "/api/v1/status/analytics" ReadOnly Tenant "Retained messages by time of commit" => status::analytics;
    get "/api/v1/status/buffers" ReadOnly Cell "The disk spool of this broker" => maintenance::buffers;
    get "/api/v1/analytics/queue-lag" ReadOnly Tenant "Delivery lag by queue and bucket" => analytics::queue_lag;
    get "/api/v1/analytics/queue-ops" ReadOnly Tenant "Operations by queue and bucket" => analytics::queue_ops;
    get "/api/v1/analytics/queue-parked-replicas" ReadOnly Tenant "Parked pops by queue, broker and bucket" => analytics::parked_replicas;
    get "/api/v1/analytics/retention" ReadOnly Tenant "Messages that retention deleted, by bucket" => retention::report;
    get "/api/v1/analytics/workload" ReadOnly Tenant "Traffic and backlog by namespace, task or queue" => workload::workload;
    get "/api/v1/analytics/dlq-signatures" ReadOnly Tenant "Reasons of the newest dead letters, folded" => analytics::dlq_signatures;
    get "/api/v1/analytics/partition-liveness" ReadOnly Tenant "How many partitions of each queue are in use" => analytics::partition_liveness;
    get "/api/v1/analytics/system-metrics" ReadOnly Cell "CPU, memory and pools by broker and bucket" => system_metrics::system_metrics;
    get "/api/v1/analytics/worker-metrics" ReadOnly Cell "Operations of all brokers by bucket" => system_metrics::worker_metrics;
    get "/api/v1/analytics/postgres-stats" ReadOnly Cell "What PostgreSQL says about itself" => system_metrics::postgres_stats;
    post "/api/v1/stats/refresh" Admin Cell "Bring the stored statistics up to date now" => status::refresh;

    // The process.
    get "/health" Public Cell "Readiness: a database round trip" => health::health;
    get "/status" ReadOnly Cell "Liveness" => health::status;
    get "/metrics" Public Cell "Figures of this process as JSON" => metrics::json;
    get "/metrics/prometheus" Public Cell "Figures of this process for Prometheus" => metrics::prometheus;
    get "/api/v1/system/maintenance" Admin Cell "Push maintenance: state" => maintenance::state;
    post "/api/v1/system/maintenance" Admin Cell "Push maintenance: switch" => maintenance::switch;
    get "/api/v1/system/maintenance/pop" Admin Cell "Pop maintenance: state" => maintenance::pop_state;
    post "/api/v1/system/maintenance/pop" Admin Cell "Pop maintenance: switch" => maintenance::switch_pop;
    get "/api/v1/system/shared-state" Admin Cell "State shared among brokers" => internal::shared_state;
    get "/api/v1/system/kv-timers" Admin Cell "Key-value and timers: state";
    post "/api/v1/system/kv-timers" Admin Cell "Key-value and timers: switch";
    get "/api/v1/system/ephemeral" Admin Cell "Ephemeral queues: state";
    post "/api/v1/system/ephemeral" Admin Cell "Ephemeral queues: switch";
    post "/internal/api/notify" Admin Tenant "Wake the parked pops of a queue" => internal::notify;
    get "/internal/api/shared-state/stats" Admin Cell "The link to other brokers" => internal::peers;
    get "/internal/api/inter-instance/stats" Admin Cell "The link to other brokers (same as shared-state)" => internal::peers;
    get "/auth/me" Public Cell "Who the caller is";
    get "/auth/login" Public Cell "Log-in page";
    post "/auth/logout" Public Cell "Log out";
    get "/openapi.json" Public Cell "This document" => openapi::document;

    // Streams.
    post "/streams/v1/queries" ReadWrite Tenant "Register a stream query";
    post "/streams/v1/cycle" ReadWrite Tenant "Commit one cycle of a stream query";
    post "/streams/v1/state/get" ReadOnly Tenant "Read the state of a stream query";

    // Key-value state and timers.
    post "/api/v1/kv" ReadWrite Tenant "Several key-value operations";
    get "/api/v1/kv/{ns}/{*key}" ReadOnly Tenant "Read a key";
    put "/api/v1/kv/{ns}/{*key}" ReadWrite Tenant "Write a key";
    delete "/api/v1/kv/{ns}/{*key}" ReadWrite Tenant "Delete a key";
    get "/api/v1/resources/kv/namespaces" ReadOnly Tenant "Namespaces of keys";
    post "/api/v1/resources/kv/list" ReadOnly Tenant "List keys";
    post "/api/v1/timers" WriteOnly Tenant "Schedule a timer";
    get "/api/v1/timers/{queue}" ReadOnly Tenant "Timers of a queue";
    get "/api/v1/timers/{queue}/{*key}" ReadOnly Tenant "One timer";
    delete "/api/v1/timers/{queue}/{*key}" ReadWrite Tenant "Cancel a timer";

    // Ephemeral queues.
    post "/api/v1/ephemeral/push" WriteOnly Tenant "Append to an ephemeral queue";
    get "/api/v1/ephemeral/pop" ReadWrite Tenant "Pop from an ephemeral queue";
    post "/api/v1/ephemeral/ack" ReadWrite Tenant "Acknowledge ephemeral messages";
    post "/api/v1/ephemeral/configure" ReadWrite Tenant "Set the options of an ephemeral queue";
    post "/api/v1/ephemeral/reset" ReadWrite Tenant "Empty an ephemeral queue";
    delete "/api/v1/ephemeral/queue/{queue}" ReadWrite Tenant "Delete an ephemeral queue";
    get "/api/v1/ephemeral/queues" ReadOnly Tenant "All ephemeral queues";
    get "/api/v1/ephemeral/queues/{queue}/depth" ReadOnly Tenant "Depth of an ephemeral queue";
}

/// The built routes with their handlers.
pub fn built() -> Router<AppState> {
    let served = ROUTES.iter().filter_map(|route| Some((route, route.handler?)));
    served.fold(Router::new(), |router, (route, handler)| {
        let handler = handler();
        // A pop is a GET that changes state: HEAD must not claim.
        let claims = route.method == Method::Get && route.access == Access::ReadWrite;
        router.route(route.path, if claims { handler.head(no_such_route) } else { handler })
    })
}
