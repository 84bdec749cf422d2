//! What a leasing pop tells the ack pipeline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ack::{AckPipeline, Fingerprint, LeaseGrant};
use super::delivery::Delivered;

/// Where granted leases are registered.
#[derive(Clone, Debug)]
pub struct Grants {
    ack: AckPipeline,
}

impl Grants {
    /// Registers with this pipeline.
    pub fn new(ack: AckPipeline) -> Grants {
        Grants { ack }
    }

    /// A lease was granted; called before the answer is sent, or the ack could come first.
    pub fn granted(&self, group: &Arc<str>, part: &Delivered, lease: Duration) {
        let (true, Some(batch_end)) = (self.ack.wants_grants(), part.end) else { return };
        self.ack.granted(LeaseGrant {
            partition: part.span.claimed.partition,
            queue: part.span.queue.id,
            group: part.span.group,
            group_name: group.clone(),
            worker: part.span.claimed.worker,
            committed: part.span.claimed.committed,
            batch_end,
            expires: Instant::now() + lease,
            fingerprint: Fingerprint::of(part.hashes.iter().copied()),
            conflating: part.span.conflating,
        });
    }
}
