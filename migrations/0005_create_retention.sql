-- What retention finds its work by, what it has deleted, and who runs it.
-- Why it looks like this: docs/adr/2026-11-30-retention.md

-- One row per partition that holds segments (kind 0) or hashes (kind 1). A push adds it when it finds the partition empty;
-- retention moves it along. Guarded by the lock on the partition row.
--   oldest_at   age of the oldest one, never too young; of a partition whose deletion waits for a cursor a later instant
CREATE TABLE queen.log_ages (
    partition_id bigint NOT NULL,
    oldest_at    timestamptz NOT NULL,
    queue_id     int NOT NULL,
    kind         smallint NOT NULL CHECK (kind IN (0, 1)),
    PRIMARY KEY (partition_id, kind)
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
CREATE INDEX log_ages_oldest ON queen.log_ages (kind, queue_id, oldest_at);

-- When to look at a queue's ages again: nothing in it can be due earlier. A changed window is looked at at once.
CREATE TABLE queen.retention_queues (
    queue_id int NOT NULL,
    kind     smallint NOT NULL CHECK (kind IN (0, 1)),
    check_at timestamptz NOT NULL,
    PRIMARY KEY (queue_id, kind)
) WITH (vacuum_truncate = off);
CREATE INDEX retention_queues_due ON queen.retention_queues (kind, check_at);

CREATE FUNCTION queen.note_queue_windows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.retention_queues (queue_id, kind, check_at)
    VALUES (NEW.id, 0, clock_timestamp()), (NEW.id, 1, clock_timestamp())
    ON CONFLICT (queue_id, kind) DO UPDATE SET check_at = excluded.check_at;
    RETURN NULL;
END $$;
CREATE TRIGGER queues_windows_new AFTER INSERT ON queen.queues
    FOR EACH ROW EXECUTE FUNCTION queen.note_queue_windows();
CREATE TRIGGER queues_windows_changed AFTER UPDATE ON queen.queues
    FOR EACH ROW WHEN ((OLD.retention_enabled, OLD.retention_seconds, OLD.completed_retention_seconds,
        OLD.max_wait_time_seconds, OLD.dedup_window_seconds, OLD.retention_sink_hold, OLD.retention_sink_hold_max_seconds)
      IS DISTINCT FROM (NEW.retention_enabled, NEW.retention_seconds, NEW.completed_retention_seconds,
        NEW.max_wait_time_seconds, NEW.dedup_window_seconds, NEW.retention_sink_hold, NEW.retention_sink_hold_max_seconds))
    EXECUTE FUNCTION queen.note_queue_windows();
INSERT INTO queen.retention_queues (queue_id, kind, check_at)
SELECT q.id, k, clock_timestamp() FROM queen.queues q CROSS JOIN generate_series(0, 1) AS k
ON CONFLICT DO NOTHING;

-- Partitions without a segment, since when: candidates for removal. A row may be out of date; the remover looks again.
CREATE TABLE queen.empty_partitions (
    partition_id bigint PRIMARY KEY,
    look_at      timestamptz NOT NULL
) WITH (vacuum_truncate = off);
CREATE INDEX empty_partitions_due ON queen.empty_partitions (look_at);

-- What was deleted, per step and queue. The queue may be gone. `partition_id` is null for several partitions at once.
CREATE TABLE queen.retention_history (
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    messages     bigint NOT NULL,
    partition_id bigint,
    queue_id     int NOT NULL,
    partitions   int NOT NULL,
    tenant       uuid NOT NULL,
    kind         text COLLATE "C" NOT NULL
) WITH (vacuum_truncate = off);
CREATE INDEX retention_history_at ON queen.retention_history (at);

-- Work that one broker does for all.
--   walked_at, walk_after   when the last walk over all partitions began, and how far the present one is (null: at rest)
CREATE TABLE queen.loop_leases (
    name       text COLLATE "C" PRIMARY KEY,
    holder     uuid NOT NULL,
    held_until timestamptz NOT NULL,
    walked_at  timestamptz,
    walk_after bigint
);
