//! Faults and races of the ack path.

use super::fake::{Fault, Options};
use super::*;
use crate::broker::ack_decision::Signal;

const OPTIONS: Options = Options { retry_limit: 3, retry_delay_ms: 0, dead_letters: true };

struct Bench {
    store: Arc<FakeStore>,
    broker: AckPipeline,
    heard: Heard,
}

impl Bench {
    fn new(settings: AckSettings) -> Bench {
        let store = Arc::new(FakeStore::new(None));
        let (broker, heard) = pipeline(&store, settings);
        Bench { store, broker, heard }
    }

    /// A partition of `count` messages, all of them leased by its own worker and registered.
    fn leased(&self, partition: i64, count: usize) -> Vec<AckItem> {
        self.store.create(partition, OPTIONS);
        self.store.push(partition, (0..count).map(|n| format!("{partition}-{n}")).collect());
        let holder = worker(partition as u128 + 1);
        let claim = self.store.claim(partition, 1, holder, 100, 1000).unwrap();
        self.broker.granted(grant(partition, "g1", holder, &claim));
        let done = |id: &String| item(partition, id, LeaseClaim::Id(holder), AckStatus::Completed);
        claim.2.iter().map(done).collect()
    }

    async fn ack(&self, items: &[AckItem]) -> Vec<Result<Acked, AckError>> {
        self.broker.ack("g1", items.to_vec()).await.into_iter().map(|answer| answer.outcome).collect()
    }

    fn fault(&self, faults: &[Fault]) {
        self.store.faults.lock().unwrap().extend(faults);
    }

    fn committed(&self, partition: i64) -> i64 {
        self.store.world().rows[&(partition, 1)].committed
    }
}

const DONE: Result<Acked, AckError> = Ok(Acked::Done { dlq: false });

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_ack_is_one_statement_and_is_heard_of() {
    for settings in [fused(), positional()] {
        let bench = Bench::new(settings);
        let items = bench.leased(1, 3);
        let answers = bench.broker.ack("g1", items).await;
        assert!(answers.iter().all(|a| a.outcome == DONE && a.lease_released), "{answers:?}");
        assert_eq!((bench.committed(1), bench.store.world().reads), (2, 0));
        assert_eq!(*bench.heard.lock().unwrap(), [(1, 1, Release::Finished)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_flush_is_in_flight_the_next_one_gathers() {
    let bench = Bench::new(AckSettings { shards: 1, ..fused() });
    let batches: Vec<_> = (0..9).map(|p| bench.leased(p, 2)).collect();
    let gate = bench.store.gate.lock().await;
    let mut acks = tokio::task::JoinSet::new();
    for items in batches {
        let broker = bench.broker.clone();
        acks.spawn(async move { broker.ack("g1", items).await });
    }
    // All but the first wait in the shard now, or will; nothing is answered before the gate opens.
    let all_in = async {
        while bench.broker.inner.home.as_ref().unwrap().actors() > 0 {
            tokio::task::yield_now().await;
        }
    };
    all_in.await;
    drop(gate);
    while let Some(answers) = acks.join_next().await {
        assert!(answers.unwrap().iter().all(|a| a.outcome == DONE));
    }
    let flushes = bench.store.world().advances.clone();
    assert_eq!(flushes.iter().sum::<usize>(), 9);
    assert!(flushes.len() <= 3, "{flushes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_never_arrived_is_sent_again() {
    for settings in [fused(), positional(), serial()] {
        let bench = Bench::new(settings);
        let items = bench.leased(1, 2);
        bench.fault(&[Fault::LostBefore, Fault::LostBefore]);
        assert_eq!(bench.ack(&items).await, [DONE, DONE]);
        assert_eq!(bench.committed(1), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_was_lost_is_never_called_a_success_nor_a_stale_lease() {
    for settings in [fused(), positional(), serial()] {
        let bench = Bench::new(settings);
        let items = bench.leased(1, 2);
        bench.fault(&[Fault::LostAfter]);
        assert_eq!(bench.ack(&items).await, [Err(AckError::FlushFailed), Err(AckError::FlushFailed)]);
        assert_eq!(bench.committed(1), 1, "it was committed, and nobody could know");
        assert_eq!(bench.ack(&items).await[0], Err(AckError::InvalidLease));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_doubt_with_the_lease_still_there_is_resolved() {
    let bench = Bench::new(fused());
    let items = bench.leased(1, 3);
    // Another broker acked a part, so the advance is refused; its answer is lost on top.
    bench.store.world().rows.get_mut(&(1, 1)).unwrap().committed = 0;
    bench.fault(&[Fault::LostBefore]);
    assert_eq!(bench.ack(&items).await, [Ok(Acked::Noop), DONE, DONE]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_connection_items_say_pool_and_nothing_happens() {
    for settings in [fused(), positional(), serial()] {
        let bench = Bench::new(settings);
        let items = bench.leased(1, 1);
        bench.fault(&[Fault::Unavailable]);
        assert_eq!(bench.ack(&items).await, [Err(AckError::Pool)]);
        assert_eq!(bench.committed(1), -1);
        // The lease is still there; resolution acks it.
        assert_eq!(bench.ack(&items).await, [DONE]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_database_fails_the_flush_within_the_budget() {
    let bench = Bench::new(AckSettings { lookup_timeout: Duration::from_millis(50), ..fused() });
    let items = bench.leased(1, 1);
    bench.fault(&[Fault::LostBefore; 40]);
    assert_eq!(bench.ack(&items).await, [Err(AckError::FlushFailed)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failing_row_does_not_fail_the_others() {
    let bench = Bench::new(AckSettings { shards: 1, ..fused() });
    *bench.store.poison.lock().unwrap() = Some(3);
    let items: Vec<AckItem> = (0..8).flat_map(|p| bench.leased(p, 1)).collect();
    let gate = bench.store.gate.lock().await;
    let ack = tokio::spawn({
        let broker = bench.broker.clone();
        async move { broker.ack("g1", items).await }
    });
    while bench.broker.inner.home.as_ref().unwrap().actors() > 0 {
        tokio::task::yield_now().await;
    }
    drop(gate);
    let answers = ack.await.unwrap();
    for (partition, answer) in answers.iter().enumerate() {
        let want = if partition == 3 { Err(AckError::FlushFailed) } else { DONE };
        assert_eq!(answer.outcome, want, "partition {partition}");
    }
    assert_eq!(bench.committed(3), -1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_tried_once_more() {
    let bench = Bench::new(fused());
    let items = bench.leased(1, 2);
    bench.fault(&[Fault::Refused("40P01")]);
    assert_eq!(bench.ack(&items).await, [DONE, DONE]);
    let bench = Bench::new(serial());
    let items = bench.leased(1, 2);
    bench.fault(&[Fault::Refused("40P01"), Fault::Refused("40001")]);
    assert_eq!(bench.ack(&items).await, [DONE, DONE]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_acks_of_one_lease_exactly_one_lands() {
    let bench = Bench::new(fused());
    for partition in 0..200 {
        let items = bench.leased(partition, 2);
        let (one, two) = tokio::join!(bench.ack(&items), bench.ack(&items));
        let landed = [&one, &two].iter().filter(|told| told.iter().all(|t| *t == DONE)).count();
        assert_eq!(landed, 1, "{one:?} {two:?}");
        let stale = |told: &Vec<_>| told.iter().all(|t| *t == Err(AckError::InvalidLease));
        assert!(stale(&one) || stale(&two), "{one:?} {two:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expiry_between_hit_and_flush_is_an_invalid_lease() {
    let bench = Bench::new(fused());
    let items = bench.leased(1, 2);
    let gate = bench.store.gate.lock().await;
    let ack = tokio::spawn({
        let (broker, items) = (bench.broker.clone(), items.clone());
        async move { broker.ack("g1", items).await }
    });
    while bench.broker.inner.home.as_ref().unwrap().actors() > 0 {
        tokio::task::yield_now().await;
    }
    // Hit; now the lease expires and another worker takes the batch.
    bench.store.world().now += 5000;
    bench.store.claim(1, 1, worker(99), 100, 1000).unwrap();
    drop(gate);
    assert!(ack.await.unwrap().iter().all(|a| a.outcome == Err(AckError::InvalidLease)));
    assert_eq!(bench.committed(1), -1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_shard_makes_callers_wait_and_then_says_pool() {
    let settings = AckSettings { shards: 1, queue_rows_max: 1, checkout_timeout: Duration::from_millis(30), ..fused() };
    let bench = Bench::new(settings);
    let (first, second) = (bench.leased(1, 1), bench.leased(2, 1));
    let gate = bench.store.gate.lock().await;
    let ack = tokio::spawn({
        let broker = bench.broker.clone();
        async move { broker.ack("g1", first).await }
    });
    while bench.broker.inner.home.as_ref().unwrap().actors() > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.ack(&second).await, [Err(AckError::Pool)]);
    drop(gate);
    assert_eq!(ack.await.unwrap()[0].outcome, DONE);
    assert_eq!(bench.ack(&second).await, [DONE], "a refused caller lost nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_flushes_and_later_acks_still_resolve() {
    let bench = Bench::new(fused());
    let (first, second) = (bench.leased(1, 1), bench.leased(2, 1));
    let gate = bench.store.gate.lock().await;
    let ack = tokio::spawn({
        let broker = bench.broker.clone();
        async move { broker.ack("g1", first).await }
    });
    while bench.broker.inner.home.as_ref().unwrap().actors() > 1 {
        tokio::task::yield_now().await;
    }
    let down = tokio::spawn({
        let broker = bench.broker.clone();
        async move { broker.shutdown().await }
    });
    drop(gate);
    assert_eq!(ack.await.unwrap()[0].outcome, DONE);
    down.await.unwrap();
    assert_eq!(bench.ack(&second).await, [DONE]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_leaves_nothing_behind() {
    let bench = Bench::new(fused());
    let items = bench.leased(1, 1);
    let gate = bench.store.gate.lock().await;
    {
        let ack = bench.broker.ack("g1", items);
        let mut ack = std::pin::pin!(ack);
        assert!(futures_util::poll!(&mut ack).is_pending());
    }
    drop(gate);
    while bench.heard.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.committed(1), 0);
    assert_eq!(bench.broker.inner.home.as_ref().unwrap().actors(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nack_takes_the_entry_along_and_a_charged_one_tells_when() {
    let bench = Bench::new(fused());
    let items = bench.leased(1, 2);
    bench.store.world().logs.get_mut(&1).unwrap().options.retry_delay_ms = 50;
    let mut nack = items.clone();
    nack[0].status = AckStatus::Signal(Signal::Failed);
    assert_eq!(bench.ack(&nack).await, [DONE, DONE]);
    let heard = bench.heard.lock().unwrap().clone();
    assert!(matches!(heard[..], [(1, 1, Release::RedeliverAt(_))]), "{heard:?}");
    while bench.broker.inner.home.as_ref().unwrap().actors() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_of_one_partition_keep_request_order() {
    for settings in [fused(), positional(), serial()] {
        let bench = Bench::new(settings);
        let mut items = bench.leased(1, 2);
        let mut again = items.clone();
        again.iter_mut().for_each(|item| item.lease = LeaseClaim::Absent);
        items.extend(again);
        let told = bench.ack(&items).await;
        assert_eq!(told, [DONE, DONE, Ok(Acked::Noop), Ok(Acked::Noop)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_far_below_the_cursor_is_found_and_an_unknown_one_is_not() {
    let bench = Bench::new(serial());
    bench.store.create(1, OPTIONS);
    for segment in 0..300 {
        bench.store.push(1, (0..200).map(|n| format!("{segment}-{n}")).collect());
    }
    bench.store.claim(1, 1, worker(1), 1, 10).unwrap();
    bench.store.seek(1, 1, 59_000);
    let items = ["0-0", "150-7", "nope", "299-199"].map(|id| item(1, id, LeaseClaim::Absent, AckStatus::Completed));
    assert_eq!(bench.ack(&items).await, [Ok(Acked::Noop), Ok(Acked::Noop), Err(AckError::Unresolvable), DONE]);
    assert_eq!(bench.committed(1), 59_999);
}
