-- Switches that all brokers obey: maintenance_mode, pop_maintenance_mode; the value is {"enabled": bool}. No row: off.
CREATE TABLE queen.system_state (
    key        text COLLATE "C" PRIMARY KEY,
    value      jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- How far the disk spool of a broker has been stored, per partition: written by the transaction that stores, so that a
-- broker that dies before it has cut its file stores nothing twice. Removed when the spool has run empty.
CREATE TABLE queen.spool_marks (
    spool        uuid NOT NULL,
    partition_id bigint NOT NULL,
    position     bigint NOT NULL,
    PRIMARY KEY (spool, partition_id)
);
