//! Packets between nodes.

use super::*;
use crate::{AdjacencyId, RoutedPacket};

const OTHER: NodeId = NodeId(3);

fn remote_hop(port: u8, adjacency: u16) -> Hop {
    Hop { node: OTHER, port: PortId(port), adjacency: AdjacencyId(adjacency) }
}

fn sent_to_node(bed: &mut Testbed, node: NodeId) -> Vec<(Hop, u32, Vec<u8>)> {
    let Testbed { pool, output, .. } = bed;
    let taken = output.to_node(node).drain(..).map(|routed| {
        let bytes = pool.bytes(&routed.packet).to_vec();
        pool.free(routed.packet);
        (routed.hop, routed.flow, bytes)
    });
    taken.collect()
}

#[test]
fn a_packet_to_another_node_is_complete_except_for_its_frame() {
    let mut bed = Testbed::new();
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[remote_hop(5, 9)]);
    bed.route("2001:db8:9::/48".parse().expect("a prefix"), &[remote_hop(5, 10)]);
    let packet = V4::to(Ipv4Addr::new(192, 0, 2, 1));
    bed.receive(0, &packet.frame());
    let mut expected = packet.bytes();
    expected[8] -= 1;
    with_checksum(&mut expected);
    let routed_packets = sent_to_node(&mut bed, OTHER);
    assert_eq!((routed_packets.len(), routed_packets[0].0, &routed_packets[0].2), (1, remote_hop(5, 9), &expected));
    let back = V4::with(|header| (header.source, header.destination) = (Ipv4Addr::new(192, 0, 2, 1), host_v4(0, 2)));
    let mut back = back.bytes();
    back[20..24].copy_from_slice(&[0x13, 0x89, 0x13, 0x88]);
    let hash = packet::flow::hash_v4(&ipv4::Packet::new_checked(&back[..]).expect("a packet"), 0);
    assert_eq!(routed_packets[0].1, hash, "the flow hash is that of the opposite direction");
    bed.receive(0, &V6::to("2001:db8:9::1".parse().expect("an address")).frame());
    let routed_packets = sent_to_node(&mut bed, OTHER);
    assert_eq!((routed_packets[0].0, routed_packets[0].2[7]), (remote_hop(5, 10), 63));
    assert_eq!(bed.forwarder.counters().to_nodes[3].packets, 2);
    bed.assert_no_leak();
}

#[test]
fn the_ingress_node_applies_the_mtus_of_remote_ports() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[remote_hop(5, 9)]);
    let packet = V4::to(Ipv4Addr::new(192, 0, 2, 1));
    bed.receive(0, &packet.frame());
    assert_eq!((bed.sent(0).len(), bed.dropped(DropReason::EgressDown)), (1, 1), "a port without an announced MTU");
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 100);
    bed.receive(0, &packet.clone().payload(vec![1; 200]).frame());
    assert_eq!(sent_to_node(&mut bed, OTHER).len(), 3, "fragments");
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 20);
    bed.receive(0, &packet.clone().payload(vec![1; 200]).frame());
    assert_eq!(bed.dropped(DropReason::TooBig), 1, "an MTU below the minimum of IPv4");
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    bed.forwarder.set_node_up(OTHER, false);
    bed.receive(0, &packet.frame());
    assert_eq!((bed.sent(0).len(), bed.dropped(DropReason::NodeDown)), (1, 1));
    bed.forwarder.set_node_up(OTHER, true);
    bed.receive(0, &packet.frame());
    assert_eq!(sent_to_node(&mut bed, OTHER).len(), 1);
    bed.assert_no_leak();
}

#[test]
fn packets_that_other_nodes_looked_up_are_sent_without_a_lookup() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let adjacency = bed
        .forwarder
        .neighbours()
        .find(|neighbour| neighbour.address == IpAddr::from(host_v4(1, 2)))
        .map(|neighbour| neighbour.adjacency)
        .expect("a neighbour");
    let egress = |bed: &mut Testbed, hop: Hop, bytes: &[u8]| {
        let Testbed { forwarder, pool, output, now, .. } = bed;
        let packet = pool.alloc_copy(bytes).expect("a buffer");
        forwarder.egress(*now, &mut vec![RoutedPacket { hop, flow: 7, packet }], pool, output);
    };
    let hop = Hop { node: NODE, port: PORTS[1], adjacency };
    // To an address without a route at this node.
    let bytes = V4::to(Ipv4Addr::new(192, 0, 2, 1)).bytes();
    egress(&mut bed, hop, &bytes);
    let frame = bed.sent_one(1);
    assert_eq!((&frame[..6], &frame[HEADER_BYTES..]), (&host_mac(1, 2).0[..], &bytes[..]));
    // The glean adjacency depends only on the destination.
    egress(&mut bed, Hop::on_link(NODE, PORTS[1]), &V6::new().bytes());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 2).0);
    for hop in [
        Hop { node: OTHER, ..hop },
        Hop { port: PORTS[0], ..hop },
        Hop { port: PortId(9), ..hop },
        Hop { port: PortId::NOWHERE, ..hop },
        Hop { adjacency: AdjacencyId(4000), ..hop },
        Hop { adjacency: AdjacencyId(u16::MAX), ..hop },
    ] {
        egress(&mut bed, hop, &bytes);
    }
    assert_eq!((bed.dropped(DropReason::Hop), bed.dropped(DropReason::EgressDown)), (4, 2));
    for invalid in [&[][..], &[0; 60], &[0xff; 60], &[0x45; 3], &[0x60; 3]] {
        egress(&mut bed, Hop::on_link(NODE, PORTS[1]), invalid);
        egress(&mut bed, Hop::kernel(NODE), invalid);
        egress(&mut bed, Hop::router(NODE), invalid);
    }
    assert_eq!(bed.sent(1).len(), 0);
    bed.received_by_kernel();
    bed.assert_no_leak();
}

#[test]
fn an_address_of_another_node_is_delivered_to_its_kernel() {
    let mut bed = Testbed::new();
    bed.route("10.7.0.1/32".parse().expect("a prefix"), &[Hop::kernel(OTHER)]);
    let packet = V4::with(|header| (header.destination, header.ttl) = (Ipv4Addr::new(10, 7, 0, 1), 1));
    bed.receive(0, &packet.frame());
    let routed_packets = sent_to_node(&mut bed, OTHER);
    assert_eq!(
        (routed_packets[0].0, &routed_packets[0].2),
        (Hop::kernel(OTHER), &packet.bytes()),
        "the TTL is not decremented"
    );
    bed.assert_no_leak();
}

#[test]
fn neighbours_of_the_cluster_are_reached_by_host_routes() {
    let mut bed = Testbed::new();
    bed.learn(1, host_v4(1, 2).into(), host_mac(1, 2));
    let events = bed.events();
    let [Event::NeighbourUp { port, address, adjacency }] = events[..] else { panic!("{events:?}") };
    bed.route(address.into(), &[Hop { node: NODE, port, adjacency }]);
    bed.receive(0, &V4::new().frame());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 2).0);
}

#[test]
fn a_full_queue_to_a_node_drops_and_counts() {
    let mut bed = Testbed::new();
    bed.output = Output::new(10);
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[remote_hop(5, 9)]);
    let frames = vec![V4::to(Ipv4Addr::new(192, 0, 2, 1)).frame(); 25];
    bed.receive_all(0, &frames);
    assert_eq!((sent_to_node(&mut bed, OTHER).len(), bed.dropped(DropReason::NodeQueue)), (10, 15));
    bed.assert_no_leak();
}
