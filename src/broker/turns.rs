//! Turns at the database for what is asked once: ten thousand consumers that appear together must not wait for a
//! connection each, with all that such a wait holds in memory.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// Askers at the same time.
const TURNS: usize = 16;
/// Whoever has waited this long goes without a turn: while the database is away, everybody must hear of it in time.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// A cheap clone.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Semaphore>);

impl Turns {
    /// All turns are free.
    pub fn new() -> Turns {
        Turns(Arc::new(Semaphore::new(TURNS)))
    }

    /// Waits for a turn. It ends when the answer drops.
    pub async fn take(&self) -> Option<SemaphorePermit<'_>> {
        tokio::time::timeout(WAIT_MAX, self.0.acquire()).await.ok()?.ok()
    }
}

impl Default for Turns {
    fn default() -> Turns {
        Turns::new()
    }
}
