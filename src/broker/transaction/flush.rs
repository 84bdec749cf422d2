//! One transaction flush: many bundles, one database transaction (`spec/transactions-kv-timers.md` §2.6).
//!
//! Locks: every partition pushed to, by id; then every cursor acked, by (partition, group). Everything is decided under
//! these locks, so what is written equals what the bundles would have done one after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::bundle::{Job, Refusal, Verdict};
use super::decide::{Judged, PartEffect, State, signals_below};
use super::meter::meter;
use crate::broker::ack::outcome::{Change, letter_of};
use crate::broker::ack_decision::{self, AckStatus, Effect, Verdict as AckVerdict, dead_letter_reason};
use crate::broker::append::{self, Asked, Making, Writing};
use crate::broker::dedup::DedupMemory;
use crate::broker::push_flush::Appended;
use crate::ids::{GroupId, PartitionId};
use crate::store::messages::{AppendTx, Opening};
use crate::store::partitions::PartitionKey;
use crate::store::transactions::{CursorName, Fate, FiledLetter, Witness};
use crate::store::{Store, StoreError, StoreResult};

/// Longest search for the outcome of a commit whose answer was lost.
const LOOK_UP_MAX: Duration = Duration::from_secs(5);

/// A flush that has ended.
#[derive(Debug)]
pub struct Flushed {
    /// One verdict per job.
    pub verdicts: Vec<Verdict>,
    /// Partitions that got messages.
    pub appended: Vec<Appended>,
    /// Cursors that moved.
    pub changes: Vec<(PartitionId, Change)>,
    /// Per job, if it was accepted: its acks by cursor, completed ones and others.
    pub acked: Vec<Vec<(GroupId, u64, u64)>>,
}

/// Runs the jobs in one transaction. An error means that nothing was committed.
pub async fn flush(
    store: &Store,
    memory: &mut DedupMemory,
    jobs: &[&Job],
    writing: &Writing,
    opening: Opening,
) -> StoreResult<Flushed> {
    append::until_made!(|making| flush_once(store, memory, jobs, writing, opening, making))
}

async fn flush_once(
    store: &Store,
    memory: &mut DedupMemory,
    jobs: &[&Job],
    writing: &Writing,
    opening: Opening,
    making: Making,
) -> StoreResult<Flushed> {
    let generation = store.generation().now();
    let mut pushed: BTreeMap<&PartitionKey, (i32, Vec<&[_]>)> = BTreeMap::new();
    for part in jobs.iter().flat_map(|job| &job.pushes) {
        let (window, hashes) = pushed.entry(&part.key).or_default();
        *window = part.window_seconds.max(*window);
        hashes.push(part.packed.hashes.as_slice());
    }
    let keys: Vec<PartitionKey> = pushed.keys().map(|key| (*key).clone()).collect();
    let (mut tx, locked) = append::lock_all(store, &keys, opening, making).await?;
    let asked: Vec<Asked<'_>> = pushed
        .into_iter()
        .filter_map(|(key, (window_seconds, hashes))| {
            let partition = locked.get(key)?;
            Some(Asked { partition, window_seconds, hashes })
        })
        .collect();
    let known = append::probe(&mut tx, memory, &asked).await?;
    let mut state = State::new(&asked, known);
    read_cursors(&mut tx, jobs, &mut state).await?;

    let mut verdicts = Vec::with_capacity(jobs.len());
    let (mut letters, mut acked) = (Vec::new(), Vec::new());
    for (nth, job) in jobs.iter().enumerate() {
        let mut counts = Vec::new();
        verdicts.push(match state.judge(job)? {
            Judged::Not(verdict) => verdict,
            Judged::Fit(effects) => match letters_of(&mut tx, job, &effects).await? {
                None => Verdict::Refused(Refusal::DlqRejected),
                Some(filed) => {
                    letters.extend(filed);
                    state.accept(nth, job, &effects);
                    counts = effects.iter().map(counted).collect();
                    meter().signals_below.increment(signals_below(&effects) as u64);
                    Verdict::Committed(effects.iter().map(dead_lettered).collect())
                }
            },
        });
        acked.push(counts);
    }
    let (moves, changes) = state.moves();
    let segments = state.segments(jobs, writing.zstd_level);
    let witness = match (segments.first(), moves.first()) {
        (Some(segment), _) => Witness::Segment(segment.partition, segment.base_offset),
        (None, Some(moved)) => Witness::Cursor(moved.partition, moved.group, moved.write.committed),
        (None, None) => {
            tx.rollback().await?;
            return Ok(Flushed { verdicts, appended: Vec::new(), changes, acked });
        }
    };
    let stamps = if segments.is_empty() { HashMap::new() } else { tx.insert_segments(&segments).await? };
    if !moves.is_empty() {
        tx.move_cursors(&moves).await?;
    }
    if !letters.is_empty() {
        tx.file_letters(&letters).await?;
    }
    if !commit(store, tx, witness).await? {
        for verdict in verdicts.iter_mut().filter(|verdict| matches!(verdict, Verdict::Committed(_))) {
            *verdict = Verdict::Unknown;
        }
        // It may have landed: whoever waits may look, the registry must not trust what it holds.
        return Ok(Flushed { verdicts, appended: state.appended(), changes, acked });
    }
    crate::broker::meter::meter().segments.increment(segments.len() as u64);
    metrics::counter!(crate::metrics::DEAD_LETTERS).increment(letters.len() as u64);
    append::remember(memory, &writing.cache, &asked, &segments, &stamps, generation);
    Ok(Flushed { verdicts, appended: state.appended(), changes, acked })
}

async fn read_cursors(tx: &mut AppendTx, jobs: &[&Job], state: &mut State) -> StoreResult<()> {
    let parts = jobs.iter().flat_map(|job| &job.acks);
    let acked: BTreeSet<(PartitionId, &Arc<str>)> = parts.map(|part| (part.partition, &part.group)).collect();
    if acked.is_empty() {
        return Ok(());
    }
    let names: Vec<CursorName<'_>> =
        acked.iter().map(|(partition, group)| CursorName { partition: *partition, group }).collect();
    tx.lock_cursors(&names).await?;
    let reads = tx.read_cursors(&names).await?;
    for ((partition, group), read) in acked.into_iter().zip(reads) {
        state.add_cursor(partition, group, read);
    }
    Ok(())
}

/// The dead letters that a bundle files; `None` if a message to be filed no longer exists.
async fn letters_of(tx: &mut AppendTx, job: &Job, effects: &[PartEffect]) -> StoreResult<Option<Vec<FiledLetter>>> {
    let mut filed = Vec::new();
    for (part, PartEffect { effect, items, retry_count, .. }) in job.acks.iter().zip(effects) {
        let Some(at) = effect.dead_letter() else { continue };
        let Some(source) = tx.letter_source(part.partition, at).await? else { return Ok(None) };
        let reasons = items.iter().copied().zip(part.items.iter().map(|item| item.reason.as_deref()));
        let letter = letter_of(source, part.partition, at, &part.group, dead_letter_reason(at, reasons))?;
        filed.push(FiledLetter { partition: part.partition, retry_count: *retry_count, letter });
    }
    Ok(Some(filed))
}

fn counted(PartEffect { group, items, .. }: &PartEffect) -> (GroupId, u64, u64) {
    let completed = items.iter().filter(|item| item.status == AckStatus::Completed).count();
    (*group, completed as u64, (items.len() - completed) as u64)
}

fn dead_lettered(PartEffect { effect, items, .. }: &PartEffect) -> Vec<bool> {
    let told = |item| matches!(ack_decision::verdict(effect, item), AckVerdict::Done { dlq: true });
    debug_assert!(!matches!(effect, Effect::Unfileable { .. }));
    items.iter().copied().map(told).collect()
}

/// `true`: durable. `false`: the answer was lost, and so is the outcome. An error: rolled back.
async fn commit(store: &Store, tx: AppendTx, witness: Witness) -> StoreResult<bool> {
    let xid = tx.xid();
    let error = match tx.commit().await {
        Ok(()) => return Ok(true),
        Err(error @ StoreError::OutcomeUnknown { .. }) => error,
        Err(error) => return Err(error),
    };
    meter().lost_answers.increment(1);
    let fate = match xid {
        Some(xid) => store.await_fate_of(xid, witness, LOOK_UP_MAX).await,
        None => None,
    };
    tracing::warn!(%error, ?fate, "the answer to the commit of a transaction flush was lost");
    match fate {
        Some(Fate::Committed) => Ok(true),
        Some(Fate::Aborted) => Err(error),
        Some(Fate::InProgress) | None => Ok(false),
    }
}
