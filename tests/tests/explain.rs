//! `crosslane explain` and `crosslane stat --all`: the path of each socket, and the reason for it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;
use system_tests::paths::{self, frozen_library, repository};
use system_tests::port::{Server, free_port, start_server};
use system_tests::rack::command_as_nobody;
use system_tests::{Finished, LocalNodes, Process, Rack, WAIT_MAX, c, is_root, local_nodes, netns, wait_until};

const ENDPOINT: &str = include_str!("explain/endpoint.c");

/// The program with the sockets.
fn endpoint() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| c::build_text("endpoint", ENDPOINT, &["-O1", "-Wall", "-Wextra", "-Werror"]))
}

fn finish(command: &mut Command) -> Finished {
    Process::start(command).wait(WAIT_MAX)
}

/// Parses JSON and checks it against a schema of docs/.
#[track_caller]
fn valid(text: &str, schema: &str) -> Value {
    let schema = std::fs::read_to_string(repository().join("docs").join(schema)).expect("a schema");
    let validator = jsonschema::validator_for(&serde_json::from_str(&schema).expect("JSON")).expect("a schema");
    let value: Value = serde_json::from_str(text).expect("JSON");
    let errors: Vec<String> =
        validator.iter_errors(&value).map(|error| format!("{error} at {}", error.instance_path)).collect();
    assert!(errors.is_empty(), "{errors:?} in {text}");
    value
}

#[track_caller]
fn explain(options: &[&str]) -> Value {
    let mut command = Rack::new().bare_command(paths::crosslane());
    let output = finish(command.arg("explain").args(options).arg("--json")).must_succeed().stdout;
    valid(&output, "explain.schema.json")
}

#[track_caller]
fn sockets_of(process: &Process) -> Vec<Value> {
    explain(&["--pid", &process.pid().to_string()])["sockets"].as_array().expect("a list").clone()
}

/// Returns the path and the reason of the socket whose peer has a port.
#[track_caller]
fn to_port(process: &Process, port: u16) -> (String, Option<String>) {
    let sockets = sockets_of(process);
    let has_port = |socket: &&Value| socket["peer"].as_str().is_some_and(|peer| peer.ends_with(&format!(":{port}")));
    let socket = sockets.iter().find(has_port).unwrap_or_else(|| panic!("no peer with port {port} in {sockets:?}"));
    let text = |key: &str| socket[key].as_str().map(str::to_owned);
    (text("path").expect("a path"), text("reason"))
}

#[track_caller]
fn assert_kernel(process: &Process, port: u16, reason: &str) {
    assert_eq!(to_port(process, port), ("kernel".to_owned(), Some(reason.to_owned())), "{}", process.name());
}

#[track_caller]
fn assert_lane(process: &Process, port: u16) {
    assert_eq!(to_port(process, port), ("lane".to_owned(), None), "{}", process.name());
}

/// Starts a program that prints a line when its sockets are ready.
fn ready(command: &mut Command) -> Process {
    let process = Process::start(command);
    process.wait_until("its sockets", WAIT_MAX, |process| process.stdout().contains("ready"));
    process
}

fn client(mut command: Command, ports: &[u16]) -> Process {
    ready(command.arg("connect").args(ports.iter().map(u16::to_string)))
}

fn server(command: impl Fn() -> Command) -> Server {
    start_server(|port| {
        let mut command = command();
        command.arg("serve").arg(port.to_string());
        command
    })
}

#[test]
fn a_lane_and_all_that_a_client_holds_is_shown() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let program = client(rack.run(&[], endpoint()), &[listener.port]);
    assert_lane(&program, listener.port);
    let sockets = sockets_of(&program);
    let of = |path: &str| sockets.iter().filter(|socket| socket["path"] == path).count();
    assert_eq!((of("lane"), of("kernel"), sockets.len()), (2, 1, 3), "a copy, one unconnected, no UDP: {sockets:?}");
    let other = &sockets[0]["other_side"];
    assert_eq!(other["pid"].as_u64(), Some(listener.process.pid().into()), "{other}");
    assert!(sockets.iter().any(|socket| socket["reason"] == "not_connected"), "{sockets:?}");
    let at_server = sockets_of(&listener.process);
    let roles: Vec<(&str, &str)> =
        at_server.iter().filter_map(|socket| Some((socket["role"].as_str()?, socket["path"].as_str()?))).collect();
    assert_eq!(roles, [("listen", "lane"), ("accept", "lane")]);
    let text = finish(rack.bare_command(paths::crosslane()).args(["explain", "--port", &listener.port.to_string()]));
    let text = text.must_succeed().stdout;
    assert_eq!(text.matches("endpoint (process ").count(), 2, "both programs: {text}");
}

#[test]
fn a_young_connection_is_not_busy_at_either_side() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let program = ready(rack.run(&[], endpoint()).args(["young", &listener.port.to_string()]));
    assert_kernel(&program, listener.port, "not_busy");
    let at_server = sockets_of(&listener.process);
    let accepted = at_server.iter().find(|socket| socket["role"] == "accept").expect("a client");
    assert_eq!((&accepted["path"], &accepted["reason"]), (&"kernel".into(), &"not_busy".into()), "{accepted}");
    assert_eq!(accepted["other_side"]["pid"].as_u64(), Some(program.pid().into()), "{accepted}");
}

#[test]
fn the_other_side_of_an_ipv4_address_in_ipv6_form_is_named() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let script = "\
import socket, sys, time
connection = socket.socket(socket.AF_INET6)
connection.connect(('::ffff:127.0.0.1', int(sys.argv[1])))
for _ in range(50):
    connection.sendall(b'x')
    connection.recv(1)
print('ready', flush=True)
time.sleep(1000)
";
    let program = ready(rack.run(&[], paths::python()).args(["-c", script, &listener.port.to_string()]));
    assert_lane(&program, listener.port);
    let sockets = sockets_of(&program);
    assert_eq!(sockets[0]["other_side"]["pid"].as_u64(), Some(listener.process.pid().into()), "{sockets:?}");
    let at_server = sockets_of(&listener.process);
    assert_eq!(at_server[1]["other_side"]["pid"].as_u64(), Some(program.pid().into()), "{at_server:?}");
}

#[test]
fn programs_that_do_not_load_the_library_are_told_apart() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let fixed = c::build_text("static-endpoint", ENDPOINT, &["-static"]);
    let mark = "__attribute__((section(\".go.buildinfo\"), used)) static const char mark[] = \"Go\";\n";
    let go = c::build_text("go-endpoint", &(mark.to_owned() + ENDPOINT), &[]);
    let mut off = rack.run(&[], endpoint());
    off.env("CROSSLANE_OFF", "1");
    let mut missing = rack.bare_command(endpoint());
    missing.env("LD_PRELOAD", "/no/libcrosslane.so");
    for (command, reason) in [
        (rack.bare_command(endpoint()), "not_loaded"),
        (rack.run(&[], &fixed), "static_program"),
        // Its sockets are the C library's, which a real one's are not.
        (rack.bare_command(&go), "go_program"),
        (off, "off_by_variable"),
        (missing, "library_missing"),
    ] {
        let program = client(command, &[listener.port]);
        assert_kernel(&program, listener.port, reason);
        let at_server = sockets_of(&listener.process);
        let accepted = at_server.iter().find(|socket| {
            socket["role"] == "accept" && socket["other_side"]["pid"].as_u64() == Some(program.pid().into())
        });
        let accepted = accepted.unwrap_or_else(|| panic!("{reason}: {at_server:?}"));
        assert_eq!(accepted["reason"].as_str(), Some(format!("peer_{reason}").as_str()));
    }
    let plain = server(|| rack.bare_command(endpoint()));
    assert_kernel(&client(rack.run(&[], endpoint()), &[plain.port]), plain.port, "peer_not_loaded");
}

#[test]
fn rules_switches_and_racks_are_told_apart() {
    let Some(rack) = Rack::with_lanes() else { return };
    let open = server(|| rack.run(&[], endpoint()));
    let port = open.port.to_string();
    let program = client(rack.run(&["--except", &port], endpoint()), &[open.port]);
    assert_kernel(&program, open.port, "port_rule");
    let at_server = sockets_of(&open.process);
    assert!(at_server.iter().any(|socket| socket["reason"] == "port_rule"), "the client's rule: {at_server:?}");

    let excluded = server(|| rack.run(&["--only", "1"], endpoint()));
    let program = client(rack.run(&[], endpoint()), &[excluded.port]);
    assert_kernel(&program, excluded.port, "port_rule");
    let at_server = sockets_of(&excluded.process);
    assert!(at_server.iter().all(|socket| socket["reason"] == "port_rule"), "{at_server:?}");
    assert_eq!(at_server.len(), 2, "the listener and the client: {at_server:?}");

    let elsewhere = Rack::new();
    let stranger = server(|| elsewhere.run(&[], endpoint()));
    assert_kernel(&client(rack.run(&[], endpoint()), &[stranger.port]), stranger.port, "other_rack");

    let honours = client(rack.run(&["--filters", "honour"], endpoint()), &[open.port]);
    assert_kernel(&honours, open.port, "packet_filters");
}

#[test]
fn a_switch_reaches_connections_that_have_a_lane() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let before = ready(rack.run(&[], endpoint()).args(["steady", &listener.port.to_string()]));
    assert_lane(&before, listener.port);
    finish(rack.crosslane("lanes").arg("off")).must_succeed();
    let after = client(rack.run(&[], endpoint()), &[listener.port]);
    assert_kernel(&after, listener.port, "switched_off");
    let switched_off = ("kernel".to_owned(), Some("switched_off".to_owned()));
    wait_until("the older connection on TCP", || to_port(&before, listener.port) == switched_off);
    let at_server = sockets_of(&listener.process);
    assert!(at_server.iter().all(|socket| socket["reason"] == "switched_off"), "{at_server:?}");
    finish(rack.crosslane("lanes").arg("on")).must_succeed();
    assert_lane(&client(rack.run(&[], endpoint()), &[listener.port]), listener.port);
}

#[test]
fn options_sandboxes_and_inherited_sockets_are_told_apart() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let port = listener.port.to_string();
    let signals = ready(rack.run(&[], endpoint()).args(["signals", &port]));
    assert_kernel(&signals, listener.port, "socket_option");

    let filtered = ready(rack.run(&[], endpoint()).args(["filter", &port, &port]));
    let sockets = sockets_of(&filtered);
    let reasons: Vec<&Value> = sockets.iter().map(|socket| &socket["reason"]).collect();
    assert_eq!(reasons, ["sandbox"; 2], "one from before the filter, one from after it: {sockets:?}");

    let mut denied = rack.bare_command(endpoint());
    let run = rack.run(&[], endpoint());
    denied.arg("deny-unix").arg(run.get_program()).args(run.get_args());
    assert_kernel(&client(denied, &[listener.port]), listener.port, "sandbox");

    let mut passed = rack.bare_command(endpoint());
    let run = rack.run(&[], endpoint());
    passed.args(["pass", &port]).arg(run.get_program()).args(run.get_args()).arg("hold");
    // The library counts no request of it.
    assert_kernel(&ready(&mut passed), listener.port, "not_busy");
}

#[test]
fn a_side_that_cannot_use_what_both_have_agreed_on_tells_the_other_one() {
    let Some(rack) = Rack::with_lanes() else { return };
    let source = [paths::package_file("probes/deny.c")];
    let deny = c::build("deny", &source, &["-Wall", "-Werror"]);
    let without_memory = || {
        let run = rack.run(&[], endpoint());
        let mut command = rack.bare_command(&deny);
        command.arg("memory").arg(run.get_program()).args(run.get_args());
        command
    };
    let reason = |process: &Process, role: &str| {
        let sockets = sockets_of(process);
        let socket = sockets.iter().find(|socket| socket["role"] == role).expect("a connection");
        (socket["reason"].as_str().map(str::to_owned), socket["reported_by_other_side"] == true)
    };
    let failed = |is_reported: bool| (Some("resource_limit".to_owned()), is_reported);
    for is_server_denied in [true, false] {
        let listener = server(|| if is_server_denied { without_memory() } else { rack.run(&[], endpoint()) });
        let command = if is_server_denied { rack.run(&[], endpoint()) } else { without_memory() };
        let program = client(command, &[listener.port]);
        assert_eq!(reason(&program, "connect"), failed(is_server_denied));
        assert_eq!(reason(&listener.process, "accept"), failed(!is_server_denied));
    }
}

#[test]
fn racks_that_cannot_be_used_are_told_apart() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let open_to_others = Rack::new();
    std::fs::set_permissions(open_to_others.path(), PermissionsExt::from_mode(0o755)).expect("a folder");
    let program = client(open_to_others.run(&[], endpoint()), &[listener.port]);
    assert_kernel(&program, listener.port, "rack_unavailable");
    if is_root() {
        let script = "\
import os, socket, sys, time
os.setuid(65534)
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(50):
    connection.sendall(b'x')
    connection.recv(1)
print('ready', flush=True)
time.sleep(1000)
";
        let mut command = rack.run(&[], paths::python());
        let changed = ready(command.args(["-c", script, &listener.port.to_string()]));
        assert_kernel(&changed, listener.port, "rack_of_other_user");
    }
}

#[test]
fn the_rack_of_a_program_that_has_overwritten_its_variables_is_not_guessed() {
    let rack = Rack::new();
    // As programs do that set their title.
    let script = "
import socket, sys, time
listener = socket.create_server(('127.0.0.1', 0))
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
start, end = int(fields[47]), int(fields[48])
with open('/proc/self/mem', 'r+b', 0) as memory:
    memory.seek(start)
    memory.write(b'x' * (end - start))
print('ready', flush=True)
time.sleep(600)";
    let program = ready(rack.run(&[], paths::python()).args(["-c", script]));
    let pid = program.pid().to_string();
    assert_eq!(explain(&["--pid", &pid])["rack"], Value::Null);
    let text = finish(Command::new(paths::crosslane()).args(["explain", "--pid", &pid])).must_succeed().stdout;
    assert!(text.contains("has overwritten its variables"), "{text}");
    let stat = finish(rack.crosslane("stat").arg("--json")).must_succeed().stdout;
    let stat: Value = serde_json::from_str(&stat).expect("JSON");
    let mut idle = stat["idle"].as_array().expect("programs").iter();
    let shown = idle.find(|idle| idle["pid"] == program.pid()).expect("the program");
    assert_eq!(shown["rack"], Value::Null, "{stat}");
}

#[test]
fn a_page_of_another_release_is_reported() {
    let Some(rack) = Rack::with_lanes() else { return };
    let plain = server(|| rack.bare_command(endpoint()));
    let program = client(rack.run(&[], endpoint()), &[plain.port]);
    let page = rack.path().join("v1/stat").join(program.pid().to_string());
    let file = std::fs::File::options().write(true).open(page).expect("a page");
    // The version follows the eight bytes of the magic number.
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x7f], 8).expect("a page");
    assert_eq!(to_port(&program, plain.port), ("unknown".to_owned(), Some("other_release".to_owned())));
}

#[test]
fn a_server_with_the_library_of_another_release_is_found() {
    let Some(rack) = Rack::with_lanes() else { return };
    let before = frozen_library("before-kernel-connections");
    let listener = server(|| rack.run(&["--library", before.to_str().expect("UTF-8")], endpoint()));
    let program = client(rack.run(&[], endpoint()), &[listener.port]);
    assert_kernel(&program, listener.port, "version_mismatch");
    let at_server = sockets_of(&listener.process);
    assert!(at_server.iter().all(|socket| socket["reason"] == "other_release"), "{at_server:?}");
}

#[test]
fn programs_of_other_users_are_named_but_not_examined() {
    if !is_root() {
        println!("skipped: only root can start programs of another user");
        return;
    }
    let Some(rack) = Rack::with_lanes() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("a folder");
    let (program, command) = (folder.path().join("endpoint"), folder.path().join("crosslane"));
    paths::copy_program(endpoint(), &program);
    paths::copy_program(&paths::crosslane(), &command);
    let other = server(|| command_as_nobody(&program));
    assert_kernel(&client(rack.run(&[], endpoint()), &[other.port]), other.port, "other_user");

    let own = server(|| rack.run(&[], endpoint()));
    let as_nobody = |options: &[&str]| finish(command_as_nobody(&command).arg("explain").args(options));
    let (pid, port) = (own.process.pid().to_string(), own.port.to_string());
    as_nobody(&["--pid", &pid]).must_fail_in_one_line(2, &[&pid, "user root", "run this as root"]);
    as_nobody(&["--port", &port]).must_fail_in_one_line(2, &[&port, "user root"]);
    let seen = as_nobody(&["--pid", &other.process.pid().to_string(), "--json"]).must_succeed().stdout;
    let seen = valid(&seen, "explain.schema.json");
    assert_eq!(seen["sockets"][0]["reason"], "not_loaded");
    assert_eq!(seen["processes"][0]["uid"], 65534);
}

#[test]
fn what_cannot_be_explained_is_refused_in_one_line() {
    let refused = |options: &[&str], words: &[&str]| {
        finish(Command::new(paths::crosslane()).arg("explain").args(options)).must_fail_in_one_line(2, words);
    };
    let ended = Process::start(&mut Command::new("true"));
    let pid = ended.pid().to_string();
    ended.wait(WAIT_MAX);
    refused(&["--pid", &pid], &["no process", &pid, "--pid"]);
    refused(&["--pid", "0"], &["'0'"]);
    refused(&["--pid", "x"], &["'x'"]);
    refused(&["--port", "65536"], &["'65536'"]);
    refused(&["--port", "1"], &["no TCP socket has port 1", "--port"]);
    refused(&["--pid", "1", "--port", "1"], &["cannot be used with"]);
    refused(&["--", "/no/such/program"], &["'/no/such/program'", "check the path"]);
    refused(&["--rack", "/no/such", "--", "true"], &["'/no/such'", "--rack"]);
}

#[test]
fn a_command_line_is_judged_beforehand() {
    let Some(rack) = Rack::with_lanes() else { return };
    let (fast, plain) = (server(|| rack.run(&[], endpoint())), server(|| rack.bare_command(endpoint())));
    let rack_path = rack.path().to_str().expect("UTF-8");
    let judge = |program: &Path, only: Option<u16>| {
        let mut command = rack.bare_command(paths::crosslane());
        only.inspect(|port| _ = command.env("CROSSLANE_ONLY", port.to_string()));
        let program = program.to_str().expect("UTF-8");
        command.args(["explain", "--json", "--rack", rack_path, "--", program, "connect", "1"]);
        valid(&finish(&mut command).must_succeed().stdout, "explain.schema.json")
    };
    let reason_to = |forecast: &Value, port: u16| -> Value {
        let to = forecast["destinations"].as_array().expect("a list").iter();
        let mut to = to.filter(|to| to["address"].as_str().is_some_and(|at| at.ends_with(&format!(":{port}"))));
        to.next().unwrap_or_else(|| panic!("no {port} in {forecast}"))["reason"].clone()
    };
    let forecast = judge(endpoint(), None);
    assert_eq!((&forecast["path"], &forecast["reason"]), (&"lane".into(), &Value::Null));
    assert_eq!(reason_to(&forecast, fast.port), Value::Null);
    assert_eq!(reason_to(&forecast, plain.port), "peer_not_loaded");
    let forecast = judge(endpoint(), Some(plain.port));
    assert_eq!(reason_to(&forecast, fast.port), "port_rule");
    let fixed = c::build_text("static-endpoint-2", ENDPOINT, &["-static"]);
    let forecast = judge(&fixed, None);
    assert_eq!((&forecast["path"], &forecast["reason"]), (&"kernel".into(), &"static_program".into()));
    assert_eq!(reason_to(&forecast, fast.port), "static_program");
    finish(rack.crosslane("lanes").arg("off")).must_succeed();
    assert_eq!(judge(endpoint(), None)["reason"], "switched_off");
}

#[test]
fn all_racks_are_listed_with_their_programs() {
    let Some(rack) = Rack::with_lanes() else { return };
    let other = Rack::new();
    let busy = server(|| rack.run(&[], endpoint()));
    let _client = client(rack.run(&[], endpoint()), &[busy.port]);
    let idle = server(|| other.run(&[], endpoint()));
    let stat = |json: &[&str]| {
        finish(rack.bare_command(paths::crosslane()).args(["stat", "--all"]).args(json)).must_succeed().stdout
    };
    let report = valid(&stat(&["--json"]), "stat.schema.json");
    let list = |key: &str| report[key].as_array().expect("a list").iter();
    for (rack, server, has_page, count) in [(&rack, &busy, true, 2), (&other, &idle, false, 1)] {
        let (directory, pid) = (rack.path().to_str().expect("UTF-8"), u64::from(server.process.pid()));
        let found = list("racks").find(|found| found["directory"] == directory).unwrap_or_else(|| panic!("{report}"));
        let programs = found["programs"].as_array().expect("a list");
        assert_eq!(programs.len(), count, "{found}");
        let program = programs.iter().find(|program| program["pid"].as_u64() == Some(pid)).expect("the server");
        assert_eq!((&program["has_page"], &program["program"]), (&has_page.into(), &"endpoint".into()));
        assert_eq!(found["uid"], program["uid"]);
        assert!(program["user"].is_string() && program["cgroup"].is_string(), "{program}");
        let is_listed = |key: &str, pid_key: &str| list(key).any(|program| program[pid_key].as_u64() == Some(pid));
        assert_eq!((is_listed("processes", "host_pid"), is_listed("idle", "pid")), (has_page, !has_page), "{report}");
    }
    let text = stat(&[]);
    let idle_line =
        format!("No connection has proved busy, so that all use kernel TCP: endpoint ({})", idle.process.pid());
    for word in ["USER", "CGROUP", "endpoint", &busy.process.pid().to_string(), &idle_line] {
        assert!(text.contains(word), "{word} in {text}");
    }
    for rack in [&rack, &other] {
        let plain = finish(rack.crosslane("stat").arg("--json")).must_succeed().stdout;
        valid(&plain, "stat.schema.json");
    }
    let text = finish(&mut other.crosslane("stat")).must_succeed().stdout;
    assert!(text.contains(&idle_line) && !text.contains("Nothing runs"), "{text}");
    finish(rack.crosslane("stat").arg("--all")).must_fail_in_one_line(2, &["--all", "--rack"]);
}

/// A network namespace that a cable joins to this one; it is removed again.
struct Neighbour {
    name: String,
    address: String,
}

impl Neighbour {
    fn new() -> Self {
        let id = std::process::id();
        let name = format!("explain-{id}");
        let network = format!("10.{}.{}", 64 + id / 256 % 64, id % 256);
        netns::add(&name);
        let ip = |words: &str| finish(Command::new(paths::tool("ip")).args(words.split(' '))).must_succeed();
        ip(&format!("link add xe{id} type veth peer name xe{id}-b netns {name}"));
        ip(&format!("addr add {network}.1/24 dev xe{id}"));
        ip(&format!("link set xe{id} up"));
        netns::ip(&name, &["addr", "add", &format!("{network}.2/24"), "dev", &format!("xe{id}-b")]);
        netns::ip(&name, &["link", "set", &format!("xe{id}-b"), "up"]);
        Self { name, address: format!("{network}.2") }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        netns::delete_all(&self.name);
    }
}

#[test]
fn a_program_in_another_network_namespace_is_found() {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let neighbour = Neighbour::new();
    let run = rack.run(&[], endpoint());
    let mut command = netns::command(&neighbour.name, run.get_program());
    let port = free_port();
    command.args(run.get_args()).args(["serve", &format!("{}:{port}", neighbour.address)]);
    let server = Process::start(&mut command);
    let connect = || {
        let mut command = rack.run(&[], endpoint());
        Process::start(command.arg("connect").arg(format!("{}:{port}", neighbour.address)))
    };
    let mut program = connect();
    wait_until("a connection", || {
        if !program.is_running() {
            program = connect();
        }
        program.stdout().contains("ready")
    });
    assert_kernel(&program, port, "namespace_differs");
    assert!(server.is_running());
}

#[test]
fn a_rack_in_another_mount_namespace_is_found() {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let script = "mount -t tmpfs none /mnt && mkdir -m 700 /mnt/rack && exec \"$@\"";
    let inner = start_server(|port| {
        let mut command = rack.bare_command(paths::tool("unshare"));
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(paths::crosslane());
        command.args(["run", "--rack", "/mnt/rack", "--"]).arg(endpoint()).args(["serve", &port.to_string()]);
        command
    });
    assert_kernel(&client(rack.run(&[], endpoint()), &[inner.port]), inner.port, "other_rack");
    let output = finish(rack.bare_command(paths::crosslane()).args(["stat", "--all", "--json"])).must_succeed().stdout;
    let report = valid(&output, "stat.schema.json");
    let directory = format!("/proc/{}/root/mnt/rack", inner.process.pid());
    let racks = report["racks"].as_array().expect("a list");
    let found = racks.iter().find(|rack| rack["directory"] == directory.as_str());
    let programs = &found.unwrap_or_else(|| panic!("{report}"))["programs"];
    assert_eq!(programs[0]["pid"].as_u64(), Some(inner.process.pid().into()), "{programs}");
}

/// Checks what is said of a program that runs with the library, but could not create its page. The last of its sockets
/// is a busy connection.
fn assert_unpublished(program: &Process, directory: &str, why: &str) {
    let pid = program.pid().to_string();
    let sockets = sockets_of(program);
    let busy = sockets.iter().rfind(|socket| socket["state"] == "connected").expect("a connection");
    assert_eq!((&busy["path"], &busy["reason"]), (&"unknown".into(), &"unpublished".into()), "{sockets:?}");
    let explained = finish(Command::new(paths::crosslane()).args(["explain", "--pid", &pid])).must_succeed().stdout;
    assert!(explained.contains("no page in rack") && !explained.contains("without crosslane"), "{explained}");
    let stat =
        |options: &[&str]| finish(Command::new(paths::crosslane()).arg("stat").args(options)).must_succeed().stdout;
    let text = stat(&["--rack", directory]);
    for word in ["not shown: endpoint", &pid, directory, why] {
        assert!(text.contains(word), "{word} in {text}");
    }
    assert!(!text.contains("Nothing runs"), "{text}");
    for options in [&["--json", "--rack", directory][..], &["--json", "--all"]] {
        let report = valid(&stat(options), "stat.schema.json");
        let unpublished = report["unpublished"].as_array().expect("a list");
        let found = unpublished.iter().any(|found| found["pid"].as_u64() == Some(program.pid().into()));
        assert!(found, "{report}");
    }
}

#[test]
fn a_program_that_may_not_write_its_page_is_named() {
    let Some(rack) = Rack::with_lanes() else { return };
    // Neither side: that of the other one would have the reason.
    let limit = || {
        let run = rack.run(&[], endpoint());
        let mut command = rack.bare_command(paths::tool("prlimit"));
        command.arg("--fsize=4096").arg(run.get_program()).args(run.get_args());
        command
    };
    let listener = server(limit);
    let limited = client(limit(), &[listener.port]);
    assert_unpublished(&limited, rack.path().to_str().expect("UTF-8"), "limit of file sizes");
}

#[test]
fn a_full_file_system_of_the_rack_directory_is_reported() {
    assert_unpublished_in(
        "mount -t tmpfs -o size=64k none /mnt && mkdir -m 700 /mnt/rack && \
         { head -c 100k /dev/zero >/mnt/filler || true; } 2>/dev/null",
        "its file system is full",
    );
}

/// As in a container without a mount for it.
#[test]
fn a_rack_directory_on_an_overlay_file_system_is_reported() {
    assert_unpublished_in(
        "mount -t tmpfs none /mnt && mkdir /mnt/lower /mnt/upper /mnt/work && \
         mount -t overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work none /mnt && \
         mkdir -m 700 /mnt/rack",
        "it is on an overlay file system",
    );
}

/// Checks what is said of a program with a rack directory at `/mnt/rack`, which a shell prepares in a mount namespace.
#[track_caller]
fn assert_unpublished_in(preparation: &str, why: &str) {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let script = format!("{preparation} && exec \"$@\"");
    let run = |command: &mut Command| {
        command.arg(paths::crosslane()).args(["run", "--rack", "/mnt/rack", "--"]).arg(endpoint());
    };
    let inner = start_server(|port| {
        let mut command = rack.bare_command(paths::tool("unshare"));
        run(command.args(["--mount", "sh", "-c", &script, "sh"]));
        command.args(["serve", &port.to_string()]);
        command
    });
    let mut command = rack.bare_command(paths::tool("nsenter"));
    run(command.arg(format!("--mount=/proc/{}/ns/mnt", inner.process.pid())));
    let limited = client(command, &[inner.port]);
    let directory = format!("/proc/{}/root/mnt/rack", inner.process.pid());
    assert_unpublished(&limited, &directory, why);
}

/// A worker that `fork` has made shows what its parent has opened.
#[test]
fn a_forked_process_shows_what_it_inherited() {
    let Some(rack) = Rack::with_lanes() else { return };
    let script = "\
import os, socket, sys, time
server = socket.create_server(('127.0.0.1', int(sys.argv[1])))
if os.fork() == 0:
    client, _ = server.accept()
    print('child', os.getpid(), flush=True)
    while data := client.recv(100):
        client.sendall(data)
time.sleep(1000)
";
    let forked = start_server(|port| {
        let mut command = rack.run(&[], paths::python());
        command.args(["-c", script, &port.to_string()]);
        command
    });
    let program = client(rack.run(&[], endpoint()), &[forked.port]);
    assert_lane(&program, forked.port);
    forked.process.wait_until("a child", WAIT_MAX, |process| process.stdout().contains("child"));
    let pid = forked.process.stdout().split_whitespace().nth(1).expect("a number").to_owned();
    let sockets = explain(&["--pid", &pid])["sockets"].clone();
    let paths: Vec<&Value> = sockets.as_array().expect("a list").iter().map(|socket| &socket["path"]).collect();
    assert_eq!(paths, ["lane", "lane"], "the listener of its parent, and its own connection: {sockets}");
}

#[test]
fn a_connection_that_two_processes_hold_is_told_apart() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = server(|| rack.run(&[], endpoint()));
    let script = "\
import os, socket, sys, time
def exchange(connection):
    for _ in range(50):
        connection.sendall(b'x')
        connection.recv(1)
moved, young = (socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(2))
exchange(moved)
if os.fork() == 0:
    time.sleep(1000)
exchange(moved)
print('ready', flush=True)
time.sleep(1000)
";
    let program = ready(rack.run(&[], paths::python()).args(["-c", script, &listener.port.to_string()]));
    let sockets = sockets_of(&program);
    let reasons: Vec<&Value> = sockets.iter().map(|socket| &socket["reason"]).collect();
    assert_eq!(reasons, ["shared_socket"; 2], "{sockets:?}");
    assert!(sockets.iter().all(|socket| socket["path"] == "kernel"), "{sockets:?}");
}

#[test]
fn a_connection_between_nodes_is_on_a_window() {
    let nodes = LocalNodes::of_file(&local_nodes::with_long_silence(&local_nodes::example(&["--nodes", "2"])));
    nodes.finish("up", &[]).must_succeed();
    let listener = start_server(|port| {
        let mut command = nodes.run(0);
        command.arg(endpoint()).args(["serve", &format!("127.77.0.1:{port}")]);
        command
    });
    let mut command = nodes.run(1);
    let program = ready(command.arg(endpoint()).args(["connect", &format!("127.77.0.1:{}", listener.port)]));
    let sockets = sockets_of(&program);
    assert_eq!((&sockets[0]["path"], &sockets[0]["reason"]), (&"window".into(), &Value::Null), "{sockets:?}");
    assert_eq!(sockets[0]["other_side"]["pid"].as_u64(), Some(listener.process.pid().into()));
}
