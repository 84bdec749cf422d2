//! The values that the labels of metrics can have.

/// Templates of the routes, as in the table of `http/routes.rs`; whatever is not listed counts as [`OTHER`].
pub const ROUTES: &[&str] = &[
    "/api/v1/push",
    "/api/v1/pop",
    "/api/v1/pop/queue/{queue}",
    "/api/v1/pop/queue/{queue}/partition/{partition}",
    "/api/v1/ack",
    "/api/v1/ack/batch",
    "/api/v1/transaction",
    "/api/v1/lease/{lease}/extend",
    "/api/v1/fetch",
    "/api/v1/configure",
    "/api/v1/resources/overview",
    "/api/v1/resources/queues",
    "/api/v1/resources/queues/{queue}",
    "/api/v1/resources/queues/{queue}/depth",
    "/api/v1/resources/namespaces",
    "/api/v1/resources/tasks",
    "/api/v1/partitions/changed",
    "/api/v1/messages",
    "/api/v1/messages/{partition}/{transaction}",
    "/api/v1/messages/{partition}/{transaction}/retry",
    "/api/v1/dlq",
    "/api/v1/dlq/{id}/replay",
    "/api/v1/consumer-groups",
    "/api/v1/consumer-groups/lagging",
    "/api/v1/consumer-groups/{group}",
    "/api/v1/consumer-groups/{group}/queues/{queue}",
    "/api/v1/consumer-groups/{group}/subscription",
    "/api/v1/consumer-groups/{group}/queues/{queue}/seek",
    "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
    "/api/v1/traces",
    "/api/v1/traces/names",
    "/api/v1/traces/by-name/{name}",
    "/api/v1/traces/{partition}/{transaction}",
    "/api/v1/status",
    "/api/v1/status/queues",
    "/api/v1/status/queues/{queue}",
    "/api/v1/status/analytics",
    "/api/v1/status/buffers",
    "/api/v1/analytics/queue-lag",
    "/api/v1/analytics/queue-ops",
    "/api/v1/analytics/queue-parked-replicas",
    "/api/v1/analytics/retention",
    "/api/v1/analytics/workload",
    "/api/v1/analytics/dlq-signatures",
    "/api/v1/analytics/partition-liveness",
    "/api/v1/analytics/system-metrics",
    "/api/v1/analytics/worker-metrics",
    "/api/v1/analytics/postgres-stats",
    "/api/v1/stats/refresh",
    "/health",
    "/status",
    "/metrics",
    "/metrics/prometheus",
    "/api/v1/system/maintenance",
    "/api/v1/system/maintenance/pop",
    "/api/v1/system/shared-state",
    "/api/v1/system/kv-timers",
    "/api/v1/system/ephemeral",
    "/internal/api/notify",
    "/internal/api/shared-state/stats",
    "/internal/api/inter-instance/stats",
    "/auth/me",
    "/auth/login",
    "/auth/logout",
    "/openapi.json",
    "/streams/v1/queries",
    "/streams/v1/cycle",
    "/streams/v1/state/get",
    "/api/v1/kv",
    "/api/v1/kv/{ns}/{*key}",
    "/api/v1/resources/kv/namespaces",
    "/api/v1/resources/kv/list",
    "/api/v1/timers",
    "/api/v1/timers/{queue}",
    "/api/v1/timers/{queue}/{*key}",
    "/api/v1/ephemeral/push",
    "/api/v1/ephemeral/pop",
    "/api/v1/ephemeral/ack",
    "/api/v1/ephemeral/configure",
    "/api/v1/ephemeral/reset",
    "/api/v1/ephemeral/queue/{queue}",
    "/api/v1/ephemeral/queues",
    "/api/v1/ephemeral/queues/{queue}/depth",
    OTHER,
];
/// Routes whose latency is a histogram of its own; all others share one.
pub const TIMED_ROUTES: &[&str] = &[
    "/api/v1/push",
    "/api/v1/pop",
    "/api/v1/pop/queue/{queue}",
    "/api/v1/pop/queue/{queue}/partition/{partition}",
    "/api/v1/ack",
    "/api/v1/ack/batch",
    "/api/v1/lease/{lease}/extend",
    "/api/v1/transaction",
    OTHER,
];
/// Value of a label for whatever its list does not name.
pub const OTHER: &str = "other";
/// Status classes; the last is a client that was gone before its answer.
pub const HTTP_STATUS: &[&str] = &["2xx", "3xx", "4xx", "5xx", "hung_up"];
/// Why a request was refused or failed as a whole.
pub const ERROR_KINDS: &[&str] = &["bad_request", "overloaded", "no_database", "not_booted", "failed", "stopping"];
/// How a statement failed (`store/error.rs`).
pub const STORE_ERROR_KINDS: &[&str] = &["unavailable", "outcome_unknown", "refused", "overtaken", "corrupt"];
/// What became of a pushed message.
pub const PUSH_STATUS: &[&str] = &["queued", "duplicate", "buffered", "failed"];
/// What became of records of the disk spool.
pub const SPOOL_RESULTS: &[&str] = &["spooled", "stored", "duplicate", "quarantined"];
/// Stages that share one database transaction among requests.
pub const FUSION_OPS: &[&str] = &["push", "ack", "transaction"];
/// Why the dedup memory asked PostgreSQL.
pub const DEDUP_READS: &[&str] = &["window", "from_offset", "candidates", "ambiguous"];
/// Which partitions a pop may serve.
pub const POP_SCOPES: &[&str] = &["queue", "partition", "labels"];
/// How a pop ended.
pub const POP_RESULTS: &[&str] = &["messages", "empty", "error"];
/// Where the segments of a claimed span came from.
pub const SPAN_SOURCES: &[&str] = &["memory", "database"];
/// What a claim found in one candidate partition.
pub const CLAIM_OUTCOMES: &[&str] = &["claimed", "empty", "not_yet", "left_over", "gone", "unmet", "emptied"];
/// Which way the autopilot of a group went.
pub const AUTOPILOT_DIRECTIONS: &[&str] = &["wider", "narrower"];
/// Whether a delivery is the first of its message to its group.
pub const ATTEMPTS: &[&str] = &["first", "again"];
/// Why an ack took full hash resolution (`broker::lease::Miss`).
pub const ACK_MISS_REASONS: &[&str] =
    &["off", "signal", "no_lease", "unknown", "other_worker", "expired", "partial", "busy"];
/// Roads of an ack (`broker::ack::meter::Road`).
pub const ACK_PATHS: &[&str] = &["fused", "positional", "resolved"];
/// How an ack item was answered.
pub const ACK_RESULTS: &[&str] = &["success", "failure"];
/// How a replay of a dead letter ended.
pub const DEAD_LETTER_MOVE_RESULTS: &[&str] = &["moved", "duplicate", "gone", "failed"];
/// How a transaction was answered: committed, refused for one of the reasons of the wire, or not carried out.
pub const TRANSACTION_OUTCOMES: &[&str] =
    &["committed", "bad_request", "duplicate", "ack_rejected", "db_error", "overloaded", "no_database", "unknown"];
/// Operations of a transaction.
pub const TRANSACTION_OPERATION_TYPES: &[&str] = &["push", "ack"];
/// Where the queues count that are not watched (`broker/watched_queues.rs`).
pub const OTHER_QUEUES: &str = "(other)";
/// A queue in counters. The watched ones join when their names are known.
pub const QUEUES: &[&str] = &[OTHER_QUEUES];
/// A queue in gauges: only watched ones.
pub const WATCHED: &[&str] = &[];
/// The label of those gauges.
pub const PER_QUEUE: (&str, &[&str]) = ("queue", WATCHED);
/// Of documented gauges.
pub const MINUTE_ACK_RESULTS: &[&str] = &["success", "failed"];
/// Of documented gauges.
pub const LAG_STATS: &[&str] = &["avg", "max"];
/// Of documented gauges that tell about the whole database.
pub const CLUSTER: &[&str] = &["cluster"];

/// Background tasks of the supervisor (`app.rs`).
pub const LOOPS: &[&str] = &[
    "ready_deadlines",
    "discovery",
    "ready_reconcile",
    "sweep",
    "retention",
    "maintenance",
    "spool_drain",
    "peer_heartbeat",
    "peer_sender",
    "peer_listener",
    "statistics",
    "segment_sizes",
    "watched_queues",
    "push_flush",
    "queue_contacts",
    "group_contacts",
    "claims",
    "segment_reads",
    "transaction_flush",
    "minutes",
    "metrics_upkeep",
    "finish_boot",
];
/// Rules of retention, as in its history (`spec/admin.md` §8.2).
pub const RETENTION_RULES: &[&str] = &["completed_retention", "retention", "max_wait_time_eviction"];
/// How a pass of a background task ended.
pub const PASS_RESULTS: &[&str] = &["done", "failed"];
/// Whose CPU time.
pub const CPU_MODES: &[&str] = &["user", "system"];
/// Statements by the words that errors and logs use for them (`store::error::Timed`).
pub const STATEMENTS: &[&str] = &[
    "ack",
    "ack flush",
    "begin of pop",
    "begin of push",
    "begin of transaction",
    "changed partitions",
    "begin of retention",
    "claiming",
    "commit of configure",
    "commit of group delete",
    "commit of pop",
    "commit of push",
    "commit of queue delete",
    "commit of seek",
    "commit of transaction",
    "commit of retention",
    "configure",
    "counting dead letters",
    "counting deliverable messages",
    "counting groups",
    "counting messages by age",
    "counting segments",
    "counting traces",
    "creating groups",
    "creating partitions",
    "creating queues",
    "database report",
    "deduplication probe",
    "deleting dead letters",
    "depth",
    "deleting segments",
    "extending a lease",
    "filing dead letters",
    "finding a dead letter",
    "finding a group",
    "finding a message",
    "finding a partition",
    "finding changed sizes",
    "finding dead offsets",
    "finding due work",
    "finding groups",
    "finding queues",
    "finding queues by label",
    "finding queues of groups",
    "finding recent partitions",
    "group delete",
    "heartbeat",
    "label changes",
    "lifetime",
    "listing brokers",
    "listing cursors",
    "listing dead letters",
    "listing groups",
    "listing labels",
    "listing lagging cursors",
    "listing messages",
    "listing partitions",
    "listing queues",
    "listing trace names",
    "listing traces",
    "locking cursors",
    "locking dead letters",
    "holding a loop",
    "listing for retention",
    "locking partitions",
    "looking up a commit",
    "moving a subscription",
    "moving cursors",
    "notify",
    "hanging up",
    "overview",
    "paging partitions",
    "paging queues",
    "partition liveness",
    "ping",
    "purging hashes",
    "purging leases",
    "purging minutes",
    "queue delete",
    "reading a cursor",
    "reading a message",
    "reading a timestamp",
    "reading cursors",
    "reading minutes",
    "switches",
    "spool mark",
    "reading queen.meta",
    "deletion history",
    "reading segments",
    "reading transaction ids",
    "recent operations",
    "recording a lease",
    "recording a trace",
    "registering groups",
    "removing partitions",
    "rescheduling queues",
    "rollback of push",
    "rollback of transaction",
    "safe time",
    "sampling dead letters",
    "saving minutes",
    "saving statistics",
    "sealing cursors",
    "seeding cursors",
    "seek",
    "shrinking a lease",
    "shrinking an automatic ack",
    "sign-off",
    "storing segments",
    "summing a queue",
    "summing queues",
    "summing sizes",
    "taking a turn",
    "taking lists",
    "walking partitions",
    "watched queues",
    OTHER,
];
