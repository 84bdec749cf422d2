//! A wire between a broker and PostgreSQL that can be cut at a chosen moment.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;

use super::Database;
use super::server::Upstream;

/// What happens to the next message to PostgreSQL that holds the chosen bytes. Once; then the wire is whole again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// It never arrives.
    Before,
    /// It arrives and is carried out, but the answer never comes back.
    After,
}

/// The wire. Dropping it lets the connections be.
pub struct Proxy {
    /// The database's URL through this wire.
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    armed: Mutex<Option<(Cut, Vec<u8>)>>,
    /// Whether the wire is down.
    down: watch::Sender<bool>,
    /// Of a hundred notifications, how many are lost on the way; the connections live on.
    swallowed_percent: AtomicU8,
    swallowed: AtomicUsize,
}

impl Proxy {
    /// A wire to the server of this database.
    pub async fn to(database: &Database) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let (swallowed_percent, swallowed) = (AtomicU8::new(0), AtomicUsize::new(0));
        let down = watch::Sender::new(false);
        let shared = Arc::new(Shared { armed: Mutex::new(None), down, swallowed_percent, swallowed });
        let upstream = database.upstream();
        let of_listener = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (upstream, shared) = (upstream.clone(), Arc::clone(&of_listener));
                tokio::spawn(async move { connect(client, upstream, shared).await });
            }
        });
        Proxy { url: database.url_at(address), shared }
    }

    /// Cuts the connection that sends the next message with these bytes in it.
    pub fn arm(&self, cut: Cut, bytes: &[u8]) {
        *self.shared.armed.lock().unwrap() = Some((cut, bytes.to_vec()));
    }

    /// Whether what was armed has not happened yet.
    pub fn is_armed(&self) -> bool {
        self.shared.armed.lock().unwrap().is_some()
    }

    /// Ends every connection and refuses new ones.
    pub fn go_down(&self) {
        self.shared.down.send_replace(true);
    }

    /// Loses so many of a hundred notifications from now on.
    pub fn swallow(&self, percent: u8) {
        self.shared.swallowed_percent.store(percent, Ordering::SeqCst);
    }

    /// Notifications lost so far.
    pub fn swallowed(&self) -> usize {
        self.shared.swallowed.load(Ordering::SeqCst)
    }

    /// Lets connections through again.
    pub fn come_back(&self) {
        self.shared.down.send_replace(false);
    }
}

async fn connect(client: TcpStream, upstream: Upstream, shared: Arc<Shared>) {
    if *shared.down.borrow() {
        return;
    }
    let _ = client.set_nodelay(true);
    match upstream {
        Upstream::Socket(path) => {
            if let Ok(server) = UnixStream::connect(path).await {
                carry(client, server, shared).await;
            }
        }
        Upstream::Tcp(host, port) => {
            if let Ok(server) = TcpStream::connect((host.as_str(), port)).await {
                carry(client, server, shared).await;
            }
        }
    }
}

/// Carries bytes both ways until one side ends, the wire goes down or the cut happens.
async fn carry(client: TcpStream, server: impl AsyncRead + AsyncWrite, shared: Arc<Shared>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let mut down = shared.down.subscribe();
    let (mut request, mut answer) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut sieve = Sieve::default();
    loop {
        tokio::select! {
            () = async { let _ = down.wait_for(|down| *down).await; } => return,
            read = from_client.read(&mut request) => match read {
                Ok(count) if count > 0 => {
                    let cut = shared.cut_of(&request[..count]);
                    if cut == Some(Cut::Before) || to_server.write_all(&request[..count]).await.is_err() {
                        return;
                    }
                    if cut == Some(Cut::After) {
                        // The answer is complete when the server is ready for the next query.
                        while let Ok(count) = from_server.read(&mut answer).await {
                            if count == 0 || answer[..count].windows(5).any(|w| w == b"Z\0\0\0\x05") {
                                return;
                            }
                        }
                    }
                }
                _ => return,
            },
            read = from_server.read(&mut answer) => match read {
                Ok(count) if count > 0 => {
                    if to_client.write_all(&sieve.pass(&answer[..count], &shared)).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}

/// Takes notifications out of what the server sends.
#[derive(Default)]
struct Sieve {
    /// What of a message has come so far.
    partial: Vec<u8>,
}

impl Sieve {
    /// The whole messages that go on to the client. Without TLS each is a letter and a length that counts itself.
    fn pass(&mut self, bytes: &[u8], shared: &Shared) -> Vec<u8> {
        self.partial.extend_from_slice(bytes);
        let mut passed = Vec::with_capacity(self.partial.len());
        let mut at = 0;
        while let Some(header) = self.partial.get(at..at + 5) {
            let length = 1 + u32::from_be_bytes(header[1..].try_into().unwrap()) as usize;
            let Some(message) = self.partial.get(at..at + length) else { break };
            let percent = shared.swallowed_percent.load(Ordering::SeqCst);
            if message[0] == b'A' && rand::random_range(0..100) < percent {
                shared.swallowed.fetch_add(1, Ordering::SeqCst);
            } else {
                passed.extend_from_slice(message);
            }
            at += length;
        }
        self.partial.drain(..at);
        passed
    }
}

impl Shared {
    /// Takes the armed cut if this message is the one.
    fn cut_of(&self, message: &[u8]) -> Option<Cut> {
        let mut armed = self.armed.lock().unwrap();
        let (cut, bytes) = armed.as_ref()?;
        if !message.windows(bytes.len()).any(|w| w == bytes) {
            return None;
        }
        let cut = *cut;
        *armed = None;
        Some(cut)
    }
}
