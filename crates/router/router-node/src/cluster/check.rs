//! Checks of a cluster file across its keys.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use config::{CheckResult, InvalidKey, check_name};
use ipnet::IpNet;
use packet::{ipv4, ipv6, vlan};
use router::{NODES_MAX, PORTS_MAX};

use super::model::{ADDRESSES_MAX, Cluster, DEVICE_BYTES_MAX, Node, PortOfNode, ROUTES_MAX, StaticRoute};
use super::schema::{InterconnectKind, PortKind};

const EXAMPLE_NAME: &str = "edge-1";
/// Lower limit of the keepalive interval: more frequent keepalives cost work and detect nothing earlier.
const BEAT_NS_MIN: f64 = 1e6;
const TIMEOUT_NS_MAX: f64 = 3.6e12;
/// No routing daemon restarts in less time. The unit of restart times is a second in RFC 4724, section 3.
const STALE_ROUTES_NS_MIN: f64 = 1e9;
/// The hold time is at least two keepalive intervals, so one delayed keepalive does not end a session.
const SILENCE_BEATS_MIN: f64 = 2.0;
/// MTU of a jumbo frame, and the largest packet that a buffer holds.
pub const MTU_BYTES_MAX: u16 = 9216;
const LATENCY_TARGET_NS: std::ops::RangeInclusive<f64> = 1e3..=1e9;

/// Checks everything that needs no access to the machine.
pub(super) fn check(cluster: &Cluster) -> CheckResult {
    check_name("name", &cluster.name, EXAMPLE_NAME)?;
    check_interconnect(cluster)?;
    check_timeouts(cluster)?;
    check_nodes(cluster)?;
    for (index, node) in cluster.nodes.iter().enumerate() {
        check_ports(index, node)?;
        check_routes(index, node)?;
    }
    check_owners(cluster)?;
    check_sockets(cluster)
}

fn check_interconnect(cluster: &Cluster) -> CheckResult {
    let interconnect = &cluster.interconnect;
    let target_ns = interconnect.latency_target_ns;
    if !LATENCY_TARGET_NS.contains(&target_ns) {
        let what = format!("{target_ns} ns; use 1 us to 1 s, as in \"10 us\"");
        return Err(InvalidKey::new("interconnect.latency_target_ns", what));
    }
    if let (Some(timing), true) = (&interconnect.timing, interconnect.kind != InterconnectKind::Window) {
        let kind = interconnect.kind.as_str();
        let what =
            format!("\"{timing}\" is a model of windows, and kind is \"{kind}\"; remove it, or set kind = \"window\"");
        return Err(InvalidKey::new("interconnect.timing", what));
    }
    Ok(())
}

fn check_timeouts(cluster: &Cluster) -> CheckResult {
    let all = &cluster.timeouts;
    let (beat_ns, silence_ns) = (cluster.keepalive_ns(), cluster.hold_ns());
    for (name, value) in [("beat_ns", beat_ns), ("silence_ns", silence_ns), ("up_ns", all.up_ns)] {
        if !(BEAT_NS_MIN..=TIMEOUT_NS_MAX).contains(&value) {
            return Err(InvalidKey::new(
                format!("timeouts.{name}"),
                format!("{value} ns; use 1 ms to 1 h, as in \"20 ms\""),
            ));
        }
    }
    let stale_ns = all.stale_routes_ns;
    if stale_ns != 0.0 && !(STALE_ROUTES_NS_MIN..=TIMEOUT_NS_MAX).contains(&stale_ns) {
        let what = format!("{stale_ns} ns; use 1 s to 1 h, as in \"120 s\", or 0 to keep no routes");
        return Err(InvalidKey::new("timeouts.stale_routes_ns", what));
    }
    let silence_ns_min = SILENCE_BEATS_MIN * beat_ns;
    if silence_ns < silence_ns_min {
        let what = format!(
            "{silence_ns} ns is too short for keepalives every {beat_ns} ns; use at least {silence_ns_min} ns, or \
             lower timeouts.beat_ns"
        );
        return Err(InvalidKey::new("timeouts.silence_ns", what));
    }
    Ok(())
}

fn check_nodes(cluster: &Cluster) -> CheckResult {
    let count = cluster.nodes.len();
    if !(2..=usize::from(NODES_MAX)).contains(&count) {
        return Err(InvalidKey::new("nodes", format!("{count} nodes; a cluster has 2 to {NODES_MAX}")));
    }
    for (index, node) in cluster.nodes.iter().enumerate() {
        check_name(&format!("nodes[{index}].name"), &node.name, EXAMPLE_NAME)?;
        let before = &cluster.nodes[..index];
        check_unlike(before, index, "name", |other| other.name == node.name, &node.name)?;
        if let Some(namespace) = &node.namespace {
            let is_same = |other: &Node| other.namespace.as_ref() == Some(namespace);
            check_unlike(before, index, "namespace", is_same, &namespace.display().to_string())?;
        }
        if let Some(control) = node.control {
            check_unlike(before, index, "control", |other| other.control == Some(control), &control.to_string())?;
        }
        if let Some(metrics) = node.metrics {
            check_unlike(before, index, "metrics", |other| other.metrics == Some(metrics), &metrics.to_string())?;
        }
        if let Some(fabric) = node.fabric {
            check_unlike(before, index, "fabric", |other| other.fabric == Some(fabric), &fabric.to_string())?;
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

fn check_ports(index: usize, node: &Node) -> CheckResult {
    let key = format!("nodes[{index}].ports");
    let count = node.ports.len();
    if !(1..=usize::from(PORTS_MAX)).contains(&count) {
        let what = format!("{count} ports of node '{}'; give it 1 to {PORTS_MAX}", node.name);
        return Err(InvalidKey::new(key, what));
    }
    for (entry, port) in node.ports.iter().enumerate() {
        let key = format!("{key}[{entry}]");
        check_device(&format!("{key}.device"), &port.device)?;
        if let Some(other) = node.ports[..entry].iter().position(|other| other.device == port.device) {
            let what = format!(
                "'{}' is already the device of nodes[{index}].ports[{other}]; name each device once",
                port.device
            );
            return Err(InvalidKey::new(format!("{key}.device"), what));
        }
        check_port(&key, port)?;
        check_vlan(&key, &node.ports[..entry], port)?;
    }
    Ok(())
}

/// Checks that the parent of a VLAN precedes it and is not a VLAN itself.
fn check_vlan(key: &str, before: &[PortOfNode], port: &PortOfNode) -> CheckResult {
    let is_vlan = port.kind == PortKind::Vlan;
    let given = [("parent", port.parent.clone()), ("vlan", port.vlan.map(|id| id.to_string()))];
    let examples = ["name its parent port, as in \"eth0\"", "set its identifier, as in 7"];
    for ((name, value), example) in given.iter().zip(examples) {
        let what = match (is_vlan, value) {
            (true, None) => format!("missing; a port of kind \"vlan\" needs it: {example}"),
            (false, Some(value)) => {
                let kind = port.kind.as_str();
                format!("{value} is not used with kind = \"{kind}\"; remove it, or set kind = \"vlan\"")
            }
            _ => continue,
        };
        return Err(InvalidKey::new(format!("{key}.{name}"), what));
    }
    let (Some(parent), Some(id)) = (&port.parent, port.vlan) else { return Ok(()) };
    if !(1..=vlan::ID_MAX).contains(&id) {
        return Err(InvalidKey::new(
            format!("{key}.vlan"),
            format!("{id} is not a VLAN identifier; use 1 to {}", vlan::ID_MAX),
        ));
    }
    if !before.iter().any(|other| other.device == *parent && other.kind != PortKind::Vlan) {
        let what = format!("'{parent}' is not an earlier port that can have VLANs; put its entry before this one");
        return Err(InvalidKey::new(format!("{key}.parent"), what));
    }
    if let Some(other) = before.iter().find(|other| (&other.parent, other.vlan) == (&port.parent, port.vlan)) {
        let what = format!("{id} of '{parent}' is already '{}'; give each VLAN one port", other.device);
        return Err(InvalidKey::new(format!("{key}.vlan"), what));
    }
    Ok(())
}

/// Checks an interface name as the kernel does.
fn check_device(key: &str, device: &str) -> CheckResult {
    let is_letter = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
    let is_valid = (1..=DEVICE_BYTES_MAX).contains(&device.len()) && device.bytes().all(is_letter);
    if is_valid && device != "." && device != ".." {
        return Ok(());
    }
    let what = format!("{device:?} is not an interface name; use 1 to {DEVICE_BYTES_MAX} letters, as in \"eth0\"");
    Err(InvalidKey::new(key, what))
}

fn check_port(key: &str, port: &PortOfNode) -> CheckResult {
    let mtu_bytes = port.mtu_bytes.unwrap_or(ipv6::MTU_MIN as u16);
    let is_v6 = port.addresses.iter().any(|address| matches!(address, IpNet::V6(_)));
    let mtu_bytes_min = if is_v6 { ipv6::MTU_MIN } else { ipv4::MTU_MIN } as u16;
    if !(mtu_bytes_min..=MTU_BYTES_MAX).contains(&mtu_bytes) {
        let what = format!("{mtu_bytes} bytes; use {mtu_bytes_min} to {MTU_BYTES_MAX}, as in 1500");
        return Err(InvalidKey::new(format!("{key}.mtu_bytes"), what));
    }
    let kind = port.kind.as_str();
    if port.kind.has_kernel() && !port.addresses.is_empty() {
        let what = format!(
            "the addresses of a port of kind \"{kind}\" are the kernel's; remove them, and run 'ip address add {} \
             dev {}'",
            port.addresses[0], port.device
        );
        return Err(InvalidKey::new(format!("{key}.addresses"), what));
    }
    if port.addresses.len() > ADDRESSES_MAX {
        let what = format!("{} addresses; use at most {ADDRESSES_MAX}", port.addresses.len());
        return Err(InvalidKey::new(format!("{key}.addresses"), what));
    }
    if let Some(network) = port.addresses.iter().find(|network| !is_host_of(network)) {
        let what = format!(
            "'{}' is not a host address in '{}'; use another address of that network, or correct the prefix length",
            network.addr(),
            network.trunc()
        );
        return Err(InvalidKey::new(format!("{key}.addresses"), what));
    }
    for (name, file) in [("input", &port.input), ("output", &port.output)] {
        match (port.kind == PortKind::Pcap, file) {
            (false, Some(_)) => {
                let what = format!("a port of kind \"{kind}\" has no capture files; remove it, or set kind = \"pcap\"");
                return Err(InvalidKey::new(format!("{key}.{name}"), what));
            }
            (true, None) => {
                let what = format!("missing; name the {name} file of this pcap port, as in \"{name}.pcap\"");
                return Err(InvalidKey::new(format!("{key}.{name}"), what));
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_routes(index: usize, node: &Node) -> CheckResult {
    if node.routes.len() > ROUTES_MAX {
        let what = format!("{} routes; use at most {ROUTES_MAX}, and a routing daemon for more", node.routes.len());
        return Err(InvalidKey::new(format!("nodes[{index}].routes"), what));
    }
    for (entry, route) in node.routes.iter().enumerate() {
        check_route(&format!("nodes[{index}].routes[{entry}]"), node, route)?;
    }
    Ok(())
}

fn check_route(key: &str, node: &Node, route: &StaticRoute) -> CheckResult {
    if node.port(&route.port).is_none() {
        let devices: Vec<&str> = node.ports.iter().map(|port| port.device.as_str()).collect();
        let devices = devices.join(", ");
        let what = format!("'{}' is not a port of node '{}'; use one of {devices}", route.port, node.name);
        return Err(InvalidKey::new(format!("{key}.port"), what));
    }
    if route.to.trunc() != route.to {
        let what = format!("'{}' has address bits beyond its prefix length; write '{}'", route.to, route.to.trunc());
        return Err(InvalidKey::new(format!("{key}.to"), what));
    }
    let Some(via) = route.via else { return Ok(()) };
    let is_own = |port: &PortOfNode| port.addresses.iter().any(|own| own.addr() == via);
    let what = if via.is_ipv4() != route.to.addr().is_ipv4() {
        format!("'{via}' is of another version of IP than '{}'; name a router of the same version", route.to)
    } else if !is_unicast(via) {
        format!("'{via}' is not a router's address; use a unicast address")
    } else if node.addresses.contains(&via) || node.ports.iter().any(is_own) {
        format!("'{via}' is this node's own address; name the next-hop router")
    } else {
        return Ok(());
    };
    Err(InvalidKey::new(format!("{key}.via"), what))
}

/// Checks that each address is configured once.
fn check_owners(cluster: &Cluster) -> CheckResult {
    let mut owned: BTreeSet<IpAddr> = BTreeSet::new();
    for (index, node) in cluster.nodes.iter().enumerate() {
        if node.addresses.len() > ADDRESSES_MAX {
            let what = format!("{} addresses; use at most {ADDRESSES_MAX}", node.addresses.len());
            return Err(InvalidKey::new(format!("nodes[{index}].addresses"), what));
        }
        let own = node.addresses.iter().map(|address| (format!("nodes[{index}].addresses"), *address));
        let of_ports = node.ports.iter().enumerate().flat_map(|(entry, port)| {
            let key = format!("nodes[{index}].ports[{entry}].addresses");
            port.addresses.iter().map(move |address| (key.clone(), address.addr()))
        });
        for (key, address) in own.chain(of_ports) {
            if !is_unicast(address) {
                return Err(InvalidKey::new(key, format!("'{address}' is not a host address; use a unicast address")));
            }
            if !owned.insert(address) {
                let what = format!("'{address}' is in this file twice; give each address to one port of one node");
                return Err(InvalidKey::new(key, what));
            }
        }
    }
    Ok(())
}

/// Returns whether the address is a host address of the network: neither the network nor the broadcast address, except
/// in a /31 (RFC 3021). No port has a network of prefix length 0.
fn is_host_of(network: &IpNet) -> bool {
    match network {
        _ if network.prefix_len() == 0 => false,
        IpNet::V4(v4) if v4.prefix_len() < 31 => v4.addr() != v4.network() && v4.addr() != v4.broadcast(),
        _ => true,
    }
}

fn is_unicast(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !address.is_multicast() && !address.is_unspecified() && !address.is_loopback() && !is_broadcast
}

/// Checks that nodes with TCP control addresses use an interconnect that leaves the machine, and that this interconnect
/// has a fabric address on each node.
fn check_sockets(cluster: &Cluster) -> CheckResult {
    let kind = cluster.interconnect.kind;
    let has_control = cluster.nodes.iter().any(|node| node.control.is_some());
    for (index, node) in cluster.nodes.iter().enumerate() {
        match (has_control, node.control) {
            (true, None) => {
                let what = "missing; other nodes have one: set the address of this node, as in \"192.0.2.1:4700\"";
                return Err(InvalidKey::new(format!("nodes[{index}].control"), what));
            }
            (_, Some(control)) if kind != InterconnectKind::RnicUdp => {
                let what = format!(
                    "'{control}' is for nodes of several machines, which kind = \"{}\" cannot join; remove it, or set \
                     kind = \"rnic-udp\"",
                    kind.as_str()
                );
                return Err(InvalidKey::new(format!("nodes[{index}].control"), what));
            }
            _ => {}
        }
        match (kind == InterconnectKind::RnicUdp, node.fabric) {
            (true, None) => {
                let what = "missing; kind = \"rnic-udp\" needs an address of each node, as in \"192.0.2.1:4791\"";
                return Err(InvalidKey::new(format!("nodes[{index}].fabric"), what));
            }
            (false, Some(fabric)) => {
                let what = format!("'{fabric}' is not used with kind = \"{}\"; remove it", kind.as_str());
                return Err(InvalidKey::new(format!("nodes[{index}].fabric"), what));
            }
            _ => {}
        }
    }
    check_key(cluster.key.as_deref(), has_control)
}

/// Checks that nodes which connect by TCP authenticate each other with a key.
fn check_key(key: Option<&Path>, has_control: bool) -> CheckResult {
    let what = match (key, has_control) {
        (None, true) => {
            "missing; nodes with a 'control' address authenticate each other with a key: create one with 'crosslane \
             router key FILE', copy it to all machines, and name its absolute path here"
                .to_owned()
        }
        (Some(key), false) => {
            let key = key.display();
            format!("'{key}' is not used without 'control' addresses: nodes of one machine need no key; remove it")
        }
        (Some(key), true) if !key.is_absolute() => {
            format!("'{}' is not an absolute path; write as in \"/etc/crosslane/office.key\"", key.display())
        }
        _ => return Ok(()),
    };
    Err(InvalidKey::new("key", what))
}

#[cfg(test)]
mod tests;
