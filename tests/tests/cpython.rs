//! CPython's own tests of sockets, selectors and asyncio: a test that passes bare passes over lanes, or
//! `cpython-differences.txt` explains the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Finished, Process, Rack, Traffic};
use tempfile::TempDir;

const RUN_LIMIT: Duration = Duration::from_secs(1800);
/// Number of tests that may hang or crash before the run is abandoned: each costs a minute.
const ABORTS_MAX: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
    /// It hung, or it ended the process.
    Aborted,
}

type Outcomes = BTreeMap<String, Outcome>;

/// The suite, bare or over lanes, and its output.
struct SuiteRun {
    folder: TempDir,
    over_lanes: bool,
    rack: Rack,
    traffic: Traffic,
    error_output: String,
}

impl SuiteRun {
    fn new(over_lanes: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder, over_lanes, rack: Rack::new(), traffic: Traffic::default(), error_output: String::new() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the modules or IDs in `names` and continues behind every test that hangs or crashes.
    fn run(&mut self, names: &[&str]) -> Outcomes {
        let record = self.file("outcomes");
        let _ = fs::remove_file(&record);
        let mut outcomes = Outcomes::new();
        for _ in 0..=ABORTS_MAX {
            let known: String = outcomes.keys().map(|name| format!("{name}\n")).collect();
            fs::write(self.file("skip"), known).unwrap();
            let finished = self.run_once(&record, names);
            let text = fs::read_to_string(&record).unwrap_or_default();
            outcomes.extend(text.lines().filter_map(outcome));
            if text.lines().last() == Some("end") {
                return outcomes;
            }
            let aborted = text.lines().last().and_then(|line| line.strip_prefix("start "));
            let aborted = aborted.unwrap_or_else(|| panic!("ended outside a test: {finished}"));
            outcomes.insert(aborted.to_owned(), Outcome::Aborted);
        }
        panic!("more than {ABORTS_MAX} tests hang or crash: {:?}", with(&outcomes, Outcome::Aborted));
    }

    fn run_once(&mut self, record: &Path, names: &[&str]) -> Finished {
        let mut command =
            if self.over_lanes { self.rack.require_lane(python()) } else { self.rack.bare_command(python()) };
        command.arg(package_file("python/record.py")).arg(record).arg(self.file("skip")).args(names);
        let process = Process::start(&mut command);
        let (finished, traffic) = if self.over_lanes {
            self.rack.watch(process, RUN_LIMIT, |stat| stat.traffic_of("python"))
        } else {
            (process.wait(RUN_LIMIT), Traffic::default())
        };
        assert!(!finished.timed_out, "{finished}");
        self.traffic = self.traffic.max(traffic);
        self.error_output.push_str(&finished.stderr);
        finished
    }

    /// Runs only these tests again.
    fn run_again(&mut self, tests: &BTreeSet<String>) -> Outcomes {
        let list = self.file("only");
        fs::write(&list, tests.iter().map(|name| format!("{name}\n")).collect::<String>()).unwrap();
        self.run(&["--only", &list.to_string_lossy()])
    }

    /// The output of the run about one test.
    fn error_of(&self, test: &str) -> String {
        let parts = self.error_output.split("=== ").filter(|part| part.lines().next() == Some(test));
        parts.last().unwrap_or("no message: it hung or crashed").lines().map(|line| format!("    {line}\n")).collect()
    }
}

fn outcome(line: &str) -> Option<(String, Outcome)> {
    let (word, name) = line.split_once(' ')?;
    let outcome = match word {
        "passed" => Outcome::Passed,
        "failed" => Outcome::Failed,
        "skipped" => Outcome::Skipped,
        _ => return None,
    };
    Some((name.to_owned(), outcome))
}

fn with(outcomes: &Outcomes, outcome: Outcome) -> BTreeSet<String> {
    outcomes.iter().filter(|(_, found)| **found == outcome).map(|(name, _)| name.clone()).collect()
}

/// The explained differences of a module, each with its reason.
fn explained(module: &str) -> BTreeMap<String, String> {
    let path = package_file("cpython-differences.txt");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let entries = lines.map(|line| {
        let (name, reason) = line.split_once(": ").unwrap_or_else(|| panic!("no reason in '{line}'"));
        assert!(!reason.trim().is_empty(), "no reason in '{line}'");
        (name.to_owned(), reason.to_owned())
    });
    entries.filter(|(name, _)| name.starts_with(&format!("{module}."))).collect()
}

/// Runs a module bare and over lanes and compares. Tests that differ run once more alone, so that a test that sometimes
/// fails in both cases does not count as a difference.
fn compare(module: &str, tests_min: usize, lane_bytes_min: u64) {
    let (mut bare, mut lanes) = (SuiteRun::new(false), SuiteRun::new(true));
    let passed_bare = with(&bare.run(&[module]), Outcome::Passed);
    assert!(passed_bare.len() >= tests_min, "only {} tests of {module} pass bare", passed_bare.len());
    let explained = explained(module);
    must_pass_bare(&mut bare, explained.keys().filter(|name| !passed_bare.contains(*name)).cloned().collect());

    let passed_over_lanes = with(&lanes.run(&[module]), Outcome::Passed);
    lanes.rack.assert_over_lanes(module, lanes.traffic, lane_bytes_min);
    let suspects = &passed_bare - &passed_over_lanes;
    let suspects: BTreeSet<String> = suspects.into_iter().filter(|name| !explained.contains_key(name)).collect();
    if suspects.is_empty() {
        return;
    }
    let again_bare = with(&bare.run_again(&suspects), Outcome::Passed);
    let again_over_lanes = with(&lanes.run_again(&suspects), Outcome::Passed);
    report(module, &(&again_bare - &again_over_lanes), &suspects, &lanes);
}

/// Runs tests that did not pass bare again and panics unless they pass.
fn must_pass_bare(bare: &mut SuiteRun, explained: BTreeSet<String>) {
    if !explained.is_empty() {
        let unknown = &explained - &with(&bare.run_again(&explained), Outcome::Passed);
        assert!(unknown.is_empty(), "explained, but these do not pass bare: {unknown:?}");
    }
}

/// Panics if a difference is reproducible; prints those that are not.
fn report(module: &str, differences: &BTreeSet<String>, suspects: &BTreeSet<String>, lanes: &SuiteRun) {
    for name in suspects - differences {
        println!("not reproducible, failed once over lanes: {name}\n{}", lanes.error_of(&name));
    }
    let mut text = String::new();
    for name in differences {
        let _ = writeln!(text, "{name}\n{}", lanes.error_of(name));
    }
    assert!(differences.is_empty(), "{} tests of {module} pass bare only:\n{text}", differences.len());
}

#[test]
fn test_socket_passes_wherever_it_passes_bare() {
    compare("test.test_socket", 400, 10_000);
}

/// Its sockets are AF_UNIX pairs, whose bytes cannot cross lanes and must not be disturbed.
#[test]
fn test_selectors_passes_wherever_it_passes_bare() {
    compare("test.test_selectors", 50, 0);
}

#[test]
fn test_asyncio_passes_wherever_it_passes_bare() {
    compare("test.test_asyncio", 1500, 10_000);
}
