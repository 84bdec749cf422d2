//! Settings of the embedded server.
//!
//! They are written to `regent.conf` in the cluster at every start. An operator's own go to `operator.conf` beside it,
//! which is read later and so wins; what durability rests on is on the command line, which wins over both.

use std::fs;

/// On the command line: no configuration file may switch these off.
pub(super) const DURABLE: [&str; 3] = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];

const MIB: u64 = 1024 * 1024;

/// The text of `regent.conf`.
pub(super) fn text(connections_max: u32, wal_compression: &str) -> String {
    let memory = memory_bytes().unwrap_or(1024 * MIB);
    // The broker and the page cache live on the same machine.
    let shared_buffers_mib = (memory / 6 / MIB).clamp(64, 4096);
    let cache_mib = (memory / 2 / MIB).max(256);
    let maintenance_mib = (memory / 64 / MIB).clamp(32, 256);
    // Room beside the pools for operators, for a second broker's boot, and for the reserved superuser slots.
    let connections = connections_max.saturating_add(20);
    format!(
        "\
# Written by regent at every start; edits are lost. Put your own settings into operator.conf beside this file.
max_connections = {connections}
shared_buffers = {shared_buffers_mib}MB
effective_cache_size = {cache_mib}MB
work_mem = 8MB
maintenance_work_mem = {maintenance_mib}MB
password_encryption = scram-sha-256
timezone = 'UTC'
log_timezone = 'UTC'

# The log is append-mostly and hot rows are rewritten all the time: fewer, longer checkpoints save full page images.
wal_compression = {wal_compression}
min_wal_size = 256MB
max_wal_size = 4GB
checkpoint_timeout = 15min
checkpoint_completion_target = 0.9

# Short statements of known shape: planning for parallelism or compiling costs more than it saves.
jit = off
max_parallel_workers_per_gather = 0
random_page_cost = 1.1
effective_io_concurrency = 64

# Tables with hot rows are vacuumed by threshold (set per table); the launcher must look often enough.
# What a million first claims leave behind is room for the next thousand only once a vacuum has said so.
autovacuum = on
autovacuum_naptime = 4s
autovacuum_vacuum_cost_limit = 2000
track_io_timing = on

log_destination = stderr
logging_collector = off
log_line_prefix = '%m [%p] %q%u@%d '
log_checkpoints = on
log_lock_waits = on
"
    )
}

/// Memory of this machine or of the container that confines us, whichever is smaller.
fn memory_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_total_bytes(&text));
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    machine.into_iter().chain(limits.into_iter().filter_map(number)).min()
}

fn meminfo_total_bytes(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(meminfo_total_bytes("MemTotal:       24684304 kB\nMemFree: 1 kB\n"), Some(24_684_304 * 1024));
        assert_eq!(meminfo_total_bytes("nothing"), None);
    }

    #[test]
    fn connections_follow_the_pools_and_nothing_weakens_durability() {
        let text = text(34, "on");
        assert!(text.contains("max_connections = 54\n"), "{text}");
        for name in ["fsync", "full_page_writes", "synchronous_commit"] {
            assert!(!text.contains(name));
        }
    }
}
