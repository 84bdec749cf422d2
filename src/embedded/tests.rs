//! Each test has a data directory, and so a server, of its own. They need the PostgreSQL programs and no network.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use sqlx::{Connection, PgConnection};
use tempfile::TempDir;

use super::*;

/// A directory that the user who runs PostgreSQL can enter, also when the tests run as root.
fn data_dir() -> TempDir {
    tempfile::Builder::new().prefix("regent-test-").permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap()
}

async fn start(data_dir: &Path) -> Result<EmbeddedPostgres, EmbeddedError> {
    EmbeddedPostgres::start(&Config::with_data_dir(data_dir).unwrap()).await
}

async fn ask(url: &str, question: &str) -> Result<String, sqlx::Error> {
    let mut connection = PgConnection::connect(url).await?;
    let answer = sqlx::query_scalar(sqlx::AssertSqlSafe(question)).fetch_one(&mut connection).await?;
    connection.close().await?;
    Ok(answer)
}

async fn tell(url: &str, statement: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

/// Polls until `done`, for 60 s at most.
async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut tick = interval(Duration::from_millis(20));
    while !done().await {
        assert!(Instant::now() < deadline, "{what}: not within 60 s");
        tick.tick().await;
    }
}

fn kill_9(pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// A server on `cluster` that no broker looks after, as a killed broker leaves it.
fn orphan(cluster: &Path) -> std::process::Child {
    let account = Account::choose().unwrap();
    let programs = Programs::find(None, cluster::version(cluster), &account).unwrap();
    let mut command = account.command(programs.postgres());
    command.arg("-D").arg(cluster).args(["-c", "listen_addresses=", "-c"]);
    // It must listen somewhere, and here it may.
    command.arg(format!("unix_socket_directories={}", cluster.display()));
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

async fn orphan_is_ready(cluster: &Path) {
    let pid_file = cluster.join("postmaster.pid");
    until("orphan ready", async || {
        fs::read_to_string(&pid_file).is_ok_and(|text| text.lines().nth(7).map(str::trim) == Some("ready"))
    })
    .await;
}

#[tokio::test]
async fn it_starts_serves_over_both_ways_stops_and_keeps_its_data() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    for url in [postgres.url(), postgres.tcp_url()] {
        assert_eq!(ask(url, "SELECT current_database() || '/' || current_user").await.unwrap(), "regent/regent");
    }
    let settings = "SELECT string_agg(name || '=' || setting, ' ' ORDER BY lower(name)) FROM pg_settings
        WHERE name IN ('fsync', 'full_page_writes', 'jit', 'max_connections', 'synchronous_commit', 'TimeZone')";
    assert_eq!(
        ask(postgres.url(), settings).await.unwrap(),
        "fsync=on full_page_writes=on jit=off max_connections=51 synchronous_commit=on TimeZone=UTC"
    );
    let database =
        "SELECT pg_encoding_to_char(encoding) || ' ' || datcollate FROM pg_database WHERE datname = 'regent'";
    assert_eq!(ask(postgres.url(), database).await.unwrap(), "UTF8 C");
    let without_password = postgres.tcp_url().replace(|c: char| c.is_ascii_hexdigit(), "0");
    assert!(ask(&without_password, "SELECT 'in'").await.is_err(), "loopback needs the password");
    assert_eq!(mode(postgres.data_dir()), 0o700);
    assert_eq!(mode(&dir.path().join("run")), 0o700);
    assert_eq!(mode(&dir.path().join("postgres.password")), 0o600);

    tell(postgres.url(), "CREATE TABLE kept AS SELECT 'yes' AS answer").await;
    let pid = postgres.postmaster_pid().unwrap();
    assert_eq!(previous::first_line_pid(&postgres.data_dir().join("postmaster.pid")), i32::try_from(pid).ok());
    postgres.stop().await.unwrap();
    postgres.stop().await.unwrap();
    assert_eq!(postgres.postmaster_pid(), None);
    assert!(previous::servers(postgres.data_dir()).is_empty());
    assert!(!dir.path().join("run").exists());

    let again = start(dir.path()).await.unwrap();
    assert_eq!(ask(again.url(), "SELECT answer FROM kept").await.unwrap(), "yes");
    again.stop().await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_killed_comes_back_on_the_same_socket() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    tell(postgres.url(), "CREATE TABLE kept AS SELECT 'yes' AS answer").await;
    for restarts in 1..=2 {
        kill_9(postgres.postmaster_pid().unwrap());
        until("restarted", async || postgres.restarts() == restarts).await;
        assert_eq!(ask(postgres.url(), "SELECT answer FROM kept").await.unwrap(), "yes");
    }
    postgres.stop().await.unwrap();
    assert!(previous::servers(postgres.data_dir()).is_empty());
}

#[tokio::test]
async fn the_server_of_a_killed_broker_is_taken_out_of_the_way() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let cluster = postgres.data_dir().to_owned();
    postgres.stop().await.unwrap();

    let mut left = orphan(&cluster);
    orphan_is_ready(&cluster).await;
    // Somebody has to reap it, as init would.
    let reaper = std::thread::spawn(move || left.wait().unwrap());
    let postgres = start(dir.path()).await.unwrap();
    assert!(reaper.join().unwrap().success(), "stopped in order");
    assert_eq!(ask(postgres.url(), "SELECT 'here'").await.unwrap(), "here");
    postgres.stop().await.unwrap();

    let mut left = orphan(&cluster);
    orphan_is_ready(&cluster).await;
    left.kill().unwrap();
    left.wait().unwrap();
    assert!(cluster.join("postmaster.pid").exists());
    let postgres = start(dir.path()).await.unwrap();
    assert_eq!(ask(postgres.url(), "SELECT 'here'").await.unwrap(), "here");
    postgres.stop().await.unwrap();
}

#[tokio::test]
async fn a_pid_file_that_names_a_stranger_does_no_harm_to_anybody() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let cluster = postgres.data_dir().to_owned();
    postgres.stop().await.unwrap();
    let account = Account::choose().unwrap();
    // A process of the very user who runs PostgreSQL: the server itself would take it for its twin.
    let mut stranger = account.command("/bin/sh").args(["-c", "exec tail -f /dev/null"]).spawn().unwrap();
    let pid_file = cluster.join("postmaster.pid");
    fs::write(&pid_file, format!("{}\n{}\n0\n0\n\n\n0 0\nready   \n", stranger.id(), cluster.display())).unwrap();
    account.own(&pid_file).unwrap();

    let postgres = start(dir.path()).await.unwrap();
    assert_eq!(ask(postgres.url(), "SELECT 'here'").await.unwrap(), "here");
    postgres.stop().await.unwrap();
    assert!(stranger.try_wait().unwrap().is_none(), "the stranger lives");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[tokio::test]
async fn a_second_broker_on_the_data_directory_is_refused() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let refused = start(dir.path()).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::DataDirInUse { .. }), "{refused}");
    let text = refused.to_string();
    assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("--data-dir"), "{text}");
    assert_eq!(ask(postgres.url(), "SELECT 'here'").await.unwrap(), "here", "the first one is not disturbed");
    postgres.stop().await.unwrap();
}

#[tokio::test]
async fn a_data_directory_with_a_long_or_strange_name_works() {
    let dir = data_dir();
    let deep = dir.path().join("x".repeat(90)).join("with, a comma");
    let postgres = start(&deep).await.unwrap();
    assert_eq!(ask(postgres.url(), "SELECT 'here'").await.unwrap(), "here");
    let socket_dir = fs::read_link(deep.join("run")).unwrap();
    assert!(socket_dir.starts_with("/tmp") && mode(&socket_dir) == 0o700);
    postgres.stop().await.unwrap();
    assert!(!socket_dir.exists() && fs::symlink_metadata(deep.join("run")).is_err());
}

#[tokio::test]
async fn root_puts_the_cluster_elsewhere_when_the_data_directory_is_closed() {
    if !geteuid().is_root() {
        return;
    }
    let closed = fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(closed).tempdir().unwrap();
    let postgres = start(dir.path()).await.unwrap();
    let cluster = postgres.data_dir().to_owned();
    tell(postgres.url(), "CREATE TABLE kept AS SELECT 'yes' AS answer").await;
    postgres.stop().await.unwrap();
    assert!(cluster.starts_with("/var/lib/regent"));
    let again = start(dir.path()).await.unwrap();
    assert_eq!(again.data_dir(), cluster);
    assert_eq!(ask(again.url(), "SELECT answer FROM kept").await.unwrap(), "yes");
    again.stop().await.unwrap();
    fs::remove_dir_all(cluster).unwrap();
}

#[tokio::test]
async fn a_lost_password_file_is_made_anew() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let old = postgres.tcp_url().to_owned();
    postgres.stop().await.unwrap();
    fs::remove_file(dir.path().join("postgres.password")).unwrap();
    let postgres = start(dir.path()).await.unwrap();
    assert_ne!(postgres.tcp_url().split('@').next(), old.split('@').next());
    assert_eq!(ask(postgres.tcp_url(), "SELECT 'here'").await.unwrap(), "here");
    postgres.stop().await.unwrap();
}

#[tokio::test]
async fn a_dropped_handle_leaves_no_server() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let cluster = postgres.data_dir().to_owned();
    drop(postgres);
    until("stopped", async || previous::servers(&cluster).is_empty()).await;
    until("unlocked", async || DataDirLock::acquire(dir.path()).is_ok()).await;
}

#[tokio::test]
async fn what_cannot_work_is_said_clearly() {
    let dir = data_dir();
    let bin_dir = dir.path().join("no-such");
    let data = dir.path().join("data");
    let args = ["regent", "--data-dir", data.to_str().unwrap(), "--pg-bin-dir", bin_dir.to_str().unwrap()];
    let config = Config::from_parts(args, &crate::config::Environment::default()).unwrap();
    let refused = EmbeddedPostgres::start(&config).await.unwrap_err().to_string();
    assert!(refused.contains("apt-get install postgresql") && refused.contains("no-such"), "{refused}");

    let cluster = data.join("postgres");
    fs::create_dir_all(&cluster).unwrap();
    fs::write(cluster.join("letters.txt"), "mine").unwrap();
    let refused = start(&data).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::NotACluster { .. }), "{refused}");
    fs::write(cluster.join("PG_VERSION"), "9\n").unwrap();
    let refused = start(&data).await.unwrap_err().to_string();
    assert!(refused.contains("the version that made the existing cluster"), "{refused}");
    assert_eq!(fs::read_to_string(cluster.join("letters.txt")).unwrap(), "mine");
}

#[tokio::test]
async fn a_server_that_cannot_start_shows_its_log() {
    let dir = data_dir();
    let postgres = start(dir.path()).await.unwrap();
    let operator = postgres.data_dir().join("operator.conf");
    postgres.stop().await.unwrap();
    fs::write(&operator, "no_such_setting = 1\n").unwrap();
    let refused = start(dir.path()).await.unwrap_err().to_string();
    assert!(refused.contains("no_such_setting"), "{refused}");
    fs::write(&operator, "work_mem = 5MB\n").unwrap();
    Account::choose().unwrap().own(&operator).unwrap();
    let postgres = start(dir.path()).await.unwrap();
    assert_eq!(ask(postgres.url(), "SHOW work_mem").await.unwrap(), "5MB");
    postgres.stop().await.unwrap();
}

#[test]
fn the_encryption_key_is_made_once_and_private() {
    let dir = data_dir();
    let first = encryption_key(dir.path()).unwrap();
    assert_eq!(encryption_key(dir.path()).unwrap(), first);
    assert_eq!(mode(&dir.path().join("encryption.key")), 0o600);
    fs::write(dir.path().join("encryption.key"), "short").unwrap();
    let refused = encryption_key(dir.path()).unwrap_err().to_string();
    assert!(refused.contains("64 hex characters") && !refused.contains("short"), "{refused}");
}

#[test]
fn a_long_log_is_moved_aside() {
    let dir = data_dir();
    let log = dir.path().join("postgres.log");
    fs::write(&log, vec![b'x'; 17 * 1024 * 1024]).unwrap();
    postmaster::bound_log(&log).unwrap();
    assert_eq!(fs::metadata(&log).unwrap().len(), 0);
    assert_eq!(fs::metadata(dir.path().join("postgres.log.1")).unwrap().len(), 17 * 1024 * 1024);
}
