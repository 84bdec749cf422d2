//! A typed HTTP client. Each verb checks the status that the specification promises for a well-formed request.

use std::net::SocketAddr;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::HeaderMap;
use reqwest::{Body, Method};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Pop, Popped};

const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Percent-encodes a path segment or query value.
pub fn encode(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// `prefix0`, `prefix1`, … as transaction ids.
pub fn numbered(prefix: &str, range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| format!("{prefix}{n}")).collect()
}

/// One item of a push answer, decoded strictly (`spec/push-pop.md` §2.3).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PushResult {
    pub index: i64,
    pub message_id: String,
    pub transaction_id: String,
    #[serde(rename = "queueName")]
    pub queue: String,
    pub status: String,
    pub offset: Option<i64>,
    pub error: Option<String>,
}

/// One item of an ack answer, decoded strictly (`spec/ack.md` §2).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AckResult {
    pub index: i64,
    pub transaction_id: String,
    pub success: bool,
    pub error: Option<String>,
    pub lease_released: bool,
    pub dlq: bool,
    pub noop: bool,
    /// Only on the ack that closes a conflating lease.
    pub conflated: Option<i64>,
}

/// Any answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Reply {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        self.decode()
    }

    /// The body as a type.
    #[track_caller]
    pub fn decode<T: DeserializeOwned>(&self) -> T {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e} in {} {}", self.status, self.text))
    }

    /// Fails the test on another status.
    #[track_caller]
    pub fn expect(self, status: u16) -> Reply {
        let start: String = self.text.chars().take(2000).collect();
        assert_eq!(self.status, status, "{start}");
        self
    }

    /// Fails the test unless this is a `400` in the error envelope whose text holds every one of `words`.
    #[track_caller]
    pub fn expect_refusal(self, words: &[&str]) -> Reply {
        let reply = self.expect(400);
        let body = reply.json();
        let text = body["error"].as_str().unwrap_or_else(|| panic!("no error text in {}", reply.text));
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        reply
    }
}

/// An HTTP client of one broker.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    /// Where the broker listens.
    pub address: SocketAddr,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(60)).no_proxy().build().unwrap();
        Client { http, address }
    }

    /// One request, errors of the connection included.
    pub async fn try_send(&self, method: Method, target: &str, body: Option<Body>) -> reqwest::Result<Reply> {
        let mut request = self.http.request(method, format!("http://{}{target}", self.address));
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let response = request.send().await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(Reply { status, headers, text: response.text().await? })
    }

    pub async fn get(&self, target: &str) -> Reply {
        self.try_send(Method::GET, target, None).await.unwrap()
    }

    pub async fn post(&self, target: &str, body: impl Into<Body>) -> Reply {
        self.try_send(Method::POST, target, Some(body.into())).await.unwrap()
    }

    pub async fn post_json(&self, target: &str, body: &Value) -> Reply {
        self.post(target, body.to_string()).await
    }

    /// The sum of the series of a metric. Those of a broker in this process are shared with others.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics/prometheus").await.expect(200).text;
        let of_family = |line: &&str| line.starts_with(&format!("{name} ")) || line.starts_with(&format!("{name}{{"));
        text.lines().filter(of_family).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    pub async fn is_healthy(&self) -> bool {
        self.try_send(Method::GET, "/health", None).await.is_ok_and(|reply| reply.status == 200)
    }

    /// Pushes `items` and answers the result per item.
    pub async fn push(&self, items: Value) -> Vec<PushResult> {
        self.push_body(json!({ "items": items }).to_string()).await.expect(201).decode()
    }

    pub async fn push_body(&self, body: impl Into<Body>) -> Reply {
        self.post("/api/v1/push", body).await
    }

    /// Pushes new messages with these transaction ids into one partition; all of them must be queued.
    pub async fn push_ids<I>(&self, queue: &str, partition: &str, ids: I) -> Vec<PushResult>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let items: Vec<Value> = ids
            .into_iter()
            .map(|id| {
                let id = id.as_ref();
                json!({ "queue": queue, "partition": partition, "transactionId": id, "payload": { "id": id } })
            })
            .collect();
        let results = self.push(json!(items)).await;
        for result in &results {
            assert_eq!(result.status, "queued", "{result:?}");
        }
        results
    }

    pub async fn pop_reply(&self, pop: &Pop) -> Reply {
        self.get(&pop.target()).await
    }

    /// Pops; a 204 is the empty answer.
    pub async fn pop(&self, pop: &Pop) -> Popped {
        let reply = self.pop_reply(pop).await;
        if reply.status == 204 {
            return Popped::default();
        }
        let popped: Popped = reply.expect(200).decode();
        assert!(popped.success && !popped.is_empty(), "a 200 without messages: {popped:?}");
        popped
    }

    /// Acks a batch for a group (`""`: queue mode).
    pub async fn ack(&self, group: &str, items: Vec<Value>) -> Vec<AckResult> {
        let mut body = json!({ "acknowledgments": items });
        if !group.is_empty() {
            body["consumerGroup"] = json!(group);
        }
        self.ack_reply(&body).await.expect(200).decode()
    }

    pub async fn ack_reply(&self, body: &Value) -> Reply {
        self.post_json("/api/v1/ack/batch", body).await
    }

    /// Acks one message through the single route.
    pub async fn ack_one(&self, group: &str, mut item: Value) -> AckResult {
        if !group.is_empty() {
            item["consumerGroup"] = json!(group);
        }
        let mut results: Vec<AckResult> = self.post_json("/api/v1/ack", &item).await.expect(200).decode();
        assert_eq!(results.len(), 1);
        results.remove(0)
    }

    /// Configures a queue, replacing its options; answers the stored ones.
    pub async fn configure(&self, queue: &str, options: Value) -> Value {
        let body = json!({ "queue": queue, "options": options });
        let answer = self.configure_reply(&body).await.expect(200).json();
        answer["options"].clone()
    }

    pub async fn configure_reply(&self, body: &Value) -> Reply {
        self.post_json("/api/v1/configure", body).await
    }

    /// Extends a lease by `seconds`.
    pub async fn extend(&self, lease: &str, seconds: i64) -> Value {
        let target = format!("/api/v1/lease/{}/extend", encode(lease));
        self.post_json(&target, &json!({ "seconds": seconds })).await.expect(200).json()
    }

    pub async fn delete_queue(&self, queue: &str) -> Value {
        let target = format!("/api/v1/resources/queues/{}", encode(queue));
        self.try_send(Method::DELETE, &target, None).await.unwrap().expect(200).json()
    }
}
