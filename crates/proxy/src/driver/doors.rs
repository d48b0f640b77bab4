//! Listeners that stand in for those of other nodes, and the servers of this one.

use super::Shared;
use super::end::SegmentEnd;
use crate::Tuple;
use control::proxy::Access;
use ledger::FallbackReason;
use rustix::io::Errno;
use socket::address;
use socket::rendezvous::{self, Accepted, LaneListener, NoLane, Request};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;

/// Bytes of two IPv4 addresses with their ports.
const TUPLE_BYTES: usize = 12;

/// The addresses of a connection as the frames carry them: who connects, and to what.
pub(super) fn encode(tuple: &address::Tuple) -> Option<Tuple> {
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (tuple.local, tuple.peer) else { return None };
    let mut bytes = [0; TUPLE_BYTES];
    for (half, address) in bytes.chunks_exact_mut(TUPLE_BYTES / 2).zip([from, to]) {
        half[..4].copy_from_slice(&address.ip().octets());
        half[4..].copy_from_slice(&address.port().to_be_bytes());
    }
    Tuple::new(&bytes)
}

/// As the other node says: hostile.
fn decode(tuple: &Tuple) -> Option<[SocketAddrV4; 2]> {
    let bytes: &[u8; TUPLE_BYTES] = tuple.bytes().try_into().ok()?;
    let half = |at: usize| {
        let ip = Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]);
        SocketAddrV4::new(ip, u16::from_be_bytes([bytes[at + 4], bytes[at + 5]]))
    };
    Some([half(0), half(6)])
}

/// A program that has connected to a listener which stands in for another node's.
pub(super) fn accept(listener: &LaneListener) -> Result<Accepted, Errno> {
    rendezvous::accept(listener.fd(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
}

/// Whether the rules of this node let a program of `peer` connect there. An honest node has asked before: its monitor
/// was told the same.
pub(super) fn is_admitted(access: &Access, peer: u8, tuple: &Tuple) -> bool {
    decode(tuple).is_none_or(|[_, to]| access.admits(peer, to.port()))
}

/// Connects to a server of this node on behalf of a program of `peer`.
///
/// # Errors
/// What the refusal says.
pub(super) fn connect(shared: &Shared, peer: u8, tuple: &Tuple) -> Result<SegmentEnd, Errno> {
    let [from, to] = decode(tuple).ok_or(Errno::PROTO)?;
    let is_of = |slot, ip: &Ipv4Addr| shared.address(slot) == Some(IpAddr::V4(*ip));
    if !is_of(peer, from.ip()) || !is_of(shared.setup.own, to.ip()) || from.port() == 0 {
        return Err(Errno::ACCESS);
    }
    let request =
        Request { destination: to.into(), source: Some(from.into()), node: None, opener: address::Opener::Proxy };
    let connected = rendezvous::connect_in(&shared.rack, &request).map_err(|no_lane| errno_of(&no_lane))?;
    Ok(SegmentEnd::new(connected.segment, connected.lifeline, false))
}

fn errno_of(no_lane: &NoLane) -> Errno {
    match no_lane.reason {
        FallbackReason::NoListener => Errno::CONNREFUSED,
        FallbackReason::BacklogFull => Errno::AGAIN,
        FallbackReason::PeerRefused => Errno::ACCESS,
        _ => no_lane.errno.unwrap_or(Errno::CONNREFUSED),
    }
}

/// The segment of a program that has been accepted, once its hello is there. `Ok(None)`: not yet.
pub(super) fn hear_hello(accepted: &Accepted) -> Result<Option<socket::segment::Segment>, Errno> {
    match rendezvous::receive_hello(accepted.lifeline.as_fd()) {
        Ok(heard) => Ok(heard.map(|(segment, _)| segment)),
        Err(_) => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::Rule;

    #[test]
    fn addresses_survive_the_way_and_hostile_ones_are_none() {
        let tuple =
            address::Tuple { local: "127.77.0.1:40000".parse().unwrap(), peer: "127.77.0.2:6379".parse().unwrap() };
        let encoded = encode(&tuple).expect("IPv4");
        let [from, to] = decode(&encoded).expect("its own");
        assert_eq!((SocketAddr::from(from), SocketAddr::from(to)), (tuple.local, tuple.peer));
        for bytes in [&encoded.bytes()[..11], &[0; 13], &[1]] {
            assert_eq!(decode(&Tuple::new(bytes).expect("short")), None);
        }
    }

    #[test]
    fn what_a_peer_opens_without_asking_is_held_against_the_rules() {
        let rules = vec![Rule { from: Some(2), ports: Some(vec![(80, 90)]), allows: false }];
        let access = Access { rules, allows_others: true };
        let to = |port: u16| {
            let peer = SocketAddr::from(([127, 77, 0, 1], port));
            encode(&address::Tuple { local: "127.77.0.3:40000".parse().unwrap(), peer }).expect("IPv4")
        };
        assert_eq!([79, 80, 90, 91].map(|port| is_admitted(&access, 2, &to(port))), [true, false, false, true]);
        assert!(is_admitted(&access, 1, &to(80)));
    }
}
