//! Which OS user runs PostgreSQL, and what that user can reach.
//!
//! PostgreSQL refuses to run as root. A broker that is root runs it as `postgres`, or `nobody` where that is missing;
//! any other broker runs it as itself.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::unistd::{Gid, Uid, User, chown, geteuid};

use super::error::EmbeddedError;

/// Variables that children inherit. All others stay here: they hold secrets, or would redirect PostgreSQL (`PGDATA`, ...).
const INHERITED: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR"];

/// The OS user that PostgreSQL runs as.
#[derive(Debug, Clone)]
pub(super) struct Account {
    pub(super) name: String,
    /// The name of the user that the broker itself runs as.
    pub(super) broker: String,
    /// Set where the broker is root and must become somebody else.
    switch: Option<(Uid, Gid)>,
}

impl Account {
    pub(super) fn choose() -> Result<Self, EmbeddedError> {
        let uid = geteuid();
        let by_id = User::from_uid(uid).ok().flatten();
        let broker = by_id.map(|user| user.name).ok_or(EmbeddedError::NamelessUser { uid: uid.as_raw() })?;
        if !uid.is_root() {
            return Ok(Self { name: broker.clone(), broker, switch: None });
        }
        let known = ["postgres", "nobody"].into_iter().find_map(|name| User::from_name(name).ok().flatten());
        let user = known.filter(|user| !user.uid.is_root()).ok_or(EmbeddedError::NoAccount)?;
        Ok(Self { name: user.name, broker, switch: Some((user.uid, user.gid)) })
    }

    /// Its numeric id.
    pub(super) fn uid(&self) -> u32 {
        self.switch.map_or_else(geteuid, |(uid, _)| uid).as_raw()
    }

    /// Whether it is another user than the broker's.
    pub(super) fn is_other(&self) -> bool {
        self.switch.is_some()
    }

    /// A command that runs as this user, in a process group of its own (so that Ctrl-C reaches the broker only, which
    /// then stops PostgreSQL in order), with nothing to read.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().current_dir("/").stdin(Stdio::null()).process_group(0);
        for name in INHERITED {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("LC_ALL", "C").env("TZ", "UTC");
        if let Some((uid, gid)) = self.switch {
            // Also drops the supplementary groups of root.
            command.uid(uid.as_raw()).gid(gid.as_raw());
        }
        command
    }

    /// Gives a file or directory to this user.
    pub(super) fn own(&self, path: &Path) -> io::Result<()> {
        match self.switch {
            Some((uid, gid)) => chown(path, Some(uid), Some(gid)).map_err(io::Error::from),
            None => Ok(()),
        }
    }

    /// Whether this user can enter `dir`. Tried, not computed: there are more rules than mode bits.
    pub(super) fn can_enter(&self, dir: &Path) -> bool {
        if !self.is_other() {
            return true;
        }
        let mut command = self.command("/bin/sh");
        command.args(["-c", "cd \"$1\""]).arg("sh").arg(dir).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}
