//! Switches and bounds of the transaction path. `app.rs` fills them from the configuration.

/// See the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransactionSettings {
    /// Flushes in flight at once.
    pub lanes: usize,
    /// Most bundles in one flush; 1 = nothing is shared.
    pub bundles_max: usize,
    /// Most packed bytes in one flush; a single larger bundle still goes, alone.
    pub bytes_max: usize,
    /// Bundles that may wait for a lane; past it they are answered 429.
    pub waiting_max: usize,
}

impl TransactionSettings {
    /// Most bundles in one flush by default.
    pub const BUNDLES_MAX: usize = 256;
    /// Flushes in flight where commits are not shared.
    pub const UNFUSED_LANES: usize = 16;
}

impl Default for TransactionSettings {
    fn default() -> TransactionSettings {
        TransactionSettings {
            lanes: 1,
            bundles_max: TransactionSettings::BUNDLES_MAX,
            bytes_max: 16 << 20,
            waiting_max: 4096,
        }
    }
}
