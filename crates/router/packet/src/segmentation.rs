//! Large packets: TCP or UDP packets with the payload of several, which a host or a network card segments later
//! (*generic segmentation offload* in Linux).
//!
//! The lengths in the headers of a large packet are those of the whole. Its transport checksum has no meaning until
//! [`Segmentation::set_partial_checksum`], or [`Segments::write_next`] for a segment, sets it.

use crate::checksum::Sum;
use crate::{Protocol, ipv4, ipv6, tcp, udp};

/// How a large packet, from its IP header on, is segmented. Its headers have been validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    is_v4: bool,
    is_udp: bool,
    /// Offset of the transport header.
    transport: usize,
    /// Length of IP and transport header.
    headers_bytes: usize,
    /// Length of the payload of each segment; the last one may be shorter.
    segment_bytes: usize,
    payload_bytes: usize,
}

impl Segmentation {
    /// Validates a large packet whose segments have a payload of `segment_bytes` bytes. Returns `None` unless it is a
    /// whole TCP or UDP packet, with consistent lengths and a payload.
    pub fn of(packet: &[u8], segment_bytes: u16) -> Option<Segmentation> {
        let is_v4 = packet.first()? >> 4 == 4;
        let (protocol, transport) = if is_v4 { transport_v4(packet)? } else { transport_v6(packet)? };
        let upper = packet.get(transport..)?;
        let (is_udp, header_bytes) = match protocol {
            Protocol::TCP => (false, tcp::Packet::new_checked(upper).ok()?.header_bytes()),
            Protocol::UDP if udp::Packet::new_checked(upper).ok()?.total_bytes() == upper.len() => {
                (true, udp::HEADER_BYTES)
            }
            _ => return None,
        };
        let headers_bytes = transport + header_bytes;
        let payload_bytes = packet.len() - headers_bytes;
        let segment_bytes = usize::from(segment_bytes);
        let is_valid = segment_bytes > 0 && payload_bytes > 0;
        is_valid.then_some(Segmentation { is_v4, is_udp, transport, headers_bytes, segment_bytes, payload_bytes })
    }

    /// Returns whether the packet is an IPv4 packet, not an IPv6 packet.
    pub fn is_v4(&self) -> bool {
        self.is_v4
    }

    /// Returns whether the packet is a UDP packet, not a TCP packet.
    pub fn is_udp(&self) -> bool {
        self.is_udp
    }

    /// Returns the length of IP and transport header in bytes.
    pub fn headers_bytes(&self) -> usize {
        self.headers_bytes
    }

    /// Returns the number of segments, at least 1.
    pub fn segments(&self) -> usize {
        self.payload_bytes.div_ceil(self.segment_bytes)
    }

    /// Returns the offset of the transport header, where its checksum begins, and the offset of its checksum field from
    /// there.
    pub fn checksum_position(&self) -> (usize, usize) {
        (self.transport, if self.is_udp { 6 } else { 16 })
    }

    /// Stores the sum of the pseudo-header in the checksum field, as the kernel and network cards expect it.
    pub fn set_partial_checksum(&self, packet: &mut [u8]) -> Option<()> {
        let sum = self.pseudo_sum(packet)?.folded().to_be_bytes();
        let (start, field) = self.checksum_position();
        packet.get_mut(start + field..start + field + 2)?.copy_from_slice(&sum);
        Some(())
    }

    /// Returns whether the TCP header reports a reduced congestion window, which only the first segment does.
    pub fn has_cwr(&self, packet: &[u8]) -> bool {
        let header = packet.get(self.transport..).map(tcp::Packet::new_checked);
        !self.is_udp && matches!(header, Some(Ok(header)) if header.flags().has(tcp::Flags::CWR))
    }

    /// Returns the segments of the packet behind `link_bytes` of other headers, which all segments get.
    pub fn split(self, link_bytes: usize) -> Segments {
        Segments { at: link_bytes + self.headers_bytes, segmentation: self, link_bytes, number: 0 }
    }

    fn pseudo_sum(&self, packet: &[u8]) -> Option<Sum> {
        let protocol = if self.is_udp { Protocol::UDP } else { Protocol::TCP };
        let upper_bytes = packet.len().checked_sub(self.transport)?;
        Some(if self.is_v4 {
            let packet = ipv4::Packet::new_checked(packet).ok()?;
            Sum::new().add_pseudo_v4(packet.source(), packet.destination(), protocol, upper_bytes as u16)
        } else {
            let packet = ipv6::Packet::new_checked(packet).ok()?;
            Sum::new().add_pseudo_v6(packet.source(), packet.destination(), protocol, upper_bytes as u32)
        })
    }
}

/// Returns the protocol and the offset of the transport header of a whole packet.
fn transport_v4(bytes: &[u8]) -> Option<(Protocol, usize)> {
    let packet = ipv4::Packet::new_checked(bytes).ok()?;
    let is_whole = packet.total_bytes() == bytes.len() && !packet.is_fragment();
    is_whole.then(|| (packet.protocol(), packet.header_bytes()))
}

/// Returns the protocol and the offset of the transport header of a whole packet.
fn transport_v6(bytes: &[u8]) -> Option<(Protocol, usize)> {
    let packet = ipv6::Packet::new_checked(bytes).ok()?;
    let upper = packet.upper_layer().ok()?;
    let is_whole = packet.total_bytes() == bytes.len() && upper.fragment.is_none();
    is_whole.then_some((upper.protocol, ipv6::HEADER_BYTES + upper.offset))
}

/// The segments of a large packet that are still to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    segmentation: Segmentation,
    /// Length of the headers before the IP header.
    link_bytes: usize,
    number: usize,
    /// Offset of the payload that is not written yet.
    at: usize,
}

impl Segments {
    /// Returns the length of the next segment with all headers; `None` after the last one.
    pub fn next_bytes(&self) -> Option<usize> {
        let left = self.end() - self.at;
        let headers_bytes = self.link_bytes + self.segmentation.headers_bytes;
        (left > 0).then(|| headers_bytes + left.min(self.segmentation.segment_bytes))
    }

    /// Writes the next segment of the frame to `to`, which has the length that [`Segments::next_bytes`] returned.
    /// Returns `None` if the frame is not the one that was validated.
    pub fn write_next(&mut self, frame: &[u8], to: &mut [u8]) -> Option<()> {
        let headers_bytes = self.link_bytes + self.segmentation.headers_bytes;
        let (headers, payload) = to.split_at_mut_checked(headers_bytes)?;
        let end = self.at + payload.len();
        headers.copy_from_slice(frame.get(..headers_bytes)?);
        payload.copy_from_slice(frame.get(self.at..end)?);
        let packet = to.get_mut(self.link_bytes..)?;
        self.adapt_network(packet)?;
        let pseudo = self.segmentation.pseudo_sum(packet)?;
        self.adapt_transport(packet.get_mut(self.segmentation.transport..)?, pseudo, end == self.end())?;
        self.at = end;
        self.number += 1;
        Some(())
    }

    fn end(&self) -> usize {
        self.link_bytes + self.segmentation.headers_bytes + self.segmentation.payload_bytes
    }

    /// Adapts the IP header of a segment to its length and position.
    fn adapt_network(&self, bytes: &mut [u8]) -> Option<()> {
        // The length is set first, because that of the large packet would exceed the segment.
        if self.segmentation.is_v4 {
            let total = u16::try_from(bytes.len()).ok()?.to_be_bytes();
            bytes.get_mut(2..4)?.copy_from_slice(&total);
            let mut packet = ipv4::Packet::new_checked(bytes).ok()?;
            let identification = packet.identification().wrapping_add(self.number as u16);
            packet.set_identification(identification);
            packet.fill_checksum();
        } else {
            let payload = u16::try_from(bytes.len().checked_sub(ipv6::HEADER_BYTES)?).ok()?.to_be_bytes();
            bytes.get_mut(4..6)?.copy_from_slice(&payload);
        }
        Some(())
    }

    fn adapt_transport(&self, bytes: &mut [u8], pseudo: Sum, is_last: bool) -> Option<()> {
        if self.segmentation.is_udp {
            let length = u16::try_from(bytes.len()).ok()?.to_be_bytes();
            bytes.get_mut(4..6)?.copy_from_slice(&length);
            udp::Packet::new_checked(bytes).ok()?.fill_checksum(pseudo);
            return Some(());
        }
        let mut segment = tcp::Packet::new_checked(bytes).ok()?;
        let sent = (self.number * self.segmentation.segment_bytes) as u32;
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

#[cfg(test)]
mod tests;
