-- The dead letters of all queues are the sum over the snapshots of those that have some. An update that leaves the number as it
-- is stays HOT.
CREATE INDEX stats_dead_letters ON queen.stats (queue_id) INCLUDE (dead_letters) WHERE dead_letters > 0;
