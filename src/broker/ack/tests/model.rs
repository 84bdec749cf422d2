//! What per-message receipts would say: a broker that remembers the fate of every message for every group, written from
//! `spec/ack.md` and not from the code. The histories compare every claim, answer and row with it.

use std::collections::BTreeMap;

use super::fake::{Letter, Options, Row, group_id};
use super::*;
use crate::broker::ack_decision::Signal;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pending,
    Finished,
    Filed,
    Dropped,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    worker: LeaseId,
    end: usize,
    expires: i64,
}

/// One group on one partition.
#[derive(Clone, Debug, Default)]
struct Lane {
    fates: Vec<Fate>,
    lease: Option<Lease>,
    budget_used: i32,
    held_until: Option<i64>,
    retired: i64,
}

#[derive(Clone, Debug)]
struct Log {
    ids: Vec<String>,
    stored_from: usize,
    hashes_from: usize,
}

/// The whole of one history.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    now: i64,
    options: Options,
    logs: BTreeMap<i64, Log>,
    lanes: BTreeMap<(i64, i32), Lane>,
    letters: BTreeMap<i64, Vec<Letter>>,
}

impl Lane {
    /// The first message that is not behind the cursor.
    fn next(&self) -> usize {
        self.fates.iter().position(|fate| *fate == Fate::Pending).unwrap_or(self.fates.len())
    }

    fn finish_to(&mut self, end: usize) {
        for fate in self.fates.iter_mut().take(end).filter(|fate| **fate == Fate::Pending) {
            *fate = Fate::Finished;
            self.retired += 1;
        }
    }

    fn live(&self, now: i64) -> Option<Lease> {
        self.lease.filter(|lease| lease.expires > now)
    }
}

impl Model {
    pub(crate) fn new(now: i64, options: Options, partitions: impl Iterator<Item = i64>) -> Model {
        let log = Log { ids: Vec::new(), stored_from: 0, hashes_from: 0 };
        Model {
            now,
            options,
            logs: partitions.map(|p| (p, log.clone())).collect(),
            lanes: BTreeMap::new(),
            letters: BTreeMap::new(),
        }
    }

    pub(crate) fn push(&mut self, partition: i64, ids: &[String]) {
        let log = self.logs.get_mut(&partition).unwrap();
        log.ids.extend_from_slice(ids);
        let count = log.ids.len();
        self.lanes.iter_mut().filter(|((p, _), _)| *p == partition).for_each(|(_, lane)| {
            lane.fates.resize(count, Fate::Pending);
        });
    }

    pub(crate) fn claim(
        &mut self,
        partition: i64,
        group: i32,
        holder: LeaseId,
        batch: i64,
        lease_ms: i64,
    ) -> Option<(i64, i64, Vec<String>)> {
        let log = &self.logs[&partition];
        let lane = self.lanes.entry((partition, group)).or_insert_with(|| {
            let finished = vec![Fate::Finished; log.stored_from];
            Lane { fates: finished, ..Lane::default() }
        });
        lane.fates.resize(log.ids.len(), Fate::Pending);
        let cursor = lane.next() as i64 - 1;
        let first = lane.next().max(log.stored_from);
        let end = (first + batch as usize).min(log.ids.len());
        if lane.live(self.now).is_some() || lane.held_until.is_some_and(|at| at > self.now) || first >= end {
            return None;
        }
        lane.lease = Some(Lease { worker: holder, end, expires: self.now + lease_ms });
        lane.held_until = None;
        Some((cursor, end as i64 - 1, log.ids[first..end].to_vec()))
    }

    pub(crate) fn extend(&mut self, partition: i64, holder: LeaseId, lease_ms: i64) {
        let now = self.now;
        for lease in self.lanes.iter_mut().filter(|((p, _), _)| *p == partition).filter_map(|(_, l)| l.lease.as_mut()) {
            if lease.worker == holder && lease.expires > now {
                lease.expires = lease.expires.max(now + lease_ms);
            }
        }
    }

    pub(crate) fn wait(&mut self, ms: i64) {
        self.now += ms;
    }

    pub(crate) fn seek(&mut self, partition: i64, group: i32, committed: i64) {
        let Some(lane) = self.lanes.get_mut(&(partition, group)) else { return };
        for (offset, fate) in lane.fates.iter_mut().enumerate() {
            *fate = if offset as i64 <= committed { Fate::Finished } else { Fate::Pending };
        }
        (lane.lease, lane.budget_used, lane.held_until) = (None, 0, None);
    }

    pub(crate) fn purge(&mut self, partition: i64, to: i64) {
        let log = self.logs.get_mut(&partition).unwrap();
        log.hashes_from = log.hashes_from.max(to as usize);
    }

    pub(crate) fn retain(&mut self, partition: i64, to: i64) {
        let log = self.logs.get_mut(&partition).unwrap();
        log.stored_from = (to as usize).min(log.ids.len()).max(log.stored_from);
    }

    /// One call: `(partition, id, lease, status, reason)` per item.
    pub(crate) fn ack(&mut self, group: &str, items: &[Said]) -> Vec<AckAnswer> {
        let mut groups: Vec<((i64, LeaseClaim), Vec<usize>)> = Vec::new();
        for (nth, item) in items.iter().enumerate() {
            match groups.iter_mut().find(|(key, _)| *key == (item.partition, item.claim)) {
                Some((_, members)) => members.push(nth),
                None => groups.push(((item.partition, item.claim), vec![nth])),
            }
        }
        let mut answers = vec![None; items.len()];
        for ((partition, claim), members) in groups {
            let said: Vec<&Said> = members.iter().map(|nth| &items[*nth]).collect();
            for (nth, answer) in members.iter().zip(self.ack_group(partition, group, claim, &said)) {
                answers[*nth] = Some(answer);
            }
        }
        answers.into_iter().flatten().collect()
    }

    fn ack_group(&mut self, partition: i64, group: &str, claim: LeaseClaim, said: &[&Said]) -> Vec<AckAnswer> {
        let all = |error: AckError| vec![AckAnswer::refused(error); said.len()];
        let (now, options, log) = (self.now, self.options, &self.logs[&partition]);
        let Some(lane) = self.lanes.get_mut(&(partition, group_id(group))) else {
            return all(AckError::ConsumerNotFound);
        };
        let live = lane.live(now);
        match claim {
            LeaseClaim::Absent => {}
            LeaseClaim::Id(worker) if live.is_some_and(|lease| lease.worker == worker) => {}
            _ => return all(AckError::InvalidLease),
        }
        let next = lane.next();
        let leased_end = lane.lease.map_or(0, |lease| lease.end);
        // Every offset that an id may mean: in the leased span all of them, past a lease that is not live the first.
        let meant = |id: &str| -> Vec<usize> {
            let from = next.max(log.hashes_from);
            let hits = |range: std::ops::Range<usize>| range.filter(|o| log.ids[*o] == id).collect::<Vec<_>>();
            let spanned = hits(from.min(leased_end)..leased_end);
            let open =
                if live.is_some() { Vec::new() } else { hits(from.max(leased_end).min(log.ids.len())..log.ids.len()) };
            if spanned.is_empty() { open.into_iter().take(1).collect() } else { spanned }
        };
        let behind = |id: &str| (log.hashes_from..next).any(|offset| log.ids[offset] == id);

        let mut completed = vec![false; log.ids.len()];
        let mut signals: Vec<Option<Signal>> = vec![None; log.ids.len()];
        for item in said {
            let offsets = meant(&item.id);
            match (item.status, offsets.first(), offsets.last()) {
                (AckStatus::Completed, _, Some(last)) => completed[*last] = true,
                (AckStatus::Signal(signal), Some(first), _) => signals[*first] = signals[*first].max(Some(signal)),
                _ => {}
            }
        }
        let poison = signals.iter().position(Option::is_some);
        let prefix = (next..poison.unwrap_or(log.ids.len())).rev().find(|offset| completed[*offset]);
        let (mut ended, mut filed, mut rejected) = (false, None, None);
        if let Some(last) = prefix {
            lane.finish_to(last + 1);
            ended = poison.is_none() && lane.lease.is_some_and(|lease| last + 1 >= lease.end);
        }
        match poison.map(|at| (at, signals[at])) {
            None if ended => (lane.budget_used, lane.held_until) = (0, None),
            None => {}
            Some((at, signal)) => {
                ended = true;
                let exhausted = lane.budget_used >= options.retry_limit;
                match signal {
                    Some(Signal::Retry) | None => {}
                    Some(Signal::Failed) if !exhausted => {
                        lane.budget_used += 1;
                        if options.retry_delay_ms > 0 {
                            lane.held_until = Some(now + i64::from(options.retry_delay_ms));
                        }
                    }
                    Some(kind) => {
                        let keep = kind == Signal::Dlq || options.dead_letters;
                        if keep && at < log.stored_from {
                            rejected = Some(at);
                        } else {
                            lane.finish_to(at + 1);
                            lane.fates[at] = if keep { Fate::Filed } else { Fate::Dropped };
                            if keep {
                                filed = Some(at);
                                let nacks =
                                    || said.iter().filter(|i| i.status != AckStatus::Completed && i.reason.is_some());
                                let own =
                                    nacks().find(|i| meant(&i.id).first() == Some(&at)).or_else(|| nacks().next());
                                let reason = own.and_then(|i| i.reason.clone()).unwrap_or("Retries exhausted".into());
                                let letter = (at as i64, group.to_owned(), reason, lane.budget_used);
                                self.letters.entry(partition).or_default().push(letter);
                            }
                        }
                        (lane.budget_used, lane.held_until) = (0, None);
                    }
                }
            }
        }
        let released = ended && live.is_some();
        let answers = said.iter().map(|item| {
            let offsets = meant(&item.id);
            let nacked = (item.status != AckStatus::Completed).then(|| offsets.first().copied()).flatten();
            let outcome = if !offsets.is_empty() {
                if nacked.is_some() && nacked == rejected {
                    Err(AckError::DlqRejected)
                } else {
                    Ok(Acked::Done { dlq: nacked.is_some() && nacked == filed })
                }
            } else if !behind(&item.id) {
                return AckAnswer::refused(AckError::Unresolvable);
            } else if item.status == AckStatus::Completed {
                Ok(Acked::Noop)
            } else {
                Err(AckError::AlreadyCommitted)
            };
            AckAnswer { outcome, lease_released: released, conflated: None }
        });
        let answers = answers.collect();
        if ended {
            lane.lease = None;
        }
        answers
    }

    /// The cursor rows as the store should hold them, and the letters of each partition.
    pub(crate) fn rows(&self) -> (BTreeMap<(i64, i32), Row>, BTreeMap<i64, Vec<Letter>>) {
        let mut rows = BTreeMap::new();
        for (key, lane) in &self.lanes {
            let row = Row {
                committed: lane.next() as i64 - 1,
                consumed: lane.retired,
                retry_count: lane.budget_used,
                batch_end: lane.lease.map(|lease| lease.end as i64 - 1),
                worker: lane.lease.map(|lease| lease.worker),
                expires: lane.lease.map(|lease| lease.expires),
                not_before: lane.held_until,
            };
            rows.insert(*key, row);
        }
        (rows, self.letters.clone())
    }
}

/// One item as the model sees it.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) partition: i64,
    pub(crate) id: String,
    pub(crate) claim: LeaseClaim,
    pub(crate) status: AckStatus,
    pub(crate) reason: Option<String>,
}

impl Said {
    /// The same on the wire.
    pub(crate) fn item(&self) -> AckItem {
        let mut item = item(self.partition, &self.id, self.claim, self.status);
        item.reason = self.reason.clone().map(String::into_boxed_str);
        item
    }
}
