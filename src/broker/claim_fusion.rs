//! Claim fusion: leasing pops of any queue, partition and group claim in one statement.
//!
//! A claim never waits for another (locked rows are skipped), so what shares a statement cannot hold anybody up. The
//! commit is asynchronous: a claim lost in a crash of the database only redelivers (design §4).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::coalesce::{Batch, Bounds, Coalescer, answer_failed};
use super::error::{BrokerError, BrokerResult};
use super::meter::meter;
use crate::ids::{GroupId, LeaseId, PartitionId};
use crate::store::claims::{ClaimOutcome, ClaimOutcomes, ClaimRequest};
use crate::store::first_claims::FirstClaim;
use crate::store::groups::StartAt;
use crate::store::{Store, StoreError, StoreResult};

/// Candidates of one statement.
const CANDIDATES_MAX: usize = 256;

/// What one pop wants to claim now.
#[derive(Debug)]
pub struct Claim {
    /// The group.
    pub group: GroupId,
    /// Partitions to try, in this order, each with the worker that its lease would get.
    pub candidates: Vec<(PartitionId, LeaseId)>,
    /// Most messages over all partitions.
    pub messages_max: i64,
    /// Most partitions to claim.
    pub partitions_max: i64,
    /// Lease length in seconds.
    pub lease_seconds: i64,
    /// `delayedProcessing` in seconds, `<= 0` off.
    pub delay_seconds: i32,
    /// `windowBuffer` in seconds, `<= 0` off.
    pub window_seconds: i32,
    /// Messages that release a `windowBuffer` partition early.
    pub window_messages: i64,
    /// Whether the group reads only the newest message of each partition.
    pub conflating: bool,
    /// Where an unregistered group starts on a partition that it meets now.
    pub start: StartAt,
}

impl Claim {
    /// As the store takes it.
    pub fn request(&self) -> ClaimRequest<'_> {
        ClaimRequest {
            group: self.group,
            candidates: &self.candidates,
            messages_max: self.messages_max,
            partitions_max: self.partitions_max,
            lease_seconds: self.lease_seconds,
            delay_seconds: self.delay_seconds,
            window_seconds: self.window_seconds,
            window_messages: self.window_messages,
            conflating: self.conflating,
        }
    }

    /// The candidates that the group had not met, to be tried again now that it has cursors there; `None` if there are
    /// none. Those that the budget no longer reaches are left over.
    pub fn unmet(&self, outcomes: &mut ClaimOutcomes) -> Option<Claim> {
        let mut left = (self.messages_max, self.partitions_max);
        for (_, outcome) in outcomes.iter() {
            if let ClaimOutcome::Claimed(claimed, _) = outcome {
                left.0 -= if self.conflating { 1 } else { claimed.last.0 - claimed.first.0 + 1 };
                left.1 -= 1;
            }
        }
        let spent = left.0 <= 0 || left.1 <= 0;
        let mut again = Vec::new();
        for (partition, outcome) in outcomes.iter_mut().filter(|(_, outcome)| *outcome == ClaimOutcome::Unmet) {
            let worker = self.candidates.iter().find(|(candidate, _)| candidate == partition);
            again.extend(worker.copied());
            *outcome = ClaimOutcome::LeftOver;
        }
        if spent || again.is_empty() {
            return None;
        }
        outcomes.retain(|(partition, _)| !again.iter().any(|(p, _)| p == partition));
        Some(Claim { candidates: again, messages_max: left.0, partitions_max: left.1, ..*self })
    }

    /// Takes what was leased with its cursor off the candidates and the budget. When that is used up, the rest is left over.
    fn take(&mut self, leased: ClaimOutcomes, outcomes: &mut ClaimOutcomes) {
        let mut gone: HashSet<PartitionId> = HashSet::with_capacity(leased.len());
        for (partition, outcome) in &leased {
            if let ClaimOutcome::Claimed(claimed, _) = outcome {
                self.messages_max -= claimed.last.0 - claimed.first.0 + 1;
                self.partitions_max -= 1;
            }
            gone.insert(*partition);
        }
        outcomes.extend(leased);
        self.candidates.retain(|(partition, _)| !gone.contains(partition));
        if self.messages_max <= 0 || self.partitions_max <= 0 {
            outcomes.extend(self.candidates.drain(..).map(|(partition, _)| (partition, ClaimOutcome::LeftOver)));
        }
    }
}

/// A claim on its way.
#[derive(Debug)]
pub struct ClaimJob {
    claim: Claim,
    reply: oneshot::Sender<Result<ClaimOutcomes, Arc<StoreError>>>,
}

/// Claims of leasing pops. A cheap clone.
pub type ClaimFusion = Coalescer<Flush>;

impl ClaimFusion {
    /// With so many statements in flight, and so many pops that may wait for theirs.
    pub fn over(store: &Store, workers: usize, waiting_max: usize) -> ClaimFusion {
        let bounds = Bounds { workers, waiting_max, jobs_max: usize::MAX, weight_max: CANDIDATES_MAX };
        Coalescer::new(Flush { store: store.clone() }, bounds)
    }

    /// Claims; answers every candidate. A claim whose caller has gone before its turn is not sent.
    pub async fn claim(&self, claim: Claim) -> BrokerResult<ClaimOutcomes> {
        let asked = Instant::now();
        let (reply, answer) = oneshot::channel();
        self.submit(ClaimJob { claim, reply })?;
        let outcomes =
            answer.await.map_err(|_| BrokerError::Failed("the claim was dropped, connection kept".into()))??;
        meter().claim_seconds.record(asked.elapsed().as_secs_f64());
        Ok(outcomes)
    }
}

/// One claim statement for the pops that wait.
#[derive(Debug)]
pub struct Flush {
    store: Store,
}

impl Batch for Flush {
    type Job = ClaimJob;
    type State = ();
    const SPAN: &'static str = "flush of claims";
    const OVERLOADED: &'static str = "too many pops under way";

    fn state(&self) {}

    fn weight(job: &ClaimJob) -> usize {
        job.claim.candidates.len()
    }

    async fn run(&self, (): &mut (), jobs: Vec<ClaimJob>) -> Vec<ClaimJob> {
        let (now, later) = split(jobs);
        if now.is_empty() {
            return later;
        }
        let claims: Vec<&Claim> = now.iter().map(|job| &job.claim).collect();
        meter().claim_flush_pops.record(claims.len() as f64);
        match self.claim(&claims).await {
            Ok(outcomes) => {
                let seen = seen(&claims, &outcomes);
                let later = tell(later, &seen);
                answer(now, outcomes);
                return later;
            }
            Err(error) => {
                let alone = async |job: ClaimJob| {
                    let outcomes = self.claim(&[&job.claim]).await;
                    (job, outcomes)
                };
                answer_failed(error, now, alone, |job, outcomes| {
                    // A pop whose client hung up does not care.
                    let _ = job.reply.send(outcomes.map(|mut outcomes| outcomes.pop().unwrap_or_default()));
                })
                .await;
            }
        }
        later
    }
}

impl Flush {
    /// One claim statement; partitions that a group meets for the first time get their cursors, and with them the leases. A
    /// second claim tries what could not be leased so.
    async fn claim(&self, claims: &[&Claim]) -> StoreResult<Vec<ClaimOutcomes>> {
        let requests: Vec<_> = claims.iter().map(|claim| claim.request()).collect();
        let mut outcomes = self.store.claim(&requests).await?;
        seal_emptied(&self.store, claims, &outcomes).await?;
        let mut again: Vec<(usize, Claim)> = claims
            .iter()
            .zip(&mut outcomes)
            .enumerate()
            .filter_map(|(nth, (claim, outcomes))| claim.unmet(outcomes).map(|again| (nth, again)))
            .collect();
        if !again.is_empty() {
            let firsts: Vec<_> =
                again.iter().map(|(_, c)| FirstClaim { request: c.request(), start: c.start }).collect();
            let leased = self.store.claim_unmet(&firsts).await?;
            for ((nth, claim), leased) in again.iter_mut().zip(leased) {
                if let Some(outcomes) = outcomes.get_mut(*nth) {
                    claim.take(leased, outcomes);
                }
            }
            again.retain(|(_, claim)| !claim.candidates.is_empty());
        }
        if !again.is_empty() {
            let requests: Vec<_> = again.iter().map(|(_, claim)| claim.request()).collect();
            for ((nth, _), more) in again.iter().zip(self.store.claim(&requests).await?) {
                if let Some(outcomes) = outcomes.get_mut(*nth) {
                    outcomes.extend(more);
                }
            }
        }
        outcomes.iter().for_each(|outcomes| meter().claimed(outcomes));
        Ok(outcomes)
    }
}

/// Gives the groups of these claims cursors on their candidates. Commits by itself: never inside a transaction that
/// others would have to wait for.
pub async fn seed<'a>(store: &Store, claims: impl Iterator<Item = &'a Claim>) -> StoreResult<()> {
    let mut unmet: Vec<_> = claims.flat_map(|c| c.candidates.iter().map(|(p, _)| (c.group, *p, c.start))).collect();
    unmet.sort_unstable_by_key(|(group, partition, _)| (*partition, *group));
    store.seed_cursors(&unmet).await
}

async fn seal_emptied(store: &Store, claims: &[&Claim], outcomes: &[ClaimOutcomes]) -> StoreResult<()> {
    let emptied: Vec<_> = claims
        .iter()
        .zip(outcomes)
        .flat_map(|(claim, outcomes)| outcomes.iter().map(|(partition, outcome)| (claim.group, *partition, outcome)))
        .filter(|(.., outcome)| **outcome == ClaimOutcome::Emptied)
        .map(|(group, partition, _)| (group, partition))
        .collect();
    if emptied.is_empty() { Ok(()) } else { store.seal_cursors(&emptied).await }
}

/// What can go now, and what must wait for the next statement because it wants a cursor that this one claims already.
/// Claims that nobody waits for any more are dropped.
fn split(jobs: Vec<ClaimJob>) -> (Vec<ClaimJob>, Vec<ClaimJob>) {
    let mut wanted: HashSet<(PartitionId, GroupId)> = HashSet::new();
    let keys = |job: &ClaimJob| job.claim.candidates.iter().map(|(p, _)| (*p, job.claim.group)).collect::<Vec<_>>();
    jobs.into_iter().filter(|job| !job.reply.is_closed()).partition(|job| {
        let keys = keys(job);
        let free = !keys.iter().any(|key| wanted.contains(key));
        if free {
            wanted.extend(keys);
        }
        free
    })
}

/// What one statement found at each cursor, for claims that waited while it was sent and want the same cursor.
fn seen(claims: &[&Claim], outcomes: &[ClaimOutcomes]) -> HashMap<(PartitionId, GroupId), ClaimOutcome> {
    let mut seen = HashMap::new();
    for (claim, outcomes) in claims.iter().zip(outcomes) {
        for (partition, outcome) in outcomes {
            let outcome = match outcome {
                // Free: only the budget of that claim was used up.
                ClaimOutcome::LeftOver => continue,
                // Whoever comes after it finds the lease.
                ClaimOutcome::Claimed(..) => {
                    ClaimOutcome::NotYet(Duration::from_secs(u64::try_from(claim.lease_seconds).unwrap_or(0)))
                }
                other => other.clone(),
            };
            seen.insert((*partition, claim.group), outcome);
        }
    }
    seen
}

/// Answers the claims of one partition that the statement has settled: a crowd on one partition costs one statement. They were
/// waiting when it was sent, so it is as if they had been in it.
fn tell(jobs: Vec<ClaimJob>, seen: &HashMap<(PartitionId, GroupId), ClaimOutcome>) -> Vec<ClaimJob> {
    let mut left = Vec::new();
    for job in jobs {
        let known = match job.claim.candidates.as_slice() {
            [(partition, _)] => seen.get(&(*partition, job.claim.group)).map(|outcome| (*partition, outcome.clone())),
            _ => None,
        };
        match known {
            Some(outcome) => {
                let outcomes = vec![outcome];
                meter().claimed(&outcomes);
                let _ = job.reply.send(Ok(outcomes));
            }
            None => left.push(job),
        }
    }
    left
}

fn answer(jobs: Vec<ClaimJob>, outcomes: Vec<ClaimOutcomes>) {
    for (job, outcomes) in jobs.into_iter().zip(outcomes) {
        let _ = job.reply.send(Ok(outcomes));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ids::Offset;
    use crate::store::claims::Claimed;

    const GROUP: GroupId = GroupId(3);

    fn claim(partitions: &[i64]) -> Claim {
        Claim {
            group: GROUP,
            candidates: partitions.iter().map(|p| (PartitionId(*p), LeaseId(uuid::Uuid::nil()))).collect(),
            messages_max: 10,
            partitions_max: 10,
            lease_seconds: 60,
            delay_seconds: 0,
            window_seconds: 0,
            window_messages: 0,
            conflating: false,
            start: StartAt::Beginning,
        }
    }

    fn job(partitions: &[i64]) -> (ClaimJob, oneshot::Receiver<Result<ClaimOutcomes, Arc<StoreError>>>) {
        let (reply, answer) = oneshot::channel();
        (ClaimJob { claim: claim(partitions), reply }, answer)
    }

    #[test]
    fn a_crowd_on_one_partition_is_answered_by_one_statement() {
        let (jobs, answers): (Vec<_>, Vec<_>) = (0..5).map(|_| job(&[7])).unzip();
        let (now, later) = split(jobs);
        assert_eq!((now.len(), later.len()), (1, 4));
        let claimed = Claimed {
            partition: PartitionId(7),
            name: "p".into(),
            committed: Offset(-1),
            first: Offset(0),
            last: Offset(0),
            worker: LeaseId(uuid::Uuid::nil()),
            attempt: 1,
            is_leased: true,
        };
        let outcomes = vec![vec![(PartitionId(7), ClaimOutcome::Claimed(claimed, false))]];
        let claims: Vec<&Claim> = now.iter().map(|job| &job.claim).collect();
        assert!(tell(later, &seen(&claims, &outcomes)).is_empty());
        for mut answer in answers.into_iter().skip(1) {
            let wait = ClaimOutcome::NotYet(Duration::from_secs(60));
            assert_eq!(answer.try_recv().unwrap().unwrap(), [(PartitionId(7), wait)]);
        }
    }

    #[test]
    fn what_a_budget_left_over_and_what_wants_several_partitions_is_tried_again() {
        let (lone, _lone) = job(&[7]);
        let (wide, _wide) = job(&[7, 8]);
        let first = claim(&[8, 7]);
        let outcomes = vec![vec![(PartitionId(8), ClaimOutcome::Empty), (PartitionId(7), ClaimOutcome::LeftOver)]];
        assert_eq!(tell(vec![lone, wide], &seen(&[&first], &outcomes)).len(), 2);
    }
}
