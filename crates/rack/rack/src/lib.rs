//! The rack file: nodes, the device that joins them, the partitions of its windows, and access rules.
//!
//! A [`Rack`] holds the keys of a file, checked as far as possible without examining the machine. A [`RackFile`] keeps
//! the text as well, so that a later error, such as a device that is missing or too small, can name the line
//! ([`RackFile::error_at`]). The text may also be that of keys in etcd, one for each node. [`Places`] lists the paths
//! of the sockets, logs and directories of a running rack.
//!
//! Nothing here does I/O beyond reading files. `docs/rack.md` explains every key.

mod access;
mod address;
mod change;
mod check;
mod cut;
mod file;
mod keys;
mod places;
mod ports;
mod text;
mod words;

use std::net::{IpAddr, SocketAddr};

use config::{bytes, nanoseconds};
use serde::Deserialize;

pub use access::AccessRule;
pub use change::Change;
pub use cut::{Cut, SPAN_BYTES, SPANS_MAX, Spans, TIMED_SPAN_BYTES};
pub use file::{RackError, RackFile};
pub use keys::{LEASES, is_key};
pub use places::{NodePlaces, Places};
pub use ports::PortList;
pub use words::{Access, Backend, Class, Coherence, PciMode, Timing, Trust};

/// The version of rack files that this release reads and writes.
pub const VERSION: u32 = 1;
/// Nodes of a rack at most: each has a slot on the device.
pub const NODES_MAX: usize = 32;
/// Data partitions of a window at most, all classes together.
pub const PARTITIONS_MAX: usize = 64;
/// Access rules and the ranges of ports in them at most, all together: they travel to each proxy in one message.
pub const ACCESS_PARTS_MAX: usize = 1024;
/// Bytes of partition 0, in which the monitors talk.
pub const CONTROL_PARTITION_BYTES: u64 = 64 << 10;
/// A data partition has at least this.
pub const DATA_PARTITION_BYTES_MIN: u64 = 64 << 10;
/// The same where links are modelled: stores under way take more room than where they arrive.
pub const MODELLED_PARTITION_BYTES_MIN: u64 = (1 << 20) + PAGE_BYTES;
/// Windows are whole pages.
pub const PAGE_BYTES: u64 = 4096;
/// A window's bytes at most: what an offset in a device of [`NODES_MAX`] nodes can say with room to spare.
pub const WINDOW_BYTES_MAX: u64 = 64 << 30;

/// What a rack file says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rack {
    /// [`VERSION`], checked before anything else is looked at.
    pub version: u32,
    /// Names the directory of the running rack, with a hash of the file's path.
    #[serde(default = "name_default")]
    pub name: String,
    /// Who writes windows: proxies, or the programs themselves.
    #[serde(default)]
    pub trust: Trust,
    /// Whether connections outlive their link over kernel TCP.
    #[serde(default)]
    pub failover: bool,
    /// Where proxies listen for those of other nodes that have lost a link; any port without it.
    #[serde(default)]
    pub failover_port: Option<u16>,
    /// What happens to a connection that no access rule matches.
    #[serde(default)]
    pub access_default: Access,
    /// What joins the nodes.
    pub device: Device,
    /// How fast the links pretend to be; as fast as the memory without it.
    #[serde(default)]
    pub link: Option<LinkTiming>,
    /// How proxies work, where that is not as ever.
    #[serde(default)]
    pub proxy: Proxy,
    /// How long things may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// How the windows are cut; one latency and one bulk partition without it.
    #[serde(default = "partitions_default")]
    pub partitions: Vec<Partitions>,
    /// The nodes. A node's place in this list is its slot on the device.
    pub nodes: Vec<Node>,
    /// Who may connect to what; the first rule that matches decides.
    #[serde(default)]
    pub access: Vec<AccessRule>,
}

/// What joins the nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// How nodes reach it, unless a node says otherwise.
    pub backend: Backend,
    /// How a PCI device is opened.
    #[serde(default)]
    pub mode: Option<PciMode>,
    /// Whether the caches of all hosts of a DAX device see each other's stores.
    #[serde(default)]
    pub coherence: Option<Coherence>,
    /// How many nodes the device has room for; as many as there are without it.
    #[serde(default)]
    pub slots: Option<u8>,
    /// Bytes of the window from each node to each other.
    #[serde(default = "window_default", deserialize_with = "bytes")]
    pub window_bytes: u64,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The address that programs connect to.
    #[serde(deserialize_with = "address::ip")]
    pub address: IpAddr,
    /// How this node reaches the device, where that differs from the others.
    #[serde(default)]
    pub backend: Option<Backend>,
    /// Its PCI address, or the path of its DAX device.
    #[serde(default)]
    pub device: Option<String>,
    /// Where metrics are served besides the unix socket.
    #[serde(default, deserialize_with = "address::loopback_port")]
    pub metrics: Option<SocketAddr>,
}

/// How fast links pretend to be.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkTiming {
    /// The link that is modelled.
    pub timing: Timing,
    /// Its delay one way, where that differs from the model's.
    #[serde(default, deserialize_with = "some_nanoseconds")]
    pub one_way_ns: Option<f64>,
}

/// How proxies work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Proxy {
    /// Bytes that a connection sends before it is another's turn; 0 is without slices.
    #[serde(deserialize_with = "some_bytes")]
    pub slice_bytes: Option<u64>,
}

/// How long things may take.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// A program's question whether another node listens.
    #[serde(deserialize_with = "nanoseconds")]
    pub query_ns: f64,
    /// Silence of a peer after which its link counts as lost.
    #[serde(deserialize_with = "nanoseconds")]
    pub silence_ns: f64,
    /// How long `crosslane up` waits for links.
    #[serde(deserialize_with = "nanoseconds")]
    pub up_ns: f64,
    /// How long connections whose programs store into windows wait for a node whose monitor or proxy has died.
    #[serde(deserialize_with = "nanoseconds")]
    pub return_ns: f64,
    /// How long a node of which etcd hears nothing keeps its lease.
    #[serde(deserialize_with = "nanoseconds")]
    pub lease_ns: f64,
}

/// Some partitions of one class.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partitions {
    /// What they are for.
    pub class: Class,
    /// How many.
    #[serde(default = "count_default", deserialize_with = "partition_count")]
    pub count: u16,
    /// The core that owns each; any core without it.
    #[serde(default)]
    pub cores: Option<Vec<u16>>,
}

/// One data partition of every window. Its place in [`Rack::data_partitions`] is its number, less one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// What it is for.
    pub class: Class,
    /// The core that owns it.
    pub core: Option<u16>,
}

impl Default for Timeouts {
    fn default() -> Self {
        // A monitor on a busy machine was seen to wait for a processor for more than a second.
        Self { query_ns: 1e9, silence_ns: 3e9, up_ns: 1e10, return_ns: 1e10, lease_ns: 1e10 }
    }
}

fn name_default() -> String {
    "rack".to_owned()
}

fn window_default() -> u64 {
    4 << 20
}

/// Room for a hundred connections.
const WINDOW_BYTES_DIRECT: u64 = 32 << 20;

fn count_default() -> u16 {
    1
}

/// Names of an example's nodes: a letter, then two, as columns of a sheet are named.
fn example_name(index: usize) -> String {
    const LETTERS: usize = 26;
    let letter = |place: usize| char::from(b'a' + (place % LETTERS) as u8);
    let first = (index / LETTERS).checked_sub(1).map(letter);
    first.into_iter().chain([letter(index)]).collect()
}

fn partitions_default() -> Vec<Partitions> {
    [Class::Latency, Class::Bulk].map(|class| Partitions { class, count: 1, cores: None }).to_vec()
}

/// Also of numbers that no `u16` holds the error is to say how many there can be.
fn partition_count<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    use serde::de::Error;
    let count = i64::deserialize(deserializer)?;
    if count < 1 {
        let what = format!("{count} partitions; ask for at least 1, or leave this entry out");
        return Err(D::Error::custom(what));
    }
    let fits = u16::try_from(count).ok().filter(|count| usize::from(*count) <= PARTITIONS_MAX);
    fits.ok_or_else(|| D::Error::custom(format!("{count} partitions; at most {PARTITIONS_MAX} in all: lower it")))
}

fn some_bytes<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    bytes(deserializer).map(Some)
}

fn some_nanoseconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    nanoseconds(deserializer).map(Some)
}

impl Rack {
    /// The rack of `crosslane rack example`: nodes a, b, ..., z, aa, ab, ... at 127.77.0.1, 127.77.0.2, ...; a device
    /// path of the usual form for each where the backend wants one.
    ///
    /// # Panics
    /// With fewer than 2 nodes or more than [`NODES_MAX`].
    pub fn example(nodes: usize, backend: Backend, timing: Option<Timing>, trust: Trust) -> Self {
        assert!((2..=NODES_MAX).contains(&nodes), "an example of {nodes} nodes");
        let node = |index: usize| Node {
            name: example_name(index),
            address: IpAddr::from([127, 77, 0, index as u8 + 1]),
            backend: None,
            device: backend.example_device().map(str::to_owned),
            metrics: None,
        };
        Self {
            version: VERSION,
            name: name_default(),
            trust,
            failover: false,
            failover_port: None,
            access_default: Access::Allow,
            device: Device {
                backend,
                mode: (backend == Backend::Pci).then_some(PciMode::Sysfs),
                coherence: (backend == Backend::Dax).then_some(Coherence::Coherent),
                slots: None,
                // What hardware has is its own affair.
                window_bytes: match (backend, trust) {
                    (Backend::Shm, Trust::Direct) => WINDOW_BYTES_DIRECT,
                    _ => window_default(),
                },
            },
            link: timing.map(|timing| LinkTiming { timing, one_way_ns: None }),
            proxy: Proxy::default(),
            timeouts: Timeouts::default(),
            partitions: partitions_default(),
            nodes: (0..nodes).map(node).collect(),
            access: Vec::new(),
        }
    }

    /// The node of that name, with its slot.
    pub fn node(&self, name: &str) -> Option<(usize, &Node)> {
        self.nodes.iter().enumerate().find(|(_, node)| node.name == name)
    }

    /// The slot of the node with that address.
    pub fn slot_of(&self, address: IpAddr) -> Option<usize> {
        self.nodes.iter().position(|node| node.address == address.to_canonical())
    }

    /// How many nodes the device has room for.
    pub fn slots(&self) -> usize {
        self.device.slots.map_or(self.nodes.len(), usize::from)
    }

    /// How a node reaches the device.
    pub fn backend_of(&self, node: &Node) -> Backend {
        node.backend.unwrap_or(self.device.backend)
    }

    /// Whether what a node stores is seen by the others without their dropping what they have cached of it.
    pub fn is_coherent(&self) -> bool {
        self.device.coherence != Some(Coherence::NonCoherent)
    }

    /// The data partitions of every window, in order.
    pub fn data_partitions(&self) -> Vec<Partition> {
        let of = |some: &Partitions| {
            let (class, cores) = (some.class, some.cores.clone());
            let core = move |index| cores.as_ref().and_then(|cores| cores.get(index).copied());
            (0..usize::from(some.count)).map(move |index| Partition { class, core: core(index) })
        };
        self.partitions.iter().flat_map(of).collect()
    }

    /// The ports at which a proxy listens for those of other nodes, one for each thread, where the file names them.
    /// `None`: there are not so many.
    pub fn failover_ports(&self) -> Option<std::ops::RangeInclusive<u16>> {
        let first = self.failover_port?;
        let latency = self.data_partitions().into_iter().filter(|partition| partition.class == Class::Latency);
        let threads = latency.map(|partition| partition.core).collect::<std::collections::BTreeSet<_>>().len();
        let last = first.checked_add(u16::try_from(threads).ok()?.saturating_sub(1))?;
        Some(first..=last)
    }

    /// Whether `from` may connect to a port of `to`, both being slots.
    pub fn allows(&self, from: usize, to: usize, port: u16) -> bool {
        let (Some(from), Some(to)) = (self.nodes.get(from), self.nodes.get(to)) else { return false };
        let rule = self.access.iter().find(|rule| rule.matches(&from.name, &to.name, port));
        rule.map_or(self.access_default, |rule| rule.action) == Access::Allow
    }

    /// A number that is the same for two files when nodes that use them can work together: it covers nodes, slots,
    /// windows, partitions, the model of the link, trust and failover, and none of what is a node's own business.
    pub fn digest(&self) -> u64 {
        let mut text = format!("{} {} {} {}\n", self.slots(), self.device.window_bytes, self.trust, self.failover);
        for node in &self.nodes {
            text += &format!("{} {}\n", node.name, node.address);
        }
        for partition in self.data_partitions() {
            text += &format!("{}\n", partition.class);
        }
        // Stores under way lie in the windows in another form than stores that are there at once.
        if let Some(link) = &self.link {
            text += &format!("{}\n", link.timing);
        }
        places::hash(text.as_bytes())
    }
}
