//! DCTCP ("Data Center TCP", SIGCOMM 2010; RFC 8257): a window that follows the share of marked packets.
//!
//! The window begins at its initial value, which is the bandwidth-delay product for a start at line rate. The first
//! marked packet of a window of data cuts it by half the smoothed share of marked packets; until that window of data is
//! acknowledged, it is neither cut again nor increased. Otherwise it grows by `increase_bytes` per round trip.

use super::AckSample;
use crate::wire::Psn;

/// The fixed-point representation of 1 with 16 fraction bits, for the share of marked packets.
const FRACTION_ONE: u32 = 1 << 16;

/// Constants of DCTCP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dctcp {
    /// The initial window in bytes.
    pub initial_bytes: u32,
    /// The maximum window in bytes. The minimum is one packet.
    pub bytes_max: u32,
    /// The weight of the newest round trip in the smoothed share of marked packets (g).
    pub gain: f32,
    /// The increase per round trip in bytes.
    pub increase_bytes: u32,
}

impl Dctcp {
    /// *Published*: a gain of 1/16, and an increase of one packet per round trip.
    pub fn published(initial_bytes: u32, bytes_max: u32, mtu_bytes: u32) -> Self {
        Self { initial_bytes, bytes_max, gain: 1.0 / 16.0, increase_bytes: mtu_bytes }
    }
}

/// The state of DCTCP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct DctcpWindow {
    bytes: u32,
    /// The remainder of increases below a byte, in bytes squared.
    pending_increase: u32,
    /// The smoothed fraction of marked packets, in 1/65536 (alpha).
    marked_fraction: u32,
    packets: u32,
    marked: u32,
    /// The fraction is updated when this PSN is acknowledged.
    round_end: Psn,
    /// After a cut: the window changes again when this PSN is acknowledged.
    cut_end: Psn,
    is_cut: bool,
}

impl DctcpWindow {
    pub fn new(constants: &Dctcp) -> Self {
        Self {
            bytes: constants.initial_bytes,
            pending_increase: 0,
            marked_fraction: FRACTION_ONE,
            packets: 0,
            marked: 0,
            round_end: Psn::default(),
            cut_end: Psn::default(),
            is_cut: false,
        }
    }

    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    pub fn on_ack(&mut self, ack: &AckSample, constants: &Dctcp) {
        self.packets += ack.packets;
        self.marked += ack.marked;
        if self.packets > 0 && ack.to.after(self.round_end) >= 0 {
            self.round_end = ack.next;
            self.update_fraction(constants);
        }
        if self.is_cut && ack.to.after(self.cut_end) >= 0 {
            self.is_cut = false;
        }
        if self.is_cut {
            return;
        }
        if ack.marked > 0 {
            let part = f64::from(self.marked_fraction) / f64::from(FRACTION_ONE) / 2.0;
            self.bytes = ((f64::from(self.bytes) * (1.0 - part)) as u32).max(ack.mtu_bytes);
            (self.is_cut, self.cut_end, self.pending_increase) = (true, ack.next, 0);
        } else {
            self.grow(ack, constants);
        }
    }

    fn update_fraction(&mut self, constants: &Dctcp) {
        let share = (f64::from(self.marked) / f64::from(self.packets)).min(1.0);
        let gain = f64::from(constants.gain);
        let smoothed = f64::from(self.marked_fraction) * (1.0 - gain) + gain * share * f64::from(FRACTION_ONE);
        self.marked_fraction = smoothed as u32;
        (self.packets, self.marked) = (0, 0);
    }

    /// Grows by the increase for each window of acknowledged bytes.
    fn grow(&mut self, ack: &AckSample, constants: &Dctcp) {
        let pending = u64::from(self.pending_increase) + u64::from(ack.bytes) * u64::from(constants.increase_bytes);
        let window = u64::from(self.bytes.max(1));
        self.bytes = self.bytes.saturating_add((pending / window) as u32).min(constants.bytes_max);
        self.pending_increase = (pending % window) as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::super::ack;
    use super::*;

    const CONSTANTS: Dctcp =
        Dctcp { initial_bytes: 100_000, bytes_max: 200_000, gain: 1.0 / 16.0, increase_bytes: 1000 };

    #[test]
    fn a_window_halves_at_the_first_mark_and_once_per_window_of_data() {
        let mut window = DctcpWindow::new(&CONSTANTS);
        // PSNs up to 110 are in flight.
        let mut sample = ack(10, 1, 1, None);
        sample.next = Psn::new(110);
        window.on_ack(&sample, &CONSTANTS);
        assert_eq!(window.bytes(), 50_000);
        for to in 11..110 {
            let sample = AckSample { to: Psn::new(to), ..ack(to, 1, 1, None) };
            window.on_ack(&sample, &CONSTANTS);
            assert_eq!(window.bytes(), 50_000, "neither cut nor increased before {to} of 110");
        }
        window.on_ack(&ack(110, 1, 1, None), &CONSTANTS);
        assert!((25_000..25_100).contains(&window.bytes()), "{}", window.bytes());
    }

    #[test]
    fn without_marks_a_window_grows_by_one_packet_per_round_trip() {
        let mut window = DctcpWindow::new(&CONSTANTS);
        let mut to = 0;
        for round in 1..=50 {
            // A window of acknowledgements, of ten packets each.
            for _ in 0..10 {
                to += 10;
                window.on_ack(&ack(to, 10, 0, None), &CONSTANTS);
            }
            let expected = 100_000.0 + f64::from(round) * 1000.0;
            // The window grows during the round, so that 100 packets are a little less than a window.
            assert!(f64::from(window.bytes()) <= expected, "{}", window.bytes());
        }
        // w' = 1000 * 100 kB / w for each round: w^2 grows by 2 * 1000 * 100,000 per round.
        let expected = f64::sqrt(1e10 + 50.0 * 2e8);
        assert!((f64::from(window.bytes()) - expected).abs() < 300.0, "{} {expected}", window.bytes());
    }

    #[test]
    fn the_smoothed_share_of_marks_converges_to_the_share_of_marked_packets() {
        let mut window = DctcpWindow::new(&CONSTANTS);
        for round in 1..=200 {
            window.on_ack(&ack(10 * round, 10, 3, None), &CONSTANTS);
            let expected = 0.3 + 0.7 * (1.0_f64 - 1.0 / 16.0).powi(round as i32);
            let alpha = f64::from(window.marked_fraction) / 65536.0;
            assert!((alpha - expected).abs() < 0.001, "round {round}: {alpha} {expected}");
        }
    }
}
