//! Pushes that go to the disk spool instead of the database (`spec/push-pop.md` §2.9).

use std::sync::Arc;

use uuid::Uuid;

use super::push::{PushItem, PushResult, PushStatus, group_items};
use super::spool::{Spool, Spooled};

/// Whether a queue encrypts, by name; `None` when that is not known here.
pub type Encrypts<'a> = &'a (dyn Fn(&str) -> Option<bool> + Sync);

/// Spools a whole request: maintenance, a database that is away, a broker that has not booted yet.
pub async fn spool_all(
    spool: &Spool,
    encrypts: Encrypts<'_>,
    items: &[PushItem<'_>],
    producer_sub: Option<&str>,
) -> Vec<PushResult> {
    let minted: Vec<Uuid> = items.iter().map(|_| Uuid::now_v7()).collect();
    let (groups, followers) = group_items(items);
    let mut leaders: Vec<usize> = groups.iter().flat_map(|group| group.items.iter().copied()).collect();
    leaders.sort_unstable();
    let mut results = vec![None; items.len()];
    spool_some(spool, encrypts, items, &minted, &leaders, producer_sub, false, &mut results).await;
    follow(&mut results, &followers);
    results
        .into_iter()
        .zip(minted)
        .map(|(result, id)| result.unwrap_or_else(|| failed(id, "no outcome".into())))
        .collect()
}

/// Spools the items at these indexes, in one record group: all of them are on disk, or none.
#[allow(clippy::too_many_arguments)]
pub async fn spool_some(
    spool: &Spool,
    encrypts: Encrypts<'_>,
    items: &[PushItem<'_>],
    minted: &[Uuid],
    indexes: &[usize],
    producer_sub: Option<&str>,
    probe: bool,
    results: &mut [Option<PushResult>],
) {
    let messages: Vec<Spooled<'_>> = indexes
        .iter()
        .map(|index| {
            let item = &items[*index];
            Spooled {
                queue: item.queue,
                partition: item.partition,
                transaction_id: item.transaction_id,
                id: minted[*index],
                payload: item.payload,
                encrypts: encrypts(item.queue),
                probe,
            }
        })
        .collect();
    let outcome = spool.store(&messages, producer_sub).await;
    for index in indexes {
        let id = minted[*index];
        results[*index] = Some(match &outcome {
            Ok(()) => PushResult { message_id: id, minted_id: id, status: PushStatus::Buffered },
            Err(error) => failed(id, error.as_str().into()),
        });
    }
}

/// Items that repeat a key of their request get the answer of the first.
pub fn follow(results: &mut [Option<PushResult>], followers: &[(usize, usize)]) {
    for (follower, leader) in followers {
        results[*follower] = results[*leader].clone().map(|leader| PushResult {
            minted_id: leader.minted_id,
            status: match leader.status {
                PushStatus::Queued { offset } => PushStatus::Duplicate { offset },
                other => other,
            },
            ..leader
        });
    }
}

fn failed(id: Uuid, error: Arc<str>) -> PushResult {
    PushResult { message_id: id, minted_id: id, status: PushStatus::Failed { error } }
}
