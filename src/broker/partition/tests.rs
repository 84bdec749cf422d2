#![allow(clippy::unwrap_used)]

//! The actor's life is tested through the directory (`directory/tests.rs`), without which it has none.

use super::*;

#[test]
fn an_actor_and_its_lease_are_small() {
    // Their share of the registry bound; what actix adds is measured in `benches/lease_memory.rs`.
    assert!(size_of::<PartitionActor>() <= 128, "{}", size_of::<PartitionActor>());
    assert!(size_of::<(LeaseGrant, Reserved)>() <= 192, "{}", size_of::<(LeaseGrant, Reserved)>());
}
