//! Programs of several users and network namespaces that share a rack directory.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::process::Command;

use system_tests::script::{COMMON, ECHO};
use system_tests::shared_rack::{CLIENTS, SERVERS, STRANGER};
use system_tests::{Process, SharedRack, WAIT_MAX, c, netns, paths, port, wait_until};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A client that exchanges pieces of many sizes, says so, and keeps the connection.
const TALK: &str = r#"
import random
choices = random.Random(5)
server = socket.create_connection(address)
def talk():
    for size in [14] * 40 + [1, 4096, 100_000, 7] * 20:
        piece = choices.randbytes(size)
        server.sendall(piece)
        assert read(server, size) == piece
talk()
say("talked")
"#;

/// What [`TALK`] sends and gets back, without what TCP carries before the ends have met.
const TALKED_BYTES_MIN: u64 = 2_000_000;

/// Python with a script for an address.
fn script(mut python: Command, script: &str, address: SocketAddr) -> Process {
    Process::start(
        python.args(["-c", &format!("{COMMON}{script}"), &address.ip().to_string()]).arg(address.port().to_string()),
    )
}

/// Starts an echo server.
fn serve(python: Command, ip: IpAddr) -> (Process, SocketAddr) {
    let address = SocketAddr::new(ip, port::free_port());
    let server = script(python, ECHO, address);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    (server, address)
}

/// Runs [`TALK`], and returns its process once it has talked.
#[track_caller]
fn talk(python: Command, address: SocketAddr) -> Process {
    let client = script(python, &format!("{TALK}time.sleep(600)"), address);
    client.wait_until("talked", WAIT_MAX, |client| client.stdout().contains("talked"));
    client
}

/// The bytes that lanes have carried for the programs of a user.
fn lane_bytes(rack: &SharedRack, uid: u32) -> u64 {
    rack.traffic_of(uid).lane_bytes
}

#[test]
fn a_rule_lets_clients_of_one_user_reach_servers_of_another_by_lanes() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let (_server, address) = serve(rack.require_lane(SERVERS, None, paths::python()), LOCALHOST);
    let client = talk(rack.require_lane(CLIENTS, None, paths::python()), address);
    for uid in [CLIENTS, SERVERS] {
        assert!(lane_bytes(&rack, uid) >= TALKED_BYTES_MIN, "{uid}: {:?}", rack.traffic_of(uid));
    }
    let all = rack.all().to_string();
    for uid in [CLIENTS, SERVERS] {
        assert!(all.contains(&format!("{}/{uid}", rack.path().display())), "{all}");
    }
    drop(client);
    // One user needs no rule.
    drop(talk(rack.require_lane(SERVERS, None, paths::python()), address));
}

#[test]
fn two_network_namespaces_are_joined_by_lanes_once_the_bytes_have_proven_it() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    let python = rack.require_lane(SERVERS, Some(&of_servers), paths::python());
    let (_server, address) = serve(python, ip.parse().expect("an address"));
    let client = talk(rack.require_lane(CLIENTS, Some(&of_clients), paths::python()), address);
    assert!(lane_bytes(&rack, CLIENTS) >= TALKED_BYTES_MIN, "{:?}", rack.traffic_of(CLIENTS));
    drop(client);
    // A user of both namespaces.
    drop(talk(rack.require_lane(SERVERS, Some(&of_clients), paths::python()), address));
}

/// A user namespace in which only root and the servers' user have numbers, as with `PrivateUsers=` of systemd.
fn private_users() -> String {
    format!("0 0 1,{SERVERS} {SERVERS} 1")
}

#[test]
fn programs_whose_users_the_kernel_hides_prove_them_by_a_key() {
    let Some(mut rack) = SharedRack::with_rule().map(SharedRack::mount) else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    let ip: IpAddr = ip.parse().expect("an address");
    let clients_only = format!("7 {CLIENTS} 1");
    for (there, here, ip) in [(Some(&of_servers), Some(&of_clients), ip), (None, None, LOCALHOST)] {
        let (there, here) = (there.map(String::as_str), here.map(String::as_str));
        let python = rack.require_lane_in(&private_users(), SERVERS, there, paths::python());
        let (_server, address) = serve(python, ip);
        let clients = [
            rack.require_lane(CLIENTS, here, paths::python()),
            // Neither side sees the other's user, nor root.
            rack.require_lane_in(&clients_only, 7, here, paths::python()),
            // One user.
            rack.require_lane_in(&private_users(), SERVERS, here, paths::python()),
        ];
        for (count, client) in (1..).zip(clients) {
            drop(talk(client, address));
            let traffic = rack.traffic_of(SERVERS);
            assert!(traffic.lane_bytes >= count * TALKED_BYTES_MIN, "{count}: {traffic:?}");
        }
    }
}

#[test]
fn hidden_users_without_the_key_have_no_lane() {
    let Some(rack) = SharedRack::with_rule().map(SharedRack::mount) else { return };
    rack.allow(STRANGER, SERVERS);
    let talk_on = format!("{TALK}while True: talk()");
    // A rule that was written by hand has no key; that of others is another.
    let own_key = rack.path().join(format!("{STRANGER}/key-{SERVERS}"));
    fs::copy(rack.path().join(format!("{CLIENTS}/key-{SERVERS}")), &own_key).expect("a key");
    let (_server, address) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    let strange = rack.require_lane_in(&format!("7 {STRANGER} 1"), 7, None, paths::python());
    script(strange, &talk_on, address).wait(WAIT_MAX).must_exit_with(1);
    let traffic = rack.traffic_of(SERVERS);
    assert_eq!(traffic.lane_bytes, 0, "{traffic:?}");
    fs::remove_file(own_key).expect("a key");
    let strange = rack.require_lane_in(&format!("7 {STRANGER} 1"), 7, None, paths::python());
    script(strange, &talk_on, address).wait(WAIT_MAX).must_exit_with(1);
    rack.allow(STRANGER, SERVERS);
    drop(talk(rack.require_lane_in(&format!("7 {STRANGER} 1"), 7, None, paths::python()), address));
}

#[test]
fn a_stream_in_one_direction_between_namespaces_moves_to_a_lane_too() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    let address = SocketAddr::new(ip.parse().expect("an address"), port::free_port());
    let sink = "
connection, _ = listen().accept()
say(*read_all(connection))
time.sleep(600)";
    let server = script(rack.run_as(SERVERS, Some(&of_servers), &[], paths::python()), sink, address);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    let source = "
data = b''.join(struct.pack('I', number) for number in range(1 << 20))
with socket.create_connection(address) as server:
    for _ in range(20):
        for start in range(0, len(data), 65536):
            server.sendall(data[start:start + 65536])
digest = hashlib.sha256(data * 20).hexdigest()
say(len(data) * 20, digest)
time.sleep(600)";
    let client = script(rack.run_as(CLIENTS, Some(&of_clients), &[], paths::python()), source, address);
    let ended = |process: &Process| process.stdout().lines().any(|line| line.starts_with("83886080 "));
    client.wait_until("the end of the stream", WAIT_MAX, ended);
    server.wait_until("the end of the stream", WAIT_MAX, ended);
    let received = server.stdout();
    assert_eq!(received.lines().last(), client.stdout().lines().last());
    assert!(lane_bytes(&rack, CLIENTS) >= 40 << 20, "{:?}", rack.traffic_of(CLIENTS));
}

#[test]
fn a_third_user_of_the_group_is_served_by_tcp() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    for (namespaces, ip) in [([None; 2], LOCALHOST), ([Some(&*of_clients), Some(&*of_servers)], ip.parse().unwrap())] {
        let (_server, address) = serve(rack.run_as(SERVERS, namespaces[1], &[], paths::python()), ip);
        // The other direction of the rule, and a user whom no rule names.
        for (uid, word) in [(STRANGER, "no rule"), (CLIENTS + 100, "no rule")] {
            drop(talk(rack.run_as(uid, namespaces[0], &[], paths::python()), address));
            assert_eq!(lane_bytes(&rack, uid), 0, "{uid}");
            let refused = script(rack.require_lane(uid, namespaces[0], paths::python()), &patient(), address);
            let refused = refused.wait(WAIT_MAX);
            assert!(refused.stdout.contains("reset"), "{refused:?}");
            if namespaces[0].is_none() {
                assert!(refused.stderr.contains(word), "{refused:?}");
            }
        }
    }
}

/// A client that talks until its connection is refused.
fn patient() -> String {
    format!(
        "{TALK}
try:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        talk()
        time.sleep(0.05)
except (ConnectionResetError, BrokenPipeError):
    say('reset')"
    )
}

#[test]
fn a_server_that_has_changed_its_root_directory_and_its_user_keeps_its_lanes() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    let address = SocketAddr::new(ip.parse().expect("an address"), port::free_port());
    let jail = rack.folder().join("jail");
    fs::create_dir(&jail).expect("a folder");
    // Python loads modules as it needs them, which it does not find there any more.
    let change = format!(
        "
listener = listen()
import encodings.idna
os.chroot({jail:?})
os.chdir('/')
os.setgroups([61000])
os.setgid({SERVERS})
os.setuid({SERVERS})
def echo(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()"
    );
    let server = script(rack.run_as_root(Some(&of_servers), paths::python()), &change, address);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    for _ in 0..2 {
        drop(talk(rack.require_lane(CLIENTS, Some(&of_clients), paths::python()), address));
    }
    let local = SocketAddr::new(LOCALHOST, address.port());
    drop(server);
    let server = script(rack.run_as_root(None, paths::python()), &change, local);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    drop(talk(rack.require_lane(CLIENTS, None, paths::python()), local));
    assert!(lane_bytes(&rack, SERVERS) >= TALKED_BYTES_MIN, "its page is there too: {:?}", rack.traffic_of(SERVERS));
}

#[test]
fn a_server_that_becomes_another_user_after_it_has_accepted_proves_its_connection() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let address = SocketAddr::new(LOCALHOST, port::free_port());
    let inetd = format!(
        "
listener = listen()
while True:
    connection, _ = listener.accept()
    os.setgroups([61000])
    os.setgid({SERVERS})
    os.setuid({SERVERS})
    while data := connection.recv(65536):
        connection.sendall(data)"
    );
    let server = script(rack.run_as_root(None, paths::python()), &inetd, address);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    let client = talk(rack.require_lane(CLIENTS, None, paths::python()), address);
    assert!(lane_bytes(&rack, CLIENTS) >= TALKED_BYTES_MIN);
    drop(client);
}

/// A proxy that passes on bytes, and does not load the library.
const PROXY: &str = "
target = (sys.argv[3], int(sys.argv[4]))
def copy(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)
listener = listen()
while True:
    client, _ = listener.accept()
    server = socket.create_connection(target)
    for pair in ((client, server), (server, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()";

#[test]
fn no_lane_goes_past_a_proxy() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, ip_of_clients), (of_servers, ip)] = rack.cable();
    for (namespaces, ips) in [
        ([None; 2], [LOCALHOST; 2]),
        ([Some(&*of_clients), Some(&*of_servers)], [ip_of_clients.parse().unwrap(), ip.parse().unwrap()]),
    ] {
        let (_server, target) = serve(rack.run_as(SERVERS, namespaces[1], &[], paths::python()), ips[1]);
        let at = SocketAddr::new(ips[0], port::free_port());
        let mut proxy = rack.bare_as(SERVERS, namespaces[0], paths::python());
        let arguments =
            [at.ip().to_string(), at.port().to_string(), target.ip().to_string(), target.port().to_string()];
        let proxy = Process::start(proxy.args(["-c", &format!("{COMMON}{PROXY}")]).args(arguments));
        proxy.wait_until("listening", WAIT_MAX, |proxy| proxy.stdout().contains("listening"));
        let client = talk(rack.run_as(CLIENTS, namespaces[0], &[], paths::python()), at);
        assert_eq!((lane_bytes(&rack, CLIENTS), lane_bytes(&rack, SERVERS)), (0, 0));
        drop(client);
    }
}

/// The user of a proxy, which is in no group of the rack's.
const PROXIES: u32 = 61_004;

#[test]
fn a_sidecar_has_lanes_on_both_of_its_sides() {
    assert_sidecar_has_lanes(|rack, namespace, at, target| {
        let (file, jail) = (rack.folder().join("haproxy.cfg"), rack.folder().join("jail"));
        fs::create_dir(&jail).expect("a folder");
        let text = format!(
            "global\n chroot {}\n uid {PROXIES}\n gid {PROXIES}\n nbthread 2\n\
             defaults\n mode tcp\n timeout connect 5s\n timeout client 1m\n timeout server 1m\n\
             frontend in\n bind {at}\n default_backend out\nbackend out\n server s {target}\n",
            jail.display()
        );
        fs::write(&file, text).expect("a file");
        let mut haproxy = rack.run_as_root(Some(namespace), paths::tool("haproxy"));
        Process::start(haproxy.arg("-db").arg("-f").arg(&file))
    });
}

#[test]
#[ignore = "needs Envoy, which ./x exam fetches"]
fn a_sidecar_of_envoy_has_lanes_on_both_of_its_sides() {
    assert_sidecar_has_lanes(|rack, namespace, at, target| {
        let address = |of: SocketAddr| {
            format!("address: {{socket_address: {{address: {}, port_value: {}}}}}", of.ip(), of.port())
        };
        let text = format!(
            "static_resources:
  listeners:
  - {}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: tcp
          cluster: servers
  clusters:
  - name: servers
    connect_timeout: 5s
    load_assignment: {{cluster_name: servers, endpoints: [{{lb_endpoints: [{{endpoint: {{{}}}}}]}}]}}
",
            address(at),
            address(target)
        );
        let file = rack.folder().join("envoy.yaml");
        fs::write(&file, text).expect("a file");
        let program = rack.folder().join("envoy");
        paths::copy_program(&paths::tool("envoy"), &program);
        let mut envoy = rack.run_as(PROXIES, Some(namespace), &[], program);
        // Otherwise it leaves memory in /dev/shm, which a second run shares.
        Process::start(envoy.args(["--disable-hot-restart", "-c"]).arg(&file))
    });
}

/// Checks that a client and a server of two users have lanes to the proxy between them, which `start` starts in a
/// namespace, at an address and for the server's, and none past it.
#[track_caller]
fn assert_sidecar_has_lanes(start: impl FnOnce(&SharedRack, &str, SocketAddr, SocketAddr) -> Process) {
    let Some(mut rack) = SharedRack::new() else { return };
    rack.allow(CLIENTS, PROXIES);
    rack.allow(PROXIES, SERVERS);
    let ([of_clients, of_proxy, of_servers], [proxy_ip, server_ip]) = rack.row();
    let server_ip = server_ip.parse().expect("an address");
    let (_server, target) = serve(rack.require_lane(SERVERS, Some(&of_servers), paths::python()), server_ip);
    let at = SocketAddr::new(proxy_ip.parse().expect("an address"), port::free_port());
    let proxy = start(&rack, &of_proxy, at, target);
    let client = talk_when_ready(&rack, &of_clients, at, &proxy);
    // The client exchanges its bytes with the proxy, the proxy with both, the server with the proxy.
    for (uid, count) in [(CLIENTS, 1), (PROXIES, 2), (SERVERS, 1)] {
        let traffic = rack.traffic_of(uid);
        assert!(traffic.lane_bytes >= count * TALKED_BYTES_MIN, "{uid}: {traffic:?}");
        assert_eq!(traffic.lane_connections, count, "{uid}: {traffic:?}");
    }
    let mut explain = Command::new(rack.crosslane());
    let pid = rack.pid_of(PROXIES).to_string();
    let explained = Process::start(explain.args(["explain", "--json", "--pid", &pid])).wait(WAIT_MAX).must_succeed();
    let explained: serde_json::Value = serde_json::from_str(&explained.stdout).expect("JSON");
    let sockets = explained["sockets"].as_array().expect("a list");
    let paths: Vec<&serde_json::Value> =
        sockets.iter().filter(|socket| socket["role"] != "listen").map(|socket| &socket["path"]).collect();
    assert_eq!(paths, ["lane"; 2], "{explained}");
    drop(client);
}

/// Runs [`TALK`] with lanes once a proxy accepts connections.
fn talk_when_ready(rack: &SharedRack, namespace: &str, address: SocketAddr, proxy: &Process) -> Process {
    let waiting = "
while True:
    try:
        socket.create_connection(address).close()
        break
    except ConnectionRefusedError:
        time.sleep(0.01)";
    let ready = script(rack.bare_as(CLIENTS, Some(namespace), paths::python()), waiting, address).wait(WAIT_MAX);
    assert!(ready.status.success(), "{ready:?}{}", proxy.stderr());
    talk(rack.require_lane(CLIENTS, Some(namespace), paths::python()), address)
}

/// Packet filters by which one port of a namespace is another one's, and a third is forbidden.
fn filters(port: u16, target: u16, forbidden: u16) -> String {
    let redirect = format!("tcp dport {port} redirect to :{target};");
    format!(
        "table ip nat {{\n chain output {{\n type nat hook output priority -100;\n {redirect}\n }}\n \
         chain prerouting {{\n type nat hook prerouting priority -100;\n {redirect}\n }}\n}}\n\
         table ip filter {{\n chain output {{\n type filter hook output priority 0;\n \
         tcp dport {forbidden} reject with tcp reset;\n }}\n}}\n"
    )
}

#[test]
fn connections_with_translated_addresses_stay_on_tcp_and_forbidden_ones_are_not_made() {
    let Some(mut rack) = SharedRack::with_rule() else { return };
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    for (client, ip) in [(&of_servers, LOCALHOST), (&of_clients, ip.parse().expect("an address"))] {
        let server = rack.run_as(SERVERS, Some(&of_servers), &[], paths::python());
        let (_server, target) = serve(server, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let [port, forbidden] = [port::free_port(), port::free_port()];
        let file = rack.folder().join(format!("{port}.nft"));
        fs::write(&file, filters(port, target.port(), forbidden)).expect("a file");
        let mut nft = netns::command(&of_servers, paths::tool("nft"));
        Process::start(nft.arg("-f").arg(&file)).wait(WAIT_MAX).must_succeed();
        let python = || rack.run_as(CLIENTS, Some(client), &[], paths::python());
        let talked = talk(python(), SocketAddr::new(ip, port));
        assert_eq!((lane_bytes(&rack, CLIENTS), lane_bytes(&rack, SERVERS)), (0, 0));
        if ip == LOCALHOST {
            let all = rack.all().to_string();
            assert!(all.contains("\"reason\":\"address_translated\""), "{all}");
            let refused = script(python(), TALK, SocketAddr::new(ip, forbidden)).wait(WAIT_MAX);
            assert!(refused.stderr.contains("ConnectionRefusedError"), "{refused:?}");
        }
        drop(talked);
        // Directly, the same server is reached by a lane.
        drop(talk(rack.require_lane(CLIENTS, Some(client), paths::python()), SocketAddr::new(ip, target.port())));
    }
}

/// A control group of version 2 of the test's own, in a mount of its own.
struct ControlGroup {
    mount: tempfile::TempDir,
}

impl ControlGroup {
    /// `None` where this is not permitted.
    fn new() -> Option<Self> {
        let mount = tempfile::tempdir().expect("a folder");
        rustix::mount::mount("none", mount.path(), "cgroup2", rustix::mount::MountFlags::empty(), None).ok()?;
        let group = Self { mount };
        fs::create_dir(group.path()).ok()?;
        Some(group)
    }

    fn path(&self) -> std::path::PathBuf {
        self.mount.path().join(format!("crosslane-test-{}", std::process::id()))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Its processes have ended, but the kernel may not know yet.
        wait_until("an empty control group", || fs::remove_dir(self.path()).is_ok() || !self.path().exists());
        let _ = rustix::mount::unmount(self.mount.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_service_address_of_a_control_group_stays_on_tcp() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let Some(group) = ControlGroup::new() else { return };
    let probe = c::build("service_address", &[paths::package_file("probes/service_address.c")], &["-Wall", "-Werror"]);
    let (_server, target) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    let mut through = Command::new(probe);
    through.arg(group.path()).args(["10.96.7.7", "80", "127.0.0.1", &target.port().to_string()]);
    let client = rack.run_as(CLIENTS, None, &[], paths::python());
    through.arg(client.get_program()).args(client.get_args()).current_dir("/").env_remove("LD_PRELOAD");
    through.env("CROSSLANE_RACK", rack.path());
    let service: SocketAddr = "10.96.7.7:80".parse().expect("an address");
    let talk = format!("{TALK}say(server.getpeername()[0])\ntime.sleep(600)");
    let client = script(through, &talk, service);
    wait_until("the client", || client.stdout().contains("10.96.7.7") || !client.is_running());
    if !client.is_running() {
        let finished = client.wait(WAIT_MAX);
        assert_eq!(finished.status.code(), Some(77), "no BPF programs here: {finished:?}");
        return;
    }
    assert_eq!((lane_bytes(&rack, CLIENTS), lane_bytes(&rack, SERVERS)), (0, 0));
}

#[test]
fn a_kernel_that_does_not_tell_about_sockets_leaves_connections_on_tcp() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let probe = rack.folder().join("deny");
    let source = paths::package_file("probes/deny.c");
    paths::copy_program(&c::build("deny", &[source], &["-Wall", "-Werror"]), &probe);
    let denied = |what, uid, options: &[&str]| {
        let mut command = rack.bare_as(uid, None, &probe);
        command.arg(what).arg(rack.crosslane()).arg("run").args(options).arg("--").arg(paths::python());
        command
    };
    // Without INET_DIAG on both sides: one side alone looks up by what the other has passed.
    let (_server, with) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    let (_denied_server, without) = serve(denied("look-ups", SERVERS, &[]), LOCALHOST);
    drop(talk(denied("look-ups", CLIENTS, &["--require-lane"]), with));
    assert!(lane_bytes(&rack, SERVERS) >= TALKED_BYTES_MIN);
    for (what, address) in [("look-ups", without), ("cookies", with)] {
        let client = talk(denied(what, CLIENTS, &[]), address);
        assert_eq!(lane_bytes(&rack, CLIENTS), 0, "{what}");
        drop(client);
        let refused = script(denied(what, CLIENTS, &["--require-lane"]), &patient(), address).wait(WAIT_MAX);
        assert!(refused.stdout.contains("reset"), "{what}: {refused:?}");
        assert!(refused.stderr.contains("the kernel does not tell"), "{what}: {refused:?}");
    }
}

/// The configuration of an nginx whose workers are of another user than its master.
fn nginx_configuration(folder: &std::path::Path, port: u16) -> String {
    let folder = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|of| format!("{of}_temp_path {folder}/nginx-{of};"));
    format!(
        "user www-data;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log {folder}/nginx.log;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; {}\n server {{ listen 127.0.0.1:{port}; location / {{ return 200 hello; }} }} }}\n",
        temporary.concat()
    )
}

/// A client that keeps a connection, and opens another one when the server has closed that between two requests.
const REQUESTS: &str = r#"
done = 0
deadline = time.monotonic() + float(sys.argv[3])
server = socket.create_connection(address)
while time.monotonic() < deadline:
    try:
        server.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        answer = b""
        while not answer.endswith(b"hello"):
            more = server.recv(4096)
            if not more:
                # The beginning of an answer would be a failed request.
                assert not answer, answer
                raise ConnectionResetError
            answer += more
        done += 1
        if b"Connection: close" in answer:
            raise ConnectionResetError
    except (ConnectionResetError, BrokenPipeError):
        server.close()
        server = socket.create_connection(address)
say("requests", done)
time.sleep(600)
"#;

#[test]
fn nginx_serves_by_lanes_of_its_workers_and_reloads_without_a_failed_request() {
    const WWW_DATA: u32 = 33;
    let Some(rack) = SharedRack::new() else { return };
    rack.allow(CLIENTS, WWW_DATA);
    let address = SocketAddr::new(LOCALHOST, port::free_port());
    let file = rack.folder().join("nginx.conf");
    fs::write(&file, nginx_configuration(&rack.folder(), address.port())).expect("a file");
    let nginx = |words: &[&str]| {
        let mut command = rack.run_as_root(None, paths::tool("nginx"));
        command.arg("-c").arg(&file).args(words);
        command
    };
    let server = Process::start(&mut nginx(&["-g", "daemon off;"]));
    server.wait_until("the listener", WAIT_MAX, |_| port::is_listening(address.port()));
    let mut python = rack.run_as(CLIENTS, None, &[], paths::python());
    let arguments = [address.ip().to_string(), address.port().to_string(), "2".to_owned()];
    let client = Process::start(python.args(["-c", &format!("{COMMON}{REQUESTS}")]).args(arguments));
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(400));
        Process::start(&mut nginx(&["-s", "reload"])).wait(WAIT_MAX).must_succeed();
    }
    client.wait_until("all requests", WAIT_MAX, |client| client.stdout().contains("requests"));
    let traffic = rack.traffic_of(CLIENTS);
    assert!(traffic.lane_bytes > 1_000_000 && traffic.lane_connections >= 3, "{traffic:?}");
    drop(client);
    Process::start(&mut nginx(&["-s", "stop"])).wait(WAIT_MAX).must_succeed();
    server.wait(WAIT_MAX).must_succeed();
}

#[test]
fn a_member_that_fills_the_file_system_keeps_nobody_from_tcp() {
    let Some(rack) = SharedRack::on_small_file_system() else { return };
    rack.allow(CLIENTS, SERVERS);
    let (_server, address) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    let fill = format!(
        "
own = {:?} + '/{STRANGER}'
os.mkdir(own)
try:
    for number in range(10000):
        open(own + '/' + str(number), 'wb').write(bytes(4096))
except OSError as error:
    say(error.strerror)",
        rack.path().display().to_string()
    );
    let filled = script(rack.bare_as(STRANGER, None, paths::python()), &fill, address).wait(WAIT_MAX).must_succeed();
    assert_eq!(filled.stdout, "No space left on device\n");
    let client = talk(rack.run_as(CLIENTS, None, &[], paths::python()), address);
    let said = client.stderr();
    assert!(said.lines().count() == 1 && said.contains("No space left") && said.contains("kernel TCP"), "{said}");
    drop(client);
    fs::remove_dir_all(rack.path().join(STRANGER.to_string())).expect("root removes them");
    let client = talk(rack.require_lane(CLIENTS, None, paths::python()), address);
    assert!(lane_bytes(&rack, CLIENTS) >= TALKED_BYTES_MIN);
    drop(client);
}

#[test]
fn only_root_switches_lanes_off_for_all() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let (_server, address) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    let client = talk(rack.run_as(CLIENTS, None, &[], paths::python()), address);
    assert!(lane_bytes(&rack, CLIENTS) >= TALKED_BYTES_MIN);
    // A member can create the file, which then is not root's.
    let off = rack.path().join("lanes-off");
    let mut touch = rack.bare_as(STRANGER, None, paths::tool("touch"));
    Process::start(touch.arg(&off)).wait(WAIT_MAX).must_succeed();
    drop(client);
    drop(talk(rack.require_lane(CLIENTS, None, paths::python()), address));
    fs::remove_file(&off).expect("a member's file");
    fs::write(&off, "").expect("root's file");
    let before = lane_bytes(&rack, SERVERS);
    drop(talk(rack.run_as(CLIENTS, None, &[], paths::python()), address));
    assert_eq!(lane_bytes(&rack, SERVERS), before);
}

#[test]
fn nothing_is_left_of_programs_that_have_ended() {
    let Some(rack) = SharedRack::with_rule() else { return };
    let (server, address) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    // Clients that never meet: the server announces each connection.
    let bare: Vec<Process> = (0..3).map(|_| talk(rack.bare_as(SERVERS, None, paths::python()), address)).collect();
    wait_until("announcements", || rack.sockets_of(SERVERS).len() == 3);
    drop(bare);
    wait_until("their end", || rack.sockets_of(SERVERS).is_empty());
    drop(talk(rack.run_as(CLIENTS, None, &[], paths::python()), address));
    drop(server);
    assert_eq!(rack.sockets_of(SERVERS), Vec::<String>::new());
}

#[test]
fn a_member_cannot_keep_another_user_out_that_a_rule_names() {
    let Some(rack) = SharedRack::new() else { return };
    // Somebody has made the directory of a user before the rule was made.
    let squatted = rack.path().join(SERVERS.to_string());
    let mut squatter = rack.bare_as(STRANGER, None, paths::tool("mkdir"));
    Process::start(squatter.arg(&squatted)).wait(WAIT_MAX).must_succeed();
    let options = ["--from", "61001", "--to", "61002"];
    let refused = Process::start(&mut rack.manage(&["allow"], &options)).wait(WAIT_MAX);
    refused.must_fail_in_one_line(1, &["61002", "61003"]);
    let (_server, address) = serve(rack.run_as(SERVERS, None, &[], paths::python()), LOCALHOST);
    drop(talk(rack.run_as(CLIENTS, None, &[], paths::python()), address));
    assert_eq!(lane_bytes(&rack, CLIENTS), 0, "served by TCP");
    fs::remove_dir(&squatted).expect("an empty folder");
    rack.allow(CLIENTS, SERVERS);
    let (_server, address) = serve(rack.require_lane(SERVERS, None, paths::python()), LOCALHOST);
    drop(talk(rack.require_lane(CLIENTS, None, paths::python()), address));
}

/// A program of a member that takes the place of a server: it listens where the server does in another directory, and
/// is silent, does not accept, or hangs up; or it leads to the server by a link.
const IMPOSTOR: &str = "
import os, socket, sys, time
place, behaviour, true_place = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
if behaviour == 'link':
    os.symlink(true_place, place)
else:
    listener.bind(place)
    os.chmod(place, 0o666)
    listener.listen(0)
print('listening', flush=True)
callers = []
while behaviour in ('silent', 'hangs-up'):
    callers.append(listener.accept())
    if behaviour == 'hangs-up':
        callers.clear()
time.sleep(600)
";

#[test]
fn a_member_that_answers_first_does_not_keep_the_server_from_a_lane() {
    let Some(mut rack) = SharedRack::new() else { return };
    rack.allow(CLIENTS, STRANGER);
    rack.allow(CLIENTS, SERVERS);
    let [(of_clients, _), (of_servers, ip)] = rack.cable();
    let python = rack.run_as(SERVERS, Some(&of_servers), &[], paths::python());
    let (_server, address) = serve(python, ip.parse().expect("an address"));
    for behaviour in ["silent", "stalled", "hangs-up", "link"] {
        // The server announces itself after its third answer.
        let begin = "for _ in range(3): server.sendall(b'x'); read(server, 1)\nsay('begun')\nsys.stdin.readline()";
        let talk = TALK.replacen("def talk", &format!("{begin}\ndef talk"), 1);
        let mut command = rack.run_as(CLIENTS, Some(&of_clients), &[], paths::python());
        command.args(["-c", &format!("{COMMON}{talk}while True: talk()"), &ip, &address.port().to_string()]);
        let (client, mut input) = Process::start_with_input(&mut command);
        let name = || rack.sockets_of(SERVERS).pop().filter(|name| !name.ends_with(".new"));
        wait_until("the announcement", || name().is_some());
        let name = name().expect("a socket");
        let [place, true_place] = [STRANGER, SERVERS].map(|uid| rack.path().join(uid.to_string()).join(&name));
        let mut impostor = rack.bare_as(STRANGER, None, paths::python());
        let impostor = Process::start(impostor.args(["-c", IMPOSTOR]).arg(&place).arg(behaviour).arg(&true_place));
        impostor.wait_until("listening", WAIT_MAX, |impostor| impostor.stdout().contains("listening"));
        let first = (behaviour == "stalled").then(|| UnixStream::connect(&place));
        input.write_all(b"\n").expect("a client that reads");
        wait_until(behaviour, || lane_bytes(&rack, CLIENTS) >= TALKED_BYTES_MIN);
        drop((client, impostor, first));
        fs::remove_file(&place).expect("the impostor's socket");
        wait_until("the end", || rack.sockets_of(SERVERS).is_empty());
    }
}
