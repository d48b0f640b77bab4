//! Any bytes are survived as packets, as headers, as data link layer packets and as a dump, and what is understood can
//! be said again and is understood the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pcie::tlp::{Dllp, Packet, Prefix, Repr, dump, explain};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = Packet::header_only(bytes) {
        let _ = Repr::parse(&header);
    }
    if let Ok(packet) = Packet::new_checked(bytes)
        && let Ok(repr) = Repr::parse(&packet)
    {
        explain::packet(&packet).expect("what is understood can be explained");
        let prefixes: Vec<Prefix> = packet.prefixes().collect();
        let again = repr.emit(&prefixes, packet.payload()).expect("what is understood can be said");
        let packet = Packet::new_checked(&again).expect("what is said has the shape of a packet");
        assert_eq!(Repr::parse(&packet), Ok(repr));
    }
    if let Ok(dllp) = Dllp::parse(bytes) {
        assert_eq!(Dllp::parse(&dllp.emit()), Ok(dllp));
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = dump::parse(text);
    }
});
