//! Accepts connections and serves each until its client leaves or the broker drains.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::serve::Listener;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::resting::{Resting, Seat};
use super::state::AppState;
use crate::broker::Broker;

/// Serves until `stop`; returns when the last connection has ended.
pub async fn serve(mut listener: TcpListener, state: AppState, stop: CancellationToken) {
    // Made once: every connection shares the route table.
    let router = super::router(state.clone()).with_state(());
    let connections = TaskTracker::new();
    loop {
        // Waits after an error that would come again at once (no file descriptor left).
        let (stream, _) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.cancelled() => break,
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY refused");
        }
        connections.spawn(connection(stream, router.clone(), state.clone(), stop.clone()));
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// One connection: served by hyper, but for the times at which its pop rests.
async fn connection(mut stream: TcpStream, router: Router, state: AppState, stop: CancellationToken) {
    let seat = Seat::default();
    let mut unread = Bytes::new();
    // What hyper needs lives in a box of its own, gone while the pop rests.
    while let Some(left) = Box::pin(serve_until_rest(stream, unread, &router, &seat, &stop)).await {
        let Ok(broker) = state.broker() else { return };
        stream = left.stream;
        if !wait(broker, &stream, &left.resting).await {
            return;
        }
        unread = [seat.come_back(left.resting), left.unread].concat().into();
    }
}

/// A connection whose pop has left hyper.
struct Left {
    stream: TcpStream,
    /// Bytes that the client sent after its pop.
    unread: Bytes,
    resting: Resting,
}

/// Serves the connection until it ends (`None`) or its pop wants to rest.
async fn serve_until_rest(
    stream: TcpStream,
    unread: Bytes,
    router: &Router,
    seat: &Seat,
    stop: &CancellationToken,
) -> Option<Left> {
    let service = service_fn(|request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        seat.offer(&mut request);
        tower::Service::call(&mut router.clone(), request)
    });
    let wire = Wire { stream, unread, seat: seat.clone() };
    let mut served = http1::Builder::new().serve_connection(TokioIo::new(wire), service);
    let mut stopped = std::pin::pin!(stop.cancelled());
    let mut drains = false;
    let resting = std::future::poll_fn(|context| {
        loop {
            match Pin::new(&mut served).poll(context) {
                Poll::Ready(Ok(())) => return Poll::Ready(None),
                Poll::Ready(Err(error)) => {
                    tracing::trace!(%error, "connection ended");
                    return Poll::Ready(None);
                }
                Poll::Pending => {}
            }
            if let Some(resting) = seat.take_leaving() {
                return Poll::Ready(Some(resting));
            }
            if drains || stopped.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            drains = true;
            Pin::new(&mut served).graceful_shutdown();
        }
    })
    .await?;
    let parts = served.into_parts();
    // Not the buffer itself: it may be large and nearly empty.
    let Wire { stream, unread, .. } = parts.io.into_inner();
    let unread = [&parts.read_buf[..], &unread[..]].concat().into();
    Some(Left { stream, unread, resting })
}

/// Waits until the pop is due; `false` if the client hung up before.
async fn wait(broker: &Broker, stream: &TcpStream, resting: &Resting) -> bool {
    tokio::select! {
        () = broker.pop_due(&resting.call) => true,
        () = hung_up(stream) => false,
    }
}

/// Resolves when the client has closed its side. A client that sends more waits for its answers: it is there.
async fn hung_up(stream: &TcpStream) {
    if let Ok(1..) = stream.peek(&mut [0]).await {
        std::future::pending().await
    }
}

/// The socket, with what was read from it before.
struct Wire {
    unread: Bytes,
    stream: TcpStream,
    seat: Seat,
}

impl Wire {
    fn wrote(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.seat.set_blocked(result.is_pending());
        result
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let some = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread.split_to(some));
        if self.unread.is_empty() {
            self.unread = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wrote(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.wrote(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
