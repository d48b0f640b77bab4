//! Kernel interfaces as ports: by AF_XDP where that goes, else by AF_PACKET.

use std::fmt;
use std::io;

use router::Port;

use crate::interface::{Interface, InterfaceError};
use crate::packet_socket::PacketSocket;
use crate::xdp::{LocalAddresses, Mode, XdpError, XdpPort};

/// How frames come from a kernel interface, and go to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// AF_XDP: rings in this process's memory.
    Xdp,
    /// AF_PACKET: a ring that the kernel copies into, and a call for many frames.
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
    /// What it is plugged into, as it was found.
    pub interface: Interface,
    /// How.
    pub backend: Backend,
    /// More of how, for people: "in the driver, copied".
    pub details: String,
    /// Why it is not [`Backend::Xdp`], where that was left to us. One line.
    pub fallback_reason: Option<String>,
}

/// Why an interface cannot be a port.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is no interface for that.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// AF_XDP was asked for.
    #[error("interface '{name}': no AF_XDP: {reason}; AF_PACKET goes with every interface")]
    Xdp {
        /// The interface.
        name: String,
        /// Why.
        reason: String,
    },
    /// Nor AF_PACKET.
    #[error("interface '{name}': no packet socket: {source}; it needs CAP_NET_RAW")]
    PacketSocket {
        /// The interface.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Drivers, as ethtool names them, of interfaces without hardware of their own. Their frames come as others hand them
/// over: VLAN tags beside the frame, checksums open, and packets merged.
const DRIVERS_OF_KERNEL: [&str; 9] =
    ["veth", "netkit", "bridge", "openvswitch", "bonding", "team", "macvlan", "ipvlan", "802.1Q VLAN Support"];

/// Opens the interface of that name in the calling thread's network namespace. Without `backend`, AF_XDP is tried
/// first where VLAN tags are in frames for sure: where they may be beside them, a frame of any VLAN looks untagged, and
/// who names AF_XDP answers for the senders. Frames with the tag of one of `vlans` are wanted too. `local` are this
/// node's addresses on whatever interface.
pub fn open(
    name: &str,
    backend: Option<Backend>,
    vlans: &[u16],
    local: &LocalAddresses,
) -> Result<Ethernet, OpenError> {
    let interface = Interface::by_name(name)?;
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
    let details = "a ring in, many frames a call out".to_string();
    Ok(Ethernet { port: Box::new(port), interface, backend: Backend::PacketSocket, details, fallback_reason })
}

fn open_xdp(
    interface: &Interface,
    is_asked_for: bool,
    vlans: &[u16],
    local: &LocalAddresses,
) -> Result<XdpPort, String> {
    let driver = interface.driver.as_str();
    if DRIVERS_OF_KERNEL.contains(&driver) {
        if !is_asked_for || !vlans.is_empty() {
            return Err(format!("its driver, {driver}, keeps VLAN tags beside frames, where the program sees none"));
        }
    } else {
        crate::interface::tags_in_frames(&interface.name).map_err(|error| error.to_string())?;
    }
    XdpPort::open(interface, vlans, local).map_err(|error: XdpError| error.to_string())
}

fn by_xdp(port: XdpPort, interface: Interface) -> Ethernet {
    let place = match port.mode() {
        Mode::Driver => "in the driver",
        Mode::Generic => "behind the driver",
    };
    let details = format!("{place}, {}", if port.is_copied() { "copied" } else { "not copied" });
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
    use crate::Tap;
    use crate::crossing::{Crossing, port_name};
    use crate::netlink::Requests;

    fn by_xdp(side: usize) -> Box<dyn Port + Send> {
        open(port_name(side), Some(Backend::Xdp), &[], &LocalAddresses::new()).unwrap().port
    }

    fn by_both(side: usize) -> Box<dyn Port + Send> {
        let backend = [Backend::Xdp, Backend::PacketSocket][side];
        open(port_name(side), Some(backend), &[], &LocalAddresses::new()).unwrap().port
    }

    #[test]
    fn streams_and_datagrams_cross_two_xdp_ports_that_sleep_and_are_woken() {
        let Some(crossing) = Crossing::new("streams_and_datagrams_cross_two_xdp_ports", 1500) else { return };
        let losses = crossing.while_carrying(by_xdp, || {
            for is_v6 in [false, true] {
                crossing.stream(is_v6, 1_000_000);
                crossing.datagrams(is_v6);
            }
        });
        assert_eq!(losses, [PortLosses::default(); 2]);
    }

    #[test]
    fn a_stream_crosses_from_xdp_to_a_packet_socket_and_back() {
        let Some(crossing) = Crossing::new("a_stream_crosses_from_xdp", 1500) else { return };
        crossing.while_carrying(by_both, || crossing.stream(false, 1_000_000));
    }

    #[test]
    fn what_does_not_go_by_xdp_goes_by_packet_socket_and_says_why() {
        let Some(crossing) = Crossing::new("what_does_not_go_by_xdp", 1500) else { return };
        let test = || {
            let local = LocalAddresses::new();
            let line = Tap::open("line0").unwrap();
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
                let beside = reason(port_name(0), vlans);
                assert!(beside.starts_with("no AF_XDP: its driver, veth, keeps VLAN tags beside frames"), "{beside}");
            }
            drop((first, line));
            // Who names it answers for the senders, but not for VLANs that the program would have to see.
            open(port_name(0), Some(Backend::Xdp), &[], &local).unwrap();
            let error = open(port_name(0), Some(Backend::Xdp), &[7], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port0': no AF_XDP: its driver, veth, keeps VLAN tags"), "{error}");
            let other = Interface::by_name(port_name(1)).unwrap();
            Requests::open().unwrap().set_mtu(other.index, 9000).unwrap();
            let error = open(port_name(1), Some(Backend::Xdp), &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port1': no AF_XDP: its MTU of 9000 B is beyond "), "{error}");
            let error = open("none", None, &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'none': not in this network namespace"), "{error}");
        };
        crossing.node.within(test).unwrap();
    }

    /// A bridge hands on what is whole.
    fn datagram_to_nobody() -> Vec<u8> {
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

    /// The host is a bridge, which takes tags out and leaves them beside the frames; so does the line to the port.
    #[test]
    fn a_frame_of_a_vlan_that_is_not_the_ports_is_never_taken_for_an_untagged_one() {
        let Some(crossing) = Crossing::new("a_frame_of_a_vlan_that_is_not_the_ports", 1500) else { return };
        let open_port = || open(port_name(0), None, &[], &LocalAddresses::new()).unwrap();
        let Ethernet { mut port, interface, .. } = crossing.node.within(open_port).unwrap();
        let bridged = || {
            let line = Tap::open("line0").unwrap();
            let host = Interface::by_name("host").unwrap().index;
            Requests::open().unwrap().add_bridge("bridge0", &[line.interface(), host]).unwrap();
            line
        };
        let mut line = crossing.hosts[0].within(bridged).unwrap();
        let mut pool = Pool::new(64, 2048, 64);
        let source = [2, 0, 0, 0, 0, 1];
        let transit = datagram_to_nobody();
        let [tagged, untagged] = [&[0x81, 0, 0x20, 5, 8, 0][..], &[8, 0]]
            .map(|behind_addresses| [&interface.mac.0[..], &source, behind_addresses, &transit].concat());
        let frames = [&tagged, &untagged].map(|frame| pool.alloc_copy(frame).unwrap());
        line.transmit(&mut pool, &mut VecDeque::from(frames)).unwrap();
        let (mut heard, mut packets) = (Vec::new(), Vec::new());
        for _ in 0..1000 {
            port.receive(&mut pool, &mut packets, 64).unwrap();
            for packet in packets.drain(..) {
                heard.extend(Some(pool.bytes(&packet).to_vec()).filter(|frame| frame[6..12] == source));
                pool.free(packet);
            }
            if heard.contains(&untagged) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The one came before the other: with its tag, or not at all.
        assert_eq!(heard.iter().filter(|frame| **frame == untagged).count(), 1, "{heard:02x?}");
        assert!(heard.iter().all(|frame| *frame == untagged || *frame == tagged), "{heard:02x?}");
    }
}
