//! What a lab is made of.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::image::Image;
use crate::kernel::{Kernel, Module};
use crate::{Device, Report, Running, program};

/// Guests of a lab at most.
pub const GUESTS_MAX: u8 = 8;
/// Devices of a guest at most, of a kind that it can have several of.
const DEVICES_MAX: u8 = 4;
/// Cores of each node of a guest's memory, where it has several.
const CORES_PER_NODE: u8 = 2;
/// What a build puts into one folder: the command, its library, and helpers of scripts.
pub const CROSSLANE_FILES: [&str; 7] =
    ["crosslane", "libcrosslane.so", "lab-copy", "lab-link", "lab-spoil", "lab-stream", "lab-word"];
/// Long enough for guests that share a core with others.
const LIMIT: Duration = Duration::from_secs(120);

/// A guest, by its place: the first is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node(pub(crate) u8);

impl Node {
    /// The first guest.
    pub const A: Self = Self(0);
    /// The second.
    pub const B: Self = Self(1);
    /// The third.
    pub const C: Self = Self(2);
}

impl fmt::Display for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", char::from(b'a' + self.0))
    }
}

/// A lab to be run: guests, their device, their programs and their script.
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
    /// Two guests with 64 MiB of plain shared memory, and two minutes' time.
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

    /// How many guests there are.
    pub fn guests(mut self, guests: u8) -> Self {
        self.guests = guests;
        self
    }

    /// What they share.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// How many each guest has, all of the one memory, where our device server hands them out: a client of it each.
    pub fn devices(mut self, devices: u8) -> Self {
        self.devices = devices;
        self
    }

    /// How much of it; a power of two.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.size_bytes = bytes;
        self
    }

    /// Doorbells of each guest.
    pub fn vectors(mut self, vectors: u32) -> Self {
        self.vectors = vectors;
        self
    }

    /// The socket of a device server that is there already, as of `crosslane up` on this machine: the lab starts none.
    pub fn device_server(mut self, socket: &Path) -> Self {
        self.device_server = Some(socket.to_owned());
        self
    }

    /// A guest's own memory.
    pub fn ram_bytes(mut self, bytes: u64) -> Self {
        self.ram_bytes = bytes;
        self
    }

    /// Nodes that a guest's own memory is divided into, two cores each. Unless said there is one, with one core.
    pub fn memory_nodes(mut self, nodes: u8) -> Self {
        self.memory_nodes = nodes;
        self
    }

    /// Gives the two guests a network device each, on a line between them: 10.77.0.1 and 10.77.0.2.
    pub fn network(mut self) -> Self {
        self.has_network = true;
        self
    }

    /// A program of the host, by name.
    pub fn program(mut self, name: &str) -> Self {
        self.names.push(name.to_owned());
        self
    }

    /// A program or a library of our making, by path; it gets its file name in the guest's PATH.
    pub fn built(mut self, path: &Path) -> Self {
        self.programs.push(path.to_owned());
        self
    }

    /// The command `crosslane` and what belongs to it, from the folder of a build.
    pub fn crosslane(mut self, folder: &Path) -> Self {
        self.programs.extend(CROSSLANE_FILES.map(|name| folder.join(name)));
        self
    }

    /// A file of the host at a path of the guests.
    pub fn file(mut self, from: &Path, to: &str) -> Self {
        self.files.push((from.to_owned(), to.to_owned()));
        self
    }

    /// What every guest runs.
    pub fn script(mut self, text: &str) -> Self {
        self.script = text.to_owned();
        self
    }

    /// How long it may take in all.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Shows what guests print while they do.
    pub fn echo(mut self) -> Self {
        self.echo = true;
        self
    }

    /// Ends everything when this becomes true.
    pub fn interrupted_by(mut self, flag: Arc<AtomicBool>) -> Self {
        self.interrupt = flag;
        self
    }

    /// Runs the script to its end in all guests.
    pub fn run(self) -> Result<Report> {
        self.start()?.finish()
    }

    /// Boots the guests, whose scripts begin.
    pub fn start(self) -> Result<Running> {
        if !(1..=GUESTS_MAX).contains(&self.guests) {
            bail!("{} guests: 1 to {GUESTS_MAX} are possible; try --guests 2", self.guests);
        }
        if self.has_network && self.guests != 2 {
            bail!("{} guests: a line joins two; leave --network out, or try --guests 2", self.guests);
        }
        let devices_max = if self.device.is_served() { DEVICES_MAX } else { 1 };
        if !(1..=devices_max).contains(&self.devices) {
            let (devices, name) = (self.devices, self.device.name());
            bail!("{devices} devices of kind '{name}' in each guest: 1 to {devices_max} are possible");
        }
        Running::start(self)
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> + use<> {
        (0..self.guests).map(Node)
    }

    /// The image that all guests boot.
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

    /// QEMU's words for one guest.
    pub(crate) fn arguments(&self, node: Node, kernel: &Kernel, image: &Path, modules: &[Module]) -> Vec<String> {
        let nodes: Vec<String> = self.nodes().map(|node| node.to_string()).collect();
        let modules: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
        let words = [
            "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable".to_owned(),
            self.device.kernel_words().to_owned(),
            format!("NODE={node} NODES={} DEVICE_KIND={}", nodes.join(","), self.device.name()),
            if self.has_network { format!("NETWORK=10.77.0.{}", node.0 + 1) } else { String::new() },
            format!("MODULES={}", modules.join(",")),
        ];
        let ram = format!("{}M{}", self.ram_bytes >> 20, self.device.memory_words(self.ram_bytes, self.size_bytes));
        let image = image.display().to_string();
        let kernel = kernel.image().display().to_string();
        let words = words.join(" ");
        let fixed = ["-nodefaults", "-nic", "none", "-display", "none", "-no-reboot", "-cpu", "max"];
        let chosen =
            ["-machine", self.device.machine(), "-m", &ram, "-kernel", &kernel, "-initrd", &image, "-append", &words];
        fixed.into_iter().chain(chosen).map(str::to_owned).chain(self.memory_words()).collect()
    }

    /// Kernel modules that a guest needs, those they depend on not named.
    pub(crate) fn modules(&self) -> Vec<&'static str> {
        let network: &[&str] = if self.has_network { &["virtio_pci", "virtio_net"] } else { &[] };
        self.device.modules().iter().chain(network).copied().collect()
    }

    /// QEMU's words for a network device: what it sends are datagrams between two sockets in a folder.
    pub(crate) fn network_words(node: Node, folder: &Path) -> [String; 4] {
        let socket = |node: u8| folder.join(format!("line-{node}")).display().to_string();
        let (own, other) = (socket(node.0), socket(1 - node.0));
        let ends = format!("local.type=unix,local.path={own},remote.type=unix,remote.path={other}");
        let line = format!("dgram,id=line,{ends}");
        [
            "-netdev".to_owned(),
            line,
            "-device".to_owned(),
            format!("virtio-net-pci,netdev=line,mac=52:54:00:77:00:0{}", node.0 + 1),
        ]
    }

    /// QEMU's words for several nodes of memory.
    fn memory_words(&self) -> Vec<String> {
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

/// Where a program lies in a guest: what was asked for comes before busybox's own.
fn in_path(path: &Path) -> String {
    format!("/usr/bin/{}", path.file_name().unwrap_or_default().to_string_lossy())
}
