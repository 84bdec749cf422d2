//! One flush: the statement, and what is done when it fails (`spec/ack.md` §7).
//!
//! An advance names everything that must be unchanged, so it lands at most once however often it is sent. A statement
//! whose answer was lost is therefore sent again: what lands now was not committed before. What does not land may have
//! been, or may have been refused; only its row can tell, and only if the lease is still there.

use std::sync::Arc;
use std::time::Duration;

use crate::broker::ack::meter::AckMeter;
use crate::broker::fusion_batch::halves;
use crate::store::advances::{OnLocked, PositionalAdvance};
use crate::store::{Store, StoreError, StoreResult};

/// Statements that one failing flush may cost.
const STATEMENTS_MAX: usize = 64;
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// What became of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Durable.
    Committed,
    /// The lease is not what it was; nothing happened. Full resolution answers.
    Refused,
    /// Committed if the lease is gone, refused if it is still there: full resolution looks.
    InDoubt,
    /// Not committed, or unknown.
    Failed,
    /// Not sent: no connection within the checkout timeout.
    NoConnection,
}

/// Runs advances.
pub struct Flusher {
    store: Store,
    flush_timeout: Duration,
    lookup_timeout: Duration,
    meter: Arc<AckMeter>,
}

impl Flusher {
    /// `flush_timeout` bounds a statement that the server never answers, `lookup_timeout` the search for its outcome.
    pub fn new(store: Store, flush_timeout: Duration, lookup_timeout: Duration, meter: Arc<AckMeter>) -> Flusher {
        Flusher { store, flush_timeout, lookup_timeout, meter }
    }

    /// Advances these rows durably; one outcome per row, in order. Every row is a different (partition, group, worker). Rows
    /// that share a commit say [`OnLocked::Skip`]: whoever has locked one of them (a seek over a million partitions, say)
    /// would hold up all the others. Resolution waits for that row.
    pub async fn advance(&self, rows: &[PositionalAdvance], on_locked: OnLocked) -> Vec<Flushed> {
        let outcomes = match self.send(rows, on_locked).await {
            Ok(landed) => landed_or(&landed, Flushed::Refused),
            Err(error) => {
                self.meter.flush_failures.increment(1);
                tracing::warn!(%error, rows = rows.len(), "ack flush failed");
                self.recover(rows, error).await
            }
        };
        self.meter.refused.increment(outcomes.iter().filter(|o| **o == Flushed::Refused).count() as u64);
        outcomes
    }

    async fn send(&self, rows: &[PositionalAdvance], on_locked: OnLocked) -> StoreResult<Vec<bool>> {
        tokio::time::timeout(self.flush_timeout, self.store.advance(rows, on_locked))
            .await
            .unwrap_or_else(|_| Err(StoreError::no_answer("ack flush")))
    }

    async fn recover(&self, rows: &[PositionalAdvance], error: StoreError) -> Vec<Flushed> {
        match error {
            StoreError::Unavailable(_) => vec![Flushed::NoConnection; rows.len()],
            StoreError::OutcomeUnknown { .. } => self.look_up(rows).await,
            StoreError::Refused { .. } => self.isolate(rows, error.is_transient() || is_timeout(&error)).await,
            StoreError::Corrupt { .. } | StoreError::Overtaken => vec![Flushed::Failed; rows.len()],
        }
    }

    /// The statement was rolled back. Finds the row that makes it fail by halving, so that the others get through. A
    /// conflict or timeout gets one more try as a whole; nothing waits for a locked row any more. What no row of these can
    /// be to blame for (no connection, a timeout again) ends the search: the shard must not stand still for every part in turn.
    async fn isolate(&self, rows: &[PositionalAdvance], passing: bool) -> Vec<Flushed> {
        let mut outcomes = Vec::with_capacity(rows.len());
        let mut statements = 0;
        let mut open = match halves(rows) {
            _ if passing => vec![rows],
            Some((left, right)) => vec![right, left],
            None => return vec![Flushed::Failed; rows.len()],
        };
        while let Some(part) = open.pop() {
            statements += 1;
            let hopeless = match self.send(part, OnLocked::Skip).await {
                Ok(landed) => {
                    outcomes.extend(landed_or(&landed, Flushed::Refused));
                    None
                }
                Err(error) if is_timeout(&error) => {
                    outcomes.extend(vec![Flushed::Failed; part.len()]);
                    Some(Flushed::Failed)
                }
                Err(StoreError::Refused { .. } | StoreError::Corrupt { .. } | StoreError::Overtaken) => {
                    match halves(part) {
                        Some((left, right)) => open.extend([right, left]),
                        None => outcomes.push(Flushed::Failed),
                    }
                    None
                }
                Err(StoreError::OutcomeUnknown { .. }) => {
                    let found = self.look_up(part).await;
                    let lost = found.contains(&Flushed::Failed);
                    outcomes.extend(found);
                    lost.then_some(Flushed::Failed)
                }
                Err(StoreError::Unavailable(_)) => {
                    outcomes.extend(vec![Flushed::NoConnection; part.len()]);
                    Some(Flushed::NoConnection)
                }
            };
            let hopeless = hopeless.or((statements >= STATEMENTS_MAX).then_some(Flushed::Failed));
            if let Some(outcome) = hopeless {
                outcomes.resize(rows.len(), outcome);
                break;
            }
        }
        outcomes
    }

    /// The answer was lost: sends again, within the budget.
    async fn look_up(&self, rows: &[PositionalAdvance]) -> Vec<Flushed> {
        let again = async {
            let mut pause = FIRST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                match self.send(rows, OnLocked::Wait).await {
                    Ok(landed) => return landed_or(&landed, Flushed::InDoubt),
                    Err(error) if error.is_connection() || error.is_transient() => pause *= 2,
                    Err(_) => return vec![Flushed::InDoubt; rows.len()],
                }
            }
        };
        let found = tokio::time::timeout(self.lookup_timeout, again).await;
        found.unwrap_or_else(|_| vec![Flushed::Failed; rows.len()])
    }
}

fn landed_or(landed: &[bool], otherwise: Flushed) -> Vec<Flushed> {
    landed.iter().map(|landed| if *landed { Flushed::Committed } else { otherwise }).collect()
}

/// Cancelled by the server's statement or lock timeout.
fn is_timeout(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { sqlstate, .. } if sqlstate == "57014" || sqlstate == "55P03")
}
