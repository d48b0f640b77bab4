//! What an operator sees: environment variables set by hand, fallback reasons, refusals, the switch, doctor.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

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
/// A program that connects to itself, and sends one byte.
const ECHOES_TO_ITSELF: &str = "
import socket, threading
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen()
try:
    client = socket.create_connection(listener.getsockname())
    listener.accept()[0].sendall(b'x')
    print(client.recv(1))
except ConnectionResetError:
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
        // Connections whose bytes packet filters see get no lane.
        let variables = [("CROSSLANE_FILTERS", "honour"), ("CROSSLANE_REQUIRE_LANE", value)];
        let finished = finish(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
        assert_eq!(finished.stdout, "refused\n", "{value}: {finished}");
        assert!(finished.stderr.contains("no lane: a setting or a socket option keeps it on kernel TCP"), "{finished}");
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
    let server = echo_server(&rack);
    let finished = finish(by_hand(&rack, &variables, &client_script(server.port))).must_succeed();
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("answered\n", ""));
    assert!(Path::new(runtime).join("crosslane/v1/stat").is_dir());
}

// --- reasons -------------------------------------------------------------------------------------------------------

const ECHO_SERVER: &str = "python/echo_server.py";

/// Connects, makes round trips after which the connection has tried to get a lane, and prints a line.
const CLIENT: &str = "
import socket, sys
connection = socket.create_connection(('127.0.0.1', PORT))
for _ in range(50):
    connection.sendall(b'x')
    assert connection.recv(1) == b'x'
print('answered', flush=True)
";

fn client_script(port: u16) -> String {
    CLIENT.replace("PORT", &port.to_string())
}

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

/// The line by which a client that requires a lane names the reason, once a second has passed.
#[track_caller]
fn refusal(rack: &Rack, port: u16) -> String {
    refusal_of(rack.require_lane(python()), port, "")
}

/// The same of a client that runs a statement first.
#[track_caller]
fn refusal_of(mut client: Command, port: u16, statement: &str) -> String {
    client.arg(package_file("python/patient_client.py")).arg(port.to_string()).arg(statement);
    let finished = Process::start(&mut client).wait(WAIT_MAX).must_exit_with(1);
    let line = finished.stderr.lines().find(|line| line.starts_with("crosslane: "));
    line.unwrap_or_else(|| panic!("{finished}")).to_owned()
}

/// The fallback reasons that `stat` counts for a busy client that runs a statement first.
fn counted_of(rack: &Rack, mut client: Command, port: u16, statement: &str) -> Vec<String> {
    let script = format!("{statement}\n{}sys.stdin.read()", client_script(port));
    let (client, _input) = Process::start_with_input(client.args(["-c", &script]));
    client.wait_until("its round trips", WAIT_MAX, |client| client.stdout().contains("answered"));
    let stat = rack.stat();
    let process = stat.named("python").find(|process| process["pid"] == client.pid());
    let fallbacks = process.expect("a page of the client")["fallbacks"].clone();
    fallbacks.as_object().expect("an object").keys().cloned().collect()
}

fn counted(rack: &Rack, port: u16) -> Vec<String> {
    counted_of(rack, rack.run(&[], python()), port, "")
}

#[test]
fn a_bare_server_and_one_of_another_user_do_not_answer() {
    let Some(rack) = Rack::with_lanes() else { return };
    let bare = server_by(|| rack.bare_command(python()), ECHO_SERVER);
    assert!(refusal(&rack, bare.port).contains("no lane: the peer has not announced itself (16); refused by"));
    assert_eq!(counted(&rack, bare.port), ["no_answer"]);
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
    // `crosslane explain` finds out whose it is.
    assert_eq!(counted(&rack, others.port), ["no_answer"]);
}

#[test]
fn a_program_that_changed_its_user_reports_the_owner_of_the_rack() {
    let Some(rack) = Rack::with_lanes().filter(|_| is_root()) else { return };
    let listener = echo_server(&rack);
    let line = refusal_of(rack.require_lane(python()), listener.port, "import os; os.setuid(65534)");
    assert!(line.contains("no lane: the rack directory belongs to another user (73)"), "{line}");
}

#[test]
fn rules_and_options_that_keep_a_busy_connection_on_kernel_tcp_are_counted() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(&rack);
    let port = server.port.to_string();
    let counted =
        |options: &[&str], statement: &str| counted_of(&rack, rack.run(options, python()), server.port, statement);
    assert_eq!(counted(&[], ""), [""; 0]);
    assert_eq!(counted(&["--except", &port], ""), ["port_rule"]);
    assert_eq!(counted(&["--only", "1"], ""), ["port_rule"]);
    assert_eq!(counted(&["--filters", "honour"], ""), ["packet_filters"]);
    let option = "
import socket
plain = socket.socket
def with_option(*arguments, **options):
    made = plain(*arguments, **options)
    made.setsockopt(socket.SOL_SOCKET, 47, 1 << 30)  # SO_MAX_PACING_RATE
    return made
socket.socket = with_option";
    assert_eq!(counted(&[], option), ["socket_option"]);
}

/// A command that may make no AF_UNIX sockets.
fn without_unix_sockets(rack: &Rack, run: &Command) -> Command {
    let mut command = rack.bare_command(python());
    command.arg(package_file("python/without_unix_sockets.py")).arg(run.get_program()).args(run.get_args());
    command
}

#[test]
fn a_program_that_may_make_no_unix_sockets_has_its_reason() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = echo_server(&rack);
    let line = refusal_of(without_unix_sockets(&rack, &rack.require_lane(python())), listener.port, "");
    assert!(line.contains("no lane: a sandbox denies what lanes need (70)"), "{line}");
    let client = without_unix_sockets(&rack, &rack.run(&[], python()));
    assert_eq!(counted_of(&rack, client, listener.port, ""), ["sandbox"]);
}

/// Limits the address space of a Python program.
const LIMITED: &str = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))";

#[test]
fn a_program_with_a_limited_address_space_uses_kernel_tcp() {
    let Some(rack) = Rack::with_lanes() else { return };
    let listener = echo_server(&rack);
    let line = refusal_of(rack.require_lane(python()), listener.port, LIMITED);
    assert!(line.contains("no lane: the address space of this process is limited (71)"), "{line}");
    let client = rack.run(&[], python());
    assert_eq!(counted_of(&rack, client, listener.port, LIMITED), ["address_space_limited"]);
    let script = format!("{LIMITED}\n{}", fs::read_to_string(package_file(ECHO_SERVER)).expect("the server"));
    let server = start_server(|port| {
        let mut command = rack.run(&[], python());
        command.arg("-c").arg(&script).arg(port.to_string());
        command
    });
    assert_eq!(counted(&rack, server.port), ["no_answer"]);
    let stat = rack.stat();
    let fallbacks = stat.named("python").map(|process| process["fallbacks"]["address_space_limited"].as_u64());
    assert!(fallbacks.flatten().any(|count| count >= 1), "{stat:?}");
}

#[test]
fn a_server_whose_address_space_is_limited_after_accept_receives_all_by_kernel_tcp() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = "
import resource, socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
connection, _ = listener.accept()
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))
total = 0
while data := connection.recv(65536):
    connection.sendall(data[:1])
    total += len(data)
print(total)
";
    let client = "
import socket, sys
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(500):
    connection.sendall(bytes(10000))
    connection.recv(1)
connection.shutdown(socket.SHUT_WR)
while connection.recv(1000):
    pass
print('sent')
";
    let port = system_tests::port::free_port();
    let python_of = |script: &str| {
        let mut command = rack.run(&[], python());
        command.args(["-c", script]).arg(port.to_string());
        Process::start(&mut command)
    };
    let server = python_of(server);
    server.wait_until("a listener", WAIT_MAX, |server| server.stdout().contains("listening"));
    let client = python_of(client).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "sent\n", "{client}");
    let server = server.wait(WAIT_MAX).must_succeed();
    assert_eq!(server.stdout, "listening\n5000000\n", "{server}");
}

// --- lanes off and on ----------------------------------------------------------------------------------------------

/// For each input line, round trips over a connection that stays and over a new one.
const CLIENT_BY_LINE: &str = "
import socket, sys
at = ('127.0.0.1', int(sys.argv[1]))
def round_trips(connection):
    for _ in range(50):
        connection.sendall(b'x')
        assert connection.recv(1) == b'x'
old = socket.create_connection(at)
round_trips(old)
print('ready', flush=True)
for line in sys.stdin:
    new = socket.create_connection(at)
    round_trips(new)
    round_trips(old)
    new.close()
    print('done', flush=True)
";
/// A connection notices the switch within this time of its waits.
const SWITCH_TIME: Duration = Duration::from_secs(1);

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
    // The number of connections that have had a lane, and the bytes by lanes.
    let mut exchange = |client: &Process| {
        rounds += 1;
        input.write_all(b"again\n").expect("a client that reads");
        client.wait_until("a round", WAIT_MAX, |client| client.stdout().matches("done").count() == rounds);
        let traffic = rack.stat().traffic_of_pid(client.pid()).expect("its page");
        (traffic.lane_connections, traffic.lane_bytes)
    };
    assert_eq!(exchange(&client).0, 2);
    let said = switch_lanes(&rack, "off");
    assert!(said.contains("use kernel TCP; those with lanes go back"), "{said}");
    std::thread::sleep(SWITCH_TIME);
    exchange(&client);
    let by_tcp = exchange(&client);
    assert_eq!(by_tcp.0, 2, "no new connection gets a lane");
    assert_eq!(exchange(&client), by_tcp, "the older one uses none any more");
    let output = Process::start(&mut rack.crosslane("stat")).wait(WAIT_MAX).must_succeed().stdout;
    assert!(output.contains("Lanes are switched off in") && output.contains("switched_off"), "{output}");
    let doctor = Process::start(&mut rack.crosslane("doctor")).wait(WAIT_MAX).stdout;
    assert!(doctor.contains("lanes are switched off"), "{doctor}");
    // A server that starts to listen meanwhile gets lanes as soon as they are on again.
    let late = echo_server(&rack);
    let refused = refusal(&rack, late.port);
    assert!(refused.contains("no lane: lanes are off (64)"), "{refused}");
    switch_lanes(&rack, "on");
    assert_eq!(exchange(&client).0, 3);
    assert_eq!(counted(&rack, late.port), [""; 0]);
    assert!(!rack.path().join("lanes-off").exists());
}

#[test]
fn lanes_that_are_off_before_the_first_program_stay_off() {
    let Some(rack) = Rack::with_lanes() else { return };
    switch_lanes(&rack, "off");
    let server = echo_server(&rack);
    assert_eq!(counted(&rack, server.port), ["switched_off"]);
    switch_lanes(&rack, "on");
    assert_eq!(counted(&rack, server.port), [""; 0]);
}

#[test]
fn stat_names_programs_without_a_busy_connection() {
    let Some(rack) = Rack::with_lanes() else { return };
    let stat = || Process::start(&mut rack.crosslane("stat")).wait(WAIT_MAX).must_succeed().stdout;
    assert!(stat().starts_with("Nothing runs over crosslane in"));
    let server = echo_server(&rack);
    let output = stat();
    let named = format!("({})", server.process.pid());
    assert!(output.starts_with("No connection has proved busy") && output.contains(&named), "{output}");
}

#[test]
fn stat_shows_closed_connections_and_their_path_for_a_while() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(&rack);
    let address = format!("127.0.0.1:{}", server.port);
    let pid = server.process.pid().to_string();
    let row = |path: &str| {
        let output = finish(rack.crosslane("stat")).must_succeed().stdout;
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let mut rows = output.lines().skip_while(|line| !line.contains(" CLOSED ")).map(words);
        rows.find(|row| row.get(3).is_some_and(|found| found == path))
    };
    let wait_for = |path: &str| {
        server.process.wait_until("a closed connection", WAIT_MAX, |_| row(path).is_some());
        row(path).expect("it is shown for a minute")
    };
    // Never busy, and closed by the client, whose end the kernel keeps.
    let once = client_script(server.port).replace("range(50)", "range(1)") + "connection.close()";
    finish(by_hand(&rack, &[], &once)).must_succeed();
    let by_kernel = wait_for("kernel");
    assert_eq!([&by_kernel[1], &by_kernel[4], &by_kernel[5]], [&pid, "accept", &address]);
    assert_eq!(by_kernel[7..10], ["-"; 3]);
    let busy = client_script(server.port) + "connection.close()";
    finish(by_hand(&rack, &[], &busy)).must_succeed();
    let by_lane = wait_for("lane");
    assert_eq!([&by_lane[1], &by_lane[2], &by_lane[4], &by_lane[5]], [&pid, "1", "accept", &address]);
    let stat = rack.stat();
    let process = stat.named("python").find(|process| process["pid"] == server.process.pid()).expect("its page");
    let closed = process["closed"].as_array().expect("closed connections");
    assert_eq!(closed.len(), 1, "{closed:?}");
    let connection = &closed[0]["connection"];
    assert_eq!((&connection["path"], &connection["role"]), (&"lane".into(), &"accept".into()));
    let carried = ["bytes_received", "tcp_bytes_received"].map(|key| connection[key].as_u64().expect("a count"));
    assert_eq!(carried.iter().sum::<u64>(), 50, "{connection}");
}

#[test]
fn stat_claims_no_path_of_closed_connections_that_another_program_may_have_had() {
    const SERVER_WITH_A_CHILD: &str = "
import os, runpy, sys
if os.fork() == 0:
    os._exit(0)
os.wait()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')";
    const LISTENER_BESIDE_ANOTHER: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])), reuse_port=True)
print('ready', flush=True)
while True:
    listener.accept()[0].recv(1)";
    let Some(rack) = Rack::with_lanes() else { return };
    let plain = echo_server(&rack);
    let command = || {
        let mut command = rack.run(&[], python());
        command.args(["-c", SERVER_WITH_A_CHILD]);
        command
    };
    let with_child = server_by(command, ECHO_SERVER);
    for server in [&plain, &with_child] {
        let once = client_script(server.port).replace("range(50)", "range(1)") + "connection.close()";
        finish(by_hand(&rack, &[], &once)).must_succeed();
    }
    let output = finish(rack.crosslane("stat")).must_succeed().stdout;
    let is_shown = |server: &Server| output.contains(&format!("127.0.0.1:{} ", server.port));
    assert!(is_shown(&plain) && !is_shown(&with_child), "{output}");
    let named = format!("({})", with_child.process.pid());
    assert!(output.contains(&named), "{output}");
    // Another program may have had a connection to an address at which both listen.
    let port = free_port();
    let listeners = [(), ()].map(|()| {
        let mut command = rack.run(&[], python());
        let listener = Process::start(command.args(["-c", LISTENER_BESIDE_ANOTHER]).arg(port.to_string()));
        listener.wait_until("a listener", WAIT_MAX, |listener| listener.stdout().contains("ready"));
        listener
    });
    let once = format!("import socket\nsocket.create_connection(('127.0.0.1', {port})).close()");
    finish(by_hand(&rack, &[], &once)).must_succeed();
    let output = finish(rack.crosslane("stat")).must_succeed().stdout;
    let is_named = |listener: &Process| output.contains(&format!("({})", listener.pid()));
    assert!(listeners.iter().all(is_named) && !output.contains(&format!("127.0.0.1:{port} ")), "{output}");
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
