//! What every request passes before its handler: it is counted and timed, and what no handler would take is refused.
//!
//! One service with a future of its own. Two `middleware::from_fn` in its place box a future and clone a boxed service each, for
//! every request.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use pin_project_lite::pin_project;
use tower::{Layer, Service};

use super::error::envelope;
use super::extract;
use super::meter::Metered;

/// The layer.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Largest request body in bytes.
    pub body_bytes_max: usize,
}

impl<S> Layer<S> for Entry {
    type Service = Entered<S>;

    fn layer(&self, inner: S) -> Entered<S> {
        Entered { inner, entry: *self }
    }
}

impl Entry {
    /// What is refused before any handler: announced bodies over the limit (413, plain text) and broken percent escapes.
    fn refuse(self, request: &Request) -> Option<Response> {
        let announced = request.headers().get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<u64>().ok());
        if announced.is_some_and(|bytes| bytes > self.body_bytes_max as u64) {
            let told = (StatusCode::PAYLOAD_TOO_LARGE, [(header::CONNECTION, "close")], "request body too large");
            return Some(told.into_response());
        }
        if !extract::escapes_are_whole(request.uri().path()) {
            return Some(envelope(StatusCode::BAD_REQUEST, "broken percent escape in the path"));
        }
        None
    }
}

/// The service.
#[derive(Clone, Debug)]
pub struct Entered<S> {
    inner: S,
    entry: Entry,
}

impl<S> Service<Request> for Entered<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Answering<S::Future>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(task)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let meter = Some(Metered::start(&request));
        match self.entry.refuse(&request) {
            Some(refusal) => Answering { meter, refusal: Some(refusal), handler: None },
            None => Answering { meter, refusal: None, handler: Some(self.inner.call(request)) },
        }
    }
}

pin_project! {
    /// The future of [`Entered`].
    #[derive(Debug)]
    pub struct Answering<F> {
        meter: Option<Metered>,
        refusal: Option<Response>,
        #[pin]
        handler: Option<F>,
    }
}

impl<F: Future<Output = Result<Response, Infallible>>> Future for Answering<F> {
    type Output = Result<Response, Infallible>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = match (this.refusal.take(), this.handler.as_pin_mut()) {
            (Some(refusal), _) => refusal,
            (None, Some(handler)) => ready!(handler.poll(task))?,
            // Polled again after its end.
            (None, None) => return Poll::Pending,
        };
        if let Some(meter) = this.meter.take() {
            meter.answered(response.status());
        }
        Poll::Ready(Ok(response))
    }
}
