use pcap_file::pcap::PcapReader;
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::wire::{Operation, Packet};
use sim::{Span, Time};

use super::*;
use crate::endpoint::Flow;
use crate::network::{Network, NetworkConfig};
use crate::rdma::{RdmaConfig, RdmaEndpoint};
use crate::topology::{NetworkLink, NetworkNode, Topology};

/// An in-memory file that outlives its writer.
#[derive(Clone, Default)]
struct SharedBuffer(Rc<RefCell<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the capture of two directly connected hosts, one of which writes `bytes` bytes to the other.
fn captured(policy: TransportPolicy, bytes: u64, host: Option<HostId>) -> Vec<u8> {
    let rate = crate::rate::LinkRate::from_gbps(100.0).unwrap();
    let link =
        NetworkLink { ends: [0, 1].map(|host| NetworkNode::Host(HostId(host))), rate, delay: Span::from_ns(500.0) };
    let topology = Topology::new(2, 0, vec![link]).unwrap();
    let config = NetworkConfig::new(topology, 1);
    let flow = Flow::new(Time::ZERO, HostId(0), HostId(1), bytes);
    let endpoints = RdmaEndpoint::for_hosts(RdmaConfig::new(NicProfile::modelled(policy)), 2).unwrap();
    let mut network = Network::new(&config, endpoints, vec![flow]);
    let file = SharedBuffer::default();
    let (tap, error) = PcapTap::new(file.clone(), host);
    network.set_tap(crate::rdma::header_tap(Box::new(tap.unwrap())));
    assert!(network.run_flows(Time::from_ps(1_000_000_000_000)));
    assert_eq!(error.get(), None);
    file.0.take()
}

#[test]
fn captured_packets_parse_as_rocev2_with_valid_checksums() {
    for policy in [TransportPolicy::GoBackN, TransportPolicy::Srnic] {
        let file = captured(policy, 5000, None);
        let mut reader = PcapReader::new(file.as_slice()).unwrap();
        assert_eq!(reader.header().datalink, DataLink::ETHERNET);
        let (mut payload_bytes, mut acks, mut before) = (0, 0, Duration::ZERO);
        while let Some(packet) = reader.next_packet() {
            let packet = packet.unwrap();
            assert!(packet.timestamp >= before);
            before = packet.timestamp;
            let (outer, body) = packet.data.split_at(OUTER_HEADER_BYTES);
            let parsed = Packet::new_checked(body).unwrap();
            let ip = &outer[ETHERNET_BYTES..];
            let at = |first: usize| Ipv4Addr::new(ip[first], ip[first + 1], ip[first + 2], ip[first + 3]);
            let (source, destination) = (at(12), at(16));
            let addresses = IpAddresses::V4 { source, destination, identification: 0, dont_fragment: true };
            let source_port = u16::from_be_bytes([ip[20], ip[21]]);
            let destination_port = u16::from_be_bytes([ip[22], ip[23]]);
            assert!(destination_port == UDP_PORT && source_port >= SOURCE_PORT_FIRST);
            assert!(parsed.is_intact(&Encapsulation { addresses, source_port, destination_port }));
            let sum: u32 = ip[..20].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "IPv4 header checksum");
            payload_bytes += parsed.header().payload_bytes;
            acks += u32::from(parsed.header().operation == Operation::Acknowledge);
        }
        assert!(payload_bytes == 5000 && acks > 0, "{policy:?}: {payload_bytes} {acks}");
    }
}

#[test]
fn a_host_capture_holds_what_it_sends_and_receives() {
    let timestamps = |host| {
        let file = captured(TransportPolicy::GoBackN, 5000, host);
        let mut reader = PcapReader::new(file.as_slice()).unwrap();
        std::iter::from_fn(|| reader.next_packet().map(|packet| packet.unwrap().timestamp)).collect::<Vec<_>>()
    };
    let (all, one) = (timestamps(None), timestamps(Some(HostId(1))));
    assert_eq!(all.len(), one.len());
    assert!(one[0] > all[0], "the first packet is received later than it is sent");
}
