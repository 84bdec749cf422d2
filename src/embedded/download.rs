//! Fetches the PostgreSQL programs where the machine has none (cargo feature `postgresql_embedded`).

use std::path::{Path, PathBuf};

use postgresql_embedded::{PostgreSQL, Settings, VersionReq};

use super::account::Account;
use super::error::{Attempt, EmbeddedError};
use super::programs::Programs;

/// Major version that is fetched for a new cluster.
const MAJOR: u32 = 17;

/// Downloads a release (once; later starts find it) and returns its programs.
pub(super) async fn fetch(data_dir: &Path, cluster: Option<u32>, account: &Account) -> Result<Programs, EmbeddedError> {
    // Another user must be able to run them: not below a data directory that is closed to that user.
    let dir = if account.is_other() { PathBuf::from("/var/lib/regent/programs") } else { data_dir.join("programs") };
    std::fs::create_dir_all(&dir).attempt("create", &dir)?;
    let failed = |error: &dyn std::fmt::Display| EmbeddedError::Program {
        program: "the download of PostgreSQL",
        output: error.to_string(),
    };
    let major = cluster.unwrap_or(MAJOR);
    // The crate makes a cluster as well, and as this user; that one is not wanted, and fails for root.
    let unwanted = dir.join("unwanted");
    let settings = Settings {
        installation_dir: dir.clone(),
        data_dir: unwanted.clone(),
        version: VersionReq::parse(&format!("={major}")).map_err(|error| failed(&error))?,
        ..Settings::default()
    };
    tracing::info!(dir = %dir.display(), major, "no PostgreSQL on this machine, fetching it");
    let setup = PostgreSQL::new(settings).setup().await;
    let _ = std::fs::remove_dir_all(&unwanted);
    let releases = std::fs::read_dir(&dir).attempt("read", &dir)?.flatten();
    let found = releases
        .map(|entry| entry.path().join("bin"))
        .find_map(|bin| Programs::find(Some(&bin), cluster, account).ok());
    match (found, setup) {
        (Some(programs), _) => Ok(programs),
        (None, Err(error)) => Err(failed(&error)),
        (None, Ok(())) => Err(failed(&"nothing usable in it")),
    }
}
