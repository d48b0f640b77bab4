//! Offloads without hardware: checksums to be completed, large TCP and UDP packets to be segmented, and VLAN tags to be
//! inserted.
//!
//! Virtual Ethernet has no hardware. A frame arrives as the sender's kernel would pass it to a network card, with a
//! header (`struct virtio_net_hdr`) that describes what the card would have to do.

use packet::checksum::{self, Sum};
use packet::ethernet::{EtherType, Frame};
use packet::{Protocol, ipv4, ipv6, tcp, udp, vlan};

/// `sizeof(struct virtio_net_hdr)`.
pub const VIRTIO_HEADER_BYTES: usize = 10;

/// Bytes of the two addresses of a frame, after which a VLAN tag is inserted.
pub const ADDRESSES_BYTES: usize = 12;

/// Bytes of a VLAN tag.
pub const TAG_BYTES: usize = vlan::HEADER_BYTES;

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
    segmentation: Option<Segmentation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segmentation {
    is_udp: bool,
    /// The payload of each segment.
    payload_bytes: usize,
    transport: usize,
}

/// The offload cannot be carried out for this frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidOffload;

impl VirtioHeader {
    /// Parses the kernel's header, whose offsets refer to the frame before a VLAN tag of `shift` bytes is inserted.
    pub fn read(bytes: &[u8; VIRTIO_HEADER_BYTES], shift: usize) -> Result<VirtioHeader, InvalidOffload> {
        let word = |at: usize| usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        let (start, field) = (word(6) + shift, word(8));
        let partial_checksum = (bytes[0] & FLAG_NEEDS_CHECKSUM != 0).then_some((start, field));
        let is_udp = match bytes[1] & !GSO_FLAG_ECN {
            GSO_NONE => return Ok(VirtioHeader { partial_checksum, segmentation: None }),
            GSO_TCP_V4 | GSO_TCP_V6 => false,
            GSO_UDP => true,
            _ => return Err(InvalidOffload),
        };
        let payload_bytes = word(4);
        if payload_bytes == 0 || partial_checksum.is_none() {
            return Err(InvalidOffload);
        }
        Ok(VirtioHeader {
            partial_checksum,
            segmentation: Some(Segmentation { is_udp, payload_bytes, transport: start }),
        })
    }

    /// Returns whether the frame must be segmented into several packets.
    pub fn needs_segmentation(&self) -> bool {
        self.segmentation.is_some()
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
        let segmentation = self.segmentation.ok_or(InvalidOffload)?;
        let network = Frame::new_checked(frame).map_err(drop).and_then(|frame| frame.network_header().map_err(drop));
        let network = network.map_err(|()| InvalidOffload)?;
        let segment = frame.get(segmentation.transport..).ok_or(InvalidOffload)?;
        let header_bytes = match segmentation.is_udp {
            true => udp::HEADER_BYTES,
            false => tcp::Packet::new_checked(segment).map_err(|_| InvalidOffload)?.header_bytes(),
        };
        let headers_bytes = segmentation.transport + header_bytes;
        let is_v4 = network.ethertype == EtherType::IPV4;
        let is_ip = is_v4 || network.ethertype == EtherType::IPV6;
        if !is_ip || segmentation.transport <= network.offset || headers_bytes >= frame.len() {
            return Err(InvalidOffload);
        }
        Ok(Segments { segmentation, network: network.offset, is_v4, headers_bytes, number: 0, at: headers_bytes })
    }
}

/// A frame that is being segmented, and the progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    segmentation: Segmentation,
    network: usize,
    is_v4: bool,
    headers_bytes: usize,
    number: usize,
    at: usize,
}

impl Segments {
    /// Returns the length of the next segment; `None` after the last one.
    pub fn next_bytes(&self, frame: &[u8]) -> Option<usize> {
        let left = frame.len() - self.at;
        (left > 0).then(|| self.headers_bytes + left.min(self.segmentation.payload_bytes))
    }

    /// Writes the next segment to `to`, which has the length that [`Segments::next_bytes`] returned.
    pub fn write_next(&mut self, frame: &[u8], to: &mut [u8]) -> Result<(), InvalidOffload> {
        let payload = to.len() - self.headers_bytes;
        to[..self.headers_bytes].copy_from_slice(&frame[..self.headers_bytes]);
        to[self.headers_bytes..].copy_from_slice(&frame[self.at..self.at + payload]);
        let is_last = self.at + payload == frame.len();
        let pseudo = self.adapt_network(&mut to[self.network..]).ok_or(InvalidOffload)?;
        self.adapt_transport(&mut to[self.segmentation.transport..], pseudo, is_last).ok_or(InvalidOffload)?;
        self.at += payload;
        self.number += 1;
        Ok(())
    }

    /// Adapts the IP header of a segment to its length and position, and returns the sum of the pseudo-header.
    fn adapt_network(&self, bytes: &mut [u8]) -> Option<Sum> {
        let protocol = if self.segmentation.is_udp { Protocol::UDP } else { Protocol::TCP };
        let (whole, upper) = (bytes.len(), bytes.len() - (self.segmentation.transport - self.network));
        if self.is_v4 {
            // The length is set first, because that of the whole frame would exceed the segment.
            bytes.get_mut(2..4)?.copy_from_slice(&u16::try_from(whole).ok()?.to_be_bytes());
            let mut packet = ipv4::Packet::new_checked(bytes).ok()?;
            let identification = packet.identification().wrapping_add(self.number as u16);
            packet.set_identification(identification);
            packet.fill_checksum();
            Some(Sum::new().add_pseudo_v4(packet.source(), packet.destination(), protocol, upper as u16))
        } else {
            let payload = u16::try_from(whole.checked_sub(ipv6::HEADER_BYTES)?).ok()?;
            bytes.get_mut(4..6)?.copy_from_slice(&payload.to_be_bytes());
            let packet = ipv6::Packet::new_checked(bytes).ok()?;
            Some(Sum::new().add_pseudo_v6(packet.source(), packet.destination(), protocol, upper as u32))
        }
    }

    fn adapt_transport(&self, bytes: &mut [u8], pseudo: Sum, is_last: bool) -> Option<()> {
        if self.segmentation.is_udp {
            let length = u16::try_from(bytes.len()).ok()?;
            bytes.get_mut(4..6)?.copy_from_slice(&length.to_be_bytes());
            udp::Packet::new_checked(bytes).ok()?.fill_checksum(pseudo);
            return Some(());
        }
        let mut segment = tcp::Packet::new_checked(bytes).ok()?;
        let sent = (self.number * self.segmentation.payload_bytes) as u32;
        segment.set_sequence(segment.sequence().wrapping_add(sent));
        let mut flags = segment.flags();
        // FIN and PSH belong to the last segment, CWR to the first (RFC 9293, RFC 3168).
        if !is_last {
            flags = flags.without(tcp::Flags::FIN).without(tcp::Flags::PSH);
        }
        if self.number > 0 {
            flags = flags.without(tcp::Flags::CWR);
        }
        segment.set_flags(flags);
        segment.fill_checksum(pseudo);
        Some(())
    }
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
