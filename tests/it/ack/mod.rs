//! The two ack routes (`spec/ack.md`), on every road that an ack can take (I6).

mod budget;
mod dead_letters;
mod decision;
mod leases;
mod patterns;
mod requests;
mod resolution;
mod retry_delay;

use crate::harness::{AckResult, Cursor, Pop, Popped, TestBroker, numbered};

const GROUP: &str = "g";
const STALE: &str = "invalid or expired lease";
const PASSED: &str = "already committed: the cursor moved past this message before this ack";
const UNRESOLVABLE: &str =
    "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers";

/// Pushes `m0`…, `count` of them, into `q`/`p` and leases them all.
async fn leased(broker: &TestBroker, count: usize) -> Popped {
    broker.push_ids("q", "p", numbered("m", 0..count)).await;
    let popped = pop(broker).await;
    assert_eq!(popped.messages.len(), count);
    popped
}

/// The next batch of the group, by the targeted route.
async fn pop(broker: &TestBroker) -> Popped {
    broker.pop(&Pop::partition("q", "p").group(GROUP).all().batch(10_000)).await
}

/// The cursor under test.
async fn cursor(broker: &TestBroker) -> Cursor {
    broker.db.cursor("q", "p", GROUP).await
}

/// `success` without any flag, the lease kept or released.
fn done(result: &AckResult, released: bool) -> bool {
    result.success && result.error.is_none() && !result.dlq && !result.noop && result.lease_released == released
}

/// Refused with this text, and nothing else claimed.
fn refused(result: &AckResult, error: &str) -> bool {
    !result.success && result.error.as_deref() == Some(error) && !result.dlq && !result.noop && !result.lease_released
}
