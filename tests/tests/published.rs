//! Nodes whose programs are connected by kernel TCP to the proxies: which addresses they see, who may connect, and how
//! programs without the library reach another node.

use std::net::SocketAddr;
use std::process::Command;

use system_tests::local_nodes::{example, with_long_silence};
use system_tests::rack::command_as_nobody;
use system_tests::script::{COMMON, ECHO};
use system_tests::{LocalNodes, Process, WAIT_MAX, is_root, netns, paths, port, wait_until};

/// Two nodes on this machine.
fn nodes(change: impl Fn(&str) -> String) -> LocalNodes {
    let text = with_long_silence(&example(&["--nodes", "2"]));
    LocalNodes::of_file(&change(&text)).with_library(Some(paths::library_of_streams()))
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

/// A rack whose node b is in a network namespace of its own: no program of this one reaches it by TCP.
struct Apart {
    nodes: LocalNodes,
    namespace: String,
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.nodes.finish("down", &[]);
        netns::delete_all(&self.namespace);
    }
}

impl Apart {
    fn up(publish: &str) -> Self {
        let namespace = format!("xp{}", std::process::id());
        netns::add(&namespace);
        let with_key = |text: &str| text.replacen("\n[device]", &format!("publish = {publish}\n\n[device]"), 1);
        let nodes = nodes(|text| with_key(text).replace("up_ns = 10000000000", "up_ns = \"1 ms\""));
        let this = Self { nodes, namespace };
        this.nodes.finish("up", &["--node", "a"]).must_succeed();
        let mut up = netns::command(&this.namespace, paths::crosslane());
        up.args(["up", "--rack", this.nodes.rack(), "--node", "b"]).current_dir(this.nodes.folder());
        Process::start(up.env("CROSSLANE_RACK", this.nodes.folder().join("base"))).wait(WAIT_MAX).must_succeed();
        this
    }

    /// Starts an echo server on node b.
    fn serve(&self) -> (Process, SocketAddr) {
        let address = SocketAddr::from(([127, 77, 0, 2], port::free_port()));
        let run = self.nodes.run(1);
        let mut command = netns::command(&self.namespace, run.get_program());
        command.args(run.get_args()).current_dir(self.nodes.folder());
        command.env("CROSSLANE_RACK", self.nodes.folder().join("base")).arg(paths::python());
        let server = bare(command, ECHO, address);
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, address)
    }
}

#[test]
fn programs_without_the_library_reach_a_node_that_is_published() {
    if !is_root() {
        return;
    }
    let apart = Apart::up("true");
    let (server, address) = apart.serve();
    // The monitor announces new listeners once in a second.
    wait_until("the published listener", || std::net::TcpStream::connect(address).is_ok());
    for command in [Command::new(paths::tool("python3")), command_as_nobody(paths::python())] {
        assert_eq!(bare(command, ONCE, address).wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    }
    // Programs with the library use their own listener.
    let client = apart.nodes.python(0, 1, ONCE, address.port());
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    drop(server);
    wait_until("the end of the published listener", || std::net::TcpStream::connect(address).is_err());
}

#[test]
fn only_ports_of_the_list_are_published() {
    if !is_root() {
        return;
    }
    let apart = Apart::up("[1]");
    let (_server, address) = apart.serve();
    let client = apart.nodes.python(0, 1, ONCE, address.port());
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "127.77.0.2 hello\n");
    assert!(std::net::TcpStream::connect(address).is_err());
}
