//! Strict, one-pass decoding of ack bodies. Strings are borrowed from the body where they hold no escape: a call may
//! carry ten thousand items.
//!
//! Only objects are accepted (a derived decoder would also take arrays for them), `null` counts as absent, a value of
//! another type is an error that names item and field, unknown keys are ignored, and of a repeated key the last counts.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::broker::ack::{AckItem, AckTarget, LeaseClaim};
use crate::broker::ack_decision::AckStatus;
use crate::http::json;
use crate::ids::{QUEUE_MODE_GROUP, TransactionHash};

#[cfg(test)]
mod tests;

/// Items that a batch gets room for before they are read.
const ITEMS_USUAL: usize = 16;

/// A decoded call.
#[derive(Debug)]
pub struct AckRequest<'a> {
    /// The consumer group.
    pub group: Cow<'a, str>,
    /// Each item's `transactionId`, to be echoed.
    pub ids: Vec<Cow<'a, str>>,
    /// The items.
    pub items: Vec<AckItem>,
}

impl<'a> AckRequest<'a> {
    fn new() -> AckRequest<'a> {
        AckRequest { group: Cow::Borrowed(QUEUE_MODE_GROUP), ids: Vec::new(), items: Vec::new() }
    }

    fn set_group(&mut self, group: Option<Cow<'a, str>>) {
        self.group = group.filter(|name| !name.is_empty()).unwrap_or(Cow::Borrowed(QUEUE_MODE_GROUP));
    }

    fn push(&mut self, fields: Fields<'a>) {
        let status = fields.status.unwrap_or(AckStatus::Completed);
        let id = fields.transaction_id.unwrap_or_default();
        self.items.push(AckItem {
            target: AckTarget::parse(fields.partition_id.as_deref().unwrap_or_default()),
            lease: LeaseClaim::parse(fields.lease_id.as_deref().unwrap_or_default()),
            transaction: (!id.is_empty()).then(|| TransactionHash::of(&id)),
            status,
            reason: fields.error.filter(|text| !text.is_empty()).map(|text| text.into_owned().into_boxed_str()),
        });
        self.ids.push(id);
    }
}

/// Decodes the body of `POST /api/v1/ack`.
pub fn single(body: &[u8]) -> serde_json::Result<AckRequest<'_>> {
    whole(body, Single)
}

/// Decodes the body of `POST /api/v1/ack/batch`.
pub fn batch(body: &[u8]) -> serde_json::Result<AckRequest<'_>> {
    whole(body, Batch)
}

fn whole<'a, V: Visitor<'a>>(body: &'a [u8], visitor: V) -> serde_json::Result<V::Value> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = json.deserialize_any(visitor)?;
    json.end()?;
    Ok(value)
}

#[derive(Default)]
struct Fields<'a> {
    transaction_id: Option<Cow<'a, str>>,
    partition_id: Option<Cow<'a, str>>,
    lease_id: Option<Cow<'a, str>>,
    status: Option<AckStatus>,
    error: Option<Cow<'a, str>>,
}

impl<'a> Fields<'a> {
    /// Reads the value of `key`; `at` names the item in errors.
    fn take<A: MapAccess<'a>>(&mut self, key: &str, map: &mut A, at: &dyn fmt::Display) -> Result<(), A::Error> {
        match key {
            "transactionId" => self.transaction_id = value(map, Text, "transactionId", at)?,
            "partitionId" => self.partition_id = value(map, Text, "partitionId", at)?,
            "leaseId" => self.lease_id = value(map, Text, "leaseId", at)?,
            "status" => self.status = value(map, Status, "status", at)?,
            "error" => self.error = value(map, Reason, "error", at)?,
            _ => {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

fn value<'a, A: MapAccess<'a>, S: DeserializeSeed<'a>>(
    map: &mut A,
    seed: S,
    field: &str,
    at: &dyn fmt::Display,
) -> Result<S::Value, A::Error> {
    map.next_value_seed(seed).map_err(|error| A::Error::custom(format_args!("{at}{field}: {error}")))
}

struct Single;

impl<'a> Visitor<'a> for Single {
    type Value = AckRequest<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<AckRequest<'a>, A::Error> {
        let mut request = AckRequest::new();
        let mut fields = Fields::default();
        while let Some(key) = map.next_key_seed(Key)? {
            match &*key {
                "consumerGroup" => request.set_group(value(&mut map, Text, "consumerGroup", &"")?),
                key => fields.take(key, &mut map, &"")?,
            }
        }
        request.push(fields);
        Ok(request)
    }
}

struct Batch;

impl<'a> Visitor<'a> for Batch {
    type Value = AckRequest<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<AckRequest<'a>, A::Error> {
        let mut request = AckRequest::new();
        let mut found = false;
        while let Some(key) = map.next_key_seed(Key)? {
            match &*key {
                "consumerGroup" => request.set_group(value(&mut map, Text, "consumerGroup", &"")?),
                "acknowledgments" => {
                    request.ids.clear();
                    request.items.clear();
                    request.ids.reserve(ITEMS_USUAL);
                    request.items.reserve(ITEMS_USUAL);
                    map.next_value_seed(Items(&mut request))?;
                    found = true;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if found { Ok(request) } else { Err(A::Error::missing_field("acknowledgments")) }
    }
}

struct Items<'r, 'a>(&'r mut AckRequest<'a>);

impl<'a> DeserializeSeed<'a> for Items<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Items<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("acknowledgments to be an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(fields) = seq.next_element_seed(Item(self.0.items.len()))? {
            self.0.push(fields);
        }
        Ok(())
    }
}

/// One element; holds its index, for errors.
struct Item(usize);

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "acknowledgments[{}].", self.0)
    }
}

impl<'a> DeserializeSeed<'a> for Item {
    type Value = Fields<'a>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Fields<'a>, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Item {
    type Value = Fields<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "acknowledgments[{}] to be an object", self.0)
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Fields<'a>, A::Error> {
        let mut fields = Fields::default();
        while let Some(key) = map.next_key_seed(Key)? {
            fields.take(&key, &mut map, &self)?;
        }
        Ok(fields)
    }
}

/// A string, or `null` for absent.
struct Text;

impl<'a> DeserializeSeed<'a> for Text {
    type Value = Option<Cow<'a, str>>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Text {
    type Value = Option<Cow<'a, str>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'a str) -> Result<Self::Value, E> {
        Ok(Some(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Cow::Owned(text.to_owned())))
    }
}

/// A string that only informs, or `null` for absent.
struct Reason;

impl<'a> DeserializeSeed<'a> for Reason {
    type Value = Option<Cow<'a, str>>;

    fn deserialize<D: Deserializer<'a>>(self, value: D) -> Result<Self::Value, D::Error> {
        match <&RawValue>::deserialize(value)? {
            raw if raw.get() == "null" => Ok(None),
            raw => json::informing(raw).map(Some).ok_or_else(|| D::Error::custom("must be a string")),
        }
    }
}

/// A key of an object.
struct Key;

impl<'a> DeserializeSeed<'a> for Key {
    type Value = Cow<'a, str>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Self::Value, D::Error> {
        Text.deserialize(json).map(Option::unwrap_or_default)
    }
}

/// A status word, a boolean, or `null` for absent.
struct Status;

impl<'a> DeserializeSeed<'a> for Status {
    type Value = Option<AckStatus>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl Visitor<'_> for Status {
    type Value = Option<AckStatus>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a boolean")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E: Error>(self, ok: bool) -> Result<Self::Value, E> {
        Ok(Some(AckStatus::of_flag(ok)))
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<Self::Value, E> {
        Ok(Some(AckStatus::of_word(word)))
    }
}
