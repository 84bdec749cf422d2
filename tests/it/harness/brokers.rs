//! The only file that names the broker's library API.

use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::{Client, Database, Proxy, panics};

/// How acks are settled (`spec/ack.md` §7): the answers must be the same on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Road {
    /// Registry and fusion, as by default.
    Fused,
    /// The registry recognises completed batches; each is committed on its own.
    RegistryOnly,
    /// Full hash resolution of every ack.
    ResolutionOnly,
    /// The same, one at a time: what the others are measured by.
    Serial,
}

/// A broker in this process. Dropping it stops it gracefully, and fails the test if that takes too long.
pub struct Broker {
    app: Option<regent::app::App>,
    client: Client,
    _data_dir: TempDir,
}

impl Broker {
    /// Starts a broker on a database.
    pub async fn start(url: &str, road: Road) -> Broker {
        Broker::launch(url, road, |_| {}).await
    }

    /// Starts one that gives up on a database that does not answer before a test would.
    pub async fn start_impatient(url: &str, road: Road) -> Broker {
        Broker::launch(url, road, |config| {
            config.postgres.pool_checkout_timeout_ms = 1_500;
            config.postgres.statement_timeout_ms = 1_500;
        })
        .await
    }

    /// Starts one with settings of its own.
    pub async fn tuned(url: &str, set: impl FnOnce(&mut regent::config::Config)) -> Broker {
        Broker::launch(url, Road::Fused, set).await
    }

    async fn launch(url: &str, road: Road, set: impl FnOnce(&mut regent::config::Config)) -> Broker {
        panics::watch();
        let data_dir = TempDir::with_prefix("regent-it-data-").unwrap();
        let mut config = config(url, road, data_dir.path());
        set(&mut config);
        let app = regent::app::App::start(config).await.expect("the broker starts");
        let client = Client::new(app.local_addr());
        Broker { app: Some(app), client, _data_dir: data_dir }
    }

    /// Starts a broker as the environment `variables` say; the text of its refusal otherwise.
    pub async fn from_environment<const N: usize>(variables: [(&str, &str); N]) -> Result<Broker, String> {
        panics::watch();
        let data_dir = TempDir::with_prefix("regent-it-data-").unwrap();
        let fixed = ["regent", "--port", "0", "--pool-size", "3", "--claim-pool-size", "1"];
        let config = regent::config::Config::from_parts(fixed, &variables.into()).map_err(|e| e.to_string())?;
        let app = regent::app::App::start(config).await.map_err(|e| e.to_string())?;
        let client = Client::new(app.local_addr());
        Ok(Broker { app: Some(app), client, _data_dir: data_dir })
    }

    /// Pops that are parked now.
    pub fn parked(&self) -> usize {
        self.app.as_ref().and_then(|app| app.broker()).map_or(0, |broker| broker.figures().pops_parked)
    }

    /// Stops it now.
    pub async fn stop(mut self) {
        if let Some(app) = self.app.take() {
            stop(app).await;
        }
    }
}

impl Deref for Broker {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(app) = self.app.take().filter(|_| !std::thread::panicking()) {
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(stop(app)));
            panics::expect_none();
        }
    }
}

async fn stop(app: regent::app::App) {
    tokio::time::timeout(Duration::from_secs(20), app.stop()).await.expect("the broker stops within 20 s");
}

/// The defaults, with pools small enough for many tests at once.
fn config(url: &str, road: Road, data_dir: &Path) -> regent::config::Config {
    let mut config = regent::config::Config::with_database(url).expect("a database URL");
    config.data_dir = data_dir.to_owned();
    config.postgres.pool_size = 6;
    config.postgres.claim_pool_size = 3;
    config.fusion.ack_registry = matches!(road, Road::Fused | Road::RegistryOnly);
    config.fusion.ack_fusion = road == Road::Fused;
    config.fusion.ack_serial = road == Road::Serial;
    // Every parked pop leaves its connection at once, as only a longer wait does in life.
    config.pop.rest_after_ms = 0;
    config
}

/// Applies the schema by starting and stopping a broker.
pub async fn migrate(url: &str) {
    Broker::start(url, Road::Fused).await.stop().await;
}

/// A broker on a fresh database: what nearly every case needs.
pub struct TestBroker {
    broker: Broker,
    /// The database under it.
    pub db: Database,
}

impl TestBroker {
    /// With the default settings.
    pub async fn start() -> TestBroker {
        TestBroker::on(Road::Fused).await
    }

    /// With the ack path set.
    pub async fn on(road: Road) -> TestBroker {
        let db = Database::migrated().await;
        let broker = Broker::start(&db.url, road).await;
        TestBroker { broker, db }
    }

    /// With settings of its own.
    pub async fn tuned(road: Road, set: impl FnOnce(&mut regent::config::Config)) -> TestBroker {
        let db = Database::migrated().await;
        let broker = Broker::launch(&db.url, road, set).await;
        TestBroker { broker, db }
    }

    /// With a retention that looks around all the time.
    pub async fn sweeping(road: Road) -> TestBroker {
        TestBroker::tuned(road, |config| config.retention.interval_ms = 40).await
    }

    /// With short timeouts.
    pub async fn impatient(road: Road) -> TestBroker {
        let db = Database::migrated().await;
        let broker = Broker::start_impatient(&db.url, road).await;
        TestBroker { broker, db }
    }

    /// That remembers no segment: for cases that write to the tables behind its back.
    pub async fn forgetful() -> TestBroker {
        let db = Database::migrated().await;
        let broker = Broker::launch(&db.url, Road::Fused, |config| config.pop.segment_cache_mib_max = 0).await;
        TestBroker { broker, db }
    }

    /// With a wire to PostgreSQL that can be cut.
    pub async fn behind_a_proxy(road: Road) -> (TestBroker, Proxy) {
        let db = Database::migrated().await;
        let proxy = Proxy::to(&db).await;
        let broker = Broker::start_impatient(&proxy.url, road).await;
        (TestBroker { broker, db }, proxy)
    }

    /// Pops that are parked now.
    pub fn parked(&self) -> usize {
        self.broker.parked()
    }

    /// One more broker on the same database.
    pub async fn another(&self) -> Broker {
        Broker::start(&self.db.url, Road::Fused).await
    }

    /// Stops the broker; its database stays.
    pub async fn stop_keeping_the_database(self) -> Database {
        self.broker.stop().await;
        self.db
    }

    /// One more broker on the same database, with settings of its own.
    pub async fn another_tuned(&self, set: impl FnOnce(&mut regent::config::Config)) -> Broker {
        Broker::launch(&self.db.url, Road::Fused, set).await
    }

    /// Stops the broker and starts a new one on the same database.
    pub async fn restart(self) -> TestBroker {
        let TestBroker { broker, db } = self;
        broker.stop().await;
        let broker = Broker::start(&db.url, Road::Fused).await;
        TestBroker { broker, db }
    }
}

impl Deref for TestBroker {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.broker
    }
}
