//! `crosslane bench router`: the line that scripts use.

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

/// How long a test waits for what surely comes.
const PATIENCE: Duration = Duration::from_secs(120);

/// The keys that scripts read.
#[test]
#[ignore = "a minute or two of both cores; in ./x exam"]
fn the_benchmark_of_the_router_answers_with_the_keys_that_scripts_read() {
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
fn what_it_does_not_know_is_named() {
    assert_fails(&crosslane(&["bench", "router", "--seed", "x"]), 2, &["--seed"]);
    assert_fails(&crosslane(&["bench", "router", "--links", "3"]), 2, &["--links"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", "a", "--prefixes", "b"]), 2, &["--mrt", "--prefixes"]);
    assert_fails(&crosslane(&["bench", "router", "--size", "1500,63"]), 2, &["--size", "63", "64..=1500"]);
    assert_fails(&crosslane(&["bench", "router", "--load", "101"]), 2, &["--load", "101", "1..=100"]);
    let parts = "choose of fib, core, churn, ethernet, interconnect, latency, adaptive";
    assert_fails(&crosslane(&["bench", "router", "--only", "core,cores"]), 2, &["--only", "'cores'", parts]);
    let kinds = "choose one of lanes, windows, rnic_lanes, rnic_udp";
    assert_fails(&crosslane(&["bench", "router", "--interconnect", "rnic"]), 2, &["--interconnect", "'rnic'", kinds]);
}

#[test]
fn a_choice_that_chooses_nothing_is_one_line() {
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
fn a_part_that_is_run_alone_is_all_that_the_answer_has() {
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

/// A run, and what it says on stderr.
struct Run {
    child: Child,
    lines: Receiver<String>,
}

impl Run {
    fn start(arguments: &[&str]) -> Run {
        // Whoever runs the tests in the background ignores interrupts, and so does all that is started there.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", CROSSLANE, "bench", "router", "--quick"]).args(arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (said, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        // It ends with the process.
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| said.send(line)));
        Run { child, lines }
    }

    /// Waits for a line with this in it.
    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("{text:?} is not said: {error}"));
            if line.contains(text) {
                return;
            }
        }
    }

    fn process(&self) -> PathBuf {
        Path::new("/proc").join(self.child.id().to_string())
    }

    /// Interrupts it, and asserts that it ended by that.
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

/// What the links of a process's descriptors and threads name: sockets, namespaces, files.
fn held(process: &Path) -> BTreeSet<String> {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    let namespaces = threads.map(|thread| thread.path().join("ns/net"));
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    let links = namespaces.chain(descriptors).filter_map(|link| fs::read_link(link).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// Network namespaces that a process has and this test has not.
fn namespaces(process: &Path) -> BTreeSet<String> {
    let own = fs::read_link("/proc/self/ns/net").unwrap().to_string_lossy().into_owned();
    held(process).into_iter().filter(|link| link.starts_with("net:") && *link != own).collect()
}

/// That no process and no mount has one of these, and that no process has `parent` for its parent.
fn assert_gone(namespaces: &BTreeSet<String>, parent: u32) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!namespaces.iter().any(|namespace| mounts.contains(namespace)), "{mounts}");
    let is_process = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit());
    for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()).filter(is_process) {
        let left: Vec<String> = held(&process).intersection(namespaces).cloned().collect();
        assert!(left.is_empty(), "{} has {left:?}", process.display());
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        assert!(!status.contains(&format!("PPid:\t{parent}\n")), "{status}");
    }
}

#[test]
fn a_run_between_virtual_ethernet_that_is_interrupted_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        println!("a_run_between_virtual_ethernet is skipped: network namespaces take root; run it as root");
        return;
    }
    let mut run = Run::start(&["--only", "ethernet"]);
    run.wait_for("virtual Ethernet: namespaces (1 of ");
    let deadline = Instant::now() + PATIENCE;
    let (process, pid) = (run.process(), run.child.id());
    // Those of the node and of the sink, for each of the four that forward.
    while namespaces(&process).len() < 8 {
        assert!(Instant::now() < deadline, "{:?}", held(&process));
        std::thread::sleep(Duration::from_millis(20));
    }
    let namespaces = namespaces(&process);
    run.interrupt();
    assert_gone(&namespaces, pid);
}

#[test]
fn a_run_between_nodes_that_is_interrupted_leaves_its_plots_and_nothing_else() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("a_run_between_nodes is skipped: two nodes need a core each; run it where there are two");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let arguments = ["--only", "interconnect,latency", "--interconnect", "rnic_lanes", "--plot"];
    let mut run = Run::start(&[&arguments[..], &[plots.to_str().unwrap()]].concat());
    run.wait_for("router-rnic_lanes-p99-hop.svg");
    let (process, pid) = (run.process(), run.child.id());
    let shared: Vec<String> = held(&process).into_iter().filter(|link| link.starts_with("/dev/shm/")).collect();
    run.interrupt();
    assert_gone(&BTreeSet::new(), pid);
    assert!(!shared.iter().any(|file| Path::new(file).exists()), "{shared:?}");
    let mut names: Vec<String> =
        fs::read_dir(&plots).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["router-rnic_lanes-p50-hop.svg", "router-rnic_lanes-p99-hop.svg"]);
    for name in names {
        let text = fs::read_to_string(plots.join(&name)).unwrap();
        assert!(text.trim_end().ends_with("</svg>"), "{name} is not whole");
    }
}

#[test]
fn a_file_of_routes_that_is_no_good_is_one_line_before_anything_is_measured() {
    let missing = crosslane(&["bench", "router", "--mrt", "/nowhere/rib"]);
    assert_fails(&missing, 2, &["/nowhere/rib: No such file"]);
    let mut list = tempfile::NamedTempFile::new().unwrap();
    list.write_all(b"10.0.0.0/8\n10.0.0.0/40\n").unwrap();
    let path = list.path().to_str().unwrap();
    let broken = crosslane(&["bench", "router", "--quick", "--prefixes", path]);
    assert_fails(&broken, 2, &[path, "line 2: '10.0.0.0/40' is not a prefix"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", path]), 2, &[path, "record 1:"]);
}
