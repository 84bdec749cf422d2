//! Where the PostgreSQL server programs are.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::account::Account;
use super::error::EmbeddedError;

/// The oldest version that the schema works on.
const MAJOR_MIN: u32 = 15;

/// A directory with `initdb` and `postgres` in it.
#[derive(Debug, Clone)]
pub(super) struct Programs {
    dir: PathBuf,
    pub(super) major: u32,
}

impl Programs {
    pub(super) fn postgres(&self) -> PathBuf {
        self.dir.join("postgres")
    }

    pub(super) fn initdb(&self) -> PathBuf {
        self.dir.join("initdb")
    }

    /// Finds the programs: in `given` if set, else in the usual places, newest first. An existing cluster works with
    /// its own major version only.
    pub(super) fn find(given: Option<&Path>, cluster: Option<u32>, account: &Account) -> Result<Self, EmbeddedError> {
        let candidates = given.map_or_else(usual_places, |dir| vec![dir.to_owned()]);
        let fits = |major: u32| cluster.map_or(major >= MAJOR_MIN, |wanted| major == wanted);
        let mut others = Vec::new();
        for dir in candidates {
            let complete = ["postgres", "initdb"].iter().all(|name| dir.join(name).is_file());
            match complete.then(|| major_version(&dir, account)).flatten() {
                Some(major) if fits(major) => return Ok(Self { dir, major }),
                Some(major) => others.push(format!("version {major} in {}", dir.display())),
                None if given.is_some() => {
                    others.push(format!(
                        "{} has no initdb and postgres that '{}' can run",
                        dir.display(),
                        account.name
                    ));
                }
                None => {}
            }
        }
        let wanted = match cluster {
            Some(major) => format!("{major} (the version that made the existing cluster)"),
            None => format!("{MAJOR_MIN} or newer"),
        };
        let looked = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
        Err(EmbeddedError::NoPrograms { wanted, looked })
    }
}

fn usual_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    let config = Command::new("pg_config").arg("--bindir").output();
    if let Some(output) = config.ok().filter(|output| output.status.success()) {
        places.push(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    places.extend(versions_below("/usr/lib/postgresql", "", "bin"));
    places.extend(versions_below("/usr", "pgsql-", "bin"));
    places.push("/usr/local/pgsql/bin".into());
    for brew in ["/opt/homebrew/opt", "/usr/local/opt", "/home/linuxbrew/.linuxbrew/opt"] {
        places.extend(versions_below(brew, "postgresql@", "bin"));
        places.push(Path::new(brew).join("postgresql/bin"));
    }
    if let Some(path) = std::env::var_os("PATH") {
        places.extend(std::env::split_paths(&path));
    }
    places
}

/// `<parent>/<prefix><number>/<leaf>`, highest number first.
fn versions_below(parent: &str, prefix: &str, leaf: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((number, entry.path().join(leaf)))
        })
        .collect();
    found.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    found.into_iter().map(|(_, dir)| dir).collect()
}

/// Asks as the user that will run it, so that a directory out of its reach counts as missing.
fn major_version(dir: &Path, account: &Account) -> Option<u32> {
    let output = account.command(dir.join("postgres")).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`, also `17beta1` and `18devel`.
fn parse_version(text: &str) -> Option<u32> {
    let version = text.split_once("(PostgreSQL)")?.1.trim_start();
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_however_they_are_packaged() {
        assert_eq!(parse_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some(15));
        assert_eq!(parse_version("postgres (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(parse_version("postgres: command not found"), None);
    }
}
