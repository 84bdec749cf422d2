//! What a leasing pop tells the ack pipeline.

use std::time::Duration;

use super::delivery::Delivered;

/// Where granted leases are registered.
#[derive(Clone, Debug, Default)]
pub struct Grants {}

impl Grants {
    /// A lease was granted; called before the answer is sent.
    pub async fn granted(&self, _group: &str, _part: &Delivered, _lease: Duration) {}
}
