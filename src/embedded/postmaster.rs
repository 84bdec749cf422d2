//! One run of the server process: started, awaited, signalled, reaped.
//!
//! Invariant: signals go only to a child that has not been reaped, so its number cannot have passed to a stranger.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};

use super::account::Account;
use super::error::{Attempt, EmbeddedError};
use super::previous::first_line_pid;
use super::programs::Programs;
use super::settings::DURABLE;

/// How long a start may take, recovery from a crash included.
const READY: Duration = Duration::from_secs(300);
/// How long an orderly ("fast") shutdown may take; it writes a checkpoint.
const FAST_STOP: Duration = Duration::from_secs(30);
/// How long an immediate one may take.
const IMMEDIATE_STOP: Duration = Duration::from_secs(10);
/// Past this size the log is moved to `<name>.1`.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// How much of the log an error repeats.
const TAIL_BYTES_MAX: u64 = 2_000;

/// Everything it takes to start the server, again and again.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) account: Account,
    pub(super) programs: Programs,
    pub(super) cluster: PathBuf,
    pub(super) socket_dir: PathBuf,
    pub(super) port: u16,
    pub(super) log: PathBuf,
    pub(super) spawner: Spawner,
}

/// A running server. Dropped, it is told to stop, but not awaited.
#[derive(Debug)]
pub(super) struct Postmaster {
    child: Child,
}

impl Plan {
    /// Starts the server and waits until it accepts connections.
    pub(super) async fn start(&self) -> Result<Postmaster, EmbeddedError> {
        let log = open_log(&self.log)?;
        let log_start = log.metadata().map(|found| found.len()).unwrap_or(0);
        let child = self.spawner.spawn(self.command(log)?).await.attempt("start", &self.programs.postgres())?;
        let mut postmaster = Postmaster { child };
        let deadline = Instant::now() + READY;
        loop {
            if postmaster.is_ready(&self.cluster) {
                return Ok(postmaster);
            }
            if let Ok(Some(status)) = postmaster.child.try_wait() {
                let tail = log_tail(&self.log, log_start);
                return Err(EmbeddedError::DidNotStart { status: status.to_string(), log: self.log.clone(), tail });
            }
            if Instant::now() >= deadline {
                return Err(EmbeddedError::NotReady { seconds: READY.as_secs(), log: self.log.clone() });
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn command(&self, log: File) -> Result<Command, EmbeddedError> {
        let out = log.try_clone().attempt("open", &self.log)?;
        let mut command = if self.spawner.dies_with_us {
            let mut command = self.account.command("setpriv");
            command.args(["--pdeathsig", "INT", "--"]).arg(self.programs.postgres());
            command
        } else {
            self.account.command(self.programs.postgres())
        };
        // Loopback TCP is a convenience; the broker itself uses the socket, whose name has the port in it. If somebody
        // else has taken the port since the first start, do without rather than not at all.
        let listen = if port_is_free(self.port) { "127.0.0.1" } else { "" };
        if listen.is_empty() {
            tracing::warn!(port = self.port, "port taken, the embedded PostgreSQL listens on its socket only");
        }
        command.arg("-D").arg(&self.cluster).args(["-p", &self.port.to_string()]);
        command.args(["-c", &format!("listen_addresses={listen}"), "-c", "unix_socket_permissions=0700"]);
        command.args(["-c", &format!("unix_socket_directories={}", self.socket_dir.display())]);
        command.args(DURABLE.iter().flat_map(|setting| ["-c", setting]));
        command.stdout(Stdio::from(out)).stderr(Stdio::from(log));
        Ok(Command::from(command))
    }
}

impl Postmaster {
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Resolves when the process has ended. Cancel-safe.
    pub(super) async fn ended(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Stops the server: in order first, then at once, then by force.
    pub(super) async fn stop(mut self) -> Result<(), EmbeddedError> {
        for (signal, patience) in [(Signal::SIGINT, FAST_STOP), (Signal::SIGQUIT, IMMEDIATE_STOP)] {
            self.signal(signal);
            if timeout(patience, self.child.wait()).await.is_ok() {
                return Ok(());
            }
            tracing::warn!(%signal, "the embedded PostgreSQL did not stop in time");
        }
        let _ = self.child.kill().await;
        Err(EmbeddedError::Killed)
    }

    fn signal(&self, signal: Signal) {
        // No id: already reaped.
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// The server writes its state into the eighth line of its pid file.
    fn is_ready(&self, cluster: &Path) -> bool {
        let pid_file = cluster.join("postmaster.pid");
        let ours = first_line_pid(&pid_file).and_then(|pid| u32::try_from(pid).ok()) == self.child.id();
        ours && fs::read_to_string(&pid_file).is_ok_and(|text| text.lines().nth(7).map(str::trim) == Some("ready"))
    }
}

impl Drop for Postmaster {
    fn drop(&mut self) {
        self.signal(Signal::SIGINT);
    }
}

/// Starts child processes from one thread that lives as long as they should.
///
/// With `setpriv` the kernel tells the server to stop when the *thread* that started it ends, `kill -9` included. A
/// worker thread of the runtime may end at other times; this one ends with the process, or when it is dropped.
#[derive(Debug)]
pub(super) struct Spawner {
    requests: mpsc::UnboundedSender<Request>,
    dies_with_us: bool,
}

type Request = (Command, oneshot::Sender<std::io::Result<Child>>);

impl Spawner {
    /// Must be called inside a runtime.
    pub(super) fn new(account: &Account) -> std::io::Result<Self> {
        let (requests, mut incoming) = mpsc::unbounded_channel::<Request>();
        let runtime = tokio::runtime::Handle::current();
        std::thread::Builder::new().name("regent-postgres".into()).spawn(move || {
            let _inside = runtime.enter();
            while let Some((mut command, reply)) = incoming.blocking_recv() {
                let _ = reply.send(command.spawn());
            }
        })?;
        let mut probe = account.command("setpriv");
        probe.args(["--pdeathsig", "INT", "--", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
        let dies_with_us = probe.status().is_ok_and(|status| status.success());
        Ok(Self { requests, dies_with_us })
    }

    async fn spawn(&self, command: Command) -> std::io::Result<Child> {
        let (reply, child) = oneshot::channel();
        let gone = || std::io::Error::other("the thread that starts processes is gone");
        self.requests.send((command, reply)).map_err(|_| gone())?;
        child.await.map_err(|_| gone())?
    }
}

/// A loopback port that nobody listens on now.
pub(super) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn port_is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn open_log(path: &Path) -> Result<File, EmbeddedError> {
    bound_log(path)?;
    OpenOptions::new().create(true).append(true).open(path).attempt("open", path)
}

/// Moves the log to `<name>.1` once it is too long. The server keeps its file open in append mode, so it is copied and
/// cut, not renamed; a line written in between is lost.
pub(super) fn bound_log(path: &Path) -> Result<(), EmbeddedError> {
    if fs::metadata(path).map(|found| found.len()).unwrap_or(0) <= LOG_BYTES_MAX {
        return Ok(());
    }
    let mut old = path.as_os_str().to_owned();
    old.push(".1");
    fs::copy(path, &old).attempt("copy", path)?;
    OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(0)).attempt("cut", path)
}

/// What was written to the log since `start`, or the end of that.
fn log_tail(path: &Path, start: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(end.saturating_sub(TAIL_BYTES_MAX)).min(end)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).trim().to_owned()
}
