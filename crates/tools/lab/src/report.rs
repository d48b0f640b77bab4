//! How a lab ended.

use std::fmt;

use crate::Node;

/// Exit codes beside those of scripts, as shells and timeout(1) have them.
const CODE_FAILED: i32 = 1;
const CODE_TIME_OVER: i32 = 124;
const CODE_INTERRUPTED: i32 = 130;
/// Lines of each guest that a failure shows.
const LINES_SHOWN: usize = 40;

/// One guest's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// Which one.
    pub node: Node,
    /// What its script ended with, when it ended by itself.
    pub code: Option<i32>,
    /// All that came on its console.
    pub output: String,
}

/// What kept the scripts from ending by themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The limit was reached.
    TimeOver {
        /// The limit in seconds.
        limit_s: u64,
        /// Guests that had not ended.
        running: Vec<Node>,
    },
    /// Somebody asked to end.
    Interrupted,
    /// A machine ended without its script having ended.
    Died {
        /// Which one.
        node: Node,
    },
}

/// What came of a lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Guest by guest.
    pub guests: Vec<GuestReport>,
    /// Why it did not end as it should, when it did not.
    pub trouble: Option<Trouble>,
}

impl Report {
    /// The exit code of it all: the first script's that failed, 124 when time was over, 130 when interrupted.
    pub fn code(&self) -> i32 {
        let failed = self.guests.iter().filter_map(|guest| guest.code).find(|code| *code != 0);
        match (&self.trouble, failed) {
            (Some(Trouble::TimeOver { .. }), _) => CODE_TIME_OVER,
            (Some(Trouble::Interrupted), _) => CODE_INTERRUPTED,
            (_, Some(code)) => code,
            (Some(Trouble::Died { .. }), None) => CODE_FAILED,
            (None, None) => 0,
        }
    }

    /// What a guest printed.
    pub fn output(&self, node: Node) -> &str {
        self.guests.iter().find(|guest| guest.node == node).map_or("", |guest| &guest.output)
    }

    /// Panics unless all scripts ended with 0.
    #[track_caller]
    pub fn must_succeed(self) -> Self {
        assert!(self.code() == 0, "{self}");
        self
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimeOver { limit_s, running } => {
                let names: Vec<String> = running.iter().map(Node::to_string).collect();
                write!(formatter, "time is over after {limit_s} s, guest {} still ran; ", names.join(", "))?;
                formatter.write_str("give more with --timeout")
            }
            Self::Interrupted => formatter.write_str("interrupted"),
            Self::Died { node } => write!(formatter, "guest {node}'s machine ended before its script; see its output"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(trouble) = &self.trouble {
            writeln!(formatter, "{trouble}")?;
        }
        for guest in &self.guests {
            let code = guest.code.map_or("no exit code".to_owned(), |code| format!("exit code {code}"));
            writeln!(formatter, "--- guest {}: {code}", guest.node)?;
            let lines: Vec<&str> = guest.output.lines().collect();
            for line in &lines[lines.len().saturating_sub(LINES_SHOWN)..] {
                writeln!(formatter, "{line}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(codes: &[Option<i32>], trouble: Option<Trouble>) -> Report {
        let guest = |(index, code): (usize, &Option<i32>)| GuestReport {
            node: Node(index as u8),
            code: *code,
            output: String::new(),
        };
        Report { guests: codes.iter().enumerate().map(guest).collect(), trouble }
    }

    #[test]
    fn the_exit_code_is_the_first_that_failed_or_says_what_happened() {
        let time_over = Trouble::TimeOver { limit_s: 1, running: vec![Node::B] };
        for (codes, trouble, code) in [
            (&[Some(0), Some(0)][..], None, 0),
            (&[Some(0), Some(3)], None, 3),
            (&[Some(0), None], Some(time_over), 124),
            (&[None, None], Some(Trouble::Interrupted), 130),
            (&[Some(0), None], Some(Trouble::Died { node: Node::B }), 1),
            (&[Some(4), None], Some(Trouble::Died { node: Node::B }), 4),
            (&[Some(0), None], None, 0), // killed by the test itself
        ] {
            assert_eq!(report(codes, trouble).code(), code, "{codes:?}");
        }
    }
}
