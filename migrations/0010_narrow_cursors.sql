-- Narrow rows: a cursor without a claim keeps nothing of its last one (half the row of before), and pages are filled by what
-- was measured (docs/adr/2026-11-29-schema-and-hot-statements.md).
--
-- Nothing is rewritten, so it takes the same few milliseconds at a million partitions: rows shrink with their next ack, pages
-- fill as they are reused. Brokers of before keep working: they read `attempts` only from rows that they have just claimed.
ALTER TABLE queen.log_partitions SET (fillfactor = 95);
ALTER TABLE queen.log_consumers SET (fillfactor = 80);
ALTER TABLE queen.log_consumers ALTER COLUMN attempts DROP NOT NULL, ALTER COLUMN attempts DROP DEFAULT;
