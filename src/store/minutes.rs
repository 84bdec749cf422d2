//! Minute buckets: what each broker did to each queue, and how each broker fared (`spec/admin.md` §10).

use super::Store;
use super::error::{StoreResult, Timed};

impl Store {
    /// Messages pushed and acknowledged within the last `seconds`, as far as they are written down.
    pub async fn recent_operations(&self, seconds: i32) -> StoreResult<(i64, i64)> {
        sqlx::query_as(
            "SELECT coalesce(sum(push_messages), 0)::bigint, coalesce(sum(ack_success), 0)::bigint \
             FROM queen.broker_minutes WHERE bucket > statement_timestamp() - make_interval(secs => $1)",
        )
        .bind(f64::from(seconds))
        .fetch_one(&self.pool)
        .timed("recent operations")
        .await
    }
}
