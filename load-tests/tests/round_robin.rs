//! `regent-load round-robin` between raw sockets: each request meets the next broker, nothing is held back, and
//! whoever hangs up is heard on the other side.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);

/// A client's connection through the proxy, two brokers behind it, and the proxy, which dies with this.
struct Bench {
    client: TcpStream,
    brokers: [TcpListener; 2],
    _proxy: Child,
}

async fn bench() -> Bench {
    let brokers = [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let mut command = Command::new(env!("CARGO_BIN_EXE_regent-load"));
    command.arg("round-robin").stdout(Stdio::piped()).kill_on_drop(true);
    for broker in &brokers {
        command.args(["--to", &format!("http://{}", broker.local_addr().unwrap())]);
    }
    let mut proxy = command.spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(proxy.stdout.take().unwrap());
    timeout(PATIENCE, output.read_line(&mut line)).await.expect("the proxy does not come up").unwrap();
    let client = TcpStream::connect(line.trim().rsplit_once('/').unwrap().1).await.unwrap();
    Bench { client, brokers, _proxy: proxy }
}

async fn accept(broker: &TcpListener) -> TcpStream {
    timeout(PATIENCE, broker.accept()).await.expect("no request at this broker").unwrap().0
}

/// Reads until the text ends like this, and returns it.
async fn read_to(stream: &mut TcpStream, end: &str) -> String {
    let mut text = Vec::new();
    let reading = async {
        while !text.ends_with(end.as_bytes()) {
            text.push(stream.read_u8().await.unwrap());
        }
    };
    timeout(PATIENCE, reading).await.unwrap_or_else(|_| panic!("no {end:?}"));
    String::from_utf8(text).unwrap()
}

/// Waits until the other side has closed or reset.
async fn closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("the hang-up is not heard");
}

/// Three requests on one connection of a client go to the first, the second and the first broker again, there on
/// the connection that was kept. Method, path, query, headers, body and status pass unchanged.
#[tokio::test]
async fn each_request_of_a_connection_meets_the_next_broker() {
    let mut bench = bench().await;
    let mut kept: [Option<TcpStream>; 2] = [None, None];
    for (n, turn) in [0, 1, 0].into_iter().enumerate() {
        let request =
            format!("POST /p/a%2Fb?n={n} HTTP/1.1\r\nhost: h\r\nx-mine: {n}\r\ncontent-length: 2\r\n\r\nm{n}");
        bench.client.write_all(request.as_bytes()).await.unwrap();
        let mut broker = match kept[turn].take() {
            Some(stream) => stream,
            None => accept(&bench.brokers[turn]).await,
        };
        let seen = read_to(&mut broker, &format!("\r\n\r\nm{n}")).await;
        assert!(seen.starts_with(&format!("POST /p/a%2Fb?n={n} HTTP/1.1\r\n")), "{seen}");
        assert!(seen.contains(&format!("x-mine: {n}\r\n")), "{seen}");
        broker.write_all(b"HTTP/1.1 418 x\r\ncontent-length: 3\r\n\r\nyes").await.unwrap();
        let answer = read_to(&mut bench.client, "\r\n\r\nyes").await;
        assert!(answer.starts_with("HTTP/1.1 418"), "{answer}");
        assert!(answer.contains(&format!("x-round-robin: {}\r\n", turn + 1)), "{answer}");
        kept[turn] = Some(broker);
    }
}

/// A body is passed on as it comes: the first part before the broker, or the client, has sent the second.
#[tokio::test]
async fn bodies_stream_both_ways() {
    let mut bench = bench().await;
    bench.client.write_all(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 8\r\n\r\npart").await.unwrap();
    let mut broker = accept(&bench.brokers[0]).await;
    read_to(&mut broker, "part").await;
    bench.client.write_all(b"rest").await.unwrap();
    read_to(&mut broker, "rest").await;
    broker.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\npart").await.unwrap();
    read_to(&mut bench.client, "part").await;
    broker.write_all(b"rest").await.unwrap();
    read_to(&mut bench.client, "rest").await;
}

/// A waiting pop whose client is gone must not take messages along: the broker hears it, and only that request ends.
#[tokio::test]
async fn a_client_that_hangs_up_takes_its_request_along() {
    let mut bench = bench().await;
    bench.client.write_all(b"GET /wait HTTP/1.1\r\nhost: h\r\n\r\n").await.unwrap();
    let mut broker = accept(&bench.brokers[0]).await;
    read_to(&mut broker, "\r\n\r\n").await;
    drop(bench.client);
    closed(&mut broker).await;
}

/// Before an answer: 502, on a connection that goes on with the next broker. Within an answer: the client's connection
/// ends, so that half an answer never looks whole.
#[tokio::test]
async fn a_broker_that_hangs_up_is_told_to_the_client() {
    let mut bench = bench().await;
    bench.client.write_all(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n").await.unwrap();
    let mut broker = accept(&bench.brokers[0]).await;
    read_to(&mut broker, "\r\n\r\n").await;
    drop(broker);
    let answer = read_to(&mut bench.client, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");

    bench.client.write_all(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n").await.unwrap();
    let mut broker = accept(&bench.brokers[1]).await;
    read_to(&mut broker, "\r\n\r\n").await;
    broker.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\npart").await.unwrap();
    read_to(&mut bench.client, "part").await;
    drop(broker);
    closed(&mut bench.client).await;
}
