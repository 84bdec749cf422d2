//! Listings of consumer groups (`spec/admin.md` §7.1 to §7.3): read live, one at a time, and bounded.
//!
//! Totals cost some microseconds per cursor, so that a million cursors take seconds. Of those that take long the answer is
//! kept for a while, and whoever asks meanwhile waits for it instead of asking PostgreSQL as well.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::error::BrokerResult;
use crate::store::Store;
pub use crate::store::group_listings::{CursorLag, GroupTotals};

/// Most rows of a listing of cursors.
pub const CURSORS_MAX: i64 = 10_000;
/// Totals that came sooner than this are not kept at all.
const QUICK: Duration = Duration::from_millis(250);
/// For how many times the time that they took totals are kept: listing costs at most a fifth of one connection.
const KEPT_TIMES: u32 = 4;

/// The listings of one broker. A cheap clone.
#[derive(Clone, Debug)]
pub struct GroupList {
    store: Store,
    totals: Arc<Mutex<Option<Kept>>>,
    /// Held by the one listing of cursors that is under way.
    turn: Arc<Mutex<()>>,
}

#[derive(Clone, Debug)]
struct Kept {
    asked: Instant,
    until: Instant,
    totals: Arc<[GroupTotals]>,
}

impl GroupList {
    /// Over the store.
    pub fn new(store: Store) -> GroupList {
        GroupList { store, totals: Arc::default(), turn: Arc::default() }
    }

    /// Totals of every (group, queue) that has cursors, by name: as of now, or where that takes long, as of a few times as
    /// long ago.
    pub async fn totals(&self) -> BrokerResult<Arc<[GroupTotals]>> {
        let came = Instant::now();
        let mut kept = self.totals.lock().await;
        if let Some(kept) = kept.as_ref().filter(|kept| kept.asked >= came || kept.until > came) {
            return Ok(kept.totals.clone());
        }
        let asked = Instant::now();
        let totals: Arc<[GroupTotals]> = self.store.group_totals().await?.into();
        let cost = asked.elapsed();
        let until = if cost < QUICK { asked } else { Instant::now() + cost * KEPT_TIMES };
        *kept = Some(Kept { asked, until, totals: totals.clone() });
        Ok(totals)
    }

    /// Cursors that owe something since at least that many seconds, the furthest behind first, at most [`CURSORS_MAX`].
    pub async fn lagging(&self, seconds_min: f64) -> BrokerResult<Vec<CursorLag>> {
        let _turn = self.turn.lock().await;
        Ok(self.store.lagging_cursors(seconds_min, CURSORS_MAX).await?)
    }

    /// The cursors of one group by queue and partition name, at most [`CURSORS_MAX`], and whether there are more.
    pub async fn cursors(&self, group: &str) -> BrokerResult<(Vec<CursorLag>, bool)> {
        let _turn = self.turn.lock().await;
        let mut cursors = self.store.cursors_of_group(group, CURSORS_MAX + 1).await?;
        let more = cursors.len() as i64 > CURSORS_MAX;
        cursors.truncate(CURSORS_MAX as usize);
        Ok((cursors, more))
    }
}
