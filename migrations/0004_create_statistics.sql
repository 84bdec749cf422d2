-- What the read side shows: snapshots per queue, minute buckets, traces. Nothing here is written by a push, a pop or an ack.
-- How the snapshots are made, and what that costs: docs/adr/2026-11-30-inspection.md

-- One row per queue, recomputed in the background. `appended` and `evicted` are sums of offsets: as long as they are what they
-- were at the last pass over the segments, `segments`, `segment_messages` and `retained_bytes` still hold.
CREATE TABLE queen.stats (
    queue_id          int PRIMARY KEY,
    partitions        bigint NOT NULL,
    appended          bigint NOT NULL,
    evicted           bigint NOT NULL,
    pending           bigint NOT NULL,
    processing        bigint NOT NULL,
    leases            bigint NOT NULL,
    leased_partitions bigint NOT NULL,
    consumed          bigint NOT NULL,
    dead_letters      bigint NOT NULL,
    oldest_pending_at timestamptz,
    last_write_at     timestamptz,
    computed_at       timestamptz NOT NULL,
    segments          bigint NOT NULL DEFAULT 0,
    segment_messages  bigint NOT NULL DEFAULT 0,
    retained_bytes    bigint NOT NULL DEFAULT 0,
    bytes_appended    bigint NOT NULL DEFAULT 0,
    bytes_evicted     bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70, vacuum_truncate = off);

-- Which broker does a cycle of background work, and where the last one stopped.
CREATE TABLE queen.turns (
    name     text PRIMARY KEY,
    taken_at timestamptz NOT NULL,
    reached  int NOT NULL DEFAULT 0
);

-- Operations by minute, queue and broker. Queue 0 gathers what had no room for a row of its own.
CREATE TABLE queen.queue_minutes (
    bucket             timestamptz NOT NULL,
    queue_id           int NOT NULL,
    broker             text COLLATE "C" NOT NULL,
    push_requests      bigint NOT NULL DEFAULT 0,
    push_messages      bigint NOT NULL DEFAULT 0,
    pop_messages       bigint NOT NULL DEFAULT 0,
    pop_empty          bigint NOT NULL DEFAULT 0,
    ack_requests       bigint NOT NULL DEFAULT 0,
    ack_success        bigint NOT NULL DEFAULT 0,
    ack_failed         bigint NOT NULL DEFAULT 0,
    transactions       bigint NOT NULL DEFAULT 0,
    conflated          bigint NOT NULL DEFAULT 0,
    partitions_created bigint NOT NULL DEFAULT 0,
    partitions_deleted bigint NOT NULL DEFAULT 0,
    lag_count          bigint NOT NULL DEFAULT 0,
    lag_ms_sum         bigint NOT NULL DEFAULT 0,
    lag_ms_max         bigint NOT NULL DEFAULT 0,
    parked_sum         bigint NOT NULL DEFAULT 0,
    parked_samples     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (bucket, queue_id, broker)
) WITH (vacuum_truncate = off);

-- The health and the operations of each broker by minute.
CREATE TABLE queen.broker_minutes (
    bucket         timestamptz NOT NULL,
    broker         text COLLATE "C" NOT NULL,
    pid            int NOT NULL,
    cpu_user       bigint NOT NULL,
    cpu_system     bigint NOT NULL,
    rss_bytes      bigint NOT NULL,
    pool_size      bigint NOT NULL,
    pool_idle      bigint NOT NULL,
    pool_active    bigint NOT NULL,
    uptime_seconds bigint NOT NULL,
    loop_lag_count  bigint NOT NULL,
    loop_lag_us_sum bigint NOT NULL,
    loop_lag_us_max bigint NOT NULL,
    waiting_max    bigint NOT NULL,
    push_requests  bigint NOT NULL,
    push_messages  bigint NOT NULL,
    pop_requests   bigint NOT NULL,
    pop_messages   bigint NOT NULL,
    ack_requests   bigint NOT NULL,
    ack_success    bigint NOT NULL,
    ack_failed     bigint NOT NULL,
    transactions   bigint NOT NULL,
    dead_letters   bigint NOT NULL,
    db_errors      bigint NOT NULL,
    lag_count      bigint NOT NULL,
    lag_ms_sum     bigint NOT NULL,
    lag_ms_max     bigint NOT NULL,
    PRIMARY KEY (bucket, broker)
) WITH (vacuum_truncate = off);

-- What all brokers together have done since this table was made. One row, one update per broker and minute.
CREATE TABLE queen.lifetime (
    one           boolean PRIMARY KEY DEFAULT true CHECK (one),
    push_requests bigint NOT NULL DEFAULT 0,
    push_messages bigint NOT NULL DEFAULT 0,
    pop_requests  bigint NOT NULL DEFAULT 0,
    pop_messages  bigint NOT NULL DEFAULT 0,
    ack_requests  bigint NOT NULL DEFAULT 0,
    ack_success   bigint NOT NULL DEFAULT 0,
    ack_failed    bigint NOT NULL DEFAULT 0,
    transactions  bigint NOT NULL DEFAULT 0,
    dead_letters  bigint NOT NULL DEFAULT 0,
    db_errors     bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Events that applications record on message addresses. No foreign key: a trace outlives its message and its queue.
CREATE TABLE queen.traces (
    id             uuid PRIMARY KEY,
    tenant         uuid NOT NULL DEFAULT queen.default_tenant(),
    partition      uuid NOT NULL,
    partition_id   bigint,
    transaction_id text COLLATE "C" NOT NULL,
    group_name     text COLLATE "C" NOT NULL,
    event_type     text NOT NULL,
    worker_id      text NOT NULL,
    data           json NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    names          text[] NOT NULL DEFAULT '{}'
);
CREATE INDEX traces_address ON queen.traces (partition, transaction_id, created_at, id);

-- One row per name of a trace, and one per name: neither listing ever counts all traces.
CREATE TABLE queen.trace_names (
    tenant         uuid NOT NULL DEFAULT queen.default_tenant(),
    name           text COLLATE "C" NOT NULL,
    created_at     timestamptz NOT NULL,
    trace_id       uuid NOT NULL,
    transaction_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, name, created_at, trace_id)
);
CREATE INDEX trace_names_message ON queen.trace_names (tenant, md5(name), md5(transaction_id));
CREATE TABLE queen.trace_totals (
    tenant        uuid NOT NULL DEFAULT queen.default_tenant(),
    name          text COLLATE "C" NOT NULL,
    trace_count   bigint NOT NULL,
    message_count bigint NOT NULL,
    last_seen     timestamptz NOT NULL,
    PRIMARY KEY (tenant, name)
) WITH (fillfactor = 70);
