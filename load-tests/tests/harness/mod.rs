//! Runs the binary against the fake broker, or against whatever listens.

#![allow(dead_code)]

pub mod fake_broker;

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

/// What a run left behind.
pub struct Outcome {
    /// Exit code.
    pub code: i32,
    /// The JSON file.
    pub json: Value,
    /// Everything printed.
    pub output: String,
}

impl Outcome {
    /// Kinds of violations of the first run, with their counts.
    pub fn violations(&self) -> Vec<String> {
        let found = self.json["runs"][0]["ledger"]["violations"].as_object();
        found.into_iter().flatten().map(|(kind, _)| kind.clone()).collect()
    }
}

/// Runs `regent-load` with these words, and with a JSON file.
pub async fn regent_load(words: &[&str]) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("figures.json");
    let run = tokio::process::Command::new(env!("CARGO_BIN_EXE_regent-load"))
        .args(words)
        .arg("--json")
        .arg(&file)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), run).await.expect("a run hangs").unwrap();
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        json: serde_json::from_str(&text).unwrap_or_default(),
        output: String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
    }
}
