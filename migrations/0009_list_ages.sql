-- no-transaction
-- Retention finds its work in lists of partitions, instead of a row per partition and kind.
-- Why it looks like this, and what brokers of before do meanwhile: docs/adr/2026-11-30-retention.md
--
-- Several short transactions, each safe to run again: moving a million rows must not hold a lock that pushes wait for.

BEGIN;

-- Partitions that hold segments (kind 0) or hashes (kind 1), by the age of the oldest one. A push adds a list of those that it
-- finds empty; retention takes lists and lists again what is left. A partition that holds something is in at least one list
-- of its kind. One that is in two, is empty or is gone costs a look, no more. After its insertion a list only loses members.
--   oldest_at   never younger than the oldest thing in any of the partitions; of a partition whose deletion waits for a
--               cursor a later instant
CREATE TABLE IF NOT EXISTS queen.log_age_lists (
    id            bigint GENERATED ALWAYS AS IDENTITY,
    oldest_at     timestamptz NOT NULL,
    queue_id      int NOT NULL,
    kind          smallint NOT NULL CHECK (kind IN (0, 1)),
    partition_ids bigint[] NOT NULL,
    PRIMARY KEY (kind, queue_id, oldest_at, id)
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);

-- Brokers of before still write to `log_ages`: what they write becomes a list.
CREATE OR REPLACE FUNCTION queen.list_age() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids)
    VALUES (NEW.kind, NEW.queue_id, NEW.oldest_at, ARRAY[NEW.partition_id]);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER log_ages_listed BEFORE INSERT ON queen.log_ages
    FOR EACH ROW EXECUTE FUNCTION queen.list_age();

-- And they must not run retention: they would find nothing in `log_ages`, and their walk would enter everything again.
INSERT INTO queen.loop_leases (name, holder, held_until)
VALUES ('retention', '00000000-0000-0000-0000-000000000000', 'infinity')
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, held_until = excluded.held_until, walk_after = NULL;

COMMIT;

-- No row is added any more. One that an old step moves or deletes meanwhile leaves an entry that costs a look.
BEGIN;
SET LOCAL statement_timeout = 0;
SET LOCAL enable_seqscan = on;
INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids)
SELECT kind, queue_id, min(oldest_at), array_agg(partition_id ORDER BY partition_id)
FROM (SELECT a.*, (row_number() OVER (PARTITION BY kind, queue_id ORDER BY oldest_at) - 1) / 32 AS nth
      FROM queen.log_ages a) a
GROUP BY kind, queue_id, nth;
TRUNCATE queen.log_ages;
DROP INDEX IF EXISTS queen.log_ages_oldest;
COMMIT;
