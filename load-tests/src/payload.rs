//! Payloads: pseudo-random text that does not compress, and that can be checked byte by byte when it comes back.
//!
//! A payload is the JSON string `"<lane>.<seq>.<micros>.<filler>"`. The filler is a slice of one large random pool,
//! at a place that follows from lane and sequence number: cheap to write, cheap to compare, and so rarely overlapping
//! inside one segment that a compressor finds nothing to share.

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

/// Room for the three numbers, the dots and the quotes.
pub const PAYLOAD_BYTES_MIN: usize = 64;
const POOL_BYTES_MIN: usize = 8 << 20;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// The random text that fillers are cut from.
pub struct PayloadPool {
    text: Vec<u8>,
    payload_bytes: usize,
}

/// What a payload says about itself.
#[derive(Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Lane that the message was made for.
    pub lane: u32,
    /// Its number in that lane.
    pub seq: u32,
    /// When it was due, in microseconds since the start of the run.
    pub due_us: u64,
}

impl PayloadPool {
    /// A pool for payloads of `payload_bytes`, from a seed.
    pub fn new(seed: u64, payload_bytes: usize) -> Self {
        let payload_bytes = payload_bytes.max(PAYLOAD_BYTES_MIN);
        let mut rng = SmallRng::seed_from_u64(seed);
        let len = POOL_BYTES_MIN.max(payload_bytes * 4);
        let mut text = Vec::with_capacity(len + 8);
        while text.len() < len {
            let mut bits = rng.next_u64();
            for _ in 0..10 {
                text.push(ALPHABET[(bits & 63) as usize]);
                bits >>= 6;
            }
        }
        Self { text, payload_bytes }
    }

    /// Appends the payload of one message, quotes included.
    pub fn write(&self, out: &mut Vec<u8>, lane: u32, seq: u32, due_us: u64) {
        let begin = out.len();
        out.push(b'"');
        push_number(out, u64::from(lane));
        out.push(b'.');
        push_number(out, u64::from(seq));
        out.push(b'.');
        push_number(out, due_us);
        out.push(b'.');
        let filler = self.payload_bytes.saturating_sub(out.len() - begin + 1);
        out.extend_from_slice(self.filler(lane, seq, filler));
        out.push(b'"');
    }

    /// Reads a payload back; `None` when any byte of it is not what [`PayloadPool::write`] wrote.
    pub fn read(&self, raw: &[u8]) -> Option<Stamp> {
        let text = raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        if raw.len() != self.payload_bytes {
            return None;
        }
        let (lane, rest) = take_number(text)?;
        let (seq, rest) = take_number(rest.strip_prefix(b".")?)?;
        let (due_us, rest) = take_number(rest.strip_prefix(b".")?)?;
        let filler = rest.strip_prefix(b".")?;
        let lane = u32::try_from(lane).ok()?;
        let seq = u32::try_from(seq).ok()?;
        (filler == self.filler(lane, seq, filler.len())).then_some(Stamp { lane, seq, due_us })
    }

    fn filler(&self, lane: u32, seq: u32, len: usize) -> &[u8] {
        let key = ((u64::from(lane) << 32) | u64::from(seq)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let start = (key ^ (key >> 29)) as usize % (self.text.len() - len);
        &self.text[start..start + len]
    }
}

/// Appends a decimal number.
pub fn push_number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Splits a leading decimal number off.
pub fn take_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 || digits > 19 {
        return None;
    }
    let number = text[..digits].iter().fold(0_u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    Some((number, &text[digits..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let pool = PayloadPool::new(7, 256);
        let mut out = Vec::new();
        pool.write(&mut out, 12, 34, 56);
        assert_eq!(out.len(), 256);
        assert_eq!(pool.read(&out), Some(Stamp { lane: 12, seq: 34, due_us: 56 }));
    }

    #[test]
    fn one_changed_byte_is_noticed() {
        let pool = PayloadPool::new(7, 256);
        let mut out = Vec::new();
        pool.write(&mut out, 12, 34, 56);
        out[200] = if out[200] == b'x' { b'y' } else { b'x' };
        assert_eq!(pool.read(&out), None);
    }

    #[test]
    fn small_payloads_are_widened() {
        let pool = PayloadPool::new(7, 1);
        let mut out = Vec::new();
        pool.write(&mut out, u32::MAX, u32::MAX, 86_400_000_000);
        assert!(pool.read(&out).is_some());
    }
}
