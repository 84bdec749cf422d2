//! The snapshot per queue (`queen.stats`), and the sums that it is made of (`spec/admin.md` §3).

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Store;
use super::backlog::{live, owed_by_partition, page_of_partitions};
use super::cursors::consumed;
use super::error::{During, StoreResult, Timed};
use crate::ids::QueueId;

/// Sums over partitions of one queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Partitions.
    pub partitions: i64,
    /// Messages ever pushed into them.
    pub appended: i64,
    /// Messages that retention has removed from them.
    pub evicted: i64,
    /// Messages above the slowest cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Live leases.
    pub leases: i64,
    /// Partitions with a live lease.
    pub leased_partitions: i64,
    /// Log positions that cursors have retired.
    pub consumed: i64,
    /// Commit time of the oldest pending segment.
    pub oldest_pending_at: Option<DateTime<Utc>>,
    /// Last push.
    pub last_write_at: Option<DateTime<Utc>>,
}

impl Sums {
    /// Messages that are retained.
    pub fn total(&self) -> i64 {
        self.appended - self.evicted
    }

    /// Adds those of other partitions of the same queue.
    pub fn add(&mut self, other: &Sums) {
        self.partitions += other.partitions;
        self.appended += other.appended;
        self.evicted += other.evicted;
        self.pending += other.pending;
        self.processing += other.processing;
        self.leases += other.leases;
        self.leased_partitions += other.leased_partitions;
        self.consumed += other.consumed;
        self.oldest_pending_at = [self.oldest_pending_at, other.oldest_pending_at].into_iter().flatten().min();
        self.last_write_at = self.last_write_at.max(other.last_write_at);
    }
}

/// What a walk through one queue has summed up so far.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The sums of the page.
    pub sums: Sums,
    /// Name of its last partition; `None` past the end.
    pub last: Option<String>,
}

/// What a finished walk writes down.
#[derive(Clone, Debug)]
pub struct NewStats {
    /// The queue.
    pub queue: QueueId,
    /// Its sums.
    pub sums: Sums,
    /// Dead letters of it.
    pub dead_letters: i64,
    /// Database time before the first row was read.
    pub at: DateTime<Utc>,
}

/// Sums and the number of dead letters of one queue, and how many partitions were looked at.
#[derive(Clone, Debug)]
pub struct QueueSums {
    /// What to write down, if the queue was small enough to be summed in one go.
    pub stats: NewStats,
    /// Whether it has more partitions than were looked at.
    pub is_large: bool,
}

/// One turn of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Where the last turn stopped.
    pub reached: i32,
}

/// Per partition: what it holds, what it owes, who has it leased. Two index probes; a third where something is pending.
/// The placeholder names the partitions.
macro_rules! sums_over {
    ($head:literal, $partitions:expr, $tail:literal) => {
        concat!(
            $head,
            "count(p.id) AS partitions, coalesce(sum(p.last_offset + 1), 0)::bigint AS appended, \
             coalesce(sum(p.log_start), 0)::bigint AS evicted, coalesce(sum(w.pending), 0)::bigint AS pending, \
             coalesce(sum(least(c.leased, w.pending)), 0)::bigint AS processing, \
             coalesce(sum(c.leases), 0)::bigint AS leases, count(*) FILTER (WHERE c.leases > 0) AS leased_partitions, \
             coalesce(sum(c.consumed), 0)::bigint AS consumed, min(s.created_at) AS oldest_pending_at, \
             max(p.last_write_at) FILTER (WHERE p.last_offset >= 0) AS last_write_at, max(p.name) AS last ",
            $partitions,
            owed_by_partition!(
                concat!(
                    ", count(*) FILTER (WHERE ",
                    live!(),
                    ") AS leases, coalesce(sum(", consumed!(), "), 0) AS consumed"
                ),
                ""
            ),
            "LEFT JOIN LATERAL ( \
               SELECT s.created_at FROM queen.log_segments s \
               WHERE w.pending > 0 AND s.partition_id = p.id AND s.base_offset <= w.done + 1 \
               ORDER BY s.base_offset DESC LIMIT 1) s ON true ",
            $tail
        )
    };
}

impl Store {
    /// The sums of several queues, of at most `partitions_max` partitions each.
    pub async fn sum_queues(&self, queues: &[QueueId], partitions_max: i64) -> StoreResult<Vec<QueueSums>> {
        let ids: Vec<i32> = queues.iter().map(|queue| queue.0).collect();
        let rows = sqlx::query(sums_over!(
            "SELECT u.queue_id, statement_timestamp() AS at, \
               (SELECT count(*) FROM queen.dead_letters d WHERE d.queue_id = u.queue_id) AS dead_letters, ",
            "FROM unnest($1::int[]) AS u (queue_id) \
             LEFT JOIN LATERAL (SELECT * FROM queen.log_partitions p WHERE p.queue_id = u.queue_id \
               ORDER BY p.name LIMIT $2) p ON true ",
            "GROUP BY u.queue_id"
        ))
        .bind(ids)
        .bind(partitions_max + 1)
        .fetch_all(&self.pool)
        .timed("summing queues")
        .await?;
        rows.iter()
            .map(|row| {
                let sums = sums_of(row)?;
                let is_large = sums.partitions > partitions_max;
                let (queue, at) = (QueueId(row.try_get("queue_id")?), row.try_get("at")?);
                Ok(QueueSums {
                    stats: NewStats { queue, sums, dead_letters: row.try_get("dead_letters")?, at },
                    is_large,
                })
            })
            .collect::<Result<_, _>>()
            .during("summing queues")
    }

    /// The sums of one page of a queue's partitions in name order after `after`.
    pub async fn sum_page(&self, queue: QueueId, after: Option<&str>, limit: i64) -> StoreResult<Page> {
        let row = sqlx::query(sums_over!("SELECT ", concat!("FROM ", page_of_partitions!()), ""))
            .bind(queue.0)
            .bind(after)
            .bind(limit)
            .fetch_one(&self.pool)
            .timed("summing a queue")
            .await?;
        let read = || Ok(Page { sums: sums_of(&row)?, last: row.try_get("last")? });
        read().during("summing a queue")
    }

    /// Dead letters of a queue, and the database's time.
    pub async fn count_dead_letters(&self, queue: QueueId) -> StoreResult<(i64, DateTime<Utc>)> {
        sqlx::query_as("SELECT count(*), statement_timestamp() FROM queen.dead_letters WHERE queue_id = $1")
            .bind(queue.0)
            .fetch_one(&self.pool)
            .timed("counting dead letters")
            .await
    }

    /// Writes snapshots down. An older one never replaces a newer one; a queue deleted meanwhile gets none.
    pub async fn save_stats(&self, stats: &[NewStats]) -> StoreResult<()> {
        let mut stats: Vec<&NewStats> = stats.iter().collect();
        stats.sort_unstable_by_key(|stats| stats.queue);
        let column = |value: fn(&NewStats) -> i64| stats.iter().map(|s| value(s)).collect::<Vec<i64>>();
        let instant =
            |value: fn(&NewStats) -> Option<DateTime<Utc>>| stats.iter().map(|s| value(s)).collect::<Vec<_>>();
        sqlx::query(
            "INSERT INTO queen.stats AS s (queue_id, partitions, appended, evicted, pending, processing, leases, \
               leased_partitions, consumed, dead_letters, oldest_pending_at, last_write_at, computed_at) \
             SELECT u.queue_id, u.partitions, u.appended, u.evicted, u.pending, u.processing, u.leases, \
               u.leased_partitions, u.consumed, u.dead_letters, u.oldest_pending_at, u.last_write_at, u.computed_at \
             FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], \
               $8::bigint[], $9::bigint[], $10::bigint[], $11::timestamptz[], $12::timestamptz[], $13::timestamptz[]) \
               WITH ORDINALITY AS u (queue_id, partitions, appended, evicted, pending, processing, leases, \
               leased_partitions, consumed, dead_letters, oldest_pending_at, last_write_at, computed_at, ord) \
             CROSS JOIN LATERAL (SELECT 1 FROM queen.queues q WHERE q.id = u.queue_id LIMIT 1) q ORDER BY u.ord \
             ON CONFLICT (queue_id) DO UPDATE SET (partitions, appended, evicted, pending, processing, leases, \
               leased_partitions, consumed, dead_letters, oldest_pending_at, last_write_at, computed_at) \
               = ROW (excluded.partitions, excluded.appended, excluded.evicted, excluded.pending, excluded.processing, \
               excluded.leases, excluded.leased_partitions, excluded.consumed, excluded.dead_letters, \
               excluded.oldest_pending_at, excluded.last_write_at, excluded.computed_at) \
             WHERE s.computed_at <= excluded.computed_at",
        )
        .bind(stats.iter().map(|s| s.queue.0).collect::<Vec<_>>())
        .bind(column(|s| s.sums.partitions))
        .bind(column(|s| s.sums.appended))
        .bind(column(|s| s.sums.evicted))
        .bind(column(|s| s.sums.pending))
        .bind(column(|s| s.sums.processing))
        .bind(column(|s| s.sums.leases))
        .bind(column(|s| s.sums.leased_partitions))
        .bind(column(|s| s.sums.consumed))
        .bind(column(|s| s.dead_letters))
        .bind(instant(|s| s.sums.oldest_pending_at))
        .bind(instant(|s| s.sums.last_write_at))
        .bind(instant(|s| Some(s.at)))
        .execute(&self.pool)
        .timed("saving statistics")
        .await?;
        Ok(())
    }

    /// Takes the next turn of a background job, if no broker took one within `every_ms`.
    pub async fn take_turn(&self, name: &str, every_ms: i64) -> StoreResult<Option<Turn>> {
        let reached: Option<i32> = sqlx::query_scalar(
            "INSERT INTO queen.turns AS t (name, taken_at) VALUES ($1, clock_timestamp()) \
             ON CONFLICT (name) DO UPDATE SET taken_at = excluded.taken_at \
             WHERE t.taken_at <= excluded.taken_at - make_interval(secs => $2 / 1000.0) RETURNING reached",
        )
        .bind(name)
        .bind(every_ms as f64)
        .fetch_optional(&self.pool)
        .timed("taking a turn")
        .await?;
        Ok(reached.map(|reached| Turn { reached }))
    }

    /// Notes where a turn stopped.
    pub async fn end_turn(&self, name: &str, reached: i32) -> StoreResult<()> {
        sqlx::query("UPDATE queen.turns SET reached = $2 WHERE name = $1")
            .bind(name)
            .bind(reached)
            .execute(&self.pool)
            .timed("taking a turn")
            .await?;
        Ok(())
    }

    /// Queues in key order after `after`.
    pub async fn queues_after(&self, after: i32, limit: i64) -> StoreResult<Vec<QueueId>> {
        let ids: Vec<i32> = sqlx::query_scalar("SELECT id FROM queen.queues WHERE id > $1 ORDER BY id LIMIT $2")
            .bind(after)
            .bind(limit)
            .fetch_all(&self.pool)
            .timed("paging queues")
            .await?;
        Ok(ids.into_iter().map(QueueId).collect())
    }

    /// The queues of these groups.
    pub async fn queues_of_groups(&self, groups: &[i32]) -> StoreResult<Vec<QueueId>> {
        let ids: Vec<i32> =
            sqlx::query_scalar("WITH g AS MATERIALIZED (SELECT queue_id FROM queen.consumer_groups WHERE id = ANY($1)) SELECT DISTINCT queue_id FROM g")
                .bind(groups)
                .fetch_all(&self.pool)
                .timed("finding queues of groups")
                .await?;
        Ok(ids.into_iter().map(QueueId).collect())
    }

    /// The next queue in key order after `after` whose segments changed since their sizes were summed up.
    pub async fn next_stale_sizes(&self, after: i32) -> StoreResult<Option<QueueId>> {
        let id: Option<i32> = sqlx::query_scalar(
            "SELECT queue_id FROM queen.stats WHERE queue_id > $1 \
               AND (bytes_appended <> appended OR bytes_evicted <> evicted) ORDER BY queue_id LIMIT 1",
        )
        .bind(after)
        .fetch_optional(&self.pool)
        .timed("finding changed sizes")
        .await?;
        Ok(id.map(QueueId))
    }

    /// Segments, messages and stored payload bytes of one page of a queue's partitions in name order after `after`, with
    /// the offsets they were read at and the last name (`None` past the end).
    pub async fn sizes_page(
        &self,
        queue: QueueId,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<(Sizes, Option<String>)> {
        let row = sqlx::query(concat!(
            "SELECT coalesce(sum(p.last_offset + 1), 0)::bigint AS appended, \
               coalesce(sum(p.log_start), 0)::bigint AS evicted, coalesce(sum(s.segments), 0)::bigint AS segments, \
               coalesce(sum(s.messages), 0)::bigint AS messages, coalesce(sum(s.bytes), 0)::bigint AS bytes, \
               max(p.name) AS last \
             FROM ",
            page_of_partitions!(),
            "LEFT JOIN LATERAL (SELECT count(*) AS segments, sum(s.message_count) AS messages, \
               sum(octet_length(s.frames)) AS bytes FROM queen.log_segments s WHERE s.partition_id = p.id) s ON true",
        ))
        .bind(queue.0)
        .bind(after)
        .bind(limit)
        .fetch_one(&self.pool)
        .timed("summing sizes")
        .await?;
        let read = || {
            let sizes = Sizes {
                appended: row.try_get("appended")?,
                evicted: row.try_get("evicted")?,
                segments: row.try_get("segments")?,
                messages: row.try_get("messages")?,
                bytes: row.try_get("bytes")?,
            };
            Ok((sizes, row.try_get("last")?))
        };
        read().during("summing sizes")
    }

    /// Writes down the sizes of one queue.
    pub async fn save_sizes(&self, queue: QueueId, sizes: &Sizes) -> StoreResult<()> {
        sqlx::query(
            "UPDATE queen.stats SET segments = $2, segment_messages = $3, retained_bytes = $4, bytes_appended = $5, \
               bytes_evicted = $6 WHERE queue_id = $1",
        )
        .bind(queue.0)
        .bind(sizes.segments)
        .bind(sizes.messages)
        .bind(sizes.bytes)
        .bind(sizes.appended)
        .bind(sizes.evicted)
        .execute(&self.pool)
        .timed("saving statistics")
        .await?;
        Ok(())
    }
}

/// Sizes of segments, with the sums of offsets that they belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Messages ever pushed.
    pub appended: i64,
    /// Messages evicted.
    pub evicted: i64,
    /// Segments.
    pub segments: i64,
    /// Messages in them.
    pub messages: i64,
    /// Stored payload bytes.
    pub bytes: i64,
}

impl Sizes {
    /// Adds those of other partitions.
    pub fn add(&mut self, other: &Sizes) {
        self.appended += other.appended;
        self.evicted += other.evicted;
        self.segments += other.segments;
        self.messages += other.messages;
        self.bytes += other.bytes;
    }
}

fn sums_of(row: &PgRow) -> Result<Sums, sqlx::Error> {
    Ok(Sums {
        partitions: row.try_get("partitions")?,
        appended: row.try_get("appended")?,
        evicted: row.try_get("evicted")?,
        pending: row.try_get("pending")?,
        processing: row.try_get("processing")?,
        leases: row.try_get("leases")?,
        leased_partitions: row.try_get("leased_partitions")?,
        consumed: row.try_get("consumed")?,
        oldest_pending_at: row.try_get("oldest_pending_at")?,
        last_write_at: row.try_get("last_write_at")?,
    })
}
