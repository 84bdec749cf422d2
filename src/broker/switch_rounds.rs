//! Rounds between brokers: who turns a switch waits until the others have read it, so that the answer holds for all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use uuid::Uuid;

/// Questions of others that may wait to be answered; the oldest is dropped beyond it, and its asker waits in vain.
const QUESTIONS_MAX: usize = 256;

/// The rounds that this broker runs, and the questions that others asked it.
#[derive(Debug, Default)]
pub struct SwitchRounds {
    state: Mutex<State>,
    asked: Notify,
    heard: Notify,
}

#[derive(Debug, Default)]
struct State {
    last_round: u64,
    confirmed: BTreeMap<u64, BTreeSet<Uuid>>,
    questions: Vec<(Uuid, u64)>,
}

/// A round of this broker; forgotten when dropped.
#[derive(Debug)]
pub struct Round<'a> {
    rounds: &'a SwitchRounds,
    number: u64,
}

impl SwitchRounds {
    /// Opens a round. Its number goes into the question.
    pub fn open(&self) -> Round<'_> {
        let mut state = self.state();
        state.last_round += 1;
        let number = state.last_round;
        state.confirmed.insert(number, BTreeSet::new());
        Round { rounds: self, number }
    }

    /// Another broker asks to read the switches.
    pub fn ask(&self, from: Uuid, round: u64) {
        let mut state = self.state();
        if state.questions.len() >= QUESTIONS_MAX {
            state.questions.remove(0);
        }
        state.questions.push((from, round));
        drop(state);
        self.asked.notify_one();
    }

    /// Waits for a question.
    pub async fn asked(&self) {
        self.asked.notified().await;
    }

    /// The questions so far: askers and their rounds. To be taken before the switches are read.
    pub fn take_questions(&self) -> Vec<(Uuid, u64)> {
        std::mem::take(&mut self.state().questions)
    }

    /// Another broker has read the switches.
    pub fn confirm(&self, from: Uuid, round: u64) {
        if let Some(confirmed) = self.state().confirmed.get_mut(&round) {
            confirmed.insert(from);
        }
        self.heard.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Round<'_> {
    /// What to ask with.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Waits for these brokers, at most so long. Whether all have confirmed.
    pub async fn confirmed_by(&self, brokers: &BTreeSet<Uuid>, patience: Duration) -> bool {
        let all = async {
            loop {
                let heard = self.rounds.heard.notified();
                tokio::pin!(heard);
                // Registered before the look: a confirmation between the two is not missed.
                heard.as_mut().enable();
                if self.rounds.state().confirmed.get(&self.number).is_some_and(|c| brokers.is_subset(c)) {
                    return;
                }
                heard.await;
            }
        };
        tokio::time::timeout(patience, all).await.is_ok()
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        self.rounds.state().confirmed.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_round_ends_with_the_last_confirmation_of_its_own_or_with_patience() {
        let rounds = SwitchRounds::default();
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let (patience, none) = (Duration::from_secs(30), Duration::from_millis(1));
        let both = BTreeSet::from([a, b]);
        let (first, second) = (rounds.open(), rounds.open());
        assert!(first.confirmed_by(&BTreeSet::new(), patience).await);
        rounds.confirm(a, first.number());
        rounds.confirm(b, second.number());
        assert!(!first.confirmed_by(&both, none).await);
        let (ended, ()) = tokio::join!(first.confirmed_by(&both, patience), async {
            tokio::task::yield_now().await;
            rounds.confirm(b, first.number());
        });
        assert!(ended);
        drop((first, second));
        assert!(rounds.state().confirmed.is_empty());
    }

    #[tokio::test]
    async fn questions_are_bounded_and_taken_once() {
        let rounds = SwitchRounds::default();
        for round in 0..=QUESTIONS_MAX as u64 {
            rounds.ask(Uuid::nil(), round);
        }
        rounds.asked().await;
        let taken = rounds.take_questions();
        assert_eq!((taken.len(), taken.first().map(|q| q.1)), (QUESTIONS_MAX, Some(1)));
        assert!(rounds.take_questions().is_empty());
    }
}
