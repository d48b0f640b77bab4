//! The description of a lab and QEMU's arguments for it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;

use crate::device::Device;
use crate::image::Image;
use crate::kernel::{Kernel, Module};
use crate::node::Node;
use crate::program;

/// Maximum number of guests.
pub const GUESTS_MAX: u8 = 8;
/// Cores of each NUMA node of a guest with several NUMA nodes.
const CORES_PER_NODE: u8 = 2;
/// The files of a build that are copied into a guest: the command, its library, and helpers for scripts.
pub const CROSSLANE_FILES: [&str; 7] =
    ["crosslane", "libcrosslane.so", "lab-copy", "lab-link", "lab-spoil", "lab-stream", "lab-word"];
/// Default time limit, long enough for guests that share a core with other processes.
const LIMIT: Duration = Duration::from_secs(120);

/// The description of a lab: guests, their device, their programs and their script.
#[derive(Clone, Debug)]
pub struct Lab {
    pub(crate) guests: u8,
    pub(crate) device: Device,
    pub(crate) devices: u8,
    pub(crate) size_bytes: u64,
    pub(crate) vectors: u32,
    pub(crate) ram_bytes: u64,
    pub(crate) memory_nodes: u8,
    pub(crate) has_network: bool,
    pub(crate) limit: Duration,
    pub(crate) echo: bool,
    pub(crate) interrupt: Arc<AtomicBool>,
    pub(crate) device_server: Option<PathBuf>,
    programs: Vec<PathBuf>,
    names: Vec<String>,
    files: Vec<(PathBuf, String)>,
    script: String,
}

impl Default for Lab {
    fn default() -> Self {
        Self::new()
    }
}

impl Lab {
    /// Returns a lab of two guests with 64 MiB of plain shared memory and a time limit of two minutes.
    pub fn new() -> Self {
        Self {
            guests: 2,
            device: Device::Plain,
            devices: 1,
            size_bytes: 64 << 20,
            vectors: 4,
            ram_bytes: 512 << 20,
            memory_nodes: 1,
            has_network: false,
            limit: LIMIT,
            echo: false,
            interrupt: Arc::default(),
            device_server: None,
            programs: Vec::new(),
            names: Vec::new(),
            files: Vec::new(),
            script: String::new(),
        }
    }

    /// Sets the number of guests.
    pub fn guests(mut self, guests: u8) -> Self {
        self.guests = guests;
        self
    }

    /// Sets the device that the guests share.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Sets the number of devices of each guest, all with the same memory. More than one needs a device that the device
    /// server provides; each is a client of the server.
    pub fn devices(mut self, devices: u8) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the size of the shared memory, a power of two.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.size_bytes = bytes;
        self
    }

    /// Sets the number of doorbells of each guest.
    pub fn vectors(mut self, vectors: u32) -> Self {
        self.vectors = vectors;
        self
    }

    /// Uses the device server at `socket`, for example that of `crosslane up` on this machine, instead of starting one.
    pub fn device_server(mut self, socket: &Path) -> Self {
        self.device_server = Some(socket.to_owned());
        self
    }

    /// Sets the size of the private memory of each guest.
    pub fn ram_bytes(mut self, bytes: u64) -> Self {
        self.ram_bytes = bytes;
        self
    }

    /// Sets the number of NUMA nodes of a guest, with two cores each. The default is one node with one core.
    pub fn memory_nodes(mut self, nodes: u8) -> Self {
        self.memory_nodes = nodes;
        self
    }

    /// Connects two guests by a network, with one network device each: 10.77.0.1 and 10.77.0.2.
    pub fn network(mut self) -> Self {
        self.has_network = true;
        self
    }

    /// Adds a program of the host, by name.
    pub fn program(mut self, name: &str) -> Self {
        self.names.push(name.to_owned());
        self
    }

    /// Adds a built program or library, by path. In the guest it is in PATH under its file name.
    pub fn built(mut self, path: &Path) -> Self {
        self.programs.push(path.to_owned());
        self
    }

    /// Adds the command `crosslane` and the files that it needs, from the folder of a build.
    pub fn crosslane(mut self, folder: &Path) -> Self {
        self.programs.extend(CROSSLANE_FILES.map(|name| folder.join(name)));
        self
    }

    /// Adds a file of the host at a path in the guests.
    pub fn file(mut self, from: &Path, to: &str) -> Self {
        self.files.push((from.to_owned(), to.to_owned()));
        self
    }

    /// Sets the script that every guest runs.
    pub fn script(mut self, text: &str) -> Self {
        self.script = text.to_owned();
        self
    }

    /// Sets the time limit of the whole lab.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Prints the guests' output as it arrives.
    pub fn echo(mut self) -> Self {
        self.echo = true;
        self
    }

    /// Ends the lab when `flag` becomes true.
    pub fn interrupted_by(mut self, flag: Arc<AtomicBool>) -> Self {
        self.interrupt = flag;
        self
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> + use<> {
        (0..self.guests).map(Node)
    }

    /// Builds the image that all guests boot.
    pub(crate) fn image(&self, modules: &[Module]) -> Result<OwnedFd> {
        let mut image = Image::default();
        image.script("/init", include_str!("../guest/init.sh"))?;
        image.file("/lab/functions", include_bytes!("../guest/functions.sh"))?;
        image.file("/lab/script", self.script.as_bytes())?;
        image.file("/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")?;
        image.file("/etc/group", b"root:x:0:\nnogroup:x:65534:\n")?;
        image.file("/etc/hosts", self.hosts().as_bytes())?;
        let busybox = program::find("busybox").map_err(|error| error.context("install busybox-static"))?;
        image.program(&busybox, "/bin/busybox", false)?;
        for name in &self.names {
            let path = program::find(name)?;
            image.program(&path, &in_path(&path), name.contains('/'))?;
        }
        for path in &self.programs {
            image.program(path, &in_path(path), true)?;
        }
        for (from, to) in &self.files {
            image.copy(from, to)?;
        }
        for (name, code) in modules {
            image.file(&format!("/lib/modules/{name}"), code)?;
        }
        image.finish()
    }

    fn hosts(&self) -> String {
        let nodes = self.nodes().map(|node| format!("127.77.0.{} {node}\n", node.0 + 1));
        format!("127.0.0.1 localhost\n{}", nodes.collect::<String>())
    }

    /// Returns QEMU's arguments for one guest.
    pub(crate) fn arguments(&self, node: Node, kernel: &Kernel, image: &Path, modules: &[Module]) -> Vec<String> {
        let nodes: Vec<String> = self.nodes().map(|node| node.to_string()).collect();
        let modules: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
        let parameters = [
            "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable".to_owned(),
            self.device.kernel_parameters().to_owned(),
            format!("NODE={node} NODES={} DEVICE_KIND={}", nodes.join(","), self.device.name()),
            if self.has_network { format!("NETWORK=10.77.0.{}", node.0 + 1) } else { String::new() },
            format!("MODULES={}", modules.join(",")),
        ];
        let ram = format!("{}M{}", self.ram_bytes >> 20, self.device.memory_arguments(self.ram_bytes, self.size_bytes));
        let image = image.display().to_string();
        let kernel = kernel.image().display().to_string();
        let append = parameters.join(" ");
        let constant = ["-nodefaults", "-nic", "none", "-display", "none", "-no-reboot", "-cpu", "max"];
        let specific =
            ["-machine", self.device.machine(), "-m", &ram, "-kernel", &kernel, "-initrd", &image, "-append", &append];
        constant.into_iter().chain(specific).map(str::to_owned).chain(self.memory_arguments()).collect()
    }

    /// Returns the kernel modules that a guest needs, without their dependencies.
    pub(crate) fn modules(&self) -> Vec<&'static str> {
        let network: &[&str] = if self.has_network { &["virtio_pci", "virtio_net"] } else { &[] };
        // A machine loads it when a program or a proxy looks a connection up; a guest has no such loader.
        let look_ups = &["tcp_diag"];
        self.device.modules().iter().chain(network).chain(look_ups).copied().collect()
    }

    /// Returns QEMU's arguments for a network device, which sends frames as datagrams between two sockets in a folder.
    pub(crate) fn network_arguments(node: Node, folder: &Path) -> [String; 4] {
        let socket = |node: u8| folder.join(format!("line-{node}")).display().to_string();
        let (own, other) = (socket(node.0), socket(1 - node.0));
        let endpoints = format!("local.type=unix,local.path={own},remote.type=unix,remote.path={other}");
        [
            "-netdev".to_owned(),
            format!("dgram,id=line,{endpoints}"),
            "-device".to_owned(),
            format!("virtio-net-pci,netdev=line,mac=52:54:00:77:00:0{}", node.0 + 1),
        ]
    }

    /// Returns QEMU's arguments for several NUMA nodes.
    fn memory_arguments(&self) -> Vec<String> {
        let nodes = self.memory_nodes;
        if nodes <= 1 {
            return Vec::new();
        }
        let node_mib = (self.ram_bytes >> 20) / u64::from(nodes);
        let of_node = |node: u8| {
            let (first, last) = (node * CORES_PER_NODE, (node + 1) * CORES_PER_NODE - 1);
            let backend = format!("memory-backend-ram,id=node{node},size={node_mib}M");
            let numa = format!("node,nodeid={node},cpus={first}-{last},memdev=node{node}");
            ["-object".to_owned(), backend, "-numa".to_owned(), numa]
        };
        let cores = format!("{},sockets={nodes},cores={CORES_PER_NODE}", nodes * CORES_PER_NODE);
        let cores = ["-smp".to_owned(), cores];
        cores.into_iter().chain((0..nodes).flat_map(of_node)).collect()
    }
}

/// Returns the path of a program in a guest. The requested programs precede those of busybox in PATH.
fn in_path(path: &Path) -> String {
    format!("/usr/bin/{}", path.file_name().unwrap_or_default().to_string_lossy())
}
