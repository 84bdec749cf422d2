//! What the operating system says about this process, read when somebody asks.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::time::TimeVal;

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Resources that this process uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// CPU time in user mode.
    pub cpu_user: Duration,
    /// CPU time in the kernel.
    pub cpu_system: Duration,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub open_fds: u64,
    /// File descriptors that may be open.
    pub max_fds: u64,
}

/// Notes the start of the process; the first call counts.
pub fn started() {
    LazyLock::force(&STARTED);
}

/// Time since [`started`].
pub fn uptime() -> Duration {
    STARTED.elapsed()
}

/// Raises the soft limit of open files to the hard one: every parked consumer is a connection. Answers the limit then in
/// force.
pub fn raise_open_files() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    if soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(%error, soft, hard, "the limit of open files cannot be raised");
        return soft;
    }
    hard
}

/// Reads what this process uses now. What the system does not tell is 0.
pub fn usage() -> Usage {
    let (cpu_user, cpu_system) = match getrusage(UsageWho::RUSAGE_SELF) {
        Ok(usage) => (duration(usage.user_time()), duration(usage.system_time())),
        Err(_) => (Duration::ZERO, Duration::ZERO),
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    Usage {
        cpu_user,
        cpu_system,
        resident_bytes: resident_bytes(&status),
        open_fds: std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64),
        max_fds: getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft),
    }
}

/// Brings the gauges of the process up to date.
pub fn sample() {
    use crate::metrics as names;
    let usage = usage();
    metrics::gauge!(names::UPTIME).set(uptime().as_secs_f64());
    metrics::gauge!(names::RESIDENT_MEMORY).set(usage.resident_bytes as f64);
    metrics::gauge!(names::CPU, "mode" => "user").set(usage.cpu_user.as_secs_f64());
    metrics::gauge!(names::CPU, "mode" => "system").set(usage.cpu_system.as_secs_f64());
    metrics::gauge!(names::OPEN_FDS).set(usage.open_fds as f64);
    metrics::gauge!(names::MAX_FDS).set(usage.max_fds as f64);
}

fn duration(time: TimeVal) -> Duration {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
}

/// The line `VmRSS:   1234 kB` of `/proc/self/status`.
fn resident_bytes(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|number| number.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_its_line() {
        assert_eq!(resident_bytes("VmPeak:\t 9 kB\nVmRSS:\t    1234 kB\nRssAnon: 7 kB\n"), 1234 * 1024);
        assert_eq!(resident_bytes(""), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_uses_something() {
        let usage = usage();
        assert!(usage.resident_bytes > 100_000 && usage.open_fds > 2 && usage.max_fds >= usage.open_fds, "{usage:?}");
    }
}
