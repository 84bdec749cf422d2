//! The safety walk of retention: first over the lists, which packs short ones and says what is listed, then over the
//! partitions, which lists what is missing. Every step is one page.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Store;
use super::age_lists::{AgeList, Keys, LIST_MAX};
use super::error::{During, StoreResult, Timed};
use super::retention::Aged;
use super::windows::window_seconds;
use crate::ids::PartitionId;

/// Commits younger than this may be in lists that the first part of a walk could not see yet.
const SETTLED_SECONDS: f64 = 30.0;
/// Lists of one page at most.
const LISTS_MAX: i64 = 1000;

/// A list as the walk finds it.
#[derive(Clone, Debug)]
pub struct WalkedList {
    /// Segments or hashes.
    pub what: Aged,
    /// The list.
    pub list: AgeList,
    /// Its partitions that hold something of the kind.
    pub live: Vec<PartitionId>,
    /// Its partitions that hold nothing, or are gone.
    pub stale: Vec<PartitionId>,
    /// Seconds until it is due; `None`: never, as long as the options of its queue stay.
    pub left: Option<f64>,
}

/// A partition as the walk finds it.
#[derive(Clone, Copy, Debug)]
pub struct WalkedPartition {
    /// Its id.
    pub id: PartitionId,
    /// Whether it holds segments.
    pub has_segments: bool,
    /// Whether it holds hashes.
    pub has_hashes: bool,
}

/// `live` and `left` come from one snapshot with the list: a partition that is in it and holds nothing was emptied after it was
/// listed, and whoever fills it lists it again.
const PAGE_OF_LISTS: &str = concat!(
    "SELECT l.kind, l.queue_id, l.oldest_at, l.id, l.partition_ids, cardinality(l.partition_ids) AS partitions, \
       ARRAY(SELECT p.id FROM unnest(l.partition_ids) AS i (id) JOIN queen.log_partitions p ON p.id = ANY (ARRAY[i.id]) \
         WHERE p.last_offset >= CASE l.kind WHEN 0 THEN p.log_start ELSE p.txns_start END) AS live, \
       extract(epoch FROM l.oldest_at - statement_timestamp())::float8 + ",
    window_seconds!("l.kind"),
    " AS left FROM (SELECT l.*, sum(cardinality(l.partition_ids)) OVER (ORDER BY l.kind, l.queue_id, l.oldest_at, l.id) \
         - cardinality(l.partition_ids) AS before \
       FROM (SELECT * FROM queen.log_age_lists WHERE (kind, queue_id, oldest_at, id) > ($1, $2, $3, $4) \
         ORDER BY kind, queue_id, oldest_at, id LIMIT $5) l) l \
     LEFT JOIN queen.queues q ON q.id = ANY (ARRAY[l.queue_id]) WHERE l.before < $6 \
     ORDER BY l.kind, l.queue_id, l.oldest_at, l.id"
);

impl Store {
    /// Where the walk `name` goes on; `None` while none is due. One begins if none has since `every` seconds (`None`: only
    /// the very first). With the time by the database's clock.
    pub async fn next_of_walk(
        &self,
        name: &str,
        every: Option<f64>,
    ) -> StoreResult<Option<(PartitionId, DateTime<Utc>)>> {
        let next: Option<(i64, DateTime<Utc>)> = sqlx::query_as(
            "UPDATE queen.loop_leases SET \
               walked_at = CASE WHEN walk_after IS NULL THEN statement_timestamp() ELSE walked_at END, \
               walk_after = coalesce(walk_after, 0) \
             WHERE name = $1 AND (walk_after IS NOT NULL OR walked_at IS NULL \
               OR walked_at < statement_timestamp() - make_interval(secs => $2)) \
             RETURNING walk_after, statement_timestamp()",
        )
        .bind(name)
        .bind(every)
        .fetch_optional(&self.claims)
        .timed("walking partitions")
        .await?;
        Ok(next.map(|(after, now)| (PartitionId(after), now)))
    }

    /// The walk is past this partition; `None`: it has ended.
    pub async fn move_walk(&self, name: &str, after: Option<PartitionId>) -> StoreResult<()> {
        sqlx::query("UPDATE queen.loop_leases SET walk_after = $2 WHERE name = $1")
            .bind(name)
            .bind(after.map(|p| p.0))
            .execute(&self.claims)
            .timed("walking partitions")
            .await?;
        Ok(())
    }

    /// The lists after one, in the order of their keys, as many as hold about `partitions_max` partitions.
    pub async fn page_lists(
        &self,
        after: Option<(Aged, AgeList)>,
        partitions_max: i64,
    ) -> StoreResult<Vec<WalkedList>> {
        let (kind, queue, oldest_at, id) = match after {
            Some((what, list)) => (what.kind(), list.queue.0, list.oldest_at, list.id),
            None => (-1, 0, DateTime::UNIX_EPOCH, 0),
        };
        let rows = sqlx::query(PAGE_OF_LISTS)
            .bind(kind)
            .bind(queue)
            .bind(oldest_at)
            .bind(id)
            .bind(LISTS_MAX)
            .bind(partitions_max)
            .fetch_all(&self.claims)
            .timed("walking partitions")
            .await?;
        rows.iter().map(walked_list).collect::<Result<_, _>>().during("walking partitions")
    }

    /// Writes the partitions of each group of lists into as few lists as they need, those in `stale` left out. A list that
    /// somebody works on stays as it is.
    pub async fn pack_lists(&self, what: Aged, groups: &[Vec<AgeList>], stale: &[PartitionId]) -> StoreResult<()> {
        let keys: Keys = groups.iter().flatten().collect();
        let group_of: Vec<i32> =
            groups.iter().enumerate().flat_map(|(nth, lists)| lists.iter().map(move |_| nth as i32)).collect();
        let stale: Vec<i64> = stale.iter().map(|p| p.0).collect();
        sqlx::query(
            "WITH taken AS MATERIALIZED ( \
               SELECT u.nth, l.kind, l.queue_id, l.oldest_at, l.id, l.partition_ids \
               FROM (SELECT *, $1::smallint AS kind FROM unnest($2::int[], $3::timestamptz[], $4::bigint[], $5::int[]) \
                 AS u (queue_id, oldest_at, id, nth) OFFSET 0) u \
               JOIN queen.log_age_lists l ON l.kind = ANY (ARRAY[u.kind]) AND l.queue_id = ANY (ARRAY[u.queue_id]) \
                 AND l.oldest_at = u.oldest_at AND l.id = u.id FOR UPDATE OF l SKIP LOCKED), \
             gone AS (DELETE FROM queen.log_age_lists l USING taken t WHERE l.kind = ANY (ARRAY[t.kind]) \
               AND l.queue_id = ANY (ARRAY[t.queue_id]) AND l.oldest_at = t.oldest_at AND l.id = t.id), \
             members AS (SELECT m.nth, m.queue_id, m.id, min(m.oldest_at) OVER (PARTITION BY m.nth) AS oldest_at, \
                 (row_number() OVER (PARTITION BY m.nth ORDER BY m.id) - 1) / $7 AS part \
               FROM (SELECT t.nth, t.queue_id, i.id, min(t.oldest_at) AS oldest_at \
                 FROM taken t CROSS JOIN LATERAL unnest(t.partition_ids) AS i (id) \
                 WHERE i.id <> ALL ($6) GROUP BY t.nth, t.queue_id, i.id) m) \
             INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) \
             SELECT $1, queue_id, min(oldest_at), array_agg(id ORDER BY id) FROM members GROUP BY nth, queue_id, part",
        )
        .bind(what.kind())
        .bind(keys.queues)
        .bind(keys.oldest_at)
        .bind(keys.ids)
        .bind(group_of)
        .bind(stale)
        .bind(LIST_MAX as i64)
        .execute(&self.claims)
        .timed("walking partitions")
        .await?;
        Ok(())
    }

    /// The partitions after one, by id. Those without a segment are entered as candidates for removal.
    pub async fn page_of_walk(&self, after: PartitionId, partitions_max: i64) -> StoreResult<Vec<WalkedPartition>> {
        let rows: Vec<(i64, bool, bool)> = sqlx::query_as(
            "WITH page AS MATERIALIZED ( \
               SELECT p.id, p.log_start, p.txns_start, p.last_offset, p.last_write_at \
               FROM queen.log_partitions p WHERE p.id > $1 ORDER BY p.id LIMIT $2), \
             empty AS (INSERT INTO queen.empty_partitions (partition_id, look_at) \
               SELECT p.id, p.last_write_at + interval '1 day' FROM page p WHERE p.last_offset < p.log_start \
                 AND NOT EXISTS (SELECT 1 FROM queen.empty_partitions e WHERE e.partition_id = ANY (ARRAY[p.id])) \
               ORDER BY p.id ON CONFLICT DO NOTHING) \
             SELECT id, last_offset >= log_start, last_offset >= txns_start FROM page ORDER BY id",
        )
        .bind(after.0)
        .bind(partitions_max)
        .fetch_all(&self.claims)
        .timed("walking partitions")
        .await?;
        let walked = |(id, has_segments, has_hashes)| WalkedPartition { id: PartitionId(id), has_segments, has_hashes };
        Ok(rows.into_iter().map(walked).collect())
    }

    /// Lists partitions that hold something since well before `begun_at`, and has their queues looked at. Answers how many
    /// entries were made. It takes no partition lock: what is emptied meanwhile leaves an entry that costs a look.
    pub async fn list_missing(&self, missing: &[(Aged, PartitionId)], begun_at: DateTime<Utc>) -> StoreResult<u64> {
        let (kinds, ids): (Vec<i16>, Vec<i64>) = missing.iter().map(|(what, id)| (what.kind(), id.0)).unzip();
        let listed: i64 = sqlx::query_scalar(
            "WITH found AS MATERIALIZED ( \
               SELECT u.kind, p.queue_id, u.id, a.created_at FROM unnest($1::smallint[], $2::bigint[]) AS u (kind, id) \
               JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.id]) CROSS JOIN LATERAL ( \
                 (SELECT created_at FROM queen.log_segments s WHERE u.kind = 0 AND s.partition_id = u.id \
                    AND s.base_offset >= p.log_start ORDER BY s.base_offset LIMIT 1) \
                 UNION ALL \
                 (SELECT created_at FROM queen.log_txns t WHERE u.kind = 1 AND t.partition_id = u.id \
                    AND t.base_offset >= p.txns_start ORDER BY t.base_offset LIMIT 1)) a \
               WHERE a.created_at < $3 - make_interval(secs => $4)), \
             listed AS (INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) \
               SELECT f.kind, f.queue_id, min(f.created_at), array_agg(f.id ORDER BY f.id) FROM ( \
                 SELECT *, (row_number() OVER (PARTITION BY kind, queue_id ORDER BY created_at) - 1) / $5 AS nth \
                 FROM found) f GROUP BY f.kind, f.queue_id, f.nth), \
             checked AS (UPDATE queen.retention_queues r SET check_at = statement_timestamp() \
               FROM (SELECT DISTINCT queue_id, kind FROM found) f \
               WHERE r.queue_id = ANY (ARRAY[f.queue_id]) AND r.kind = f.kind AND r.check_at > statement_timestamp()) \
             SELECT count(*) FROM found",
        )
        .bind(kinds)
        .bind(ids)
        .bind(begun_at)
        .bind(SETTLED_SECONDS)
        .bind(LIST_MAX as i64)
        .fetch_one(&self.claims)
        .timed("walking partitions")
        .await?;
        Ok(listed.unsigned_abs())
    }
}

fn walked_list(row: &PgRow) -> Result<WalkedList, sqlx::Error> {
    let members: Vec<i64> = row.try_get("partition_ids")?;
    let live: Vec<i64> = row.try_get("live")?;
    let stale = members.into_iter().filter(|id| !live.contains(id)).map(PartitionId).collect();
    let kind: i16 = row.try_get("kind")?;
    Ok(WalkedList {
        what: if kind == Aged::Segments.kind() { Aged::Segments } else { Aged::Hashes },
        list: AgeList::of(row)?,
        live: live.into_iter().map(PartitionId).collect(),
        stale,
        left: row.try_get("left")?,
    })
}
