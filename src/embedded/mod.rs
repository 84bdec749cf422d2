//! A PostgreSQL of the broker's own, for whoever has none.
//!
//! ```text
//! <data_dir>/regent.lock         one broker per data directory
//!            postgres/           the cluster (or a link to it, see cluster.rs); regent.conf, operator.conf
//!            postgres.log        what the server says, with postgres.log.1 before it
//!            postgres.password   of the role "regent" over loopback TCP
//!            encryption.key      key for payloads at rest
//!            run/                the Unix socket (or a link to its directory, see socket.rs)
//!
//! starting -> ready --server ends--> down --backoff--> ready --stop()--> stopped
//! ```
//!
//! Invariants: the lock is held from before the first look at the cluster until the server has ended; a server that ends
//! by itself is started again on the same socket, so that pools heal without being told; no process is signalled that we
//! did not start or verify as ours.

mod account;
mod cluster;
#[cfg(feature = "postgresql_embedded")]
mod download;
mod error;
mod key;
mod lock;
mod postmaster;
mod previous;
mod programs;
mod settings;
mod socket;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::config::Config;

use account::Account;
use cluster::Cluster;
use error::Attempt;
pub use error::EmbeddedError;
pub use key::encryption_key;
pub use lock::DataDirLock;
use postmaster::{Plan, Postmaster, Spawner};
use programs::Programs;
use socket::SocketDir;

/// Role and superuser of the embedded cluster.
const ROLE: &str = "regent";
/// Database of the broker.
const DATABASE: &str = "regent";

/// First pause before a server that ended is started again.
const RESTART_BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest such pause.
const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A server that ran this long is started again with the shortest pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// How often the length of the log is looked at.
const LOG_CHECK: Duration = Duration::from_secs(30);
/// Ports tried at the first start: between finding a free one and using it, somebody may take it.
const PORT_ATTEMPTS: u32 = 3;

/// A running PostgreSQL that belongs to this broker. Dropped without [`EmbeddedPostgres::stop`], it is told to stop but
/// not awaited.
#[derive(Debug)]
pub struct EmbeddedPostgres {
    url: String,
    tcp_url: String,
    cluster: PathBuf,
    stop: CancellationToken,
    shared: Arc<Shared>,
    stopped: watch::Receiver<Option<Ended>>,
}

/// What the keeper tells the handle.
#[derive(Debug, Default)]
struct Shared {
    /// Zero while the server is down.
    pid: AtomicU32,
    restarts: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
enum Ended {
    InOrder,
    ByForce,
}

impl EmbeddedPostgres {
    /// Finds the programs, makes the cluster if there is none, ends what a crashed run left behind, starts the server and
    /// waits until it accepts connections. From then on it is watched, and started again whenever it ends.
    ///
    /// # Errors
    /// See [`EmbeddedError`]; nothing keeps running.
    pub async fn start(config: &Config) -> Result<Self, EmbeddedError> {
        let lock = DataDirLock::acquire(&config.data_dir)?;
        let data_dir = lock.dir().to_owned();
        let account = Account::choose()?;
        let place = cluster::place(&data_dir, &account)?;
        let programs = find_programs(config, &data_dir, cluster::version(&place), &account).await?;
        previous::settle(&place).await?;
        let connections_max = config.postgres.connections_max();
        let cluster = {
            // initdb takes a second or two of waiting for another process.
            let (data_dir, programs, account) = (data_dir.clone(), programs.clone(), account.clone());
            let opened = tokio::task::spawn_blocking(move || {
                Cluster::open(place, &data_dir, &programs, &account, connections_max)
            });
            opened.await.map_err(std::io::Error::other).attempt("open the cluster in", lock.dir())??
        };
        let socket_dir = SocketDir::prepare(&data_dir, &account)?;
        let mut plan = Plan {
            spawner: Spawner::new(&account).attempt("start a thread for", &cluster.path)?,
            account,
            programs,
            cluster: cluster.path,
            socket_dir: socket_dir.path().to_owned(),
            port: 0,
            log: data_dir.join("postgres.log"),
        };
        let postmaster = first_start(&mut plan).await?;
        let shared = Arc::new(Shared::default());
        shared.pid.store(postmaster.pid().unwrap_or(0), Ordering::Release);
        tracing::info!(
            cluster = %plan.cluster.display(), socket_dir = %plan.socket_dir.display(), port = plan.port,
            pid = postmaster.pid(), version = plan.programs.major, account = plan.account.name,
            "embedded PostgreSQL is ready"
        );
        let escaped = utf8_percent_encode(&plan.socket_dir.to_string_lossy(), NON_ALPHANUMERIC).to_string();
        let (stop, (end, stopped)) = (CancellationToken::new(), watch::channel(None));
        let this = Self {
            url: format!("postgres://{ROLE}@localhost:{}/{DATABASE}?host={escaped}&sslmode=disable", plan.port),
            tcp_url: format!("postgres://{ROLE}:{}@127.0.0.1:{}/{DATABASE}", cluster.password, plan.port),
            cluster: plan.cluster.clone(),
            stop: stop.clone(),
            shared: Arc::clone(&shared),
            stopped,
        };
        let keeper = Keeper { postmaster: Some(postmaster), plan, shared, stop, _socket_dir: socket_dir, _lock: lock };
        tokio::spawn(async move {
            let ended = keeper.keep().await;
            end.send_replace(Some(ended));
        });
        Ok(this)
    }

    /// Connection URL over the private Unix socket, with no secret in it: the operating system vouches for the user.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Connection URL over loopback TCP. Holds a password: do not log it.
    pub fn tcp_url(&self) -> &str {
        &self.tcp_url
    }

    /// The cluster directory.
    pub fn data_dir(&self) -> &Path {
        &self.cluster
    }

    /// Process id of the server; nothing while it is down.
    pub fn postmaster_pid(&self) -> Option<u32> {
        Some(self.shared.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// How often the server ended by itself and was started again.
    pub fn restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Acquire)
    }

    /// Stops the server and waits for its end: in order, after 30 s at once, after 10 s more by force. Idempotent. The
    /// data directory is free when this returns.
    ///
    /// # Errors
    /// It had to be killed ([`EmbeddedError::Killed`]); what was committed is safe all the same.
    pub async fn stop(&self) -> Result<(), EmbeddedError> {
        self.stop.cancel();
        let mut stopped = self.stopped.clone();
        let ended = stopped.wait_for(Option::is_some).await.ok().and_then(|ended| *ended);
        match ended {
            Some(Ended::InOrder) => Ok(()),
            Some(Ended::ByForce) | None => Err(EmbeddedError::Killed),
        }
    }
}

impl Drop for EmbeddedPostgres {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Owns the server from its first start to its end. Fields drop in this order: the lock goes last.
struct Keeper {
    postmaster: Option<Postmaster>,
    plan: Plan,
    shared: Arc<Shared>,
    stop: CancellationToken,
    _socket_dir: SocketDir,
    _lock: DataDirLock,
}

impl Keeper {
    async fn keep(mut self) -> Ended {
        let mut backoff = RESTART_BACKOFF_MIN;
        let stop = self.stop.clone();
        loop {
            if let Some(postmaster) = self.postmaster.take() {
                let started = Instant::now();
                match self.watch(postmaster).await {
                    Some(ended) => return ended,
                    None if started.elapsed() >= HEALTHY_AFTER => backoff = RESTART_BACKOFF_MIN,
                    None => {}
                }
            }
            tokio::select! {
                () = sleep(backoff) => {}
                () = stop.cancelled() => return Ended::InOrder,
            }
            backoff = (backoff * 2).min(RESTART_BACKOFF_MAX);
            tokio::select! {
                started = self.start_again() => match started {
                    Ok(postmaster) => {
                        self.shared.pid.store(postmaster.pid().unwrap_or(0), Ordering::Release);
                        let restarts = self.shared.restarts.fetch_add(1, Ordering::AcqRel) + 1;
                        metrics::counter!(crate::metrics::POSTGRES_RESTARTS).increment(1);
                        tracing::info!(restarts, pid = postmaster.pid(), "embedded PostgreSQL is ready again");
                        self.postmaster = Some(postmaster);
                    }
                    Err(error) => tracing::error!(%error, "embedded PostgreSQL does not start, trying again"),
                },
                // A half-started server was told to stop when the future was dropped; see that it is gone.
                () = stop.cancelled() => {
                    return match previous::settle(&self.plan.cluster).await {
                        Ok(()) => Ended::InOrder,
                        Err(_) => Ended::ByForce,
                    };
                }
            }
        }
    }

    /// Waits until the server ends by itself (nothing), or stops it when told to.
    async fn watch(&self, mut postmaster: Postmaster) -> Option<Ended> {
        let mut log_check = interval(LOG_CHECK);
        log_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ended = postmaster.ended() => {
                    self.shared.pid.store(0, Ordering::Release);
                    if self.stop.is_cancelled() {
                        return Some(Ended::InOrder);
                    }
                    let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
                    let log = self.plan.log.display();
                    tracing::error!(status, %log, "embedded PostgreSQL ended by itself, starting it again");
                    return None;
                }
                () = self.stop.cancelled() => {
                    let stopped = postmaster.stop().await;
                    self.shared.pid.store(0, Ordering::Release);
                    tracing::info!("embedded PostgreSQL has stopped");
                    return Some(if stopped.is_ok() { Ended::InOrder } else { Ended::ByForce });
                }
                _ = log_check.tick() => {
                    if let Err(error) = postmaster::bound_log(&self.plan.log) {
                        tracing::warn!(%error, "cannot shorten the log of the embedded PostgreSQL");
                    }
                }
            }
        }
    }

    async fn start_again(&self) -> Result<Postmaster, EmbeddedError> {
        // Backends of a postmaster that was killed hold its shared memory until they notice.
        previous::settle(&self.plan.cluster).await?;
        self.plan.start().await
    }
}

async fn first_start(plan: &mut Plan) -> Result<Postmaster, EmbeddedError> {
    let mut attempt = 1;
    loop {
        plan.port = postmaster::free_port().attempt("find a free port for", &plan.cluster)?;
        match plan.start().await {
            Err(EmbeddedError::DidNotStart { tail, .. })
                if attempt < PORT_ATTEMPTS && tail.contains("Address already in use") =>
            {
                attempt += 1;
            }
            started => return started,
        }
    }
}

async fn find_programs(
    config: &Config,
    data_dir: &Path,
    version: Option<u32>,
    account: &Account,
) -> Result<Programs, EmbeddedError> {
    let given = config.postgres.pg_bin_dir.as_deref();
    let found = Programs::find(given, version, account);
    #[cfg(feature = "postgresql_embedded")]
    if found.is_err() && given.is_none() {
        return download::fetch(data_dir, version, account).await;
    }
    let _ = data_dir;
    found
}
