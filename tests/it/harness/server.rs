//! One PostgreSQL server per run of the test binary.
//!
//! `REGENT_TEST_DATABASE_URL` names an outside server (its role needs CREATEDB; the databases `regent_it_…` stay there
//! when the run ends). Otherwise a cluster is made under
//! `/tmp` and dies with this process: libtest has no teardown, so a small `sh` holds the read end of a pipe whose
//! write end is ours. When this process ends, however it ends, the pipe closes, and `sh` stops the postmaster that it
//! started and removes the directory.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use super::eventually_blocking;

/// Where the server listens.
#[derive(Clone, Debug)]
pub enum Upstream {
    Socket(PathBuf),
    Tcp(String, u16),
}

/// Where the tests find PostgreSQL.
pub struct Server {
    base: String,
    query: String,
    log: Option<PathBuf>,
    _lifeline: Option<ChildStdin>,
    _supervisor: Option<Child>,
}

impl Server {
    /// The server of this run, started by the first test that asks.
    pub fn of_this_run() -> &'static Server {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(|| match std::env::var("REGENT_TEST_DATABASE_URL") {
            Ok(url) if !url.is_empty() => Server::outside(&url),
            _ => Server::start(None, ""),
        })
    }

    /// The URL of one database of this server.
    pub fn url(&self, database: &str) -> String {
        format!("{}/{database}{}", self.base, self.query)
    }

    /// The URL of one database of this server by way of another address.
    pub fn url_at(&self, database: &str, address: SocketAddr) -> String {
        let (scheme, rest) = self.base.split_once("://").expect("a URL");
        let credentials = rest.rsplit_once('@').map_or(String::new(), |(credentials, _)| format!("{credentials}@"));
        format!("{scheme}://{credentials}{address}/{database}?sslmode=disable")
    }

    fn outside(url: &str) -> Server {
        let (address, query) = url.split_once('?').map_or((url, String::new()), |(a, q)| (a, format!("?{q}")));
        let scheme_end = address.find("://").expect("REGENT_TEST_DATABASE_URL must be a URL") + 3;
        let end = address[scheme_end..].find('/').map_or(address.len(), |slash| scheme_end + slash);
        Server { base: address[..end].to_owned(), query, log: None, _lifeline: None, _supervisor: None }
    }

    /// A server of its own, with TLS on a port of the loopback address beside its socket.
    pub fn with_tls(tls: &Tls) -> Server {
        Server::start(Some(tls), "max_connections = 40\nshared_buffers = 16MB\n")
    }

    /// A server of its own, with these lines of configuration.
    pub fn configured(settings: &str) -> Server {
        Server::start(None, settings)
    }

    /// What it has written down so far.
    pub fn log(&self) -> String {
        let bytes = self.log.as_ref().map(std::fs::read).expect("a server of its own").unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn start(tls: Option<&Tls>, settings: &str) -> Server {
        let bin = binaries();
        let owner = Owner::find();
        let dir = PathBuf::from(format!("/tmp/regent-it-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        owner.give(&dir);

        let data = dir.join("data");
        let made = owner
            .command(&bin.join("initdb"), &dir)
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(&data)
            .output()
            .expect("initdb runs");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let mut config = std::fs::OpenOptions::new().append(true).open(data.join("postgresql.conf")).unwrap();
        config.write_all(SETTINGS.as_bytes()).unwrap();
        writeln!(config, "unix_socket_directories = '{}'", dir.display()).unwrap();
        if let Some(tls) = tls {
            for (name, text) in [("server.crt", &tls.certificate_pem), ("server.key", &tls.key_pem)] {
                let path = dir.join(name);
                std::fs::write(&path, text).unwrap();
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
                owner.give(&path);
                let setting = if name.ends_with("crt") { "ssl_cert_file" } else { "ssl_key_file" };
                writeln!(config, "{setting} = '{}'", path.display()).unwrap();
            }
            writeln!(config, "ssl = on\nlisten_addresses = '127.0.0.1'\nport = {}", tls.port).unwrap();
        }
        config.write_all(settings.as_bytes()).unwrap();
        drop(config);
        let port = tls.map_or(5432, |tls| tls.port);

        let script = r#""$1/postgres" -D "$2/data" >"$2/log" 2>&1 & server=$!
cat >/dev/null
kill -QUIT "$server"; wait "$server"; cd /; rm -rf "$2""#;
        let mut supervisor = owner
            .command(Path::new("/bin/sh"), &dir)
            .args(["-c", script, "regent-it-server"])
            .arg(&bin)
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0) // Ctrl-C is for the tests; this one ends when they have ended
            .spawn()
            .expect("sh runs");
        let lifeline = supervisor.stdin.take();

        let ready = eventually_blocking(Duration::from_secs(60), || {
            let mut probe = Command::new(bin.join("pg_isready"));
            probe.arg("-q").arg("-h").arg(&dir).arg("-p").arg(port.to_string());
            probe.status().is_ok_and(|status| status.success())
        });
        assert!(ready, "PostgreSQL: {}", std::fs::read_to_string(dir.join("log")).unwrap_or_default());
        Server {
            base: format!("postgres://postgres@localhost:{port}"),
            query: format!("?host={}", dir.display()),
            log: Some(dir.join("log")),
            _lifeline: lifeline,
            _supervisor: Some(supervisor),
        }
    }
}

/// What a server with TLS shows, and where.
pub struct Tls {
    /// Its certificate.
    pub certificate_pem: String,
    /// The key of that.
    pub key_pem: String,
    /// Its port.
    pub port: u16,
}

/// Durability is off: no test of this server crashes it. Those that do (`crash.rs`) run the broker's own cluster.
/// Autovacuum is off because every database lives for a second.
const SETTINGS: &str = "
listen_addresses = ''
max_connections = 400
shared_buffers = 256MB
fsync = off
full_page_writes = off
synchronous_commit = off
wal_level = minimal
max_wal_senders = 0
max_wal_size = 4GB
checkpoint_timeout = 1h
autovacuum = off
jit = off
log_min_messages = warning
";

/// The directory of `initdb` and `postgres`.
fn binaries() -> PathBuf {
    let given = std::env::var("PG_BIN_DIR").ok().map(PathBuf::from);
    let configured = Command::new("pg_config")
        .arg("--bindir")
        .output()
        .ok()
        .map(|out| PathBuf::from(String::from_utf8_lossy(&out.stdout).trim().to_owned()));
    let mut usual: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|versions| versions.flatten().map(|v| v.path().join("bin")).collect())
        .unwrap_or_default();
    usual.sort();
    usual.push("/usr/local/bin".into());
    usual.push("/usr/bin".into());
    given
        .into_iter()
        .chain(configured)
        .chain(usual.into_iter().rev())
        .find(|dir| dir.join("initdb").exists() && dir.join("postgres").exists())
        .expect("no PostgreSQL found: install it, or set PG_BIN_DIR or REGENT_TEST_DATABASE_URL")
}

/// Who runs the server: this user, or `postgres` when this user is root, whom PostgreSQL refuses.
enum Owner {
    Me,
    Other { uid: u32, gid: u32 },
}

impl Owner {
    fn find() -> Owner {
        if !nix::unistd::geteuid().is_root() {
            return Owner::Me;
        }
        let user = ["postgres", "nobody"]
            .iter()
            .find_map(|name| nix::unistd::User::from_name(name).ok().flatten())
            .expect("root cannot run PostgreSQL and there is no unprivileged user");
        Owner::Other { uid: user.uid.as_raw(), gid: user.gid.as_raw() }
    }

    fn give(&self, path: &Path) {
        if let Owner::Other { uid, gid } = self {
            std::os::unix::fs::chown(path, Some(*uid), Some(*gid)).unwrap();
        }
    }

    fn command(&self, program: &Path, dir: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(dir).env("LC_ALL", "C").env_remove("PGHOST").env_remove("PGPORT");
        if let Owner::Other { uid, gid } = self {
            command.uid(*uid).gid(*gid);
        }
        command
    }
}
