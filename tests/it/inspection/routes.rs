//! The route table, the OpenAPI document and the router against the index of the specification (`admin.md` §2), which
//! `routes.txt` repeats: method, path, level, scope.

use std::collections::BTreeSet;

use regent::http::routes::ROUTES;
use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::TestBroker;

/// Ours beside the protocol's.
const OWN: (&str, &str) = ("GET", "/openapi.json");

fn index() -> Vec<[&'static str; 4]> {
    let lines = include_str!("routes.txt").lines();
    lines.map(|line| line.split(' ').collect::<Vec<_>>().try_into().unwrap()).collect()
}

/// The path with every parameter written `:`, and a rest of the path `*`.
fn shape(path: &str) -> String {
    let shape = |segment: &str| match segment.trim_start_matches('{').chars().next() {
        Some('*') => "*".to_owned(),
        _ if segment.starts_with(['{', ':']) => ":".to_owned(),
        _ => segment.to_owned(),
    };
    path.split('/').map(shape).collect::<Vec<_>>().join("/")
}

/// §2: all 93 pairs with their level and scope, and nothing else but the document itself.
#[test]
fn the_table_is_the_index_of_the_specification() {
    let wanted: BTreeSet<_> =
        index().iter().map(|[method, path, level, scope]| (*method, shape(path), *level, *scope)).collect();
    assert_eq!(wanted.len(), 93);
    let declared: BTreeSet<_> = ROUTES
        .iter()
        .filter(|route| (route.method.name(), route.path) != OWN)
        .map(|r| (r.method.name(), shape(r.path), r.access.name(), r.scope.name()))
        .collect();
    let missing: Vec<_> = wanted.difference(&declared).collect();
    let surplus: Vec<_> = declared.difference(&wanted).collect();
    assert!(missing.is_empty() && surplus.is_empty(), "missing {missing:?}, surplus {surplus:?}");
    assert_eq!(ROUTES.len(), 94, "no pair twice");
}

/// Whether the router serves a route: everything else is a 404 with its own code (§1.3).
async fn is_served(broker: &TestBroker, method: &str, path: &str) -> bool {
    let target =
        path.split('/').map(|s| if s.starts_with([':', '*', '{']) { "x" } else { s }).collect::<Vec<_>>().join("/");
    let body = ["POST", "PUT"].contains(&method).then(|| "{}".into());
    let reply = broker.try_send(method.parse().unwrap(), &target, body).await.unwrap();
    let answer: Value = serde_json::from_str(&reply.text).unwrap_or_default();
    let missing = answer == json!({ "error": "Not Found", "code": "no_such_route" });
    assert!(!missing || reply.status == 404, "{method} {path}: {}", reply.status);
    !missing
}

/// The document has exactly what the router serves, with level and scope, and each parameter of a path.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openapi_document_is_what_the_router_serves() {
    let broker = TestBroker::start().await;
    let document = broker.get("/openapi.json").await.expect(200).json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"), "{}", document["openapi"]);
    let mut documented = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase();
            assert!(is_served(&broker, &method, path).await, "{method} {path} is documented and not served");
            let summary = operation["summary"].as_str().unwrap();
            assert!(!summary.is_empty(), "{method} {path}");
            let named: Vec<&str> = path.split('/').filter_map(|s| s.strip_prefix('{')?.strip_suffix('}')).collect();
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let declared: Vec<&str> = parameters
                .iter()
                .filter(|p| p["in"] == "path")
                .inspect(|p| assert_eq!(p["required"], true, "{method} {path}"))
                .map(|p| p["name"].as_str().unwrap())
                .collect();
            assert_eq!(declared, named, "{method} {path}");
            documented.insert((method, path.clone()));
        }
    }
    for route in ROUTES {
        let key = (route.method.name().to_owned(), route.path.replace("{*", "{"));
        let served = is_served(&broker, route.method.name(), route.path).await;
        assert_eq!(served, documented.contains(&key), "{key:?}: served, documented");
        assert_eq!(served, route.handler.is_some(), "{key:?}: served, built");
        if served {
            let operation = &document["paths"][&key.1][key.0.to_lowercase()];
            assert_eq!(operation["x-access"], route.access.name(), "{key:?}");
            assert_eq!(operation["x-scope"], route.scope.name(), "{key:?}");
        }
    }
    assert!(documented.contains(&("GET".into(), "/openapi.json".into())));
}

/// §2: what clients call and no broker of this protocol serves **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_clients_to_routes_that_do_not_exist_say_so() {
    let broker = TestBroker::start().await;
    for (method, path) in [
        ("GET", "/api/v1/resources/partitions"),
        ("DELETE", "/api/v1/queues/q/clear"),
        ("POST", "/api/v1/messages/p/t/dlq"),
        ("GET", "/api/v1/status/queues/q/messages"),
        ("GET", "/api/v1/messages/t"),
        ("GET", "/api/v1/migration/status"),
        ("POST", "/api/v1/migration/start"),
    ] {
        assert!(!is_served(&broker, method, path).await, "{method} {path}");
    }
}

/// A GET that changes state has no HEAD: it would claim and throw the answer away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pop_has_no_head() {
    let broker = TestBroker::start().await;
    for path in ["/api/v1/pop?namespace=n", "/api/v1/pop/queue/q", "/api/v1/pop/queue/q/partition/p"] {
        assert_eq!(broker.try_send(Method::HEAD, path, None).await.unwrap().status, 404, "{path}");
    }
    assert_eq!(broker.try_send(Method::HEAD, "/health", None).await.unwrap().status, 200);
}
