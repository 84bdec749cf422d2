//! The disk spool: pushes that PostgreSQL cannot take now (`spec/push-pop.md` §2.9, README rulings 2 and 3).
//!
//! A message is answered `buffered` once its record is forced to disk. While this broker's spool holds records of a
//! partition, later pushes to it go behind them; `drain.rs` stores them in order, each once.

pub mod drain;
pub mod record;
mod writer;

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use uuid::Uuid;

use super::encryption::{Encryption, NO_KEY};
use super::error::{BrokerError, BrokerResult};
use record::{Header, Record, Sealing};
use writer::{Order, Writer};

/// Brokers that may be started over one directory.
const DIRECTORIES_MAX: usize = 64;
/// Orders that may wait for the writer; past it records are refused.
const ORDERS_MAX: usize = 4096;
/// How long a transaction or a replay waits for the drain to pass it.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks.
const DRAIN_LOOK_EVERY: Duration = Duration::from_millis(20);
/// What the directory's own file is called: the name of this spool among others.
const ID_FILE: &str = "spool.id";
/// Key for payloads whose queue is not known to this broker when it has no other key.
const KEY_FILE: &str = "spool.key";

/// Where the spool is, and how large it may become.
#[derive(Clone, Debug)]
pub struct SpoolSettings {
    /// Directory of this broker alone.
    pub dir: PathBuf,
    /// Bytes of payload past which nothing more is taken.
    pub bytes_max: u64,
    /// Records of one file.
    pub records_per_file: usize,
    /// AES-256 key of payload encryption.
    pub encryption_key: Option<[u8; 32]>,
}

/// A message on its way to disk.
#[derive(Clone, Copy, Debug)]
pub struct Spooled<'a> {
    /// Queue name.
    pub queue: &'a str,
    /// Partition name.
    pub partition: &'a str,
    /// What the producer gave.
    pub transaction_id: Option<&'a str>,
    /// Id that is answered.
    pub id: Uuid,
    /// JSON text as it was sent.
    pub payload: &'a [u8],
    /// Whether the queue encrypts; `None` = not known here.
    pub encrypts: Option<bool>,
    /// A commit of unknown outcome may have stored it.
    pub probe: bool,
}

/// Handle to the spool. A cheap clone.
#[derive(Clone, Debug)]
pub struct Spool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    id: Uuid,
    /// Keeps other brokers out of the directory.
    _lock: File,
    dir: PathBuf,
    bytes_max: u64,
    orders: crossbeam_channel::Sender<Order>,
    key: Encryption,
    local: Encryption,
    pending: Mutex<Pending>,
    maintenance: AtomicBool,
    away: AtomicBool,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Pending {
    by_partition: HashMap<(String, String), u64>,
    records: u64,
    bytes: u64,
}

/// What the status routes show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpoolFigures {
    /// Messages that wait to be stored.
    pub pending: u64,
    /// Messages that could not be spooled.
    pub failed: u64,
    /// Whether PostgreSQL took the last thing it was asked for.
    pub db_healthy: bool,
    /// Files of records that PostgreSQL refused for good.
    pub failed_files: u64,
    /// Their size.
    pub failed_bytes: u64,
}

impl Spool {
    /// Opens the directory, takes over what an earlier run left, and starts the writer. A directory that cannot be made is
    /// replaced by one under the system's temporary directory; one that cannot be written refuses each record.
    pub fn open(settings: &SpoolSettings) -> std::io::Result<Spool> {
        let dir = match std::fs::create_dir_all(&settings.dir) {
            Ok(()) => settings.dir.clone(),
            Err(error) => {
                let fallback = std::env::temp_dir().join(format!("regent-spool-{}", nix::unistd::geteuid()));
                tracing::warn!(%error, dir = %settings.dir.display(), fallback = %fallback.display(),
                    "spool: the directory cannot be made");
                std::fs::create_dir_all(&fallback)?;
                fallback
            }
        };
        let (dir, lock) = lock_one_of(&dir)?;
        for path in files(&dir, "tmp") {
            writer::finalise(&path)?;
        }
        let mut pending = Pending::default();
        let mut next = 0;
        for path in files(&dir, "buf") {
            for record in Record::decode_all(&std::fs::read(&path)?) {
                next = next.max(record.header.position + 1);
                pending.add(&record.header.queue, &record.header.partition, record.payload.len() as u64);
            }
        }
        // A spool that starts empty is a new one: marks of the old one say nothing about it.
        let known = std::fs::read_to_string(dir.join(ID_FILE)).ok().and_then(|text| Uuid::parse_str(text.trim()).ok());
        let id = known.filter(|_| pending.records > 0).unwrap_or_else(Uuid::new_v4);
        if let Err(error) = std::fs::write(dir.join(ID_FILE), id.to_string()).and_then(|()| writer::sync_dir(&dir)) {
            tracing::warn!(%error, dir = %dir.display(), "spool: the directory cannot be written");
        }
        if pending.records > 0 {
            tracing::info!(records = pending.records, dir = %dir.display(), "spool: records of an earlier run wait");
        }
        let local = match settings.encryption_key {
            Some(_) => None,
            None => local_key(&dir),
        };
        let (orders, received) = crossbeam_channel::bounded(ORDERS_MAX);
        let writer = Writer::new(dir.clone(), next, settings.records_per_file.max(1));
        std::thread::Builder::new().name("regent-spool".into()).spawn(move || writer.run(&received))?;
        let inner = Inner {
            id,
            _lock: lock,
            dir,
            bytes_max: settings.bytes_max,
            orders,
            key: Encryption::new(settings.encryption_key),
            local: Encryption::new(local),
            pending: Mutex::new(pending),
            maintenance: AtomicBool::new(false),
            away: AtomicBool::new(false),
            refused: AtomicU64::new(0),
        };
        Ok(Spool { inner: Arc::new(inner) })
    }

    /// Whether every push goes to disk now: maintenance, or a database that is away.
    pub fn takes_everything(&self) -> bool {
        self.maintenance() || self.is_away()
    }

    /// Whether the database could not be reached when it was asked last.
    pub fn is_away(&self) -> bool {
        self.inner.away.load(Ordering::Relaxed)
    }

    /// Whether push maintenance is on.
    pub fn maintenance(&self) -> bool {
        self.inner.maintenance.load(Ordering::Relaxed)
    }

    /// Switches push maintenance for this process.
    pub fn set_maintenance(&self, on: bool) {
        self.inner.maintenance.store(on, Ordering::Relaxed);
    }

    /// The database cannot be reached, or can again.
    pub fn set_away(&self, away: bool) {
        if self.inner.away.swap(away, Ordering::Relaxed) != away {
            if away {
                tracing::warn!("entering buffered mode (degraded durability)");
            } else {
                tracing::info!("DB recovered");
            }
        }
    }

    /// Whether records of this partition wait: a later push goes behind them.
    pub fn holds(&self, queue: &str, partition: &str) -> bool {
        let pending = self.pending();
        pending.records > 0 && pending.by_partition.contains_key(&(queue.to_owned(), partition.to_owned()))
    }

    /// Comes back once no record of these partitions waits any more: whoever stores past the spool must not overtake them.
    ///
    /// # Errors
    /// `Overloaded`: they still wait after [`DRAIN_PATIENCE`], or push maintenance keeps them; nothing was done.
    pub async fn let_pass(&self, partitions: &[(&str, &str)]) -> BrokerResult<()> {
        let started = Instant::now();
        while partitions.iter().any(|(queue, partition)| self.holds(queue, partition)) {
            if self.maintenance() || started.elapsed() > DRAIN_PATIENCE {
                return Err(BrokerError::overloaded("earlier messages of the partition wait in the disk spool", 1));
            }
            tokio::time::sleep(DRAIN_LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Writes the messages, in order, and forces them to disk. An error: nothing of them is there.
    pub async fn store(&self, messages: &[Spooled<'_>], producer_sub: Option<&str>) -> Result<(), String> {
        let records: Result<Vec<Record>, String> =
            messages.iter().map(|message| self.record_of(message, producer_sub)).collect();
        let outcome = match records {
            Ok(records) => self.write(records).await,
            Err(error) => Err(error),
        };
        let count = messages.len() as u64;
        match &outcome {
            Ok(()) => metrics::counter!(crate::metrics::SPOOL_RECORDS, "result" => "spooled").increment(count),
            Err(error) => {
                tracing::error!(error, "a push could not be spooled");
                self.inner.refused.fetch_add(count, Ordering::Relaxed);
            }
        }
        outcome
    }

    async fn write(&self, records: Vec<Record>) -> Result<(), String> {
        let names: Vec<(String, String, u64)> = records
            .iter()
            .map(|r| (r.header.queue.clone(), r.header.partition.clone(), r.payload.len() as u64))
            .collect();
        {
            let mut pending = self.pending();
            let bytes: u64 = names.iter().map(|(.., bytes)| bytes).sum();
            if pending.bytes.saturating_add(bytes) > self.inner.bytes_max {
                return Err("the spool is full".into());
            }
            // Before it is written: whoever comes later goes behind.
            names.iter().for_each(|(queue, partition, bytes)| pending.add(queue, partition, *bytes));
        }
        let (reply, written) = oneshot::channel();
        let outcome = match self.inner.orders.try_send(Order::Write(records, reply)) {
            Ok(()) => written.await.unwrap_or_else(|_| Err("the spool's writer has ended".into())),
            Err(_) => Err("too many writes wait for the spool".into()),
        };
        if outcome.is_err() {
            let mut pending = self.pending();
            names.iter().for_each(|(queue, partition, bytes)| pending.remove(queue, partition, *bytes));
        }
        outcome
    }

    fn record_of(&self, message: &Spooled<'_>, producer_sub: Option<&str>) -> Result<Record, String> {
        let (sealing, payload) = match message.encrypts {
            Some(false) => (Sealing::Plain, Some(message.payload.to_vec())),
            _ if self.inner.key.has_key() => (Sealing::Key, self.inner.key.seal(message.payload)),
            Some(true) => return Err(NO_KEY.into()),
            None => (Sealing::Local, self.inner.local.seal(message.payload)),
        };
        let payload = payload.ok_or("the payload of an unknown queue cannot be sealed")?;
        let header = Header {
            position: 0,
            queue: message.queue.to_owned(),
            partition: message.partition.to_owned(),
            transaction_id: message.transaction_id.map(str::to_owned),
            id: message.id,
            producer_sub: producer_sub.map(str::to_owned),
            sealing,
            accepted_ms: chrono::Utc::now().timestamp_millis(),
            probe: message.probe,
        };
        Ok(Record { header, payload })
    }

    /// What the status routes show. Looks into the directory.
    pub fn figures(&self) -> SpoolFigures {
        let failed = files(&self.inner.dir.join("failed"), "buf");
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
        SpoolFigures {
            pending: self.pending().records,
            failed: self.inner.refused.load(Ordering::Relaxed),
            db_healthy: !self.is_away(),
            failed_files: failed.len() as u64,
            failed_bytes: failed.iter().map(size).sum(),
        }
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.inner.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    fn add(&mut self, queue: &str, partition: &str, bytes: u64) {
        *self.by_partition.entry((queue.to_owned(), partition.to_owned())).or_default() += 1;
        self.records += 1;
        self.bytes += bytes;
    }

    fn remove(&mut self, queue: &str, partition: &str, bytes: u64) {
        let key = (queue.to_owned(), partition.to_owned());
        if let Some(count) = self.by_partition.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.by_partition.remove(&key);
            }
            self.records = self.records.saturating_sub(1);
            self.bytes = self.bytes.saturating_sub(bytes);
        }
    }
}

/// The directory, or the first numbered one inside it that no other broker uses: two that shared their files would store
/// them twice, or lose some.
fn lock_one_of(dir: &Path) -> std::io::Result<(PathBuf, File)> {
    let mut last = None;
    for nth in 0..DIRECTORIES_MAX {
        let dir = if nth == 0 { dir.to_owned() } else { dir.join(format!("broker-{nth}")) };
        std::fs::create_dir_all(&dir)?;
        let file = File::options().create(true).truncate(false).write(true).open(dir.join("spool.lock"))?;
        match file.try_lock() {
            Ok(()) => {
                if nth > 0 {
                    tracing::warn!(dir = %dir.display(), "spool: the directory is another broker's; using one inside it");
                }
                return Ok((dir, file));
            }
            Err(error) => last = Some(error.into()),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::WouldBlock.into()))
}

/// The files with this extension, oldest first.
fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    files.sort();
    files
}

/// The key that lies beside the spool, made by the first run.
fn local_key(dir: &Path) -> Option<[u8; 32]> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let path = dir.join(KEY_FILE);
    let read = || std::fs::read_to_string(&path).ok().and_then(|text| hex::decode(text.trim()).ok()?.try_into().ok());
    if let Some(key) = read() {
        return Some(key);
    }
    let key: [u8; 32] = rand::random();
    let made = std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path);
    let written = made.and_then(|mut file| {
        file.write_all(hex::encode(key).as_bytes())?;
        file.sync_all()
    });
    match written {
        Ok(()) => Some(key),
        Err(error) => {
            tracing::warn!(%error, "spool: no key can be kept; pushes to unknown queues cannot be spooled");
            None
        }
    }
}
