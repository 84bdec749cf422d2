//! The domain: actors, decisions, policies. It knows no HTTP and no SQL.

pub mod claim;
pub mod delivery;
pub mod encryption;
pub mod error;
pub mod grants;
pub mod group;
pub mod parking;
pub mod pop;
pub mod push;
pub mod push_flush;
pub mod push_fusion;
pub mod queue;
pub mod ready;
pub mod ready_group;
pub mod segment;
pub mod settings;
pub mod waiter;
