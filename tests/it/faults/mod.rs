//! The database goes away, or breaks in the middle of a commit (`design.md` §6, README rulings 3 and 7).
//!
//! What is judged is the answer against the rows: success is never told without a commit, and nothing is told twice.

mod acks;
mod outage;
mod pops;
mod pushes;
