//! `DELETE /api/v1/messages/:partitionId/:transactionId` (`spec/admin.md` §5.3) and `DELETE /api/v1/dlq` (§6.5).

use serde_json::json;

use super::{NOT_FOUND, address, delete, give_up, give_up_next, listed};
use crate::harness::TestBroker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_loses_the_rows_of_all_groups_and_nothing_else() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["a/1", "b"]).await;
    give_up_next(&broker, "q", "p", "h", 1).await;
    give_up(&broker, "q", "other", "g", &["a/1"]).await;
    let target = address(&partition, "a/1");
    let body = delete(&broker, &target).await.expect(200).json();
    assert_eq!(
        body,
        json!({"success": true, "partitionId": partition, "transactionId": "a/1",
               "message": "Message deleted successfully"})
    );
    assert_eq!(listed(&broker, "").await, ["a/1", "b"], "the other partition's row stays");
    assert_eq!(broker.db.last_offset("q", "p").await, Some(1), "the log is as it was");
    let again = delete(&broker, &target).await.expect(404).json();
    assert_eq!(again["error"], NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_dead_letter_is_not_found() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["dead"]).await;
    broker.push_ids("q", "p", ["live"]).await;
    let foreign = uuid::Uuid::new_v4().to_string();
    for (partition, transaction) in [
        (partition.as_str(), "live"),
        (partition.as_str(), "never"),
        (partition.as_str(), "nul\0"),
        (foreign.as_str(), "dead"),
        ("no-uuid", "dead"),
    ] {
        for reply in [
            delete(&broker, &address(partition, transaction)).await,
            broker.post(&format!("{}/retry", address(partition, transaction)), "").await,
        ] {
            let mut body = reply.expect(404).json();
            let sentence = body.as_object_mut().unwrap().remove("message").unwrap();
            assert!(sentence.as_str().unwrap().contains("dead letter"), "{sentence}");
            assert_eq!(
                body,
                json!({"success": false, "partitionId": partition, "transactionId": transaction, "error": NOT_FOUND})
            );
        }
    }
    assert_eq!(listed(&broker, "").await, ["dead"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_takes_a_queue_or_one_group_of_it() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q1", "p", "g", &["a", "b"]).await;
    give_up_next(&broker, "q1", "p", "h", 2).await;
    give_up(&broker, "q2", "p", "g", &["c"]).await;
    for missing in ["", "?queue=", "?consumerGroup=g"] {
        let body = delete(&broker, &format!("/api/v1/dlq{missing}")).await.expect(400).json();
        assert_eq!(body, json!({"error": "queue is required"}));
    }
    let body = delete(&broker, "/api/v1/dlq?queue=none").await.expect(200).json();
    assert_eq!(body, json!({"success": true, "deleted": 0, "queue": "none", "consumerGroup": null}));
    let body = delete(&broker, "/api/v1/dlq?queue=q1&consumerGroup=h").await.expect(200).json();
    assert_eq!(body, json!({"success": true, "deleted": 2, "queue": "q1", "consumerGroup": "h"}));
    assert_eq!(listed(&broker, "").await, ["c", "b", "a"]);
    let body = delete(&broker, "/api/v1/dlq?queue=q1&consumerGroup=").await.expect(200).json();
    assert_eq!(body["deleted"], 2);
    assert_eq!(listed(&broker, "").await, ["c"]);
}

/// Steps of bounded size add up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_of_many_rows_takes_them_all() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    broker
        .db
        .execute(
            "INSERT INTO queen.dead_letters (id, queue_id, partition_id, log_offset, group_name, queue_name, \
               partition_name, message_id, transaction_id, payload, reason, retry_count, message_created_at) \
             SELECT gen_random_uuid(), queue_id, partition_id, n, group_name, queue_name, partition_name, message_id, \
               't' || n, payload, reason, 0, message_created_at FROM queen.dead_letters, generate_series(1, 2499) n",
        )
        .await;
    let body = delete(&broker, "/api/v1/dlq?queue=q").await.expect(200).json();
    assert_eq!(body["deleted"], 2500);
    assert!(listed(&broker, "").await.is_empty());
}
