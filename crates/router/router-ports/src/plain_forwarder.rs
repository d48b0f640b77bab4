//! The simplest forwarder by AF_PACKET: a blocking call that receives and one that sends. Benchmarks compare the router
//! with it: it has neither tables nor neighbours, and large packets stay whole.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use packet::ethernet::{EtherType, Frame, HEADER_BYTES, MacAddress};
use packet::ipv4;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use crate::interface::{Interface, InterfaceIndex};
use crate::offload::VIRTIO_HEADER_BYTES;
use crate::packet_socket::bind;
use crate::system::set_option;

/// The longest large packet with its headers.
const FRAME_BYTES_MAX: usize = 70_000;
const RECEIVE_QUEUE_BYTES: usize = 16 << 20;
/// Interval of checks whether to end.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Forwards the IPv4 packets of one direction.
pub struct PlainForwarder {
    from: OwnedFd,
    to: OwnedFd,
    source: MacAddress,
    destination: MacAddress,
}

impl PlainForwarder {
    /// Opens both interfaces. Packets are sent to `destination`, whatever their IP address is.
    ///
    /// # Errors
    /// Fails if the sockets cannot be opened, which takes `CAP_NET_RAW`.
    pub fn open(from: &Interface, to: &Interface, destination: MacAddress) -> io::Result<PlainForwarder> {
        let receiver = socket(from.index, libc::ETH_P_ALL as u16)?;
        set_option(&receiver, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1)?;
        sockopt::set_socket_timeout(&receiver, sockopt::Timeout::Recv, Some(CHECK_INTERVAL))?;
        sockopt::set_socket_recv_buffer_size_force(&receiver, RECEIVE_QUEUE_BYTES)?;
        let sender = socket(to.index, 0)?;
        set_option(&sender, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &1)?;
        Ok(PlainForwarder { from: receiver, to: sender, source: to.mac, destination })
    }

    /// Forwards until `is_over`.
    pub fn run(&self, is_over: &AtomicBool) {
        let mut buffer = vec![0; FRAME_BYTES_MAX];
        while !is_over.load(Ordering::Relaxed) {
            let Ok((bytes, _)) = rustix::net::recv(&self.from, &mut buffer[..], RecvFlags::empty()) else { continue };
            let frame = buffer[..bytes].get_mut(VIRTIO_HEADER_BYTES..).unwrap_or_default();
            if self.rewrite(frame).is_some() {
                // A frame that is refused is lost, as on a wire.
                let _ = rustix::net::send(&self.to, &buffer[..bytes], SendFlags::empty());
            }
        }
    }

    /// Decrements the TTL of an IPv4 packet, and addresses its frame to the next hop.
    fn rewrite(&self, frame: &mut [u8]) -> Option<()> {
        let mut view = Frame::new_checked(&mut *frame).ok()?;
        view.network_header().ok().filter(|network| network.ethertype == EtherType::IPV4)?;
        view.set_source(self.source);
        view.set_destination(self.destination);
        let mut packet = ipv4::Packet::new_checked(frame.get_mut(HEADER_BYTES..)?).ok()?;
        (packet.ttl() > 1).then(|| packet.decrement_ttl())
    }
}

fn socket(interface: InterfaceIndex, ethertype: u16) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1)?;
    bind(&socket, interface, ethertype)?;
    Ok(socket)
}
