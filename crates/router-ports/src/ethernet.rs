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

/// Opens the interface of that name in the calling thread's network namespace. Without `backend`, AF_XDP is tried
/// first. Frames with the tag of one of `vlans` are wanted too. `local` are this node's addresses on whatever
/// interface.
pub fn open(
    name: &str,
    backend: Option<Backend>,
    vlans: &[u16],
    local: &LocalAddresses,
) -> Result<Ethernet, OpenError> {
    let interface = Interface::by_name(name)?;
    let mut fallback_reason = None;
    if backend != Some(Backend::PacketSocket) {
        match open_xdp(&interface, vlans, local) {
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

fn open_xdp(interface: &Interface, vlans: &[u16], local: &LocalAddresses) -> Result<XdpPort, String> {
    if !vlans.is_empty() && interface.driver == "veth" {
        return Err("virtual Ethernet keeps VLAN tags beside the frame, where the program does not see them".into());
    }
    if !vlans.is_empty() {
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
    use router::PortLosses;

    use super::*;
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
            let first = open(port_name(0), None, &[], &local).unwrap();
            assert_eq!((first.backend, first.details.as_str()), (Backend::Xdp, "in the driver, copied"));
            let reason = |vlans: &[u16]| {
                let second = open(port_name(0), None, vlans, &local).unwrap();
                assert_eq!(second.backend, Backend::PacketSocket);
                second.fallback_reason.unwrap()
            };
            assert!(reason(&[]).starts_with("no AF_XDP: an AF_XDP socket: Device or resource busy"), "{}", reason(&[]));
            assert!(reason(&[7]).contains("VLAN tags"), "{}", reason(&[7]));
            drop(first);
            let other = Interface::by_name(port_name(1)).unwrap();
            Requests::open().unwrap().set_mtu(other.index, 9000).unwrap();
            let error = open(port_name(1), Some(Backend::Xdp), &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'port1': no AF_XDP: its MTU of 9000 B is beyond "), "{error}");
            let error = open("none", None, &[], &local).err().unwrap().to_string();
            assert!(error.starts_with("interface 'none': not in this network namespace"), "{error}");
        };
        crossing.node.within(test).unwrap();
    }
}
