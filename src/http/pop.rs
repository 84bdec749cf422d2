//! The three pop routes (`spec/push-pop.md` §7).

use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::error::ApiError;
use super::extract::{Query, check_name};
use super::json;
use super::resting::Seat;
use super::state::AppState;
use crate::broker::Broker;
use crate::broker::autopilot::Chosen;
use crate::broker::delivery::{Delivered, Run};
use crate::broker::group::Subscription;
use crate::broker::maintenance::Mode;
use crate::broker::pop::{BATCH_MAX, Delegated, Labels, Policy, PopAnswer, PopRequest, Popped, Scope, Sizes};
use crate::broker::pop_call::PopCall;
use crate::broker::segment::Frame;
use crate::ids::QUEUE_MODE_GROUP;

const BATCH_DEFAULT: i64 = 200;

/// `GET /api/v1/pop/queue/:queue`.
pub async fn pop_queue(
    State(state): State<AppState>,
    seat: Option<Extension<Seat>>,
    Path(queue): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    if let Some(call) = returning(&seat) {
        return serve(state, seat, call).await;
    }
    check_name("queue", &queue)?;
    begin(state, seat, Scope::Queue(queue), Query::parse(query.as_deref())?).await
}

/// `GET /api/v1/pop/queue/:queue/partition/:partition`.
pub async fn pop_partition(
    State(state): State<AppState>,
    seat: Option<Extension<Seat>>,
    Path((queue, partition)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    if let Some(call) = returning(&seat) {
        return serve(state, seat, call).await;
    }
    check_name("queue", &queue)?;
    check_name("partition", &partition)?;
    begin(state, seat, Scope::Partition(queue, partition), Query::parse(query.as_deref())?).await
}

/// `GET /api/v1/pop`: every queue whose labels match.
pub async fn pop_labels(
    State(state): State<AppState>,
    seat: Option<Extension<Seat>>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    if let Some(call) = returning(&seat) {
        return serve(state, seat, call).await;
    }
    let query = Query::parse(query.as_deref())?;
    let (namespace, task) = (query.name("namespace")?.map(str::to_owned), query.name("task")?.map(str::to_owned));
    if namespace.is_none() && task.is_none() {
        let body = serde_json::json!({"success": false, "error": "namespace or task is required", "messages": []});
        return Ok((StatusCode::BAD_REQUEST, Json(body)).into_response());
    }
    begin(state, seat, Scope::Labels(Labels { namespace, task }), query).await
}

/// The pop of a request that has come back from resting.
fn returning(seat: &Option<Extension<Seat>>) -> Option<Box<PopCall>> {
    seat.as_ref().and_then(|seat| seat.take_returning())
}

async fn begin(
    state: AppState,
    seat: Option<Extension<Seat>>,
    scope: Scope,
    query: Query,
) -> Result<Response, ApiError> {
    if let Some(refused) = refuse_conflation(&query)? {
        return Ok(refused);
    }
    let request = request_of(state.broker()?, scope, &query)?;
    // A parked pop keeps only what it needs.
    drop(query);
    serve(state, seat, Box::new(PopCall::new(request))).await
}

async fn serve(state: AppState, seat: Option<Extension<Seat>>, mut call: Box<PopCall>) -> Result<Response, ApiError> {
    let broker = state.broker()?;
    let maintenance = broker.maintenance();
    let (wait, conflation) = (call.request.wait, call.request.conflation);
    loop {
        if maintenance.is_on(Mode::Pop) {
            return paused(conflation);
        }
        let popped = tokio::select! {
            popped = broker.pop(&mut call) => popped?,
            // A parked pop must not deliver any more; what it claimed at that instant comes again after its lease.
            () = maintenance.pops_paused(), if wait => return paused(conflation),
        };
        if let Some(popped) = popped {
            return answered(broker, &call.request, popped);
        }
        loop {
            tokio::select! {
                () = broker.pop_due(&call) => break,
                () = tokio::time::sleep(state.rest_after), if seat.is_some() => {}
            }
            if let Some(Extension(seat)) = &seat {
                call = seat.rest(call).await;
            }
        }
    }
}

fn answered(broker: &Broker, request: &PopRequest, popped: Popped) -> Result<Response, ApiError> {
    let Popped { answer, policy, chosen } = popped;
    let answer = match answer {
        Some(answer) => answer,
        None if policy == Policy::default() => return Ok(StatusCode::NO_CONTENT.into_response()),
        None => PopAnswer { lease: None, delivered: Vec::new() },
    };
    let body = render(broker, request, &answer, policy, chosen);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The answer of a paused pop: nothing, without a body unless the client asked for conflation.
fn paused(conflation: Option<bool>) -> Result<Response, ApiError> {
    if conflation == Some(true) {
        let body = serde_json::json!({"messages": [], "paused": true, "conflation": true});
        return Ok(Json(body).into_response());
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What conflation cannot be combined with (`spec/push-pop.md` §7.12).
fn refuse_conflation(query: &Query) -> Result<Option<Response>, ApiError> {
    if query.boolean("conflation")? != Some(true) {
        return Ok(None);
    }
    let error = if query.text("consumerGroup").is_none_or(|group| group == QUEUE_MODE_GROUP) {
        "conflation requires a consumerGroup"
    } else if query.boolean("autoAck")? == Some(true) {
        "conflation cannot be combined with autoAck"
    } else {
        return Ok(None);
    };
    let body = serde_json::json!({"success": false, "error": error, "messages": []});
    Ok(Some((StatusCode::BAD_REQUEST, Json(body)).into_response()))
}

fn request_of(broker: &Broker, scope: Scope, query: &Query) -> Result<PopRequest, ApiError> {
    let positive = |key| query.integer(key).map(|n| n.filter(|n| *n > 0));
    let partitions = query.integer("partitions")?.map(|n| if n <= 0 { BATCH_MAX } else { n.min(BATCH_MAX) });
    let batch = positive("batch")?;
    let group = query.name("consumerGroup")?.unwrap_or(QUEUE_MODE_GROUP);
    let conflation = query.boolean("conflation")?;
    let asked = query.boolean("autopilot")? == Some(true);
    let autopilot = asked && matches!(scope, Scope::Queue(_)) && group != QUEUE_MODE_GROUP && conflation != Some(true);
    Ok(PopRequest {
        scope,
        group: group.to_owned(),
        sizes: Sizes { batch: batch.unwrap_or(BATCH_DEFAULT).min(BATCH_MAX), partitions },
        delegated: Delegated { batch: autopilot && batch.is_none(), partitions: autopilot && partitions.is_none() },
        auto_ack: query.boolean("autoAck")?.unwrap_or(false),
        wait: query.boolean("wait")?.unwrap_or(false),
        timeout: match query.integer("timeout")? {
            None => broker.pop_timeout_default(),
            Some(ms) => Duration::from_millis(u64::try_from(ms).unwrap_or(0)),
        },
        lease_seconds: positive("leaseSeconds")?,
        subscription: Subscription {
            mode: query.text("subscriptionMode").map(str::to_owned),
            from: query.text("subscriptionFrom").map(str::to_owned),
        },
        conflation,
    })
}

/// The body of an answer (`spec/push-pop.md` §7).
pub fn render(
    broker: &Broker,
    request: &PopRequest,
    answer: &PopAnswer,
    policy: Policy,
    chosen: Option<Chosen>,
) -> Vec<u8> {
    let payload: usize = answer.delivered.iter().map(|d| d.hashes.len() * 512).sum();
    let mut out = Vec::with_capacity(512 + payload);
    let queue = match &request.scope {
        Scope::Queue(queue) | Scope::Partition(queue, _) => queue.as_str(),
        Scope::Labels(_) => "",
    };
    let mut lease = String::new();
    if let Some(id) = answer.lease {
        lease = id.to_string();
    }
    out.extend_from_slice(b"{\"success\":true,\"queue\":");
    json::string(&mut out, queue);
    out.extend_from_slice(b",\"partition\":");
    let first = answer.delivered.first();
    json::string(&mut out, first.map_or("", |d| d.span.claimed.name.as_str()));
    out.extend_from_slice(b",\"partitionId\":\"");
    if let Some(first) = first {
        json::uuid(&mut out, broker.ids().partition(first.span.claimed.partition));
    }
    out.extend_from_slice(b"\",\"leaseId\":\"");
    out.extend_from_slice(lease.as_bytes());
    out.extend_from_slice(b"\",\"consumerGroup\":");
    json::string(&mut out, &request.group);
    out.extend_from_slice(b",\"messages\":[");
    let mut is_first = true;
    for part in &answer.delivered {
        // What every message of the partition repeats is written once and copied.
        let tail = tail_of(broker, request, part, &lease);
        for run in &part.runs {
            render_run(&mut out, broker, run, &tail, &mut is_first);
        }
    }
    out.extend_from_slice(b"],\"partitionsClaimed\":");
    json::integer(&mut out, answer.delivered.len() as i64);
    if policy.conflation {
        out.extend_from_slice(b",\"conflation\":true");
    }
    if policy.conflict {
        out.extend_from_slice(b",\"conflationConflict\":true");
    }
    if let Some(chosen) = chosen {
        out.extend_from_slice(b",\"autopilot\":{\"partitions\":");
        json::integer(&mut out, chosen.partitions);
        out.extend_from_slice(b",\"batch\":");
        json::integer(&mut out, chosen.batch);
        if let Some(wait) = chosen.wait_ms {
            out.extend_from_slice(b",\"waitMs\":");
            json::integer(&mut out, i64::try_from(wait).unwrap_or(i64::MAX));
        }
        out.push(b'}');
    }
    out.push(b'}');
    out
}

fn tail_of(broker: &Broker, request: &PopRequest, part: &Delivered, lease: &str) -> Vec<u8> {
    let claimed = &part.span.claimed;
    let mut tail = Vec::with_capacity(256);
    tail.extend_from_slice(b",\"partitionId\":\"");
    json::uuid(&mut tail, broker.ids().partition(claimed.partition));
    tail.extend_from_slice(b"\",\"partition\":");
    json::string(&mut tail, &claimed.name);
    tail.extend_from_slice(b",\"leaseId\":\"");
    tail.extend_from_slice(lease.as_bytes());
    tail.extend_from_slice(b"\",\"consumerGroup\":");
    json::string(&mut tail, &request.group);
    tail.extend_from_slice(b",\"deliveryAttempt\":");
    json::integer(&mut tail, i64::from(if request.auto_ack { 1 } else { claimed.attempt }));
    tail.push(b'}');
    tail
}

fn render_run(out: &mut Vec<u8>, broker: &Broker, run: &Run, tail: &[u8], is_first: &mut bool) {
    let created_at = json::timestamp(run.created_at);
    for frame in run.messages() {
        if !std::mem::take(is_first) {
            out.push(b',');
        }
        render_message(out, broker, &frame, &created_at);
        out.extend_from_slice(tail);
    }
}

fn render_message(out: &mut Vec<u8>, broker: &Broker, frame: &Frame<'_>, created_at: &str) {
    out.extend_from_slice(b"{\"id\":\"");
    json::uuid(out, frame.id);
    out.extend_from_slice(b"\",\"transactionId\":");
    match frame.transaction_id {
        Some(text) => json::string(out, text),
        None => {
            out.push(b'"');
            json::uuid(out, frame.id);
            out.push(b'"');
        }
    }
    out.extend_from_slice(b",\"traceId\":");
    json::optional_string(out, frame.trace_id);
    out.extend_from_slice(b",\"data\":");
    match broker.open_payload(frame.payload) {
        Some(opened) => out.extend_from_slice(&opened),
        None if frame.payload.is_empty() => out.extend_from_slice(b"null"),
        None => out.extend_from_slice(frame.payload),
    }
    out.extend_from_slice(b",\"producerSub\":");
    json::optional_string(out, frame.producer_sub);
    out.extend_from_slice(b",\"createdAt\":\"");
    out.extend_from_slice(created_at.as_bytes());
    out.push(b'"');
}
