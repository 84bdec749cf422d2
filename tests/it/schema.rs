//! Booting without the right to migrate (`spec/security-operations.md` §13.2).

use crate::harness::{Broker, empty_database};

/// `QUEEN_APPLY_SCHEMA=0` changes nothing, and serves only the schema of this version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_may_not_migrate_wants_the_schema_of_its_version() {
    let db = empty_database().await;
    let url = ("DATABASE_URL", db.url.as_str());
    let start = async || Broker::from_environment([url, ("QUEEN_APPLY_SCHEMA", "0")]).await.map(|_| ());
    let refusal = start().await.unwrap_err();
    assert!(refusal.contains("lacks migration 1") && refusal.contains("QUEEN_APPLY_SCHEMA"), "{refusal}");
    let schema: Option<String> =
        sqlx::query_scalar("SELECT to_regnamespace('queen')::text").fetch_one(&db.pool).await.unwrap();
    assert_eq!(schema, None);

    Broker::from_environment([url]).await.unwrap().stop().await;
    start().await.unwrap();

    db.execute("DELETE FROM _sqlx_migrations WHERE version = (SELECT max(version) FROM _sqlx_migrations)").await;
    assert!(start().await.unwrap_err().contains("lacks migration"));
    db.execute("INSERT INTO _sqlx_migrations VALUES (0, 'of another version', now(), true, '', 0)").await;
    let refusal = start().await.unwrap_err();
    assert!(refusal.contains("not the one of this version"), "{refusal}");
}
