//! Black-box tests: through HTTP, against a real PostgreSQL, each case on a database of its own.
//!
//! Every case names the invariant (`design.md` §2) or the section of the wire specification that it guards.
//! Run them wide (`--test-threads 8`): most of their time is waiting for the database.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ack;
mod ack_faults;
mod ack_fusion;
mod ack_history;
mod bad_input;
mod configure;
mod crash;
mod dead_letters;
mod faults;
mod groups;
mod harness;
mod health;
mod histories;
mod hostile;
mod inspection;
mod lease;
mod maintenance;
mod order;
mod peers;
mod plans;
mod pop;
mod push;
mod queue;
mod retention;
mod schema;
mod several_brokers;
mod tls;
mod traces_exported;
mod transactions;
mod watched_queues;
