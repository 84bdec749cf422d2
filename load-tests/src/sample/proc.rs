//! CPU, memory and sockets of processes, from `/proc`.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::resource::{UsageWho, getrusage};
use nix::time::clock_getcpuclockid;
use nix::unistd::{Pid, SysconfVar, sysconf};

/// CPU seconds that this process has used.
pub fn own_cpu_seconds() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        [usage.user_time(), usage.system_time()].iter().map(|t| t.tv_sec() as f64 + t.tv_usec() as f64 / 1e6).sum()
    })
}

/// The fields of `/proc/PID/stat` that are used here.
struct Stat {
    parent: i32,
    reaped_ticks: u64,
}

fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name stands in parentheses and may contain anything.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    Some(Stat { parent: fields.get(1)?.parse().ok()?, reaped_ticks: number(13)? + number(14)? })
}

/// CPU seconds of one process, without its children: all its threads, those that ended too. By its own clock, which
/// counts nanoseconds: `/proc/PID/stat` counts hundredths of a second, much of what a short window costs.
pub fn cpu_seconds(pid: i32) -> Option<f64> {
    let used = clock_getcpuclockid(Pid::from_raw(pid)).ok()?.now().ok()?;
    Some(used.tv_sec() as f64 + used.tv_nsec() as f64 / 1e9)
}

/// CPU seconds of a postmaster and all backends that it ever had: what a backend used moves to its parent when it
/// ends, so the sum of the living and the reaped misses nothing. Only the latter is as coarse as a tick.
pub fn family_cpu_seconds(postmaster: i32) -> Option<f64> {
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100) as f64;
    let of = |pid: i32| Some(cpu_seconds(pid)? + stat(pid)?.reaped_ticks as f64 / per_second);
    Some(of(postmaster)? + children(postmaster).into_iter().filter_map(of).sum::<f64>())
}

fn children(parent: i32) -> Vec<i32> {
    all_pids().filter(|pid| stat(*pid).is_some_and(|stat| stat.parent == parent)).collect()
}

fn all_pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Resident bytes of one process.
pub fn rss_bytes(pid: i32) -> Option<u64> {
    status_kib(&format!("/proc/{pid}/status"), "VmRSS:")
}

/// Highest resident bytes that one process ever had.
pub fn peak_rss_bytes(pid: i32) -> Option<u64> {
    status_kib(&format!("/proc/{pid}/status"), "VmHWM:")
}

/// Proportional bytes of a postmaster and its children: shared buffers count once.
pub fn family_pss_bytes(postmaster: i32) -> Option<u64> {
    let mut pids = children(postmaster);
    pids.push(postmaster);
    let sum = pids.into_iter().filter_map(|pid| status_kib(&format!("/proc/{pid}/smaps_rollup"), "Pss:")).sum();
    (sum > 0).then_some(sum)
}

fn status_kib(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Command line of a process, for the record.
pub fn command_line(pid: i32) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(String::from_utf8_lossy(&text).replace('\0', " ").trim().to_owned())
}

/// One row of `/proc/net/tcp`.
struct Socket {
    local_port: u16,
    remote_port: u16,
    listening: bool,
    inode: u64,
}

fn sockets() -> Vec<Socket> {
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    [read("/proc/net/tcp"), read("/proc/net/tcp6")]
        .iter()
        .flat_map(|text| text.lines().skip(1))
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            Some(Socket {
                local_port: port(fields.get(1)?)?,
                remote_port: port(fields.get(2)?)?,
                listening: *fields.get(3)? == "0A",
                inode: fields.get(9)?.parse().ok()?,
            })
        })
        .collect()
}

fn inodes_of(pid: i32) -> HashSet<u64> {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let target = fs::read_link(entry.ok()?.path()).ok()?;
            target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect()
}

/// The process that listens on a TCP port of this machine.
pub fn listener_on(port: u16) -> Option<i32> {
    let wanted: HashSet<u64> =
        sockets().into_iter().filter(|s| s.listening && s.local_port == port).map(|socket| socket.inode).collect();
    if wanted.is_empty() {
        return None;
    }
    let mut holders: Vec<i32> = all_pids().filter(|pid| !inodes_of(*pid).is_disjoint(&wanted)).collect();
    // A forked child can share the socket: the oldest process owns it.
    holders.sort_unstable();
    holders.first().copied()
}

/// The postmaster that a broker is connected to over TCP on this machine, or that it started as a child.
pub fn postmaster_of(broker: i32) -> Option<i32> {
    let is_postgres =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "postgres");
    if let Some(child) = children(broker).into_iter().find(is_postgres) {
        return Some(child);
    }
    let mine = inodes_of(broker);
    let ports: HashSet<u16> =
        sockets().into_iter().filter(|s| mine.contains(&s.inode) && !s.listening).map(|s| s.remote_port).collect();
    ports.into_iter().filter_map(listener_on).find(is_postgres)
}

/// The data directory of a PostgreSQL below a broker's own directory, as far as its command line tells that one.
pub fn data_dir_below(broker: i32) -> Option<PathBuf> {
    let command = command_line(broker)?;
    let words: Vec<&str> = command.split(' ').collect();
    let named = words.windows(2).find(|pair| pair[0] == "--data-dir").map(|pair| pair[1]);
    let joined = words.iter().find_map(|word| word.strip_prefix("--data-dir="));
    let home = fs::read_link(format!("/proc/{broker}/cwd")).ok()?;
    find_data_dir(&home.join(named.or(joined).unwrap_or("data")), 1)
}

/// Looks for the data directory of a running server, down to a depth.
pub fn find_data_dir(dir: &Path, depth: usize) -> Option<PathBuf> {
    if read_postmaster_file(dir).is_some() {
        return dir.canonicalize().ok();
    }
    if depth == 0 {
        return None;
    }
    let children = fs::read_dir(dir).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    children.filter(|path| path.is_dir()).find_map(|path| find_data_dir(&path, depth - 1))
}

/// Where a postmaster keeps its data.
pub fn data_dir_of(postmaster: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{postmaster}/cwd")).ok()
}

/// What `postmaster.pid` says.
#[derive(Debug, Clone)]
pub struct PostmasterFile {
    /// Process id.
    pub pid: i32,
    /// TCP port, which also names the socket.
    pub port: u16,
    /// Directory of the Unix socket, when there is one.
    pub socket_dir: Option<String>,
}

/// Reads `postmaster.pid` of a running server.
pub fn read_postmaster_file(data_dir: &Path) -> Option<PostmasterFile> {
    let text = fs::read_to_string(data_dir.join("postmaster.pid")).ok()?;
    let lines: Vec<&str> = text.lines().collect();
    let pid = lines.first()?.trim().parse().ok()?;
    stat(pid)?;
    Some(PostmasterFile {
        pid,
        port: lines.get(3)?.trim().parse().ok()?,
        socket_dir: lines.get(4).map(|dir| dir.trim().to_owned()).filter(|dir| !dir.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn this_process_is_seen() {
        let pid = std::process::id() as i32;
        assert!(cpu_seconds(pid).is_some());
        assert!(rss_bytes(pid).unwrap() > 0);
        assert!(own_cpu_seconds() >= 0.0);
        let own = cpu_seconds(pid).unwrap();
        assert!(family_cpu_seconds(pid).unwrap() >= own);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(listener_on(listener.local_addr().unwrap().port()), Some(pid));
    }
}
