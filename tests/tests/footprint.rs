//! What connections cost while they carry little or nothing: counts, not times.

use std::time::Duration;

use system_tests::place::{package_file, python};
use system_tests::{PATIENCE, Process, Rack, c};

const RUN_LIMIT: Duration = Duration::from_secs(120);
/// Until a connection carries bulk.
const TOUCHED_KIB_MAX: f64 = 64.0;
/// A wait that looks again every millisecond would sleep a thousand times in the second that is counted.
const IDLE_SWITCHES_MAX: f64 = 100.0;
/// Of the second that is counted: one that spins uses all of it.
const IDLE_CPU_MS_MAX: f64 = 250.0;

/// Runs fifty connections; `ROLE FACT NUMBER` by line.
fn measure() -> Vec<(String, f64)> {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    let (finished, traffic) = rack.run_watched(command.arg(package_file("python/idle_and_memory.py")), RUN_LIMIT);
    rack.assert_over_lanes("the fifty", traffic, 1);
    let finished = finished.must_succeed();
    let fact = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("'{line}': {finished}"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("'{line}': {finished}")))
    };
    finished.stdout.lines().map(fact).collect()
}

/// One fact of both ends.
#[track_caller]
fn of_both(facts: &[(String, f64)], what: &str) -> Vec<f64> {
    let found: Vec<f64> =
        facts.iter().filter(|(name, _)| name.ends_with(&format!(" {what}"))).map(|(_, value)| *value).collect();
    assert_eq!(found.len(), 2, "{what} of both ends: {facts:?}");
    found
}

#[test]
fn a_connection_touches_little_memory_and_does_nothing_while_idle() {
    let facts = measure();
    for when in ["touched_kib_connected", "touched_kib_used"] {
        let touched_kib: f64 = of_both(&facts, when).iter().sum();
        assert!(touched_kib > 0.0 && touched_kib <= TOUCHED_KIB_MAX, "{when}: {facts:?}");
    }
    assert!(of_both(&facts, "idle_switches").iter().all(|count| *count <= IDLE_SWITCHES_MAX), "{facts:?}");
    assert!(of_both(&facts, "idle_cpu_ms").iter().all(|ms| *ms <= IDLE_CPU_MS_MAX), "{facts:?}");
}

/// Says how many threads it has; with an argument, after it has used a connection by way of epoll.
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
        let finished = Process::start(rack.require_lane(&program).args(arguments)).wait(PATIENCE).must_succeed();
        assert_eq!(finished.stdout, "1\n", "{finished}");
    }
}

/// Both ends in one process: as many as the limits of ordinary machines let a program hold.
const LIVE_CONNECTIONS: usize = 4000;

#[test]
fn thousands_of_live_connections_are_listed() {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    let command = command.arg(package_file("python/many_connections.py")).arg(LIVE_CONNECTIONS.to_string());
    let (process, input) = Process::start_with_input(command);
    process.wait_until("connections", RUN_LIMIT, |process| process.stdout().contains("connected"));
    let stat = rack.stat();
    let listed: usize = stat.named("python").map(|process| process["connections"].as_array().map_or(0, Vec::len)).sum();
    assert_eq!(listed, 2 * LIVE_CONNECTIONS);
    let traffic = stat.traffic_of("python");
    assert_eq!(traffic.lane_bytes, 2 * LIVE_CONNECTIONS as u64);
    drop(input);
    process.wait(PATIENCE).must_succeed();
}
