//! The domain: actors, decisions, policies. It knows no HTTP and no SQL.

pub mod ack;
pub mod ack_decision;
pub mod resolver;
pub mod segment;
