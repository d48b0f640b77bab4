//! The data model of a rack file: the rack, its device, links, partitions and nodes.

use std::net::{IpAddr, SocketAddr};

use config::{bytes, nanoseconds};
use serde::Deserialize;

use crate::access::AccessRule;
use crate::publish::Publish;
use crate::schema::{Access, Backend, Class, Coherence, PciMode, Timing, Trust};
use crate::{address, fnv};

/// Version of the rack file format that this release reads and writes.
pub const VERSION: u32 = 1;
/// Maximum number of nodes of a rack. Each node has a slot on the device.
pub const NODES_MAX: usize = 32;
/// Maximum number of data partitions of a window, all classes together.
pub const PARTITIONS_MAX: usize = 64;
/// Maximum number of access rules plus port ranges in them. All of them are sent to each proxy in one message.
pub const ACCESS_PARTS_MAX: usize = 1024;
/// Bytes of partition 0, which carries the control lanes of the monitors.
pub const CONTROL_PARTITION_BYTES: u64 = 64 << 10;
/// Minimum size of a data partition in bytes.
pub const DATA_PARTITION_BYTES_MIN: u64 = 64 << 10;
/// Minimum size of a data partition of a modelled link in bytes. Stores in flight need more room than stored data.
pub const MODELLED_PARTITION_BYTES_MIN: u64 = (1 << 20) + PAGE_BYTES;
/// Size of a page in bytes. The size of a window is a multiple of it.
pub const PAGE_BYTES: u64 = 4096;
/// Maximum size of a window in bytes. An offset in a device of [`NODES_MAX`] nodes can address that many, with a
/// margin.
pub const WINDOW_BYTES_MAX: u64 = 64 << 30;

/// A rack, as its file describes it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rack {
    /// [`VERSION`], checked before all other keys.
    pub version: u32,
    /// Name of the rack. With a hash of the file's path it forms the name of the run directory.
    #[serde(default = "name_default")]
    pub name: String,
    /// Who writes windows: the proxies, or the programs themselves.
    #[serde(default)]
    pub trust: Trust,
    /// Whether connections of a lost link continue over kernel TCP.
    #[serde(default)]
    pub failover: bool,
    /// First port at which proxies accept connections from proxies that have lost a link; any port if absent.
    #[serde(default)]
    pub failover_port: Option<u16>,
    /// Listeners of other nodes that programs without the library reach, on nodes that do not say otherwise.
    #[serde(default)]
    pub publish: Publish,
    /// Action for a connection that no access rule matches.
    #[serde(default)]
    pub access_default: Access,
    /// The device that joins the nodes.
    pub device: Device,
    /// Model that links are slowed down to; without it they are as fast as the memory.
    #[serde(default)]
    pub link: Option<LinkTiming>,
    /// Settings of proxies.
    #[serde(default)]
    pub proxy: Proxy,
    /// Timeouts.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// The data partitions of each window; one latency and one bulk partition if absent.
    #[serde(default = "partitions_default")]
    pub partitions: Vec<Partitions>,
    /// The nodes. The index of a node in this list is its slot on the device.
    pub nodes: Vec<Node>,
    /// Access rules; the first that matches decides.
    #[serde(default)]
    pub access: Vec<AccessRule>,
}

/// The device that joins the nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// How nodes reach the device, unless a node overrides it.
    pub backend: Backend,
    /// How a PCI device is opened.
    #[serde(default)]
    pub mode: Option<PciMode>,
    /// Whether the caches of all hosts of a DAX device are coherent.
    #[serde(default)]
    pub coherence: Option<Coherence>,
    /// Number of nodes that the device has room for; the number of nodes if absent.
    #[serde(default)]
    pub slots: Option<u8>,
    /// Bytes of the window from each node to each other node.
    #[serde(default = "window_default", deserialize_with = "bytes")]
    pub window_bytes: u64,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// Address that programs connect to.
    #[serde(deserialize_with = "address::ip")]
    pub address: IpAddr,
    /// How this node reaches the device, where it differs from the other nodes.
    #[serde(default)]
    pub backend: Option<Backend>,
    /// PCI address, or path of the DAX device.
    #[serde(default)]
    pub device: Option<String>,
    /// Address at which metrics are served in addition to the unix socket.
    #[serde(default, deserialize_with = "address::loopback_port")]
    pub metrics: Option<SocketAddr>,
    /// Listeners of other nodes that programs of this machine reach without the library, where they differ from the
    /// rack's.
    #[serde(default)]
    pub publish: Option<Publish>,
}

/// Model that links are slowed down to.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkTiming {
    /// The modelled link.
    pub timing: Timing,
    /// One-way delay in nanoseconds, if it differs from the model's.
    #[serde(default, deserialize_with = "some_nanoseconds")]
    pub one_way_ns: Option<f64>,
}

/// Settings of proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Proxy {
    /// Bytes that a connection sends before the proxy serves the next connection; 0 disables slicing.
    #[serde(deserialize_with = "some_bytes")]
    pub slice_bytes: Option<u64>,
}

/// Timeouts in nanoseconds.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Limit for the answer to a program's query for a listener of another node.
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
    /// How long a node keeps its lease in etcd without a keepalive.
    #[serde(deserialize_with = "nanoseconds")]
    pub lease_ns: f64,
}

/// Data partitions of one class.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partitions {
    /// Class of the partitions.
    pub class: Class,
    /// Number of partitions.
    #[serde(default = "count_default", deserialize_with = "partition_count")]
    pub count: u16,
    /// The core that owns each partition; any core if absent.
    #[serde(default)]
    pub cores: Option<Vec<u16>>,
}

/// A data partition of every window. Its number is its index in [`Rack::data_partitions`] plus one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Class of the partition.
    pub class: Class,
    /// The core that owns it.
    pub core: Option<u16>,
}

impl Default for Timeouts {
    fn default() -> Self {
        // A monitor on a busy machine was observed to wait more than a second for a CPU.
        Self { query_ns: 1e9, silence_ns: 3e9, up_ns: 1e10, return_ns: 1e10, lease_ns: 1e10 }
    }
}

pub(crate) fn name_default() -> String {
    "rack".to_owned()
}

fn window_default() -> u64 {
    4 << 20
}

/// Default size of windows in bytes with `trust = "direct"`: room for about a hundred connections.
const WINDOW_BYTES_DIRECT: u64 = 32 << 20;

fn count_default() -> u16 {
    1
}

/// Returns the name of an example's node: a, b, ..., z, aa, ab, ..., like the columns of a spreadsheet.
fn example_name(index: usize) -> String {
    const LETTERS: usize = 26;
    let letter = |index: usize| char::from(b'a' + (index % LETTERS) as u8);
    let first = (index / LETTERS).checked_sub(1).map(letter);
    first.into_iter().chain([letter(index)]).collect()
}

pub(crate) fn partitions_default() -> Vec<Partitions> {
    [Class::Latency, Class::Bulk].map(|class| Partitions { class, count: 1, cores: None }).to_vec()
}

/// Parses as `i64`, so that the error for a number outside `u16` also states the limit.
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
    /// Returns the rack of `crosslane rack example`: nodes a, b, ..., z, aa, ab, ... at 127.77.0.1, 127.77.0.2, ...,
    /// each with an example device where the backend needs one.
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
            publish: None,
        };
        Self {
            version: VERSION,
            name: name_default(),
            trust,
            failover: false,
            failover_port: None,
            publish: Publish::Nothing,
            access_default: Access::Allow,
            device: Device {
                backend,
                mode: (backend == Backend::Pci).then_some(PciMode::Sysfs),
                coherence: (backend == Backend::Dax).then_some(Coherence::Coherent),
                slots: None,
                // The size of hardware windows is not known here.
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

    /// Returns the node of that name and its slot.
    pub fn node(&self, name: &str) -> Option<(usize, &Node)> {
        self.nodes.iter().enumerate().find(|(_, node)| node.name == name)
    }

    /// Returns the slot of the node with that address.
    pub fn slot_of(&self, address: IpAddr) -> Option<usize> {
        self.nodes.iter().position(|node| node.address == address.to_canonical())
    }

    /// Returns the number of nodes that the device has room for.
    pub fn slots(&self) -> usize {
        self.device.slots.map_or(self.nodes.len(), usize::from)
    }

    /// Returns how a node reaches the device.
    pub fn backend_of(&self, node: &Node) -> Backend {
        node.backend.unwrap_or(self.device.backend)
    }

    /// Returns the listeners of other nodes that programs without the library reach on the machine of a node.
    pub fn publish_of<'a>(&'a self, node: &'a Node) -> &'a Publish {
        node.publish.as_ref().unwrap_or(&self.publish)
    }

    /// Returns whether other nodes see the stores of a node without flushing or invalidating caches.
    pub fn is_coherent(&self) -> bool {
        self.device.coherence != Some(Coherence::NonCoherent)
    }

    /// Returns the data partitions of every window, in order.
    pub fn data_partitions(&self) -> Vec<Partition> {
        let of = |entry: &Partitions| {
            let (class, cores) = (entry.class, entry.cores.clone());
            let core = move |index| cores.as_ref().and_then(|cores| cores.get(index).copied());
            (0..usize::from(entry.count)).map(move |index| Partition { class, core: core(index) })
        };
        self.partitions.iter().flat_map(of).collect()
    }

    /// Returns the configured ports at which a proxy accepts connections of other proxies after failover, one for each
    /// of its threads. `None` if no port is configured or the range exceeds 65535.
    pub fn failover_ports(&self) -> Option<std::ops::RangeInclusive<u16>> {
        let first = self.failover_port?;
        let latency = self.data_partitions().into_iter().filter(|partition| partition.class == Class::Latency);
        let threads = latency.map(|partition| partition.core).collect::<std::collections::BTreeSet<_>>().len();
        let last = first.checked_add(u16::try_from(threads).ok()?.saturating_sub(1))?;
        Some(first..=last)
    }

    /// Returns whether the node in slot `from` may connect to a port of the node in slot `to`.
    pub fn allows(&self, from: usize, to: usize, port: u16) -> bool {
        let (Some(from), Some(to)) = (self.nodes.get(from), self.nodes.get(to)) else { return false };
        let rule = self.access.iter().find(|rule| rule.matches(&from.name, &to.name, port));
        rule.map_or(self.access_default, |rule| rule.action) == Access::Allow
    }

    /// Returns a digest that is equal for two files whose nodes can work together. It covers nodes, slots, windows,
    /// partitions, the link model, trust and failover, and excludes settings that concern one node alone.
    pub fn digest(&self) -> u64 {
        let mut text = format!("{} {} {} {}\n", self.slots(), self.device.window_bytes, self.trust, self.failover);
        for node in &self.nodes {
            text += &format!("{} {}\n", node.name, node.address);
        }
        for partition in self.data_partitions() {
            text += &format!("{}\n", partition.class);
        }
        // The memory format of a modelled link differs: it contains stores in flight.
        if let Some(link) = &self.link {
            text += &format!("{}\n", link.timing);
        }
        fnv::hash(text.as_bytes())
    }
}
