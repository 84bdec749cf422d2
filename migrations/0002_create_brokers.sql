-- Which brokers work on this database now. A broker that is alone sends no notifications: NOTIFY serialises commits.
-- Unlogged: after a crash of the database every broker enters itself again within seconds.
CREATE UNLOGGED TABLE queen.brokers (
    id        uuid PRIMARY KEY,
    name      text NOT NULL,
    last_seen timestamptz NOT NULL
);
