#![allow(clippy::unwrap_used)]

use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::broker::lease::EXPIRY_MARGIN;
use crate::ids::{Offset, TransactionHash};

fn home(bytes_max: usize) -> Arc<Home> {
    Home::new(Arbiters::start(1).unwrap(), Vec::new(), bytes_max, Arc::new(AckMeter::new()))
}

fn ids(count: u128) -> Fingerprint {
    Fingerprint::of((0..count).map(TransactionHash))
}

fn holder(n: u128) -> LeaseId {
    LeaseId(Uuid::from_u128(n))
}

fn grant(partition: i64, worker: u128, expires: Instant) -> LeaseGrant {
    LeaseGrant {
        partition: PartitionId(partition),
        queue: QueueId(1),
        group: GroupId(1),
        group_name: "g".into(),
        worker: holder(worker),
        committed: Offset(-1),
        batch_end: Offset(1),
        expires,
        fingerprint: ids(2),
        conflating: false,
    }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn ask(home: &Home, partition: i64, worker: u128) -> Result<Offset, Miss> {
    match home.cover(PartitionId(partition), "g".into(), holder(worker), ids(2), None)?.await.unwrap() {
        Covered::Miss(miss) => Err(miss),
        Covered::Hit(hit) => Ok(hit.advance.batch_end),
        Covered::Flushed(..) => unreachable!("there are no shards"),
    }
}

/// Waits, without a clock, for what another thread is about to do.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_actor_lives_as_long_as_it_holds_a_lease() {
    let home = home(1 << 20);
    assert_eq!(ask(&home, 1, 1).await, Err(Miss::Unknown));
    home.granted(grant(1, 1, later()));
    assert!(home.knows(PartitionId(1)) && home.actors() == 1);
    assert_eq!(ask(&home, 1, 2).await, Err(Miss::OtherWorker));
    assert_eq!(ask(&home, 1, 1).await, Ok(Offset(1)));
    until(|| home.actors() == 0 && home.bytes.load(Ordering::Relaxed) == 0).await;
    assert_eq!(ask(&home, 1, 1).await, Err(Miss::Unknown));
}

#[tokio::test]
async fn every_grant_is_found_however_often_the_actor_comes_and_goes() {
    let home = home(1 << 20);
    for round in 0..3000 {
        // The previous round's actor may be anywhere between its last answer and its end.
        home.granted(grant(1, round, later()));
        assert_eq!(ask(&home, 1, round).await, Ok(Offset(1)), "round {round}");
    }
    until(|| home.actors() == 0 && home.bytes.load(Ordering::Relaxed) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn grants_and_acks_from_all_sides_lose_nothing_but_speed() {
    let home = home(1 << 20);
    let mut tasks = tokio::task::JoinSet::new();
    for side in 0..4u128 {
        let home = home.clone();
        tasks.spawn(async move {
            let mut found = 0;
            for round in 0..500 {
                let worker = side * 1000 + round;
                home.granted(grant(1, worker, later()));
                // Another side's grant may have replaced it: one lease per (partition, group).
                found += u32::from(ask(&home, 1, worker).await.is_ok());
            }
            found
        });
    }
    let mut found = 0;
    while let Some(count) = tasks.join_next().await {
        found += count.unwrap();
    }
    assert!(found > 100, "only {found} of 2000");
    home.forget_group(GroupId(1));
    until(|| home.actors() == 0 && home.bytes.load(Ordering::Relaxed) == 0).await;
}

#[tokio::test]
async fn an_expired_lease_goes_by_itself_and_an_extended_one_stays() {
    let home = home(1 << 20);
    let past = Instant::now().checked_sub(EXPIRY_MARGIN).unwrap();
    home.granted(grant(1, 1, past));
    home.granted(grant(2, 2, past + Duration::from_millis(300)));
    home.extended(holder(2), &[PartitionId(2), PartitionId(3)], later());
    until(|| !home.knows(PartitionId(1))).await;
    assert_eq!(ask(&home, 2, 2).await, Ok(Offset(1)));
}

#[tokio::test]
async fn what_ended_elsewhere_is_dropped() {
    let home = home(1 << 20);
    home.granted(grant(1, 1, later()));
    home.dropped(PartitionId(1), GroupId(1), Some(holder(9)));
    assert_eq!(ask(&home, 1, 2).await, Err(Miss::OtherWorker), "not that worker's");
    home.dropped(PartitionId(1), GroupId(1), Some(holder(1)));
    assert_eq!(ask(&home, 1, 1).await.unwrap_err(), Miss::Unknown);
    home.granted(grant(2, 1, later()));
    home.granted(grant(3, 1, later()));
    home.forget_queue(QueueId(2));
    home.forget_queue(QueueId(1));
    until(|| home.actors() == 0).await;
}

#[tokio::test]
async fn the_memory_bound_holds_and_is_given_back() {
    let one = ACTOR_BYTES + LEASE_BYTES + 1;
    let home = home(3 * one);
    for partition in 0..10 {
        home.granted(grant(partition, 1, later()));
    }
    assert_eq!(home.actors(), 3);
    assert_eq!(home.bytes.load(Ordering::Relaxed), 3 * one);
    home.forget_group(GroupId(1));
    until(|| home.actors() == 0 && home.bytes.load(Ordering::Relaxed) == 0).await;
    home.granted(grant(7, 1, later()));
    assert_eq!(ask(&home, 7, 1).await, Ok(Offset(1)));
}

#[tokio::test]
async fn a_stopped_system_only_costs_the_fast_path() {
    let home = home(1 << 20);
    home.granted(grant(1, 1, later()));
    assert!(home.knows(PartitionId(1)));
    home.stop();
    assert_eq!(ask(&home, 1, 1).await, Err(Miss::Unknown));
}
