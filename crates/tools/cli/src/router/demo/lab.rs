//! Namespaces, interfaces, hosts and nodes of the demo: their creation and removal.

use std::fmt::Write as _;
use std::fs::{DirBuilder, File};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};
use router_node::cluster::{ClusterFile, ClusterPaths, NodePaths};
use router_node::management::Status;
use rustix::process::{Pid, Signal};

use super::host::Web;
use crate::rack_control::{Process, first_of};
use crate::router::request::status;

/// Names of the nodes; each node has one port with one host behind it.
pub const NODES: [&str; 3] = ["a", "b", "c"];
/// Prefix of the names of a demo's namespaces and folder; the demo's PID follows.
const PREFIX: &str = "crosslane-demo-";
/// Folder in which `ip netns` keeps namespaces.
const NAMESPACES: &str = "/run/netns";
/// Name of the interface of each node and each host.
const DEVICE: &str = "eth0";

/// A demo, which is removed when this is dropped.
pub struct Lab<'a> {
    name: String,
    folder: PathBuf,
    interconnect: String,
    signals: BorrowedFd<'a>,
    web: Option<Web>,
    is_over: bool,
}

/// The result of a program.
pub struct CommandOutput {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output and standard error.
    pub text: String,
    /// The command line, for messages.
    pub command: String,
}

impl<'a> Lab<'a> {
    /// Creates the demo and brings the nodes up.
    pub fn new(ports: &str, interconnect: &str, signals: BorrowedFd<'a>) -> Result<Self> {
        let name = format!("{PREFIX}{}", std::process::id());
        let folder = std::env::temp_dir().join(&name);
        let remedy = || format!("folder '{}'; remove it, or set TMPDIR", folder.display());
        DirBuilder::new().mode(0o700).create(&folder).with_context(remedy)?;
        let interconnect = interconnect.to_owned();
        let mut lab = Self { name, folder, interconnect, signals, web: None, is_over: false };
        for (index, node) in NODES.iter().enumerate() {
            lab.add_pair(node, index + 1)?;
        }
        if ports == "af-xdp" {
            lab.disable_offloads()?;
        }
        std::fs::write(lab.cluster(), lab.cluster_text(ports)).context("writing the cluster file")?;
        lab.up(None)?;
        lab.web = Some(Web::serve(&lab.namespace_path("h3"))?);
        Ok(lab)
    }

    /// Creates the namespaces of a node and its host, and a veth pair between them.
    fn add_pair(&self, node: &str, number: usize) -> Result<()> {
        let (router, host) = (self.namespace(node), self.namespace(&format!("h{number}")));
        for namespace in [&router, &host] {
            self.ip(&["netns", "add", namespace])?;
            self.ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        let peer = ["peer", "name", DEVICE, "netns", &host];
        self.ip(&[&["link", "add", DEVICE, "netns", &router, "type", "veth"][..], &peer].concat())?;
        // The links come up before they get addresses: otherwise the kernel delays use of the addresses up to a second.
        for namespace in [&router, &host] {
            self.ip(&["-n", namespace, "link", "set", DEVICE, "up"])?;
        }
        for (namespace, last) in [(&router, 1), (&host, 2)] {
            self.ip(&["-n", namespace, "address", "add", &format!("10.77.{number}.{last}/24"), "dev", DEVICE])?;
            // The link has only these two hosts, so duplicate address detection is not needed.
            let v6 = format!("fd77:{number}::{last}/64");
            self.ip(&["-n", namespace, "address", "add", &v6, "dev", DEVICE, "nodad"])?;
        }
        self.ip(&["-n", &host, "route", "add", "default", "via", &format!("10.77.{number}.1")])?;
        self.ip(&["-n", &host, "-6", "route", "add", "default", "via", &format!("fd77:{number}::1")])
    }

    /// Disables offloads on the hosts: an AF_XDP program sees frames as the host sends them, so the host must compute
    /// checksums and segment them.
    fn disable_offloads(&self) -> Result<()> {
        for number in 1..=NODES.len() {
            let namespace = router_ports::Namespace::at(&self.namespace_path(&format!("h{number}")))?;
            namespace.within(|| router_ports::disable_offloads(DEVICE))??;
        }
        Ok(())
    }

    fn cluster_text(&self, ports: &str) -> String {
        let mut text = format!(
            "version = 1\nname = \"demo\"\n\n[interconnect]\nkind = \"{}\"\nbatch = \"adaptive\"\n",
            self.interconnect
        );
        for (index, node) in NODES.iter().enumerate() {
            let namespace = self.namespace(node);
            let fabric = match self.interconnect.as_str() {
                "rnic-udp" => format!("fabric = \"127.0.0.{}:4791\"\n", index + 77),
                _ => String::new(),
            };
            let written = write!(
                text,
                "\n[[nodes]]\nname = \"{node}\"\nnamespace = \"{namespace}\"\n{fabric}\n[[nodes.ports]]\ndevice = \
                 \"{DEVICE}\"\nkind = \"{ports}\"\n"
            );
            assert!(written.is_ok(), "text grows");
        }
        text
    }

    /// Returns the path of the cluster file.
    pub fn cluster(&self) -> PathBuf {
        self.folder.join("cluster.toml")
    }

    fn namespace(&self, of: &str) -> String {
        format!("{}-{of}", self.name)
    }

    fn namespace_path(&self, of: &str) -> PathBuf {
        Path::new(NAMESPACES).join(self.namespace(of))
    }

    fn ip(&self, arguments: &[&str]) -> Result<()> {
        let output = self.run(Command::new("ip").args(arguments))?;
        if output.status.success() {
            return Ok(());
        }
        let (command, text) = (output.command, output.text.trim());
        bail!("'{command}' failed: {text}; the demo needs a kernel with network namespaces and veth")
    }

    /// Brings up one node, or all nodes.
    pub fn up(&self, node: Option<&str>) -> Result<()> {
        let mut command = self.own(&["router", "up", "--cluster"])?;
        command.arg(self.cluster());
        if let Some(node) = node {
            command.args(["--node", node]);
        }
        let output = self.run(&mut command)?;
        if !output.status.success() {
            bail!("{}", output.text.trim().trim_start_matches("crosslane: "));
        }
        Ok(())
    }

    /// Returns a `crosslane` command for the cluster of the demo.
    fn own(&self, arguments: &[&str]) -> Result<Command> {
        own(&self.folder, arguments)
    }

    /// Runs a program in the namespace of a node or host and returns its result.
    pub fn run_at(&self, at: &str, words: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(at)]).args(words);
        let output = self.run(&mut command)?;
        Ok(CommandOutput { command: words.join(" "), ..output })
    }

    /// Starts a program in the namespace of a node or host.
    pub fn start_at(&self, at: &str, words: &[&str]) -> Result<std::process::Child> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(at)]).args(words).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().with_context(|| format!("starting '{}'", words.join(" ")))
    }

    /// Runs a program until it ends, or kills it when a signal ends the demo.
    fn run(&self, command: &mut Command) -> Result<CommandOutput> {
        let shown: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
        let shown: Vec<_> = shown.iter().map(|word| word.to_string_lossy()).collect();
        let shown = shown.join(" ");
        let path = self.folder.join("output");
        let output = File::create(&path).with_context(|| format!("file '{}'", path.display()))?;
        let errors = output.try_clone().context("duplicating a descriptor")?;
        // A separate process group, so that an interrupt from the keyboard reaches only this process, which cleans up.
        let command = command.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
        let mut child = command.spawn().with_context(|| format!("starting '{shown}'"))?;
        let process = Process::new(Pid::from_child(&child)).with_context(|| format!("watching '{shown}'"))?;
        if first_of(self.signals, std::iter::once(&process)).is_none() {
            process.signal(Signal::KILL);
            let _ = child.wait();
            bail!("interrupted; the demo has been removed");
        }
        let status = child.wait().with_context(|| format!("waiting for '{shown}'"))?;
        let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap_or_default()).into_owned();
        Ok(CommandOutput { status, text, command: shown })
    }

    /// Returns the status of a node, or `None` if it does not run.
    pub fn status(&self, node: &str) -> Result<Option<Status>> {
        status(&self.node_paths(node)?)
    }

    fn node_paths(&self, node: &str) -> Result<NodePaths> {
        let file = ClusterFile::read(&self.cluster())?;
        let path = std::fs::canonicalize(self.cluster()).context("the cluster file")?;
        Ok(ClusterPaths::new(&self.folder, &file.cluster, &path).node(node))
    }

    /// Kills a node, as a crash would.
    pub fn kill(&self, node: &str) -> Result<()> {
        let process = Process::holding_lock(&self.node_paths(node)?.pid()).with_context(|| format!("node {node}"))?;
        process.signal(Signal::KILL);
        Ok(())
    }

    /// Returns the kind of the ports in use.
    pub fn port_kind(&self) -> Result<String> {
        let status = self.status(NODES[0])?.context("node a is not up")?;
        Ok(status.ports.first().map(|port| port.kind.clone()).unwrap_or_default())
    }

    /// Returns a drawing of the topology.
    pub fn picture(&self) -> String {
        let mut text = format!("three router nodes, joined by {}, each in a network namespace:\n\n", self.interconnect);
        for (index, node) in NODES.iter().enumerate() {
            let (number, end) = (index + 1, ["═╗", "═╬═ as one router", "═╝"][index]);
            let host = format!("host h{number}  10.77.{number}.2  fd77:{number}::2");
            text += &format!("  {host} ── 10.77.{number}.1  fd77:{number}::1  node {node} {end}\n");
        }
        text + "\n"
    }

    /// Returns commands with which to inspect the demo if it stays up.
    pub fn hints(&self, stays: bool) -> String {
        if !stays {
            return String::new();
        }
        let (folder, file) = (self.folder.display(), self.cluster());
        let file = file.display();
        let namespace = self.namespace("h1");
        let router = |what: &str| format!("  crosslane router {what} --cluster {file}\n");
        let commands = [router("status"), router("fib"), router("trace --protocol icmp")].concat();
        let begin = "\nthe demo stays up until Ctrl-C; inspect it from another terminal:\n";
        format!("{begin}  export CROSSLANE_RACK={folder}\n{commands}  ip netns exec {namespace} ping 10.77.3.2\n")
    }

    /// Waits until a signal arrives.
    pub fn wait_for_signal(&self) {
        first_of(self.signals, std::iter::empty());
    }

    /// Stops the nodes, and removes the namespaces and the folder.
    pub fn end(mut self) -> Result<()> {
        self.is_over = true;
        self.web = None;
        end(&self.name, &self.folder)
    }
}

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        self.web = None;
        if !self.is_over
            && let Err(error) = end(&self.name, &self.folder)
        {
            eprintln!("crosslane: removing the demo: {error:#}");
        }
    }
}

fn own(folder: &Path, arguments: &[&str]) -> Result<Command> {
    let own = std::env::current_exe().context("finding the path of this command")?;
    let mut command = Command::new(own);
    command.args(arguments).env("CROSSLANE_RACK", folder);
    Ok(command)
}

/// Stops the nodes of a demo, and removes its namespaces and its folder.
fn end(name: &str, folder: &Path) -> Result<()> {
    let cluster = folder.join("cluster.toml");
    if cluster.exists() {
        let mut down = own(folder, &["router", "down", "--cluster"])?;
        let _ = down.arg(&cluster).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0).status();
    }
    for namespace in namespaces().into_iter().filter(|namespace| namespace.starts_with(&format!("{name}-"))) {
        let done = Command::new("ip").args(["netns", "del", &namespace]).stdin(Stdio::null()).process_group(0).status();
        if !done.is_ok_and(|status| status.success()) {
            bail!("namespace '{namespace}' was not removed; remove it with 'ip netns del {namespace}'");
        }
    }
    std::fs::remove_dir_all(folder).with_context(|| format!("folder '{}' was not removed; remove it", folder.display()))
}

fn namespaces() -> Vec<String> {
    let entries = std::fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Removes the namespaces and folders of demos that were killed.
pub fn remove_leftovers() {
    let names = namespaces();
    let mut numbers: Vec<i32> = names
        .iter()
        .filter_map(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok())
        .filter(|number| Pid::from_raw(*number).and_then(Process::new).is_none())
        .collect();
    numbers.dedup();
    for number in numbers {
        let name = format!("{PREFIX}{number}");
        let folder = std::env::temp_dir().join(&name);
        let is_own = std::fs::symlink_metadata(&folder).is_ok_and(|found| found.is_dir() && found.uid() == 0);
        if is_own {
            let _ = end(&name, &folder);
        }
    }
}
