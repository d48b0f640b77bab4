//! Racks in etcd: nodes of this machine come up from the description in etcd, follow its changes and survive its
//! outages. Each machine is modelled by its own folder, which contains the locks of its nodes.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use system_tests::{Finished, Process, Server, WAIT_MAX, paths, port, rack_file, start_server};
use tempfile::TempDir;

const LINE_CHARS_MAX: usize = 500;
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const LEASE_OF_A: &str = "/racks/r1/leases/a";
/// The time to live of leases, as text of a rack file.
const LEASE: &str = "lease_ns = \"5 s\"";

/// Certificates of a test: a CA, etcd and a client; and another CA.
struct Certificates {
    folder: TempDir,
}

impl Certificates {
    fn make() -> Self {
        let certificates = Self { folder: tempfile::tempdir().expect("a folder") };
        for ca in ["ca", "other-ca"] {
            let own = ["-days", "2", "-subj", &format!("/CN={ca}"), "-addext", "keyUsage=critical,keyCertSign"];
            certificates.openssl(&["req", "-x509", "-out", &format!("{ca}.pem")], ca, &own);
        }
        // The gateway of an etcd that requires client certificates presents the server's certificate.
        let uses = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n";
        fs::write(certificates.folder.path().join("uses"), uses).expect("a file");
        for name in ["etcd", "client"] {
            let request = format!("{name}.csr");
            certificates.openssl(&["req", "-out", &request], name, &["-subj", &format!("/CN={name}")]);
            let signed = ["x509", "-req", "-in", &request, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
            let more = ["-days", "2", "-extfile", "uses", "-out", &format!("{name}.pem")];
            certificates.run(&[&signed[..], &more].concat());
        }
        certificates
    }

    /// Runs openssl with a new key of this name.
    fn openssl(&self, words: &[&str], name: &str, more: &[&str]) {
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout"];
        self.run(&[words, &key, &[&format!("{name}.key")], more].concat());
    }

    fn run(&self, words: &[&str]) {
        let mut command = Command::new(paths::tool("openssl"));
        Process::start(command.args(words).current_dir(self.folder.path())).wait(WAIT_MAX).must_succeed();
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}

/// A private etcd.
struct Etcd {
    server: Option<Process>,
    port: u16,
    peer_port: u16,
    folder: TempDir,
}

fn etcd_command(folder: &TempDir, port: u16, peer_port: u16) -> Command {
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    let mut command = Command::new(paths::tool("etcd"));
    command.env_clear().current_dir(folder.path()).arg("--data-dir").arg(folder.path().join("data"));
    command.args(["--name", "test", "--logger", "zap", "--log-level", "error"]);
    for (option, address) in [
        ("--listen-client-urls", &client),
        ("--advertise-client-urls", &client),
        ("--listen-peer-urls", &peer),
        ("--initial-advertise-peer-urls", &peer),
        ("--initial-cluster", &format!("test={peer}")),
    ] {
        command.arg(option).arg(address);
    }
    command
}

impl Etcd {
    fn start() -> Self {
        let (folder, peer_port) = (tempfile::tempdir().expect("a folder"), port::free_port());
        let Server { process, port } = start_server(|port| etcd_command(&folder, port, peer_port));
        let etcd = Self { server: Some(process), port, peer_port, folder };
        etcd.wait_until_it_answers();
        etcd
    }

    fn wait_until_it_answers(&self) {
        let server = self.server.as_ref().expect("it runs");
        server.wait_until("an answer", WAIT_MAX, |_| self.ask("kv/range", &json!({ "key": "eA==" })).is_some());
    }

    fn kill(&mut self) {
        self.server = None;
    }

    fn restart(&mut self) {
        self.server = Some(Process::start(&mut etcd_command(&self.folder, self.port, self.peer_port)));
        self.wait_until_it_answers();
    }

    fn address(&self, rack: &str) -> String {
        format!("etcd://127.0.0.1:{}/{rack}", self.port)
    }

    /// Sends a request to its JSON gateway; `None` if it fails.
    fn ask(&self, path: &str, asked: &Value) -> Option<Value> {
        let mut command = Command::new(paths::tool("curl"));
        command.args(["-sf", "--max-time", "10", "--noproxy", "*", "-d", &asked.to_string()]);
        let finished = Process::start(command.arg(format!("http://127.0.0.1:{}/v3/{path}", self.port))).wait(WAIT_MAX);
        finished.status.success().then(|| serde_json::from_str(&finished.stdout).expect("JSON"))
    }

    /// The lease to which a key is attached.
    fn lease(&self, key: &str) -> Option<Value> {
        let found = self.ask("kv/range", &json!({ "key": base64(key.as_bytes()) })).expect("an answer");
        found["kvs"][0].get("lease").cloned()
    }

    /// Writes a key without any checks.
    fn put(&self, key: &str, value: &[u8]) {
        let asked = json!({ "key": base64(key.as_bytes()), "value": base64(value) });
        assert!(self.ask("kv/put", &asked).is_some(), "{key} is put");
    }
}

fn base64(bytes: &[u8]) -> String {
    let mut command = Command::new(paths::tool("base64"));
    let (process, mut input) = Process::start_with_input(command.arg("-w0"));
    input.write_all(bytes).expect("a reader");
    drop(input);
    process.wait(WAIT_MAX).must_succeed().stdout
}

#[track_caller]
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    while !holds() {
        assert!(Instant::now() < deadline, "no {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A folder with its own racks, which acts as another machine as far as leases are concerned.
struct Machine {
    folder: TempDir,
    rack: String,
}

impl Drop for Machine {
    /// Ends all processes, also after a failed test.
    fn drop(&mut self) {
        if self.folder.path().join("base").exists() {
            Process::start(self.command(&["down"]).args(["--rack", &self.rack])).wait(WAIT_MAX);
        }
    }
}

impl Machine {
    fn new(rack: &str) -> Self {
        Self {
            folder: tempfile::Builder::new().prefix("m-").tempdir_in("/tmp").expect("a folder"),
            rack: rack.to_owned(),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        rack_file::command(self.folder.path(), arguments)
    }

    /// Runs a command with this rack to its end.
    fn finish(&self, subcommand: &str, arguments: &[&str]) -> Finished {
        Process::start(self.command(&[subcommand, "--rack", &self.rack]).args(arguments)).wait(WAIT_MAX)
    }

    /// Puts the text of a rack file at the rack's address.
    fn push(&self, text: &str) -> Finished {
        fs::write(self.folder.path().join("r.toml"), text).expect("a file");
        Process::start(&mut self.command(&["rack", "push", "--rack", "r.toml", "--to", &self.rack])).wait(WAIT_MAX)
    }

    fn status(&self) -> Value {
        // It fails if no node is up, and prints the state nevertheless.
        let finished = self.finish("status", &["--json"]);
        serde_json::from_str(&finished.stdout).expect("JSON")
    }

    /// Waits until the state meets a condition.
    #[track_caller]
    fn wait_for(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let status = self.status();
            if holds(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "no {what}: {status:#}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Starts a Python program on a node, with the address of a server.
    fn python(&self, node: &str, script: &str, port: u16) -> Process {
        let mut command = self.command(&["run", "--rack", &self.rack, "--node", node, "--require-lane", "--"]);
        let python = command.arg(paths::python()).args(["-c", script, "127.77.0.2"]).arg(port.to_string());
        Process::start(python)
    }

    /// Starts an echo server on node b and waits until it listens.
    fn serve(&self) -> (Process, u16) {
        let port = port::free_port();
        let server = self.python("b", ECHO, port);
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, port)
    }
}

const ECHO: &str = "
import socket, sys, threading
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print('listening', flush=True)
def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
";

/// One word to the server and back.
const CLIENT: &str = "
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as server:
    server.sendall(b'word')
    print(server.recv(64).decode(), server.getsockname()[0])
";

/// Words to the server and back until the process is ended.
const TALKER: &str = "
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as server:
    while True:
        server.sendall(b'word')
        assert server.recv(64) == b'word'
        print('word', flush=True)
        time.sleep(0.01)
";

fn words(process: &Process) -> usize {
    process.stdout().lines().count()
}

/// Panics unless the process still exchanges words.
#[track_caller]
fn assert_talks(talker: &Process) {
    let before = words(talker);
    talker.wait_until("more words", WAIT_MAX, |talker| words(talker) > before + 5);
}

#[track_caller]
fn assert_one_line(finished: &Finished, code: i32, words: &[&str]) {
    let text = finished.stderr.trim_end();
    assert_eq!((finished.code(), text.lines().count()), (Some(code), 1), "{finished}");
    assert!(text.starts_with("crosslane: ") && text.len() <= LINE_CHARS_MAX, "{finished}");
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} in {finished}"));
}

/// The text of a rack file with room for a third node.
fn text_of(nodes: &str) -> String {
    text_of_trust(nodes, "proxy")
}

fn text_of_trust(nodes: &str, trust: &str) -> String {
    let text = rack_file::with_long_silence(&rack_file::example(&["--nodes", nodes, "--trust", trust]));
    let with_slots = text.replace("[device]\n", "[device]\nslots = 3\n");
    with_slots.replace("[timeouts]\n", &format!("[timeouts]\n{LEASE}\n"))
}

fn node<'a>(status: &'a Value, name: &str) -> &'a Value {
    let nodes = status["nodes"].as_array().expect("nodes");
    nodes.iter().find(|node| node["node"] == name).unwrap_or(&Value::Null)
}

fn kill(pid: &Value) {
    let pid = rustix::process::Pid::from_raw(pid.as_i64().expect("a process") as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
}

/// A rack in etcd whose two nodes are up.
fn up(etcd: &Etcd) -> Machine {
    up_as(etcd, &text_of("2"))
}

fn up_as(etcd: &Etcd, text: &str) -> Machine {
    let machine = Machine::new(&etcd.address("racks/r1"));
    machine.push(text).must_succeed();
    let up = machine.finish("up", &[]).must_succeed();
    assert_eq!(up.stdout, format!("{} is up: nodes a, b\n", machine.rack));
    machine
}

#[test]
fn nodes_come_up_from_etcd_and_hold_leases_that_other_machines_see() {
    let etcd = Etcd::start();
    let machine = up(&etcd);
    let pushed = machine.push(&text_of("2")).must_succeed();
    assert!(pushed.stdout.ends_with(": 0 keys written, 0 removed\n"), "{pushed}");
    let mut show = machine.command(&["rack", "show", "--rack", &machine.rack]);
    let shown = Process::start(&mut show).wait(WAIT_MAX).must_succeed().stdout;
    assert!(shown.contains("name = \"b\"\naddress = \"127.77.0.2\"") && shown.contains("slots = 3"), "{shown}");

    let (_server, port) = machine.serve();
    let client = machine.python("a", CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "word 127.77.0.1\n");

    let other = Machine::new(&machine.rack);
    let seen = other.wait_for("links in leases", |status| node(status, "a")["lease"]["links"][0]["state"] == "up");
    for name in ["a", "b"] {
        let own = node(&machine.status(), name)["monitor"]["pid"].clone();
        assert_eq!((&node(&seen, name)["lease"]["pid"], &node(&seen, name)["is_up"]), (&own, &json!(false)));
    }
    let refused = other.finish("up", &[]);
    assert_one_line(&refused, 1, &["node 'a' is up on", "bring it down there, or try again in"]);
    assert!(other.status()["nodes"][0]["monitor"].is_null(), "no half-started process is left");

    // A killed monitor keeps its lease for a while, which is no obstacle on the same machine.
    kill(&node(&machine.status(), "a")["monitor"]["pid"]);
    machine.finish("up", &[]).must_succeed();
    kill(&node(&machine.status(), "b")["monitor"]["pid"]);
    other.wait_for("end of a lease", |status| node(status, "b")["lease"].is_null());
    other.wait_for("a lease that is still held", |status| !node(status, "a")["lease"].is_null());
    machine.finish("down", &[]).must_succeed();
    assert!(node(&other.status(), "a")["lease"].is_null(), "the lease is released");
}

#[test]
fn changes_are_applied_while_connections_continue() {
    let etcd = Etcd::start();
    // Programs store into windows themselves, also into those of a node that joins later.
    let text_of = |nodes| text_of_trust(nodes, "direct");
    let machine = up_as(&etcd, &text_of("2"));
    let (_server, port) = machine.serve();
    let talker = machine.python("a", TALKER, port);
    assert_talks(&talker);

    let denied = text_of("2") + &format!("\n[[access]]\nfrom = \"a\"\nports = {port}\naction = \"deny\"\n");
    machine.push(&denied).must_succeed();
    let taken = |count: u64| {
        move |status: &Value| {
            let etcd = |name| node(status, name)["monitor"]["etcd"]["changes_taken"].clone();
            etcd("a") == count && etcd("b") == count
        }
    };
    machine.wait_for("rule", taken(1));
    let refused = machine.python("a", CLIENT, port).wait(WAIT_MAX);
    assert!(!refused.status.success() && !refused.timed_out, "{refused}");
    assert_talks(&talker);

    machine.push(&text_of("3")).must_succeed();
    machine.wait_for("node", taken(2));
    let up = machine.finish("up", &[]).must_succeed();
    assert!(up.stdout.ends_with("is up: nodes a, b, c\n"), "{up}");
    let client = machine.python("c", CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "word 127.77.0.3\n");
    let status = machine.status();
    for (name, peer) in [("b", 1), ("c", 1)] {
        let carried = &node(&status, name)["monitor"]["links"][peer]["carried"];
        assert_eq!((&carried["direct_total"], &carried["bytes_sent"]), (&json!(1), &json!(0)), "{status:#}");
    }
    machine.python("a", CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_talks(&talker);

    machine.push(&text_of("3").replace("window_bytes = 33554432", "window_bytes = 16777216")).must_succeed();
    let left = |status: &Value| node(status, "a")["monitor"]["etcd"]["restart_needed"] == json!(["device"]);
    machine.wait_for("key that needs a restart", left);
    etcd.put("/racks/r1/nodes/b", b"slot = 1\naddress = \"127.77.0.1\"\n");
    let is_bad = |status: &Value| {
        let problem = node(status, "a")["monitor"]["etcd"]["problem"].as_str().unwrap_or_default().to_owned();
        problem.contains("/racks/r1/nodes/b, line 2, address: '127.77.0.1' is already that of nodes[0]")
    };
    machine.wait_for("fault", is_bad);
    assert_talks(&talker);
    let again = machine.finish("up", &[]);
    assert_one_line(&again, 2, &["/racks/r1/nodes/b, line 2, address", "give each node its own"]);
    machine.finish("down", &[]).must_succeed();
}

#[test]
fn nodes_continue_and_serve_programs_during_an_etcd_outage() {
    let mut etcd = Etcd::start();
    let machine = up(&etcd);
    let (_server, port) = machine.serve();
    let talker = machine.python("a", TALKER, port);
    assert_talks(&talker);
    let outages = |status: &Value| node(status, "a")["monitor"]["etcd"]["outages"].as_u64().expect("a number");
    // On a busy machine etcd may have been too slow before.
    let outages_before = outages(&machine.status());
    etcd.kill();
    let reached = |is_reached: bool| {
        move |status: &Value| {
            let etcd = &node(status, "a")["monitor"]["etcd"];
            etcd["is_reached"] == is_reached && node(status, "b")["monitor"]["etcd"]["is_reached"] == is_reached
        }
    };
    let status = machine.wait_for("outage", reached(false));
    assert_eq!(status["is_etcd_reached"], false);
    assert!(outages(&status) > outages_before, "{status:#}");
    assert!(machine.finish("status", &[]).stderr.contains("what the nodes of this machine use"));
    machine.python("a", CLIENT, port).wait(WAIT_MAX).must_succeed();
    let strict = Machine::new(&machine.rack);
    assert_one_line(&strict.finish("up", &[]), 1, &[&machine.rack, "refused", "see that etcd runs there"]);

    etcd.restart();
    machine.wait_for("end of the outage", reached(true));
    let other = Machine::new(&machine.rack);
    other.wait_for("leases", |status| ["a", "b"].iter().all(|name| !node(status, name)["lease"].is_null()));
    machine.push(&text_of("2").replace("query_ns = 1000000000", "query_ns = 900000000")).must_succeed();
    machine.wait_for("change", |status| node(status, "a")["monitor"]["etcd"]["changes_taken"] == 1);
    assert_talks(&talker);

    // A lost lease is acquired again, unless the key belongs to another machine by then.
    let lease = etcd.lease(LEASE_OF_A).expect("it is held");
    assert!(etcd.ask("lease/revoke", &json!({ "ID": lease })).is_some());
    wait_until("another lease", || etcd.lease(LEASE_OF_A).is_some_and(|now| now != lease));
    let held = |is_held: bool| move |status: &Value| node(status, "a")["monitor"]["etcd"]["is_held"] == is_held;
    etcd.put(LEASE_OF_A, b"{}");
    let lost = machine.wait_for("loss of the lease", held(false));
    let problem = node(&lost, "a")["monitor"]["etcd"]["problem"].as_str().unwrap_or_default().to_owned();
    assert!(problem.contains("node 'a' is up on") && problem.contains("remove /racks/r1/leases/a"), "{problem}");
    assert_talks(&talker);
    assert!(etcd.ask("kv/deleterange", &json!({ "key": base64(LEASE_OF_A.as_bytes()) })).is_some());
    machine.wait_for("lease", held(true));
    etcd.kill();
    machine.finish("down", &[]).must_succeed();
    assert_one_line(&machine.finish("status", &[]), 1, &["see that etcd runs there"]);
}

#[test]
fn an_error_in_etcd_is_one_line_and_nothing_is_started() {
    let etcd = Etcd::start();
    let machine = Machine::new(&etcd.address("bad"));
    assert_one_line(&machine.finish("up", &[]), 2, &["/bad/rack: no such key", "crosslane rack push"]);
    assert_one_line(&machine.push("version = 1\n"), 2, &["r.toml", "missing field `device`"]);
    machine.push(&text_of("2")).must_succeed();
    let good = |status: &Finished| assert!(status.status.success(), "{status}");
    for (key, value, line) in [
        (
            "nodes/c",
            &b"slot = 7\naddress = \"127.77.0.3\"\n"[..],
            ["/bad/nodes/c, line 1, slot: 7", "number them from 0"],
        ),
        (
            "nodes/c",
            b"slot = 2\naddress = \"localhost\"\n",
            ["nodes/c, line 2, address: 'localhost'", "write one as in"],
        ),
        ("nodes/c", b"\xff", ["/bad/nodes/c, line 1: not UTF-8", ";"]),
        ("nodes/c", b"slot = 2\n[[nodes]]\n", ["/bad/nodes/c", "unknown field `nodes`"]),
        ("rack", b"version = 9\n", ["/bad/rack, line 1, version: 9 belongs to another release", "this one reads 1"]),
        ("link", b"timing = 5\n", ["/bad/link, line 1, timing", ";"]),
        ("else", b"", ["/bad/else: not a key of a rack", "remove it"]),
    ] {
        etcd.put(&format!("/bad/{key}"), value);
        for command in ["up", "status"] {
            assert_one_line(&machine.finish(command, &[]), 2, &line);
        }
        if key != "else" {
            good(&machine.push(&text_of("2")));
        }
    }
    assert_one_line(
        &machine.push(&text_of("2")),
        1,
        &["the key else there does not belong to a rack", "another prefix"],
    );
    etcd.put("/lease/leases/a", b"{}");
    let leased = Machine::new(&etcd.address("lease"));
    leased.push(&text_of("2")).must_succeed();
    assert!(leased.finish("status", &[]).must_succeed().stdout.contains("unreadable"));
    assert_one_line(&leased.finish("up", &[]), 1, &["node 'a'", "not known", "remove /lease/leases/a"]);

    let web_server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = web_server.local_addr().expect("an address").port();
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = web_server.accept().expect("a client");
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").expect("a reader");
        // Bytes left unread would reset the connection before the answer is read.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let lost = Machine::new(&format!("etcd://127.0.0.1:{port}/r"));
    assert_one_line(&lost.finish("up", &[]), 1, &["not a response of etcd", "the port for clients"]);
    answer.join().expect("it answers");
    for machine in [&machine, &lost] {
        assert!(!machine.folder.path().join("base").exists(), "an invalid rack leaves no files");
    }
    let nodes = leased.status()["nodes"].as_array().expect("nodes").clone();
    let socket = |node: &Value| Path::new(node["directory"].as_str().expect("a path")).join("monitor.sock");
    assert!(nodes.iter().all(|node| !socket(node).exists()), "no half-started process is left");
}

/// Starts an etcd with TLS that authenticates clients by certificates.
fn start_with_tls(certificates: &Certificates, folder: &TempDir) -> Server {
    let peer_port = port::free_port();
    let server = start_server(|port| {
        let mut command = etcd_command(folder, port, peer_port);
        let client = format!("https://127.0.0.1:{port}");
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client, "--client-cert-auth"]);
        for (option, file) in [("--cert-file", "etcd.pem"), ("--key-file", "etcd.key"), ("--trusted-ca-file", "ca.pem")]
        {
            command.arg(option).arg(certificates.path(file));
        }
        command
    });
    server.process.wait_until("an answer", WAIT_MAX, |_| {
        let mut command = Command::new(paths::tool("curl"));
        command.args(["-sf", "--max-time", "10", "--noproxy", "*", "-d", r#"{"key":"eA=="}"#]);
        command.args(["--cacert", "ca.pem", "--cert", "client.pem", "--key", "client.key"]);
        command.arg(format!("https://127.0.0.1:{}/v3/kv/range", server.port)).current_dir(certificates.folder.path());
        Process::start(&mut command).wait(WAIT_MAX).status.success()
    });
    server
}

#[test]
fn a_rack_comes_up_from_an_etcd_with_client_certificates() {
    let (certificates, folder) = (Certificates::make(), tempfile::tempdir().expect("a folder"));
    let server = start_with_tls(&certificates, &folder);
    let authority = format!("127.0.0.1:{}/racks/r1", server.port);
    let files = |ca: &str, cert: &str, key: &str| {
        let [ca, cert, key] = [ca, cert, key].map(|name| certificates.path(name));
        format!("etcds://{authority}?ca={ca}&cert={cert}&key={key}")
    };
    let machine = Machine::new(&files("ca.pem", "client.pem", "client.key"));
    machine.push(&text_of("2")).must_succeed();
    let up = machine.finish("up", &[]).must_succeed();
    assert!(up.stderr.is_empty(), "{up}");
    let status = machine.wait_for("lease", |status| node(status, "a")["lease"].is_object());
    assert_eq!(node(&status, "b")["is_up"], true, "{status}");
    machine.finish("down", &[]).must_succeed();

    let missing = certificates.path("none.pem");
    for (rack, words) in [
        (files("other-ca.pem", "client.pem", "client.key"), &["TLS fails", "UnknownIssuer", "see that ca"][..]),
        (files("none.pem", "client.pem", "client.key"), &[&missing, "No such file", "PEM"]),
        (files("client.key", "client.pem", "client.key"), &["client.key: no certificate in it"]),
        (files("ca.pem", "client.pem", "etcd.key"), &["client.pem and ", "etcd.key", "its own key"]),
        (files("ca.pem", "other-ca.pem", "other-ca.key"), &["cert and key"]),
        (format!("etcds://{authority}?ca={}", certificates.path("ca.pem")), &["cert and key"]),
        (format!("etcd://{authority}"), &["write etcds://"]),
        (format!("etcds://{authority}"), &["names no CA", "?ca="]),
    ] {
        assert_one_line(&Machine::new(&rack).finish("up", &[]), 2, words);
    }
    let plain = Etcd::start();
    let rack = format!("etcds://127.0.0.1:{}/racks/r1?ca={}", plain.port, certificates.path("ca.pem"));
    assert_one_line(&Machine::new(&rack).finish("up", &[]), 2, &["write etcd://"]);
}
