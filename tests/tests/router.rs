//! Clusters of routers in network namespaces: they forward packets of unmodified programs and learn the routes of
//! routing daemons, their nodes are killed and restarted, and nothing of them is left behind.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use serde_json::Value;
use system_tests::process::{Stopped, signal};
use system_tests::{Finished, Process, WAIT_MAX, paths, wait_for, wait_until};

use cluster::{Cluster, can_make_namespaces};

#[path = "router/alternating.rs"]
mod alternating;
#[path = "router/bird.rs"]
mod bird;
#[path = "router/captures.rs"]
mod captures;
#[path = "router/cluster.rs"]
mod cluster;
#[path = "router/dead_paths.rs"]
mod dead_paths;
#[path = "router/files.rs"]
mod files;
#[path = "router/filters.rs"]
mod filters;
#[path = "router/floods.rs"]
mod floods;
#[path = "router/large.rs"]
mod large;
#[path = "router/metrics.rs"]
mod metrics;
#[path = "router/pauses.rs"]
mod pauses;
#[path = "router/ports.rs"]
mod ports;
#[path = "router/redirects.rs"]
mod redirects;
#[path = "router/stale_routes.rs"]
mod stale_routes;
#[path = "router/sysctls.rs"]
mod sysctls;

const DAY_US: u64 = 86_400_000_000;
const NODES: [&str; 3] = ["a", "b", "c"];
/// Number of steps of the demo, each of which prints a line that begins with `ok`.
const STEPS: usize = 13;

/// `crosslane router demo`, and its cluster of three nodes.
struct Demo {
    process: Option<Process>,
    cluster: Cluster,
}

impl Deref for Demo {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Drop for Demo {
    /// Ends the demo, which then cleans up, also after a failed test.
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            drop(process.stop(WAIT_MAX));
        }
    }
}

impl Demo {
    /// Starts a demo that keeps its cluster up, and waits until all steps have succeeded.
    fn stay(interconnect: &str, ports: &str) -> Self {
        let demo = Self::start(&["--quick", "--stay", "--interconnect", interconnect, "--ports", ports]);
        demo.process().wait_until("the end of its steps", WAIT_MAX, |demo| demo.stdout().contains("stays up until"));
        let output = demo.process().stdout();
        let succeeded = output.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(succeeded == STEPS && !output.contains("FAILED"), "{output}");
        assert_eq!(demo.node(0)["interconnect"], interconnect);
        demo
    }

    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(paths::crosslane());
        let process = Process::start(command.args(["router", "demo"]).args(arguments).env("TMPDIR", "/tmp"));
        let name = format!("crosslane-demo-{}", process.pid());
        let folder = Path::new("/tmp").join(&name);
        Self { process: Some(process), cluster: Cluster { name, folder } }
    }

    fn process(&self) -> &Process {
        self.process.as_ref().expect("it was not ended")
    }

    /// Sends SIGINT, as a terminal does, and waits for its end.
    fn interrupt(mut self) -> Finished {
        let process = self.process.take().expect("it was not ended");
        process.signal(Signal::INT);
        process.wait(WAIT_MAX)
    }
}

/// The fields of `/proc/PID/stat` from the state on (proc_pid_stat(5), field 3).
fn stat_fields(pid: u64) -> Vec<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    stat.rsplit(") ").next().expect("its state").split(' ').map(str::to_owned).collect()
}

/// CPU time of a process in hundredths of a second: `utime` and `stime`.
fn cpu_ticks(pid: u64) -> u64 {
    stat_fields(pid)[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

#[test]
fn a_cluster_forwards_for_unmodified_programs_survives_a_kill_and_leaves_nothing() {
    if !can_make_namespaces("a_cluster_forwards_for_unmodified_programs_survives_a_kill_and_leaves_nothing") {
        return;
    }
    let demo = Demo::stay("lane", "auto");
    a_death_was_counted(&demo);
    an_idle_node_uses_no_processor(&demo);
    routes_of_the_kernel_are_the_clusters(&demo);
    packets_are_followed_through_all_nodes(&demo);
    a_stopped_node_is_lost_until_it_continues(&demo);
    a_frozen_node_is_lost_until_it_continues(&demo);
    a_killed_node_is_in_no_route_of_the_others(&demo);
    let (name, folder) = (demo.name.clone(), demo.folder.clone());
    demo.interrupt().must_succeed();
    Cluster::assert_gone(&name, &folder);
}

/// The demo has killed node c, once, and no other node.
fn a_death_was_counted(demo: &Demo) {
    let status = demo.node(0);
    let [b, c] = &status["peers"].as_array().expect("peers")[..] else { panic!("{status:#}") };
    assert_eq!((&b["node"], &c["node"]), (&Value::from("b"), &Value::from("c")), "{status:#}");
    for (peer, losses) in [(b, 0), (c, 1)] {
        assert_eq!((&peer["state"], &peer["losses"]), (&Value::from("up"), &Value::from(losses)), "{status:#}");
        // Routes to a node are withdrawn only when it is lost.
        assert_eq!(peer["withdrawn_us"].is_u64(), losses > 0, "{status:#}");
    }
    assert_eq!(status["buffers_free"], status["buffers"], "no buffer is lost: {status:#}");
}

fn an_idle_node_uses_no_processor(demo: &Demo) {
    const SPAN: Duration = Duration::from_secs(2);
    // A heartbeat to two nodes every 500 ms, and a check every 20 ms whether their processes are stopped, took up to
    // two hundredths of a second in this span, concurrently with other tests. A thread that spins uses all of it.
    const CPU_SHARE_MAX: f64 = 0.05;
    let pids: Vec<u64> = (0..NODES.len()).map(|node| demo.node(node)["pid"].as_u64().expect("up")).collect();
    let before: Vec<u64> = pids.iter().map(|pid| cpu_ticks(*pid)).collect();
    let began = Instant::now();
    std::thread::sleep(SPAN);
    for (pid, before) in pids.iter().zip(before) {
        let (ticks, passed) = (cpu_ticks(*pid) - before, began.elapsed());
        let is_idle = ticks as f64 / 100.0 <= CPU_SHARE_MAX * passed.as_secs_f64();
        assert!(is_idle, "process {pid} used {ticks} hundredths of a second in {passed:?}");
    }
}

fn routes_of_the_kernel_are_the_clusters(demo: &Demo) {
    let route = ["198.51.100.0/24", "via", "10.77.1.2"];
    demo.ip("a", &[&["route", "add"][..], &route].concat());
    demo.wait_for_route("c", "198.51.100.7", Some("a"));
    demo.ip("a", &[&["route", "del"][..], &route].concat());
    demo.wait_for_route("c", "198.51.100.7", None);
    demo.ip("a", &["address", "add", "10.255.0.1/32", "dev", "lo"]);
    demo.wait_for_route("c", "10.255.0.1", Some("a"));
    demo.ping("h3", "10.255.0.1").must_succeed();
}

fn packets_are_followed_through_all_nodes(demo: &Demo) {
    let mut command = demo.command("trace", &["--to", "10.77.1.2", "--protocol", "icmp", "--count", "1", "--json"]);
    let trace = Process::start(command.args(["--seconds", "30"]));
    trace.wait_until("its beginning", WAIT_MAX, |trace| trace.stderr().contains("tracing packets"));
    demo.ping("h3", "10.77.1.2").must_succeed();
    let sent = |line: &str| line.contains(r#""node":"a""#) && line.contains("sent by");
    trace.wait_until("the packet's end", WAIT_MAX, |trace| trace.stdout().lines().any(sent));
    let steps = trace.stdout();
    let at = |node: &str, what: &str| {
        let node = format!(r#""node":"{node}""#);
        steps.lines().any(|line| line.contains(&node) && line.contains(what))
    };
    assert!(at("c", "received") && at("c", "looked up") && at("c", "to node a") && at("a", "from another"), "{steps}");
}

/// The state of node `name` as node `of`, which is not stopped, reports it.
fn peer(demo: &Demo, of: usize, name: &str) -> Value {
    let status = demo.json("status", &["--node", NODES[of]])["nodes"][0]["status"].clone();
    let peers = status["peers"].as_array().expect("peers");
    peers.iter().find(|peer| peer["node"] == name).unwrap_or_else(|| panic!("{status:#}")).clone()
}

#[track_caller]
fn wait_for_peer(demo: &Demo, of: usize, name: &str, state: &str) -> Value {
    wait_for(&format!("{state} node {name}"), || peer(demo, of, name), |peer| peer["state"] == state)
}

/// A stopped node is lost long before its silence limit, and reconnects when it continues; it drops the packets that
/// were queued meanwhile. On an oversubscribed machine, a node that waits for a processor is not lost.
fn a_stopped_node_is_lost_until_it_continues(demo: &Demo) {
    /// Longer than the maximum age of queued packets.
    const STOP_TIME: Duration = Duration::from_millis(1500);
    let cpu_bound = || Process::start(Command::new(paths::tool("sh")).args(["-c", "while :; do :; done"]));
    let mut load: Vec<Process> = (0..3).map(|_| cpu_bound()).collect();
    let traffic = |from: &str, to: &str| {
        let mut ping = demo.at(from, paths::tool("ping"));
        Process::start(ping.args(["-n", "-q", "-i", "0.01", "-s", "1000", to]))
    };
    let _traffic = [traffic("h1", "10.77.3.2"), traffic("h3", "10.77.1.2"), traffic("h2", "10.77.1.2")];
    for (stopped, others) in [(2, [0, 1]), (0, [1, 2])] {
        let (name, pid) = (NODES[stopped], demo.node(stopped)["pid"].as_u64().expect("up"));
        let losses = || others.map(|of| peer(demo, of, name)["losses"].as_u64().expect("a number"));
        let before = losses();
        let stop = Stopped::new(pid);
        let began = Instant::now();
        for of in others {
            let peer = wait_for_peer(demo, of, name, "down");
            assert!(stat_fields(pid)[0] == "T" && peer["reason"] == "its process is stopped", "{peer:#}");
        }
        let host = |node: usize| format!("10.77.{}.2", node + 1);
        let [one, other] = others;
        demo.ping(&format!("h{}", one + 1), &host(other)).must_succeed();
        let finished = demo.ping(&format!("h{}", one + 1), &host(stopped));
        assert!(!finished.status.success(), "{finished}");
        std::thread::sleep(STOP_TIME.saturating_sub(began.elapsed()));
        assert_eq!(losses(), before.map(|losses| losses + 1), "a stopped node is not contacted repeatedly");
        drop(stop);
        for of in others {
            wait_for_peer(demo, of, name, "up");
        }
        demo.ping(&format!("h{}", one + 1), &host(stopped)).must_succeed();
        assert_eq!(losses(), before.map(|losses| losses + 1), "it was lost once");
        load.clear();
        let status = demo.node(stopped);
        assert!(status["drops"]["stale"].as_u64().is_some_and(|packets| packets > 0), "{status:#}");
    }
}

/// A control group (version 2) with one process, which returns to its previous group when this is dropped.
struct ControlGroup {
    root: &'static Path,
    folder: PathBuf,
    pid: u64,
}

impl ControlGroup {
    /// `None` if this machine does not allow creating one.
    fn with(pid: u64) -> Option<Self> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        groups.lines().find(|line| *line == "0::/")?;
        let folder = root.join(format!("crosslane-test-{pid}"));
        fs::create_dir(&folder).ok()?;
        let group = Self { root, folder, pid };
        fs::write(group.folder.join("cgroup.procs"), pid.to_string()).ok()?;
        Some(group)
    }

    fn freeze(&self, is_frozen: bool) {
        fs::write(self.folder.join("cgroup.freeze"), if is_frozen { "1" } else { "0" }).expect("a freezer");
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = fs::write(self.folder.join("cgroup.freeze"), "0");
        let _ = fs::write(self.root.join("cgroup.procs"), self.pid.to_string());
        let _ = fs::remove_dir(&self.folder);
    }
}

/// As a stopped node: the kernel reports that its control group is frozen.
fn a_frozen_node_is_lost_until_it_continues(demo: &Demo) {
    let (name, others) = (NODES[1], [0, 2]);
    let Some(group) = ControlGroup::with(demo.node(1)["pid"].as_u64().expect("up")) else {
        println!("a frozen node is skipped: this machine allows no control group of version 2 for it");
        return;
    };
    group.freeze(true);
    for of in others {
        let peer = wait_for_peer(demo, of, name, "down");
        assert_eq!(peer["reason"], "its container is frozen", "{peer:#}");
    }
    demo.ping("h1", "10.77.3.2").must_succeed();
    group.freeze(false);
    for of in others {
        wait_for_peer(demo, of, name, "up");
    }
    demo.ping("h1", "10.77.2.2").must_succeed();
}

/// Kills a node and returns the time, in microseconds of the day.
fn kill(demo: &Demo, node: usize) -> u64 {
    let pid = demo.node(node)["pid"].as_u64().expect("up");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    signal(pid, Signal::KILL);
    (now.as_micros() % u128::from(DAY_US)) as u64
}

/// The lines of a node's log about the loss of another one.
fn losses<'a>(log: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let node = format!("node=\"{name}\"");
    log.lines().filter(move |line| line.contains(" lost: ") && line.contains(&node))
}

/// Nodes a and b remove the routes of c's ports from their own tables and from those of their kernels.
fn a_killed_node_is_in_no_route_of_the_others(demo: &Demo) {
    let (name, others) = (NODES[2], [0, 1]);
    let uses_it = |route: &&Value| route["hops"].as_array().expect("hops").iter().any(|hop| hop["node"] == name);
    let routes_by_it = |of: usize| {
        let fib = demo.json("fib", &["--node", NODES[of]]);
        fib["routes"].as_array().expect("routes").iter().filter(uses_it).count()
    };
    let kernel_routes = |of: usize| demo.ip(NODES[of], &["route", "show", "10.77.3.0/24"]);
    for of in others {
        let has_routes = routes_by_it(of) > 0 && kernel_routes(of).contains("crosslane0");
        assert!(has_routes, "{} has routes to remove", NODES[of]);
    }
    kill(demo, 2);
    for of in others {
        let peer = wait_for_peer(demo, of, name, "down");
        assert_eq!(peer["routes"], 0, "{peer:#}");
        let log = demo.log(NODES[of]);
        let losses: Vec<&str> = losses(&log, name).collect();
        let reason = peer["reason"].as_str().expect("a reason");
        assert_eq!(Some(losses.len() as u64), peer["losses"].as_u64(), "{log}");
        assert!(losses.last().is_some_and(|line| line.contains(reason)), "{peer:#}: {log}");
        wait_until("removal of its routes", || routes_by_it(of) == 0);
        demo.wait_for_route(NODES[of], "10.77.3.2", None);
        wait_until("removal of its routes in the kernel", || kernel_routes(of).is_empty());
    }
    let finished = demo.ping("h1", "10.77.3.2");
    assert!(!finished.status.success() && finished.stdout.contains("Unreachable"), "{finished}");
    demo.ping("h1", "10.77.2.2").must_succeed();
}

/// The time at which a node last lost another one, in microseconds of the day, from the log line, such as
/// `2026-11-23T23:33:35.470603Z  WARN lost: its connection ended node="c"`.
fn lost_us(log: &str, name: &str) -> u64 {
    let line = losses(log, name).last().unwrap_or_else(|| panic!("{log}"));
    let time = line.split(['T', 'Z']).nth(1).expect("a time");
    let parts: Vec<u64> = time.split([':', '.']).map(|part| part.parse().expect("a number")).collect();
    let [hours, minutes, seconds, us] = parts[..] else { panic!("{line}") };
    ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + us
}

/// Measures the time from a kill of node c until the others stop sending to it.
#[test]
#[ignore = "reports times and asserts nothing about them"]
fn times_from_kills_to_withdrawals() {
    const KILLS: usize = 10;
    if !can_make_namespaces("times_from_kills_to_withdrawals") {
        return;
    }
    // The kernel needs time to release the resources of a process, most of all for an AF_XDP socket.
    for ports in ["af-packet", "af-xdp"] {
        let demo = Demo::stay("lane", ports);
        let mut all_us: Vec<u64> = (0..KILLS).flat_map(|_| withdrawals_us(&demo)).collect();
        all_us.sort_unstable();
        println!("{ports}: median {} us, all {all_us:?}", all_us[all_us.len() / 2]);
        demo.interrupt().must_succeed();
    }
}

/// Kills node c once. Returns the time, in microseconds, until each other node stopped sending to it.
fn withdrawals_us(demo: &Demo) -> [u64; 2] {
    /// Before and after the kill the test itself uses no processor.
    const PAUSE: Duration = Duration::from_millis(300);
    std::thread::sleep(PAUSE);
    let killed_us = kill(demo, 2);
    std::thread::sleep(PAUSE);
    demo.finish("up", &["--node", NODES[2]]).must_succeed();
    [0, 1].map(|of| {
        // It did not rejoin before the withdrawal was reported.
        let withdrawn_us = wait_for_peer(demo, of, NODES[2], "up")["withdrawn_us"].as_u64().expect("it was lost");
        let detected_us = (lost_us(&demo.log(NODES[of]), NODES[2]) + DAY_US - killed_us) % DAY_US;
        println!("node {}: detected {detected_us} us after the kill, withdrawn {withdrawn_us} us later", NODES[of]);
        detected_us + withdrawn_us
    })
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    if !can_make_namespaces("an_interrupted_demo_leaves_nothing") {
        return;
    }
    let demo = Demo::start(&["--quick", "--interconnect", "rnic-lane"]);
    demo.process().wait_until("a first step", WAIT_MAX, |demo| demo.stdout().contains("ok "));
    let (name, folder) = (demo.name.clone(), demo.folder.clone());
    let finished = demo.interrupt().must_exit_with(1);
    assert!(finished.stderr.contains("interrupted"), "{finished}");
    Cluster::assert_gone(&name, &folder);
}

/// FRR's routing daemons in the namespace of a node or host. They end with the guard.
struct Daemons {
    _zebra: Process,
    bgpd: Process,
}

impl Daemons {
    fn start(cluster: &Cluster, folder: &Path, at: &str, bgp: &str) -> Self {
        let folder = folder.join(at);
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("zebra.conf"), "").expect("a file");
        fs::write(folder.join("bgpd.conf"), bgp).expect("a file");
        // The daemons drop root.
        let mut chown = Command::new(paths::tool("chown"));
        Process::start(chown.args(["-R", "frr:frr"]).arg(&folder)).wait(WAIT_MAX).must_succeed();
        let zebra = Self::start_one(cluster, &folder, at, "zebra");
        let socket = folder.join("zserv.api");
        zebra.wait_until("its socket", WAIT_MAX, |_| socket.exists());
        Self { _zebra: zebra, bgpd: Self::start_one(cluster, &folder, at, "bgpd") }
    }

    fn start_one(cluster: &Cluster, folder: &Path, at: &str, daemon: &str) -> Process {
        let file = |ending: &str| folder.join(format!("{daemon}.{ending}"));
        let mut command = cluster.at(at, Path::new("/usr/lib/frr").join(daemon));
        command.arg("-f").arg(file("conf")).arg("-i").arg(file("pid")).arg("-z").arg(folder.join("zserv.api"));
        Process::start(command.arg("--vty_socket").arg(folder).args(["-P", "0"]))
    }

    /// Kills bgpd, and starts it again.
    fn restart_bgpd(&mut self, cluster: &Cluster, folder: &Path, at: &str) {
        self.bgpd.signal(Signal::KILL);
        let started = Self::start_one(cluster, &folder.join(at), at, "bgpd");
        drop(std::mem::replace(&mut self.bgpd, started));
    }
}

/// A folder that the daemons, which drop root, can enter.
fn folder_of_daemons() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("frr-").tempdir_in("/tmp").expect("a folder");
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a folder");
    folder
}

/// The configuration of bgpd for one neighbour, each with its address and AS; `what` is announced.
fn bgp(own: (&str, u32), other: (&str, u32), what: &str) -> String {
    let ((own, own_as), (other, other_as)) = (own, other);
    format!(
        "router bgp {own_as}\n bgp router-id {own}\n no bgp ebgp-requires-policy\n neighbor {other} remote-as \
         {other_as}\n neighbor {other} timers 1 3\n neighbor {other} timers connect 1\n address-family ipv4 \
         unicast\n  {what}\n exit-address-family\n"
    )
}

#[test]
fn routes_of_bgp_are_learnt_by_all_nodes_and_withdrawn() {
    if !can_make_namespaces("routes_of_bgp_are_learnt_by_all_nodes_and_withdrawn") {
        return;
    }
    let demo = Demo::stay("window", "auto");
    let folder = folder_of_daemons();
    // Host h1 is an external router with a network behind it.
    demo.ip("h1", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    let (node, host) = (("10.77.1.1", 65000), ("10.77.1.2", 65001));
    let _of_node = Daemons::start(&demo, folder.path(), "a", &bgp(node, host, "redistribute kernel"));
    let of_host = Daemons::start(&demo, folder.path(), "h1", &bgp(host, node, "network 203.0.113.0/24"));
    demo.wait_for_route("c", "203.0.113.1", Some("a"));
    demo.ping("h3", "203.0.113.1").must_succeed();
    // The other router learns the cluster's networks from node a only.
    let routes = demo.ip("h1", &["route", "show", "proto", "bgp"]);
    assert!(routes.contains("10.77.3.0/24"), "{routes}");
    drop(of_host.bgpd);
    demo.wait_for_route("c", "203.0.113.1", None);
    let finished = demo.ping("h3", "203.0.113.1");
    assert!(!finished.status.success() && finished.stdout.contains("Unreachable"), "{finished}");
}

/// An error in a cluster file is reported in one line with its remedy before anything is changed.
#[test]
fn a_bad_cluster_file_is_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut example = Command::new(paths::crosslane());
    let example = Process::start(example.args(["router", "example"])).wait(WAIT_MAX).must_succeed().stdout;
    let port = "[[nodes.ports]]\ndevice = \"eth0\"\nkind = \"auto\"\n";
    let up = |text: &str, arguments: &[&str]| {
        fs::write(folder.path().join("c.toml"), text).expect("a file");
        let mut command = Command::new(paths::crosslane());
        command.args(["router", "up", "--cluster", "c.toml"]).args(arguments).current_dir(folder.path());
        Process::start(command.env("CROSSLANE_RACK", folder.path().join("base"))).wait(WAIT_MAX)
    };
    let cases: [(String, &[&str], &[&str]); 6] = [
        (example.replacen(port, &(port.to_owned() + port), 1), &[], &["ports[1].device", "'eth0'", "once"]),
        (example.replace("\"b\"", "\"a\""), &[], &["nodes[1].name", "'a'", "own"]),
        (example[..example.find("name = \"b\"").expect("b") - 10].to_owned(), &[], &["1 nodes; a cluster has 2 to"]),
        (example.clone(), &["--node", "z"], &["node 'z' is not in c.toml", "a, b, c"]),
        (example.replace("lane\"  ", "lanes\" "), &[], &["interconnect.kind", "lanes", "rnic-udp"]),
        (
            example.replace("namespace = \"b\"", "namespace = \"no-such\""),
            &["--node", "b"],
            &["nodes[1].namespace", "no-such"],
        ),
    ];
    for (text, arguments, words) in cases {
        up(&text, arguments).must_fail_in_one_line(2, words);
    }
}
