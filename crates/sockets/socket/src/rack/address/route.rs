//! Which addresses are this machine's, and the source address of a connection to one: asked of the kernel by rtnetlink
//! (`rtnetlink(7)`).

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::sockaddr::array;

/// Returns the source address that TCP would show for a connection to `ip`, if `ip` is an address of this machine.
///
/// The kernel is asked each time, except for loopback addresses: that takes microseconds, and a cached route could
/// send a connection to the wrong machine just after an address has moved.
///
/// # Errors
/// The errors of socket, sendto and recvfrom; `PROTO` if the kernel's reply is malformed.
pub fn local_source(ip: IpAddr, scope: u32) -> Result<Option<IpAddr>, Errno> {
    match ip {
        IpAddr::V4(v4) if v4.is_loopback() => Ok(Some(Ipv4Addr::LOCALHOST.into())),
        IpAddr::V6(v6) if v6.is_loopback() => Ok(Some(ip)),
        _ if ip.is_unspecified() || ip.is_multicast() => Ok(None),
        _ => ask_route(ip, scope),
    }
}

const ROUTE_SEQUENCE: u32 = 0x43_52_4f_53;
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
/// Twice what the kernel replies with all attributes of a route.
const REPLY_BYTES: usize = 512;

fn ask_route(ip: IpAddr, scope: u32) -> Result<Option<IpAddr>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    let request = route_request(ip, scope);
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let mut reply = [0_u8; REPLY_BYTES];
    // The kernel has queued its reply before the send returns, so there is nothing to wait for.
    let length = receive(&socket, &mut reply)?;
    parse_route_reply(&reply[..length])
}

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT).map(|(length, _)| length)
}

fn route_request(ip: IpAddr, scope: u32) -> Vec<u8> {
    let (family, octets) = match ip {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let mut request = vec![0_u8; HEADER_BYTES + ROUTE_BYTES];
    request[4..6].copy_from_slice(&libc::RTM_GETROUTE.to_ne_bytes());
    request[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    request[8..12].copy_from_slice(&ROUTE_SEQUENCE.to_ne_bytes());
    request[HEADER_BYTES] = family as u8;
    request[HEADER_BYTES + 1] = octets.len() as u8 * 8;
    push_attribute(&mut request, libc::RTA_DST, &octets);
    if scope != 0 {
        push_attribute(&mut request, libc::RTA_OIF, &scope.to_ne_bytes());
    }
    let length = request.len() as u32;
    request[..4].copy_from_slice(&length.to_ne_bytes());
    request
}

fn push_attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(value);
}

/// Returns the preferred source in the kernel's reply, if the route is local.
fn parse_route_reply(reply: &[u8]) -> Result<Option<IpAddr>, Errno> {
    let length = array(reply, 0).map(u32::from_ne_bytes).ok_or(Errno::PROTO)? as usize;
    let kind = array(reply, 4).map(u16::from_ne_bytes).ok_or(Errno::PROTO)?;
    let sequence = array(reply, 8).map(u32::from_ne_bytes).ok_or(Errno::PROTO)?;
    if sequence != ROUTE_SEQUENCE || length > reply.len() {
        return Err(Errno::PROTO);
    }
    if i32::from(kind) == libc::NLMSG_ERROR {
        return Ok(None); // No route: not an address of this machine.
    }
    if kind != libc::RTM_NEWROUTE || length < HEADER_BYTES + ROUTE_BYTES {
        return Err(Errno::PROTO);
    }
    if reply[HEADER_BYTES + 7] != libc::RTN_LOCAL {
        return Ok(None);
    }
    let attributes = &reply[HEADER_BYTES + ROUTE_BYTES..length];
    let source = find_attribute(attributes, libc::RTA_PREFSRC).or_else(|| find_attribute(attributes, libc::RTA_DST));
    source.and_then(ip_of_octets).map(Some).ok_or(Errno::PROTO)
}

fn find_attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(array(attributes, 0)?));
        let found = u16::from_ne_bytes(array(attributes, 2)?);
        if length < 4 {
            return None;
        }
        if found == kind {
            return attributes.get(4..length);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

fn ip_of_octets(octets: &[u8]) -> Option<IpAddr> {
    match octets.len() {
        4 => array::<4>(octets, 0).map(IpAddr::from),
        16 => array::<16>(octets, 0).map(IpAddr::from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv6Addr;

    proptest! {
        #[test]
        fn any_bytes_of_a_route_reply_are_parsed_without_a_panic(reply in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reply = reply;
            let length = (reply.len() as u32).to_ne_bytes();
            if reply.len() >= 12 {
                reply[..4].copy_from_slice(&length);
                reply[4..6].copy_from_slice(&libc::RTM_NEWROUTE.to_ne_bytes());
                reply[8..12].copy_from_slice(&ROUTE_SEQUENCE.to_ne_bytes());
            }
            let _ = parse_route_reply(&reply);
        }
    }

    /// Returns the address that TCP would use towards `ip`, without the need for a listener.
    fn source_by_datagram(ip: IpAddr) -> std::io::Result<IpAddr> {
        let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        Ok(socket.local_addr()?.ip())
    }

    #[test]
    fn the_source_of_a_local_connection_is_that_of_the_kernel() {
        let mut ips: Vec<IpAddr> = ["127.0.0.1", "127.77.0.1"].map(|ip| ip.parse().unwrap()).to_vec();
        // The machine's address towards the outside, if it has one: no packet is sent.
        ips.extend(source_by_datagram("192.0.2.200".parse().unwrap()));
        ips.extend(source_by_datagram("2001:db8::1".parse().unwrap()));
        for ip in ips {
            assert_eq!(local_source(ip, 0), Ok(source_by_datagram(ip).ok()), "{ip}");
        }
    }

    #[test]
    fn addresses_of_other_machines_are_not_local() {
        for ip in
            ["198.51.100.7", "8.8.8.8", "2001:db8::77", "224.0.0.1", "255.255.255.255", "ff02::1", "0.0.0.0", "::"]
        {
            assert!(matches!(local_source(ip.parse().unwrap(), 0), Ok(None)), "{ip}");
        }
    }
}
