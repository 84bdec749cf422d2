//! What PostgreSQL counts: WAL, commits, fsyncs, table bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, Row};

use super::proc::PostmasterFile;

/// Roles and databases that a broker's own PostgreSQL may have, tried over its Unix socket.
const GUESSES: [(&str, &str); 4] =
    [("regent", "regent"), ("postgres", "regent"), ("postgres", "queen"), ("postgres", "postgres")];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Counters at one moment.
#[derive(Debug, Clone, Default, Serialize)]
pub struct PgSample {
    /// Position in the WAL.
    pub wal_bytes: i64,
    /// Committed transactions of the database, those that only read included.
    pub commits: i64,
    /// Transactions that wrote: the growth of the transaction id. Exact, and of the whole cluster.
    pub writes: i64,
    /// Rolled-back transactions of the database.
    pub rollbacks: i64,
    /// WAL fsyncs, where this version counts them.
    pub wal_syncs: Option<i64>,
    /// Heap and TOAST bytes of the schema `queen`.
    pub table_bytes: i64,
    /// Index bytes of the schema `queen`.
    pub index_bytes: i64,
    /// Heap, TOAST and index bytes by table.
    pub tables: BTreeMap<String, i64>,
}

/// Connects to the given database.
pub async fn connect(url: &str) -> Result<PgConnection> {
    let options: PgConnectOptions = url.parse().context("--database-url")?;
    Ok(options.connect().await?)
}

/// Connects to the server whose data directory this is, over its Unix socket.
pub async fn connect_local(file: &PostmasterFile) -> Option<PgConnection> {
    for (user, database) in GUESSES {
        let mut options = PgConnectOptions::new_without_pgpass().username(user).database(database).port(file.port);
        options = match &file.socket_dir {
            Some(dir) => options.socket(dir),
            None => options.host("127.0.0.1"),
        };
        if let Ok(Ok(connection)) = tokio::time::timeout(CONNECT_TIMEOUT, options.connect()).await {
            return Some(connection);
        }
    }
    None
}

/// The server's version.
pub async fn version(connection: &mut PgConnection) -> Result<String> {
    Ok(sqlx::query("SHOW server_version").fetch_one(connection).await?.try_get(0)?)
}

/// Ends the session in an orderly way.
pub async fn close(connection: PgConnection) {
    // The server notices a lost session by itself; nothing hangs on this.
    let _ = connection.close().await;
}

/// Reads the counters. Statistics reach the shared view up to a second late; the WAL position is exact.
pub async fn read(connection: &mut PgConnection, tables: bool) -> Result<PgSample> {
    let row = sqlx::query(
        "SELECT (pg_current_wal_lsn() - '0/0')::bigint, xact_commit, xact_rollback,
                pg_snapshot_xmax(pg_current_snapshot())::text::bigint
           FROM pg_stat_database WHERE datname = current_database()",
    )
    .fetch_one(&mut *connection)
    .await?;
    let mut sample = PgSample {
        wal_bytes: row.try_get(0)?,
        commits: row.try_get(1)?,
        rollbacks: row.try_get(2)?,
        writes: row.try_get(3)?,
        ..Default::default()
    };
    sample.wal_syncs = wal_syncs(connection).await;
    if tables {
        let rows = sqlx::query(
            "SELECT c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid)
               FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE n.nspname = 'queen' AND c.relkind IN ('r', 'm')",
        )
        .fetch_all(&mut *connection)
        .await?;
        for row in rows {
            let (name, heap, index): (String, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            sample.table_bytes += heap;
            sample.index_bytes += index;
            sample.tables.insert(name, heap + index);
        }
    }
    Ok(sample)
}

async fn wal_syncs(connection: &mut PgConnection) -> Option<i64> {
    // The counter moved from pg_stat_wal to pg_stat_io in version 18.
    for statement in
        ["SELECT wal_sync::bigint FROM pg_stat_wal", "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"]
    {
        if let Ok(row) = sqlx::query(statement).fetch_one(&mut *connection).await {
            return row.try_get(0).ok().flatten();
        }
    }
    None
}
