//! The private directory of the Unix socket.

use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use super::account::Account;
use super::error::{Attempt, EmbeddedError};

/// Longest socket path that the system takes, without its final zero byte (macOS has 3 fewer than Linux).
const SOCKET_PATH_BYTES_MAX: usize = if cfg!(target_os = "linux") { 107 } else { 103 };
/// Where the directory goes when the data directory will not do. Not `$TMPDIR`: that may be long as well.
const SHORT_PARENT: &str = "/tmp";
const SHORT_PREFIX: &str = "regent-";

/// A directory of mode 0700 that belongs to the user who runs PostgreSQL.
#[derive(Debug)]
pub(super) struct SocketDir {
    path: PathBuf,
    /// The symbolic link that leads to a directory outside the data directory.
    link: Option<PathBuf>,
}

impl SocketDir {
    /// `<data_dir>/run`, or a directory under /tmp with a link of that name where the path would be too long, has
    /// characters that PostgreSQL gives a meaning, or is out of reach of the user who runs PostgreSQL.
    pub(super) fn prepare(data_dir: &Path, account: &Account) -> Result<Self, EmbeddedError> {
        let preferred = data_dir.join("run");
        remove_leftover(&preferred, account)?;
        if fits(&preferred) && account.can_enter(data_dir) {
            create_private(&preferred, account)?;
            return Ok(Self { path: preferred, link: None });
        }
        let path = Path::new(SHORT_PARENT).join(format!("{SHORT_PREFIX}{:016x}", rand::random::<u64>()));
        // Fails if the name exists, so nobody can have put something there before.
        create_private(&path, account)?;
        symlink(&path, &preferred).attempt("create", &preferred)?;
        Ok(Self { path, link: Some(preferred) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        if let Some(link) = &self.link {
            let _ = fs::remove_file(link);
        }
    }
}

fn create_private(path: &Path, account: &Account) -> Result<(), EmbeddedError> {
    DirBuilder::new().mode(0o700).create(path).attempt("create", path)?;
    account.own(path).attempt("change the owner of", path)
}

/// Removes what a crashed run left: the directory itself, or the link and the directory that it leads to.
fn remove_leftover(preferred: &Path, account: &Account) -> Result<(), EmbeddedError> {
    let Ok(found) = fs::symlink_metadata(preferred) else { return Ok(()) };
    if !found.is_symlink() {
        return fs::remove_dir_all(preferred).attempt("remove", preferred);
    }
    let target = fs::read_link(preferred).attempt("read", preferred)?;
    let ours = target.parent() == Some(Path::new(SHORT_PARENT))
        && target.file_name().is_some_and(|name| name.as_bytes().starts_with(SHORT_PREFIX.as_bytes()))
        // Somebody else may have taken the name since.
        && fs::symlink_metadata(&target).is_ok_and(|found| found.is_dir() && found.uid() == account.uid());
    if ours {
        let _ = fs::remove_dir_all(&target);
    }
    fs::remove_file(preferred).attempt("remove", preferred)
}

fn fits(dir: &Path) -> bool {
    let bytes = dir.as_os_str().as_bytes();
    bytes.len() + "/.s.PGSQL.65535".len() <= SOCKET_PATH_BYTES_MAX
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(byte))
}
