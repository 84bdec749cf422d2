-- The log: queues, partitions, segments, their hash index, consumer cursors, dead letters.
-- Why it looks like this (key sizes, fillfactor, lock order, hot statements): docs/adr/2026-11-29-schema-and-hot-statements.md

CREATE SCHEMA IF NOT EXISTS queen;

-- One row. The tag makes ids of this database recognisable on the wire, the secret keeps their order from showing.
CREATE TABLE queen.meta (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    id_tag     bigint NOT NULL,
    id_secret  bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO queen.meta (id_tag, id_secret)
VALUES (('x' || translate(left(gen_random_uuid()::text, 13), '-', ''))::bit(48)::bigint,
        ('x' || right(gen_random_uuid()::text, 12))::bit(48)::bigint);

-- The tenant of every request that names none (spec/security-operations.md §3.1).
CREATE FUNCTION queen.default_tenant() RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN '00000000-0000-0000-0000-000000000001'::uuid;

CREATE TABLE queen.queues (
    id                              int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant                          uuid NOT NULL DEFAULT queen.default_tenant(),
    name                            text COLLATE "C" NOT NULL,
    namespace                       text COLLATE "C" NOT NULL DEFAULT '',
    task                            text COLLATE "C" NOT NULL DEFAULT '',
    lease_time                      int NOT NULL DEFAULT 60,
    retry_limit                     int NOT NULL DEFAULT 3,
    retry_delay                     int NOT NULL DEFAULT 0,
    dead_letter_queue               boolean NOT NULL DEFAULT true,
    dlq_after_max_retries           boolean NOT NULL DEFAULT true,
    delayed_processing              int NOT NULL DEFAULT 0,
    window_buffer                   int NOT NULL DEFAULT 0,
    min_pop_wait_time               int NOT NULL DEFAULT 0,
    retention_enabled               boolean NOT NULL DEFAULT false,
    retention_seconds               int NOT NULL DEFAULT 0,
    completed_retention_seconds     int NOT NULL DEFAULT 0,
    max_wait_time_seconds           int NOT NULL DEFAULT 0,
    encryption_enabled              boolean NOT NULL DEFAULT false,
    dedup_window_seconds            int NOT NULL DEFAULT 3600,
    retention_sink_hold             text NOT NULL DEFAULT '',
    retention_sink_hold_max_seconds int NOT NULL DEFAULT 604800,
    priority                        int NOT NULL DEFAULT 0,
    ttl                             int NOT NULL DEFAULT 3600,
    max_size                        int NOT NULL DEFAULT 0,
    created_at                      timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant, name)
);
CREATE INDEX queues_labels ON queen.queues (tenant, namespace, task);

-- The allocator of one partition. Updated by every push: no updated column is indexed, so the updates stay HOT.
CREATE TABLE queen.log_partitions (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    last_offset   bigint NOT NULL DEFAULT -1,
    log_start     bigint NOT NULL DEFAULT 0,
    txns_start    bigint NOT NULL DEFAULT 0,
    last_write_at timestamptz NOT NULL DEFAULT now(),
    created_at    timestamptz NOT NULL DEFAULT now(),
    queue_id      int NOT NULL,
    name          text COLLATE "C" NOT NULL,
    UNIQUE (queue_id, name)
) WITH (fillfactor = 80, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- One row per segment: consecutive messages of one partition, packed and compressed by the broker.
-- `writer` is the pushing transaction: what a group's registration snapshot could see (subscription mode `new`).
CREATE TABLE queen.log_segments (
    partition_id  bigint NOT NULL,
    base_offset   bigint NOT NULL,
    created_at    timestamptz NOT NULL,
    writer        xid8 NOT NULL DEFAULT pg_current_xact_id(),
    message_count int NOT NULL,
    payload_bytes int NOT NULL,
    frames        bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.3,
        toast.vacuum_truncate = off, toast.autovacuum_vacuum_scale_factor = 0.1,
        toast.autovacuum_vacuum_insert_scale_factor = 0.3);

-- 16 bytes per message, in offset order: xxh3-128 of the transaction id. Written on every push.
CREATE TABLE queen.log_txns (
    partition_id bigint NOT NULL,
    base_offset  bigint NOT NULL,
    created_at   timestamptz NOT NULL,
    hashes       bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset),
    CHECK (octet_length(hashes) % 16 = 0)
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.3,
        toast.vacuum_truncate = off, toast.autovacuum_vacuum_scale_factor = 0.1,
        toast.autovacuum_vacuum_insert_scale_factor = 0.3);

-- Frames and hashes come compressed or incompressible: TOAST must not try again.
ALTER TABLE queen.log_segments ALTER COLUMN frames SET STORAGE EXTERNAL;
ALTER TABLE queen.log_txns ALTER COLUMN hashes SET STORAGE EXTERNAL;

-- A group of a queue. `mode` is null until its first wildcard or discovery pop registers it (spec/push-pop.md §7.10).
CREATE TABLE queen.consumer_groups (
    id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id      int NOT NULL,
    name          text COLLATE "C" NOT NULL,
    mode          text CHECK (mode IN ('all', 'new', 'timestamp')),
    subscribed_at timestamptz,
    snapshot      pg_snapshot,
    conflation    boolean NOT NULL DEFAULT false,
    created_at    timestamptz NOT NULL DEFAULT now(),
    UNIQUE (queue_id, name)
);

-- The cursor and lease of one (partition, group). Nothing but the key is indexed: claims and acks stay HOT.
--   committed          last finished offset, -1 = none
--   batch_end          inclusive end of the leased span (committed, batch_end], null without a lease
--   not_before         a charged `failed` waits until then (retryDelay)
--   attempt_start      first offset of the last claim, with `attempts` the source of deliveryAttempt
--   attempt_end        last offset of the last claim: what was delivered once is not held back again (windowBuffer)
CREATE TABLE queen.log_consumers (
    partition_id      bigint NOT NULL,
    group_id          int NOT NULL,
    batch_retry_count int NOT NULL DEFAULT 0,
    committed         bigint NOT NULL,
    total_consumed    bigint NOT NULL DEFAULT 0,
    attempts          int NOT NULL DEFAULT 0,
    attempt_start     bigint,
    attempt_end       bigint,
    batch_end         bigint,
    worker_id         uuid,
    lease_expires_at  timestamptz,
    lease_acquired_at timestamptz,
    not_before        timestamptz,
    PRIMARY KEY (partition_id, group_id)
) WITH (fillfactor = 70, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- The partitions of a lease that spans several. A lease on one partition names it in its own id (src/ids.rs), so
-- that extending a lease never searches the cursors. Expired rows are purged in the background.
CREATE TABLE queen.leases (
    id            uuid PRIMARY KEY,
    partition_ids bigint[] NOT NULL,
    expires_at    timestamptz NOT NULL
);

-- A snapshot of what was given up. No foreign key: it outlives retention.
CREATE TABLE queen.dead_letters (
    id                 uuid PRIMARY KEY,
    tenant             uuid NOT NULL DEFAULT queen.default_tenant(),
    queue_id           int NOT NULL,
    partition_id       bigint NOT NULL,
    log_offset         bigint NOT NULL,
    group_name         text COLLATE "C" NOT NULL,
    queue_name         text COLLATE "C" NOT NULL,
    partition_name     text COLLATE "C" NOT NULL,
    message_id         uuid NOT NULL,
    transaction_id     text NOT NULL,
    payload            bytea NOT NULL,
    reason             text NOT NULL,
    retry_count        int NOT NULL,
    message_created_at timestamptz NOT NULL,
    failed_at          timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX dead_letters_queue ON queen.dead_letters (queue_id, failed_at DESC, id DESC);
CREATE INDEX dead_letters_address ON queen.dead_letters (partition_id, log_offset);
