//! What rolls back (§2.7): each cause leaves every row as it was (I10). Those of leases are in `fencing`, duplicates in
//! `pushes`.

use serde_json::{Value, json};

use super::{GROUP, ack_op, commits, leased, leaseless_op, push_op, rolls_back};
use crate::harness::TestBroker;

async fn body_with(broker: &TestBroker, change: impl FnOnce(&mut Value)) -> Value {
    let popped = leased(broker, &["a", "b"]).await;
    broker.push_ids("out", "p", ["there"]).await;
    let mut op = leaseless_op(&popped.messages[1], "completed");
    change(&mut op);
    json!({ "operations": [push_op("out", "p", "x"), leaseless_op(&popped.messages[0], "failed"), op] })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_was_never_pushed() {
    let broker = TestBroker::start().await;
    let words = "QTXN ack references unknown transactionId; transaction rolled back";
    let body = body_with(&broker, |op| op["transactionId"] = json!("bogus")).await;
    rolls_back(&broker, &broker.db, body.clone(), "ack_rejected", words).await;
    for absent in [json!(""), json!(null)] {
        let mut body = body.clone();
        body["operations"][2]["transactionId"] = absent;
        rolls_back(&broker, &broker.db, body, "ack_rejected", words).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_whose_hash_was_purged() {
    let broker = TestBroker::start().await;
    let body = body_with(&broker, |_| {}).await;
    broker.db.execute("DELETE FROM queen.log_txns WHERE base_offset = 0 AND hashes IS NOT NULL").await;
    broker.db.execute("UPDATE queen.log_partitions SET txns_start = last_offset + 1").await;
    rolls_back(&broker, &broker.db, body, "ack_rejected", "unknown transactionId").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_a_cursor() {
    let broker = TestBroker::start().await;
    let long = "g".repeat(2000);
    let mut body = body_with(&broker, |_| {}).await;
    for group in ["nobody", "nul\0", &long] {
        body["operations"][2]["consumerGroup"] = json!(group);
        rolls_back(
            &broker,
            &broker.db,
            body.clone(),
            "ack_rejected",
            "QTXN consumer not found; transaction rolled back",
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_partition() {
    let broker = TestBroker::start().await;
    let mut body = body_with(&broker, |_| {}).await;
    let known = body["operations"][2]["partitionId"].clone();
    let gone = {
        broker.push_ids("gone", "p", ["a"]).await;
        let popped = super::pop(&broker, "gone", "p").await;
        broker.delete_queue("gone").await;
        popped.partition_id
    };
    for partition in [json!("not a uuid"), json!(""), json!("00000000-0000-0000-0000-000000000001"), json!(gone)] {
        body["operations"][2]["partitionId"] = partition;
        rolls_back(
            &broker,
            &broker.db,
            body.clone(),
            "ack_rejected",
            "QTXN unknown partition; transaction rolled back",
        )
        .await;
    }
    body["operations"][2]["partitionId"] = known;
    assert_eq!(super::reply(&broker, body["operations"].as_array().unwrap()).await.json()["success"], true);
}

/// Step order decides: a duplicate is reported before a rejected ack (§2.7).
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_is_named_before_a_rejected_ack() {
    let broker = TestBroker::start().await;
    for (field, wrong) in
        [("partitionId", "no uuid"), ("consumerGroup", "nobody"), ("leaseId", "stale"), ("transactionId", "bogus")]
    {
        let id = format!("dup-{field}");
        commits(&broker, &[push_op("q", "p", &id)]).await;
        let popped = leased(&broker, &[field]).await;
        let mut op = ack_op(&popped.messages[0], "completed");
        op[field] = json!(wrong);
        let body = json!({ "operations": [op.clone(), push_op("q", "p", &id)] });
        rolls_back(&broker, &broker.db, body, "duplicate", "QDUP").await;
        rolls_back(&broker, &broker.db, json!({ "operations": [op] }), "ack_rejected", "QTXN").await;
        commits(&broker, &[ack_op(&popped.messages[0], "completed")]).await;
    }
}

/// A message that retention deleted cannot be filed, so the bundle does not commit.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_whose_message_is_gone() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, &["a"]).await;
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = last_offset + 1").await;
    let body = json!({ "operations": [ack_op(&popped.messages[0], "dlq")] });
    rolls_back(&broker, &broker.db, body, "ack_rejected", "QTXN dlq rejected").await;
}

/// An error of the database takes one bundle with it, whoever shares its flush.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_database() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, &["a"]).await;
    broker.push_ids("bad", "p", ["there"]).await;
    broker
        .db
        .execute(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN RAISE EXCEPTION 'this row is poison'; END $$",
        )
        .await;
    let trigger = format!(
        "CREATE TRIGGER refuse BEFORE UPDATE ON queen.log_partitions FOR EACH ROW WHEN (old.queue_id = {}) \
         EXECUTE FUNCTION public.refuse()",
        sqlx::query_scalar::<_, i32>("SELECT id FROM queen.queues WHERE name = 'bad'")
            .fetch_one(&broker.db.pool)
            .await
            .unwrap()
    );
    sqlx::query(sqlx::AssertSqlSafe(trigger)).execute(&broker.db.pool).await.unwrap();
    let body = json!({ "operations": [push_op("bad", "p", "x"), ack_op(&popped.messages[0], "completed")] });
    let mut others = tokio::task::JoinSet::new();
    for n in 0..20 {
        let client = (*broker).clone();
        others.spawn(async move { super::reply(&client, &[push_op("good", &format!("p{n}"), "x")]).await.json() });
        let (client, body) = ((*broker).clone(), body.clone());
        others.spawn(async move {
            let mut answer = client.post_json("/api/v1/transaction", &body).await.json();
            answer["poison"] = json!(true);
            answer
        });
    }
    while let Some(answer) = others.join_next().await {
        let answer = answer.unwrap();
        if answer["poison"] == true {
            assert_eq!((&answer["success"], &answer["reason"]), (&json!(false), &json!("db_error")), "{answer}");
            assert!(answer["error"].as_str().unwrap().contains("this row is poison"), "{answer}");
        } else {
            assert_eq!(answer["success"], true, "{answer}");
        }
    }
    assert_eq!(broker.db.cursor("in", "p", GROUP).await.committed, -1);
    assert_eq!(broker.db.last_offset("bad", "p").await, Some(0));
    broker.db.execute("DROP TRIGGER refuse ON queen.log_partitions").await;
    broker.db.execute("DROP FUNCTION public.refuse").await;
}
