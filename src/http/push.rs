//! `POST /api/v1/push` (`spec/push-pop.md` §2).

use std::borrow::Cow;
use std::fmt;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::error::ApiError;
use super::extract::check_name;
use super::json;
use super::state::AppState;
use crate::broker::push::{PushItem, PushResult, PushStatus};
use crate::broker::push_spool;
use crate::ids::DEFAULT_PARTITION;

/// A string, borrowed from the body unless it has escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

/// The request body. Objects only: serde's derived structs would take arrays for objects.
pub struct Body<'a> {
    items: Vec<Item<'a>>,
}

impl<'a> Body<'a> {
    /// Decodes the JSON text; payloads stay where they are.
    ///
    /// # Errors
    /// 400 that names the item and the field.
    pub fn parse(text: &'a [u8]) -> Result<Body<'a>, ApiError> {
        serde_json::from_slice(text).map_err(|error| ApiError::bad_body(diagnose(text, &error)))
    }

    /// The items in request order, with the defaults of what was left out.
    ///
    /// # Errors
    /// 400 for a name that is too long or has forbidden bytes.
    pub fn items(&self) -> Result<Vec<PushItem<'_>>, ApiError> {
        self.items.iter().enumerate().map(item_of).collect()
    }
}

struct Item<'a> {
    queue: Text<'a>,
    partition: Option<Text<'a>>,
    transaction_id: Option<Text<'a>>,
    payload: &'a RawValue,
}

impl<'de: 'a, 'a> Deserialize<'de> for Body<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BodyVisitor;
        impl<'de> Visitor<'de> for BodyVisitor {
            type Value = Body<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with the key items")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body<'de>, A::Error> {
                let mut items = None;
                while let Some(Text(key)) = map.next_key()? {
                    match key.as_ref() {
                        "items" => items = Some(map.next_value()?),
                        _ => map.next_value::<IgnoredAny>().map(|_| ())?,
                    }
                }
                Ok(Body { items: items.ok_or_else(|| de::Error::missing_field("items"))? })
            }
        }
        deserializer.deserialize_map(BodyVisitor)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Item<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = Item<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with queue and payload")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Item<'de>, A::Error> {
                let (mut queue, mut partition, mut transaction_id, mut payload) = (None, None, None, None);
                while let Some(Text(key)) = map.next_key()? {
                    match key.as_ref() {
                        "queue" => queue = Some(map.next_value()?),
                        "partition" => partition = map.next_value()?,
                        "transactionId" => transaction_id = map.next_value()?,
                        "payload" => payload = Some(map.next_value()?),
                        _ => map.next_value::<IgnoredAny>().map(|_| ())?,
                    }
                }
                Ok(Item {
                    queue: queue.ok_or_else(|| de::Error::missing_field("queue"))?,
                    partition,
                    transaction_id,
                    payload: payload.ok_or_else(|| de::Error::missing_field("payload"))?,
                })
            }
        }
        deserializer.deserialize_map(ItemVisitor)
    }
}

/// Decodes, pushes, answers one result per item in request order.
pub async fn push(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let parsed = Body::parse(&body)?;
    let items = parsed.items()?;
    let results = match state.broker.get() {
        _ if items.is_empty() => Vec::new(),
        Some(broker) => broker.push(&items, None).await?,
        // The database has not been reached since the start (README ruling 3).
        None => push_spool::spool_all(&state.spool, &|_| None, &items, None).await,
    };
    // Under maintenance the disk is all there is (`spec/admin.md` §13.3).
    let refused = results.iter().any(|result| matches!(result.status, PushStatus::Failed { .. }));
    let status =
        if refused && state.spool.maintenance() { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::CREATED };
    let body = render(&items, &results);
    Ok((status, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

fn item_of<'a>((index, item): (usize, &'a Item<'a>)) -> Result<PushItem<'a>, ApiError> {
    let filled = |text: &'a Option<Text<'a>>| text.as_ref().map(|t| t.0.as_ref()).filter(|t| !t.is_empty());
    let (partition, transaction_id) = (filled(&item.partition), filled(&item.transaction_id));
    for (field, text) in
        [("queue", Some(item.queue.0.as_ref())), ("partition", partition), ("transactionId", transaction_id)]
    {
        check_name(&format!("items[{index}].{field}"), text.unwrap_or_default()).map_err(|error| match error {
            ApiError::BadRequest(text) => ApiError::bad_body(text),
            other => other,
        })?;
    }
    Ok(PushItem {
        queue: item.queue.0.as_ref(),
        partition: partition.unwrap_or(DEFAULT_PARTITION),
        transaction_id,
        trace_id: None,
        payload: item.payload.get().as_bytes(),
    })
}

/// Says which item and field is wrong; runs only for bodies that were refused.
fn diagnose(body: &[u8], error: &serde_json::Error) -> String {
    let Ok(value) = serde_json::from_slice::<Value>(body) else { return error.to_string() };
    let Some(object) = value.as_object() else { return "the body must be an object with the key items".into() };
    let Some(items) = object.get("items") else { return "missing field items".into() };
    let Some(items) = items.as_array() else { return "items must be an array".into() };
    for (index, item) in items.iter().enumerate() {
        let Some(item) = item.as_object() else { return format!("items[{index}] must be an object") };
        match item.get("queue") {
            None => return format!("items[{index}].queue is missing"),
            Some(Value::String(_)) => {}
            Some(_) => return format!("items[{index}].queue must be a string"),
        }
        for field in ["partition", "transactionId"] {
            if !matches!(item.get(field), None | Some(Value::Null | Value::String(_))) {
                return format!("items[{index}].{field} must be a string");
            }
        }
        if !item.contains_key("payload") {
            return format!("items[{index}].payload is missing");
        }
    }
    error.to_string()
}

fn render(items: &[PushItem<'_>], results: &[PushResult]) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 + results.len() * 192);
    out.push(b'[');
    for (index, (item, result)) in items.iter().zip(results).enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"index\":");
        json::integer(&mut out, index as i64);
        out.extend_from_slice(b",\"message_id\":\"");
        json::uuid(&mut out, result.message_id);
        out.extend_from_slice(b"\",\"transaction_id\":");
        match item.transaction_id {
            Some(text) => json::string(&mut out, text),
            None => {
                out.push(b'"');
                json::uuid(&mut out, result.minted_id);
                out.push(b'"');
            }
        }
        out.extend_from_slice(b",\"queueName\":");
        json::string(&mut out, item.queue);
        let (status, offset, error) = match &result.status {
            PushStatus::Queued { offset } => ("queued", Some(offset), None),
            PushStatus::Duplicate { offset } => ("duplicate", Some(offset), None),
            PushStatus::Buffered => ("buffered", None, None),
            PushStatus::Failed { error } => ("failed", None, Some(error)),
        };
        out.extend_from_slice(b",\"status\":\"");
        out.extend_from_slice(status.as_bytes());
        out.push(b'"');
        if let Some(error) = error {
            out.extend_from_slice(b",\"error\":");
            json::string(&mut out, error);
        }
        if let Some(offset) = offset {
            out.extend_from_slice(b",\"offset\":");
            json::integer(&mut out, offset.0);
        }
        out.push(b'}');
    }
    out.push(b']');
    out
}
