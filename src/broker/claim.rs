//! Claims: candidates of the ready index against the cursors of PostgreSQL, until the budget of a pop is used up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim_fusion::{self, Claim, ClaimFusion};
use super::error::BrokerResult;
use super::meter::meter;
use super::queue::Queue;
use super::ready::{ReadyGroup, ReadyIndex, Taken};
use super::ready_group::Verdict;
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};
use crate::store::Store;
use crate::store::claims::{ClaimOutcome, ClaimOutcomes, Claimed};
use crate::store::cursors::AutoAckTx;
use crate::store::groups::StartAt;

/// Most candidates in one claim statement.
const CANDIDATES_MAX: i64 = 64;
/// Messages that release a `windowBuffer` partition early (`QUEEN_HOTLIST_WINDOW_BATCH`).
const WINDOW_MESSAGES: i64 = 100;
/// While other brokers may end leases, a held partition is looked at again after at most this long.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// What a pop may still take.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Messages.
    pub messages: i64,
    /// Partitions.
    pub partitions: i64,
}

impl Budget {
    /// Whether nothing more may be taken.
    pub fn is_spent(&self) -> bool {
        self.messages <= 0 || self.partitions <= 0
    }

    fn spend(&mut self, span: &ClaimedSpan) {
        self.messages -= span.claimed.last.0 - span.deliver_from().0 + 1;
        self.partitions -= 1;
    }
}

/// A span that this pop owns.
#[derive(Clone, Debug)]
pub struct ClaimedSpan {
    /// The queue.
    pub queue: Queue,
    /// The group.
    pub group: GroupId,
    /// Span, worker, attempt.
    pub claimed: Claimed,
    /// Whether the group reads only the newest message of the span.
    pub conflating: bool,
}

impl ClaimedSpan {
    /// First offset to deliver.
    pub fn deliver_from(&self) -> Offset {
        if self.conflating { self.claimed.last } else { self.claimed.first }
    }
}

/// Everything that one pop has claimed so far.
#[derive(Debug, Default)]
pub struct Claims<'a> {
    /// The spans, in claim order.
    pub spans: Vec<ClaimedSpan>,
    /// A group that has been deleted: no cursor can be made for it.
    pub gone: Option<GroupId>,
    /// Of an `autoAck` pop: candidates that stay taken until the commit, with what to think of them then.
    held: Vec<(Taken<'a>, Vec<(PartitionId, Verdict)>)>,
}

impl Claims<'_> {
    /// The transaction of an `autoAck` pop has committed, or moved nothing. Dropped without this, its candidates are ready
    /// again.
    pub fn settle(&mut self) {
        for (mut taken, verdicts) in self.held.drain(..) {
            for (partition, verdict) in verdicts {
                taken.settle(partition, verdict);
            }
        }
    }
}

/// How one pop claims.
#[derive(Debug)]
pub struct Claimer<'a> {
    /// The store.
    pub store: &'a Store,
    /// Claims of leasing pops.
    pub fusion: &'a ClaimFusion,
    /// The ready index.
    pub ready: &'a ReadyIndex,
    /// Whether other brokers work on this database.
    pub has_peers: bool,
    /// One id for all partitions, or `None` for an id per partition: the pop takes one at most.
    pub shared_worker: Option<LeaseId>,
    /// Where an unregistered group starts on a partition that it meets now.
    pub start: StartAt,
    /// Lease length in seconds.
    pub lease_seconds: i64,
    /// Whether the group reads only the newest message of each partition (`spec/push-pop.md` §7.12).
    pub conflating: bool,
}

impl<'a> Claimer<'a> {
    fn span(&self, queue: &Queue, group: GroupId, claimed: Claimed) -> ClaimedSpan {
        ClaimedSpan { queue: queue.clone(), group, claimed, conflating: self.conflating }
    }

    /// Claims from the ready partitions of one group.
    pub async fn claim_ready(
        &self,
        queue: &Queue,
        group: &Arc<ReadyGroup>,
        budget: &mut Budget,
        auto: &mut Option<AutoAckTx>,
        claims: &mut Claims<'a>,
    ) -> BrokerResult<()> {
        // As many candidates as may be claimed; more after a miss, so that a run of stale ones is soon behind.
        let mut spread = 1;
        while !budget.is_spent() {
            let count = (budget.partitions.min(budget.messages) * spread).min(CANDIDATES_MAX);
            spread = (spread * 2).min(CANDIDATES_MAX);
            let mut taken = self.ready.take(group, count as usize).await?;
            if taken.partitions().is_empty() {
                claims.gone = claims.gone.or(group.is_gone().then_some(group.id));
                return Ok(());
            }
            let candidates = taken.partitions().to_vec();
            let outcomes = self.claim(queue, group.id, &candidates, *budget, auto).await?;
            let mut verdicts = Vec::new();
            for (partition, outcome) in outcomes {
                verdicts.extend(self.verdict(queue, &outcome).map(|verdict| (partition, verdict)));
                if outcome == ClaimOutcome::Unmet {
                    claims.gone = Some(group.id);
                }
                if let ClaimOutcome::Claimed(claimed, _) = outcome {
                    let span = self.span(queue, group.id, claimed);
                    budget.spend(&span);
                    claims.spans.push(span);
                }
            }
            if auto.is_some() {
                claims.held.push((taken, verdicts));
            } else {
                for (partition, verdict) in verdicts {
                    taken.settle(partition, verdict);
                }
            }
            if claims.gone == Some(group.id) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Claims one named partition. Answers how long to wait if it is held.
    pub async fn claim_partition(
        &self,
        queue: &Queue,
        group: GroupId,
        partition: PartitionId,
        budget: &mut Budget,
        auto: &mut Option<AutoAckTx>,
        claims: &mut Claims<'a>,
    ) -> BrokerResult<Option<Duration>> {
        let mut wait = None;
        for (_, outcome) in self.claim(queue, group, &[partition], *budget, auto).await? {
            match outcome {
                ClaimOutcome::Claimed(claimed, _) => {
                    let span = self.span(queue, group, claimed);
                    budget.spend(&span);
                    claims.spans.push(span);
                }
                ClaimOutcome::NotYet(duration) => wait = Some(duration),
                ClaimOutcome::Unmet => claims.gone = Some(group),
                _ => {}
            }
        }
        Ok(wait)
    }

    /// Tries the partitions, giving the group cursors where it has none yet. What is unmet even then has no group to meet.
    async fn claim(
        &self,
        queue: &Queue,
        group: GroupId,
        partitions: &[PartitionId],
        budget: Budget,
        auto: &mut Option<AutoAckTx>,
    ) -> BrokerResult<ClaimOutcomes> {
        let ids = self.store.ids();
        let claim = Claim {
            group,
            candidates: partitions
                .iter()
                .map(|p| (*p, self.shared_worker.unwrap_or_else(|| ids.lease_on(*p))))
                .collect(),
            messages_max: budget.messages,
            partitions_max: budget.partitions,
            lease_seconds: self.lease_seconds,
            delay_seconds: queue.options.delayed_processing,
            window_seconds: queue.options.window_buffer,
            window_messages: WINDOW_MESSAGES,
            conflating: self.conflating,
            start: self.start,
        };
        let Some(tx) = auto else { return self.fusion.claim(claim).await };
        let started = Instant::now();
        let mut outcomes = tx.claim(&claim.request()).await?;
        if let Some(again) = claim.unmet(&mut outcomes) {
            claim_fusion::seed(self.store, std::iter::once(&again)).await?;
            outcomes.extend(tx.claim(&again.request()).await?);
        }
        meter().claimed(&outcomes);
        meter().claim_seconds.record(started.elapsed().as_secs_f64());
        Ok(outcomes)
    }

    /// What the ready index should think of a partition after this outcome; `None` leaves it ready.
    fn verdict(&self, queue: &Queue, outcome: &ClaimOutcome) -> Option<Verdict> {
        let hold = |wait: Duration, more: bool, eager: bool| {
            let wait = if self.has_peers { wait.min(HOLD_MAX) } else { wait };
            Some(Verdict::Hold { until: Instant::now() + wait, more, eager })
        };
        match outcome {
            ClaimOutcome::Claimed(claimed, more) if claimed.is_leased => {
                hold(Duration::from_secs(self.lease_seconds as u64), *more, false)
            }
            ClaimOutcome::Claimed(_, true) => Some(Verdict::Again),
            ClaimOutcome::Claimed(_, false) | ClaimOutcome::Empty | ClaimOutcome::Emptied | ClaimOutcome::Gone => {
                Some(Verdict::Empty)
            }
            ClaimOutcome::NotYet(wait) => hold(*wait, true, queue.options.window_buffer > 0),
            ClaimOutcome::LeftOver | ClaimOutcome::Unmet => None,
        }
    }
}
