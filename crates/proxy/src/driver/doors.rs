//! Listeners that stand in for those of other nodes, and the servers of this one.

use super::Shared;
use super::direct::ProgramEnd;
use super::end::SegmentEnd;
use crate::Tuple;
use control::proxy::Access;
use fabric::device::Device;
use ledger::FallbackReason;
use rustix::io::Errno;
use socket::address;
use socket::rendezvous::{self, Accepted, LaneListener, NoLane, Request};
use socket::segment::Secrets;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;

/// Bytes of two IPv4 addresses with their ports.
const TUPLE_BYTES: usize = 12;
/// Bytes of these, of the secrets of both lanes, and of a span's index.
const PROPOSAL_BYTES: usize = TUPLE_BYTES + 16 + 4;
const _: () = assert!(PROPOSAL_BYTES <= crate::frame::TUPLE_BYTES_MAX);

/// A span of the windows for a connection, and what its records are told by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub index: u32,
    pub secrets: Secrets,
}

/// The addresses of a connection as the frames carry them, who connects and to what; and the place proposed for it.
pub(super) fn encode(tuple: &address::Tuple, offer: Option<Offer>) -> Option<Tuple> {
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (tuple.local, tuple.peer) else { return None };
    let mut bytes = [0; PROPOSAL_BYTES];
    for (half, address) in bytes.chunks_exact_mut(TUPLE_BYTES / 2).zip([from, to]) {
        half[..4].copy_from_slice(&address.ip().octets());
        half[4..].copy_from_slice(&address.port().to_be_bytes());
    }
    let Some(Offer { index, secrets }) = offer else { return Tuple::new(&bytes[..TUPLE_BYTES]) };
    bytes[12..20].copy_from_slice(&secrets.to_acceptor.to_le_bytes());
    bytes[20..28].copy_from_slice(&secrets.to_connector.to_le_bytes());
    bytes[28..].copy_from_slice(&index.to_le_bytes());
    Tuple::new(&bytes)
}

/// As the other node says: hostile.
fn decode(tuple: &Tuple) -> Option<([SocketAddrV4; 2], Option<Offer>)> {
    let (bytes, offer) = tuple.bytes().split_first_chunk::<TUPLE_BYTES>()?;
    let offer = match offer {
        [] => None,
        offer => Some(decode_offer(offer.try_into().ok()?)),
    };
    let half = |at: usize| {
        let ip = Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]);
        SocketAddrV4::new(ip, u16::from_be_bytes([bytes[at + 4], bytes[at + 5]]))
    };
    Some(([half(0), half(6)], offer))
}

fn decode_offer(bytes: &[u8; PROPOSAL_BYTES - TUPLE_BYTES]) -> Offer {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    let index = u32::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
    Offer { index, secrets: Secrets { to_acceptor: word(0), to_connector: word(8) } }
}

/// A program that has connected to a listener which stands in for another node's.
pub(super) fn accept(listener: &LaneListener) -> Result<Accepted, Errno> {
    rendezvous::accept(listener.fd(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
}

/// Whether the rules of this node let a program of `peer` connect there. An honest node has asked before: its monitor
/// was told the same.
pub(super) fn is_admitted(access: &Access, peer: u8, tuple: &Tuple) -> bool {
    decode(tuple).is_none_or(|([_, to], _)| access.admits(peer, to.port()))
}

/// Connects to a server of this node on behalf of a program of `peer`, in the windows if their place is free.
///
/// # Errors
/// What the refusal says.
pub(super) fn connect(shared: &Shared, device: &Device, peer: u8, tuple: &Tuple) -> Result<ProgramEnd, Errno> {
    let ([from, to], offer) = decode(tuple).ok_or(Errno::PROTO)?;
    let is_of = |slot, ip: &Ipv4Addr| shared.address(slot) == Some(IpAddr::V4(*ip));
    if !is_of(peer, from.ip()) || !is_of(shared.setup.own, to.ip()) || from.port() == 0 {
        return Err(Errno::ACCESS);
    }
    let request =
        Request { destination: to.into(), source: Some(from.into()), node: None, opener: address::Opener::Proxy };
    let refused = |no_lane| errno_of(&no_lane);
    let pool = shared.span_pool(peer);
    if let Some((offer, pool)) = offer.zip(pool)
        && let Some(acceptance) = pool.accept(device, offer.index)
    {
        let what = (acceptance.place, offer.secrets);
        let lifeline = rendezvous::connect_in_windows(&shared.rack, &request, what, acceptance.loan.as_fd());
        return Ok(ProgramEnd::Direct(acceptance.into_end(lifeline.map_err(refused)?)));
    }
    let connected = rendezvous::connect_in(&shared.rack, &request).map_err(refused)?;
    Ok(ProgramEnd::Carried(Box::new(SegmentEnd::new(connected.segment, connected.lifeline, false))))
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
        let secrets = Secrets { to_acceptor: 1 << 63 | 2, to_connector: 3 << 56 };
        for offer in [None, Some(Offer { index: 0x0102_0304, secrets })] {
            let encoded = encode(&tuple, offer).expect("IPv4");
            let ([from, to], found) = decode(&encoded).expect("its own");
            assert_eq!((SocketAddr::from(from), SocketAddr::from(to)), (tuple.local, tuple.peer));
            assert_eq!(found, offer);
            for bytes in [&encoded.bytes()[..11], &[0; 13], &[1], &[0; PROPOSAL_BYTES - 1]] {
                assert_eq!(decode(&Tuple::new(bytes).expect("short")), None);
            }
        }
    }

    #[test]
    fn what_a_peer_opens_without_asking_is_held_against_the_rules() {
        let rules = vec![Rule { from: Some(2), ports: Some(vec![(80, 90)]), allows: false }];
        let access = Access { rules, allows_others: true };
        let to = |port: u16| {
            let peer = SocketAddr::from(([127, 77, 0, 1], port));
            encode(&address::Tuple { local: "127.77.0.3:40000".parse().unwrap(), peer }, None).expect("IPv4")
        };
        assert_eq!([79, 80, 90, 91].map(|port| is_admitted(&access, 2, &to(port))), [true, false, false, true]);
        assert!(is_admitted(&access, 1, &to(80)));
    }
}
