//! Packets between nodes.

use super::*;
use crate::{AdjacencyId, Parcel};

const OTHER: NodeId = NodeId(3);

fn far(port: u8, adjacency: u16) -> Hop {
    Hop { node: OTHER, port: PortId(port), adjacency: AdjacencyId(adjacency) }
}

fn taken(world: &mut World, node: NodeId) -> Vec<(Hop, u32, Vec<u8>)> {
    let World { pool, output, .. } = world;
    let taken = output.to_node(node).drain(..).map(|parcel| {
        let bytes = pool.bytes(&parcel.packet).to_vec();
        pool.free(parcel.packet);
        (parcel.hop, parcel.flow, bytes)
    });
    taken.collect()
}

#[test]
fn what_leaves_by_another_node_is_done_here_but_for_its_frame() {
    let mut world = World::new();
    world.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    world.route("192.0.2.0/24".parse().expect("a prefix"), &[far(5, 9)]);
    world.route("2001:db8:9::/48".parse().expect("a prefix"), &[far(5, 10)]);
    let packet = V4::to(Ipv4Addr::new(192, 0, 2, 1));
    world.receive(0, &packet.frame());
    let mut expected = packet.bytes();
    expected[8] -= 1;
    mended(&mut expected);
    let parcels = taken(&mut world, OTHER);
    assert_eq!((parcels.len(), parcels[0].0, &parcels[0].2), (1, far(5, 9), &expected));
    let back = V4::with(|header| (header.source, header.destination) = (Ipv4Addr::new(192, 0, 2, 1), host_v4(0, 2)));
    let mut back = back.bytes();
    back[20..24].copy_from_slice(&[0x13, 0x89, 0x13, 0x88]);
    let hash = packet::flow::hash_v4(&ipv4::Packet::new_checked(&back[..]).expect("a packet"), 0);
    assert_eq!(parcels[0].1, hash, "the flow's hash, the same as of the other direction");
    world.receive(0, &V6::to("2001:db8:9::1".parse().expect("an address")).frame());
    let parcels = taken(&mut world, OTHER);
    assert_eq!((parcels[0].0, parcels[0].2[7]), (far(5, 10), 63));
    assert_eq!(world.forwarder.counters().to_nodes[3].packets, 2);
    world.assert_no_leak();
}

#[test]
fn the_ingress_node_knows_what_ports_of_others_take() {
    let mut world = World::new();
    world.know_hosts();
    world.route("192.0.2.0/24".parse().expect("a prefix"), &[far(5, 9)]);
    let packet = V4::to(Ipv4Addr::new(192, 0, 2, 1));
    world.receive(0, &packet.frame());
    assert_eq!((world.sent(0).len(), world.dropped(DropReason::EgressDown)), (1, 1), "a port that nobody spoke of");
    world.forwarder.set_remote_mtu(OTHER, PortId(5), 100);
    world.receive(0, &packet.clone().payload(vec![1; 200]).frame());
    assert_eq!(taken(&mut world, OTHER).len(), 3, "fragments");
    world.forwarder.set_remote_mtu(OTHER, PortId(5), 20);
    world.receive(0, &packet.clone().payload(vec![1; 200]).frame());
    assert_eq!(world.dropped(DropReason::TooBig), 1, "less than IP needs, whatever the node says");
    world.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    world.forwarder.set_node_up(OTHER, false);
    world.receive(0, &packet.frame());
    assert_eq!((world.sent(0).len(), world.dropped(DropReason::NodeDown)), (1, 1));
    world.forwarder.set_node_up(OTHER, true);
    world.receive(0, &packet.frame());
    assert_eq!(taken(&mut world, OTHER).len(), 1);
    world.assert_no_leak();
}

#[test]
fn what_other_nodes_looked_up_is_sent_without_another_look() {
    let mut world = World::new();
    world.know_hosts();
    let adjacency = world
        .forwarder
        .neighbours()
        .find(|neighbour| neighbour.address == IpAddr::from(host_v4(1, 2)))
        .map(|neighbour| neighbour.adjacency)
        .expect("a neighbour");
    let egress = |world: &mut World, hop: Hop, bytes: &[u8]| {
        let World { forwarder, pool, output, now, .. } = world;
        let packet = pool.copy_of(bytes).expect("a buffer");
        forwarder.egress(*now, &mut vec![Parcel { hop, flow: 7, packet }], pool, output);
    };
    let hop = Hop { node: NODE, port: PORTS[1], adjacency };
    // To an address that is in no table of this node's.
    let bytes = V4::to(Ipv4Addr::new(192, 0, 2, 1)).bytes();
    egress(&mut world, hop, &bytes);
    let frame = world.sent_one(1);
    assert_eq!((&frame[..6], &frame[HEADER_BYTES..]), (&host_mac(1, 2).0[..], &bytes[..]));
    // The glean looks at the destination, and at nothing else.
    egress(&mut world, Hop::on_link(NODE, PORTS[1]), &V6::new().bytes());
    assert_eq!(world.sent_one(1)[..6], host_mac(1, 2).0);
    for hop in [
        Hop { node: OTHER, ..hop },
        Hop { port: PORTS[0], ..hop },
        Hop { port: PortId(9), ..hop },
        Hop { port: PortId::NOWHERE, ..hop },
        Hop { adjacency: AdjacencyId(4000), ..hop },
        Hop { adjacency: AdjacencyId(u16::MAX), ..hop },
    ] {
        egress(&mut world, hop, &bytes);
    }
    assert_eq!((world.dropped(DropReason::Hop), world.dropped(DropReason::EgressDown)), (4, 2));
    for nonsense in [&[][..], &[0; 60], &[0xff; 60], &[0x45; 3], &[0x60; 3]] {
        egress(&mut world, Hop::on_link(NODE, PORTS[1]), nonsense);
        egress(&mut world, Hop::kernel(NODE), nonsense);
        egress(&mut world, Hop::router(NODE), nonsense);
    }
    assert_eq!(world.sent(1).len(), 0);
    world.taken_by_kernel();
    world.assert_no_leak();
}

#[test]
fn an_own_address_of_another_node_is_reached_at_its_kernel() {
    let mut world = World::new();
    world.route("10.7.0.1/32".parse().expect("a prefix"), &[Hop::kernel(OTHER)]);
    let packet = V4::with(|header| (header.destination, header.ttl) = (Ipv4Addr::new(10, 7, 0, 1), 1));
    world.receive(0, &packet.frame());
    let parcels = taken(&mut world, OTHER);
    assert_eq!((parcels[0].0, &parcels[0].2), (Hop::kernel(OTHER), &packet.bytes()), "its hops are not counted");
    world.assert_no_leak();
}

#[test]
fn neighbours_of_the_cluster_are_reached_by_their_own_routes() {
    let mut world = World::new();
    world.know(1, host_v4(1, 2).into(), host_mac(1, 2));
    let events = world.events();
    let [Event::NeighbourUp { port, address, adjacency }] = events[..] else { panic!("{events:?}") };
    world.route(address.into(), &[Hop { node: NODE, port, adjacency }]);
    world.receive(0, &V4::new().frame());
    assert_eq!(world.sent_one(1)[..6], host_mac(1, 2).0);
}

#[test]
fn a_full_queue_to_a_node_drops_and_counts() {
    let mut world = World::new();
    world.output = Output::new(10);
    world.forwarder.set_remote_mtu(OTHER, PortId(5), 1500);
    world.route("192.0.2.0/24".parse().expect("a prefix"), &[far(5, 9)]);
    let frames = vec![V4::to(Ipv4Addr::new(192, 0, 2, 1)).frame(); 25];
    world.receive_all(0, &frames);
    assert_eq!((taken(&mut world, OTHER).len(), world.dropped(DropReason::NodeQueue)), (10, 15));
    world.assert_no_leak();
}
