//! What an operator sees: environment variables set by hand, fallback reasons, refusals.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use system_tests::paths::{copy_program, library, package_file, python, tool};
use system_tests::port::free_port;
use system_tests::rack::command_as_nobody;
use system_tests::{Finished, Process, Rack, Server, WAIT_MAX, is_root, start_server};

/// A Python program with the library preloaded by hand, as where an operator cannot change the command line.
fn by_hand(rack: &Rack, variables: &[(&str, &str)], script: &str) -> Command {
    let mut command = rack.bare_command(python());
    command.args(["-c", script]).env("LD_PRELOAD", library()).env("CROSSLANE_RACK", rack.path());
    command.envs(variables.iter().copied());
    command
}

fn finish(mut command: Command) -> Finished {
    Process::start(&mut command).wait(WAIT_MAX)
}

const PRINTS_RAN: &str = "print('ran')";
/// A program that connects to itself, which gets no lane.
const ECHOES_TO_ITSELF: &str = "
import socket, threading
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen()
try:
    client = socket.create_connection(listener.getsockname())
    listener.accept()[0].sendall(b'x')
    print(client.recv(1))
except ConnectionRefusedError:
    print('refused')
";

#[test]
fn an_invalid_variable_prevents_the_program_from_running() {
    let Some(rack) = Rack::with_lanes() else { return };
    for (name, value, remedy) in [
        ("CROSSLANE_REQUIRE_LANE", "treu", "set 1"),
        ("CROSSLANE_FILTERS", "honor", "set honour"),
        ("CROSSLANE_ONLY", "http", "80,6000-6100"),
        ("CROSSLANE_EXCEPT", "-1", "80,6000-6100"),
        ("CROSSLANE_NODE", "q7", "a letter"),
        ("CROSSLANE_OFF", "2", "set 1"),
    ] {
        let finished = finish(by_hand(&rack, &[(name, value)], PRINTS_RAN)).must_exit_with(2);
        assert_eq!(finished.stdout, "", "{finished}");
        finished.must_print_one_line(&[&format!("crosslane: {name}='{value}': "), remedy]);
    }
    let off = finish(by_hand(&rack, &[("CROSSLANE_OFF", "yes"), ("CROSSLANE_NODE", "q7")], PRINTS_RAN)).must_succeed();
    assert_eq!((off.stdout.as_str(), off.stderr.as_str()), ("ran\n", ""));
}

#[test]
fn valid_variables_print_nothing_and_switches_accept_words() {
    let Some(rack) = Rack::with_lanes() else { return };
    let fallback = [("CROSSLANE_ONLY", "1"), ("CROSSLANE_NODE", "b")];
    for value in ["no", "False", "0", ""] {
        let variables = [&fallback[..], &[("CROSSLANE_REQUIRE_LANE", value)]].concat();
        let finished = finish(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("b'x'\n", ""), "{value}");
    }
    for value in ["1", "true", "YES", "on"] {
        // Connections that packet filters see get no lane.
        let variables = [("CROSSLANE_FILTERS", "honour"), ("CROSSLANE_REQUIRE_LANE", value)];
        let finished = finish(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
        assert_eq!(finished.stdout, "refused\n", "{value}: {finished}");
        assert!(finished.stderr.contains("packet filters"), "{finished}");
    }
}

#[test]
fn an_unknown_variable_causes_one_warning_of_the_command_and_none_of_programs() {
    let Some(rack) = Rack::with_lanes() else { return };
    let script = "import subprocess; [subprocess.run(['/bin/true']) for _ in range(3)]; print('ran')";
    let by_hand = finish(by_hand(&rack, &[("CROSSLANE_REQUIRELANE", "1")], script)).must_succeed();
    assert_eq!((by_hand.stdout.as_str(), by_hand.stderr.as_str()), ("ran\n", ""));
    let mut run = rack.run(&[], python());
    run.args(["-c", script]).env("CROSSLANE_REQUIRELANE", "1");
    let run = finish(run).must_succeed();
    assert_eq!(run.stdout, "ran\n");
    run.must_print_one_line(&["crosslane: CROSSLANE_REQUIRELANE: "]);
}

#[test]
fn a_missing_rack_that_is_named_is_not_created() {
    let Some(rack) = Rack::with_lanes() else { return };
    let missing = rack.path().join("mistyped");
    let named = missing.to_str().expect("a name");
    let finished = finish(by_hand(&rack, &[("CROSSLANE_RACK", named)], ECHOES_TO_ITSELF)).must_succeed();
    assert_eq!(finished.stdout, "b'x'\n", "kernel TCP still works");
    finished.must_print_one_line(&[&format!("crosslane: rack '{named}' is not there; ")]);
    assert!(!missing.exists());
}

#[test]
fn the_default_directory_is_created() {
    let Some(rack) = Rack::with_lanes() else { return };
    let runtime = rack.path().to_str().expect("a name");
    let variables = [("CROSSLANE_RACK", ""), ("XDG_RUNTIME_DIR", runtime)];
    let finished = finish(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("b'x'\n", ""));
    assert!(Path::new(runtime).join("crosslane/v1/stat").is_dir());
}

// --- reasons -------------------------------------------------------------------------------------------------------

const ECHO_SERVER: &str = "python/echo_server.py";

/// Connects, prints a line, and stays until its input ends.
const HOLDING_CLIENT: &str = "
import socket, sys
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
connection.sendall(b'x')
print('answered', connection.recv(1), flush=True)
sys.stdin.read()
";

/// Starts a server: `command` runs Python, and the script and a port are appended.
fn server_by(command: impl Fn() -> Command, script: &str) -> Server {
    start_server(|port| {
        let mut command = command();
        command.arg(package_file(script)).arg(port.to_string());
        command
    })
}

fn echo_server(rack: &Rack) -> Server {
    server_by(|| rack.run(&[], python()), ECHO_SERVER)
}

/// The error of a client that requires a lane.
fn refusal(rack: &Rack, port: u16) -> String {
    let mut client = rack.require_lane(python());
    client.args(["-c", HOLDING_CLIENT]).arg(port.to_string());
    Process::start(&mut client).wait(WAIT_MAX).must_exit_with(1).stderr
}

/// The fallback reasons that `stat` counts for a client.
fn counted(rack: &Rack, port: u16) -> serde_json::Value {
    let mut client = rack.run(&[], python());
    client.args(["-c", HOLDING_CLIENT]).arg(port.to_string());
    let (client, _input) = Process::start_with_input(&mut client);
    client.wait_until("an answer", WAIT_MAX, |client| client.stdout().contains("answered"));
    let stat = rack.stat();
    let process = stat.named("python").find(|process| process["pid"] == client.pid());
    process.expect("a page of the client")["fallbacks"].clone()
}

#[test]
fn a_bare_server_and_one_of_another_user_have_different_reasons() {
    let Some(rack) = Rack::with_lanes() else { return };
    let bare = server_by(|| rack.bare_command(python()), ECHO_SERVER);
    assert!(refusal(&rack, bare.port).contains("no lane: no listener with lanes has that address"));
    assert_eq!(counted(&rack, bare.port), serde_json::json!({"no_listener": 1}));
    if !is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    // The user nobody may not be able to read the file.
    let script = fs::read_to_string(package_file(ECHO_SERVER)).expect("the server");
    let others = start_server(|port| {
        let mut command = command_as_nobody(python());
        command.arg("-c").arg(&script).arg(port.to_string());
        command
    });
    let output = refusal(&rack, others.port);
    assert!(output.contains("no lane: the server belongs to another user; refused by --require-lane"), "{output}");
    // Without a refusal, `crosslane explain` finds the reason out: connects of ordinary programs must not wait for it.
    assert_eq!(counted(&rack, others.port), serde_json::json!({"no_listener": 1}));
}

#[test]
fn a_server_in_another_network_namespace_has_its_reason() {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let mut server = rack.run(&[], tool("unshare"));
    server.args(["--net", "sh", "-c", "ip link set lo up; exec \"$@\"", "sh"]).arg(python()).args(["-u", "-c"]);
    server.arg("import socket; l = socket.create_server(('127.0.0.1', 0)); print(l.getsockname()[1]); l.accept()");
    let server = Process::start(&mut server);
    server.wait_until("a port", WAIT_MAX, |server| server.stdout().contains('\n'));
    let output = refusal(&rack, server.stdout().trim().parse().expect("a port"));
    assert!(output.contains("no lane: the two programs are in different network namespaces"), "{output}");
}

#[test]
fn a_program_that_changed_its_user_reports_the_owner_of_the_rack() {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let listener = echo_server(&rack);
    let mut client = rack.require_lane(python());
    client.args(["-c", &format!("import os; os.setuid(65534){HOLDING_CLIENT}")]).arg(listener.port.to_string());
    let output = Process::start(&mut client).wait(WAIT_MAX).must_exit_with(1).stderr;
    assert!(output.contains("no lane: the rack directory belongs to another user"), "{output}");
}

/// A client that may make no AF_UNIX sockets.
fn without_unix_sockets(rack: &Rack, options: &[&str], port: u16) -> Command {
    let run = rack.run(options, python());
    let mut command = rack.bare_command(python());
    command.arg(package_file("python/without_unix_sockets.py")).arg(run.get_program()).args(run.get_args());
    command.args(["-c", HOLDING_CLIENT]).arg(port.to_string());
    command
}

#[test]
fn a_program_that_may_make_no_unix_sockets_has_its_reason() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = echo_server(&rack);
    let refused = finish(without_unix_sockets(&rack, &["--require-lane"], listener.port)).must_exit_with(1).stderr;
    assert!(refused.contains("no lane: a sandbox denies the program what lanes need"), "{refused}");
    let (client, _input) = Process::start_with_input(&mut without_unix_sockets(&rack, &[], listener.port));
    client.wait_until("an answer", WAIT_MAX, |client| client.stdout().contains("answered"));
}

#[test]
fn a_program_with_a_limited_address_space_uses_kernel_tcp() {
    let Some(rack) = Rack::with_lanes() else { return };
    let limited =
        |script: &str| format!("import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n{script}");
    let listener = echo_server(&rack);
    let mut client = rack.require_lane(python());
    client.args(["-c", &limited(HOLDING_CLIENT)]).arg(listener.port.to_string());
    let refused = finish(client).must_exit_with(1).stderr;
    assert!(refused.contains("no lane: the program's address space is limited"), "{refused}");
    let script = limited(&fs::read_to_string(package_file(ECHO_SERVER)).expect("the server"));
    let server = start_server(|port| {
        let mut command = rack.run(&[], python());
        command.arg("-c").arg(&script).arg(port.to_string());
        command
    });
    assert_eq!(counted(&rack, server.port), serde_json::json!({"no_listener": 1}));
    let stat = rack.stat();
    let fallbacks = stat.named("python").map(|process| process["fallbacks"]["address_space_limited"].as_u64());
    assert!(fallbacks.flatten().any(|count| count == 1), "{stat:?}");
}

#[test]
fn an_endpoint_that_cannot_map_the_memory_of_a_lane_resets_the_connection() {
    let Some(rack) = Rack::with_lanes() else { return };
    // The limit is set when the connection has begun: the server can then map the memory of no lane.
    let server = "
import resource, socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
connection, _ = listener.accept()
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))
print('limited', flush=True)
try:
    while connection.recv(65536):
        pass
except ConnectionResetError:
    print('reset')
try:
    connection.sendall(b'x')
except BrokenPipeError:
    print('broken')
";
    // More than a lifeline holds, so that the client switches to a lane.
    let client = "
import socket, sys
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
try:
    for _ in range(1000):
        connection.sendall(bytes(100000))
except (ConnectionResetError, BrokenPipeError):
    print('failed')
";
    let port = free_port();
    let python_of = |script: &str| {
        let mut command = rack.run(&[], python());
        command.args(["-c", script]).arg(port.to_string());
        Process::start(&mut command)
    };
    let server = python_of(server);
    server.wait_until("a listener", WAIT_MAX, |server| server.stdout().contains("listening"));
    let client = python_of(client).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "failed\n", "{client}");
    let server = server.wait(WAIT_MAX).must_succeed();
    assert_eq!(server.stdout, "listening\nlimited\nreset\nbroken\n", "{server}");
}

#[test]
fn a_server_of_another_version_has_its_reason() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(&rack);
    // Each version has its own directory.
    fs::rename(rack.path().join("v4"), rack.path().join("v999")).expect("the directory of this version");
    let output = refusal(&rack, server.port);
    assert!(output.contains("no lane: the other side runs another version of crosslane"), "{output}");
    assert_eq!(counted(&rack, server.port), serde_json::json!({"no_listener": 1}));
}

// --- lanes off and on ----------------------------------------------------------------------------------------------

/// For each input line, one round trip over a connection that stays and one over a new one.
const CLIENT_BY_LINE: &str = "
import socket, sys
at = ('127.0.0.1', int(sys.argv[1]))
def round_trip(connection):
    connection.sendall(b'x')
    assert connection.recv(1) == b'x'
old = socket.create_connection(at)
round_trip(old)
print('ready', flush=True)
for line in sys.stdin:
    new = socket.create_connection(at)
    round_trip(new)
    round_trip(old)
    new.close()
    print('done', flush=True)
";

fn switch_lanes(rack: &Rack, state: &str) -> String {
    Process::start(rack.crosslane("lanes").arg(state)).wait(WAIT_MAX).must_succeed().stdout
}

#[test]
fn lanes_are_switched_off_and_on_while_programs_run() {
    let Some(rack) = Rack::with_lanes() else { return };
    let early = server_by(|| rack.run(&[], python()), "python/selector_echo_server.py");
    let mut client = rack.run(&[], python());
    client.args(["-c", CLIENT_BY_LINE]).arg(early.port.to_string());
    let (client, mut input) = Process::start_with_input(&mut client);
    client.wait_until("its connection", WAIT_MAX, |client| client.stdout().contains("ready"));
    let mut rounds = 0;
    let mut paths = |client: &Process| {
        rounds += 1;
        input.write_all(b"again\n").expect("a client that reads");
        client.wait_until("a round", WAIT_MAX, |client| client.stdout().matches("done").count() == rounds);
        let traffic = rack.stat().traffic_of_pid(client.pid()).expect("its page");
        (traffic.lane_connections, traffic.kernel_connections)
    };
    assert_eq!(paths(&client), (2, 0));
    switch_lanes(&rack, "off");
    assert_eq!(paths(&client), (2, 1), "an open connection keeps its lane");
    assert_eq!(paths(&client), (2, 2));
    let output = Process::start(&mut rack.crosslane("stat")).wait(WAIT_MAX).must_succeed().stdout;
    assert!(output.contains("Lanes are switched off in") && output.contains("switched_off"), "{output}");
    let doctor = Process::start(&mut rack.crosslane("doctor")).wait(WAIT_MAX).stdout;
    assert!(doctor.contains("lanes are switched off"), "{doctor}");
    // A server that starts to listen meanwhile gets lanes as soon as they are on again.
    let late = echo_server(&rack);
    let refused = refusal(&rack, late.port);
    assert!(refused.contains("no lane: lanes are switched off in the rack: crosslane lanes on"), "{refused}");
    switch_lanes(&rack, "on");
    assert_eq!(paths(&client), (3, 2));
    assert_eq!(counted(&rack, late.port), serde_json::json!({}));
    assert!(!rack.path().join("lanes-off").exists());
}

#[test]
fn lanes_that_are_off_before_the_first_program_stay_off() {
    let Some(rack) = Rack::with_lanes() else { return };
    switch_lanes(&rack, "off");
    let server = echo_server(&rack);
    assert_eq!(counted(&rack, server.port), serde_json::json!({"switched_off": 1}));
    switch_lanes(&rack, "on");
    assert_eq!(counted(&rack, server.port), serde_json::json!({}));
}

#[test]
fn a_repeated_refusal_is_printed_once() {
    let Some(rack) = Rack::with_lanes() else { return };
    let mut client = rack.require_lane(python());
    let script = "import socket, sys\nfor _ in range(4): socket.socket().connect_ex(('127.0.0.1', int(sys.argv[1])))";
    client.args(["-c", script, &free_port().to_string()]);
    let finished = Process::start(&mut client).wait(WAIT_MAX).must_succeed();
    assert_eq!(finished.stderr.lines().count(), 1, "{finished}");
}

#[test]
fn stat_shows_listeners() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(&rack);
    let output = Process::start(&mut rack.crosslane("stat")).wait(WAIT_MAX).must_succeed().stdout;
    let line = output.lines().find(|line| line.contains(&format!(":{}", server.port))).expect("the listener");
    assert!(output.contains("LISTENER") && line.contains("python"), "{output}");
}

// --- doctor --------------------------------------------------------------------------------------------------------

#[test]
fn doctor_names_programs_whose_library_was_replaced() {
    let Some(rack) = Rack::with_lanes() else { return };
    let scratch = rack.scratch();
    let copy = scratch.path().join("libcrosslane.so");
    copy_program(&library(), &copy);
    let options = ["--library", copy.to_str().expect("UTF-8")];
    let server = server_by(|| rack.run(&options, python()), ECHO_SERVER);
    let doctor = || finish(rack.crosslane("doctor")).must_succeed().stdout;
    let line = |text: &str| {
        let line = text.lines().find(|line| line.contains("  programs ")).expect("a check");
        line.to_owned()
    };
    assert!(line(&doctor()).starts_with("ok"), "{}", line(&doctor()));
    // As an installation does: a new file under the old name.
    fs::remove_file(&copy).expect("a file");
    copy_program(&library(), &copy);
    let replaced = line(&doctor());
    let found = [copy.to_str().expect("UTF-8"), "was replaced", "restart"];
    assert!(replaced.starts_with("note") && found.iter().all(|word| replaced.contains(word)), "{replaced}");
    drop(server);
    assert!(line(&doctor()).starts_with("ok"), "{}", line(&doctor()));
}

#[test]
fn doctor_fails_under_a_limit_that_prevents_lanes() {
    let Some(rack) = Rack::with_lanes() else { return };
    let doctor = rack.crosslane("doctor");
    let mut limited = rack.bare_command(tool("prlimit"));
    limited.arg(format!("--as={}", 4_u64 << 30)).arg(doctor.get_program()).args(doctor.get_args());
    let finished = finish(limited).must_exit_with(1);
    let line = finished.stdout.lines().find(|line| line.contains("address space")).expect("a check");
    assert!(line.starts_with("MISSING") && line.contains("LimitAS=infinity"), "{finished}");
}
