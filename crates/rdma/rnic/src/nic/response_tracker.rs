//! The state of a response to a READ or atomic operation of which packets arrived out of order.

use sim::Time;

use super::packet_bitmap::PacketBitmap;

/// What came of an answer out of order: in the host's memory.
#[derive(Clone, Debug)]
pub(super) struct OutOfOrderResponse {
    /// Bit i: packet `response_packets + i` came.
    pub arrived: PacketBitmap,
    /// All gaps before this packet were asked for again.
    pub rerequested_to: u32,
    /// Since when there is a gap that was not asked for.
    pub gap_since: Option<Time>,
    /// When the request left that the first of these answers, by the clock that packets carry.
    pub first_sent_tick: u16,
    /// When gaps were last asked for again, once that has left.
    pub rerequested_tick: Option<u16>,
    /// A later answer came: what is missing up to the end was overtaken.
    pub is_overtaken: bool,
    /// Bit i: of packet `response_packets + i` only the head came, and it is asked for again by itself.
    pub trimmed: PacketBitmap,
    /// Of those, bit i: not yet.
    pub to_rerequest: PacketBitmap,
    /// What was asked for again by itself: the first packet, how many, and how many of them nothing was heard of.
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

    /// Something of a packet came, were it only its head.
    pub fn packet_seen(&mut self, packet: u32) {
        let is_in = |first: u32, packets: u32| packet.checked_sub(first).is_some_and(|offset| offset < packets);
        if let Some(at) = self.repairs.iter().position(|(first, packets, _)| is_in(*first, *packets)) {
            self.repairs[at].2 -= 1;
            if self.repairs[at].2 == 0 {
                self.repairs.swap_remove(at);
            }
        }
    }

    /// Nothing more is waited for by itself.
    pub fn clear_repairs(&mut self) {
        (self.trimmed, self.to_rerequest) = (PacketBitmap::EMPTY, PacketBitmap::EMPTY);
        self.repairs.clear();
    }

    /// First packet and length of each gap from one packet to another, without what was asked for by itself.
    pub fn gaps(&self, response_packets: u32, from: u32, to: u32) -> Vec<(u32, u32)> {
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        // What is beyond the bitmaps did not come.
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
