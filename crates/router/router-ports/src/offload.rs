//! What a sender left to hardware that is not there: checksums to be completed, TCP's and UDP's big packets to be cut,
//! VLAN tags to be put back.
//!
//! Virtual Ethernet has no hardware. A frame comes from its sender's kernel as that would hand it to a network card,
//! with a note (`struct virtio_net_hdr`) of what the card would still have to do.

use packet::checksum::{self, Sum};
use packet::ethernet::{EtherType, Frame};
use packet::{Protocol, ipv4, ipv6, tcp, udp, vlan};

/// `sizeof(struct virtio_net_hdr)`.
pub const NOTE_BYTES: usize = 10;

/// Bytes of a frame's two addresses: a VLAN tag comes behind them.
const ADDRESSES_BYTES: usize = 12;

const FLAG_CHECKSUM_OPEN: u8 = 1;
const CUT_NOT: u8 = 0;
const CUT_TCP_V4: u8 = 1;
const CUT_TCP_V6: u8 = 4;
const CUT_UDP: u8 = 5;
const CUT_FLAG_CONGESTION: u8 = 0x80;

/// What is still to be done to a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Where checksumming starts, and where behind that the field is.
    open_checksum: Option<(usize, usize)>,
    cut: Option<Cut>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    is_udp: bool,
    /// What each packet carries.
    payload_bytes: usize,
    transport: usize,
}

/// A note that cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unusable;

impl Note {
    /// The kernel's note, whose offsets count from the frame's start, before a VLAN tag of `shift` bytes is put in.
    pub fn read(bytes: &[u8; NOTE_BYTES], shift: usize) -> Result<Note, Unusable> {
        let word = |at: usize| usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        let (start, field) = (word(6) + shift, word(8));
        let open_checksum = (bytes[0] & FLAG_CHECKSUM_OPEN != 0).then_some((start, field));
        let is_udp = match bytes[1] & !CUT_FLAG_CONGESTION {
            CUT_NOT => return Ok(Note { open_checksum, cut: None }),
            CUT_TCP_V4 | CUT_TCP_V6 => false,
            CUT_UDP => true,
            _ => return Err(Unusable),
        };
        let payload_bytes = word(4);
        if payload_bytes == 0 || open_checksum.is_none() {
            return Err(Unusable);
        }
        Ok(Note { open_checksum, cut: Some(Cut { is_udp, payload_bytes, transport: start }) })
    }

    /// Whether the frame is several packets.
    pub fn is_to_be_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Does what is to be done to a frame that is one packet.
    pub fn complete(&self, frame: &mut [u8]) -> Result<(), Unusable> {
        let Some((start, field)) = self.open_checksum else { return Ok(()) };
        // UDP's field is its seventh byte, TCP's its seventeenth; ICMPv6 and others are like TCP.
        let is_udp = field == 6;
        checksum::complete_partial(frame, start, field, is_udp).ok_or(Unusable)
    }

    /// The packets that the frame is to be cut into.
    pub fn pieces(&self, frame: &[u8]) -> Result<Pieces, Unusable> {
        let cut = self.cut.ok_or(Unusable)?;
        let network = Frame::new_checked(frame).map_err(drop).and_then(|frame| frame.network_header().map_err(drop));
        let network = network.map_err(|()| Unusable)?;
        let segment = frame.get(cut.transport..).ok_or(Unusable)?;
        let header_bytes = match cut.is_udp {
            true => udp::HEADER_BYTES,
            false => tcp::Packet::new_checked(segment).map_err(|_| Unusable)?.header_bytes(),
        };
        let headers_bytes = cut.transport + header_bytes;
        let is_v4 = network.ethertype == EtherType::IPV4;
        let is_ip = is_v4 || network.ethertype == EtherType::IPV6;
        if !is_ip || cut.transport <= network.offset || headers_bytes >= frame.len() {
            return Err(Unusable);
        }
        Ok(Pieces { cut, network: network.offset, is_v4, headers_bytes, number: 0, at: headers_bytes })
    }
}

/// A frame that is several packets, and how many of them have been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    cut: Cut,
    network: usize,
    is_v4: bool,
    headers_bytes: usize,
    number: usize,
    at: usize,
}

impl Pieces {
    /// How long the next frame is; `None` when all have been taken.
    pub fn next_bytes(&self, frame: &[u8]) -> Option<usize> {
        let left = frame.len() - self.at;
        (left > 0).then(|| self.headers_bytes + left.min(self.cut.payload_bytes))
    }

    /// Writes the next frame to `to`, which is as long as [`Pieces::next_bytes`] said.
    pub fn take(&mut self, frame: &[u8], to: &mut [u8]) -> Result<(), Unusable> {
        let payload = to.len() - self.headers_bytes;
        to[..self.headers_bytes].copy_from_slice(&frame[..self.headers_bytes]);
        to[self.headers_bytes..].copy_from_slice(&frame[self.at..self.at + payload]);
        let is_last = self.at + payload == frame.len();
        let pseudo = self.fit_network(&mut to[self.network..]).ok_or(Unusable)?;
        self.fit_transport(&mut to[self.cut.transport..], pseudo, is_last).ok_or(Unusable)?;
        self.at += payload;
        self.number += 1;
        Ok(())
    }

    /// Fits the IP header of a piece to its length and place. The sum of the pseudo-header.
    fn fit_network(&self, bytes: &mut [u8]) -> Option<Sum> {
        let protocol = if self.cut.is_udp { Protocol::UDP } else { Protocol::TCP };
        let (whole, upper) = (bytes.len(), bytes.len() - (self.cut.transport - self.network));
        if self.is_v4 {
            // The length comes first: the whole's would not be within the piece.
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

    fn fit_transport(&self, bytes: &mut [u8], pseudo: Sum, is_last: bool) -> Option<()> {
        if self.cut.is_udp {
            let length = u16::try_from(bytes.len()).ok()?;
            bytes.get_mut(4..6)?.copy_from_slice(&length.to_be_bytes());
            udp::Packet::new_checked(bytes).ok()?.fill_checksum(pseudo);
            return Some(());
        }
        let mut segment = tcp::Packet::new_checked(bytes).ok()?;
        let sent = (self.number * self.cut.payload_bytes) as u32;
        segment.set_sequence(segment.sequence().wrapping_add(sent));
        let mut flags = segment.flags();
        // What ends or pushes a stream stands with its last byte, what answers congestion with its first.
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

/// Copies a frame, with a VLAN tag put in behind its addresses. `to` is 4 bytes longer.
pub fn put_tag(frame: &[u8], tag: [u8; 4], to: &mut [u8]) -> Result<(), Unusable> {
    let (addresses, rest) = frame.split_at_checked(ADDRESSES_BYTES).ok_or(Unusable)?;
    to[..ADDRESSES_BYTES].copy_from_slice(addresses);
    to[ADDRESSES_BYTES..ADDRESSES_BYTES + vlan::HEADER_BYTES].copy_from_slice(&tag);
    to[ADDRESSES_BYTES + vlan::HEADER_BYTES..].copy_from_slice(rest);
    Ok(())
}

/// Completes a checksum that was left open, where no note says so: the field of a TCP or UDP packet then is the sum
/// of the pseudo-header, which a finished one is by chance once in 65,536, and the checksum is wrong, which that is
/// not.
pub fn complete_unnoted(frame: &mut [u8]) {
    let Some(UpperChecksum { start, end, field, pseudo }) = upper_checksum(frame) else { return };
    let Some(frame) = frame.get_mut(..end) else { return };
    let at = start + field;
    let Some(bytes) = frame.get(at..at + 2) else { return };
    if [bytes[0], bytes[1]] != pseudo.folded().to_be_bytes() {
        return;
    }
    let covered = &frame[start..];
    // With a finished checksum, all and the pseudo-header sum up to ones.
    let is_finished = pseudo.add_bytes(covered).folded() == 0xffff;
    if !is_finished {
        let _ = checksum::complete_partial(frame, start, field, field == 6);
    }
}

/// What the checksum of a TCP or UDP packet covers.
struct UpperChecksum {
    start: usize,
    end: usize,
    /// Where behind the start the checksum itself is.
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
