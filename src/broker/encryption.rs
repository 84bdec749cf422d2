//! Payload encryption at rest (`spec/security-operations.md` §4): AES-256-GCM, the payload replaced by an envelope.

use aes_gcm::aead::{Aead, KeyInit};
use aes_gcm::{Aes256Gcm, Nonce};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

const IV_BYTES: usize = 16;
const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;

/// What a client is told whose queue encrypts at a broker without a key.
pub const NO_KEY: &str = "the queue encrypts payloads and this broker has no QUEEN_ENCRYPTION_KEY";

/// The stored form of an encrypted payload.
#[derive(Serialize, Deserialize)]
struct Envelope {
    encrypted: String,
    iv: String,
    #[serde(rename = "authTag")]
    auth_tag: String,
}

/// The process key. No key: nothing is encrypted, and envelopes are served as they are.
#[derive(Clone)]
pub struct Encryption {
    cipher: Option<Aes256Gcm>,
}

impl std::fmt::Debug for Encryption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Encryption({})", if self.cipher.is_some() { "<key>" } else { "<no key>" })
    }
}

impl Encryption {
    /// With this key, or without one.
    pub fn new(key: Option<[u8; 32]>) -> Encryption {
        Encryption { cipher: key.map(|key| Aes256Gcm::new(&key.into())) }
    }

    /// Whether pushes to a flagged queue can be stored at all.
    pub fn has_key(&self) -> bool {
        self.cipher.is_some()
    }

    /// The envelope of a payload; `None` without a key or when the cipher refuses (the item is refused then).
    pub fn seal(&self, payload: &[u8]) -> Option<Vec<u8>> {
        self.seal_with(payload, rand::random())
    }

    /// The envelope of a payload whose queue encrypts (`encrypts`); `None`: it is stored as it is. The error is the client's.
    pub fn seal_if(&self, encrypts: bool, payload: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
        match encrypts {
            false => Ok(None),
            true if !self.has_key() => Err(NO_KEY),
            true => self.seal(payload).map(Some).ok_or("encryption failed"),
        }
    }

    fn seal_with(&self, payload: &[u8], iv: [u8; IV_BYTES]) -> Option<Vec<u8>> {
        let nonce = Nonce::from_slice(iv.get(..NONCE_BYTES)?);
        let sealed = self.cipher.as_ref()?.encrypt(nonce, payload).ok()?;
        let (text, tag) = sealed.split_at_checked(sealed.len().checked_sub(TAG_BYTES)?)?;
        serde_json::to_vec(&Envelope {
            encrypted: STANDARD.encode(text),
            iv: STANDARD.encode(iv),
            auth_tag: STANDARD.encode(tag),
        })
        .ok()
    }

    /// The payload of an envelope, judged by shape whatever the queue's flag says now; `None` for anything that is no
    /// envelope or cannot be decrypted, which is then served unchanged.
    pub fn open(&self, stored: &[u8]) -> Option<Vec<u8>> {
        let cipher = self.cipher.as_ref()?;
        if stored.first() != Some(&b'{') || !contains(stored, b"\"authTag\"") {
            return None;
        }
        let envelope: Envelope = serde_json::from_slice(stored).ok()?;
        let iv = STANDARD.decode(envelope.iv).ok().filter(|iv| iv.len() == IV_BYTES)?;
        let tag = STANDARD.decode(envelope.auth_tag).ok().filter(|tag| tag.len() == TAG_BYTES)?;
        let mut sealed = STANDARD.decode(envelope.encrypted).ok()?;
        sealed.extend_from_slice(&tag);
        cipher.decrypt(Nonce::from_slice(iv.get(..NONCE_BYTES)?), sealed.as_slice()).ok()
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn key() -> [u8; 32] {
        std::array::from_fn(|i| i as u8)
    }

    #[test]
    fn the_published_vector_holds() {
        let encryption = Encryption::new(Some(key()));
        let iv = std::array::from_fn(|i| 0xa0 + i as u8);
        let sealed = encryption.seal_with(br#"{"hello":"world"}"#, iv).unwrap();
        let envelope: Envelope = serde_json::from_slice(&sealed).unwrap();
        assert_eq!(envelope.encrypted, "nToUSCmnbZ1YR/C8dRak/A0=");
        assert_eq!(envelope.iv, "oKGio6SlpqeoqaqrrK2urw==");
        assert_eq!(envelope.auth_tag, "49ynwxxkbvBtsXGR8yWUTQ==");
        assert_eq!(encryption.open(&sealed).unwrap(), br#"{"hello":"world"}"#);
    }

    #[test]
    fn what_is_no_envelope_of_this_key_is_left_alone() {
        let encryption = Encryption::new(Some(key()));
        let other = Encryption::new(Some([9; 32]));
        let sealed = other.seal(b"1").unwrap();
        assert_eq!(encryption.open(&sealed), None);
        assert_eq!(Encryption::new(None).open(&sealed), None);
        assert_eq!(Encryption::new(None).seal(b"1"), None);
        for plain in ["null", "{}", r#"{"authTag":"x"}"#, r#"{"encrypted":"a","iv":"b","authTag":"c"}"#] {
            assert_eq!(encryption.open(plain.as_bytes()), None, "{plain}");
        }
    }
}
