//! The broker binary: with its embedded PostgreSQL, for tests that kill either, or on a test's database, for tests that
//! read metrics, which are one broker's only in a process of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Client, eventually, eventually_blocking};

/// A running binary on a data directory of its own.
pub struct BrokerProcess {
    child: Child,
    data: DataDir,
    /// Its database, unless it runs its own.
    database: Option<String>,
    /// Where it serves; the same after a restart.
    pub address: SocketAddr,
}

/// A directory that the embedded server's user can enter, removed at the end.
struct DataDir(PathBuf);

impl Drop for DataDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} stays: {error}", self.0.display());
        }
    }
}

impl BrokerProcess {
    /// Starts it on a fresh data directory and waits until it is healthy.
    pub async fn start() -> BrokerProcess {
        BrokerProcess::launch(None, &[]).await
    }

    /// The same with these variables.
    pub async fn start_with(variables: &[(&str, &str)]) -> BrokerProcess {
        BrokerProcess::launch(None, variables).await
    }

    /// The same on a database that others use too.
    pub async fn on(url: &str) -> BrokerProcess {
        BrokerProcess::on_with(url, &[]).await
    }

    /// The same with these variables.
    pub async fn on_with(url: &str, variables: &[(&str, &str)]) -> BrokerProcess {
        BrokerProcess::launch(Some(url.to_owned()), variables).await
    }

    async fn launch(database: Option<String>, variables: &[(&str, &str)]) -> BrokerProcess {
        let dir = PathBuf::from(format!("/tmp/regent-it-crash-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let child = spawn(&dir, address, database.as_deref(), variables);
        let process = BrokerProcess { child, data: DataDir(dir), database, address };
        process.healthy().await;
        process
    }

    /// Starts it again on the same directory and address.
    pub async fn restart(&mut self) {
        self.restart_with(&[]).await;
    }

    /// The same with these variables.
    pub async fn restart_with(&mut self, variables: &[(&str, &str)]) {
        self.reap();
        self.child = spawn(&self.data.0, self.address, self.database.as_deref(), variables);
        self.healthy().await;
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// `kill -9` of the broker; its database is left as it was.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.reap();
    }

    /// Any signal to the broker.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// `kill -9` of its PostgreSQL postmaster.
    pub fn kill_postgres(&self) {
        kill(self.postmaster().expect("a running postmaster"), Signal::SIGKILL).unwrap();
    }

    /// Asks it to stop and waits until it has.
    pub fn terminate(&mut self) {
        if self.has_ended() {
            return;
        }
        self.ask_to_stop();
        let ended = eventually_blocking(Duration::from_secs(20), || self.has_ended());
        assert!(ended, "SIGTERM must end the broker:\n{}", self.log());
    }

    /// Asks it to stop.
    pub fn ask_to_stop(&self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).unwrap();
    }

    /// Whether the broker process is gone.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// The end of what it wrote.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.data.0.join("broker.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// The running postmaster of the data directory.
    pub fn postmaster(&self) -> Option<Pid> {
        let file = find(&self.data.0, "postmaster.pid")?;
        let pid: i32 = std::fs::read_to_string(file).ok()?.lines().next()?.trim().parse().ok()?;
        // A postmaster works in its data directory; any other process with that id is none of ours.
        let works_in = std::fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
        works_in.starts_with(&self.data.0).then(|| Pid::from_raw(pid))
    }

    /// Where its own PostgreSQL listens.
    pub fn embedded_url(&self) -> String {
        let read = |name| std::fs::read_to_string(find(&self.data.0, name).expect("a running cluster")).unwrap();
        let (password, state) = (read("postgres.password"), read("postmaster.pid"));
        let port = state.lines().nth(3).expect("the port is in the fourth line").trim().to_owned();
        format!("postgres://regent:{}@127.0.0.1:{port}/regent?sslmode=disable", password.trim())
    }

    async fn healthy(&self) {
        let client = self.client();
        eventually(Duration::from_secs(40), || client.is_healthy()).await;
    }

    fn reap(&mut self) {
        let gone = eventually_blocking(Duration::from_secs(5), || self.has_ended());
        assert!(gone, "the broker process is still there");
    }
}

impl Drop for BrokerProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the broker's log:\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(postmaster) = self.postmaster() {
            let _ = kill(postmaster, Signal::SIGQUIT);
            eventually_blocking(Duration::from_secs(10), || self.postmaster().is_none());
        }
    }
}

fn spawn(dir: &Path, address: SocketAddr, database: Option<&str>, variables: &[(&str, &str)]) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join("broker.log")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_regent"));
    if let Some(url) = database {
        command.args(["--database-url", url, "--pool-size", "6", "--claim-pool-size", "3"]);
    }
    command
        .arg("--port")
        .arg(address.port().to_string())
        .arg("--data-dir")
        .arg(dir.join("data"))
        .env_remove("DATABASE_URL")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .expect("the broker binary runs")
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    let here = entries.iter().find(|path| path.file_name().is_some_and(|n| n == name)).cloned();
    here.or_else(|| entries.iter().filter(|path| path.is_dir()).find_map(|path| find(path, name)))
}
