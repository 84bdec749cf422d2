//! Regent: a message broker on PostgreSQL that speaks the Queen MQ 1.x HTTP protocol.
//!
//! ```text
//! main -> app -> http -> broker -> store -> PostgreSQL
//!                  \________\________\____-> ids, clock, metrics, config   (leaves: they import no layer)
//! ```

pub mod app;
pub mod broker;
pub mod clock;
pub mod config;
pub mod embedded;
pub mod http;
pub mod ids;
pub mod metrics;
pub mod process;
pub mod shutdown;
pub mod spans;
pub mod store;
pub mod telemetry;
