//! Deciding bundles in memory, in arrival order, against rows that the flush has locked. An accepted bundle changes the
//! state that the next one is decided against; a refused one leaves no trace.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::bundle::{AckPart, Job, Refusal, Verdict};
use crate::broker::ack::outcome::{Change, change_of, policy_of, position_of, resolved, write_of};
use crate::broker::ack::search;
use crate::broker::ack_decision::{self, AckStatus, Effect, Place, ResolvedItem};
use crate::broker::append::{Asked, Known, Segments};
use crate::broker::push_flush::Appended;
use crate::broker::resolver::{Resolver, Window};
use crate::ids::{GroupId, Offset, PartitionId, TransactionHash};
use crate::store::StoreResult;
use crate::store::acks::{CursorRow, CursorWrite, HashRow, NotBefore, SpanRead};
use crate::store::messages::NewSegment;
use crate::store::partitions::PartitionKey;
use crate::store::transactions::{CursorMove, CursorRead};

/// Everything that the bundles of one flush are decided against.
#[derive(Debug, Default)]
pub struct State {
    partitions: HashMap<PartitionKey, Partition>,
    keys: HashMap<PartitionId, PartitionKey>,
    cursors: HashMap<PartitionId, HashMap<Arc<str>, Cursor>>,
    known: Known,
    /// What accepted bundles store, in their order.
    stored: Vec<Stored>,
}

#[derive(Debug)]
struct Partition {
    id: PartitionId,
    last_offset: Offset,
    /// Hashes that accepted bundles store, where the queue deduplicates.
    here: HashSet<TransactionHash>,
    /// The same in offset order, where a cursor of the flush is on the partition.
    run: Vec<HashRow>,
    deduplicates: bool,
}

#[derive(Debug)]
enum Cursor {
    NoPartition,
    NoConsumer,
    Found(Box<Found>),
}

#[derive(Debug)]
struct Found {
    /// The row, accepted bundles included.
    row: CursorRow,
    span: SpanRead,
    write: Option<CursorWrite>,
    change: Option<Change>,
}

/// The messages of one push part, at consecutive offsets.
#[derive(Debug)]
struct Stored {
    key: PartitionKey,
    first: Offset,
    job: usize,
    part: usize,
}

/// What one ack part does.
#[derive(Debug)]
pub struct PartEffect {
    /// The cursor's group.
    pub group: GroupId,
    /// To its cursor.
    pub effect: Effect,
    /// Its items, resolved.
    pub items: Vec<ResolvedItem>,
    /// Failed acks charged before.
    pub retry_count: i32,
}

/// How a bundle looks.
#[derive(Debug)]
pub enum Judged {
    /// It cannot be carried out.
    Not(Verdict),
    /// It can, if its dead letters can be filed: one effect per ack part.
    Fit(Vec<PartEffect>),
}

impl State {
    /// The locked partitions, with the widest window of each, and what is stored of the pushed hashes.
    pub fn new(asked: &[Asked<'_>], known: Known) -> State {
        let mut state = State { known, ..State::default() };
        for Asked { partition: locked, window_seconds, .. } in asked {
            let partition = Partition {
                id: locked.id,
                last_offset: locked.last_offset,
                here: HashSet::new(),
                run: Vec::new(),
                deduplicates: *window_seconds > 0,
            };
            state.keys.insert(locked.id, locked.key.clone());
            state.partitions.insert(locked.key.clone(), partition);
        }
        state
    }

    /// Adds a locked cursor.
    pub fn add_cursor(&mut self, partition: PartitionId, group: &Arc<str>, read: CursorRead) {
        let cursor = match read {
            CursorRead::NoPartition => Cursor::NoPartition,
            CursorRead::NoConsumer => Cursor::NoConsumer,
            CursorRead::Found(span) => {
                Cursor::Found(Box::new(Found { row: span.row.clone(), span: *span, write: None, change: None }))
            }
        };
        self.cursors.entry(partition).or_default().insert(group.clone(), cursor);
    }

    /// Looks at a bundle. Changes nothing.
    pub fn judge(&self, job: &Job) -> StoreResult<Judged> {
        if job.pushes.iter().any(|part| !self.partitions.contains_key(&part.key)) {
            return Ok(Judged::Not(Verdict::QueueGone));
        }
        // Pushes come before acks, so a duplicate is reported before a rejected ack (§2.7).
        for part in &job.pushes {
            let Some(partition) = self.partitions.get(&part.key) else { continue };
            let known = self.known.get(&partition.id);
            let is_stored = |hash: &TransactionHash| {
                known.is_some_and(|known| known.contains_key(hash)) || partition.here.contains(hash)
            };
            if partition.deduplicates && part.packed.hashes.iter().any(is_stored) {
                let (queue, partition) = (part.queue.clone(), part.key.name.as_str().into());
                return Ok(Judged::Not(Verdict::Refused(Refusal::Duplicate { queue, partition })));
            }
        }
        if let Some(refusal) = &job.doomed {
            return Ok(Judged::Not(Verdict::Refused(refusal.clone())));
        }
        let mut effects = Vec::with_capacity(job.acks.len());
        let mut search = Vec::new();
        for (nth, part) in job.acks.iter().enumerate() {
            match self.judge_acks(job, part)? {
                Ok(Some(effect)) => effects.push(effect),
                Ok(None) => search.push(nth),
                Err(refusal) => return Ok(Judged::Not(Verdict::Refused(refusal))),
            }
        }
        Ok(if search.is_empty() { Judged::Fit(effects) } else { Judged::Not(Verdict::Search(search)) })
    }

    /// `None`: some of its ids are not in what the flush has read.
    fn judge_acks(&self, job: &Job, part: &AckPart) -> StoreResult<Result<Option<PartEffect>, Refusal>> {
        let found = match self.cursors.get(&part.partition).and_then(|groups| groups.get(&part.group)) {
            Some(Cursor::Found(found)) => found,
            Some(Cursor::NoConsumer) => return Ok(Err(Refusal::ConsumerNotFound)),
            Some(Cursor::NoPartition) | None => return Ok(Err(Refusal::UnknownPartition)),
        };
        if !part.fence.admits(&found.row) {
            return Ok(Err(Refusal::InvalidLease));
        }
        let Some(items) = self.resolve(job, part, found)? else { return Ok(Ok(None)) };
        if items.iter().any(|item| item.place == Place::Unresolvable) {
            return Ok(Err(Refusal::UnknownTransaction));
        }
        let effect = ack_decision::decide(position_of(&found.row), policy_of(&found.row), items.iter().copied());
        Ok(Ok(Some(PartEffect { group: found.row.group, effect, items, retry_count: found.row.retry_count })))
    }

    fn resolve(&self, job: &Job, part: &AckPart, found: &Found) -> StoreResult<Option<Vec<ResolvedItem>>> {
        let row = &found.row;
        if let Some(searched) = part.searched.as_ref().filter(|searched| searched.holds(row)) {
            let mut resolver = searched.resolver.clone();
            if !row.leased() {
                self.scan_run(&mut resolver, job, part.partition, row.committed)?;
            }
            return Ok(Some(resolved(part.items.iter(), &searched.slots, &resolver)));
        }
        let (mut resolver, slots) = Resolver::new(part.items.iter().map(|item| item.transaction));
        let (from, read_to) = (found.span.from.0.max(row.committed.0 + 1), found.span.read_to.0);
        let (window, end) = match row.batch_end.map(|end| end.0).filter(|end| *end >= from) {
            Some(end) => (Window::Leased, end),
            None if row.leased() => (Window::Leased, from - 1),
            None => (Window::Open, read_to),
        };
        if end > read_to {
            return Ok(None);
        }
        let page = &found.span.hashes;
        search::scan(&mut resolver, part.partition, page, (from, end), window)?;
        if !resolver.complete() && (row.leased() || read_to >= row.last_offset.0) {
            if !row.leased() {
                self.scan_run(&mut resolver, job, part.partition, row.committed)?;
            }
            // What bundles of this flush have passed.
            let passed = (found.span.from.0, row.committed.0);
            search::scan(&mut resolver, part.partition, page, passed, Window::Below)?;
        }
        Ok(resolver.complete().then(|| resolved(part.items.iter(), &slots, &resolver)))
    }

    /// What this flush stores above everything that is committed: of the bundles before, and of this one.
    fn scan_run(&self, resolver: &mut Resolver, job: &Job, id: PartitionId, cursor: Offset) -> StoreResult<()> {
        let Some(key) = self.keys.get(&id) else { return Ok(()) };
        let Some(partition) = self.partitions.get(key) else { return Ok(()) };
        let mut next = partition.last_offset.next();
        let own = job.pushes.iter().filter(|part| part.key == *key).map(|part| {
            let row = hash_row(next, &part.packed.hashes);
            next = Offset(next.0 + part.packed.len() as i64);
            row
        });
        let own: Vec<HashRow> = own.collect();
        for (range, window) in [((cursor.0 + 1, i64::MAX), Window::Open), ((0, cursor.0), Window::Below)] {
            for row in partition.run.iter().chain(&own) {
                search::scan(resolver, id, std::slice::from_ref(row), range, window)?;
            }
        }
        Ok(())
    }

    /// Accepts a bundle that was judged fit.
    pub fn accept(&mut self, nth: usize, job: &Job, effects: &[PartEffect]) {
        for (part_nth, part) in job.pushes.iter().enumerate() {
            let Some(partition) = self.partitions.get_mut(&part.key) else { continue };
            let first = partition.last_offset.next();
            partition.last_offset = Offset(partition.last_offset.0 + part.packed.len() as i64);
            if partition.deduplicates {
                partition.here.extend(&part.packed.hashes);
            }
            if self.cursors.contains_key(&partition.id) {
                partition.run.push(hash_row(first, &part.packed.hashes));
            }
            self.stored.push(Stored { key: part.key.clone(), first, job: nth, part: part_nth });
        }
        for (part, effect) in job.acks.iter().zip(effects) {
            let cursor = self.cursors.get_mut(&part.partition).and_then(|groups| groups.get_mut(&part.group));
            if let Some(Cursor::Found(found)) = cursor {
                found.take(&effect.effect);
            }
        }
    }

    /// The segments that the accepted bundles store.
    pub fn segments(&self, jobs: &[&Job], zstd_level: i32) -> Vec<NewSegment> {
        let mut open: HashMap<&PartitionKey, Segments> = HashMap::new();
        let mut order = Vec::new();
        for stored in &self.stored {
            let Some(partition) = self.partitions.get(&stored.key) else { continue };
            let segments = open.entry(&stored.key).or_insert_with(|| {
                order.push(&stored.key);
                Segments::new(partition.id, zstd_level)
            });
            let Some(part) = jobs.get(stored.job).and_then(|job| job.pushes.get(stored.part)) else { continue };
            for (index, offset) in (0..part.packed.len()).zip(stored.first.0..) {
                segments.add(Offset(offset), &part.packed, index);
            }
        }
        order.into_iter().filter_map(|key| open.remove(key)).flat_map(Segments::finish).collect()
    }

    /// The partitions that get messages.
    pub fn appended(&self) -> Vec<Appended> {
        let mut keys: HashMap<&PartitionKey, bool> = HashMap::new();
        for stored in &self.stored {
            *keys.entry(&stored.key).or_default() |= stored.first == Offset(0);
        }
        let appended = |(key, is_new): (&PartitionKey, bool)| {
            self.partitions.get(key).map(|partition| Appended { queue: key.queue, partition: partition.id, is_new })
        };
        keys.into_iter().filter_map(appended).collect()
    }

    /// How the cursors move, and what that changes for others.
    pub fn moves(&self) -> (Vec<CursorMove>, Vec<(PartitionId, Change)>) {
        let found = self.cursors.iter().flat_map(|(partition, groups)| {
            groups.values().filter_map(|cursor| match cursor {
                Cursor::Found(found) => Some((*partition, found.row.group, found.write?, found.change?)),
                _ => None,
            })
        });
        let both = |(partition, group, write, change)| (CursorMove { partition, group, write }, (partition, change));
        found.map(both).unzip()
    }
}

impl Found {
    fn take(&mut self, effect: &Effect) {
        if *effect == Effect::Nothing {
            return;
        }
        let (mut write, change) = (write_of(effect, &self.row), change_of(&self.row, effect));
        if let Some(before) = self.write {
            write.release |= before.release;
            if write.not_before == NotBefore::Keep {
                write.not_before = before.not_before;
            }
        }
        self.write = Some(write);
        self.change = Some(match self.change {
            None => change,
            Some(before) => Change {
                holder: before.holder.or(change.holder),
                release: change.release.or(before.release),
                group: change.group,
            },
        });
        self.row.committed = write.committed;
        self.row.retry_count = write.retry_count;
        if effect.releases() {
            self.row.lease = None;
            self.row.batch_end = None;
        }
    }
}

/// Signals below the cursor: legal in a bundle, and without effect (§11 Q3).
pub fn signals_below(effects: &[PartEffect]) -> usize {
    let below = |item: &&ResolvedItem| item.place == Place::BelowCursor && matches!(item.status, AckStatus::Signal(_));
    effects.iter().map(|effect| effect.items.iter().filter(below).count()).sum()
}

fn hash_row(base: Offset, hashes: &[TransactionHash]) -> HashRow {
    HashRow { base, packed: hashes.iter().flat_map(|hash| hash.to_bytes()).collect() }
}
