//! Swift (SIGCOMM 2020): a window that holds the round-trip time at a target, which is larger for small windows.
//!
//! Each measured round trip changes the window: below the target it grows by `increase` packets per round trip, above
//! it shrinks by `beta` times the relative excess. A window below one packet means one packet in flight and a pause of
//! the round-trip time divided by the window (OCP Falcon 0.9, p. 78).

use sim::{Span, Time};

use super::AckSample;

/// Constants of Swift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Swift {
    /// The target round-trip time of large windows: a base and a part for each link of the path.
    pub target: Span,
    /// The maximum addition to the target for small windows.
    pub scaling_range: Span,
    /// Windows of so many packets, and smaller ones, have the whole addition.
    pub scaling_window_min: f32,
    /// Windows of so many packets, and larger ones, have none.
    pub scaling_window_max: f32,
    /// The increase in packets per round trip.
    pub increase: f32,
    /// The factor of decreases (beta).
    pub beta: f32,
    /// The maximum part by which one decrease shrinks the window.
    pub decrease_max: f32,
    /// The minimum window in packets.
    pub window_min: f32,
    /// The initial window in bytes.
    pub initial_bytes: u32,
    /// The maximum window in bytes.
    pub bytes_max: u32,
}

impl Swift {
    /// The base target in additions for a link, of htsim.
    pub const LINKS_PER_BASE: f64 = 6.55;
    /// The scaling range in base targets, of htsim.
    pub const RANGE_PER_BASE: f64 = 5.0;

    /// The constants of htsim (csg-htsim 841d9e7, swift.cpp), whose comments call most of them guesses, because the
    /// paper gives few values; for a path of this many links.
    pub fn htsim(links: u32, initial_bytes: u32, bytes_max: u32) -> Self {
        let base_ns = 20_000.0;
        Self {
            target: Span::from_ns(base_ns + base_ns / Self::LINKS_PER_BASE * f64::from(links)),
            scaling_range: Span::from_ns(Self::RANGE_PER_BASE * base_ns),
            scaling_window_min: 0.1,
            scaling_window_max: 100.0,
            increase: 1.0,
            beta: 0.8,
            decrease_max: 0.5,
            window_min: 0.01,
            initial_bytes,
            bytes_max,
        }
    }

    /// Returns the target round-trip time for a window: the addition falls from `scaling_range` to 0 with
    /// 1/sqrt(window).
    fn target_ns(&self, packets: f32) -> f32 {
        let root = |window: f32| 1.0 / window.sqrt();
        let span = root(self.scaling_window_min) - root(self.scaling_window_max);
        let part = if span > 0.0 { (root(packets) - root(self.scaling_window_max)) / span } else { 0.0 };
        self.target.ns() as f32 + self.scaling_range.ns() as f32 * part.clamp(0.0, 1.0)
    }
}

/// The state of Swift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct SwiftWindow {
    sent_at: Time,
    bytes: f32,
    /// The last measured round-trip time.
    rtt_ns: f32,
    /// Packets acknowledged since the last measurement.
    packets: u32,
    mtu_bytes: u16,
}

impl SwiftWindow {
    pub fn new(constants: &Swift) -> Self {
        Self { sent_at: Time::ZERO, bytes: constants.initial_bytes as f32, rtt_ns: 0.0, packets: 0, mtu_bytes: 0 }
    }

    /// Returns the window in whole packets, at least one.
    pub fn bytes(&self) -> u32 {
        let (bytes, mtu_bytes) = (self.bytes as u32, u32::from(self.mtu_bytes.max(1)));
        (bytes - bytes % mtu_bytes).max(mtu_bytes)
    }

    /// Returns the pause after a packet if the window is smaller than one.
    pub fn pause(&self, _bytes: u32) -> Span {
        let packets = self.bytes / f32::from(self.mtu_bytes);
        if packets < 1.0 { Span::from_ns(f64::from(self.rtt_ns / packets)) } else { Span::ZERO }
    }

    pub fn on_sent(&mut self, now: Time) {
        self.sent_at = now;
    }

    /// Returns when the next packet may leave: the pause follows the newest window, and counts from the last packet.
    pub fn on_ack(&mut self, ack: &AckSample, constants: &Swift) -> Option<Time> {
        self.mtu_bytes = ack.mtu_bytes as u16; // at most 4096, by the profile
        self.packets = self.packets.saturating_add(ack.packets);
        let rtt = ack.rtt?;
        self.rtt_ns = rtt.ns() as f32;
        let was_below_one = self.bytes < ack.mtu_bytes as f32;
        let mtu = ack.mtu_bytes as f32;
        let window = self.bytes / mtu;
        let target_ns = constants.target_ns(window);
        let changed = if self.rtt_ns < target_ns {
            window + constants.increase * self.packets as f32 / window.max(1.0)
        } else {
            let excess = (self.rtt_ns - target_ns) / self.rtt_ns;
            window * (1.0 - constants.beta * excess).max(1.0 - constants.decrease_max)
        };
        self.packets = 0;
        self.bytes = (changed.max(constants.window_min) * mtu).min(constants.bytes_max as f32);
        (was_below_one || self.bytes < mtu).then(|| self.sent_at + self.pause(ack.mtu_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ack;
    use super::*;

    fn constants() -> Swift {
        Swift::htsim(4, 100_000, 1_000_000)
    }

    fn us(us: f64) -> Option<Span> {
        Some(Span::from_ns(us * 1e3))
    }

    #[test]
    fn the_target_is_larger_for_small_windows_and_falls_with_the_root_of_the_window() {
        let constants = constants();
        let base_us = 20.0 + 4.0 * 20.0 / 6.55;
        // A = 100 us / (1/sqrt(0.1) - 1/sqrt(100)), B = -A / sqrt(100).
        let a = 100.0 / (1.0 / 0.1_f64.sqrt() - 0.1);
        for (window, addition_us) in
            [(0.01, 100.0), (0.1, 100.0), (1.0, a - a / 10.0), (25.0, a / 5.0 - a / 10.0), (100.0, 0.0), (1e4, 0.0)]
        {
            let target_us = f64::from(constants.target_ns(window)) / 1e3;
            assert!((target_us - base_us - addition_us).abs() < 0.01, "{window}: {target_us}");
        }
    }

    #[test]
    fn a_window_grows_by_one_packet_per_round_trip_and_shrinks_by_beta_times_the_excess() {
        let constants = constants();
        let mut window = SwiftWindow::new(&constants);
        window.on_ack(&ack(100, 100, 0, us(10.0)), &constants);
        assert_eq!(window.bytes(), 101_000);
        // The target of 101 packets is 32.2 us: the excess is 1/4 of 42.9 us.
        let target_us = 20.0 + 80.0 / 6.55;
        window.on_ack(&ack(200, 100, 0, us(target_us / 0.75)), &constants);
        assert!((f64::from(window.bytes) - 101_000.0 * (1.0 - 0.8 * 0.25)).abs() < 1.0, "{}", window.bytes);
        // One decrease halves the window at most.
        let before = window.bytes;
        window.on_ack(&ack(300, 80, 0, us(5000.0)), &constants);
        assert!((window.bytes / before - 0.5).abs() < 1e-4);
    }

    #[test]
    fn a_window_below_one_packet_pauses_for_the_round_trip_divided_by_the_window() {
        let constants = constants();
        let mut window = SwiftWindow::new(&constants);
        for to in 1..=9 {
            window.on_ack(&ack(to, 1, 0, us(10_000.0)), &constants);
        }
        // 100 packets, halved nine times.
        assert!((f64::from(window.bytes) - 100_000.0 / 512.0).abs() < 0.1);
        assert_eq!((window.bytes(), window.pause(1000).ns().round()), (1000, 10_000_000.0 * 5.12));
        let sent_at = Time::from_ps(7_000_000);
        window.on_sent(sent_at);
        let until = window.on_ack(&ack(10, 1, 0, us(10_000.0)), &constants).unwrap();
        assert!((until.since(sent_at).ns() / (10_000_000.0 * 10.24) - 1.0).abs() < 1e-4);
        // A good round trip adds a whole packet, which ends the pause.
        let until = window.on_ack(&ack(11, 1, 0, us(10.0)), &constants);
        assert_eq!((window.bytes(), until), (1000, Some(sent_at)));
        // Never below the minimum.
        for to in 12..100 {
            window.on_ack(&ack(to, 1, 0, us(10_000.0)), &constants);
        }
        assert!((window.bytes - 10.0).abs() < 1e-3);
    }

    #[test]
    fn a_queue_is_held_near_the_target() {
        let constants = constants();
        let mut window = SwiftWindow::new(&constants);
        // A queue: the round trip takes as long as the window at 10 bytes a nanosecond, and at least 10 us.
        for round in 1..600 {
            let queue_us = f64::from(window.bytes()) / 10_000.0;
            let packets = window.bytes() / 1000;
            window.on_ack(&ack(1000 * round, packets, 0, us(queue_us.max(10.0))), &constants);
        }
        let target_bytes = f64::from(constants.target_ns(300.0)) * 10.0;
        assert!((f64::from(window.bytes()) / target_bytes - 1.0).abs() < 0.1, "{} {target_bytes}", window.bytes());
    }
}
