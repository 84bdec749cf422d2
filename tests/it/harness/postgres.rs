//! A database per test, cloned from one that the broker migrated once.
//!
//! A test that passes leaves its database, emptied, to a later one: making the files of a fresh clone costs more than
//! most tests. No two tests ever share one at the same time, and that of a failed test is never touched again.

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::sync::{Mutex, OnceCell};

use super::server::{Server, Upstream};
use super::{brokers, eventually};

/// Names of emptied databases.
static SPARE: StdMutex<Vec<String>> = StdMutex::new(Vec::new());

/// Empties every table of the schema but the one row that the migrations wrote.
const EMPTY: &str = "
DO $$
DECLARE t record;
BEGIN
  FOR t IN SELECT tablename, pg_total_relation_size(format('queen.%I', tablename)) > 1000000 AS large
             FROM pg_tables WHERE schemaname = 'queen' AND tablename <> 'meta'
  LOOP
    IF t.large THEN
      EXECUTE format('TRUNCATE queen.%I', t.tablename);
    ELSE
      EXECUTE format('DELETE FROM queen.%I', t.tablename);
    END IF;
  END LOOP;
END $$";

/// One test's database.
pub struct Database {
    /// What a broker is given.
    pub url: String,
    /// For looking at rows, and for moving a lease's expiry instead of waiting for it.
    pub pool: PgPool,
    name: String,
    is_migrated: bool,
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
                admin(&format!("ALTER DATABASE {name} WITH IS_TEMPLATE true ALLOW_CONNECTIONS false")).await;
                name
            })
            .await;
        let spare = SPARE.lock().unwrap().pop();
        match spare {
            Some(name) => {
                alone_in(&name).await;
                let database = Database::open(name, true).await;
                // With what its former users read, no test could say what its own broker reads.
                database.pool.execute("SELECT pg_stat_reset()").await.unwrap();
                database.pool.execute(EMPTY).await.unwrap();
                database
            }
            None => Database::create(&format!("TEMPLATE {template}"), true).await,
        }
    }

    async fn create(clause: &str, is_migrated: bool) -> Database {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
        let name = format!("regent_it_{}_{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        {
            let _turn = ONE_AT_A_TIME.lock().await;
            admin(&format!("CREATE DATABASE {name} {clause}")).await;
        }
        Database::open(name, is_migrated).await
    }

    async fn open(name: String, is_migrated: bool) -> Database {
        let url = server().await.url(&name);
        let options = PgConnectOptions::from_str(&url).unwrap();
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
        Database { url, pool, name, is_migrated }
    }

    /// A database, without a schema, of a server that is not the one of this run.
    pub async fn of(server: &Server, name: &str) -> Database {
        let mut connection = PgConnection::connect(&server.url("postgres")).await.unwrap();
        connection.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        connection.close().await.unwrap();
        let url = server.url(name);
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy(&url).unwrap();
        Database { url, pool, name: name.to_owned(), is_migrated: false }
    }

    /// Where its server listens.
    pub fn upstream(&self) -> Upstream {
        let options = self.pool.connect_options();
        match options.get_socket() {
            Some(directory) => Upstream::Socket(directory.join(format!(".s.PGSQL.{}", options.get_port()))),
            None => Upstream::Tcp(options.get_host().to_owned(), options.get_port()),
        }
    }

    /// Its URL by way of another address.
    pub fn url_at(&self, address: SocketAddr) -> String {
        Server::of_this_run().url_at(&self.name, address)
    }

    /// Ends every connection to it. A connection reports what it has read at the latest when it ends.
    pub async fn disconnect_all(&self) {
        alone_in(&self.name).await;
    }

    /// Runs one statement.
    pub async fn execute(&self, sql: &'static str) {
        self.pool.execute(sql).await.unwrap();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.is_migrated && !std::thread::panicking() {
            SPARE.lock().unwrap().push(std::mem::take(&mut self.name));
        }
    }
}

/// A database without a schema, for tests of booting.
pub async fn empty_database() -> Database {
    Database::create("TEMPLATE template0 ENCODING 'UTF8'", false).await
}

/// Ends what a stopped broker or a dropped pool may have left connected.
async fn alone_in(name: &str) {
    let end = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'");
    eventually(Duration::from_secs(10), async || admin(&end).await == 0).await;
}

async fn server() -> &'static Server {
    static SERVER: OnceCell<&'static Server> = OnceCell::const_new();
    SERVER.get_or_init(|| async { tokio::task::spawn_blocking(Server::of_this_run).await.unwrap() }).await
}

/// Runs one statement as the owner of all; answers the rows it touched.
async fn admin(sql: &str) -> u64 {
    let mut connection = PgConnection::connect(&server().await.url("postgres")).await.unwrap();
    let done = connection.execute(AssertSqlSafe(sql.to_owned())).await.unwrap();
    connection.close().await.unwrap();
    done.rows_affected()
}
