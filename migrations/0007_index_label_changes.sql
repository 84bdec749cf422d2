-- The transaction that made or last configured a queue; null before this migration. A broker that knows the queues of a
-- label reads by it what has changed since (src/store/labels.rs), so that discovery never reads them all again.
ALTER TABLE queen.queues ADD COLUMN labelled_by xid8;
ALTER TABLE queen.queues ALTER COLUMN labelled_by SET DEFAULT pg_current_xact_id();
CREATE INDEX queues_labelled ON queen.queues (labelled_by);
