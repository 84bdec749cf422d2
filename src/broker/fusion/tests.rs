#![allow(clippy::unwrap_used, clippy::panic)]

//! What needs no answer from PostgreSQL; the rest is in tests/it/ack_fusion.rs and tests/it/ack_faults.rs.

use std::net::TcpListener;

use uuid::Uuid;

use super::*;
use crate::broker::arbiters::Arbiters;
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};
use crate::store::Store;
use crate::store::advances::PositionalAdvance;

/// Takes the actor down without its supervisor noticing.
#[derive(Message)]
#[rtype(result = "()")]
struct Break;

impl Handler<Break> for FusionActor {
    type Result = ();

    fn handle(&mut self, _: Break, _: &mut Context<Self>) {
        panic!("planted");
    }
}

struct Nobody;

impl ReleaseListener for Nobody {
    fn released(&self, _: PartitionId, _: GroupId, _: Release) {}
}

struct Stand {
    shard: Arc<Shard>,
    arbiters: Arbiters,
    /// Takes connections and never speaks, so that a flush stays in flight until the checkout timeout.
    _silent: TcpListener,
}

fn stand() -> Stand {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = Store::unreachable(silent.local_addr().unwrap().port(), Duration::from_millis(500));
    let meter = Arc::new(AckMeter::new());
    let wait = Duration::from_secs(5);
    let tools = ShardTools {
        flusher: Arc::new(Flusher::new(store, wait, wait, meter.clone())),
        listener: Arc::new(Nobody),
        meter,
        runtime: Handle::current(),
        caps: Caps { rows_max: 10, bytes_max: 1 << 20 },
    };
    let arbiters = Arbiters::start(1).unwrap();
    Stand { shard: Shard::start(arbiters.of(0), 10, tools), arbiters, _silent: silent }
}

impl Stand {
    async fn push(&self, partition: i64, batch_end: i64) -> oneshot::Receiver<Covered> {
        let (reply, answer) = oneshot::channel();
        let advance = PositionalAdvance {
            partition: PartitionId(partition),
            group: GroupId(1),
            worker: LeaseId(Uuid::from_u128(7)),
            committed: Offset(-1),
            batch_end: Offset(batch_end),
        };
        let room = self.shard.room(Duration::ZERO).await.unwrap();
        self.shard.push(Pending { hit: Hit { advance, conflated: None }, reply, room });
        answer
    }
}

async fn outcome(answer: oneshot::Receiver<Covered>) -> Flushed {
    match answer.await.unwrap() {
        Covered::Flushed(_, flushed) => flushed,
        other => panic!("{other:?}"),
    }
}

/// I6: the second is answered by resolution, as if it had come after the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_ack_of_a_lease_in_one_flush_is_refused_unsent() {
    let stand = stand();
    let in_flight = stand.push(1, 5).await;
    while !stand.shard.outlet.is_empty() {
        tokio::task::yield_now().await;
    }
    let (leader, same, further) = (stand.push(2, 5).await, stand.push(2, 5).await, stand.push(2, 9).await);
    assert_eq!(outcome(in_flight).await, Flushed::NoConnection);
    assert_eq!(outcome(leader).await, Flushed::NoConnection);
    assert_eq!(outcome(same).await, Flushed::Refused);
    assert_eq!(outcome(further).await, Flushed::Refused);
    stand.shard.drain().await;
    stand.arbiters.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_whose_actor_died_answers_what_waits_and_what_comes() {
    let stand = stand();
    let before = stand.push(1, 5).await;
    // It dies with a flush in flight, so what comes meanwhile is nobody's.
    stand.shard.actor().as_ref().unwrap().do_send(Break);
    let waiting = stand.push(2, 5).await;
    assert_eq!(outcome(before).await, Flushed::NoConnection);
    assert_eq!(outcome(waiting).await, Flushed::NoConnection);
    assert_eq!(outcome(stand.push(3, 5).await).await, Flushed::NoConnection);
    stand.shard.drain().await;
    stand.arbiters.stop();
}
