//! Work that one broker does for all: who does it now.

use std::time::Duration;

use uuid::Uuid;

use super::Store;
use super::error::{StoreResult, Timed};

impl Store {
    /// Takes or keeps the work `name` for `length`; `false` while another broker has it.
    pub async fn hold_loop(&self, name: &str, holder: Uuid, length: Duration) -> StoreResult<bool> {
        let done = sqlx::query(
            "INSERT INTO queen.loop_leases AS l (name, holder, held_until) \
             VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3)) \
             ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, held_until = excluded.held_until \
             WHERE l.holder = excluded.holder OR l.held_until < clock_timestamp()",
        )
        .bind(name)
        .bind(holder)
        .bind(length.as_secs_f64())
        .execute(&self.claims)
        .timed("holding a loop")
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Leaves the work to the next broker at once.
    pub async fn release_loop(&self, name: &str, holder: Uuid) -> StoreResult<()> {
        sqlx::query("UPDATE queen.loop_leases SET held_until = '-infinity' WHERE name = $1 AND holder = $2")
            .bind(name)
            .bind(holder)
            .execute(&self.claims)
            .timed("holding a loop")
            .await?;
        Ok(())
    }
}
