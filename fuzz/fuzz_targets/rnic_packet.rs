//! Decodes arbitrary bytes as a packet: they must be refused or decoded to a header that can be encoded and decoded
//! again; its ICRC is then correct, and incorrect after a bit is flipped.
#![no_main]

use std::net::Ipv6Addr;

use libfuzzer_sys::fuzz_target;
use rnic::wire::{Encapsulation, Header, ICRC_BYTES, IpAddresses, Operation, Packet, UDP_PORT};

const DATAGRAM: Encapsulation = Encapsulation {
    addresses: IpAddresses::V6 { source: Ipv6Addr::LOCALHOST, destination: Ipv6Addr::LOCALHOST },
    source_port: 0xc000,
    destination_port: UDP_PORT,
};

fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; header.packet_bytes()];
    let payload_at = header.emit(&mut packet).expect("a decoded header can be encoded");
    packet[payload_at..payload_at + payload.len()].copy_from_slice(payload);
    header.seal(&mut packet, Some(&DATAGRAM));
    packet
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let _ = packet.is_intact(&DATAGRAM);
    let mut header = *packet.header();
    header.congestion_echo |= header.operation == Operation::CongestionNotification;
    let mut again = encode(&header, packet.payload());
    let packet_again = Packet::new_checked(&again).expect("an encoded packet can be decoded");
    assert_eq!(packet_again.header(), &header);
    assert_eq!(packet_again.payload(), packet.payload());
    assert!(packet_again.is_intact(&DATAGRAM));
    let last = again.len() - 1;
    again[last - usize::from(bytes[0]) % ICRC_BYTES] ^= 1;
    let corrupted = Packet::new_checked(&again).expect("decoding ignores the ICRC");
    assert!(!corrupted.is_intact(&DATAGRAM));
});
