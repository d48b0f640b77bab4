//! Tests of the commands for racks: `rack`, `up`, `down`, `status`, and `run` with a node of a rack.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

mod command;
mod library;

use command::{CROSSLANE, assert_fails, crosslane, error_line, stdout};

/// Maximum CPU time of an idle proxy in one second. A proxy that polled after each short sleep used 100 ms, one that
/// also flushed cache lines used 370 ms.
const IDLE_CPU_MS_MAX: u64 = 50;

/// A folder with a rack file and the run directory of the rack.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Drop for Fixture {
    /// Stops the processes of a failed test.
    fn drop(&mut self) {
        if self.folder.path().join("base").exists() {
            let _ = self.command(&["down", "--rack", "r.toml"]).output();
        }
    }
}

impl Fixture {
    fn new(arguments: &[&str]) -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        let example = crosslane(&[&["rack", "example"], arguments].concat());
        assert!(example.status.success(), "{example:?}");
        fs::write(fixture.file(), example.stdout).unwrap();
        fixture
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("r.toml")
    }

    /// Makes a library that does nothing and returns its path.
    fn library(&self) -> String {
        let path = self.folder.path().join("library.so");
        library::compile(&path, env!("CARGO_PKG_VERSION"));
        path.to_str().unwrap().to_owned()
    }

    /// Returns the command with an environment that puts run directories into this folder.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(CROSSLANE);
        command.args(arguments).env("CROSSLANE_RACK", self.folder.path().join("base")).current_dir(self.folder.path());
        for variable in ["NODE", "ONLY", "EXCEPT", "REQUIRE_LANE", "OFF"] {
            command.env_remove(format!("CROSSLANE_{variable}"));
        }
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

#[test]
fn an_example_has_nodes_named_by_letters_and_the_options_given() {
    let text = stdout(&crosslane(&["rack", "example", "--nodes", "3", "--link", "gen5x16", "--trust", "direct"]));
    for line in
        ["name = \"c\"", "address = \"127.77.0.3\"", "timing = \"gen5x16\"", "trust = \"direct\"", "backend = \"shm\""]
    {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(!text.contains("127.77.0.4"));
    let fixture = Fixture::new(&["--nodes", "32"]);
    let rack = rack::RackFile::read(&fixture.file()).unwrap().rack;
    for (name, address) in [("z", "127.77.0.26"), ("aa", "127.77.0.27"), ("af", "127.77.0.32")] {
        assert_eq!(rack.node(name).map(|(_, node)| node.address), address.parse().ok());
    }
    assert!(!stdout(&crosslane(&["rack", "example", "--nodes", "2", "--backend", "shm"])).contains("timing"));
}

#[test]
fn an_example_with_an_invalid_option_is_wrong_use() {
    for (option, value, word) in [
        ("--nodes", "1", "2..=32"),
        ("--nodes", "33", "2..=32"),
        ("--backend", "ib", "choose one of shm, pci, dax"),
        ("--link", "gen2", "ntb"),
        ("--trust", "none", "direct"),
    ] {
        assert_fails(&crosslane(&["rack", "example", option, value]), 2, &[value, word]);
    }
}

#[test]
fn an_invalid_rack_is_one_line_and_exit_code_2_and_starts_nothing() {
    let fixture = Fixture::new(&[]);
    let good = fs::read_to_string(fixture.file()).unwrap();
    fs::write(fixture.file(), good.replace("127.77.0.2", "127.77.0.1")).unwrap();
    let bad = fixture.output(&["run", "--rack", "r.toml", "--node", "a", "--", "echo"]);
    assert_fails(&bad, 2, &["r.toml, line", "nodes[1].address", "'127.77.0.1'", "its own"]);
    for (address, words) in [
        ("http://127.0.0.1:2379/rack", ["http://127.0.0.1:2379/rack: a rack is a file", "etcd://HOST:PORT/PREFIX"]),
        ("etcd://127.0.0.1/rack", ["\"127.0.0.1\" is not HOST:PORT", "as in etcd://"]),
        ("etcd://me:secret@127.0.0.1:2379/rack", ["etcd://...", "passwords of etcd are not supported"]),
    ] {
        for command in ["stat", "up", "down", "status"] {
            let output = fixture.output(&[command, "--rack", address]);
            assert_fails(&output, 2, &words);
            assert!(!error_line(&output).contains("secret"));
        }
    }
    let missing = fixture.output(&["run", "--rack", "none.toml", "--node", "a", "--", "echo"]);
    assert_fails(&missing, 2, &["none.toml", "--rack"]);
    assert!(!fixture.folder.path().join("base").exists() && !fixture.folder.path().join("none.toml").exists());
}

#[test]
fn run_needs_a_node_of_the_rack() {
    let fixture = Fixture::new(&[]);
    let run = |arguments: &[&str]| fixture.output(&[&["run", "--rack", "r.toml"], arguments].concat());
    assert_fails(&run(&["--", "true"]), 2, &["r.toml", "--node"]);
    assert_fails(&run(&["--node", "q", "--", "true"]), 2, &["'q'", "r.toml", "one of a, b"]);
}

#[test]
fn a_node_that_is_not_up_is_a_warning_or_an_error() {
    let fixture = Fixture::new(&[]);
    let library = fixture.library();
    let run = |strict: &[&str], program: &[&str]| {
        let head = ["run", "--library", &library, "--rack", "r.toml", "--node", "b"];
        fixture.output(&[&head[..], strict, &["--"], program].concat())
    };
    assert_fails(&run(&["--require-lane"], &["true"]), 1, &["'b'", "not up", "crosslane up --rack r.toml"]);
    let lenient = run(&[], &["env"]);
    assert!(error_line(&lenient).contains("kernel TCP"));
    let variable = |name: &str| {
        let text = stdout(&lenient);
        let line = text.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
        line.unwrap_or_else(|| panic!("{name} in {text}"))
    };
    assert_eq!(variable("CROSSLANE_NODE="), "127.77.0.2");
    let rack = PathBuf::from(variable("CROSSLANE_RACK="));
    assert!(rack.is_dir() && rack.ends_with("b") && rack.starts_with(fixture.folder.path().join("base/racks")));
}

/// Brings up a rack of two nodes on this machine.
fn up() -> Fixture {
    let fixture = Fixture::new(&["--nodes", "2", "--backend", "shm"]);
    // A time limit that only a hang reaches.
    fixture.change("up_ns = 10000000000", "up_ns = \"60 s\"");
    let up = fixture.output(&["up", "--rack", "r.toml"]);
    assert!(up.status.success() && stdout(&up).starts_with("r.toml is up: nodes a, b\n"), "{up:?}");
    fixture
}

impl Fixture {
    /// Changes the rack file.
    fn change(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.file()).unwrap();
        assert!(text.contains(from), "{from:?} in\n{text}");
        fs::write(self.file(), text.replacen(from, to, 1)).unwrap();
    }

    fn status(&self) -> serde_json::Value {
        let status = self.output(&["status", "--rack", "r.toml", "--json"]);
        let found: serde_json::Value = serde_json::from_str(&String::from_utf8_lossy(&status.stdout)).unwrap();
        let is_up = found["nodes"].as_array().unwrap().iter().any(|node| node["is_up"] == true);
        assert_eq!(status.status.code(), Some(if is_up { 0 } else { 1 }), "{status:?}");
        found
    }

    fn monitor(&self, node: usize) -> serde_json::Value {
        self.status()["nodes"][node]["monitor"].clone()
    }

    /// Returns the CPU time that a node's proxy uses during `period`.
    fn proxy_cpu_ms(&self, node: usize, period: Duration) -> u64 {
        let pid = &self.monitor(node)["proxy"]["pid"];
        let used_ms = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
            // User and system time in ticks of 10 ms: fields 14 and 15 (proc_pid_stat(5)); `fields` starts at field 3.
            10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
        };
        let before_ms = used_ms();
        std::thread::sleep(period);
        used_ms() - before_ms
    }

    /// Waits until a node's first link is in `state`, at most a minute.
    fn wait_for_link(&self, node: usize, state: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.monitor(node)["links"][0]["state"] != state {
            assert!(Instant::now() < deadline, "no link is {state}: {}", self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the sockets of the rack that exist.
    fn sockets(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.folder.path().join("base")];
        let mut sockets = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
                match entry.file_type().unwrap() {
                    kind if kind.is_dir() => folders.push(entry.path()),
                    kind if kind.is_socket() => sockets.push(entry.path()),
                    _ => {}
                }
            }
        }
        sockets
    }
}

fn kill(pid: &serde_json::Value) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

#[test]
fn a_rack_of_two_nodes_comes_up_is_shown_and_goes_down() {
    let fixture = up();
    for (node, peer) in [(0, "b"), (1, "a")] {
        let link = fixture.monitor(node)["links"][0].clone();
        assert_eq!((&link["peer"], &link["state"]), (&peer.into(), &"up".into()), "{link}");
    }
    let text = stdout(&fixture.output(&["status", "--rack", "r.toml"]));
    for word in ["127.77.0.2", "Partitions: 0 control, 1 latency, 2 bulk."] {
        assert!(text.contains(word), "{word} in\n{text}");
    }
    let stat = || -> serde_json::Value {
        serde_json::from_str(&stdout(&fixture.output(&["stat", "--rack", "r.toml", "--json"]))).unwrap()
    };
    let found = stat();
    let proxies: Vec<_> = found["proxies"].as_array().unwrap().iter().map(|proxy| proxy["node"].as_str()).collect();
    assert_eq!(proxies, [Some("a"), Some("b")], "{found}");
    assert_eq!((&found["proxies"][0]["bytes_copied"], &found["proxies"][0]["stalls"]), (&0.into(), &0.into()));
    let pids = [0, 1].map(|node| fixture.monitor(node)["pid"].clone());
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success(), "a second up is harmless");
    assert_eq!([0, 1].map(|node| fixture.monitor(node)["pid"].clone()), pids);

    for _ in 0..2 {
        let down = fixture.output(&["down", "--rack", "r.toml"]);
        assert_eq!((down.status.code(), stdout(&down).as_str()), (Some(0), "r.toml is down\n"));
        assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    }
    assert_eq!(fixture.status()["nodes"][0]["is_up"], false);
    let line = error_line(&fixture.output(&["status", "--rack", "r.toml"]));
    assert!(line.contains("no node of r.toml runs here") && line.contains("crosslane up --rack r.toml"), "{line}");
    assert_eq!(stat()["proxies"], serde_json::json!([]));
}

#[test]
fn a_killed_monitor_is_detected_and_up_restores_it_and_its_link() {
    let fixture = up();
    let before = fixture.monitor(1)["links"][0].clone();
    kill(&fixture.monitor(0)["pid"]);
    fixture.wait_for_link(1, "training");
    let reason = fixture.monitor(1)["links"][0]["reason"].to_string();
    // Its proxy has no connection and ends with it. Either the peer's monitor or the peer's proxy detects it first.
    assert!(reason.contains("ended") || reason.contains("has another proxy by now, or none"), "{reason}");
    assert_eq!(fixture.status()["nodes"][0]["is_up"], false);
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
    fixture.wait_for_link(1, "up");
    let after = fixture.monitor(1)["links"][0].clone();
    assert!(after["epoch"].as_u64() > before["epoch"].as_u64() && after["ups"].as_u64() > before["ups"].as_u64());
}

#[test]
fn the_monitor_tells_programs_why_a_node_is_unreachable() {
    let fixture = Fixture::new(&["--nodes", "3"]);
    let rules = "\n[[access]]\nfrom = \"a\"\nports = \"81-90\"\naction = \"deny\"\n";
    fs::write(fixture.file(), fs::read_to_string(fixture.file()).unwrap() + rules).unwrap();
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
    let directory = fixture.status()["nodes"][0]["directory"].as_str().unwrap().to_owned();
    let ask = |request: &str| {
        let channel = control::Channel::connect(&PathBuf::from(&directory).join("monitor.sock")).unwrap();
        channel.send_packet(request.as_bytes(), &[]).unwrap();
        loop {
            match channel.receive_packet().unwrap() {
                control::Received::Message(packet, _) => break String::from_utf8(packet).unwrap(),
                control::Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
                control::Received::Ended => panic!("no answer to {request}"),
            }
        }
    };
    assert_eq!(ask("far 1 127.0.0.1:80"), "no no_listener");
    assert_eq!(ask("far 1 127.77.0.1:80"), "no no_listener");
    assert_eq!(ask("far 1 9.9.9.9:80"), "no remote_address");
    assert_eq!(ask("far 1 127.77.0.2:80"), "no no_listener");
    assert_eq!(ask("far 1 127.77.0.2:81"), "no access_denied");
    kill(&fixture.monitor(2)["pid"]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while ask("far 1 127.77.0.3:80") != "no link_down" {
        assert!(Instant::now() < deadline, "a dead node answers");
    }
    assert_eq!(ask("far 1 127.77.0.2:80"), "no no_listener", "other nodes are not affected");
}

/// Sends a request to the monitor at the given socket, and prints each packet that it receives.
const OTHER_USER: &str = r#"
import socket, sys
monitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
monitor.settimeout(30)
monitor.connect(sys.argv[1])
try:
    monitor.send(b"far 1 127.77.0.2:80")
except BrokenPipeError:
    pass
while True:
    try:
        packet = monitor.recv(65536)
    except ConnectionResetError:
        # The monitor closed before it read the request: the kernel reports the reset before the packets that were sent.
        continue
    if not packet:
        break
    print(packet.decode())
"#;

#[test]
fn a_monitor_refuses_a_connection_of_another_user_and_logs_it() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can change its user");
    }
    let fixture = up();
    let directory = PathBuf::from(fixture.status()["nodes"][0]["directory"].as_str().unwrap());
    let socket = directory.join("monitor.sock");
    for folder in directory.ancestors().take_while(|folder| folder.starts_with(fixture.folder.path())) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o711)).unwrap();
    }
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let mut other_user = Command::new("python3");
    let output = other_user.args(["-c", OTHER_USER]).arg(&socket).uid(65534).current_dir("/").output().unwrap();
    let answer = stdout(&output);
    assert!(output.status.success() && answer.lines().count() == 1, "{output:?}");
    assert!(answer.contains("refused") && answer.contains("this monitor runs as another user"), "{answer}");
    // The monitor answers before it logs.
    let what = "refused a connection of another user at the monitor's socket";
    let is_logged = |log: &String| log.lines().any(|line| line.contains(what) && line.contains("65534"));
    let read = || fs::read_to_string(directory.join("monitor.log")).unwrap();
    let logs = std::iter::repeat_with(read).inspect(|_| std::thread::sleep(std::time::Duration::from_millis(10)));
    assert!(logs.take(1000).any(|log| is_logged(&log)), "{}", read());
}

/// Closes a listener and waits until its port is free. A process that a concurrent test forks holds the listener too,
/// until its `exec`.
fn release(listener: std::net::TcpListener) {
    let address = listener.local_addr().unwrap();
    drop(listener);
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::net::TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "{address} still has a listener");
    }
}

#[test]
fn a_failed_up_reports_the_error_and_stops_what_it_has_started() {
    let fixture = Fixture::new(&[]);
    fixture.change("up_ns = 10000000000", "up_ns = \"60 s\"");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    fixture.change("address = \"127.77.0.2\"", &format!("address = \"127.77.0.2\"\nmetrics = \"{port}\""));
    let failed = fixture.output(&["up", "--rack", "r.toml"]);
    assert_fails(&failed, 1, &["node 'b'", &port, "another address"]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    release(taken);
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
}

#[test]
fn a_device_that_is_missing_or_too_small_is_wrong_use_with_its_line() {
    let fixture = Fixture::new(&["--backend", "dax"]);
    assert_fails(&fixture.output(&["up", "--rack", "r.toml"]), 2, &["r.toml", "--node"]);
    assert_fails(&fixture.output(&["up", "--rack", "r.toml", "--node", "z"]), 2, &["'z'", "a, b"]);
    let up = ["up", "--rack", "r.toml", "--node", "a"];
    let memory = fixture.folder.path().join("memory");
    fixture.change("device = \"/dev/dax0.0\"", &format!("device = {memory:?}"));
    assert_fails(&fixture.output(&up), 2, &["r.toml, line", "nodes[0].device", "memory", "name a DAX device"]);
    fs::File::create(&memory).unwrap().set_len(1 << 20).unwrap();
    assert_fails(&fixture.output(&up), 2, &["nodes[0].device", "1048576 bytes", "window_bytes to"]);
    fixture.change("count = 1", "count = 1\ncores = [9999]");
    fs::File::create(&memory).unwrap().set_len(1 << 24).unwrap();
    assert_fails(&fixture.output(&up), 2, &["r.toml, line", "partitions[0].cores", "9999"]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn windows_larger_than_this_machines_memory_are_wrong_use_with_their_line() {
    let fixture = Fixture::new(&["--nodes", "32"]);
    fixture.change("window_bytes = 4194304", &format!("window_bytes = {}", 64_u64 << 30));
    let words = ["r.toml, line", "device.window_bytes", "68719476736 bytes", "are free", "at most"];
    assert_fails(&fixture.output(&["up", "--rack", "r.toml"]), 2, &words);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn impossible_failover_is_wrong_use_with_its_line() {
    let fixture = Fixture::new(&[]);
    fixture.change("failover = false", "failover = true");
    // The prefix for documentation (RFC 3849): no machine has it.
    fixture.change("127.77.0.1", "2001:db8::1");
    fixture.change("127.77.0.2", "fd00:77::2");
    fixture
        .change("address = \"fd00:77::2\"", "address = \"fd00:77::2\"\nbackend = \"pci\"\ndevice = \"0000:00:04.0\"");
    let up = ["up", "--rack", "r.toml", "--node", "a"];
    let words = ["r.toml, line", "nodes[0].address", "'2001:db8::1'", "ip address add", "failover = false"];
    assert_fails(&fixture.output(&up), 2, &words);

    let fixture = Fixture::new(&[]);
    let taken = std::net::TcpListener::bind("127.77.0.2:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    fixture.change("failover = false", &format!("failover = true\nfailover_port = {port}"));
    let up = ["up", "--rack", "r.toml"];
    assert_fails(&fixture.output(&up), 2, &["r.toml, line", "failover_port", &port.to_string(), "'127.77.0.2'"]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    release(taken);
    // The second time, the rack's own proxies have bound the port.
    for _ in 0..2 {
        assert!(fixture.output(&up).status.success());
    }
}

/// Returns the PID of the process whose command line contains both words.
fn process(words: [&str; 2]) -> serde_json::Value {
    let has = |folder: &PathBuf| {
        let line = fs::read(folder.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        words.iter().all(|word| line.contains(word))
    };
    let folder = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).find(has).expect("it runs");
    folder.file_name().unwrap().to_str().unwrap().parse::<u64>().unwrap().into()
}

#[test]
fn without_the_device_server_nodes_stay_and_up_starts_no_new_server() {
    let fixture = up();
    kill(&process(["device-server", fixture.folder.path().to_str().unwrap()]));
    let socket =
        PathBuf::from(fixture.status()["nodes"][0]["directory"].as_str().unwrap()).with_file_name("device.sock");
    let deadline = Instant::now() + Duration::from_secs(60);
    while UnixStream::connect(&socket).is_ok() {
        assert!(Instant::now() < deadline, "a killed server answers");
        std::thread::sleep(Duration::from_millis(1));
    }
    let again = fixture.output(&["up", "--rack", "r.toml"]);
    assert_fails(&again, 1, &["device server", "has ended", "crosslane down --rack r.toml"]);
    assert_eq!(fixture.monitor(0)["links"][0]["state"], "up");
    assert!(fixture.output(&["down", "--rack", "r.toml"]).status.success());
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
}

#[test]
fn nodes_over_a_file_come_up_one_after_the_other_without_a_server() {
    for coherence in ["coherent", "non-coherent"] {
        let (fixture, _) = over_file();
        fixture.change("coherence = \"coherent\"", &format!("coherence = {coherence:?}"));
        let first = fixture.output(&["up", "--rack", "r.toml", "--node", "b"]);
        assert!(first.status.success() && stdout(&first).contains("not yet: link from 'b' to 'a'"), "{first:?}");
        assert!(fixture.output(&["up", "--rack", "r.toml", "--node", "a"]).status.success());
        fixture.wait_for_link(0, "up");
        fixture.wait_for_link(1, "up");
        assert!(fixture.sockets().iter().all(|socket| !socket.ends_with("device.sock")));
        assert!(
            (0..2).all(|node| fixture.proxy_cpu_ms(node, Duration::from_secs(1)) <= IDLE_CPU_MS_MAX),
            "{coherence}"
        );
    }
}

#[test]
fn two_concurrent_ups_wait_for_the_link_and_not_for_each_other() {
    let (fixture, _) = over_file();
    fixture.change("up_ns = \"1 s\"", "up_ns = \"600 s\"");
    let first = fixture.command(&["up", "--rack", "r.toml", "--node", "b"]).stdout(Stdio::piped()).spawn().unwrap();
    let second = fixture.output(&["up", "--rack", "r.toml", "--node", "a"]);
    for output in [first.wait_with_output().unwrap(), second] {
        assert!(output.status.success() && !stdout(&output).contains("not yet"), "{output:?}");
    }
}

#[test]
fn nodes_of_a_rack_file_that_has_changed_are_shown_correctly_and_can_be_stopped() {
    let fixture = Fixture::new(&[]);
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
    let status = || fixture.output(&["status", "--rack", "r.toml", "--json"]);
    fixture.change("trust = \"proxy\"", "trust = \"direct\"");
    fixture.change("window_bytes = 4194304", "window_bytes = 33554432");
    for arguments in [&["up", "--rack", "r.toml"][..], &["up", "--restart", "--rack", "r.toml"]] {
        assert_fails(
            &fixture.output(arguments),
            2,
            &["r.toml has changed", "(device, trust)", "crosslane down --rack r.toml"],
        );
    }
    let found = status();
    assert!(error_line(&found).contains("r.toml has changed since its nodes were brought up"), "{found:?}");
    assert_eq!(fixture.status()["trust"], "proxy");
    fs::write(fixture.file(), "no rack file").unwrap();
    assert!(error_line(&status()).contains("showing what the nodes of this machine use"));
    assert_eq!(fixture.status()["nodes"][1]["is_up"], true);
    fs::remove_file(fixture.file()).unwrap();
    assert!(fixture.output(&["down", "--rack", "r.toml"]).status.success());
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    assert_fails(&fixture.output(&["down", "--rack", "r.toml"]), 2, &["r.toml", "--rack"]);
}

#[test]
fn changed_rules_of_a_file_apply_after_a_restart() {
    let fixture = Fixture::new(&[]);
    assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
    fixture.change("access_default = \"allow\"", "access_default = \"deny\"");
    let again = fixture.output(&["up", "--rack", "r.toml"]);
    assert!(again.status.success() && error_line(&again).contains("access_default changed"), "{again:?}");
    let restarted = fixture.output(&["up", "--restart", "--rack", "r.toml"]);
    assert!(restarted.status.success() && restarted.stderr.is_empty(), "{restarted:?}");
    let after = fixture.output(&["up", "--rack", "r.toml"]);
    assert!(after.status.success() && after.stderr.is_empty(), "{after:?}");
}

#[test]
fn in_the_foreground_the_nodes_end_with_the_command_and_the_command_with_the_nodes() {
    let fixture = Fixture::new(&[]);
    let start = || {
        fixture
            .command(&["up", "--rack", "r.toml", "--foreground"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut terminated = start();
    fixture.wait_for_link(0, "up");
    assert!(Command::new("kill").arg(terminated.id().to_string()).status().unwrap().success());
    assert!(terminated.wait().unwrap().success());
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());

    let mut abandoned = start();
    fixture.wait_for_link(0, "up");
    fixture.wait_for_link(1, "up");
    // The links are up, so the command watches the monitors. Before, it would fail for another reason with this code.
    let killed = fixture.monitor(1)["pid"].clone();
    kill(&killed);
    let deadline = Instant::now() + Duration::from_secs(60);
    while fixture.monitor(1)["pid"] == killed || fixture.monitor(1)["pid"].is_null() {
        assert!(Instant::now() < deadline, "the monitor is not restarted");
    }
    fixture.wait_for_link(1, "up");
    assert!(fixture.output(&["down", "--rack", "r.toml"]).status.success());
    assert_eq!(abandoned.wait().unwrap().code(), Some(1));
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

/// Returns whether a command ends within a minute. Kills it if not, so that the test fails instead of hanging.
fn ends(mut command: Command) -> bool {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().and_then(|()| child.wait()).unwrap();
    false
}

#[test]
fn down_stops_a_monitor_that_hangs_with_a_full_backlog() {
    let fixture = up();
    let (monitor, proxy) = (fixture.monitor(0)["pid"].clone(), fixture.monitor(0)["proxy"]["pid"].clone());
    let socket = PathBuf::from(fixture.status()["nodes"][0]["directory"].as_str().unwrap()).join("monitor.sock");
    assert!(Command::new("kill").args(["-STOP", &monitor.to_string()]).status().unwrap().success());
    while control::Channel::connect(&socket).is_ok() {}
    if !ends(fixture.command(&["down", "--rack", "r.toml"])) {
        kill(&monitor);
        panic!("down does not end");
    }
    let proc = |pid: &serde_json::Value| PathBuf::from("/proc").join(pid.to_string());
    let deadline = Instant::now() + Duration::from_secs(60);
    while proc(&monitor).exists() || proc(&proxy).exists() {
        assert!(Instant::now() < deadline, "monitor {monitor} or proxy {proxy} still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_directory_that_other_users_can_write_is_refused() {
    let fixture = Fixture::new(&[]);
    let base = fixture.folder.path().join("base");
    fs::create_dir(&base).unwrap();
    fs::set_permissions(&base, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = fixture.output(&["up", "--rack", "r.toml"]);
    assert_fails(&refused, 1, &[base.to_str().unwrap(), "other users", "chmod go-w"]);
    assert_eq!(fs::read_dir(&base).unwrap().count(), 0, "nothing is created there");
}

#[test]
fn a_monitor_raises_its_descriptor_limit_to_the_hard_limit() {
    let fixture = Fixture::new(&[]);
    let mut up = Command::new("sh");
    let script = "ulimit -Sn 200 && exec \"$0\" up --rack r.toml";
    let up = up.args(["-c", script, CROSSLANE]).env("CROSSLANE_RACK", fixture.folder.path().join("base"));
    assert!(up.current_dir(fixture.folder.path()).status().unwrap().success());
    let limits = fs::read_to_string(format!("/proc/{}/limits", fixture.monitor(0)["pid"])).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [soft, hard, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{line}") };
    assert_eq!(soft, hard);
}

/// Returns a rack whose device is a file, and the path of the file.
fn over_file() -> (Fixture, PathBuf) {
    let fixture = Fixture::new(&["--backend", "dax"]);
    let memory = fixture.folder.path().join("memory");
    let file = fs::File::options().create(true).truncate(false).write(true).mode(0o600).open(&memory).unwrap();
    file.set_len(1 << 24).unwrap();
    for _ in 0..2 {
        fixture.change("\"/dev/dax0.0\"", &format!("{memory:?}"));
    }
    fixture.change("up_ns = 10000000000", "up_ns = \"1 s\"");
    (fixture, memory)
}

const UP_A: [&str; 5] = ["up", "--rack", "r.toml", "--node", "a"];

#[test]
fn a_device_of_another_layout_is_wrong_use_with_its_line() {
    let (fixture, memory) = over_file();
    let device = fs::File::options().write(true).open(&memory).unwrap();
    for (offset, word, message) in
        [(0, 0xbad_u64, "0xbad"), (8, 7, "layout version 7"), (24, 4096, "4096 bytes per window")]
    {
        let words = [u64::from_le_bytes(*b"XLANEWIN"), 1, 2, 4 << 20];
        for (index, word) in words.into_iter().enumerate() {
            device.write_all_at(&word.to_le_bytes(), 8 * index as u64).unwrap();
        }
        device.write_all_at(&word.to_le_bytes(), offset).unwrap();
        assert_fails(&fixture.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", message, "clear its first 4096"]);
        assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_device_that_other_users_own_or_can_write_is_wrong_use_with_its_line() {
    let (fixture, memory) = over_file();
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o622)).unwrap();
    assert_fails(&fixture.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", "mode 622", "chmod go-w"]);
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(&memory, Some(65534), None).is_err() {
        return println!("skipped: only root can change the owner of a file");
    }
    assert_fails(&fixture.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", "owned by user 65534", "chown"]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_device_that_shrinks_ends_its_monitor_with_one_line_and_code_2() {
    let (fixture, memory) = over_file();
    let mut monitor = fixture.command(&["monitor", "--rack", "r.toml", "--node", "a"]);
    let mut monitor = monitor.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fixture.monitor(0)["proxy"]["is_ready"] != true {
        assert!(Instant::now() < deadline, "no node: {}", fixture.status());
        std::thread::sleep(Duration::from_millis(20));
    }
    let proxy = PathBuf::from("/proc").join(fixture.monitor(0)["proxy"]["pid"].to_string());
    fs::File::options().write(true).open(&memory).unwrap().set_len(1 << 20).unwrap();
    let mut text = String::new();
    monitor.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(monitor.wait().unwrap().code(), Some(2), "{text}");
    let last = text.lines().last().unwrap();
    for word in ["crosslane: r.toml, line", "nodes[0].device", "truncated"] {
        assert!(last.contains(word), "{word} in\n{text}");
    }
    while proxy.exists() {
        assert!(Instant::now() < deadline, "the proxy still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_link_is_modelled_only_between_nodes_that_share_a_clock() {
    assert_fails(
        &crosslane(&["rack", "example", "--backend", "pci", "--link", "ntb"]),
        2,
        &["--link ntb", "pci", "clock"],
    );
    let (fixture, _memory) = over_file();
    let text = fs::read_to_string(fixture.file()).unwrap();
    fs::write(fixture.file(), text + "[link]\ntiming = \"ntb\"\n").unwrap();
    assert_fails(&fixture.output(&UP_A), 2, &["r.toml, line", "link.timing", "\"ntb\"", "clock", "remove [link]"]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_program_with_another_clock_is_refused_if_links_are_modelled() {
    if !rustix::process::geteuid().is_root() || fs::read_link("/proc/self/ns/time_for_children").is_err() {
        eprintln!("skipped: only root can create time namespaces, on kernels that have them");
        return;
    }
    for (link, is_refused) in [(&["--link", "ntb"][..], true), (&[], false)] {
        let fixture = Fixture::new(link);
        assert!(fixture.output(&["up", "--rack", "r.toml"]).status.success());
        let in_other_namespace = |arguments: &[&str]| {
            let command = fixture.command(arguments);
            let mut unshare = Command::new("unshare");
            unshare.args(["--time", "--monotonic", "1000", "--"]).arg(command.get_program()).args(command.get_args());
            unshare.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            unshare.current_dir(fixture.folder.path()).output().unwrap()
        };
        let library = fixture.library();
        let run = ["run", "--rack", "r.toml", "--node", "a", "--library", &library, "--", "/bin/true"];
        for arguments in [&run[..], &["up", "--rack", "r.toml"]] {
            let output = in_other_namespace(arguments);
            if is_refused {
                assert_fails(&output, 2, &["r.toml, line", "link.timing", "clock", "time namespace"]);
            } else {
                assert_ne!(output.status.code(), Some(2), "{output:?}");
            }
        }
    }
}

#[test]
fn a_proxy_that_hangs_is_replaced_and_the_link_comes_back() {
    let fixture = up();
    let before = fixture.monitor(0);
    assert!(Command::new("kill").args(["-STOP", &before["proxy"]["pid"].to_string()]).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(120);
    while fixture.monitor(0)["proxy"]["pid"] == before["proxy"]["pid"]
        || fixture.monitor(0)["proxy"]["is_ready"] != true
    {
        assert!(Instant::now() < deadline, "no new proxy: {}", fixture.status());
        std::thread::sleep(Duration::from_millis(100));
    }
    fixture.wait_for_link(0, "up");
    assert!(fixture.monitor(0)["links"][0]["ups"].as_u64() > before["links"][0]["ups"].as_u64());
}

#[test]
fn the_smallest_window_of_a_modelled_link_comes_up_and_a_smaller_one_is_wrong_use() {
    let fixture = Fixture::new(&["--link", "gen3x16"]);
    let least_bytes = rack::CONTROL_PARTITION_BYTES + 2 * rack::MODELLED_PARTITION_BYTES_MIN;
    fixture.change("window_bytes = 4194304", &format!("window_bytes = {}", least_bytes - 4096));
    let refused = fixture.output(&["up", "--rack", "r.toml"]);
    assert_fails(&refused, 2, &["r.toml, line", "device.window_bytes", "modelled", &least_bytes.to_string()]);
    assert_eq!(fixture.sockets(), Vec::<PathBuf>::new());
    fixture.change(&(least_bytes - 4096).to_string(), &least_bytes.to_string());
    let up = fixture.output(&["up", "--rack", "r.toml"]);
    assert!(up.status.success(), "{up:?}");
}
