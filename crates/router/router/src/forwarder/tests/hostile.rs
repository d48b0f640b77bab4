//! Arbitrary input at ports, from other nodes or from the kernel: no panic, no lost buffer, every packet is sent or
//! counted.

use sim::Random;

use super::*;
use crate::{AdjacencyId, Filter, RoutedPacket};

/// Returns a valid packet of a random kind with some bytes changed.
fn corrupted(random: &mut Random) -> Vec<u8> {
    let seeds = [
        V4::new().frame(),
        V4::new().options(&[7, 7, 4, 0, 0, 0, 0, 68, 8, 5, 0, 0, 0, 0, 0, 0]).frame(),
        V4::to(own_v4(0)).frame(),
        V4::to(Ipv4Addr::new(169, 254, 0, 2)).frame(),
        V4::with(|header| header.source = host_v4(1, 255)).frame(),
        V6::new().frame(),
        V6::to(own_v6(0)).frame(),
        V6::with(|header| header.next_header = ipv6::FRAGMENT).payload(vec![17, 0, 0, 8, 0, 0, 0, 1, 1]).frame(),
        V4::new().payload(vec![3; 1600]).frame(),
        framed(MacAddress::BROADCAST, host_mac(0, 2), EtherType::ARP, &[0, 1, 8, 0, 6, 4, 0, 1]),
    ];
    let mut frame = seeds[random.below(seeds.len() as u64) as usize].clone();
    for _ in 0..random.below(6) {
        let at = random.below(frame.len().min(80) as u64) as usize;
        frame[at] = random.bits() as u8;
    }
    if random.chance(0.2) {
        frame.truncate(random.below(frame.len() as u64 + 1) as usize);
    }
    // Half of them get a correct checksum; otherwise few would pass its verification.
    if frame.len() > HEADER_BYTES
        && random.chance(0.5)
        && let Ok(mut packet) = ipv4::Packet::new_checked(&mut frame[HEADER_BYTES..])
    {
        packet.fill_checksum();
    }
    frame
}

fn hop(random: &mut Random) -> Hop {
    let port = [0, 1, 2, 63, 64, 254, 255][random.below(7) as usize];
    let adjacency = [0, 1, 2, 9, 5000, u16::MAX][random.below(6) as usize];
    Hop { node: NodeId(random.below(9) as u8), port: PortId(port), adjacency: AdjacencyId(adjacency) }
}

fn storm(seed: u64, rounds: usize) {
    let mut bed = Testbed::with(|config| PortConfig { has_kernel: seed.is_multiple_of(2), ..config });
    bed.learn_hosts();
    bed.forwarder.set_remote_mtu(NodeId(3), PortId(1), 600);
    bed.rib
        .announce(NodeId(3), "192.0.0.0/3".parse().expect("a prefix"), 0, &[Hop::on_link(NodeId(3), PortId(1))])
        .expect("room");
    let mut random = Random::new(seed, "storm");
    for _ in 0..rounds {
        let frames: Vec<Vec<u8>> = (0..random.below(20)).map(|_| corrupted(&mut random)).collect();
        bed.receive_all(random.below(2) as u8, &frames);
        let Testbed { forwarder, pool, output, now, .. } = &mut bed;
        let bytes = corrupted(&mut random);
        let packet = pool.alloc_copy(&bytes[bytes.len().min(HEADER_BYTES)..]).expect("a buffer");
        if random.chance(0.5) {
            forwarder.from_kernel(*now, &mut vec![packet], pool, output);
        } else {
            let routed = RoutedPacket { hop: hop(&mut random), flow: random.bits() as u32, packet };
            forwarder.egress(*now, &mut vec![routed], pool, output);
        }
        bed.wait(Duration::from_millis(random.below(500)));
        for port in [0, 1] {
            for frame in bed.sent(port) {
                assert!(frame.len() >= HEADER_BYTES && frame[6..12] == own_mac(port).0, "{frame:02x?}");
                assert!(frame.len() <= HEADER_BYTES + usize::from(MTU_BYTES), "{} B", frame.len());
            }
        }
        bed.received_by_kernel();
        drain_nodes(&mut bed);
    }
    // Address resolution fails in the end, which frees the queued packets.
    for _ in 0..20 {
        bed.wait(Duration::from_secs(1));
        bed.sent(0);
        bed.sent(1);
        bed.received_by_kernel();
        drain_nodes(&mut bed);
    }
    bed.assert_no_leak();
}

fn drain_nodes(bed: &mut Testbed) {
    let Testbed { pool, output, .. } = bed;
    for node in 0..8 {
        output.to_node(NodeId(node)).drain(..).for_each(|routed| pool.free(routed.packet));
    }
}

/// Sends the same frames to two routers, one of which traces all packets, so that they take the slow path.
#[test]
fn the_fast_path_and_the_slow_path_behave_the_same() {
    let new = || {
        let mut bed = Testbed::new();
        bed.learn_hosts();
        bed.forwarder.set_remote_mtu(NodeId(3), PortId(1), 600);
        bed.route("169.254.0.0/16".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(1))]);
        bed.route("192.0.0.0/3".parse().expect("a prefix"), &[Hop::on_link(NodeId(3), PortId(1))]);
        bed
    };
    let (mut fast, mut slow) = (new(), new());
    slow.forwarder.trace(Some(Filter::all(u32::MAX)));
    let mut random = Random::new(9, "both paths");
    let taken = |bed: &mut Testbed| {
        let Testbed { pool, output, .. } = bed;
        let mut taken = Vec::new();
        for routed in output.to_node(NodeId(3)).drain(..) {
            taken.push((routed.hop, routed.flow, pool.bytes(&routed.packet).to_vec()));
            pool.free(routed.packet);
        }
        taken
    };
    for _ in 0..20_000 {
        let frame = corrupted(&mut random);
        let waits = Duration::from_millis(random.below(20));
        for bed in [&mut fast, &mut slow] {
            bed.receive(0, &frame);
            bed.wait(waits);
            bed.output.traced.clear();
        }
        assert_eq!((fast.sent(0), fast.sent(1)), (slow.sent(0), slow.sent(1)), "{frame:02x?}");
        assert_eq!(taken(&mut fast), taken(&mut slow), "{frame:02x?}");
    }
    assert_eq!(fast.forwarder.counters(), slow.forwarder.counters());
    assert!(fast.forwarder.counters().ports[1].sent.packets > 1000, "enough packets were forwarded");
}

#[test]
fn corrupted_packets_cause_neither_panics_nor_leaks() {
    for seed in 0..4 {
        storm(seed, 2_000);
    }
}

#[test]
#[ignore = "takes half a minute; runs in ./x exam"]
fn many_corrupted_packets_cause_neither_panics_nor_leaks() {
    for seed in 0..25 {
        storm(1000 + seed, 20_000);
    }
}
