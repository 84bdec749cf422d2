//! Switches and bounds of the ack path. `app.rs` fills them from the configuration.

use std::time::Duration;

/// See the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AckSettings {
    /// Remember granted leases, so that the ack of a whole batch needs no resolution.
    pub registry: bool,
    /// Commit the acks of many requests together.
    pub fusion: bool,
    /// One group at a time, by full resolution, without registry and fusion: the oracle of the differential tests and
    /// the baseline of the benchmarks.
    pub serial: bool,
    /// Memory of the registry.
    pub registry_bytes_max: usize,
    /// Independent flushes; a partition always belongs to the same one.
    pub shards: usize,
    /// Threads that the actors share.
    pub threads: usize,
    /// Most cursor rows in one flush.
    pub rows_max: usize,
    /// Most parameter bytes in one flush.
    pub bytes_max: usize,
    /// Advances that one shard holds; past it callers wait, up to `checkout_timeout`.
    pub queue_rows_max: usize,
    /// Memory of the calls under way; past it their items answer `pool`.
    pub inflight_bytes_max: usize,
    /// Longest wait for a place or a turn; then the items answer `pool`.
    pub checkout_timeout: Duration,
    /// Longest wait for the answer to a flush.
    pub flush_timeout: Duration,
    /// Longest search for the outcome of a commit whose answer was lost.
    pub lookup_timeout: Duration,
}

impl Default for AckSettings {
    fn default() -> AckSettings {
        AckSettings {
            registry: true,
            fusion: true,
            serial: false,
            registry_bytes_max: 64 << 20,
            shards: std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2).min(8)),
            threads: std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(4)),
            rows_max: 1000,
            bytes_max: 1 << 20,
            queue_rows_max: 8192,
            inflight_bytes_max: 256 << 20,
            checkout_timeout: Duration::from_secs(5),
            flush_timeout: Duration::from_secs(40),
            lookup_timeout: Duration::from_secs(2),
        }
    }
}
