//! Large packets, which are segmented as late as possible.

use super::*;
use crate::output::RoutedPacket;

/// A segment is as long as a packet of the MTU.
const SEGMENT_BYTES: u16 = MTU_BYTES - 40;
const HEADERS_BYTES: usize = 40;

/// Returns a TCP segment with so many bytes of payload.
fn tcp(payload_bytes: usize) -> Vec<u8> {
    let header = [0x13, 0x88, 0x13, 0x89, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x19, 1, 0, 0, 0, 0, 0];
    let payload = (0..payload_bytes).map(|at| (at * 7 + at / 256) as u8);
    header.into_iter().chain(payload).collect()
}

fn packet(payload_bytes: usize, do_not_fragment: bool) -> V4 {
    let header = |header: &mut ipv4::Repr| {
        (header.protocol, header.do_not_fragment) = (Protocol::TCP, do_not_fragment);
    };
    V4::with(header).payload(tcp(payload_bytes))
}

impl Testbed {
    /// Creates a testbed with buffers for large packets, whose port 1 takes or refuses them.
    fn large(takes_large: bool) -> Testbed {
        let mut bed = Testbed::with(|config| PortConfig { takes_large, ..config });
        bed.pool = Pool::with_large(BUFFERS, 2048, 128, 4);
        bed.learn_hosts();
        bed
    }

    fn receive_large(&mut self, frame: &[u8], segment_bytes: u16) {
        let mut packet = self.pool.alloc_large().expect("a buffer");
        self.pool.resize(&mut packet, frame.len());
        self.pool.bytes_mut(&packet).copy_from_slice(frame);
        assert!(self.pool.set_large(&mut packet, HEADER_BYTES, segment_bytes), "{frame:02x?}");
        let Testbed { forwarder, pool, output, now, .. } = self;
        forwarder.ingress(*now, PORTS[0], &mut vec![packet], pool, output);
    }

    fn assert_no_large_leak(&self) {
        self.assert_no_leak();
        assert_eq!(self.pool.large_available(), 4, "all large buffers are free");
    }
}

/// Asserts that these are the segments of a stream with this payload, none longer than the MTU.
fn assert_stream(frames: &[Vec<u8>], payload: &[u8]) {
    let mut received = Vec::new();
    for frame in frames {
        let view = v4_of(frame);
        assert_eq!((view.ttl(), view.protocol()), (63, Protocol::TCP));
        assert!(view.total_bytes() <= usize::from(MTU_BYTES));
        let segment = packet::tcp::Packet::new_checked(view.payload()).expect("a segment");
        assert_eq!(segment.sequence() as usize, 1 + received.len());
        received.extend_from_slice(segment.payload());
    }
    assert!(received == payload, "{} of {} B", received.len(), payload.len());
}

#[test]
fn a_large_packet_leaves_whole_if_the_port_takes_it_and_its_segments_count() {
    let mut bed = Testbed::large(true);
    let sent = packet(50_000, true);
    bed.receive_large(&sent.frame(), SEGMENT_BYTES);
    let queued = &bed.output.to_ports[1];
    assert_eq!(queued.iter().map(|packet| packet.segment_bytes()).collect::<Vec<_>>(), [SEGMENT_BYTES]);
    let frame = bed.sent_one(1);
    let mut expected = sent.bytes();
    ipv4::Packet::new_checked(&mut expected[..]).expect("a packet").decrement_ttl();
    assert!(frame[HEADER_BYTES..] == expected, "only TTL and checksum change");
    let counters = &bed.forwarder.counters().ports;
    let segments = 50_000usize.div_ceil(usize::from(SEGMENT_BYTES));
    let bytes = (50_000 + segments * (HEADER_BYTES + HEADERS_BYTES)) as u64;
    for traffic in [counters[0].received, counters[1].sent] {
        assert_eq!((traffic.packets, traffic.bytes), (segments as u64, bytes));
    }
    bed.assert_no_large_leak();
}

#[test]
fn a_large_packet_is_segmented_for_a_port_that_takes_none() {
    let mut bed = Testbed::large(false);
    bed.receive_large(&packet(50_000, true).frame(), SEGMENT_BYTES);
    let frames = bed.sent(1);
    assert_stream(&frames, &tcp(50_000)[20..]);
    assert_eq!(bed.forwarder.counters().ports[1].sent.packets, frames.len() as u64);
    bed.assert_no_large_leak();
}

#[test]
fn the_length_of_a_segment_is_compared_with_the_mtu() {
    let mut bed = Testbed::large(true);
    bed.receive_large(&packet(5000, true).frame(), SEGMENT_BYTES + 1);
    assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::TooBig)), (0, 4));
    let error = bed.sent_one(0);
    let view = v4_of(&error);
    let message = packet::icmpv4::Message::parse(view.payload()).expect("a message");
    assert!(format!("{message:?}").contains("1500"), "{message:?}");
    bed.assert_no_large_leak();

    // Segments of a packet that may be fragmented are.
    bed.receive_large(&packet(5000, false).frame(), 2000 - 148);
    let frames = bed.sent(1);
    assert!(frames.iter().all(|frame| v4_of(frame).total_bytes() <= usize::from(MTU_BYTES)));
    assert_eq!(frames.len(), 2 + 2 + 1, "the last one fits");
    let payload_bytes: usize = frames.iter().map(|frame| v4_of(frame).payload().len()).sum();
    assert_eq!(payload_bytes, 5000 + 3 * 20);
    bed.assert_no_large_leak();
}

#[test]
fn an_expired_large_packet_is_reported_once_and_dropped() {
    let mut bed = Testbed::large(true);
    let mut sent = packet(5000, true);
    sent.header.ttl = 1;
    bed.receive_large(&sent.frame(), SEGMENT_BYTES);
    assert_eq!((bed.sent(0).len(), bed.sent(1).len(), bed.dropped(DropReason::TimeExceeded)), (1, 0, 4));
    bed.assert_no_large_leak();
}

#[test]
fn segments_without_a_buffer_are_dropped_and_counted() {
    let mut bed = Testbed::large(false);
    let taken: Vec<_> = (2..BUFFERS).filter_map(|_| bed.pool.alloc()).collect();
    bed.receive_large(&packet(5000, true).frame(), SEGMENT_BYTES);
    assert_eq!(bed.sent(1).len(), 2);
    assert!(bed.dropped(DropReason::NoBuffer) > 0, "{:?}", bed.drops());
    taken.into_iter().for_each(|packet| bed.pool.free(packet));
    bed.assert_no_large_leak();
}

#[test]
fn a_large_packet_stays_whole_between_nodes() {
    let mut bed = Testbed::large(true);
    bed.forwarder.set_remote_mtu(NodeId(1), PORTS[0], MTU_BYTES);
    bed.route("10.9.0.0/16".parse().expect("a prefix"), &[Hop::on_link(NodeId(1), PORTS[0])]);
    let mut sent = packet(50_000, true);
    sent.header.destination = Ipv4Addr::new(10, 9, 0, 1);
    bed.receive_large(&sent.frame(), SEGMENT_BYTES);
    let routed: Vec<RoutedPacket> = bed.output.to_nodes[1].drain(..).collect();
    assert_eq!(routed.iter().map(|routed| routed.packet.segment_bytes()).collect::<Vec<_>>(), [SEGMENT_BYTES]);
    // At the egress node, whose port has another MTU than announced, it is dropped.
    let hop = Hop::on_link(NODE, PORTS[1]);
    let mut arrived = routed.into_iter().map(|routed| RoutedPacket { hop, ..routed }).collect();
    let config = bed.forwarder.port_config(PORTS[1]).expect("a port").clone();
    bed.set_port(PORTS[1], PortConfig { mtu_bytes: MTU_BYTES - 1, ..config });
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    forwarder.egress(*now, &mut arrived, pool, output);
    assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::TooBig)), (0, 35));
    bed.assert_no_large_leak();
}
