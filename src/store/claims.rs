//! Claims on the cursors of (partition, group): the candidates of many pops in one statement.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, Row};
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};

/// What one pop asks for.
#[derive(Clone, Copy, Debug)]
pub struct ClaimRequest<'a> {
    /// The group, and through it the queue.
    pub group: GroupId,
    /// Partitions to try, in this order, each with the worker that its lease would get.
    pub candidates: &'a [(PartitionId, LeaseId)],
    /// Most messages over all partitions.
    pub messages_max: i64,
    /// Most partitions to claim.
    pub partitions_max: i64,
    /// Lease length in seconds, 1 to [`super::cursors::LEASE_SECONDS_MAX`].
    pub lease_seconds: i64,
    /// `delayedProcessing` in seconds, `<= 0` off.
    pub delay_seconds: i32,
    /// `windowBuffer` in seconds, `<= 0` off.
    pub window_seconds: i32,
    /// Messages that release a `windowBuffer` partition early.
    pub window_messages: i64,
    /// Takes everything visible of a partition, whatever its number, and counts it as one message.
    pub conflating: bool,
}

/// A span that this pop owns now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The partition.
    pub partition: PartitionId,
    /// Its name.
    pub name: String,
    /// Cursor at the claim.
    pub committed: Offset,
    /// First offset to deliver.
    pub first: Offset,
    /// Last offset to deliver.
    pub last: Offset,
    /// The worker, as asked for.
    pub worker: LeaseId,
    /// `deliveryAttempt` of every message of the span.
    pub attempt: i32,
    /// Whether it is leased (else committed at once).
    pub is_leased: bool,
}

/// What became of one candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// Claimed; `more` says whether messages above the span were waiting.
    Claimed(Claimed, bool),
    /// Nothing above the cursor.
    Empty,
    /// Retention took everything above the cursor: it is to be moved to the end ([`Store::seal_cursors`]).
    Emptied,
    /// Leased, held back (`retryDelay`, `delayedProcessing`, `windowBuffer`) or locked by another claim: worth another
    /// look after this time.
    NotYet(Duration),
    /// The group has no cursor here yet.
    Unmet,
    /// Eligible, but the budget was used up by the candidates before it.
    LeftOver,
    /// No such partition any more.
    Gone,
}

/// The outcomes of one request, in the order of its candidates.
pub type ClaimOutcomes = Vec<(PartitionId, ClaimOutcome)>;

// One row per candidate in `seen`; `locked` and `claimed` refer to it by `ord`. The answer is their union, not their
// join: with hash joins off (docs/adr) a join of three lists would be quadratic in the candidates of a flush.
// The end of what `delayedProcessing` lets through is found by halving the offsets above the cursor: created_at never
// falls along a partition, and no index holds it, so that a push pays for none.
macro_rules! claim_sql {
    ($set:literal) => {
        concat!(
            "WITH u AS ( \
               SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::int[], $4::int[], $5::bigint[], $6::bigint[], \
                 $7::float8[], $8::float8[], $9::float8[], $10::bigint[], $11::boolean[]) WITH ORDINALITY \
                 AS u (partition_id, worker_id, group_id, request, messages_max, partitions_max, \
                   lease_seconds, delay_seconds, window_seconds, window_messages, conflating, ord)), \
             seen AS MATERIALIZED ( \
               SELECT u.*, p.id IS NOT NULL AS exists, c.partition_id IS NOT NULL AS met, \
                 p.name, p.last_offset, v.visible_end, \
                 CASE WHEN u.delay_seconds > 0 THEN ( \
                   SELECT CASE WHEN s.created_at > clock_timestamp() - make_interval(secs => u.delay_seconds) \
                     THEN s.created_at + make_interval(secs => u.delay_seconds) END FROM queen.log_segments s \
                   WHERE s.partition_id = u.partition_id AND s.base_offset <= v.visible_end + 1 \
                   ORDER BY s.base_offset DESC LIMIT 1) END AS next_visible_at, \
                 greatest(c.committed, p.log_start - 1) + 1 AS first, \
                 p.log_start > p.last_offset AND c.committed < p.last_offset AS emptied, \
                 CASE WHEN c.worker_id IS NOT NULL AND c.lease_expires_at > clock_timestamp() \
                   THEN c.lease_expires_at END AS leased_until, \
                 CASE WHEN c.not_before > clock_timestamp() THEN c.not_before END AS not_before, \
                 CASE WHEN u.window_seconds > 0 \
                      AND greatest(c.committed, p.log_start - 1) >= coalesce(c.attempt_end, -1) \
                      AND v.visible_end - greatest(c.committed, p.log_start - 1) < u.window_messages THEN ( \
                   SELECT s.created_at + make_interval(secs => u.window_seconds) FROM queen.log_segments s \
                   WHERE s.partition_id = u.partition_id AND s.base_offset <= greatest(c.committed, p.log_start - 1) + 1 \
                   ORDER BY s.base_offset DESC LIMIT 1) END AS window_end \
               FROM u \
               LEFT JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.partition_id]) \
               LEFT JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[u.partition_id]) AND c.group_id = u.group_id \
               LEFT JOIN LATERAL ( \
                 SELECT CASE WHEN u.delay_seconds <= 0 THEN p.last_offset ELSE ( \
                   WITH RECURSIVE old AS ( \
                     SELECT greatest(c.committed, p.log_start - 1) AS upto, p.last_offset AS below, \
                       clock_timestamp() - make_interval(secs => u.delay_seconds) AS cutoff \
                     UNION ALL \
                     SELECT CASE WHEN s.created_at <= old.cutoff \
                         THEN greatest(s.base_offset + s.message_count - 1, m.middle) ELSE old.upto END, \
                       CASE WHEN s.created_at <= old.cutoff THEN old.below ELSE s.base_offset - 1 END, old.cutoff \
                     FROM old CROSS JOIN LATERAL (SELECT old.upto + (old.below - old.upto + 1) / 2 AS middle) m \
                     CROSS JOIN LATERAL ( \
                       SELECT base_offset, message_count, created_at FROM queen.log_segments \
                       WHERE partition_id = u.partition_id AND base_offset <= m.middle \
                       ORDER BY base_offset DESC LIMIT 1) s \
                     WHERE old.upto < old.below) \
                   SELECT max(upto) FROM old) END AS visible_end \
               ) v ON true), \
             locked AS MATERIALIZED ( \
               SELECT c.partition_id, c.group_id, c.committed, s.worker_id, s.ord, s.request, s.messages_max, \
                 s.partitions_max, s.lease_seconds, s.conflating, greatest(c.committed + 1, s.first) AS first, s.visible_end \
               FROM seen s JOIN queen.log_consumers c \
                 ON c.partition_id = ANY (ARRAY[s.partition_id]) AND c.group_id = s.group_id \
               WHERE s.leased_until IS NULL AND s.not_before IS NULL \
                 AND (s.window_end IS NULL OR s.window_end <= clock_timestamp()) \
                 AND (c.worker_id IS NULL OR c.lease_expires_at <= clock_timestamp()) \
                 AND (c.not_before IS NULL OR c.not_before <= clock_timestamp()) \
                 AND s.visible_end >= greatest(c.committed + 1, s.first) \
               ORDER BY s.partition_id, s.group_id FOR NO KEY UPDATE OF c SKIP LOCKED), \
             counted AS ( \
               SELECT *, CASE WHEN conflating THEN 1 ELSE visible_end - first + 1 END AS available FROM locked), \
             sized AS ( \
               SELECT *, row_number() OVER (PARTITION BY request ORDER BY ord) AS rank, \
                 sum(available) OVER (PARTITION BY request ORDER BY ord) - available AS before \
               FROM counted), \
             taken AS ( \
               SELECT partition_id, group_id, ord, worker_id, committed, lease_seconds, first, \
                 CASE WHEN conflating THEN visible_end \
                   ELSE first + least(available, messages_max - before)::bigint - 1 END AS last \
               FROM sized WHERE before < messages_max AND rank <= partitions_max), \
             claimed AS ( \
               UPDATE queen.log_consumers c SET ",
            $set,
            " FROM taken t WHERE c.partition_id = ANY (ARRAY[t.partition_id]) AND c.group_id = t.group_id \
               RETURNING t.ord, t.committed, t.first, t.last, t.worker_id, coalesce(c.attempts, 1) AS attempts, \
                 c.worker_id IS NOT NULL AS leased) \
             SELECT ord, 0 AS stage, name, exists, met, emptied, \
               first IS NOT NULL AND last_offset >= first AS pending, last_offset, \
               extract(epoch FROM coalesce(leased_until, not_before, \
                 CASE WHEN window_end > clock_timestamp() THEN window_end END, next_visible_at) \
                 - clock_timestamp())::float8 AS wait_seconds, \
               NULL::bigint AS committed, NULL::bigint AS first, NULL::bigint AS last, NULL::uuid AS worker_id, \
               NULL::int AS attempts, NULL::boolean AS leased \
             FROM seen \
             UNION ALL SELECT ord, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \
             FROM locked \
             UNION ALL SELECT ord, 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
               committed, first, last, worker_id, attempts, leased FROM claimed"
        )
    };
}

const CLAIM_LEASED: &str = claim_sql!(
    "worker_id = t.worker_id, batch_end = t.last, lease_acquired_at = clock_timestamp(), \
     lease_expires_at = clock_timestamp() + make_interval(secs => t.lease_seconds), not_before = NULL, \
     attempts = CASE WHEN c.attempt_start = t.first THEN c.attempts + 1 ELSE 1 END, attempt_start = t.first, attempt_end = t.last"
);
const CLAIM_AUTO_ACK: &str = claim_sql!(
    "committed = t.last, total_consumed = c.total_consumed + (t.last - c.committed), batch_retry_count = 0, \
     worker_id = NULL, batch_end = NULL, lease_expires_at = NULL, not_before = NULL, attempts = NULL, \
     lease_acquired_at = clock_timestamp(), attempt_start = NULL, attempt_end = NULL"
);

impl Store {
    /// Claims what can be claimed among the candidates of every request and leases it, in one statement that commits
    /// asynchronously. Never waits for another claim: a locked row is skipped. No (partition, group) may occur twice.
    /// Answers per request.
    pub async fn claim(&self, requests: &[ClaimRequest<'_>]) -> StoreResult<Vec<ClaimOutcomes>> {
        run(&self.claims, CLAIM_LEASED, requests).await
    }
}

/// Moves the cursors of what can be claimed; nothing is leased.
pub(super) async fn commit_at_once<'e>(
    executor: impl PgExecutor<'e>,
    request: &ClaimRequest<'_>,
) -> StoreResult<Vec<ClaimOutcomes>> {
    run(executor, CLAIM_AUTO_ACK, std::slice::from_ref(request)).await
}

async fn run<'e>(
    executor: impl PgExecutor<'e>,
    sql: &'static str,
    requests: &[ClaimRequest<'_>],
) -> StoreResult<Vec<ClaimOutcomes>> {
    let each = || requests.iter().zip(0_i32..).flat_map(|(r, nth)| r.candidates.iter().map(move |c| (r, nth, c)));
    let rows = sqlx::query(sql)
        .bind(each().map(|(_, _, (partition, _))| partition.0).collect::<Vec<i64>>())
        .bind(each().map(|(_, _, (_, worker))| worker.0).collect::<Vec<Uuid>>())
        .bind(each().map(|(r, ..)| r.group.0).collect::<Vec<i32>>())
        .bind(each().map(|(_, nth, _)| nth).collect::<Vec<i32>>())
        .bind(each().map(|(r, ..)| r.messages_max).collect::<Vec<i64>>())
        .bind(each().map(|(r, ..)| r.partitions_max).collect::<Vec<i64>>())
        .bind(each().map(|(r, ..)| r.lease_seconds as f64).collect::<Vec<f64>>())
        .bind(each().map(|(r, ..)| f64::from(r.delay_seconds)).collect::<Vec<f64>>())
        .bind(each().map(|(r, ..)| f64::from(r.window_seconds)).collect::<Vec<f64>>())
        .bind(each().map(|(r, ..)| r.window_messages).collect::<Vec<i64>>())
        .bind(each().map(|(r, ..)| r.conflating).collect::<Vec<bool>>())
        .fetch_all(executor)
        .timed("claiming")
        .await?;
    let mut candidates = Vec::new();
    candidates.resize_with(each().count(), Candidate::default);
    for row in &rows {
        place(row, &mut candidates).during("claiming")?;
    }
    let mut candidates = candidates.into_iter();
    Ok(requests
        .iter()
        .map(|request| {
            let partitions = request.candidates.iter().map(|(partition, _)| *partition);
            partitions.zip(candidates.by_ref()).map(|(partition, c)| (partition, c.outcome(partition))).collect()
        })
        .collect())
}

/// How long to leave a row alone that another claim holds locked: the length of a claim.
const LOCKED_RETRY: Duration = Duration::from_millis(20);

/// What the three stages of the statement say of one candidate.
#[derive(Default)]
struct Candidate {
    seen: Option<Seen>,
    locked: bool,
    claimed: Option<Span>,
}

struct Seen {
    name: Option<String>,
    last_offset: Option<i64>,
    exists: bool,
    met: bool,
    emptied: bool,
    pending: bool,
    wait_seconds: Option<f64>,
}

struct Span {
    committed: i64,
    first: i64,
    last: i64,
    worker: Uuid,
    attempts: i32,
    leased: bool,
}

fn place(row: &PgRow, candidates: &mut [Candidate]) -> Result<(), sqlx::Error> {
    let ord: i64 = row.try_get("ord")?;
    let Some(candidate) = usize::try_from(ord - 1).ok().and_then(|nth| candidates.get_mut(nth)) else {
        return Err(sqlx::Error::Protocol(format!("candidate {ord} was not asked for")));
    };
    match row.try_get::<i32, _>("stage")? {
        0 => {
            candidate.seen = Some(Seen {
                name: row.try_get("name")?,
                last_offset: row.try_get("last_offset")?,
                exists: row.try_get("exists")?,
                met: row.try_get("met")?,
                emptied: row.try_get::<Option<bool>, _>("emptied")?.unwrap_or(false),
                pending: row.try_get("pending")?,
                wait_seconds: row.try_get("wait_seconds")?,
            });
        }
        1 => candidate.locked = true,
        _ => {
            candidate.claimed = Some(Span {
                committed: row.try_get("committed")?,
                first: row.try_get("first")?,
                last: row.try_get("last")?,
                worker: row.try_get("worker_id")?,
                attempts: row.try_get("attempts")?,
                leased: row.try_get("leased")?,
            });
        }
    }
    Ok(())
}

impl Candidate {
    fn outcome(self, partition: PartitionId) -> ClaimOutcome {
        let Some(seen) = self.seen else { return ClaimOutcome::Gone };
        if let Some(span) = self.claimed {
            let more = seen.last_offset.is_some_and(|end| end > span.last);
            let claimed = Claimed {
                partition,
                name: seen.name.unwrap_or_default(),
                committed: Offset(span.committed),
                first: Offset(span.first),
                last: Offset(span.last),
                worker: LeaseId(span.worker),
                attempt: span.attempts,
                is_leased: span.leased,
            };
            return ClaimOutcome::Claimed(claimed, more);
        }
        if !seen.exists {
            ClaimOutcome::Gone
        } else if !seen.met {
            ClaimOutcome::Unmet
        } else if !seen.pending {
            if seen.emptied { ClaimOutcome::Emptied } else { ClaimOutcome::Empty }
        } else if self.locked {
            ClaimOutcome::LeftOver
        } else {
            let wait = seen.wait_seconds.filter(|s| *s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok());
            ClaimOutcome::NotYet(wait.unwrap_or(LOCKED_RETRY))
        }
    }
}
