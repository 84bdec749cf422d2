//! The only place with SQL, and (with `app.rs`) the only one that names `sqlx`.
//!
//! Lock order, everywhere: partitions by id, then consumers by (partition, group). A statement that locks several rows
//! sorts them first. `now` is `clock_timestamp()` of the database: it alone judges leases and stamps segments.
//!
//! **Joins of lists with tables** say `key = ANY (ARRAY[list.key])`, not `key = list.key`, and sort by the list's columns:
//! plans are made once per connection, and while statistics call a table small PostgreSQL would read the whole of it in
//! index order and compare it with the list. For the same reason every column of the key comes from the list, constants too
//! (`$1 AS kind` in a list that is `MATERIALIZED` or ends in `OFFSET 0`): what does not come from it is a condition by itself, by
//! which a scan of the table is made before the list. Where a key has columns of two lists, a `LATERAL (… OFFSET 0)` looks it up.
//! By these forms a table can only be entered by its key (tests/it/plans).

pub mod acks;
pub mod advances;
pub mod age_lists;
pub mod age_walk;
mod backlog;
pub mod brokers;
pub mod changed_partitions;
pub mod claims;
pub mod cursors;
pub mod database_report;
pub mod dead_letters;
pub mod empty_partitions;
pub mod error;
pub mod first_claims;
pub mod group_contacts;
pub mod group_listings;
pub mod groups;
pub mod inspection;
pub mod labels;
pub mod loop_leases;
pub mod message_list;
pub mod messages;
pub mod migrate;
pub mod minutes;
pub mod partitions;
pub mod queues;
pub mod retention;
pub mod retention_history;
pub mod seeks;
pub mod spool_marks;
pub mod statistics;
pub mod system_state;
pub mod tls;
pub mod traces;
pub mod transactions;
pub mod watched_queues;
mod windows;

pub use error::{StoreError, StoreResult};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sqlx::PgPool;

use crate::ids::IdSpace;
use error::Timed;

/// Counts the connections that were opened. Whoever remembers what the database said compares it: a new connection may lead to
/// a standby that lacks the newest commits. A cheap clone.
#[derive(Clone, Debug, Default)]
pub struct Generation(Arc<AtomicU64>);

impl Generation {
    /// A connection was opened.
    pub fn advance(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Connections opened so far.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The connections to one migrated database. A cheap clone.
#[derive(Clone, Debug)]
pub struct Store {
    /// Everything that must be durable when it is answered.
    pub(crate) pool: PgPool,
    /// Lease claims only: these connections commit asynchronously, because a claim lost in a database crash only
    /// redelivers (design §4).
    pub(crate) claims: PgPool,
    generation: Generation,
    ids: IdSpace,
}

impl Store {
    /// Opens the store over a database whose schema has been applied. The pools advance `generation` with every connection.
    pub async fn open(pool: PgPool, claims: PgPool, generation: Generation) -> StoreResult<Store> {
        let (tag, secret): (i64, i64) = sqlx::query_as("SELECT id_tag, id_secret FROM queen.meta")
            .fetch_one(&pool)
            .timed("reading queen.meta")
            .await?;
        Ok(Store { pool, claims, generation, ids: IdSpace::new(tag, secret) })
    }

    /// A store whose connections lead to a port where nobody answers.
    #[cfg(test)]
    pub(crate) fn unreachable(port: u16, checkout_timeout: std::time::Duration) -> Store {
        let address = sqlx::postgres::PgConnectOptions::new_without_pgpass().host("127.0.0.1").port(port);
        let options = sqlx::postgres::PgPoolOptions::new().acquire_timeout(checkout_timeout);
        let pool = options.connect_lazy_with(address);
        Store { claims: pool.clone(), pool, generation: Generation::default(), ids: IdSpace::new(0, 0) }
    }

    /// The count of opened connections.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// The ids of this database on the wire.
    pub fn ids(&self) -> IdSpace {
        self.ids
    }

    /// A real round trip, for health checks.
    pub async fn ping(&self) -> StoreResult<()> {
        sqlx::query("SELECT 1").execute(&self.pool).timed("ping").await.map(|_| ())
    }

    /// Pooled connections now: (open, idle).
    pub fn pool_size(&self) -> (u32, usize) {
        (self.pool.size() + self.claims.size(), self.pool.num_idle() + self.claims.num_idle())
    }

    /// Pooled connections that may be open.
    pub fn pool_max(&self) -> u32 {
        self.durable_max() + self.claims.options().get_max_connections()
    }

    /// Connections that may be open for what must be durable when it is answered.
    pub fn durable_max(&self) -> u32 {
        self.pool.options().get_max_connections()
    }

    /// Closes both pools after their checked-out connections came back.
    pub async fn close(&self) {
        self.claims.close().await;
        self.pool.close().await;
    }
}
