-- A cursor without a claim keeps nothing of its last one: half the row of before. No row is rewritten here: each shrinks with
-- its next ack.
ALTER TABLE queen.log_consumers ALTER COLUMN attempts DROP NOT NULL, ALTER COLUMN attempts DROP DEFAULT;
