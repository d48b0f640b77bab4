//! Transit packets that the kernel forwards, or nobody.

use super::*;
use crate::{AdjacencyId, RoutedPacket, TransitPath};

const OTHER: NodeId = NodeId(3);

fn from_node(bed: &mut Testbed, hop: Hop, packet: &[u8]) {
    let packet = bed.pool.alloc_copy(packet).expect("a buffer");
    let mut packets = vec![RoutedPacket { hop, flow: 0, packet }];
    bed.forwarder.egress(bed.now, &mut packets, &mut bed.pool, &mut bed.output);
}

fn from_kernel(bed: &mut Testbed, packet: &[u8]) {
    let mut packets = vec![bed.pool.alloc_copy(packet).expect("a buffer")];
    bed.forwarder.from_kernel(bed.now, &mut packets, &mut bed.pool, &mut bed.output);
}

/// Receives a packet from host 2 on the network of port 1.
fn receive_at_1(bed: &mut Testbed, packet: &V4) {
    bed.receive(1, &framed(own_mac(1), host_mac(1, 2), EtherType::IPV4, &packet.bytes()));
}

/// Port 0 has a kernel interface, port 1 does not.
fn bed(path: TransitPath) -> Testbed {
    let mut bed = Testbed::with(|mut config| {
        config.has_kernel = config.mac == own_mac(0);
        config
    });
    bed.learn_hosts();
    bed.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    let remote = Hop { node: OTHER, port: PortId(5), adjacency: AdjacencyId(9) };
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[remote]);
    bed.forwarder.set_transit(path);
    bed
}

fn all_sent(bed: &mut Testbed) -> usize {
    let to_node = {
        let Testbed { pool, output, .. } = &mut *bed;
        output.to_node(OTHER).drain(..).map(|routed| pool.free(routed.packet)).count()
    };
    bed.sent(0).len() + bed.sent(1).len() + to_node
}

#[test]
fn the_kernel_gets_each_transit_packet_once_with_the_right_ttl() {
    let mut bed = bed(TransitPath::Kernel);
    let remote = Ipv4Addr::new(192, 0, 2, 1);
    // The kernel has its own copy of a frame at port 0.
    bed.receive(0, &V4::to(remote).frame());
    bed.receive(0, &V4::to(host_v4(1, 2)).frame());
    bed.receive(0, &V6::to(host_v6(1, 2)).frame());
    assert_eq!((bed.received_by_kernel().len(), bed.dropped(DropReason::KernelForwards)), (0, 3));
    // At port 1 it has not. Its TTL is decremented by the kernel.
    let packet = V4::with(|header| (header.source, header.destination) = (host_v4(1, 2), remote));
    receive_at_1(&mut bed, &packet);
    assert_eq!(bed.received_by_kernel(), [packet.bytes()]);
    // From another node: the kernel decrements the TTL once more.
    let out = Hop::on_link(NODE, PortId(0));
    for (destination, ttl) in [(host_v4(0, 2), 63), (host_v4(1, 2), 63), (host_v4(0, 2), 255)] {
        let packet = V4::with(|header| (header.source, header.destination, header.ttl) = (remote, destination, ttl));
        from_node(&mut bed, out, &packet.bytes());
        let expected = V4::with(|header| {
            (header.source, header.destination, header.ttl) = (remote, destination, ttl.saturating_add(1));
        });
        assert_eq!(bed.received_by_kernel(), [expected.bytes()]);
    }
    let packet = V6::with(|header| (header.source, header.destination) = (host_v6(9, 9), host_v6(0, 2)));
    from_node(&mut bed, out, &packet.bytes());
    assert_eq!(bed.received_by_kernel()[0][7], packet.bytes()[7] + 1);
    assert_eq!(all_sent(&mut bed), 0, "the router forwards nothing by itself");
    // A packet that the tables lead back to another node would circle.
    from_node(&mut bed, out, &V4::to(remote).bytes());
    assert_eq!((bed.received_by_kernel().len(), bed.dropped(DropReason::Hop)), (0, 1));
    // What the kernel forwards leaves with its TTL.
    from_kernel(&mut bed, &V4::to(remote).bytes());
    let Testbed { pool, output, .. } = &mut bed;
    let sent: Vec<Vec<u8>> = output.to_node(OTHER).iter().map(|routed| pool.bytes(&routed.packet).to_vec()).collect();
    assert_eq!(sent, [V4::to(remote).bytes()]);
    assert_eq!(all_sent(&mut bed), 1);
    bed.forwarder.set_transit(TransitPath::Router);
    bed.receive(0, &V4::to(remote).frame());
    assert_eq!(all_sent(&mut bed), 1);
    bed.assert_no_leak();
}

#[test]
fn nothing_crosses_a_closed_router() {
    let mut bed = bed(TransitPath::Closed);
    let remote = Ipv4Addr::new(192, 0, 2, 1);
    bed.receive(0, &V4::to(remote).frame());
    bed.receive(0, &V4::to(Ipv4Addr::new(198, 51, 100, 1)).frame());
    let packet = V4::with(|header| (header.source, header.destination) = (host_v4(1, 2), host_v4(0, 2)));
    receive_at_1(&mut bed, &packet);
    from_node(&mut bed, Hop::on_link(NODE, PortId(0)), &V4::to(host_v4(0, 2)).bytes());
    assert_eq!((all_sent(&mut bed), bed.received_by_kernel().len(), bed.dropped(DropReason::Filters)), (0, 0, 4));
    // Packets to and from the node itself pass its own filters.
    from_node(&mut bed, Hop::kernel(NODE), &V4::to(own_v4(0)).bytes());
    assert_eq!(bed.received_by_kernel().len(), 1);
    from_kernel(&mut bed, &V4::to(remote).bytes());
    assert_eq!(all_sent(&mut bed), 1);
    bed.assert_no_leak();
}
