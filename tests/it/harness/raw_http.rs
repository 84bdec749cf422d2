//! Bytes on a socket, for what a proper client would never send or never show.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An answer as it came.
#[derive(Debug)]
pub struct RawReply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl RawReply {
    /// The value of a header, by lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Connects and sends the head of a request (and whatever else is in `request`).
pub async fn open(address: SocketAddr, request: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    stream
}

/// Sends `request`, which must ask for `Connection: close`, and reads everything up to the end of the connection.
pub async fn exchange(address: SocketAddr, request: &[u8]) -> RawReply {
    let mut stream = open(address, request).await;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    parse(&bytes)
}

/// Sends a `GET` and goes away without reading the answer.
pub async fn hang_up(address: SocketAddr, target: &str) {
    let request = format!("GET {target} HTTP/1.1\r\nHost: regent\r\n\r\n");
    drop(open(address, request.as_bytes()).await);
}

fn parse(bytes: &[u8]) -> RawReply {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| {
        panic!("no end of headers in {:?}", String::from_utf8_lossy(bytes));
    });
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines
        .map(|line| line.split_once(':').unwrap())
        .map(|(key, value)| (key.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    RawReply { status, headers, body: bytes[end + 4..].to_vec() }
}
