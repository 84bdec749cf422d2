//! Decoding of transaction bodies: strict about the shape of the bundle, lenient in the fields of a pushed item where
//! the specification is (`spec/transactions-kv-timers.md` §2.1-§2.3). Strings and payloads are borrowed from the body.
//!
//! Errors are the texts of a `400`; nothing has happened then. Of a repeated key the last counts.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::broker::ack::{AckItem, AckTarget, LeaseClaim};
use crate::broker::ack_decision::AckStatus;
use crate::broker::push::PushItem;
use crate::broker::transaction::{Bundle, BundleAck};
use crate::http::error::ApiError;
use crate::http::extract::check_name;
use crate::http::json;
use crate::ids::{DEFAULT_PARTITION, QUEUE_MODE_GROUP, TransactionHash};

#[cfg(test)]
mod tests;

/// The text of the published broker for an operation that is neither.
const UNKNOWN_TYPE: &str = "segments transaction supports only push and ack operations";

/// What one element of the answer stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// A pushed item, by its place among them.
    Push(usize),
    /// An ack, by its place among them.
    Ack(usize),
}

/// One pushed item. Strings are borrowed unless they have escapes.
#[derive(Debug)]
pub struct Pushed<'a> {
    queue: Cow<'a, str>,
    partition: Cow<'a, str>,
    transaction_id: Option<Cow<'a, str>>,
    trace_id: Option<Uuid>,
    payload: &'a str,
}

/// A decoded request.
#[derive(Debug, Default)]
pub struct Request<'a> {
    pushes: Vec<Pushed<'a>>,
    acks: Vec<BundleAck>,
    hints: Vec<LeaseClaim>,
    /// Each ack's `transactionId`, to be echoed.
    pub ack_ids: Vec<Cow<'a, str>>,
    /// The flat index space.
    pub slots: Vec<Slot>,
}

impl<'a> Request<'a> {
    /// For the broker.
    pub fn bundle(&self) -> Bundle<'_> {
        fn item<'r>(pushed: &'r Pushed<'_>) -> PushItem<'r> {
            PushItem {
                queue: &pushed.queue,
                partition: &pushed.partition,
                transaction_id: pushed.transaction_id.as_deref(),
                trace_id: pushed.trace_id,
                payload: pushed.payload.as_bytes(),
            }
        }
        Bundle { pushes: self.pushes.iter().map(item).collect(), acks: &self.acks, hints: &self.hints }
    }

    fn operation(&mut self, at: usize, fields: &Fields<'a>) -> Result<(), String> {
        let at = format_args!("operations[{at}]");
        match fields.get(Key::Type).map(RawValue::get) {
            Some("\"push\"") => match fields.get(Key::Items).filter(|items| items.get() != "null") {
                None => self.push(fields, &at),
                Some(items) => {
                    let items = elements(items).ok_or_else(|| format!("{at}.items must be an array"))?;
                    for (nth, item) in items.into_iter().enumerate() {
                        let at = format_args!("{at}.items[{nth}]");
                        self.push(&Fields::of(item).ok_or_else(|| format!("{at} must be an object"))?, &at)?;
                    }
                    Ok(())
                }
            },
            Some("\"ack\"") => self.ack(fields, &at),
            _ => Err(UNKNOWN_TYPE.to_owned()),
        }
    }

    fn push(&mut self, fields: &Fields<'a>, at: &dyn fmt::Display) -> Result<(), String> {
        let queue = fields.lenient_text(Key::Queue, at)?.ok_or_else(|| format!("{at}.queue must be a string"))?;
        let partition = fields.lenient_text(Key::Partition, at)?.unwrap_or(Cow::Borrowed(DEFAULT_PARTITION));
        let transaction_id = fields.lenient_text(Key::TransactionId, at)?.filter(|text| !text.is_empty());
        let named =
            [("queue", Some(&queue)), ("partition", Some(&partition)), ("transactionId", transaction_id.as_ref())];
        for (field, text) in named.into_iter().filter_map(|(field, text)| Some((field, text?))) {
            check_name(&format!("{at}.{field}"), text).map_err(text_of)?;
        }
        let payload = fields.get(Key::Payload).or_else(|| fields.get(Key::Data)).map_or("{}", RawValue::get);
        let trace_id = fields.get(Key::TraceId).and_then(text_in).and_then(|text| Uuid::try_parse(&text).ok());
        self.slots.push(Slot::Push(self.pushes.len()));
        self.pushes.push(Pushed { queue, partition, transaction_id, trace_id, payload });
        Ok(())
    }

    fn ack(&mut self, fields: &Fields<'a>, at: &dyn fmt::Display) -> Result<(), String> {
        let text = |key: Key| fields.optional_text(key, at).map(|text| text.filter(|text| !text.is_empty()));
        let group = text(Key::ConsumerGroup)?.map_or_else(|| Arc::from(QUEUE_MODE_GROUP), |group| self.group(&group));
        let id = text(Key::TransactionId)?.unwrap_or_default();
        let item = AckItem {
            target: AckTarget::parse(&text(Key::PartitionId)?.unwrap_or_default()),
            lease: LeaseClaim::parse(&text(Key::LeaseId)?.unwrap_or_default()),
            transaction: (!id.is_empty()).then(|| TransactionHash::of(&id)),
            status: fields.status(at)?,
            reason: fields.reason(at)?,
        };
        self.slots.push(Slot::Ack(self.acks.len()));
        self.acks.push(BundleAck { group, item });
        self.ack_ids.push(id);
        Ok(())
    }

    /// Nearly always that of the ack before.
    fn group(&self, name: &str) -> Arc<str> {
        match self.acks.last() {
            Some(before) if &*before.group == name => before.group.clone(),
            _ => name.into(),
        }
    }
}

/// Decodes a body.
///
/// # Errors
/// What to tell the client.
pub fn decode(body: &[u8]) -> Result<Request<'_>, String> {
    let whole: &RawValue = serde_json::from_slice(body).map_err(|error| format!("bad body: {error}"))?;
    let fields = Fields::of(whole).ok_or("bad body: it must be an object with the key operations")?;
    let operations = fields.get(Key::Operations).ok_or("operations is missing")?;
    let operations = elements(operations).ok_or("operations must be an array")?;
    for (key, name) in [(Key::Kv, "kv"), (Key::Timers, "timers")] {
        let Some(rider) = fields.get(key).filter(|rider| rider.get() != "null") else { continue };
        if !elements(rider).ok_or_else(|| format!("{name} must be an array"))?.is_empty() {
            return Err(format!("{name} operations are not supported by this version; nothing was written"));
        }
    }
    let mut request = Request::default();
    if let Some(leases) = fields.get(Key::RequiredLeases).filter(|leases| leases.get() != "null") {
        let leases = elements(leases).ok_or("requiredLeases must be an array")?;
        let claims = leases.into_iter().filter_map(text_in).map(|text| LeaseClaim::parse(&text));
        request.hints = claims.filter(|claim| *claim != LeaseClaim::Absent).collect();
    }
    for (nth, operation) in operations.into_iter().enumerate() {
        let fields = Fields::of(operation).ok_or_else(|| format!("operations[{nth}] must be an object"))?;
        request.operation(nth, &fields)?;
    }
    Ok(request)
}

/// The elements of an array; `None` for anything else.
fn elements(raw: &RawValue) -> Option<Vec<&RawValue>> {
    serde_json::from_str(raw.get()).ok()
}

/// A string; `None` for anything else.
fn text_in(raw: &RawValue) -> Option<Cow<'_, str>> {
    let quoted = raw.get();
    let inner = quoted.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') { serde_json::from_str(quoted).ok().map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
}

fn text_of(error: ApiError) -> String {
    match error {
        ApiError::BadRequest(text) => text,
        ApiError::Broker(error) => error.to_string(),
    }
}

/// The keys that mean something anywhere in a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Type,
    Items,
    Queue,
    Partition,
    Payload,
    Data,
    TransactionId,
    TraceId,
    PartitionId,
    ConsumerGroup,
    Status,
    LeaseId,
    Error,
    Operations,
    RequiredLeases,
    Kv,
    Timers,
}

impl Key {
    const COUNT: usize = Key::Timers as usize + 1;

    fn of(name: &str) -> Option<Key> {
        Some(match name {
            "type" => Key::Type,
            "items" => Key::Items,
            "queue" => Key::Queue,
            "partition" => Key::Partition,
            "payload" => Key::Payload,
            "data" => Key::Data,
            "transactionId" => Key::TransactionId,
            "traceId" => Key::TraceId,
            "partitionId" => Key::PartitionId,
            "consumerGroup" => Key::ConsumerGroup,
            "status" => Key::Status,
            "leaseId" => Key::LeaseId,
            "error" => Key::Error,
            "operations" => Key::Operations,
            "requiredLeases" => Key::RequiredLeases,
            "kv" => Key::Kv,
            "timers" => Key::Timers,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Key::Queue => "queue",
            Key::Partition => "partition",
            Key::TransactionId => "transactionId",
            Key::PartitionId => "partitionId",
            Key::ConsumerGroup => "consumerGroup",
            Key::Status => "status",
            _ => "leaseId",
        }
    }
}

/// The values of an object, unread.
#[derive(Debug, Default)]
struct Fields<'a>([Option<&'a RawValue>; Key::COUNT]);

impl<'a> Fields<'a> {
    /// `None`: not an object.
    fn of(raw: &'a RawValue) -> Option<Fields<'a>> {
        serde_json::from_str(raw.get()).ok()
    }

    fn get(&self, key: Key) -> Option<&'a RawValue> {
        self.0.get(key as usize).copied().flatten()
    }

    /// A string; anything else counts as absent. A string that is no Unicode is an error: taken for absent, it would
    /// put the message into another partition, or past its deduplication.
    fn lenient_text(&self, key: Key, at: &dyn fmt::Display) -> Result<Option<Cow<'a, str>>, String> {
        match self.get(key).filter(|raw| raw.get().starts_with('"')) {
            None => Ok(None),
            Some(raw) => text_in(raw).map(Some).ok_or_else(|| format!("{at}.{} must be Unicode text", key.name())),
        }
    }

    /// A string, or absent; `null` is absent, anything else an error.
    fn optional_text(&self, key: Key, at: &dyn fmt::Display) -> Result<Option<Cow<'a, str>>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(raw) if raw.get() == "null" => Ok(None),
            Some(raw) => text_in(raw).map(Some).ok_or_else(|| format!("{at}.{} must be a string", key.name())),
        }
    }

    /// The reason of an ack, as on the ack route; empty is absent.
    fn reason(&self, at: &dyn fmt::Display) -> Result<Option<Box<str>>, String> {
        let Some(raw) = self.get(Key::Error).filter(|raw| raw.get() != "null") else { return Ok(None) };
        let text = json::informing(raw).ok_or_else(|| format!("{at}.error must be a string"))?;
        Ok(Some(text).filter(|text| !text.is_empty()).map(|text| text.into_owned().into_boxed_str()))
    }

    /// As on the ack route: words, and booleans by convention.
    fn status(&self, at: &dyn fmt::Display) -> Result<AckStatus, String> {
        match self.get(Key::Status).map(RawValue::get) {
            Some("true") => Ok(AckStatus::of_flag(true)),
            Some("false") => Ok(AckStatus::of_flag(false)),
            _ => Ok(match self.optional_text(Key::Status, at)? {
                None => AckStatus::Completed,
                Some(word) => AckStatus::of_word(&word),
            }),
        }
    }
}

/// The name of a member, if it is a known one.
struct Name(Option<Key>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = Name;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }
            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Name, E> {
                Ok(Name(Key::of(name)))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Fields::default();
                while let Some(name) = map.next_key::<Name>()? {
                    match name.0.and_then(|key| fields.0.get_mut(key as usize)) {
                        Some(field) => *field = Some(map.next_value()?),
                        None => map.next_value::<IgnoredAny>().map(|_| ())?,
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Members)
    }
}
