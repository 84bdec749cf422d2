//! The cluster directory: where it is, how it is made, what is configured in it.

use std::fs::{self, DirBuilder};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::account::Account;
use super::error::{Attempt, EmbeddedError};
use super::programs::Programs;
use super::{DATABASE, ROLE, key, settings};

/// Where clusters go that cannot be under their data directory.
const FALLBACK_PARENT: &str = "/var/lib/regent";
/// How much of a program's output an error repeats.
const OUTPUT_BYTES_MAX: usize = 2_000;

/// A cluster directory of this account.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) path: PathBuf,
    /// Password of the role over TCP. Over the socket the OS user counts.
    pub(super) password: String,
}

/// Finds the place of the cluster: `<data_dir>/postgres`. Where the user who runs PostgreSQL cannot enter the data
/// directory (one below /root, say), that is a symbolic link to a directory of random name below /var/lib/regent: random,
/// so that a new data directory never comes upon the cluster of a deleted one.
pub(super) fn place(data_dir: &Path, account: &Account) -> Result<PathBuf, EmbeddedError> {
    let direct = data_dir.join("postgres");
    if fs::symlink_metadata(&direct).is_ok() {
        return direct.canonicalize().attempt("resolve", &direct);
    }
    if account.can_enter(data_dir) {
        return Ok(direct);
    }
    let parent = Path::new(FALLBACK_PARENT);
    fs::create_dir_all(parent).attempt("create", parent)?;
    if !account.can_enter(parent) {
        return Err(EmbeddedError::Unreachable { account: account.name.clone(), path: data_dir.to_owned() });
    }
    let elsewhere = parent.join(format!("{:016x}", rand::random::<u64>()));
    make_dir(&elsewhere, account)?;
    symlink(&elsewhere, &direct).attempt("create", &direct)?;
    tracing::warn!(
        data_dir = %data_dir.display(), cluster = %elsewhere.display(), account = account.name,
        "the user who runs PostgreSQL cannot enter the data directory; the database files go elsewhere"
    );
    elsewhere.canonicalize().attempt("resolve", &elsewhere)
}

/// The major version that made the cluster, if there is one.
pub(super) fn version(path: &Path) -> Option<u32> {
    fs::read_to_string(path.join("PG_VERSION")).ok()?.trim().parse().ok()
}

impl Cluster {
    /// Opens the cluster at `path`, making it first if there is none, and writes the settings of this start.
    pub(super) fn open(
        path: PathBuf,
        data_dir: &Path,
        programs: &Programs,
        account: &Account,
        connections_max: u32,
    ) -> Result<Self, EmbeddedError> {
        let (password, password_is_new) = key::read_or_create(&data_dir.join("postgres.password"), 24)?;
        if version(&path).is_none() {
            create(&path, &password, programs, account)?;
        } else if !account.can_enter(&path) {
            return Err(EmbeddedError::Unreachable { account: account.name.clone(), path });
        } else if password_is_new {
            tracing::warn!("the password file of the embedded database was missing; setting a new password");
            single_user(&path, &set_password(&password), programs, account)?;
        }
        // A cluster directory must not be open to anybody else, and the name of the broker's user may have changed.
        write_owned(&path.join("pg_ident.conf"), &ident(account), account)?;
        let compression = wal_compression(&path, programs, account);
        write_owned(&path.join("regent.conf"), &settings::text(connections_max, compression), account)?;
        Ok(Self { path, password })
    }
}

/// Makes the cluster aside and renames it: a crash in between leaves nothing that looks like a cluster.
fn create(path: &Path, password: &str, programs: &Programs, account: &Account) -> Result<(), EmbeddedError> {
    if fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(EmbeddedError::NotACluster { path: path.to_owned() });
    }
    let mut aside = path.as_os_str().to_owned();
    aside.push(".new");
    let aside = PathBuf::from(aside);
    if aside.exists() {
        fs::remove_dir_all(&aside).attempt("remove", &aside)?;
    }
    make_dir(&aside, account)?;
    tracing::info!(cluster = %path.display(), version = programs.major, "creating the database cluster");

    let mut initdb = account.command(programs.initdb());
    initdb.arg("-D").arg(&aside).args(["--username", ROLE, "--encoding", "UTF8", "--locale", "C"]);
    initdb.args(["--auth-local", "peer", "--auth-host", "reject", "--no-instructions"]);
    run(initdb, "initdb", None)?;

    let hba = "\
# Made by regent. Over the private socket the operating system vouches for the user; over loopback a password does.
local all all              peer map=regent
host  all all 127.0.0.1/32 scram-sha-256
host  all all ::1/128      scram-sha-256
";
    write_owned(&aside.join("pg_hba.conf"), hba, account)?;
    let main = aside.join("postgresql.conf");
    let includes = "\ninclude_if_exists = 'regent.conf'\ninclude_if_exists = 'operator.conf'\n";
    fs::OpenOptions::new()
        .append(true)
        .open(&main)
        .and_then(|mut file| {
            file.write_all(includes.as_bytes())?;
            file.sync_all()
        })
        .attempt("extend", &main)?;
    let statements = format!("{}CREATE DATABASE {DATABASE};\n", set_password(password));
    single_user(&aside, &statements, programs, account)?;

    fs::rename(&aside, path).attempt("create", path)?;
    if let Some(parent) = path.parent() {
        fs::File::open(parent).and_then(|dir| dir.sync_all()).attempt("sync", parent)?;
    }
    Ok(())
}

/// The password is hexadecimal: nothing in it to quote.
fn set_password(password: &str) -> String {
    format!("ALTER ROLE {ROLE} PASSWORD '{password}';\n")
}

/// Runs statements, one a line, without a server.
fn single_user(path: &Path, statements: &str, programs: &Programs, account: &Account) -> Result<(), EmbeddedError> {
    let mut postgres = account.command(programs.postgres());
    postgres.args(["--single", "-D"]).arg(path).args([
        "-c",
        "exit_on_error=on",
        "-c",
        "password_encryption=scram-sha-256",
    ]);
    postgres.arg("postgres");
    run(postgres, "postgres --single", Some(statements))
}

fn run(mut command: Command, program: &'static str, input: Option<&str>) -> Result<(), EmbeddedError> {
    let failed = |output: String| EmbeddedError::Program { program, output };
    if input.is_some() {
        command.stdin(Stdio::piped());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
        // A few lines fit into the pipe; and a program that ended early says why on its own.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Err(failed(format!("{} ({})", tail(text.trim()), output.status)))
}

/// The end of `text`.
fn tail(text: &str) -> &str {
    let mut start = text.len().saturating_sub(OUTPUT_BYTES_MAX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// lz4 costs a fraction of the built-in method, and only some builds have it.
fn wal_compression(path: &Path, programs: &Programs, account: &Account) -> &'static str {
    let mut postgres = account.command(programs.postgres());
    postgres.arg("-D").arg(path).args(["-C", "wal_compression", "-c", "wal_compression=lz4"]);
    postgres.stdout(Stdio::null()).stderr(Stdio::null());
    if postgres.status().is_ok_and(|status| status.success()) { "lz4" } else { "on" }
}

fn ident(account: &Account) -> String {
    let mut users = vec![&account.broker];
    if account.name != account.broker {
        users.push(&account.name);
    }
    let lines: String = users.into_iter().map(|user| format!("regent \"{user}\" {ROLE}\n")).collect();
    format!("# Written by regent at every start. Map, OS user, role.\n{lines}")
}

fn make_dir(path: &Path, account: &Account) -> Result<(), EmbeddedError> {
    DirBuilder::new().mode(0o700).create(path).attempt("create", path)?;
    account.own(path).attempt("change the owner of", path)
}

fn write_owned(path: &Path, text: &str, account: &Account) -> Result<(), EmbeddedError> {
    fs::write(path, text).attempt("write", path)?;
    account.own(path).attempt("change the owner of", path)
}
