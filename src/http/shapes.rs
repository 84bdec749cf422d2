//! Bodies and answers of the core routes, for the OpenAPI document (`spec/push-pop.md` §2, §5, §7, §8, `spec/ack.md` §1, §2,
//! `spec/transactions-kv-timers.md` §2, `spec/admin.md` §6, §7).

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::openapi::AWAY;
use super::routes::{Method, Route};

const BAD: (&str, &str) = ("400", "Not what the route takes: `error` says what, and nothing changed");
const TOO_LARGE: (&str, &str) = ("413", "The body is larger than `QUEEN_MAX_BODY_BYTES`");
const OVERLOADED: (&str, &str) = ("429", "Too much at once; nothing was done, try again after `Retry-After` seconds");
const ABSENT: (&str, &str) = ("404", "There is no such thing: `error` says what");

fn text(about: &str) -> Value {
    json!({"type": "string", "description": about})
}

fn integer(about: &str) -> Value {
    json!({"type": "integer", "description": about})
}

fn boolean(about: &str) -> Value {
    json!({"type": "boolean", "description": about})
}

fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

fn array(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// What the document calls a schema; `None` only if it is none, which a test excludes.
fn schema(value: Value) -> Option<RefOr<Schema>> {
    serde_json::from_value(value).ok()
}

/// The body of a route and whether it must be there.
pub fn body_of(route: &Route) -> Option<(bool, Option<RefOr<Schema>>)> {
    let (required, body) = match (route.method, route.path) {
        (Method::Post, "/api/v1/push") => (true, object(&["items"], json!({"items": array(push_item())}))),
        (Method::Post, "/api/v1/ack") => {
            let mut one = ack_item();
            one["properties"]["consumerGroup"] = text("Reading group; default queue mode");
            (true, one)
        }
        (Method::Post, "/api/v1/ack/batch") => (
            true,
            object(
                &["acknowledgments"],
                json!({"consumerGroup": text("Reading group; default queue mode"), "acknowledgments": array(ack_item())}),
            ),
        ),
        (Method::Post, "/api/v1/lease/{lease}/extend") => {
            (false, object(&[], json!({"seconds": integer("From now; default 60, at least 1")})))
        }
        (Method::Post, "/api/v1/configure") => (true, configuration()),
        (Method::Post, "/api/v1/transaction") => (true, transaction()),
        (Method::Post, "/api/v1/dlq/{id}/replay" | "/api/v1/messages/{partition}/{transaction}/retry") => (
            false,
            object(
                &[],
                json!({"queue": text("Where to; default where it came from"),
                       "partition": text("Where to; default where it came from")}),
            ),
        ),
        (Method::Post, "/api/v1/consumer-groups/{group}/queues/{queue}/seek") => (true, destination()),
        (Method::Post, "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek") => {
            (false, destination())
        }
        (Method::Post, "/api/v1/consumer-groups/{group}/subscription") => {
            (true, object(&["subscriptionTimestamp"], json!({"subscriptionTimestamp": text("ISO-8601")})))
        }
        (Method::Post, "/api/v1/system/maintenance" | "/api/v1/system/maintenance/pop") => {
            (true, object(&["enabled"], json!({"enabled": boolean("On or off")})))
        }
        _ => return None,
    };
    Some((required, schema(body)))
}

/// The answers of a route, status and meaning; empty: those of any route.
pub fn statuses_of(route: &Route) -> &'static [(&'static str, &'static str)] {
    const POP: &[(&str, &str)] = &[
        ("200", "Messages, or the empty answer of a group that conflates"),
        ("204", "Nothing to deliver; no body"),
        BAD,
        OVERLOADED,
        AWAY,
    ];
    const ACK: &[(&str, &str)] =
        &[("200", "One result per item, in request order, also when all failed"), BAD, TOO_LARGE];
    match (route.method, route.path) {
        (Method::Post, "/api/v1/push") => &[
            ("201", "One result per item, in request order, whatever their statuses"),
            BAD,
            TOO_LARGE,
            OVERLOADED,
            ("500", "Push maintenance is on and the spool could not be written; the body is that of 201"),
        ],
        (
            Method::Get,
            "/api/v1/pop" | "/api/v1/pop/queue/{queue}" | "/api/v1/pop/queue/{queue}/partition/{partition}",
        ) => POP,
        (Method::Post, "/api/v1/ack" | "/api/v1/ack/batch") => ACK,
        (Method::Post, "/api/v1/lease/{lease}/extend") => {
            &[("200", "Whether or not anything was extended; `success` says it"), AWAY]
        }
        (Method::Post, "/api/v1/configure") => &[("200", "The stored options"), BAD, AWAY],
        (Method::Post, "/api/v1/transaction") => {
            &[("200", "Committed, or rolled back; `success` says it"), BAD, TOO_LARGE, OVERLOADED, AWAY]
        }
        (Method::Get, "/api/v1/dlq") => &[("200", "Dead letters, newest first"), BAD, AWAY],
        (Method::Delete, "/api/v1/dlq") => &[("200", "How many were deleted"), BAD, AWAY],
        (
            Method::Post,
            "/api/v1/consumer-groups/{group}/queues/{queue}/seek"
            | "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        ) => &[("200", "The cursors moved"), BAD, ABSENT, AWAY],
        _ => &[],
    }
}

/// The body of an answer of a route.
pub fn answer_of(route: &Route, status: &str) -> Option<RefOr<Schema>> {
    let answer = match (route.path, status) {
        ("/api/v1/push", "201") => array(push_result()),
        ("/api/v1/pop" | "/api/v1/pop/queue/{queue}" | "/api/v1/pop/queue/{queue}/partition/{partition}", "200") => {
            popped()
        }
        ("/api/v1/ack" | "/api/v1/ack/batch", "200") => array(ack_result()),
        ("/api/v1/lease/{lease}/extend", "200") => object(
            &["leaseId", "success", "renewed"],
            json!({"leaseId": text("As asked"), "success": boolean("Whether anything was extended"),
                   "renewed": integer("Partitions extended"),
                   "newExpiresAt": {"type": ["string", "null"], "description": "Earliest expiry; also `expiresAt`"}}),
        ),
        ("/api/v1/transaction", "200") => object(
            &["success"],
            json!({"success": boolean("Whether all of it was committed"),
                   "reason": text("Why not, as a word"), "error": text("Why not, in words")}),
        ),
        _ => return None,
    };
    schema(answer)
}

fn push_item() -> Value {
    object(
        &["queue", "payload"],
        json!({"queue": text("Made if it does not exist"), "partition": text("Ordered lane; default `Default`"),
               "transactionId": text("Key of deduplication within the partition; default the message's id"),
               "traceId": text("Kept with the message"), "payload": {"description": "Any JSON, kept as it was sent"}}),
    )
}

fn push_result() -> Value {
    object(
        &["index", "message_id", "transaction_id", "queueName", "status"],
        json!({"index": integer("Of the item"), "message_id": text("Id of the message, or of the original"),
               "transaction_id": text("As stored"), "queueName": text("As asked"),
               "status": {"type": "string", "enum": ["queued", "duplicate", "buffered", "failed"]},
               "offset": {"type": ["integer", "null"], "description": "In its partition, where it is known"},
               "error": text("Why it failed")}),
    )
}

fn popped() -> Value {
    let message = object(
        &["id", "transactionId", "data", "createdAt", "partitionId", "partition", "leaseId"],
        json!({"id": text("Id of the message"), "transactionId": text("Acks name it"),
               "traceId": {"type": ["string", "null"]}, "data": {"description": "The payload"},
               "producerSub": {"type": ["string", "null"]}, "createdAt": text("When it was committed"),
               "partitionId": text("Acks name it"), "partition": text("Name of the partition"),
               "leaseId": text("Acks name it; empty with `autoAck`"), "consumerGroup": text("The reading group"),
               "deliveryAttempt": integer("From 1")}),
    );
    object(
        &["success", "messages", "partitionsClaimed"],
        json!({"success": boolean("true"), "queue": text("As asked"), "partition": text("Of the first message"),
               "partitionId": text("Of the first message"), "leaseId": text("One for the whole answer"),
               "consumerGroup": text("The reading group"), "messages": array(message),
               "partitionsClaimed": integer("Partitions that the lease covers"),
               "conflation": boolean("The group conflates"),
               "autopilot": object(&[], json!({"partitions": integer("Chosen"), "batch": integer("Chosen"),
                                               "waitMs": integer("Pause before the next pop")}))}),
    )
}

fn ack_item() -> Value {
    object(
        &["transactionId", "partitionId"],
        json!({"transactionId": text("Of the message"), "partitionId": text("As the pop said"),
               "leaseId": text("As the pop said; without it no lease is checked"),
               "status": {"description": "`completed` (also absent, `success`, `acked`, `ok`, true), `retry`, `dlq`; \
                                          anything else has failed", "type": ["string", "boolean", "null"]},
               "error": {"type": ["string", "null"], "description": "Why it failed; kept with the dead letter"}}),
    )
}

fn ack_result() -> Value {
    object(
        &["index", "transactionId", "success", "error", "leaseReleased", "dlq", "noop"],
        json!({"index": integer("Of the item"), "transactionId": text("As asked"),
               "success": boolean("Whether the instruction was carried out"),
               "error": {"type": ["string", "null"], "description": "Why not"},
               "leaseReleased": boolean("This call ended the lease"), "dlq": boolean("This call filed a dead letter"),
               "noop": boolean("Completed before"),
               "conflated": integer("Older messages that this ack finished, where the group conflates")}),
    )
}

fn configuration() -> Value {
    let options = object(
        &[],
        json!({"namespace": text("Label"), "task": text("Label"), "leaseTime": integer("Seconds; default 300"),
               "retryLimit": integer("Failed acks before the message is given up; default 3"),
               "retryDelay": integer("Milliseconds before a failed message comes again; default 0"),
               "deadLetterQueue": boolean("Keep what is given up; default true"),
               "dlqAfterMaxRetries": boolean("The same, another spelling; default true"),
               "delayedProcessing": integer("Seconds before a message is delivered; default 0"),
               "windowBuffer": integer("Seconds that a partition gathers; default 0"),
               "minPopWaitTime": integer("Milliseconds that an under-full pop gathers; at most 60000, default 0"),
               "retentionEnabled": boolean("Switch of the next two; default false"),
               "retentionSeconds": integer("Delete what is older, read or not; default 0: never"),
               "completedRetentionSeconds": integer("Delete what is older and read by all groups; default 0: never"),
               "maxWaitTimeSeconds": integer("Delete what is older, whatever the switch says; default 0: never"),
               "encryptionEnabled": boolean("Encrypt payloads at rest; default false"),
               "dedupWindowSeconds": integer("How long a transaction id is remembered; default 3600, 0: not at all"),
               "retentionSinkHold": text("Sink that retention waits for"),
               "retentionSinkHoldMaxSeconds": integer("Longest such wait; default 604800"),
               "priority": integer("Kept, without effect"), "ttl": integer("Kept, without effect"),
               "maxSize": integer("Kept, without effect")}),
    );
    object(
        &["queue"],
        json!({"queue": text("Name"), "namespace": text("Label"), "task": text("Label"), "options": options,
               "mode": {"type": "string", "enum": ["replace", "merge"],
                        "description": "What becomes of options that are not named; default `replace`: their defaults"}}),
    )
}

fn transaction() -> Value {
    let mut ack = ack_item();
    ack["required"] = json!(["type", "transactionId", "partitionId"]);
    ack["properties"]["type"] = json!({"const": "ack"});
    ack["properties"]["consumerGroup"] = text("Reading group; default queue mode");
    let push = object(&["type", "items"], json!({"type": {"const": "push"}, "items": array(push_item())}));
    object(
        &["operations"],
        json!({"operations": array(json!({"oneOf": [push, ack]})),
               "requiredLeases": array(text("A lease that must still be held"))}),
    )
}

fn destination() -> Value {
    object(
        &[],
        json!({"timestamp": text("ISO-8601: the first message not before it is the next"),
               "toEnd": boolean("Past everything")}),
    )
}

#[cfg(test)]
mod tests {
    use super::super::routes::ROUTES;
    use super::*;

    #[test]
    fn every_shape_is_a_schema() {
        let bodies: Vec<_> = ROUTES.iter().filter_map(|route| Some((route.path, body_of(route)?.1))).collect();
        assert_eq!(bodies.len(), 13);
        for (path, schema) in bodies {
            assert!(schema.is_some(), "{path}");
        }
        let answers =
            [("/api/v1/push", "201"), ("/api/v1/pop", "200"), ("/api/v1/ack", "200"), ("/api/v1/transaction", "200")];
        for (path, status) in answers {
            assert!(ROUTES.iter().any(|route| route.path == path && answer_of(route, status).is_some()), "{path}");
        }
    }
}
