//! Decode, call the broker, encode. No pool, no SQL, no policy.

pub mod ack;
