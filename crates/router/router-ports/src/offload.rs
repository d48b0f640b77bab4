//! Offloads without hardware: checksums to be completed, large TCP and UDP packets to be passed on or segmented, and
//! VLAN tags to be inserted.
//!
//! Virtual Ethernet has no hardware. A frame arrives as the sender's kernel would pass it to a network card, with a
//! header (`struct virtio_net_hdr`) that describes what the card would have to do. A large packet is passed to the
//! kernel of the next interface with such a header too.

use std::num::NonZeroU16;

use packet::checksum::{self, Sum};
use packet::ethernet::{EtherType, Frame};
use packet::segmentation::{Segmentation, Segments};
use packet::{Protocol, ipv4, ipv6, vlan};

/// `sizeof(struct virtio_net_hdr)`.
pub const VIRTIO_HEADER_BYTES: usize = 10;

/// Bytes of the two addresses of a frame, after which a VLAN tag is inserted.
pub const ADDRESSES_BYTES: usize = 12;

/// Bytes of a VLAN tag.
pub const TAG_BYTES: usize = vlan::HEADER_BYTES;

/// The kinds of large packets, for each of which an interface may have segmentation: TCP over IPv4 and IPv6, UDP.
pub const LARGE_KINDS: usize = 3;

const FLAG_NEEDS_CHECKSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCP_V4: u8 = 1;
const GSO_TCP_V6: u8 = 4;
const GSO_UDP: u8 = 5;
const GSO_FLAG_ECN: u8 = 0x80;

/// The offloads that a frame still needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioHeader {
    /// The offset where the checksum starts, and the offset of its field from there.
    partial_checksum: Option<(usize, usize)>,
    /// The payload of each segment, if the frame must be segmented.
    segment_bytes: Option<NonZeroU16>,
}

/// The offload cannot be carried out for this frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidOffload;

impl VirtioHeader {
    /// Parses the kernel's header, whose offsets refer to the frame before a VLAN tag of `shift` bytes is inserted.
    pub fn read(bytes: &[u8; VIRTIO_HEADER_BYTES], shift: usize) -> Result<VirtioHeader, InvalidOffload> {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let (start, field) = (usize::from(word(6)) + shift, usize::from(word(8)));
        let partial_checksum = (bytes[0] & FLAG_NEEDS_CHECKSUM != 0).then_some((start, field));
        match bytes[1] & !GSO_FLAG_ECN {
            GSO_NONE => return Ok(VirtioHeader { partial_checksum, segment_bytes: None }),
            GSO_TCP_V4 | GSO_TCP_V6 | GSO_UDP => {}
            _ => return Err(InvalidOffload),
        }
        let segment_bytes = NonZeroU16::new(word(4)).filter(|_| partial_checksum.is_some());
        Ok(VirtioHeader { partial_checksum, segment_bytes: Some(segment_bytes.ok_or(InvalidOffload)?) })
    }

    /// Returns the payload of each segment in bytes, if the frame must be segmented into several packets.
    pub fn segment_bytes(&self) -> Option<u16> {
        self.segment_bytes.map(NonZeroU16::get)
    }

    /// Completes the checksum of a frame that is one packet.
    pub fn complete(&self, frame: &mut [u8]) -> Result<(), InvalidOffload> {
        let Some((start, field)) = self.partial_checksum else { return Ok(()) };
        // The field is at offset 6 in UDP and 16 in TCP; ICMPv6 and others are treated like TCP.
        let is_udp = field == 6;
        checksum::complete_partial(frame, start, field, is_udp).ok_or(InvalidOffload)
    }

    /// Returns the segments of the frame.
    pub fn segments(&self, frame: &[u8]) -> Result<Segments, InvalidOffload> {
        let segment_bytes = self.segment_bytes.ok_or(InvalidOffload)?.get();
        let link_bytes = link_bytes(frame).ok_or(InvalidOffload)?;
        let segmentation = Segmentation::of(&frame[link_bytes..], segment_bytes).ok_or(InvalidOffload)?;
        Ok(segmentation.split(link_bytes))
    }
}

/// Returns the length of the headers of a frame before its IP header; `None` if it has none.
pub fn link_bytes(frame: &[u8]) -> Option<usize> {
    let network = Frame::new_checked(frame).ok()?.network_header().ok()?;
    let is_ip = matches!(network.ethertype, EtherType::IPV4 | EtherType::IPV6);
    (is_ip && network.offset <= frame.len()).then_some(network.offset)
}

/// Returns the header with which a large packet is passed to the kernel, and its kind, below [`LARGE_KINDS`], and
/// stores the partial checksum in the frame, which has `link_bytes` before the IP header.
pub fn describe_large(
    frame: &mut [u8],
    link_bytes: usize,
    segment_bytes: u16,
) -> Result<([u8; VIRTIO_HEADER_BYTES], usize), InvalidOffload> {
    let packet = frame.get_mut(link_bytes..).ok_or(InvalidOffload)?;
    let segmentation = Segmentation::of(packet, segment_bytes).ok_or(InvalidOffload)?;
    segmentation.set_partial_checksum(packet).ok_or(InvalidOffload)?;
    let ecn = if segmentation.has_cwr(packet) { GSO_FLAG_ECN } else { 0 };
    let (gso, kind) = match (segmentation.is_udp(), segmentation.is_v4()) {
        (false, true) => (GSO_TCP_V4 | ecn, 0),
        (false, false) => (GSO_TCP_V6 | ecn, 1),
        (true, _) => (GSO_UDP, 2),
    };
    let (transport, field) = segmentation.checksum_position();
    let words = [link_bytes + segmentation.headers_bytes(), usize::from(segment_bytes), link_bytes + transport, field];
    let mut header = [0; VIRTIO_HEADER_BYTES];
    (header[0], header[1]) = (FLAG_NEEDS_CHECKSUM, gso);
    for (to, word) in header[2..].as_chunks_mut::<2>().0.iter_mut().zip(words) {
        *to = (word as u16).to_ne_bytes();
    }
    Ok((header, kind))
}

/// Copies a frame and inserts a VLAN tag after its addresses. `to` is [`TAG_BYTES`] longer than `frame`.
pub fn insert_tag(frame: &[u8], tag: [u8; TAG_BYTES], to: &mut [u8]) -> Result<(), InvalidOffload> {
    let (addresses, rest) = frame.split_at_checked(ADDRESSES_BYTES).ok_or(InvalidOffload)?;
    to[..ADDRESSES_BYTES].copy_from_slice(addresses);
    to[ADDRESSES_BYTES..ADDRESSES_BYTES + TAG_BYTES].copy_from_slice(&tag);
    to[ADDRESSES_BYTES + TAG_BYTES..].copy_from_slice(rest);
    Ok(())
}

/// Inserts a VLAN tag after the first `front` bytes of what begins after room for the tag. Panics if `bytes` has no
/// `front` bytes after the room.
pub fn insert_tag_in_place(bytes: &mut [u8], front: usize, tag: [u8; TAG_BYTES]) {
    bytes.copy_within(TAG_BYTES..TAG_BYTES + front, 0);
    bytes[front..front + TAG_BYTES].copy_from_slice(&tag);
}

/// Completes a partial checksum that no header describes. The field of a TCP or UDP packet with a partial checksum is
/// the sum of the pseudo-header, which a complete one equals by chance once in 65,536; a complete checksum is also
/// correct, and a partial one is not.
pub fn complete_unannounced(frame: &mut [u8]) {
    let Some(UpperChecksum { start, end, field, pseudo }) = upper_checksum(frame) else { return };
    let Some(frame) = frame.get_mut(..end) else { return };
    let at = start + field;
    let Some(bytes) = frame.get(at..at + 2) else { return };
    if [bytes[0], bytes[1]] != pseudo.folded().to_be_bytes() {
        return;
    }
    let covered = &frame[start..];
    // With a complete checksum, the sum including the pseudo-header is all ones.
    let is_complete = pseudo.add_bytes(covered).folded() == 0xffff;
    if !is_complete {
        let _ = checksum::complete_partial(frame, start, field, field == 6);
    }
}

/// The range that the checksum of a TCP or UDP packet covers.
struct UpperChecksum {
    start: usize,
    end: usize,
    /// The offset of the checksum field from the start.
    field: usize,
    pseudo: Sum,
}

fn upper_checksum(bytes: &[u8]) -> Option<UpperChecksum> {
    let frame = Frame::new_checked(bytes).ok()?;
    let network = frame.network_header().ok()?;
    let packet = bytes.get(network.offset..)?;
    let (offset, total, protocol, pseudo): (usize, usize, Protocol, Sum) = if network.ethertype == EtherType::IPV4 {
        let packet = ipv4::Packet::new_checked(packet).ok().filter(|packet| !packet.is_fragment())?;
        let upper = packet.total_bytes() - packet.header_bytes();
        let (source, destination) = (packet.source(), packet.destination());
        let pseudo = Sum::new().add_pseudo_v4(source, destination, packet.protocol(), upper as u16);
        (packet.header_bytes(), packet.total_bytes(), packet.protocol(), pseudo)
    } else if network.ethertype == EtherType::IPV6 {
        let packet = ipv6::Packet::new_checked(packet).ok()?;
        let upper = packet.upper_layer().ok().filter(|upper| upper.fragment.is_none())?;
        let bytes = (packet.payload_bytes() - upper.offset) as u32;
        let pseudo = Sum::new().add_pseudo_v6(packet.source(), packet.destination(), upper.protocol, bytes);
        (ipv6::HEADER_BYTES + upper.offset, packet.total_bytes(), upper.protocol, pseudo)
    } else {
        return None;
    };
    let field = match protocol {
        Protocol::TCP => 16,
        Protocol::UDP => 6,
        _ => return None,
    };
    Some(UpperChecksum { start: network.offset + offset, end: network.offset + total, field, pseudo })
}

#[cfg(test)]
mod tests;
