//! The resolver: transaction id to offset, inside a bounded window (`spec/ack.md` §3).
//!
//! Pure. The caller feeds it stored hash rows, page by page; "unresolvable" is a value here, not an error.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use crate::broker::ack_decision::Place;
use crate::ids::{Offset, TransactionHash};
use crate::store::acks::HashRow;

#[cfg(test)]
mod tests;

/// Up to here a row is compared hash by hash; past it, looked up in an index of the wanted ones.
const LINEAR_WANTED_MAX: usize = 4;

/// A stored row whose packed column is no multiple of 16 bytes; offsets past it would be wrong, so nothing is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TornRow {
    /// Offset of its first hash.
    pub base: Offset,
}

/// How a page of rows counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The span that a lease names: every occurrence counts.
    Leased,
    /// Above any lease: the lowest occurrence counts, and only for ids not found before. A message far behind the
    /// wanted one that re-uses its id must not drag the cursor over what nobody delivered.
    Open,
    /// At or below the cursor.
    Below,
}

/// The distinct ids of one group and where they have been found so far.
#[derive(Clone, Debug)]
pub struct Resolver {
    wanted: Vec<u128>,
    places: Vec<Option<Place>>,
    index: HashMap<u128, usize>,
    missing: usize,
}

impl Resolver {
    /// Starts with nothing found. The second value gives each item's slot; an item without a hash (an empty
    /// `transactionId`) has none and resolves to nothing.
    pub fn new(hashes: impl Iterator<Item = Option<TransactionHash>>) -> (Resolver, Vec<Option<usize>>) {
        let mut index = HashMap::new();
        let mut wanted = Vec::new();
        let slots = hashes
            .map(|hash| {
                hash.map(|TransactionHash(hash)| {
                    *index.entry(hash).or_insert_with(|| {
                        wanted.push(hash);
                        wanted.len() - 1
                    })
                })
            })
            .collect();
        let missing = wanted.len();
        (Resolver { places: vec![None; missing], wanted, index, missing }, slots)
    }

    /// Whether every id has a place, so that no further page is needed.
    pub fn complete(&self) -> bool {
        self.missing == 0
    }

    /// Where the id of this slot is, as far as the pages told.
    pub fn place(&self, slot: Option<usize>) -> Place {
        slot.and_then(|slot| self.places.get(slot).copied().flatten()).unwrap_or(Place::Unresolvable)
    }

    /// Takes one stored row into account, restricted to the offsets of `range`.
    pub fn scan(&mut self, row: &HashRow, range: RangeInclusive<i64>, window: Window) -> Result<(), TornRow> {
        let hashes = TransactionHash::unpack(&row.packed).ok_or(TornRow { base: row.base })?;
        let skip = usize::try_from(range.start() - row.base.0).unwrap_or(0);
        let Ok(take) = usize::try_from(range.end().saturating_sub(row.base.0).saturating_add(1)) else { return Ok(()) };
        let within = hashes.enumerate().take(take).skip(skip);
        for (nth, TransactionHash(hash)) in within {
            if let Some(slot) = self.slot_of(hash) {
                self.found(slot, Offset(row.base.0 + nth as i64), window);
            }
        }
        Ok(())
    }

    fn slot_of(&self, hash: u128) -> Option<usize> {
        if self.wanted.len() <= LINEAR_WANTED_MAX {
            self.wanted.iter().position(|wanted| *wanted == hash)
        } else {
            self.index.get(&hash).copied()
        }
    }

    fn found(&mut self, slot: usize, offset: Offset, window: Window) {
        let Some(place) = self.places.get_mut(slot) else { return };
        match (&mut *place, window) {
            (None, Window::Below) => *place = Some(Place::BelowCursor),
            (None, Window::Leased | Window::Open) => *place = Some(Place::Span { first: offset, last: offset }),
            (Some(Place::Span { first, last }), Window::Leased) => {
                *first = offset.min(*first);
                *last = offset.max(*last);
                return;
            }
            (Some(_), _) => return,
        }
        self.missing -= 1;
    }
}
