//! Racks in etcd: nodes of this machine come up from the description in etcd, follow its changes and survive its
//! outages. Each machine is modelled by [`LocalNodes`] of its own, whose folder contains the locks of its
//! nodes.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};
use system_tests::local_nodes::{example, with_long_silence};
use system_tests::process::signal;
use system_tests::script::ECHO;
use system_tests::{LocalNodes, Process, Server, WAIT_MAX, paths, port, start_server, wait_until};
use tempfile::TempDir;

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
        server.wait_until("an answer", WAIT_MAX, |_| self.call("kv/range", &json!({ "key": "eA==" })).is_some());
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
    fn call(&self, path: &str, request: &Value) -> Option<Value> {
        let mut command = Command::new(paths::tool("curl"));
        command.args(["-sf", "--max-time", "10", "--noproxy", "*", "-d", &request.to_string()]);
        let finished = Process::start(command.arg(format!("http://127.0.0.1:{}/v3/{path}", self.port))).wait(WAIT_MAX);
        finished.status.success().then(|| serde_json::from_str(&finished.stdout).expect("JSON"))
    }

    /// The lease to which a key is attached.
    fn lease(&self, key: &str) -> Option<Value> {
        let found = self.call("kv/range", &json!({ "key": base64(key.as_bytes()) })).expect("an answer");
        found["kvs"][0].get("lease").cloned()
    }

    /// Writes a key without any checks.
    fn put(&self, key: &str, value: &[u8]) {
        let request = json!({ "key": base64(key.as_bytes()), "value": base64(value) });
        assert!(self.call("kv/put", &request).is_some(), "{key} is put");
    }
}

fn base64(bytes: &[u8]) -> String {
    let mut command = Command::new(paths::tool("base64"));
    let (process, mut input) = Process::start_with_input(command.arg("-w0"));
    input.write_all(bytes).expect("a reader");
    drop(input);
    process.wait(WAIT_MAX).must_succeed().stdout
}

/// One word to the server and back.
const CLIENT: &str = "
with socket.create_connection(address, timeout=20) as server:
    server.sendall(b'word')
    say(server.recv(64).decode(), server.getsockname()[0])
";

/// Words to the server and back until the process is ended.
const TALKER: &str = "
with socket.create_connection(address, timeout=20) as server:
    while True:
        server.sendall(b'word')
        assert server.recv(64) == b'word'
        say('word')
        time.sleep(0.01)
";

/// Panics unless the process still exchanges words.
#[track_caller]
fn assert_talks(talker: &Process) {
    let words = |talker: &Process| talker.stdout().lines().count();
    let before = words(talker);
    talker.wait_until("more words", WAIT_MAX, |talker| words(talker) > before + 5);
}

/// The text of a rack file with room for a third node.
fn text_of(nodes: &str) -> String {
    text_of_trust(nodes, "proxy")
}

fn text_of_trust(nodes: &str, trust: &str) -> String {
    let text = with_long_silence(&example(&["--nodes", nodes, "--trust", trust]));
    let with_slots = text.replace("[device]\n", "[device]\nslots = 3\n");
    with_slots.replace("[timeouts]\n", &format!("[timeouts]\n{LEASE}\n"))
}

fn node<'a>(status: &'a Value, name: &str) -> &'a Value {
    let nodes = status["nodes"].as_array().expect("nodes");
    nodes.iter().find(|node| node["node"] == name).unwrap_or(&Value::Null)
}

fn kill_monitor(machine: &LocalNodes, name: &str) {
    let status = machine.status();
    signal(node(&status, name)["monitor"]["pid"].as_u64().expect("a process"), Signal::KILL);
}

/// A rack in etcd whose two nodes are up.
fn up(etcd: &Etcd) -> LocalNodes {
    up_as(etcd, &text_of("2"))
}

fn up_as(etcd: &Etcd, text: &str) -> LocalNodes {
    let machine = LocalNodes::of_rack(&etcd.address("racks/r1"));
    machine.push(text).must_succeed();
    let up = machine.finish("up", &[]).must_succeed();
    assert_eq!(up.stdout, format!("{} is up: nodes a, b\n", machine.rack()));
    machine
}

#[test]
fn nodes_come_up_from_etcd_and_hold_leases_that_other_machines_see() {
    let etcd = Etcd::start();
    let machine = up(&etcd);
    let pushed = machine.push(&text_of("2")).must_succeed();
    assert!(pushed.stdout.ends_with(": 0 keys written, 0 removed\n"), "{pushed}");
    let mut show = machine.command(&["rack", "show", "--rack", machine.rack()]);
    let shown = Process::start(&mut show).wait(WAIT_MAX).must_succeed().stdout;
    assert!(shown.contains("name = \"b\"\naddress = \"127.77.0.2\"") && shown.contains("slots = 3"), "{shown}");

    let (_server, port) = machine.serve(1, ECHO);
    let client = machine.python(0, 1, CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "word 127.77.0.1\n");

    let other = LocalNodes::of_rack(machine.rack());
    let seen =
        other.wait_for_status("links in leases", |status| node(status, "a")["lease"]["links"][0]["state"] == "up");
    for name in ["a", "b"] {
        let own = node(&machine.status(), name)["monitor"]["pid"].clone();
        assert_eq!((&node(&seen, name)["lease"]["pid"], &node(&seen, name)["is_up"]), (&own, &json!(false)));
    }
    let refused = other.finish("up", &[]);
    refused.must_fail_in_one_line(1, &["node 'a' is up on", "bring it down there, or try again in"]);
    assert!(other.status()["nodes"][0]["monitor"].is_null(), "no half-started process is left");

    // A killed monitor keeps its lease for a while, which is no obstacle on the same machine.
    kill_monitor(&machine, "a");
    machine.finish("up", &[]).must_succeed();
    kill_monitor(&machine, "b");
    other.wait_for_status("end of a lease", |status| node(status, "b")["lease"].is_null());
    other.wait_for_status("a lease that is still held", |status| !node(status, "a")["lease"].is_null());
    machine.finish("down", &[]).must_succeed();
    assert!(node(&other.status(), "a")["lease"].is_null(), "the lease is released");
}

#[test]
fn changes_are_applied_while_connections_continue() {
    let etcd = Etcd::start();
    // Programs store into windows themselves, also into those of a node that joins later.
    let text_of = |nodes| text_of_trust(nodes, "direct");
    let machine = up_as(&etcd, &text_of("2"));
    let (_server, port) = machine.serve(1, ECHO);
    let talker = machine.python(0, 1, TALKER, port);
    assert_talks(&talker);

    let denied = text_of("2") + &format!("\n[[access]]\nfrom = \"a\"\nports = {port}\naction = \"deny\"\n");
    machine.push(&denied).must_succeed();
    let taken = |count: u64| {
        move |status: &Value| {
            let etcd = |name| node(status, name)["monitor"]["etcd"]["changes_taken"].clone();
            etcd("a") == count && etcd("b") == count
        }
    };
    machine.wait_for_status("rule", taken(1));
    let refused = machine.python(0, 1, CLIENT, port).wait(WAIT_MAX);
    assert!(!refused.status.success() && !refused.timed_out, "{refused}");
    assert_talks(&talker);

    machine.push(&text_of("3")).must_succeed();
    machine.wait_for_status("node", taken(2));
    let up = machine.finish("up", &[]).must_succeed();
    assert!(up.stdout.ends_with("is up: nodes a, b, c\n"), "{up}");
    let client = machine.python(2, 1, CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "word 127.77.0.3\n");
    let status = machine.status();
    for (name, peer) in [("b", 1), ("c", 1)] {
        let carried = &node(&status, name)["monitor"]["links"][peer]["carried"];
        assert_eq!(carried["connections_total"], 1, "{status:#}");
    }
    machine.python(0, 1, CLIENT, port).wait(WAIT_MAX).must_succeed();
    assert_talks(&talker);

    machine.push(&text_of("3").replace("window_bytes = 33554432", "window_bytes = 16777216")).must_succeed();
    let left = |status: &Value| node(status, "a")["monitor"]["etcd"]["restart_needed"] == json!(["device"]);
    machine.wait_for_status("key that needs a restart", left);
    etcd.put("/racks/r1/nodes/b", b"slot = 1\naddress = \"127.77.0.1\"\n");
    let is_bad = |status: &Value| {
        let problem = node(status, "a")["monitor"]["etcd"]["problem"].as_str().unwrap_or_default().to_owned();
        problem.contains("/racks/r1/nodes/b, line 2, address: '127.77.0.1' is already that of nodes[0]")
    };
    machine.wait_for_status("fault", is_bad);
    assert_talks(&talker);
    let again = machine.finish("up", &[]);
    again.must_fail_in_one_line(2, &["/racks/r1/nodes/b, line 2, address", "give each node its own"]);
    machine.finish("down", &[]).must_succeed();
}

#[test]
fn nodes_continue_and_serve_programs_during_an_etcd_outage() {
    let mut etcd = Etcd::start();
    let machine = up(&etcd);
    let (_server, port) = machine.serve(1, ECHO);
    let talker = machine.python(0, 1, TALKER, port);
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
    let status = machine.wait_for_status("outage", reached(false));
    assert_eq!(status["is_etcd_reached"], false);
    assert!(outages(&status) > outages_before, "{status:#}");
    assert!(machine.finish("status", &[]).stderr.contains("what the nodes of this machine use"));
    machine.python(0, 1, CLIENT, port).wait(WAIT_MAX).must_succeed();
    let strict = LocalNodes::of_rack(machine.rack());
    strict.finish("up", &[]).must_fail_in_one_line(1, &[machine.rack(), "refused", "see that etcd runs there"]);

    etcd.restart();
    machine.wait_for_status("end of the outage", reached(true));
    let other = LocalNodes::of_rack(machine.rack());
    other.wait_for_status("leases", |status| ["a", "b"].iter().all(|name| !node(status, name)["lease"].is_null()));
    machine.push(&text_of("2").replace("query_ns = 1000000000", "query_ns = 900000000")).must_succeed();
    machine.wait_for_status("change", |status| node(status, "a")["monitor"]["etcd"]["changes_taken"] == 1);
    assert_talks(&talker);

    // A lost lease is acquired again, unless the key belongs to another machine by then.
    let lease = etcd.lease(LEASE_OF_A).expect("it is held");
    assert!(etcd.call("lease/revoke", &json!({ "ID": lease })).is_some());
    wait_until("another lease", || etcd.lease(LEASE_OF_A).is_some_and(|now| now != lease));
    let held = |is_held: bool| move |status: &Value| node(status, "a")["monitor"]["etcd"]["is_held"] == is_held;
    etcd.put(LEASE_OF_A, b"{}");
    let lost = machine.wait_for_status("loss of the lease", held(false));
    let problem = node(&lost, "a")["monitor"]["etcd"]["problem"].as_str().unwrap_or_default().to_owned();
    assert!(problem.contains("node 'a' is up on") && problem.contains("remove /racks/r1/leases/a"), "{problem}");
    assert_talks(&talker);
    assert!(etcd.call("kv/deleterange", &json!({ "key": base64(LEASE_OF_A.as_bytes()) })).is_some());
    machine.wait_for_status("lease", held(true));
    etcd.kill();
    machine.finish("down", &[]).must_succeed();
    machine.finish("status", &[]).must_fail_in_one_line(1, &["see that etcd runs there"]);
}

#[test]
fn an_error_in_etcd_is_one_line_and_nothing_is_started() {
    let etcd = Etcd::start();
    let machine = LocalNodes::of_rack(&etcd.address("bad"));
    machine.finish("up", &[]).must_fail_in_one_line(2, &["/bad/rack: no such key", "crosslane rack push"]);
    machine.push("version = 1\n").must_fail_in_one_line(2, &["r.toml", "missing field `device`"]);
    machine.push(&text_of("2")).must_succeed();
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
            machine.finish(command, &[]).must_fail_in_one_line(2, &line);
        }
        if key != "else" {
            machine.push(&text_of("2")).must_succeed();
        }
    }
    let foreign_key = ["the key else there does not belong to a rack", "another prefix"];
    machine.push(&text_of("2")).must_fail_in_one_line(1, &foreign_key);
    etcd.put("/lease/leases/a", b"{}");
    let leased = LocalNodes::of_rack(&etcd.address("lease"));
    leased.push(&text_of("2")).must_succeed();
    assert!(leased.finish("status", &[]).must_succeed().stdout.contains("unreadable"));
    leased.finish("up", &[]).must_fail_in_one_line(1, &["node 'a'", "not known", "remove /lease/leases/a"]);

    let web_server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = web_server.local_addr().expect("an address").port();
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = web_server.accept().expect("a client");
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").expect("a reader");
        // Bytes left unread would reset the connection before the answer is read.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let lost = LocalNodes::of_rack(&format!("etcd://127.0.0.1:{port}/r"));
    lost.finish("up", &[]).must_fail_in_one_line(1, &["not a response of etcd", "the port for clients"]);
    answer.join().expect("it answers");
    for machine in [&machine, &lost] {
        assert!(!machine.rack_directory_exists(), "an invalid rack leaves no files");
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
    let machine = LocalNodes::of_rack(&files("ca.pem", "client.pem", "client.key"));
    machine.push(&text_of("2")).must_succeed();
    let up = machine.finish("up", &[]).must_succeed();
    assert!(up.stderr.is_empty(), "{up}");
    let status = machine.wait_for_status("lease", |status| node(status, "a")["lease"].is_object());
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
        LocalNodes::of_rack(&rack).finish("up", &[]).must_fail_in_one_line(2, words);
    }
    let plain = Etcd::start();
    let rack = format!("etcds://127.0.0.1:{}/racks/r1?ca={}", plain.port, certificates.path("ca.pem"));
    LocalNodes::of_rack(&rack).finish("up", &[]).must_fail_in_one_line(2, &["write etcd://"]);
}
