//! A TCP proxy between a broker and its PostgreSQL that understands just enough of the protocol to break a connection
//! around one kind of statement: those that write an ack.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Notify;

/// What happens to the next execution of a statement that writes an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The connection breaks before the server sees it.
    BeforeSend,
    /// The server has answered (and so committed), and the broker never hears.
    BeforeAnswer,
    /// It stays in the proxy until [`Proxy::let_go`].
    HoldBack,
}

#[derive(Default)]
struct Plan {
    cuts: Vec<Cut>,
    refuse: bool,
    held: usize,
}

struct Shared {
    plan: Mutex<Plan>,
    go: Notify,
}

/// See the module.
pub struct Proxy {
    shared: Arc<Shared>,
}

#[derive(Clone)]
enum Server {
    Unix(PathBuf),
    Tcp(String),
}

impl Proxy {
    /// A proxy in front of the server of this URL, and the URL to reach it by.
    pub async fn before(url: &str) -> (Proxy, String) {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        let (scheme, rest) = address.split_once("://").unwrap();
        let (authority, database) = rest.split_once('/').unwrap();
        let (user, host) = authority.rsplit_once('@').unwrap_or(("postgres", authority));
        let port = host.split_once(':').map_or("5432", |(_, port)| port);
        let socket_dir = query.split('&').find_map(|pair| pair.strip_prefix("host="));
        let server = match socket_dir {
            Some(dir) => Server::Unix(PathBuf::from(dir).join(format!(".s.PGSQL.{port}"))),
            None if host.contains(':') => Server::Tcp(host.to_owned()),
            None => Server::Tcp(format!("{host}:{port}")),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { plan: Mutex::default(), go: Notify::new() });
        tokio::spawn(accept(listener, server, shared.clone()));
        let through = format!("{scheme}://{user}@{address}/{database}?sslmode=disable");
        (Proxy { shared }, through)
    }

    /// What happens to the next executions, one after the other.
    pub fn next(&self, cuts: &[Cut]) {
        self.shared.plan.lock().unwrap().cuts = cuts.iter().rev().copied().collect();
    }

    /// Cancels what was to happen to later executions.
    pub fn forgive(&self) {
        self.shared.plan.lock().unwrap().cuts.clear();
    }

    /// Whether new connections are refused from now on.
    pub fn refuse(&self, refuse: bool) {
        self.shared.plan.lock().unwrap().refuse = refuse;
    }

    /// Executions held back now.
    pub fn held(&self) -> usize {
        self.shared.plan.lock().unwrap().held
    }

    /// Lets go what is held back.
    pub fn let_go(&self) {
        self.shared.go.notify_waiters();
    }
}

async fn accept(listener: TcpListener, server: Server, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        if shared.plan.lock().unwrap().refuse {
            continue;
        }
        let (server, shared) = (server.clone(), shared.clone());
        tokio::spawn(async move {
            client.set_nodelay(true).unwrap();
            match server {
                Server::Unix(path) => {
                    if let Ok(upstream) = UnixStream::connect(path).await {
                        serve(client, upstream, shared).await;
                    }
                }
                Server::Tcp(address) => {
                    if let Ok(upstream) = TcpStream::connect(address).await {
                        serve(client, upstream, shared).await;
                    }
                }
            }
        });
    }
}

/// Passes one connection on until a side closes or a cut is due; returning closes both sides.
async fn serve(client: TcpStream, upstream: impl AsyncRead + AsyncWrite, shared: Arc<Shared>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(upstream);
    // The start-up message has no type byte.
    let Some(start) = read_body(&mut from_client).await else { return };
    if to_server.write_all(&start).await.is_err() {
        return;
    }
    let mut ack_statements = BTreeSet::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        tokio::select! {
            answered = from_server.read(&mut buffer) => match answered {
                Ok(count @ 1..) => {
                    if to_client.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
            kind = from_client.read_u8() => {
                let Ok(kind) = kind else { return };
                let Some(body) = read_body(&mut from_client).await else { return };
                note(kind, &body, &mut ack_statements);
                let cut = if executes(kind, &body, &ack_statements) { due(&shared) } else { None };
                match cut {
                    None => {}
                    Some(Cut::BeforeSend) => return,
                    Some(Cut::HoldBack) => hold(&shared).await,
                    Some(Cut::BeforeAnswer) => {
                        if to_server.write_u8(kind).await.is_ok() && to_server.write_all(&body).await.is_ok() {
                            finish_unheard(&mut from_client, &mut to_server, &mut from_server).await;
                        }
                        return;
                    }
                }
                if to_server.write_u8(kind).await.is_err() || to_server.write_all(&body).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Length and body of one frontend message.
async fn read_body(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let length = from.read_u32().await.ok()?;
    let mut body = length.to_be_bytes().to_vec();
    body.resize(length as usize, 0);
    from.read_exact(&mut body[4..]).await.ok()?;
    Some(body)
}

/// Remembers the names of the prepared statements that write acks.
fn note(kind: u8, body: &[u8], ack_statements: &mut BTreeSet<Vec<u8>>) {
    if kind != b'P' {
        return;
    }
    let mut texts = body[4..].split(|byte| *byte == 0);
    let (name, sql) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
    let sql = String::from_utf8_lossy(sql);
    if sql.contains("UPDATE queen.log_consumers c SET committed")
        && !sql.contains("lease_acquired_at = clock_timestamp()")
    {
        ack_statements.insert(name.to_vec());
    } else {
        ack_statements.remove(name);
    }
}

fn executes(kind: u8, body: &[u8], ack_statements: &BTreeSet<Vec<u8>>) -> bool {
    kind == b'B' && body[4..].split(|byte| *byte == 0).nth(1).is_some_and(|name| ack_statements.contains(name))
}

fn due(shared: &Shared) -> Option<Cut> {
    let mut plan = shared.plan.lock().unwrap();
    plan.cuts.pop()
}

async fn hold(shared: &Shared) {
    let go = shared.go.notified();
    shared.plan.lock().unwrap().held += 1;
    go.await;
    shared.plan.lock().unwrap().held -= 1;
}

/// Forwards up to the next Sync and reads until the server is ready for more: then the statement is committed.
async fn finish_unheard(
    from_client: &mut (impl AsyncRead + Unpin),
    to_server: &mut (impl AsyncWrite + Unpin),
    from_server: &mut (impl AsyncRead + Unpin),
) {
    loop {
        let Ok(kind) = from_client.read_u8().await else { return };
        let Some(body) = read_body(from_client).await else { return };
        if to_server.write_u8(kind).await.is_err() || to_server.write_all(&body).await.is_err() {
            return;
        }
        if kind == b'S' {
            break;
        }
    }
    while let Ok(kind) = from_server.read_u8().await {
        if read_body(from_server).await.is_none() || kind == b'Z' {
            return;
        }
    }
}
