//! The domain: actors, decisions, policies. It knows no HTTP and no SQL.

pub mod segment;
