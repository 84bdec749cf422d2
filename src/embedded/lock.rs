//! One broker per data directory. The lock is an `flock`, which ends with its process however that ends.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::error::{Attempt, EmbeddedError};

/// Holds a data directory until it is dropped.
#[derive(Debug)]
pub struct DataDirLock {
    dir: PathBuf,
    file: File,
}

impl DataDirLock {
    /// Makes the directory if need be and takes its lock, without waiting.
    ///
    /// # Errors
    /// Another broker holds it ([`EmbeddedError::DataDirInUse`]), or it cannot be made or written.
    pub fn acquire(data_dir: &Path) -> Result<Self, EmbeddedError> {
        fs::create_dir_all(data_dir).attempt("create", data_dir)?;
        let dir = data_dir.canonicalize().attempt("resolve", data_dir)?;
        let path = dir.join("regent.lock");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .attempt("open", &path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder =
                    if holder.trim().is_empty() { "unknown process".to_owned() } else { holder.trim().to_owned() };
                return Err(EmbeddedError::DataDirInUse { dir, holder });
            }
            Err(TryLockError::Error(source)) => return Err(source).attempt("lock", &path),
        }
        // For the message above only; the lock itself is what counts.
        file.set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| writeln!(file, "process {}", std::process::id()))
            .attempt("write", &path)?;
        Ok(Self { dir, file })
    }

    /// The locked directory, absolute and without symbolic links.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for DataDirLock {
    fn drop(&mut self) {
        // Closing is not enough: a child that another thread is just starting holds a copy until it runs its program.
        let _ = self.file.unlock();
    }
}
