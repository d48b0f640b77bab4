//! Transmission times of a modelled link, and the reservation of its capacity.

use super::error::TimedError;
use volmem::Region;
use volmem::sync::Ordering;

/// Delay, rate and granularity of writes over a link.
///
/// For a path of crate `pcie`, with `path = Path::named("ntb")`: the delay is `path.write(0)`, the rate is
/// `path.packet_gbps() * 125`, the longest payload of a packet is the link's MPS, and the header is the rest of a
/// packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkTiming {
    /// Delay from a store until a load of the peer returns it, without transmission time.
    pub one_way_ns: u64,
    /// Rate of the link, in bytes of packets.
    pub bytes_per_us: u64,
    /// Bytes of a packet besides its payload.
    pub header_bytes: u64,
    /// Maximum payload of a packet. A longer write is split into packets of this size.
    pub payload_bytes_max: u64,
}

/// Time is counted in fractions of a nanosecond, so that the transmission times of short packets on fast links add up.
pub(super) const TICKS_PER_NS: u64 = 64;
/// Fractional bits of [`PacketCosts::byte_ticks_scaled`].
const SCALE_BITS: u32 = 24;
/// Upper bounds of the values, so that no product overflows.
const BYTES_PER_US_MAX: u64 = 100_000_000;
const ONE_WAY_NS_MAX: u64 = 1_000_000_000;
const PAYLOAD_BYTES_MAX: u64 = 4096;
/// A longer write is divided, so that the receiver copies one piece while the next is in flight.
const PIECE_BYTES: u64 = 1024;
/// Payload is sent in double words.
const DWORD_BYTES: u64 = 4;

/// A timing in the units of the computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct PacketCosts {
    pub one_way_ns: u64,
    /// Longest piece of a write, a multiple of the packet's payload.
    pub piece_bytes: usize,
    byte_ticks_scaled: u64,
    header_bytes: u64,
    payload_bytes_max: u64,
}

impl PacketCosts {
    pub(super) fn new(timing: LinkTiming) -> Result<Self, TimedError> {
        let LinkTiming { one_way_ns, bytes_per_us, header_bytes, payload_bytes_max } = timing;
        check("one_way_ns", one_way_ns, 0, ONE_WAY_NS_MAX)?;
        check("bytes_per_us", bytes_per_us, 1, BYTES_PER_US_MAX)?;
        check("header_bytes", header_bytes, 0, PAYLOAD_BYTES_MAX)?;
        check("payload_bytes_max", payload_bytes_max, DWORD_BYTES, PAYLOAD_BYTES_MAX)?;
        let packets = (PIECE_BYTES / payload_bytes_max).max(1);
        Ok(Self {
            one_way_ns,
            piece_bytes: (packets * payload_bytes_max) as usize,
            byte_ticks_scaled: ((1000 * TICKS_PER_NS) << SCALE_BITS) / bytes_per_us,
            header_bytes,
            payload_bytes_max,
        })
    }

    /// Transmission time of a write of `len_bytes` in one piece.
    #[inline]
    pub(super) fn busy_ticks(&self, len_bytes: usize) -> u64 {
        let payload_bytes = (len_bytes as u64).next_multiple_of(DWORD_BYTES);
        let packets =
            if payload_bytes <= self.payload_bytes_max { 1 } else { payload_bytes.div_ceil(self.payload_bytes_max) };
        ((payload_bytes + packets * self.header_bytes) * self.byte_ticks_scaled) >> SCALE_BITS
    }
}

fn check(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), TimedError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(TimedError::Timing { what, value, min, max }) }
}

/// No honest sender has reserved a link for longer than this.
const AHEAD_TICKS_MAX: u64 = 10_000_000_000 * TICKS_PER_NS;

/// The time when a link is free again: a word that all writers of one link from one node share, so that they share its
/// rate, whichever windows and processes they have. If the word is corrupted, the link is delayed and nothing else
/// happens.
#[derive(Debug, Clone)]
pub struct Pacer(Region);

impl Pacer {
    /// Makes a pacer for one process.
    pub fn new() -> Self {
        Self(Region::heap(size_of::<u64>()))
    }

    /// Makes a pacer of the first word of memory that several processes of this node share. The word is zero at first,
    /// and no other process should write it.
    pub fn in_region(region: Region) -> Self {
        assert!(region.len_bytes() >= size_of::<u64>(), "a pacer in {} bytes", region.len_bytes());
        Self(region)
    }

    /// Reserves the link for `busy_ticks` from now on, or from the end of the earlier reservations on. Returns the end
    /// in nanoseconds.
    #[inline]
    pub(super) fn reserve(&self, now_ns: u64, busy_ticks: u64) -> u64 {
        let now_ticks = now_ns.saturating_mul(TICKS_PER_NS);
        let free_ticks = self.0.load_u64(0, Ordering::Relaxed);
        if free_ticks < now_ticks || free_ticks - now_ticks > AHEAD_TICKS_MAX {
            let end_ticks = now_ticks.saturating_add(busy_ticks);
            if self.0.compare_exchange_u64(0, free_ticks, end_ticks).is_ok() {
                return end_ticks.div_ceil(TICKS_PER_NS);
            }
            // Another writer was faster and has moved the time forward. Only a corrupted time is ever moved back.
        }
        let end_ticks = self.0.add_u64(0, busy_ticks, Ordering::Relaxed).saturating_add(busy_ticks);
        end_ticks.div_ceil(TICKS_PER_NS)
    }

    /// End of the reservations so far, in nanoseconds.
    pub(super) fn free_ns(&self) -> u64 {
        self.0.load_u64(0, Ordering::Acquire).div_ceil(TICKS_PER_NS)
    }
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}
