//! Brokers and the database over time (`spec/admin.md` §9.1, §10.8 to §10.10).

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::json::instant;
use super::resources::counts;
use super::state::AppState;
use super::status::filter;
use super::window::{label, mean, per_second, round2, time_range, window};
use crate::broker::analytics::{BrokerPoint, Operations, QueuePoint, Window};
use crate::broker::inspection::{Inspection, QueueFilter, QueueSummary};

/// Queues that `status` lists, those with the most pending messages.
const QUEUES_LISTED_MAX: usize = 1_000;

fn by_bucket(points: &[BrokerPoint]) -> BTreeMap<DateTime<Utc>, Vec<&BrokerPoint>> {
    let mut buckets: BTreeMap<_, Vec<&BrokerPoint>> = BTreeMap::new();
    for point in points {
        buckets.entry(point.bucket).or_default().push(point);
    }
    buckets
}

fn sum_of<'a>(points: impl IntoIterator<Item = &'a &'a BrokerPoint>) -> Operations {
    let mut sums = Operations::default();
    points.into_iter().for_each(|point| sums.add(&point.totals));
    sums
}

/// Sum over brokers of the average of a gauge.
fn gauge(points: &[&BrokerPoint], value: fn(&BrokerPoint) -> &[f64]) -> f64 {
    points.iter().filter_map(|point| value(point).first()).sum()
}

/// The scheduler's lag over brokers: mean and most, milliseconds.
fn loop_lag(points: &[&BrokerPoint]) -> (f64, f64) {
    let sum: i64 = points.iter().map(|point| point.loop_lag_us_sum).sum();
    let count: i64 = points.iter().map(|point| point.loop_lag_count).sum();
    let max = points.iter().map(|point| point.loop_lag_us_max).max().unwrap_or(0);
    (round2(sum as f64 / count.max(1) as f64 / 1_000.0), round2(max as f64 / 1_000.0))
}

/// Last sign of life of each broker in the window.
fn workers(points: &[BrokerPoint]) -> Vec<Value> {
    let mut last: BTreeMap<&str, &BrokerPoint> = BTreeMap::new();
    points.iter().for_each(|point| {
        last.insert(&point.broker, point);
    });
    let row = |(name, point): (&&str, &&BrokerPoint)| {
        let (lag, _) = loop_lag(&[point]);
        json!({
            "hostname": name,
            "workerId": 0,
            "pid": point.pid,
            "lastSeen": label(point.last_seen),
            "avgEventLoopLagMs": lag,
            "dbPoolSize": point.pool_size.last(),
            "dbPoolIdle": point.pool_idle.last(),
            "rssBytes": point.rss_bytes.last().map(|bytes| *bytes as i64),
            "uptimeSeconds": point.uptime_seconds.last().map(|seconds| *seconds as i64),
        })
    };
    last.iter().map(row).collect()
}

/// `GET /api/v1/status`.
pub async fn status(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (window, filter) = (window(&query)?, filter(&query)?);
    let inspection = state.broker()?.inspection();
    let overview = inspection.overview(&filter).await?;
    let brokers = inspection.broker_points(&window, None).await?;
    let is_filtered = filter != QueueFilter::default();
    let queue_points = if is_filtered { Some(inspection.queue_points(&window, &filter).await?) } else { None };
    let throughput = throughput(&window, &brokers, queue_points.as_deref());
    let mut queues = inspection.queues(&filter, true, i64::MAX, 0).await?;
    queues.sort_by(|a, b| b.pending.cmp(&a.pending).then_with(|| a.name.cmp(&b.name)));
    queues.truncate(QUEUES_LISTED_MAX);
    let mut sums = Operations::default();
    brokers.iter().for_each(|point| sums.add(&point.totals));
    let reasons = if overview.dead_letters > 0 { inspection.top_reasons().await? } else { Vec::new() };
    let reasons: Vec<Value> =
        reasons.into_iter().map(|(error, count)| json!({"error": error, "count": count})).collect();
    Ok(Json(json!({
        "timeRange": time_range(&window),
        "bucketMinutes": window.minutes,
        "pointCount": throughput.len(),
        "statsAge": overview.stats_age,
        "throughput": throughput,
        "workers": workers(&brokers),
        "queues": queues.iter().map(|queue| queue_row(queue, inspection)).collect::<Vec<_>>(),
        "messages": counts((&overview).into()),
        "leases": {"active": overview.leases, "partitionsWithLeases": overview.leased_partitions},
        "deadLetterQueue": {
            "totalMessages": overview.dead_letters,
            "affectedPartitions": null,
            "affectedQueues": overview.dead_letter_queues,
            "topErrors": reasons,
        },
        "errors": {
            "dbErrors": sums.db_errors,
            "ackFailed": sums.ack_failed,
            "dlqCount": sums.dead_letters,
        },
    }))
    .into_response())
}

fn queue_row(queue: &QueueSummary, inspection: &Inspection) -> Value {
    json!({
        "id": inspection.ids().queue(queue.id),
        "name": queue.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "partitions": queue.partitions,
        "totalConsumed": queue.consumed,
        "messages": counts(queue.into()),
    })
}

/// Traffic of all queues as the brokers count it, or of some queues; the health is always that of the brokers.
fn throughput(window: &Window, brokers: &[BrokerPoint], queues: Option<&[QueuePoint]>) -> Vec<Value> {
    let brokers = by_bucket(brokers);
    let mut traffic: BTreeMap<DateTime<Utc>, (i64, i64, i64)> = BTreeMap::new();
    for point in queues.unwrap_or_default() {
        let sums = traffic.entry(point.bucket).or_default();
        sums.0 += point.push_messages;
        sums.1 += point.pop_messages;
        sums.2 += point.ack_success + point.ack_failed;
    }
    let row = |(bucket, points): (&DateTime<Utc>, &Vec<&BrokerPoint>)| {
        let (push, pop, ack) = match queues {
            Some(_) => traffic.get(bucket).copied().unwrap_or_default(),
            None => {
                let sums = sum_of(points);
                (sums.push_messages, sums.pop_messages, sums.acks())
            }
        };
        let (lag, _) = loop_lag(points);
        json!({
            "timestamp": label(*bucket),
            "pushMessages": push,
            "popMessages": pop,
            "ackMessages": ack,
            "pushPerSecond": per_second(push, window),
            "popPerSecond": per_second(pop, window),
            "ackPerSecond": per_second(ack, window),
            "ingested": push,
            "processed": ack,
            "ingestedPerSecond": per_second(push, window),
            "processedPerSecond": per_second(ack, window),
            "avgEventLoopLagMs": lag,
            "cpuUser": round2(gauge(points, |p| &p.cpu_user) / 100.0),
            "cpuSystem": round2(gauge(points, |p| &p.cpu_system) / 100.0),
            "rssBytes": gauge(points, |p| &p.rss_bytes) as i64,
            "dbPoolSize": round2(gauge(points, |p| &p.pool_size)),
            "dbPoolIdle": round2(gauge(points, |p| &p.pool_idle)),
            "dbPoolActive": round2(gauge(points, |p| &p.pool_active)),
        })
    };
    brokers.iter().map(row).collect()
}

/// `GET /api/v1/analytics/system-metrics`.
pub async fn system_metrics(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let points = points_of(&state, &query, &window).await?;
    let mut replicas: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for point in &points {
        let leaf = |values: &[f64]| match values {
            [avg, min, max, last] => json!({"avg": round2(*avg), "min": min, "max": max, "last": last}),
            _ => Value::Null,
        };
        replicas.entry(&point.broker).or_default().push(json!({
            "timestamp": label(point.bucket),
            "metrics": {
                "cpu": {"user_us": leaf(&point.cpu_user), "system_us": leaf(&point.cpu_system)},
                "memory": {"rss_bytes": leaf(&point.rss_bytes)},
                "database": {
                    "pool_size": leaf(&point.pool_size),
                    "pool_idle": leaf(&point.pool_idle),
                    "pool_active": leaf(&point.pool_active),
                },
                "uptime_seconds": leaf(&point.uptime_seconds),
                "threadpool": null,
                "shared_state": {"enabled": false, "messages_sent": 0, "messages_received": 0, "servers_alive": 0},
            },
        }));
    }
    let replicas: Vec<Value> = replicas
        .into_iter()
        .map(|(name, series)| json!({"hostname": name, "workerId": 0, "timeSeries": series}))
        .collect();
    Ok(Json(json!({
        "timeRange": time_range(&window),
        "bucketMinutes": window.minutes,
        "pointCount": by_bucket(&points).len(),
        "replicas": replicas,
    }))
    .into_response())
}

/// The points of the brokers that the request names; there is one worker per broker, number 0.
async fn points_of(state: &AppState, query: &Query, window: &Window) -> Result<Vec<BrokerPoint>, ApiError> {
    let broker = query.name("hostname")?;
    if query.text("workerId").is_some() && query.integer("workerId")? != Some(0) {
        return Ok(Vec::new());
    }
    Ok(state.broker()?.inspection().broker_points(window, broker).await?)
}

/// `GET /api/v1/analytics/worker-metrics`.
pub async fn worker_metrics(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let points = points_of(&state, &query, &window).await?;
    let inspection = state.broker()?.inspection();
    let filter = QueueFilter { queue: query.name("queue")?.map(str::to_owned), ..QueueFilter::default() };
    let mut queues: BTreeMap<String, (i64, i64, i64, i64)> = BTreeMap::new();
    for point in inspection.queue_points(&window, &filter).await? {
        let sums = queues.entry(point.queue_name).or_default();
        sums.0 += point.pop_messages;
        sums.1 += point.lag_ms_sum;
        sums.2 += point.lag_count;
        sums.3 = sums.3.max(point.lag_ms_max);
    }
    let queues: Vec<Value> = queues
        .into_iter()
        .map(|(name, (pops, sum, count, max))| {
            json!({"queueName": name, "popCount": pops, "avgLagMs": mean(sum, count), "maxLagMs": (count > 0).then_some(max)})
        })
        .collect();
    let series: Vec<Value> = by_bucket(&points).iter().map(|(at, points)| worker_point(*at, points, &window)).collect();
    let lifetime = inspection.lifetime().await?;
    let mut summary = operations(&lifetime);
    summary.insert("transactions".to_owned(), lifetime.transactions.into());
    Ok(Json(json!({
        "timeRange": time_range(&window),
        "bucketMinutes": window.minutes,
        "pointCount": series.len(),
        "summary": summary,
        "timeSeries": series,
        "workers": workers(&points),
        "queues": queues,
    }))
    .into_response())
}

fn operations(t: &Operations) -> Map<String, Value> {
    let mut map = Map::new();
    for (key, value) in [
        ("pushMessages", t.push_messages),
        ("popMessages", t.pop_messages),
        ("ackMessages", t.acks()),
        ("pushRequests", t.push_requests),
        ("popRequests", t.pop_requests),
        ("ackRequests", t.ack_requests),
        ("ackSuccess", t.ack_success),
        ("ackFailed", t.ack_failed),
        ("dlqCount", t.dead_letters),
        ("dbErrors", t.db_errors),
    ] {
        map.insert(key.to_owned(), value.into());
    }
    map
}

fn worker_point(at: DateTime<Utc>, points: &[&BrokerPoint], window: &Window) -> Value {
    let sums = sum_of(points);
    let (lag_avg, lag_max) = loop_lag(points);
    let lag_count: i64 = points.iter().map(|p| p.lag_count).sum();
    let lag_sum: i64 = points.iter().map(|p| p.lag_ms_sum).sum();
    let waiting = points.iter().map(|p| p.waiting_max).max().unwrap_or(0);
    let idle_min = points.iter().filter_map(|p| p.pool_idle.get(1)).fold(f64::INFINITY, |a, b| a.min(*b));
    let mut point = operations(&sums);
    let others = [
        ("timestamp", json!(label(at))),
        ("pushPerSecond", per_second(sums.push_messages, window).into()),
        ("popPerSecond", per_second(sums.pop_messages, window).into()),
        ("ackPerSecond", per_second(sums.acks(), window).into()),
        ("avgEventLoopLagMs", lag_avg.into()),
        ("maxEventLoopLagMs", lag_max.into()),
        ("avgLagMs", mean(lag_sum, lag_count).into()),
        ("maxLagMs", points.iter().map(|p| p.lag_ms_max).max().filter(|_| lag_count > 0).into()),
        ("lagCount", lag_count.into()),
        ("dbConnections", round2(gauge(points, |p| &p.pool_active)).into()),
        ("avgFreeSlots", round2(gauge(points, |p| &p.pool_idle)).into()),
        ("minFreeSlots", if idle_min.is_finite() { idle_min } else { 0.0 }.into()),
        ("jobsDone", sums.push_requests.into()),
        ("avgJobQueueSize", waiting.into()),
        ("maxJobQueueSize", waiting.into()),
        ("backoffSize", 0.into()),
    ];
    point.extend(others.map(|(key, value)| (key.to_owned(), value)));
    point.into()
}

/// `GET /api/v1/analytics/postgres-stats`.
pub async fn postgres_stats(State(state): State<AppState>) -> Result<Response, ApiError> {
    let report = state.broker()?.inspection().database_report().await?;
    let cache = report.cache.get(0).cloned().unwrap_or_default();
    let hits = |list: &Value| {
        let sum = |key: &str| list.as_array().into_iter().flatten().filter_map(|row| row[key].as_i64()).sum::<i64>();
        let (hit, read) = (sum("blocksHit"), sum("blocksRead"));
        let ratio = (hit + read > 0).then(|| (hit as f64 / (hit + read) as f64 * 10_000.0).round() / 10_000.0);
        json!({"blocksHit": hit, "blocksRead": read, "hitRatio": ratio})
    };
    Ok(Json(json!({
        "timestamp": instant(Utc::now()),
        "database": report.database,
        "databaseCache": cache,
        "cacheSummary": {"tables": hits(&report.table_cache), "indexes": hits(&report.index_cache)},
        "tableCache": report.table_cache,
        "indexCache": report.index_cache,
        "activeQueries": report.active_queries,
        "tableSizes": report.table_sizes,
        "deadTuples": report.dead_tuples,
        "hotUpdates": report.hot_updates,
        "autovacuumStatus": report.autovacuum,
        "bufferConfig": report.buffer_config,
        "bufferUsage": [],
    }))
    .into_response())
}
