//! The limits and switches that the domain works under. `app.rs` fills them from the configuration.

use std::time::Duration;

use super::ack::AckSettings;
use super::autopilot::AutopilotSettings;
use super::retention::RetentionSettings;
use super::transaction::TransactionSettings;
use super::watched_queues::WatchSettings;

/// Where a named group starts that says nothing itself (`DEFAULT_SUBSCRIPTION_MODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultSubscription {
    /// Messages pushed after the group's first pop.
    New,
    /// The oldest retained message.
    All,
}

/// See the fields.
#[derive(Clone, Debug)]
pub struct BrokerSettings {
    /// Name of this broker among others, for logs.
    pub name: String,
    /// Independent push flushes; a partition always belongs to the same one.
    pub push_shards: usize,
    /// Most groups (request × partition) in one push flush.
    pub push_groups_max: usize,
    /// Most packed bytes in one push flush; a single larger group still goes, alone.
    pub push_bytes_max: usize,
    /// Packed bytes of all pushes that wait or are under way; past it pushes are answered 429.
    pub push_inflight_bytes_max: usize,
    /// Memory for recent transaction ids; 0 reads the window for every push.
    pub dedup_bytes_max: usize,
    /// zstd level of segments.
    pub zstd_level: i32,
    /// Claim statements, and reads of segments, in flight at the same time; each serves every pop that waits.
    pub pop_workers: usize,
    /// Memory for the newest segments, unpacked; 0 reads every segment from PostgreSQL.
    pub segment_cache_bytes_max: usize,
    /// `autoAck` pops that claim at the same time; the others wait.
    pub pop_claims_max: usize,
    /// Pops that may wait for a claim; past it pops are answered 429.
    pub pop_waiting_max: usize,
    /// Parked long polls; past it pops are answered 429.
    pub long_polls_max: usize,
    /// Long-poll deadline of a request that names none.
    pub pop_timeout_default: Duration,
    /// Start of a named group that says nothing.
    pub subscription_default: DefaultSubscription,
    /// The sizes of pops that leave them open.
    pub autopilot: AutopilotSettings,
    /// The ack path.
    pub ack: AckSettings,
    /// Statistics and minute buckets.
    pub statistics: StatisticsSettings,
    /// Queues with metrics of their own.
    pub watch: WatchSettings,
    /// The transaction path.
    pub transaction: TransactionSettings,
    /// Deletion.
    pub retention: RetentionSettings,
    /// AES-256 key of payload encryption.
    pub encryption_key: Option<[u8; 32]>,
}

/// See the fields.
#[derive(Clone, Copy, Debug)]
pub struct StatisticsSettings {
    /// Pause between two cycles of the reconciler.
    pub interval: Duration,
    /// Pause between two passes over segment sizes.
    pub sizes_interval: Duration,
    /// Pause between two writes of the minute buckets.
    pub flush_interval: Duration,
    /// How long minute buckets are kept.
    pub keep: Duration,
    /// Queues with buckets of their own per write.
    pub queues_max: usize,
    /// Distance of `safeTime` when other sessions cannot be seen, milliseconds.
    pub safe_floor_ms: u64,
}

impl Default for StatisticsSettings {
    fn default() -> StatisticsSettings {
        StatisticsSettings {
            interval: Duration::from_secs(10),
            sizes_interval: Duration::from_secs(600),
            flush_interval: Duration::from_secs(60),
            keep: Duration::from_secs(90 * 86_400),
            queues_max: 1_000,
            safe_floor_ms: 30_000,
        }
    }
}

impl Default for BrokerSettings {
    fn default() -> BrokerSettings {
        BrokerSettings {
            name: "regent".into(),
            push_shards: 4,
            push_groups_max: 1024,
            push_bytes_max: 8 << 20,
            push_inflight_bytes_max: 256 << 20,
            dedup_bytes_max: 512 << 20,
            zstd_level: 1,
            pop_workers: 2,
            segment_cache_bytes_max: 64 << 20,
            pop_claims_max: 32,
            pop_waiting_max: 20_000,
            long_polls_max: 200_000,
            pop_timeout_default: Duration::from_secs(30),
            subscription_default: DefaultSubscription::New,
            autopilot: AutopilotSettings::default(),
            ack: AckSettings::default(),
            statistics: StatisticsSettings::default(),
            watch: WatchSettings::default(),
            transaction: TransactionSettings::default(),
            retention: RetentionSettings::default(),
            encryption_key: None,
        }
    }
}
