//! Every metric: name, kind, buckets, labels with all their values, help. Registered once, at zero; `docs/metrics.md` has
//! a row for each, and `tests/tidy.rs` compares the two.
//!
//! A label has a short list of values, given in `metrics/labels.rs`: never a partition or group, and a queue only if it is one
//! of the few that are watched (`broker/watched_queues.rs`). Names are those of the documented
//! families (`spec/admin.md` §14) where the meaning is the same, ours start with `regent_`.

mod labels;

use metrics::{Label, describe_counter, describe_gauge, describe_histogram};

pub use labels::*;

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution over fixed buckets.
    Histogram,
}

/// One declared metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Family name.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Upper bounds of a histogram's buckets; empty for the other kinds.
    pub buckets: &'static [f64],
    /// Its labels, each with every value that it can have.
    pub labels: &'static [(&'static str, &'static [&'static str])],
    /// Help text.
    pub help: &'static str,
}

macro_rules! buckets {
    () => {
        &[]
    };
    ($own:ident) => {
        &$own
    };
}

macro_rules! metrics {
    ($($const:ident = $kind:ident $(($buckets:ident))? $name:literal $([$($label:literal $values:ident),+])?, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $const: &str = $name;
        )*
        /// Every metric that the broker exposes.
        pub const ALL: &[Metric] = &[$(Metric {
            name: $name,
            kind: Kind::$kind,
            buckets: buckets!($($buckets)?),
            labels: &[$($(($label, $values)),+)?],
            help: $help,
        }),*];
    };
}

const SECONDS: [f64; 15] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
const STATEMENT_SECONDS: [f64; 12] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0];
const AGE_SECONDS: [f64; 12] = [0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0, 3600.0, 86400.0];
const COUNTS: [f64; 13] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];

metrics! {
    // The process.
    UPTIME = Gauge "queen_uptime_seconds", "Seconds since the process started.";
    RESIDENT_MEMORY = Gauge "queen_process_resident_memory_bytes", "Resident memory of the process.";
    CPU = Gauge "regent_process_cpu_seconds" ["mode" CPU_MODES], "CPU time of the process since its start; only grows.";
    OPEN_FDS = Gauge "regent_process_open_fds", "Open file descriptors.";
    MAX_FDS = Gauge "regent_process_max_fds", "File descriptors that the process may open.";
    LOOP_RESTARTS = Counter "regent_loop_restarts_total" ["loop" LOOPS], "Background tasks that crashed and were started again.";
    LOOP_RUNNING = Gauge "regent_loop_running" ["loop" LOOPS], "Background tasks that have not ended.";
    LOOP_PASSES = Counter "regent_loop_passes_total" ["loop" LOOPS, "result" PASS_RESULTS], "Passes of periodic background tasks.";
    POSTGRES_RESTARTS = Counter "regent_postgres_restarts_total", "Times that the PostgreSQL inside this broker was started again after it ended by itself.";

    // HTTP.
    HTTP_REQUESTS = Counter "regent_http_requests_total" ["route" ROUTES, "status" HTTP_STATUS], "Requests by route template and status class.";
    HTTP_SECONDS = Histogram(SECONDS) "regent_http_request_seconds" ["route" TIMED_ROUTES], "Time from request to answer; a long poll counts its waiting.";
    HTTP_INFLIGHT = Gauge "regent_http_requests_inflight", "Requests under way, long polls included.";
    ERRORS = Counter "regent_errors_total" ["kind" ERROR_KINDS], "Requests refused or failed as a whole.";

    // Push.
    PUSH_REQUESTS = Counter "queen_process_push_requests_total", "Push requests.";
    PUSH_MESSAGES = Counter "queen_process_push_messages_total", "Messages in push requests, whatever became of them.";
    PUSH_ITEMS = Counter "regent_push_items_total" ["status" PUSH_STATUS], "Pushed messages by what became of them.";
    PUSH_PAYLOAD_BYTES = Counter "regent_push_payload_bytes_total", "Payload bytes in push requests.";
    PUSH_INFLIGHT_BYTES = Gauge "regent_push_inflight_bytes", "Bytes of pushes under way, as admission counts them.";
    PUSH_INFLIGHT_BYTES_MAX = Gauge "regent_push_inflight_bytes_max", "Bytes of pushes under way past which pushes are refused.";
    PUSH_FLUSH_SECONDS = Histogram(SECONDS) "regent_push_flush_seconds", "Time of one push flush, from its first statement to its commit.";
    PUSH_FLUSH_GROUPS = Histogram(COUNTS) "regent_push_flush_groups", "Groups (request and partition) that shared one push flush.";
    PUSH_FLUSH_MESSAGES = Histogram(COUNTS) "regent_push_flush_messages", "Messages that shared one push flush.";
    PUSH_FLUSH_FAILURES = Counter "regent_push_flush_failures_total", "Push flushes that failed for good; their items answered failed.";
    PUSH_FLUSH_RETRIES = Counter "regent_push_flush_retries_total", "Push flushes that failed and were tried again.";
    PUSH_SEGMENTS = Counter "regent_push_segments_total", "Segments stored.";
    BATCHES_FIRED = Counter "queen_batches_fired_total" ["op" FUSION_OPS], "Shared database transactions.";
    BATCH_ITEMS_FIRED = Counter "queen_batch_items_fired_total" ["op" FUSION_OPS], "Requests or their parts that shared them.";
    DEDUP_MEMORY_BYTES = Gauge "regent_dedup_memory_bytes", "Memory of recent transaction ids.";
    DEDUP_CANDIDATES = Counter "regent_dedup_candidates_total", "Stored offsets that memory named and PostgreSQL was asked about.";
    DEDUP_READS_TOTAL = Counter "regent_dedup_reads_total" ["kind" DEDUP_READS], "Partitions whose stored transaction ids were read, by reason.";

    // Pop.
    POP_REQUESTS = Counter "queen_process_pop_requests_total", "Pop requests.";
    POP_MESSAGES = Counter "queen_process_pop_messages_total", "Messages delivered.";
    POP_TARGETED = Counter "queen_pop_targeted_total", "Pops of one named partition.";
    POP_WILDCARD = Counter "queen_pop_wildcard_total", "Pops of a queue, or of queues by label.";
    POP_FILL_WAITS = Counter "queen_pop_fill_wait_total", "Pops that minPopWaitTime made wait for more.";
    POP_FILL_WAIT_MICROSECONDS = Counter "queen_pop_fill_wait_microseconds_total", "How long minPopWaitTime made them wait.";
    PARKED_LONG_POLLS = Gauge "queen_parked_long_polls", "Long polls that are parked.";
    POPS = Counter "regent_pops_total" ["scope" POP_SCOPES, "result" POP_RESULTS], "Pops by scope and by how they ended.";
    POP_DELIVERIES = Counter "regent_pop_deliveries_total" ["attempt" ATTEMPTS], "Delivered messages: first delivery, or again.";
    POP_DELIVERY_AGE = Histogram(AGE_SECONDS) "regent_pop_delivery_age_seconds", "Age of the oldest message of each delivered partition; the broker's clock against the database's.";
    POP_CLAIM_SECONDS = Histogram(SECONDS) "regent_pop_claim_seconds", "Time from a claim to its outcome, its wait for the statement and new cursors included.";
    POP_CLAIM_WAIT_SECONDS = Histogram(SECONDS) "regent_pop_claim_wait_seconds", "Time that an autoAck pop waited for its turn to claim, if it had to.";
    POP_CLAIMS = Counter "regent_pop_claims_total" ["outcome" CLAIM_OUTCOMES], "Candidate partitions of claims by what was found.";
    POP_CLAIM_FLUSH_POPS = Histogram(COUNTS) "regent_pop_claim_flush_pops", "Pops that shared one claim statement.";
    POP_SPANS_READ = Counter "regent_pop_spans_read_total" ["from" SPAN_SOURCES], "Claimed spans by where their segments came from.";
    SEGMENT_CACHE_BYTES = Gauge "regent_segment_cache_bytes", "Memory of the newest segments.";
    POP_CLAIMING = Gauge "regent_pop_claiming", "autoAck pops that have their turn to claim and read.";
    POP_WAITING = Gauge "regent_pop_waiting", "Pops that wait for their turn to claim.";
    PARTITIONS_SEEDED = Counter "regent_ready_partitions_walked_total", "Partitions that the walk of a newly popped group looked at.";
    AUTOPILOT_LANES = Gauge "regent_pop_autopilot_lanes", "Groups whose pops leave their width to the broker.";
    AUTOPILOT_CHANGES = Counter "regent_pop_autopilot_changes_total" ["direction" AUTOPILOT_DIRECTIONS], "Changes of the width of such a group.";
    AUTOPILOT_WIDTH = Histogram(COUNTS) "regent_pop_autopilot_width", "Width of such a group at each look of a pop that found something ready.";
    DISCOVERY_FEEDS = Gauge "regent_discovery_feeds", "Groups that pop by label here, once per label.";
    DISCOVERY_MET = Counter "regent_discovery_queues_met_total", "Queues that such groups met for the first time.";
    DISCOVERY_VISITED = Counter "regent_discovery_queues_visited_total", "Queues that discovery pops claimed from.";
    READY_ENTRIES = Gauge "regent_ready_entries", "Partitions in the ready index, once per group.";
    READY_GROUPS = Gauge "regent_ready_groups", "Groups that are popped here.";
    READY_DEADLINES = Gauge "regent_ready_deadlines", "Held partitions with an instant at which they are looked at again.";

    // Acks.
    ACK_REQUESTS = Counter "queen_process_ack_requests_total", "Ack requests.";
    ACK_MESSAGES = Counter "queen_process_ack_messages_total", "Items in ack requests, whatever became of them.";
    ACK_HITS = Counter "regent_ack_hits_total", "Acks that covered exactly what was delivered under their lease.";
    ACK_MISSES = Counter "regent_ack_misses_total" ["reason" ACK_MISS_REASONS], "Acks that took full hash resolution, by reason.";
    ACK_FLUSH_ROWS = Histogram(COUNTS) "regent_ack_flush_rows", "Cursor rows that shared one ack flush.";
    ACK_FLUSH_SECONDS = Histogram(SECONDS) "regent_ack_flush_seconds", "Time of one ack flush, until its outcome was known.";
    ACK_REFUSED = Counter "regent_ack_refused_total", "Positional advances that PostgreSQL refused; they took full hash resolution.";
    ACK_FLUSH_FAILURES = Counter "regent_ack_flush_failures_total", "Ack flushes whose statement failed.";
    ACK_INFLIGHT_BYTES = Gauge "regent_ack_inflight_bytes", "Bytes of ack calls under way, as admission counts them.";
    ACK_INFLIGHT_BYTES_MAX = Gauge "regent_ack_inflight_bytes_max", "Bytes of ack calls under way past which acks answer pool.";
    ACK_QUEUE_DEPTH = Gauge "regent_ack_queue_depth", "Positional advances that wait for a flush.";
    ACK_ACTORS = Gauge "regent_ack_partition_actors", "Partitions with a lease in the registry of this broker.";
    ACK_REGISTRY_BYTES = Gauge "regent_ack_registry_bytes", "Memory of the lease registry.";
    ACK_EVICTED = Counter "regent_ack_evicted_total", "Leases that left the registry early because it was full.";
    ACK_UNREGISTERED = Counter "regent_ack_unregistered_total", "Leases that the registry had no room for.";
    ACK_SECONDS = Histogram(SECONDS) "regent_ack_seconds" ["path" ACK_PATHS], "Time from request to answer of the acks of one lease, by path.";
    ACK_ITEMS = Counter "regent_ack_items_total" ["result" ACK_RESULTS], "Acknowledged messages, by result.";
    DEAD_LETTERS = Counter "regent_dead_letters_total", "Messages moved to the dead-letter table.";
    DEAD_LETTER_MOVES = Counter "regent_dead_letter_moves_total" ["result" DEAD_LETTER_MOVE_RESULTS], "Replays of dead letters, by result.";

    // Transactions.
    TRANSACTIONS = Counter "regent_transactions_total" ["outcome" TRANSACTION_OUTCOMES], "Transactions by how they were answered.";
    TRANSACTION_OPERATIONS = Counter "regent_transaction_operations_total" ["type" TRANSACTION_OPERATION_TYPES], "Pushed items and acks in transactions, whatever became of them.";
    TRANSACTION_FLUSH_BUNDLES = Histogram(COUNTS) "regent_transaction_flush_bundles", "Transactions that shared one database transaction.";
    TRANSACTION_FLUSH_SECONDS = Histogram(SECONDS) "regent_transaction_flush_seconds", "Time of one such database transaction, until its outcome was known.";
    TRANSACTION_FLUSH_RETRIES = Counter "regent_transaction_flush_retries_total", "Those that failed for a passing cause and were tried again.";
    TRANSACTION_SEARCHES = Counter "regent_transaction_searches_total", "Transactions that had to search for ids outside the leased batch before they could be decided.";
    TRANSACTION_SIGNALS_BELOW = Counter "regent_transaction_signals_below_cursor_total", "Acks other than completed, in committed transactions, of messages that the cursor had passed; they did nothing.";
    TRANSACTION_LOST_ANSWERS = Counter "regent_transaction_lost_answers_total", "Commits of transactions whose answer was lost and whose outcome was looked up.";
    TRANSACTIONS_WAITING = Gauge "regent_transactions_waiting", "Transactions that wait for a flush.";
    // The disk spool.
    SPOOL_PENDING = Gauge "queen_file_buffer_pending", "Messages on this broker's disk that are not in PostgreSQL yet.";
    SPOOL_FAILED = Gauge "queen_file_buffer_failed", "Messages that could not be written to the spool; they answered failed.";
    SPOOL_DB_HEALTHY = Gauge "queen_file_buffer_db_healthy", "1 while PostgreSQL takes pushes, 0 while they go to disk.";
    SPOOL_RECORDS = Counter "regent_spool_records_total" ["result" SPOOL_RESULTS], "Messages of the disk spool: written, stored in PostgreSQL, found stored already, put aside for good.";
    MAINTENANCE = Gauge "queen_maintenance_mode_enabled", "1 while push maintenance is on.";

    // Single queues: those that the operator names, and the busiest few.
    QUEUE_PUSHED = Counter "regent_queue_pushed_messages_total" ["queue" QUEUES], "Messages stored by this broker, by watched queue.";
    QUEUE_POPPED = Counter "regent_queue_popped_messages_total" ["queue" QUEUES], "Messages delivered by this broker, by watched queue.";
    QUEUE_ACKED = Counter "regent_queue_acked_messages_total" ["queue" QUEUES, "result" ACK_RESULTS], "Ack items settled by this broker, by watched queue.";
    QUEUE_RETAINED = Gauge "regent_queue_retained_messages" ["queue" WATCHED], "Messages that are retained.";
    QUEUE_PENDING = Gauge "regent_queue_pending_messages" ["queue" WATCHED], "Messages above the slowest cursor.";
    QUEUE_LEASED = Gauge "regent_queue_leased_messages" ["queue" WATCHED], "Pending messages under a live lease.";
    QUEUE_OLDEST_AGE = Gauge "regent_queue_oldest_pending_seconds" ["queue" WATCHED], "Age of the oldest pending message; 0 without one.";
    QUEUE_PARKED = Gauge "regent_queue_parked_pops" ["queue" WATCHED], "Pops of this broker that are parked now.";
    QUEUE_SNAPSHOT_AGE = Gauge "regent_queue_snapshot_age_seconds" ["queue" WATCHED], "Age of the snapshot behind the counts of messages.";
    DLQ_DEPTH = Gauge "queen_dlq_depth" ["scope" CLUSTER], "Dead letters of all queues, as of their snapshots.";
    DLQ_DEPTH_BY_QUEUE = Gauge "queen_dlq_depth_by_queue" ["queue" WATCHED], "Dead letters.";
    QUEUE_PUSH_MESSAGES_PER_MINUTE = Gauge "queen_queue_push_messages_per_minute" ["queue" WATCHED], "Messages stored by all brokers in the newest minute bucket.";
    QUEUE_PUSH_REQUESTS_PER_MINUTE = Gauge "queen_queue_push_requests_per_minute" ["queue" WATCHED], "Push requests in it.";
    QUEUE_POP_MESSAGES_PER_MINUTE = Gauge "queen_queue_pop_messages_per_minute" ["queue" WATCHED], "Messages delivered in it.";
    QUEUE_POP_EMPTY_PER_MINUTE = Gauge "queen_queue_pop_empty_per_minute" ["queue" WATCHED], "Pops answered without a message in it.";
    QUEUE_CONFLATED_PER_MINUTE = Gauge "queen_queue_conflated_per_minute" ["queue" WATCHED], "Positions retired without a delivery in it.";
    QUEUE_TRANSACTIONS_PER_MINUTE = Gauge "queen_queue_transactions_per_minute" ["queue" WATCHED], "Transactions in it.";
    QUEUE_ACK_PER_MINUTE = Gauge "queen_queue_ack_per_minute" ["queue" WATCHED, "result" MINUTE_ACK_RESULTS], "Ack items settled in it.";
    QUEUE_POP_LAG = Gauge "queen_queue_pop_lag_milliseconds" ["queue" WATCHED, "stat" LAG_STATS], "Age of messages when they were delivered in it.";
    QUEUE_PARKED_CONSUMERS = Gauge "queen_queue_parked_consumers" ["queue" WATCHED], "Parked pops of all brokers in it, on average.";
    QUEUE_METRICS_AGE = Gauge "queen_queue_metrics_age_seconds" ["queue" WATCHED], "Seconds since that bucket began.";

    // Retention.
    RETENTION_SEGMENTS = Counter "regent_retention_segments_total" ["rule" RETENTION_RULES], "Segments deleted, by the rule that let them go.";
    RETENTION_MESSAGES = Counter "regent_retention_messages_total" ["rule" RETENTION_RULES], "Messages in deleted segments, by rule.";
    RETENTION_HASH_ROWS = Counter "regent_retention_hash_rows_total", "Rows of the hash index purged.";
    RETENTION_PARTITIONS = Counter "regent_retention_partitions_removed_total", "Empty partitions removed.";
    RETENTION_STEP_SECONDS = Histogram(SECONDS) "regent_retention_step_seconds", "Time of one deleting transaction, waiting for a connection and for locks included.";
    RETENTION_LAG = Gauge "regent_retention_lag_seconds", "How long the longest overdue queue has been due; 0 on brokers that leave the work to another.";
    RETENTION_WALKED = Counter "regent_retention_partitions_walked_total", "Partitions that the safety walk looked at.";

    // Other brokers.
    PEERS = Gauge "regent_peers", "Other live brokers on this database.";
    PEER_NOTIFICATIONS_SENT = Counter "regent_peer_notifications_sent_total", "Notifications sent to other brokers.";
    PEER_NOTIFICATIONS_HEARD = Counter "regent_peer_notifications_heard_total", "Notifications of other brokers that this one acted on.";
    PEER_NOTIFICATIONS_LOST = Counter "regent_peer_notifications_lost_total", "Notifications that could not be sent; other brokers find out by their own walks.";
    PEER_NOTIFICATIONS_MISSED = Counter "regent_peer_notifications_missed_total", "Notifications that were sent and never arrived here, by their numbers; each gap causes a walk.";
    PEER_SILENCES = Counter "regent_peer_silences_total", "Times that another broker fell silent, or that this one could not hear itself.";
    READY_WALKS = Counter "regent_ready_walks_total", "Walks through the partitions of what is popped here: after a gap, a silence or a lost connection, and every 300 s.";

    // PostgreSQL.
    POOL_SIZE = Gauge "queen_db_pool_size", "Open connections.";
    POOL_IDLE = Gauge "queen_db_pool_idle", "Open connections that nobody uses.";
    POOL_ACTIVE = Gauge "queen_db_pool_active", "Open connections in use.";
    POOL_MAX = Gauge "regent_db_pool_max", "Connections that may be open.";
    CONNECTIONS_OPENED = Counter "regent_db_connections_opened_total", "Connections opened since the start.";
    STATEMENT_SECONDS_TOTAL = Histogram(STATEMENT_SECONDS) "regent_db_statement_seconds" ["statement" STATEMENTS], "Round trips to PostgreSQL; the first of a transaction, and every statement outside one, counts its wait for a connection.";
    STORE_ERRORS = Counter "regent_db_errors_total" ["kind" STORE_ERROR_KINDS], "Failed statements, commits and checkouts.";
}

impl Metric {
    /// Every combination of values that its labels can have from the start; one empty one without labels, none for gauges
    /// of single queues.
    pub fn series(&self) -> Vec<Vec<Label>> {
        let mut all = vec![Vec::new()];
        for (key, values) in self.labels {
            let extend = |one: Vec<Label>| {
                values.iter().map(move |value| {
                    let label = Label::from_static_parts(key, value);
                    one.iter().cloned().chain([label]).collect()
                })
            };
            all = all.into_iter().flat_map(extend).collect();
        }
        all
    }
}

/// Describes every metric and brings every series of it to zero. The recorder must be installed.
pub fn register() {
    for metric in ALL {
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, metric.help),
            Kind::Gauge => describe_gauge!(metric.name, metric.help),
            Kind::Histogram => describe_histogram!(metric.name, metric.help),
        }
        for labels in metric.series() {
            match metric.kind {
                Kind::Counter => metrics::counter!(metric.name, labels).absolute(0),
                Kind::Gauge => metrics::gauge!(metric.name, labels).set(0.0),
                // Its existence is its zero.
                Kind::Histogram => drop(metrics::histogram!(metric.name, labels)),
            }
        }
    }
}
