//! Waves: everything is popped first, and what is measured is only the acks. Also the memory of what is leased meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::task::JoinSet;

use super::ack::{close, empty, fill};
use crate::engine::Bench;
use crate::engine::consume::{Answered, Claim, Consumer, Source};
use crate::figures::Counts;
use crate::report::Report;
use crate::run::{Phase, Run};
use crate::sample::Resources;

/// Pops in a row that find nothing before a consumer gives up, with a pause after each.
const EMPTY_MAX: u32 = 400;
const EMPTY_PAUSE: Duration = Duration::from_millis(5);

/// The group that pops and acknowledges.
const GROUP: usize = 0;

/// Leases of one wave, and the connections that pop and acknowledge them.
struct Wave {
    consumers: Vec<Consumer>,
    claims: Vec<Claim>,
}

impl Wave {
    fn with(run: &Arc<Run>) -> Self {
        let consumer = |number| Consumer::new(run, GROUP, &Source::Queue(0), number, 0, false);
        Self { consumers: (0..run.traffic.consumers.max(1)).map(consumer).collect(), claims: Vec::new() }
    }

    /// Pops until `messages` are leased.
    async fn claim(&mut self, messages: u64) -> Result<()> {
        let leased: usize = self.claims.iter().map(|claim| claim.items.len()).sum();
        let claimed = Arc::new(AtomicU64::new(leased as u64));
        let mut claiming: JoinSet<Result<(Consumer, Vec<Claim>)>> = JoinSet::new();
        for mut consumer in self.consumers.drain(..) {
            let claimed = claimed.clone();
            claiming.spawn(async move {
                let (mut claims, mut claim, mut empty) = (Vec::new(), Claim::default(), 0);
                while claimed.load(Relaxed) < messages && empty < EMPTY_MAX {
                    if consumer.claim(&mut claim).await? {
                        claimed.fetch_add(claim.items.len() as u64, Relaxed);
                        claims.push(std::mem::take(&mut claim));
                        empty = 0;
                    } else {
                        empty += 1;
                        tokio::time::sleep(EMPTY_PAUSE).await;
                    }
                }
                Ok((consumer, claims))
            });
        }
        while let Some(ended) = claiming.join_next().await {
            let (consumer, part) = ended??;
            self.consumers.push(consumer);
            self.claims.extend(part);
        }
        let claimed = claimed.load(Relaxed);
        if claimed < messages {
            bail!("only {claimed} of {messages} messages could be leased");
        }
        Ok(())
    }

    /// Acknowledges everything, each connection an equal share. The answers are still to be booked.
    async fn settle(self) -> Result<Vec<Answered>> {
        let Self { consumers, mut claims } = self;
        let share = claims.len().div_ceil(consumers.len());
        let mut acking: JoinSet<Result<Vec<Answered>>> = JoinSet::new();
        for mut consumer in consumers {
            let part = claims.split_off(claims.len() - share.min(claims.len()));
            acking.spawn(async move {
                let mut answered = Vec::with_capacity(part.len());
                for claim in part {
                    answered.push(consumer.settle_unread(claim).await?);
                }
                Ok(answered)
            });
        }
        let mut answered = Vec::new();
        while let Some(ended) = acking.join_next().await {
            answered.extend(ended??);
        }
        Ok(answered)
    }
}

fn book(run: &Run, answered: &[Answered]) -> Result<()> {
    answered.iter().try_for_each(|answered| answered.book(run, GROUP))
}

/// Measures the acks of `waves` times `messages` messages, and nothing else. The first wave has been pushed.
pub async fn acks_only(bench: &mut Bench, title: &str, run: &Arc<Run>, messages: u64, waves: usize) -> Result<Report> {
    let (mut counts, mut resources) = (Counts::default(), Resources::default());
    for number in 0..waves.max(1) {
        if number > 0 {
            fill(run, messages).await?;
        }
        let mut wave = Wave::with(run);
        wave.claim(messages).await?;
        // Outside the clocks' window: a sample costs PostgreSQL as much as thousands of acks.
        let before = bench.sampler.take(true).await;
        bench.sampler.quiet().await;
        let counted = run.figures.counters.snapshot();
        run.enter(Phase::Measure);
        let began = bench.sampler.cpu();
        let answered = wave.settle().await?;
        resources.add_cpu(&began, &bench.sampler.cpu());
        run.enter(Phase::Warmup);
        book(run, &answered)?;
        counts = counts.plus(&run.figures.counters.snapshot().since(&counted));
        resources.add_counters(bench.sampler.take(true).await.since(&before));
    }
    close(bench, title, run, counts, resources).await
}

/// Leases half of what was pushed, then the rest, and compares the broker's resident memory.
pub async fn lease_memory(bench: &mut Bench, title: &str, run: &Arc<Run>, messages: u64) -> Result<Report> {
    // Every partition, buffer and cache has been in use once before anything is compared.
    empty(run).await?;
    fill(run, messages).await?;
    let before = bench.sampler.take(true).await;
    let counted = run.figures.counters.snapshot();
    let mut wave = Wave::with(run);
    let mut seen = Vec::new();
    for goal in [messages / 2, messages] {
        wave.claim(goal).await?;
        bench.sampler.quiet().await;
        let rss = bench.sampler.take(false).await.broker_rss.context("the broker's memory is not known")?;
        seen.push((wave.claims.len(), rss));
    }
    book(run, &wave.settle().await?)?;
    let (first, last) = (seen[0], seen[1]);
    let bytes = (last.1 as f64 - first.1 as f64) / (last.0 - first.0).max(1) as f64;
    let resources = bench.sampler.take(true).await.since(&before);
    let counts = run.figures.counters.snapshot().since(&counted);
    let mut report = close(bench, title, run, counts, resources).await?;
    report.extra.insert("leases_first".to_owned(), json!(first.0));
    report.extra.insert("leases_last".to_owned(), json!(last.0));
    report.extra.insert("rss_first".to_owned(), json!(first.1));
    report.extra.insert("rss_last".to_owned(), json!(last.1));
    report.extra.insert("bytes_per_lease".to_owned(), json!(bytes.round()));
    Ok(report)
}
