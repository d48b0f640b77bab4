//! The flow hash is the same in both directions and for all fragments, and spreads flows evenly.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use packet::flow::{Flow, hash_v4, hash_v6};
use packet::{Protocol, ipv4, ipv6};
use proptest::prelude::*;

fn flow() -> impl Strategy<Value = Flow> {
    let v4 = any::<(u32, u32)>().prop_map(|(a, b)| (IpAddr::from(Ipv4Addr::from(a)), IpAddr::from(Ipv4Addr::from(b))));
    let v6 =
        any::<(u128, u128)>().prop_map(|(a, b)| (IpAddr::from(Ipv6Addr::from(a)), IpAddr::from(Ipv6Addr::from(b))));
    (prop_oneof![v4, v6], any::<(u16, u16)>(), prop_oneof![Just(Protocol::TCP), Just(Protocol::UDP)]).prop_map(
        |((source, destination), (source_port, destination_port), protocol)| Flow {
            source,
            destination,
            protocol,
            source_port,
            destination_port,
        },
    )
}

/// Returns a packet of the flow, from the IP header on.
fn packet_of(flow: &Flow) -> Vec<u8> {
    let ports = [flow.source_port.to_be_bytes(), flow.destination_port.to_be_bytes()].concat();
    match (flow.source, flow.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut bytes = vec![0; 28];
            let repr = ipv4::Repr {
                source,
                destination,
                protocol: flow.protocol,
                ttl: 9,
                traffic_class: 0,
                identification: 7,
                do_not_fragment: false,
                payload_bytes: 8,
            };
            repr.emit(&mut bytes);
            bytes[20..24].copy_from_slice(&ports);
            bytes
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut bytes = vec![0; 56];
            let repr = ipv6::Repr {
                source,
                destination,
                next_header: ipv6::DESTINATION_OPTIONS,
                hop_limit: 9,
                traffic_class: 0,
                flow_label: 0,
                payload_bytes: 16,
            };
            repr.emit(&mut bytes);
            bytes[40] = flow.protocol.0;
            bytes[48..52].copy_from_slice(&ports);
            bytes
        }
        _ => unreachable!("both of one family"),
    }
}

fn flow_of(bytes: &[u8]) -> Flow {
    if bytes[0] >> 4 == 4 {
        Flow::from_v4(&ipv4::Packet::new_checked(bytes).expect("a packet"))
    } else {
        Flow::from_v6(&ipv6::Packet::new_checked(bytes).expect("a packet"))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_directions_have_one_hash_and_packets_yield_their_flow(flow in flow(), seed: u64) {
        prop_assert_eq!(flow.hash(seed), flow.reversed().hash(seed));
        let bytes = packet_of(&flow);
        prop_assert_eq!(flow_of(&bytes), flow);
        let hash = match flow.source {
            IpAddr::V4(_) => hash_v4(&ipv4::Packet::new_checked(&bytes).expect("a packet"), seed),
            IpAddr::V6(_) => hash_v6(&ipv6::Packet::new_checked(&bytes).expect("a packet"), seed),
        };
        prop_assert_eq!(hash, flow.hash(seed));
    }

    #[test]
    fn flows_that_differ_in_one_field_rarely_have_the_same_hash(flow in flow(), seed: u64) {
        let others = [
            Flow { source_port: flow.source_port ^ 1, ..flow },
            Flow { destination_port: flow.destination_port ^ 0x8000, ..flow },
            Flow { protocol: Protocol(flow.protocol.0 ^ 1), ..flow },
            // Not the reverse flow: only the ports are swapped.
            Flow { source_port: flow.destination_port, destination_port: flow.source_port, ..flow },
        ];
        let same = others.iter().filter(|other| **other != flow && other.hash(seed) == flow.hash(seed)).count();
        prop_assert!(same == 0 || flow.source == flow.destination, "{same} of {others:?}");
        prop_assert!(flow.hash(seed) != flow.hash(seed ^ 1));
    }
}

#[test]
fn all_fragments_of_a_packet_belong_to_one_flow() {
    let flow = Flow {
        source: Ipv4Addr::new(10, 0, 0, 1).into(),
        destination: Ipv4Addr::new(10, 0, 0, 2).into(),
        protocol: Protocol::UDP,
        source_port: 1000,
        destination_port: 2000,
    };
    let fragment = |more, offset_bytes| {
        let mut bytes = packet_of(&flow);
        ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet").set_fragment(false, more, offset_bytes);
        flow_of(&bytes)
    };
    let whole = Flow { source_port: 0, destination_port: 0, ..flow };
    assert_eq!([fragment(true, 0), fragment(true, 1480), fragment(false, 2960)], [whole; 3]);
    assert_eq!(fragment(false, 0), flow);
    // IPv6: by the fragment header.
    let (source, destination) = (Ipv6Addr::from(1).into(), Ipv6Addr::from(2).into());
    let mut bytes = packet_of(&Flow { source, destination, ..flow });
    bytes[6] = ipv6::FRAGMENT.0;
    for bits in [1, 8, 9] {
        bytes[43] = bits;
        assert_eq!(flow_of(&bytes), Flow { source, destination, ..whole }, "{bits}");
    }
}

#[test]
fn flows_are_spread_evenly_over_few_paths() {
    for paths in [2_u64, 3, 5, 16] {
        let mut counts = vec![0_u32; paths as usize];
        // Consecutive ports and addresses, as hosts use them.
        for index in 0..16_000_u32 {
            let flow = Flow {
                source: Ipv4Addr::from_bits(0x0a00_0000 + index % 40).into(),
                destination: Ipv4Addr::new(192, 0, 2, 1).into(),
                protocol: Protocol::TCP,
                source_port: 32_768 + (index / 40) as u16,
                destination_port: 443,
            };
            counts[((u64::from(flow.hash(5)) * paths) >> 32) as usize] += 1;
        }
        let even = 16_000 / paths as u32;
        assert!(counts.iter().all(|count| count.abs_diff(even) < even / 8), "{paths} paths: {counts:?}");
    }
}
