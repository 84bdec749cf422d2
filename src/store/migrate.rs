//! Embedded, forward-only migrations, applied at boot (README ruling 10). `sqlx` serialises brokers that boot at once
//! with an advisory lock and refuses a schema that is newer than this binary.

use std::collections::BTreeMap;

use sqlx::PgPool;
use sqlx::migrate::MigrateError;
use thiserror::Error;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("./migrations");

/// Why a database cannot be used.
#[derive(Debug, Error)]
pub enum SchemaError {
    /// The database did not answer; booting goes on when it does (README ruling 3).
    #[error("cannot reach the database: {0}")]
    Unreachable(#[source] sqlx::Error),
    /// It answered and turned us away: no such database, wrong credentials. Or we it: its certificate does not hold.
    #[error("the database refuses this broker, or the other way round: {0}")]
    Refused(#[source] sqlx::Error),
    /// A schema `queen` that our migrations did not make.
    #[error("the database holds a schema \"queen\" that this broker did not create; give it a database of its own")]
    Foreign,
    /// Newer than this binary, altered, or a migration failed.
    #[error("schema apply failed: {0}")]
    Apply(#[source] MigrateError),
    /// Migrations are left to an operator, who has not run them.
    #[error(
        "the schema lacks migration {0} of this version, and QUEEN_APPLY_SCHEMA is off: start this version once \
         with QUEEN_APPLY_SCHEMA=1 and a role that may create tables"
    )]
    Behind(i64),
    /// Migrations are left to an operator, and the schema is of another version.
    #[error("the schema is not the one of this version, and QUEEN_APPLY_SCHEMA is off: {0}")]
    Differs(#[source] MigrateError),
}

/// Brings the database to this binary's schema. Safe when several brokers boot at once.
pub async fn apply(pool: &PgPool) -> Result<(), SchemaError> {
    is_ours(pool).await?;
    MIGRATIONS.run(pool).await.map_err(|error| match error {
        MigrateError::Execute(error) if is_away(&error) => SchemaError::Unreachable(error),
        other => SchemaError::Apply(other),
    })
}

/// Checks that the database has this binary's schema, and changes nothing: reading the table of migrations is all that
/// the role needs.
pub async fn verify(pool: &PgPool) -> Result<(), SchemaError> {
    let applied = if is_ours(pool).await? {
        sqlx::query_as("SELECT version, checksum, success FROM public._sqlx_migrations ORDER BY version")
            .fetch_all(pool)
            .await
            .map_err(unusable)?
    } else {
        Vec::new()
    };
    let embedded = MIGRATIONS.iter().filter(|migration| !migration.migration_type.is_down_migration());
    compare(&applied, embedded.map(|migration| (migration.version, migration.checksum.as_ref())).collect())
}

/// Whether our migrations have been here; an error if somebody else's schema is in their place.
async fn is_ours(pool: &PgPool) -> Result<bool, SchemaError> {
    let (schema, ours): (bool, bool) = sqlx::query_as(
        "SELECT to_regnamespace('queen') IS NOT NULL, to_regclass('public._sqlx_migrations') IS NOT NULL",
    )
    .fetch_one(pool)
    .await
    .map_err(unusable)?;
    if schema && !ours { Err(SchemaError::Foreign) } else { Ok(ours) }
}

/// What was applied (version, checksum, success) against what this binary holds.
fn compare(applied: &[(i64, Vec<u8>, bool)], mut embedded: BTreeMap<i64, &[u8]>) -> Result<(), SchemaError> {
    for (version, checksum, success) in applied {
        let differs = match embedded.remove(version) {
            _ if !success => MigrateError::Dirty(*version),
            None => MigrateError::VersionMissing(*version),
            Some(ours) if ours != checksum => MigrateError::VersionMismatch(*version),
            Some(_) => continue,
        };
        return Err(SchemaError::Differs(differs));
    }
    embedded.keys().next().map_or(Ok(()), |version| Err(SchemaError::Behind(*version)))
}

fn unusable(error: sqlx::Error) -> SchemaError {
    if is_away(&error) { SchemaError::Unreachable(error) } else { SchemaError::Refused(error) }
}

/// Whether the server could not be reached or is starting or stopping, rather than having refused us. A certificate that
/// does not hold, or no TLS where it is asked for, does not pass by waiting (security-operations §5).
fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(db) => db.code().is_some_and(|code| code.starts_with("57P") || code == "53300"),
        sqlx::Error::Tls(_) | sqlx::Error::Configuration(_) => false,
        // This is how a failed TLS handshake arrives.
        sqlx::Error::Io(error) => error.kind() != std::io::ErrorKind::InvalidData,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(applied: &[(i64, &[u8], bool)]) -> String {
        let applied: Vec<_> = applied.iter().map(|(version, sum, ok)| (*version, sum.to_vec(), *ok)).collect();
        let embedded = BTreeMap::from([(1, &b"one"[..]), (2, &b"two"[..])]);
        compare(&applied, embedded).map_or_else(|error| error.to_string(), |()| "same".to_owned())
    }

    #[test]
    fn a_schema_of_another_version_is_told_from_this_one() {
        assert_eq!(verdict(&[(1, b"one", true), (2, b"two", true)]), "same");
        assert!(verdict(&[]).contains("lacks migration 1"));
        assert!(verdict(&[(1, b"one", true)]).contains("lacks migration 2"));
        assert!(verdict(&[(1, b"uno", true)]).contains("migration 1 was previously applied but has been modified"));
        let newer = verdict(&[(1, b"one", true), (2, b"two", true), (3, b"three", true)]);
        assert!(newer.contains("migration 3 was previously applied but is missing"), "{newer}");
        assert!(verdict(&[(1, b"one", true), (2, b"two", false)]).contains("partially applied"));
    }
}
