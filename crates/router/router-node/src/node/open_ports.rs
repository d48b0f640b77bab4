//! Opens the ports, the slow path and the interconnect of a node as the cluster file configures them.

use std::io;
use std::path::{Path, PathBuf};

use fabric::timed::LinkTiming;
use packet::ethernet::MacAddress;
use packet::ipv4;
use pcie::host::path::Path as LinkPath;
use router::{NodeId, Port, PortConfig};
use router_ports::ethernet::{self, Backend};
use router_ports::netlink::{Link, Requests};
use router_ports::{Interface, InterfaceIndex, LocalAddresses, Namespace, PcapError, PcapPort, Sysctls, TunTap};
use sim::Span;

use super::error::NodeError;
use super::kernel_settings::namespace_path;
use crate::cluster::{Balance, Cluster, InterconnectKind, MTU_BYTES_MAX, Node, PortKind, PortOfNode, batching_policy};
use crate::interconnect::{self, Interconnect, InterconnectSettings, TransportKind};

/// The TUN interface between a node and its kernel.
pub const SLOW_PATH: &str = "crosslane0";
/// Bytes of a PCIe packet besides its payload, with a header for 64-bit addresses.
const PACKET_HEADER_BYTES: u64 = 24;

/// An opened port.
pub struct OpenPort {
    /// The port; `None` for a VLAN, which uses its parent.
    pub port: Option<Box<dyn Port + Send>>,
    /// Its configuration, as far as the device determines it.
    pub config: PortConfig,
    /// Its kernel interface, if the kernel has its addresses.
    pub interface: Option<InterfaceIndex>,
    /// The kind of port in use.
    pub kind: &'static str,
    /// Why the preferred kind is not in use.
    pub fallback: Option<String>,
    /// The properties of the interface that the port depends on.
    pub opened_interface: Option<OpenedInterface>,
}

/// Properties of an interface that an open port cannot follow when they change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedInterface {
    /// The hardware address, if the port receives only frames for it.
    mac: Option<MacAddress>,
    /// The MTU that the port has room for.
    mtu_bytes: u32,
}

impl OpenedInterface {
    /// Returns whether the port still receives all frames of the interface, and nothing else handles them.
    pub fn still_matches(&self, link: &Link) -> bool {
        let has_its_mac = self.mac.is_none() || link.mac.is_none() || self.mac == link.mac;
        has_its_mac && link.mtu_bytes <= self.mtu_bytes && link.controller.is_none()
    }
}

/// Parameters of opening a port.
pub struct OpenPortParams<'a> {
    /// The node in the cluster file.
    pub node: &'a Node,
    /// The index of the port.
    pub index: usize,
    /// Seed of a generated hardware address.
    pub seed: u64,
    /// Base directory of relative paths of capture files.
    pub folder: &'a Path,
    /// The addresses of the node.
    pub local: &'a LocalAddresses,
    /// Whether the kernel forwards, which must receive all frames of a port.
    pub kernel_forwards: bool,
}

/// Returns the timing of a modelled link.
fn timing(timing: Option<rack::Timing>) -> Result<LinkTiming, NodeError> {
    let path = LinkPath::named(timing.unwrap_or(rack::Timing::Gen3x16).as_str())
        .map_err(|error| NodeError::Timing(error.to_string()))?;
    Ok(LinkTiming {
        one_way_ns: path.write(0).ns().round() as u64,
        bytes_per_us: (path.packet_gbps() * 125.0).round() as u64,
        header_bytes: PACKET_HEADER_BYTES,
        payload_bytes_max: u64::from(path.link().mps_bytes.bytes()),
    })
}

/// Moves the calling thread, and those that it starts, into the node's network namespace.
pub fn enter_namespace(node: &Node) -> Result<(), NodeError> {
    let Some(path) = namespace_path(node) else { return Ok(()) };
    let entered = Namespace::at(&path).and_then(|namespace| namespace.enter());
    entered.map_err(|error| NodeError::Namespace { shown: path.display().to_string(), error })
}

/// Opens a port. For a VLAN, whose parent is open already, it only returns the configuration.
pub fn open_port(params: &OpenPortParams<'_>, sysctls: &mut Sysctls) -> Result<OpenPort, NodeError> {
    let index = params.index;
    let failed = |error: String| NodeError::Port { index, error };
    match params.port_config().kind {
        PortKind::Auto => open_ethernet(params, None, sysctls).map_err(failed),
        PortKind::AfXdp => open_ethernet(params, Some(Backend::Xdp), sysctls).map_err(failed),
        PortKind::AfPacket => open_ethernet(params, Some(Backend::PacketSocket), sysctls).map_err(failed),
        PortKind::Tap => open_tap(params).map_err(failed),
        PortKind::Pcap => open_pcap(params),
        PortKind::Vlan => Ok(vlan(params)),
    }
}

impl OpenPortParams<'_> {
    fn port_config(&self) -> &PortOfNode {
        &self.node.ports[self.index]
    }
}

/// Returns the configuration of a VLAN. The hardware address, and an MTU that the file does not set, come from the
/// parent.
fn vlan(params: &OpenPortParams<'_>) -> OpenPort {
    let port_config = params.port_config();
    let mut config = PortConfig::new(own_mac(params.seed), port_config.mtu_bytes.unwrap_or(MTU_BYTES_MAX));
    config.vlan = params.node.vlan(port_config);
    // Nothing answers from a capture file.
    let parent = params.node.ports.iter().find(|port| Some(&port.device) == port_config.parent.as_ref());
    config.probes = parent.is_some_and(|parent| parent.kind != PortKind::Pcap);
    OpenPort {
        port: None,
        config,
        interface: None,
        kind: PortKind::Vlan.as_str(),
        fallback: None,
        opened_interface: None,
    }
}

/// Why a port that may use AF_XDP does not: its program takes packets before the kernel can forward them.
pub const KERNEL_FORWARDS: &str = "the kernel forwards because of packet filters";

fn open_ethernet(
    params: &OpenPortParams<'_>,
    wanted: Option<Backend>,
    sysctls: &mut Sysctls,
) -> Result<OpenPort, String> {
    let is_overridden = params.kernel_forwards && wanted != Some(Backend::PacketSocket);
    let backend = if is_overridden { Some(Backend::PacketSocket) } else { wanted };
    let device = &params.port_config().device;
    let vlans = params.node.vlans_of(device);
    let opened = ethernet::open(device, backend, &vlans, params.local).map_err(|error| error.to_string())?;
    sysctls.configure_port(device).map_err(|error| format!("interface '{device}': {error}"))?;
    let interface = opened.interface;
    let kind = match opened.backend {
        Backend::Xdp => PortKind::AfXdp,
        Backend::PacketSocket => PortKind::AfPacket,
    };
    let mtu_bytes = u16::try_from(interface.mtu_bytes).unwrap_or(u16::MAX).min(MTU_BYTES_MAX);
    let mut config = PortConfig::new(interface.mac, mtu_bytes.max(ipv4::MTU_MIN as u16));
    config.has_kernel = true;
    config.takes_large = opened.port.takes_large();
    Ok(OpenPort {
        port: Some(opened.port),
        config,
        interface: Some(interface.index),
        kind: kind.as_str(),
        fallback: if is_overridden { Some(KERNEL_FORWARDS.to_owned()) } else { opened.fallback_reason },
        // The XDP program compares destination addresses with the one at the time of opening.
        opened_interface: Some(OpenedInterface {
            mac: (opened.backend == Backend::Xdp).then_some(interface.mac),
            mtu_bytes: interface.mtu_bytes,
        }),
    })
}

/// MTU of a TAP or pcap port that the file does not set.
pub const MTU_BYTES_DEFAULT: u16 = 1500;

fn open_tap(params: &OpenPortParams<'_>) -> Result<OpenPort, String> {
    let port_config = params.port_config();
    let tap = TunTap::open_tap(&port_config.device).map_err(|error| error.to_string())?;
    let mut requests = Requests::open().map_err(|error| error.to_string())?;
    let mtu_bytes = port_config.mtu_bytes.unwrap_or(MTU_BYTES_DEFAULT);
    requests.set_mtu(tap.interface(), u32::from(mtu_bytes)).map_err(|error| error.to_string())?;
    requests.set_up(tap.interface()).map_err(|error| error.to_string())?;
    let mut config = PortConfig::new(own_mac(params.seed), mtu_bytes);
    config.probes = true;
    config.takes_large = tap.takes_large();
    let kind = PortKind::Tap.as_str();
    Ok(OpenPort { port: Some(Box::new(tap)), config, interface: None, kind, fallback: None, opened_interface: None })
}

/// Sets the MTU of an open TAP interface to the value in the file.
pub fn set_tap_mtu(port_config: &PortOfNode) -> Result<(), String> {
    let interface = Interface::by_name(&port_config.device).map_err(|error| error.to_string())?;
    let mut requests = Requests::open().map_err(|error| error.to_string())?;
    let mtu_bytes = port_config.mtu_bytes.unwrap_or(MTU_BYTES_DEFAULT);
    requests.set_mtu(interface.index, u32::from(mtu_bytes)).map_err(|error| error.to_string())
}

fn open_pcap(params: &OpenPortParams<'_>) -> Result<OpenPort, NodeError> {
    let port_config = params.port_config();
    let path = |file: &Option<PathBuf>| file.as_ref().map(|file| params.folder.join(file));
    let failed = |key: &'static str| {
        move |error: PcapError| NodeError::PortFile { index: params.index, key, error: error.to_string() }
    };
    // The two are opened separately, so that an error names one of them.
    let input = PcapPort::open(path(&port_config.input).as_deref(), None).map_err(failed("input"))?;
    let port = input.with_output(path(&port_config.output).as_deref()).map_err(failed("output"))?;
    let config = PortConfig::new(own_mac(params.seed), port_config.mtu_bytes.unwrap_or(MTU_BYTES_DEFAULT));
    let kind = PortKind::Pcap.as_str();
    Ok(OpenPort { port: Some(Box::new(port)), config, interface: None, kind, fallback: None, opened_interface: None })
}

/// Returns a locally administered address, the same at each start.
fn own_mac(seed: u64) -> MacAddress {
    let [a, b, c, d, e, ..] = seed.to_le_bytes();
    MacAddress([2, a, b, c, d, e])
}

/// Opens the TUN interface, sets it up, and adds the node's own addresses.
pub fn open_slow_path(node: &Node, sysctls: &mut Sysctls, requests: &mut Requests) -> Result<TunTap, NodeError> {
    let failed = |error: &dyn std::fmt::Display| NodeError::SlowPath(error.to_string());
    let tun = TunTap::open_tun(SLOW_PATH).map_err(|error| failed(&error))?;
    let interface = tun.interface();
    let system = |error: io::Error| failed(&error);
    sysctls.configure_tun(SLOW_PATH).map_err(system)?;
    requests.remove_own_routes().map_err(|error| failed(&error))?;
    requests.set_mtu(interface, u32::from(MTU_BYTES_MAX)).map_err(|error| failed(&error))?;
    requests.set_up(interface).map_err(|error| failed(&error))?;
    for address in &node.addresses {
        requests.add_address(interface, (*address).into()).map_err(|error| failed(&error))?;
    }
    Ok(tun)
}

/// Opens the interconnect.
pub fn open_interconnect(cluster: &Cluster, own: NodeId) -> Result<Box<dyn Interconnect>, NodeError> {
    let config = &cluster.interconnect;
    let kind = match config.kind {
        InterconnectKind::Lane => TransportKind::Lanes,
        InterconnectKind::Window => TransportKind::Windows(timing(config.timing)?),
        InterconnectKind::RnicLane => TransportKind::RnicLanes,
        InterconnectKind::RnicUdp => match cluster.node_of(own).and_then(|node| node.fabric) {
            Some(address) => TransportKind::RnicUdp(address),
            None => return Err(NodeError::Missing("fabric")),
        },
    };
    let policy = batching_policy(config);
    let balances = config.balance == Balance::Valiant;
    let unanswered_max = Some(Span::from_ns(cluster.hold_ns()));
    let settings = InterconnectSettings { policy, balances, unanswered_max, ..InterconnectSettings::default() };
    Ok(interconnect::open(own, kind, &settings)?)
}
