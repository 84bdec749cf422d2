//! Query parameters, bodies and names into domain values; each refusal names its field.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::error::ApiError;
use crate::ids::NAME_BYTES_MAX;

/// The decoded query of a request. Of a repeated key the last value counts.
#[derive(Debug, Default)]
pub struct Query(HashMap<String, String>);

impl Query {
    /// Decodes a raw query string; a broken escape is a 400.
    pub fn parse(raw: Option<&str>) -> Result<Query, ApiError> {
        let mut map = HashMap::new();
        for pair in raw.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            map.insert(decode_form(key)?, decode_form(value)?);
        }
        Ok(Query(map))
    }

    /// A string; the empty one counts as absent.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str).filter(|text| !text.is_empty())
    }

    /// Whether the key was given at all, if only with the empty string.
    pub fn given(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// A name: like [`Query::text`], but within the limits of a name.
    pub fn name(&self, key: &str) -> Result<Option<&str>, ApiError> {
        self.text(key).map(|text| check_name(key, text).map(|()| text)).transpose()
    }

    /// An integer.
    pub fn integer(&self, key: &str) -> Result<Option<i64>, ApiError> {
        let Some(text) = self.0.get(key) else { return Ok(None) };
        let wrong = || ApiError::BadRequest(format!("{key} must be an integer, got {text:?}"));
        text.trim().parse().map(Some).map_err(|_| wrong())
    }

    /// A boolean: true/false, 1/0, yes/no, on/off, in any case. The empty string counts as absent.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ApiError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(Some(true)),
            "false" | "0" | "no" | "off" => Ok(Some(false)),
            _ => Err(ApiError::BadRequest(format!("{key} must be a boolean, got {text:?}"))),
        }
    }
}

fn decode_form(text: &str) -> Result<String, ApiError> {
    decode(&text.replace('+', " "))
}

fn decode(text: &str) -> Result<String, ApiError> {
    if !escapes_are_whole(text) {
        return Err(ApiError::BadRequest(format!("broken percent escape in {text:?}")));
    }
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    decoded.map(Into::into).map_err(|_| ApiError::BadRequest(format!("{text:?} is not UTF-8")))
}

/// Whether every `%` starts an escape of two hex digits.
pub fn escapes_are_whole(text: &str) -> bool {
    text.match_indices('%').all(|(at, _)| {
        text.as_bytes().get(at + 1..at + 3).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    })
}

/// The object of a body that may be left out: a blank one has no fields.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Map::new());
    }
    serde_json::from_slice(body).map_err(ApiError::bad_body)
}

/// Refuses names that PostgreSQL cannot hold or that are too long (`spec/push-pop.md` §2.1, §9).
pub fn check_name(field: &str, text: &str) -> Result<(), ApiError> {
    if text.contains('\0') {
        return Err(ApiError::BadRequest(format!("{field} must not contain NUL")));
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(ApiError::BadRequest(format!("{field} is longer than {NAME_BYTES_MAX} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_query_is_read_as_section_1_1_says() {
        let query = Query::parse(Some("batch=7&wait=YES&consumerGroup=&q=a%20b+c%2Fd&batch=8&flag")).unwrap();
        assert_eq!(query.integer("batch").unwrap(), Some(8));
        assert_eq!(query.boolean("wait").unwrap(), Some(true));
        assert_eq!(query.text("consumerGroup"), None);
        assert_eq!(query.text("q"), Some("a b c/d"));
        assert_eq!(query.boolean("flag").unwrap(), None);
        for raw in ["batch=abc", "batch=", "batch=1.5"] {
            assert!(Query::parse(Some(raw)).unwrap().integer("batch").is_err(), "{raw}");
        }
        assert!(Query::parse(Some("wait=maybe")).unwrap().boolean("wait").is_err());
        for raw in ["a=%", "a=%z1", "a=%1", "a=%ff"] {
            assert!(Query::parse(Some(raw)).is_err(), "{raw}");
        }
    }
}
