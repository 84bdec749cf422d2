//! `POST /api/v1/transaction` (`spec/transactions-kv-timers.md` §2).
//!
//! 200 says that the call was processed, committed or rolled back; the body tells which. Every answer of this route has
//! the envelope of §2.8.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use uuid::Uuid;

use super::error::{count, kind, retry_after};
use super::json;
use super::state::AppState;
use crate::broker::error::BrokerError;
use crate::broker::transaction::{Bundle, Committed, meter::meter};

pub mod decode;

use decode::{Request, Slot};

/// Decodes, carries out, answers one element per operation in request order.
pub async fn transact(State(state): State<AppState>, body: Bytes) -> Response {
    let request = match decode::decode(&body) {
        Ok(request) => request,
        Err(text) => {
            count("bad_request");
            meter().answered("bad_request");
            return failure(StatusCode::BAD_REQUEST, "bad_request", &text);
        }
    };
    if request.slots.is_empty() {
        return success(&request, &request.bundle(), &Committed { pushes: Vec::new(), dead_lettered: Vec::new() });
    }
    let bundle = request.bundle();
    let done = match state.broker.get() {
        Some(broker) => broker.transact(&bundle, None).await,
        None => Err(BrokerError::NotYet),
    };
    match done {
        Ok(Ok(committed)) => success(&request, &bundle, &committed),
        Ok(Err(refusal)) => failure(StatusCode::OK, refusal.reason(), &refusal.to_string()),
        Err(error) => {
            count(kind(&error));
            let (status, seconds) = match &error {
                BrokerError::Overloaded { retry_after_seconds, .. } => {
                    (StatusCode::TOO_MANY_REQUESTS, Some(*retry_after_seconds))
                }
                BrokerError::Invalid(_) => (StatusCode::BAD_REQUEST, None),
                BrokerError::Failed(_) => (StatusCode::OK, None),
                BrokerError::NoDatabase(_)
                | BrokerError::NotYet
                | BrokerError::Stopping
                | BrokerError::OutcomeUnknown => (StatusCode::SERVICE_UNAVAILABLE, Some(1)),
            };
            tracing::warn!(%error, "a transaction was not carried out");
            let response = failure(status, "db_error", &error.to_string());
            match seconds {
                Some(seconds) => retry_after(response, seconds),
                None => response,
            }
        }
    }
}

fn failure(status: StatusCode, reason: &str, error: &str) -> Response {
    let id = Uuid::now_v7();
    let body = json!({"transactionId": id, "success": false, "reason": reason, "error": error, "results": []});
    (status, axum::Json(body)).into_response()
}

fn success(request: &Request<'_>, bundle: &Bundle<'_>, committed: &Committed) -> Response {
    let body = render(Uuid::now_v7(), request, bundle, committed);
    (StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn render(id: Uuid, request: &Request<'_>, bundle: &Bundle<'_>, committed: &Committed) -> Vec<u8> {
    const BYTES_PER_SLOT: usize = 192;
    let mut out = Vec::with_capacity(96 + request.slots.len() * BYTES_PER_SLOT);
    out.extend_from_slice(b"{\"transactionId\":\"");
    json::uuid(&mut out, id);
    out.extend_from_slice(b"\",\"success\":true,\"results\":[");
    for (index, slot) in request.slots.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"index\":");
        json::integer(&mut out, index as i64);
        match slot {
            Slot::Push(nth) => push_slot(&mut out, bundle, committed, *nth),
            Slot::Ack(nth) => ack_slot(&mut out, request, committed, *nth),
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
    out
}

fn push_slot(out: &mut Vec<u8>, bundle: &Bundle<'_>, committed: &Committed, nth: usize) {
    let (Some(item), Some(pushed)) = (bundle.pushes.get(nth), committed.pushes.get(nth)) else { return };
    out.extend_from_slice(b",\"type\":\"push\",\"success\":true,\"transactionId\":");
    match item.transaction_id {
        Some(text) => json::string(out, text),
        None => {
            out.push(b'"');
            json::uuid(out, pushed.minted_id);
            out.push(b'"');
        }
    }
    out.extend_from_slice(b",\"messageId\":\"");
    json::uuid(out, pushed.message_id);
    out.extend_from_slice(b"\",\"queueName\":");
    json::string(out, item.queue);
    if pushed.duplicate {
        out.extend_from_slice(b",\"duplicate\":true");
    }
}

fn ack_slot(out: &mut Vec<u8>, request: &Request<'_>, committed: &Committed, nth: usize) {
    let (Some(id), Some(dlq)) = (request.ack_ids.get(nth), committed.dead_lettered.get(nth)) else { return };
    out.extend_from_slice(b",\"type\":\"ack\",\"success\":true,\"transactionId\":");
    json::string(out, id);
    out.extend_from_slice(b",\"error\":null,\"dlq\":");
    out.extend_from_slice(if *dlq { b"true" } else { b"false" });
}
