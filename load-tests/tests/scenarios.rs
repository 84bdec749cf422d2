//! Every scenario runs from start to end, small, against the fake broker.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod harness;

use harness::fake_broker::{Fault, Trouble, start};
use harness::{Outcome, regent_load};

async fn run(words: &[&str]) -> Outcome {
    let url = start(0, Fault::None, Trouble::default()).await;
    let mut words = words.to_vec();
    words.extend_from_slice(&["--url", &url, "--warmup", "0.1", "--drain-timeout", "20"]);
    if !words.contains(&"--duration") {
        words.extend_from_slice(&["--duration", "0.5"]);
    }
    let outcome = regent_load(&words).await;
    assert_eq!(outcome.code, 0, "{}", outcome.output);
    outcome
}

fn count(outcome: &Outcome, name: &str) -> u64 {
    outcome.json["runs"][0]["counts"][name].as_u64().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn dense() {
    let outcome =
        run(&["dense", "--partitions", "20", "--producers", "2", "--consumers", "2", "--backlog", "2000"]).await;
    assert!(count(&outcome, "acked") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_loop_keeps_its_rate() {
    let outcome = run(&["ordinary", "--partitions", "20", "--rate", "400", "--duration", "2"]).await;
    let rate = outcome.json["runs"][0]["rates_per_second"]["pushed"].as_f64().unwrap();
    assert!((200.0..600.0).contains(&rate), "{rate}");
}

#[tokio::test(flavor = "multi_thread")]
async fn thin_parked() {
    let outcome = run(&["thin", "--partitions", "30", "--producers", "4"]).await;
    assert!(count(&outcome, "acked") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn thin_by_discovery() {
    let outcome =
        run(&["thin", "--consume", "discovery", "--partitions", "30", "--producers", "4", "--consumers", "4"]).await;
    assert!(count(&outcome, "acked") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn parked() {
    let outcome = run(&["parked", "--waiting", "60"]).await;
    assert_eq!(outcome.json["runs"][0]["extra"]["waiting_consumers"], 60);
    assert!(count(&outcome, "delivered") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn fanout() {
    let outcome = run(&["fanout", "--groups", "3", "--partitions", "10", "--producers", "2", "--backlog", "500"]).await;
    let ledger = &outcome.json["runs"][0]["ledger"];
    assert_eq!(ledger["stored"].as_u64().unwrap() * 3, ledger["acked"].as_u64().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn relay() {
    let outcome = run(&["relay", "--partitions", "10", "--producers", "2", "--backlog", "500"]).await;
    assert!(count(&outcome, "forwarded") > 0);
    assert!(outcome.json["runs"][0]["extra"]["end_acked_total"].as_u64().unwrap() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn million_in_small() {
    for pattern in ["rotating", "scattered"] {
        let outcome = run(&[
            "million",
            "--partitions",
            "2000",
            "--active",
            "100",
            "--pattern",
            pattern,
            "--idle",
            "0.1",
            "--settle",
            "0",
            "--producers",
            "4",
            "--consumers",
            "4",
            "--backlog",
            "500",
        ])
        .await;
        let extra = &outcome.json["runs"][0]["extra"];
        assert!(extra["created_per_second"].as_f64().unwrap() > 0.0, "{extra:#}");
        assert!(extra["first_contact_of_a_group_ms"].as_f64().is_some(), "{extra:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acks_of_every_kind() {
    for mode in ["--lone", "--partial"] {
        let outcome = run(&["ack", mode, "--messages", "2000", "--consumers", "4"]).await;
        let expected = "--partial" == mode;
        assert_eq!(count(&outcome, "acked"), 2_000, "{mode}: {}", outcome.output);
        assert_eq!(outcome.json["runs"][0]["latency_us"]["ack_single"].is_object(), expected, "{mode}");
    }
    let outcome = run(&["ack", "--messages", "2000", "--retained", "3000", "--consumers", "4"]).await;
    assert_eq!(outcome.json["runs"][0]["ledger"]["stored"], 5_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn waves_of_acks_measure_nothing_but_acks() {
    let outcome = run(&["ack", "--claim-first", "--waves", "3", "--messages", "2000", "--consumers", "4"]).await;
    assert_eq!(count(&outcome, "acked"), 6_000, "{}", outcome.output);
    assert_eq!(count(&outcome, "ack_calls"), 600);
    for not_measured in ["pushed", "push_calls", "delivered", "pop_calls", "pop_empty"] {
        assert_eq!(count(&outcome, not_measured), 0, "{not_measured}");
    }
    let run = &outcome.json["runs"][0];
    assert_eq!(run["latency_us"]["ack"]["count"], 600);
    assert!(run["latency_us"]["pop"].is_null() && run["resources"]["seconds"].as_f64().unwrap() > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_memory_compares_once_and_twice_as_many_leases() {
    let outcome = run(&["ack", "--lease-memory", "--messages", "4000", "--consumers", "4"]).await;
    let extra = &outcome.json["runs"][0]["extra"];
    let (first, last) = (extra["leases_first"].as_i64().unwrap(), extra["leases_last"].as_i64().unwrap());
    // Consumers on their way when the first half is complete bring one more each.
    assert!((200..=204).contains(&first) && last == 400, "{}", outcome.output);
    assert!(extra["bytes_per_lease"].is_number());
}

#[tokio::test(flavor = "multi_thread")]
async fn soak_reports_intervals() {
    let outcome = run(&["soak", "--of", "ordinary", "--duration", "2.5", "--every", "1", "--partitions", "10"]).await;
    assert!(!outcome.json["runs"][0]["series"].as_array().unwrap().is_empty(), "{}", outcome.output);
}

/// Not a test: the fake broker as a process of its own, for the tests below. It ends when it is killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by other tests"]
async fn fake_broker_process() {
    let Some(port) = std::env::args().find_map(|word| word.strip_prefix("port=")?.parse().ok()) else { return };
    start(port, Fault::None, Trouble::default()).await;
    std::future::pending::<()>().await;
}

fn fake_broker_command() -> String {
    let program = std::env::current_exe().unwrap();
    format!("{} --ignored --exact fake_broker_process port={{port}}", program.display())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_forgets_when_it_is_killed_is_caught() {
    let command = fake_broker_command();
    let outcome = regent_load(&[
        "chaos",
        "--broker-cmd",
        &command,
        "--duration",
        "3",
        "--warmup",
        "0.2",
        "--kill-every",
        "1",
        "--partitions",
        "10",
        "--lease-seconds",
        "1",
        "--drain-timeout",
        "15",
    ])
    .await;
    assert_eq!(outcome.code, 1, "{}", outcome.output);
    assert!(outcome.json["runs"][0]["extra"]["broker_kills"].as_u64().unwrap() > 0, "{}", outcome.output);
}

#[tokio::test(flavor = "multi_thread")]
async fn switches_are_compared_in_alternation() {
    let command = fake_broker_command();
    let outcome =
        regent_load(&["ack", "--broker-cmd", &command, "--rounds", "2", "--messages", "1000", "--consumers", "4"])
            .await;
    assert_eq!(outcome.code, 0, "{}", outcome.output);
    let titles: Vec<&str> =
        outcome.json["runs"].as_array().unwrap().iter().map(|run| run["title"].as_str().unwrap()).collect();
    let (first, second) = titles.split_at(4);
    assert_eq!(first, ["fused", "fusion off", "both off", "one at a time"]);
    assert_eq!(second, ["fusion off", "both off", "one at a time", "fused"]);
    assert!(outcome.output.contains("comparison"), "{}", outcome.output);
}
