//! What the cases stand on: a PostgreSQL server per run, a database and a broker per test, a typed HTTP client.

mod brokers;
mod client;
mod eventually;
mod keys;
mod ledger;
mod message;
mod panics;
mod pop;
mod postgres;
mod process;
mod proxy;
mod raw_http;
mod repeatable;
mod rows;
mod server;

pub use brokers::{Broker, Road, TestBroker};
pub use client::{AckResult, Client, PushResult, Reply, encode, numbered};
pub use eventually::{between_attempts, comes_true, eventually, eventually_blocking, eventually_some};
pub use keys::{keys_of, member};
pub use ledger::{Crew, Load};
pub use message::{Message, Popped};
pub use pop::Pop;
pub use postgres::{Database, empty_database};
pub use process::BrokerProcess;
pub use proxy::{Cut, Proxy};
pub use raw_http::{exchange, hang_up, open};
pub use repeatable::{number, tell};
pub use rows::{Aged, Cursor, assert_left};
pub use server::{Server, Tls};

use std::time::Duration;

/// How long a test waits for something that must come: far above what an idle machine needs.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Runs one case under the three settings of the ack path (`spec/ack.md` §7): the answers must not differ (I6).
macro_rules! on_every_road {
    ($($case:ident),+ $(,)?) => {
        mod registry_and_fusion {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(&crate::harness::TestBroker::on(crate::harness::Road::Fused).await).await;
            })+
        }
        mod registry_only {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(&crate::harness::TestBroker::on(crate::harness::Road::RegistryOnly).await).await;
            })+
        }
        mod resolution_only {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(&crate::harness::TestBroker::on(crate::harness::Road::ResolutionOnly).await).await;
            })+
        }
    };
}
pub(crate) use on_every_road;
