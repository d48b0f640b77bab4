//! One direction of a link. Packets follow one another, and a packet that arrives corrupted is retransmitted, with all
//! packets behind it, after a Nak or when the replay timer expires.

use std::collections::VecDeque;

use sim::{Random, Span, Time};

use super::parameters::WireParameters;
use crate::link::Link;
use crate::model::overhead;
use crate::tlp::{DLLP_BYTES, Repr};

/// Number of sequence numbers, which have twelve bits.
const SEQUENCES: u16 = 1 << 12;
/// Bits of the fraction of a picosecond, which avoid rounding errors when bytes are added up.
const FRACTION_BITS: u32 = 16;
/// Largest number of transmissions of a packet; with a permitted bit error rate, more are practically impossible.
const TRIES_MAX: u32 = 64;

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Wire {
    /// Picoseconds a byte, times 2^[`FRACTION_BITS`].
    byte_ps_scaled: u64,
    is_flit_mode: bool,
    latency: Span,
    acknowledge: Span,
    replay_timer: Span,
    replay_buffer_bytes: u32,
    /// Probability of a bit error.
    bit_error_rate: f64,
    random: Random,
    free_at: Time,
    /// Bytes of packets sent by [`Wire::send_between`] since the last other packet.
    between_bytes: u32,
    sequence: u16,
    /// Times of arrival of acknowledgements with the bytes that they acknowledge, earliest first.
    unacknowledged: VecDeque<(Time, u32)>,
    unacknowledged_bytes: u32,
    /// Number of packets carried.
    pub packets: u64,
    /// Number of retransmissions.
    pub replays: u64,
}

/// The transmission of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmission {
    /// Time at which its last bit left and the wire became free.
    pub left: Time,
    /// Time at which its last bit arrived without corruption.
    pub arrived: Time,
    /// Sequence number of the packet.
    pub sequence: u16,
}

/// Returns the highest rate of packets in one direction of `link`, in 10^9 bits a second, if link layer packets and
/// skip symbols take the share `dllp_share`, or what the specification makes them take at least. In flit mode they have
/// a share of their own.
pub fn packet_gbps(link: &Link, dllp_share: f64) -> f64 {
    let most = overhead::packets_share(link);
    let share = if link.generation.is_flit_mode() { most } else { most.min(1.0 - dllp_share) };
    link.raw_gbps() * share
}

impl Wire {
    /// Returns an idle direction of `link`, of which link layer packets take the share `dllp_share`.
    pub fn new(link: &Link, wire: &WireParameters, dllp_share: f64, random: Random) -> Self {
        let byte_ps = 8000.0 / packet_gbps(link, dllp_share);
        Self {
            byte_ps_scaled: (byte_ps * f64::from(1_u32 << FRACTION_BITS)).ceil() as u64,
            is_flit_mode: link.generation.is_flit_mode(),
            latency: Span::from_ns(wire.latency_ns),
            acknowledge: Span::from_ns(wire.acknowledge_ns),
            replay_timer: Span::from_ns(wire.replay_timer_ns),
            replay_buffer_bytes: wire.replay_buffer_bytes,
            bit_error_rate: wire.bit_error_rate,
            random,
            free_at: Time::ZERO,
            between_bytes: 0,
            sequence: 0,
            unacknowledged: VecDeque::new(),
            unacknowledged_bytes: 0,
            packets: 0,
            replays: 0,
        }
    }

    /// Returns the time at which all packets so far have left.
    pub fn free_at(&self) -> Time {
        self.free_at
    }

    /// Returns the bytes of a packet on the wire.
    pub fn bytes_of(&self, packet: &Repr) -> u32 {
        if self.is_flit_mode { packet.flit_bytes() } else { packet.wire_bytes() }
    }

    /// Returns the transmission time of this many bytes, rounded up: no run is faster than the link.
    pub fn duration(&self, bytes: u32) -> Span {
        Span::from_ps((u64::from(bytes) * self.byte_ps_scaled).div_ceil(1 << FRACTION_BITS))
    }

    /// Sends a packet that is ready at `ready`, after all packets before it.
    pub fn send(&mut self, ready: Time, packet: &Repr) -> Transmission {
        let bytes = self.bytes_of(packet);
        let between_bytes = std::mem::take(&mut self.between_bytes);
        let between = self.duration(between_bytes);
        let begin = self.room(ready.max(self.free_at + between), bytes);
        let duration = self.duration(bytes);
        let mut left = begin + duration;
        for _ in 1..TRIES_MAX {
            if !self.is_corrupted(bytes) {
                break;
            }
            self.replays += 1;
            left = self.loss_detected_at(left) + duration;
        }
        self.free_at = left;
        let sequence = self.sequence;
        self.sequence = (sequence + 1) % SEQUENCES;
        self.packets += 1;
        let arrived = left + self.latency;
        self.unacknowledged.push_back((arrived + self.acknowledge + self.latency, bytes));
        self.unacknowledged_bytes += bytes;
        Transmission { left, arrived, sequence }
    }

    /// Sends a small packet that is ready at `ready`, which may be later than packets that are still to be sent, and
    /// returns its arrival. It takes its share of the rate from the packets after it, but never waits for one itself.
    pub fn send_between(&mut self, ready: Time, packet: &Repr) -> Time {
        let bytes = self.bytes_of(packet);
        self.between_bytes += bytes;
        self.packets += 1;
        ready + self.duration(bytes) + self.latency
    }

    /// Returns the time, not before `at`, at which the replay buffer, which keeps unacknowledged packets, has space for
    /// `bytes`.
    fn room(&mut self, at: Time, bytes: u32) -> Time {
        let mut now = at;
        while let Some(&(acknowledged, old_bytes)) = self.unacknowledged.front() {
            if acknowledged > now {
                if self.unacknowledged_bytes + bytes <= self.replay_buffer_bytes {
                    break;
                }
                now = acknowledged;
            }
            self.unacknowledged.pop_front();
            self.unacknowledged_bytes -= old_bytes;
        }
        now
    }

    fn is_corrupted(&mut self, bytes: u32) -> bool {
        self.bit_error_rate > 0.0 && self.draw_corruption(bytes)
    }

    /// Draws whether a packet is corrupted. A cold function, so that wires without errors do not compute the power for
    /// each packet.
    #[cold]
    fn draw_corruption(&mut self, bytes: u32) -> bool {
        let intact = (1.0 - self.bit_error_rate).powi((bytes * 8) as i32);
        self.random.chance(1.0 - intact)
    }

    /// Returns the time at which the sender learns that the packet that left at `left` arrived corrupted: from a Nak
    /// or, if that is also corrupted, from the replay timer.
    fn loss_detected_at(&mut self, left: Time) -> Time {
        if self.is_corrupted(DLLP_BYTES) {
            left + self.replay_timer
        } else {
            left + self.latency + self.acknowledge + self.latency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::packets;

    fn wire(change: impl FnOnce(&mut WireParameters)) -> Wire {
        let mut parameters = WireParameters {
            up_dllp_share: 0.02,
            down_dllp_share: 0.02,
            latency_ns: 100.0,
            acknowledge_ns: 50.0,
            replay_timer_ns: 2000.0,
            replay_buffer_bytes: 4096,
            bit_error_rate: 0.0,
        };
        change(&mut parameters);
        Wire::new(&Link::PUBLISHED, &parameters, 0.02, Random::new(1, "wire"))
    }

    fn write(bytes: u32) -> Repr {
        packets::write(&Link::PUBLISHED, 0, bytes)
    }

    fn gbps_of_writes(wire: &mut Wire, count: u32) -> f64 {
        let packet = write(256);
        let mut last = Time::ZERO;
        for _ in 0..count {
            last = wire.send(Time::ZERO, &packet).left;
        }
        f64::from(wire.bytes_of(&packet) * count) * 8.0 / last.since(Time::ZERO).ns()
    }

    #[test]
    fn packets_are_sent_one_after_the_other() {
        let mut wire = wire(|_| ());
        let first = wire.send(Time::ZERO, &write(256));
        let second = wire.send(Time::ZERO, &write(256));
        assert_eq!(first.arrived, first.left + Span::from_ns(100.0));
        assert_eq!(second.left - first.left, wire.duration(280));
        assert_eq!((first.sequence, second.sequence), (0, 1));
    }

    #[test]
    fn a_wire_without_errors_reaches_its_rate() {
        let rate = gbps_of_writes(&mut wire(|_| ()), 10_000);
        assert!((rate - 63.015_38 * 0.98).abs() < 0.01, "{rate}");
    }

    #[test]
    fn a_small_replay_buffer_limits_throughput_to_its_size_per_round_trip() {
        let mut wire = wire(|parameters| parameters.replay_buffer_bytes = 560);
        let rate = gbps_of_writes(&mut wire, 10_000);
        // Two packets of 280 bytes a round trip: the time of a packet, 100 ns to the receiver, 50 ns until the Ack, and
        // 100 ns back.
        let round_trip_ns = wire.duration(280).ns() + 250.0;
        assert!((rate - 560.0 * 8.0 / round_trip_ns).abs() < 0.1, "{rate}");
    }

    #[test]
    fn a_corrupted_packet_is_retransmitted_after_a_round_trip() {
        let mut wire = wire(|parameters| parameters.bit_error_rate = 1e-5);
        let rate = gbps_of_writes(&mut wire, 20_000);
        let corrupted_share = 1.0 - (1.0_f64 - 1e-5).powi(280 * 8);
        assert!((wire.replays as f64 / 20_000.0 - corrupted_share).abs() < 0.003, "{} replays", wire.replays);
        let packet_ns = wire.duration(280).ns();
        let expected = 280.0 * 8.0 / (packet_ns + corrupted_share * (packet_ns + 250.0));
        assert!((rate - expected).abs() < 1.0, "{rate}, not {expected}");
    }

    #[test]
    fn sequence_numbers_wrap_at_twelve_bits() {
        let mut wire = wire(|_| ());
        for _ in 0..SEQUENCES {
            wire.send(Time::ZERO, &write(4));
        }
        assert_eq!(wire.send(Time::ZERO, &write(4)).sequence, 0);
    }
}
