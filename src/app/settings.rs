//! The configuration in the words of the domain.

use std::time::Duration;

use crate::broker::ack::AckSettings;
use crate::broker::autopilot::{AutopilotMode, AutopilotSettings};
use crate::broker::retention::RetentionSettings;
use crate::broker::settings::{BrokerSettings, DefaultSubscription, StatisticsSettings};
use crate::broker::spool::SpoolSettings;
use crate::broker::sweep_width::Pace;
use crate::broker::transaction::TransactionSettings;
use crate::broker::watched_queues::WatchSettings;
use crate::config::{Config, FusionConfig, PopAutopilot, SubscriptionMode};

/// The limits and switches of the domain, from the configuration.
pub(super) fn broker_settings(config: &Config) -> BrokerSettings {
    BrokerSettings {
        name: config.server_id.clone(),
        push_shards: config.push.fusion_shards,
        push_groups_max: config.push.fusion_queue_max,
        push_bytes_max: config.push.fusion_bytes_max,
        push_inflight_bytes_max: config.limits.request_bytes_max(),
        dedup_bytes_max: if config.push.dedup_cache { config.push.dedup_cache_bytes_max() } else { 0 },
        zstd_level: i32::from(config.push.zstd_level),
        pop_workers: config.pop.pop_workers,
        segment_cache_bytes_max: config.pop.segment_cache_bytes_max(),
        pop_claims_max: config.postgres.claim_pool_size as usize,
        pop_waiting_max: config.limits.requests_waiting_max,
        long_polls_max: config.pop.long_polls_max,
        pop_timeout_default: Duration::from_millis(config.pop.timeout_ms_default),
        subscription_default: match config.pop.subscription_mode_default {
            SubscriptionMode::New => DefaultSubscription::New,
            SubscriptionMode::All => DefaultSubscription::All,
        },
        autopilot: autopilot_settings(config),
        ack: ack_settings(config),
        statistics: statistics_settings(config),
        watch: WatchSettings {
            names: config.statistics.watched_queues.clone(),
            busiest: config.statistics.watched_queues_busiest,
            interval: Duration::from_millis(config.statistics.stats_interval_ms),
        },
        transaction: transaction_settings(config),
        retention: retention_settings(config),
        encryption_key: config.security.encryption_key.as_ref().map(|key| *key.bytes()),
    }
}

fn autopilot_settings(config: &Config) -> AutopilotSettings {
    let set = &config.pop.autopilot;
    AutopilotSettings {
        mode: match set.mode {
            PopAutopilot::On => AutopilotMode::On,
            PopAutopilot::Shadow => AutopilotMode::Shadow,
            PopAutopilot::Off => AutopilotMode::Off,
        },
        batch: i64::from(set.batch),
        pace: Pace {
            target_age: Duration::from_secs_f64(set.target_age_ms / 1e3),
            dwell: Duration::from_millis(set.dwell_ms),
            dwell_pops: set.dwell_pops,
        },
        lanes_max: set.lanes_max,
    }
}

fn statistics_settings(config: &Config) -> StatisticsSettings {
    let set = &config.statistics;
    StatisticsSettings {
        interval: Duration::from_millis(set.stats_interval_ms),
        sizes_interval: Duration::from_millis(set.retained_bytes_interval_ms),
        flush_interval: Duration::from_millis(set.metrics_flush_ms),
        keep: Duration::from_secs(u64::from(set.metrics_retention_days) * 86_400),
        queues_max: set.metrics_queues_max,
        safe_floor_ms: set.safe_floor_ms,
    }
}

fn retention_settings(config: &Config) -> RetentionSettings {
    let set = &config.retention;
    let days = |days: u32| Duration::from_secs(u64::from(days) * 86_400);
    RetentionSettings {
        interval: Duration::from_millis(set.interval_ms),
        batch_size: set.batch_size,
        parallelism: usize::from(set.parallelism),
        due_max: set.due_max(),
        safety_walk: (set.safety_walk_ms > 0).then(|| Duration::from_millis(set.safety_walk_ms)),
        partition_age: set.partition_cleanup.then(|| days(set.partition_cleanup_days)),
        history_days: config.statistics.metrics_retention_days,
    }
}

// Checked at boot as the one, counted in flushes as the other.
const _: () = assert!(FusionConfig::ACK_ROW_BYTES == crate::broker::fusion_batch::ROW_BYTES);

fn ack_settings(config: &Config) -> AckSettings {
    AckSettings {
        registry: config.fusion.ack_registry,
        fusion: config.fusion.ack_fusion,
        serial: config.fusion.ack_serial,
        registry_bytes_max: config.fusion.ack_registry_bytes_max(),
        shards: config.fusion.ack_fusion_shards,
        rows_max: config.fusion.ack_fusion_rows_max,
        bytes_max: config.fusion.ack_fusion_bytes_max,
        queue_rows_max: config.fusion.ack_fusion_queue_max,
        inflight_bytes_max: config.limits.request_bytes_max(),
        checkout_timeout: Duration::from_millis(config.postgres.pool_checkout_timeout_ms),
        // The server cancels before; this is for one that never answers.
        flush_timeout: Duration::from_millis(config.postgres.statement_timeout_ms.saturating_add(5_000)),
        ..AckSettings::default()
    }
}

fn transaction_settings(config: &Config) -> TransactionSettings {
    let fused = config.transaction.fusion;
    TransactionSettings {
        lanes: if fused { config.transaction.lanes } else { TransactionSettings::UNFUSED_LANES },
        bundles_max: if fused { config.transaction.bundles_max } else { 1 },
        bytes_max: config.push.fusion_bytes_max,
        waiting_max: config.limits.requests_waiting_max,
    }
}

/// Where pushes go that the database cannot take.
pub(super) fn spool_settings(config: &Config) -> SpoolSettings {
    let set = &config.spool;
    SpoolSettings {
        dir: set.file_buffer_dir.clone().unwrap_or_else(|| config.data_dir.join("spool")),
        bytes_max: set.mib_max.saturating_mul(1 << 20),
        records_per_file: set.records_per_file,
        encryption_key: config.security.encryption_key.as_ref().map(|key| *key.bytes()),
    }
}
