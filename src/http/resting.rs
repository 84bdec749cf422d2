//! Pops that wait without their HTTP connection state.
//!
//! A parked pop inside hyper and axum holds two buffers and a tower of futures, some 24 KB; a hundred thousand of them
//! are the memory of a broker. So a pop that has waited for a moment leaves: its handler puts the [`PopCall`] into the
//! connection's [`Seat`], the connection (`http/server.rs`) drops everything but the socket, and waits. When something is
//! due it serves the socket again, behind a request head that stands for the one that was answered by nobody yet; the
//! handler finds the pop in its seat and goes on. hyper reads and writes every byte as before.
//!
//! The stand-in head names the route only: what the client sent was checked when it came, and nobody but the connection
//! can put a pop into a seat.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::HttpBody;
use axum::extract::MatchedPath;
use axum::http::{HeaderValue, Method, Request, Version, header};
use bytes::Bytes;

use super::meter::UnderWay;
use crate::broker::pop_call::PopCall;

/// Where the pops of one connection leave and come back. A cheap clone; in the extensions of every request that may rest.
#[derive(Clone, Debug, Default)]
pub struct Seat {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Bytes of an earlier answer wait in hyper for the client to read: dropping hyper would lose them.
    blocked: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    head: Head,
    under_way: Option<UnderWay>,
    leaving: Option<Box<PopCall>>,
    returning: Option<Box<PopCall>>,
}

/// What the stand-in for a request must repeat.
#[derive(Debug, Default)]
struct Head {
    route: Option<MatchedPath>,
    connection: Option<HeaderValue>,
}

/// A pop that has left its request.
#[derive(Debug)]
pub struct Resting {
    /// The pop.
    pub call: Box<PopCall>,
    head: Bytes,
    under_way: Option<UnderWay>,
}

impl Seat {
    /// Offers the seat to a request that may rest: a pop without a body in HTTP/1.1.
    pub fn offer<B: HttpBody>(&self, request: &mut Request<B>) {
        let may_rest = request.method() == Method::GET
            && request.version() == Version::HTTP_11
            && request.uri().path().starts_with("/api/v1/pop")
            && request.body().is_end_stream();
        if may_rest {
            // A copy: the value of the request keeps all of hyper's buffer.
            let connection = request.headers().get(header::CONNECTION);
            let connection = connection.and_then(|value| HeaderValue::from_bytes(value.as_bytes()).ok());
            self.state().head = Head { route: None, connection };
            request.extensions_mut().insert(self.clone());
        }
    }

    /// Lets the meter of the request stay here while it is served: a pop that leaves is still under way.
    pub fn keep(&self, under_way: UnderWay, route: Option<MatchedPath>) {
        let mut state = self.state();
        state.under_way = Some(under_way);
        state.head.route = route;
    }

    /// The meter of the request.
    pub fn take_meter(&self) -> Option<UnderWay> {
        self.state().under_way.take()
    }

    /// The pop that the request stands for, if it has come back.
    pub fn take_returning(&self) -> Option<Box<PopCall>> {
        self.state().returning.take()
    }

    /// Leaves: never resolves, and the connection drops the caller. Gives the pop back at once if that is impossible now.
    pub async fn rest(&self, call: Box<PopCall>) -> Box<PopCall> {
        if self.inner.blocked.load(Ordering::Relaxed) {
            return call;
        }
        self.state().leaving = Some(call);
        std::future::pending().await
    }

    /// Notes whether the socket takes no more bytes.
    pub fn set_blocked(&self, blocked: bool) {
        self.inner.blocked.store(blocked, Ordering::Relaxed);
    }

    /// The pop that wants to leave.
    pub fn take_leaving(&self) -> Option<Resting> {
        let mut state = self.state();
        let call = state.leaving.take()?;
        let under_way = state.under_way.take();
        Some(Resting { call, head: state.head.render(), under_way })
    }

    /// Seats a pop that comes back. Answers the head of the request that will ask for it.
    pub fn come_back(&self, resting: Resting) -> Bytes {
        let mut state = self.state();
        state.returning = Some(resting.call);
        state.under_way = resting.under_way;
        resting.head
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every method leaves the state whole.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Head {
    fn render(&self) -> Bytes {
        let route = self.route.as_ref().map_or("/api/v1/pop", MatchedPath::as_str);
        let mut head = Vec::with_capacity(96);
        head.extend_from_slice(b"GET ");
        // Any names do: the pop is in its seat.
        for (n, part) in route.split('/').enumerate() {
            if n > 0 {
                head.push(b'/');
            }
            head.extend_from_slice(if part.starts_with('{') { b"-" } else { part.as_bytes() });
        }
        head.extend_from_slice(b" HTTP/1.1\r\nhost: -\r\n");
        if let Some(connection) = &self.connection {
            head.extend_from_slice(b"connection: ");
            head.extend_from_slice(connection.as_bytes());
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(b"\r\n");
        head.into()
    }
}
