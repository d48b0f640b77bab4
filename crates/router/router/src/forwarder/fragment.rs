//! Fragmentation of IPv4 packets (RFC 791, section 3.2; RFC 1812, section 4.2.2.7).

use packet::ipv4::{self, Ipv4Option};

use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::trace::Step;
use crate::{Hop, Packet};

/// The common parameters of the fragments of a packet.
struct Plan {
    /// Header length of the first fragment, in bytes.
    header_bytes: usize,
    /// Header of the other fragments, with the options that have the copied flag.
    header_later: [u8; ipv4::HEADER_BYTES_MAX],
    header_later_bytes: usize,
    /// Payload length of each fragment except the last, in bytes.
    piece_bytes: usize,
    payload_bytes: usize,
    offset_bytes: usize,
    more_fragments: bool,
}

impl Plan {
    /// Plans the fragments of a packet. Returns `None` if the MTU is below the minimum of IPv4, or if the fragments
    /// would exceed the maximum length of a datagram.
    fn of(packet: &ipv4::Packet<&[u8]>, mtu_bytes: usize) -> Option<Plan> {
        let header_bytes = packet.header_bytes();
        let payload_bytes = packet.payload().len();
        let offset_bytes = packet.fragment_offset_bytes();
        let piece_bytes = mtu_bytes.checked_sub(header_bytes)? & !7;
        if mtu_bytes < ipv4::MTU_MIN || offset_bytes + payload_bytes > usize::from(u16::MAX) {
            return None;
        }
        let (header_later, header_later_bytes) = header_later(packet);
        let more_fragments = packet.more_fragments();
        Some(Plan {
            header_bytes,
            header_later,
            header_later_bytes,
            piece_bytes,
            payload_bytes,
            offset_bytes,
            more_fragments,
        })
    }

    /// Writes the fragment that begins at offset `from` of the payload; `fragment` has its exact length.
    fn write(&self, original: &[u8], fragment: &mut [u8], from: usize) {
        let header =
            if from == 0 { &original[..self.header_bytes] } else { &self.header_later[..self.header_later_bytes] };
        let payload = fragment.len() - header.len();
        let is_last = from + payload == self.payload_bytes;
        fragment[..header.len()].copy_from_slice(header);
        let begin = self.header_bytes + from;
        fragment[header.len()..].copy_from_slice(&original[begin..begin + payload]);
        let total = (fragment.len() as u16).to_be_bytes();
        fragment[2..4].copy_from_slice(&total);
        if let Ok(mut view) = ipv4::Packet::new_checked(fragment) {
            view.set_fragment(false, self.more_fragments || !is_last, self.offset_bytes + from);
            view.fill_checksum();
        }
    }
}

/// Returns the header of fragments other than the first: only with options that have the copied flag.
fn header_later(packet: &ipv4::Packet<&[u8]>) -> ([u8; ipv4::HEADER_BYTES_MAX], usize) {
    let mut header = [0; ipv4::HEADER_BYTES_MAX];
    header[..ipv4::HEADER_BYTES].copy_from_slice(&packet.header()[..ipv4::HEADER_BYTES]);
    let mut bytes = ipv4::HEADER_BYTES;
    let is_copied = |option: &Ipv4Option<'_>| option.is_copied();
    for option in packet.options().map_while(Result::ok).filter(is_copied) {
        let end = bytes + 2 + option.data.len();
        header[bytes] = option.kind;
        header[bytes + 1] = (end - bytes) as u8;
        header[bytes + 2..end].copy_from_slice(option.data);
        bytes = end;
    }
    // Zeros, the *end of option list*, pad the header to a multiple of 4 bytes.
    let bytes = bytes.next_multiple_of(4);
    header[0] = 0x40 | (bytes / 4) as u8;
    (header, bytes)
}

impl Forwarder {
    /// Sends a packet, whose TTL is already decremented, in fragments: of each segment, if it is a large packet.
    pub(super) fn fragment(
        &mut self,
        ctx: &mut Context<'_>,
        packet: Packet,
        origin: Origin,
        out: (Hop, u32),
        mtu_bytes: usize,
    ) {
        if !packet.is_large() {
            return self.fragment_one(ctx, packet, origin, out, mtu_bytes);
        }
        self.segment(ctx, packet, origin, |this, ctx, segment| match segment.len() <= mtu_bytes {
            // The last one.
            true => this.dispatch(ctx, segment, out.0, out.1),
            false => this.fragment_one(ctx, segment, origin, out, mtu_bytes),
        });
    }

    fn fragment_one(
        &mut self,
        ctx: &mut Context<'_>,
        packet: Packet,
        origin: Origin,
        (hop, flow): (Hop, u32),
        mtu_bytes: usize,
    ) {
        let plan = ipv4::Packet::new_checked(ctx.pool.bytes(&packet)).ok().and_then(|view| Plan::of(&view, mtu_bytes));
        let Some(plan) = plan else { return self.discard(ctx, packet, origin, DropReason::TooBig) };
        let count = plan.payload_bytes.div_ceil(plan.piece_bytes);
        self.trace_step(ctx, &packet, Step::Fragmented(count as u16));
        for from in (0..plan.payload_bytes).step_by(plan.piece_bytes) {
            let header_bytes = if from == 0 { plan.header_bytes } else { plan.header_later_bytes };
            let payload_bytes = plan.piece_bytes.min(plan.payload_bytes - from);
            let Some(mut fragment) = ctx.pool.alloc() else {
                // The receiver cannot reassemble the datagram without this fragment.
                return self.discard(ctx, packet, origin, DropReason::NoBuffer);
            };
            ctx.pool.resize(&mut fragment, header_bytes + payload_bytes);
            let (original, bytes) = ctx.pool.bytes_pair(&packet, &fragment);
            plan.write(original, bytes, from);
            self.dispatch(ctx, fragment, hop, flow);
        }
        ctx.pool.free(packet);
    }
}
