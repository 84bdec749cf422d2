-- Rows of partitions and cursors say only what does not follow from the rest of them.
--
--   log_partitions.created_at      NULL: when it was last written; it was written once
--   log_consumers.total_consumed   NULL: everything below the cursor, committed + 1
--
-- Nothing is rewritten. Brokers of before go on delivering. Until they are replaced, what they show of such rows is wanting:
-- a listing of groups fails, a partition that they write to gets younger (docs/adr/2026-11-29-schema-and-hot-statements.md).
ALTER TABLE queen.log_partitions ALTER COLUMN created_at DROP NOT NULL;
ALTER TABLE queen.log_consumers ALTER COLUMN total_consumed DROP NOT NULL;
