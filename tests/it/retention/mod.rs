//! Retention: what is deleted when, and what nobody notices of it (I12, `spec/admin.md` §8).
//!
//! Time passes by making everything that is stored older; the broker's own loop does the deleting.

mod cleanup;
mod concurrent;
mod hashes;
mod lists;
mod readers;
mod report;
mod rules;
mod upgrade;

use std::time::Duration;

use crate::harness::{Database, PATIENCE, TestBroker, eventually};

/// Lets `seconds` pass, and retention find out.
async fn pass(broker: &TestBroker, seconds: i32) {
    broker.db.age(seconds).await;
    swept(&broker.db).await;
}

/// Waits until retention has looked at everything.
async fn swept(db: &Database) {
    eventually(PATIENCE, || db.is_swept()).await;
}

/// Waits until the log of a partition starts there.
async fn starts_at(db: &Database, partition: &str, offset: i64) {
    eventually(Duration::from_secs(20), async || {
        db.log_bounds("q", partition).await.is_some_and(|(start, ..)| start == offset)
    })
    .await;
}

/// First offsets of the stored segments of the database, in order.
async fn segments(db: &Database) -> Vec<i64> {
    let sql = "SELECT base_offset FROM queen.log_segments ORDER BY partition_id, base_offset";
    sqlx::query_scalar(sql).fetch_all(&db.pool).await.unwrap()
}

/// (kind, messages) of the history, in order.
async fn history(db: &Database) -> Vec<(String, i64)> {
    let sql = "SELECT kind, messages FROM queen.retention_history ORDER BY at, kind";
    sqlx::query_as(sql).fetch_all(&db.pool).await.unwrap()
}
