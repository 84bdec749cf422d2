//! How long the rules of a queue keep things, as SQL over a row `q` of `queen.queues` (`spec/admin.md` §8.2).

/// Seconds of each rule's window for a queue row `q`, NULL when the rule is off. A sink hold without a readable pointer is
/// its cap alone, and widens rules 1 and 2.
macro_rules! held {
    ($window:literal) => {
        concat!(
            "CASE WHEN q.retention_enabled AND q.",
            $window,
            " > 0 THEN greatest(q.",
            $window,
            ", CASE WHEN q.retention_sink_hold <> '' THEN q.retention_sink_hold_max_seconds END)::float8 END"
        )
    };
}
macro_rules! retention_seconds {
    () => {
        $crate::store::windows::held!("retention_seconds")
    };
}
macro_rules! completed_seconds {
    () => {
        $crate::store::windows::held!("completed_retention_seconds")
    };
}
macro_rules! max_wait_seconds {
    () => {
        "CASE WHEN q.max_wait_time_seconds > 0 THEN q.max_wait_time_seconds::float8 END"
    };
}
/// When the oldest thing of a kind can become due at the earliest: seconds after it was committed.
macro_rules! window_seconds {
    ($kind:literal) => {
        concat!(
            "CASE ",
            $kind,
            " WHEN 0 THEN least(",
            $crate::store::windows::retention_seconds!(),
            ", ",
            $crate::store::windows::completed_seconds!(),
            ", ",
            $crate::store::windows::max_wait_seconds!(),
            ") ELSE greatest(q.dedup_window_seconds, q.completed_retention_seconds, 900)::float8 END"
        )
    };
}
pub(super) use {completed_seconds, held, max_wait_seconds, retention_seconds, window_seconds};
