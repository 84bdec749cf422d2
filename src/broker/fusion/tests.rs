//! Flushes end to end are tested with the ack path (`ack/tests/faults.rs`); here is what needs the shard alone.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::*;
use crate::broker::ack::tests::fake::{FakeStore, Options};
use crate::broker::ack::tests::worker;
use crate::broker::arbiters::Arbiters;
use crate::ids::{GroupId, Offset, PartitionId};
use crate::store::acks::PositionalAdvance;

struct Stand {
    store: Arc<FakeStore>,
    arbiters: Arbiters,
    shard: Arc<Shard>,
}

fn stand(rows_max: usize, queue: usize) -> Stand {
    let store = Arc::new(FakeStore::new(None));
    let meter = Arc::new(AckMeter::new());
    let seconds = Duration::from_secs(2);
    let tools = ShardTools {
        flusher: Arc::new(Flusher::new(store.clone(), seconds, seconds, meter.clone())),
        listener: Arc::new(|_: PartitionId, _: GroupId, _: Release| {}),
        meter,
        runtime: Handle::current(),
        caps: Caps { rows_max, bytes_max: 1 << 20 },
    };
    let arbiters = Arbiters::start(1).unwrap();
    let shard = Shard::start(arbiters.of(0), queue, tools);
    Stand { store, arbiters, shard }
}

impl Stand {
    /// Leases a one-message partition and pushes its advance.
    async fn push(&self, partition: i64) -> oneshot::Receiver<Covered> {
        self.store.create(partition, Options { retry_limit: 0, retry_delay_ms: 0, dead_letters: true });
        self.store.push(partition, vec!["m".into()]);
        self.store.claim(partition, 1, worker(1), 1, 1000).unwrap();
        self.push_again(partition).await
    }

    async fn push_again(&self, partition: i64) -> oneshot::Receiver<Covered> {
        let room = self.shard.room(Duration::from_secs(5)).await.unwrap();
        let (reply, answer) = oneshot::channel();
        let advance = PositionalAdvance {
            partition: PartitionId(partition),
            group: GroupId(1),
            worker: worker(1),
            committed: Offset(-1),
            batch_end: Offset(0),
        };
        self.shard.push(Pending { hit: Hit { advance, conflated: None }, reply, room });
        answer
    }
}

fn outcome(covered: Covered) -> Flushed {
    match covered {
        Covered::Flushed(_, flushed) => flushed,
        other => unreachable!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_flush_is_larger_than_its_cap_and_none_overlap() {
    let stand = stand(4, 64);
    let gate = stand.store.gate.lock().await;
    let mut answers = Vec::new();
    for partition in 0..30 {
        answers.push(stand.push(partition).await);
    }
    assert!(stand.store.world().advances.is_empty());
    drop(gate);
    for answer in answers {
        assert_eq!(outcome(answer.await.unwrap()), Flushed::Committed);
    }
    let flushes = stand.store.world().advances.clone();
    assert!(flushes.iter().all(|rows| *rows <= 4), "{flushes:?}");
    assert_eq!(flushes.iter().sum::<usize>(), 30);
    assert!(flushes.len() <= 9, "{flushes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folded_advance_is_refused_so_that_resolution_answers_it() {
    let stand = stand(100, 64);
    let gate = stand.store.gate.lock().await;
    let held = stand.push(1).await;
    // The first one is in flight by now or soon; these two may share a flush behind it or not: one lands in any case.
    let (leader, follower) = (stand.push(2).await, stand.push_again(2).await);
    drop(gate);
    assert_eq!(outcome(held.await.unwrap()), Flushed::Committed);
    assert_eq!(outcome(leader.await.unwrap()), Flushed::Committed);
    assert_eq!(outcome(follower.await.unwrap()), Flushed::Refused);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_shard_has_no_room_until_it_answers() {
    let stand = stand(100, 2);
    let gate = stand.store.gate.lock().await;
    let answers = [stand.push(1).await, stand.push(2).await];
    assert!(stand.shard.room(Duration::ZERO).await.is_none());
    drop(gate);
    for answer in answers {
        assert_eq!(outcome(answer.await.unwrap()), Flushed::Committed);
    }
    assert!(stand.shard.room(Duration::from_secs(5)).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_waits_for_what_is_in_and_then_refuses() {
    let stand = stand(100, 8);
    let answer = stand.push(1).await;
    stand.shard.drain().await;
    assert_eq!(outcome(answer.await.unwrap()), Flushed::Committed);
    assert!(stand.shard.room(Duration::from_secs(5)).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_actor_is_replaced() {
    let stand = stand(100, 8);
    // Its address goes nowhere, as after a panic.
    let (gone, _) = actix::dev::channel::channel(1);
    *stand.shard.actor() = Some(Addr::new(gone));
    let answer = stand.push(1).await;
    assert_eq!(outcome(answer.await.unwrap()), Flushed::Committed);
    stand.arbiters.stop();
}
