//! The SQL that says what a partition owes, and how the partitions of a queue are paged (`spec/admin.md` §3): once, for
//! every statement that asks.

/// Live leases among cursors `c`.
macro_rules! live {
    () => {
        "c.worker_id IS NOT NULL AND c.lease_expires_at > statement_timestamp()"
    };
}

/// One page of a queue's partitions in name order, as `p`: queue $1, after the name $2 (`NULL`: from the start), at most $3.
macro_rules! page_of_partitions {
    () => {
        "(SELECT * FROM queen.log_partitions WHERE queue_id = $1 AND name >= coalesce($2, '') AND name IS DISTINCT FROM $2 \
           ORDER BY name LIMIT $3) p "
    };
}

/// Of partition `p`: the slowest of its cursors (`c.worst`), positions under live leases (`c.leased`), what is done for all
/// (`w.done`), messages above that (`w.pending`). More columns of `c`, and which cursors count, if not all.
macro_rules! owed_by_partition {
    ($columns:expr, $cursors:literal) => {
        concat!(
            "LEFT JOIN LATERAL ( \
               SELECT min(c.committed) AS worst, \
                 coalesce(sum(greatest(c.batch_end - c.committed, 0)) FILTER (WHERE ",
            $crate::store::backlog::live!(),
            "), 0) AS leased",
            $columns,
            " FROM queen.log_consumers c WHERE c.partition_id = p.id",
            $cursors,
            ") c ON true \
             LEFT JOIN LATERAL ( \
               SELECT greatest(coalesce(c.worst, -1), p.log_start - 1) AS done, \
                 greatest(p.last_offset - greatest(coalesce(c.worst, -1), p.log_start - 1), 0) AS pending) w ON true "
        )
    };
}

pub(super) use {live, owed_by_partition, page_of_partitions};
