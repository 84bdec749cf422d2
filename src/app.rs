//! Composition root: pools, domain, router; start order and drain order. The only file that sees all layers.

mod settings;
mod statistics;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgPool};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::broker::Broker;
use crate::broker::coalesce::{Batch, Coalescer};
use crate::broker::error::BrokerError;
use crate::broker::settings::BrokerSettings;
use crate::broker::spool::Spool;
use crate::config::{Config, PostgresConfig};
use crate::http::{self, state::Shared};
use crate::metrics::Kind;
use crate::shutdown::{Shutdown, Supervisor, count_pass};
use crate::store::migrate::{self, SchemaError};
use crate::store::tls::TlsSettings;
use crate::store::{Generation, Store, StoreError};
use settings::{broker_settings, spool_settings};

/// Pause between two tries to reach a database that was away at boot.
const DATABASE_RETRY: Duration = Duration::from_millis(500);
/// Pause between two folds of recorded samples into their buckets: a scrape does it too, but nobody need scrape.
const METRICS_UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// A pooled connection that rested longer is asked whether it still lives before it is used.
const PING_AFTER_IDLE: Duration = Duration::from_secs(1);
/// Pause between two passes of the background sweep.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// Why a broker could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// No database is configured.
    #[error("no database: give --database-url, or let the binary run its own PostgreSQL")]
    NoDatabase,
    /// The URL does not parse.
    #[error("DATABASE_URL is not usable: {0}")]
    DatabaseUrl(#[source] sqlx::Error),
    /// A wrong or broken database.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The database answered the migrations but not the first query.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The disk spool cannot be opened.
    #[error("cannot open the disk spool: {0}")]
    Spool(#[source] std::io::Error),
    /// The address is taken or not ours.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// What was asked for.
        address: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The metrics recorder of this process is somebody else's.
    #[error("cannot install the metrics recorder: {0}")]
    Metrics(String),
}

/// A serving broker.
#[derive(Debug)]
pub struct App {
    address: SocketAddr,
    shutdown: Shutdown,
    supervisor: Supervisor,
    server: JoinHandle<()>,
    pools: Pools,
    broker: Arc<OnceLock<Broker>>,
}

#[derive(Clone, Debug)]
struct Pools {
    main: PgPool,
    claims: PgPool,
    generation: Generation,
    /// Whether this broker may migrate what they lead to.
    apply_schema: bool,
}

impl App {
    /// Starts a broker that ends when [`App::stop`] is called.
    pub async fn start(config: Config) -> Result<App, StartError> {
        App::start_with(config, Shutdown::new()).await
    }

    /// Starts a broker that ends with `shutdown`. A database that is away does not keep it from serving: it finishes
    /// booting when the database returns (README ruling 3). A wrong database does.
    pub async fn start_with(config: Config, shutdown: Shutdown) -> Result<App, StartError> {
        let metrics = install_metrics()?;
        let pools = open_pools(&config)?;
        let supervisor = Supervisor::new(shutdown.clone());
        keep_metrics_small(&supervisor, &metrics);
        let broker = Arc::new(OnceLock::new());
        let settings = broker_settings(&config);
        let spool = Spool::open(&spool_settings(&config)).map_err(StartError::Spool)?;
        match open_broker(&pools, &settings, &spool, &shutdown, &supervisor).await {
            Ok(open) => {
                let _ = broker.set(open);
            }
            Err(error) if is_away(&error) => {
                tracing::warn!(%error, "the database is away; serving 503 until it returns");
                finish_boot_later(
                    pools.clone(),
                    settings,
                    spool.clone(),
                    shutdown.clone(),
                    &supervisor,
                    broker.clone(),
                );
            }
            Err(error) => return Err(error),
        }
        let address = format!("{}:{}", config.http.host, config.http.port);
        let bind = |source| StartError::Bind { address: address.clone(), source };
        let listener = TcpListener::bind((config.http.host.as_str(), config.http.port)).await.map_err(bind)?;
        let local = listener.local_addr().map_err(bind)?;
        let state = Shared {
            broker: broker.clone(),
            spool,
            metrics,
            body_bytes_max: config.http.body_bytes_max,
            rest_after: Duration::from_millis(config.pop.rest_after_ms.max(1)),
        };
        let server = tokio::spawn(http::server::serve(listener, state.into(), shutdown.soft().clone()));
        Ok(App { address: local, shutdown, supervisor, server, pools, broker })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The domain behind the routes; `None` while the database has not been reached since the start.
    pub fn broker(&self) -> Option<&Broker> {
        self.broker.get()
    }

    /// Waits until the shutdown begins, then drains.
    pub async fn run(self) {
        self.shutdown.soft().cancelled().await;
        self.drain().await;
    }

    /// Stops accepting, answers parked pops, finishes what is in flight, closes the pools.
    pub async fn stop(self) {
        self.shutdown.begin();
        self.drain().await;
    }

    async fn drain(self) {
        if let Some(broker) = self.broker.get() {
            broker.ready().wake_everybody();
        }
        let hard = self.shutdown.hard().clone();
        let server = self.server;
        let abort = server.abort_handle();
        tokio::select! {
            _ = server => {}
            () = hard.cancelled() => abort.abort(),
        }
        if let Some(broker) = self.broker.get() {
            broker.shutdown().await;
        }
        self.supervisor.stop(Duration::from_secs(5)).await;
        self.pools.claims.close().await;
        self.pools.main.close().await;
    }
}

async fn open_broker(
    pools: &Pools,
    settings: &BrokerSettings,
    spool: &Spool,
    shutdown: &Shutdown,
    supervisor: &Supervisor,
) -> Result<Broker, StartError> {
    let store = migrated(pools).await?;
    let broker = Broker::start(store, settings.clone(), spool.clone(), shutdown.soft().clone());
    // A mode that was on before this start is on from its first request.
    broker.maintenance().refresh().await?;
    spawn_loops(supervisor, &broker);
    Ok(broker)
}

async fn migrated(pools: &Pools) -> Result<Store, StartError> {
    if pools.apply_schema {
        migrate::apply(&pools.main).await?;
    } else {
        migrate::verify(&pools.main).await?;
        tracing::info!("schema: apply skipped, it is the one of this version");
    }
    Ok(Store::open(pools.main.clone(), pools.claims.clone(), pools.generation.clone()).await?)
}

/// The database that is configured, as a broker opens it, without a broker.
pub async fn open_store(config: &Config) -> Result<Store, StartError> {
    migrated(&open_pools(config)?).await
}

/// Samples of a histogram pile up in memory until somebody folds them into its buckets.
fn keep_metrics_small(supervisor: &Supervisor, metrics: &PrometheusHandle) {
    let metrics = metrics.clone();
    supervisor.spawn("metrics_upkeep", move |stop| {
        let metrics = metrics.clone();
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(METRICS_UPKEEP_EVERY)).await.is_some() {
                metrics.run_upkeep();
                count_pass("metrics_upkeep", true);
            }
            Ok::<(), StartError>(())
        }
    });
}

/// The workers of a coalescer. One that panics loses its batch, and is started again.
fn spawn_workers<B: Batch>(supervisor: &Supervisor, name: &'static str, coalescer: &Coalescer<B>) {
    for _ in 0..coalescer.workers() {
        let coalescer = coalescer.clone();
        supervisor.spawn(name, move |stop| {
            let coalescer = coalescer.clone();
            async move {
                coalescer.run(&stop).await;
                Ok::<(), BrokerError>(())
            }
        });
    }
}

/// The background loops. Each is started again if it crashes, and ends with the soft shutdown.
fn spawn_loops(supervisor: &Supervisor, broker: &Broker) {
    let ready = broker.ready().clone();
    supervisor.spawn("ready_deadlines", move |stop| {
        let ready = ready.clone();
        async move {
            stop.run_until_cancelled(ready.run_deadlines()).await;
            Ok::<(), BrokerError>(())
        }
    });
    let discovery = broker.discovery().clone();
    supervisor.spawn("discovery", move |stop| {
        let discovery = discovery.clone();
        async move { discovery.run(&stop).await }
    });
    let peers = broker.peers().clone();
    supervisor.spawn("peer_heartbeat", move |stop| {
        let peers = peers.clone();
        async move { peers.run_heartbeat(&stop).await }
    });
    let peers = broker.peers().clone();
    supervisor.spawn("peer_sender", move |stop| {
        let peers = peers.clone();
        async move { peers.run_sender(&stop).await }
    });
    let peers = broker.peers().clone();
    supervisor.spawn("peer_listener", move |stop| {
        let peers = peers.clone();
        async move { peers.run_listener(&stop).await }
    });
    let walks = broker.peers().walks().clone();
    supervisor.spawn("ready_reconcile", move |stop| {
        let walks = walks.clone();
        async move { walks.run(&stop).await }
    });
    statistics::spawn(supervisor, broker);
    spawn_workers(supervisor, "queue_contacts", broker.queue_contacts());
    spawn_workers(supervisor, "group_contacts", broker.group_contacts());
    spawn_workers(supervisor, "claims", broker.claims());
    spawn_workers(supervisor, "segment_reads", broker.reads());
    spawn_workers(supervisor, "transaction_flush", broker.transaction_lanes());
    for shard in broker.push_shards() {
        spawn_workers(supervisor, "push_flush", shard);
    }
    let maintenance = broker.maintenance().clone();
    supervisor.spawn("maintenance", move |stop| {
        let maintenance = maintenance.clone();
        async move { maintenance.run(&stop).await }
    });
    let drain = broker.drain().clone();
    supervisor.spawn("spool_drain", move |stop| {
        let drain = drain.clone();
        async move { drain.run(&stop).await }
    });
    let retention = broker.retention().clone();
    supervisor.spawn("retention", move |stop| {
        let retention = retention.clone();
        async move { retention.run(&stop).await }
    });
    let broker = broker.clone();
    supervisor.spawn("sweep", move |stop| {
        let broker = broker.clone();
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY)).await.is_some() {
                let swept = broker.sweep().await;
                count_pass("sweep", swept.is_ok());
                if let Err(error) = swept {
                    tracing::warn!(%error, "background sweep failed; next pass as planned");
                }
            }
            Ok::<(), BrokerError>(())
        }
    });
}

fn is_away(error: &StartError) -> bool {
    match error {
        StartError::Schema(SchemaError::Unreachable(_)) => true,
        StartError::Store(error) => error.is_connection(),
        _ => false,
    }
}

fn finish_boot_later(
    pools: Pools,
    settings: BrokerSettings,
    spool: Spool,
    shutdown: Shutdown,
    supervisor: &Supervisor,
    broker: Arc<OnceLock<Broker>>,
) {
    let tasks = supervisor.clone();
    supervisor.spawn("finish_boot", move |stop| {
        let (pools, settings, spool, shutdown) = (pools.clone(), settings.clone(), spool.clone(), shutdown.clone());
        let (tasks, broker) = (tasks.clone(), broker.clone());
        async move {
            loop {
                match open_broker(&pools, &settings, &spool, &shutdown, &tasks).await {
                    Ok(open) => {
                        let _ = broker.set(open);
                        tracing::info!("the database is back; booted");
                        return Ok::<(), StartError>(());
                    }
                    Err(error) if is_away(&error) => tracing::debug!(%error, "the database is still away"),
                    Err(error) => {
                        tracing::error!(%error, "FATAL: this database cannot be used");
                        shutdown.begin();
                        return Ok(());
                    }
                }
                if stop.run_until_cancelled(tokio::time::sleep(DATABASE_RETRY)).await.is_none() {
                    return Ok(());
                }
            }
        }
    });
}

/// What every connection is told. Index nested loops are right for every hot statement, at any table size: a plan made
/// while a table was small must not become a scan when it has grown.
fn open_pools(config: &Config) -> Result<Pools, StartError> {
    let url = config.postgres.database_url.as_ref().ok_or(StartError::NoDatabase)?;
    let timeout = config.postgres.statement_timeout_ms.to_string();
    let options: PgConnectOptions = url.expose().parse().map_err(StartError::DatabaseUrl)?;
    let options = with_tls(options, &config.postgres);
    let options = options.application_name("regent").options([
        ("TimeZone", "UTC"),
        ("statement_timeout", timeout.as_str()),
        ("idle_in_transaction_session_timeout", timeout.as_str()),
        ("jit", "off"),
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_seqscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("enable_bitmapscan", "off"),
    ]);
    let generation = Generation::default();
    let pool = |size: u32| {
        let generation = generation.clone();
        PgPoolOptions::new()
            .max_connections(size)
            .acquire_timeout(Duration::from_millis(config.postgres.pool_checkout_timeout_ms))
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    // A connection that rested may have died with its server; a busy one is not asked.
                    if meta.idle_for > PING_AFTER_IDLE {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            })
            .max_lifetime(None)
            .after_connect(move |_, _| {
                generation.advance();
                metrics::counter!(crate::metrics::CONNECTIONS_OPENED).increment(1);
                Box::pin(std::future::ready(Ok(())))
            })
            .idle_timeout(Duration::from_secs(600))
    };
    let main = pool(config.postgres.pool_size).connect_lazy_with(options.clone());
    let claims =
        pool(config.postgres.claim_pool_size).connect_lazy_with(options.options([("synchronous_commit", "off")]));
    Ok(Pools { main, claims, generation, apply_schema: config.postgres.apply_schema })
}

/// TLS as it was asked for, and a word about it in the boot log.
fn with_tls(options: PgConnectOptions, postgres: &PostgresConfig) -> PgConnectOptions {
    let settings = TlsSettings {
        required: postgres.pg_use_ssl,
        root_cert_pem: postgres.root_cert_pem(),
        accept_any: !postgres.pg_ssl_reject_unauthorized,
    };
    let inert = postgres.pg_ssl_root_cert.is_some() && !postgres.pg_ssl_reject_unauthorized;
    let (options, ssl_trust) = settings.apply(options);
    tracing::info!(ssl_trust, "PostgreSQL");
    if ssl_trust == "accept-any" {
        tracing::warn!("any certificate of PostgreSQL is accepted: the link is not verified");
    }
    if ssl_trust == "plaintext" && (postgres.pg_use_ssl || postgres.pg_ssl_root_cert.is_some()) {
        tracing::warn!("PG_USE_SSL or PG_SSL_ROOT_CERT is set, and the link to PostgreSQL is plaintext all the same");
    }
    if inert {
        tracing::warn!("PG_SSL_REJECT_UNAUTHORIZED=false has no effect beside PG_SSL_ROOT_CERT");
    }
    options
}

/// One recorder per process, whoever starts first.
fn install_metrics() -> Result<PrometheusHandle, StartError> {
    static HANDLE: OnceLock<Result<PrometheusHandle, String>> = OnceLock::new();
    let handle = HANDLE.get_or_init(|| {
        let mut builder = PrometheusBuilder::new();
        for metric in crate::metrics::ALL.iter().filter(|metric| metric.kind == Kind::Histogram) {
            let name = Matcher::Full(metric.name.to_owned());
            builder = builder.set_buckets_for_metric(name, metric.buckets).map_err(|error| error.to_string())?;
        }
        let handle = builder.install_recorder().map_err(|error| error.to_string())?;
        crate::process::started();
        crate::metrics::register();
        Ok(handle)
    });
    handle.clone().map_err(StartError::Metrics)
}
