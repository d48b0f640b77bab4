//! One direction of a link: packets take their time on it one after the other, and one that arrives damaged is sent
//! again, with all behind it, after a Nak or when the replay timer runs out.

use std::collections::VecDeque;

use sim::{Random, Span, Time};

use super::parameters::WireParameters;
use crate::link::{FLIT_BYTES, FLIT_TLP_BYTES, Link};
use crate::tlp::{DLLP_BYTES, FRAMING_BYTES, Repr};

/// Sequence numbers have twelve bits.
const SEQUENCES: u16 = 1 << 12;
/// Fractions of a picosecond are kept in this many bits while bytes are added up.
const FRACTION_BITS: u32 = 16;
/// Tries of one packet: with a bit error rate that a link may have, more are as good as impossible.
const TRIES_MAX: u32 = 64;

/// One direction.
#[derive(Clone, Debug)]
pub struct Wire {
    /// Picoseconds a byte takes, times 2^[`FRACTION_BITS`].
    byte_ps_scaled: u64,
    is_flit_mode: bool,
    latency: Span,
    acknowledge: Span,
    replay_timer: Span,
    replay_buffer_bytes: u32,
    /// Probability that a bit arrives wrong.
    bit_error_rate: f64,
    random: Random,
    free_at: Time,
    sequence: u16,
    /// When the acknowledgement of which bytes comes, earliest first.
    unacknowledged: VecDeque<(Time, u32)>,
    unacknowledged_bytes: u32,
    /// Packets that went over it.
    pub packets: u64,
    /// Packets that had to be sent again.
    pub replays: u64,
}

/// A packet's way over a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Its last bit left; the wire is free.
    pub left: Time,
    /// Its last bit arrived, undamaged.
    pub arrived: Time,
    /// Its sequence number.
    pub sequence: u16,
}

/// Bytes of packets that a direction of `link` carries at most, in 10^9 bits a second, `dllp_share` of it being link
/// layer packets.
pub fn packet_gbps(link: &Link, dllp_share: f64) -> f64 {
    let packets_share = if link.generation.is_flit_mode() {
        f64::from(FLIT_TLP_BYTES) / f64::from(FLIT_BYTES)
    } else {
        1.0 - dllp_share
    };
    link.raw_gbps() * packets_share
}

impl Wire {
    /// An idle direction of `link`, `dllp_share` of which goes to link layer packets.
    pub fn new(link: &Link, wire: &WireParameters, dllp_share: f64, random: Random) -> Self {
        let byte_ps = 8000.0 / packet_gbps(link, dllp_share);
        Self {
            byte_ps_scaled: (byte_ps * f64::from(1_u32 << FRACTION_BITS)).round() as u64,
            is_flit_mode: link.generation.is_flit_mode(),
            latency: Span::from_ns(wire.latency_ns),
            acknowledge: Span::from_ns(wire.acknowledge_ns),
            replay_timer: Span::from_ns(wire.replay_timer_ns),
            replay_buffer_bytes: wire.replay_buffer_bytes,
            bit_error_rate: wire.bit_error_rate,
            random,
            free_at: Time::ZERO,
            sequence: 0,
            unacknowledged: VecDeque::new(),
            unacknowledged_bytes: 0,
            packets: 0,
            replays: 0,
        }
    }

    /// When it has carried all it was given.
    pub fn free_at(&self) -> Time {
        self.free_at
    }

    /// Bytes that a packet takes: in flits there is no framing of its own.
    pub fn bytes_of(&self, packet: &Repr) -> u32 {
        if self.is_flit_mode { packet.wire_bytes() - FRAMING_BYTES } else { packet.wire_bytes() }
    }

    /// How long this many bytes take.
    pub fn duration(&self, bytes: u32) -> Span {
        Span::from_ps((u64::from(bytes) * self.byte_ps_scaled) >> FRACTION_BITS)
    }

    /// Sends a packet that is ready at `ready`, after all before it.
    pub fn send(&mut self, ready: Time, packet: &Repr) -> Passage {
        let bytes = self.bytes_of(packet);
        let begin = self.room(ready.max(self.free_at), bytes);
        let duration = self.duration(bytes);
        let mut left = begin + duration;
        for _ in 1..TRIES_MAX {
            if !self.is_damaged(bytes) {
                break;
            }
            self.replays += 1;
            left = self.told_of_damage(left) + duration;
        }
        self.free_at = left;
        let sequence = self.sequence;
        self.sequence = (sequence + 1) % SEQUENCES;
        self.packets += 1;
        let arrived = left + self.latency;
        self.unacknowledged.push_back((arrived + self.acknowledge + self.latency, bytes));
        self.unacknowledged_bytes += bytes;
        Passage { left, arrived, sequence }
    }

    /// The replay buffer keeps what is not acknowledged: when it has room for `bytes`, at `at` at the earliest.
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

    fn is_damaged(&mut self, bytes: u32) -> bool {
        self.bit_error_rate > 0.0 && self.draw_damage(bytes)
    }

    /// Out of the way of wires without errors: the power would be worked out for each of their packets.
    #[cold]
    fn draw_damage(&mut self, bytes: u32) -> bool {
        let intact = (1.0 - self.bit_error_rate).powi((bytes * 8) as i32);
        self.random.chance(1.0 - intact)
    }

    /// When the sender knows that what left at `left` arrived damaged: a Nak says so, or, when that is damaged too, the
    /// replay timer.
    fn told_of_damage(&mut self, left: Time) -> Time {
        if self.is_damaged(DLLP_BYTES) {
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
            up_dllp_share: 0.01,
            down_dllp_share: 0.01,
            latency_ns: 100.0,
            acknowledge_ns: 50.0,
            replay_timer_ns: 2000.0,
            replay_buffer_bytes: 4096,
            bit_error_rate: 0.0,
        };
        change(&mut parameters);
        Wire::new(&Link::PUBLISHED, &parameters, 0.01, Random::new(1, "wire"))
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
    fn packets_take_their_bytes_one_after_the_other() {
        let mut wire = wire(|_| ());
        let first = wire.send(Time::ZERO, &write(256));
        let second = wire.send(Time::ZERO, &write(256));
        assert_eq!(first.arrived, first.left + Span::from_ns(100.0));
        assert_eq!(second.left - first.left, wire.duration(280));
        assert_eq!((first.sequence, second.sequence), (0, 1));
    }

    #[test]
    fn an_undamaged_wire_carries_its_rate() {
        let rate = gbps_of_writes(&mut wire(|_| ()), 10_000);
        assert!((rate - 63.015_38 * 0.99).abs() < 0.01, "{rate}");
    }

    #[test]
    fn throughput_is_replay_buffer_by_round_trip_when_the_buffer_is_small() {
        let mut wire = wire(|parameters| parameters.replay_buffer_bytes = 560);
        let rate = gbps_of_writes(&mut wire, 10_000);
        // Two packets of 280 bytes each trip: a packet's own time, there 100 ns, 50 ns until the Ack, back 100 ns.
        let round_trip_ns = wire.duration(280).ns() + 250.0;
        assert!((rate - 560.0 * 8.0 / round_trip_ns).abs() < 0.1, "{rate}");
    }

    #[test]
    fn damage_is_repaired_and_costs_a_round_trip() {
        let mut wire = wire(|parameters| parameters.bit_error_rate = 1e-5);
        let rate = gbps_of_writes(&mut wire, 20_000);
        let damaged_share = 1.0 - (1.0_f64 - 1e-5).powi(280 * 8);
        assert!((wire.replays as f64 / 20_000.0 - damaged_share).abs() < 0.003, "{} replays", wire.replays);
        let packet_ns = wire.duration(280).ns();
        let expected = 280.0 * 8.0 / (packet_ns + damaged_share * (packet_ns + 250.0));
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
