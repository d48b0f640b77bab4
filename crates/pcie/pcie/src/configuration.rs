//! Reads the link of a device from its configuration space (PCI Express base specification, sections 7.5 and 7.8.4).

use crate::link::{AddressWidth, Generation, Lanes, Link, ReadBoundary, TransferLimit};

const STATUS: usize = 0x06;
const STATUS_HAS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES: usize = 0x34;
/// Lowest address of a capability; each has at least one double word.
const CAPABILITIES_FROM: usize = 0x40;
const PCI_EXPRESS: u8 = 0x10;
/// Registers of the PCI Express capability.
const DEVICE_CONTROL: usize = 0x08;
const LINK_CONTROL: usize = 0x10;
const LINK_STATUS: usize = 0x12;
const RCB_128: u16 = 1 << 3;
/// Start of the extended capabilities, and size of the configuration space.
const EXTENDED: usize = 0x100;
const SPACE_BYTES: usize = 0x1000;
const ADVANCED_ERRORS: u16 = 0x0001;
/// Capabilities and Control register of Advanced Error Reporting, and its ECRC Generation Enable bit.
const ADVANCED_ERRORS_CONTROL: usize = 0x18;
const ECRC_GENERATION: u16 = 1 << 6;

/// Returns the negotiated link of the device with this configuration space. `None` if the device has no PCI Express
/// capability or no link (a virtual function has none of its own), or if the given part of the space is too short:
/// Linux shows an unprivileged program the first 64 bytes only.
///
/// A hypervisor may show its guest other limits. Only requests contain the width of addresses, so 64 bits are assumed.
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

/// Returns the offset of a capability. A cyclic list ends the search after as many steps as there are double words.
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

/// Returns the offset of an extended capability.
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

    /// The first bytes of the space of an H100 in a guest: capabilities from 0x40 on, PCI Express at 0x60, then an
    /// empty extended capability at 0x100; advanced error reporting at 0x140 is added.
    fn space() -> Vec<u8> {
        let mut space = vec![0; 0x1000];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &[0xde, 0x10, 0x30, 0x23, 0x06, 0x04, 0x10, 0x00]);
        put(0x34, &[0x40]);
        put(0x40, &[0x01, 0x48, 0x13, 0x00, 0x08, 0x00, 0x00, 0x00, 0x05, 0x60, 0x88, 0x03]);
        put(0x60, &[0x10, 0xb0, 0x02, 0x00, 0x21, 0x80, 0x00, 0x10, 0x3e, 0x51, 0x00, 0x00, 0x05, 0x79, 0x45, 0x00]);
        put(0x70, &[0x00, 0x00, 0x05, 0x11]);
        put(0xb0, &[0x11, 0x00, 0x08, 0x80]);
        put(0x100, &[0x00, 0x00, 0x00, 0x14]);
        put(0x140, &[0x01, 0x00, 0x01, 0x00]);
        space
    }

    fn changed(changes: &[(usize, u8)]) -> Vec<u8> {
        let mut space = space();
        changes.iter().for_each(|(at, value)| space[*at] = *value);
        space
    }

    /// Generation, lanes, MPS, MRRS, RCB, checksum.
    fn facts(space: &[u8]) -> (u8, u8, u32, u32, u32, bool) {
        let link = link(space).unwrap();
        let Link { generation, lanes, mps_bytes, mrrs_bytes, rcb_bytes, ecrc, .. } = link;
        (generation.number(), lanes.count(), mps_bytes.bytes(), mrrs_bytes.bytes(), rcb_bytes.bytes(), ecrc)
    }

    #[test]
    fn a_link_is_read_from_its_registers() {
        assert_eq!(facts(&space()), (5, 16, 256, 4096, 64, false));
        assert_eq!(facts(&changed(&[(0x70, 0x08)])), (5, 16, 256, 4096, 128, false), "a boundary of 128 bytes");
        assert_eq!(facts(&changed(&[(0x158, 0x40)])), (5, 16, 256, 4096, 64, true), "with checksums");
        assert_eq!(facts(&changed(&[(0x72, 0x83), (0x73, 0x00)])), (3, 8, 256, 4096, 64, false));
        assert_eq!(facts(&changed(&[(0x72, 0x06), (0x73, 0x02)])), (6, 32, 256, 4096, 64, false));
        assert_eq!(facts(&changed(&[(0x68, 0x1e), (0x69, 0x2f)])), (5, 16, 128, 512, 64, false));
    }

    #[test]
    fn capabilities_are_found_at_any_offset() {
        // The two lowest bits of a capability pointer are reserved.
        for (at, value) in [(0x34, 0x43), (0x34, 0x61), (0x49, 0x62)] {
            assert_eq!(facts(&changed(&[(at, value)])), (5, 16, 256, 4096, 64, false), "{at:#x} is {value:#x}");
        }
        let mut first = space();
        first.copy_within(0x60..0x80, 0x40);
        assert!(link(&first).is_some());
        let mut first = changed(&[(0x158, 0x40)]);
        first.copy_within(0x140..0x160, 0x100);
        assert!(link(&first).unwrap().ecrc);
    }

    #[test]
    fn an_incomplete_or_invalid_space_has_no_link() {
        for (what, space) in [
            ("nothing", Vec::new()),
            ("the part that an unprivileged program sees", space()[..64].to_vec()),
            ("no capabilities", changed(&[(0x06, 0)])),
            ("no PCI Express", changed(&[(0x60, 0x11)])),
            ("a cyclic list", changed(&[(0x49, 0x40)])),
            ("a list that points into the header", changed(&[(0x49, 0x10)])),
            ("no speed", changed(&[(0x72, 0)])),
            ("no such speed", changed(&[(0x72, 0x08)])),
            ("no such width", changed(&[(0x73, 0x00)])),
            ("no such payload limit", changed(&[(0x68, 0xfe)])),
            ("no such request limit", changed(&[(0x69, 0x71)])),
        ] {
            assert_eq!(link(&space), None, "{what}");
        }
        // Advanced error reporting is not visible, or not in a cyclic list: no ECRC is assumed.
        assert!(!link(&changed(&[(0x158, 0x40)])[..0x100]).unwrap().ecrc);
        assert!(!link(&changed(&[(0x140, 2), (0x143, 0x14), (0x158, 0x40)])).unwrap().ecrc);
    }

    proptest! {
        #[test]
        fn the_search_terminates_for_any_bytes(mut space in prop::collection::vec(any::<u8>(), 0..SPACE_BYTES + 8)) {
            link(&space);
            if let Some(status) = space.get_mut(STATUS) {
                *status |= STATUS_HAS_CAPABILITIES as u8;
                link(&space);
            }
        }
    }
}
