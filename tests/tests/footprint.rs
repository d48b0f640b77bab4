//! The resources of connections that carry little or nothing: counts, not times.

use std::process::Command;
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, WAIT_MAX, c, start_server};

const RUN_LIMIT: Duration = Duration::from_secs(120);
const LONG_RUN_LIMIT: Duration = Duration::from_secs(600);
/// Memory of a connection that carries no bulk data.
const TOUCHED_KIB_MAX: f64 = 64.0;
/// A wait that polls every millisecond would block a thousand times in the measured second.
const IDLE_SWITCHES_MAX: f64 = 100.0;
/// CPU time in the measured second; a wait that spins uses all of it.
const IDLE_CPU_MS_MAX: f64 = 250.0;

/// Runs fifty connections, whose report has the lines `ROLE FACT NUMBER`.
fn measure() -> Vec<(String, f64)> {
    let rack = Rack::new();
    let mut command = rack.run(&[], python());
    let (finished, traffic) = rack.run_watched(command.arg(package_file("python/idle_and_memory.py")), RUN_LIMIT);
    rack.assert_over_lanes("the fifty", traffic, 1);
    let finished = finished.must_succeed();
    let fact = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("'{line}': {finished}"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("'{line}': {finished}")))
    };
    finished.stdout.lines().map(fact).collect()
}

/// One fact of both endpoints.
#[track_caller]
fn of_both(facts: &[(String, f64)], what: &str) -> Vec<f64> {
    let found: Vec<f64> =
        facts.iter().filter(|(name, _)| name.ends_with(&format!(" {what}"))).map(|(_, value)| *value).collect();
    assert_eq!(found.len(), 2, "{what} of both endpoints: {facts:?}");
    found
}

#[test]
fn a_connection_touches_little_memory_and_does_nothing_while_idle() {
    let facts = measure();
    // A connection has no lanes until it is busy.
    assert!(of_both(&facts, "touched_kib_connected").iter().all(|kib| *kib == 0.0), "{facts:?}");
    let touched_kib: f64 = of_both(&facts, "touched_kib_used").iter().sum();
    assert!(touched_kib > 0.0 && touched_kib <= TOUCHED_KIB_MAX, "{facts:?}");
    assert!(of_both(&facts, "idle_switches").iter().all(|count| *count <= IDLE_SWITCHES_MAX), "{facts:?}");
    assert!(of_both(&facts, "idle_cpu_ms").iter().all(|ms| *ms <= IDLE_CPU_MS_MAX), "{facts:?}");
}

/// Prints its number of threads; with an argument, after it has used a connection by epoll.
const THREAD_COUNTER: &str = r#"
#include <arpa/inet.h>
#include <dirent.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static int count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int count = -2; // "." and ".."
    while (readdir(tasks))
        count++;
    closedir(tasks);
    return count;
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t size = sizeof at;
        struct epoll_event event = {.events = EPOLLIN};
        char byte = 'x';
        int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
        int epoll = epoll_create1(0);
        if (bind(listener, (struct sockaddr *)&at, size) || listen(listener, 1)
            || getsockname(listener, (struct sockaddr *)&at, &size) || connect(client, (struct sockaddr *)&at, size))
            return 1;
        int server = accept(listener, NULL, NULL);
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event) || write(client, &byte, 1) != 1
            || epoll_wait(epoll, &event, 1, 10000) != 1 || read(server, &byte, 1) != 1)
            return 2;
    }
    printf("%d\n", count_threads());
    return 0;
}
"#;

#[test]
fn the_library_has_no_thread() {
    let rack = Rack::new();
    let program = c::build_text("count_threads", THREAD_COUNTER, &["-O2"]);
    for arguments in [&[] as &[&str], &["connect"]] {
        let finished = Process::start(rack.require_lane(&program).args(arguments)).wait(WAIT_MAX).must_succeed();
        assert_eq!(finished.stdout, "1\n", "{finished}");
    }
}

/// Bytes of both endpoints and both small rings of a connection.
const DRAINED_BYTES: &str = "16384";

/// Has two threads, and makes round trips to the port of its argument by two connections. Prints for how many
/// descriptors the kernel's table has room, before and after.
const TWO_THREADS: &str = "
import socket, sys, threading
def room():
    return int(next(line for line in open('/proc/self/status') if line.startswith('FDSize')).split()[1])
threading.Thread(target=threading.Event().wait, daemon=True).start()
before = room()
for connection in [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(2)]:
    for _ in range(50):
        connection.sendall(b'x')
        assert connection.recv(1) == b'x'
print(before, room())";

#[test]
fn the_table_of_descriptors_of_a_program_with_threads_does_not_grow_for_a_few_lanes() {
    // The kernel takes milliseconds to enlarge it, in which the connection would wait.
    let Some(rack) = Rack::with_lanes() else { return };
    let server = start_server(|port| {
        let mut command = rack.run(&[], python());
        command.arg(package_file("python/selector_echo_server.py")).arg(port.to_string());
        command
    });
    let mut client = rack.run(&[], python());
    client.args(["-c", TWO_THREADS]).arg(server.port.to_string());
    let finished = Process::start(&mut client).wait(WAIT_MAX).must_succeed();
    let traffic = rack.stat().traffic_of_pid(server.process.pid()).expect("its page");
    assert_eq!(traffic.lane_connections, 2);
    let sizes: Vec<&str> = finished.stdout.split_whitespace().collect();
    assert!(sizes.len() == 2 && sizes[0] == sizes[1], "{finished}");
}

#[test]
fn a_connection_that_was_read_to_the_end_keeps_only_its_small_rings() {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    command.arg(package_file("python/drained_memory.py")).arg(DRAINED_BYTES);
    let finished = Process::start(&mut command).wait(WAIT_MAX).must_succeed();
    assert_eq!(finished.stdout, "ok\n", "{finished}");
}

/// A line of `unread_bytes.py`: `SO_SNDBUF`, `SO_RCVBUF`, bytes of a write, bytes accepted.
fn unread_bytes(command: &mut Command) -> Vec<[u64; 4]> {
    let finished = Process::start(command.arg(package_file("python/unread_bytes.py"))).wait(RUN_LIMIT).must_succeed();
    let numbers = |line: &str| -> Option<[u64; 4]> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        numbers.try_into().ok()
    };
    let lines = finished.stdout.lines();
    lines.map(|line| numbers(line).unwrap_or_else(|| panic!("'{line}': {finished}"))).collect()
}

/// A lane holds half of `SO_SNDBUF`, so that TCP can take all of it back at once.
#[test]
fn a_sender_whose_peer_does_not_read_is_accepted_a_fifth_to_all_of_what_tcp_accepts() {
    let by_tcp = unread_bytes(&mut Command::new(python()));
    let by_lanes = unread_bytes(&mut Rack::new().run(&[], python()));
    assert_eq!((by_tcp.len(), by_lanes.len()), (12, 12));
    for (tcp, lane) in by_tcp.iter().zip(&by_lanes) {
        let [.., write_bytes, accepted_by_tcp] = *tcp;
        let [.., accepted] = *lane;
        assert_eq!(tcp[..3], lane[..3]);
        // The last write may be partial.
        let bounds = (accepted_by_tcp / 5).saturating_sub(write_bytes)..=accepted_by_tcp + write_bytes;
        assert!(bounds.contains(&accepted), "{lane:?} over a lane, {tcp:?} over TCP");
    }
}

#[test]
fn a_core_dump_leaves_the_memory_of_lanes_out() {
    let Some(rack) = Rack::with_lanes() else { return };
    let folder = rack.scratch();
    let mut command = rack.require_lane(python());
    command.arg(package_file("python/core_dump.py")).current_dir(folder.path());
    let finished = Process::start(&mut command).wait(RUN_LIMIT).must_succeed();
    assert!(finished.stdout.starts_with("ok"), "{finished}");
    if finished.stdout.contains("without") {
        eprintln!("skipped in part: the machine writes no core file into the working directory");
    }
}

fn connections_leave_nothing(count: &str) {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    command.arg(package_file("python/growth.py")).arg(count);
    let finished = Process::start(&mut command).wait(LONG_RUN_LIMIT).must_succeed();
    assert!(finished.stdout.ends_with("ok\n"), "{finished}");
}

#[test]
fn ten_thousand_connections_leave_nothing_behind() {
    connections_leave_nothing("10000");
}

#[test]
#[ignore = "takes half a minute; in ./x exam"]
fn two_hundred_thousand_connections_leave_nothing_behind() {
    connections_leave_nothing("200000");
}

/// Both endpoints are in one process: the number that the limits of ordinary machines allow.
const LIVE_CONNECTIONS: usize = 4000;
/// Round trips of one byte by each, as in `many_connections.py`.
const ROUND_TRIPS: u64 = 40;

#[test]
fn thousands_of_live_connections_are_listed() {
    let rack = Rack::new();
    let mut command = rack.run(&[], python());
    let command = command.arg(package_file("python/many_connections.py")).arg(LIVE_CONNECTIONS.to_string());
    let (process, input) = Process::start_with_input(command);
    process.wait_until("connections", RUN_LIMIT, |process| process.stdout().contains("connected"));
    let stat = rack.stat();
    let listed: usize = stat.named("python").map(|process| process["connections"].as_array().map_or(0, Vec::len)).sum();
    assert_eq!(listed, 2 * LIVE_CONNECTIONS);
    let traffic = stat.traffic_of("python");
    // Sent and received, there and back.
    let bytes = 4 * LIVE_CONNECTIONS as u64 * ROUND_TRIPS;
    assert!(traffic.lane_bytes > bytes / 2, "{traffic:?}");
    assert_eq!(traffic.lane_bytes + traffic.kernel_bytes, bytes, "{traffic:?}");
    drop(input);
    process.wait(WAIT_MAX).must_succeed();
}
