//! Calls every accessor of every view that accepts the bytes, and checks that what was parsed can be emitted again. The
//! tests in this folder and the fuzz target `packet_views` use it.

use packet::{arp, checksum, ethernet, flow, icmpv4, icmpv6, ipv4, ipv6, ndisc, tcp, udp, vlan};

/// Parses the bytes as a frame, as the frame's payload, and as each of the other protocols.
pub fn exercise(bytes: &[u8]) {
    if let Ok(frame) = ethernet::Frame::new_checked(bytes) {
        let repr = ethernet::Repr::parse(&frame);
        let mut again = [0; ethernet::HEADER_BYTES];
        repr.emit(&mut again);
        assert_eq!(again, bytes[..ethernet::HEADER_BYTES]);
        if let Ok(network) = frame.network_header() {
            exercise_network(&bytes[network.offset..]);
        }
        let _ = frame.payload();
    }
    if let Ok(packet) = vlan::Packet::new_checked(bytes) {
        let mut again = [0; vlan::HEADER_BYTES];
        vlan::emit(packet.tag(), packet.ethertype(), &mut again);
        assert_eq!(again, bytes[..vlan::HEADER_BYTES]);
        let _ = packet.payload();
    }
    exercise_network(bytes);
    exercise_upper(bytes);
    let mut bytes = bytes.to_vec();
    let (start, field_at) = (bytes.first().copied(), bytes.get(1).copied());
    let _ = checksum::complete_partial(&mut bytes, start.map_or(0, usize::from), field_at.map_or(0, usize::from), true);
}

fn exercise_network(bytes: &[u8]) {
    if let Ok(packet) = arp::Packet::new_checked(bytes) {
        let mut again = [0; arp::PACKET_BYTES];
        arp::Repr::parse(&packet).emit(&mut again);
        assert_eq!(again, bytes[..arp::PACKET_BYTES]);
    }
    if let Ok(packet) = ipv4::Packet::new_checked(bytes) {
        exercise_ipv4(&packet);
    }
    if let Ok(packet) = ipv6::Packet::new_checked(bytes) {
        exercise_ipv6(&packet, bytes);
    }
}

fn exercise_ipv4(packet: &ipv4::Packet<&[u8]>) {
    assert!(packet.options().count() <= ipv4::HEADER_BYTES_MAX - ipv4::HEADER_BYTES);
    assert_eq!(packet.header().len() + packet.payload().len(), packet.total_bytes());
    let flow = flow::Flow::from_v4(packet);
    assert_eq!(flow.hash(1), flow.reversed().hash(1));
    exercise_upper(packet.payload());
    let repr = ipv4::Repr::parse(packet);
    let mut again = vec![0; repr.total_bytes()];
    repr.emit(&mut again);
    let mut again = ipv4::Packet::new_checked(again).expect("an emitted packet is valid");
    assert!(again.verify_checksum());
    assert_eq!(ipv4::Repr::parse(&again), repr);
    if again.ttl() > 0 {
        again.decrement_ttl();
        assert!(again.verify_checksum());
    }
}

fn exercise_ipv6(packet: &ipv6::Packet<&[u8]>, bytes: &[u8]) {
    let flow = flow::Flow::from_v6(packet);
    assert_eq!(flow.hash(1), flow.reversed().hash(1));
    if let Ok(upper) = packet.upper_layer() {
        exercise_upper(&packet.payload()[upper.offset..]);
    }
    let repr = ipv6::Repr::parse(packet);
    let mut again = [0; ipv6::HEADER_BYTES];
    repr.emit(&mut again);
    assert_eq!(again, bytes[..ipv6::HEADER_BYTES]);
    let (source, destination) = (packet.source(), packet.destination());
    let payload = packet.payload();
    // Also with a correct checksum, so that the parsers accept more of the payloads.
    let mut corrected = payload.to_vec();
    if corrected.len() >= 4 {
        corrected[2..4].fill(0);
        let sum = icmpv6::pseudo(source, destination, corrected.len()).add_bytes(&corrected).checksum();
        corrected[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    for bytes in [payload, &corrected] {
        if let Ok(message) = icmpv6::Message::parse(bytes, source, destination) {
            let mut again = vec![0; message.total_bytes()];
            message.emit(&mut again, source, destination);
            assert_eq!(
                icmpv6::Message::parse(&again, source, destination).map(|again| again.total_bytes()),
                Ok(bytes.len())
            );
        }
        if let Ok(message) = ndisc::Message::parse(bytes, source, destination) {
            let mut again = [0; ndisc::MESSAGE_BYTES_MAX];
            let length = message.emit(&mut again, source, destination);
            assert_eq!(ndisc::Message::parse(&again[..length], source, destination), Ok(message));
        }
    }
}

fn exercise_upper(bytes: &[u8]) {
    if let Ok(message) = icmpv4::Message::parse(bytes) {
        let mut again = vec![0; message.total_bytes()];
        message.emit(&mut again);
        assert_eq!(icmpv4::Message::parse(&again).map(|again| again.total_bytes()), Ok(bytes.len()));
    }
    let _ = icmpv4::Packet::new_checked(bytes).map(|packet| (packet.is_error(), packet.payload().len()));
    let _ = udp::Packet::new_checked(bytes)
        .map(|packet| (packet.source_port(), packet.payload().len(), packet.verify_checksum(checksum::Sum::new())));
    if let Ok(packet) = tcp::Packet::new_checked(bytes) {
        let _ = (packet.source_port(), packet.sequence(), packet.flags(), packet.verify_checksum(checksum::Sum::new()));
        assert_eq!(packet.payload().len() + packet.header_bytes(), bytes.len());
    }
}
