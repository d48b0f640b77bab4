//! Formats a rack as the text of its file, or of its keys in etcd.

use std::fmt::{Display, Formatter, Result};

use crate::{AccessRule, Device, LinkTiming, Node, Partitions, Proxy, Publish, Rack, Timeouts};

impl Display for Rack {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "# A rack of Crosslane. docs/rack.md explains every key.")?;
        write_head(f, self)?;
        write_access_default(f, self)?;
        write_device(f, &self.device)?;
        if let Some(link) = &self.link {
            writeln!(f, "\n[link]")?;
            write_link(f, link)?;
        }
        write_proxy(f, &self.proxy)?;
        write_timeouts(f, &self.timeouts)?;
        self.partitions.iter().try_for_each(|entry| write_partitions(f, entry))?;
        for node in &self.nodes {
            writeln!(f, "\n[[nodes]]\nname = {}", quoted(&node.name))?;
            write_node(f, node)?;
        }
        self.access.iter().try_for_each(|rule| write_rule(f, rule))
    }
}

/// A part of a rack, formatted as the value of its key in etcd.
pub(crate) enum RackPart<'a> {
    /// Everything that has no key of its own.
    Common(&'a Rack),
    /// The access rules.
    Access(&'a Rack),
    /// The link model.
    Link(&'a LinkTiming),
    /// A node and its slot.
    Node(usize, &'a Node),
}

impl Display for RackPart<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Common(rack) => {
                write_head(f, rack)?;
                write_device(f, &rack.device)?;
                write_proxy(f, &rack.proxy)?;
                write_timeouts(f, &rack.timeouts)?;
                rack.partitions.iter().try_for_each(|entry| write_partitions(f, entry))
            }
            Self::Access(rack) => {
                write_access_default(f, rack)?;
                rack.access.iter().try_for_each(|rule| write_rule(f, rule))
            }
            Self::Link(link) => write_link(f, link),
            Self::Node(slot, node) => {
                writeln!(f, "slot = {slot}")?;
                write_node(f, node)
            }
        }
    }
}

fn write_head(f: &mut Formatter<'_>, rack: &Rack) -> Result {
    writeln!(f, "version = {}", rack.version)?;
    writeln!(f, "name = {}", quoted(&rack.name))?;
    writeln!(f, "trust = \"{}\"                  # programs that write windows: \"proxy\" or \"direct\"", rack.trust)?;
    writeln!(
        f,
        "failover = {}                 # whether connections of a lost link move to kernel TCP",
        rack.failover
    )?;
    if let Some(port) = rack.failover_port {
        writeln!(f, "failover_port = {port}             # first port at which proxies accept these connections")?;
    }
    match &rack.publish {
        Publish::Nothing => Ok(()),
        publish => writeln!(f, "publish = {publish}     # listeners of other nodes for programs without the library"),
    }
}

fn write_access_default(f: &mut Formatter<'_>, rack: &Rack) -> Result {
    writeln!(f, "access_default = \"{}\"         # action if no [[access]] rule matches", rack.access_default)
}

fn write_device(f: &mut Formatter<'_>, device: &Device) -> Result {
    writeln!(f, "\n[device]\nbackend = \"{}\"                  # \"shm\", \"pci\" or \"dax\"", device.backend)?;
    if let Some(mode) = device.mode {
        writeln!(f, "mode = \"{mode}\"                   # \"sysfs\", or \"vfio\" for doorbell interrupts")?;
    }
    if let Some(coherence) = device.coherence {
        writeln!(f, "coherence = \"{coherence}\"           # \"coherent\" or \"non-coherent\"")?;
    }
    if let Some(slots) = device.slots {
        writeln!(f, "slots = {slots}                        # number of nodes that the device has room for")?;
    }
    writeln!(f, "window_bytes = {}           # of the window from each node to each other node", device.window_bytes)
}

fn write_link(f: &mut Formatter<'_>, link: &LinkTiming) -> Result {
    writeln!(f, "timing = \"{}\"               # links are slowed down to this model", link.timing)?;
    match link.one_way_ns {
        Some(one_way_ns) => writeln!(f, "one_way_ns = {one_way_ns}"),
        None => Ok(()),
    }
}

fn write_proxy(f: &mut Formatter<'_>, proxy: &Proxy) -> Result {
    match proxy.slice_bytes {
        Some(bytes) => {
            writeln!(
                f,
                "\n[proxy]\nslice_bytes = {bytes}              # bytes that a connection sends before another is served"
            )
        }
        None => Ok(()),
    }
}

fn write_timeouts(f: &mut Formatter<'_>, timeouts: &Timeouts) -> Result {
    writeln!(f, "\n[timeouts]")?;
    writeln!(f, "query_ns = {:<18} # limit of a program's query for a remote listener", timeouts.query_ns)?;
    writeln!(f, "silence_ns = {:<16} # silence of a peer after which its link counts as lost", timeouts.silence_ns)?;
    writeln!(f, "up_ns = {:<21} # how long 'crosslane up' waits for links", timeouts.up_ns)?;
    if timeouts.return_ns != Timeouts::default().return_ns {
        writeln!(f, "return_ns = {:<17} # how long direct connections wait for a node that died", timeouts.return_ns)?;
    }
    if timeouts.lease_ns == Timeouts::default().lease_ns {
        return Ok(());
    }
    writeln!(f, "lease_ns = {:<18} # time to live of a node's lease in etcd", timeouts.lease_ns)
}

fn write_partitions(f: &mut Formatter<'_>, entry: &Partitions) -> Result {
    writeln!(f, "\n[[partitions]]\nclass = \"{}\"\ncount = {}", entry.class, entry.count)?;
    match &entry.cores {
        Some(cores) => writeln!(f, "cores = {cores:?}"),
        None => Ok(()),
    }
}

fn write_node(f: &mut Formatter<'_>, node: &Node) -> Result {
    writeln!(f, "address = \"{}\"", node.address)?;
    if let Some(backend) = node.backend {
        writeln!(f, "backend = \"{backend}\"")?;
    }
    if let Some(device) = &node.device {
        writeln!(f, "device = {}", quoted(device))?;
    }
    if let Some(metrics) = node.metrics {
        writeln!(f, "metrics = \"{metrics}\"")?;
    }
    match &node.publish {
        Some(publish) => writeln!(f, "publish = {publish}"),
        None => Ok(()),
    }
}

fn write_rule(f: &mut Formatter<'_>, rule: &AccessRule) -> Result {
    writeln!(f, "\n[[access]]\nfrom = {}\nto = {}", quoted(&rule.from), quoted(&rule.to))?;
    if let Some(ports) = &rule.ports {
        writeln!(f, "ports = \"{ports}\"")?;
    }
    writeln!(f, "action = \"{}\"", rule.action)
}

/// Returns a TOML basic string. Names contain nothing to escape, and paths no control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
