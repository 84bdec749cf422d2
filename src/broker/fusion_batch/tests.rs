#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::ids::Offset;

fn advance(partition: i64, group: i32, worker: u128) -> PositionalAdvance {
    PositionalAdvance {
        partition: PartitionId(partition),
        group: GroupId(group),
        worker: LeaseId(Uuid::from_u128(worker)),
        committed: Offset(0),
        batch_end: Offset(5),
    }
}

const WIDE: Caps = Caps { rows_max: 100, bytes_max: 1 << 20 };

#[test]
fn the_same_worker_folds_and_another_one_does_not() {
    let mut batch = Batch::new(WIDE);
    batch.add(advance(2, 1, 1), "first");
    batch.add(advance(1, 1, 1), "other partition");
    batch.add(advance(2, 1, 1), "again");
    batch.add(advance(2, 1, 2), "other worker");
    let rows = batch.into_rows();
    let shape: Vec<_> = rows.iter().map(|r| (r.advance.partition.0, r.waiter, r.followers.as_slice())).collect();
    assert_eq!(shape, [(1, "other partition", &[][..]), (2, "first", &["again"][..]), (2, "other worker", &[][..])]);
}

/// The first to come leads, whatever the others name: which of two ends is right only the row can tell (I6).
#[test]
fn another_end_of_the_same_lease_follows_and_moves_nothing() {
    let mut batch = Batch::new(WIDE);
    batch.add(advance(1, 1, 1), "leads");
    batch.add(PositionalAdvance { batch_end: Offset(9), ..advance(1, 1, 1) }, "further");
    batch.add(PositionalAdvance { batch_end: Offset(2), ..advance(1, 1, 1) }, "nearer");
    let rows = batch.into_rows();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].advance.batch_end, rows[0].waiter), (Offset(5), "leads"));
    assert_eq!(rows[0].followers, ["further", "nearer"]);
}

#[test]
fn a_batch_always_takes_one_and_then_keeps_its_caps() {
    for caps in [Caps { rows_max: 0, bytes_max: 0 }, Caps { rows_max: 9, bytes_max: ROW_BYTES }] {
        let mut batch = Batch::new(caps);
        assert!(batch.has_room() && batch.is_empty());
        batch.add(advance(1, 1, 1), ());
        assert!(!batch.has_room());
    }
}

#[test]
fn halves_end_at_single_rows() {
    let rows: Vec<_> = (0..5).map(|n| advance(n, 1, 1)).collect();
    let mut single = Vec::new();
    let mut open = vec![&rows[..]];
    while let Some(part) = open.pop() {
        match halves(part) {
            Some((left, right)) => open.extend([right, left]),
            None => single.push(part[0]),
        }
    }
    assert_eq!(single, rows);
}

proptest! {
    #[test]
    fn every_waiter_is_in_exactly_one_row_and_rows_are_in_lock_order(
        adds in prop::collection::vec((0i64..4, 0i32..3, 0u128..3), 0..40), rows_max in 1usize..30,
    ) {
        let mut batch = Batch::new(Caps { rows_max, ..WIDE });
        let mut added = 0;
        for (nth, (partition, group, worker)) in adds.iter().enumerate() {
            if !batch.has_room() {
                break;
            }
            batch.add(advance(*partition, *group, *worker), nth);
            added += 1;
        }
        prop_assert!(added <= rows_max);
        let rows = batch.into_rows();
        prop_assert!(rows.is_sorted_by_key(|r| (r.advance.partition, r.advance.group)));
        let mut seen: Vec<usize> = Vec::new();
        for row in &rows {
            prop_assert!(row.followers.iter().all(|f| *f > row.waiter), "the first to come leads");
            seen.extend(row.followers.iter().chain([&row.waiter]));
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..added).collect::<Vec<_>>());
    }
}
