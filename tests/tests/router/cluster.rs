//! Clusters in network namespaces, with queries for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use system_tests::{Finished, Process, WAIT_MAX, is_root, netns, paths, wait_for};
use tempfile::TempDir;

/// Two nodes with a kernel interface each, for [`Lab::write`].
pub const PLAIN: &str = r#"version = 1
name = "plain"

[[nodes]]
name = "a"
namespace = "NAMESPACE-a"

[[nodes.ports]]
device = "eth0"

[[nodes]]
name = "b"
namespace = "NAMESPACE-b"

[[nodes.ports]]
device = "eth0"
"#;

/// [`PLAIN`] with another interconnect and with detection of hot links.
pub fn joined_by(interconnect: &str) -> String {
    let how = format!("\n[interconnect]\nkind = \"{interconnect}\"\nbalance = \"valiant\"\n\n[[nodes]]");
    PLAIN.replacen("\n[[nodes]]", &how, 1)
}

/// Whether network namespaces can be created here; prints a line if not.
pub fn can_make_namespaces(test: &str) -> bool {
    if !is_root() {
        println!("{test} is skipped: network namespaces take root; run it as root");
    }
    is_root()
}

/// A cluster. The names of its namespaces begin with its name, and its file is in its own folder.
pub struct Cluster {
    pub name: String,
    pub folder: PathBuf,
}

impl Cluster {
    pub fn command(&self, subcommand: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(paths::crosslane());
        command.env("CROSSLANE_RACK", &self.folder).args(["router", subcommand, "--cluster"]);
        command.arg(self.file()).args(arguments);
        command
    }

    /// The cluster file.
    pub fn file(&self) -> PathBuf {
        self.folder.join("cluster.toml")
    }

    /// Runs `crosslane router SUBCOMMAND` with this cluster to its end.
    pub fn finish(&self, subcommand: &str, arguments: &[&str]) -> Finished {
        Process::start(&mut self.command(subcommand, arguments)).wait(WAIT_MAX)
    }

    pub fn json(&self, subcommand: &str, arguments: &[&str]) -> Value {
        let finished = self.finish(subcommand, &[&["--json"], arguments].concat()).must_succeed();
        serde_json::from_str(&finished.stdout).expect("JSON")
    }

    /// The state of a node, by its index in the file.
    pub fn node(&self, index: usize) -> Value {
        self.json("status", &[])["nodes"][index]["status"].clone()
    }

    /// The log of a node.
    pub fn log(&self, node: &str) -> String {
        let nodes = self.json("status", &["--node", node]);
        fs::read_to_string(nodes["nodes"][0]["log"].as_str().expect("a path")).expect("a log")
    }

    /// The namespace of a node or host.
    pub fn namespace(&self, at: &str) -> String {
        format!("{}-{at}", self.name)
    }

    /// A command that runs a program in the namespace of a node or host.
    pub fn at(&self, at: &str, program: impl AsRef<Path>) -> Command {
        netns::command(&self.namespace(at), program.as_ref())
    }

    pub fn ping(&self, from: &str, to: &str) -> Finished {
        let mut command = self.at(from, paths::tool("ping"));
        Process::start(command.args(["-n", "-c", "2", "-i", "0.2", "-w", "5", to])).wait(WAIT_MAX)
    }

    pub fn ip(&self, at: &str, words: &[&str]) -> String {
        netns::ip(&self.namespace(at), words)
    }

    /// The routes that packets to an address take from a node.
    pub fn routes(&self, node: &str, address: &str) -> Vec<Value> {
        self.json("fib", &["--node", node, address])["routes"].as_array().expect("routes").clone()
    }

    /// Waits until node `from` has a route to an address by way of node `by`, or no route.
    #[track_caller]
    pub fn wait_for_route(&self, from: &str, address: &str, by: Option<&str>) {
        let holds = |routes: &Vec<Value>| match (routes.first(), by) {
            (Some(route), Some(by)) => route["hops"][0]["node"] == by,
            (route, by) => route.is_none() && by.is_none(),
        };
        wait_for(&format!("such route to {address}"), || self.routes(from, address), holds);
    }

    /// Panics unless nothing of the cluster is left.
    #[track_caller]
    pub fn assert_gone(name: &str, folder: &Path) {
        let left = netns::with_prefix(name);
        assert!(left.is_empty(), "{left:?}");
        assert!(!folder.exists(), "{}", folder.display());
        let shown = folder.to_string_lossy().into_owned();
        let commands = fs::read_dir("/proc").expect("processes").flatten();
        let commands = commands.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
        let left: Vec<String> = commands.filter(|command| command.contains(&shown)).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// A cluster that the test configures. It ends with its guard.
pub struct Lab {
    cluster: Cluster,
    _folder: TempDir,
}

impl std::ops::Deref for Lab {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.file().exists() {
            self.finish("down", &[]);
        }
        netns::delete_all(&self.namespace(""));
    }
}

impl Lab {
    /// Creates namespaces of these names; prints a line and returns `None` if that is not possible.
    pub fn new(test: &str, namespaces: &[&str]) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !can_make_namespaces(test) {
            return None;
        }
        let name = format!("crosslane-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // It contains sockets, whose paths must be short.
        let folder = tempfile::Builder::new().prefix("router-").tempdir_in("/tmp").expect("a folder");
        let lab = Self { cluster: Cluster { name, folder: folder.path().to_owned() }, _folder: folder };
        namespaces.iter().for_each(|at| netns::add(&lab.namespace(at)));
        Some(lab)
    }

    /// Connects a node and a host by networks with this number: 10.77.N.0/24 and fd77:N::/64. The node has address 1,
    /// the host address 2 and a default route to the node.
    pub fn join(&self, (node, device): (&str, &str), (host, host_device): (&str, &str), number: u8) {
        let there = self.namespace(host);
        let peer = ["type", "veth", "peer", "name", host_device, "netns", &there];
        self.ip(node, &[&["link", "add", device][..], &peer].concat());
        for (at, device, last) in [(node, device, 1), (host, host_device, 2)] {
            self.ip(at, &["address", "add", &format!("10.77.{number}.{last}/24"), "dev", device]);
            self.ip(at, &["address", "add", &format!("fd77:{number}::{last}/64"), "dev", device, "nodad"]);
            self.ip(at, &["link", "set", device, "up"]);
        }
        let metric = number.to_string();
        self.ip(host, &["route", "add", "default", "via", &format!("10.77.{number}.1"), "metric", &metric]);
        self.ip(host, &["-6", "route", "add", "default", "via", &format!("fd77:{number}::1"), "metric", &metric]);
    }

    /// Writes the cluster file: `NAMESPACE` is replaced by the common prefix of the namespaces' names, `FOLDER` by the
    /// folder.
    pub fn write(&self, text: &str) {
        let folder = self.folder.display().to_string();
        let text = text.replace("NAMESPACE", &self.name).replace("FOLDER", &folder);
        fs::write(self.file(), text).expect("a file");
    }

    pub fn up(&self) {
        self.finish("up", &[]).must_succeed();
    }
}
