//! The table at the end, and the JSON file.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::PoisonError;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::args::Common;
use crate::figures::{Counts, Quantiles};
use crate::ledger::Verdict;
use crate::run::Run;
use crate::sample::{Resources, machine};

/// One measured run.
pub struct Report {
    /// Name of the run; variants of one scenario have names of their own.
    pub title: String,
    /// Counted inside the window.
    pub counts: Counts,
    /// What it cost.
    pub resources: Resources,
    /// Latencies inside the window.
    pub latencies: Vec<(&'static str, Quantiles)>,
    /// The ledger's judgement of the whole run.
    pub verdict: Verdict,
    /// Answers that were not a success, by text.
    pub refusals: Value,
    /// Settings of the run.
    pub traffic: Value,
    /// Versions of what took part.
    pub versions: Value,
    /// One entry per progress interval.
    pub series: Vec<Value>,
    /// Figures that only this scenario has.
    pub extra: Map<String, Value>,
}

impl Report {
    /// Puts a run's figures together.
    pub fn new(title: &str, run: &Run, counts: Counts, resources: Resources, verdict: Verdict) -> Self {
        Self {
            title: title.to_owned(),
            counts,
            resources,
            latencies: run.figures.latencies(),
            verdict,
            refusals: json!(*run.refusals.lock().unwrap_or_else(PoisonError::into_inner)),
            traffic: json!(run.traffic),
            versions: Value::Null,
            series: Vec::new(),
            extra: Map::new(),
        }
    }

    /// Messages that "per message" divides by: those that went the whole way.
    pub fn messages(&self) -> u64 {
        if self.counts.acked > 0 { self.counts.acked } else { self.counts.pushed }
    }

    /// CPU microseconds per message.
    pub fn cpu_us_per_message(&self, seconds: Option<f64>) -> Option<f64> {
        let messages = self.messages();
        (messages > 0).then(|| seconds.map(|seconds| seconds * 1e6 / messages as f64))?
    }

    fn per_message(&self, count: Option<i64>) -> Option<f64> {
        let messages = self.messages();
        (messages > 0).then(|| count.map(|count| count as f64 / messages as f64))?
    }

    /// Everything as JSON.
    pub fn json(&self) -> Value {
        let r = &self.resources;
        let rate = |count: u64| count as f64 / r.seconds.max(1e-9);
        json!({
            "title": self.title,
            "rates_per_second": {
                "pushed": rate(self.counts.pushed), "delivered": rate(self.counts.delivered),
                "acked": rate(self.counts.acked), "ack_calls": rate(self.counts.ack_calls),
            },
            "counts": self.counts,
            "latency_us": self.latencies.iter().map(|(name, q)| ((*name).to_owned(), json!(q))).collect::<Map<_, _>>(),
            "resources": r,
            "per_message": {
                "messages": self.messages(),
                "generator_cpu_us": self.cpu_us_per_message(Some(r.own_cpu_seconds)),
                "broker_cpu_us": self.cpu_us_per_message(r.broker_cpu_seconds),
                "postgres_cpu_us": self.cpu_us_per_message(r.postgres_cpu_seconds),
                "commits": self.per_message(r.commits),
                "write_commits": self.per_message(r.write_commits),
                "wal_syncs": self.per_message(r.wal_syncs),
                "wal_bytes": self.per_message(r.wal_bytes),
                "grown_bytes": self.per_message(r.grown_bytes),
            },
            "ledger": self.verdict,
            "refusals": self.refusals,
            "traffic": self.traffic,
            "versions": self.versions,
            "series": self.series,
            "extra": self.extra,
        })
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let r = &self.resources;
        let c = &self.counts;
        let rate = |count: u64| (count as f64 / r.seconds.max(1e-9)).round();
        let _ = writeln!(out, "\n== {} ({:.1} s) ==", self.title, r.seconds);
        let _ = writeln!(
            out,
            "messages/s        pushed {}   delivered {}   acked {}",
            rate(c.pushed),
            rate(c.delivered),
            rate(c.acked)
        );
        let _ = writeln!(
            out,
            "calls/s           push {}   pop {}   pop empty {}   ack {}",
            rate(c.push_calls),
            rate(c.pop_calls),
            rate(c.pop_empty),
            rate(c.ack_calls)
        );
        for (name, q) in &self.latencies {
            let ms = |us: u64| us as f64 / 1e3;
            let _ = writeln!(
                out,
                "{name:<17} p50 {:.2}   p90 {:.2}   p99 {:.2}   p99.9 {:.2}   max {:.2} ms   ({} samples)",
                ms(q.p50_us),
                ms(q.p90_us),
                ms(q.p99_us),
                ms(q.p999_us),
                ms(q.max_us),
                q.count
            );
        }
        self.write_costs(&mut out);
        let _ = writeln!(
            out,
            "retries           connection {}   5xx {}   429 {}   ack items refused {}   late pushes {}",
            c.retries_io, c.retries_5xx, c.retries_429, c.ack_refused, c.late
        );
        for (name, value) in self.extra.iter().filter(|(_, value)| !value.is_object()) {
            let _ = writeln!(out, "{name:<17} {}", plain(value));
        }
        if let Some(refusals) = self.refusals.as_object() {
            for (text, count) in refusals {
                let _ = writeln!(out, "answer            {count} x {text}");
            }
        }
        self.write_verdict(&mut out);
        out
    }

    fn write_costs(&self, out: &mut String) {
        let r = &self.resources;
        let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
        let sum = r.broker_cpu_seconds.zip(r.postgres_cpu_seconds).map(|(broker, postgres)| broker + postgres);
        let _ = writeln!(
            out,
            "CPU us/message    broker {}   postgres {}   both {}   (generator {})",
            number(self.cpu_us_per_message(r.broker_cpu_seconds), 2),
            number(self.cpu_us_per_message(r.postgres_cpu_seconds), 2),
            number(self.cpu_us_per_message(sum), 2),
            number(self.cpu_us_per_message(Some(r.own_cpu_seconds)), 2)
        );
        let _ = writeln!(
            out,
            "CPU seconds       broker {}   postgres {}   generator {:.2}",
            number(r.broker_cpu_seconds, 2),
            number(r.postgres_cpu_seconds, 2),
            r.own_cpu_seconds
        );
        if r.broker_cpu_seconds.is_some_and(|broker| broker < r.own_cpu_seconds && r.own_cpu_seconds > 0.5) {
            let _ = writeln!(out, "                  note: the generator used more CPU than the broker");
        }
        let _ = writeln!(
            out,
            "per message       commits {} (writing {})   WAL syncs {}   WAL bytes {}   table growth {} bytes",
            number(self.per_message(r.commits), 4),
            number(self.per_message(r.write_commits), 4),
            number(self.per_message(r.wal_syncs), 4),
            number(self.per_message(r.wal_bytes), 0),
            number(self.per_message(r.grown_bytes), 0)
        );
        let mib = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1_048_576.0), 1);
        let _ = writeln!(
            out,
            "memory MiB        broker RSS {} (peak {})   postgres PSS {}   tables {}   indexes {}",
            mib(r.broker_rss_bytes),
            mib(r.broker_peak_rss_bytes),
            mib(r.postgres_pss_bytes),
            mib(r.table_bytes.map(|bytes| bytes as u64)),
            mib(r.index_bytes.map(|bytes| bytes as u64))
        );
        let acks =
            r.broker_metrics.iter().filter(|(name, _)| name.starts_with("regent_ack_") && !name.contains("bucket"));
        for (name, value) in acks {
            let _ = writeln!(out, "broker            {name} +{value}");
        }
    }

    fn write_verdict(&self, out: &mut String) {
        let v = &self.verdict;
        let _ = writeln!(
            out,
            "ledger            stored {}   acked {}   without answer {}   redelivered {}   duplicates {}   buffered {}",
            v.stored, v.acked, v.acked_unanswered, v.redelivered, self.counts.duplicates, self.counts.buffered
        );
        if v.holds() {
            let _ = writeln!(out, "                  every promise was kept");
        }
        for (kind, count) in &v.violations {
            let _ = writeln!(out, "VIOLATION         {kind:?}: {count}");
        }
        for note in &v.notes {
            let _ = writeln!(out, "                  {note}");
        }
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.as_f64().map_or(number.to_string(), |v| format!("{}", (v * 1e4).round() / 1e4)),
        other => other.to_string(),
    }
}

/// Writes the JSON file.
pub fn write_json(path: &Path, scenario: &str, common: &Common, settings: Value, reports: &[Report]) -> Result<()> {
    let text = serde_json::to_string_pretty(&json!({
        "tool": "regent-load",
        "version": env!("CARGO_PKG_VERSION"),
        "command": std::env::args().collect::<Vec<_>>(),
        "unix_time": std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        "scenario": scenario,
        "common": common,
        "settings": settings,
        "machine": machine::describe(),
        "holds": reports.iter().all(|report| report.verdict.holds()),
        "runs": reports.iter().map(Report::json).collect::<Vec<_>>(),
    }))?;
    std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
}
