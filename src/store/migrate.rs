//! Embedded, forward-only migrations, applied at boot (README ruling 10). `sqlx` serialises brokers that boot at once
//! with an advisory lock and refuses a schema that is newer than this binary.

use sqlx::PgPool;
use thiserror::Error;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("./migrations");

/// Why a database cannot be used.
#[derive(Debug, Error)]
pub enum SchemaError {
    /// The database did not answer; booting goes on when it does (README ruling 3).
    #[error("cannot reach the database: {0}")]
    Unreachable(#[source] sqlx::Error),
    /// It answered and turned us away: no such database, wrong credentials.
    #[error("the database refuses this broker: {0}")]
    Refused(#[source] sqlx::Error),
    /// A schema `queen` that our migrations did not make.
    #[error("the database holds a schema \"queen\" that this broker did not create; give it a database of its own")]
    Foreign,
    /// Newer than this binary, altered, or a migration failed.
    #[error("schema apply failed: {0}")]
    Apply(#[source] sqlx::migrate::MigrateError),
}

/// Brings the database to this binary's schema. Safe when several brokers boot at once.
pub async fn apply(pool: &PgPool) -> Result<(), SchemaError> {
    let (schema, ours): (bool, bool) = sqlx::query_as(
        "SELECT to_regnamespace('queen') IS NOT NULL, to_regclass('public._sqlx_migrations') IS NOT NULL",
    )
    .fetch_one(pool)
    .await
    .map_err(|error| if is_away(&error) { SchemaError::Unreachable(error) } else { SchemaError::Refused(error) })?;
    if schema && !ours {
        return Err(SchemaError::Foreign);
    }
    MIGRATIONS.run(pool).await.map_err(|error| match error {
        sqlx::migrate::MigrateError::Execute(error) if is_away(&error) => SchemaError::Unreachable(error),
        other => SchemaError::Apply(other),
    })
}

/// Whether the server could not be reached or is starting or stopping, rather than having refused us.
fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(db) => db.code().is_some_and(|code| code.starts_with("57P") || code == "53300"),
        _ => true,
    }
}
