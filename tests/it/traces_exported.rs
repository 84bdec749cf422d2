//! OpenTelemetry traces of the message path: a real collector socket, the real binary, protobuf over HTTP.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Attribute;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;

use crate::harness::{BrokerProcess, PATIENCE, Pop, eventually, eventually_some};

/// What it was sent.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    services: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    /// Serves until the test ends; answers the URL of the signal.
    async fn start() -> (Collector, String) {
        let collector = Collector::default();
        let told = collector.clone();
        let take = move |headers: HeaderMap, body: Bytes| async move {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            told.take(&body);
            StatusCode::OK
        };
        let router = axum::Router::new().route("/v1/traces", axum::routing::post(take));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (collector, url)
    }

    fn take(&self, body: &[u8]) {
        for resource in ExportTraceServiceRequest::decode(body).unwrap().resource_spans {
            for attribute in resource.resource.unwrap_or_default().attributes {
                if let ("service.name", Some(Attribute::StringValue(name))) =
                    (attribute.key.as_str(), attribute.value.and_then(|value| value.value))
                {
                    self.services.lock().unwrap().push(name);
                }
            }
            self.spans.lock().unwrap().extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }

    /// The span of the first request with this name; waits for it.
    async fn request(&self, name: &str) -> Span {
        eventually_some(PATIENCE, async || self.spans().into_iter().find(|span| span.name == name)).await
    }

    /// The names of all spans somewhere below this one.
    fn below(&self, top: &Span) -> Vec<String> {
        let spans = self.spans();
        let (mut found, mut open) = (Vec::new(), vec![top.span_id.clone()]);
        while let Some(parent) = open.pop() {
            for span in spans.iter().filter(|span| span.parent_span_id == parent) {
                assert_eq!(span.trace_id, top.trace_id);
                assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
                open.push(span.span_id.clone());
                found.push(span.name.clone());
            }
        }
        found
    }

    /// Waits until there are spans with these names below this one.
    async fn has_below(&self, top: &Span, names: &[&str]) {
        eventually(PATIENCE, async || {
            let found = self.below(top);
            names.iter().all(|name| found.iter().any(|found| found == name))
        })
        .await;
    }
}

/// A push, a pop and an ack are traced down to their statements, and a request with a `traceparent` joins that trace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_traced_down_to_their_statements() {
    let (collector, url) = Collector::start().await;
    let variables = [("REGENT_TRACES", "true"), ("REGENT_TRACES_RATIO", "1"), ("OTEL_EXPORTER_OTLP_ENDPOINT", &url)];
    let mut broker = BrokerProcess::start_with(&[&variables[..], &[("OTEL_BSP_SCHEDULE_DELAY", "50")]].concat()).await;
    let client = broker.client();
    client.push_ids("jobs", "p", ["a", "b"]).await;
    let push = collector.request("POST /api/v1/push").await;
    collector.has_below(&push, &["flush of pushes", "begin of push", "storing segments", "commit of push"]).await;

    let popped = client.pop(&Pop::queue("jobs").group("g").all()).await;
    let pop = collector.request("GET /api/v1/pop/queue/{queue}").await;
    collector.has_below(&pop, &["flush of claims", "claiming"]).await;

    client.ack("g", popped.items("completed")).await;
    let ack = collector.request("POST /api/v1/ack/batch").await;
    collector.has_below(&ack, &["flush of acks", "ack flush"]).await;

    // W3C Trace Context: the request's own trace goes on.
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let body = json!({ "items": [{ "queue": "jobs", "payload": 1 }] });
    let sent = reqwest::Client::new().post(format!("http://{}/api/v1/push", broker.address));
    let sent = sent.header("traceparent", traceparent).json(&body).send().await.unwrap();
    assert_eq!(sent.status(), 201);
    let joined = eventually_some(PATIENCE, async || {
        let hex = |id: &[u8]| hex::encode(id);
        collector.spans().into_iter().find(|span| {
            hex(&span.trace_id) == "4bf92f3577b34da6a3ce929d0e0e4736" && hex(&span.parent_span_id) == "00f067aa0ba902b7"
        })
    })
    .await;
    collector.has_below(&joined, &["flush of pushes", "commit of push"]).await;
    assert!(collector.services.lock().unwrap().iter().all(|name| name == "regent"));

    // Concurrent pushes share flushes: every one of them is in its flush's trace, or linked to it.
    let before = collector.spans().len();
    let pushes: Vec<_> = (0..40)
        .map(|n| {
            let client = broker.client();
            tokio::spawn(async move { client.push_ids("jobs", "p", [format!("c{n}")]).await })
        })
        .collect();
    for push in pushes {
        push.await.unwrap();
    }
    eventually(PATIENCE, async || {
        let new = &collector.spans()[before..];
        let requests: Vec<&Span> = new.iter().filter(|span| span.name == "POST /api/v1/push").collect();
        let flushes: Vec<&Span> = new.iter().filter(|span| span.name == "flush of pushes").collect();
        let carries = |flush: &Span, request: &Span| {
            flush.parent_span_id == request.span_id || flush.links.iter().any(|link| link.span_id == request.span_id)
        };
        requests.len() == 40 && requests.iter().all(|request| flushes.iter().any(|flush| carries(flush, request)))
    })
    .await;
    assert!(collector.spans().iter().any(|span| span.name == "flush of pushes" && !span.links.is_empty()));

    // What was not sent yet is sent at shutdown.
    let slow = [("OTEL_BSP_SCHEDULE_DELAY", "3600000")];
    broker.terminate();
    broker.restart_with(&[&variables[..], &slow[..]].concat()).await;
    let before = collector.spans().len();
    broker.client().push_ids("last", "p", ["x"]).await;
    assert_eq!(collector.spans().len(), before);
    broker.terminate();
    assert!(collector.spans()[before..].iter().any(|span| span.name == "commit of push"));
}

/// Nothing is sent unless it is asked for, and what is not sampled is not sent either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_are_off_by_default_and_sampled() {
    let (collector, url) = Collector::start().await;
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", url.as_str());
    let mut broker = BrokerProcess::start_with(&[endpoint]).await;
    broker.client().push_ids("jobs", "p", ["a"]).await;
    broker.terminate();
    assert_eq!(collector.spans().len(), 0);
    broker.restart_with(&[endpoint, ("REGENT_TRACES", "true"), ("REGENT_TRACES_RATIO", "0")]).await;
    broker.client().push_ids("jobs", "p", ["b"]).await;
    broker.terminate();
    assert_eq!(collector.spans().len(), 0);
}
