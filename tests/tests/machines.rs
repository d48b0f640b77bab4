//! A cluster over several machines, modelled by namespaces: each machine has its own network, shared memory and run
//! folder, and only Ethernet connects them. Control uses TCP, packets use RoCEv2.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use system_tests::process::signal;
use system_tests::{Finished, Process, WAIT_MAX, is_root, netns, paths, wait_for, wait_until};

const NODES: [&str; 3] = ["a", "b", "c"];

/// Three machines with a host behind each, and two switches between them: one for control, one for packets.
struct Lab {
    name: String,
    folder: tempfile::TempDir,
    /// The running nodes, by name.
    machines: HashMap<String, Process>,
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Each machine takes its node down.
        self.machines.drain().for_each(|(_, machine)| drop(machine.stop(WAIT_MAX)));
        netns::delete_all(&self.namespace(""));
    }
}

impl Lab {
    fn new() -> Self {
        let name = format!("crosslane-machines-{}", std::process::id());
        let folder = tempfile::Builder::new().prefix("machines-").tempdir_in("/tmp").expect("a folder");
        let lab = Self { name, folder, machines: HashMap::new() };
        for switch in ["control", "fabric"] {
            netns::add(&lab.namespace(switch));
            lab.ip(switch, &["link", "add", "switch", "type", "bridge"]);
            lab.ip(switch, &["link", "set", "dev", "switch", "up"]);
        }
        for (index, node) in NODES.iter().enumerate() {
            let number = index + 1;
            netns::add(&lab.namespace(node));
            let host = format!("h{number}");
            netns::add(&lab.namespace(&host));
            lab.connect(node, ("control", &format!("10.66.0.{number}/24")), "control");
            lab.connect(node, ("fabric", &format!("10.67.0.{number}/24")), "fabric");
            lab.connect(node, ("eth0", &format!("10.78.{number}.1/24")), &host);
            lab.ip(&host, &["address", "add", &format!("10.78.{number}.2/24"), "dev", node]);
            lab.ip(&host, &["route", "add", "default", "via", &format!("10.78.{number}.1")]);
        }
        crosslane(&["router", "key"], &lab.folder.path().join("key")).must_succeed();
        for node in NODES {
            fs::create_dir(lab.folder_of(node)).expect("a folder");
            fs::write(lab.folder_of(node).join("cluster.toml"), lab.cluster(node)).expect("a file");
            lab.give_key(node, &lab.folder.path().join("key"));
        }
        lab
    }

    fn namespace(&self, of: &str) -> String {
        format!("{}-{of}", self.name)
    }

    /// Connects a machine's interface of this address to a switch or host, where the other end has the machine's name.
    fn connect(&self, node: &str, interface: (&str, &str), to: &str) {
        let ((device, address), there) = (interface, self.namespace(to));
        self.ip(node, &["link", "add", device, "type", "veth", "peer", "name", node, "netns", &there]);
        self.ip(node, &["address", "add", address, "dev", device]);
        self.ip(node, &["link", "set", "dev", device, "up"]);
        if device == to {
            self.ip(to, &["link", "set", "dev", node, "master", "switch"]);
        }
        self.ip(to, &["link", "set", "dev", node, "up"]);
    }

    #[track_caller]
    fn ip(&self, at: &str, words: &[&str]) {
        netns::ip(&self.namespace(at), words);
    }

    /// The folder of a machine.
    fn folder_of(&self, node: &str) -> PathBuf {
        self.folder.path().join(node)
    }

    /// A machine's cluster file: all are equal except for the path of the key.
    fn cluster(&self, node: &str) -> String {
        let key = self.folder_of(node).join("key");
        // Heartbeats are slow because these machines share two processors.
        let mut text = format!(
            "version = 1\nname = \"machines\"\nkey = \"{}\"\n\n[interconnect]\nkind = \"rnic-udp\"\n\n[timeouts]\n\
             beat_ns = \"200 ms\"\nsilence_ns = \"2 s\"\nup_ns = \"1 ms\"\n",
            key.display()
        );
        for (index, name) in NODES.iter().enumerate() {
            let number = index + 1;
            text += &format!(
                "\n[[nodes]]\nname = \"{name}\"\ncontrol = \"10.66.0.{number}:4700\"\nfabric = \
                 \"10.67.0.{number}:4791\"\n\n[[nodes.ports]]\ndevice = \"eth0\"\nkind = \"af-packet\"\n"
            );
        }
        text
    }

    fn give_key(&self, node: &str, key: &Path) {
        let to = self.folder_of(node).join("key");
        fs::copy(key, &to).expect("a file");
        fs::set_permissions(&to, fs::Permissions::from_mode(0o600)).expect("a file");
    }

    /// The command that brings a node up on its machine.
    fn up(&self, node: &str) -> Command {
        let mut command = netns::command(&self.namespace(node), paths::tool("unshare"));
        // New mount and System V IPC namespaces.
        command.args(["--mount", "--ipc", "--"]);
        command.args(["sh", "-c", "mount -t tmpfs none /dev/shm && exec \"$@\"", "sh"]);
        command.arg(paths::crosslane()).args(["router", "up", "--foreground", "--node", node, "--cluster"]);
        command.arg(self.folder_of(node).join("cluster.toml")).env("CROSSLANE_RACK", self.folder_of(node));
        command
    }

    fn start(&mut self, node: &str) {
        let machine = Process::start(&mut self.up(node));
        self.machines.insert(node.to_owned(), machine);
    }

    /// Kills a node, as a crash would.
    fn kill(&mut self, node: &str) {
        let pid = self.status(node)["nodes"][0]["status"]["pid"].as_u64().expect("it is up");
        signal(pid, Signal::KILL);
        let machine = self.machines.remove(node).expect("it is up");
        let finished = machine.wait(WAIT_MAX).must_exit_with(1);
        assert!(finished.stderr.contains("has ended by itself"), "{finished}");
    }

    fn status(&self, node: &str) -> Value {
        let mut command = Command::new(paths::crosslane());
        command.args(["router", "status", "--json", "--node", node, "--cluster"]);
        command.arg(self.folder_of(node).join("cluster.toml")).env("CROSSLANE_RACK", self.folder_of(node));
        let finished = Process::start(&mut command).wait(WAIT_MAX);
        serde_json::from_str(&finished.stdout).unwrap_or(Value::Null)
    }

    /// Waits until a node reports this about another one.
    #[track_caller]
    fn wait_for(&self, node: &str, other: &str, what: &str, holds: impl Fn(&Value) -> bool) {
        let has_peer = |status: &Value| {
            let peers = status["nodes"][0]["status"]["peers"].as_array();
            peers.into_iter().flatten().any(|peer| peer["node"] == other && holds(peer))
        };
        wait_for(&format!("{what} of {other} at {node}"), || self.status(node), has_peer);
    }

    #[track_caller]
    fn wait_until_all_are_up(&self) {
        for (node, other) in [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")] {
            self.wait_for(node, other, "up", |peer| peer["state"] == "up");
        }
    }

    #[track_caller]
    fn wait_until_down(&self, node: &str, other: &str) {
        self.wait_for(node, other, "down", |peer| peer["state"] == "down");
    }

    /// A command that runs a program on a host.
    fn at(&self, host: usize, program: &str) -> Command {
        netns::command(&self.namespace(&format!("h{host}")), paths::tool(program))
    }

    fn ping(&self, from: usize, to: usize) -> Finished {
        let mut command = self.at(from, "ping");
        command.args(["-n", "-c", "2", "-i", "0.2", "-W", "2", &format!("10.78.{to}.2")]);
        Process::start(&mut command).wait(WAIT_MAX)
    }

    /// Waits until a host is reached: nodes that have just connected may not have exchanged all routes yet.
    #[track_caller]
    fn reaches(&self, from: usize, to: usize) {
        wait_until(&format!("reply of host {to} to host {from}"), || self.ping(from, to).status.success());
        self.ping(from, to).must_succeed();
    }

    #[track_caller]
    fn gets_unreachable(&self, from: usize, to: usize) {
        let finished = self.ping(from, to);
        assert!(!finished.status.success() && finished.stdout.contains("Unreachable"), "{finished}");
    }
}

/// Runs `crosslane` with a file as the last argument.
fn crosslane(words: &[&str], file: &Path) -> Finished {
    Process::start(Command::new(paths::crosslane()).args(words).arg(file)).wait(WAIT_MAX)
}

#[test]
fn machines_joined_by_ethernet_are_one_router_and_heal() {
    if !is_root() {
        println!("machines_joined_by_ethernet_are_one_router_and_heal is skipped: it takes root; run it as root");
        return;
    }
    let mut lab = Lab::new();
    NODES.iter().for_each(|node| lab.start(node));
    lab.wait_until_all_are_up();
    for (from, to) in [(1, 2), (2, 3), (3, 1)] {
        lab.reaches(from, to);
    }
    a_stream_crosses(&lab);
    a_partition_of_control_is_healed(&lab);
    a_node_dies_and_comes_back(&mut lab);
}

fn a_stream_crosses(lab: &Lab) {
    let mut server = lab.at(2, "iperf3");
    let server = Process::start(server.args(["-s", "-1", "--forceflush"]));
    server.wait_until("a server", WAIT_MAX, |server| server.stdout().contains("listening"));
    let mut client = lab.at(1, "iperf3");
    Process::start(client.args(["-c", "10.78.2.2", "-n", "4M"])).wait(WAIT_MAX).must_succeed();
    server.wait(WAIT_MAX).must_succeed();
}

/// Only the control network is cut at node c: its routes are withdrawn, so no packets are sent.
fn a_partition_of_control_is_healed(lab: &Lab) {
    lab.ip("control", &["link", "set", "dev", "c", "down"]);
    for (node, other) in [("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")] {
        lab.wait_until_down(node, other);
    }
    lab.gets_unreachable(1, 3);
    lab.gets_unreachable(3, 2);
    lab.reaches(1, 2);
    lab.ip("control", &["link", "set", "dev", "c", "up"]);
    lab.wait_until_all_are_up();
    lab.reaches(1, 3);
    lab.reaches(3, 2);
}

fn a_node_dies_and_comes_back(lab: &mut Lab) {
    lab.kill("b");
    lab.wait_until_down("a", "b");
    lab.wait_until_down("c", "b");
    lab.gets_unreachable(1, 2);
    lab.reaches(1, 3);
    // It returns with a key that other users can read, then with a different key: neither is accepted.
    let key = lab.folder_of("b").join("key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("a file");
    Process::start(&mut lab.up("b")).wait(WAIT_MAX).must_fail_in_one_line(2, &["chmod 600"]);
    fs::remove_file(&key).expect("a file");
    crosslane(&["router", "key"], &key).must_succeed();
    lab.start("b");
    let is_refused = |peer: &Value| peer["reason"].as_str().is_some_and(|reason| reason.contains("another key"));
    lab.wait_for("b", "a", "refusal", is_refused);
    lab.wait_until_down("c", "b");
    lab.gets_unreachable(1, 2);
    lab.kill("b");
    lab.give_key("b", &lab.folder.path().join("key"));
    lab.start("b");
    lab.wait_until_all_are_up();
    lab.reaches(1, 2);
    lab.reaches(3, 2);
}
