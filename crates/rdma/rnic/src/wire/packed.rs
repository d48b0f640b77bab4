//! A packet header in one cache line. A simulation has a hundred thousand packets in flight and reads each header once,
//! long after it was written.

use bitflags::bitflags;

use super::header::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Reth, SelectiveAck, Service,
    Syndrome,
};

/// Number of words of the one long header that a packet has: RETH, AtomicETH, DETH or a selective acknowledgement.
const LONG_WORDS: usize = 7;

/// A [`Header`] in 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(64))]
pub struct PackedHeader {
    destination: QpNumber,
    psn: Psn,
    payload_bytes: u32,
    operation: Operation,
    service: Service,
    /// Of the AETH.
    syndrome: Syndrome,
    parts: Parts,
    /// Of the placement header.
    sent: u16,
    /// The long header that `parts` names.
    long: [u32; LONG_WORDS],
    immediate: u32,
    /// Of the AETH.
    msn: u32,
    /// Of the placement header.
    message: u32,
    packet: u32,
}

const _: () = assert!(size_of::<PackedHeader>() == 64, "a packed header must fit a cache line");

bitflags! {
    /// The headers and flags that are present.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Parts: u16 {
        const ACK_REQUEST = 1;
        const SOLICITED = 1 << 1;
        const CONGESTION_ECHO = 1 << 2;
        const AETH = 1 << 3;
        const PLACEMENT = 1 << 4;
        const IMMEDIATE_DATA = 1 << 5;
        const INVALIDATE = 1 << 6;
        const RETH = 1 << 7;
        const ATOMIC = 1 << 8;
        const DETH = 1 << 9;
        const SACK = 1 << 10;
        const LONG = Self::RETH.bits() | Self::ATOMIC.bits() | Self::DETH.bits() | Self::SACK.bits();
    }
}

const fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> u32::BITS) as u32]
}

const fn joined(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << u32::BITS
}

impl PackedHeader {
    /// Packs a header.
    ///
    /// # Panics
    /// If it has two of RETH, AtomicETH, DETH and selective acknowledgement, which no packet has.
    pub fn new(header: &Header) -> Self {
        let mut parts = Parts::empty();
        parts.set(Parts::ACK_REQUEST, header.ack_request);
        parts.set(Parts::SOLICITED, header.solicited);
        parts.set(Parts::CONGESTION_ECHO, header.congestion_echo);
        parts.set(Parts::AETH, header.aeth.is_some());
        parts.set(Parts::PLACEMENT, header.placement.is_some());
        parts.set(Parts::RETH, header.reth.is_some());
        parts.set(Parts::ATOMIC, header.atomic.is_some());
        parts.set(Parts::DETH, header.datagram.is_some());
        parts.set(Parts::SACK, header.sack.is_some());
        assert!((parts & Parts::LONG).bits().count_ones() <= 1, "no packet has two of these headers: {header:?}");
        let immediate = match header.immediate {
            None => 0,
            Some(Immediate::Data(data)) => {
                parts.set(Parts::IMMEDIATE_DATA, true);
                data
            }
            Some(Immediate::Invalidate(RKey(key))) => {
                parts.set(Parts::INVALIDATE, true);
                key
            }
        };
        let none = Aeth { syndrome: Syndrome::InvalidRequest, msn: 0 };
        let Aeth { syndrome, msn } = header.aeth.unwrap_or(none);
        let PlacementHeader { message, packet, sent } =
            header.placement.unwrap_or(PlacementHeader { message: 0, packet: 0, sent: 0 });
        Self {
            destination: header.destination,
            psn: header.psn,
            payload_bytes: header.payload_bytes,
            operation: header.operation,
            service: header.service,
            syndrome,
            parts,
            sent,
            long: long(header),
            immediate,
            msn,
            message,
            packet,
        }
    }

    /// Returns the unpacked header.
    pub fn header(&self) -> Header {
        let parts = self.parts;
        let mut header = Header::bare(self.service, self.operation, self.destination, self.psn);
        header.payload_bytes = self.payload_bytes;
        header.ack_request = parts.contains(Parts::ACK_REQUEST);
        header.solicited = parts.contains(Parts::SOLICITED);
        header.congestion_echo = parts.contains(Parts::CONGESTION_ECHO);
        if parts.contains(Parts::AETH) {
            header.aeth = Some(Aeth { syndrome: self.syndrome, msn: self.msn });
        }
        if parts.contains(Parts::PLACEMENT) {
            header.placement = Some(PlacementHeader { message: self.message, packet: self.packet, sent: self.sent });
        }
        if parts.contains(Parts::IMMEDIATE_DATA) {
            header.immediate = Some(Immediate::Data(self.immediate));
        } else if parts.contains(Parts::INVALIDATE) {
            header.immediate = Some(Immediate::Invalidate(RKey(self.immediate)));
        }
        let [a, b, c, d, e, f, g] = self.long;
        if parts.contains(Parts::RETH) {
            header.reth = Some(Reth { address: joined(a, b), key: RKey(c), bytes: d });
        } else if parts.contains(Parts::SACK) {
            let arrived = u128::from(joined(c, d)) | u128::from(joined(e, f)) << u64::BITS;
            let (expected, newest) = (Psn::new(a), Psn::new(b));
            header.sack =
                Some(SelectiveAck { expected, newest, arrived, marked: g as u16, echo: (g >> u16::BITS) as u16 });
        } else if parts.contains(Parts::ATOMIC) {
            let (address, swap_or_add, compare) = (joined(a, b), joined(d, e), joined(f, g));
            header.atomic = Some(AtomicEth { address, key: RKey(c), swap_or_add, compare });
        } else if parts.contains(Parts::DETH) {
            header.datagram = Some((a, QpNumber(b)));
        }
        header
    }
}

/// Returns the words of the long header.
fn long(header: &Header) -> [u32; LONG_WORDS] {
    if let Some(Reth { address, key, bytes }) = header.reth {
        let [low, high] = halves(address);
        [low, high, key.0, bytes, 0, 0, 0]
    } else if let Some(sack) = header.sack {
        let ([a, b], [c, d]) = (halves(sack.arrived as u64), halves((sack.arrived >> u64::BITS) as u64));
        let last = u32::from(sack.marked) | u32::from(sack.echo) << u16::BITS;
        [sack.expected.get(), sack.newest.get(), a, b, c, d, last]
    } else if let Some(AtomicEth { address, key, swap_or_add, compare }) = header.atomic {
        let ([a, b], [d, e], [f, g]) = (halves(address), halves(swap_or_add), halves(compare));
        [a, b, key.0, d, e, f, g]
    } else if let Some((queue_key, QpNumber(qp))) = header.datagram {
        [queue_key, qp, 0, 0, 0, 0, 0]
    } else {
        [0; LONG_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn long_part(which: u8, words: (u64, u64, u64, u128), small: (u32, u16, u16)) -> Header {
        let mut header = Header::bare(Service::Rc, Operation::WriteMiddle, QpNumber(small.0), Psn::new(small.0));
        let (key, psn) = (RKey(words.2 as u32), |word: u64| Psn::new(word as u32));
        match which {
            0 => header.reth = Some(Reth { address: words.0, key, bytes: words.1 as u32 }),
            1 => {
                header.atomic = Some(AtomicEth { address: words.0, key, swap_or_add: words.1, compare: words.3 as u64 })
            }
            2 => header.datagram = Some((words.0 as u32, QpNumber(words.1 as u32))),
            3 => {
                let (expected, newest) = (psn(words.0), psn(words.1));
                let (arrived, marked, echo) = (words.3, small.1, small.2);
                header.sack = Some(SelectiveAck { expected, newest, arrived, marked, echo });
            }
            _ => {}
        }
        header
    }

    proptest! {
        #[test]
        fn an_unpacked_header_equals_the_packed_one(
            which in 0..5_u8,
            words: (u64, u64, u64, u128),
            small: (u32, u16, u16),
            has: [bool; 5],
            immediate in 0..3_u8,
            service in 0..3_usize,
        ) {
            let mut header = long_part(which, words, small);
            header.service = [Service::Rc, Service::Uc, Service::Ud][service];
            (header.ack_request, header.solicited, header.congestion_echo) = (has[0], has[1], has[2]);
            header.payload_bytes = small.0;
            let syndromes = [Syndrome::Ack { credit_code: 7 }, Syndrome::ReceiverNotReady { timer_code: 9 }];
            let syndrome = syndromes[usize::from(has[0])];
            header.aeth = has[3].then_some(Aeth { syndrome, msn: words.1 as u32 });
            let (message, packet, sent) = (words.0 as u32, words.2 as u32, small.2);
            header.placement = has[4].then_some(PlacementHeader { message, packet, sent });
            header.immediate = match immediate {
                0 => None,
                1 => Some(Immediate::Data(small.0)),
                _ => Some(Immediate::Invalidate(RKey(small.0))),
            };
            prop_assert_eq!(PackedHeader::new(&header).header(), header);
        }
    }

    #[test]
    #[should_panic(expected = "no packet has two of these headers")]
    fn two_long_headers_cannot_be_packed() {
        let words = (1, 2, 3, 4);
        let datagram = long_part(2, words, (0, 0, 0)).datagram;
        let _ = PackedHeader::new(&Header { datagram, ..long_part(0, words, (0, 0, 0)) });
    }
}
