#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

#[tokio::test]
async fn a_panicking_task_is_started_again_and_counted() {
    let shutdown = Shutdown::new();
    let supervisor = Supervisor::new(shutdown.clone());
    let starts = Arc::new(AtomicU32::new(0));
    let (third, reached) = tokio::sync::oneshot::channel();
    let third = Arc::new(Mutex::new(Some(third)));
    let seen = Arc::clone(&starts);
    supervisor.spawn("flaky", move |soft| {
        let start = seen.fetch_add(1, Ordering::SeqCst) + 1;
        let third = Arc::clone(&third);
        async move {
            match start {
                1 => panic!("first"),
                2 => Err("second".to_owned()),
                _ => {
                    let _ = third.lock().unwrap().take().unwrap().send(());
                    soft.cancelled().await;
                    Ok(())
                }
            }
        }
    });
    reached.await.unwrap();
    assert_eq!(supervisor.restarts(), BTreeMap::from([("flaky", 2)]));
    assert_eq!(supervisor.running(), ["flaky"]);
    assert!(supervisor.stop(Duration::from_secs(5)).await.is_empty());
    assert!(supervisor.running().is_empty());
    assert_eq!(starts.load(Ordering::SeqCst), 3);
    assert!(!shutdown.hard().is_cancelled());
}

#[tokio::test]
async fn a_task_that_is_done_stays_done() {
    let supervisor = Supervisor::new(Shutdown::new());
    supervisor.spawn("once", |_| async { Ok::<(), Infallible>(()) });
    supervisor.tasks.close();
    supervisor.tasks.wait().await;
    assert_eq!(supervisor.restarts(), BTreeMap::from([("once", 0)]));
}

#[tokio::test]
async fn a_task_deaf_to_the_soft_stage_is_dropped_and_named() {
    let shutdown = Shutdown::new();
    let supervisor = Supervisor::new(shutdown.clone());
    supervisor.spawn("deaf", |_| std::future::pending::<Result<(), Infallible>>());
    assert_eq!(supervisor.stop(Duration::from_millis(50)).await, ["deaf"]);
    assert!(shutdown.hard().is_cancelled());
}

#[tokio::test]
async fn a_task_that_waits_to_be_restarted_stops_at_once() {
    let shutdown = Shutdown::new();
    let supervisor = Supervisor::new(shutdown.clone());
    let (crashed, seen) = tokio::sync::mpsc::unbounded_channel();
    supervisor.spawn("hopeless", move |_| {
        let _ = crashed.send(());
        async { Err("no luck") }
    });
    let mut seen = seen;
    for _ in 0..3 {
        seen.recv().await.unwrap();
    }
    let before = Instant::now();
    assert!(supervisor.stop(Duration::from_secs(60)).await.is_empty());
    assert!(before.elapsed() < Duration::from_secs(5), "did not wait out the backoff");
}

#[tokio::test]
async fn draining_that_takes_too_long_is_forced() {
    let shutdown = Shutdown::new();
    shutdown.listen_for_signals(50).unwrap();
    shutdown.begin();
    let before = Instant::now();
    shutdown.hard().cancelled().await;
    assert!(before.elapsed() >= Duration::from_millis(50));
}
