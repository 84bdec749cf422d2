//! One spooled message on disk: `u32` length, `u64` checksum (xxh3), then a JSON line with everything but the payload,
//! and the payload. Little-endian. What does not check ends a file: it was never answered.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Bytes before the body of a record.
const HEAD_BYTES: usize = 12;

/// How the payload lies on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sealing {
    /// As it was sent.
    Plain,
    /// Under the broker's encryption key.
    Key,
    /// Under the key that lies beside the spool: the queue's options were not known, and there is no other key.
    Local,
}

/// Everything but the payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Grows with every record of this spool.
    #[serde(rename = "n")]
    pub position: i64,
    /// Queue name.
    #[serde(rename = "q")]
    pub queue: String,
    /// Partition name.
    #[serde(rename = "p")]
    pub partition: String,
    /// What the producer gave.
    #[serde(rename = "t", skip_serializing_if = "Option::is_none", default)]
    pub transaction_id: Option<String>,
    /// Id that was answered.
    pub id: Uuid,
    /// Who pushed.
    #[serde(rename = "sub", skip_serializing_if = "Option::is_none", default)]
    pub producer_sub: Option<String>,
    /// The payload's form.
    #[serde(rename = "s")]
    pub sealing: Sealing,
    /// When it was accepted, milliseconds since the epoch.
    #[serde(rename = "at")]
    pub accepted_ms: i64,
    /// A commit of unknown outcome may have stored it already.
    #[serde(rename = "probe", skip_serializing_if = "std::ops::Not::not", default)]
    pub probe: bool,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Everything but the payload.
    pub header: Header,
    /// The payload as it lies on disk.
    pub payload: Vec<u8>,
}

impl Record {
    /// Appends it to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), String> {
        let mut body = serde_json::to_vec(&self.header).map_err(|error| error.to_string())?;
        body.push(b'\n');
        body.extend_from_slice(&self.payload);
        let length = u32::try_from(body.len()).map_err(|_| "the record is too large")?;
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&body).to_le_bytes());
        out.extend_from_slice(&body);
        Ok(())
    }

    /// The record at the start of `bytes`, with its length; `None` where a file ends, whole or torn.
    pub fn decode(bytes: &[u8]) -> Option<(Record, usize)> {
        let head = bytes.get(..HEAD_BYTES)?;
        let length = u32::from_le_bytes(head.get(..4)?.try_into().ok()?) as usize;
        let checksum = u64::from_le_bytes(head.get(4..)?.try_into().ok()?);
        let body = bytes.get(HEAD_BYTES..HEAD_BYTES.checked_add(length)?)?;
        if xxhash_rust::xxh3::xxh3_64(body) != checksum {
            return None;
        }
        let line = body.iter().position(|byte| *byte == b'\n')?;
        let header = serde_json::from_slice(body.get(..line)?).ok()?;
        let payload = body.get(line + 1..)?.to_vec();
        Some((Record { header, payload }, HEAD_BYTES + length))
    }

    /// All records of a file, up to the first that does not check.
    pub fn decode_all(mut bytes: &[u8]) -> Vec<Record> {
        let mut records = Vec::new();
        while let Some((record, length)) = Record::decode(bytes) {
            records.push(record);
            bytes = bytes.get(length..).unwrap_or_default();
        }
        records
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record(position: i64, payload: &[u8]) -> Record {
        let header = Header {
            position,
            queue: "q\n\"".into(),
            partition: "p".into(),
            transaction_id: Some("t".into()),
            id: Uuid::from_u128(7),
            producer_sub: None,
            sealing: Sealing::Plain,
            accepted_ms: 1,
            probe: false,
        };
        Record { header, payload: payload.to_vec() }
    }

    /// I8: whatever a crash leaves of the tail, every whole record before it is read, and nothing else.
    #[test]
    fn a_torn_or_flipped_tail_ends_the_file_and_spoils_nothing_before_it() {
        let all = [record(0, b"1"), record(1, b"\"a\\nb\""), record(2, &[0, 255, b'\n'])];
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for record in &all {
            record.encode(&mut bytes).unwrap();
            ends.push(bytes.len());
        }
        assert_eq!(Record::decode_all(&bytes), all);
        for cut in 0..bytes.len() {
            let whole = ends.iter().filter(|end| **end <= cut).count();
            assert_eq!(Record::decode_all(&bytes[..cut]), all[..whole], "{cut}");
        }
        for flip in 0..bytes.len() {
            let mut spoiled = bytes.clone();
            spoiled[flip] ^= 1;
            let before = ends.iter().filter(|end| **end <= flip).count();
            assert_eq!(Record::decode_all(&spoiled), all[..before], "{flip}");
        }
    }
}
