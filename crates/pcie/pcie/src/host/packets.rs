//! Builds the packets of the simulation.

use super::device_tlb::TRANSLATION_BYTES;
use crate::link::Link;
use crate::test::PAGE_BYTES;
use crate::tlp::{CommonFields, Completion, CompletionStatus, DW_BYTES, DeviceId, MemoryOp, MemoryRequest, Repr};

/// The device under test: bus 4, device 0, function 0.
const DEVICE: DeviceId = DeviceId(0x0400);
/// The root port.
const ROOT: DeviceId = DeviceId(0);
/// Byte enables of all four bytes of a double word.
const ALL_BYTES: u8 = 0xF;

/// Returns the number of double words that `bytes` at `address` touch.
fn length_dw(address: u64, bytes: u32) -> u32 {
    ((address % u64::from(DW_BYTES)) as u32 + bytes).div_ceil(DW_BYTES)
}

/// Returns the byte enables of the first and of the last double word.
fn byte_enables(address: u64, bytes: u32) -> (u8, u8) {
    let skipped = (address % u64::from(DW_BYTES)) as u32;
    let unused = length_dw(address, bytes) * DW_BYTES - skipped - bytes;
    let (first, last) = (ALL_BYTES << skipped & ALL_BYTES, ALL_BYTES >> unused);
    if length_dw(address, bytes) == 1 { (first & last, 0) } else { (first, last) }
}

fn common(link: &Link) -> CommonFields {
    CommonFields { has_ecrc: link.ecrc, ..CommonFields::default() }
}

fn memory(link: &Link, op: MemoryOp, address: u64, bytes: u32, tag: u16) -> Repr {
    let (first_byte_enable, last_byte_enable) = byte_enables(address, bytes);
    Repr::Memory(MemoryRequest {
        op,
        address: address - address % u64::from(DW_BYTES),
        width: link.address,
        length_dw: length_dw(address, bytes),
        first_byte_enable,
        last_byte_enable,
        requester: DEVICE,
        tag,
        common: common(link),
    })
}

/// Returns a write of `bytes` at `address`.
pub fn write(link: &Link, address: u64, bytes: u32) -> Repr {
    memory(link, MemoryOp::Write, address, bytes, 0)
}

/// Returns a read request for `bytes` at `address`.
pub fn read(link: &Link, address: u64, bytes: u32, tag: u16) -> Repr {
    memory(link, MemoryOp::Read, address, bytes, tag)
}

/// Returns a request for the translation of `address` (ATS), which is as long as a read.
pub fn translation_request(link: &Link, address: u64) -> Repr {
    memory(link, MemoryOp::Read, address / PAGE_BYTES * PAGE_BYTES, TRANSLATION_BYTES, 0)
}

/// Returns the completion that carries a translation.
pub fn translation_completion(link: &Link, address: u64) -> Repr {
    completion(link, address / PAGE_BYTES * PAGE_BYTES, TRANSLATION_BYTES, TRANSLATION_BYTES, 0)
}

/// Returns a completion with `bytes` at `address`, of `remaining` that were outstanding.
pub fn completion(link: &Link, address: u64, bytes: u32, remaining: u32, tag: u16) -> Repr {
    Repr::Completion(Completion {
        completer: ROOT,
        requester: DEVICE,
        tag,
        status: CompletionStatus::Successful,
        byte_count: remaining as u16,
        lower_address: (address % 128) as u8,
        length_dw: length_dw(address, bytes),
        common: common(link),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_sizes_match_the_published_model() {
        let link = Link::PUBLISHED;
        assert_eq!(write(&link, 0, 64).wire_bytes(), 64 + 24);
        assert_eq!(read(&link, 0, 512, 0).wire_bytes(), 24);
        assert_eq!(completion(&link, 0, 256, 512, 0).wire_bytes(), 256 + 20);
    }

    #[test]
    fn a_translation_takes_a_request_and_eight_bytes() {
        let link = Link::PUBLISHED;
        assert_eq!(translation_request(&link, 4100).wire_bytes(), 24);
        assert_eq!(translation_completion(&link, 4100).wire_bytes(), 20 + 8);
    }

    #[test]
    fn unaligned_ends_occupy_whole_double_words() {
        assert_eq!((length_dw(3, 2), byte_enables(3, 2)), (2, (0b1000, 0b0001)));
        assert_eq!((length_dw(1, 2), byte_enables(1, 2)), (1, (0b0110, 0)));
        assert_eq!((length_dw(0, 8), byte_enables(0, 8)), (2, (0b1111, 0b1111)));
    }
}
