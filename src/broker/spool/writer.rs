//! The thread that writes the spool's files: what has gathered is written at once and forced to disk once.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::record::Record;

/// Bytes after which a file is closed.
const FILE_BYTES_MAX: u64 = 32 << 20;
/// Bytes that must stay free on the disk.
const FREE_BYTES_MIN: u64 = 64 << 20;
/// Requests that share one write.
const WRITES_MAX: usize = 1024;

/// What the thread is asked for.
#[derive(Debug)]
pub enum Order {
    /// Writes records; answers once they are on disk.
    Write(Vec<Record>, oneshot::Sender<Result<(), String>>),
    /// Closes the open file, so that it can be drained.
    Finalise(oneshot::Sender<()>),
}

/// Records, and who waits for them.
type Write = (Vec<Record>, oneshot::Sender<Result<(), String>>);

/// The open file.
struct Active {
    file: File,
    path: PathBuf,
    bytes: u64,
    records: usize,
}

/// The thread's state.
pub struct Writer {
    /// Where the files are.
    pub dir: PathBuf,
    /// Position of the next record.
    pub next: i64,
    /// Records after which a file is closed.
    pub records_max: usize,
    active: Option<Active>,
    serial: u64,
}

impl Writer {
    /// A writer without an open file.
    pub fn new(dir: PathBuf, next: i64, records_max: usize) -> Writer {
        Writer { dir, next, records_max, active: None, serial: 0 }
    }

    /// Works until every handle is gone.
    pub fn run(mut self, orders: &crossbeam_channel::Receiver<Order>) {
        while let Ok(first) = orders.recv() {
            let mut writes = Vec::new();
            let mut finalise = Vec::new();
            let mut order = Some(first);
            while let Some(next) = order.take() {
                match next {
                    Order::Write(records, reply) => writes.push((records, reply)),
                    Order::Finalise(reply) => finalise.push(reply),
                }
                if writes.len() < WRITES_MAX && finalise.is_empty() {
                    order = orders.try_recv().ok();
                }
            }
            if !writes.is_empty() {
                let outcome = self.write(&mut writes);
                for (_, reply) in writes {
                    let _ = reply.send(outcome.clone());
                }
            }
            if !finalise.is_empty() {
                self.close();
                for reply in finalise {
                    let _ = reply.send(());
                }
            }
        }
        self.close();
    }

    fn write(&mut self, writes: &mut [Write]) -> Result<(), String> {
        let mut bytes = Vec::new();
        let mut count = 0;
        for record in writes.iter_mut().flat_map(|(records, _)| records) {
            record.header.position = self.next;
            self.next += 1;
            record.encode(&mut bytes)?;
            count += 1;
        }
        let free = nix::sys::statvfs::statvfs(&self.dir).map_err(|error| error.to_string())?;
        if (free.blocks_available() as u64).saturating_mul(free.fragment_size() as u64)
            < FREE_BYTES_MIN.saturating_add(bytes.len() as u64)
        {
            return Err("the spool's disk is full".into());
        }
        if self.active.is_none() {
            self.active = Some(self.open().map_err(|error| format!("the spool cannot be written: {error}"))?);
        }
        let Some(active) = &mut self.active else { return Err("the spool has no file".into()) };
        let written = active.file.write_all(&bytes).and_then(|()| active.file.sync_data());
        if let Err(error) = written {
            // Nothing of it was answered; what came before stays readable.
            let _ = active.file.set_len(active.bytes);
            self.close();
            return Err(format!("the spool cannot be written: {error}"));
        }
        active.bytes += bytes.len() as u64;
        active.records += count;
        if active.bytes >= FILE_BYTES_MAX || active.records >= self.records_max {
            self.close();
        }
        Ok(())
    }

    fn open(&mut self) -> std::io::Result<Active> {
        let ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        // The stamp orders files of several runs, the serial those of one.
        self.serial += 1;
        let path = self.dir.join(format!("push-{ms:013}-{:08}.tmp", self.serial));
        let file = OpenOptions::new().create_new(true).append(true).open(&path)?;
        sync_dir(&self.dir)?;
        Ok(Active { file, path, bytes: 0, records: 0 })
    }

    fn close(&mut self) {
        let Some(active) = self.active.take() else { return };
        if let Err(error) = finalise(&active.path).and_then(|()| sync_dir(&self.dir)) {
            tracing::error!(%error, path = %active.path.display(), "a spool file could not be closed");
        }
    }
}

/// Makes a file drainable.
pub fn finalise(path: &Path) -> std::io::Result<()> {
    std::fs::rename(path, path.with_extension("buf"))
}

/// Forces names of a directory to disk.
pub fn sync_dir(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}
