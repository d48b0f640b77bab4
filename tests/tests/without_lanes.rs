//! The system calls that the library adds to those of a program that uses no lane. Counts, not times: those are in
//! docs/results/sockets.md, by `crosslane bench overhead`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use system_tests::port::{free_port, is_listening, start_server};
use system_tests::{Process, Rack, WAIT_MAX, c, paths, wait_until};

/// The largest number of system calls that the library adds to each call, those of children included.
const ADDED_MAX: &[(&str, usize)] = &[
    ("socket", 0),
    // The namespace, the user, the rack directory, and whether the socket is bound.
    ("connect, refused", 4),
    ("connect, non-blocking", 4),
    ("connect", 4),
    // The process, which may be a child of vfork.
    ("close, refused", 1),
    ("close, connected", 1),
    ("close, accepted", 1),
    ("send", 0),
    ("recv", 0),
    // Whether the page of an argument can be accessed, when it is named for the first time.
    ("recvmsg", 1),
    ("sendmsg", 1),
    ("poll", 1),
    ("select", 1),
    ("epoll_ctl", 1),
    ("epoll_wait", 0),
    ("shutdown", 0),
    // Which of the two sockets of the listener has a client.
    ("accept", 1),
    // Signals are blocked, and the child gets a statistics page; some children remove those of dead processes.
    ("fork", 60),
    // The library is loaded.
    ("spawn", 45),
];

fn calls() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let source = include_str!("without_lanes/calls.c");
    BUILT.get_or_init(|| c::build_text("calls", source, &["-O1", "-Wall", "-Wextra", "-Werror"]))
}

/// The system calls of each marked call, by its name.
type Steps = BTreeMap<String, Vec<String>>;

/// Returns the steps in an output of strace.
fn steps(output: &str) -> Steps {
    let (mut steps, mut step) = (Steps::new(), None);
    for line in output.lines() {
        // The number of the process comes first.
        let line = line.trim_start_matches(|letter: char| letter.is_ascii_digit()).trim_start();
        match line.strip_prefix("write(-1, \"").and_then(|rest| rest.split('"').next()) {
            Some("end") => step = None,
            // Of several, the last: the first call may do what only the first one must.
            Some(name) => {
                let calls = steps.entry(name.to_owned()).or_default();
                calls.clear();
                step = Some(calls);
            }
            None if line.starts_with(['<', '+', '-']) => {} // The second half of a call, an end, or a signal.
            None => {
                if let Some(step) = &mut step {
                    step.push(line.to_owned());
                }
            }
        }
    }
    steps
}

/// Runs the program below strace, in a rack of its own or bare, while `meanwhile` runs.
fn traced(arguments: &[&str], rack: Option<&Rack>, meanwhile: impl FnOnce()) -> Steps {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("calls");
    let outside = Rack::new();
    let mut command = outside.bare_command(paths::tool("strace"));
    command.args(["-f", "-o"]).arg(&output);
    // strace itself must not load the library.
    if let Some(rack) = rack {
        let variable = |name: &str, value: &Path| format!("{name}={}", value.display());
        command.args(["-E", &variable("LD_PRELOAD", &paths::library())]);
        command.args(["-E", &variable("CROSSLANE_RACK", rack.path())]);
    }
    let process = Process::start(command.arg(calls()).args(arguments));
    meanwhile();
    process.wait(WAIT_MAX).must_succeed();
    steps(&std::fs::read_to_string(&output).expect("the output of strace"))
}

fn assert_few_added(bare: &Steps, with: &Steps) {
    for (name, calls) in with {
        let max = ADDED_MAX.iter().find(|(known, _)| known == name).map(|(_, max)| *max);
        let max = max.unwrap_or_else(|| panic!("no bound for '{name}'"));
        let added = calls.len().saturating_sub(bare[name].len());
        assert!(added <= max, "{name}: {added} more than without the library, at most {max}: {calls:#?}");
        let in_proc: Vec<&String> = calls.iter().filter(|call| call.contains("\"/proc/")).collect();
        assert!(in_proc.is_empty(), "{name}: {in_proc:?}");
    }
    assert_eq!(with.keys().collect::<Vec<_>>(), bare.keys().collect::<Vec<_>>());
}

#[test]
fn a_client_of_a_server_without_lanes_makes_few_more_system_calls() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = start_server(|port| {
        let mut command = rack.bare_command(calls());
        command.args(["serve", &port.to_string()]);
        command
    });
    let port = server.port.to_string();
    let [bare, with] = [None, Some(&rack)].map(|rack| traced(&["call", &port], rack, || {}));
    assert!(with.len() > 15, "{with:?}");
    assert_few_added(&bare, &with);
}

#[test]
fn a_server_of_a_client_without_lanes_makes_few_more_system_calls() {
    let Some(rack) = Rack::with_lanes() else { return };
    let client = "
import socket, sys, time
for _ in range(2):
    client = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    client.sendall(b'ab')
    client.recv(1)
";
    let [bare, with] = [None, Some(&rack)].map(|of| {
        let port = free_port();
        traced(&["accept", &port.to_string()], of, || {
            wait_until("a listener", || is_listening(port));
            let mut command = rack.bare_command(paths::python());
            Process::start(command.args(["-c", client, &port.to_string()])).wait(WAIT_MAX).must_succeed();
        })
    });
    assert_few_added(&bare, &with);
}

#[test]
fn marked_calls_are_told_apart_in_the_output_of_strace() {
    let output = "7 write(-1, \"fork\", 4) = -1 EBADF (Bad file descriptor)\n7 fork() = 8\n8 exit(0) = ?\n\
                  8 +++ exited\n7 --- SIGCHLD ---\n7 <... wait4 resumed>) = 8\n7 write(-1, \"end\", 3) = -1 EBADF\n\
                  7 getpid() = 7\n";
    let expected = Steps::from([("fork".to_owned(), vec!["fork() = 8".to_owned(), "exit(0) = ?".to_owned()])]);
    assert_eq!(steps(output), expected);
}
