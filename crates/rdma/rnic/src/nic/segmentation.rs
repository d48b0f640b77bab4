//! Segmentation of messages into packets and scatter/gather elements, and the clock that packets carry.

use sim::Time;

use crate::verbs::{SGES_MAX, Sge};
use crate::wire::Psn;

/// Returns the payload length of one packet of a message.
pub(super) const fn piece_bytes(bytes: u32, packet: u32, mtu: u32) -> u32 {
    let before = packet.saturating_mul(mtu);
    let left = bytes.saturating_sub(before);
    if left < mtu { left } else { mtu }
}

/// Returns the number of packets of a message; a message of no bytes has one.
pub(super) fn packet_count(bytes: u32, mtu: u32) -> u32 {
    bytes.div_ceil(mtu).max(1)
}

/// Number of bits of message numbers and indices on the wire.
pub(super) const MESSAGE_BITS: u32 = 24;

pub(super) const MESSAGE_MASK: u32 = (1 << MESSAGE_BITS) - 1;

/// Picoseconds in a tick of the clock that packets carry.
pub(super) const TICK_PS: u64 = 1_024_000;

/// Returns the clock that packets carry: units of 1.024 us, mod 2^16.
pub(super) const fn tick(now: Time) -> u16 {
    (now.ps() / TICK_PS) as u16
}

/// Returns the parts of scatter/gather elements that hold `bytes` bytes of a message from `offset` on.
pub(super) fn sge_parts(pieces: &[Sge; SGES_MAX], offset: u32, bytes: u32) -> impl Iterator<Item = Sge> + '_ {
    let (mut skip, mut left) = (offset, bytes);
    pieces.iter().filter_map(move |piece| {
        let skipped = skip.min(piece.bytes);
        skip -= skipped;
        let part_bytes = (piece.bytes - skipped).min(left);
        left -= part_bytes;
        let address = piece.address.wrapping_add(u64::from(skipped));
        (part_bytes > 0).then_some(Sge { address, bytes: part_bytes, key: piece.key })
    })
}

/// Returns the distance from one 24-bit message number to another.
pub(super) fn ahead_of(message: u32, other: u32) -> i32 {
    Psn::new(message).after(Psn::new(other))
}
