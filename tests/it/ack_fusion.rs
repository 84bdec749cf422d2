//! One shard of fused acks, seen from outside (`spec/ack.md` §7, design §3): a lock on all cursors holds its flush in flight,
//! and what is acknowledged meanwhile gathers. Cursor rows of one commit share their `xmin`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::json;
use sqlx::{Postgres, Transaction};
use tokio::net::TcpStream;

use crate::harness::{AckResult, BrokerProcess, Client, Database, PATIENCE, Pop, Popped, eventually, open};

const GROUP: &str = "g";
const STALE: &str = "invalid or expired lease";
const FLUSH_FAILED: &str = "ack flush failed; lease will expire and redeliver";

/// A broker with one shard and metrics of its own.
struct Stand {
    process: BrokerProcess,
    client: Client,
    db: Database,
}

/// Acks under way.
type Acking = tokio::task::JoinHandle<Vec<AckResult>>;

impl Stand {
    async fn with(variables: &[(&str, &str)]) -> Stand {
        let db = Database::migrated().await;
        let mut all = vec![("QUEEN_ACK_FUSION_SHARDS", "1"), ("DB_POOL_SIZE", "6"), ("REGENT_CLAIM_POOL_SIZE", "2")];
        all.extend(variables);
        let process = BrokerProcess::on_with(&db.url, &all).await;
        Stand { client: process.client(), process, db }
    }

    /// Pushes a message into each of these partitions and leases them together.
    async fn leased(&self, partitions: std::ops::Range<usize>) -> Popped {
        let count = partitions.len();
        for partition in partitions {
            self.client.push_ids("q", &name(partition), ["m"]).await;
        }
        let pop = Pop::queue("q").group(GROUP).all().batch(count as i64).partitions(count as i64);
        let popped = self.client.pop(&pop).await;
        assert_eq!(popped.messages.len(), count);
        popped
    }

    fn ack(&self, popped: &Popped) -> Acking {
        let (client, items) = (self.client.clone(), popped.items("completed"));
        tokio::spawn(async move { client.ack(GROUP, items).await })
    }

    /// The sum of a metric's series.
    async fn metric(&self, name: &str) -> f64 {
        self.client.metric(name).await
    }

    /// Locks all cursors, has one acknowledged, and waits until that flush waits for the lock.
    async fn blocked(&self, popped: &Popped) -> (Transaction<'static, Postgres>, Acking) {
        let lock = self.locked().await;
        let acking = self.ack(popped);
        self.in_flight().await;
        (lock, acking)
    }

    /// Locks all cursors.
    async fn locked(&self) -> Transaction<'static, Postgres> {
        let mut lock = self.db.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE queen.log_consumers IN EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
        lock
    }

    /// Waits until a flush waits for the lock.
    async fn in_flight(&self) {
        eventually(PATIENCE, async || self.db.lock_waits("WITH locked AS %").await == 1).await;
    }

    /// Sends a whole ack request and leaves the answer unread.
    async fn ask(&self, popped: &Popped) -> TcpStream {
        let body = json!({ "consumerGroup": GROUP, "acknowledgments": popped.items("completed") }).to_string();
        let head = "POST /api/v1/ack/batch HTTP/1.1\r\nHost: regent\r\nContent-Type: application/json\r\n";
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        open(self.client.address, request.as_bytes()).await
    }

    /// Waits until this many requests are under way beside the one that asks.
    async fn under_way(&self, count: f64) {
        eventually(PATIENCE, async || self.metric("regent_http_requests_inflight").await == count + 1.0).await;
    }

    /// Waits until this many advances wait behind the flush in flight.
    async fn gathered(&self, count: f64) {
        eventually(PATIENCE, async || self.metric("regent_ack_queue_depth").await == count).await;
    }

    /// Cursor rows of each commit, of the partitions in `range`; largest first.
    async fn commits(&self, range: std::ops::Range<usize>) -> Vec<usize> {
        let rows: Vec<(String, String)> = sqlx::query_as(
            "SELECT p.name, c.xmin::text FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id",
        )
        .fetch_all(&self.db.pool)
        .await
        .unwrap();
        let wanted: Vec<String> = range.map(name).collect();
        let mut sizes: HashMap<String, usize> = HashMap::new();
        for (_, commit) in rows.into_iter().filter(|(partition, _)| wanted.contains(partition)) {
            *sizes.entry(commit).or_default() += 1;
        }
        let mut sizes: Vec<usize> = sizes.into_values().collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes
    }

    async fn committed(&self, partition: usize) -> i64 {
        self.db.cursor("q", &name(partition), GROUP).await.committed
    }
}

fn name(partition: usize) -> String {
    format!("p{partition}")
}

fn all_done(results: &[AckResult]) -> bool {
    results.iter().all(|result| result.success && result.error.is_none() && result.lease_released)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_gathers_behind_a_flush_shares_the_next_commits_within_their_caps() {
    // 44 bytes a row.
    let cases = [
        (Some(("REGENT_ACK_FUSION_ROWS_MAX", "5")), vec![5, 5, 2]),
        (Some(("REGENT_ACK_FUSION_BYTES_MAX", "200")), vec![4, 4, 4]),
        (None, vec![12]),
    ];
    for (variables, expected) in cases {
        let stand = Stand::with(variables.as_slice()).await;
        let (first, others) = (stand.leased(0..1).await, stand.leased(1..13).await);
        let (lock, acking) = stand.blocked(&first).await;
        let gathering = stand.ack(&others);
        stand.gathered(12.0).await;
        assert_eq!(stand.committed(5).await, -1, "one flush in flight per shard");
        lock.rollback().await.unwrap();
        assert!(all_done(&acking.await.unwrap()) && all_done(&gathering.await.unwrap()), "{variables:?}");
        assert_eq!(stand.commits(1..13).await, expected, "{variables:?}");
        assert_eq!(stand.metric("regent_ack_flush_rows_sum").await, 13.0, "every row was fused: {variables:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_shard_makes_an_ack_wait_then_answers_pool_and_its_lease_stands() {
    let variables = [
        ("REGENT_ACK_FUSION_ROWS_MAX", "2"),
        ("REGENT_ACK_FUSION_QUEUE_MAX", "2"),
        ("REGENT_POOL_CHECKOUT_TIMEOUT_MS", "1000"),
    ];
    let stand = Stand::with(&variables).await;
    let leases = [stand.leased(0..1).await, stand.leased(1..2).await, stand.leased(2..3).await];
    let (lock, first) = stand.blocked(&leases[0]).await;
    let second = stand.ack(&leases[1]);
    stand.gathered(1.0).await;
    let began = Instant::now();
    let refused = stand.ack(&leases[2]).await.unwrap();
    assert_eq!(refused[0].error.as_deref(), Some("pool"), "{refused:?}");
    assert!(!refused[0].success && began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    lock.rollback().await.unwrap();
    assert!(all_done(&first.await.unwrap()) && all_done(&second.await.unwrap()));
    assert!(all_done(&stand.ack(&leases[2]).await.unwrap()), "nothing had happened to its lease");
    assert_eq!(stand.metric("regent_ack_hits_total").await, 3.0, "nor to its registry entry");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_that_expire_between_hit_and_flush_are_refused_and_the_others_commit() {
    let stand = Stand::with(&[]).await;
    let (first, others) = (stand.leased(0..1).await, stand.leased(1..5).await);
    let (mut lock, acking) = stand.blocked(&first).await;
    let gathering = stand.ack(&others);
    stand.gathered(4.0).await;
    sqlx::query(
        "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() - interval '1 ms'
          WHERE partition_id IN (SELECT id FROM queen.log_partitions WHERE name IN ('p0', 'p3'))",
    )
    .execute(&mut *lock)
    .await
    .unwrap();
    lock.commit().await.unwrap();
    assert_eq!(acking.await.unwrap()[0].error.as_deref(), Some(STALE), "alone in its flush");
    for (message, result) in others.messages.iter().zip(gathering.await.unwrap()) {
        let expected = (message.partition == "p3").then_some(STALE);
        assert_eq!(result.error.as_deref(), expected, "{}", message.partition);
    }
    for partition in 0..5 {
        let expected = if matches!(partition, 0 | 3) { -1 } else { 0 };
        assert_eq!(stand.committed(partition).await, expected, "{partition}");
    }
    assert_eq!(stand.metric("regent_ack_refused_total").await, 2.0);
    for partition in ["p0", "p3"] {
        let again = stand.client.pop(&Pop::partition("q", partition).group(GROUP).all()).await;
        assert_eq!(again.ids(), ["m"], "{partition} comes back");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_flushes_once_what_was_taken_in() {
    let mut stand = Stand::with(&[]).await;
    let (first, others) = (stand.leased(0..1).await, stand.leased(1..8).await);
    let (lock, acking) = stand.blocked(&first).await;
    let gathering = stand.ack(&others);
    stand.gathered(7.0).await;
    stand.process.ask_to_stop();
    let client = stand.client.clone();
    eventually(PATIENCE, async || !client.is_healthy().await).await;
    lock.rollback().await.unwrap();
    assert!(all_done(&acking.await.unwrap()) && all_done(&gathering.await.unwrap()));
    stand.process.terminate();
    assert_eq!(stand.commits(0..1).await, [1]);
    assert_eq!(stand.commits(1..8).await, [7], "one flush for all that waited");
    assert_eq!(stand.db.live_leases().await, 0);
}

/// Somebody who keeps cursors locked for long (a seek over very many partitions) holds up the acks of those cursors and
/// no others: not those that would have shared their flush, and not by taking all connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_cursor_holds_up_its_own_acks_only() {
    const LOCKED: usize = 8;
    // Six connections, of which one group's resolutions take three.
    let stand = Stand::with(&[("REGENT_POOL_CHECKOUT_TIMEOUT_MS", "30000")]).await;
    let mut held = Vec::new();
    for partition in 0..LOCKED {
        held.push(stand.leased(partition..partition + 1).await);
    }
    let free = stand.leased(LOCKED..LOCKED + 4).await;
    let mut lock = stand.db.pool.begin().await.unwrap();
    let sql = "SELECT 1 FROM queen.log_consumers WHERE partition_id IN
                 (SELECT id FROM queen.log_partitions WHERE name = ANY($1)) FOR UPDATE";
    let names: Vec<String> = (0..LOCKED).map(name).collect();
    sqlx::query(sql).bind(names).fetch_all(&mut *lock).await.unwrap();
    let acking: Vec<Acking> = held.iter().map(|popped| stand.ack(popped)).collect();
    eventually(PATIENCE, async || stand.db.lock_waits("%").await == 3).await;
    assert!(all_done(&stand.ack(&free).await.unwrap()));
    stand.client.push_ids("q", "p0", ["another"]).await;
    assert_eq!(stand.db.lock_waits("%").await, 3, "the locks are held still");
    lock.rollback().await.unwrap();
    for acking in acking {
        assert!(all_done(&acking.await.unwrap()));
    }
}

/// `spec/ack.md` §7: no row is to blame for a timeout that comes back, so no row is looked for while the shard stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_times_out_twice_is_given_up_at_once() {
    const STATEMENTS: &str = r#"regent_db_statement_seconds_count{statement="ack flush"}"#;
    let stand = Stand::with(&[("QUEEN_STMT_TIMEOUT_MS", "1000")]).await;
    let (first, others) = (stand.leased(0..1).await, stand.leased(1..13).await);
    let (lock, acking) = stand.blocked(&first).await;
    let gathering = stand.ack(&others);
    for results in [acking.await.unwrap(), gathering.await.unwrap()] {
        assert!(results.iter().all(|result| result.error.as_deref() == Some(FLUSH_FAILED)), "{results:?}");
    }
    assert_eq!(stand.metric("regent_ack_flush_failures_total").await, 2.0);
    // Of a shared flush the checkout is timed, too.
    assert_eq!(stand.metric(STATEMENTS).await, 2.0 + 2.0 * 2.0, "two flushes, each sent twice");
    lock.rollback().await.unwrap();
    assert!(all_done(&stand.ack(&others).await.unwrap()), "their leases stand");
}

/// Design §6: what waits is bounded in memory, whether or not its client still waits for it. README ruling 5: acks say so per item.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_past_the_memory_for_requests_answer_pool() {
    // A kilobyte for four items.
    let small = [
        ("REGENT_REQUEST_MEMORY_MB", "1"),
        ("QUEEN_MAX_BODY_BYTES", "1048576"),
        ("REGENT_PUSH_FUSION_BYTES_MAX", "1048576"),
    ];
    let stand = Stand::with(&small).await;
    let (first, other) = (stand.leased(0..1).await, stand.leased(1..2).await);
    let (lock, acking) = stand.blocked(&first).await;
    let many = |count: usize| {
        let (client, items) = (stand.client.clone(), vec![other.items("completed")[0].clone(); count]);
        tokio::spawn(async move { client.ack(GROUP, items).await })
    };
    let waiting = [many(2_000), many(2_000)];
    let under_way = f64::from(1024 * (1 + 500 + 500));
    eventually(PATIENCE, async || stand.metric("regent_ack_inflight_bytes").await == under_way).await;
    let refused = many(100).await.unwrap();
    assert_eq!(refused.len(), 100);
    assert!(refused.iter().all(|result| result.error.as_deref() == Some("pool")), "{refused:?}");
    assert_eq!(stand.committed(1).await, -1, "the flush is held up still");
    lock.rollback().await.unwrap();
    assert!(all_done(&acking.await.unwrap()));
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().len(), 2_000);
    }
    assert_eq!(stand.metric("regent_ack_inflight_bytes").await, 0.0);
}

/// Design §3: a seek over all cursors of one group is the business of no other, be it on the same partitions or of the same name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_groups_locked_cursors_hold_up_no_other_group() {
    const LOCKED: usize = 8;
    let stand = Stand::with(&[("REGENT_POOL_CHECKOUT_TIMEOUT_MS", "30000")]).await;
    let mut held = Vec::new();
    for partition in 0..LOCKED {
        held.push(stand.leased(partition..partition + 1).await);
        stand.client.push_ids("q2", &name(partition), ["m"]).await;
    }
    let all =
        |queue: &str, group: &str| Pop::queue(queue).group(group).all().batch(LOCKED as i64).partitions(LOCKED as i64);
    let neighbour = stand.client.pop(&all("q", "h")).await;
    let namesake = stand.client.pop(&all("q2", GROUP)).await;
    let mut lock = stand.db.pool.begin().await.unwrap();
    let sql = "SELECT 1 FROM queen.log_consumers WHERE group_id =
                 (SELECT g.id FROM queen.consumer_groups g JOIN queen.queues q ON q.id = g.queue_id
                   WHERE q.name = 'q' AND g.name = $1) FOR UPDATE";
    sqlx::query(sql).bind(GROUP).fetch_all(&mut *lock).await.unwrap();
    let acking: Vec<Acking> = held.iter().map(|popped| stand.ack(popped)).collect();
    eventually(PATIENCE, async || stand.db.lock_waits("%").await == 3).await;
    for (group, popped) in [("h", &neighbour), (GROUP, &namesake)] {
        let results = stand.client.ack(group, popped.items("failed")).await;
        assert_eq!(results.len(), LOCKED);
        assert!(results.iter().all(|result| result.success), "{group}: {results:?}");
    }
    assert_eq!(stand.db.lock_waits("%").await, 3, "the locks are held still");
    lock.rollback().await.unwrap();
    for acking in acking {
        assert!(all_done(&acking.await.unwrap()));
    }
}

/// The partition's actor leaves with each ack and comes back with each pop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_ack_misses_its_lease_however_often_the_actor_comes_and_goes() {
    let stand = Stand::with(&[]).await;
    let pop = Pop::partition("q", "p").group(GROUP).all();
    stand.client.push_ids("q", "p", (0..200).map(|n| format!("m{n}"))).await;
    for round in 0..200 {
        let popped = stand.client.pop(&pop.clone().batch(1)).await;
        let results = stand.ack(&popped).await.unwrap();
        assert!(all_done(&results), "round {round}: {results:?}");
    }
    assert_eq!(stand.metric("regent_ack_hits_total").await, 200.0);
    assert_eq!(stand.metric("regent_ack_misses_total").await, 0.0);
    eventually(PATIENCE, async || stand.metric("regent_ack_partition_actors").await == 0.0).await;
    assert_eq!(stand.metric("regent_ack_registry_bytes").await, 0.0);
}

/// Security-operations §8: the registry evicts what was used least recently; that costs the ack time, never its verdict.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_registry_forgets_the_oldest_leases_and_their_acks_still_land() {
    const LEASES: usize = 1_000;
    // What one pop adds fits into the headroom of a sixteenth.
    const PER_POP: usize = 20;
    let stand = Stand::with(&[("QUEEN_ACK_REGISTRY_MB", "1")]).await;
    let items: Vec<_> = (0..LEASES)
        .map(|n| serde_json::json!({ "queue": "q", "partition": name(n), "transactionId": "m", "payload": 1 }))
        .collect();
    stand.client.push(items.into()).await;
    let pop = Pop::queue("q").group(GROUP).all().batch(PER_POP as i64).partitions(PER_POP as i64);
    let mut leases = Vec::new();
    for _ in 0..LEASES / PER_POP {
        leases.push(stand.client.pop(&pop).await);
        // The actors give memory back on their own thread.
        let settled = f64::from(1024 * 1024) * 15.0 / 16.0;
        eventually(PATIENCE, async || stand.metric("regent_ack_registry_bytes").await <= settled).await;
    }
    assert_eq!(leases.iter().map(|popped| popped.messages.len()).sum::<usize>(), LEASES);
    assert!(stand.metric("regent_ack_evicted_total").await > 0.0);
    assert_eq!(stand.metric("regent_ack_unregistered_total").await, 0.0);
    let mut hit = Vec::new();
    for popped in leases {
        let before = stand.metric("regent_ack_hits_total").await;
        assert!(all_done(&stand.ack(&popped).await.unwrap()), "every ack lands");
        hit.push(stand.metric("regent_ack_hits_total").await - before);
    }
    assert_eq!(hit[0], 0.0, "the oldest were forgotten");
    assert_eq!(hit[hit.len() - 1], PER_POP as f64, "the newest are known");
    assert!(hit.is_sorted(), "in the order of their pops: {hit:?}");
    assert_eq!(stand.db.live_leases().await, 0);
}

/// I15: a client that hangs up while its ack is in flight, or waits behind one, takes nothing with it: the cursor moves,
/// who waits for the partition hears of it, and the places of the shard are free again. Two places, twenty hang-ups.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_whose_client_hangs_up_lands_wakes_who_waits_and_gives_its_place_back() {
    const ROUNDS: usize = 10;
    let stand = Stand::with(&[("REGENT_ACK_FUSION_ROWS_MAX", "2"), ("REGENT_ACK_FUSION_QUEUE_MAX", "2")]).await;
    let pop = |partition: usize| Pop::partition("q", &name(partition)).group(GROUP).all().batch(1).lease(600);
    for partition in 0..2 {
        stand.client.push_ids("q", &name(partition), (0..=ROUNDS).map(|n| format!("m{n}"))).await;
    }
    let mut leases = [stand.client.pop(&pop(0)).await, stand.client.pop(&pop(1)).await];
    for round in 0..ROUNDS {
        let waiting = [0, 1].map(|partition| {
            let (client, pop) = (stand.client.clone(), pop(partition).wait_ms(60_000));
            tokio::spawn(async move { client.pop(&pop).await })
        });
        eventually(PATIENCE, async || stand.metric("queen_parked_long_polls").await == 2.0).await;
        let lock = stand.locked().await;
        let in_flight = stand.ask(&leases[0]).await;
        stand.in_flight().await;
        let gathered = stand.ask(&leases[1]).await;
        stand.gathered(1.0).await;
        stand.under_way(4.0).await;
        drop((in_flight, gathered));
        stand.under_way(2.0).await;
        assert_eq!(stand.committed(0).await, round as i64 - 1, "round {round}: nothing was flushed yet");
        lock.rollback().await.unwrap();
        let woken = tokio::time::timeout(PATIENCE, futures_util::future::join_all(waiting)).await;
        let woken = woken.unwrap_or_else(|_| panic!("round {round}: nobody was woken"));
        for (partition, popped) in woken.into_iter().enumerate() {
            leases[partition] = popped.unwrap();
            assert_eq!(leases[partition].ids(), [format!("m{}", round + 1)]);
            assert_eq!(stand.committed(partition).await, round as i64);
        }
    }
    assert_eq!(stand.metric("regent_ack_flush_rows_sum").await, 2.0 * ROUNDS as f64, "every one was fused");
    assert_eq!(stand.metric("regent_ack_queue_depth").await, 0.0);
}

/// PostgreSQL refuses to write one row of a flush of twelve: the flush is counted and logged once, and splitting it lets
/// the other eleven through.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_one_row_fails_is_split_and_counted_and_logged_once() {
    let stand = Stand::with(&[]).await;
    let (first, others) = (stand.leased(0..1).await, stand.leased(1..13).await);
    let (mut lock, acking) = stand.blocked(&first).await;
    let gathering = stand.ack(&others);
    stand.gathered(12.0).await;
    // With the commit that lets go: the next flush is the first to meet it.
    for sql in [
        "CREATE OR REPLACE FUNCTION queen.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           IF NEW.worker_id IS NULL AND (SELECT name FROM queen.log_partitions WHERE id = NEW.partition_id) = 'p7'
           THEN RAISE EXCEPTION 'planted'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON queen.log_consumers FOR EACH ROW EXECUTE FUNCTION queen.refuse()",
    ] {
        sqlx::query(sql).execute(&mut *lock).await.unwrap();
    }
    lock.commit().await.unwrap();
    assert!(all_done(&acking.await.unwrap()));
    let results = gathering.await.unwrap();
    stand.db.execute("DROP FUNCTION queen.refuse() CASCADE").await;
    for (message, result) in others.messages.iter().zip(&results) {
        let expected = (message.partition == "p7").then_some(FLUSH_FAILED);
        assert_eq!(result.error.as_deref(), expected, "{}", message.partition);
    }
    for partition in 0..13 {
        assert_eq!(stand.committed(partition).await, if partition == 7 { -1 } else { 0 }, "{partition}");
    }
    assert_eq!(stand.metric("regent_ack_flush_rows_sum").await, 13.0);
    assert_eq!(stand.metric("regent_ack_flush_rows_count").await, 2.0, "the twelve shared one flush");
    assert_eq!(stand.metric("regent_ack_flush_failures_total").await, 1.0);
    assert_eq!(stand.process.log().matches("ack flush failed").count(), 1, "{}", stand.process.log());
    assert!(stand.commits(1..13).await[0] > 1, "those that are well still share commits");
}
