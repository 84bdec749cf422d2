//! The ids of one generation of a partition's memory: hash to offset. Most of a million partitions have one id inside
//! the window, and a table of its own would be most of what such a partition costs.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Up to so many are looked through one by one.
const FEW: usize = 8;

/// Hashes are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 << 8) | u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// One generation.
#[derive(Debug)]
pub(super) enum Ids {
    One(u64, i64),
    /// At most [`FEW`]; also none.
    Few(Vec<(u64, i64)>),
    #[expect(clippy::box_collection, reason = "the size of a generation counts, and a large one is rare")]
    Many(Box<HashMap<u64, i64, BuildHasherDefault<Identity>>>),
}

impl Default for Ids {
    fn default() -> Ids {
        Ids::Few(Vec::new())
    }
}

impl Ids {
    pub(super) fn len(&self) -> usize {
        match self {
            Ids::One(..) => 1,
            Ids::Few(ids) => ids.len(),
            Ids::Many(ids) => ids.len(),
        }
    }

    pub(super) fn get(&self, hash: u64) -> Option<i64> {
        match self {
            Ids::One(one, offset) => (*one == hash).then_some(*offset),
            Ids::Few(ids) => ids.iter().find(|(id, _)| *id == hash).map(|(_, offset)| *offset),
            Ids::Many(ids) => ids.get(&hash).copied(),
        }
    }

    /// Room for so many more.
    pub(super) fn reserve(&mut self, more: usize) {
        let expected = self.len() + more;
        match self {
            Ids::Many(ids) => ids.reserve(more),
            _ if expected > FEW => self.spread(expected),
            Ids::Few(ids) if expected > 1 => ids.reserve_exact(more),
            _ => {}
        }
    }

    /// The offset that the hash had before.
    pub(super) fn insert(&mut self, hash: u64, offset: i64) -> Option<i64> {
        match self {
            Ids::Many(ids) => return ids.insert(hash, offset),
            Ids::Few(ids) if ids.capacity() == 0 => {
                *self = Ids::One(hash, offset);
                return None;
            }
            Ids::Few(ids) => {
                if let Some((_, before)) = ids.iter_mut().find(|(id, _)| *id == hash) {
                    return Some(std::mem::replace(before, offset));
                }
                if ids.len() < FEW {
                    ids.push((hash, offset));
                    return None;
                }
            }
            Ids::One(one, before) if *one == hash => return Some(std::mem::replace(before, offset)),
            Ids::One(one, before) => {
                *self = Ids::Few(vec![(*one, *before), (hash, offset)]);
                return None;
            }
        }
        self.spread(2 * FEW);
        self.insert(hash, offset)
    }

    fn spread(&mut self, expected: usize) {
        let mut spread = HashMap::with_capacity_and_hasher(expected, BuildHasherDefault::default());
        match std::mem::take(self) {
            Ids::One(hash, offset) => spread.extend([(hash, offset)]),
            Ids::Few(ids) => spread.extend(ids),
            Ids::Many(ids) => spread = *ids,
        }
        *self = Ids::Many(Box::new(spread));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_generation_is_small() {
        assert_eq!(size_of::<Ids>(), 24);
    }

    proptest! {
        #[test]
        fn whatever_its_shape_it_is_a_map(inserts in prop::collection::vec((0..30_u64, any::<i64>(), 0..12_usize), 0..60)) {
            let (mut ids, mut model) = (Ids::default(), HashMap::new());
            for (hash, offset, reserved) in inserts {
                if reserved > 9 {
                    ids.reserve(reserved);
                }
                prop_assert_eq!(ids.insert(hash, offset), model.insert(hash, offset));
                prop_assert_eq!(ids.len(), model.len());
                for hash in 0..30 {
                    prop_assert_eq!(ids.get(hash), model.get(&hash).copied());
                }
            }
        }
    }
}
