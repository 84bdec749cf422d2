//! A database per test, cloned from one that the broker migrated once.

use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::sync::{Mutex, OnceCell};

use super::brokers;
use super::server::Server;

/// One test's database.
pub struct Database {
    /// What a broker is given.
    pub url: String,
    /// For looking at rows, and for moving a lease's expiry instead of waiting for it.
    pub pool: PgPool,
    name: String,
}

impl Database {
    /// A migrated database without a row.
    pub async fn migrated() -> Database {
        static TEMPLATE: OnceCell<String> = OnceCell::const_new();
        let template = TEMPLATE
            .get_or_init(|| async {
                let template = empty_database().await;
                brokers::migrate(&template.url).await;
                template.pool.close().await;
                let name = template.name.clone();
                std::mem::forget(template); // lives as long as the run
                admin(&format!("ALTER DATABASE {name} WITH IS_TEMPLATE true ALLOW_CONNECTIONS false")).await;
                name
            })
            .await;
        Database::create(&format!("TEMPLATE {template}")).await
    }

    async fn create(clause: &str) -> Database {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
        let name = format!("regent_it_{}_{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        {
            let _turn = ONE_AT_A_TIME.lock().await;
            admin(&format!("CREATE DATABASE {name} {clause}")).await;
        }
        let url = server().await.url(&name);
        let options = PgConnectOptions::from_str(&url).unwrap();
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
        Database { url, pool, name }
    }

    /// Runs one statement.
    pub async fn execute(&self, sql: &'static str) {
        self.pool.execute(sql).await.unwrap();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let Some(server) = SERVER.get().filter(|server| server.outside) else { return };
        let (url, sql) = (server.url("postgres"), format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name));
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut connection = PgConnection::connect(&url).await?;
                connection.execute(AssertSqlSafe(sql)).await?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        });
        if !matches!(dropped.join(), Ok(Ok(()))) {
            eprintln!("could not drop {}", self.name);
        }
    }
}

/// A database without a schema, for tests of booting.
pub async fn empty_database() -> Database {
    Database::create("TEMPLATE template0 ENCODING 'UTF8'").await
}

static SERVER: OnceCell<&'static Server> = OnceCell::const_new();

async fn server() -> &'static Server {
    SERVER.get_or_init(|| async { tokio::task::spawn_blocking(Server::of_this_run).await.unwrap() }).await
}

async fn admin(sql: &str) {
    let mut connection = PgConnection::connect(&server().await.url("postgres")).await.unwrap();
    connection.execute(AssertSqlSafe(sql.to_owned())).await.unwrap();
    connection.close().await.unwrap();
}
