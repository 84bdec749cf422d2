//! Packing of messages into the frames of a segment, and back.
//!
//! ```text
//! stored   = version 0x01 · codec (0 plain, 1 zstd) · body
//! body     = frame*
//! frame    = flags · message id (16) · [transaction id] · [trace id] · [producer sub] · payload
//! [text]   = varint length · UTF-8
//! ```
//! A transaction id that is the message id's own text is not stored: most producers let the broker mint it.

use std::cell::RefCell;

use bytes::Bytes;
use thiserror::Error;
use uuid::Uuid;

use crate::ids::TransactionHash;

const VERSION: u8 = 1;
const CODEC_PLAIN: u8 = 0;
const CODEC_ZSTD: u8 = 1;
/// Below this, a compressed frame costs more CPU than the bytes it saves.
const COMPRESS_BYTES_MIN: usize = 128;
/// No body is larger: a request is at most 64 MiB and a body is cut at [`SEGMENT_BYTES_MAX`] past its first message.
const BODY_BYTES_MAX: usize = 1 << 30;
/// A segment is closed once its frames pass this size, so that a small pop never unpacks a large neighbour.
pub const SEGMENT_BYTES_MAX: usize = 1 << 20;
/// Most messages in one segment.
pub const SEGMENT_MESSAGES_MAX: usize = 4096;

const MINTED_TRANSACTION: u8 = 1;
const HAS_TRACE: u8 = 2;
const HAS_PRODUCER: u8 = 4;
const ENCRYPTED: u8 = 8;

/// A stored segment does not decode.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// Written by a newer broker.
    #[error("unknown segment format {0}")]
    Version(u8),
    /// Ends inside a frame, or a text is not UTF-8.
    #[error("torn frame at byte {0}")]
    Torn(usize),
    /// zstd refused it.
    #[error("decompression failed: {0}")]
    Decompress(String),
}

/// One message on its way into a segment.
#[derive(Clone, Debug)]
pub struct Frame<'a> {
    /// Message id, minted by the broker.
    pub id: Uuid,
    /// Deduplication key and ack address; `None` = the text of `id`.
    pub transaction_id: Option<&'a str>,
    /// Only a transaction stores one.
    pub trace_id: Option<&'a str>,
    /// `sub` of the producer's token.
    pub producer_sub: Option<&'a str>,
    /// Whether `payload` is an encryption envelope.
    pub encrypted: bool,
    /// The payload's bytes, verbatim.
    pub payload: &'a [u8],
}

impl Frame<'_> {
    /// The key that was pushed, as text.
    pub fn transaction_text(&self) -> std::borrow::Cow<'_, str> {
        match self.transaction_id {
            Some(text) => text.into(),
            None => self.id.as_hyphenated().to_string().into(),
        }
    }

    /// What acks and deduplication look for.
    pub fn transaction_hash(&self) -> TransactionHash {
        match self.transaction_id {
            Some(text) => TransactionHash::of(text),
            None => TransactionHash::of(self.id.as_hyphenated().encode_lower(&mut Uuid::encode_buffer())),
        }
    }

    /// Appends the frame to a segment body.
    pub fn pack(&self, body: &mut Vec<u8>) {
        let mut flags = 0;
        if self.transaction_id.is_none() {
            flags |= MINTED_TRANSACTION;
        }
        if self.trace_id.is_some() {
            flags |= HAS_TRACE;
        }
        if self.producer_sub.is_some() {
            flags |= HAS_PRODUCER;
        }
        if self.encrypted {
            flags |= ENCRYPTED;
        }
        body.push(flags);
        body.extend_from_slice(self.id.as_bytes());
        for text in [self.transaction_id, self.trace_id, self.producer_sub].into_iter().flatten() {
            put_bytes(body, text.as_bytes());
        }
        put_bytes(body, self.payload);
    }
}

/// Closes a body into its stored form, compressing it when that saves space.
pub fn seal(body: &[u8], zstd_level: i32) -> Vec<u8> {
    if body.len() >= COMPRESS_BYTES_MIN {
        let mut stored = vec![0; 2 + zstd::zstd_safe::compress_bound(body.len())];
        if let Some(written) = compress_into(body, &mut stored[2..], zstd_level).filter(|n| *n < body.len()) {
            stored[0] = VERSION;
            stored[1] = CODEC_ZSTD;
            stored.truncate(2 + written);
            return stored;
        }
    }
    let mut stored = Vec::with_capacity(2 + body.len());
    stored.extend_from_slice(&[VERSION, CODEC_PLAIN]);
    stored.extend_from_slice(body);
    stored
}

thread_local! {
    /// A compression context is some hundred KiB: kept per thread, not made per segment.
    static COMPRESSOR: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> = const { RefCell::new(None) };
}

fn compress_into(body: &[u8], out: &mut [u8], level: i32) -> Option<usize> {
    COMPRESSOR.with_borrow_mut(|slot| {
        if !matches!(slot, Some((l, _)) if *l == level) {
            *slot = zstd::bulk::Compressor::new(level).ok().map(|c| (level, c));
        }
        slot.as_mut()?.1.compress_to_buffer(body, out).ok()
    })
}

/// The frames of one segment, unpacked once and read in offset order. A cheap clone.
#[derive(Clone, Debug)]
pub struct Frames {
    body: Bytes,
}

impl Frames {
    /// Unpacks a stored segment.
    pub fn open(stored: &[u8]) -> Result<Frames, FrameError> {
        let [version, codec, body @ ..] = stored else { return Err(FrameError::Torn(0)) };
        match (*version, *codec) {
            (VERSION, CODEC_PLAIN) => Ok(Frames { body: Bytes::copy_from_slice(body) }),
            (VERSION, CODEC_ZSTD) => {
                let size = zstd::zstd_safe::get_frame_content_size(body)
                    .ok()
                    .flatten()
                    .and_then(|n| usize::try_from(n).ok())
                    .filter(|n| *n <= BODY_BYTES_MAX)
                    .ok_or_else(|| FrameError::Decompress("no content size".into()))?;
                let body =
                    zstd::bulk::decompress(body, size).map_err(|error| FrameError::Decompress(error.to_string()))?;
                Ok(Frames { body: body.into() })
            }
            (version, _) => Err(FrameError::Version(version)),
        }
    }

    /// The frames of a body that has just been packed.
    pub fn of_body(body: Bytes) -> Frames {
        Frames { body }
    }

    /// Bytes of the body.
    pub fn bytes(&self) -> usize {
        self.body.len()
    }

    /// The messages in offset order.
    pub fn iter(&self) -> FrameIter<'_> {
        FrameIter { body: &self.body, at: 0 }
    }
}

/// Iterates the messages of a segment; ends after the first error.
#[derive(Debug)]
pub struct FrameIter<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Iterator for FrameIter<'a> {
    type Item = Result<Frame<'a>, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.body.len() {
            return None;
        }
        let start = self.at;
        let frame = self.read().ok_or(FrameError::Torn(start));
        if frame.is_err() {
            self.at = self.body.len();
        }
        Some(frame)
    }
}

impl<'a> FrameIter<'a> {
    fn read(&mut self) -> Option<Frame<'a>> {
        let flags = *self.take(1)?.first()?;
        let id = Uuid::from_slice(self.take(16)?).ok()?;
        let transaction_id = if flags & MINTED_TRANSACTION == 0 { Some(self.text()?) } else { None };
        let trace_id = if flags & HAS_TRACE != 0 { Some(self.text()?) } else { None };
        let producer_sub = if flags & HAS_PRODUCER != 0 { Some(self.text()?) } else { None };
        let payload = self.bytes()?;
        Some(Frame { id, transaction_id, trace_id, producer_sub, encrypted: flags & ENCRYPTED != 0, payload })
    }

    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n)?;
        let slice = self.body.get(self.at..end)?;
        self.at = end;
        Some(slice)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let (mut length, mut shift) = (0usize, 0);
        loop {
            let byte = *self.take(1)?.first()?;
            length |= usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return self.take(length);
            }
            shift += 7;
            if shift > 35 {
                return None;
            }
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }
}

fn put_bytes(body: &mut Vec<u8>, bytes: &[u8]) {
    let mut length = bytes.len();
    while length >= 0x80 {
        body.push(length as u8 | 0x80);
        length >>= 7;
    }
    body.push(length as u8);
    body.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn packed(messages: &[Frame<'_>]) -> Vec<u8> {
        let mut body = Vec::new();
        messages.iter().for_each(|m| m.pack(&mut body));
        seal(&body, 1)
    }

    proptest! {
        #[test]
        fn what_was_packed_comes_back_verbatim(
            rows in prop::collection::vec(
                (any::<u128>(), prop::option::of(".{0,40}"), prop::option::of("[a-z]{1,9}"), any::<bool>(),
                 prop::collection::vec(any::<u8>(), 0..600)),
                1..20,
            )
        ) {
            let messages: Vec<Frame<'_>> = rows
                .iter()
                .map(|(id, txn, sub, encrypted, payload)| Frame {
                    id: Uuid::from_u128(*id),
                    transaction_id: txn.as_deref(),
                    trace_id: None,
                    producer_sub: sub.as_deref(),
                    encrypted: *encrypted,
                    payload,
                })
                .collect();
            let frames = Frames::open(&packed(&messages)).unwrap();
            let back: Vec<_> = frames.iter().map(Result::unwrap).collect();
            prop_assert_eq!(back.len(), messages.len());
            for (got, sent) in back.iter().zip(&messages) {
                prop_assert_eq!(format!("{got:?}"), format!("{sent:?}"));
                prop_assert_eq!(got.transaction_hash(), TransactionHash::of(&sent.transaction_text()));
            }
        }

        #[test]
        fn torn_segments_are_errors_and_never_panics(cut in 0usize..400, noise in prop::collection::vec(any::<u8>(), 0..64)) {
            let whole = packed(&[Frame {
                id: Uuid::nil(), transaction_id: Some("t"), trace_id: None, producer_sub: None, encrypted: false,
                payload: &[7; 300],
            }]);
            let _ = Frames::open(&whole[..cut.min(whole.len())]).map(|f| f.iter().count());
            let _ = Frames::open(&noise).map(|f| f.iter().count());
        }
    }

    #[test]
    fn a_newer_format_is_named() {
        assert_eq!(Frames::open(&[9, 0, 1]).unwrap_err(), FrameError::Version(9));
        assert_eq!(Frames::open(&[]).unwrap_err(), FrameError::Torn(0));
        assert_eq!(Frames::open(&[1, 0, 0]).unwrap().iter().next().unwrap().unwrap_err(), FrameError::Torn(0));
    }
}
