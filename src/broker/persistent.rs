//! Work that its caller may stop waiting for, and that goes on all the same.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use tokio::runtime::Handle;

/// The work panicked; it was caught and told to the panic hook.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the work panicked")]
pub struct Panicked;

/// Work that runs in its caller's task for as long as that waits, and in one of its own from when it is dropped.
///
/// A task per call from the beginning would cost two more wake-ups, nearly always for nothing.
#[must_use = "it runs when it is awaited or dropped"]
pub struct Persistent<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    work: Option<Pin<Box<CatchUnwind<std::panic::AssertUnwindSafe<F>>>>>,
}

impl<F> Persistent<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    /// Wraps work that has not begun. What it shares must bear that a panic leaves it half done.
    pub fn new(work: F) -> Persistent<F> {
        Persistent { work: Some(Box::pin(std::panic::AssertUnwindSafe(work).catch_unwind())) }
    }
}

impl<F> Future for Persistent<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    type Output = Result<F::Output, Panicked>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        // Polled again after its end it says what it would say of work that broke off.
        let Some(work) = &mut self.work else { return Poll::Ready(Err(Panicked)) };
        let ended = std::task::ready!(work.as_mut().poll(task));
        self.work = None;
        Poll::Ready(ended.map_err(|_| Panicked))
    }
}

impl<F> Drop for Persistent<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // Without a runtime the process ends, and the work with it.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn it_goes_on_when_nobody_waits() {
        let (begin, begun) = oneshot::channel::<()>();
        let (ended, end) = oneshot::channel();
        let mut work = Box::pin(Persistent::new(async move {
            let _ = begun.await;
            let _ = ended.send(1);
        }));
        assert!(futures_util::poll!(work.as_mut()).is_pending());
        drop(work);
        assert!(begin.send(()).is_ok(), "it was dropped with its caller");
        assert_eq!(tokio::time::timeout(Duration::from_secs(10), end).await, Ok(Ok(1)));
    }

    #[tokio::test]
    async fn work_that_nobody_ever_awaited_is_done() {
        let (ended, end) = oneshot::channel();
        drop(Persistent::new(async move { ended.send(2) }));
        assert_eq!(tokio::time::timeout(Duration::from_secs(10), end).await, Ok(Ok(2)));
    }

    #[tokio::test]
    async fn it_answers_and_a_panic_is_told() {
        assert_eq!(Persistent::new(async { 3 }).await.ok(), Some(3));
        let broken = Persistent::new(async { assert_eq!(1, 2, "as planned") }).await;
        assert!(broken.is_err());
    }
}
