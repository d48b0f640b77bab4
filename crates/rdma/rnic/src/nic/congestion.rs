//! Congestion control: the rate or window of a queue pair. One enum, because its state is part of the on-chip context.
//!
//! Packet loss is not a congestion signal here, because the fabric may lose packets for other reasons. The signals are
//! congestion marks, notifications and round-trip times.

use sim::{Span, Time};

use crate::wire::Psn;

/// The fixed-point representation of 1 with 16 fraction bits, for DCTCP's fraction of marked packets.
const FRACTION_ONE: u32 = 1 << 16;
/// Number of picoseconds in a second.
const PS_PER_S: f64 = 1e12;
/// Maximum number of DCQCN's increases that are applied at once after a time without packets; enough to reach any rate.
const CATCH_UP_MAX: u64 = 1000;

/// The congestion control algorithm of senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionControl {
    /// No congestion control.
    None,
    /// A fixed window of the bandwidth-delay product (IRN's BDP-FC).
    BdpWindow {
        /// The window in bytes.
        bytes: u32,
    },
    /// A window controlled by the fraction of marked packets ("DCTCP", SIGCOMM 2010; g = 1/16).
    Dctcp {
        /// The initial window in bytes. The window halves at most once a round trip.
        initial_bytes: u32,
        /// The maximum window in bytes.
        bytes_max: u32,
    },
    /// A window controlled by the round-trip time ("Swift", SIGCOMM 2020, without pacing of windows below one packet).
    Swift {
        /// The target round-trip time.
        target: Span,
        /// The initial window in bytes.
        initial_bytes: u32,
        /// The maximum window in bytes.
        bytes_max: u32,
    },
    /// A rate controlled by congestion notification packets of the receiver ("DCQCN", SIGCOMM 2015).
    Dcqcn(Dcqcn),
}

/// Parameters of DCQCN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dcqcn {
    /// The rate of the port in bits per second, which is the initial rate of every queue pair.
    pub line_bps: u64,
    /// The minimum rate.
    pub least_bps: u64,
    /// The step of an additive increase.
    pub step_bps: u64,
    /// The step of a hyper increase.
    pub hyper_step_bps: u64,
    /// The period of the increase timer and of the decay of alpha.
    pub period: Span,
    /// Bytes between two increases of the byte counter.
    pub bytes: u32,
    /// Minimum time between two CNPs that a receiver sends for a queue pair.
    pub notify_period: Span,
}

impl Dcqcn {
    /// *Published*: the parameters of the DCQCN paper, for a port of this rate.
    pub fn published(line_bps: u64) -> Self {
        Self {
            line_bps,
            least_bps: line_bps / 1000,
            step_bps: 40_000_000,
            hyper_step_bps: 400_000_000,
            period: Span::from_ns(55_000.0),
            bytes: 10_000_000,
            notify_period: Span::from_ns(50_000.0),
        }
    }
}

/// What an acknowledgement says about the path.
#[derive(Clone, Copy, Debug)]
pub(super) struct AckSample {
    /// Bytes newly acknowledged.
    pub bytes: u32,
    /// Packets newly acknowledged.
    pub packets: u32,
    /// Number of packets with a congestion mark.
    pub marked: u32,
    /// All packets before this PSN have arrived.
    pub to: Psn,
    /// The PSN of the next new packet.
    pub next: Psn,
    /// The round-trip time, if it was measured.
    pub rtt: Option<Span>,
    pub mtu_bytes: u32,
}

/// A congestion window, controlled by marks or round-trip times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CongestionWindow {
    bytes: u32,
    bytes_max: u32,
    /// The remainder of increases below a byte, in bytes squared.
    pending_increase: u32,
    /// The smoothed fraction of marked packets, in 1/65536 (DCTCP's alpha).
    marked_fraction: u32,
    packets: u32,
    marked: u32,
    round_end: Psn,
    is_starting: bool,
}

/// The state of DCQCN's reaction point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DcqcnRate {
    current_bps: f32,
    target_bps: f32,
    alpha: f32,
    /// When the current period of the increase timer began.
    since: Time,
    bytes: u32,
    timer_stage: u8,
    byte_stage: u8,
}

/// The congestion control state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum CongestionState {
    Unlimited,
    Fixed { bytes: u32 },
    Dctcp(CongestionWindow),
    Swift(CongestionWindow),
    Dcqcn(DcqcnRate),
}

impl CongestionWindow {
    fn new(initial_bytes: u32, bytes_max: u32) -> Self {
        Self {
            bytes: initial_bytes,
            bytes_max,
            pending_increase: 0,
            marked_fraction: FRACTION_ONE,
            packets: 0,
            marked: 0,
            round_end: Psn::default(),
            is_starting: true,
        }
    }

    /// Grows by the acknowledged bytes in slow start, else by one packet for each round trip.
    fn grow(&mut self, ack: &AckSample) {
        if self.is_starting {
            self.bytes = self.bytes.saturating_add(ack.bytes);
        } else {
            let pending_increase = u64::from(self.pending_increase) + u64::from(ack.bytes) * u64::from(ack.mtu_bytes);
            let window = u64::from(self.bytes.max(1));
            self.bytes = self.bytes.saturating_add((pending_increase / window) as u32);
            self.pending_increase = (pending_increase % window) as u32;
        }
        self.bytes = self.bytes.min(self.bytes_max);
    }

    fn shrink(&mut self, part: f64, ack: &AckSample) {
        self.bytes = ((f64::from(self.bytes) * (1.0 - part)) as u32).max(ack.mtu_bytes);
        self.is_starting = false;
        self.pending_increase = 0;
    }

    /// Begins a new round if a round trip has passed, that is, if the packet that was next when the round began has
    /// arrived. Returns whether it did.
    fn end_round(&mut self, ack: &AckSample) -> bool {
        let has_ended = ack.to.after(self.round_end) >= 0;
        if has_ended {
            self.round_end = ack.next;
        }
        has_ended
    }

    fn dctcp(&mut self, ack: &AckSample) {
        self.packets += ack.packets;
        self.marked += ack.marked;
        if ack.marked > 0 {
            self.is_starting = false;
        }
        self.grow(ack);
        if self.packets == 0 || !self.end_round(ack) {
            return;
        }
        let marked_fraction = (u64::from(self.marked) * u64::from(FRACTION_ONE) / u64::from(self.packets)) as u32;
        self.marked_fraction =
            self.marked_fraction - self.marked_fraction / 16 + marked_fraction.min(FRACTION_ONE) / 16;
        if self.marked > 0 {
            self.shrink(f64::from(self.marked_fraction) / f64::from(FRACTION_ONE) / 2.0, ack);
        }
        (self.packets, self.marked) = (0, 0);
    }

    fn swift(&mut self, target: Span, ack: &AckSample) {
        const BETA: f64 = 0.8;
        const PART_MAX: f64 = 0.5;
        let Some(rtt) = ack.rtt else { return };
        // A sample covers the packets acknowledged since the last one, which is about a window.
        if rtt <= target {
            let bytes = if self.is_starting { self.bytes } else { ack.mtu_bytes };
            self.bytes = self.bytes.saturating_add(bytes).min(self.bytes_max);
        } else if self.end_round(ack) {
            let above = (rtt.ps() - target.ps()) as f64 / rtt.ps() as f64;
            self.shrink((BETA * above).min(PART_MAX), ack);
        }
    }
}

impl DcqcnRate {
    fn on_cnp(&mut self, now: Time, constants: &Dcqcn) {
        self.catch_up(now, constants);
        self.target_bps = self.current_bps;
        self.current_bps = (self.current_bps * (1.0 - self.alpha / 2.0)).max(constants.least_bps as f32);
        self.alpha = (1.0 - 1.0 / 256.0) * self.alpha + 1.0 / 256.0;
        (self.timer_stage, self.byte_stage, self.bytes, self.since) = (0, 0, 0, now);
    }

    /// Applies the timer events up to `now`.
    fn catch_up(&mut self, now: Time, constants: &Dcqcn) {
        let periods = now.since(self.since).ps() / constants.period.ps().max(1);
        for _ in 0..periods.min(CATCH_UP_MAX) {
            self.alpha *= 1.0 - 1.0 / 256.0;
            self.timer_stage = self.timer_stage.saturating_add(1);
            self.increase(constants);
        }
        self.since += constants.period * periods;
    }

    fn on_sent(&mut self, now: Time, bytes: u32, constants: &Dcqcn) -> Span {
        self.catch_up(now, constants);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= constants.bytes {
            self.bytes = 0;
            self.byte_stage = self.byte_stage.saturating_add(1);
            self.increase(constants);
        }
        Span::from_ps((f64::from(bytes) * 8.0 * PS_PER_S / f64::from(self.current_bps)) as u64)
    }

    fn increase(&mut self, constants: &Dcqcn) {
        const FAST_STAGES: u8 = 5;
        let line_bps = constants.line_bps as f32;
        if self.timer_stage.min(self.byte_stage) > FAST_STAGES {
            self.target_bps += constants.hyper_step_bps as f32;
        } else if self.timer_stage.max(self.byte_stage) > FAST_STAGES {
            self.target_bps += constants.step_bps as f32;
        }
        self.target_bps = self.target_bps.min(line_bps);
        self.current_bps = f32::midpoint(self.current_bps, self.target_bps);
    }
}

impl CongestionState {
    pub fn new(constants: &CongestionControl) -> Self {
        match *constants {
            CongestionControl::None => Self::Unlimited,
            CongestionControl::BdpWindow { bytes } => Self::Fixed { bytes },
            CongestionControl::Dctcp { initial_bytes, bytes_max } => {
                Self::Dctcp(CongestionWindow::new(initial_bytes, bytes_max))
            }
            CongestionControl::Swift { initial_bytes, bytes_max, .. } => {
                Self::Swift(CongestionWindow::new(initial_bytes, bytes_max))
            }
            CongestionControl::Dcqcn(Dcqcn { line_bps, .. }) => Self::Dcqcn(DcqcnRate {
                current_bps: line_bps as f32,
                target_bps: line_bps as f32,
                alpha: 1.0,
                since: Time::ZERO,
                bytes: 0,
                timer_stage: 0,
                byte_stage: 0,
            }),
        }
    }

    /// Returns the maximum number of bytes in flight.
    pub fn window_bytes(&self) -> u32 {
        match self {
            Self::Unlimited | Self::Dcqcn(_) => u32::MAX,
            Self::Fixed { bytes } => *bytes,
            Self::Dctcp(window) | Self::Swift(window) => window.bytes,
        }
    }

    /// Returns the rate of packets in bits per second, if the algorithm controls it.
    pub fn rate_bps(mut self, constants: &CongestionControl, now: Time) -> Option<f64> {
        match (&mut self, constants) {
            (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) => {
                rate.catch_up(now, constants);
                Some(rate.current_bps.into())
            }
            _ => None,
        }
    }

    pub fn on_ack(&mut self, constants: &CongestionControl, ack: &AckSample) {
        match (self, constants) {
            (Self::Dctcp(window), _) => window.dctcp(ack),
            (Self::Swift(window), CongestionControl::Swift { target, .. }) => window.swift(*target, ack),
            _ => {}
        }
    }

    /// Processes a CNP.
    pub fn on_cnp(&mut self, constants: &CongestionControl, now: Time) {
        if let (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) = (self, constants) {
            rate.on_cnp(now, constants);
        }
    }

    /// Accounts for a packet that leaves; returns the delay until the next one may leave.
    pub fn on_sent(&mut self, constants: &CongestionControl, now: Time, bytes: u32) -> Span {
        match (self, constants) {
            (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) => rate.on_sent(now, bytes, constants),
            _ => Span::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU_BYTES: u32 = 1000;

    fn ack(to: u32, packets: u32, marked: u32, rtt: Option<Span>) -> AckSample {
        AckSample {
            bytes: packets * MTU_BYTES,
            packets,
            marked,
            to: Psn::new(to),
            next: Psn::new(to + 10),
            rtt,
            mtu_bytes: MTU_BYTES,
        }
    }

    #[test]
    fn dctcp_halves_at_most_once_a_round_trip_and_by_the_share_of_marks() {
        let constants = CongestionControl::Dctcp { initial_bytes: 100_000, bytes_max: 200_000 };
        let mut control = CongestionState::new(&constants);
        control.on_ack(&constants, &ack(10, 10, 10, None));
        let once = control.window_bytes();
        assert!((50_000..52_000).contains(&once), "{once}");
        control.on_ack(&constants, &ack(12, 2, 2, None));
        assert!(control.window_bytes() >= once, "the round has not ended");
        for round in 2..200 {
            control.on_ack(&constants, &ack(10 * round, 10, 0, None));
        }
        let grown = control.window_bytes();
        assert!(grown > once + 10 * MTU_BYTES, "{grown}");
        control.on_ack(&constants, &ack(2010, 10, 1, None));
        assert!(
            control.window_bytes() > grown * 9 / 10,
            "a mark after many rounds without marks reduces the window little"
        );
    }

    #[test]
    fn swift_holds_the_round_trip_at_its_target() {
        let target = Span::from_ns(20_000.0);
        let constants = CongestionControl::Swift { target, initial_bytes: 10_000, bytes_max: 1_000_000 };
        let mut control = CongestionState::new(&constants);
        // A queue: the round trip takes as long as the window at 10 bytes a nanosecond, and at least 10 us.
        for round in 1..300 {
            let queue = f64::from(control.window_bytes()) / 10.0;
            control.on_ack(&constants, &ack(20 * round, 10, 0, Some(Span::from_ns(queue.max(10_000.0)))));
        }
        let window = control.window_bytes();
        assert!((140_000..230_000).contains(&window), "{window}");
    }

    #[test]
    fn dcqcn_halves_at_the_first_notification_and_recovers() {
        let constants = CongestionControl::Dcqcn(Dcqcn::published(100_000_000_000));
        let mut control = CongestionState::new(&constants);
        let full = control.on_sent(&constants, Time::ZERO, 1250);
        assert_eq!(full.ps() / 1000, 100);
        control.on_cnp(&constants, Time::ZERO);
        let half = control.on_sent(&constants, Time::ZERO, 1250);
        assert!((195_000..205_000).contains(&half.ps()), "{half}");
        let later = Time::from_ps(1_000_000_000);
        let back = control.on_sent(&constants, later, 1250);
        assert!(back.ps() < 102_000, "after 18 periods of fast recovery: {back}");
    }
}
