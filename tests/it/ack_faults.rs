//! Acks while the way to PostgreSQL breaks (`spec/ack.md` §7, I3, I6), and the races of a lease.
//!
//! What must hold on every road: an ack answered with success is in the database, one that is not never is called one,
//! and whatever was answered, nothing is lost: what was not committed comes back.

use std::time::Duration;

use crate::harness::{
    AckResult, Broker, BrokerProcess, Database, PATIENCE, Pop, Popped, Road, TestBroker, eventually, numbered,
};
use proxy::{Cut, Proxy};

mod proxy;

const GROUP: &str = "g";
const FLUSH_FAILED: &str = "ack flush failed; lease will expire and redeliver";
const STALE: &str = "invalid or expired lease";
const ROADS: [Road; 3] = [Road::Fused, Road::RegistryOnly, Road::ResolutionOnly];

/// A broker whose connections run through a proxy.
struct Stand {
    broker: Broker,
    proxy: Proxy,
    db: Database,
}

impl Stand {
    async fn on(road: Road) -> Stand {
        let db = Database::migrated().await;
        let (proxy, url) = Proxy::before(&db.url).await;
        let broker = Broker::start(&url, road).await;
        Stand { broker, proxy, db }
    }

    async fn pop(&self) -> Popped {
        self.broker.pop(&Pop::partition("q", "p").group(GROUP).all().batch(100)).await
    }

    /// Pushes three messages and leases them.
    async fn leased(&self) -> Popped {
        self.broker.push_ids("q", "p", numbered("m", 0..3)).await;
        let popped = self.pop().await;
        assert_eq!(popped.messages.len(), 3);
        popped
    }

    async fn ack(&self, popped: &Popped) -> Vec<AckResult> {
        self.broker.ack(GROUP, popped.items("completed")).await
    }

    async fn committed(&self) -> i64 {
        self.db.cursor("q", "p", GROUP).await.committed
    }
}

fn all_done(results: &[AckResult]) -> bool {
    results.iter().all(|result| result.success && result.error.is_none() && result.lease_released)
}

fn all_say(results: &[AckResult], error: &str) -> bool {
    results.iter().all(|result| !result.success && result.error.as_deref() == Some(error) && !result.lease_released)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_never_arrived_is_found_out_and_sent_again() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        let popped = stand.leased().await;
        stand.proxy.next(&[Cut::BeforeSend]);
        let results = stand.ack(&popped).await;
        assert!(all_done(&results), "{road:?}: {results:?}");
        assert_eq!(stand.committed().await, 2, "{road:?}");
        assert!(stand.pop().await.is_empty(), "{road:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_reported_as_failed_and_does_not_come_back() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        let popped = stand.leased().await;
        stand.proxy.next(&[Cut::BeforeAnswer]);
        let results = stand.ack(&popped).await;
        assert!(all_say(&results, FLUSH_FAILED), "{road:?}: {results:?}");
        assert_eq!(stand.committed().await, 2, "{road:?}: it had been committed");
        assert!(stand.pop().await.is_empty(), "{road:?}");
        assert!(all_say(&stand.ack(&popped).await, STALE), "{road:?}");
    }
}

/// Fused or alone, whatever becomes of it afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_whose_connection_breaks_is_counted_and_logged_once() {
    for fusion in ["on", "off"] {
        let db = Database::migrated().await;
        let (proxy, url) = Proxy::before(&db.url).await;
        let process = BrokerProcess::on_with(&url, &[("QUEEN_ACK_FUSION", fusion)]).await;
        let client = process.client();
        for (failures, cut) in [(1, Cut::BeforeSend), (2, Cut::BeforeAnswer)] {
            client.push_ids("q", "p", [format!("m{failures}")]).await;
            let popped = client.pop(&Pop::partition("q", "p").group(GROUP).all()).await;
            proxy.next(&[cut]);
            let results = client.ack(GROUP, popped.items("completed")).await;
            assert_eq!(all_done(&results), cut == Cut::BeforeSend, "{results:?}");
            let counted = client.metric("regent_ack_flush_failures_total").await;
            assert_eq!(counted, f64::from(failures), "fusion {fusion}, {cut:?}");
            let logged = process.log().matches("ack flush failed").count();
            assert_eq!(logged, failures as usize, "fusion {fusion}, {cut:?}: {}", process.log());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_database_is_away_acks_fail_quickly_and_afterwards_the_lease_still_stands() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        let popped = stand.leased().await;
        stand.proxy.refuse(true);
        stand.proxy.next(&[Cut::BeforeSend; 30]);
        let started = std::time::Instant::now();
        let results = stand.ack(&popped).await;
        assert!(results.iter().all(|result| !result.success), "{road:?}: {results:?}");
        assert!(started.elapsed() < Duration::from_secs(8), "{road:?}: {:?}", started.elapsed());
        let error = results[0].error.as_deref();
        assert!(error == Some(FLUSH_FAILED) || error == Some("pool"), "{road:?}: {error:?}");
        assert_eq!(stand.committed().await, -1, "{road:?}");
        stand.proxy.refuse(false);
        stand.proxy.forgive();
        eventually(PATIENCE, async || all_done(&stand.ack(&popped).await)).await;
        assert_eq!(stand.committed().await, 2, "{road:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_waits_for_a_slow_database_and_is_answered_after_the_commit() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        let popped = stand.leased().await;
        stand.proxy.next(&[Cut::HoldBack]);
        let (results, ()) = tokio::join!(stand.ack(&popped), async {
            eventually(PATIENCE, async || stand.proxy.held() == 1).await;
            assert_eq!(stand.committed().await, -1);
            stand.proxy.let_go();
        });
        assert!(all_done(&results), "{road:?}: {results:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_expires_and_is_taken_over_on_the_way_is_refused() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        let popped = stand.leased().await;
        stand.proxy.next(&[Cut::HoldBack]);
        let (results, again) = tokio::join!(stand.ack(&popped), async {
            eventually(PATIENCE, async || stand.proxy.held() == 1).await;
            stand.db.expire_leases().await;
            let again = stand.pop().await;
            stand.proxy.let_go();
            again
        });
        assert!(all_say(&results, STALE), "{road:?}: {results:?}");
        assert_eq!(again.ids(), popped.ids(), "{road:?}");
        assert!(all_done(&stand.ack(&again).await), "{road:?}: the present worker was not disturbed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_acks_of_one_lease_at_once_land_once() {
    for road in ROADS {
        let stand = Stand::on(road).await;
        for round in 0..20 {
            stand.broker.push_ids("q", "p", numbered(&format!("r{round}-"), 0..3)).await;
            let popped = stand.pop().await;
            let (one, two) = tokio::join!(stand.ack(&popped), stand.ack(&popped));
            let landed = usize::from(all_done(&one)) + usize::from(all_done(&two));
            assert_eq!(landed, 1, "{road:?}: {one:?} {two:?}");
            assert!(all_say(&one, STALE) || all_say(&two, STALE), "{road:?}: {one:?} {two:?}");
        }
        assert_eq!(stand.committed().await, 59);
    }
}

/// Twelve partitions in one call; PostgreSQL refuses to write the row of one of them. `ack_fusion.rs` has the same with
/// all twelve in one flush for certain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_cannot_be_written_fails_alone() {
    for road in ROADS {
        let broker = TestBroker::on(road).await;
        for partition in 0..12 {
            broker.push_ids("q", &format!("p{partition}"), ["m"]).await;
        }
        let popped = broker.pop(&Pop::queue("q").group(GROUP).all().batch(100).partitions(12)).await;
        assert_eq!(popped.messages.len(), 12);
        broker
            .db
            .execute(
                "CREATE OR REPLACE FUNCTION queen.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                   IF NEW.worker_id IS NULL AND (SELECT name FROM queen.log_partitions WHERE id = NEW.partition_id) = 'p7'
                   THEN RAISE EXCEPTION 'planted'; END IF; RETURN NEW; END $$",
            )
            .await;
        broker
            .db
            .execute("CREATE TRIGGER refuse BEFORE UPDATE ON queen.log_consumers FOR EACH ROW EXECUTE FUNCTION queen.refuse()")
            .await;
        let results = broker.ack(GROUP, popped.items("completed")).await;
        broker.db.execute("DROP TRIGGER refuse ON queen.log_consumers").await;
        for (message, result) in popped.messages.iter().zip(&results) {
            let expected = match (message.partition.as_str(), road) {
                ("p7", Road::ResolutionOnly) => Some("planted"),
                ("p7", _) => Some(FLUSH_FAILED),
                _ => None,
            };
            assert_eq!(result.error.as_deref(), expected, "{road:?} {}", message.partition);
            let committed = broker.db.cursor("q", &message.partition, GROUP).await.committed;
            assert_eq!(committed, if message.partition == "p7" { -1 } else { 0 }, "{road:?} {}", message.partition);
        }
    }
}

/// The registry is one broker's memory: any broker settles any lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_broker_and_a_restarted_one_settle_the_lease() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let pop = Pop::partition("q", "p").group(GROUP).all();
    let popped = broker.pop(&pop).await;
    let part = vec![popped.messages[0].item("completed")];
    assert!(other.ack(GROUP, part).await[0].success);
    // The first broker still holds the whole batch in its registry; the database knows better.
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert_eq!(results.iter().map(|r| r.noop).collect::<Vec<_>>(), [true, false, false]);
    assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");

    broker.push_ids("q", "p", numbered("n", 0..3)).await;
    let popped = broker.pop(&pop).await;
    let broker = broker.restart().await;
    assert!(all_done(&broker.ack(GROUP, popped.items("completed")).await));
    assert_eq!(broker.db.cursor("q", "p", GROUP).await.committed, 5);
}
