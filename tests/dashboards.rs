//! Dashboards, alert rules, runbooks and tables against what the code declares: no database, no Prometheus.
//! `.ci/observability` runs the same files through the real one.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use regent::metrics::{ALL, Kind, LOOPS, ROUTES, STATEMENTS};
use serde_json::Value;

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(directory)).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|found| found == extension));
    files.sort();
    assert!(!files.is_empty(), "no {extension} in {directory}");
    files
}

/// Every metric name in a text, without the suffixes of a histogram's series.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names = words.filter(|word| word.starts_with("regent_") || word.starts_with("queen_"));
    names.map(|name| family(name).to_owned()).collect()
}

fn family(name: &str) -> &str {
    let of_histogram = |stem: &&str| ALL.iter().any(|metric| metric.name == *stem && metric.kind == Kind::Histogram);
    let mut stems = ["_bucket", "_sum", "_count"].iter().filter_map(|suffix| name.strip_suffix(suffix));
    stems.find(of_histogram).unwrap_or(name)
}

fn undeclared(text: &str) -> Vec<String> {
    metrics_in(text).into_iter().filter(|name| !ALL.iter().any(|metric| metric.name == name)).collect()
}

/// The text between each `before` and the next `"`.
fn quoted_after(text: &str, before: &str) -> BTreeSet<String> {
    text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect()
}

struct Panel {
    title: String,
    question: String,
    expressions: Vec<String>,
}

fn panels() -> Vec<Panel> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut panels = Vec::new();
    for path in files("grafana/dashboards", "json") {
        let board: Value = serde_json::from_str(&read(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for panel in board["panels"].as_array().unwrap() {
            panels.push(Panel {
                title: text(&panel["title"]),
                question: text(&panel["description"]),
                expressions: panel["targets"].as_array().unwrap().iter().map(|t| text(&t["expr"])).collect(),
            });
        }
    }
    panels
}

#[test]
fn panels_and_alerts_name_declared_metrics() {
    for panel in panels() {
        assert!(!panel.expressions.is_empty(), "{}", panel.title);
        for expression in &panel.expressions {
            assert!(!metrics_in(expression).is_empty(), "{}: {expression}", panel.title);
            assert_eq!(undeclared(expression), Vec::<String>::new(), "{}: {expression}", panel.title);
        }
    }
    for text in [read("grafana/alerts/regent.rules.yml"), read("docs/operations.md"), read("grafana/README.md")] {
        assert_eq!(undeclared(&text), Vec::<String>::new());
    }
}

#[test]
fn an_undeclared_metric_is_found() {
    assert_eq!(undeclared("rate(regent_invented_total[1m])"), ["regent_invented_total"]);
    assert_eq!(undeclared("regent_push_flush_seconds_bucket + regent_push_flush_seconds_count"), Vec::<String>::new());
    // A counter has no buckets.
    assert_eq!(undeclared("regent_push_segments_total_sum"), ["regent_push_segments_total_sum"]);
}

#[test]
fn uids_are_stable_and_distinct() {
    let boards = files("grafana/dashboards", "json");
    let uids: BTreeSet<String> = boards
        .iter()
        .map(|path| serde_json::from_str::<Value>(&read(path)).unwrap()["uid"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(uids.len(), boards.len());
    for path in &boards {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        assert!(uids.contains(&format!("regent-{stem}")), "the uid of {stem}.json is regent-{stem}");
    }
}

#[test]
fn every_panel_is_explained() {
    let table = read("grafana/README.md");
    for panel in panels() {
        let row = table.lines().find(|line| {
            line.starts_with(&format!("| {} |", panel.title)) && line.ends_with(&format!("| {} |", panel.question))
        });
        let Some(row) = row else { panic!("no row in grafana/README.md for {:?}: {:?}", panel.title, panel.question) };
        assert_eq!(metrics_in(row), metrics_in(&panel.expressions.join(" ")), "{}", panel.title);
    }
}

#[test]
fn every_alert_has_a_runbook() {
    let (rules, runbooks) = (read("grafana/alerts/regent.rules.yml"), read("docs/operations.md"));
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(!alerts.is_empty());
    for (count, alert) in alerts.iter().enumerate() {
        assert!(runbooks.contains(&format!("\n### {alert}\n")), "docs/operations.md: no runbook for {alert}");
        assert!(rules.contains(&format!("runbook: docs/operations.md#{}\n", alert.to_lowercase())), "{alert}");
        assert_eq!(rules.matches("summary: ").count(), alerts.len(), "each of {} has a summary", count + 1);
    }
    for title in runbooks.lines().filter_map(|line| line.strip_prefix("### ")) {
        assert!(alerts.contains(&title), "docs/operations.md: a runbook for no alert: {title}");
    }
}

#[test]
fn the_table_of_metrics_is_right_about_kinds_and_labels() {
    let table = read("docs/metrics.md");
    for metric in ALL {
        let labels: Vec<String> = metric.labels.iter().map(|(key, _)| format!("`{key}`")).collect();
        let kind = format!("{:?}", metric.kind).to_lowercase();
        let start = format!("| `{}` | {kind} | {} |", metric.name, labels.join(", "));
        assert!(table.contains(&start), "docs/metrics.md: no row {start}");
    }
    assert_eq!(undeclared(&rows_of(&table)), Vec::<String>::new());
}

/// The prose above the tables names families that are left out.
fn rows_of(text: &str) -> String {
    text.lines().filter(|line| line.starts_with('|')).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_route_statement_and_loop_has_its_label() {
    let templates: BTreeSet<&str> = regent::http::routes::ROUTES.iter().map(|route| route.path).collect();
    for template in &templates {
        assert!(ROUTES.contains(template), "src/metrics/labels.rs: ROUTES lacks {template}");
    }
    assert_eq!(ROUTES.len(), templates.len() + 1, "src/metrics/labels.rs: ROUTES has a template that is no route");
    for path in files("src/store", "rs") {
        for statement in quoted_after(&read(&path), ".timed(\"") {
            assert!(STATEMENTS.contains(&statement.as_str()), "src/metrics/labels.rs: STATEMENTS lacks {statement:?}");
        }
    }
    for path in ["src/app.rs", "src/app/statistics.rs", "src/broker/peers.rs"] {
        let text = read(path);
        for name in quoted_after(&text, ".spawn(\"").into_iter().chain(quoted_after(&text, "count_pass(\"")) {
            assert!(LOOPS.contains(&name.as_str()), "src/metrics/labels.rs: LOOPS lacks {name:?}");
        }
    }
}

#[test]
fn every_series_exists_from_the_start() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new();
    let histograms = ALL.iter().filter(|metric| metric.kind == Kind::Histogram);
    let recorder = histograms.fold(recorder, |recorder, metric| {
        let name = metrics_exporter_prometheus::Matcher::Full(metric.name.to_owned());
        recorder.set_buckets_for_metric(name, metric.buckets).unwrap()
    });
    let recorder = recorder.build_recorder();
    metrics::with_local_recorder(&recorder, regent::metrics::register);
    let exposition = recorder.handle().render();
    for metric in ALL {
        // Gauges of single queues come with the queues (tests/it/watched_queues.rs).
        if metric.labels.contains(&regent::metrics::PER_QUEUE) {
            assert_eq!((metric.kind, metric.series().len()), (Kind::Gauge, 0), "{}", metric.name);
            continue;
        }
        assert!(exposition.contains(&format!("# HELP {} ", metric.name)), "{}: help", metric.name);
        for labels in metric.series() {
            let mut labels: Vec<_> = labels.iter().map(|l| format!("{}=\"{}\"", l.key(), l.value())).collect();
            if metric.kind == Kind::Histogram {
                labels.push("le=\"+Inf\"".into());
            }
            let suffix = if metric.kind == Kind::Histogram { "_bucket" } else { "" };
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let line = format!("\n{}{suffix}{labels} 0\n", metric.name);
            assert!(exposition.contains(&line), "no line{line}");
        }
    }
}

#[test]
fn every_series_is_declared_once() {
    let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), ALL.len());
    for metric in ALL {
        assert_eq!(metric.kind == Kind::Histogram, !metric.buckets.is_empty(), "{}: buckets", metric.name);
        assert!(metric.buckets.windows(2).all(|pair| pair[0] < pair[1]), "{}: buckets grow", metric.name);
        assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}: name", metric.name);
        let series = metric.series();
        let product: usize = metric.labels.iter().map(|(_, values)| values.len()).product();
        assert_eq!(series.len(), product, "{}", metric.name);
    }
}
