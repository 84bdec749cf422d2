//! The safety walk of retention, in pages of one cycle each. What it knows of the lists is a bit per partition and kind,
//! and lasts as long as the walk; a broker that goes on with another's walk reads the lists anew.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use roaring::RoaringTreemap;

use super::error::BrokerResult;
use crate::ids::PartitionId;
use crate::store::Store;
use crate::store::age_lists::{AgeList, LIST_MAX};
use crate::store::age_walk::{WalkedList, WalkedPartition};
use crate::store::retention::Aged;

/// Partitions of one page.
const PAGE: i64 = 1000;
/// Lists are packed into one if their times differ by less than this part of the time that is left: the same share that
/// a step goes by.
const NEAR: f64 = 16.0;

/// How far a walk is.
#[derive(Debug, Default)]
pub struct AgeWalk {
    lists: Option<Lists>,
    /// How far [`AgeWalk::pack_behind`] is in its round over all lists.
    packed: Option<(Aged, AgeList)>,
    /// Partitions that steps looked at since its last page.
    stepped: usize,
}

/// What was read of the lists.
#[derive(Debug)]
struct Lists {
    begun_at: DateTime<Utc>,
    after: Option<(Aged, AgeList)>,
    all_read: bool,
    segments: RoaringTreemap,
    hashes: RoaringTreemap,
}

impl AgeWalk {
    /// One page of the walk `name`, if one is due. Answers the partitions looked at.
    pub async fn page(&mut self, store: &Store, name: &str, every: Option<Duration>) -> BrokerResult<u64> {
        let Some((after, now)) = store.next_of_walk(name, every.map(|every| every.as_secs_f64())).await? else {
            return Ok(0);
        };
        let lists = self.lists.get_or_insert_with(|| Lists::new(now));
        if !lists.all_read {
            let page = store.page_lists(lists.after, PAGE).await?;
            lists.read(&page);
            if !page.is_empty() {
                pack(store, &page).await?;
                return Ok(0);
            }
        }
        let page = store.page_of_walk(after, PAGE).await?;
        let missing = lists.missing(&page);
        if !missing.is_empty() {
            let listed = store.list_missing(&missing, lists.begun_at).await?;
            if listed > 0 {
                tracing::info!(listed, "partitions were missing from the lists of retention");
            }
        }
        let next = page.last().map(|last| last.id).filter(|_| page.len() as i64 == PAGE);
        store.move_walk(name, next).await?;
        if next.is_none() {
            self.lists = None;
        }
        Ok(page.len() as u64)
    }

    /// Steps have looked at so many partitions.
    pub fn stepped_over(&mut self, partitions: usize) {
        self.stepped += partitions;
    }

    /// After a failure: what was read of the lists may have holes. What is to be packed stays so.
    pub fn read_again(&mut self) {
        self.lists = None;
    }

    /// Packs a page of lists for every page of partitions that steps looked at: what they list anew shares lists with what
    /// the same step lists, and that is little where ages lie scattered. Not while a walk reads the lists.
    pub async fn pack_behind(&mut self, store: &Store) -> BrokerResult<()> {
        while self.stepped >= PAGE as usize && self.lists.as_ref().is_none_or(|lists| lists.all_read) {
            let page = store.page_lists(self.packed, PAGE).await?;
            pack(store, &page).await?;
            self.packed = page.last().map(|last| (last.what, last.list));
            self.stepped -= PAGE as usize;
        }
        Ok(())
    }
}

impl Lists {
    fn new(begun_at: DateTime<Utc>) -> Lists {
        let (segments, hashes) = Default::default();
        Lists { begun_at, after: None, all_read: false, segments, hashes }
    }

    fn read(&mut self, page: &[WalkedList]) {
        self.all_read = page.is_empty();
        for walked in page {
            let listed = match walked.what {
                Aged::Segments => &mut self.segments,
                Aged::Hashes => &mut self.hashes,
            };
            listed.extend(walked.live.iter().map(|id| id.0.unsigned_abs()));
            self.after = Some((walked.what, walked.list));
        }
    }

    /// What holds something and was in no list.
    fn missing(&self, page: &[WalkedPartition]) -> Vec<(Aged, PartitionId)> {
        let mut missing = Vec::new();
        for walked in page {
            let id = walked.id.0.unsigned_abs();
            if walked.has_segments && !self.segments.contains(id) {
                missing.push((Aged::Segments, walked.id));
            }
            if walked.has_hashes && !self.hashes.contains(id) {
                missing.push((Aged::Hashes, walked.id));
            }
        }
        missing
    }
}

/// Rewrites what [`groups_of`] finds.
async fn pack(store: &Store, page: &[WalkedList]) -> BrokerResult<()> {
    for what in [Aged::Segments, Aged::Hashes] {
        let of_kind: Vec<&WalkedList> = page.iter().filter(|walked| walked.what == what).collect();
        let groups = groups_of(&of_kind);
        if groups.is_empty() {
            continue;
        }
        let stale: Vec<PartitionId> = of_kind.iter().flat_map(|walked| walked.stale.iter().copied()).collect();
        store.pack_lists(what, &groups, &stale).await?;
    }
    Ok(())
}

/// Groups of lists (of one kind, in the order of their keys) that are better written anew: neighbours that need fewer
/// lists together, and those with stale members. What is due is left to the steps.
fn groups_of(page: &[&WalkedList]) -> Vec<Vec<AgeList>> {
    let mut groups: Vec<Vec<&WalkedList>> = Vec::new();
    for walked in page {
        let is_full = walked.live.len() >= LIST_MAX && walked.stale.is_empty();
        if is_full || walked.left.is_some_and(|left| left <= 0.0) {
            continue;
        }
        match groups.last_mut() {
            Some(group) if group.first().is_some_and(|first| are_near(first, walked)) => group.push(walked),
            _ => groups.push(vec![walked]),
        }
    }
    groups.retain(|group| {
        let live: usize = group.iter().map(|walked| walked.live.len()).sum();
        live.div_ceil(LIST_MAX) < group.len() || group.iter().any(|walked| !walked.stale.is_empty())
    });
    groups.into_iter().map(|group| group.into_iter().map(|walked| walked.list).collect()).collect()
}

fn are_near(first: &WalkedList, other: &WalkedList) -> bool {
    let apart = other.list.oldest_at - first.list.oldest_at;
    let is_near = |left: f64| TimeDelta::try_seconds((left / NEAR) as i64).is_none_or(|most| apart <= most);
    first.list.queue == other.list.queue && first.left.is_none_or(is_near)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::QueueId;

    fn list(queue: i32, at: i64, live: usize, stale: usize, left: Option<f64>) -> WalkedList {
        let oldest_at = DateTime::UNIX_EPOCH + TimeDelta::seconds(at);
        let ids = |from: usize, n: usize| (from..from + n).map(|id| PartitionId(id as i64)).collect();
        WalkedList {
            what: Aged::Segments,
            list: AgeList { queue: QueueId(queue), oldest_at, id: at, partitions: live + stale },
            live: ids(0, live),
            stale: ids(live, stale),
            left,
        }
    }

    /// Ids of the lists of each group.
    fn packed(lists: &[WalkedList]) -> Vec<Vec<i64>> {
        let groups = groups_of(&lists.iter().collect::<Vec<_>>());
        groups.into_iter().map(|group| group.into_iter().map(|list| list.id).collect()).collect()
    }

    #[test]
    fn neighbours_of_one_queue_that_need_fewer_lists_are_packed() {
        let alone = |queue, at| list(queue, at, 1, 0, None);
        assert_eq!(packed(&[alone(1, 1), alone(1, 9_000), alone(2, 3)]), [vec![1, 9_000]]);
        // A full one between them stays as it is.
        assert_eq!(packed(&[alone(1, 1), list(1, 2, LIST_MAX, 0, None), alone(1, 3)]), [vec![1, 3]]);
        // Two that do not fit into one gain nothing; three that fit into two do.
        let large = |at| list(1, at, LIST_MAX * 5 / 8, 0, None);
        assert_eq!(packed(&[large(1), large(2)]), Vec::<Vec<i64>>::new());
        assert_eq!(packed(&[large(1), large(2), large(3)]), [vec![1, 2, 3]]);
    }

    #[test]
    fn only_lists_that_are_due_at_about_the_same_time_are_packed() {
        let due_in = |at: i64| list(1, at, 1, 0, Some(1_600.0 + at as f64));
        assert_eq!(packed(&[due_in(0), due_in(100), due_in(101)]), [vec![0, 100]]);
        assert_eq!(packed(&[list(1, 0, 1, 0, Some(0.0)), list(1, 1, 1, 0, Some(-3.0))]), Vec::<Vec<i64>>::new());
    }

    #[test]
    fn a_list_with_stale_members_is_written_anew() {
        assert_eq!(packed(&[list(1, 1, 5, 1, None)]), [vec![1]]);
        assert_eq!(packed(&[list(1, 1, 0, 32, Some(10.0))]), [vec![1]]);
        assert_eq!(packed(&[list(1, 1, 5, 0, None)]), Vec::<Vec<i64>>::new());
    }
}
