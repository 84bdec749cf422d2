//! Liveness, readiness and what no route serves (`spec/admin.md` §1.3, §13.1).

use reqwest::Method;
use serde_json::json;

use crate::harness::TestBroker;

/// §13.1: a real database round trip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_reports_the_database() {
    let broker = TestBroker::start().await;
    let reply = broker.get("/health").await.expect(200);
    let body = reply.json();
    assert_eq!((&body["status"], &body["database"]), (&"healthy".into(), &"connected".into()));
    assert!(body["engine"].is_string() && body["version"].is_string(), "{body}");
    assert_eq!(reply.headers["content-type"], "application/json");
}

/// §1.3: an unmatched API path, and an unmatched method anywhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_route_is_a_404_with_its_code() {
    let broker = TestBroker::start().await;
    for (method, path) in [
        (Method::GET, "/api/v1/nothing"),
        (Method::POST, "/api/v1/nothing"),
        (Method::GET, "/api/v2/pop/queue/q"),
        (Method::GET, "/api/v1/pop/queue/q/partition"),
        (Method::GET, "/api/v1/pop/queue/q/partition/p/more"),
        (Method::DELETE, "/somewhere/else"),
        (Method::GET, "/api/"),
    ] {
        let reply = broker.try_send(method.clone(), path, None).await.unwrap();
        assert_eq!(reply.status, 404, "{method} {path}: {}", reply.text);
        assert_eq!(reply.json(), json!({ "error": "Not Found", "code": "no_such_route" }), "{method} {path}");
    }
}

/// `push-pop.md` §1.2: with authentication off a bearer token of any content is ignored **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bearer_token_is_ignored_without_authentication() {
    let broker = TestBroker::start().await;
    for token in ["Bearer nonsense", "Bearer ", "Basic eDp5", "💥"] {
        let request = format!(
            "GET /api/v1/pop/queue/q HTTP/1.1\r\nHost: r\r\nConnection: close\r\nAuthorization: {token}\r\n\r\n"
        );
        let reply = crate::harness::exchange(broker.address, request.as_bytes()).await;
        assert_eq!(reply.status, 204, "{token}");
    }
}
