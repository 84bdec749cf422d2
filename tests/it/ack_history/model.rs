//! What per-message receipts would say: a broker that remembers the fate of every message for every group, written from
//! `spec/ack.md` §3-§5 and not from the code.

use std::collections::BTreeMap;

/// What a client says about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Completed,
    Retry,
    Failed,
    Dlq,
}

impl Status {
    /// From a random byte: a completion, except for four bytes of each `of`.
    pub fn drawn(kind: u8, of: u8) -> Status {
        [Status::Retry, Status::Failed, Status::Failed, Status::Dlq]
            .get(usize::from(kind % of))
            .copied()
            .unwrap_or(Status::Completed)
    }

    /// Its word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Status::Completed => "completed",
            Status::Retry => "retry",
            Status::Failed => "failed",
            Status::Dlq => "dlq",
        }
    }
}

/// Which lease an ack names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    None,
    /// The lease of the pop with this number.
    Of(usize),
}

/// One ack item.
#[derive(Clone, Debug)]
pub struct Said {
    pub partition: usize,
    pub id: String,
    pub claim: Claim,
    pub status: Status,
    pub reason: Option<String>,
}

/// The answer to it: success or an error text, lease released, dlq, noop.
pub type Told = (Result<(), &'static str>, bool, bool, bool);

/// A cursor row: committed, leased up to, leased by, live, retry count, held back.
pub type Row = (i64, Option<i64>, Option<usize>, bool, i32, bool);

/// A filed message: offset, transaction id, reason, retry count.
pub type Letter = (i64, String, String, i32);

pub const NO_CONSUMER: &str = "consumer not found";
pub const STALE: &str = "invalid or expired lease";
pub const PASSED: &str = "already committed: the cursor moved past this message before this ack";
pub const UNRESOLVABLE: &str =
    "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers";
pub const REJECTED: &str = "dlq rejected: the message was deleted by retention";

/// Queue options.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub retry_limit: i32,
    /// Whether a charged nack holds the message back (until [`Model::release_held`]).
    pub holds: bool,
    pub dead_letters: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pending,
    Finished,
    Filed,
    Dropped,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    pop: usize,
    end: usize,
    live: bool,
}

/// One group on one partition.
#[derive(Clone, Debug, Default)]
struct Lane {
    fates: Vec<Fate>,
    lease: Option<Lease>,
    budget_used: i32,
    held: bool,
}

#[derive(Clone, Debug, Default)]
struct Log {
    ids: Vec<String>,
    stored_from: usize,
    hashes_from: usize,
}

/// One queue.
#[derive(Clone, Debug)]
pub struct Model {
    options: Options,
    logs: Vec<Log>,
    lanes: BTreeMap<(usize, usize), Lane>,
    letters: BTreeMap<(usize, usize), Vec<Letter>>,
}

impl Lane {
    /// The first message that is not behind the cursor.
    fn next(&self) -> usize {
        self.fates.iter().position(|fate| *fate == Fate::Pending).unwrap_or(self.fates.len())
    }

    fn finish_to(&mut self, end: usize) {
        for fate in self.fates.iter_mut().take(end).filter(|fate| **fate == Fate::Pending) {
            *fate = Fate::Finished;
        }
    }
}

impl Model {
    pub fn new(options: Options, partitions: usize) -> Model {
        Model { options, logs: vec![Log::default(); partitions], lanes: BTreeMap::new(), letters: BTreeMap::new() }
    }

    pub fn push(&mut self, partition: usize, ids: &[String]) {
        self.logs[partition].ids.extend_from_slice(ids);
        let count = self.logs[partition].ids.len();
        for (_, lane) in self.lanes.iter_mut().filter(|((p, _), _)| *p == partition) {
            lane.fates.resize(count, Fate::Pending);
        }
    }

    /// Messages of a partition.
    pub fn count(&self, partition: usize) -> usize {
        self.logs[partition].ids.len()
    }

    /// Where the stored messages of a partition start, where its hashes start, and its last offset.
    pub fn bounds(&self, partition: usize) -> Option<(i64, i64, i64)> {
        let log = &self.logs[partition];
        let bounds = (log.stored_from as i64, log.hashes_from as i64, log.ids.len() as i64 - 1);
        (!log.ids.is_empty()).then_some(bounds)
    }

    /// What a pop from the oldest message on delivers.
    pub fn pop(&mut self, partition: usize, group: usize, pop: usize, batch: usize) -> Vec<String> {
        let log = &self.logs[partition];
        if log.ids.is_empty() {
            return Vec::new(); // no such partition yet
        }
        let met = self.lanes.contains_key(&(partition, group));
        let lane = self.lanes.entry((partition, group)).or_default();
        if !met {
            lane.fates = vec![Fate::Finished; log.stored_from];
        }
        lane.fates.resize(log.ids.len(), Fate::Pending);
        let first = lane.next().max(log.stored_from);
        let end = (first + batch).min(log.ids.len());
        if lane.lease.is_some_and(|lease| lease.live) {
            return Vec::new();
        }
        if first >= end {
            // With nothing stored at all, the cursor seals what retention took (`spec/push-pop.md` §7.5.4).
            if log.stored_from == log.ids.len() && lane.next() < log.ids.len() {
                lane.finish_to(log.ids.len());
                lane.lease = None;
            }
            return Vec::new();
        }
        if lane.held {
            return Vec::new();
        }
        lane.lease = Some(Lease { pop, end, live: true });
        log.ids[first..end].to_vec()
    }

    /// Every lease expires.
    pub fn expire(&mut self) {
        self.lanes.values_mut().filter_map(|lane| lane.lease.as_mut()).for_each(|lease| lease.live = false);
    }

    /// Every `retryDelay` is over.
    pub fn release_held(&mut self) {
        self.lanes.values_mut().for_each(|lane| lane.held = false);
    }

    /// The group's cursor on a partition goes before the message `next`, or before what is retained if that is later. What
    /// was leased and charged is gone (I13).
    pub fn seek(&mut self, partition: usize, group: usize, next: usize) {
        let log = &self.logs[partition];
        if log.ids.is_empty() {
            return; // no such partition yet
        }
        let next = next.max(log.stored_from);
        let lane = self.lanes.entry((partition, group)).or_default();
        lane.fates = (0..log.ids.len()).map(|at| if at < next { Fate::Finished } else { Fate::Pending }).collect();
        (lane.lease, lane.budget_used, lane.held) = (None, 0, false);
    }

    /// The group is gone. Answers how many cursors it had.
    pub fn delete_group(&mut self, group: usize) -> usize {
        let before = self.lanes.len();
        self.lanes.retain(|(_, of), _| *of != group);
        before - self.lanes.len()
    }

    /// Hashes below `to` are gone.
    pub fn purge(&mut self, partition: usize, to: usize) {
        let log = &mut self.logs[partition];
        log.hashes_from = log.hashes_from.max(to);
    }

    /// Messages below `to` are gone.
    pub fn retain(&mut self, partition: usize, to: usize) {
        let log = &mut self.logs[partition];
        log.stored_from = log.stored_from.max(to);
    }

    /// One call.
    pub fn ack(&mut self, group: usize, group_name: &str, said: &[Said]) -> Vec<Told> {
        let mut groups: Vec<((usize, Claim), Vec<usize>)> = Vec::new();
        for (nth, item) in said.iter().enumerate() {
            match groups.iter_mut().find(|(key, _)| *key == (item.partition, item.claim)) {
                Some((_, members)) => members.push(nth),
                None => groups.push(((item.partition, item.claim), vec![nth])),
            }
        }
        let mut told = vec![(Ok(()), false, false, false); said.len()];
        for ((partition, claim), members) in groups {
            let items: Vec<&Said> = members.iter().map(|nth| &said[*nth]).collect();
            let answers = self.ack_group(partition, (group, group_name), claim, &items);
            members.into_iter().zip(answers).for_each(|(nth, answer)| told[nth] = answer);
        }
        told
    }

    fn ack_group(&mut self, partition: usize, group: (usize, &str), claim: Claim, said: &[&Said]) -> Vec<Told> {
        let refuse = |error| vec![(Err(error), false, false, false); said.len()];
        let (options, log) = (self.options, &self.logs[partition]);
        let Some(lane) = self.lanes.get_mut(&(partition, group.0)) else { return refuse(NO_CONSUMER) };
        let live = lane.lease.filter(|lease| lease.live);
        match claim {
            Claim::None => {}
            Claim::Of(pop) if live.is_some_and(|lease| lease.pop == pop) => {}
            Claim::Of(_) => return refuse(STALE),
        }
        let next = lane.next();
        let leased_end = lane.lease.map_or(0, |lease| lease.end);
        // Every offset that an id may mean: in the leased span all of them, past a lease that is not live the first.
        let meant = |id: &str| -> Vec<usize> {
            let from = next.max(log.hashes_from);
            let hits = |range: std::ops::Range<usize>| range.filter(|o| log.ids[*o] == id).collect::<Vec<_>>();
            let spanned = hits(from.min(leased_end)..leased_end);
            if !spanned.is_empty() || live.is_some() {
                return spanned;
            }
            hits(from.max(leased_end).min(log.ids.len())..log.ids.len()).into_iter().take(1).collect()
        };
        let behind = |id: &str| (log.hashes_from..next).any(|offset| log.ids[offset] == id);

        let mut completed = vec![false; log.ids.len()];
        let mut signals: Vec<Option<Status>> = vec![None; log.ids.len()];
        for item in said {
            let offsets = meant(&item.id);
            match (item.status, offsets.first(), offsets.last()) {
                (Status::Completed, _, Some(last)) => completed[*last] = true,
                (signal, Some(first), _) => signals[*first] = signals[*first].max(Some(signal)),
                _ => {}
            }
        }
        let poison = signals.iter().enumerate().find_map(|(at, signal)| signal.map(|signal| (at, signal)));
        let ceiling = poison.map_or(log.ids.len(), |(at, _)| at);
        let prefix = (next..ceiling).rev().find(|offset| completed[*offset]);
        let (mut ended, mut filed, mut rejected) = (false, None, None);
        if let Some(last) = prefix {
            lane.finish_to(last + 1);
            ended = poison.is_none() && lane.lease.is_some_and(|lease| last + 1 >= lease.end);
        }
        if ended {
            (lane.budget_used, lane.held) = (0, false);
        }
        if let Some((at, signal)) = poison {
            ended = true;
            if signal == Status::Failed && lane.budget_used < options.retry_limit {
                lane.budget_used += 1;
                lane.held |= options.holds;
            } else if signal != Status::Retry {
                let keep = signal == Status::Dlq || options.dead_letters;
                if keep && at < log.stored_from {
                    rejected = Some(at);
                } else {
                    lane.finish_to(at + 1);
                    lane.fates[at] = if keep { Fate::Filed } else { Fate::Dropped };
                }
                if keep && rejected.is_none() {
                    filed = Some(at);
                    let nacks = || said.iter().filter(|i| i.status != Status::Completed && i.reason.is_some());
                    let own = nacks().find(|i| meant(&i.id).first() == Some(&at)).or_else(|| nacks().next());
                    let reason = own.and_then(|i| i.reason.clone()).unwrap_or_else(|| "Retries exhausted".to_owned());
                    let letter = (at as i64, log.ids[at].clone(), reason, lane.budget_used);
                    self.letters.entry((partition, group.0)).or_default().push(letter);
                }
                (lane.budget_used, lane.held) = (0, false);
            }
        }
        let released = ended && live.is_some();
        let answer = |item: &&Said| -> Told {
            let offsets = meant(&item.id);
            let nacked = if item.status == Status::Completed { None } else { offsets.first().copied() };
            match (offsets.is_empty(), behind(&item.id), item.status) {
                (false, _, _) if nacked.is_some() && nacked == rejected => (Err(REJECTED), released, false, false),
                (false, _, _) => (Ok(()), released, nacked.is_some() && nacked == filed, false),
                (true, false, _) => (Err(UNRESOLVABLE), false, false, false),
                (true, true, Status::Completed) => (Ok(()), released, false, true),
                (true, true, _) => (Err(PASSED), released, false, false),
            }
        };
        let told = said.iter().map(answer).collect();
        if ended {
            lane.lease = None;
        }
        told
    }

    /// The rows as they should be, by (partition, group).
    pub fn rows(&self) -> BTreeMap<(usize, usize), Row> {
        let row = |lane: &Lane| {
            let lease = lane.lease;
            (
                lane.next() as i64 - 1,
                lease.map(|lease| lease.end as i64 - 1),
                lease.map(|lease| lease.pop),
                lease.is_some_and(|lease| lease.live),
                lane.budget_used,
                lane.held,
            )
        };
        self.lanes.iter().map(|(key, lane)| (*key, row(lane))).collect()
    }

    /// The dead letters as they should be, by (partition, group), in the order of filing.
    pub fn letters(&self) -> &BTreeMap<(usize, usize), Vec<Letter>> {
        &self.letters
    }
}
