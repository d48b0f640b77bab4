//! Racks started by `crosslane up`. Monitors and proxies are killed and restarted while programs continue with the same
//! connections and descriptors and lose no byte.

use std::fs;
use std::io::{Read as _, Write as _};
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use router_ports::Namespace;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use system_tests::local_nodes::{NAMES, example, with_long_silence};
use system_tests::process::{Stopped, signal};
use system_tests::script::{CLIENT, ECHO, FORKING_TALKS};
use system_tests::{LocalNodes, Process, WAIT_MAX, paths, wait_for};

/// Room for two windows of the usual size.
const FILE_BYTES: u64 = 16 << 20;

/// Nodes of this machine, two by default.
struct Nodes(LocalNodes);

impl Deref for Nodes {
    type Target = LocalNodes;

    fn deref(&self) -> &LocalNodes {
        &self.0
    }
}

impl Nodes {
    /// Two nodes with direct connections that wait this long for a dead node.
    fn up(return_time: &str) -> Self {
        Self::up_with("direct", |text| patient(text, return_time))
    }

    fn up_with(trust: &str, change: impl Fn(&str) -> String) -> Self {
        Self::up_as(&["--nodes", "2", "--trust", trust], change)
    }

    fn up_as(arguments: &[&str], change: impl Fn(&str) -> String) -> Self {
        let nodes = Self(LocalNodes::of_file(&change(&example(arguments))));
        nodes.finish("up", &[]).must_succeed();
        nodes
    }

    /// Two nodes that share only a file.
    fn over_file(coherence: &str) -> Self {
        // The nodes start one after the other: the first must not wait for the second.
        let text = patient(&example(&["--nodes", "2", "--backend", "dax"]), "10 s");
        let text = text.replace("up_ns = 10000000000", "up_ns = \"1 ms\"");
        let text = text.replace("\"coherent\"", &format!("{coherence:?}"));
        let nodes = Self(LocalNodes::of_file(""));
        let memory = nodes.folder().join("memory");
        let file = fs::File::options().create_new(true).write(true).mode(0o600).open(&memory).expect("a file");
        file.set_len(FILE_BYTES).expect("a sparse file");
        nodes.write(&text.replace("\"/dev/dax0.0\"", &format!("{memory:?}")));
        for name in &NAMES[..2] {
            nodes.finish("up", &["--node", name]).must_succeed();
        }
        nodes.wait_for_open(0);
        nodes
    }

    /// A node's metrics, as a scraper reads them.
    fn metrics(&self, node: usize) -> String {
        let status = self.status();
        let directory = Path::new(status["nodes"][node]["directory"].as_str().expect("a path"));
        let mut reader = UnixStream::connect(directory.join("metrics.sock")).expect("a monitor");
        reader.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("room");
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        text
    }

    fn monitor(&self, node: usize) -> Value {
        self.status()["nodes"][node]["monitor"].clone()
    }

    /// The processes of a node: its monitor and its proxy.
    fn processes(&self, node: usize) -> [u64; 2] {
        let monitor = self.monitor(node);
        [&monitor["pid"], &monitor["proxy"]["pid"]].map(|pid| pid.as_u64().expect("it runs"))
    }

    /// Waits until both nodes have this number of open connections, all of them over the link.
    #[track_caller]
    fn wait_for_connections(&self, count: u64) {
        let has_all = |link: &Value| {
            let carried = &link["carried"];
            link["state"] == "up" && carried["connections_open"] == count && carried["direct_held"] == 0
        };
        (0..2).for_each(|node| self.wait_for_link(node, &format!("{count} connections"), has_all));
    }

    /// As [`Nodes::wait_for_connections`], also for connections that are not over the link.
    #[track_caller]
    fn wait_for_open(&self, count: u64) {
        let has_all = |link: &Value| link["state"] == "up" && link["carried"]["connections_open"] == count;
        (0..2).for_each(|node| self.wait_for_link(node, &format!("{count} connections"), has_all));
    }

    /// Waits until a node's link meets a condition.
    #[track_caller]
    fn wait_for_link(&self, node: usize, what: &str, holds: impl Fn(&Value) -> bool) {
        wait_for(what, || self.monitor(node), |monitor| holds(&monitor["links"][0]));
    }

    /// Starts a program on node a, with a server on node b, and waits until it has printed `output`.
    fn client(&self, script: &str, port: u16, output: &str) -> Process {
        self.client_of(0, 1, script, port, output)
    }

    /// As [`Nodes::client`], on any node, with a server on any other node.
    fn client_of(&self, node: usize, server: usize, script: &str, port: u16, output: &str) -> Process {
        let client = self.python(node, server, script, port);
        client.wait_until(output, WAIT_MAX, |client| client.stdout().contains(output));
        client
    }

    /// Ends a client that runs [`TALK`], and panics unless all its bytes came back.
    #[track_caller]
    fn end_talk(&self, client: Process) {
        fs::write(self.folder().join("over"), "").expect("a file");
        let output = client.wait(WAIT_MAX).must_succeed().stdout;
        assert!(output.ends_with("over [True, True]\n") && !output.contains("rror"), "{output}");
    }
}

/// A rack file with long timeouts, whose nodes are waited for.
fn patient(text: &str, return_time: &str) -> String {
    let text = with_long_silence(text);
    text.replace("[timeouts]\n", &format!("[timeouts]\nreturn_ns = \"{return_time}\"\n"))
}

/// Kills a process and waits until its sockets are closed: until then other processes may connect to them.
#[track_caller]
fn kill(number: u64) {
    let pid = Pid::from_raw(number as i32).expect("a process");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
    pidfd_send_signal(&process, Signal::KILL).expect("it runs");
    let limit = Timespec::try_from(WAIT_MAX).expect("short");
    // Readable once its last thread has ended.
    let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
    assert_eq!(ended, Ok(1), "process {number} does not end");
}

fn is_running(pid: u64) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// A stream, and words to the server and back between which both endpoints block, until the file `over` exists. Prints
/// whether all bytes came back unchanged over the initial descriptor.
const TALK: &str = r#"
def identity(server):
    return server.fileno(), os.fstat(server.fileno()).st_ino
def is_over():
    return os.path.exists("over")
def stream(server):
    block, sent, received = os.urandom(1 << 20), hashlib.sha256(), hashlib.sha256()
    def receive():
        while data := server.recv(65536):
            received.update(data)
    reader = threading.Thread(target=receive)
    reader.start()
    turn = 0
    while not is_over():
        piece = block[turn % 1000:][:50_000]
        server.sendall(piece)
        sent.update(piece)
        turn += 1
        time.sleep(0.002)
    server.shutdown(socket.SHUT_WR)
    reader.join()
    return turn > 0 and sent.digest() == received.digest()
def words(server):
    turn = 0
    while not is_over():
        word = struct.pack("!I", turn) * 3
        server.sendall(word)
        assert read(server, len(word)) == word
        turn += 1
        if turn % 10 == 0:
            say("words", turn)
        time.sleep(0.003)
    return turn > 0
def watched(talk):
    try:
        with socket.create_connection(address) as server:
            before = identity(server)
            right.append(talk(server) and identity(server) == before)
    except Exception as error:
        say(talk.__name__, repr(error))
right = []
threads = [threading.Thread(target=watched, args=(talk,)) for talk in (stream, words)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say("over", right)
"#;

fn words(client: &Process) -> usize {
    client.stdout().lines().filter(|line| line.starts_with("words")).count()
}

/// Waits until a client that runs [`TALK`] has exchanged more words than `before`.
#[track_caller]
fn wait_for_words(client: &Process, what: &str, before: usize) {
    client.wait_until(what, WAIT_MAX, |client| words(client) > before + 3);
}

#[test]
fn direct_connections_survive_killed_proxies_and_monitors() {
    let pair = Nodes::up("60 s");
    let (_server, port) = pair.serve(1, ECHO);
    let client = pair.client(TALK, port, "words");
    pair.wait_for_connections(2);
    let deaths: [&dyn Fn(); 6] = [
        &|| kill(pair.processes(0)[1]),
        &|| kill(pair.processes(1)[1]),
        &|| kill(pair.processes(0)[0]),
        &|| kill(pair.processes(1)[0]),
        &|| {
            let [[monitor, _], [_, proxy]] = [0, 1].map(|node| pair.processes(node));
            [monitor, proxy].into_iter().for_each(kill);
        },
        // An orderly stop, as for an upgrade.
        &|| {
            let before = [0, 1].map(|node| pair.processes(node));
            pair.finish("up", &["--restart"]).must_succeed();
            let after = [0, 1].map(|node| pair.processes(node));
            assert!(before.iter().zip(after).all(|(before, after)| before.iter().zip(after).all(|(b, a)| *b != a)));
        },
    ];
    for (index, die) in deaths.into_iter().enumerate() {
        let before = words(&client);
        die();
        pair.finish("up", &[]).must_succeed();
        pair.wait_for_connections(2);
        wait_for_words(&client, "more words", before);
        assert!(!client.stdout().contains("rror"), "after death {index}: {}", client.stdout());
    }
    let metrics = pair.metrics(0);
    let of_programs = "crosslane_programs_sent_bytes{node=\"a\",path=\"window\"} ";
    let sent: Option<u64> = metrics.lines().find_map(|line| line.strip_prefix(of_programs)?.parse().ok());
    assert!(sent > Some(0), "bytes that programs write themselves: {metrics}");
    pair.end_talk(client);
    pair.wait_for_connections(0);
}

#[test]
fn direct_connections_that_use_tcp_when_a_proxy_dies_lose_no_byte_silently() {
    let pair = Nodes::up("60 s");
    let (_server, port) = pair.serve(1, ECHO);
    let client = pair.client(FORKING_TALKS, port, "words");
    const DEATHS: u64 = 8;
    for death in 0..DEATHS {
        let before = words(&client);
        kill(pair.processes((death % 2) as usize)[1]);
        pair.finish("up", &[]).must_succeed();
        wait_for_words(&client, "more words", before);
    }
    fs::write(pair.folder().join("over"), "").expect("a file");
    let output = client.wait(WAIT_MAX).must_succeed().stdout;
    assert!(output.ends_with("over\n") && !output.contains("wrong"), "{output}");
    let resets = output.lines().filter_map(|line| line.strip_prefix("resets ")?.parse::<u64>().ok()).sum::<u64>();
    assert!(resets < 4 * DEATHS, "no connection has outlived a proxy: {resets} resets");
}

/// The server of [`CLIENT`]: reads until each connection ends and prints how it ended.
const SERVER: &str = r#"
listener = listen()
def serve(connection):
    read(connection, 5)
    connection.sendall(b"hello")
    say(outcome(connection))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

#[test]
fn programs_killed_while_a_monitor_is_dead_end_connections_as_kernel_tcp_does() {
    let pair = Nodes::up("60 s");
    // A program that dies with unread bytes resets. It reports when they have arrived: bytes in flight are not unread.
    let reads_none = "connection.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL); say(\"unread\"); time.sleep(60)";
    let (unreading, unreading_port) = pair.serve(1, &SERVER.replace("say(outcome(connection))", reads_none));
    let unread = CLIENT.replace("say(\"connected\")", "server.sendall(b'unread'); say(\"connected\")");
    let unread = pair.client(&unread, unreading_port, "connected");
    unreading.wait_until("unread bytes", WAIT_MAX, |unreading| unreading.stdout().contains("unread"));
    let (server, port) = pair.serve(1, SERVER);
    let (here, there) = (pair.client(CLIENT, port, "connected"), pair.client(CLIENT, port, "connected"));
    pair.wait_for_connections(3);
    kill(pair.processes(0)[0]);
    drop((here, unreading));
    server.wait_until("the end of a client", WAIT_MAX, |server| server.stdout() == "listening\nend\n");
    assert_eq!(unread.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    pair.finish("up", &[]).must_succeed();
    pair.wait_for_connections(1);
    kill(pair.processes(1)[0]);
    drop(server);
    assert_eq!(there.wait(WAIT_MAX).must_succeed().stdout, "connected\nend\n");
    pair.finish("up", &[]).must_succeed();
    pair.wait_for_connections(0);
}

/// While a monitor is dead, its proxy continues, also with new connections of other nodes' programs.
#[test]
fn proxied_connections_and_their_proxies_survive_killed_monitors() {
    let pair = Nodes::up_with("proxy", |text| patient(text, "60 s"));
    let (_server, port) = pair.serve(1, ECHO);
    let client = pair.client(TALK, port, "words");
    let proxies = [0, 1].map(|node| pair.processes(node)[1]);
    let epoch = || pair.monitor(0)["links"][0]["epoch"].as_u64().expect("a number");
    for victims in [&[1][..], &[0], &[0, 1]] {
        let (before, epoch_before) = (words(&client), epoch());
        victims.iter().map(|node| pair.processes(*node)[0]).collect::<Vec<_>>().into_iter().for_each(kill);
        wait_for_words(&client, "words without a monitor", before);
        if !victims.contains(&0) {
            pair.client(CLIENT, port, "connected");
        }
        pair.finish("up", &[]).must_succeed();
        pair.wait_for_open(2);
        assert!(epoch() > epoch_before, "the link was trained again");
        let before = words(&client);
        wait_for_words(&client, "words over the next link", before);
        assert!(!client.stdout().contains("rror"), "after {victims:?}: {}", client.stdout());
    }
    assert_eq!([0, 1].map(|node| pair.processes(node)[1]), proxies);
    pair.end_talk(client);
    pair.wait_for_open(0);
}

#[test]
fn proxied_connections_of_a_monitor_that_does_not_return_are_reset_or_fail_over() {
    for is_failover in [false, true] {
        let pair = Nodes::up_with("proxy", |text| {
            let text = text.replace("failover = false", &format!("failover = {is_failover}"));
            text.replace("[timeouts]\n", "[timeouts]\nreturn_ns = \"500 ms\"\n")
        });
        let (server, port) = pair.serve(1, if is_failover { ECHO } else { SERVER });
        let client = pair.client(if is_failover { TALK } else { CLIENT }, port, "");
        pair.wait_for_open(if is_failover { 2 } else { 1 });
        let [monitor, proxy] = pair.processes(1);
        kill(monitor);
        if !is_failover {
            assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
            server.wait_until("the reset", WAIT_MAX, |server| server.stdout() == "listening\nreset\n");
            pair.finish("up", &[]).must_succeed();
            continue;
        }
        pair.wait_for_link(0, "connections over kernel TCP", |link| link["carried"]["failover_open"] == 2);
        let before = words(&client);
        wait_for_words(&client, "words over kernel TCP", before);
        // The next monitor adopts them.
        pair.finish("up", &[]).must_succeed();
        assert_eq!(pair.processes(1)[1], proxy);
        pair.wait_for_link(1, "connections over kernel TCP", |link| link["carried"]["failover_open"] == 2);
        pair.end_talk(client);
    }
}

/// A proxy's state is only in its memory: without the proxy, and without a monitor that holds the lifelines, programs
/// see the reset at once.
#[test]
fn proxied_connections_are_reset_if_monitor_and_proxy_die_at_once_also_with_failover() {
    for is_failover in [false, true] {
        let pair =
            Nodes::up_with("proxy", |text| text.replace("failover = false", &format!("failover = {is_failover}")));
        let (server, port) = pair.serve(1, SERVER);
        let client = pair.client(CLIENT, port, "connected");
        pair.wait_for_open(1);
        pair.processes(1).into_iter().for_each(kill);
        assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
        server.wait_until("the reset", WAIT_MAX, |server| server.stdout() == "listening\nreset\n");
        pair.finish("up", &[]).must_succeed();
        pair.client(CLIENT, port, "connected");
    }
}

#[test]
fn connections_of_a_node_that_does_not_return_are_reset_and_down_leaves_nothing() {
    let pair = Nodes::up("500 ms");
    let (server, port) = pair.serve(1, SERVER);
    let client = pair.client(CLIENT, port, "connected");
    kill(pair.processes(1)[0]);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    server.wait_until("the reset", WAIT_MAX, |server| server.stdout() == "listening\nreset\n");
    pair.finish("up", &[]).must_succeed();

    // A node that leaves in order is not waited for. If monitor and proxy die at once, no process holds the lifelines.
    for is_order in [true, false] {
        let client = pair.client(CLIENT, port, "connected");
        pair.wait_for_connections(1);
        if is_order {
            pair.finish("down", &[]).must_succeed();
        } else {
            pair.processes(1).into_iter().for_each(kill);
        }
        assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
        pair.finish("up", &[]).must_succeed();
    }
}

#[test]
fn two_nodes_are_not_affected_by_the_death_and_return_of_a_third() {
    for trust in ["proxy", "direct"] {
        let nodes = Nodes::up_as(&["--nodes", "3", "--trust", trust], |text| patient(text, "500 ms"));
        let (_echo, echo_port) = nodes.serve(1, ECHO);
        let (server, port) = nodes.serve(2, SERVER);
        let talk = nodes.client(TALK, echo_port, "words");
        let reset = [0, 1].map(|node| nodes.client_of(node, 2, CLIENT, port, "connected"));
        let epoch = || {
            let link = nodes.monitor(0)["links"][0].clone();
            assert_eq!(link["peer"], "b", "{link}");
            link["epoch"].clone()
        };
        let (before, epoch_before) = (words(&talk), epoch());
        nodes.processes(2).into_iter().for_each(kill);
        for client in reset {
            assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
        }
        server.wait_until("resets", WAIT_MAX, |server| server.stdout() == "listening\nreset\nreset\n");
        wait_for_words(&talk, "more words", before);
        nodes.finish("up", &[]).must_succeed();
        for node in [0, 1] {
            nodes.client_of(node, 2, CLIENT, port, "connected");
        }
        let before = words(&talk);
        wait_for_words(&talk, "words while the third node is back", before);
        assert_eq!(epoch(), epoch_before, "the link between the others has not changed");
        nodes.end_talk(talk);
    }
}

/// Proxies write back and invalidate their caches of the file where it is not coherent.
#[test]
fn streams_and_words_cross_a_coherent_and_a_non_coherent_file() {
    for coherence in ["coherent", "non-coherent"] {
        let nodes = Nodes::over_file(coherence);
        let (_servers, ports): (Vec<_>, Vec<_>) = [0, 1].map(|node| nodes.serve(node, ECHO)).into_iter().unzip();
        let clients = [(0, 1), (1, 0)].map(|(from, to)| nodes.client_of(from, to, TALK, ports[to], "words"));
        for node in [0, 1] {
            let carried = |link: &Value, name: &str| link["carried"][name].as_u64() > Some(FILE_BYTES);
            let has_wrapped = |link: &Value| carried(link, "bytes_sent") && carried(link, "bytes_received");
            nodes.wait_for_link(node, "more bytes than the file holds", has_wrapped);
        }
        clients.into_iter().for_each(|client| nodes.end_talk(client));
        nodes.wait_for_open(0);
        for node in [0, 1] {
            let carried = nodes.monitor(node)["links"][0]["carried"].clone();
            assert_eq!(carried["connections_total"], 4, "{coherence}: {carried}");
        }
    }
}

#[test]
fn a_proxy_that_waits_for_the_next_monitor_is_ended_by_down() {
    let pair = Nodes::up("60 s");
    let (_server, port) = pair.serve(1, SERVER);
    let client = pair.client(CLIENT, port, "connected");
    pair.wait_for_connections(1);
    let [monitor, proxy] = pair.processes(0);
    kill(monitor);
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_running(proxy), "it has a connection for the next monitor");
    pair.finish("down", &[]).must_succeed();
    assert!(!is_running(proxy));
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
}

#[test]
fn a_hung_proxy_of_a_dead_monitor_is_killed_by_the_next_monitor() {
    let pair = Nodes::up("60 s");
    let (_server, port) = pair.serve(1, SERVER);
    let client = pair.client(CLIENT, port, "connected");
    pair.wait_for_connections(1);
    let [monitor, proxy] = pair.processes(0);
    signal(proxy, Signal::STOP);
    kill(monitor);
    pair.finish("up", &[]).must_succeed();
    assert!(!is_running(proxy));
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    pair.wait_for_connections(0);
}

#[test]
fn failover_moves_streams_to_kernel_tcp_while_a_monitor_hangs() {
    fail_over_and_back("127.77.0.", "");
}

/// As [`COMMON`], for nodes with IPv6 addresses.
const BY_IPV6: &str = r#"
address = ("fd00:77::2", address[1])
def listen():
    listener = socket.create_server(address, family=socket.AF_INET6)
    say("listening")
    return listener
"#;

/// Runs in a new network namespace that has the nodes' addresses.
#[test]
fn failover_works_between_nodes_with_ipv6_addresses() {
    let network = match Namespace::new() {
        Ok(network) => network,
        Err(error) => return println!("skipped: no network namespace ({error}); run it as root"),
    };
    let test = || {
        let ip = |words: &[&str]| Process::start(Command::new(paths::tool("ip")).args(words)).wait(WAIT_MAX);
        ip(&["link", "set", "lo", "up"]).must_succeed();
        for address in ["fd00:77::1/128", "fd00:77::2/128"] {
            ip(&["-6", "address", "add", address, "dev", "lo", "nodad"]).must_succeed();
        }
        fail_over_and_back("fd00:77::", BY_IPV6);
    };
    network.within(test).expect("a network namespace");
}

fn fail_over_and_back(addresses: &str, prelude: &str) {
    let pair = Nodes::up_with("proxy", |text| {
        let text = text.replace("failover = false", "failover = true").replace("127.77.0.", addresses);
        text.replace("silence_ns = 3000000000", "silence_ns = 1000000000")
    });
    let script = |of: &str| format!("{prelude}\n{of}");
    let (_server, port) = pair.serve(1, &script(ECHO));
    let client = pair.client(&script(TALK), port, "words");
    let [monitor, _] = pair.processes(1);
    let hung = Stopped::new(monitor);
    let is_moved = |link: &Value| link["carried"]["failover_open"] == 2 && link["state"] != "up";
    pair.wait_for_link(0, "connections over kernel TCP", is_moved);
    let before = words(&client);
    wait_for_words(&client, "more words", before);
    drop(hung);
    (0..2).for_each(|node| pair.wait_for_link(node, "link that is up again", |link| link["state"] == "up"));
    let by_window = pair.monitor(0)["links"][0]["carried"]["connections_total"].as_u64().expect("a count");
    let next = pair.client(&script(CLIENT), pair.serve(1, &script(SERVER)).1, "connected");
    pair.wait_for_link(0, "new connection over the link", |link| {
        link["carried"]["connections_total"].as_u64() > Some(by_window)
    });
    pair.end_talk(client);
    drop(next);
}

/// A server for both address families, like most servers.
const DUAL_SERVER: &str = r#"
listener = socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
say("listening")
while True:
    connection, peer = listener.accept()
    with connection:
        connection.sendall(" ".join([peer[0], connection.getsockname()[0], connection.getpeername()[0]]).encode())
"#;

#[test]
fn programs_of_nodes_with_ipv6_addresses_connect() {
    for trust in ["proxy", "direct"] {
        let pair = Nodes::up_with(trust, |text| text.replace("127.77.0.", "fd00:77::"));
        let (_server, port) = pair.serve(1, DUAL_SERVER);
        let script = r#"
with socket.create_connection(("fd00:77::2", address[1])) as server:
    say(server.getpeername()[0], server.getsockname()[0], server.recv(100).decode())
"#;
        let output = pair.python(0, 1, script, port).wait(WAIT_MAX).must_succeed().stdout;
        assert_eq!(output, "fd00:77::2 fd00:77::1 fd00:77::1 fd00:77::2 fd00:77::1\n");
        let carried = pair.monitor(0)["links"][0]["carried"].clone();
        assert_eq!(carried["connections_total"], 1, "{carried}");
    }
}
