//! Shows the progress of a run on stderr: a bar on a terminal; otherwise a line at each new stage, and occasionally
//! within a stage.

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
    /// Shows the progress of a run of `steps` steps.
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

    /// Records that the step `detail` of `stage` begins.
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

    /// Prints a warning.
    pub fn warn(&self, text: &str) {
        self.say(&format!("crosslane: {text}"));
    }

    /// Prints a line above the bar.
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

/// Shortest time between two lines of one stage in a log.
const QUIET: Duration = Duration::from_secs(10);

/// The lines of a log: enough to show that a run of half an hour continues, and few for a short run.
struct Lines {
    steps: u64,
    begun: u64,
    stage: String,
    last_line: Duration,
}

impl Lines {
    fn new(steps: u64) -> Self {
        Self { steps, begun: 0, stage: String::new(), last_line: Duration::ZERO }
    }

    /// Returns the line for the start of a step at time `now`; `None` if the last line was shortly before.
    fn step(&mut self, now: Duration, stage: &str, detail: &str) -> Option<String> {
        self.begun += 1;
        let is_new = self.stage != stage;
        if !is_new && now.saturating_sub(self.last_line) < QUIET {
            return None;
        }
        stage.clone_into(&mut self.stage);
        self.last_line = now;
        Some(format!("{stage}: {detail} ({} of {})", self.begun, self.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_a_line_at_each_stage_and_occasionally_within_one() {
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
