//! `POST /api/v1/ack` and `POST /api/v1/ack/batch` (`spec/ack.md` §1, §2).
//!
//! Both answer 200 with one element per item, whatever became of them; only a body that cannot be read is a 400, and
//! then nothing was applied.

use std::borrow::Cow;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::json;
use super::state::AppState;
use crate::broker::ack::{AckAnswer, AckError, Acked};

pub mod decode;

use decode::AckRequest;

/// Handles `POST /api/v1/ack`.
pub async fn single(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    Ok(answer(&state, decode::single(&body).map_err(ApiError::bad_body)?).await)
}

/// Handles `POST /api/v1/ack/batch`.
pub async fn batch(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    Ok(answer(&state, decode::batch(&body).map_err(ApiError::bad_body)?).await)
}

async fn answer(state: &AppState, AckRequest { group, ids, items }: AckRequest<'_>) -> Response {
    let answers = match state.broker() {
        _ if items.is_empty() => Vec::new(),
        Ok(broker) => broker.ack(&group, items).await,
        // Still waiting for its database: that, too, is told per item.
        Err(_) => vec![AckAnswer::refused(AckError::Pool); items.len()],
    };
    ([(header::CONTENT_TYPE, "application/json")], render(&ids, &answers)).into_response()
}

/// The response array; `ids` are echoed in request order.
fn render(ids: &[Cow<'_, str>], answers: &[AckAnswer]) -> Vec<u8> {
    const BYTES_PER_ITEM: usize = 160;
    let mut out = Vec::with_capacity(2 + answers.len() * BYTES_PER_ITEM);
    out.push(b'[');
    for (index, (id, answer)) in ids.iter().zip(answers).enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let (success, dlq, noop) = match answer.outcome {
            Ok(Acked::Done { dlq }) => (true, dlq, false),
            Ok(Acked::Noop) => (true, false, true),
            Err(_) => (false, false, false),
        };
        out.extend_from_slice(b"{\"index\":");
        json::integer(&mut out, index as i64);
        out.extend_from_slice(b",\"transactionId\":");
        json::string(&mut out, id);
        flag(&mut out, ",\"success\":", success);
        out.extend_from_slice(b",\"error\":");
        match &answer.outcome {
            Ok(_) => out.extend_from_slice(b"null"),
            Err(error) => json::string(&mut out, &error.to_string()),
        }
        flag(&mut out, ",\"leaseReleased\":", answer.lease_released);
        flag(&mut out, ",\"dlq\":", dlq);
        flag(&mut out, ",\"noop\":", noop);
        if let Some(conflated) = answer.conflated {
            out.extend_from_slice(b",\"conflated\":");
            json::integer(&mut out, conflated);
        }
        out.push(b'}');
    }
    out.push(b']');
    out
}

fn flag(out: &mut Vec<u8>, key: &str, value: bool) {
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(if value { b"true" } else { b"false" });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::ack::AckError;

    #[test]
    fn the_keys_come_in_the_order_of_the_specification() {
        let answers = [
            AckAnswer { outcome: Ok(Acked::Done { dlq: true }), lease_released: true, conflated: None },
            AckAnswer { outcome: Ok(Acked::Noop), lease_released: false, conflated: Some(9) },
            AckAnswer::refused(AckError::NotUuid("a\"b".into())),
        ];
        let ids = ["a", "", "\u{1}\""].map(Cow::Borrowed);
        let text = String::from_utf8_lossy(&render(&ids, &answers)).into_owned();
        assert_eq!(
            text,
            concat!(
                r#"[{"index":0,"transactionId":"a","success":true,"error":null,"leaseReleased":true,"dlq":true,"noop":false},"#,
                r#"{"index":1,"transactionId":"","success":true,"error":null,"leaseReleased":false,"dlq":false,"noop":true,"conflated":9},"#,
                r#"{"index":2,"transactionId":"\u0001\"","success":false,"error":"invalid input syntax for type uuid: \"a\"b\"","leaseReleased":false,"dlq":false,"noop":false}]"#,
            )
        );
        assert_eq!(render(&[], &[]), b"[]");
    }
}
