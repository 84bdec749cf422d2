//! Progress while a run goes on: a bar on a terminal, plain lines otherwise.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::figures::Counts;
use crate::run::Run;

/// Shows where a run stands.
pub struct Progress {
    bar: Option<ProgressBar>,
    every: Duration,
    last: Option<(Instant, Counts)>,
    title: String,
}

impl Progress {
    /// Progress of a step of known length. `every` is the time between two plain lines; `lines` asks for lines on a
    /// terminal too.
    pub fn new(title: &str, length: Duration, every: Duration, lines: bool) -> Self {
        let bar = (std::io::stderr().is_terminal() && !lines).then(|| {
            let bar = ProgressBar::new(length.as_secs().max(1));
            if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:30} {elapsed} {msg}") {
                bar.set_style(style);
            }
            bar.set_prefix(title.to_owned());
            bar
        });
        Self { bar, every, last: None, title: title.to_owned() }
    }

    /// Called about once a second; says whether an interval ended, and then gives its line.
    pub fn tick(&mut self, run: &Run, elapsed: Duration) -> Option<String> {
        let now = Instant::now();
        let counts = run.figures.counters.snapshot();
        let (since, before) = *self.last.get_or_insert((now, counts));
        let seconds = since.elapsed().as_secs_f64();
        let line = || {
            let rate = |count: u64| (count as f64 / seconds.max(0.001)).round();
            let part = counts.since(&before);
            format!(
                "pushed {}/s  delivered {}/s  acked {}/s  backlog {}  retries {}  violations {}",
                rate(part.pushed),
                rate(part.delivered),
                rate(part.acked),
                run.ledger.backlog(),
                part.retries_io + part.retries_5xx + part.retries_429,
                run.ledger.violations_so_far()
            )
        };
        if let Some(bar) = &self.bar {
            bar.set_position(elapsed.as_secs());
            if seconds >= 1.0 {
                bar.set_message(line());
                self.last = Some((now, counts));
            }
            return None;
        }
        // Half a tick of slack, so that a line does not slip by a whole tick.
        if seconds + 0.5 < self.every.as_secs_f64() {
            return None;
        }
        let text = format!("{} {:>6.0}s  {}", self.title, elapsed.as_secs_f64(), line());
        self.last = Some((now, counts));
        Some(text)
    }

    /// Takes the bar away.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
