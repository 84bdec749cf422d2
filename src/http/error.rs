//! Broker errors on the wire: status, envelope `{"error": …}`, `Retry-After` (`spec/push-pop.md` §1.2, §9).

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::broker::error::BrokerError;

/// An error answer.
#[derive(Debug)]
pub enum ApiError {
    /// 400 with a text that names the field.
    BadRequest(String),
    /// Whatever the domain says.
    Broker(BrokerError),
}

impl ApiError {
    /// A body that does not parse.
    pub fn bad_body(why: impl std::fmt::Display) -> ApiError {
        ApiError::BadRequest(format!("bad body: {why}"))
    }
}

impl From<BrokerError> for ApiError {
    fn from(error: BrokerError) -> ApiError {
        ApiError::Broker(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let error = match self {
            ApiError::BadRequest(text) => {
                count("bad_request");
                return envelope(StatusCode::BAD_REQUEST, &text);
            }
            ApiError::Broker(error) => error,
        };
        count(kind(&error));
        match &error {
            BrokerError::Invalid(text) => envelope(StatusCode::BAD_REQUEST, text),
            BrokerError::Overloaded { retry_after_seconds, .. } => {
                let body = json!({"error": error.to_string(), "code": "rate_limited"});
                retry_after((StatusCode::TOO_MANY_REQUESTS, Json(body)).into_response(), *retry_after_seconds)
            }
            BrokerError::NoDatabase(source) => {
                tracing::warn!(%source, "no database connection");
                retry_after(envelope(StatusCode::SERVICE_UNAVAILABLE, "no database connection"), 1)
            }
            BrokerError::NotYet | BrokerError::Stopping | BrokerError::OutcomeUnknown => {
                retry_after(envelope(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()), 1)
            }
            BrokerError::Failed(text) => {
                tracing::error!(error = text, "request failed");
                // SDK consume loops go on after a failed pop only if the text says "connection".
                envelope(StatusCode::INTERNAL_SERVER_ERROR, &format!("database connection error: {text}"))
            }
        }
    }
}

/// Counts a request that was refused or failed as a whole.
pub(super) fn count(kind: &'static str) {
    metrics::counter!(crate::metrics::ERRORS, "kind" => kind).increment(1);
}

/// How it is counted.
pub(super) fn kind(error: &BrokerError) -> &'static str {
    match error {
        BrokerError::Invalid(_) => "bad_request",
        BrokerError::Overloaded { .. } => "overloaded",
        BrokerError::NoDatabase(_) | BrokerError::OutcomeUnknown => "no_database",
        BrokerError::NotYet => "not_booted",
        BrokerError::Failed(_) => "failed",
        BrokerError::Stopping => "stopping",
    }
}

/// `{"error": text}` with a status.
pub fn envelope(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

/// The answer for a path or method that does not exist.
pub async fn no_such_route() -> Response {
    (StatusCode::NOT_FOUND, Json(json!({"error": "Not Found", "code": "no_such_route"}))).into_response()
}

/// Adds the header.
pub(super) fn retry_after(mut response: Response, seconds: u32) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}
