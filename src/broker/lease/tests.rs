#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn hashes(ids: &[u128]) -> Vec<TransactionHash> {
    ids.iter().map(|id| TransactionHash(*id)).collect()
}

fn worker(n: u128) -> LeaseId {
    LeaseId(Uuid::from_u128(n))
}

fn grant(group: i32, holder: u128, expires: Instant, ids: &[u128]) -> LeaseGrant {
    LeaseGrant {
        partition: PartitionId(7),
        queue: QueueId(1),
        group: GroupId(group),
        group_name: format!("g{group}").into(),
        worker: worker(holder),
        committed: Offset(9),
        batch_end: Offset(9 + ids.len() as i64),
        expires,
        fingerprint: Fingerprint::of(hashes(ids)),
        conflating: false,
    }
}

#[test]
fn a_hit_is_exact_and_takes_the_entry_with_it() {
    let now = Instant::now();
    let mut registry = Registry::default();
    registry.grant(grant(1, 5, now, &[1, 2, 3]), ());
    let all = Fingerprint::of(hashes(&[3, 1, 2, 2]));
    let some = Fingerprint::of(hashes(&[1, 2]));
    assert_eq!(registry.cover("g2", worker(5), &all, now), Err(Miss::Unknown));
    assert_eq!(registry.cover("g1", worker(6), &all, now), Err(Miss::OtherWorker));
    assert_eq!(registry.cover("g1", worker(5), &some, now), Err(Miss::Partial));
    let hit = registry.cover("g1", worker(5), &all, now).unwrap();
    assert_eq!((hit.advance.committed, hit.advance.batch_end, hit.conflated), (Offset(9), Offset(12), None));
    assert_eq!(registry.cover("g1", worker(5), &all, now), Err(Miss::Unknown));
    assert!(registry.is_empty());
}

#[test]
fn expiry_has_a_margin_and_extension_never_shortens() {
    let now = Instant::now();
    let all = Fingerprint::of(hashes(&[1]));
    let mut registry = Registry::default();
    registry.grant(grant(1, 5, now, &[1]), ());
    let late = now + EXPIRY_MARGIN + Duration::from_millis(1);
    assert_eq!(registry.cover("g1", worker(5), &all, late), Err(Miss::Expired));
    registry.extend(worker(6), late, |()| ());
    assert_eq!(registry.next_expiry(), Some(now + EXPIRY_MARGIN));
    registry.extend(worker(5), late, |()| ());
    registry.extend(worker(5), now, |()| ());
    assert_eq!(registry.next_expiry(), Some(late + EXPIRY_MARGIN));
    registry.expire(late + EXPIRY_MARGIN);
    assert!(!registry.is_empty());
    registry.expire(late + EXPIRY_MARGIN * 2);
    assert!(registry.is_empty());
}

#[test]
fn an_old_worker_cannot_remove_the_present_one() {
    let now = Instant::now();
    let mut registry = Registry::default();
    registry.grant(grant(1, 5, now, &[1]), ());
    registry.grant(grant(2, 5, now, &[1]), ());
    registry.grant(grant(1, 6, now, &[1]), ());
    registry.drop_lease(GroupId(1), Some(worker(5)));
    assert!(registry.cover("g1", worker(6), &Fingerprint::of(hashes(&[1])), now).is_ok());
    registry.drop_lease(GroupId(2), None);
    assert!(registry.is_empty());
}

#[test]
fn a_conflating_lease_knows_what_it_skipped() {
    let now = Instant::now();
    let mut registry = Registry::default();
    registry.grant(LeaseGrant { conflating: true, batch_end: Offset(19), ..grant(1, 5, now, &[1]) }, ());
    let hit = registry.cover("g1", worker(5), &Fingerprint::of(hashes(&[1])), now).unwrap();
    assert_eq!(hit.conflated, Some(9));
}

proptest! {
    #[test]
    fn fingerprints_are_equal_exactly_when_the_sets_are(
        mut a in prop::collection::vec(0u128..40, 0..20),
        mut b in prop::collection::vec(0u128..40, 0..20),
        copy in any::<bool>(),
    ) {
        // Spread the small universe over 128 bits, as the hash does.
        let spread = |ids: &[u128]| -> Vec<TransactionHash> {
            ids.iter().map(|id| TransactionHash::of(&id.to_string())).collect()
        };
        if copy {
            b = a.iter().rev().chain(a.first()).copied().collect();
        }
        let (left, right) = (Fingerprint::of(spread(&a)), Fingerprint::of(spread(&b)));
        a.sort_unstable();
        a.dedup();
        b.sort_unstable();
        b.dedup();
        prop_assert_eq!(left == right, a == b);
    }
}
