//! Switches that all brokers of a database obey (`spec/admin.md` §13.3).

use super::Store;
use super::error::{StoreResult, Timed};

impl Store {
    /// Whether the switches are on; `false` for one without a row.
    pub async fn switches(&self, keys: &[&str]) -> StoreResult<Vec<bool>> {
        sqlx::query_scalar(
            "SELECT coalesce((s.value->>'enabled')::boolean, false) FROM unnest($1::text[]) WITH ORDINALITY AS u (key, ord) \
             LEFT JOIN queen.system_state s ON s.key = u.key ORDER BY u.ord",
        )
        .bind(keys)
        .fetch_all(&self.claims)
        .timed("switches")
        .await
    }

    /// Turns a switch for every broker, durably.
    pub async fn set_switch(&self, key: &str, enabled: bool) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO queen.system_state (key, value) VALUES ($1, jsonb_build_object('enabled', $2::boolean)) \
             ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now()",
        )
        .bind(key)
        .bind(enabled)
        .execute(&self.pool)
        .timed("switches")
        .await?;
        Ok(())
    }
}
