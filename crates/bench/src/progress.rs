//! Says on stderr how far a run is: a bar on a terminal, a line at each new stage elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of one run.
pub struct Progress {
    bar: Option<ProgressBar>,
    stage: String,
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
        Self { bar, stage: String::new() }
    }

    /// One step, `detail` of `stage`, is beginning.
    pub fn step(&mut self, stage: &str, detail: &str) {
        match &self.bar {
            Some(bar) => {
                bar.inc(1);
                bar.set_message(format!("{stage}: {detail}"));
            }
            None if self.stage != stage => eprintln!("crosslane: {stage}"),
            None => {}
        }
        stage.clone_into(&mut self.stage);
    }

    /// Something the reader must see at once.
    pub fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("crosslane: {text}")),
            None => eprintln!("crosslane: {text}"),
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
