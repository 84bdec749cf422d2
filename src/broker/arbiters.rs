//! The threads that actors live on: an actix `System` of its own, beside the multi-thread runtime of HTTP and SQL.
//!
//! Actors own state and never wait for I/O; what waits (a flush) runs on the other runtime. So few threads do.

use std::sync::mpsc;
use std::thread;

use actix::{Arbiter, System};

/// A running system. Ends with [`Arbiters::stop`], or with the process.
#[derive(Debug)]
pub struct Arbiters {
    handles: Vec<actix::ArbiterHandle>,
    system: System,
}

/// Without I/O, which actors never do: every ack wakes one of these threads, and one that waits on a condition is woken
/// without a write to an event file.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_time().build()
}

impl Arbiters {
    /// Starts `threads` of them; at least one. Fails if the system gives no thread.
    pub fn start(threads: usize) -> std::io::Result<Arbiters> {
        let (ready, started) = mpsc::channel();
        thread::Builder::new().name("actors".into()).spawn(move || {
            let runner = System::new();
            let made: std::io::Result<Vec<_>> =
                runner.block_on(async { (0..threads.max(1)).map(|_| Arbiter::try_with_tokio_rt(runtime)).collect() });
            let handles = made.map(|arbiters| arbiters.iter().map(Arbiter::handle).collect());
            // Nobody waits if the caller is gone; then the system ends at once.
            if ready.send(handles.map(|handles| Arbiters { handles, system: System::current() })).is_ok()
                && let Err(error) = runner.run()
            {
                tracing::error!(%error, "the actor system ended");
            }
        })?;
        started.recv().unwrap_or_else(|_| Err(std::io::Error::other("the actor system did not start")))
    }

    /// The thread of a slot: equal slots share it.
    pub fn of(&self, slot: usize) -> &actix::ArbiterHandle {
        &self.handles[slot % self.handles.len()]
    }

    /// All of them.
    pub fn threads(&self) -> &[actix::ArbiterHandle] {
        &self.handles
    }

    /// Ends all actors and threads.
    pub fn stop(&self) {
        self.system.stop();
    }
}
