//! Nodes whose programs are connected by kernel TCP to the proxies: which addresses they see, who may connect, and how
//! programs without the library reach another node.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use system_tests::local_nodes::{example, with_long_silence};
use system_tests::rack::command_as_nobody;
use system_tests::script::{COMMON, ECHO};
use system_tests::{LocalNodes, Process, WAIT_MAX, is_root, netns, paths, port, wait_until};

/// Two nodes on this machine.
fn nodes(change: impl Fn(&str) -> String) -> LocalNodes {
    let text = with_long_silence(&example(&["--nodes", "2"]));
    LocalNodes::of_file(&change(&text))
}

fn up(change: impl Fn(&str) -> String) -> LocalNodes {
    let nodes = nodes(change);
    nodes.finish("up", &[]).must_succeed();
    nodes
}

/// Starts a Python program that does not load the library.
fn bare(mut command: Command, script: &str, address: SocketAddr) -> Process {
    let script = format!("{COMMON}\n{script}");
    Process::start(command.args(["-c", &script, &address.ip().to_string(), &address.port().to_string()]))
}

const ONCE: &str = r#"
with socket.create_connection(address, timeout=20) as server:
    server.sendall(b"hello")
    say(server.getpeername()[0], read(server, 5).decode())
"#;

#[test]
fn both_programs_see_each_others_addresses() {
    let nodes = up(str::to_owned);
    let (server, port) = nodes.serve(
        1,
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
say(peer, connection.getpeername() == peer, connection.getsockname())
connection.recv(1)
"#,
    );
    let client = nodes.python(
        0,
        1,
        r#"
with socket.create_connection(address, timeout=20) as server:
    server.sendall(b"hello")
    assert read(server, 5) == b"hello"
    say(server.getsockname(), server.getpeername())
"#,
        port,
    );
    let seen_by_client = client.wait(WAIT_MAX).must_succeed().stdout;
    let seen_by_server = server.wait(WAIT_MAX).must_succeed().stdout;
    let own = seen_by_client.split(" ('127.77.0.2'").next().expect("two addresses");
    assert!(own.starts_with("('127.77.0.1', "), "{seen_by_client}");
    assert_eq!(seen_by_client, format!("{own} ('127.77.0.2', {port})\n"));
    assert_eq!(seen_by_server, format!("listening\n{own} True ('127.77.0.2', {port})\n"));
}

#[test]
fn a_full_queue_of_a_server_delays_its_clients_as_in_tcp() {
    let nodes = up(str::to_owned);
    let (_server, port) = nodes.serve(
        1,
        r#"
listener = socket.create_server(address, backlog=0)
say("listening")
time.sleep(1.5)
while True:
    connection, peer = listener.accept()
    connection.sendall(connection.recv(5))
    connection.close()
"#,
    );
    let client = nodes.python(
        0,
        1,
        r#"
def talk():
    with socket.create_connection(address) as server:
        server.sendall(b"hello")
        right.append(read(server, 5) == b"hello")
right = []
threads = [threading.Thread(target=talk) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say(right.count(True))
"#,
        port,
    );
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "6\n");
}

/// The address to which the kernel has connected a client of this port.
fn proxys_address(client_port: u16) -> Option<SocketAddr> {
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    table.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let [local, peer] = [words.next()?, words.next()?].map(|word| word.split_once(':'));
        let (ip, port) = peer?;
        let octets = u32::from_str_radix(ip, 16).ok()?.to_le_bytes();
        let is_its = u16::from_str_radix(local?.1, 16) == Ok(client_port) && octets[..2] == [127, 78];
        is_its.then(|| SocketAddr::from((octets, u16::from_str_radix(port, 16).unwrap_or(0))))
    })
}

#[test]
fn programs_of_other_users_cannot_connect_to_the_proxy() {
    if !is_root() {
        return;
    }
    let nodes = up(str::to_owned);
    let (_server, port) = nodes.serve(1, ECHO);
    let client = nodes.python(
        0,
        1,
        r#"
server = socket.create_connection(address, timeout=20)
server.sendall(b"hello")
assert read(server, 5) == b"hello"
say(server.getsockname()[1])
time.sleep(60)
"#,
        port,
    );
    client.wait_until("a port", WAIT_MAX, |client| client.stdout().contains('\n'));
    let client_port = client.stdout().trim().parse().expect("a port");
    let proxy = proxys_address(client_port).expect("a connection to the proxy");
    let own = bare(Command::new(paths::tool("python3")), ONCE, proxy);
    assert_eq!(own.wait(WAIT_MAX).must_succeed().stdout, format!("{} hello\n", proxy.ip()));
    let stranger = r#"
try:
    server = socket.create_connection(address, timeout=20)
    server.sendall(b"hello")
    say(server.recv(5))
except ConnectionError:
    say("closed")
"#;
    let stranger = bare(command_as_nobody(paths::python()), stranger, proxy);
    assert_eq!(stranger.wait(WAIT_MAX).must_succeed().stdout, "closed\n");
}

/// A rack whose nodes are in network namespaces of their own: no program of one reaches the other by TCP.
struct Apart {
    nodes: LocalNodes,
    /// The namespaces of the nodes; the first one is this process's if it has no name.
    namespaces: [String; 2],
    addresses: &'static str,
}

impl Drop for Apart {
    fn drop(&mut self) {
        for node in ["a", "b"] {
            Process::start(&mut self.command(node, &["down"])).wait(WAIT_MAX);
        }
        self.namespaces.iter().filter(|name| !name.is_empty()).for_each(|name| netns::delete_all(name));
    }
}

impl Apart {
    /// Nodes that share an emulated device. Node a is in this process's namespace.
    fn up(publish: &str) -> Self {
        let namespaces = [String::new(), format!("xp{}-{}", std::process::id(), publish.len())];
        let nodes = nodes(|text| published(text, publish));
        Self::start(nodes, namespaces, "127.77.0.")
    }

    /// Nodes that share a file only, and have addresses like those of machines.
    fn over_file(publish: &str) -> Self {
        let namespaces = ["a", "b"].map(|node| format!("xf{}-{node}", std::process::id()));
        let text = with_long_silence(&example(&["--nodes", "2", "--backend", "dax"]));
        let nodes = LocalNodes::of_file("");
        let memory = nodes.folder().join("memory");
        let file = fs::File::options().create_new(true).write(true).mode(0o600).open(&memory).expect("a file");
        file.set_len(FILE_BYTES).expect("a sparse file");
        let text = published(&text, publish).replace("\"/dev/dax0.0\"", &format!("{memory:?}"));
        nodes.write(&text.replace("127.77.0.", MACHINES));
        Self::start(nodes, namespaces, MACHINES)
    }

    fn start(nodes: LocalNodes, namespaces: [String; 2], addresses: &'static str) -> Self {
        for (name, number) in namespaces.iter().zip(1..).filter(|(name, _)| !name.is_empty()) {
            netns::add(name);
            netns::ip(name, &["address", "add", &format!("{addresses}{number}/32"), "dev", "lo"]);
        }
        let this = Self { nodes, namespaces, addresses };
        for node in ["a", "b"] {
            Process::start(&mut this.command(node, &["up"])).wait(WAIT_MAX).must_succeed();
        }
        let is_up = |status: &serde_json::Value| status["nodes"][0]["monitor"]["links"][0]["state"] == "up";
        this.nodes.wait_for_status("the link", is_up);
        this
    }

    /// A program in the namespace of a node.
    fn within(&self, node: &str, program: &Path) -> Command {
        match &self.namespaces[usize::from(node == "b")][..] {
            "" => Command::new(program),
            name => netns::command(name, program),
        }
    }

    /// `crosslane SUBCOMMAND` for a node, in its namespace.
    fn command(&self, node: &str, subcommand: &[&str]) -> Command {
        let mut command = self.within(node, &paths::crosslane());
        command.args(subcommand).args(["--rack", self.nodes.rack(), "--node", node]);
        command.current_dir(self.nodes.folder()).env("CROSSLANE_RACK", self.nodes.folder().join("base"));
        command
    }

    /// Python on a node, with the library.
    fn python(&self, node: &str) -> Command {
        let mut command = self.command(node, &["run"]);
        command.args(["--require-lane", "--"]).arg(paths::python());
        command
    }

    /// Starts a server on node b.
    fn serve(&self, script: &str) -> (Process, SocketAddr) {
        let ip = format!("{}2", self.addresses).parse().expect("an address");
        let address = SocketAddr::new(ip, port::free_port());
        let server = bare(self.python("b"), script, address);
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, address)
    }
}

/// Room for two windows of the usual size.
const FILE_BYTES: u64 = 16 << 20;
/// The beginning of the addresses of machines.
const MACHINES: &str = "10.77.0.";

/// A rack file whose nodes publish. They are started one after the other.
fn published(text: &str, publish: &str) -> String {
    let text = text.replacen("\n[device]", &format!("publish = {publish}\n\n[device]"), 1);
    text.replace("up_ns = 10000000000", "up_ns = \"1 ms\"")
}

#[test]
fn programs_without_the_library_reach_a_node_that_is_published() {
    if !is_root() {
        return;
    }
    let apart = Apart::up("true");
    let (server, address) = apart.serve(ECHO);
    // The monitor announces new listeners once in a second.
    wait_until("the published listener", || TcpStream::connect(address).is_ok());
    for command in [Command::new(paths::tool("python3")), command_as_nobody(paths::python())] {
        assert_eq!(bare(command, ONCE, address).wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    }
    // Programs with the library use their own listener.
    let client = bare(apart.python("a"), ONCE, address);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    drop(server);
    wait_until("the end of the published listener", || TcpStream::connect(address).is_err());
}

#[test]
fn only_ports_of_the_list_are_published() {
    if !is_root() {
        return;
    }
    let apart = Apart::up("[1]");
    let (_server, address) = apart.serve(ECHO);
    let client = bare(apart.python("a"), ONCE, address);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    assert!(TcpStream::connect(address).is_err());
}

/// A client that binds to its node's address, or to none, and a server that tells who has connected.
const WHOM: &str = r#"
listener = listen()
while True:
    connection, peer = listener.accept()
    connection.sendall(f"{peer[0]} {connection.getsockname()[0]}".encode())
    connection.close()
"#;
const TELL: &str = r#"
for own in ["", OWN]:
    with socket.create_connection(address, timeout=20, source_address=(own, 0)) as server:
        say(server.recv(100).decode(), server.getpeername()[0], server.getsockname()[0])
"#;

#[test]
fn a_published_address_works_once_the_operator_has_given_it_to_the_machine() {
    if !is_root() {
        return;
    }
    let apart = Apart::over_file("true");
    let (_server, address) = apart.serve(WHOM);
    let seen = "10.77.0.1 10.77.0.2 10.77.0.2 10.77.0.1\n";
    let client = bare(apart.python("a"), &TELL.replace("OWN", "'10.77.0.1'"), address);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, seen.repeat(2));
    let bare_client = || bare(apart.within("a", &paths::python()), ONCE, address).wait(WAIT_MAX);
    assert!(bare_client().stderr.contains("unreachable"), "no route leads there");
    let log = apart.nodes.folder().join("base");
    let advice = "run 'ip route add local 10.77.0.2 dev lo' as root";
    let logs = || Process::start(Command::new("grep").args(["-rh", "to publish"]).arg(&log)).wait(WAIT_MAX).stdout;
    wait_until("the advice", || logs().contains(advice));
    netns::ip(&apart.namespaces[0], &["route", "add", "local", "10.77.0.2", "dev", "lo"]);
    let script = r#"
with socket.create_connection(address, timeout=20) as server:
    say(server.recv(100).decode())
"#;
    let client = bare(apart.within("a", &paths::python()), script, address);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "10.77.0.1 10.77.0.2\n");
}
