//! Unmodified servers and clients over lanes; their stats pages show that the bytes used lanes.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::paths::{package_file, postgresql, python, tool};
use system_tests::port::free_port;
use system_tests::{Finished, Process, Rack, Server, Traffic, WAIT_MAX, start_server};

const HOST: &str = "127.0.0.1";
const LOAD_LIMIT: Duration = Duration::from_secs(180);

/// Runs a client, which must succeed.
fn run_client(rack: &Rack, command: &mut Command) -> (Finished, Traffic) {
    let (finished, traffic) = rack.run_watched(command, LOAD_LIMIT);
    (finished.must_succeed(), traffic)
}

/// Runs a client that takes long enough for its stats page to be seen.
fn run_long_client(rack: &Rack, command: &mut Command) -> Finished {
    let (finished, traffic) = run_client(rack, command);
    rack.assert_over_lanes(&finished.name, traffic, 1);
    finished
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Bytes without repetitions, so that a misplaced part is detected.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

// --- Redis ---------------------------------------------------------------------------------------------------------

fn start_redis(rack: &Rack, folder: &Path) -> Server {
    start_redis_by(|| rack.require_lane(tool("redis-server")), folder)
}

fn start_redis_by(command: impl Fn() -> Command, folder: &Path) -> Server {
    start_server(|port| {
        let mut command = command();
        command.args(["--bind", HOST, "--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
        command.arg("--dir").arg(folder);
        command
    })
}

fn redis_cli(rack: &Rack, port: u16) -> Command {
    let mut command = rack.require_lane(tool("redis-cli"));
    command.args(["-h", HOST, "-p", &port.to_string()]);
    command
}

#[test]
fn redis_answers_redis_cli() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis(&rack, folder.path());
    let (client, mut input) = Process::start_with_input(&mut redis_cli(&rack, server.port));
    input.write_all(b"SET greeting hello\n").unwrap();
    input.write_all(&b"GET greeting\n".repeat(100)).unwrap();
    client.wait_until("the answers", WAIT_MAX, |client| client.stdout().matches("hello").count() == 100);
    rack.assert_program_over_lanes("redis-server", 1000);
    rack.assert_program_over_lanes("redis-cli", 1000);
    drop(input);
    client.wait(WAIT_MAX).must_succeed();
    let finished = run_client(&rack, redis_cli(&rack, server.port).args(["GET", "greeting"])).0;
    assert_eq!(finished.stdout, "hello\n");
}

#[test]
fn redis_stores_a_large_value() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis(&rack, folder.path());
    let text = content(3_000_000).iter().map(|byte| char::from(b'a' + byte % 26)).collect::<String>();
    let (client, mut input) = Process::start_with_input(redis_cli(&rack, server.port).args(["-x", "SET", "large"]));
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    client.wait(WAIT_MAX).must_succeed();
    let finished = run_client(&rack, redis_cli(&rack, server.port).args(["--raw", "GET", "large"])).0;
    assert!(finished.stdout.trim_end() == text, "the returned value has {} bytes", finished.stdout.len());
}

#[test]
fn redis_serves_redis_benchmark() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis(&rack, folder.path());
    for options in [["-c", "1", "-n", "10000"], ["-c", "50", "-n", "50000"]] {
        let mut command = rack.require_lane(tool("redis-benchmark"));
        command.args(["-h", HOST, "-p", &server.port.to_string(), "-t", "ping,set,get", "-d", "64", "--csv"]);
        let finished = run_client(&rack, command.args(options)).0;
        assert!(finished.stdout.contains("\"GET\""), "{finished}");
        assert!(!finished.stderr.contains("rror"), "{finished}");
    }
    rack.assert_program_over_lanes("redis-server", 50_000 * 64);
    let answer = run_client(&rack, redis_cli(&rack, server.port).arg("PING")).0;
    assert_eq!(answer.stdout, "PONG\n");
}

#[test]
fn redis_pipelines() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis(&rack, folder.path());
    let mut command = rack.require_lane(tool("redis-benchmark"));
    command.args(["-h", HOST, "-p", &server.port.to_string(), "-t", "set,get", "-P", "64", "-n", "200000", "--csv"]);
    let finished = run_client(&rack, &mut command).0;
    assert!(finished.stdout.contains("\"GET\""), "{finished}");
    rack.assert_program_over_lanes("redis-server", 200_000 * 10);
}

#[test]
fn redis_loads_from_a_pipe_and_copies_to_a_replica() {
    const KEYS: usize = 20_000;
    let (rack, folder, copies) = (Rack::new(), scratch(), scratch());
    let server = start_redis(&rack, folder.path());
    let (client, mut input) = Process::start_with_input(redis_cli(&rack, server.port).arg("--pipe"));
    for key in 0..KEYS {
        input.write_all(format!("SET key-{key} {key:0100}\r\n").as_bytes()).unwrap();
    }
    drop(input);
    let loaded = client.wait(WAIT_MAX).must_succeed();
    assert!(loaded.stdout.contains(&format!("errors: 0, replies: {KEYS}")), "{loaded}");

    run_client(&rack, redis_cli(&rack, server.port).args(["CONFIG", "SET", "repl-diskless-sync-delay", "0"]));
    let replica = start_redis(&rack, copies.path());
    let ours = server.port.to_string();
    run_client(&rack, redis_cli(&rack, replica.port).args(["REPLICAOF", HOST, &ours]));
    // WAIT concerns the writes of its own connection, so both commands use one connection.
    let (writer, mut input) = Process::start_with_input(&mut redis_cli(&rack, server.port));
    input.write_all(b"SET late arrival\nWAIT 1 30000\n").unwrap();
    drop(input);
    assert_eq!(writer.wait(WAIT_MAX).must_succeed().stdout, "OK\n1\n", "{}", replica.process.stdout());
    for (key, value) in [("late", "arrival".to_owned()), ("key-17", format!("{:0100}", 17))] {
        let copied = run_client(&rack, redis_cli(&rack, replica.port).args(["GET", key])).0;
        assert_eq!(copied.stdout, value + "\n");
    }
    // Part of the replies of five bytes: while the server saves in a child, its connections use TCP.
    rack.assert_program_over_lanes("redis-server", (KEYS * 2) as u64);
}

// --- memcached -----------------------------------------------------------------------------------------------------

fn start_memcached(rack: &Rack) -> Server {
    start_server(|port| {
        let mut command = rack.require_lane(tool("memcached"));
        command.args(["-l", HOST, "-p", &port.to_string(), "-U", "0", "-t", "2", "-c", "100", "-u", "root"]);
        command
    })
}

#[test]
fn memcached_returns_stored_values() {
    let rack = Rack::new();
    let server = start_memcached(&rack);
    let mut command = rack.require_lane(python());
    command.arg(package_file("python/memcached_client.py")).args([HOST, &server.port.to_string()]);
    let finished = run_client(&rack, &mut command).0;
    let bytes: u64 = finished.stdout.trim().strip_prefix("ok ").and_then(|text| text.parse().ok()).expect("ok BYTES");
    rack.assert_program_over_lanes("memcached", bytes / 2);
}

#[test]
fn memcached_answers_libmemcached() {
    let rack = Rack::new();
    let server = start_memcached(&rack);
    for program in ["memcping", "memccapable"] {
        let mut command = rack.require_lane(tool(program));
        match program {
            "memcping" => command.arg(format!("--servers={HOST}:{}", server.port)),
            _ => command.args(["-a", "-h", HOST, "-p", &server.port.to_string()]),
        };
        run_client(&rack, &mut command);
    }
    rack.assert_program_over_lanes("memcached", 100);
}

// --- nginx ---------------------------------------------------------------------------------------------------------

const NGINX_WORKERS: usize = 2;
const NGINX_ROUNDS_MAX: usize = 20;

fn nginx_configuration(folder: &Path, port: u16) -> String {
    let folder = folder.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("    {name}_temp_path {folder}/{name};\n"))
        .collect();
    format!(
        "daemon off;\nworker_processes {NGINX_WORKERS};\nuser root;\npid {folder}/nginx.pid;\n\
         error_log {folder}/error.log warn;\n\
         events {{ worker_connections 512; }}\n\
         http {{\n    access_log off;\n    sendfile on;\n    tcp_nopush on;\n{temporary}\
         server {{\n    listen {HOST}:{port};\n    root {folder}/pages;\n    keepalive_requests 1000000;\n\
         location /copy/ {{ proxy_pass http://{HOST}:{port}/; proxy_http_version 1.1; }} }}\n}}\n"
    )
}

fn start_nginx(rack: &Rack, folder: &Path) -> Server {
    start_server(|port| {
        let configuration = folder.join("nginx.conf");
        fs::write(&configuration, nginx_configuration(folder, port)).unwrap();
        let mut command = rack.require_lane(tool("nginx"));
        command.arg("-e").arg(folder.join("error.log")).arg("-c").arg(configuration);
        command
    })
}

fn pages(folder: &Path) -> Vec<u8> {
    let large = content(5_000_000);
    fs::create_dir(folder.join("pages")).unwrap();
    fs::write(folder.join("pages/small"), "a small page\n").unwrap();
    fs::write(folder.join("pages/large"), &large).unwrap();
    large
}

fn curl(rack: &Rack, url: &str) -> Command {
    let mut command = rack.require_lane(tool("curl"));
    command.args(["--silent", "--show-error", "--fail", "--noproxy", "*", "--max-time", "60", url]);
    command
}

/// Fetches a file and compares it.
fn fetch(rack: &Rack, folder: &Path, url: &str, want: &[u8]) {
    let got = folder.join("fetched");
    run_client(rack, curl(rack, url).arg("--output").arg(&got));
    let got = fs::read(got).unwrap();
    assert!(got == want, "{url}: got {} bytes, want {}", got.len(), want.len());
}

#[test]
fn nginx_serves_curl() {
    let (rack, folder) = (Rack::new(), scratch());
    let large = pages(folder.path());
    let server = start_nginx(&rack, folder.path());
    let url = format!("http://{HOST}:{}", server.port);
    fetch(&rack, folder.path(), &format!("{url}/small"), b"a small page\n");
    fetch(&rack, folder.path(), &format!("{url}/large"), &large);
    fetch(&rack, folder.path(), &format!("{url}/copy/large"), &large); // nginx as a client of itself
    let many = vec![format!("{url}/small"); 50];
    let finished = run_client(&rack, curl(&rack, &format!("{url}/small")).args(many)).0;
    assert_eq!(finished.stdout, "a small page\n".repeat(51));
    rack.assert_program_over_lanes("nginx", 5000);
}

/// Runs wrk and panics unless every answer was complete and in time.
fn load(rack: &Rack, port: u16, page: &str, connections: &str) {
    let url = format!("http://{HOST}:{port}/{page}");
    let mut command = rack.require_lane(tool("wrk"));
    command.args(["-t", "2", "-d", "2s", "--timeout", "60s", "-c", connections, &url]);
    let finished = run_long_client(rack, &mut command);
    assert!(!finished.stdout.contains("Socket errors"), "{finished}");
    assert!(!finished.stdout.contains("Non-2xx"), "{finished}");
    assert!(requests(&finished.stdout) > 0, "{finished}");
}

#[test]
fn nginx_serves_wrk() {
    let (rack, folder) = (Rack::new(), scratch());
    pages(folder.path());
    let server = start_nginx(&rack, folder.path());
    load(&rack, server.port, "large", "4");
    load(&rack, server.port, "small", "32");
    rack.assert_program_over_lanes("nginx", 5_000_000);
    for _ in 0..NGINX_ROUNDS_MAX {
        if rack.programs_that_sent("nginx").is_none_or(|workers| workers == NGINX_WORKERS) {
            return;
        }
        load(&rack, server.port, "small", "32"); // on one processor, one worker may have accepted all connections
    }
    panic!("not all workers served: {:?}", rack.stat());
}

/// `120` of wrk's `120 requests in 2.00s, 1.2MB read`.
fn requests(output: &str) -> u64 {
    let line = output.lines().find(|line| line.contains(" requests in ")).unwrap_or_default();
    line.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

// --- HAProxy -------------------------------------------------------------------------------------------------------

/// A reverse proxy for HTTP and one for TCP; with `splice` it moves bytes through pipes.
fn haproxy_configuration(http_port: u16, tcp_port: u16, server_port: u16, splice: bool) -> String {
    let splice = if splice { "    option splice-request\n    option splice-response\n" } else { "" };
    let proxy = |mode: &str, port: u16| {
        format!("listen {mode}\n    mode {mode}\n    bind {HOST}:{port}\n    server one {HOST}:{server_port}\n")
    };
    format!(
        "global\n    maxconn 200\n    nbthread 2\n\
         defaults\n    timeout connect 60s\n    timeout client 60s\n    timeout server 60s\n{splice}{}{}",
        proxy("http", http_port),
        proxy("tcp", tcp_port)
    )
}

fn haproxy(splice: bool) {
    let (rack, folder) = (Rack::new(), scratch());
    let large = pages(folder.path());
    let server = start_nginx(&rack, folder.path());
    let tcp_port = free_port();
    let proxy = start_server(|port| {
        let configuration = folder.path().join("haproxy.cfg");
        fs::write(&configuration, haproxy_configuration(port, tcp_port, server.port, splice)).unwrap();
        let mut command = rack.require_lane(tool("haproxy"));
        command.arg("-db").arg("-f").arg(configuration);
        command
    });
    for port in [proxy.port, tcp_port] {
        let url = format!("http://{HOST}:{port}");
        fetch(&rack, folder.path(), &format!("{url}/large"), &large);
        let many = vec![format!("{url}/small"); 20]; // over one connection
        let finished = run_client(&rack, curl(&rack, &format!("{url}/small")).args(many)).0;
        assert_eq!(finished.stdout, "a small page\n".repeat(21));
    }
    load(&rack, proxy.port, "small", "8");
    rack.assert_program_over_lanes("haproxy", 100_000);
    rack.assert_program_over_lanes("nginx", 100_000);
}

#[test]
fn haproxy_forwards_between_curl_and_nginx() {
    haproxy(false);
}

#[test]
fn haproxy_splices_between_curl_and_nginx() {
    haproxy(true);
}

// --- PostgreSQL ----------------------------------------------------------------------------------------------------

fn start_postgres(rack: &Rack, folder: &Path) -> Server {
    let data = folder.join("data");
    let mut create = rack.bare_command(postgresql("initdb"));
    create.args(["--username=tester", "--auth=trust", "--no-locale", "--encoding=UTF8", "--no-sync", "-D"]).arg(&data);
    Process::start(&mut create).wait(LOAD_LIMIT).must_succeed();
    let server = start_server(|port| {
        let mut command = rack.require_lane(postgresql("postgres"));
        command.arg("-D").arg(&data).args(["-h", HOST, "-p", &port.to_string(), "-k", "", "-c", "fsync=off"]);
        command
    });
    let is_up = |process: &Process| process.stderr().contains("ready to accept connections");
    server.process.wait_until("the data base", WAIT_MAX, is_up);
    server
}

/// A PostgreSQL client that runs as the server's user.
fn postgres_client(rack: &Rack, name: &str, port: u16) -> Command {
    let mut command = rack.require_lane(postgresql(name));
    command.args(["-h", HOST, "-p", &port.to_string(), "-U", "tester"]).env("PGDATABASE", "postgres");
    command
}

#[test]
fn postgres_serves_psql_and_pgbench() {
    const ROWS: usize = 20_000;
    const SHORT_QUERIES: usize = 500;
    let rack = Rack::unprivileged();
    let folder = rack.scratch();
    let server = start_postgres(&rack, folder.path());
    let mut psql = postgres_client(&rack, "psql", server.port);
    let (client, mut input) = Process::start_with_input(psql.args(["-X", "-A", "-t", "-q"]));
    let select = format!("SELECT repeat(i::text, 100) FROM generate_series(1, {ROWS}) AS i;\n");
    input.write_all(select.as_bytes()).unwrap();
    input.write_all("SELECT 1;\n".repeat(SHORT_QUERIES).as_bytes()).unwrap();
    input.write_all(b"\\echo done\n").unwrap();
    client.wait_until("all rows", LOAD_LIMIT, |client| client.stdout().ends_with("done\n"));
    let want: String = (1..=ROWS).map(|i| i.to_string().repeat(100) + "\n").collect();
    let want = want + &"1\n".repeat(SHORT_QUERIES);
    assert!(client.stdout() == want + "done\n", "{} bytes received", client.stdout().len());
    // In the server, a child that inherited the connection counts its traffic.
    for program in ["psql", "postgres"] {
        rack.assert_program_over_lanes(program, 10_000);
    }
    drop(input);
    client.wait(WAIT_MAX).must_succeed();

    run_client(&rack, postgres_client(&rack, "pgbench", server.port).args(["--initialize", "--quiet"]));
    for options in [&["-t", "200"][..], &["-t", "10", "--connect"]] {
        let mut pgbench = postgres_client(&rack, "pgbench", server.port);
        let finished = run_client(&rack, pgbench.args(["-c", "4", "-j", "2"]).args(options)).0;
        assert!(finished.stdout.contains("number of failed transactions: 0 "), "{finished}");
    }
    server.process.stop(WAIT_MAX).must_succeed();
}

// --- iperf3 --------------------------------------------------------------------------------------------------------

const IPERF_BYTES: u64 = 200_000_000;

fn iperf3(streams: &str, direction: &[&str]) {
    let rack = Rack::new();
    let server = start_server(|port| {
        let mut command = rack.require_lane(tool("iperf3"));
        command.args(["-s", "-B", HOST, "-p", &port.to_string()]);
        command
    });
    let mut command = rack.require_lane(tool("iperf3"));
    command.args(["-c", HOST, "-p", &server.port.to_string(), "-n", &IPERF_BYTES.to_string(), "-P", streams, "-J"]);
    let finished = run_client(&rack, command.args(direction)).0;
    let report: Value = serde_json::from_str(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {finished}"));
    let bytes = |side: &str| report["end"][side]["bytes"].as_u64().unwrap_or_default();
    // With traffic in both directions it ends as soon as one direction is done.
    assert!(bytes("sum_sent").max(bytes("sum_sent_bidir_reverse")) >= IPERF_BYTES, "{finished}");
    assert!(bytes("sum_received") > 0 && bytes("sum_received") <= bytes("sum_sent"), "{finished}");
    rack.assert_program_over_lanes("iperf3", bytes("sum_received") / 2);
}

#[test]
fn iperf3_sends_one_stream() {
    iperf3("1", &[]);
}

#[test]
fn iperf3_receives_one_stream() {
    iperf3("1", &["-R"]);
}

#[test]
fn iperf3_sends_four_streams() {
    iperf3("4", &[]);
}

#[test]
fn iperf3_receives_four_streams() {
    iperf3("4", &["-R"]);
}

#[test]
fn iperf3_sends_in_both_directions_at_once() {
    iperf3("2", &["--bidir"]);
}

// --- sockperf ------------------------------------------------------------------------------------------------------

/// By default sockperf reserves memory for 600000 round trips a second and fails if there are more.
const SOCKPERF_ROUND_TRIPS_PER_S: &str = "5000000";

fn sockperf(test: &str, options: &[&str]) {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_server(|port| sockperf_command(&rack, folder.path(), "server", port, options));
    let mut command = sockperf_command(&rack, folder.path(), test, server.port, options);
    if test == "ping-pong" {
        command.args(["--mps", SOCKPERF_ROUND_TRIPS_PER_S]);
    }
    let finished = run_long_client(&rack, command.args(["-t", "2", "-m", "200"]));
    assert!(finished.stdout.contains("Summary: "), "{finished}");
    assert!(!finished.stdout.to_lowercase().contains("error:"), "{finished}");
    rack.assert_program_over_lanes("sockperf", 10_000);
}

/// sockperf reads its address from a file if it should wait by something other than recv().
fn sockperf_command(rack: &Rack, folder: &Path, subcommand: &str, port: u16, options: &[&str]) -> Command {
    let mut command = rack.require_lane(tool("sockperf"));
    command.arg(subcommand).args(options);
    if options.is_empty() {
        command.args(["--tcp", "-i", HOST, "-p", &port.to_string()]);
    } else {
        let feed = folder.join("feed");
        fs::write(&feed, format!("T:{HOST}:{port}\nT:{HOST}:{port}\n")).unwrap();
        command.arg("-f").arg(feed);
    }
    command
}

#[test]
fn sockperf_runs_ping_pong() {
    sockperf("ping-pong", &[]);
}

#[test]
fn sockperf_runs_ping_pong_through_epoll() {
    sockperf("ping-pong", &["-F", "epoll"]);
}

#[test]
fn sockperf_runs_ping_pong_through_select() {
    sockperf("ping-pong", &["-F", "select"]);
}

#[test]
fn sockperf_measures_throughput() {
    sockperf("throughput", &[]);
}

// --- Python's http.server ------------------------------------------------------------------------------------------

#[test]
fn python_http_server_serves_curl() {
    let (rack, folder) = (Rack::new(), scratch());
    let large = pages(folder.path());
    let server = start_server(|port| {
        let mut command = rack.require_lane(python());
        command.args(["-m", "http.server", "--bind", HOST, "--directory"]).arg(folder.path().join("pages"));
        command.arg(port.to_string());
        command
    });
    let url = format!("http://{HOST}:{}", server.port);
    fetch(&rack, folder.path(), &format!("{url}/large"), &large);
    for _ in 0..10 {
        fetch(&rack, folder.path(), &format!("{url}/small"), b"a small page\n");
    }
}

// --- a peer without Crosslane --------------------------------------------------------------------------------------

#[test]
fn redis_over_lanes_serves_a_bare_client_too() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis_by(|| rack.run(&[], tool("redis-server")), folder.path());
    for client in [rack.bare_command(tool("redis-cli")), rack.require_lane(tool("redis-cli"))] {
        must_pong(client, server.port);
    }
}

#[test]
fn a_bare_redis_serves_a_client_over_kernel_tcp() {
    let (rack, folder) = (Rack::new(), scratch());
    let server = start_redis_by(|| rack.bare_command(tool("redis-server")), folder.path());
    must_pong(rack.run(&[], tool("redis-cli")), server.port);
}

#[track_caller]
fn must_pong(mut client: Command, port: u16) {
    client.args(["-h", HOST, "-p", &port.to_string(), "PING"]);
    assert_eq!(Process::start(&mut client).wait(WAIT_MAX).must_succeed().stdout, "PONG\n");
}
