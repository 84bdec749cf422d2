//! Transactions: all pushes and acks of a bundle commit, or none (I10; `spec/transactions-kv-timers.md` §2).
//!
//! ```text
//! transact ── prepare ── intake ── lane: one database transaction for many bundles ── answer
//!                │          ▲         lock · read · decide each in memory · write · COMMIT
//!                │          └── search (ids that are not in the pages a flush reads; locks nothing)
//!                └── refused without the database
//! ```
//! A bundle that is refused leaves nothing, and those that share its flush do not notice. Nothing is ever spooled, and
//! nothing overtakes what is.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::oneshot;
use uuid::Uuid;

pub mod bundle;
pub mod decide;
pub mod flush;
pub mod lane;
pub mod meter;
pub mod settings;

pub use bundle::{Bundle, BundleAck, BundlePushed, Committed, Refusal};
pub use settings::TransactionSettings;

use super::ack::search::Search;
use super::ack::{AckItem, AckTarget, LeaseClaim};
use super::encryption::Encryption;
use super::error::{BrokerError, BrokerResult};
use super::push::{distinct_queues, group_items, pack_group};
use super::push_fusion::PushFusion;
use super::queue::QueueDirectory;
use super::resolver::Resolver;
use super::spool::Spool;
use crate::ids::{NAME_BYTES_MAX, PartitionId};
use crate::store::partitions::PartitionKey;
use crate::store::{Store, StoreError};
use bundle::{AckPart, Fence, Job, PushPart, Searched, Verdict, Waiting};
use lane::Lanes;
use meter::meter;

/// Times that a bundle follows a queue that is deleted and made again under it.
const QUEUE_GONE_RETRIES: usize = 3;
/// Times that a bundle searches again because its cursor moved meanwhile.
const SEARCHES_MAX: usize = 32;
/// What admission counts for an ack or a pushed item, beside its payload.
const OPERATION_BYTES: usize = 96;

/// The transaction path of one broker.
#[derive(Clone, Debug)]
pub struct TransactionPath {
    store: Store,
    queues: QueueDirectory,
    encryption: Encryption,
    /// Admission is shared with pushes: both hold request bodies.
    fusion: PushFusion,
    search: Search,
    spool: Spool,
    lanes: Lanes,
}

impl TransactionPath {
    /// Puts the path together; its lanes are run by the supervisor.
    pub fn new(
        store: Store,
        queues: QueueDirectory,
        encryption: Encryption,
        fusion: PushFusion,
        search: Search,
        spool: Spool,
        lanes: Lanes,
    ) -> TransactionPath {
        TransactionPath { store, queues, encryption, fusion, search, spool, lanes }
    }

    /// The lanes to be run.
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Carries a bundle out, whole or not at all. It has at least one operation.
    ///
    /// # Errors
    /// `Overloaded`, `NoDatabase`, `Stopping`: nothing was done. `OutcomeUnknown`: nobody can tell.
    pub async fn transact(
        &self,
        bundle: &Bundle<'_>,
        producer_sub: Option<&str>,
    ) -> BrokerResult<Result<Committed, Refusal>> {
        meter().pushes.increment(bundle.pushes.len() as u64);
        meter().acks.increment(bundle.acks.len() as u64);
        let done = self.run(bundle, producer_sub).await;
        meter().answered(match &done {
            Ok(Ok(_)) => "committed",
            Ok(Err(refusal)) => refusal.reason(),
            Err(BrokerError::Overloaded { .. }) => "overloaded",
            Err(BrokerError::OutcomeUnknown) => "unknown",
            Err(_) => "no_database",
        });
        done
    }

    async fn run(&self, bundle: &Bundle<'_>, producer_sub: Option<&str>) -> BrokerResult<Result<Committed, Refusal>> {
        let operations = bundle.pushes.len() + bundle.acks.len();
        let payloads: usize = bundle.pushes.iter().map(|item| item.payload.len()).sum();
        let _admitted = self.fusion.admit(payloads + operations * OPERATION_BYTES)?;
        let pushed: Vec<(&str, &str)> = bundle.pushes.iter().map(|item| (item.queue, item.partition)).collect();
        self.spool.let_pass(&pushed).await?;
        let minted: Vec<Uuid> = bundle.pushes.iter().map(|_| Uuid::now_v7()).collect();
        for _ in 0..=QUEUE_GONE_RETRIES {
            let mut job = match self.prepare(bundle, &minted, producer_sub).await? {
                Ok(job) => job,
                Err(refusal) => return Ok(Err(refusal)),
            };
            for _ in 0..SEARCHES_MAX {
                let (back, verdict) = self.submit(job).await?;
                job = back;
                match verdict {
                    Verdict::Committed(parts) => return Ok(Ok(committed(bundle, &minted, &job, parts))),
                    Verdict::Refused(refusal) => return Ok(Err(refusal)),
                    Verdict::NoDatabase => return Err(StoreError::no_answer("transaction").into()),
                    Verdict::Unknown => return Err(BrokerError::OutcomeUnknown),
                    Verdict::QueueGone => break,
                    Verdict::Search(parts) => {
                        meter().searches.increment(1);
                        for nth in parts {
                            if let Some(part) = job.acks.get_mut(nth)
                                && let Err(error) = self.find(part).await
                            {
                                return failed(error);
                            }
                        }
                    }
                }
            }
            for part in &job.pushes {
                self.queues.forget(&part.queue);
            }
        }
        Ok(Err(Refusal::Database("QTXN too much else happens to the same rows; transaction rolled back".into())))
    }

    /// Resolves queues, packs messages, groups acks. What can never commit is refused here.
    async fn prepare(
        &self,
        bundle: &Bundle<'_>,
        minted: &[Uuid],
        producer_sub: Option<&str>,
    ) -> BrokerResult<Result<Job, Refusal>> {
        let (acks, doomed) = self.ack_parts(bundle);
        let (groups, _) = group_items(&bundle.pushes);
        if groups.is_empty()
            && let Some(refusal) = doomed
        {
            return Ok(Err(refusal));
        }
        let queues = match self.queues.find_or_create(&distinct_queues(&groups)).await {
            Ok(queues) => queues,
            Err(BrokerError::Failed(text)) => return Ok(Err(Refusal::Database(text.into()))),
            Err(error) => return Err(error),
        };
        let mut pushes = Vec::with_capacity(groups.len());
        for group in &groups {
            let Some(queue) = queues.get(group.queue) else {
                return Ok(Err(Refusal::Database("QTXN a queue is being deleted; transaction rolled back".into())));
            };
            match pack_group(&bundle.pushes, minted, group, queue, &self.encryption, producer_sub) {
                Err(text) => return Ok(Err(Refusal::Database(text))),
                Ok(packed) => pushes.push(PushPart {
                    key: PartitionKey { queue: queue.id, name: group.partition.to_owned() },
                    queue: queue.name.as_str().into(),
                    window_seconds: queue.options.dedup_window_seconds,
                    packed,
                }),
            }
        }
        Ok(Ok(Job { pushes, acks, doomed }))
    }

    /// The acks by cursor, and the first reason why one of them can never be carried out.
    fn ack_parts(&self, bundle: &Bundle<'_>) -> (Vec<AckPart>, Option<Refusal>) {
        let named = named_leases(bundle);
        let mut doomed = None;
        let mut parts: BTreeMap<(PartitionId, &Arc<str>), AckPart> = BTreeMap::new();
        for (nth, BundleAck { group, item }) in bundle.acks.iter().enumerate() {
            let partition = match &item.target {
                AckTarget::NotUuid(_) => None,
                AckTarget::Partition(wire) => self.store.ids().partition_of(*wire),
            };
            let Some(partition) = partition else {
                doomed.get_or_insert(Refusal::UnknownPartition);
                continue;
            };
            if group.len() > NAME_BYTES_MAX || group.contains('\0') {
                doomed.get_or_insert(Refusal::ConsumerNotFound);
                continue;
            }
            let part = parts.entry((partition, group)).or_insert_with(|| AckPart {
                partition,
                group: group.clone(),
                fence: Fence::None,
                items: Vec::new(),
                places: Vec::new(),
                searched: None,
            });
            part.items.push(item.clone());
            part.places.push(nth);
        }
        let fenced = |mut part: AckPart| {
            part.fence = fence_of(&named, &part.items);
            part
        };
        (parts.into_values().map(fenced).collect(), doomed)
    }

    async fn submit(&self, job: Job) -> BrokerResult<(Job, Verdict)> {
        let (reply, verdict) = oneshot::channel();
        self.lanes.submit(Waiting { job, reply })?;
        // The lane went down with the bundle in hand, perhaps while it committed.
        verdict.await.map_err(|_| BrokerError::OutcomeUnknown)
    }

    /// Looks for the ids of a part wherever they may be, without a lock. What is found holds as long as the cursor
    /// stays where it is: stored hashes never change.
    async fn find(&self, part: &mut AckPart) -> Result<(), StoreError> {
        part.searched = None;
        let Some(read) = self.store.read_span(part.partition, &part.group, LeaseClaim::Absent).await? else {
            return Ok(());
        };
        let (mut resolver, slots) = Resolver::new(part.items.iter().map(|item| item.transaction));
        self.search.search_span(&mut resolver, part.partition, &read).await?;
        self.search.search_below(&mut resolver, part.partition, &read.row).await?;
        let (committed, batch_end, leased) = (read.row.committed, read.row.batch_end, read.row.leased());
        part.searched = Some(Searched { committed, batch_end, leased, resolver, slots });
        Ok(())
    }
}

fn failed(error: StoreError) -> BrokerResult<Result<Committed, Refusal>> {
    if error.is_connection() {
        return Err(error.into());
    }
    Ok(Err(Refusal::Database(error.message().into())))
}

/// Every lease that the request names anywhere, once.
fn named_leases(bundle: &Bundle<'_>) -> Arc<[LeaseClaim]> {
    let own = bundle.acks.iter().map(|ack| ack.item.lease).filter(|lease| *lease != LeaseClaim::Absent);
    distinct(bundle.hints.iter().copied().chain(own)).into()
}

fn fence_of(named: &Arc<[LeaseClaim]>, items: &[AckItem]) -> Fence {
    if named.is_empty() {
        return Fence::None;
    }
    let own = distinct(items.iter().map(|item| item.lease).filter(|lease| *lease != LeaseClaim::Absent));
    if own.is_empty() { Fence::Any(named.clone()) } else { Fence::All(own) }
}

fn distinct(claims: impl Iterator<Item = LeaseClaim>) -> Vec<LeaseClaim> {
    let mut seen = std::collections::HashSet::new();
    claims.filter(|claim| seen.insert(*claim)).collect()
}

fn committed(bundle: &Bundle<'_>, minted: &[Uuid], job: &Job, parts: Vec<Vec<bool>>) -> Committed {
    let (_, followers) = group_items(&bundle.pushes);
    let leaders: HashMap<usize, usize> = followers.into_iter().collect();
    let pushed = |(nth, own): (usize, &Uuid)| {
        let leader = leaders.get(&nth).and_then(|leader| minted.get(*leader));
        BundlePushed { message_id: *leader.unwrap_or(own), minted_id: *own, duplicate: leader.is_some() }
    };
    let mut dead_lettered = vec![false; bundle.acks.len()];
    for (part, flags) in job.acks.iter().zip(parts) {
        for (place, flag) in part.places.iter().zip(flags) {
            if let Some(slot) = dead_lettered.get_mut(*place) {
                *slot = flag;
            }
        }
    }
    Committed { pushes: minted.iter().enumerate().map(pushed).collect(), dead_lettered }
}
