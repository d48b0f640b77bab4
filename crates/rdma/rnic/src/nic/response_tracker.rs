//! Tracks a READ or atomic response whose packets arrive out of order.

use sim::Time;

use super::packet_bitmap::PacketBitmap;

/// The response packets that arrived out of order. It is in the host's memory.
#[derive(Clone, Debug)]
pub(super) struct OutOfOrderResponse {
    /// Bit i: packet `response_packets + i` has arrived.
    pub arrived: PacketBitmap,
    /// All gaps before this packet have been requested again.
    pub rerequested_to: u32,
    /// Since when a gap exists that was not requested again.
    pub gap_since: Option<Time>,
    /// The clock in the request that the first of these packets answers.
    pub first_sent_tick: u16,
    /// When gaps were last requested again, once that request has left.
    pub rerequested_tick: Option<u16>,
    /// A response to a later request arrived: packets missing up to the end were overtaken.
    pub is_overtaken: bool,
    /// Bit i: of packet `response_packets + i` only the header arrived (packet trimming); it is requested again
    /// separately.
    pub trimmed: PacketBitmap,
    /// Bit i: such a packet that is not requested yet.
    pub to_rerequest: PacketBitmap,
    /// The separate requests for trimmed packets: first packet, number of packets, and how many of these have not
    /// arrived.
    pub repairs: Vec<(u32, u32, u32)>,
}

impl OutOfOrderResponse {
    pub fn new(first_sent_tick: u16) -> Box<Self> {
        Box::new(Self {
            arrived: PacketBitmap::EMPTY,
            rerequested_to: 0,
            gap_since: None,
            first_sent_tick,
            rerequested_tick: None,
            is_overtaken: false,
            trimmed: PacketBitmap::EMPTY,
            to_rerequest: PacketBitmap::EMPTY,
            repairs: Vec::new(),
        })
    }

    /// Notes that a packet, or only its header, has arrived.
    pub fn packet_seen(&mut self, packet: u32) {
        let is_in = |first: u32, packets: u32| packet.checked_sub(first).is_some_and(|offset| offset < packets);
        if let Some(at) = self.repairs.iter().position(|(first, packets, _)| is_in(*first, *packets)) {
            self.repairs[at].2 -= 1;
            if self.repairs[at].2 == 0 {
                self.repairs.swap_remove(at);
            }
        }
    }

    /// Forgets the separate requests for trimmed packets.
    pub fn clear_repairs(&mut self) {
        (self.trimmed, self.to_rerequest) = (PacketBitmap::EMPTY, PacketBitmap::EMPTY);
        self.repairs.clear();
    }

    /// Returns the first packet and the length of each gap between two packets, without packets that are requested
    /// separately.
    pub fn gaps(&self, response_packets: u32, from: u32, to: u32) -> Vec<(u32, u32)> {
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        // Packets beyond the bitmaps have not arrived.
        let known_to = to.min(response_packets + self.arrived.end().max(self.trimmed.end()));
        let is_gap =
            |packet: &u32| !self.arrived.has(packet - response_packets) && !self.trimmed.has(packet - response_packets);
        for packet in (from..known_to).filter(is_gap) {
            match gaps.last_mut() {
                Some((first, packets)) if *first + *packets == packet => *packets += 1,
                _ => gaps.push((packet, 1)),
            }
        }
        let rest = from.max(known_to);
        if rest < to {
            gaps.push((rest, to - rest));
        }
        gaps
    }
}
