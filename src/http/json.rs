//! Small pieces of hand-written JSON: answers of thousands of messages are written once, straight into their buffer.

use chrono::{DateTime, Utc};
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
