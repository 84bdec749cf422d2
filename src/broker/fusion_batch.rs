//! Pure: what joins one flush of cursor advances, what closes it, and how a failing one is split.

use std::collections::HashMap;

use crate::ids::{GroupId, LeaseId, PartitionId};
use crate::store::advances::PositionalAdvance;

#[cfg(test)]
mod tests;

/// Parameter bytes of one row.
pub const ROW_BYTES: usize = 8 + 4 + 16 + 8 + 8;

/// Bounds of one flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Cursor rows.
    pub rows_max: usize,
    /// Parameter bytes.
    pub bytes_max: usize,
}

/// One cursor row of a flush, and who waits for it.
#[derive(Debug)]
pub struct Fused<W> {
    /// The advance.
    pub advance: PositionalAdvance,
    /// Who asked for it.
    pub waiter: W,
    /// Who asked for the same lease after that. The row can end that lease only once, so these are answered by full
    /// resolution, as if they had come one after the other (I6).
    pub followers: Vec<W>,
}

/// The rows of one flush.
#[derive(Debug)]
pub struct Batch<W> {
    caps: Caps,
    rows: Vec<Fused<W>>,
    at: HashMap<(PartitionId, GroupId, LeaseId), usize>,
    waiters: usize,
}

impl<W> Batch<W> {
    /// An empty batch.
    pub fn new(caps: Caps) -> Batch<W> {
        Batch { caps, rows: Vec::new(), at: HashMap::new(), waiters: 0 }
    }

    /// Whether one more advance fits, whatever it is. Waiters count too: folding must not make a batch unbounded.
    pub fn has_room(&self) -> bool {
        let rows = self.waiters + 1;
        self.rows.is_empty() || (rows <= self.caps.rows_max && rows.saturating_mul(ROW_BYTES) <= self.caps.bytes_max)
    }

    /// Adds an advance, folding it into an equal one.
    pub fn add(&mut self, advance: PositionalAdvance, waiter: W) {
        self.waiters += 1;
        let key = (advance.partition, advance.group, advance.worker);
        match self.at.get(&key).and_then(|at| self.rows.get_mut(*at)) {
            Some(row) => row.followers.push(waiter),
            None => {
                self.at.insert(key, self.rows.len());
                self.rows.push(Fused { advance, waiter, followers: Vec::new() });
            }
        }
    }

    /// Whether there is nothing to flush.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The rows, in lock order.
    pub fn into_rows(self) -> Vec<Fused<W>> {
        let mut rows = self.rows;
        rows.sort_by_key(|row| (row.advance.partition, row.advance.group));
        rows
    }
}

/// The halves of a flush that failed as a whole, to find the row that makes it fail; `None` if it is one row.
pub fn halves(rows: &[PositionalAdvance]) -> Option<(&[PositionalAdvance], &[PositionalAdvance])> {
    (rows.len() > 1).then(|| rows.split_at(rows.len() / 2))
}
