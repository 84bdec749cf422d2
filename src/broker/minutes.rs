//! Writes the minute buckets: what happened to each queue since the last write, and how this broker fared. Bounded: the
//! busiest queues have rows of their own, the others share one; what could not be written waits for the next write.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio_util::sync::CancellationToken;

use super::Broker;
use super::error::BrokerResult;
use crate::ids::QueueId;
use crate::process::{self, Usage};
use crate::store::minutes::{BrokerMinute, Operations, QueueMinute};

/// How often the scheduler's lag is measured.
const TICK: Duration = Duration::from_secs(1);
/// How often parked pops are counted, in ticks.
const PARKED_TICKS: u32 = 5;
/// Longest wait for the last write at the end of the process.
const LAST_WRITE_MAX: Duration = Duration::from_secs(3);
/// Pause between two purges of old buckets, by whichever broker takes the turn.
const PURGE_EVERY_MS: i64 = 600_000;
/// Purge statements of one turn.
const PURGES_MAX: usize = 200;

/// What one loop gathers between two writes.
#[derive(Debug)]
struct Gathered {
    own: BrokerMinute,
    parked: HashMap<i32, (i64, i64)>,
    since: Instant,
    usage: Usage,
    unsaved: Option<(DateTime<Utc>, BrokerMinute, Vec<QueueMinute>)>,
}

impl Broker {
    /// Writes the buckets until `stop`, once more at the end, and purges old ones.
    pub async fn run_minutes(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let settings = self.pop.settings.statistics;
        let mut gathered = Gathered {
            own: BrokerMinute::default(),
            parked: HashMap::new(),
            since: Instant::now(),
            usage: process::usage(),
            unsaved: None,
        };
        let mut ticks = 0_u32;
        let mut next = Instant::now() + until_next(settings.flush_interval, Utc::now());
        loop {
            let started = Instant::now();
            let pause = TICK.min(next.saturating_duration_since(started));
            let stopped = stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
            if stopped {
                let last = tokio::time::timeout(LAST_WRITE_MAX, self.write_minute(&mut gathered)).await;
                if let Ok(Err(error)) = last {
                    tracing::debug!(%error, "the last minute was not written");
                }
                return Ok(());
            }
            gathered.note_lag(started.elapsed().saturating_sub(pause));
            gathered.own.waiting_max = gathered.own.waiting_max.max(self.pop.parking.waiting() as i64);
            ticks = ticks.wrapping_add(1);
            if ticks.is_multiple_of(PARKED_TICKS) {
                self.sample_parked(&mut gathered);
            }
            if Instant::now() < next {
                continue;
            }
            let done = self.write_minute(&mut gathered).await;
            crate::shutdown::count_pass("minutes", done.is_ok());
            if let Err(error) = done {
                tracing::warn!(%error, "minute buckets were not written; they go with the next ones");
            }
            if let Err(error) = self.purge_minutes(settings.keep).await {
                tracing::debug!(%error, "old minute buckets were not purged");
            }
            next = Instant::now() + until_next(settings.flush_interval, Utc::now());
        }
    }

    fn sample_parked(&self, gathered: &mut Gathered) {
        for (queue, count) in self.ready.parked_by_queue() {
            let (sum, _) = gathered.parked.entry(queue.0).or_default();
            *sum += count as i64;
        }
        gathered.parked.values_mut().for_each(|(_, samples)| *samples += 1);
    }

    async fn write_minute(&self, gathered: &mut Gathered) -> BrokerResult<()> {
        let name = &self.pop.settings.name;
        if let Some((bucket, own, queues)) = gathered.unsaved.take()
            && let Err(error) = self.store.save_minute(bucket, name, &own, &queues).await
        {
            gathered.unsaved = Some((bucket, own, queues));
            return Err(error.into());
        }
        let mut own = self.take_own(gathered);
        let queues = self.take_queues(gathered).await;
        for queue in &queues {
            own.lag_count += queue.lag_count;
            own.lag_ms_sum += queue.lag_ms_sum;
            own.lag_ms_max = own.lag_ms_max.max(queue.lag_ms_max);
        }
        let bucket = bucket_of(Utc::now());
        if let Err(error) = self.store.save_minute(bucket, name, &own, &queues).await {
            gathered.unsaved = Some((bucket, own, queues));
            return Err(error.into());
        }
        Ok(())
    }

    fn take_own(&self, gathered: &mut Gathered) -> BrokerMinute {
        let now = process::usage();
        let seconds = gathered.since.elapsed().as_secs_f64().max(0.001);
        let percent =
            |now: Duration, then: Duration| (now.saturating_sub(then).as_secs_f64() / seconds * 10_000.0) as i64;
        let figures = self.figures();
        let mut own = std::mem::take(&mut gathered.own);
        own.pid = i32::try_from(std::process::id()).unwrap_or(0);
        own.cpu_user = percent(now.cpu_user, gathered.usage.cpu_user);
        own.cpu_system = percent(now.cpu_system, gathered.usage.cpu_system);
        own.rss_bytes = i64::try_from(now.resident_bytes).unwrap_or(i64::MAX);
        own.pool_size = i64::from(figures.connections);
        own.pool_idle = figures.connections_idle as i64;
        own.pool_active = (own.pool_size - own.pool_idle).max(0);
        own.uptime_seconds = i64::try_from(process::uptime().as_secs()).unwrap_or(i64::MAX);
        own.totals = self.activity.take_totals();
        own.totals.db_errors = i64::try_from(crate::store::error::take_errors()).unwrap_or(i64::MAX);
        (gathered.usage, gathered.since) = (now, Instant::now());
        own
    }

    /// The rows of the busiest queues, and one for all others.
    async fn take_queues(&self, gathered: &mut Gathered) -> Vec<QueueMinute> {
        let mut rows: HashMap<i32, QueueMinute> = HashMap::new();
        let take = |counter: &std::sync::atomic::AtomicU64| i64::try_from(counter.swap(0, Relaxed)).unwrap_or(i64::MAX);
        self.activity.take_queues(|queue, activity| {
            let row = rows.entry(queue.0).or_default();
            row.push_requests += take(&activity.push_requests);
            row.push_messages += take(&activity.push_messages);
            row.pop_messages += take(&activity.pop_messages);
            row.pop_empty += take(&activity.pop_empty);
            row.transactions += take(&activity.transactions);
            row.partitions_created += take(&activity.partitions_created);
            row.partitions_deleted += take(&activity.partitions_deleted);
            row.lag_count += take(&activity.lag_count);
            row.lag_ms_sum += take(&activity.lag_ms_sum);
            row.lag_ms_max = row.lag_ms_max.max(take(&activity.lag_ms_max));
        });
        let mut acks = Vec::new();
        self.activity.take_groups(|group, activity| {
            let counts = QueueMinute {
                ack_requests: take(&activity.ack_requests),
                ack_success: take(&activity.ack_success),
                ack_failed: take(&activity.ack_failed),
                transactions: take(&activity.transactions),
                conflated: take(&activity.conflated),
                ..QueueMinute::default()
            };
            if counts != QueueMinute::default() {
                acks.push((group.0, counts));
            }
        });
        let groups: Vec<i32> = acks.iter().map(|(group, _)| *group).collect();
        // Groups that are gone, or that cannot be looked up now, count for no queue in particular.
        let queues: HashMap<i32, i32> =
            self.store.group_queues(&groups).await.unwrap_or_default().into_iter().collect();
        for (group, counts) in acks {
            rows.entry(queues.get(&group).copied().unwrap_or(0)).or_default().add(&counts);
        }
        for (queue, (sum, samples)) in gathered.parked.drain() {
            let row = rows.entry(queue).or_default();
            (row.parked_sum, row.parked_samples) = (sum, samples);
        }
        rows.retain(|_, row| *row != QueueMinute::default());
        self.activity.watched().note_minute(rows.iter().map(|(queue, row)| (QueueId(*queue), busy(row))));
        busiest(rows, self.pop.settings.statistics.queues_max)
    }

    async fn purge_minutes(&self, keep: Duration) -> BrokerResult<()> {
        if self.store.take_turn("minutes", PURGE_EVERY_MS).await?.is_some() {
            for _ in 0..PURGES_MAX {
                if !self.store.purge_minutes(keep.as_secs_f64()).await? {
                    break;
                }
            }
        }
        Ok(())
    }
}

impl Gathered {
    fn note_lag(&mut self, lag: Duration) {
        let us = i64::try_from(lag.as_micros()).unwrap_or(i64::MAX);
        self.own.loop_lag_count += 1;
        self.own.loop_lag_us_sum = self.own.loop_lag_us_sum.saturating_add(us);
        self.own.loop_lag_us_max = self.own.loop_lag_us_max.max(us);
    }
}

/// How much happened to a queue.
fn busy(row: &QueueMinute) -> i64 {
    row.push_messages + row.pop_messages + row.ack_requests + row.pop_empty + row.parked_sum
}

/// Queue rows in key order; those past `max`, the least busy, are added up as queue 0.
fn busiest(rows: HashMap<i32, QueueMinute>, max: usize) -> Vec<QueueMinute> {
    let mut rows: Vec<QueueMinute> = rows.into_iter().map(|(queue, row)| QueueMinute { queue, ..row }).collect();
    rows.sort_unstable_by_key(|row| (std::cmp::Reverse(busy(row)), row.queue));
    let mut rest = QueueMinute::default();
    for row in rows
        .split_off(max.min(rows.len()))
        .iter()
        .chain(rows.extract_if(.., |row| row.queue == 0).collect::<Vec<_>>().iter())
    {
        rest.add(row);
    }
    if rest != QueueMinute::default() {
        rows.push(rest);
    }
    rows.sort_unstable_by_key(|row| row.queue);
    rows
}

/// The minute that has just passed, or is passing.
fn bucket_of(now: DateTime<Utc>) -> DateTime<Utc> {
    let second = (now.timestamp_millis() - 1).div_euclid(60_000) * 60;
    DateTime::from_timestamp(second, 0).unwrap_or(now)
}

/// Time until the next multiple of the interval, so that a bucket is written when its minute is over.
fn until_next(interval: Duration, now: DateTime<Utc>) -> Duration {
    let interval = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX).max(1);
    let into = u64::try_from(now.timestamp_millis()).unwrap_or(0) % interval;
    Duration::from_millis(interval - into)
}

/// Operations of this process since the last write.
#[derive(Debug, Default)]
pub struct Totals {
    counters: [std::sync::atomic::AtomicU64; 9],
}

/// What [`Totals`] counts, in the order of its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Count {
    PushRequests,
    PushMessages,
    PopRequests,
    PopMessages,
    AckRequests,
    AckSuccess,
    AckFailed,
    Transactions,
    DeadLetters,
}

impl Totals {
    /// Counts.
    pub fn add(&self, what: Count, by: u64) {
        self.counters[what as usize].fetch_add(by, Relaxed);
    }

    /// Hands the counts out and sets them to zero.
    pub fn take(&self) -> Operations {
        let of = |what: Count| i64::try_from(self.counters[what as usize].swap(0, Relaxed)).unwrap_or(i64::MAX);
        Operations {
            push_requests: of(Count::PushRequests),
            push_messages: of(Count::PushMessages),
            pop_requests: of(Count::PopRequests),
            pop_messages: of(Count::PopMessages),
            ack_requests: of(Count::AckRequests),
            ack_success: of(Count::AckSuccess),
            ack_failed: of(Count::AckFailed),
            transactions: of(Count::Transactions),
            dead_letters: of(Count::DeadLetters),
            db_errors: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_queues_have_rows_and_nothing_is_lost() {
        let rows = (1..=10).map(|n| (n, QueueMinute { push_messages: i64::from(n), ..QueueMinute::default() }));
        let kept = busiest(rows.collect(), 3);
        let told: Vec<(i32, i64)> = kept.iter().map(|row| (row.queue, row.push_messages)).collect();
        assert_eq!(told, [(0, 28), (8, 8), (9, 9), (10, 10)]);
        assert!(busiest(HashMap::new(), 3).is_empty());
    }

    #[test]
    fn a_write_at_the_turn_of_the_minute_belongs_to_the_minute_before() {
        let at = |ms: i64| DateTime::from_timestamp_millis(ms).unwrap_or_default();
        assert_eq!(bucket_of(at(120_000)).timestamp(), 60);
        assert_eq!(bucket_of(at(120_001)).timestamp(), 120);
        assert_eq!(until_next(Duration::from_secs(60), at(119_000)), Duration::from_secs(1));
        assert_eq!(until_next(Duration::from_secs(60), at(120_000)), Duration::from_secs(60));
    }
}
