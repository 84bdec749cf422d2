#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn hash(n: u128) -> TransactionHash {
    TransactionHash(n)
}

fn row(base: i64, hashes: &[u128]) -> HashRow {
    HashRow { base: Offset(base), packed: hashes.iter().flat_map(|h| hash(*h).to_bytes()).collect() }
}

fn span(first: i64, last: i64) -> Place {
    Place::Span { first: Offset(first), last: Offset(last) }
}

#[test]
fn duplicates_in_the_request_share_a_slot_and_empty_ids_have_none() {
    let (resolver, slots) = Resolver::new([Some(hash(1)), None, Some(hash(2)), Some(hash(1))].into_iter());
    assert_eq!(slots, [Some(0), None, Some(1), Some(0)]);
    assert_eq!(resolver.place(None), Place::Unresolvable);
    assert!(!resolver.complete());
    assert!(Resolver::new([None].into_iter()).0.complete());
}

#[test]
fn the_window_bounds_what_counts() {
    let (mut resolver, slots) = Resolver::new([7, 8, 9].map(|n| Some(hash(n))).into_iter());
    // Offsets 10..=14; the span is 11..=13.
    resolver.scan(&row(10, &[7, 8, 5, 8, 9]), 11..=13, Window::Leased).unwrap();
    let places: Vec<_> = slots.iter().map(|slot| resolver.place(*slot)).collect();
    assert_eq!(places, [Place::Unresolvable, span(11, 13), Place::Unresolvable]);
    resolver.scan(&row(0, &[7, 8]), 0..=10, Window::Below).unwrap();
    assert_eq!(resolver.place(slots[0]), Place::BelowCursor);
    assert_eq!(resolver.place(slots[1]), span(11, 13), "what the span holds is not below");
    assert!(!resolver.complete());
}

#[test]
fn without_a_lease_the_lowest_occurrence_counts() {
    let (mut resolver, slots) = Resolver::new([Some(hash(7))].into_iter());
    resolver.scan(&row(10, &[1, 7]), 10..=i64::MAX, Window::Open).unwrap();
    resolver.scan(&row(12, &[7]), 10..=i64::MAX, Window::Open).unwrap();
    assert_eq!(resolver.place(slots[0]), span(11, 11));
    assert!(resolver.complete());
}

#[test]
fn a_torn_row_is_refused() {
    let (mut resolver, _) = Resolver::new([Some(hash(7))].into_iter());
    let torn = HashRow { base: Offset(3), packed: vec![0; 17] };
    assert_eq!(resolver.scan(&torn, 0..=9, Window::Leased), Err(TornRow { base: Offset(3) }));
}

proptest! {
    #[test]
    fn rows_and_a_flat_log_agree(
        log in prop::collection::vec(0u128..12, 1..60),
        cuts in prop::collection::vec(1usize..9, 60),
        wanted in prop::collection::vec(0u128..14, 1..9),
        low in 0i64..60, high in 0i64..60,
    ) {
        let (mut resolver, slots) = Resolver::new(wanted.iter().map(|n| Some(hash(*n))));
        let mut rest = &log[..];
        let mut base = 0;
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            rest = later;
            let stored = row(base, now);
            base += now.len() as i64;
            prop_assert_eq!(stored.last(), Offset(base - 1));
            resolver.scan(&stored, low..=high, Window::Leased).unwrap();
        }
        let inside = |n: u128| log.iter().enumerate().map(|(o, h)| (o as i64, *h)).filter(move |(o, h)| *h == n && (low..=high).contains(o));
        for (n, slot) in wanted.iter().zip(&slots) {
            let want = match (inside(*n).next(), inside(*n).next_back()) {
                (Some((first, _)), Some((last, _))) => span(first, last),
                _ => Place::Unresolvable,
            };
            prop_assert_eq!(resolver.place(*slot), want);
        }
    }
}
