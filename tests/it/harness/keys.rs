//! JSON as the bytes that came, for what `serde_json::Value` forgets: the order of keys and the spelling of values.

use std::fmt;

use serde::Deserializer;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// The members of one JSON object, in the order and spelling of the wire.
#[track_caller]
pub fn members(object: &str) -> Vec<(String, Box<RawValue>)> {
    struct InOrder;
    impl<'de> Visitor<'de> for InOrder {
        type Value = Vec<(String, Box<RawValue>)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_str(object).deserialize_map(InOrder).expect("a JSON object")
}

/// Its keys, in order.
#[track_caller]
pub fn keys_of(object: &str) -> Vec<String> {
    members(object).into_iter().map(|(key, _)| key).collect()
}

/// One member of an object, verbatim.
#[track_caller]
pub fn member(object: &str, key: &str) -> String {
    let found = members(object).into_iter().find(|(k, _)| k == key);
    found.unwrap_or_else(|| panic!("no {key} in {object}")).1.get().to_owned()
}
