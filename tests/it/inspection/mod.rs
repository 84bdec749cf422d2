//! The read side of the admin surface (`spec/admin.md`).

mod analytics;
mod changed;
mod internal;
mod messages;
mod query_parameters;
mod resources;
mod routes;
mod status;
mod traces;

use serde_json::Value;

use crate::harness::{Pop, TestBroker};

/// Fails unless `value` is an object with exactly these keys.
#[track_caller]
fn has_keys(value: &Value, keys: &[&str]) {
    let mut found: Vec<&str> =
        value.as_object().unwrap_or_else(|| panic!("{value}")).keys().map(String::as_str).collect();
    let mut wanted = keys.to_vec();
    found.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(found, wanted, "{value}");
}

/// Fails unless each of these is an integer token: clients read them with an `i64` accessor (§1.1).
#[track_caller]
fn are_integers(value: &Value, keys: &[&str]) {
    for key in keys {
        assert!(value[key].as_i64().is_some(), "{key} of {value}");
    }
}

/// Partition `a` of `queue`: six messages; group `g` has finished two, dead-lettered one, and holds one more under a
/// lease. Partition `b`: one message that nobody asked for.
async fn half_consumed(broker: &TestBroker, queue: &str) {
    broker.push_ids(queue, "a", ["a0", "a1", "a2", "a3", "a4", "a5"]).await;
    broker.push_ids(queue, "b", ["b0"]).await;
    let pop = Pop::partition(queue, "a").group("g").all();
    let popped = broker.pop(&pop.clone().batch(2)).await;
    assert!(broker.ack("g", popped.items("completed")).await.iter().all(|r| r.success));
    let popped = broker.pop(&pop.clone().batch(1)).await;
    assert!(broker.ack("g", popped.items("dlq")).await[0].dlq);
    assert_eq!(broker.pop(&pop.batch(1)).await.ids(), ["a3"]);
}
