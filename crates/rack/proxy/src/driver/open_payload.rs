//! The payload of an `Open` between live proxies: the addresses of the connection, and the span proposed for it.

use crate::connection::OpenPayload;
use crate::frame::OPEN_PAYLOAD_BYTES_MAX;
use meeting::Tuple;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Bytes of two IPv4 addresses with their ports.
const IPV4_BYTES: usize = 12;
/// Bytes of two ports, after a byte that says so. Two IPv6 addresses would not fit into the cache line of the header,
/// and can only be those of the two nodes.
const PORTS_BYTES: usize = 5;
/// That byte.
const PORTS_OF_NODES: u8 = 6;
/// Bytes of the secrets of both lanes and of a span's index, which may follow.
const OFFER_BYTES: usize = 16 + 4;
const _: () = assert!(IPV4_BYTES + OFFER_BYTES <= OPEN_PAYLOAD_BYTES_MAX);

/// The bit of an index that every proposal has: earlier releases proposed spans of another layout without it.
const FOR_TCP: u32 = 1 << 31;

/// The secrets by which the records of each lane are distinguished from other bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Secrets {
    pub(super) to_acceptor: u64,
    pub(super) to_connector: u64,
}

/// A span that is proposed for a connection, and the secrets of its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanOffer {
    pub(super) index: u32,
    pub(super) secrets: Secrets,
}

/// The address of an endpoint as the payload has it: without an IP address, it is its node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndpointAddr {
    ip: Option<Ipv4Addr>,
    pub(super) port: u16,
}

impl EndpointAddr {
    /// Returns the full address, if its IP address is that of its node.
    pub(super) fn at_node(self, node: Option<IpAddr>) -> Option<SocketAddr> {
        let node = node.filter(|node| self.ip.map_or(node.is_ipv6(), |ip| *node == IpAddr::V4(ip)))?;
        Some(SocketAddr::new(node, self.port))
    }
}

/// A decoded payload, as the other node wrote it: hostile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OpenRequest {
    pub(super) source: EndpointAddr,
    pub(super) destination: EndpointAddr,
    pub(super) offer: Option<SpanOffer>,
}

/// Encodes the addresses of a connection, seen from the program that connects, and the span proposed for it. `nodes`
/// are the addresses of its node and of the other one. Returns `None` for IPv6 addresses other than these.
pub(super) fn encode(tuple: &Tuple, nodes: [Option<IpAddr>; 2], offer: Option<SpanOffer>) -> Option<OpenPayload> {
    let mut bytes = Vec::with_capacity(IPV4_BYTES + OFFER_BYTES);
    match (tuple.local, tuple.peer) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            for endpoint in [source, destination] {
                bytes.extend(endpoint.ip().octets());
                bytes.extend(endpoint.port().to_be_bytes());
            }
        }
        (source, destination) if [Some(source.ip()), Some(destination.ip())] == nodes => {
            bytes.push(PORTS_OF_NODES);
            [source, destination].iter().for_each(|endpoint| bytes.extend(endpoint.port().to_be_bytes()));
        }
        _ => return None,
    }
    if let Some(SpanOffer { index, secrets }) = offer {
        bytes.extend(secrets.to_acceptor.to_le_bytes());
        bytes.extend(secrets.to_connector.to_le_bytes());
        bytes.extend((index | FOR_TCP).to_le_bytes());
    }
    OpenPayload::new(&bytes)
}

/// Decodes a payload of the other node; returns `None` if it is invalid.
pub(super) fn decode(payload: &OpenPayload) -> Option<OpenRequest> {
    let bytes = payload.bytes();
    let is_len = |addresses: &usize| [*addresses, *addresses + OFFER_BYTES].contains(&bytes.len());
    let (addresses, offer) = bytes.split_at([IPV4_BYTES, PORTS_BYTES].into_iter().find(is_len)?);
    let port = |at: usize| u16::from_be_bytes([addresses[at], addresses[at + 1]]);
    let endpoint = |at: usize| {
        let octets: [u8; 4] = std::array::from_fn(|index| addresses[at + index]);
        EndpointAddr { ip: Some(octets.into()), port: port(at + 4) }
    };
    let of_node = |at: usize| EndpointAddr { ip: None, port: port(at) };
    let [source, destination] = match (addresses.len(), addresses[0]) {
        (IPV4_BYTES, _) => [endpoint(0), endpoint(6)],
        (_, PORTS_OF_NODES) => [of_node(1), of_node(3)],
        _ => return None,
    };
    Some(OpenRequest { source, destination, offer: <&[u8; OFFER_BYTES]>::try_from(offer).ok().and_then(decode_offer) })
}

fn decode_offer(bytes: &[u8; OFFER_BYTES]) -> Option<SpanOffer> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    let index = u32::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
    let secrets = Secrets { to_acceptor: word(0), to_connector: word(8) };
    (index & FOR_TCP != 0).then_some(SpanOffer { index: index & !FOR_TCP, secrets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_decoded_as_encoded_and_invalid_payloads_are_rejected() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let tuple = |local: &str, peer: &str| Tuple { local: at(local), peer: at(peer) };
        let tuples = [tuple("127.77.0.1:40000", "127.77.0.2:6379"), tuple("[fd00:77::1]:40000", "[2001:db8::2]:6379")];
        let secrets = Secrets { to_acceptor: 1 << 63 | 2, to_connector: 3 << 56 };
        for tuple in tuples {
            let nodes = [tuple.local, tuple.peer].map(|endpoint| Some(endpoint.ip()));
            for offer in [None, Some(SpanOffer { index: 0x0102_0304, secrets })] {
                let encoded = encode(&tuple, nodes, offer).expect("the nodes' addresses");
                let decoded = decode(&encoded).expect("a valid payload");
                let addresses = [decoded.source.at_node(nodes[0]), decoded.destination.at_node(nodes[1])];
                assert_eq!((addresses, decoded.offer), ([Some(tuple.local), Some(tuple.peer)], offer));
                let other_nodes = [Some(IpAddr::from([127, 77, 0, 9])), None];
                assert_eq!(other_nodes.map(|node| decoded.source.at_node(node)), [None; 2]);
                for bytes in [&encoded.bytes()[..encoded.bytes().len() - 1], &[0; 13], &[1], &[0; 5], &[0; 31]] {
                    assert_eq!(decode(&OpenPayload::new(bytes).expect("short")), None, "{} bytes", bytes.len());
                }
            }
            let others = Tuple { local: at("[fd00:77::9]:1"), ..tuple };
            assert_eq!(encode(&others, nodes, None), None);
        }
    }
}
