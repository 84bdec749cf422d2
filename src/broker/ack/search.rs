//! The search for transaction ids among the stored hashes, page by page (`spec/ack.md` §3). Locks nothing.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::broker::resolver::{Resolver, TornRow, Window};
use crate::ids::{Offset, PartitionId};
use crate::store::acks::{CursorRow, HashRow, OPEN_PAGE_OFFSETS, PAGE_OFFSETS_MAX, SpanRead, torn_hashes};
use crate::store::{Store, StoreResult};

/// Searches that go past their first page, in the whole broker: an id that was never pushed must not cost much.
const DEEP_SEARCHES_MAX: usize = 2;

/// Searches the stored hashes. A cheap clone; all clones share the bound on deep searches.
#[derive(Clone, Debug)]
pub struct Search {
    store: Store,
    deep: Arc<Semaphore>,
}

impl Search {
    /// Over this store.
    pub fn new(store: Store) -> Search {
        Search { store, deep: Arc::new(Semaphore::new(DEEP_SEARCHES_MAX)) }
    }

    /// Looks through the ackable span: the leased one, and above it only if the lease is not live.
    pub async fn search_span(
        &self,
        resolver: &mut Resolver,
        partition: PartitionId,
        read: &SpanRead,
    ) -> StoreResult<()> {
        let (row, from) = (&read.row, read.from.0);
        let span_end = row.batch_end.map(|end| end.0).filter(|end| *end >= from);
        let (window, first_end) = match span_end {
            Some(end) => (Window::Leased, end.min(read.read_to.0)),
            None if row.leased() => return Ok(()),
            None => (Window::Open, read.read_to.0),
        };
        scan(resolver, partition, &read.hashes, (from, first_end), window)?;
        let mut next = first_end + 1;
        if let Some(end) = span_end {
            while next <= end {
                next = self.page(resolver, partition, (next, end.min(next + PAGE_OFFSETS_MAX - 1)), window).await?;
            }
        }
        if row.leased() {
            return Ok(());
        }
        let mut size = OPEN_PAGE_OFFSETS;
        let mut permit = None;
        while !resolver.complete() && next <= row.last_offset.0 {
            if permit.is_none() && size > OPEN_PAGE_OFFSETS {
                permit = self.deep.acquire().await.ok();
            }
            next = self.page(resolver, partition, (next, next + size - 1), Window::Open).await?;
            size = (size * 4).min(PAGE_OFFSETS_MAX);
        }
        Ok(())
    }

    /// Reads and scans one page upwards; answers where the next one starts.
    async fn page(
        &self,
        resolver: &mut Resolver,
        partition: PartitionId,
        (from, to): (i64, i64),
        window: Window,
    ) -> StoreResult<i64> {
        let rows = self.store.read_hashes(partition, Offset(from), Offset(to)).await?;
        scan(resolver, partition, &rows, (from, to), window)?;
        Ok(to + 1)
    }

    /// Looks for what is still missing at and below the cursor, newest first, down to what was purged.
    pub async fn search_below(
        &self,
        resolver: &mut Resolver,
        partition: PartitionId,
        row: &CursorRow,
    ) -> StoreResult<()> {
        let floor = row.txns_start.0.max(0);
        let (mut to, mut size) = (row.committed.0, OPEN_PAGE_OFFSETS);
        let mut permit = None;
        while !resolver.complete() && to >= floor {
            if permit.is_none() && size > OPEN_PAGE_OFFSETS {
                permit = self.deep.acquire().await.ok();
            }
            let from = (to - size + 1).max(floor);
            let rows = self.store.read_hashes(partition, Offset(from), Offset(to)).await?;
            scan(resolver, partition, &rows, (floor, to), Window::Below)?;
            to = rows.first().map_or(from, |row| from.min(row.base.0)) - 1;
            size = (size * 4).min(PAGE_OFFSETS_MAX);
        }
        Ok(())
    }
}

/// Takes rows into account, restricted to the offsets `from..=to`.
pub fn scan(
    resolver: &mut Resolver,
    partition: PartitionId,
    rows: &[HashRow],
    (from, to): (i64, i64),
    window: Window,
) -> StoreResult<()> {
    for row in rows {
        resolver.scan(row, from..=to, window).map_err(|TornRow { base }| torn_hashes(partition, base))?;
    }
    Ok(())
}
