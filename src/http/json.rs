//! Small pieces of hand-written JSON: answers of thousands of messages are written once, straight into their buffer.

use std::borrow::Cow;
use std::fmt;

use chrono::{DateTime, Utc};
use serde::de::{Deserializer, Error, Visitor};
use serde_json::value::RawValue;
use uuid::Uuid;

/// A string with quotes and escapes.
pub fn string(out: &mut Vec<u8>, text: &str) {
    // Writing to a vector cannot fail, and a `str` always serialises.
    if serde_json::to_writer(&mut *out, text).is_err() {
        out.extend_from_slice(b"\"\"");
    }
}

/// A string, or `null`.
pub fn optional_string(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => string(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

/// An integer token.
pub fn integer(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

/// The 36 characters of a UUID, without quotes.
pub fn uuid(out: &mut Vec<u8>, id: Uuid) {
    out.extend_from_slice(id.as_hyphenated().encode_lower(&mut Uuid::encode_buffer()).as_bytes());
}

/// RFC 3339, UTC, six fractional digits, `Z` (`spec/push-pop.md` §1.1).
pub fn timestamp(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true)
}

/// RFC 3339, UTC, milliseconds, `Z`: time stamps of the admin routes (`spec/admin.md` §1.1).
pub fn instant(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
}

/// A string that only informs people, such as the reason of a failed ack; `None` for anything else.
///
/// Half a surrogate pair, as a text has it that was cut between UTF-16 units, is no Unicode but valid JSON: it is
/// replaced. Payloads may hold it, so a handler's error may quote it, and the verdict must not fail over its wording.
pub fn informing(raw: &RawValue) -> Option<Cow<'_, str>> {
    let quoted = raw.get();
    let inner = quoted.strip_prefix('"')?.strip_suffix('"')?;
    if !inner.contains('\\') {
        return Some(Cow::Borrowed(inner));
    }
    // As bytes, escapes are decoded but not judged.
    let bytes = serde_json::Deserializer::from_str(quoted).deserialize_bytes(Bytes).ok()?;
    Some(Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The decoded bytes of a string.
struct Bytes;

impl Visitor<'_> for Bytes {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }
}
