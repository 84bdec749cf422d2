//! One keep-alive HTTP/1.1 connection, as cheap as it gets.
//!
//! Written for this tool instead of a general client for two reasons: the generator must cost less CPU than the broker
//! that it measures, and a waiting consumer of `parked` must cost about a kilobyte, not a connection pool's share. It
//! speaks what a broker answers: a length, chunks, or nothing (204).

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

/// Room in front of a request's body, so that the head can be put there once the length is known.
const HEADROOM: usize = 512;
const HEAD_BYTES_MAX: usize = 64 * 1024;
const READ_BYTES: usize = 32 * 1024;
const READ_BYTES_LEAN: usize = 2 * 1024;
/// Connections from one loopback source address, kept below the usual range of ephemeral ports.
const CONNECTIONS_PER_SOURCE: usize = 20_000;

/// Where the broker is.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Address to connect to.
    pub address: SocketAddr,
    /// Value of the `Host` header.
    pub host: String,
    /// Lines that every request carries.
    headers: String,
}

impl Endpoint {
    /// Resolves `http://host[:port]`.
    pub async fn resolve(url: &str, token: Option<&str>) -> Result<Self> {
        let Some(rest) = url.strip_prefix("http://") else {
            bail!("--url {url}: only http:// is spoken here");
        };
        let host = rest.split('/').next().unwrap_or_default().to_owned();
        let target = if host.contains(':') { host.clone() } else { format!("{host}:80") };
        let mut addresses = tokio::net::lookup_host(&target).await.with_context(|| format!("look up {target}"))?;
        let address = addresses.next().with_context(|| format!("{target} has no address"))?;
        let mut headers = format!("Host: {host}\r\n");
        if let Some(token) = token {
            headers.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        Ok(Self { address, host, headers })
    }

    /// The same headers for another port of this machine, where a broker was started.
    pub fn local(port: u16) -> Self {
        let host = format!("127.0.0.1:{port}");
        let headers = format!("Host: {host}\r\n");
        Self { address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)), host, headers }
    }
}

/// A request, built in place and kept until its answer is final.
#[derive(Default)]
pub struct Request {
    bytes: Vec<u8>,
    start: usize,
}

impl Request {
    /// A GET of a path with its query.
    pub fn get(endpoint: &Endpoint, path: &str) -> Self {
        Self { bytes: format!("GET {path} HTTP/1.1\r\n{}\r\n", endpoint.headers).into_bytes(), start: 0 }
    }

    /// Starts a body; what is pushed to the returned buffer becomes the body.
    pub fn begin_post(&mut self) -> &mut Vec<u8> {
        self.bytes.clear();
        self.bytes.resize(HEADROOM, b' ');
        &mut self.bytes
    }

    /// The buffer of a body that was begun.
    pub fn body(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Puts the head in front of the body.
    pub fn finish_post(&mut self, endpoint: &Endpoint, path: &str) {
        let length = self.bytes.len() - HEADROOM;
        let head = format!(
            "POST {path} HTTP/1.1\r\n{}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n",
            endpoint.headers
        );
        if head.len() <= HEADROOM {
            self.start = HEADROOM - head.len();
            self.bytes[self.start..HEADROOM].copy_from_slice(head.as_bytes());
        } else {
            // A very long token or path: move the body once.
            self.bytes.splice(..HEADROOM, head.into_bytes());
            self.start = 0;
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// Status and the one header that matters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Head {
    /// HTTP status.
    pub status: u16,
    /// `Retry-After`.
    pub retry_after: Option<Duration>,
}

/// A connection that reconnects by itself; one request at a time.
pub struct Connection {
    endpoint: Arc<Endpoint>,
    stream: Option<TcpStream>,
    inbox: Vec<u8>,
    body: Range<usize>,
    lean: bool,
    number: usize,
}

impl Connection {
    /// A connection that opens with its first request. `number` spreads very many over several loopback sources.
    pub fn new(endpoint: Arc<Endpoint>, number: usize) -> Self {
        Self { endpoint, stream: None, inbox: Vec::new(), body: 0..0, lean: false, number }
    }

    /// The same, holding no buffer while it waits.
    pub fn lean(endpoint: Arc<Endpoint>, number: usize) -> Self {
        Self { lean: true, ..Self::new(endpoint, number) }
    }

    /// Where it goes.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Body of the last answer.
    pub fn body(&self) -> &[u8] {
        &self.inbox[self.body.clone()]
    }

    /// Sends and waits for the answer. After an error the outcome of the request is unknown.
    pub async fn call(&mut self, request: &Request, timeout: Duration) -> io::Result<Head> {
        match tokio::time::timeout(timeout, self.exchange(request)).await {
            Ok(Ok(head)) => Ok(head),
            Ok(Err(error)) => {
                self.stream = None;
                Err(error)
            }
            Err(_) => {
                self.stream = None;
                Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))
            }
        }
    }

    async fn exchange(&mut self, request: &Request) -> io::Result<Head> {
        if self.lean {
            self.inbox = Vec::new();
        } else {
            self.inbox.clear();
        }
        self.body = 0..0;
        if self.stream.is_none() {
            self.stream = Some(self.connect().await?);
        }
        let Some(stream) = self.stream.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        stream.write_all(request.as_bytes()).await?;
        let (head, keep) = read_answer(stream, &mut self.inbox, &mut self.body, self.lean).await?;
        if !keep {
            self.stream = None;
        }
        Ok(head)
    }

    async fn connect(&self) -> io::Result<TcpStream> {
        let address = self.endpoint.address;
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        let source = self.number / CONNECTIONS_PER_SOURCE;
        if source > 0 && address.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST) {
            let last = 1 + (source % 250) as u8;
            socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)))?;
        }
        let stream = socket.connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

async fn read_more(stream: &TcpStream, inbox: &mut Vec<u8>, want: usize) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        inbox.reserve(want);
        match stream.try_read_buf(inbox) {
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

enum Framing {
    Length(usize),
    Chunks,
    UntilClose,
}

async fn read_answer(
    stream: &TcpStream,
    inbox: &mut Vec<u8>,
    body: &mut Range<usize>,
    lean: bool,
) -> io::Result<(Head, bool)> {
    let step = if lean { READ_BYTES_LEAN } else { READ_BYTES };
    let (head, begin, framing, keep) = loop {
        if read_more(stream, inbox, step).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(parsed) = parse_head(inbox)? {
            break parsed;
        }
        if inbox.len() > HEAD_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "endless header"));
        }
    };
    match framing {
        Framing::Length(length) => {
            while inbox.len() < begin + length {
                let missing = begin + length - inbox.len();
                if read_more(stream, inbox, missing).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            *body = begin..begin + length;
        }
        Framing::Chunks => {
            let mut joined = begin;
            let mut at = begin;
            while !join_chunks(inbox, &mut joined, &mut at)? {
                if read_more(stream, inbox, step).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            *body = begin..joined;
        }
        Framing::UntilClose => {
            while read_more(stream, inbox, step).await? > 0 {}
            *body = begin..inbox.len();
        }
    }
    Ok((head, keep))
}

type ParsedHead = (Head, usize, Framing, bool);

fn parse_head(inbox: &[u8]) -> io::Result<Option<ParsedHead>> {
    let mut headers = [httparse::EMPTY_HEADER; 48];
    let mut answer = httparse::Response::new(&mut headers);
    let parsed = answer.parse(inbox).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let httparse::Status::Complete(begin) = parsed else { return Ok(None) };
    let status = answer.code.unwrap_or_default();
    let mut framing = if status == 204 { Framing::Length(0) } else { Framing::UntilClose };
    let mut keep = answer.version == Some(1);
    let mut retry_after = None;
    for header in answer.headers.iter() {
        let value = std::str::from_utf8(header.value).unwrap_or_default().trim();
        if header.name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            framing = Framing::Length(length);
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            framing = Framing::Chunks;
        } else if header.name.eq_ignore_ascii_case("connection") {
            keep = !value.eq_ignore_ascii_case("close");
        } else if header.name.eq_ignore_ascii_case("retry-after") {
            retry_after = value.parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        }
    }
    keep &= !matches!(framing, Framing::UntilClose);
    Ok(Some((Head { status, retry_after }, begin, framing, keep)))
}

/// Moves the contents of complete chunks together in front; says whether the last chunk was seen.
fn join_chunks(inbox: &mut [u8], joined: &mut usize, at: &mut usize) -> io::Result<bool> {
    loop {
        let rest = &inbox[*at..];
        let parsed = httparse::parse_chunk_size(rest);
        let Ok(httparse::Status::Complete((line, size))) = parsed else {
            return match parsed {
                Ok(_) => Ok(false),
                Err(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "bad chunk")),
            };
        };
        let size = usize::try_from(size).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        // Two more bytes end the chunk's line; trailers are not sent by the brokers that we drive.
        if rest.len() < line + size + 2 {
            return Ok(false);
        }
        if size == 0 {
            return Ok(true);
        }
        inbox.copy_within(*at + line..*at + line + size, *joined);
        *joined += size;
        *at += line + size + 2;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn heads_are_read() {
        let wire = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0.5\r\nContent-Length: 3\r\n\r\nabc";
        let (head, begin, framing, keep) = parse_head(wire).unwrap().unwrap();
        assert_eq!(head, Head { status: 429, retry_after: Some(Duration::from_millis(500)) });
        assert_eq!(&wire[begin..], b"abc");
        assert!(keep && matches!(framing, Framing::Length(3)));
        assert!(parse_head(b"HTTP/1.1 200 OK\r\nA: b\r\n").unwrap().is_none());
        assert!(parse_head(b"garbage\r\n\r\n").is_err());
    }

    #[test]
    fn chunks_are_joined_whatever_the_cuts() {
        let wire = b"4\r\nWiki\r\n6;x=y\r\npedia \r\n0\r\n\r\n";
        for cut in 1..wire.len() {
            let mut inbox = wire[..cut].to_vec();
            let (mut joined, mut at) = (0, 0);
            let early = join_chunks(&mut inbox, &mut joined, &mut at).unwrap();
            inbox.extend_from_slice(&wire[cut..]);
            assert!(early || join_chunks(&mut inbox, &mut joined, &mut at).unwrap());
            assert_eq!(&inbox[..joined], b"Wikipedia ");
        }
    }

    #[test]
    fn a_long_head_moves_the_body() {
        let mut endpoint = Endpoint::local(1);
        endpoint.headers.push_str(&"x".repeat(HEADROOM));
        let mut request = Request::default();
        request.begin_post().extend_from_slice(b"body");
        request.finish_post(&endpoint, "/p");
        assert!(request.as_bytes().starts_with(b"POST /p HTTP/1.1\r\n"));
        assert!(request.as_bytes().ends_with(b"Content-Length: 4\r\n\r\nbody"));
    }
}
