//! Who was heard on the notification channel, by number: what did not arrive shows.
//!
//! Every broker numbers what it says and says something every second while it knows of others, so a word that was lost
//! leaves a gap in front of the next one, and a broker that ended before it could speak falls silent. A broker hears itself
//! too: one that does not is deaf, however alive its connection looks.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

/// Pause between two signs of life.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// Whoever was not heard for this long has ended, or this broker is deaf.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Voice {
    number: u64,
    at: Instant,
}

/// What one broker has heard. Bounded by the brokers that spoke within [`SILENT_AFTER`].
#[derive(Debug)]
pub struct Hearing {
    me: Uuid,
    voices: HashMap<Uuid, Voice>,
    /// Since when something that was said here has not come back.
    unechoed_since: Option<Instant>,
    cannot_listen: bool,
}

impl Hearing {
    /// Of the broker `me`, before it listens.
    pub fn new(me: Uuid) -> Hearing {
        Hearing { me, voices: HashMap::new(), unechoed_since: None, cannot_listen: true }
    }

    /// It listens from now on.
    pub fn listens(&mut self) {
        self.unechoed_since = None;
    }

    /// It cannot listen.
    pub fn lost(&mut self) {
        self.cannot_listen = true;
    }

    /// It has said something.
    pub fn said(&mut self, now: Instant) {
        self.unechoed_since.get_or_insert(now);
    }

    /// It heard word `number` of a broker. Answers how many before it never came; all of them, of a broker that it did not
    /// know of; none of its own, which tell it nothing new.
    pub fn heard(&mut self, from: Uuid, number: u64, now: Instant) -> u64 {
        if from == self.me {
            self.unechoed_since = None;
            self.cannot_listen = false;
            return 0;
        }
        let voice = self.voices.entry(from).or_insert(Voice { number: 0, at: now });
        let missed = number.saturating_sub(voice.number + 1);
        *voice = Voice { number: number.max(voice.number), at: now };
        missed
    }

    /// The others that have fallen silent: each is answered once, and not known any more.
    pub fn fallen_silent(&mut self, now: Instant) -> usize {
        let before = self.voices.len();
        self.voices.retain(|_, voice| now.saturating_duration_since(voice.at) < SILENT_AFTER);
        before - self.voices.len()
    }

    /// Whether what it said does not come back.
    pub fn is_unechoed(&self, now: Instant) -> bool {
        self.unechoed_since.is_some_and(|since| now.saturating_duration_since(since) >= SILENT_AFTER)
    }

    /// Whether nothing that others say can be relied on to arrive.
    pub fn is_deaf(&self) -> bool {
        self.cannot_listen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: Uuid = Uuid::nil();
    const OTHER: Uuid = Uuid::max();

    #[test]
    fn a_lost_word_shows_at_the_next_one_and_only_there() {
        let now = Instant::now();
        let mut hearing = Hearing::new(ME);
        assert_eq!(hearing.heard(OTHER, 1, now), 0);
        assert_eq!(hearing.heard(OTHER, 2, now), 0);
        assert_eq!(hearing.heard(OTHER, 5, now), 2);
        assert_eq!(hearing.heard(OTHER, 6, now), 0);
        assert_eq!(hearing.heard(OTHER, 6, now), 0, "twice is harmless");
        assert_eq!(hearing.heard(OTHER, 7, now), 0);
    }

    #[test]
    fn a_broker_that_spoke_before_it_was_known_was_missed() {
        let mut hearing = Hearing::new(ME);
        assert_eq!(hearing.heard(OTHER, 40, Instant::now()), 39);
    }

    #[test]
    fn silence_is_told_once_and_what_was_said_meanwhile_counts_as_missed() {
        let now = Instant::now();
        let mut hearing = Hearing::new(ME);
        hearing.heard(OTHER, 1, now);
        assert_eq!(hearing.fallen_silent(now + BEAT_EVERY * 2), 0);
        assert_eq!(hearing.fallen_silent(now + SILENT_AFTER), 1);
        assert_eq!(hearing.fallen_silent(now + SILENT_AFTER * 2), 0);
        assert_eq!(hearing.heard(OTHER, 2, now + SILENT_AFTER * 3), 1, "it was not known any more");
    }

    #[test]
    fn what_does_not_come_back_makes_deaf() {
        let now = Instant::now();
        let mut hearing = Hearing::new(ME);
        hearing.listens();
        assert!(hearing.is_deaf(), "nothing heard yet");
        hearing.said(now);
        hearing.said(now + SILENT_AFTER);
        assert!(hearing.is_unechoed(now + SILENT_AFTER));
        assert_eq!(hearing.heard(ME, 4, now + SILENT_AFTER), 0);
        assert!(!hearing.is_unechoed(now + SILENT_AFTER * 9));
        assert!(!hearing.is_deaf());
        hearing.lost();
        assert!(hearing.is_deaf());
    }
}
