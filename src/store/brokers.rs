//! Brokers of one database: who is alive, and what they tell each other through `NOTIFY`.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};

const CHANNEL: &str = "regent";
/// How long connecting to listen may take.
const LISTEN_PATIENCE: Duration = Duration::from_secs(10);

/// Another broker on this database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRow {
    /// What it is called in notifications.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Whether it was seen within ten seconds.
    pub is_alive: bool,
}

/// Notifications of the other brokers, as they come.
#[derive(Debug)]
pub struct Notifications {
    listener: PgListener,
    /// The process of the database at the other end.
    backend: i32,
}

impl Store {
    /// Enters this broker as alive, drops those that have been silent for long, and counts the other live ones.
    pub async fn heartbeat(&self, id: Uuid, name: &str) -> StoreResult<i64> {
        sqlx::query_scalar(
            "WITH me AS ( \
               INSERT INTO queen.brokers (id, name, last_seen) VALUES ($1, $2, clock_timestamp()) \
               ON CONFLICT (id) DO UPDATE SET last_seen = excluded.last_seen), \
             gone AS ( \
               DELETE FROM queen.brokers WHERE last_seen < clock_timestamp() - interval '1 hour') \
             SELECT count(*) FROM queen.brokers \
             WHERE id <> $1 AND last_seen > clock_timestamp() - interval '10 seconds'",
        )
        .bind(id)
        .bind(name)
        .fetch_one(&self.claims)
        .timed("heartbeat")
        .await
    }

    /// The other brokers, by name.
    pub async fn list_brokers(&self, id: Uuid) -> StoreResult<Vec<PeerRow>> {
        let rows: Vec<(Uuid, String, bool)> = sqlx::query_as(
            "SELECT id, name, last_seen > clock_timestamp() - interval '10 seconds' FROM queen.brokers WHERE id <> $1 \
             ORDER BY name, id LIMIT 1000",
        )
        .bind(id)
        .fetch_all(&self.pool)
        .timed("listing brokers")
        .await?;
        Ok(rows.into_iter().map(|(id, name, is_alive)| PeerRow { id, name, is_alive }).collect())
    }

    /// Takes this broker off the list.
    pub async fn sign_off(&self, id: Uuid) -> StoreResult<()> {
        sqlx::query("DELETE FROM queen.brokers WHERE id = $1").bind(id).execute(&self.claims).timed("sign-off").await?;
        Ok(())
    }

    /// Sends payloads of at most 7,999 bytes to every listening broker, this one included.
    pub async fn notify(&self, payloads: &[String]) -> StoreResult<()> {
        sqlx::query("SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS u (payload)")
            .bind(CHANNEL)
            .bind(payloads)
            .execute(&self.claims)
            .timed("notify")
            .await?;
        Ok(())
    }

    /// Starts to listen, on a connection of its own and outside the pools: one whose wire is dead is given up without being
    /// waited for.
    pub async fn listen(&self) -> StoreResult<Notifications> {
        let options = PgPoolOptions::new().max_connections(1).acquire_timeout(LISTEN_PATIENCE).max_lifetime(None);
        let pool = options.idle_timeout(None).connect_lazy_with((*self.pool.connect_options()).clone());
        let mut listener = PgListener::connect_with(&pool).await.during("listen")?;
        listener.eager_reconnect(false);
        let backend: i32 =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut listener).await.during("listen")?;
        listener.listen(CHANNEL).await.during("listen")?;
        Ok(Notifications { listener, backend })
    }

    /// Ends the database's side of a listening connection that has died on the way.
    pub async fn hang_up(&self, notifications: Notifications) -> StoreResult<()> {
        sqlx::query("SELECT pg_terminate_backend($1)")
            .bind(notifications.backend)
            .execute(&self.claims)
            .timed("hanging up")
            .await?;
        Ok(())
    }
}

impl Notifications {
    /// The next payload; `None` when the connection was lost: whatever was sent meanwhile is lost too.
    pub async fn next(&mut self) -> StoreResult<Option<String>> {
        let notification = self.listener.try_recv().await.during("receiving a notification")?;
        Ok(notification.map(|n| n.payload().to_owned()))
    }
}
