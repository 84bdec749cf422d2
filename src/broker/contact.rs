//! Queues and groups that this broker meets for the first time. Ten thousand consumers that appear together are a few
//! statements, not ten thousand waits for a connection each.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use tokio::sync::oneshot;

use super::coalesce::{Batch, Bounds, Coalescer, answer_failed};
use super::error::{BrokerError, BrokerResult};
use super::label_news::LabelNews;
use super::queue::Queue;
use crate::ids::QueueId;
use crate::store::groups::{GroupRow, StartAt};
use crate::store::{Store, StoreError, StoreResult};

/// Requests that may wait for an answer.
const WAITING_MAX: usize = 100_000;
/// Names of one batch: some hundred milliseconds of the database, and two batches hold nearly everybody who must hear
/// that it is away.
const NAMES_MAX: usize = 4_096;
/// Batches in flight.
const WORKERS: usize = 2;
/// Statements of one batch of groups in flight: one per name and start.
const STATEMENTS: usize = 4;

type Reply<T> = oneshot::Sender<Result<T, Arc<StoreError>>>;

fn bounds() -> Bounds {
    Bounds { workers: WORKERS, waiting_max: WAITING_MAX, jobs_max: usize::MAX, weight_max: NAMES_MAX }
}

async fn answer_of<T>(answer: oneshot::Receiver<Result<T, Arc<StoreError>>>) -> BrokerResult<T> {
    let dropped = |_| BrokerError::Failed("the look-up was dropped, connection kept".into());
    Ok(answer.await.map_err(dropped)??)
}

/// Looks queues up, and makes those that do not exist if asked to.
pub type QueueContacts = Coalescer<FindQueues>;

/// Some queues that somebody wants.
#[derive(Debug)]
pub struct QueueJob {
    names: Vec<String>,
    create: bool,
    reply: Reply<Vec<Queue>>,
}

/// One look for everybody who waits.
#[derive(Debug)]
pub struct FindQueues {
    store: Store,
    label_news: Arc<LabelNews>,
}

impl QueueContacts {
    /// Over the store; what it makes is news to those who pop by label.
    pub fn over(store: &Store, label_news: &Arc<LabelNews>) -> QueueContacts {
        Coalescer::new(FindQueues { store: store.clone(), label_news: label_news.clone() }, bounds())
    }

    /// The queues of these names that exist, or with `create` all of them.
    pub async fn find(&self, names: Vec<String>, create: bool) -> BrokerResult<Vec<Queue>> {
        let (reply, answer) = oneshot::channel();
        self.submit(QueueJob { names, create, reply })?;
        answer_of(answer).await
    }
}

impl Batch for FindQueues {
    type Job = QueueJob;
    type State = ();
    const SPAN: &'static str = "look-up of queues";
    const OVERLOADED: &'static str = "too many new queues at once";

    fn state(&self) {}

    fn weight(job: &QueueJob) -> usize {
        job.names.len()
    }

    async fn run(&self, (): &mut (), jobs: Vec<QueueJob>) -> Vec<QueueJob> {
        match self.find(&jobs).await {
            Ok(found) => {
                for job in jobs {
                    let queues = job.names.iter().filter_map(|name| found.get(name).cloned()).collect();
                    // Whoever hung up does not care.
                    let _ = job.reply.send(Ok(queues));
                }
            }
            Err(error) => {
                let alone = async |job| {
                    let found = self.find(std::slice::from_ref(&job)).await;
                    (job, found)
                };
                answer_failed(error, jobs, alone, |job, found| {
                    let _ = job.reply.send(found.map(|found| found.into_values().collect()));
                })
                .await;
            }
        }
        Vec::new()
    }
}

impl FindQueues {
    async fn find(&self, jobs: &[QueueJob]) -> StoreResult<HashMap<String, Queue>> {
        let mut found: HashMap<String, Queue> = HashMap::new();
        let mut names: Vec<String> = jobs.iter().flat_map(|job| job.names.iter().cloned()).collect();
        names.sort_unstable();
        names.dedup();
        // A queue that was made may be deleted before it is read; twice in a row somebody means it.
        for attempt in 0..3 {
            for row in self.store.find_queues(&names).await? {
                found.insert(row.name.clone(), Arc::new(row));
            }
            names = jobs.iter().filter(|job| job.create).flat_map(|job| job.names.iter().cloned()).collect();
            names.retain(|name| !found.contains_key(name));
            names.sort_unstable();
            names.dedup();
            if names.is_empty() {
                break;
            }
            if attempt < 2 {
                self.store.create_queues(&names).await?;
                self.label_news.changed();
            }
        }
        Ok(found)
    }
}

/// Looks groups up, and registers or makes those that are not there.
pub type GroupContacts = Coalescer<MeetGroups>;

/// What a group must be when it is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Registered; if it is not yet, with this start and conflation.
    Registered(StartAt, bool),
    /// There.
    Row,
}

/// A group on a queue.
#[derive(Debug)]
pub struct GroupJob {
    queue: QueueId,
    name: String,
    want: Want,
    reply: Reply<Option<GroupRow>>,
}

/// One look for everybody who waits.
#[derive(Debug)]
pub struct MeetGroups {
    store: Store,
}

impl GroupContacts {
    /// Over the store.
    pub fn over(store: &Store) -> GroupContacts {
        Coalescer::new(MeetGroups { store: store.clone() }, bounds())
    }

    /// The group; `None` if its queue is gone.
    pub async fn meet(&self, queue: QueueId, name: &str, want: Want) -> BrokerResult<Option<GroupRow>> {
        let (reply, answer) = oneshot::channel();
        self.submit(GroupJob { queue, name: name.to_owned(), want, reply })?;
        answer_of(answer).await
    }
}

impl Batch for MeetGroups {
    type Job = GroupJob;
    type State = ();
    const SPAN: &'static str = "look-up of groups";
    const OVERLOADED: &'static str = "too many new groups at once";

    fn state(&self) {}

    fn weight(_: &GroupJob) -> usize {
        1
    }

    async fn run(&self, (): &mut (), jobs: Vec<GroupJob>) -> Vec<GroupJob> {
        let mut alike: Vec<Vec<GroupJob>> = Vec::new();
        let mut places: HashMap<String, Vec<usize>> = HashMap::new();
        for job in jobs {
            let places = places.entry(job.name.clone()).or_default();
            let same =
                places.iter().copied().find(|nth| alike[*nth].first().is_some_and(|first| first.want == job.want));
            match same {
                Some(nth) => alike[nth].push(job),
                None => {
                    places.push(alike.len());
                    alike.push(vec![job]);
                }
            }
        }
        stream::iter(alike).for_each_concurrent(STATEMENTS, |jobs| self.answer(jobs)).await;
        Vec::new()
    }
}

impl MeetGroups {
    /// Answers jobs that want the same of groups of one name.
    async fn answer(&self, jobs: Vec<GroupJob>) {
        match self.meet(&jobs).await {
            Ok(met) => {
                for job in jobs {
                    let _ = job.reply.send(Ok(met.get(&job.queue).copied()));
                }
            }
            Err(error) => {
                let alone = async |job| {
                    let met = self.meet(std::slice::from_ref(&job)).await;
                    (job, met)
                };
                answer_failed(error, jobs, alone, |job, met| {
                    let _ = job.reply.send(met.map(|met| met.get(&job.queue).copied()));
                })
                .await;
            }
        }
    }

    async fn meet(&self, jobs: &[GroupJob]) -> StoreResult<HashMap<QueueId, GroupRow>> {
        let Some(GroupJob { name, want, .. }) = jobs.first() else { return Ok(HashMap::new()) };
        let mut queues: Vec<QueueId> = jobs.iter().map(|job| job.queue).collect();
        queues.sort_unstable();
        queues.dedup();
        let mut met: HashMap<QueueId, GroupRow> = self.store.find_groups(&queues, name).await?.into_iter().collect();
        match *want {
            Want::Registered(start, conflation) => {
                queues.retain(|queue| !met.get(queue).is_some_and(|row| row.registered));
                if !queues.is_empty() {
                    met.extend(self.store.register_groups(&queues, name, start, conflation).await?);
                    // A queue that is gone has no answer, whatever was read before.
                    met.retain(|_, row| row.registered);
                }
            }
            Want::Row => {
                queues.retain(|queue| !met.contains_key(queue));
                if !queues.is_empty() {
                    met.extend(self.store.create_groups(&queues, name).await?);
                }
            }
        }
        Ok(met)
    }
}
