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

const ONE: usize = ACTOR_BYTES + LEASE_BYTES + 1;

#[tokio::test]
async fn near_the_memory_bound_the_least_recently_used_leases_make_room() {
    let home = home(32 * ONE);
    let filled = |leases: usize| home.actors() == leases && home.bytes.load(Ordering::Relaxed) == leases * ONE;
    for partition in 0..100 {
        home.granted(grant(partition, 1, later()));
        // The headroom is two of 32.
        until(|| filled((partition as usize + 1).min(30))).await;
        if partition >= 10 {
            // Extended all the time: never the least recently used.
            home.extended(holder(1), &[PartitionId(10)], later());
            assert_eq!(ask(&home, 10, 2).await, Err(Miss::OtherWorker), "the extension has been seen");
        }
    }
    let known: Vec<i64> = (0..100).filter(|partition| home.knows(PartitionId(*partition))).collect();
    assert_eq!(known, [10].into_iter().chain(71..100).collect::<Vec<_>>());
    assert_eq!(ask(&home, 99, 1).await, Ok(Offset(1)));
    home.forget_group(GroupId(1));
    until(|| home.actors() == 0 && home.bytes.load(Ordering::Relaxed) == 0).await;
    assert_eq!(home.order().oldest(), None, "the order forgets with the registry");
}

#[tokio::test]
async fn one_group_of_many_on_a_partition_makes_room_alone() {
    let lease = LEASE_BYTES + 2;
    let home = home(ACTOR_BYTES * 2 + 16 * lease);
    // Less the headroom, and the actor that any grant could need.
    let kept = (home.bytes_max - home.bytes_max / HEADROOM - 2 * ACTOR_BYTES) / lease;
    let group = |n: i32| LeaseGrant { group: GroupId(n), group_name: format!("{n:02}").into(), ..grant(1, 1, later()) };
    for n in 0..40 {
        home.granted(group(n));
        let used = ACTOR_BYTES + (n as usize + 1).min(kept) * lease;
        until(|| home.bytes.load(Ordering::Relaxed) == used).await;
    }
    assert_eq!(home.actors(), 1);
    let ask = async |n: i32| {
        let answer = home.cover(PartitionId(1), format!("{n:02}").into(), holder(1), ids(2), None).unwrap();
        matches!(answer.await.unwrap(), Covered::Hit(_))
    };
    assert!(!ask(0).await, "the oldest went");
    assert!(!ask(39 - kept as i32).await && ask(40 - kept as i32).await && ask(39).await, "the newest stayed");
}

#[tokio::test]
async fn the_memory_bound_holds_while_the_actors_stand_still_and_is_given_back() {
    let home = home(32 * ONE);
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    home.arbiters.of(0).spawn(async move {
        let _ = wait.recv();
    });
    for partition in 0..100 {
        home.granted(grant(partition, 1, later()));
        assert!(home.bytes.load(Ordering::Relaxed) <= 32 * ONE);
    }
    assert_eq!(home.actors(), 32, "the rest is not registered");
    go_on.send(()).unwrap();
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
