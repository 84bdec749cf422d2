//! From claimed spans to messages: segments read outside the claim, unpacked, cut to the size limit of an answer.

use chrono::{DateTime, Utc};

use super::claim::ClaimedSpan;
use super::error::{BrokerError, BrokerResult};
use super::segment::{Frame, Frames};
use super::segment_cache::OpenSegment;
use crate::ids::{LeaseId, Offset, PartitionId, TransactionHash};
use crate::store::messages::Span;

/// Payload bytes after which an answer stops; one message is always delivered (`spec/push-pop.md` §9).
pub const DELIVERY_BYTES_MAX: usize = 64 << 20;

/// A run of messages of one segment.
#[derive(Debug)]
pub struct Run {
    frames: Frames,
    skip: usize,
    take: usize,
    /// Commit time of the segment.
    pub created_at: DateTime<Utc>,
}

impl Run {
    /// The messages in offset order.
    pub fn messages(&self) -> impl Iterator<Item = Frame<'_>> {
        // Every frame was read once when the run was made, so none can fail here.
        self.frames.iter().filter_map(Result::ok).skip(self.skip).take(self.take)
    }
}

/// The messages of one claimed partition.
#[derive(Debug)]
pub struct Delivered {
    /// The claim.
    pub span: ClaimedSpan,
    /// The messages, segment by segment.
    pub runs: Vec<Run>,
    /// Transaction hashes in offset order.
    pub hashes: Vec<TransactionHash>,
    /// Last offset delivered; `None` if nothing was.
    pub end: Option<Offset>,
}

impl Delivered {
    /// Where the lease must end instead, if not at the claimed end.
    pub fn shrunk(&self) -> Option<Option<Offset>> {
        (self.end != Some(self.span.claimed.last)).then_some(self.end)
    }

    /// Partition and worker.
    pub fn lease(&self) -> (PartitionId, LeaseId) {
        (self.span.claimed.partition, self.span.claimed.worker)
    }
}

/// The spans to read for these claims.
pub fn spans(claims: &[ClaimedSpan]) -> Vec<Span> {
    claims
        .iter()
        .map(|c| Span { partition: c.claimed.partition, first: c.deliver_from(), last: c.claimed.last })
        .collect()
}

/// Cuts the segments of each claim to its span. Stops at the size limit; what lies behind it is not delivered.
pub fn deliver(claims: Vec<ClaimedSpan>, segments: Vec<Vec<OpenSegment>>) -> BrokerResult<Vec<Delivered>> {
    let mut bytes_left = Some(DELIVERY_BYTES_MAX);
    let mut first = true;
    claims
        .into_iter()
        .zip(segments)
        .map(|(span, segments)| {
            let mut delivered = Delivered { span, runs: Vec::new(), hashes: Vec::new(), end: None };
            for segment in segments {
                if bytes_left.is_none() || !read_run(&mut delivered, segment, &mut bytes_left, &mut first)? {
                    break;
                }
            }
            Ok(delivered)
        })
        .collect()
}

/// Adds the wanted messages of one segment; `false` when the limit cut it.
fn read_run(
    delivered: &mut Delivered,
    segment: OpenSegment,
    bytes_left: &mut Option<usize>,
    first: &mut bool,
) -> BrokerResult<bool> {
    let claimed = &delivered.span.claimed;
    let damaged = |error: String| {
        let at = format!("partition {} offset {}", segment.partition, segment.base_offset);
        BrokerError::Failed(format!("stored segment does not decode, connection kept: {error} at {at}"))
    };
    let frames = segment.frames;
    let skip = usize::try_from(delivered.span.deliver_from().0 - segment.base_offset.0).unwrap_or(0);
    let wanted = usize::try_from(claimed.last.0 - segment.base_offset.0 + 1).unwrap_or(0).saturating_sub(skip);
    let (mut take, mut cut) = (0, false);
    for frame in frames.iter().skip(skip).take(wanted) {
        let frame = frame.map_err(|e| damaged(e.to_string()))?;
        let left = bytes_left.unwrap_or(0);
        if frame.payload.len() > left && !*first {
            cut = true;
            *bytes_left = None;
            break;
        }
        *first = false;
        *bytes_left = Some(left.saturating_sub(frame.payload.len()));
        delivered.hashes.push(frame.transaction_hash());
        take += 1;
    }
    if take > 0 {
        delivered.end = Some(Offset(segment.base_offset.0 + (skip + take) as i64 - 1));
        delivered.runs.push(Run { frames, skip, take, created_at: segment.created_at });
    }
    Ok(!cut)
}
