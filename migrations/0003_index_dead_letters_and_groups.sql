-- Listings of dead letters read one index range each, newest first; 0001 has the one by queue.
CREATE INDEX dead_letters_failed ON queen.dead_letters (tenant, failed_at DESC, id DESC);
CREATE INDEX dead_letters_group ON queen.dead_letters (tenant, group_name, failed_at DESC, id DESC);
CREATE INDEX dead_letters_queue_group ON queen.dead_letters (queue_id, group_name, failed_at DESC, id DESC);
-- The dead letters of one message, by its address on the wire.
CREATE INDEX dead_letters_message ON queen.dead_letters (partition_id, transaction_id);

-- A group of many queues is found by its name.
CREATE INDEX consumer_groups_name ON queen.consumer_groups (name, queue_id);

-- When the group was registered: partitions older than that have a place for it, whether their cursor was made yet or not.
-- `subscribed_at` is what an operator may move (spec/admin.md §7.4).
ALTER TABLE queen.consumer_groups ADD COLUMN registered_at timestamptz;
UPDATE queen.consumer_groups SET registered_at = CASE mode WHEN 'timestamp' THEN created_at ELSE subscribed_at END
WHERE mode IS NOT NULL;
