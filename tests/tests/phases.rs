//! Connections of every age: each step of their endpoints has the same result as over kernel TCP, or
//! `phase-differences.txt` lists the difference.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::fs;
use std::process::Command;
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack};

const RUN_LIMIT: Duration = Duration::from_secs(300);
/// Over kernel TCP the results of a scenario do not depend on the age, so few ages are enough.
const TCP_AGES: &[&str] = &["unaccepted", "fresh"];
/// Number of times that all runs are repeated if some differ; only what differs each time fails.
const REPETITIONS_MAX: usize = 3;
/// Seeds, and the ages of the connections with each. "middle" has two seeds, because a seed chooses the acting
/// endpoint.
const PASSES: [(u64, &[&str]); 3] =
    [(1, &["unaccepted", "fresh", "one", "twenty"]), (2, &["middle", "oneway"]), (3, &["middle", "full"])];
const SCENARIOS_MIN: usize = 150;
/// Runs that a failure prints in full.
const RUNS_SHOWN_MAX: usize = 8;

/// A line of `connection_phases.py`.
struct Run {
    /// Scenario, age, direction and processes.
    name: String,
    /// `STEP=RESULT`, in order.
    steps: String,
}

impl Run {
    fn parse(line: &str) -> Self {
        let (name, steps) = line.split_once(": ").unwrap_or_else(|| panic!("'{line}' is not a run"));
        Self { name: name.to_owned(), steps: steps.to_owned() }
    }

    fn scenario(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    fn age(&self) -> &str {
        self.name.split(' ').nth(1).unwrap_or_default()
    }
}

fn play(mut command: Command, seed: u64, ages: &[&str]) -> Vec<Run> {
    command.arg(package_file("python/connection_phases.py")).args(["--brief", "--seed", &seed.to_string()]);
    command.args(ages.iter().flat_map(|age| ["--age", age]));
    let finished = Process::start(&mut command).wait(RUN_LIMIT).must_succeed();
    finished.stdout.lines().map(Run::parse).collect()
}

/// The steps of each scenario over kernel TCP; panics if two runs of a scenario have different results.
fn steps_of_tcp(runs: Vec<Run>) -> BTreeMap<String, String> {
    let mut first_runs: BTreeMap<String, Run> = BTreeMap::new();
    for run in runs {
        if let Some(first) = first_runs.get(run.scenario()) {
            assert_eq!(first.steps, run.steps, "kernel TCP: '{}' and '{}'", first.name, run.name);
        } else {
            first_runs.insert(run.scenario().to_owned(), run);
        }
    }
    first_runs.into_iter().map(|(scenario, run)| (scenario, run.steps)).collect()
}

/// A line of `phase-differences.txt`.
struct Explained {
    line: String,
    /// Patterns of scenario, age, the step over TCP, and the result over lanes.
    patterns: [String; 4],
    has_matched: Cell<bool>,
}

impl Explained {
    fn parse(line: &str) -> Self {
        let (patterns, reason) = line.split_once(": ").unwrap_or_else(|| panic!("no reason in '{line}'"));
        assert!(!reason.trim().is_empty(), "no reason in '{line}'");
        let patterns: Vec<String> = patterns.trim_start_matches("? ").split(' ').map(str::to_owned).collect();
        let patterns = patterns.try_into().unwrap_or_else(|_| panic!("not four words before the reason: '{line}'"));
        Self { line: line.to_owned(), patterns, has_matched: Cell::new(false) }
    }

    fn explains(&self, run: &Run, by_tcp: &str, over_lanes: &str) -> bool {
        let words = [run.scenario(), run.age(), by_tcp, over_lanes];
        let matches = self.patterns.iter().zip(words).all(|(pattern, word)| matches_pattern(pattern, word));
        self.has_matched.set(self.has_matched.get() || matches);
        matches
    }

    /// Whether this is a defect that should show in every run and has shown in none.
    fn is_outdated(&self) -> bool {
        !self.line.starts_with('?') && !self.has_matched.get()
    }
}

/// Whether a word matches a pattern in which `*` matches anything.
fn matches_pattern(pattern: &str, word: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == word };
    let Some(word) = word.strip_prefix(start) else { return false };
    (0..=word.len()).any(|skipped| word.get(skipped..).is_some_and(|word| matches_pattern(rest, word)))
}

fn explained(file: &str) -> Vec<Explained> {
    let path = package_file(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).map(Explained::parse).collect()
}

/// A run whose steps differ from those of TCP.
struct Difference<'a> {
    seed: u64,
    run: Run,
    by_tcp: &'a str,
    /// The first unexplained step, over TCP and over lanes.
    step: (String, String),
}

impl fmt::Display for Difference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (by_tcp, over_lanes) = &self.step;
        writeln!(f, "{} (seed {}): {over_lanes}, where kernel TCP answers {by_tcp}", self.run.name, self.seed)?;
        writeln!(f, "    TCP:   {}\n    lanes: {}", self.by_tcp, self.run.steps)
    }
}

fn unexplained_step(run: &Run, by_tcp: &str, explained: &[Explained]) -> Option<(String, String)> {
    let (mut steps_of_tcp, mut steps) = (by_tcp.split(' '), run.steps.split(' '));
    loop {
        let (by_tcp, over_lanes) = match (steps_of_tcp.next(), steps.next()) {
            (None, None) => return None,
            (by_tcp, over_lanes) => (by_tcp.unwrap_or("nothing"), over_lanes.unwrap_or("nothing")),
        };
        // A run that hangs has no further steps.
        let is_same_step = over_lanes == "HANG" || by_tcp.split('=').next() == over_lanes.split('=').next();
        let result = over_lanes.split_once('=').map_or(over_lanes, |(_, result)| result);
        let is_explained = is_same_step && explained.iter().any(|entry| entry.explains(run, by_tcp, result));
        if by_tcp != over_lanes && !is_explained {
            return Some((by_tcp.to_owned(), over_lanes.to_owned()));
        }
        if over_lanes == "HANG" {
            return None;
        }
    }
}

fn report(differences: &[Difference]) -> String {
    let mut text = String::new();
    for difference in differences.iter().take(RUNS_SHOWN_MAX) {
        let _ = write!(text, "{difference}");
    }
    for difference in differences.iter().skip(RUNS_SHOWN_MAX) {
        let (by_tcp, over_lanes) = &difference.step;
        let _ = writeln!(text, "{} (seed {}): {over_lanes}, not {by_tcp}", difference.run.name, difference.seed);
    }
    text
}

/// The unexplained differences, and the number of runs, of programs that `command` starts.
fn differences<'a>(
    command: &dyn Fn() -> Command,
    by_tcp: &'a BTreeMap<String, String>,
    explained: &[Explained],
) -> (Vec<Difference<'a>>, usize) {
    let (mut differences, mut runs_count) = (Vec::new(), 0);
    for (seed, ages) in PASSES {
        for run in play(command(), seed, ages) {
            runs_count += 1;
            let by_tcp = by_tcp.get(run.scenario()).unwrap_or_else(|| panic!("'{}' is not run over TCP", run.name));
            if let Some(step) = unexplained_step(&run, by_tcp, explained) {
                differences.push(Difference { seed, run, by_tcp, step });
            }
        }
    }
    (differences, runs_count)
}

#[test]
fn connections_of_every_age_behave_as_over_kernel_tcp() {
    let rack = Rack::new();
    let by_tcp = steps_of_tcp(play(rack.bare_command(python()), 1, TCP_AGES));
    assert!(by_tcp.len() >= SCENARIOS_MIN, "only {} scenarios", by_tcp.len());
    let command = || rack.run(&[], python());
    let explained = explained("phase-differences.txt");
    let (mut differences, runs_count) = differences(&command, &by_tcp, &explained);
    for _ in 0..REPETITIONS_MAX {
        if differences.is_empty() {
            break;
        }
        let again = self::differences(&command, &by_tcp, &explained).0;
        differences.retain(|one| again.iter().any(|other| (other.seed, &other.run.name) == (one.seed, &one.run.name)));
    }
    assert!(differences.is_empty(), "{} of {runs_count} runs differ:\n{}", differences.len(), report(&differences));
    let outdated: Vec<&str> = explained.iter().filter(|entry| entry.is_outdated()).map(|entry| &*entry.line).collect();
    assert!(rack.is_bare() || outdated.is_empty(), "no longer seen, remove them from the list: {outdated:#?}");
}

#[test]
fn a_star_in_a_pattern_matches_anything() {
    assert!(
        matches_pattern("exit_*_recv", "exit_unread_recv")
            && matches_pattern("*", "")
            && matches_pattern("a*b*", "a-b")
    );
    assert!(!matches_pattern("exit_*_recv", "exit_recv") && !matches_pattern("a", "ab") && !matches_pattern("", "a"));
}
