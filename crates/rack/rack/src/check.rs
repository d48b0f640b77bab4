//! Checks of a rack beyond the types of its keys: bounds, and keys that depend on each other.

use std::path::Path;

use crate::access::ANY_NODE;
use crate::address::is_emulated;
use crate::{
    ACCESS_PARTS_MAX, Backend, CONTROL_PARTITION_BYTES, Class, NODES_MAX, Node, PAGE_BYTES, PARTITIONS_MAX, PortList,
    Rack, Trust, WINDOW_BYTES_MAX,
};
use config::{CheckResult, InvalidKey, check_name};

const EXAMPLE_NAME: &str = "host-1";
/// Maximum one-way delay of a modelled link.
const ONE_WAY_NS_MAX: f64 = 1e9;
/// A shorter timeout would expire on a machine that is merely busy.
const TIMEOUT_NS_MIN: f64 = 1e6;
const TIMEOUT_NS_MAX: f64 = 3.6e12;
/// etcd grants no shorter lease with its default election timeout.
const LEASE_NS_MIN: f64 = 2e9;
/// A slice is at least a cache line, and delays other connections by about 100 us at most.
const SLICE_BYTES_MIN: u64 = 64;
const SLICE_BYTES_MAX: u64 = 1 << 20;
/// Form of a PCI function's address in sysfs: hexadecimal digits and separators.
const PCI_ADDRESS_FORM: &[u8] = b"xxxx:xx:xx.x";

/// Checks everything that does not depend on the machine.
pub(crate) fn check(rack: &Rack) -> CheckResult {
    check_name("name", &rack.name, EXAMPLE_NAME)?;
    check_partitions(rack)?;
    check_window(rack)?;
    check_link(rack)?;
    check_slice(rack)?;
    check_timeouts(rack)?;
    check_failover(rack)?;
    check_nodes(rack)?;
    check_device(rack)?;
    check_emulated(rack)?;
    check_access(rack)
}

fn check_partitions(rack: &Rack) -> CheckResult {
    for (index, entry) in rack.partitions.iter().enumerate() {
        let key = |name: &str| format!("partitions[{index}].{name}");
        let count = entry.count;
        let cores = entry.cores.as_ref().map_or(usize::from(count), Vec::len);
        if cores != usize::from(count) {
            let what = format!("{cores} cores for {count} partitions; name one core for each, or set count = {cores}");
            return Err(InvalidKey::new(key("cores"), what));
        }
    }
    match rack.data_partitions().len() {
        0 => Err(InvalidKey::new("partitions", "no partition at all; leave the key out for one of each class")),
        count if count > PARTITIONS_MAX => {
            let what = format!("{count} partitions in all; at most {PARTITIONS_MAX}: lower a count");
            Err(InvalidKey::new("partitions", what))
        }
        _ => check_pairs(rack),
    }
}

/// Checks that each bulk partition has a latency partition of the same rank and core: one proxy thread serves both.
fn check_pairs(rack: &Rack) -> CheckResult {
    let latency: Vec<_> = owners(rack, Class::Latency).collect();
    let bulk: Vec<_> = owners(rack, Class::Bulk).collect();
    if bulk.len() > latency.len() {
        let what = format!(
            "{} of class \"bulk\" for {} of class \"latency\"; each of them goes with one of class \"latency\": ask \
             for as many of those",
            bulk.len(),
            latency.len()
        );
        return Err(InvalidKey::new("partitions", what));
    }
    for ((_, owner), (entry, core)) in latency.into_iter().zip(bulk) {
        if let Some(core) = core.filter(|core| Some(*core) != owner) {
            let owner = owner.map_or("any core".to_owned(), |owner| format!("core {owner}"));
            let what = format!(
                "{core} for a bulk partition whose latency partition has {owner}; one thread serves both: name the \
                 same core, or leave the key out of class \"bulk\""
            );
            return Err(InvalidKey::new(format!("partitions[{entry}].cores"), what));
        }
    }
    Ok(())
}

/// Returns the partitions of a class: the index of the entry in the file, and the core.
fn owners(rack: &Rack, class: Class) -> impl Iterator<Item = (usize, Option<u16>)> {
    let entries = rack.partitions.iter().enumerate().filter(move |(_, entry)| entry.class == class);
    entries.flat_map(|(index, entry)| {
        let core = |rank| entry.cores.as_ref().and_then(|cores| cores.get(rank).copied());
        (0..usize::from(entry.count)).map(move |rank| (index, core(rank)))
    })
}

fn check_window(rack: &Rack) -> CheckResult {
    let (key, bytes) = ("device.window_bytes", rack.device.window_bytes);
    let partitions = rack.data_partitions().len() as u64;
    let of = if rack.link.is_some() { " of a modelled link" } else { "" };
    let needed = CONTROL_PARTITION_BYTES + partitions * rack.partition_bytes_min();
    if bytes < needed {
        let what = format!(
            "{bytes} bytes are too few for {partitions} partitions{of}; make it at least {needed}, or ask for fewer"
        );
        return Err(InvalidKey::new(key, what));
    }
    if rack.trust == Trust::Direct && rack.window_layout().spans.is_none() {
        let needed = rack.window_bytes_min();
        let what = format!(
            "{bytes} bytes leave no room for a connection with trust = \"direct\" besides {partitions} partitions; \
             make it at least {needed}, or set trust = \"proxy\""
        );
        return Err(InvalidKey::new(key, what));
    }
    if bytes > WINDOW_BYTES_MAX || !bytes.is_multiple_of(PAGE_BYTES) {
        let what =
            format!("{bytes} bytes are not a window size; use a multiple of {PAGE_BYTES}, at most {WINDOW_BYTES_MAX}");
        return Err(InvalidKey::new(key, what));
    }
    Ok(())
}

fn check_link(rack: &Rack) -> CheckResult {
    // Both endpoints of a modelled link compare times at which stores are due, which needs one clock.
    let apart = rack.nodes.iter().find(|node| rack.backend_of(node) != Backend::Shm);
    if let (Some(link), Some(node)) = (&rack.link, apart) {
        let what = format!(
            "\"{}\" needs one clock at both endpoints, and node '{}' has backend \"{}\", where clocks disagree; remove \
             [link], or use backend \"shm\" for all nodes",
            link.timing,
            node.name,
            rack.backend_of(node)
        );
        return Err(InvalidKey::new("link.timing", what));
    }
    let one_way_ns = rack.link.as_ref().and_then(|link| link.one_way_ns).unwrap_or(0.0);
    if one_way_ns <= ONE_WAY_NS_MAX {
        return Ok(());
    }
    let what =
        format!("{one_way_ns} ns are not a delay of a link; use at most {ONE_WAY_NS_MAX} ns, as in 500 or \"1 us\"");
    Err(InvalidKey::new("link.one_way_ns", what))
}

fn check_slice(rack: &Rack) -> CheckResult {
    match rack.proxy.slice_bytes {
        Some(bytes) if bytes != 0 && !(SLICE_BYTES_MIN..=SLICE_BYTES_MAX).contains(&bytes) => {
            let what = format!("{bytes} bytes; use {SLICE_BYTES_MIN} to {SLICE_BYTES_MAX}, or 0 for no slices");
            Err(InvalidKey::new("proxy.slice_bytes", what))
        }
        _ => Ok(()),
    }
}

fn check_timeouts(rack: &Rack) -> CheckResult {
    let all = &rack.timeouts;
    let plain = [
        ("query_ns", all.query_ns),
        ("silence_ns", all.silence_ns),
        ("up_ns", all.up_ns),
        ("return_ns", all.return_ns),
    ];
    for (name, value) in plain {
        if !(TIMEOUT_NS_MIN..=TIMEOUT_NS_MAX).contains(&value) {
            let what = format!("{value} ns; use 1 ms to 1 h, as in \"500 ms\"");
            return Err(InvalidKey::new(format!("timeouts.{name}"), what));
        }
    }
    if !(LEASE_NS_MIN..=TIMEOUT_NS_MAX).contains(&all.lease_ns) {
        let what = format!("{} ns; use 2 s to 1 h, as in \"10 s\"", all.lease_ns);
        return Err(InvalidKey::new("timeouts.lease_ns", what));
    }
    Ok(())
}

fn check_failover(rack: &Rack) -> CheckResult {
    if rack.failover && rack.trust == Trust::Direct {
        let what = "true with trust = \"direct\": data that programs wrote to windows cannot be sent again; \
                    set it to false, or trust to \"proxy\"";
        return Err(InvalidKey::new("failover", what));
    }
    match rack.failover_port {
        Some(port) if !rack.failover => {
            let what = format!("{port} has no effect without failover; remove it, or set failover = true");
            Err(InvalidKey::new("failover_port", what))
        }
        Some(0) => {
            Err(InvalidKey::new("failover_port", "0 is not a port; leave the key out for any port, or name one"))
        }
        Some(port) if rack.failover_ports().is_none() => {
            let what = format!(
                "{port} is too high: each core of the partitions has a port, this one and the next; choose one below it"
            );
            Err(InvalidKey::new("failover_port", what))
        }
        _ => Ok(()),
    }
}

fn check_nodes(rack: &Rack) -> CheckResult {
    let count = rack.nodes.len();
    if !(2..=NODES_MAX).contains(&count) {
        return Err(InvalidKey::new(
            "nodes",
            format!("{count} nodes are not a rack; describe 2 to {NODES_MAX} of them"),
        ));
    }
    let slots = rack.slots();
    if slots < count || slots > NODES_MAX {
        let what = format!("{slots} slots for {count} nodes; leave the key out, or have at most {NODES_MAX}");
        return Err(InvalidKey::new("device.slots", what));
    }
    for (index, node) in rack.nodes.iter().enumerate() {
        check_name(&format!("nodes[{index}].name"), &node.name, EXAMPLE_NAME)?;
        let before = &rack.nodes[..index];
        check_unlike(before, index, "name", |other| other.name == node.name, &node.name)?;
        check_unlike(before, index, "address", |other| other.address == node.address, &node.address.to_string())?;
        let first = rack.nodes[0].address;
        if first.is_ipv4() != node.address.is_ipv4() {
            let what = format!("'{}' is of another family than '{first}' of nodes[0]; use one for all", node.address);
            return Err(InvalidKey::new(format!("nodes[{index}].address"), what));
        }
        if let Some(metrics) = node.metrics {
            let is_same = |other: &Node| other.metrics == Some(metrics) && rack.backend_of(other) == Backend::Shm;
            check_unlike(before, index, "metrics", is_same, &metrics.to_string())?;
        }
    }
    Ok(())
}

/// Checks that no earlier node has the same value.
fn check_unlike(
    before: &[Node],
    index: usize,
    name: &str,
    is_same: impl Fn(&Node) -> bool,
    value: &str,
) -> CheckResult {
    let Some(other) = before.iter().position(is_same) else { return Ok(()) };
    let what = format!("'{value}' is already that of nodes[{other}]; give each node its own");
    Err(InvalidKey::new(format!("nodes[{index}].{name}"), what))
}

fn check_device(rack: &Rack) -> CheckResult {
    let uses = |backend| rack.nodes.iter().any(|node| rack.backend_of(node) == backend);
    let device = &rack.device;
    if let Some(mode) = device.mode.filter(|_| !uses(Backend::Pci)) {
        return Err(InvalidKey::new(
            "device.mode",
            format!("\"{mode}\" says how to open a PCI device, and no node has one; remove it"),
        ));
    }
    if let Some(coherence) = device.coherence.filter(|_| !uses(Backend::Dax)) {
        let what = format!("\"{coherence}\" applies to DAX devices, and no node has one; remove it");
        return Err(InvalidKey::new("device.coherence", what));
    }
    if uses(Backend::Dax) && device.coherence.is_none() {
        let what = "missing; write coherence = \"coherent\", or \"non-coherent\" if hosts must flush their caches";
        return Err(InvalidKey::new("device.coherence", what));
    }
    if uses(Backend::Dax) && (uses(Backend::Shm) || uses(Backend::Pci)) {
        return Err(InvalidKey::new(
            "device.backend",
            "\"dax\" for some nodes only; all of a rack share one device: use it for all",
        ));
    }
    for (index, node) in rack.nodes.iter().enumerate() {
        check_node_device(rack.backend_of(node), node)
            .map_err(|what| InvalidKey::new(format!("nodes[{index}].device"), what))?;
    }
    Ok(())
}

/// Checks that nodes of one machine have emulated addresses: programs treat the address of an interface as local.
fn check_emulated(rack: &Rack) -> CheckResult {
    let here = || rack.nodes.iter().enumerate().filter(|(_, node)| rack.backend_of(node) == Backend::Shm);
    match here().find(|(_, node)| !is_emulated(node.address)) {
        Some((index, node)) if here().count() > 1 => {
            let what = format!(
                "'{}' is not for one of several nodes on one machine, as those of backend \"shm\" are; use addresses \
                 of 127.77.0.0/16 for them, or of fd00:77::/32",
                node.address
            );
            Err(InvalidKey::new(format!("nodes[{index}].address"), what))
        }
        _ => Ok(()),
    }
}

fn check_node_device(backend: Backend, node: &Node) -> Result<(), String> {
    let (Some(example), Some(device)) = (backend.example_device(), &node.device) else {
        return match (backend.example_device(), &node.device) {
            (None, Some(device)) => Err(format!("'{device}' has no meaning with backend \"{backend}\"; remove it")),
            (Some(example), None) => Err(format!("missing for backend \"{backend}\"; write device = \"{example}\"")),
            _ => Ok(()),
        };
    };
    let is_good = match backend {
        Backend::Pci => is_pci_address(device),
        _ => Path::new(device).is_absolute() && device.chars().all(|letter| !letter.is_control()),
    };
    if is_good { Ok(()) } else { Err(format!("{device:?} is not a {backend} device; write one as in \"{example}\"")) }
}

fn is_pci_address(text: &str) -> bool {
    let fits = |(found, form): (u8, &u8)| match form {
        b'x' => found.is_ascii_digit() || (b'a'..=b'f').contains(&found),
        separator => found == *separator,
    };
    text.len() == PCI_ADDRESS_FORM.len() && text.bytes().zip(PCI_ADDRESS_FORM).all(fits)
}

fn check_access(rack: &Rack) -> CheckResult {
    let ranges = |ports: &PortList| ports.ranges().len();
    let parts: usize = rack.access.iter().map(|rule| 1 + rule.ports.as_ref().map_or(0, ranges)).sum();
    if parts > ACCESS_PARTS_MAX {
        let what = format!(
            "{parts} rules and ranges of ports in all; at most {ACCESS_PARTS_MAX}: join ports to ranges, or use \
             access_default"
        );
        return Err(InvalidKey::new("access", what));
    }
    for (index, rule) in rack.access.iter().enumerate() {
        for (name, node) in [("from", &rule.from), ("to", &rule.to)] {
            if node != ANY_NODE && rack.node(node).is_none() {
                let names: Vec<&str> = rack.nodes.iter().map(|node| node.name.as_str()).collect();
                let what =
                    format!("{node:?} is not a node of this rack; write \"*\" for any, or one of {}", names.join(", "));
                return Err(InvalidKey::new(format!("access[{index}].{name}"), what));
            }
        }
    }
    Ok(())
}
