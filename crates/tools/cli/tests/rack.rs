//! Racks from outside: the example, and programs as its nodes.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

mod command;

use command::{CROSSLANE, assert_fails, crosslane, error_line, stdout};

/// Processor time that a proxy may take in a second in which there is nothing to do: it took 100 where it looked on
/// after each nap, and 370 where it flushed lines for it.
const IDLE_CPU_MS_MAX: u64 = 50;

/// A folder with a rack file in it, in which everything of the rack lies.
struct Place {
    folder: tempfile::TempDir,
}

impl Drop for Place {
    /// Nothing of a failed test goes on running.
    fn drop(&mut self) {
        if self.folder.path().join("base").exists() {
            let _ = self.command(&["down", "--rack", "r.toml"]).output();
        }
    }
}

impl Place {
    fn new(arguments: &[&str]) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        let example = crosslane(&[&["rack", "example"], arguments].concat());
        assert!(example.status.success(), "{example:?}");
        fs::write(place.file(), example.stdout).unwrap();
        place
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("r.toml")
    }

    /// The command with an environment in which racks lie in this folder.
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
fn an_example_describes_nodes_by_letters_with_what_was_asked_for() {
    let text = stdout(&crosslane(&["rack", "example", "--nodes", "3", "--link", "gen5x16", "--trust", "direct"]));
    for line in
        ["name = \"c\"", "address = \"127.77.0.3\"", "timing = \"gen5x16\"", "trust = \"direct\"", "backend = \"shm\""]
    {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(!text.contains("127.77.0.4"));
    let place = Place::new(&["--nodes", "32"]);
    let rack = rack::RackFile::read(&place.file()).unwrap().rack;
    for (name, address) in [("z", "127.77.0.26"), ("aa", "127.77.0.27"), ("af", "127.77.0.32")] {
        assert_eq!(rack.node(name).map(|(_, node)| node.address), address.parse().ok());
    }
    assert!(!stdout(&crosslane(&["rack", "example", "--nodes", "2", "--backend", "shm"])).contains("timing"));
}

#[test]
fn an_example_of_something_unknown_is_wrong_use() {
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
fn a_bad_rack_file_is_one_line_and_exit_code_2_and_nothing_is_started() {
    let place = Place::new(&[]);
    let good = fs::read_to_string(place.file()).unwrap();
    fs::write(place.file(), good.replace("127.77.0.2", "127.77.0.1")).unwrap();
    let bad = place.output(&["run", "--rack", "r.toml", "--node", "a", "--", "echo"]);
    assert_fails(&bad, 2, &["r.toml, line", "nodes[1].address", "'127.77.0.1'", "its own"]);
    for (address, words) in [
        ("http://127.0.0.1:2379/rack", ["http://127.0.0.1:2379/rack: racks are files", "etcd://HOST:PORT/PREFIX"]),
        ("etcd://127.0.0.1/rack", ["\"127.0.0.1\" is not HOST:PORT", "as in etcd://"]),
        ("etcd://me:secret@127.0.0.1:2379/rack", ["etcd://...", "passwords of etcd are not supported"]),
    ] {
        for command in ["stat", "up", "down", "status"] {
            let output = place.output(&[command, "--rack", address]);
            assert_fails(&output, 2, &words);
            assert!(!error_line(&output).contains("secret"));
        }
    }
    let missing = place.output(&["run", "--rack", "none.toml", "--node", "a", "--", "echo"]);
    assert_fails(&missing, 2, &["none.toml", "--rack"]);
    assert!(!place.folder.path().join("base").exists() && !place.folder.path().join("none.toml").exists());
}

#[test]
fn a_program_must_say_which_node_of_the_rack_it_is() {
    let place = Place::new(&[]);
    let run = |arguments: &[&str]| place.output(&[&["run", "--rack", "r.toml"], arguments].concat());
    assert_fails(&run(&["--", "true"]), 2, &["r.toml", "--node"]);
    assert_fails(&run(&["--node", "q", "--", "true"]), 2, &["'q'", "r.toml", "one of a, b"]);
}

#[test]
fn a_program_of_a_rack_that_is_not_up_is_warned_or_refused() {
    let place = Place::new(&[]);
    let source = std::env::current_exe().unwrap();
    // Any shared library does: this is about what the command says.
    let library = fs::read_dir(source.parent().unwrap())
        .unwrap()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "so"))
        .expect("a build has shared libraries");
    let library = library.to_str().unwrap();
    let run = |strict: &[&str], program: &[&str]| {
        let head = ["run", "--library", library, "--rack", "r.toml", "--node", "b"];
        place.output(&[&head[..], strict, &["--"], program].concat())
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
    assert!(rack.is_dir() && rack.ends_with("b") && rack.starts_with(place.folder.path().join("base/racks")));
}

/// A rack on this machine, brought up.
fn up() -> Place {
    let place = Place::new(&["--nodes", "2", "--backend", "shm"]);
    // Only a hang ever takes as long.
    place.change("up_ns = 10000000000", "up_ns = \"60 s\"");
    let up = place.output(&["up", "--rack", "r.toml"]);
    assert!(up.status.success() && stdout(&up).starts_with("r.toml is up: nodes a, b\n"), "{up:?}");
    place
}

impl Place {
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

    /// The processor time that a node's proxy takes meanwhile.
    fn proxy_cpu_ms(&self, node: usize, meanwhile: Duration) -> u64 {
        let pid = &self.monitor(node)["proxy"]["pid"];
        let taken_ms = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
            // User and system time, in ticks of 10 ms: fields 14 and 15, of which the first two lie before.
            10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
        };
        let before_ms = taken_ms();
        std::thread::sleep(meanwhile);
        taken_ms() - before_ms
    }

    /// Waits until a node's first link is in a state; a minute is more than any machine takes.
    fn wait_for_link(&self, node: usize, state: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.monitor(node)["links"][0]["state"] != state {
            assert!(Instant::now() < deadline, "no link is {state}: {}", self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The sockets of the rack that are left.
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
fn a_rack_of_two_nodes_comes_up_is_seen_and_goes_down() {
    let place = up();
    for (node, peer) in [(0, "b"), (1, "a")] {
        let link = place.monitor(node)["links"][0].clone();
        assert_eq!((&link["peer"], &link["state"]), (&peer.into(), &"up".into()), "{link}");
    }
    let text = stdout(&place.output(&["status", "--rack", "r.toml"]));
    for word in ["127.77.0.2", "Partitions: 0 control, 1 latency, 2 bulk."] {
        assert!(text.contains(word), "{word} in\n{text}");
    }
    let stat = || -> serde_json::Value {
        serde_json::from_str(&stdout(&place.output(&["stat", "--rack", "r.toml", "--json"]))).unwrap()
    };
    let found = stat();
    let proxies: Vec<_> = found["proxies"].as_array().unwrap().iter().map(|proxy| proxy["node"].as_str()).collect();
    assert_eq!(proxies, [Some("a"), Some("b")], "{found}");
    assert_eq!((&found["proxies"][0]["bytes_copied"], &found["proxies"][0]["stalls"]), (&0.into(), &0.into()));
    let pids = [0, 1].map(|node| place.monitor(node)["pid"].clone());
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success(), "a second up is harmless");
    assert_eq!([0, 1].map(|node| place.monitor(node)["pid"].clone()), pids);

    for _ in 0..2 {
        let down = place.output(&["down", "--rack", "r.toml"]);
        assert_eq!((down.status.code(), stdout(&down).as_str()), (Some(0), "r.toml is down\n"));
        assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    }
    assert_eq!(place.status()["nodes"][0]["is_up"], false);
    let line = error_line(&place.output(&["status", "--rack", "r.toml"]));
    assert!(line.contains("nothing of r.toml runs here") && line.contains("crosslane up --rack r.toml"), "{line}");
    assert_eq!(stat()["proxies"], serde_json::json!([]));
}

#[test]
fn a_killed_monitor_is_noticed_and_brought_back_and_the_link_with_it() {
    let place = up();
    let before = place.monitor(1)["links"][0].clone();
    kill(&place.monitor(0)["pid"]);
    place.wait_for_link(1, "training");
    let reason = place.monitor(1)["links"][0]["reason"].to_string();
    // Its proxy, which has no connection, ends with it: the peer's monitor sees the one, the peer's proxy the other.
    assert!(reason.contains("ended") || reason.contains("has another proxy by now, or none"), "{reason}");
    assert_eq!(place.status()["nodes"][0]["is_up"], false);
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
    place.wait_for_link(1, "up");
    let after = place.monitor(1)["links"][0].clone();
    assert!(after["epoch"].as_u64() > before["epoch"].as_u64() && after["ups"].as_u64() > before["ups"].as_u64());
}

#[test]
fn programs_are_told_by_the_monitor_why_there_is_no_way_to_another_node() {
    let place = Place::new(&["--nodes", "3"]);
    let rules = "\n[[access]]\nfrom = \"a\"\nports = \"81-90\"\naction = \"deny\"\n";
    fs::write(place.file(), fs::read_to_string(place.file()).unwrap() + rules).unwrap();
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
    let directory = place.status()["nodes"][0]["directory"].as_str().unwrap().to_owned();
    let asked = |question: &str| {
        let channel = control::Channel::connect(&PathBuf::from(&directory).join("monitor.sock")).unwrap();
        channel.send_packet(question.as_bytes(), &[]).unwrap();
        loop {
            match channel.receive_packet().unwrap() {
                control::Received::Message(packet, _) => break String::from_utf8(packet).unwrap(),
                control::Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
                control::Received::Ended => panic!("no answer to {question}"),
            }
        }
    };
    assert_eq!(asked("far 1 127.0.0.1:80"), "no no_listener");
    assert_eq!(asked("far 1 127.77.0.1:80"), "no no_listener");
    assert_eq!(asked("far 1 9.9.9.9:80"), "no remote_address");
    assert_eq!(asked("far 1 127.77.0.2:80"), "no no_listener");
    assert_eq!(asked("far 1 127.77.0.2:81"), "no access_denied");
    kill(&place.monitor(2)["pid"]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while asked("far 1 127.77.0.3:80") != "no link_down" {
        assert!(Instant::now() < deadline, "a dead node answers");
    }
    assert_eq!(asked("far 1 127.77.0.2:80"), "no no_listener", "the others are not concerned");
}

/// Asks the monitor whose socket it is given, and prints each packet that comes until the end.
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
        # The question was there unread when the monitor closed: that is said before what it sent.
        continue
    if not packet:
        break
    print(packet.decode())
"#;

#[test]
fn another_user_who_reaches_the_monitors_socket_gets_no_answer_and_the_log_says_so() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let place = up();
    let directory = PathBuf::from(place.status()["nodes"][0]["directory"].as_str().unwrap());
    let socket = directory.join("monitor.sock");
    for folder in directory.ancestors().take_while(|folder| folder.starts_with(place.folder.path())) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o711)).unwrap();
    }
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let mut other_user = Command::new("python3");
    let output = other_user.args(["-c", OTHER_USER]).arg(&socket).uid(65534).current_dir("/").output().unwrap();
    let said = stdout(&output);
    assert!(output.status.success() && said.lines().count() == 1, "{output:?}");
    assert!(said.contains("refused") && said.contains("this monitor runs as another user"), "{said}");
    let log = fs::read_to_string(directory.join("monitor.log")).unwrap();
    let line = log.lines().find(|line| line.contains("refused a connection of another user at the monitor's socket"));
    assert!(line.is_some_and(|line| line.contains("65534")), "{log}");
}

/// Closes a listener. A program that a test beside this one starts has it too, until it has become that program.
fn give_back(listener: std::net::TcpListener) {
    let address = listener.local_addr().unwrap();
    drop(listener);
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::net::TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "{address} is still listened at");
    }
}

#[test]
fn what_cannot_come_up_is_said_and_nothing_half_started_is_left() {
    let place = Place::new(&[]);
    place.change("up_ns = 10000000000", "up_ns = \"60 s\"");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    place.change("address = \"127.77.0.2\"", &format!("address = \"127.77.0.2\"\nmetrics = \"{port}\""));
    let failed = place.output(&["up", "--rack", "r.toml"]);
    assert_fails(&failed, 1, &["node 'b'", &port, "another address"]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    give_back(taken);
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
}

#[test]
fn a_device_that_is_missing_or_too_small_is_wrong_use_with_its_line() {
    let place = Place::new(&["--backend", "dax"]);
    assert_fails(&place.output(&["up", "--rack", "r.toml"]), 2, &["r.toml", "--node"]);
    assert_fails(&place.output(&["up", "--rack", "r.toml", "--node", "z"]), 2, &["'z'", "a, b"]);
    let up = ["up", "--rack", "r.toml", "--node", "a"];
    let memory = place.folder.path().join("memory");
    place.change("device = \"/dev/dax0.0\"", &format!("device = {memory:?}"));
    assert_fails(&place.output(&up), 2, &["r.toml, line", "nodes[0].device", "memory", "name a DAX device"]);
    fs::File::create(&memory).unwrap().set_len(1 << 20).unwrap();
    assert_fails(&place.output(&up), 2, &["nodes[0].device", "1048576 bytes", "window_bytes to"]);
    place.change("count = 1", "count = 1\ncores = [9999]");
    fs::File::create(&memory).unwrap().set_len(1 << 24).unwrap();
    assert_fails(&place.output(&up), 2, &["r.toml, line", "partitions[0].cores", "9999"]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn windows_larger_than_this_machines_memory_are_wrong_use_with_their_line() {
    let place = Place::new(&["--nodes", "32"]);
    place.change("window_bytes = 4194304", &format!("window_bytes = {}", 64_u64 << 30));
    let words = ["r.toml, line", "device.window_bytes", "68719476736 bytes", "are free", "at most"];
    assert_fails(&place.output(&["up", "--rack", "r.toml"]), 2, &words);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn failover_that_cannot_be_is_wrong_use_with_its_line() {
    let place = Place::new(&[]);
    place.change("failover = false", "failover = true");
    // The documentation's own prefix: no machine has it.
    place.change("127.77.0.1", "2001:db8::1");
    place.change("127.77.0.2", "fd00:77::2");
    place.change("address = \"fd00:77::2\"", "address = \"fd00:77::2\"\nbackend = \"pci\"\ndevice = \"0000:00:04.0\"");
    let up = ["up", "--rack", "r.toml", "--node", "a"];
    let words = ["r.toml, line", "nodes[0].address", "'2001:db8::1'", "ip address add", "failover = false"];
    assert_fails(&place.output(&up), 2, &words);

    let place = Place::new(&[]);
    let taken = std::net::TcpListener::bind("127.77.0.2:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    place.change("failover = false", &format!("failover = true\nfailover_port = {port}"));
    let up = ["up", "--rack", "r.toml"];
    assert_fails(&place.output(&up), 2, &["r.toml, line", "failover_port", &port.to_string(), "'127.77.0.2'"]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    give_back(taken);
    // The second time its own proxies have the port.
    for _ in 0..2 {
        assert!(place.output(&up).status.success());
    }
}

/// The process whose command line has both words.
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
fn without_the_device_server_nodes_stay_and_no_other_memory_is_handed_out() {
    let place = up();
    kill(&process(["device-server", place.folder.path().to_str().unwrap()]));
    let socket = PathBuf::from(place.status()["nodes"][0]["directory"].as_str().unwrap()).with_file_name("device.sock");
    let deadline = Instant::now() + Duration::from_secs(60);
    while UnixStream::connect(&socket).is_ok() {
        assert!(Instant::now() < deadline, "a killed server answers");
        std::thread::sleep(Duration::from_millis(1));
    }
    let again = place.output(&["up", "--rack", "r.toml"]);
    assert_fails(&again, 1, &["device server", "has ended", "crosslane down --rack r.toml"]);
    assert_eq!(place.monitor(0)["links"][0]["state"], "up");
    assert!(place.output(&["down", "--rack", "r.toml"]).status.success());
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
}

#[test]
fn nodes_over_a_file_come_up_one_after_the_other_without_any_server() {
    for coherence in ["coherent", "non-coherent"] {
        let (place, _) = over_file();
        place.change("coherence = \"coherent\"", &format!("coherence = {coherence:?}"));
        let first = place.output(&["up", "--rack", "r.toml", "--node", "b"]);
        assert!(first.status.success() && stdout(&first).contains("not yet: link from 'b' to 'a'"), "{first:?}");
        assert!(place.output(&["up", "--rack", "r.toml", "--node", "a"]).status.success());
        place.wait_for_link(0, "up");
        place.wait_for_link(1, "up");
        assert!(place.sockets().iter().all(|socket| !socket.ends_with("device.sock")));
        assert!((0..2).all(|node| place.proxy_cpu_ms(node, Duration::from_secs(1)) <= IDLE_CPU_MS_MAX), "{coherence}");
    }
}

#[test]
fn two_commands_that_bring_up_a_node_each_wait_for_the_link_and_not_for_each_other() {
    let (place, _) = over_file();
    place.change("up_ns = \"1 s\"", "up_ns = \"600 s\"");
    let first = place.command(&["up", "--rack", "r.toml", "--node", "b"]).stdout(Stdio::piped()).spawn().unwrap();
    let second = place.output(&["up", "--rack", "r.toml", "--node", "a"]);
    for output in [first.wait_with_output().unwrap(), second] {
        assert!(output.status.success() && !stdout(&output).contains("not yet"), "{output:?}");
    }
}

#[test]
fn a_rack_file_that_changes_while_its_nodes_run_says_nothing_untrue_and_they_can_be_ended() {
    let place = Place::new(&[]);
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
    let status = || place.output(&["status", "--rack", "r.toml", "--json"]);
    place.change("trust = \"proxy\"", "trust = \"direct\"");
    place.change("window_bytes = 4194304", "window_bytes = 33554432");
    for arguments in [&["up", "--rack", "r.toml"][..], &["up", "--restart", "--rack", "r.toml"]] {
        assert_fails(
            &place.output(arguments),
            2,
            &["r.toml has changed", "(device, trust)", "crosslane down --rack r.toml"],
        );
    }
    let found = status();
    assert!(error_line(&found).contains("r.toml has changed since its nodes were brought up"), "{found:?}");
    assert_eq!(place.status()["trust"], "proxy");
    fs::write(place.file(), "no rack file").unwrap();
    assert!(error_line(&status()).contains("shown is what the nodes of this machine go by"));
    assert_eq!(place.status()["nodes"][1]["is_up"], true);
    fs::remove_file(place.file()).unwrap();
    assert!(place.output(&["down", "--rack", "r.toml"]).status.success());
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    assert_fails(&place.output(&["down", "--rack", "r.toml"]), 2, &["r.toml", "--rack"]);
}

#[test]
fn rules_that_change_in_a_file_are_there_after_a_restart() {
    let place = Place::new(&[]);
    assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
    place.change("access_default = \"allow\"", "access_default = \"deny\"");
    let again = place.output(&["up", "--rack", "r.toml"]);
    assert!(again.status.success() && error_line(&again).contains("access_default changed"), "{again:?}");
    let restarted = place.output(&["up", "--restart", "--rack", "r.toml"]);
    assert!(restarted.status.success() && restarted.stderr.is_empty(), "{restarted:?}");
    let after = place.output(&["up", "--rack", "r.toml"]);
    assert!(after.status.success() && after.stderr.is_empty(), "{after:?}");
}

#[test]
fn in_the_foreground_the_nodes_end_with_the_command_and_it_with_them() {
    let place = Place::new(&[]);
    let start = || {
        place
            .command(&["up", "--rack", "r.toml", "--foreground"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut told = start();
    place.wait_for_link(0, "up");
    assert!(Command::new("kill").arg(told.id().to_string()).status().unwrap().success());
    assert!(told.wait().unwrap().success());
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());

    let mut left = start();
    place.wait_for_link(0, "up");
    place.wait_for_link(1, "up");
    // Only once it watches the nodes does it notice: before, it would fail for another reason, and end alike.
    let killed = place.monitor(1)["pid"].clone();
    kill(&killed);
    let deadline = Instant::now() + Duration::from_secs(60);
    while place.monitor(1)["pid"] == killed || place.monitor(1)["pid"].is_null() {
        assert!(Instant::now() < deadline, "nobody starts the monitor again");
    }
    place.wait_for_link(1, "up");
    assert!(place.output(&["down", "--rack", "r.toml"]).status.success());
    assert_eq!(left.wait().unwrap().code(), Some(1));
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

/// One that does not end is killed, so that a failed test says so.
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
fn a_monitor_that_hangs_is_ended_however_many_wait_for_it() {
    let place = up();
    let (monitor, proxy) = (place.monitor(0)["pid"].clone(), place.monitor(0)["proxy"]["pid"].clone());
    let socket = PathBuf::from(place.status()["nodes"][0]["directory"].as_str().unwrap()).join("monitor.sock");
    assert!(Command::new("kill").args(["-STOP", &monitor.to_string()]).status().unwrap().success());
    while control::Channel::connect(&socket).is_ok() {}
    if !ends(place.command(&["down", "--rack", "r.toml"])) {
        kill(&monitor);
        panic!("down does not end");
    }
    let proc = |pid: &serde_json::Value| PathBuf::from("/proc").join(pid.to_string());
    let deadline = Instant::now() + Duration::from_secs(60);
    while proc(&monitor).exists() || proc(&proxy).exists() {
        assert!(Instant::now() < deadline, "monitor {monitor} or proxy {proxy} runs on");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_directory_in_which_others_could_put_another_rack_is_refused() {
    let place = Place::new(&[]);
    let base = place.folder.path().join("base");
    fs::create_dir(&base).unwrap();
    fs::set_permissions(&base, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = place.output(&["up", "--rack", "r.toml"]);
    assert_fails(&refused, 1, &[base.to_str().unwrap(), "other users", "chmod go-w"]);
    assert_eq!(fs::read_dir(&base).unwrap().count(), 0, "nothing is made there");
}

#[test]
fn a_monitor_may_have_as_many_descriptors_as_the_system_lets_it() {
    let place = Place::new(&[]);
    let mut up = Command::new("sh");
    let script = "ulimit -Sn 200 && exec \"$0\" up --rack r.toml";
    let up = up.args(["-c", script, CROSSLANE]).env("CROSSLANE_RACK", place.folder.path().join("base"));
    assert!(up.current_dir(place.folder.path()).status().unwrap().success());
    let limits = fs::read_to_string(format!("/proc/{}/limits", place.monitor(0)["pid"])).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [soft, hard, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{line}") };
    assert_eq!(soft, hard);
}

/// A rack over a file, and the file.
fn over_file() -> (Place, PathBuf) {
    let place = Place::new(&["--backend", "dax"]);
    let memory = place.folder.path().join("memory");
    let file = fs::File::options().create(true).truncate(false).write(true).mode(0o600).open(&memory).unwrap();
    file.set_len(1 << 24).unwrap();
    for _ in 0..2 {
        place.change("\"/dev/dax0.0\"", &format!("{memory:?}"));
    }
    place.change("up_ns = 10000000000", "up_ns = \"1 s\"");
    (place, memory)
}

const UP_A: [&str; 5] = ["up", "--rack", "r.toml", "--node", "a"];

#[test]
fn a_device_of_another_layout_is_wrong_use_with_its_line() {
    let (place, memory) = over_file();
    let device = fs::File::options().write(true).open(&memory).unwrap();
    for (offset, word, said) in
        [(0, 0xbad_u64, "0xbad"), (8, 7, "layout version 7"), (24, 4096, "4096 bytes per window")]
    {
        let words = [u64::from_le_bytes(*b"XLANEWIN"), 1, 2, 4 << 20];
        for (index, word) in words.into_iter().enumerate() {
            device.write_all_at(&word.to_le_bytes(), 8 * index as u64).unwrap();
        }
        device.write_all_at(&word.to_le_bytes(), offset).unwrap();
        assert_fails(&place.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", said, "clear its first 4096"]);
        assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_device_that_others_own_or_write_is_wrong_use_with_its_line() {
    let (place, memory) = over_file();
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o622)).unwrap();
    assert_fails(&place.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", "mode 622", "chmod go-w"]);
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(&memory, Some(65534), None).is_err() {
        return println!("skipped: only root can give a file away");
    }
    assert_fails(&place.output(&UP_A), 2, &["r.toml, line", "nodes[0].device", "owned by user 65534", "chown"]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_device_that_shrinks_ends_its_monitor_with_one_line_and_code_2() {
    let (place, memory) = over_file();
    let mut monitor = place.command(&["monitor", "--rack", "r.toml", "--node", "a"]);
    let mut monitor = monitor.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while place.monitor(0)["proxy"]["is_ready"] != true {
        assert!(Instant::now() < deadline, "no node: {}", place.status());
        std::thread::sleep(Duration::from_millis(20));
    }
    let proxy = PathBuf::from("/proc").join(place.monitor(0)["proxy"]["pid"].to_string());
    fs::File::options().write(true).open(&memory).unwrap().set_len(1 << 20).unwrap();
    let mut text = String::new();
    monitor.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(monitor.wait().unwrap().code(), Some(2), "{text}");
    let last = text.lines().last().unwrap();
    for word in ["crosslane: r.toml, line", "nodes[0].device", "truncated"] {
        assert!(last.contains(word), "{word} in\n{text}");
    }
    while proxy.exists() {
        assert!(Instant::now() < deadline, "the proxy runs on");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_link_is_modelled_only_between_nodes_that_share_a_clock() {
    assert_fails(
        &crosslane(&["rack", "example", "--backend", "pci", "--link", "ntb"]),
        2,
        &["--link ntb", "pci", "clock"],
    );
    let (place, _memory) = over_file();
    let text = fs::read_to_string(place.file()).unwrap();
    fs::write(place.file(), text + "[link]\ntiming = \"ntb\"\n").unwrap();
    assert_fails(&place.output(&UP_A), 2, &["r.toml, line", "link.timing", "\"ntb\"", "clock", "remove [link]"]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
}

#[test]
fn a_program_with_another_clock_is_refused_where_a_link_is_modelled() {
    if !rustix::process::geteuid().is_root() || fs::read_link("/proc/self/ns/time_for_children").is_err() {
        eprintln!("not run: only root makes time namespaces, on kernels that have them");
        return;
    }
    for (link, is_refused) in [(&["--link", "ntb"][..], true), (&[], false)] {
        let place = Place::new(link);
        assert!(place.output(&["up", "--rack", "r.toml"]).status.success());
        let apart = |arguments: &[&str]| {
            let command = place.command(arguments);
            let mut unshare = Command::new("unshare");
            unshare.args(["--time", "--monotonic", "1000", "--"]).arg(command.get_program()).args(command.get_args());
            unshare.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            unshare.current_dir(place.folder.path()).output().unwrap()
        };
        let run = ["run", "--rack", "r.toml", "--node", "a", "--library", CROSSLANE, "--", "/bin/true"];
        for arguments in [&run[..], &["up", "--rack", "r.toml"]] {
            let output = apart(arguments);
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
    let place = up();
    let before = place.monitor(0);
    assert!(Command::new("kill").args(["-STOP", &before["proxy"]["pid"].to_string()]).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(120);
    while place.monitor(0)["proxy"]["pid"] == before["proxy"]["pid"] || place.monitor(0)["proxy"]["is_ready"] != true {
        assert!(Instant::now() < deadline, "no other proxy: {}", place.status());
        std::thread::sleep(Duration::from_millis(100));
    }
    place.wait_for_link(0, "up");
    assert!(place.monitor(0)["links"][0]["ups"].as_u64() > before["links"][0]["ups"].as_u64());
}

#[test]
fn a_window_as_small_as_a_modelled_link_can_have_comes_up_and_a_smaller_one_is_wrong_use() {
    let place = Place::new(&["--link", "gen3x16"]);
    let least_bytes = rack::CONTROL_PARTITION_BYTES + 2 * rack::MODELLED_PARTITION_BYTES_MIN;
    place.change("window_bytes = 4194304", &format!("window_bytes = {}", least_bytes - 4096));
    let refused = place.output(&["up", "--rack", "r.toml"]);
    assert_fails(&refused, 2, &["r.toml, line", "device.window_bytes", "modelled", &least_bytes.to_string()]);
    assert_eq!(place.sockets(), Vec::<PathBuf>::new());
    place.change(&(least_bytes - 4096).to_string(), &least_bytes.to_string());
    let up = place.output(&["up", "--rack", "r.toml"]);
    assert!(up.status.success(), "{up:?}");
}
