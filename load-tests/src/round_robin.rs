//! A reverse proxy that sends each request to the next of several brokers, whatever connection it came on: what a load
//! balancer without affinity does. Consecutive requests of one client meet different brokers.
//!
//! Bodies stream both ways, both sides keep connections alive, a long poll waits as long as its broker lets it, and
//! a client that hangs up takes its request to the broker with it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderName, HeaderValue};
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::RoundRobinArgs;

/// Names the broker that answered, counted from 1 in the order of `--to`.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-round-robin");
/// A connection to a broker that idles longer is not used again: the broker may be about to close it.
const IDLE: Duration = Duration::from_secs(5);
/// Pause after a failed accept; the usual cause is that no file descriptor is free.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

type Body = Either<Incoming, Full<Bytes>>;

/// Listens and forwards until SIGINT or SIGTERM. Its address is the one line on standard output.
///
/// # Errors
/// A URL that is not `http://HOST:PORT`, an address that cannot be listened on, an output that is gone.
pub async fn serve(args: &RoundRobinArgs) -> Result<()> {
    let brokers = args.to.iter().map(|url| authority(url)).collect::<Result<Vec<_>>>()?;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client =
        Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).build(connector);
    let ring = Arc::new(Ring { brokers, next: AtomicUsize::new(0), client });
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("cannot listen on {}", args.listen))?;
    println!("round robin on http://{}", listener.local_addr()?);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(tokio::spawn(connection(stream, Arc::clone(&ring)))),
                Err(error) => {
                    eprintln!("regent-load: accept: {error}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            },
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        }
    }
}

fn authority(url: &str) -> Result<Authority> {
    let uri: Uri = url.parse().with_context(|| format!("--to {url}"))?;
    ensure!(uri.scheme() == Some(&Scheme::HTTP) && uri.path() == "/", "--to {url}: not http://HOST:PORT");
    uri.into_parts().authority.with_context(|| format!("--to {url}: no host"))
}

/// The brokers, and whose turn it is.
struct Ring {
    brokers: Vec<Authority>,
    next: AtomicUsize,
    client: Client<HttpConnector, Incoming>,
}

impl Ring {
    /// Passes one request on. Dropping the future (the client is gone) closes the connection to the broker. A broker
    /// that cannot be reached, or hangs up before it answers, is a 502: no second try, the first may have been done.
    async fn forward(&self, request: Request<Incoming>) -> Response<Body> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.brokers.len();
        let (mut parts, body) = request.into_parts();
        let mut to = std::mem::take(&mut parts.uri).into_parts();
        to.scheme = Some(Scheme::HTTP);
        to.authority = self.brokers.get(turn).cloned();
        to.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        parts.headers.remove(CONNECTION);
        let answered = match Uri::from_parts(to) {
            Ok(uri) => {
                parts.uri = uri;
                self.client.request(Request::from_parts(parts, body)).await.map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        let mut response = match answered {
            Ok(response) => response.map(Either::Left),
            Err(error) => {
                eprintln!("regent-load: broker {}: {error}", turn + 1);
                let mut response = Response::new(Either::Right(Full::from(error)));
                *response.status_mut() = StatusCode::BAD_GATEWAY;
                response
            }
        };
        response.headers_mut().remove(CONNECTION);
        response.headers_mut().insert(ANSWERED_BY, HeaderValue::from(turn + 1));
        response
    }
}

/// Serves one connection until either side closes it.
async fn connection(stream: TcpStream, ring: Arc<Ring>) {
    let service = service_fn(|request| async { Ok::<_, Infallible>(ring.forward(request).await) });
    // A connection that ends in an error is a hang-up: there is nobody left to tell.
    let _ = stream.set_nodelay(true);
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}
