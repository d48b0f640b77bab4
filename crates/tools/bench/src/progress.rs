//! Says on stderr how far a run is: a bar on a terminal; elsewhere a line at each new stage, and now and then within
//! one.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of one run.
pub struct Progress {
    bar: Option<ProgressBar>,
    lines: Lines,
    began: Instant,
}

impl Progress {
    /// Of a run of so many steps.
    pub fn new(steps: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps);
            if let Ok(style) = ProgressStyle::with_template("{bar:32} {percent:>3}%  {elapsed}  {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, lines: Lines::new(steps), began: Instant::now() }
    }

    /// One step, `detail` of `stage`, is beginning.
    pub fn step(&mut self, stage: &str, detail: &str) {
        match &self.bar {
            Some(bar) => {
                bar.inc(1);
                bar.set_message(format!("{stage}: {detail}"));
            }
            None => {
                if let Some(line) = self.lines.step(self.began.elapsed(), stage, detail) {
                    eprintln!("crosslane: {line}");
                }
            }
        }
    }

    /// Something the reader must see at once.
    pub fn warn(&self, text: &str) {
        self.say(&format!("crosslane: {text}"));
    }

    /// A line beside the progress, as it is.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// How long a log says nothing, at least, between two lines of one stage.
const QUIET: Duration = Duration::from_secs(10);

/// What a log is told of the steps: a run of half an hour is to be seen to go on, and a short one to say little.
struct Lines {
    steps: u64,
    begun: u64,
    stage: String,
    said: Duration,
}

impl Lines {
    fn new(steps: u64) -> Self {
        Self { steps, begun: 0, stage: String::new(), said: Duration::ZERO }
    }

    /// The line at the beginning of a step, so long after the run began; `None` where the last one was just now.
    fn step(&mut self, now: Duration, stage: &str, detail: &str) -> Option<String> {
        self.begun += 1;
        let is_new = self.stage != stage;
        if !is_new && now.saturating_sub(self.said) < QUIET {
            return None;
        }
        stage.clone_into(&mut self.stage);
        self.said = now;
        Some(format!("{stage}: {detail} ({} of {})", self.begun, self.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_a_line_at_each_stage_and_now_and_then_within_one() {
        let mut lines = Lines::new(9);
        let mut at = |seconds, stage, detail| lines.step(Duration::from_secs(seconds), stage, detail);
        assert_eq!(at(0, "router", "tables").as_deref(), Some("router: tables (1 of 9)"));
        assert_eq!(at(9, "router", "core"), None);
        assert_eq!(at(10, "router", "rates").as_deref(), Some("router: rates (3 of 9)"));
        assert_eq!(at(19, "router", "loads"), None);
        assert_eq!(at(19, "sizes", "64 B").as_deref(), Some("sizes: 64 B (5 of 9)"));
        assert_eq!(at(300, "sizes", "1500 B").as_deref(), Some("sizes: 1500 B (6 of 9)"));
    }
}
