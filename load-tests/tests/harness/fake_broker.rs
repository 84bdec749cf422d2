//! A broker in memory, that keeps the protocol's promises as far as the ledger needs, and breaks one when told to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// A promise to break, once, when there is something to break it on.
#[allow(dead_code)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Keep every promise.
    None,
    /// Answer `queued` and store nothing.
    LosePush,
    /// Step over a stored message.
    SkipDelivery,
    /// Deliver a message twice in one answer.
    DoubleInAnswer,
    /// Store a message twice, some messages apart.
    StoreTwice,
    /// Swap two neighbours of an answer.
    Swap,
    /// Set a cursor back over acknowledged messages.
    ForgetAck,
    /// Answer an ack with success and do not move the cursor.
    IgnoreAck,
    /// Change a byte of a payload.
    Corrupt,
    /// Grant a second lease while the first runs.
    LeaseTwice,
    /// Answer `duplicate` to a first push, and store nothing.
    FalseDuplicate,
    /// Say that a delivered message is not known.
    WrongRefusal,
    /// Deliver a message that nobody pushed.
    Phantom,
}

/// Trouble that is legal: the generator must cope, and find nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trouble {
    /// Every so many requests: carried out, and answered with 503.
    pub unanswered_every: usize,
    /// Every so many requests: not carried out, and answered with 429.
    pub overload_every: usize,
    /// Every so many acks: not carried out, and said so per item; all redelivers when the lease is over.
    pub flush_failed_every: usize,
}

#[derive(Default)]
struct Cursor {
    committed: i64,
    lease: Option<(String, i64, Instant)>,
}

#[derive(Default)]
struct Lane {
    name: String,
    queue: String,
    messages: Vec<(String, String)>,
    known: HashMap<String, usize>,
    cursors: HashMap<String, Cursor>,
}

struct Books {
    fault: Fault,
    trouble: Trouble,
    requests: usize,
    pops: usize,
    pushes: usize,
    acks: usize,
    leases: usize,
    lanes: Vec<Lane>,
    index: HashMap<(String, String), usize>,
}

type Shared = Arc<Mutex<Books>>;

/// Starts one on a free port, or on this one; it lives as long as the runtime.
pub async fn start(port: u16, fault: Fault, trouble: Trouble) -> String {
    let books = Arc::new(Mutex::new(Books {
        fault,
        trouble,
        requests: 0,
        pops: 0,
        pushes: 0,
        acks: 0,
        leases: 0,
        lanes: Vec::new(),
        index: HashMap::new(),
    }));
    let routes = Router::new()
        .route("/health", get(|| async { Json(json!({"status":"healthy","engine":"fake","version":"0"})) }))
        .route(
            "/metrics/prometheus",
            get(|State(books): State<Shared>| async move {
                format!("fake_requests_total {}\n", books.lock().unwrap().requests)
            }),
        )
        .route("/api/v1/configure", post(|| async { Json(json!({"configured":true})) }))
        .route("/api/v1/push", post(push))
        .route("/api/v1/pop/queue/{queue}", get(pop_queue))
        .route("/api/v1/pop", get(pop_discovery))
        .route("/api/v1/ack/batch", post(ack))
        .route("/api/v1/transaction", post(transaction))
        .with_state(books);
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    url
}

impl Books {
    /// Whether this request is troubled before or after it is carried out.
    fn troubled(&mut self) -> (bool, bool) {
        self.requests += 1;
        let hit = |every: usize| every > 0 && self.requests.is_multiple_of(every);
        (hit(self.trouble.overload_every), hit(self.trouble.unanswered_every))
    }

    fn once(&mut self, fault: Fault) -> bool {
        let hit = self.fault == fault;
        if hit {
            self.fault = Fault::None;
        }
        hit
    }

    fn store(&mut self, item: &Value) -> Value {
        let text = |key: &str| item[key].as_str().map(str::to_owned);
        let queue = text("queue").unwrap();
        let name = text("partition").unwrap_or_else(|| "Default".to_owned());
        let id = text("transactionId").unwrap();
        let at = *self.index.entry((queue.clone(), name.clone())).or_insert_with(|| {
            self.lanes.push(Lane { name, queue: queue.clone(), ..Lane::default() });
            self.lanes.len() - 1
        });
        self.pushes += 1;
        let settled_in = self.pushes > 30;
        let answer = |status: &str, offset: Option<usize>| {
            let mut answer = json!({"message_id":"m","transaction_id":id,"queueName":queue,"status":status});
            if let Some(offset) = offset {
                answer["offset"] = json!(offset);
            }
            answer
        };
        if let Some(offset) = self.lanes[at].known.get(&id) {
            return answer("duplicate", Some(*offset));
        }
        if settled_in && self.once(Fault::LosePush) {
            return answer("queued", None);
        }
        if settled_in && self.once(Fault::FalseDuplicate) {
            return answer("duplicate", None);
        }
        // Far enough behind that the first copy was acknowledged.
        let twice = self.lanes[at].messages.len() > 300 && self.once(Fault::StoreTwice);
        let lane = &mut self.lanes[at];
        if twice {
            let old = lane.messages[0].clone();
            lane.messages.push(old);
        }
        let offset = lane.messages.len();
        lane.known.insert(id.clone(), offset);
        lane.messages.push((id.clone(), item["payload"].to_string()));
        answer("queued", (!twice && self.fault != Fault::LosePush).then_some(offset))
    }

    fn claim(&mut self, wanted: &dyn Fn(&str) -> bool, query: &HashMap<String, String>) -> Option<String> {
        let number = |key: &str| query.get(key).and_then(|value| value.parse::<usize>().ok());
        let (mut budget, mut partitions) = (number("batch").unwrap_or(200), number("partitions").unwrap_or(1));
        let group = query.get("consumerGroup").cloned().unwrap_or_default();
        self.pops += 1;
        self.leases += 1;
        let settled_in = self.pops > 20;
        let seconds = number("leaseSeconds").unwrap_or(60) as u64;
        let lease = format!("lease-{}", self.leases);
        let mut out: Vec<String> = Vec::new();
        let count = self.lanes.len();
        for step in 0..count {
            let at = (self.pops + step) % count;
            if budget == 0 || partitions == 0 {
                break;
            }
            if !wanted(&self.lanes[at].queue) {
                continue;
            }
            let fault = self.fault;
            let lane = &mut self.lanes[at];
            let cursor = lane.cursors.entry(group.clone()).or_insert_with(|| Cursor { committed: -1, lease: None });
            let leased = cursor.lease.as_ref().is_some_and(|(_, _, until)| *until > Instant::now());
            if leased && !(settled_in && fault == Fault::LeaseTwice) {
                continue;
            }
            if settled_in && fault == Fault::ForgetAck && cursor.committed > 0 {
                cursor.committed -= 1;
                self.fault = Fault::None;
            }
            let mut first = (cursor.committed + 1) as usize;
            if settled_in && fault == Fault::SkipDelivery && first + 1 < lane.messages.len() {
                first += 1;
                self.fault = Fault::None;
            }
            let end = lane.messages.len().min(first + budget);
            if first >= end {
                continue;
            }
            if leased {
                self.fault = Fault::None;
            }
            cursor.lease = Some((lease.clone(), end as i64 - 1, Instant::now() + Duration::from_secs(seconds)));
            let mut texts: Vec<String> = lane.messages[first..end]
                .iter()
                .map(|(id, data)| {
                    format!(
                        r#"{{"id":"m","transactionId":"{id}","traceId":null,"data":{data},"producerSub":null,"createdAt":"2026-01-01T00:00:00.000000Z","partitionId":"{at}","partition":"{}","leaseId":"{lease}","consumerGroup":"{group}","deliveryAttempt":1}}"#,
                        lane.name
                    )
                })
                .collect();
            if settled_in {
                self.spoil(&mut texts);
            }
            out.append(&mut texts);
            budget -= end - first;
            partitions -= 1;
        }
        (!out.is_empty())
            .then(|| format!(r#"{{"success":true,"queue":"q","leaseId":"{lease}","messages":[{}]}}"#, out.join(",")))
    }

    fn spoil(&mut self, texts: &mut Vec<String>) {
        match self.fault {
            Fault::DoubleInAnswer => texts.insert(1, texts[0].clone()),
            Fault::Swap if texts.len() > 1 => texts.swap(0, 1),
            Fault::Corrupt => {
                // A letter of the filler, near the end of the payload.
                let at = texts[0].find("\",\"producerSub").unwrap() - 2;
                let other = if texts[0].as_bytes()[at] == b'x' { "y" } else { "x" };
                texts[0].replace_range(at..=at, other);
            }
            Fault::Phantom => {
                let ghost = texts[0].replacen("-0-", "-999999-", 1);
                let ghost = if ghost == texts[0] {
                    texts[0].replacen("\"transactionId\":\"", "\"transactionId\":\"x", 1)
                } else {
                    ghost
                };
                texts.push(ghost);
            }
            _ => return,
        }
        self.fault = Fault::None;
    }

    fn acknowledge(&mut self, item: &Value, group: &str) -> Result<bool, &'static str> {
        if self.pops > 20 && self.once(Fault::WrongRefusal) {
            return Err("unresolvable: transaction not in the ack window");
        }
        let at: usize = item["partitionId"].as_str().unwrap().parse().unwrap();
        let ignore = self.pops > 20 && self.fault == Fault::IgnoreAck;
        let lane = self.lanes.get_mut(at).ok_or("consumer not found")?;
        let cursor = lane.cursors.get_mut(group).ok_or("consumer not found")?;
        let (lease, end, until) = cursor.lease.clone().ok_or("invalid or expired lease")?;
        if item["leaseId"] != lease.as_str() || until < Instant::now() {
            return Err("invalid or expired lease");
        }
        let Some(&offset) = lane.known.get(item["transactionId"].as_str().unwrap()) else { return Ok(false) };
        let noop = cursor.committed >= offset as i64;
        cursor.committed = cursor.committed.max(offset as i64);
        if cursor.committed >= end {
            // Kept until the whole call is applied: see `release`.
            cursor.lease = Some((lease, end, until));
            if ignore {
                cursor.committed = offset as i64 - 1;
                cursor.lease = None;
                self.fault = Fault::None;
            }
        }
        Ok(noop)
    }

    fn release(&mut self, group: &str) {
        for lane in &mut self.lanes {
            if let Some(cursor) = lane.cursors.get_mut(group)
                && cursor.lease.as_ref().is_some_and(|(_, end, _)| cursor.committed >= *end)
            {
                cursor.lease = None;
            }
        }
    }
}

fn overloaded() -> Response {
    let mut headers = HeaderMap::new();
    headers.insert("retry-after", "0.01".parse().unwrap());
    (StatusCode::TOO_MANY_REQUESTS, headers, Json(json!({"error":"busy","code":"rate_limited"}))).into_response()
}

fn unanswered() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error":"no database connection"}))).into_response()
}

async fn push(State(books): State<Shared>, Json(body): Json<Value>) -> Response {
    let mut books = books.lock().unwrap();
    let (before, after) = books.troubled();
    if before {
        return overloaded();
    }
    let mut answers: Vec<Value> = body["items"].as_array().unwrap().iter().map(|item| books.store(item)).collect();
    for (index, answer) in answers.iter_mut().enumerate() {
        answer["index"] = json!(index);
    }
    if after { unanswered() } else { (StatusCode::CREATED, Json(answers)).into_response() }
}

async fn pop(books: Shared, wanted: impl Fn(&str) -> bool, query: HashMap<String, String>) -> Response {
    let (before, after) = books.lock().unwrap().troubled();
    if before {
        return overloaded();
    }
    let wait = query.get("wait").is_some_and(|wait| wait == "true");
    let timeout = query.get("timeout").and_then(|ms| ms.parse().ok()).unwrap_or(30_000);
    let deadline = Instant::now() + Duration::from_millis(timeout);
    loop {
        let claimed = books.lock().unwrap().claim(&wanted, &query);
        if let Some(text) = claimed {
            // A claim whose answer is lost would wait out its lease: the generator's drain has no time for that here.
            return if after && query.get("leaseSeconds").is_some_and(|s| s == "1") {
                unanswered()
            } else {
                ([("content-type", "application/json")], text).into_response()
            };
        }
        if !wait || Instant::now() > deadline {
            return StatusCode::NO_CONTENT.into_response();
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

async fn pop_queue(
    State(books): State<Shared>,
    Path(queue): Path<String>,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    pop(books, move |name| name == queue, query).await
}

async fn pop_discovery(State(books): State<Shared>, Query(query): Query<HashMap<String, String>>) -> Response {
    let namespace = query["namespace"].clone();
    pop(books, move |name| name.split('.').next() == Some(&namespace), query).await
}

async fn ack(State(books): State<Shared>, Json(body): Json<Value>) -> Response {
    let mut books = books.lock().unwrap();
    let (before, after) = books.troubled();
    if before {
        return overloaded();
    }
    let group = body["consumerGroup"].as_str().unwrap();
    books.acks += 1;
    let every = books.trouble.flush_failed_every;
    let fails = every > 0 && books.acks.is_multiple_of(every);
    let mut answers = Vec::new();
    for (index, item) in body["acknowledgments"].as_array().unwrap().iter().enumerate() {
        let outcome = match fails {
            true => Err("ack flush failed; lease will expire and redeliver"),
            false => books.acknowledge(item, group),
        };
        answers.push(json!({"index":index,"transactionId":item["transactionId"],"success":outcome.is_ok(),
            "error":outcome.err(),"leaseReleased":true,"dlq":false,"noop":outcome == Ok(true)}));
    }
    books.release(group);
    if after { unanswered() } else { Json(answers).into_response() }
}

async fn transaction(State(books): State<Shared>, Json(body): Json<Value>) -> Response {
    let mut books = books.lock().unwrap();
    let operations = body["operations"].as_array().unwrap();
    let failed = |reason: &str, error: &str| {
        Json(json!({"transactionId":"t","success":false,"reason":reason,"error":error,"results":[]})).into_response()
    };
    for ack in operations.iter().filter(|operation| operation["type"] == "ack") {
        if let Err(error) = books.acknowledge(ack, ack["consumerGroup"].as_str().unwrap()) {
            return failed("ack_rejected", error);
        }
    }
    for push in operations.iter().filter(|operation| operation["type"] == "push") {
        for item in push["items"].as_array().unwrap() {
            books.store(item);
        }
    }
    books.release("load");
    Json(json!({"transactionId":"t","success":true,"results":[]})).into_response()
}
