//! Files that hold a generated secret: made once, mode 0600, never printed.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rand::RngCore;

use super::error::{Attempt, EmbeddedError};
use crate::config::EncryptionKey;

/// The encryption key of this data directory (`encryption.key`, 64 hex characters), made at first use.
///
/// # Errors
/// The file cannot be read or written, or holds no key.
pub fn encryption_key(data_dir: &Path) -> Result<EncryptionKey, EmbeddedError> {
    let path = data_dir.join("encryption.key");
    let (text, _) = read_or_create(&path, 32)?;
    EncryptionKey::parse(&text)
        .map_err(|_| std::io::Error::new(std::io::ErrorKind::InvalidData, "it must hold 64 hex characters"))
        .attempt("use", &path)
}

/// The text of a secret file, and whether it was made just now of `random_bytes` (as hex).
pub(super) fn read_or_create(path: &Path, random_bytes: usize) -> Result<(String, bool), EmbeddedError> {
    match fs::read_to_string(path) {
        Ok(text) => return Ok((text.trim().to_owned(), false)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).attempt("read", path),
    }
    let mut bytes = vec![0; random_bytes];
    rand::rng().fill_bytes(&mut bytes);
    let text = hex::encode(bytes);
    // Written aside, synced and renamed: a crash leaves the whole secret or none.
    let aside = path.with_extension("new");
    let _ = fs::remove_file(&aside);
    let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside).and_then(|mut file| {
        writeln!(file, "{text}")?;
        file.sync_all()
    });
    written.attempt("write", &aside)?;
    fs::rename(&aside, path).attempt("create", path)?;
    if let Some(parent) = path.parent() {
        fs::File::open(parent).and_then(|dir| dir.sync_all()).attempt("sync", parent)?;
    }
    Ok((text, true))
}
