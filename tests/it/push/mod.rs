//! `POST /api/v1/push` (`spec/push-pop.md` §2).

mod bodies;
mod dedup;
mod limits;
mod new_partitions;
mod payloads;
mod results;
