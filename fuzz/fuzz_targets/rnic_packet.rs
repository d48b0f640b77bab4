//! Any bytes are survived as a packet of an RDMA NIC, and what is understood can be said again and is understood the
//! same; its checksum then holds, and no longer when a bit is changed.
#![no_main]

use std::net::Ipv6Addr;

use libfuzzer_sys::fuzz_target;
use rnic::wire::{Encapsulation, Header, ICRC_BYTES, IpAddresses, Operation, Packet, UDP_PORT};

const DATAGRAM: Encapsulation = Encapsulation {
    addresses: IpAddresses::V6 { source: Ipv6Addr::LOCALHOST, destination: Ipv6Addr::LOCALHOST },
    source_port: 0xc000,
    destination_port: UDP_PORT,
};

fn said(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; header.packet_bytes()];
    let payload_at = header.emit(&mut packet).expect("what is understood can be said");
    packet[payload_at..payload_at + payload.len()].copy_from_slice(payload);
    header.seal(&mut packet, Some(&DATAGRAM));
    packet
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let _ = packet.is_intact(&DATAGRAM);
    let mut header = *packet.header();
    header.congestion_echo |= header.operation == Operation::CongestionNotification;
    let mut again = said(&header, packet.payload());
    let packet_again = Packet::new_checked(&again).expect("what is said has the shape of a packet");
    assert_eq!(packet_again.header(), &header);
    assert_eq!(packet_again.payload(), packet.payload());
    assert!(packet_again.is_intact(&DATAGRAM));
    let last = again.len() - 1;
    again[last - usize::from(bytes[0]) % ICRC_BYTES] ^= 1;
    let spoilt = Packet::new_checked(&again).expect("the checksum has no shape");
    assert!(!spoilt.is_intact(&DATAGRAM));
});
