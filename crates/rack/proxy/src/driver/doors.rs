//! Listeners that stand in for those of other nodes, and the servers of this one.

use super::Shared;
use super::direct::ProgramEnd;
use super::end::SegmentEnd;
use crate::OpenPayload;
use control::proxy::Access;
use fabric::device::Device;
use rustix::io::Errno;
use segment::Secrets;
use socket::rendezvous::address;
use socket::rendezvous::{self, Accepted, ConnectRequest, LaneListener, NoLane};
use stats_page::FallbackReason;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;

/// Bytes of two IPv4 addresses with their ports.
const TUPLE_BYTES: usize = 12;
/// Bytes of two ports, and a byte before them that says so: two IPv6 addresses would take an `Open` a second line, and
/// can only be those of the two nodes.
const PORTS_BYTES: usize = 5;
/// That byte.
const PORTS_OF_NODES: u8 = 6;
/// Bytes of the secrets of both lanes, and of a span's index, which may follow.
const OFFER_BYTES: usize = 16 + 4;
const _: () = assert!(TUPLE_BYTES + OFFER_BYTES <= crate::frame::OPEN_PAYLOAD_BYTES_MAX);

/// A span of the windows for a connection, and what its records are told by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub index: u32,
    pub secrets: Secrets,
}

/// The addresses of a connection as the frames carry them, who connects and to what; and the place proposed for it.
/// `nodes` are the addresses of the two nodes, in that order. `None` for IPv6 addresses that are not those.
pub(super) fn encode(tuple: &address::Tuple, nodes: [Option<IpAddr>; 2], offer: Option<Offer>) -> Option<OpenPayload> {
    let mut bytes = Vec::with_capacity(TUPLE_BYTES + OFFER_BYTES);
    match (tuple.local, tuple.peer) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            for end in [from, to] {
                bytes.extend(end.ip().octets());
                bytes.extend(end.port().to_be_bytes());
            }
        }
        (from, to) if [Some(from.ip()), Some(to.ip())] == nodes => {
            bytes.push(PORTS_OF_NODES);
            [from, to].iter().for_each(|end| bytes.extend(end.port().to_be_bytes()));
        }
        _ => return None,
    }
    if let Some(Offer { index, secrets }) = offer {
        bytes.extend(secrets.to_acceptor.to_le_bytes());
        bytes.extend(secrets.to_connector.to_le_bytes());
        bytes.extend(index.to_le_bytes());
    }
    OpenPayload::new(&bytes)
}

/// An address without an IP is the node's.
type End = (Option<Ipv4Addr>, u16);

/// As the other node says: hostile.
fn decode(tuple: &OpenPayload) -> Option<([End; 2], Option<Offer>)> {
    let bytes = tuple.bytes();
    let is_of = |ends_bytes: &usize| [*ends_bytes, *ends_bytes + OFFER_BYTES].contains(&bytes.len());
    let (ends, offer) = bytes.split_at([TUPLE_BYTES, PORTS_BYTES].into_iter().find(is_of)?);
    let port = |at: usize| u16::from_be_bytes([ends[at], ends[at + 1]]);
    let ip = |at: usize| Some(Ipv4Addr::new(ends[at], ends[at + 1], ends[at + 2], ends[at + 3]));
    let ends = match (ends.len(), ends[0]) {
        (TUPLE_BYTES, _) => [(ip(0), port(4)), (ip(6), port(10))],
        (_, PORTS_OF_NODES) => [(None, port(1)), (None, port(3))],
        _ => return None,
    };
    Some((ends, <&[u8; OFFER_BYTES]>::try_from(offer).ok().map(decode_offer)))
}

/// The address of an end, which has to be that of its node.
fn address_of((ip, port): End, node: Option<IpAddr>) -> Option<SocketAddr> {
    let node = node.filter(|node| ip.map_or(node.is_ipv6(), |ip| *node == IpAddr::V4(ip)))?;
    Some(SocketAddr::new(node, port))
}

fn decode_offer(bytes: &[u8; OFFER_BYTES]) -> Offer {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    let index = u32::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
    Offer { index, secrets: Secrets { to_acceptor: word(0), to_connector: word(8) } }
}

/// A program that has connected to a listener which stands in for another node's.
pub(super) fn accept(listener: &LaneListener) -> Result<Accepted, Errno> {
    rendezvous::accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
}

/// Whether the rules of this node let a program of `peer` connect there. An honest node has asked before: its monitor
/// was told the same.
pub(super) fn is_admitted(access: &Access, peer: u8, tuple: &OpenPayload) -> bool {
    decode(tuple).is_none_or(|([_, (_, port)], _)| access.admits(peer, port))
}

/// Connects to a server of this node on behalf of a program of `peer`, in the windows if their place is free.
///
/// # Errors
/// What the refusal says.
pub(super) fn connect(shared: &Shared, device: &Device, peer: u8, tuple: &OpenPayload) -> Result<ProgramEnd, Errno> {
    let ([from, to], offer) = decode(tuple).ok_or(Errno::PROTO)?;
    let from = address_of(from, shared.address(peer)).filter(|from| from.port() != 0).ok_or(Errno::ACCESS)?;
    let to = address_of(to, shared.address(shared.setup.own_slot)).ok_or(Errno::ACCESS)?;
    let request = ConnectRequest { destination: to, source: Some(from), node: None, opener: address::Opener::Proxy };
    let refused = |no_lane| errno_of(&no_lane);
    let pool = shared.span_pool(peer);
    if let Some((offer, pool)) = offer.zip(pool)
        && let Some(acceptance) = pool.accept(device, offer.index)
    {
        let what = (acceptance.place, offer.secrets);
        let lifeline = rendezvous::connect_in_windows(&shared.rack, &request, what, acceptance.lease.as_fd());
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

/// The segment of a program that has been accepted, once its handshake is there. `Ok(None)`: not yet.
pub(super) fn hear_handshake(accepted: &Accepted) -> Result<Option<segment::Segment>, Errno> {
    match rendezvous::receive_handshake(accepted.lifeline.as_fd()) {
        // Only proxies say that a connection lies in windows, and to programs.
        Ok(Some((segment, _))) if segment.is_in_windows() => Err(Errno::PROTO),
        Ok(heard) => Ok(heard.map(|(segment, _)| segment)),
        Err(_) => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::Rule;
    use fabric::device::Caching;
    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType};
    use segment::Segment;
    use socket::rendezvous::handshake::{Handshake, WindowSpans};

    #[test]
    fn addresses_survive_the_way_and_hostile_ones_are_none() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let tuple = |local: &str, peer: &str| address::Tuple { local: at(local), peer: at(peer) };
        let tuples = [tuple("127.77.0.1:40000", "127.77.0.2:6379"), tuple("[fd00:77::1]:40000", "[2001:db8::2]:6379")];
        let secrets = Secrets { to_acceptor: 1 << 63 | 2, to_connector: 3 << 56 };
        for tuple in tuples {
            let nodes = [tuple.local, tuple.peer].map(|end| Some(end.ip()));
            for offer in [None, Some(Offer { index: 0x0102_0304, secrets })] {
                let encoded = encode(&tuple, nodes, offer).expect("the nodes' addresses");
                let ([from, to], found) = decode(&encoded).expect("its own");
                let ends = [address_of(from, nodes[0]), address_of(to, nodes[1])];
                assert_eq!((ends, found), ([Some(tuple.local), Some(tuple.peer)], offer));
                let strange = [Some(IpAddr::from([127, 77, 0, 9])), None];
                assert_eq!(strange.map(|node| address_of(from, node)), [None; 2]);
                for bytes in [&encoded.bytes()[..encoded.bytes().len() - 1], &[0; 13], &[1], &[0; 5], &[0; 31]] {
                    assert_eq!(decode(&OpenPayload::new(bytes).expect("short")), None, "{} bytes", bytes.len());
                }
            }
            let others = address::Tuple { local: at("[fd00:77::9]:1"), ..tuple };
            assert_eq!(encode(&others, nodes, None), None);
        }
    }

    #[test]
    fn a_program_that_says_that_it_lies_in_windows_is_turned_away() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let memory = rustix::fs::memfd_create("spans", MemfdFlags::ALLOW_SEALING).expect("memory");
        rustix::fs::ftruncate(&memory, 2 * Segment::WINDOW_BYTES as u64).expect("room");
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK).expect("a seal");
        for caching in [Caching::Cached, Caching::Uncached, Caching::WriteCombined] {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let (program, lifeline) = pair.expect("a pair");
            let place = WindowSpans { caching, ..WindowSpans::new(0, Segment::WINDOW_BYTES as u64) };
            let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
            let handshake = Handshake { secrets, spans: Some(place) }.encode();
            let fds = [memory.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            rustix::net::sendmsg(&program, &[std::io::IoSlice::new(&handshake)], &mut control, SendFlags::empty())
                .expect("room");
            let end = SocketAddr::from(([127, 77, 0, 1], 80));
            let tuple = address::Tuple { local: end, peer: end };
            let accepted = Accepted { lifeline, tuple, opener: address::Opener::Program };
            assert_eq!(hear_handshake(&accepted).map(|heard| heard.is_some()), Err(Errno::PROTO), "{caching}");
        }
    }

    #[test]
    fn what_a_peer_opens_without_asking_is_held_against_the_rules() {
        let rules = vec![Rule { from: Some(2), ports: Some(vec![(80, 90)]), allows: false }];
        let access = Access { rules, allows_others: true };
        let to = |port: u16| {
            let peer = SocketAddr::from(([127, 77, 0, 1], port));
            encode(&address::Tuple { local: "127.77.0.3:40000".parse().unwrap(), peer }, [None; 2], None).expect("IPv4")
        };
        assert_eq!([79, 80, 90, 91].map(|port| is_admitted(&access, 2, &to(port))), [true, false, false, true]);
        assert!(is_admitted(&access, 1, &to(80)));
    }
}
