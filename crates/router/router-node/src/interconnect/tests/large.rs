//! Large packets, longer than a message.

use super::*;

/// Returns a TCP packet over IPv4 with so many bytes of payload.
fn large_packet(payload_bytes: usize, mark: u8) -> Vec<u8> {
    let mut bytes = vec![0; ipv4::HEADER_BYTES];
    let header = ipv4::Repr {
        source: [10, 0, 0, 1].into(),
        destination: [10, 0, 0, 2].into(),
        protocol: Protocol::TCP,
        ttl: 64,
        traffic_class: 0,
        identification: 0,
        do_not_fragment: true,
        payload_bytes: 20 + payload_bytes,
    };
    header.emit(&mut bytes);
    bytes.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes.extend((0..payload_bytes).map(|at| (at * 31 + at / 251) as u8 ^ mark));
    bytes
}

impl Node {
    fn send_large(&mut self, to: u8, bytes: &[u8], segment_bytes: u16) {
        let mut packet = self.pool.alloc_large().expect("a buffer");
        self.pool.resize(&mut packet, bytes.len());
        self.pool.bytes_mut(&packet).copy_from_slice(bytes);
        assert!(self.pool.set_large(&mut packet, 0, segment_bytes));
        let hop = Hop { node: NodeId(to), port: PortId(3), adjacency: AdjacencyId(0x1234) };
        let now = self.now();
        self.interconnect.send(now, &mut self.pool, NodeId(to), &mut vec![(hop, packet)]);
    }
}

#[test]
fn large_packets_arrive_whole_and_in_order_with_others() {
    for kind in kinds() {
        let mut nodes = pair(kind, &InterconnectSettings::default());
        let mut sent = Vec::new();
        for round in 0..40u8 {
            // Shorter than a message, longer than one, and as long as possible.
            for payload_bytes in [3000, 17_000, 50_000, 65_000] {
                let bytes = large_packet(payload_bytes, round);
                nodes[0].send_large(1, &bytes, 1448);
                sent.push((bytes, 1448));
                let bytes = packet(usize::from(round));
                nodes[0].send(1, std::slice::from_ref(&bytes));
                sent.push((bytes, 0));
            }
            let mut received = Vec::new();
            for _ in 0..ITERATIONS_MAX {
                nodes.iter_mut().for_each(|node| {
                    node.poll();
                });
                let Node { arrived, pool, .. } = &mut nodes[1];
                for (_, packet) in arrived.drain(..) {
                    received.push((pool.bytes(&packet).to_vec(), packet.segment_bytes()));
                    pool.free(packet);
                }
                if received.len() == sent.len() {
                    break;
                }
            }
            assert!(received == sent, "{kind:?}: {} of {} packets in round {round}", received.len(), sent.len());
            sent.clear();
        }
        let counters = [nodes[0].counters(1).sent_packets, nodes[1].counters(0).received_packets];
        assert_eq!(counters, [320; 2], "{kind:?}: each packet counts once");
        let free = nodes.each_ref().map(|node| (node.pool.available(), node.pool.large_available()));
        assert_eq!(free, [(BUFFERS as usize, LARGE_BUFFERS as usize); 2], "{kind:?}");
    }
}

#[test]
fn a_large_packet_without_a_buffer_is_dropped_and_the_next_one_is_not() {
    let mut nodes = pair(TransportKind::Lanes, &InterconnectSettings::default());
    let taken: Vec<_> = (0..LARGE_BUFFERS).map(|_| nodes[1].pool.alloc_large().expect("a buffer")).collect();
    nodes[0].send_large(1, &large_packet(60_000, 1), 1448);
    nodes[0].send(1, &[packet(1)]);
    assert_eq!(collect(&mut nodes, 1, 1), [packet(1)]);
    assert_eq!(nodes[1].counters(0).drop_no_buffer, 1);
    taken.into_iter().for_each(|packet| nodes[1].pool.free(packet));
    nodes[0].send_large(1, &large_packet(60_000, 2), 1448);
    assert!(collect(&mut nodes, 1, 1) == [large_packet(60_000, 2)]);
}

#[test]
fn a_peer_that_is_removed_leaves_no_part_of_a_large_packet() {
    let mut nodes = pair(TransportKind::Lanes, &InterconnectSettings::default());
    for _ in 0..8 {
        nodes[0].send_large(1, &large_packet(65_000, 3), 1448);
    }
    // The ring has no room for all of them: one is sent in part.
    nodes[1].poll();
    nodes[1].take_arrived();
    nodes[1].remove_peer(0);
    nodes[0].remove_peer(1);
    let free = nodes.each_ref().map(|node| node.pool.large_available());
    assert_eq!(free, [LARGE_BUFFERS as usize; 2]);
}
