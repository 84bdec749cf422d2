//! Claims on partitions that a group meets for the first time: the cursor is made with its lease.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::Row;
use uuid::Uuid;

use super::Store;
use super::claims::{ClaimOutcome, ClaimOutcomes, ClaimRequest, Claimed};
use super::error::{During, StoreResult, Timed};
use super::groups::{StartAt, start_of};
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};

/// What one pop asks for on partitions where its group has no cursor.
#[derive(Clone, Copy, Debug)]
pub struct FirstClaim<'a> {
    /// As for a claim.
    pub request: ClaimRequest<'a>,
    /// Where an unregistered group starts.
    pub start: StartAt,
}

impl FirstClaim<'_> {
    /// Whether the lease may come with the cursor: nothing can hold the messages back, and each counts as one.
    fn is_leasing(&self) -> bool {
        self.request.delay_seconds <= 0 && self.request.window_seconds <= 0 && !self.request.conflating
    }
}

// `placed` is where the cursors begin, `taken` what the budget of each request reaches in the order of its candidates. The
// answer is a union, not a join, as that of a claim.
const CLAIM_UNMET: &str = concat!(
    "WITH p AS MATERIALIZED ( \
       SELECT u.*, p.name, p.log_start, p.last_offset \
       FROM unnest($1::int[], $2::bigint[], $3::text[], $4::timestamptz[], $5::uuid[], $6::int[], $7::int[], $8::bigint[], \
           $9::bigint[], $10::float8[], $11::boolean[]) \
         AS u (group_id, id, mode, instant, worker_id, request, nth, messages_max, partitions_max, lease_seconds, leasing) \
       JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.id]) \
       ORDER BY u.id FOR KEY SHARE OF p), \
     kept AS MATERIALIZED ( \
       SELECT id FROM queen.consumer_groups \
       WHERE id = ANY (ARRAY (SELECT DISTINCT group_id FROM p)) ORDER BY id FOR KEY SHARE), \
     placed AS MATERIALIZED ( \
       SELECT p.*, ",
    start_of!("coalesce(g.mode, p.mode)", "coalesce(g.subscribed_at, p.instant)"),
    " AS committed FROM p CROSS JOIN LATERAL (SELECT * FROM queen.consumer_groups WHERE id = p.group_id OFFSET 0) g \
       WHERE g.id = ANY (ARRAY (SELECT id FROM kept))), \
     sized AS ( \
       SELECT *, count(*) FILTER (WHERE available > 0) OVER w AS rank, sum(available) OVER w - available AS before \
       FROM (SELECT *, greatest(committed, log_start - 1) + 1 AS first, \
               greatest(last_offset - greatest(committed, log_start - 1), 0) AS available FROM placed) counted \
       WINDOW w AS (PARTITION BY request ORDER BY nth)), \
     taken AS MATERIALIZED ( \
       SELECT *, CASE WHEN leasing AND available > 0 AND before < messages_max AND rank <= partitions_max \
         THEN first + least(available, messages_max - before)::bigint - 1 END AS last FROM sized), \
     made AS ( \
       INSERT INTO queen.log_consumers (partition_id, group_id, committed, total_consumed, attempts, attempt_start, attempt_end, \
         batch_end, worker_id, lease_expires_at, lease_acquired_at) \
       SELECT id, group_id, committed, CASE WHEN committed <> -1 THEN 0 END, CASE WHEN last IS NOT NULL THEN 1 END, CASE WHEN last IS NOT NULL THEN first END, \
         last, last, CASE WHEN last IS NOT NULL THEN worker_id END, \
         CASE WHEN last IS NOT NULL THEN clock_timestamp() + make_interval(secs => lease_seconds) END, \
         CASE WHEN last IS NOT NULL THEN clock_timestamp() END \
       FROM taken ORDER BY id, group_id ON CONFLICT (partition_id, group_id) DO NOTHING \
       RETURNING partition_id, group_id, batch_end) \
     SELECT id, group_id, request, name, committed, first, last, last_offset, worker_id FROM taken WHERE last IS NOT NULL \
     UNION ALL SELECT partition_id, group_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM made WHERE batch_end IS NOT NULL"
);

impl Store {
    /// Makes the cursors of [`Store::seed_cursors`], and leases at once what the budget of each request reaches, unless
    /// something may hold its messages back. Answers per request what was leased, with what a claim would say; the other
    /// candidates are to be claimed. No (partition, group) may occur twice.
    pub async fn claim_unmet(&self, firsts: &[FirstClaim<'_>]) -> StoreResult<Vec<ClaimOutcomes>> {
        let mut each: Vec<_> = firsts
            .iter()
            .zip(0_i32..)
            .flat_map(|(first, request)| {
                first
                    .request
                    .candidates
                    .iter()
                    .zip(0_i32..)
                    .map(move |(candidate, nth)| (first, request, nth, candidate))
            })
            .collect();
        each.sort_unstable_by_key(|(first, _, _, (partition, _))| (*partition, first.request.group));
        let rows = sqlx::query(CLAIM_UNMET)
            .bind(each.iter().map(|(first, ..)| first.request.group.0).collect::<Vec<i32>>())
            .bind(each.iter().map(|(_, _, _, (partition, _))| partition.0).collect::<Vec<i64>>())
            .bind(each.iter().map(|(first, ..)| first.start.fallback().0).collect::<Vec<&str>>())
            .bind(each.iter().map(|(first, ..)| first.start.fallback().1).collect::<Vec<Option<DateTime<Utc>>>>())
            .bind(each.iter().map(|(_, _, _, (_, worker))| worker.0).collect::<Vec<Uuid>>())
            .bind(each.iter().map(|(_, request, ..)| *request).collect::<Vec<i32>>())
            .bind(each.iter().map(|(_, _, nth, _)| *nth).collect::<Vec<i32>>())
            .bind(each.iter().map(|(first, ..)| first.request.messages_max).collect::<Vec<i64>>())
            .bind(each.iter().map(|(first, ..)| first.request.partitions_max).collect::<Vec<i64>>())
            .bind(each.iter().map(|(first, ..)| first.request.lease_seconds as f64).collect::<Vec<f64>>())
            .bind(each.iter().map(|(first, ..)| first.is_leasing()).collect::<Vec<bool>>())
            .fetch_all(&self.claims)
            .timed("seeding cursors")
            .await?;
        let mut taken: HashMap<(PartitionId, GroupId), (usize, ClaimOutcome)> = HashMap::new();
        let mut leased: Vec<ClaimOutcomes> = firsts.iter().map(|_| Vec::new()).collect();
        // What was taken comes before what was made.
        let mut read = |row: &sqlx::postgres::PgRow| -> Result<(), sqlx::Error> {
            let (partition, group) = (PartitionId(row.try_get("id")?), GroupId(row.try_get("group_id")?));
            let Some(request) = row.try_get::<Option<i32>, _>("request")? else {
                if let Some((request, outcome)) = taken.remove(&(partition, group))
                    && let Some(leased) = leased.get_mut(request)
                {
                    leased.push((partition, outcome));
                }
                return Ok(());
            };
            let last: i64 = row.try_get("last")?;
            let claimed = Claimed {
                partition,
                name: row.try_get("name")?,
                committed: Offset(row.try_get("committed")?),
                first: Offset(row.try_get("first")?),
                last: Offset(last),
                worker: LeaseId(row.try_get("worker_id")?),
                attempt: 1,
                is_leased: true,
            };
            let more = row.try_get::<i64, _>("last_offset")? > last;
            let request = usize::try_from(request).unwrap_or(usize::MAX);
            taken.insert((partition, group), (request, ClaimOutcome::Claimed(claimed, more)));
            Ok(())
        };
        for row in &rows {
            read(row).during("seeding cursors")?;
        }
        Ok(leased)
    }
}
