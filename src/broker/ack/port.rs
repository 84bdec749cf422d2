//! What the ack path asks of the store, as a trait: the differential and fault tests stand in for PostgreSQL here.

use futures_util::future::BoxFuture;

use crate::ids::{IdSpace, Offset, PartitionId};
use crate::store::acks::{CursorWrite, Guard, HashRow, LeaseClaim, OnLocked, PositionalAdvance, SpanRead};
use crate::store::dead_letters::{LetterSource, NewDeadLetter};
use crate::store::{Store, StoreResult};

/// See [`Store`], whose methods these are.
pub trait AckStore: Send + Sync + 'static {
    /// Ids on the wire.
    fn ids(&self) -> IdSpace;
    /// [`Store::read_span`].
    fn read_span<'a>(
        &'a self,
        partition: PartitionId,
        group: &'a str,
        lease: LeaseClaim,
    ) -> BoxFuture<'a, StoreResult<Option<SpanRead>>>;
    /// [`Store::read_hashes`].
    fn read_hashes(&self, partition: PartitionId, from: Offset, to: Offset)
    -> BoxFuture<'_, StoreResult<Vec<HashRow>>>;
    /// [`Store::letter_source`].
    fn letter_source(&self, partition: PartitionId, offset: Offset)
    -> BoxFuture<'_, StoreResult<Option<LetterSource>>>;
    /// [`Store::settle`].
    fn settle<'a>(
        &'a self,
        guard: &'a Guard,
        write: &'a CursorWrite,
        dead_letter: Option<&'a NewDeadLetter>,
    ) -> BoxFuture<'a, StoreResult<bool>>;
    /// [`Store::advance`].
    fn advance<'a>(
        &'a self,
        rows: &'a [PositionalAdvance],
        on_locked: OnLocked,
    ) -> BoxFuture<'a, StoreResult<Vec<bool>>>;
}

impl AckStore for Store {
    fn ids(&self) -> IdSpace {
        Store::ids(self)
    }

    fn read_span<'a>(
        &'a self,
        partition: PartitionId,
        group: &'a str,
        lease: LeaseClaim,
    ) -> BoxFuture<'a, StoreResult<Option<SpanRead>>> {
        Box::pin(Store::read_span(self, partition, group, lease))
    }

    fn read_hashes(
        &self,
        partition: PartitionId,
        from: Offset,
        to: Offset,
    ) -> BoxFuture<'_, StoreResult<Vec<HashRow>>> {
        Box::pin(Store::read_hashes(self, partition, from, to))
    }

    fn letter_source(
        &self,
        partition: PartitionId,
        offset: Offset,
    ) -> BoxFuture<'_, StoreResult<Option<LetterSource>>> {
        Box::pin(Store::letter_source(self, partition, offset))
    }

    fn settle<'a>(
        &'a self,
        guard: &'a Guard,
        write: &'a CursorWrite,
        dead_letter: Option<&'a NewDeadLetter>,
    ) -> BoxFuture<'a, StoreResult<bool>> {
        Box::pin(Store::settle(self, guard, write, dead_letter))
    }

    fn advance<'a>(
        &'a self,
        rows: &'a [PositionalAdvance],
        on_locked: OnLocked,
    ) -> BoxFuture<'a, StoreResult<Vec<bool>>> {
        Box::pin(Store::advance(self, rows, on_locked))
    }
}
