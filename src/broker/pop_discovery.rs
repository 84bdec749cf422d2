//! Discovery pops: any partition of every queue whose labels match (`spec/push-pop.md` §7.1).

use std::sync::Arc;

use super::claim::{Budget, Claims};
use super::error::BrokerResult;
use super::feed::{Feed, Labels};
use super::meter::meter;
use super::pop::{Attempt, Miss, PopPath, PopRequest, Popped};
use crate::store::groups::StartAt;

impl PopPath {
    /// The queues that have something, in turn, until the budget is used up.
    pub(super) async fn attempt_labels(&self, request: &PopRequest, labels: &Labels) -> BrokerResult<Attempt> {
        let start = request.subscription.start(&request.group, self.settings.subscription_default);
        let feed = Box::pin(self.discovery.feed(labels, &request.group)).await?;
        Box::pin(self.meet_queues(request, &feed, start)).await?;
        let policy = feed.policy(request);
        let sizes = request.sizes;
        let widest = sizes.width(policy.conflation).max(sizes.width(false));
        let worker = (widest > 1).then(|| self.store.ids().lease_on_many());
        let mut permit = None;
        let mut auto = None;
        let mut claims = Claims::default();
        let mut messages = sizes.batch;
        for _ in 0..feed.ready() {
            let taken = i64::try_from(claims.spans.len()).unwrap_or(i64::MAX);
            if messages <= 0 || taken >= widest || claims.gone.is_some() {
                break;
            }
            let Some((group, conflating)) = feed.next_ready() else { break };
            let Some(queue) = Box::pin(self.queues.find_by_id(group.queue)).await? else {
                feed.remove(group.queue);
                continue;
            };
            if request.auto_ack && auto.is_none() {
                permit = self.permit(request).await?;
                auto = Box::pin(self.begin(request)).await?;
            }
            let mut budget = Budget { messages, partitions: sizes.width(conflating) - taken };
            let claimer = self.claimer(request, &queue, worker, start, conflating);
            let claimed = claimer.claim_ready(&queue, &group, &mut budget, &mut auto, &mut claims).await;
            group.settle_listing(&feed);
            claimed?;
            messages = budget.messages;
            meter().queues_visited.increment(1);
        }
        let gone = claims.gone;
        let answer = Box::pin(self.serve(request, claims, auto, worker)).await?;
        drop(permit);
        match (answer, gone) {
            (Some(answer), _) => Ok(Attempt::Served(Popped { answer: Some(answer), policy, chosen: None })),
            (None, Some(group)) => Ok(self.forget_group(group)),
            (None, None) => Ok(Attempt::Nothing(Miss::on_feed(policy, feed))),
        }
    }

    /// First contact, page by page. A group that begins with what is pushed from now on meets every queue before it is
    /// given anything: its boundary is this pop. Any other is served from what it has met.
    async fn meet_queues(&self, request: &PopRequest, feed: &Arc<Feed>, start: StartAt) -> BrokerResult<()> {
        let conflation = request.conflation == Some(true);
        while self.discovery.meet(feed, start, conflation).await? {
            if start != StartAt::End && feed.ready() > 0 {
                break;
            }
        }
        Ok(())
    }
}
