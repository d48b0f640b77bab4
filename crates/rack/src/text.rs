//! A rack as the text of its file.

use std::fmt::{Display, Formatter, Result};

use crate::{LinkTiming, Node, Partitions, Rack, Timeouts};

impl Display for Rack {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "# A rack of Crosslane. docs/rack.md explains every key.")?;
        writeln!(f, "version = {}", self.version)?;
        writeln!(f, "name = {}", quoted(&self.name))?;
        writeln!(f, "trust = \"{}\"                  # who writes windows: \"proxy\" or \"direct\"", self.trust)?;
        writeln!(
            f,
            "failover = {}                 # whether connections move to kernel TCP when a link is lost",
            self.failover
        )?;
        if let Some(port) = self.failover_port {
            writeln!(f, "failover_port = {port}             # the first port at which proxies listen for that")?;
        }
        writeln!(
            f,
            "access_default = \"{}\"         # what happens where no [[access]] rule matches",
            self.access_default
        )?;
        writeln!(
            f,
            "\n[device]\nbackend = \"{}\"                  # \"shm\", \"pci\" or \"dax\"",
            self.device.backend
        )?;
        if let Some(mode) = self.device.mode {
            writeln!(f, "mode = \"{mode}\"                   # \"sysfs\", or \"vfio\" for doorbell interrupts")?;
        }
        if let Some(coherence) = self.device.coherence {
            writeln!(f, "coherence = \"{coherence}\"           # \"coherent\" or \"non-coherent\"")?;
        }
        writeln!(f, "window_bytes = {}           # from each node to each other", self.device.window_bytes)?;
        if let Some(link) = &self.link {
            write_link(f, link)?;
        }
        write_timeouts(f, &self.timeouts)?;
        self.partitions.iter().try_for_each(|some| write_partitions(f, some))?;
        self.nodes.iter().try_for_each(|node| write_node(f, node))?;
        for rule in &self.access {
            writeln!(f, "\n[[access]]\nfrom = {}\nto = {}", quoted(&rule.from), quoted(&rule.to))?;
            if let Some(ports) = &rule.ports {
                writeln!(f, "ports = \"{ports}\"")?;
            }
            writeln!(f, "action = \"{}\"", rule.action)?;
        }
        Ok(())
    }
}

fn write_link(f: &mut Formatter<'_>, link: &LinkTiming) -> Result {
    writeln!(f, "\n[link]\ntiming = \"{}\"               # links are slowed down to this model", link.timing)?;
    match link.one_way_ns {
        Some(one_way_ns) => writeln!(f, "one_way_ns = {one_way_ns}"),
        None => Ok(()),
    }
}

fn write_timeouts(f: &mut Formatter<'_>, timeouts: &Timeouts) -> Result {
    writeln!(f, "\n[timeouts]")?;
    writeln!(f, "query_ns = {:<18} # a program's question whether another node listens", timeouts.query_ns)?;
    writeln!(f, "silence_ns = {:<16} # of a peer, after which its link counts as lost", timeouts.silence_ns)?;
    writeln!(f, "up_ns = {:<21} # how long 'crosslane up' waits for links", timeouts.up_ns)
}

fn write_partitions(f: &mut Formatter<'_>, some: &Partitions) -> Result {
    writeln!(f, "\n[[partitions]]\nclass = \"{}\"\ncount = {}", some.class, some.count)?;
    match &some.cores {
        Some(cores) => writeln!(f, "cores = {cores:?}"),
        None => Ok(()),
    }
}

fn write_node(f: &mut Formatter<'_>, node: &Node) -> Result {
    writeln!(f, "\n[[nodes]]\nname = {}\naddress = \"{}\"", quoted(&node.name), node.address)?;
    if let Some(backend) = node.backend {
        writeln!(f, "backend = \"{backend}\"")?;
    }
    if let Some(device) = &node.device {
        writeln!(f, "device = {}", quoted(device))?;
    }
    match node.metrics {
        Some(metrics) => writeln!(f, "metrics = \"{metrics}\""),
        None => Ok(()),
    }
}

/// A basic string of TOML. Names have nothing in them to escape, and paths no control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
