//! Kernel interfaces as ports: with AF_XDP where possible, otherwise with AF_PACKET.

use std::fmt;
use std::io;

use router::Port;

use crate::interface::{Interface, InterfaceError};
use crate::netlink::{NetlinkError, Requests};
use crate::packet_socket::PacketSocket;
use crate::xdp::{LocalAddresses, Mode, XdpError, XdpPort};

/// The mechanism by which frames are received from and sent to a kernel interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// AF_XDP: rings in the memory of this process.
    Xdp,
    /// AF_PACKET: a receive ring that the kernel copies into, and system calls that send many frames.
    PacketSocket,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Xdp => "AF_XDP",
            Backend::PacketSocket => "AF_PACKET",
        })
    }
}

/// A kernel interface, opened as a port.
pub struct Ethernet {
    /// The port.
    pub port: Box<dyn Port + Send>,
    /// The interface, as it was when the port was opened.
    pub interface: Interface,
    /// The mechanism in use.
    pub backend: Backend,
    /// Details of the mechanism for people: "in the driver, copied".
    pub details: String,
    /// The reason why the port does not use [`Backend::Xdp`], if no backend was requested; one line.
    pub fallback_reason: Option<String>,
}

/// The reason why an interface cannot be a port.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The interface does not exist or is not suitable.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The kernel handles the frames of the interface as those of another one.
    #[error(
        "interface '{name}': it belongs to '{controller}': take it out with 'ip link set {name} nomaster', or, if \
         '{controller}' is a bridge or a bond, make that the port"
    )]
    Member {
        /// The interface.
        name: String,
        /// The bridge, bond, VRF, ... that it belongs to.
        controller: String,
    },
    /// What the interface belongs to cannot be found out.
    #[error("interface '{name}': {source}")]
    Netlink {
        /// The interface.
        name: String,
        /// The error of the kernel.
        source: NetlinkError,
    },
    /// AF_XDP was requested and is not available.
    #[error("interface '{name}': no AF_XDP: {reason}; AF_PACKET works with every interface")]
    Xdp {
        /// The interface.
        name: String,
        /// The reason.
        reason: String,
    },
    /// AF_PACKET is not available.
    #[error("interface '{name}': no packet socket: {source}; it needs CAP_NET_RAW")]
    PacketSocket {
        /// The interface.
        name: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// The drivers, as ethtool names them, of virtual interfaces. Their frames arrive as the senders pass them on: with
/// VLAN tags outside the frame, partial checksums, and unsegmented packets.
const VIRTUAL_DRIVERS: [&str; 9] =
    ["veth", "netkit", "bridge", "openvswitch", "bonding", "team", "macvlan", "ipvlan", "802.1Q VLAN Support"];

/// Opens an interface by name in the calling thread's network namespace. Without `backend`, AF_XDP is tried first if
/// VLAN tags are certainly inside frames; otherwise a frame of any VLAN looks untagged to the XDP program, and a user
/// who requests AF_XDP must make sure that the senders use no VLANs. Frames with the tag of one of `vlans` are received
/// too. `local` are the addresses of this node on any interface.
pub fn open(
    name: &str,
    backend: Option<Backend>,
    vlans: &[u16],
    local: &LocalAddresses,
) -> Result<Ethernet, OpenError> {
    let interface = Interface::by_name(name)?;
    if let Some(controller) = controller_of(&interface)? {
        return Err(OpenError::Member { name: name.to_string(), controller });
    }
    let mut fallback_reason = None;
    if backend != Some(Backend::PacketSocket) {
        match open_xdp(&interface, backend.is_some(), vlans, local) {
            Ok(port) => return Ok(by_xdp(port, interface)),
            Err(reason) if backend.is_none() => fallback_reason = Some(format!("no AF_XDP: {reason}")),
            Err(reason) => return Err(OpenError::Xdp { name: name.to_string(), reason }),
        }
    }
    let port =
        PacketSocket::open(&interface).map_err(|source| OpenError::PacketSocket { name: name.to_string(), source })?;
    let details = "receive ring, batched sends".to_string();
    Ok(Ethernet { port: Box::new(port), interface, backend: Backend::PacketSocket, details, fallback_reason })
}

/// Returns the name of the interface that this one belongs to.
fn controller_of(interface: &Interface) -> Result<Option<String>, OpenError> {
    let controller = Requests::open().and_then(|mut requests| requests.controller_of(interface.index));
    let controller = controller.map_err(|source| OpenError::Netlink { name: interface.name.clone(), source })?;
    Ok(controller.map(|index| index.name().unwrap_or_else(|| index.to_string())))
}

fn open_xdp(
    interface: &Interface,
    is_requested: bool,
    vlans: &[u16],
    local: &LocalAddresses,
) -> Result<XdpPort, String> {
    let driver = interface.driver.as_str();
    if VIRTUAL_DRIVERS.contains(&driver) {
        if !is_requested || !vlans.is_empty() {
            return Err(format!(
                "its driver, {driver}, keeps VLAN tags outside frames, where the XDP program cannot see them"
            ));
        }
    } else {
        crate::interface::disable_vlan_stripping(&interface.name).map_err(|error| error.to_string())?;
    }
    XdpPort::open(interface, vlans, local).map_err(|error: XdpError| error.to_string())
}

fn by_xdp(port: XdpPort, interface: Interface) -> Ethernet {
    let location = match port.mode() {
        Mode::Driver => "in the driver",
        Mode::Generic => "after the driver",
    };
    let details = format!("{location}, {}", if port.is_copied() { "copied" } else { "not copied" });
    Ethernet { port: Box::new(port), interface, backend: Backend::Xdp, details, fallback_reason: None }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use packet::{Protocol, ipv4};
    use router::{Pool, PortLosses};

    use super::*;
    use crate::TunTap;
    use crate::test_network::{TestNetwork, port_name};

    fn by_xdp(side: usize) -> Box<dyn Port + Send> {
        open(port_name(side), Some(Backend::Xdp), &[], &LocalAddresses::new()).unwrap().port
    }

    fn by_both(side: usize) -> Box<dyn Port + Send> {
        let backend = [Backend::Xdp, Backend::PacketSocket][side];
        open(port_name(side), Some(backend), &[], &LocalAddresses::new()).unwrap().port
    }

    #[test]
    fn streams_and_datagrams_cross_two_xdp_ports_that_sleep_and_are_woken() {
        let Some(network) = TestNetwork::new("streams_and_datagrams_cross_two_xdp_ports", 1500) else { return };
        let losses = network.while_forwarding(by_xdp, || {
            for is_v6 in [false, true] {
                network.stream(is_v6, 1_000_000);
                network.datagrams(is_v6);
            }
        });
        assert_eq!(losses, [PortLosses::default(); 2]);
    }

    #[test]
    fn a_stream_crosses_from_xdp_to_a_packet_socket_and_back() {
        let Some(network) = TestNetwork::new("a_stream_crosses_from_xdp", 1500) else { return };
        network.while_forwarding(by_both, || network.stream(false, 1_000_000));
    }

    #[test]
    fn ports_without_xdp_use_a_packet_socket_and_give_the_reason() {
        let Some(network) = TestNetwork::new("ports_without_xdp", 1500) else { return };
        let test = || {
            let local = LocalAddresses::new();
            let line = TunTap::open_tap("line0").unwrap();
            let first = open("line0", None, &[], &local).unwrap();
            assert_eq!((first.backend, first.details.as_str()), (Backend::Xdp, "in the driver, copied"));
            let reason = |name: &str, vlans: &[u16]| {
                let second = open(name, None, vlans, &local).unwrap();
                assert_eq!(second.backend, Backend::PacketSocket);
                second.fallback_reason.unwrap()
            };
            let busy = reason("line0", &[]);
            assert!(busy.starts_with("no AF_XDP: an AF_XDP socket: Device or resource busy"), "{busy}");
            for vlans in [&[][..], &[7]] {
                let refusal = reason(port_name(0), vlans);
                assert!(
                    refusal.starts_with("no AF_XDP: its driver, veth, keeps VLAN tags outside frames"),
                    "{refusal}"
                );
            }
            drop((first, line));
            // An explicit request is accepted without VLANs, and rejected with VLANs whose tags the program would have
            // to see.
            open(port_name(0), Some(Backend::Xdp), &[], &local).unwrap();
            let error = open(port_name(0), Some(Backend::Xdp), &[7], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port0': no AF_XDP: its driver, veth, keeps VLAN tags"), "{error}");
            let other = Interface::by_name(port_name(1)).unwrap();
            Requests::open().unwrap().set_mtu(other.index, 9000).unwrap();
            let error = open(port_name(1), Some(Backend::Xdp), &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port1': no AF_XDP: its MTU of 9000 B exceeds "), "{error}");
            let error = open("none", None, &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'none': not in this network namespace"), "{error}");
        };
        network.node.within(test).unwrap();
    }

    #[test]
    fn a_member_of_a_bridge_is_no_port_and_the_bridge_is() {
        let Some(network) = TestNetwork::new("a_member_of_a_bridge", 1500) else { return };
        let test = || {
            let member = Interface::by_name(port_name(0)).unwrap().index;
            let mut requests = Requests::open().unwrap();
            assert_eq!(requests.controller_of(member).unwrap(), None);
            requests.add_bridge("bridge0", &[member]).unwrap();
            let error = open(port_name(0), None, &[], &LocalAddresses::new()).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port0': it belongs to 'bridge0': take it out with "), "{error}");
            open("bridge0", None, &[], &LocalAddresses::new()).unwrap();
        };
        network.node.within(test).unwrap();
    }

    /// Returns a valid datagram, because a bridge forwards only valid ones.
    fn unclaimed_datagram() -> Vec<u8> {
        let header = ipv4::Repr {
            source: Ipv4Addr::new(10, 7, 0, 1),
            destination: Ipv4Addr::new(10, 7, 9, 9),
            protocol: Protocol::UDP,
            ttl: 64,
            traffic_class: 0,
            identification: 0,
            do_not_fragment: false,
            payload_bytes: 26,
        };
        let mut bytes = vec![0; ipv4::HEADER_BYTES + header.payload_bytes];
        header.emit(&mut bytes);
        bytes
    }

    /// The host is a bridge, which removes tags from frames and stores them as metadata; so does the link to the port.
    #[test]
    fn a_frame_of_another_vlan_is_never_received_as_an_untagged_one() {
        let Some(network) = TestNetwork::new("a_frame_of_another_vlan", 1500) else { return };
        let open_port = || open(port_name(0), None, &[], &LocalAddresses::new()).unwrap();
        let Ethernet { mut port, interface, .. } = network.node.within(open_port).unwrap();
        let bridged = || {
            let line = TunTap::open_tap("line0").unwrap();
            let host = Interface::by_name("host").unwrap().index;
            Requests::open().unwrap().add_bridge("bridge0", &[line.interface(), host]).unwrap();
            line
        };
        let mut line = network.hosts[0].within(bridged).unwrap();
        let mut pool = Pool::new(64, 2048, 64);
        let source = [2, 0, 0, 0, 0, 1];
        let transit = unclaimed_datagram();
        let [tagged, untagged] = [&[0x81, 0, 0x20, 5, 8, 0][..], &[8, 0]]
            .map(|behind_addresses| [&interface.mac.0[..], &source, behind_addresses, &transit].concat());
        let frames = [&tagged, &untagged].map(|frame| pool.alloc_copy(frame).unwrap());
        line.transmit(&mut pool, &mut VecDeque::from(frames)).unwrap();
        let (mut received, mut packets) = (Vec::new(), Vec::new());
        for _ in 0..1000 {
            port.receive(&mut pool, &mut packets, 64).unwrap();
            for packet in packets.drain(..) {
                received.extend(Some(pool.bytes(&packet).to_vec()).filter(|frame| frame[6..12] == source));
                pool.free(packet);
            }
            if received.contains(&untagged) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The tagged frame was sent first: it arrives with its tag or not at all.
        assert_eq!(received.iter().filter(|frame| **frame == untagged).count(), 1, "{received:02x?}");
        assert!(received.iter().all(|frame| *frame == untagged || *frame == tagged), "{received:02x?}");
    }
}
