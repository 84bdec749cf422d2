//! Values that must never be printed.

use std::fmt;

/// Text that shows its length only, however it is formatted.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself. Do not log it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", redacted(&self.0))
    }
}

/// What is printed in place of `text` (security-operations §13.1).
pub(super) fn redacted(text: &str) -> String {
    if text.is_empty() { "<unset>".to_owned() } else { format!("<set:{} chars>", text.chars().count()) }
}

/// The AES-256 key for payloads at rest (security-operations §4).
#[derive(Clone, PartialEq, Eq)]
pub struct EncryptionKey([u8; 32]);

impl EncryptionKey {
    /// The key with these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes. Do not log them.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads 64 hex characters.
    ///
    /// # Errors
    /// What is wrong with the text, without the text.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.chars().count() != 64 {
            return Err("QUEEN_ENCRYPTION_KEY must be 64 hex chars");
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| "QUEEN_ENCRYPTION_KEY is not valid hex")?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for EncryptionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<set:64 chars>")
    }
}
