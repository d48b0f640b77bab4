//! Tests of `crosslane bench router`: the keys that scripts read, errors, and cleanup after an interruption.

mod command;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use command::{CROSSLANE, assert_fails, crosslane, stdout};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit for an event that only a hang prevents.
const HANG_LIMIT: Duration = Duration::from_secs(120);

#[test]
#[ignore = "uses both cores for a minute or two; in ./x exam"]
fn the_report_has_the_keys_that_scripts_read() {
    let output = crosslane(&["bench", "router", "--quick", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let answer: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    for key in ["core_mpps_64b", "fib_v4_mlookups_per_s", "rnic_batch_gain_64b"] {
        assert!(answer[key].as_f64().is_some_and(|number| number > 0.0), "{key}: {}", answer[key]);
    }
    let rows = answer["adaptive"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        for key in ["size_bytes", "load_mpps", "p50_us", "p99_us", "best_fixed_batch", "best_fixed_p99_us"] {
            assert!(row[key].is_number(), "{key} in {row}");
        }
    }
}

#[test]
fn an_unknown_option_or_value_is_named() {
    assert_fails(&crosslane(&["bench", "router", "--seed", "x"]), 2, &["--seed"]);
    assert_fails(&crosslane(&["bench", "router", "--links", "3"]), 2, &["--links"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", "a", "--prefixes", "b"]), 2, &["--mrt", "--prefixes"]);
    assert_fails(&crosslane(&["bench", "router", "--size", "1500,63"]), 2, &["--size", "63", "64..=1500"]);
    assert_fails(&crosslane(&["bench", "router", "--load", "101"]), 2, &["--load", "101", "1..=100"]);
    let parts = "choose of fib, core, churn, ethernet, streams, interconnect, latency, adaptive";
    assert_fails(&crosslane(&["bench", "router", "--only", "core,cores"]), 2, &["--only", "'cores'", parts]);
    let kinds = "choose one of lanes, windows, rnic_lanes, rnic_udp";
    assert_fails(&crosslane(&["bench", "router", "--interconnect", "rnic"]), 2, &["--interconnect", "'rnic'", kinds]);
}

#[test]
fn an_option_that_applies_to_no_part_is_one_line() {
    let nothing = crosslane(&["bench", "router", "--only", "fib,core", "--interconnect", "lanes"]);
    assert_fails(&nothing, 2, &["--interconnect", "--only fib,core", "latency"]);
    let nothing = crosslane(&["bench", "router", "--only", "core", "--size", "1500"]);
    assert_fails(&nothing, 2, &["--size", "--only core", "interconnect, latency"]);
    let nothing = crosslane(&["bench", "router", "--only", "interconnect", "--load", "90"]);
    assert_fails(&nothing, 2, &["--load", "--only interconnect", "add latency or adaptive"]);
    let nothing = crosslane(&["bench", "router", "--only", "ethernet", "--prefixes", "table.txt"]);
    assert_fails(&nothing, 2, &["--only ethernet", "add fib or core"]);
}

#[test]
fn the_report_has_only_the_parts_that_were_run() {
    let output = crosslane(&["bench", "router", "--quick", "--json", "--only", "fib"]);
    assert!(output.status.success(), "{output:?}");
    let answer: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let keys: Vec<&str> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    let about = ["machine", "missing", "provenance", "remarks", "schema", "seed"];
    let expected: BTreeSet<&str> = about.into_iter().chain(["fib", "fib_v4_mlookups_per_s"]).collect();
    assert_eq!(keys.into_iter().collect::<BTreeSet<_>>(), expected);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("crosslane: forwarding tables: tables (1 of 5)"), "{stderr}");
}

/// A running benchmark, and its lines on standard error.
struct Run {
    child: Child,
    lines: Receiver<String>,
}

impl Run {
    fn start(arguments: &[&str]) -> Run {
        // A shell that runs the tests in the background ignores SIGINT, which child processes inherit (signal(7)).
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", CROSSLANE, "bench", "router", "--quick"]).args(arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        // The thread ends with the process.
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Run { child, lines }
    }

    /// Waits for a line that contains `text`.
    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + HANG_LIMIT;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(remaining).unwrap_or_else(|error| panic!("no line {text:?}: {error}"));
            if line.contains(text) {
                return;
            }
        }
    }

    fn process(&self) -> PathBuf {
        Path::new("/proc").join(self.child.id().to_string())
    }

    /// Interrupts the run and asserts that the signal ended it.
    fn interrupt(&mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::INT).unwrap();
        let status = self.child.wait().unwrap();
        assert!(!status.success(), "{status}");
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the targets of the links in /proc of a process's descriptors and namespaces.
fn link_targets(process: &Path) -> BTreeSet<String> {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    let namespaces = threads.map(|thread| thread.path().join("ns/net"));
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    let links = namespaces.chain(descriptors).filter_map(|link| fs::read_link(link).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// Returns the network namespaces of a process except that of this test.
fn namespaces(process: &Path) -> BTreeSet<String> {
    let own = fs::read_link("/proc/self/ns/net").unwrap().to_string_lossy().into_owned();
    link_targets(process).into_iter().filter(|link| link.starts_with("net:") && *link != own).collect()
}

/// Asserts that no process and no mount uses one of `namespaces`, and that no process is a child of `parent`.
fn assert_gone(namespaces: &BTreeSet<String>, parent: u32) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!namespaces.iter().any(|namespace| mounts.contains(namespace)), "{mounts}");
    let is_process = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit());
    for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()).filter(is_process) {
        let used: Vec<String> = link_targets(&process).intersection(namespaces).cloned().collect();
        assert!(used.is_empty(), "{} uses {used:?}", process.display());
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        assert!(!status.contains(&format!("PPid:\t{parent}\n")), "{status}");
    }
}

#[test]
fn an_interrupted_run_between_virtual_ethernet_ports_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: network namespaces need root; run the test as root");
        return;
    }
    let mut run = Run::start(&["--only", "ethernet"]);
    run.wait_for("virtual Ethernet: namespaces (1 of ");
    let deadline = Instant::now() + HANG_LIMIT;
    let (process, pid) = (run.process(), run.child.id());
    // Two for each of the four forwarders: those of the node and of the sink.
    while namespaces(&process).len() < 8 {
        assert!(Instant::now() < deadline, "{:?}", link_targets(&process));
        std::thread::sleep(Duration::from_millis(20));
    }
    let namespaces = namespaces(&process);
    run.interrupt();
    assert_gone(&namespaces, pid);
}

#[test]
fn an_interrupted_run_between_nodes_leaves_only_its_plots() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: two nodes need two cores; run the test on such a machine");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let arguments = ["--only", "interconnect,latency", "--interconnect", "rnic_lanes", "--plot"];
    let mut run = Run::start(&[&arguments[..], &[plots.to_str().unwrap()]].concat());
    run.wait_for("router-rnic_lanes-p99-hop.svg");
    let (process, pid) = (run.process(), run.child.id());
    let shared: Vec<String> = link_targets(&process).into_iter().filter(|link| link.starts_with("/dev/shm/")).collect();
    run.interrupt();
    assert_gone(&BTreeSet::new(), pid);
    assert!(!shared.iter().any(|file| Path::new(file).exists()), "{shared:?}");
    let mut names: Vec<String> =
        fs::read_dir(&plots).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["router-rnic_lanes-p50-hop.svg", "router-rnic_lanes-p99-hop.svg"]);
    for name in names {
        let text = fs::read_to_string(plots.join(&name)).unwrap();
        assert!(text.trim_end().ends_with("</svg>"), "{name} is incomplete");
    }
}

#[test]
fn an_invalid_file_of_routes_is_one_line_before_anything_is_measured() {
    let missing = crosslane(&["bench", "router", "--mrt", "/nowhere/rib"]);
    assert_fails(&missing, 2, &["/nowhere/rib: No such file"]);
    let mut list = tempfile::NamedTempFile::new().unwrap();
    list.write_all(b"10.0.0.0/8\n10.0.0.0/40\n").unwrap();
    let path = list.path().to_str().unwrap();
    let broken = crosslane(&["bench", "router", "--quick", "--prefixes", path]);
    assert_fails(&broken, 2, &[path, "line 2: '10.0.0.0/40' is not a prefix"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", path]), 2, &[path, "record 1:"]);
}
