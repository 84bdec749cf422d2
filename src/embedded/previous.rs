//! What a crashed previous run left behind.
//!
//! Invariant: a process is signalled only after the system has confirmed that it is a PostgreSQL server whose working
//! directory is our cluster. The caller holds the lock of the data directory, so no live broker owns such a process.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep};

use super::error::{Attempt, EmbeddedError};

/// How long an orderly ("fast") shutdown may take.
const FAST_STOP: Duration = Duration::from_secs(20);
/// How long an immediate one may take.
const IMMEDIATE_STOP: Duration = Duration::from_secs(10);

/// Ends every server process that still works on `cluster`, and takes away a pid file that names a stranger.
pub(super) async fn settle(cluster: &Path) -> Result<(), EmbeddedError> {
    let pid_file = cluster.join("postmaster.pid");
    let postmaster = first_line_pid(&pid_file);
    let running = servers(cluster);
    if !running.is_empty() {
        tracing::warn!(pids = ?running, "stopping the PostgreSQL that a previous run left behind");
        // Without its postmaster a backend ends by itself once it notices; only then is it pushed.
        signal_servers(cluster, Signal::SIGINT, |pid| Some(pid) == postmaster);
        if !gone(cluster, FAST_STOP).await {
            signal_servers(cluster, Signal::SIGQUIT, |_| true);
            if !gone(cluster, IMMEDIATE_STOP).await {
                return Err(EmbeddedError::StillRunning { pids: servers(cluster), path: cluster.to_owned() });
            }
        }
    }
    // PostgreSQL itself clears a pid file whose process is dead, with checks that we must not bypass. It gives up when
    // the number was taken by a stranger since.
    if let Some(pid) = first_line_pid(&pid_file)
        && kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
    {
        tracing::warn!(pid, "postmaster.pid names a process that is no PostgreSQL of ours; removing the file");
        fs::remove_file(&pid_file).attempt("remove", &pid_file)?;
    }
    Ok(())
}

/// The process that a `postmaster.pid` names.
pub(super) fn first_line_pid(pid_file: &Path) -> Option<i32> {
    let text = fs::read_to_string(pid_file).ok()?;
    // Negative for a stand-alone backend; 0 and 1 are never ours.
    text.lines().next()?.trim().parse::<i32>().ok().map(i32::abs).filter(|pid| *pid > 1)
}

fn signal_servers(cluster: &Path, signal: Signal, which: impl Fn(i32) -> bool) {
    for pid in servers(cluster).into_iter().filter(|pid| which(*pid)) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

async fn gone(cluster: &Path, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while !servers(cluster).is_empty() {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(50)).await;
    }
    true
}

/// The server processes (postmaster and backends) that work in `cluster`.
#[cfg(target_os = "linux")]
pub(super) fn servers(cluster: &Path) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok().filter(|pid| *pid > 1))
        .filter(|pid| {
            let process = Path::new("/proc").join(pid.to_string());
            fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == cluster)
                && fs::read(process.join("cmdline")).is_ok_and(|command| is_server(&command) || is_dying(&command))
        })
        .collect()
}

/// The postmasters that were started on `cluster`.
#[cfg(not(target_os = "linux"))]
pub(super) fn servers(cluster: &Path) -> Vec<i32> {
    let Ok(output) = std::process::Command::new("ps").args(["-axo", "pid=,command="]).output() else {
        return Vec::new();
    };
    let start = format!(" -D {} ", cluster.display());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines = text.lines().filter(|line| line.contains("/postgres ") && line.contains(&start));
    lines.filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
}

/// Whether a command line is that of a PostgreSQL server: `/usr/lib/.../postgres -D ...` or `postgres: checkpointer`.
#[cfg(target_os = "linux")]
fn is_server(command: &[u8]) -> bool {
    let first = command.split(|byte| *byte == 0 || *byte == b' ').next().unwrap_or_default();
    let name = first.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    matches!(name.strip_suffix(b":").unwrap_or(name), b"postgres" | b"postmaster")
}

/// A process that is being taken down has no command line any more, but may hold the shared memory for some milliseconds yet: a
/// server started now would find it in use.
#[cfg(target_os = "linux")]
fn is_dying(command: &[u8]) -> bool {
    command.is_empty()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_postgres_counts_as_a_server() {
        assert!(is_server(b"/usr/lib/postgresql/15/bin/postgres\0-D\0/x\0"));
        assert!(is_server(b"postgres: checkpointer \0\0"));
        assert!(!is_server(b"vim\0postgres\0"));
        assert!(!is_server(b""));
    }
}
