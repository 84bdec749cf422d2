//! A broker that this tool starts, kills and restarts. Only processes started here are ever signalled, and the
//! postmaster of a data directory that the caller named.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::client::{Connection, Endpoint, Request};
use crate::sample::proc;

/// The first start may have to create a database.
const READY_TIMEOUT: Duration = Duration::from_secs(180);
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Command, port and directory of a broker, and the process while it runs.
pub struct BrokerProcess {
    command: String,
    port: u16,
    dir: PathBuf,
    temporary: bool,
    child: Option<Child>,
}

impl BrokerProcess {
    /// Prepares a broker; `{port}` and `{dir}` of the command are filled in.
    pub fn prepare(command: &str, dir: Option<&Path>) -> Result<Self> {
        // Bound and let go: the broker takes it a moment later.
        let port = TcpListener::bind("127.0.0.1:0").context("find a free port")?.local_addr()?.port();
        let temporary = dir.is_none();
        let dir = match dir {
            Some(dir) => dir.to_path_buf(),
            None => std::env::temp_dir().join(format!("regent-load-{}-{port}", std::process::id())),
        };
        std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let command = command.replace("{port}", &port.to_string()).replace("{dir}", &dir.display().to_string());
        Ok(Self { command, port, dir, temporary, child: None })
    }

    /// Where it listens.
    pub fn endpoint(&self) -> Arc<Endpoint> {
        Arc::new(Endpoint::local(self.port))
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().and_then(Child::id).and_then(|pid| i32::try_from(pid).ok())
    }

    /// The data directory of a PostgreSQL below the broker's own directory, if one runs there.
    pub fn pg_data_dir(&self) -> Option<PathBuf> {
        proc::find_data_dir(&self.dir, 2)
    }

    /// Starts it without waiting until it serves.
    pub fn spawn(&mut self, environment: &[(&str, &str)]) -> Result<()> {
        let mut words = self.command.split_ascii_whitespace();
        let program = words.next().context("--broker-cmd is empty")?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.join("broker.log"))?;
        let child = Command::new(program)
            .args(words)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {}", self.command))?;
        self.child = Some(child);
        Ok(())
    }

    /// Starts it and waits until `/health` says 200.
    pub async fn start(&mut self, environment: &[(&str, &str)]) -> Result<Duration> {
        let begun = Instant::now();
        self.spawn(environment)?;
        self.wait_ready().await?;
        Ok(begun.elapsed())
    }

    /// Waits until `/health` says 200.
    pub async fn wait_ready(&mut self) -> Result<()> {
        let mut connection = Connection::new(self.endpoint(), 0);
        let request = Request::get(connection.endpoint(), "/health");
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            if let Ok(head) = connection.call(&request, Duration::from_secs(2)).await
                && head.status == 200
            {
                return Ok(());
            }
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the broker ended with {status}; see {}", self.dir.join("broker.log").display());
            }
            if Instant::now() > deadline {
                bail!("the broker is not ready after {READY_TIMEOUT:?}; see {}", self.dir.join("broker.log").display());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// `kill -9`, by process id.
    pub async fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().await.context("kill the broker")?;
        }
        Ok(())
    }

    /// SIGTERM, then waits until it is gone.
    pub async fn stop(&mut self) -> Result<()> {
        let Some(pid) = self.pid() else { return Ok(()) };
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("stop the broker")?;
        if let Some(child) = self.child.as_mut()
            && tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.is_err()
        {
            eprintln!("the broker did not end within {EXIT_TIMEOUT:?}: killed");
            return self.kill().await;
        }
        self.child = None;
        Ok(())
    }

    /// Stops it and removes its directory if that was a temporary one and nothing asked to look at it.
    pub async fn finish(&mut self, keep: bool) -> Result<()> {
        self.stop().await?;
        if self.temporary && !keep {
            // A database that outlives its broker would lose its files under it.
            if self.pg_data_dir().is_none() {
                std::fs::remove_dir_all(&self.dir).ok();
            }
        } else {
            eprintln!("broker directory kept: {}", self.dir.display());
        }
        Ok(())
    }
}

/// `kill -9` of the postmaster of a data directory, after making sure that the process is that postmaster.
pub fn kill_postmaster(data_dir: &Path) -> Result<()> {
    let file = proc::read_postmaster_file(data_dir).context("no postmaster runs there")?;
    let its_dir = proc::data_dir_of(file.pid).context("the postmaster's directory cannot be read")?;
    if its_dir != data_dir.canonicalize()? {
        bail!("process {} does not serve {}", file.pid, data_dir.display());
    }
    kill(Pid::from_raw(file.pid), Signal::SIGKILL).context("kill the postmaster")
}
