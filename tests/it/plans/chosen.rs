//! The plans that PostgreSQL chose for a broker's statements, by `auto_explain` (of PostgreSQL's contrib): none may come
//! into a table but by a key, whatever statistics said when it was made (design §5).

use std::collections::{BTreeMap, BTreeSet};

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Broker, Client, Database, PATIENCE, Pop, Road, Server, eventually};

/// Begins an entry of the server's log: who connected where.
const ENTRY: &str = "entry of %a in %d: ";

/// Tables that hold a handful of rows however large the rest is.
const SMALL: [&str; 5] = ["brokers", "lifetime", "loop_leases", "meta", "system_state"];

/// What is right all the same: a piece of the statement, the fault, why.
const ALLOWED: [(&str, &str, &str); 3] = [
    ("FROM queen.stats WHERE dead_letters > 0", "all of stats_dead_letters", "it has no other entries"),
    (
        "FROM queen.log_consumers c JOIN queen.log_partitions p",
        "Seq Scan on log_consumers",
        "an operator lists all cursors",
    ),
    ("FROM _sqlx_migrations", "all of _sqlx_migrations_pkey", "once, at the start"),
];

/// What the load must have made the broker say: by a piece of the text. A statement that nobody sends proves nothing.
const HOT: [(&str, &str); 26] = [
    ("locking partitions", "FOR NO KEY UPDATE OF p"),
    ("making partitions", "INSERT INTO queen.log_partitions (id, queue_id, name, last_offset"),
    ("deduplication", "queen.log_txns t"),
    ("storing segments", "INSERT INTO queen.log_segments"),
    ("claiming", "visible_end"),
    ("first claim", "placed AS MATERIALIZED"),
    ("reading", "frames FROM"),
    ("paging partitions", "array_agg(p.id ORDER BY p.name) FILTER"),
    ("first partitions of many queues", "ORDER BY name LIMIT $3) p JOIN queen.consumer_groups"),
    ("registering groups", "unregistered AS MATERIALIZED"),
    ("labels", "namespace = $1"),
    ("changed labels", "labelled_by"),
    ("acks by position", "locked AS MATERIALIZED ( SELECT c.ctid AS place"),
    ("acks by hash", "low.lo, span.hi"),
    ("transactions", "CASE WHEN c.partition_id IS NOT NULL"),
    ("extending a lease", "extended AS"),
    ("due queues", "FROM queen.retention_queues WHERE kind = $1"),
    ("due lists", "l.before < $3"),
    ("taking lists", "FOR UPDATE OF l SKIP LOCKED"),
    ("deleting segments", "DELETE FROM queen.log_segments"),
    ("deleting hashes", "DELETE FROM queen.log_txns"),
    ("rescheduling queues", "UPDATE queen.retention_queues r SET check_at = coalesce"),
    ("removing partitions", "IS NULL AND (SELECT 1 FROM queen.dead_letters"),
    ("counting deliverable messages", "sum(p.last_offset - greatest(c.committed"),
    ("seek", "search (low, high)"),
    ("statistics", "INSERT INTO queen.stats"),
];

/// A broker's statements whose plan shows a fault, with the fault.
type Faults = BTreeMap<String, BTreeSet<String>>;

struct Plans {
    /// By name of an index, the column that it begins with.
    leading: BTreeMap<String, String>,
    faults: Faults,
    statements: BTreeSet<String>,
}

impl Plans {
    fn take(&mut self, log: &str, database: &str) {
        let mark = format!("entry of regent in {database}: ");
        for entry in log.split("\nentry of ").map(|entry| format!("entry of {entry}")) {
            let Some(text) = entry.strip_prefix(&mark) else { continue };
            let Some((_, plan)) = text.split_once("plan:\n") else { continue };
            let plan: Value = serde_json::from_str(plan).unwrap_or_else(|error| panic!("{error}: {plan}"));
            let statement = plan["Query Text"].as_str().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
            self.look(&plan["Plan"], &statement);
            self.statements.insert(statement);
        }
    }

    fn look(&mut self, node: &Value, statement: &str) {
        let text = |key: &str| node[key].as_str().unwrap_or_default();
        let children = || node["Plans"].as_array().into_iter().flatten();
        let (kind, table, index) = (text("Node Type"), text("Relation Name"), text("Index Name"));
        let is_small = SMALL.contains(&table);
        let fault = match kind {
            "Seq Scan" | "Tid Range Scan" if !is_small => Some(format!("{kind} on {table}")),
            "Index Scan" | "Index Only Scan" if !is_small && !self.enters(node) => {
                Some(format!("{kind} of all of {index}: {}", text("Index Cond")))
            }
            "Hash Join" | "Merge Join" | "Bitmap Heap Scan" => Some(format!("{kind} {table}")),
            // A table that is compared with the other side row by row was not entered by what they share.
            "Nested Loop" if node["Join Filter"].is_string() && children().nth(1).is_some_and(is_scan_of_much) => {
                Some(format!("{kind}, compared only afterwards: {}", text("Join Filter")))
            }
            _ => None,
        };
        let is_allowed = |fault: &String| {
            ALLOWED.iter().any(|(piece, allowed, _)| statement.contains(piece) && fault.contains(allowed))
        };
        if let Some(fault) = fault.filter(|fault| !is_allowed(fault)) {
            self.faults.entry(statement.to_owned()).or_default().insert(fault);
        }
        for child in children() {
            self.look(child, statement);
        }
    }

    /// Whether an index is entered by the column that it begins with.
    fn enters(&self, scan: &Value) -> bool {
        let condition = scan["Index Cond"].as_str().unwrap_or_default();
        let index = scan["Index Name"].as_str().unwrap();
        let leading = self.leading.get(index).unwrap_or_else(|| panic!("no index {index}"));
        condition.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == leading)
    }
}

fn is_scan_of_much(node: &Value) -> bool {
    match node["Node Type"].as_str().unwrap() {
        "Materialize" | "Memoize" => is_scan_of_much(&node["Plans"][0]),
        "Seq Scan" | "Index Scan" | "Index Only Scan" => !SMALL.contains(&node["Relation Name"].as_str().unwrap()),
        _ => false,
    }
}

/// Has everything said that is said all the time: pushes, pops of every kind, acks of both roads, transactions, seeks,
/// listings; waits for retention and statistics.
async fn load(broker: &Client, db: &Database, ns: &str) {
    let (kept, held, gathered) = (&format!("{ns}.kept"), &format!("{ns}.held"), &format!("{ns}.gathered"));
    let lanes = |queue: &str, lanes: usize, round: &str| -> Value {
        let item = |n: usize| json!({ "queue": queue, "partition": format!("p{n}"), "payload": n, "transactionId": format!("{round}{n}") });
        (0..lanes).map(item).collect()
    };
    broker
        .configure(
            kept,
            json!({ "namespace": ns, "retentionEnabled": true, "completedRetentionSeconds": 100, "retryLimit": 1 }),
        )
        .await;
    broker.configure(held, json!({ "namespace": ns, "delayedProcessing": 30, "windowBuffer": 1 })).await;
    broker.configure(gathered, json!({ "namespace": ns, "minPopWaitTime": 30, "maxWaitTimeSeconds": 1_000 })).await;
    for (n, round) in ["a", "b", "a", "c"].into_iter().enumerate() {
        for queue in [kept, held, gathered] {
            broker.push(lanes(queue, 30, round)).await;
        }
        broker.push_ids(kept, "p0", [format!("lone {n}")]).await;
    }
    db.age(40).await;
    for group in ["g", "h"] {
        let pop = || Pop::queue(kept).group(group).all();
        let popped = broker.pop(&pop().partitions(20).batch(50)).await;
        assert!(popped.messages.len() > 10);
        broker.extend(&popped.lease_id, 300).await;
        // Fused, what names its lease as it was delivered; resolved, the rest.
        assert!(broker.ack(group, popped.items("completed")).await.iter().all(|result| result.success));
        for status in ["failed", "dlq", "retry", "completed"] {
            let popped = broker.pop(&pop().partitions(3).batch(6)).await;
            let items = popped.messages.iter().map(|message| message.leaseless(status)).collect();
            broker.ack(group, items).await;
        }
        let seek = format!("/api/v1/consumer-groups/{group}/queues/{kept}/seek");
        broker.post_json(&seek, &json!({ "toEnd": true })).await.expect(200);
        broker.post_json(&seek, &json!({ "timestamp": "1970-01-01T00:00:00Z" })).await.expect(200);
        let popped = broker.pop(&Pop::partition(kept, "p0").group(group).all().batch(2)).await;
        assert!(!popped.is_empty());
        let ack = |message: &crate::harness::Message| {
            json!({ "type": "ack", "transactionId": message.transaction_id, "partitionId": message.partition_id,
                "leaseId": message.lease_id, "consumerGroup": group, "status": "completed" })
        };
        let mut operations: Vec<Value> = popped.messages.iter().map(ack).collect();
        operations.push(json!({ "type": "push", "items": lanes(kept, 2, &format!("tx {group}")) }));
        let done =
            broker.post_json("/api/v1/transaction", &json!({ "operations": operations })).await.expect(200).json();
        assert_eq!(done["success"], true, "{done}");
        for queue in [held, gathered] {
            broker.pop(&Pop::queue(queue).group(group).all().partitions(4).batch(500).wait_ms(60)).await;
            broker.pop(&Pop::queue(queue).group(group).all().auto_ack().batch(3)).await;
        }
        let by_label = || Pop::discover().set("namespace", ns).group(&format!("label {group}"));
        assert!(!broker.pop(&by_label().all().partitions(0).batch(20)).await.is_empty());
        broker.configure(&format!("{ns}.late {group}"), json!({ "namespace": ns })).await;
        broker.pop(&by_label().all().auto_ack().batch(20)).await;
        broker.pop(&Pop::discover().set("task", "").set("namespace", ns).group("new").batch(5)).await;
    }
    for target in [
        "/consumer-groups",
        "/consumer-groups/lagging?minLagSeconds=0",
        "/consumer-groups/g",
        "/resources/queues",
        "/status",
    ] {
        broker.get(&format!("/api/v1{target}")).await.expect(200);
    }
    db.age(4_000_000).await;
    eventually(PATIENCE, || db.is_swept()).await;
    db.execute("UPDATE queen.empty_partitions SET look_at = '-infinity'").await;
    eventually(PATIENCE, async || {
        let waiting = sqlx::query_scalar("SELECT count(*) FROM queen.empty_partitions WHERE look_at = '-infinity'");
        waiting.fetch_one(&db.pool).await.unwrap_or(1i64) == 0
    })
    .await;
    eventually(PATIENCE, async || {
        let stats = sqlx::query_scalar("SELECT count(*) FROM queen.stats");
        stats.fetch_one(&db.pool).await.unwrap_or(0i64) >= 3
    })
    .await;
    broker.try_send(Method::DELETE, "/api/v1/consumer-groups/h?deleteMetadata=true", None).await.unwrap().expect(200);
}

/// Plans of tables that nobody has analysed, of tables that were empty when somebody did, and of small ones: no kind of
/// connection may have one that reads a table, or an index, from one end to the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_of_the_data_path_enters_a_table_but_by_its_key() {
    let settings = format!("log_line_prefix = '{ENTRY}'\nmax_connections = 60\nshared_buffers = 32MB\n");
    let server = tokio::task::spawn_blocking(move || Server::configured(&settings)).await.unwrap();
    let mut plans = Plans { leading: BTreeMap::new(), faults: BTreeMap::new(), statements: BTreeSet::new() };
    for (name, analysed) in [("never_analysed", false), ("analysed_empty", true)] {
        let db = Database::of(&server, name).await;
        let loaded = sqlx::query("LOAD 'auto_explain'").execute(&db.pool).await;
        loaded.expect("this test needs auto_explain of PostgreSQL's contrib modules (Debian: in postgresql-15)");
        Broker::start(&db.url, Road::Fused).await.stop().await;
        if analysed {
            db.execute("VACUUM ANALYZE").await;
        }
        for (setting, value) in [
            ("session_preload_libraries", "auto_explain"),
            ("auto_explain.log_min_duration", "0"),
            ("auto_explain.log_nested_statements", "on"),
            ("auto_explain.log_format", "json"),
        ] {
            let sql = format!("ALTER DATABASE {name} SET {setting} = '{value}'");
            sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&db.pool).await.unwrap();
        }
        for ns in &["ns", "again"][..1 + usize::from(analysed)] {
            let broker = Broker::tuned(&db.url, |config| {
                config.retention.interval_ms = 40;
                config.statistics.stats_interval_ms = 200;
                config.pop.segment_cache_mib_max = 0;
            })
            .await;
            load(&broker, &db, ns).await;
            broker.stop().await;
            db.execute("VACUUM ANALYZE").await;
        }
        let leading: Vec<(String, String)> = sqlx::query_as(
            "SELECT c.relname::text, pg_get_indexdef(i.indexrelid, 1, true) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid",
        )
        .fetch_all(&db.pool)
        .await
        .unwrap();
        plans.leading.extend(leading);
        plans.take(&server.log(), name);
    }
    let unsaid: Vec<_> = HOT.iter().filter(|(_, piece)| !plans.statements.iter().any(|s| s.contains(piece))).collect();
    assert!(unsaid.is_empty(), "{unsaid:?} of {} statements", plans.statements.len());
    assert!(plans.faults.is_empty(), "{:#?}", plans.faults);
}
