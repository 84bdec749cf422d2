//! Queue options out of a configure request: defaults, casts, clamps (`spec/push-pop.md` §5).

use serde_json::{Map, Value};
use thiserror::Error;

use super::queue::Queue;
use crate::store::queues::QueueOptions;

/// A refused request. The texts are the wire's.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigureError {
    /// `queue` is missing or no string.
    #[error("queue is required")]
    QueueRequired,
    /// `mode` is neither of the two words; carries what was sent.
    #[error("mode must be \"merge\" or \"replace\", got {0}")]
    Mode(String),
    /// An option's value cannot be stored.
    #[error("{name} {why}")]
    Option {
        /// The option.
        name: &'static str,
        /// Why.
        why: String,
    },
}

/// Whether options that are left out return to their defaults or keep their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Defaults (README ruling 6).
    Replace,
    /// Values the queue has.
    Merge,
}

/// One parsed request.
#[derive(Clone, Debug)]
pub struct ConfigureRequest {
    /// The queue.
    pub queue: String,
    /// Replace or merge.
    pub mode: Mode,
    settings: Map<String, Value>,
}

enum Setting<T> {
    Absent,
    Default,
    Value(T),
}

impl ConfigureRequest {
    /// Reads a request body; every option is checked, so nothing is written when one is wrong.
    pub fn parse(body: Map<String, Value>) -> Result<ConfigureRequest, ConfigureError> {
        let Some(Value::String(queue)) = body.get("queue").cloned() else {
            return Err(ConfigureError::QueueRequired);
        };
        let mode = match body.get("mode") {
            None | Some(Value::Null) => Mode::Replace,
            Some(Value::String(word)) if word == "replace" => Mode::Replace,
            Some(Value::String(word)) if word == "merge" => Mode::Merge,
            Some(Value::String(word)) => return Err(ConfigureError::Mode(word.clone())),
            Some(other) => return Err(ConfigureError::Mode(other.to_string())),
        };
        let labels = ["namespace", "task"].map(|label| match body.get(label) {
            Some(Value::String(text)) if !text.is_empty() => Some((label.to_owned(), Value::String(text.clone()))),
            _ => None,
        });
        let mut settings = match body.get("options") {
            None | Some(Value::Null) => body.into_iter().filter(|(key, _)| key != "queue" && key != "mode").collect(),
            Some(Value::Object(options)) => options.clone(),
            Some(_) => return Err(invalid("options", "must be an object")),
        };
        // At the top level only a non-empty string counts, and it wins.
        settings.extend(labels.into_iter().flatten());
        let request = ConfigureRequest { queue, mode, settings };
        request.apply(None)?;
        Ok(request)
    }

    /// The options that the queue gets, given those it has.
    pub fn apply(&self, present: Option<QueueOptions>) -> Result<QueueOptions, ConfigureError> {
        let defaults = QueueOptions::default();
        let mut o = match (self.mode, present) {
            (Mode::Merge, Some(present)) => present,
            _ => defaults.clone(),
        };
        self.text("namespace", &defaults.namespace, &mut o.namespace)?;
        self.text("task", &defaults.task, &mut o.task)?;
        self.integer("leaseTime", defaults.lease_time, &mut o.lease_time)?;
        self.integer("retryLimit", defaults.retry_limit, &mut o.retry_limit)?;
        self.integer("retryDelay", defaults.retry_delay, &mut o.retry_delay)?;
        self.boolean("deadLetterQueue", defaults.dead_letter_queue, &mut o.dead_letter_queue)?;
        self.boolean("dlqAfterMaxRetries", defaults.dlq_after_max_retries, &mut o.dlq_after_max_retries)?;
        self.integer("delayedProcessing", defaults.delayed_processing, &mut o.delayed_processing)?;
        self.integer("windowBuffer", defaults.window_buffer, &mut o.window_buffer)?;
        self.integer("minPopWaitTime", defaults.min_pop_wait_time, &mut o.min_pop_wait_time)?;
        self.boolean("retentionEnabled", defaults.retention_enabled, &mut o.retention_enabled)?;
        self.integer("retentionSeconds", defaults.retention_seconds, &mut o.retention_seconds)?;
        self.integer(
            "completedRetentionSeconds",
            defaults.completed_retention_seconds,
            &mut o.completed_retention_seconds,
        )?;
        self.integer("maxWaitTimeSeconds", defaults.max_wait_time_seconds, &mut o.max_wait_time_seconds)?;
        self.boolean("encryptionEnabled", defaults.encryption_enabled, &mut o.encryption_enabled)?;
        self.integer("dedupWindowSeconds", defaults.dedup_window_seconds, &mut o.dedup_window_seconds)?;
        self.text("retentionSinkHold", &defaults.retention_sink_hold, &mut o.retention_sink_hold)?;
        self.integer(
            "retentionSinkHoldMaxSeconds",
            defaults.retention_sink_hold_max_seconds,
            &mut o.retention_sink_hold_max_seconds,
        )?;
        self.integer("priority", defaults.priority, &mut o.priority)?;
        self.integer("ttl", defaults.ttl, &mut o.ttl)?;
        self.integer("maxSize", defaults.max_size, &mut o.max_size)?;
        o.min_pop_wait_time = o.min_pop_wait_time.clamp(0, 60_000);
        o.dedup_window_seconds = o.dedup_window_seconds.max(0);
        let hold = &o.retention_sink_hold;
        if hold.len() > 64 || !hold.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
            return Err(invalid("retentionSinkHold", "must match [A-Za-z0-9._-]{0,64}"));
        }
        if !(60..=31_536_000).contains(&o.retention_sink_hold_max_seconds) {
            return Err(invalid("retentionSinkHoldMaxSeconds", "must be 60 to 31536000"));
        }
        Ok(o)
    }

    fn setting<T>(
        &self,
        name: &'static str,
        read: impl Fn(&Value) -> Option<T>,
        expected: &str,
    ) -> Result<Setting<T>, ConfigureError> {
        match self.settings.get(name) {
            None => Ok(Setting::Absent),
            Some(Value::Null) => Ok(Setting::Default),
            Some(value) => match read(value) {
                Some(value) => Ok(Setting::Value(value)),
                None => Err(invalid(name, &format!("must be {expected}, got {value}"))),
            },
        }
    }

    fn integer(&self, name: &'static str, default: i32, slot: &mut i32) -> Result<(), ConfigureError> {
        let read = |value: &Value| match value {
            Value::Number(n) => n.as_i64().and_then(|n| i32::try_from(n).ok()),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        put(self.setting(name, read, "a 32-bit integer")?, default, slot);
        Ok(())
    }

    fn boolean(&self, name: &'static str, default: bool, slot: &mut bool) -> Result<(), ConfigureError> {
        let read = |value: &Value| match value {
            Value::Bool(b) => Some(*b),
            Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
                "true" | "t" | "yes" | "on" | "1" => Some(true),
                "false" | "f" | "no" | "off" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        };
        put(self.setting(name, read, "a boolean")?, default, slot);
        Ok(())
    }

    fn text(&self, name: &'static str, default: &str, slot: &mut String) -> Result<(), ConfigureError> {
        let read = |value: &Value| match value {
            Value::String(text) if !text.contains('\0') && text.len() <= crate::ids::NAME_BYTES_MAX => {
                Some(text.clone())
            }
            _ => None,
        };
        put(self.setting(name, read, "a string of at most 1024 bytes without NUL")?, default.to_owned(), slot);
        Ok(())
    }
}

fn put<T>(setting: Setting<T>, default: T, slot: &mut T) {
    match setting {
        Setting::Absent => {}
        Setting::Default => *slot = default,
        Setting::Value(value) => *slot = value,
    }
}

fn invalid(name: &'static str, why: &str) -> ConfigureError {
    ConfigureError::Option { name, why: why.to_owned() }
}

/// The stored options as the answer echoes them: 19 keys, without the labels.
pub fn echo(queue: &Queue) -> Map<String, Value> {
    let o = &queue.options;
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| {
        map.insert(key.to_owned(), value);
    };
    put("leaseTime", o.lease_time.into());
    put("retryLimit", o.retry_limit.into());
    put("deadLetterQueue", o.dead_letter_queue.into());
    put("dlqAfterMaxRetries", o.dlq_after_max_retries.into());
    put("delayedProcessing", o.delayed_processing.into());
    put("windowBuffer", o.window_buffer.into());
    put("minPopWaitTime", o.min_pop_wait_time.into());
    put("retentionEnabled", o.retention_enabled.into());
    put("retentionSeconds", o.retention_seconds.into());
    put("completedRetentionSeconds", o.completed_retention_seconds.into());
    put("maxWaitTimeSeconds", o.max_wait_time_seconds.into());
    put("encryptionEnabled", o.encryption_enabled.into());
    put("dedupWindowSeconds", o.dedup_window_seconds.into());
    put("retentionSinkHold", o.retention_sink_hold.clone().into());
    put("retentionSinkHoldMaxSeconds", o.retention_sink_hold_max_seconds.into());
    put("priority", o.priority.into());
    put("ttl", o.ttl.into());
    put("maxSize", o.max_size.into());
    put("retryDelay", o.retry_delay.into());
    map
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<ConfigureRequest, ConfigureError> {
        let Value::Object(map) = body else { panic!("an object") };
        ConfigureRequest::parse(map)
    }

    #[test]
    fn what_is_left_out_returns_to_its_default_or_stays() {
        let present = QueueOptions { dedup_window_seconds: 0, lease_time: 60, ..QueueOptions::default() };
        let replace = parse(json!({"queue": "q", "options": {"retryLimit": 9}})).unwrap();
        let o = replace.apply(Some(present.clone())).unwrap();
        assert_eq!((o.retry_limit, o.dedup_window_seconds, o.lease_time), (9, 3600, 300));
        let merge =
            parse(json!({"queue": "q", "mode": "merge", "options": {"retryLimit": "9", "leaseTime": null}})).unwrap();
        let o = merge.apply(Some(present)).unwrap();
        assert_eq!((o.retry_limit, o.dedup_window_seconds, o.lease_time), (9, 0, 300));
    }

    #[test]
    fn values_are_cast_clamped_or_refused_by_name() {
        let o = parse(json!({"queue": "", "minPopWaitTime": 90000, "deadLetterQueue": "false", "namespace": "n"}));
        let o = o.unwrap().apply(None).unwrap();
        assert_eq!((o.min_pop_wait_time, o.dead_letter_queue, o.namespace.as_str()), (60_000, false, "n"));
        for bad in [json!(1.5), json!("1e3"), json!(4_000_000_000_i64), json!([]), json!(true)] {
            let error = parse(json!({"queue": "q", "options": {"leaseTime": bad}})).unwrap_err();
            assert!(matches!(error, ConfigureError::Option { name: "leaseTime", .. }), "{error:?}");
        }
        assert_eq!(parse(json!({"options": {}})).unwrap_err(), ConfigureError::QueueRequired);
        assert_eq!(parse(json!({"queue": "q", "mode": "x"})).unwrap_err(), ConfigureError::Mode("x".into()));
    }

    #[test]
    fn labels_at_the_top_win_unless_they_are_empty() {
        let o =
            parse(json!({"queue": "q", "namespace": "top", "task": null, "options": {"namespace": "in", "task": "t"}}));
        let o = o.unwrap().apply(None).unwrap();
        assert_eq!((o.namespace.as_str(), o.task.as_str()), ("top", "t"));
    }
}
