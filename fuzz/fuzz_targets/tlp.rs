//! Parses arbitrary bytes as a TLP, a TLP header, a DLLP and a text dump: the parsers must not panic, and a parsed
//! packet can be emitted and parsed again to the same values.
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
        explain::packet(&packet).expect("a parsed packet can be explained");
        let prefixes: Vec<Prefix> = packet.prefixes().collect();
        let again = repr.emit(&prefixes, packet.payload()).expect("a parsed packet can be emitted");
        let packet = Packet::new_checked(&again).expect("an emitted packet has a valid length");
        assert_eq!(Repr::parse(&packet), Ok(repr));
    }
    if let Ok(dllp) = Dllp::parse(bytes) {
        assert_eq!(Dllp::parse(&dllp.emit()), Ok(dllp));
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = dump::parse(text);
    }
});
