//! The domain: actors, decisions, policies. It knows no HTTP and no SQL.

pub mod ack;
pub mod ack_decision;
pub mod activity;
mod age_walk;
pub mod analytics;
pub mod append;
pub mod arbiters;
pub mod autopilot;
pub mod claim;
pub mod claim_fusion;
pub mod coalesce;
pub mod configure;
pub mod contact;
pub mod dead_letters;
pub mod dedup;
mod dedup_ids;
pub mod delivery;
pub mod directory;
pub mod discovery;
pub mod encryption;
pub mod error;
pub mod expiry;
pub mod feed;
pub mod figures;
pub mod fusion;
pub mod fusion_batch;
pub mod grants;
pub mod group;
pub mod group_admin;
pub mod group_list;
pub mod hearing;
pub mod inspection;
pub mod label_news;
pub mod lease;
pub mod lease_order;
pub mod maintenance;
pub mod message_list;
pub mod meter;
pub mod minutes;
pub mod parking;
pub mod partition;
pub mod peer_report;
pub mod peer_words;
pub mod peers;
pub mod persistent;
pub mod pop;
pub mod pop_call;
mod pop_discovery;
pub mod pop_request;
pub mod push;
pub mod push_flush;
pub mod push_fusion;
pub mod push_spool;
pub mod queue;
pub mod reads;
pub mod ready;
pub mod ready_group;
pub mod ready_walk;
pub mod resolver;
pub mod retention;
pub mod retention_report;
pub mod segment;
pub mod segment_cache;
pub mod settings;
pub mod spool;
pub mod statistics;
mod step_size;
pub mod sweep_width;
mod switch_rounds;
pub mod traces;
pub mod transaction;
pub mod waiter;
pub mod watched_queues;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::ids::{GroupId, LeaseId, PartitionId};
use crate::store::Store;
use ack::{AckAnswer, AckItem, AckPipeline};
use activity::Activity;
use append::Writing;
use autopilot::Autopilot;
use claim_fusion::ClaimFusion;
use configure::ConfigureRequest;
use contact::{GroupContacts, QueueContacts};
use dead_letters::DeadLetters;
use dedup::DedupBudget;
use discovery::Discovery;
use encryption::Encryption;
use error::{BrokerError, BrokerResult};
pub use figures::Figures;
use grants::Grants;
use group::GroupDirectory;
use group_admin::{GroupAdmin, GroupMemory};
use group_list::GroupList;
use inspection::Inspection;
use maintenance::Maintenance;
use parking::Parking;
use peers::Peers;
use pop::{PopPath, Popped};
use pop_call::PopCall;
use push::{PushItem, PushPath, PushResult};
use push_fusion::{PushFusion, PushShard};
use queue::{Queue, QueueDirectory};
use reads::{Reads, SharedReads};
use ready::ReadyIndex;
use ready_walk::ReadyWalks;
use retention::Retention;
use segment_cache::SegmentCache;
use settings::BrokerSettings;
use spool::Spool;
use spool::drain::Drain;
use statistics::Statistics;
use transaction::lane::{Lane, Lanes};
use transaction::{Bundle, Committed, Refusal, TransactionPath};

/// The only door that HTTP may use. A cheap clone; every method is a short delegation.
#[derive(Clone, Debug)]
pub struct Broker {
    store: Store,
    queues: QueueDirectory,
    memory: GroupMemory,
    group_admin: GroupAdmin,
    group_list: GroupList,
    ready: ReadyIndex,
    peers: Peers,
    push: PushPath,
    pop: PopPath,
    ack: AckPipeline,
    dead_letters: DeadLetters,
    transactions: TransactionPath,
    dedup: Arc<DedupBudget>,
    encryption: Encryption,
    activity: Arc<Activity>,
    inspection: Inspection,
    retention: Retention,
    maintenance: Maintenance,
    drain: Drain,
}

/// Outcome of a lease extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Rows extended.
    pub renewed: i64,
    /// The earliest expiry among them.
    pub expires_at: Option<DateTime<Utc>>,
}

impl Broker {
    /// Puts the paths together over an open store. `stop` ends the push shards and answers parked pops.
    pub fn start(store: Store, settings: BrokerSettings, spool: Spool, stop: CancellationToken) -> Broker {
        let queues = QueueDirectory::new(store.clone());
        let groups = GroupDirectory::new(&store);
        let ready = ReadyIndex::new(store.clone(), queues.clone());
        let encryption = Encryption::new(settings.encryption_key);
        let parking = Parking::new(settings.long_polls_max, settings.pop_waiting_max);
        let activity = Arc::new(Activity::new(settings.watch.clone()));
        let retention = Retention::new(store.clone(), activity.clone(), settings.retention.clone());
        let cache = SegmentCache::new(settings.segment_cache_bytes_max, store.generation().clone());
        let released = {
            let ready = ready.clone();
            move |partition: PartitionId, group: GroupId, release| ready.released(group, partition, release)
        };
        let ack = AckPipeline::start(store.clone(), settings.ack.clone(), Arc::new(released), activity.clone());
        let memory =
            GroupMemory { groups: groups.clone(), ready: ready.clone(), ack: ack.clone(), activity: activity.clone() };
        let name = settings.name.clone();
        let walks = ReadyWalks::new(ready.clone());
        let peers = Peers::new(name, store.clone(), queues.clone(), memory.clone(), parking.clone(), walks);
        let group_list = GroupList::new(store.clone());
        let group_admin = GroupAdmin::new(store.clone(), memory.clone(), peers.clone());
        let dedup = DedupBudget::new(settings.dedup_bytes_max);
        let writing = Writing { zstd_level: settings.zstd_level, cache: cache.clone(), dedup: dedup.clone() };
        let fusion = PushFusion::new(&store, &ready, &peers, &writing, &settings);
        let dead_letters = DeadLetters::new(
            store.clone(),
            queues.clone(),
            fusion.clone(),
            encryption.clone(),
            spool.clone(),
            activity.clone(),
        );
        let push = PushPath::new(queues.clone(), fusion.clone(), encryption.clone(), spool.clone());
        let maintenance = Maintenance::new(store.clone(), spool.clone(), peers.clone());
        let drain = Drain {
            spool: spool.clone(),
            store: store.clone(),
            queues: queues.clone(),
            ready: ready.clone(),
            peers: peers.clone(),
            activity: activity.clone(),
            encryption: encryption.clone(),
            zstd_level: settings.zstd_level,
        };
        let statistics = Statistics::new(store.clone(), activity.clone(), settings.statistics);
        let inspection = Inspection::new(store.clone(), statistics, settings.statistics.safe_floor_ms);
        let lane = Lane {
            store: store.clone(),
            ready: ready.clone(),
            peers: peers.clone(),
            ack: ack.clone(),
            activity: activity.clone(),
            writing,
        };
        let lanes = lane.intake(&settings.transaction);
        let transactions = TransactionPath::new(
            store.clone(),
            queues.clone(),
            encryption.clone(),
            fusion,
            ack.search(),
            spool.clone(),
            lanes,
        );
        let discovery = Discovery::new(store.clone(), queues.clone(), groups.clone(), ready.clone());
        let pop = PopPath {
            store: store.clone(),
            queues: queues.clone(),
            groups,
            ready: ready.clone(),
            grants: Grants::new(ack.clone()),
            autopilot: Autopilot::new(settings.autopilot),
            discovery,
            parking,
            claim_fusion: ClaimFusion::over(&store, settings.pop_workers, settings.pop_waiting_max),
            reads: Reads::new(&store, cache, settings.pop_workers, settings.pop_waiting_max),
            claims: Arc::new(Semaphore::new(settings.pop_claims_max)),
            stop,
            settings: Arc::new(settings),
        };
        Broker {
            store,
            queues,
            memory,
            group_admin,
            group_list,
            ready,
            peers,
            push,
            pop,
            ack,
            dead_letters,
            transactions,
            dedup,
            encryption,
            activity,
            inspection,
            retention,
            maintenance,
            drain,
        }
    }

    /// `POST /api/v1/push`.
    pub async fn push(&self, items: &[PushItem<'_>], producer_sub: Option<&str>) -> BrokerResult<Vec<PushResult>> {
        meter::meter().push_asked(items);
        let results = self.push.push(items, producer_sub).await;
        meter::meter().push_answered(results.as_deref().ok(), items.len());
        if let Ok(results) = &results {
            self.note_push(items, results);
        }
        results
    }

    /// The three pop routes: answered, or parked until [`PopCall::due`].
    pub async fn pop(&self, call: &mut PopCall) -> BrokerResult<Option<Popped>> {
        let popped = match self.pop.advance(call).await {
            Ok(None) => return Ok(None),
            Ok(Some(popped)) => Ok(popped),
            Err(error) => Err(error),
        };
        meter::meter().popped(&call.request, &popped);
        self.note_pop(&call.request, &popped);
        popped.map(Some)
    }

    /// Resolves when a parked pop should look again, or is to be refused because pops are paused.
    pub async fn pop_due(&self, call: &PopCall) {
        tokio::select! {
            () = call.due() => {}
            () = self.maintenance().pops_paused() => {}
        }
    }

    /// Both ack routes: one answer per item, in order; no failure is the call's.
    pub async fn ack(&self, group: &str, items: Vec<AckItem>) -> Vec<AckAnswer> {
        meter::meter().ack_requests.increment(1);
        meter::meter().ack_messages.increment(items.len() as u64);
        self.ack.ack(group, items).await
    }

    /// `POST /api/v1/transaction`: everything in the bundle commits, or nothing (I10).
    pub async fn transact(
        &self,
        bundle: &Bundle<'_>,
        producer_sub: Option<&str>,
    ) -> BrokerResult<Result<Committed, Refusal>> {
        self.transactions.transact(bundle, producer_sub).await
    }

    /// The claims of leasing pops, for the background tasks that run them.
    pub fn claims(&self) -> &ClaimFusion {
        &self.pop.claim_fusion
    }

    /// The reads of what was claimed, likewise.
    pub fn reads(&self) -> &SharedReads {
        self.pop.reads.shared()
    }

    /// First contacts of queues, likewise.
    pub fn queue_contacts(&self) -> &QueueContacts {
        self.queues.contacts()
    }

    /// First contacts of groups, likewise.
    pub fn group_contacts(&self) -> &GroupContacts {
        self.pop.groups.contacts()
    }

    /// The shards of the push path, likewise.
    pub fn push_shards(&self) -> &[PushShard] {
        self.push.shards()
    }

    /// The lanes of the transaction path, likewise.
    pub fn transaction_lanes(&self) -> &Lanes {
        self.transactions.lanes()
    }

    /// `POST /api/v1/lease/:leaseId/extend`. `lease` is whatever text the client sent.
    pub async fn extend_lease(&self, lease: &str, seconds: i64) -> BrokerResult<Extension> {
        let Some(lease) = LeaseId::parse(lease) else {
            return Ok(Extension { renewed: 0, expires_at: None });
        };
        let seconds = seconds.clamp(1, crate::store::cursors::LEASE_SECONDS_MAX);
        let extended = self.store.extend_lease(lease, seconds).await?;
        if extended.renewed > 0 {
            let expires = std::time::Instant::now() + std::time::Duration::from_secs(seconds.unsigned_abs());
            self.ack.extended(lease, &extended.partitions, expires);
        }
        Ok(Extension { renewed: extended.renewed, expires_at: extended.expires_at })
    }

    /// `POST /api/v1/configure`.
    pub async fn configure(&self, request: &ConfigureRequest) -> BrokerResult<Queue> {
        // Parsing has applied the request to nothing; applied to what the queue has, a stored value may still refuse it.
        let configured = self.queues.configure(&request.queue, |present| request.apply(present)).await?;
        let queue = configured.map_err(|error| BrokerError::Invalid(error.to_string()))?;
        self.ready.reconsider(queue.id);
        self.peers.configured(&queue.name);
        Ok(queue)
    }

    /// `DELETE /api/v1/resources/queues/:queue`: whether it existed.
    pub async fn delete_queue(&self, name: &str) -> BrokerResult<bool> {
        let deleted = self.store.delete_queue(name).await?;
        for id in [self.queues.forget(name), deleted].into_iter().flatten() {
            self.memory.forget_queue(id);
        }
        if let Some(id) = deleted {
            self.peers.deleted(name, id);
        }
        Ok(deleted.is_some())
    }

    /// Finishes the ack flushes under way and ends the actors. Call it when no more requests come.
    pub async fn shutdown(&self) {
        self.ack.shutdown().await;
    }

    /// A real round trip to PostgreSQL.
    pub async fn ping(&self) -> BrokerResult<()> {
        self.store.ping().await.map_err(BrokerError::from)
    }

    /// What a stored payload reads as: envelopes are opened if the key fits.
    pub fn open_payload(&self, stored: &[u8]) -> Option<Vec<u8>> {
        self.encryption.open(stored)
    }

    /// The ids of this database on the wire.
    pub fn ids(&self) -> crate::ids::IdSpace {
        self.store.ids()
    }

    /// How long a pop waits that names no timeout.
    pub fn pop_timeout_default(&self) -> std::time::Duration {
        self.pop.settings.pop_timeout_default
    }

    /// What an operator may do to consumer groups.
    pub fn group_admin(&self) -> &GroupAdmin {
        &self.group_admin
    }

    /// Listings of consumer groups.
    pub fn group_list(&self) -> &GroupList {
        &self.group_list
    }

    /// The dead letters.
    pub fn dead_letters(&self) -> &DeadLetters {
        &self.dead_letters
    }

    /// The ready index, for the background tasks that feed it.
    pub fn ready(&self) -> &ReadyIndex {
        &self.ready
    }

    /// Queues by label, for the background task that keeps up with them.
    pub fn discovery(&self) -> &Discovery {
        &self.pop.discovery
    }

    /// The link to other brokers, for its background tasks.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The read side of the admin routes.
    pub fn inspection(&self) -> &Inspection {
        &self.inspection
    }

    /// The maintenance modes.
    pub fn maintenance(&self) -> &Maintenance {
        &self.maintenance
    }

    /// What stores the spool's records.
    pub fn drain(&self) -> &Drain {
        &self.drain
    }

    /// What deletes in the background.
    pub fn retention(&self) -> &Retention {
        &self.retention
    }

    /// One pass of what is cleaned up in the background.
    pub async fn sweep(&self) -> BrokerResult<()> {
        const ROWS_MAX: i64 = 1000;
        self.pop.discovery.trim_idle();
        self.ready.trim_idle_groups();
        while self.store.purge_leases(ROWS_MAX).await? == ROWS_MAX as u64 {}
        Ok(())
    }
}
