//! Reading claimed spans: from the cache of newest segments, else from PostgreSQL, many pops in one statement.

use tokio::sync::oneshot;

use super::coalesce::{Batch, Bounds, Coalescer, answer_failed};
use super::delivery::DELIVERY_BYTES_MAX;
use super::error::{BrokerError, BrokerResult};
use super::meter::meter;
use super::segment::Frames;
use super::segment_cache::{OpenSegment, SegmentCache};
use crate::store::Store;
use crate::store::messages::{SegmentRow, Span};

/// Messages of one shared read.
const MESSAGES_MAX: usize = 4096;
/// Payload bytes of one span in a shared read; a span that has more is read again, alone, to the limit of an answer.
const SHARED_SPAN_BYTES_MAX: i64 = 1 << 20;

/// Reads spans for pops. A cheap clone.
#[derive(Clone, Debug)]
pub struct Reads {
    cache: SegmentCache,
    shared: SharedReads,
}

/// Reads that share statements.
pub type SharedReads = Coalescer<SharedRead>;

/// The spans of one pop.
#[derive(Debug)]
pub struct ReadJob {
    spans: Vec<Span>,
    reply: oneshot::Sender<Result<Vec<Vec<OpenSegment>>, BrokerError>>,
}

impl Reads {
    /// With so many statements in flight, and so many pops that may wait for theirs.
    pub fn new(store: &Store, cache: SegmentCache, workers: usize, waiting_max: usize) -> Reads {
        let bounds = Bounds { workers, waiting_max, jobs_max: usize::MAX, weight_max: MESSAGES_MAX };
        Reads { cache, shared: Coalescer::new(SharedRead { store: store.clone() }, bounds) }
    }

    /// What is to be run in the background.
    pub fn shared(&self) -> &SharedReads {
        &self.shared
    }

    /// The segments that cover each span, by offset, up to [`DELIVERY_BYTES_MAX`] payload bytes of a span.
    pub async fn read(&self, spans: Vec<Span>) -> BrokerResult<Vec<Vec<OpenSegment>>> {
        let cached: Vec<_> = spans.iter().map(|span| self.cache.find(*span, DELIVERY_BYTES_MAX)).collect();
        let missing: Vec<Span> =
            spans.iter().zip(&cached).filter(|(_, found)| found.is_none()).map(|(span, _)| *span).collect();
        meter().spans_read_from_memory.increment((spans.len() - missing.len()) as u64);
        let mut read = Vec::new();
        if !missing.is_empty() {
            meter().spans_read_from_database.increment(missing.len() as u64);
            let (reply, answer) = oneshot::channel();
            self.shared.submit(ReadJob { spans: missing, reply })?;
            read = answer.await.map_err(|_| BrokerError::Failed("the read was dropped, connection kept".into()))??;
        }
        let mut read = read.into_iter();
        Ok(cached.into_iter().map(|found| found.unwrap_or_else(|| read.next().unwrap_or_default())).collect())
    }

    /// Reads that wait for their turn now.
    pub fn waiting(&self) -> usize {
        self.shared.waiting()
    }

    /// Memory of the newest segments, in bytes.
    pub fn cached_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// The segments of every span, if all of them are in memory.
    pub fn remembered(&self, spans: &[Span]) -> Option<Vec<Vec<OpenSegment>>> {
        spans.iter().map(|span| self.cache.find(*span, DELIVERY_BYTES_MAX)).collect()
    }
}

/// One read statement for the pops that wait.
#[derive(Debug)]
pub struct SharedRead {
    store: Store,
}

impl Batch for SharedRead {
    type Job = ReadJob;
    type State = ();
    const SPAN: &'static str = "flush of reads";
    const OVERLOADED: &'static str = "too many reads under way";

    fn state(&self) {}

    fn weight(job: &ReadJob) -> usize {
        job.spans.iter().map(|span| usize::try_from(span.last.0 - span.first.0 + 1).unwrap_or(1)).sum()
    }

    async fn run(&self, (): &mut (), jobs: Vec<ReadJob>) -> Vec<ReadJob> {
        let spans: Vec<Span> = jobs.iter().flat_map(|job| job.spans.iter().copied()).collect();
        let bytes_max = if spans.len() == 1 { DELIVERY_BYTES_MAX as i64 } else { SHARED_SPAN_BYTES_MAX };
        match self.store.read_segments(&spans, bytes_max).await {
            Ok(rows) => {
                let mut rows = rows.into_iter();
                for job in jobs {
                    let rows: Vec<_> = rows.by_ref().take(job.spans.len()).collect();
                    let answer = self.complete(&job.spans, rows, bytes_max).await;
                    // A pop whose client hung up does not care.
                    let _ = job.reply.send(answer);
                }
            }
            Err(error) => {
                let alone = async |job: ReadJob| {
                    let rows = self.store.read_segments(&job.spans, DELIVERY_BYTES_MAX as i64).await;
                    (job, rows)
                };
                answer_failed(error, jobs, alone, |job, rows| {
                    let rows = rows.map_err(BrokerError::from);
                    let _ = job.reply.send(rows.and_then(|rows| rows.into_iter().map(unpack).collect()));
                })
                .await;
            }
        }
        Vec::new()
    }
}

impl SharedRead {
    /// Reads alone what the shared read cut off, and unpacks.
    async fn complete(
        &self,
        spans: &[Span],
        rows: Vec<Vec<SegmentRow>>,
        bytes_max: i64,
    ) -> BrokerResult<Vec<Vec<OpenSegment>>> {
        let mut read = Vec::with_capacity(spans.len());
        for (span, mut rows) in spans.iter().zip(rows) {
            let end = rows.last().map_or(span.first.0 - 1, |row| row.base_offset.0 + row.message_count as i64 - 1);
            if bytes_max == SHARED_SPAN_BYTES_MAX && !rows.is_empty() && end < span.last.0 {
                rows = self.store.read_segments(&[*span], DELIVERY_BYTES_MAX as i64).await?.pop().unwrap_or_default();
            }
            read.push(unpack(rows)?);
        }
        Ok(read)
    }
}

/// Opens stored segments.
pub fn unpack(rows: Vec<SegmentRow>) -> BrokerResult<Vec<OpenSegment>> {
    rows.into_iter()
        .map(|row| {
            let frames = Frames::open(&row.frames).map_err(|error| {
                let at = format!("partition {} offset {}", row.partition, row.base_offset);
                BrokerError::Failed(format!("stored segment does not decode, connection kept: {error} at {at}"))
            })?;
            Ok(OpenSegment {
                partition: row.partition,
                base_offset: row.base_offset,
                message_count: row.message_count,
                created_at: row.created_at,
                frames,
            })
        })
        .collect()
}
