//! Stored messages for people: the newest of a window, and one by its address (`spec/admin.md` §5).
//!
//! No index orders messages by age across partitions: every push would pay for it. A page is merged from the partitions
//! that were written last. The newest `n` messages lie in the `n` partitions with the newest last write, so a page needs
//! few of them; which partitions those are is known for what was written lately (`activity.rs`) and looked up for the
//! rest, up to a bound.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};

use super::Broker;
use super::error::{BrokerError, BrokerResult};
use super::queue::Queue;
use super::segment::Frames;
use crate::ids::{Offset, PartitionId, QUEUE_MODE_GROUP, TransactionHash};
use crate::store::message_list::{HashRun, PlaceFilter};
pub use crate::store::message_list::{MessagePlace, PlaceCursor};
use crate::store::messages::Span;

/// Most messages of one page.
pub const PAGE_MAX: usize = 1_000;
/// Messages that a listing may skip; behind that, a page is empty.
pub const SKIP_MAX: usize = 10_000;
/// Queues that a listing without a queue looks through, the last written first.
const QUEUES_MAX: i64 = 200;
/// Partitions of a queue that a listing looks through, in name order, beside those known to be recent.
const PARTITIONS_MAX: i64 = 10_000;
/// Partitions that a listing looks through in all.
const CANDIDATES_MAX: i64 = 20_000;
/// Partitions whose messages a listing reads.
const PLACES_MAX: usize = 2_000;
/// Partitions per step of the merge.
const STEP_PLACES: usize = 16;
/// Hash rows of one partition that a listing looks through.
const ROWS_MAX: i64 = 5_000;
/// Hash rows per page of a search for one id.
const SEARCH_ROWS: i64 = 2_000;
/// Segments without stored hashes that a search for one id unpacks, and how many at a time.
const SEARCH_SEGMENTS_MAX: usize = 5_000;
const SEARCH_SEGMENTS: i64 = 50;
/// Payload bytes of one page; the messages behind come without theirs.
const PAGE_BYTES_MAX: usize = 32 << 20;

/// What a message is to its readers (`spec/admin.md` §5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MessageStatus {
    DeadLetter,
    Completed,
    Processing,
    Pending,
}

impl MessageStatus {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            MessageStatus::DeadLetter => "dead_letter",
            MessageStatus::Completed => "completed",
            MessageStatus::Processing => "processing",
            MessageStatus::Pending => "pending",
        }
    }

    /// By its name; `None` for a word that matches nothing.
    pub fn of_name(name: &str) -> Option<MessageStatus> {
        use MessageStatus::*;
        [DeadLetter, Completed, Processing, Pending].into_iter().find(|status| status.name() == name)
    }

    /// Of the message at `offset`: for readers without a group (§5.4), or for all of them (§17.10).
    fn of(offset: Offset, is_dead: bool, cursors: &[PlaceCursor], for_all: bool) -> MessageStatus {
        let is_past = |cursor: &PlaceCursor| cursor.committed >= offset;
        let leased = |cursor: &&PlaceCursor| !is_past(cursor) && cursor.leased_to.is_some_and(|end| end >= offset);
        let queue_mode = cursors.iter().find(|cursor| cursor.group == QUEUE_MODE_GROUP);
        let all_past = for_all && queue_mode.is_none() && !cursors.is_empty() && cursors.iter().all(is_past);
        if is_dead {
            MessageStatus::DeadLetter
        } else if queue_mode.is_some_and(is_past) || all_past {
            MessageStatus::Completed
        } else if cursors.iter().any(|cursor| leased(&cursor)) {
            MessageStatus::Processing
        } else {
            MessageStatus::Pending
        }
    }
}

/// What a frame says; nothing of it is known once its segment is gone.
#[derive(Clone, Debug)]
pub struct MessageFrame {
    /// Message id.
    pub id: uuid::Uuid,
    /// Transaction id.
    pub transaction_id: String,
    /// Trace id.
    pub trace_id: Option<String>,
    /// Producer.
    pub producer_sub: Option<String>,
    /// Whether it is stored as an envelope.
    pub is_encrypted: bool,
    /// The payload, opened if there is a key; `None` if it is empty or was left out for size.
    pub payload: Option<Vec<u8>>,
}

/// One listed message.
#[derive(Clone, Debug)]
pub struct ListedMessage {
    /// Where it is.
    pub place: Arc<MessagePlace>,
    /// Its offset.
    pub offset: Offset,
    /// Offset of its segment's first message.
    pub base: Offset,
    /// Its stored hash, 16 bytes.
    pub hash: [u8; 16],
    /// Commit time.
    pub created_at: DateTime<Utc>,
    /// For all groups.
    pub status: MessageStatus,
    /// For readers without a group.
    pub queue_status: MessageStatus,
    /// Every group with a cursor here.
    pub cursors: Arc<[PlaceCursor]>,
    /// Its frame, unless the segment is gone.
    pub frame: Option<MessageFrame>,
}

/// One message by its address.
#[derive(Clone, Debug)]
pub struct MessageDetail {
    /// What a listing shows of it.
    pub message: ListedMessage,
    /// Its queue.
    pub queue: Queue,
    /// The newest dead letter of it: retry count and reason.
    pub dead: Option<(i32, String)>,
}

/// What a listing wants.
#[derive(Clone, Debug)]
pub struct MessageFilter {
    /// Exact queue name.
    pub queue: Option<String>,
    /// Exact partition name.
    pub partition: Option<String>,
    /// Exact namespace.
    pub namespace: Option<String>,
    /// Exact task.
    pub task: Option<String>,
    /// Only of this status.
    pub status: Option<MessageStatus>,
    /// Commit time at or after.
    pub from: DateTime<Utc>,
    /// Commit time before.
    pub to: DateTime<Utc>,
    /// Messages of the page.
    pub limit: usize,
    /// Messages skipped.
    pub offset: usize,
}

#[derive(Clone, Copy)]
struct Found {
    place: usize,
    base: Offset,
    offset: Offset,
    created_at: DateTime<Utc>,
    is_dead: bool,
}

impl Broker {
    /// The newest messages of a window.
    pub async fn list_messages(&self, filter: &MessageFilter) -> BrokerResult<Vec<ListedMessage>> {
        let (limit, skip) = (filter.limit.min(PAGE_MAX), filter.offset);
        if limit == 0 || skip > SKIP_MAX {
            return Ok(Vec::new());
        }
        let _turn = self.inspection.turn().await?;
        let queue = match &filter.queue {
            Some(name) => match self.inspection.find(name).await? {
                Some(queue) => Some(queue.id),
                None => return Ok(Vec::new()),
            },
            None => None,
        };
        let places = self
            .store
            .message_places(&PlaceFilter {
                queue: filter.queue.clone(),
                namespace: filter.namespace.clone(),
                task: filter.task.clone(),
                partition: filter.partition.clone(),
                recent: if filter.partition.is_some() { Vec::new() } else { self.activity.recent(queue) },
                from: filter.from,
                queues_max: QUEUES_MAX,
                partitions_max: PARTITIONS_MAX,
                candidates_max: CANDIDATES_MAX,
                places_max: PLACES_MAX as i64,
            })
            .await?;
        let (found, cursors) = self.merge(filter, &places, limit + skip).await?;
        let page: Vec<Found> = found.into_iter().skip(skip).take(limit).collect();
        self.load(&places, &cursors, page).await
    }

    /// The newest `wanted` messages, from the partitions in the order of their last writes.
    async fn merge(
        &self,
        filter: &MessageFilter,
        places: &[MessagePlace],
        wanted: usize,
    ) -> BrokerResult<(Vec<Found>, HashMap<PartitionId, Arc<[PlaceCursor]>>)> {
        let (mut found, mut cursors) = (Vec::<Found>::new(), HashMap::new());
        for (step, chunk) in places.chunks(STEP_PLACES).enumerate() {
            let oldest_wanted = found.get(wanted - 1).map(|last| last.created_at);
            if oldest_wanted.is_some_and(|at| chunk.first().is_none_or(|place| place.last_write_at < at)) {
                break;
            }
            let ids: Vec<PartitionId> = chunk.iter().map(|place| place.partition).collect();
            let rows_max = if filter.status.is_none() && filter.to > Utc::now() { wanted as i64 } else { ROWS_MAX };
            let runs = self.store.newest_runs(&ids, filter.from, filter.to, rows_max.min(ROWS_MAX)).await?;
            for cursor in self.store.place_cursors(&ids).await? {
                cursors.entry(cursor.partition).or_insert_with(Vec::new).push(cursor);
            }
            let dead: HashSet<(PartitionId, Offset)> =
                self.store.dead_offsets(&spans_of(&runs)).await?.into_iter().collect();
            let place_of: HashMap<PartitionId, usize> =
                ids.iter().enumerate().map(|(nth, id)| (*id, step * STEP_PLACES + nth)).collect();
            for run in runs {
                let Some(place) = place_of.get(&run.partition) else { continue };
                let cursors = cursors.get(&run.partition).map(Vec::as_slice).unwrap_or_default();
                for offset in (run.base.0..run.base.0 + run.count).map(Offset) {
                    let is_dead = dead.contains(&(run.partition, offset));
                    if filter.status.is_none_or(|want| want == MessageStatus::of(offset, is_dead, cursors, true)) {
                        found.push(Found {
                            place: *place,
                            base: run.base,
                            offset,
                            created_at: run.created_at,
                            is_dead,
                        });
                    }
                }
            }
            found.sort_unstable_by_key(|found| std::cmp::Reverse((found.created_at, found.offset, found.place)));
            found.truncate(wanted);
        }
        Ok((found, cursors.into_iter().map(|(id, cursors)| (id, cursors.into())).collect()))
    }

    /// Reads what the page shows of each message; every segment is unpacked once.
    async fn load(
        &self,
        places: &[MessagePlace],
        cursors: &HashMap<PartitionId, Arc<[PlaceCursor]>>,
        page: Vec<Found>,
    ) -> BrokerResult<Vec<ListedMessage>> {
        let mut runs: Vec<(PartitionId, Offset)> =
            page.iter().filter_map(|f| Some((places.get(f.place)?.partition, f.base))).collect();
        runs.sort_unstable();
        runs.dedup();
        let hashes = self.store.hashes_of_runs(&runs).await?;
        let hashes: HashMap<_, _> = hashes.into_iter().map(|(id, base, hashes)| ((id, base), hashes)).collect();
        let mut by_run: HashMap<(PartitionId, Offset), HashMap<Offset, MessageFrame>> = HashMap::new();
        let mut bytes_left = PAGE_BYTES_MAX;
        for run in &runs {
            let wanted: HashSet<Offset> = page
                .iter()
                .filter(|f| f.base == run.1 && places.get(f.place).is_some_and(|place| place.partition == run.0))
                .map(|f| f.offset)
                .collect();
            let frames = match self.frames_at(run.0, &wanted, &mut bytes_left).await {
                // One damaged segment must not hide a page of others.
                Err(BrokerError::Failed(error)) => {
                    tracing::error!(error, partition = %run.0, base_offset = %run.1, "a listed segment cannot be read");
                    HashMap::new()
                }
                read => read?,
            };
            by_run.insert(*run, frames);
        }
        let shared: Vec<Arc<MessagePlace>> = places.iter().cloned().map(Arc::new).collect();
        Ok(page
            .into_iter()
            .filter_map(|found| {
                let place = shared.get(found.place)?.clone();
                let run = (place.partition, found.base);
                let nth = usize::try_from(found.offset.0 - found.base.0).ok()?;
                let hash = hashes.get(&run)?.get(nth * 16..nth * 16 + 16)?.try_into().ok()?;
                let cursors = cursors.get(&place.partition).cloned().unwrap_or_default();
                Some(ListedMessage {
                    offset: found.offset,
                    base: found.base,
                    hash,
                    created_at: found.created_at,
                    status: MessageStatus::of(found.offset, found.is_dead, &cursors, true),
                    queue_status: MessageStatus::of(found.offset, found.is_dead, &cursors, false),
                    cursors,
                    frame: by_run.get_mut(&run).and_then(|frames| frames.remove(&found.offset)),
                    place,
                })
            })
            .collect())
    }

    /// The frames of these offsets of one partition, as far as their segments are still there.
    async fn frames_at(
        &self,
        partition: PartitionId,
        offsets: &HashSet<Offset>,
        bytes_left: &mut usize,
    ) -> BrokerResult<HashMap<Offset, MessageFrame>> {
        let (Some(first), Some(last)) = (offsets.iter().min(), offsets.iter().max()) else { return Ok(HashMap::new()) };
        let span = Span { partition, first: *first, last: *last };
        let mut frames = HashMap::new();
        for segment in self.store.read_segments(&[span], i64::MAX).await?.into_iter().flatten() {
            let open = Frames::open(&segment.frames).map_err(|_| BrokerError::Failed("frame decode failed".into()))?;
            for (nth, frame) in open.iter().enumerate() {
                let frame = frame.map_err(|_| BrokerError::Failed("frame decode failed".into()))?;
                let offset = Offset(segment.base_offset.0 + nth as i64);
                if offsets.contains(&offset) {
                    let fits = frame.payload.len() <= *bytes_left;
                    *bytes_left = bytes_left.saturating_sub(frame.payload.len());
                    frames.insert(offset, self.message_frame(&frame, fits));
                }
            }
        }
        Ok(frames)
    }

    fn message_frame(&self, frame: &super::segment::Frame<'_>, with_payload: bool) -> MessageFrame {
        let payload = (with_payload && !frame.payload.is_empty())
            .then(|| self.open_payload(frame.payload).unwrap_or_else(|| frame.payload.to_vec()));
        MessageFrame {
            id: frame.id,
            transaction_id: frame.transaction_text().into_owned(),
            trace_id: frame.trace_id.map(str::to_owned),
            producer_sub: frame.producer_sub.map(str::to_owned),
            is_encrypted: frame.encrypted,
            payload,
        }
    }

    /// One message by its address; the newest if the id was stored twice (§17.31). A dead letter whose segment is gone is
    /// answered from its snapshot (§17.11).
    pub async fn message(&self, partition: &str, transaction: &str) -> BrokerResult<Option<MessageDetail>> {
        let partition = partition.parse().ok().and_then(|wire| self.ids().partition_of(wire));
        let Some(partition) = partition.filter(|_| !transaction.contains('\0')) else { return Ok(None) };
        let _turn = self.inspection.turn().await?;
        let Some(place) = self.store.message_place(partition).await? else { return Ok(None) };
        let Some(queue) = self.inspection.find(&place.queue_name).await? else { return Ok(None) };
        let dead = self.store.letter_snapshot(partition, transaction).await?;
        let cursors: Arc<[PlaceCursor]> = self.store.place_cursors(&[partition]).await?.into();
        let place = Arc::new(place);
        let detail = |offset, base, created_at, is_dead, frame| ListedMessage {
            place,
            offset,
            base,
            hash: TransactionHash::of(transaction).to_bytes(),
            created_at,
            status: MessageStatus::of(offset, is_dead, &cursors, true),
            queue_status: MessageStatus::of(offset, is_dead, &cursors, false),
            cursors: cursors.clone(),
            frame,
        };
        if let Some((offset, base, created_at, frame)) = self.find_frame(partition, transaction).await? {
            let is_dead = !self.store.dead_offsets(&[(partition, offset, offset)]).await?.is_empty();
            let dead = dead.filter(|_| is_dead).map(|letter| (letter.retry_count, letter.reason));
            return Ok(Some(MessageDetail {
                message: detail(offset, base, created_at, is_dead, Some(frame)),
                queue,
                dead,
            }));
        }
        let Some(letter) = dead else { return Ok(None) };
        let opened = self.open_payload(&letter.payload);
        let frame = MessageFrame {
            id: letter.message_id,
            transaction_id: transaction.to_owned(),
            trace_id: None,
            producer_sub: None,
            is_encrypted: opened.is_some(),
            payload: Some(opened.unwrap_or(letter.payload)).filter(|payload| !payload.is_empty()),
        };
        let offset = Offset(letter.log_offset);
        let message = detail(offset, offset, letter.message_created_at, true, Some(frame));
        Ok(Some(MessageDetail { message, queue, dead: Some((letter.retry_count, letter.reason)) }))
    }

    /// Looks for an id newest first: among the stored hashes, then in the segments that are older than those.
    async fn find_frame(
        &self,
        partition: PartitionId,
        transaction: &str,
    ) -> BrokerResult<Option<(Offset, Offset, DateTime<Utc>, MessageFrame)>> {
        let hash = TransactionHash::of(transaction);
        let mut below = i64::MAX;
        loop {
            let (hits, end) = self.store.find_hash(partition, hash, below, SEARCH_ROWS).await?;
            for (base, packed) in hits {
                let nth = packed.chunks_exact(16).rposition(|chunk| chunk == hash.to_bytes());
                let Some(offset) = nth.map(|nth| Offset(base.0 + nth as i64)) else { continue };
                let wanted = Span { partition, first: offset, last: offset };
                let Some(segment) = self.store.read_segments(&[wanted], 0).await?.into_iter().flatten().next() else {
                    return Ok(None);
                };
                let frame = self.frames_at(partition, &HashSet::from([offset]), &mut { usize::MAX }).await?;
                let frame = frame.into_values().next();
                return Ok(frame.map(|frame| (offset, segment.base_offset, segment.created_at, frame)));
            }
            match end {
                Some(end) => below = end,
                None => break,
            }
        }
        let mut seen = 0;
        while seen < SEARCH_SEGMENTS_MAX {
            let segments = self.store.segments_below(partition, below, SEARCH_SEGMENTS).await?;
            let Some((last, ..)) = segments.last() else { break };
            below = last.0;
            seen += segments.len();
            for (base, stored, created_at) in &segments {
                let open = Frames::open(stored).map_err(|_| BrokerError::Failed("frame decode failed".into()))?;
                let hit = open.iter().enumerate().filter_map(|(nth, frame)| Some((nth, frame.ok()?)));
                let hit = hit.filter(|(_, frame)| frame.transaction_text() == transaction).last();
                if let Some((nth, frame)) = hit {
                    let offset = Offset(base.0 + nth as i64);
                    return Ok(Some((offset, *base, *created_at, self.message_frame(&frame, true))));
                }
            }
        }
        Ok(None)
    }
}

fn spans_of(runs: &[HashRun]) -> Vec<(PartitionId, Offset, Offset)> {
    let mut spans: HashMap<PartitionId, (Offset, Offset)> = HashMap::new();
    for run in runs {
        let last = Offset(run.base.0 + run.count - 1);
        let span = spans.entry(run.partition).or_insert((run.base, last));
        *span = (span.0.min(run.base), span.1.max(last));
    }
    spans.into_iter().map(|(partition, (first, last))| (partition, first, last)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(group: &str, committed: i64, leased_to: Option<i64>) -> PlaceCursor {
        PlaceCursor {
            partition: PartitionId(1),
            group: group.into(),
            committed: Offset(committed),
            leased_to: leased_to.map(Offset),
            lease_expires_at: None,
        }
    }

    /// `spec/admin.md` §5.4, §17.10.
    #[test]
    fn the_status_follows_the_first_rule_that_holds() {
        use MessageStatus::*;
        let of = |cursors: &[PlaceCursor], dead| MessageStatus::of(Offset(5), dead, cursors, true);
        assert_eq!(of(&[cursor(QUEUE_MODE_GROUP, 9, None)], true), DeadLetter);
        assert_eq!(of(&[cursor(QUEUE_MODE_GROUP, 5, None), cursor("g", 4, Some(7))], false), Completed);
        assert_eq!(of(&[cursor(QUEUE_MODE_GROUP, 4, None), cursor("g", 4, Some(5))], false), Processing);
        assert_eq!(of(&[cursor("g", 4, Some(4))], false), Pending);
        assert_eq!(of(&[], false), Pending);
        let both = [cursor("g", 5, None), cursor("h", 6, None)];
        assert_eq!(of(&both, false), Completed);
        assert_eq!(MessageStatus::of(Offset(5), false, &both, false), Pending, "queue mode has not met it");
        assert_eq!(of(&[cursor("g", 5, None), cursor("h", 3, None)], false), Pending);
    }
}
