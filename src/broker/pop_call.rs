//! One pop from its arrival to its answer, whoever holds it meanwhile.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::parking::Parked;
use super::pop_request::{PopRequest, TIMEOUT_MAX};

/// A pop under way. Between two looks it is plain data that can be moved to wherever waiting costs least.
#[derive(Debug)]
pub struct PopCall {
    /// What it asks for.
    pub request: PopRequest,
    /// When it is answered at the latest.
    pub(super) deadline: Instant,
    looked_before: bool,
    waiting: Option<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    parked: Parked,
    until: Instant,
    stop: CancellationToken,
}

impl PopCall {
    /// A pop that arrives now.
    pub fn new(request: PopRequest) -> PopCall {
        let deadline = Instant::now() + request.timeout.min(TIMEOUT_MAX);
        PopCall { request, deadline, looked_before: false, waiting: None }
    }

    /// Resolves when another look is worthwhile: something may be there, the deadline has come, or the broker stops.
    /// At once if it is not parked. Cancel safe: a wake-up is used by the look that follows, or passed on when the call drops.
    pub async fn due(&self) {
        let Some(waiting) = &self.waiting else { return };
        tokio::select! {
            () = waiting.parked.woken() => {}
            () = tokio::time::sleep_until(waiting.until.into()) => {}
            () = waiting.stop.cancelled() => {}
        }
    }

    /// Takes it off the lists, for a look that begins now. Answers whether that is the first.
    pub(super) fn begin_look(&mut self) -> bool {
        if let Some(waiting) = self.waiting.take() {
            waiting.parked.looks();
        }
        !std::mem::replace(&mut self.looked_before, true)
    }

    /// Notes where it is parked, and that it must look again after so long even if nobody wakes it.
    pub(super) fn park(&mut self, parked: Parked, again_after: Option<Duration>, stop: CancellationToken) {
        let until = again_after.map_or(self.deadline, |wait| self.deadline.min(Instant::now() + wait));
        self.waiting = Some(Waiting { parked, until, stop });
    }
}
