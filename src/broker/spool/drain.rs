//! From disk to PostgreSQL: oldest first, a partition's records in order, each exactly once.
//!
//! The transaction that stores records also writes how far the spool has been stored in that partition. A broker that
//! dies before it has cut its file finds there what it need not store again, with or without deduplication.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::record::{Record, Sealing};
use super::writer::{Order, sync_dir};
use super::{Spool, files};
use crate::broker::activity::Activity;
use crate::broker::append::{self, Making, Segments};
use crate::broker::encryption::Encryption;
use crate::broker::error::BrokerResult;
use crate::broker::peers::Peers;
use crate::broker::push::Packed;
use crate::broker::push_flush::Appended;
use crate::broker::queue::{Queue, QueueDirectory};
use crate::broker::ready::ReadyIndex;
use crate::broker::segment::{Frame, Frames};
use crate::ids::{Offset, PartitionId, TransactionHash};
use crate::metrics::SPOOL_RECORDS;
use crate::shutdown::count_pass;
use crate::store::messages::{AppendTx, Opening};
use crate::store::partitions::{LockedPartition, PartitionKey};
use crate::store::{Store, StoreError, StoreResult};

/// Pause between two looks at the spool.
const EVERY: Duration = Duration::from_millis(100);
/// Pause after failures in a row.
const AFTER_FAILURES: Duration = Duration::from_secs(5);
/// Failures in a row before that pause.
const FAILURES_MAX: u32 = 10;
/// Times that records are tried which PostgreSQL refuses.
const ATTEMPTS_MAX: u32 = 5;
/// Records of one transaction.
const BATCH: usize = 100;
/// How far back a commit of unknown outcome is looked for, beside the record's own age.
const PROBE_SECONDS: i64 = 900;

/// Stores what the spool holds.
#[derive(Clone, Debug)]
pub struct Drain {
    /// The spool.
    pub spool: Spool,
    /// The database.
    pub store: Store,
    /// Queues by name.
    pub queues: QueueDirectory,
    /// Whom to tell of messages here.
    pub ready: ReadyIndex,
    /// Whom to tell elsewhere.
    pub peers: Peers,
    /// Hears of what was stored.
    pub activity: Arc<Activity>,
    /// Payload encryption.
    pub encryption: Encryption,
    /// zstd level of segments.
    pub zstd_level: i32,
}

/// Why records were not stored.
enum Refusal {
    /// The cause passes: they stay.
    Passing(String),
    /// PostgreSQL, or the records themselves, will not have it.
    Permanent(String),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        // What lies in the data itself. Anything else (a standby, a missing right, a full disk) is somebody's to mend.
        let of_the_data = match &error {
            StoreError::Refused { sqlstate, .. } => ["22", "23", "54"].iter().any(|class| sqlstate.starts_with(class)),
            StoreError::Corrupt { .. } => true,
            StoreError::Unavailable(_) | StoreError::OutcomeUnknown { .. } | StoreError::Overtaken => false,
        };
        if of_the_data { Refusal::Permanent(error.to_string()) } else { Refusal::Passing(error.to_string()) }
    }
}

impl Drain {
    /// Works until `stop`.
    pub async fn run(&self, stop: &CancellationToken) -> BrokerResult<()> {
        let mut done: HashSet<i64> = HashSet::new();
        let mut attempts: HashMap<i64, u32> = HashMap::new();
        let mut failures = 0;
        let mut pause = EVERY;
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            pause = EVERY;
            if self.spool.is_away() && self.store.ping().await.is_ok() {
                self.spool.set_away(false);
            }
            if self.spool.maintenance() || self.spool.pending().records == 0 {
                continue;
            }
            let cycle = self.cycle(&mut done, &mut attempts, stop).await;
            count_pass("spool_drain", cycle.is_ok());
            match cycle {
                Ok(()) => failures = 0,
                Err(error) => {
                    tracing::warn!(error, "the spool waits for the database");
                    failures += 1;
                    if failures >= FAILURES_MAX {
                        (failures, pause) = (0, AFTER_FAILURES);
                    }
                }
            }
        }
        Ok(())
    }

    /// Drains every closed file, oldest first.
    async fn cycle(
        &self,
        done: &mut HashSet<i64>,
        attempts: &mut HashMap<i64, u32>,
        stop: &CancellationToken,
    ) -> Result<(), String> {
        let (reply, finalised) = oneshot::channel();
        if self.spool.inner.orders.try_send(Order::Finalise(reply)).is_ok() {
            let _ = finalised.await;
        }
        for path in files(&self.spool.inner.dir, "buf") {
            if !self.file(&path, done, attempts, stop).await? {
                return Ok(());
            }
            std::fs::remove_file(&path).and_then(|()| sync_dir(&self.spool.inner.dir)).map_err(|e| e.to_string())?;
            done.clear();
            attempts.clear();
        }
        if self.spool.pending().records == 0
            && let Err(error) = self.store.forget_spool(self.spool.inner.id).await
        {
            tracing::debug!(%error, "marks of a drained spool stay");
        }
        Ok(())
    }

    /// Drains one file; `false`: something of it has to wait.
    async fn file(
        &self,
        path: &Path,
        done: &mut HashSet<i64>,
        attempts: &mut HashMap<i64, u32>,
        stop: &CancellationToken,
    ) -> Result<bool, String> {
        let bytes = tokio::fs::read(path).await.map_err(|error| error.to_string())?;
        let records = Record::decode_all(&bytes);
        drop(bytes);
        let mut held: HashSet<(String, String)> = HashSet::new();
        for batch in records.chunks(BATCH) {
            let mut groups: BTreeMap<(String, String), Vec<&Record>> = BTreeMap::new();
            for record in batch.iter().filter(|record| !done.contains(&record.header.position)) {
                let key = (record.header.queue.clone(), record.header.partition.clone());
                groups.entry(key).or_default().push(record);
            }
            for (key, records) in groups {
                if stop.is_cancelled() || self.spool.maintenance() {
                    return Ok(false);
                }
                // Behind records that wait, in order.
                if held.contains(&key) {
                    continue;
                }
                let Some(first) = records.first().map(|record| record.header.position) else { continue };
                match self.group(&key.0, &key.1, &records).await {
                    Ok(()) => self.spool.set_away(false),
                    Err(Refusal::Passing(error)) => {
                        self.spool.set_away(true);
                        return Err(error);
                    }
                    Err(Refusal::Permanent(error)) => {
                        let attempt = attempts.entry(first).or_default();
                        *attempt += 1;
                        tracing::error!(error, attempt, max_attempts = ATTEMPTS_MAX, "drain failed (permanent)");
                        if *attempt < ATTEMPTS_MAX {
                            held.insert(key);
                            continue;
                        }
                        self.quarantine(path, &records)?;
                    }
                }
                for record in records {
                    done.insert(record.header.position);
                    self.spool.pending().remove(&key.0, &key.1, record.payload.len() as u64);
                }
            }
        }
        Ok(held.is_empty())
    }

    /// Stores records of one partition.
    async fn group(&self, queue: &str, partition: &str, records: &[&Record]) -> Result<(), Refusal> {
        let found = self.queues.find_or_create(&[queue]).await;
        let found = found.map_err(|error| Refusal::Passing(error.to_string()))?;
        let Some(options) = found.get(queue) else { return Err(Refusal::Passing("the queue is being deleted".into())) };
        let packed = self.pack(options, records).map_err(Refusal::Permanent)?;
        let key = PartitionKey { queue: options.id, name: partition.to_owned() };
        if append::until_made!(|making| self.append(options, &key, records, &packed, making))? {
            return Ok(());
        }
        self.queues.forget(queue);
        Err(Refusal::Passing("the queue is being deleted".into()))
    }

    /// One transaction; `false`: the queue is gone.
    async fn append(
        &self,
        options: &Queue,
        key: &PartitionKey,
        records: &[&Record],
        packed: &Packed,
        making: Making,
    ) -> StoreResult<bool> {
        let (mut tx, locked) = append::lock_all(&self.store, std::slice::from_ref(key), Opening::PUSH, making).await?;
        let Some(locked) = locked.get(key) else { return Ok(false) };
        let mark = tx.spool_mark(self.spool.inner.id, locked.id).await?;
        let stored = self.stored(&mut tx, locked, options, records, packed).await?;
        let mut segments = Segments::new(locked.id, self.zstd_level);
        let mut next = locked.last_offset;
        let mut duplicates = 0;
        for (index, record) in records.iter().enumerate() {
            if record.header.position <= mark {
                continue;
            }
            if stored.get(index) == Some(&true) {
                duplicates += 1;
                continue;
            }
            next = next.next();
            segments.add(next, packed, index);
        }
        let segments = segments.finish();
        if !segments.is_empty() {
            tx.insert_segments(&segments).await?;
        }
        let last = records.iter().map(|record| record.header.position).max().unwrap_or(mark);
        tx.set_spool_mark(self.spool.inner.id, locked.id, last.max(mark)).await?;
        tx.commit().await?;
        let landed = (next.0 - locked.last_offset.0).unsigned_abs();
        metrics::counter!(SPOOL_RECORDS, "result" => "stored").increment(landed);
        metrics::counter!(SPOOL_RECORDS, "result" => "duplicate").increment(duplicates);
        if landed > 0 {
            let appended =
                [Appended { queue: options.id, partition: locked.id, is_new: locked.last_offset == Offset::NONE }];
            self.ready.appended(&appended);
            self.peers.landed(&appended);
            self.activity.pushed(options.id, landed);
        }
        Ok(true)
    }

    fn pack(&self, queue: &Queue, records: &[&Record]) -> Result<Packed, String> {
        let encrypt = queue.options.encryption_enabled;
        let mut packed = Packed::default();
        for record in records {
            let header = &record.header;
            let key = match header.sealing {
                Sealing::Plain => None,
                Sealing::Key => Some(&self.encryption),
                Sealing::Local => Some(&self.spool.inner.local),
            };
            let opened =
                key.map(|key| key.open(&record.payload).ok_or("the spooled payload does not open")).transpose()?;
            let payload = opened.as_deref().unwrap_or(&record.payload);
            let sealed = self.encryption.seal_if(encrypt, payload)?;
            let frame = Frame {
                id: header.id,
                transaction_id: header.transaction_id.as_deref(),
                trace_id: None,
                producer_sub: header.producer_sub.as_deref(),
                encrypted: encrypt,
                payload: sealed.as_deref().unwrap_or(payload),
            };
            packed.add(&frame, frame.transaction_hash());
        }
        Ok(packed)
    }

    /// Per record, whether it is not to be stored: inside the window, as of when it was accepted, its key is stored or came
    /// earlier here; or a commit of unknown outcome has stored it.
    async fn stored(
        &self,
        tx: &mut AppendTx,
        partition: &LockedPartition,
        queue: &Queue,
        records: &[&Record],
        packed: &Packed,
    ) -> StoreResult<Vec<bool>> {
        let window = i64::from(queue.options.dedup_window_seconds);
        let now = chrono::Utc::now().timestamp_millis();
        let oldest = records.iter().map(|record| record.header.accepted_ms).min().unwrap_or(now);
        let age = (now - oldest).max(0) / 1000 + 1;
        let probes = records.iter().any(|record| record.header.probe);
        let back = if window > 0 { window + age } else { 0 }.max(if probes { PROBE_SECONDS + age } else { 0 });
        let mut known: HashMap<TransactionHash, Vec<Offset>> = HashMap::new();
        if back > 0 && partition.last_offset > Offset::NONE {
            let back = i32::try_from(back).unwrap_or(i32::MAX);
            for run in tx.hashes_within(&[(partition.id, Offset(0), back)]).await? {
                for (offset, hash) in (run.base_offset.0..).zip(run.hashes) {
                    known.entry(hash).or_default().push(Offset(offset));
                }
            }
        }
        let mut seen: HashSet<TransactionHash> = HashSet::new();
        let mut stored = Vec::with_capacity(records.len());
        for (record, hash) in records.iter().zip(&packed.hashes) {
            let places = known.get(hash);
            let is_stored = if window > 0 {
                places.is_some() || !seen.insert(*hash)
            } else if record.header.probe {
                holds_id(tx, partition.id, places.map_or(&[][..], Vec::as_slice), record.header.id).await?
            } else {
                false
            };
            stored.push(is_stored);
        }
        Ok(stored)
    }

    /// Puts records aside that nobody can store. They are never read again, and never deleted.
    fn quarantine(&self, path: &Path, records: &[&Record]) -> Result<(), String> {
        let dir = self.spool.inner.dir.join("failed");
        let aside = dir.join(path.file_name().map_or_else(|| PathBuf::from("records.buf"), PathBuf::from));
        let mut bytes = Vec::new();
        for record in records {
            record.encode(&mut bytes)?;
        }
        let write = || -> std::io::Result<()> {
            use std::io::Write as _;
            std::fs::create_dir_all(&dir)?;
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&aside)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            sync_dir(&dir)
        };
        write().map_err(|error| error.to_string())?;
        tracing::error!(records = records.len(), file = %aside.display(), "quarantined poison spool file");
        metrics::counter!(SPOOL_RECORDS, "result" => "quarantined").increment(records.len() as u64);
        Ok(())
    }
}

/// Whether one of these offsets holds the message with this id.
async fn holds_id(tx: &mut AppendTx, partition: PartitionId, places: &[Offset], id: uuid::Uuid) -> StoreResult<bool> {
    for place in places {
        let Some(row) = tx.segment_at(partition, *place).await? else { continue };
        let Ok(frames) = Frames::open(&row.frames) else { continue };
        if frames.iter().flatten().any(|frame| frame.id == id) {
            return Ok(true);
        }
    }
    Ok(false)
}
