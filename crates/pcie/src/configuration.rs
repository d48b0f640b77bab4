//! A device's configuration space: what it says of the link (PCI Express base specification, sections 7.5 and 7.8.4).

use crate::link::{AddressWidth, Generation, Lanes, Link, ReadBoundary, TransferLimit};

const STATUS: usize = 0x06;
const STATUS_HAS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES: usize = 0x34;
/// Where capabilities begin; each has a double word at least.
const CAPABILITIES_FROM: usize = 0x40;
const PCI_EXPRESS: u8 = 0x10;
/// Registers of the PCI Express capability.
const DEVICE_CONTROL: usize = 0x08;
const LINK_CONTROL: usize = 0x10;
const LINK_STATUS: usize = 0x12;
const RCB_128: u16 = 1 << 3;
/// Where extended capabilities begin, and where the space ends.
const EXTENDED: usize = 0x100;
const SPACE_BYTES: usize = 0x1000;
const ADVANCED_ERRORS: u16 = 0x0001;
/// A register of the advanced error reporting capability, and its bit that has every packet carry a checksum.
const ADVANCED_ERRORS_CONTROL: usize = 0x18;
const ECRC_GENERATION: u16 = 1 << 6;

/// The link of the device whose configuration space this is, as both ends have agreed on it. None if it has no PCI
/// Express capability, no link (a virtual function has none of its own), or if so much of the space is not given:
/// Linux shows an unprivileged program the first 64 bytes.
///
/// A hypervisor may show a guest limits of its own.
pub fn link(space: &[u8]) -> Option<Link> {
    let express = capability(space, PCI_EXPRESS)?;
    let device_control = u16_at(space, express + DEVICE_CONTROL)?;
    let link_status = u16_at(space, express + LINK_STATUS)?;
    let limit = |bits: u16| TransferLimit::ALL.get(usize::from(bits & 7)).copied();
    let is_rcb_128 = u16_at(space, express + LINK_CONTROL)? & RCB_128 != 0;
    let errors = extended(space, ADVANCED_ERRORS).and_then(|at| u16_at(space, at + ADVANCED_ERRORS_CONTROL));
    Some(Link {
        generation: Generation::new((link_status & 0xf) as u8).ok()?,
        lanes: Lanes::new((link_status >> 4 & 0x3f) as u8).ok()?,
        mps_bytes: limit(device_control >> 5)?,
        mrrs_bytes: limit(device_control >> 12)?,
        rcb_bytes: ReadBoundary::new(if is_rcb_128 { 128 } else { 64 }).ok()?,
        address: AddressWidth::Bits64,
        ecrc: errors.is_some_and(|control| control & ECRC_GENERATION != 0),
    })
}

fn u16_at(space: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(space.get(at..at + 2)?.try_into().ok()?))
}

/// Where a capability begins. A list that goes round in a circle ends, because there are only so many double words.
fn capability(space: &[u8], id: u8) -> Option<usize> {
    if u16_at(space, STATUS)? & STATUS_HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(*space.get(CAPABILITIES)?) & !3;
    for _ in CAPABILITIES_FROM / 4..EXTENDED / 4 {
        if at < CAPABILITIES_FROM {
            return None;
        }
        if *space.get(at)? == id {
            return Some(at);
        }
        at = usize::from(*space.get(at + 1)?) & !3;
    }
    None
}

/// Where an extended capability begins.
fn extended(space: &[u8], id: u16) -> Option<usize> {
    let mut at = EXTENDED;
    for _ in EXTENDED / 4..SPACE_BYTES / 4 {
        if at < EXTENDED {
            return None;
        }
        if u16_at(space, at)? == id {
            return Some(at);
        }
        at = usize::from(u16_at(space, at + 2)? >> 4) & !3;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A space with power management at 0x60 and PCI Express at 0x80, an empty capability at 0x100, and advanced errors
    /// at 0x140.
    fn space() -> Vec<u8> {
        let mut space = vec![0; SPACE_BYTES];
        let mut put = |at: usize, value: u32, bytes: usize| {
            space[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        };
        put(STATUS, 0x0010, 2);
        put(CAPABILITIES, 0x60, 1);
        put(0x60, 0x8001, 2);
        put(0x80, 0x0010, 2);
        // Of an H100: MPS 256, MRRS 4096, 64 bytes of read completion boundary, 32 GT/s by 16 lanes.
        put(0x80 + DEVICE_CONTROL, 0x513e, 2);
        put(0x80 + LINK_STATUS, 0x1105, 2);
        put(0x100, 0x1400_0000, 4);
        put(0x140, 0x0001_0001, 4);
        space
    }

    #[test]
    fn a_link_is_what_its_registers_say() {
        let mut space = space();
        let found = link(&space).unwrap();
        assert_eq!((found.generation.number(), found.lanes.count()), (5, 16));
        assert_eq!((found.mps_bytes.bytes(), found.mrrs_bytes.bytes(), found.rcb_bytes.bytes()), (256, 4096, 64));
        assert!(!found.ecrc);
        space[0x80 + LINK_CONTROL] |= RCB_128 as u8;
        space[0x140 + ADVANCED_ERRORS_CONTROL] |= ECRC_GENERATION as u8;
        let found = link(&space).unwrap();
        assert_eq!((found.rcb_bytes.bytes(), found.ecrc), (128, true));
        space[0x80 + LINK_STATUS..][..2].copy_from_slice(&0x0083_u16.to_le_bytes());
        space[0x80 + DEVICE_CONTROL..][..2].copy_from_slice(&0x2010_u16.to_le_bytes());
        let found = link(&space).unwrap();
        assert_eq!((found.generation.number(), found.lanes.count()), (3, 8));
        assert_eq!((found.mps_bytes.bytes(), found.mrrs_bytes.bytes()), (128, 512));
    }

    #[test]
    fn no_link_is_made_up() {
        let changed = |at: usize, value: u8| {
            let mut space = space();
            space[at] = value;
            space
        };
        for (what, space) in [
            ("nothing", Vec::new()),
            ("what an unprivileged program sees", space()[..64].to_vec()),
            ("no capabilities", changed(STATUS, 0)),
            ("no PCI Express", changed(0x80, 0x11)),
            ("a list in a circle", changed(0x61, 0x60)),
            ("a list that leaves for the header", changed(0x61, 0x10)),
            ("no speed", changed(0x80 + LINK_STATUS, 0)),
            ("no such width", changed(0x80 + LINK_STATUS + 1, 0x20)),
            ("no such payload limit", changed(0x80 + DEVICE_CONTROL, 0xe0)),
        ] {
            assert_eq!(link(&space), None, "{what}");
        }
        // Advanced errors cannot be seen, or are a list in a circle: no checksum is known of.
        assert!(!link(&space()[..0x100]).unwrap().ecrc);
        let mut circle = changed(0x140, 2);
        circle[0x143] = 0x14;
        assert!(!link(&circle).unwrap().ecrc);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(mut space in prop::collection::vec(any::<u8>(), 0..SPACE_BYTES + 8)) {
            link(&space);
            if let Some(status) = space.get_mut(STATUS) {
                *status |= STATUS_HAS_CAPABILITIES as u8;
                link(&space);
            }
        }
    }
}
