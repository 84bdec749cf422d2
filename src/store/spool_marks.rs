//! How far a broker's disk spool has been stored: read and written by the transaction that stores its records.

use uuid::Uuid;

use super::Store;
use super::error::{StoreResult, Timed};
use super::messages::AppendTx;
use crate::ids::PartitionId;

impl AppendTx {
    /// The last stored position of the spool in a partition that this transaction holds locked; -1 if none.
    pub async fn spool_mark(&mut self, spool: Uuid, partition: PartitionId) -> StoreResult<i64> {
        let found: Option<i64> =
            sqlx::query_scalar("SELECT position FROM queen.spool_marks WHERE spool = $1 AND partition_id = $2")
                .bind(spool)
                .bind(partition.0)
                .fetch_optional(&mut *self.tx)
                .timed("spool mark")
                .await?;
        Ok(found.unwrap_or(-1))
    }

    /// Moves it.
    pub async fn set_spool_mark(&mut self, spool: Uuid, partition: PartitionId, position: i64) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO queen.spool_marks (spool, partition_id, position) VALUES ($1, $2, $3) \
             ON CONFLICT (spool, partition_id) DO UPDATE SET position = excluded.position",
        )
        .bind(spool)
        .bind(partition.0)
        .bind(position)
        .execute(&mut *self.tx)
        .timed("spool mark")
        .await?;
        Ok(())
    }
}

impl Store {
    /// Forgets the marks of a spool that has run empty: its positions never come again.
    pub async fn forget_spool(&self, spool: Uuid) -> StoreResult<()> {
        sqlx::query("DELETE FROM queen.spool_marks WHERE spool = $1")
            .bind(spool)
            .execute(&self.claims)
            .timed("spool mark")
            .await?;
        Ok(())
    }
}
