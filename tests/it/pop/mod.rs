//! The three pop routes (`spec/push-pop.md` §6, §7).

mod autopilot;
mod budget;
mod claims;
mod conflation;
mod cursor_rows;
mod discovery;
mod discovery_cost;
mod discovery_feeds;
mod first_contact;
mod hang_up;
mod long_poll;
mod parameters;
mod redelivery;
mod response;
mod resting;
mod shared_claims;
mod subscription;
mod visibility;
