//! The machine and the versions that a run's figures belong to.

use std::fs;

use serde_json::{Value, json};

/// What is worth knowing of this machine.
pub fn describe() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split(':').nth(1));
    let memory = read("/proc/meminfo");
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).map(|rest| rest.trim().to_owned());
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": model.map(str::trim),
        "memory": total,
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "hostname": read("/proc/sys/kernel/hostname").trim(),
        "load_average": read("/proc/loadavg").split_ascii_whitespace().next(),
    })
}
