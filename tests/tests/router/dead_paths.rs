//! Paths between nodes that carry control sessions, but no packets.

use std::fs;
use std::process::Command;

use serde_json::Value;
use system_tests::{Process, WAIT_MAX, paths, wait_for, wait_until};

use super::cluster::Lab;

const NODES: [&str; 2] = ["a", "b"];

/// Nodes a and b as of two machines, in namespaces that Ethernet connects, with hosts h1 and h2 behind them.
struct Machines {
    nodes: Vec<Process>,
    lab: Lab,
}

impl Machines {
    fn new(test: &str) -> Option<Self> {
        let lab = Lab::new(test, &["a", "b", "h1", "h2"])?;
        lab.join(("a", "eth0"), ("h1", "eth0"), 1);
        lab.join(("b", "eth0"), ("h2", "eth0"), 2);
        lab.ip("a", &["link", "add", "fabric", "type", "veth", "peer", "name", "fabric", "netns", &lab.namespace("b")]);
        let mut text = "version = 1\nname = \"paths\"\nkey = \"FOLDER/key\"\n\n[interconnect]\nkind = \"rnic-udp\"\n\n\
                        [timeouts]\nbeat_ns = \"200 ms\"\nsilence_ns = \"2 s\"\n"
            .to_owned();
        for (node, number) in NODES.into_iter().zip(1..) {
            let address = format!("10.67.0.{number}");
            lab.ip(node, &["address", "add", &format!("{address}/24"), "dev", "fabric"]);
            lab.ip(node, &["link", "set", "fabric", "up"]);
            text += &format!(
                "\n[[nodes]]\nname = \"{node}\"\ncontrol = \"{address}:4700\"\nfabric = \"{address}:4791\"\n\n\
                 [[nodes.ports]]\ndevice = \"eth0\"\nkind = \"af-packet\"\n"
            );
        }
        let key = lab.folder.join("key");
        let mut create = Command::new(paths::crosslane());
        Process::start(create.args(["router", "key"]).arg(key)).wait(WAIT_MAX).must_succeed();
        lab.write(&text);
        let start = |node: &str| {
            fs::create_dir(lab.folder.join(node)).expect("a folder");
            let mut up = lab.at(node, paths::crosslane());
            up.args(["router", "up", "--foreground", "--node", node, "--cluster"]).arg(lab.file());
            Process::start(up.env("CROSSLANE_RACK", lab.folder.join(node)))
        };
        let nodes = NODES.map(start).into();
        Some(Self { nodes, lab })
    }

    /// What `crosslane router status` reports of a node.
    fn node(&self, node: &str) -> Value {
        let mut command = Command::new(paths::crosslane());
        command.args(["router", "status", "--json", "--node", node, "--cluster"]).arg(self.lab.file());
        let finished = Process::start(command.env("CROSSLANE_RACK", self.lab.folder.join(node))).wait(WAIT_MAX);
        let report: Value = serde_json::from_str(&finished.stdout).unwrap_or(Value::Null);
        report["nodes"][0].clone()
    }

    /// The state of the other node, as a node reports it, and the reason.
    fn peer(&self, node: &str) -> (String, String) {
        let peer = self.node(node)["status"]["peers"][0].clone();
        let text = |key: &str| peer[key].as_str().unwrap_or_default().to_owned();
        (text("state"), text("reason"))
    }

    fn log(&self, node: &str) -> String {
        fs::read_to_string(self.node(node)["log"].as_str().expect("a path")).expect("a log")
    }

    /// Makes both machines drop packets of the fabric, or lets them pass.
    fn set_fabric(&self, passes: bool) {
        for node in NODES {
            let mut nft = self.lab.at(node, paths::tool("nft"));
            nft.arg(match passes {
                true => "delete table ip fabric",
                false => {
                    "table ip fabric { chain c { type filter hook input priority 0 ; policy accept ; \
                     udp dport 4791 drop ; } ; }"
                }
            });
            Process::start(&mut nft).wait(WAIT_MAX).must_succeed();
        }
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.nodes.drain(..).for_each(|node| drop(node.stop(WAIT_MAX)));
    }
}

/// A node whose packets are not answered is removed although its control session is healthy, attracts no packets while
/// that lasts, and is joined again afterwards.
#[test]
fn a_path_that_carries_no_packets_is_detected_beside_a_healthy_control_session() {
    let test = "a_path_that_carries_no_packets_is_detected_beside_a_healthy_control_session";
    let Some(machines) = Machines::new(test) else { return };
    let lab = &machines.lab;
    let is = |wanted: &'static str| move |(state, _): &(String, String)| state == wanted;
    NODES.iter().for_each(|node| _ = wait_for("the join", || machines.peer(node), is("up")));
    wait_until("the way to the other host", || lab.ping("h1", "10.77.2.2").status.success());

    machines.set_fabric(false);
    let lost = wait_for(
        "the detection",
        || {
            lab.ping("h1", "10.77.2.2");
            machines.peer("a")
        },
        |(state, _)| state != "up",
    );
    let is_waiting = |(state, reason): &(String, String)| state == "joining" && reason.contains("has not answered yet");
    wait_for("a session without a path", || machines.peer("a"), is_waiting);
    let finished = lab.ping("h1", "10.77.2.2");
    assert!(!finished.status.success() && finished.stdout.contains("Unreachable"), "{lost:?}: {finished}");

    machines.set_fabric(true);
    NODES.iter().for_each(|node| _ = wait_for("the join", || machines.peer(node), is("up")));
    wait_until("the way to the other host", || lab.ping("h1", "10.77.2.2").status.success());
    let logs = NODES.map(|node| machines.log(node));
    assert!(logs.iter().any(|log| log.contains("lost: its forwarding does not answer")), "{logs:#?}");
}
