//! Congestion control: the rate or window of a queue pair. One enum, because its state is part of the on-chip context.
//!
//! Packet loss is not a congestion signal here, because the fabric may lose packets for other reasons. The signals are
//! congestion marks, notifications and round-trip times.

mod dcqcn;
mod dctcp;
mod swift;
mod timely;

use sim::{Span, Time};

pub use dcqcn::Dcqcn;
pub use dctcp::Dctcp;
pub use swift::Swift;
pub use timely::Timely;

use crate::wire::Psn;
use dcqcn::DcqcnRate;
use dctcp::DctcpWindow;
use swift::SwiftWindow;
use timely::TimelyRate;

/// Number of picoseconds in a second.
const PS_PER_S: f64 = 1e12;

/// The congestion control algorithm of senders, with all its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CongestionControl {
    /// No congestion control.
    None,
    /// A fixed window of the bandwidth-delay product (IRN's BDP-FC).
    BdpWindow {
        /// The window in bytes.
        bytes: u32,
    },
    /// A window controlled by the fraction of marked packets.
    Dctcp(Dctcp),
    /// A window controlled by the round-trip time; below one packet, a pause between packets.
    Swift(Swift),
    /// A rate controlled by congestion notification packets of the receiver.
    Dcqcn(Dcqcn),
    /// A rate controlled by the gradient of the round-trip time.
    Timely(Timely),
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

/// The congestion control state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum CongestionState {
    Unlimited,
    Fixed { bytes: u32 },
    Dctcp(DctcpWindow),
    Swift(SwiftWindow),
    Dcqcn(DcqcnRate),
    Timely(TimelyRate),
}

/// Returns how long `bytes` bytes take at a rate.
fn time_at(bytes: u32, bps: f32) -> Span {
    Span::from_ps((f64::from(bytes) * 8.0 * PS_PER_S / f64::from(bps)) as u64)
}

impl CongestionState {
    pub fn new(constants: &CongestionControl) -> Self {
        match constants {
            CongestionControl::None => Self::Unlimited,
            CongestionControl::BdpWindow { bytes } => Self::Fixed { bytes: *bytes },
            CongestionControl::Dctcp(constants) => Self::Dctcp(DctcpWindow::new(constants)),
            CongestionControl::Swift(constants) => Self::Swift(SwiftWindow::new(constants)),
            CongestionControl::Dcqcn(constants) => Self::Dcqcn(DcqcnRate::new(constants)),
            CongestionControl::Timely(constants) => Self::Timely(TimelyRate::new(constants)),
        }
    }

    /// Returns the maximum number of bytes in flight.
    pub fn window_bytes(&self) -> u32 {
        match self {
            Self::Unlimited | Self::Dcqcn(_) | Self::Timely(_) => u32::MAX,
            Self::Fixed { bytes } => *bytes,
            Self::Dctcp(window) => window.bytes(),
            Self::Swift(window) => window.bytes(),
        }
    }

    /// Returns the rate of packets in bits per second, if the algorithm controls it.
    pub fn rate_bps(mut self, constants: &CongestionControl, now: Time) -> Option<f64> {
        match (&mut self, constants) {
            (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) => Some(rate.bps_at(now, constants)),
            (Self::Timely(rate), _) => Some(rate.bps()),
            _ => None,
        }
    }

    /// Returns how long a sender waits after a packet of this size, at present.
    pub fn pause(&self, bytes: u32) -> Span {
        match self {
            Self::Unlimited | Self::Fixed { .. } | Self::Dctcp(_) => Span::ZERO,
            Self::Swift(window) => window.pause(bytes),
            Self::Dcqcn(rate) => rate.pause(bytes),
            Self::Timely(rate) => rate.pause(bytes),
        }
    }

    /// Processes an acknowledgement. Returns when the next packet may leave, if that changes.
    pub fn on_ack(&mut self, constants: &CongestionControl, ack: &AckSample) -> Option<Time> {
        match (self, constants) {
            (Self::Dctcp(window), CongestionControl::Dctcp(constants)) => window.on_ack(ack, constants),
            (Self::Swift(window), CongestionControl::Swift(constants)) => return window.on_ack(ack, constants),
            (Self::Timely(rate), CongestionControl::Timely(constants)) => rate.on_ack(ack, constants),
            _ => {}
        }
        None
    }

    /// Processes a CNP.
    pub fn on_cnp(&mut self, constants: &CongestionControl, now: Time) {
        if let (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) = (self, constants) {
            rate.on_cnp(now, constants);
        }
    }

    /// Accounts for a packet that leaves; returns the delay until the next one may leave.
    pub fn on_sent(&mut self, constants: &CongestionControl, now: Time, bytes: u32) -> Span {
        match (&mut *self, constants) {
            (Self::Dcqcn(rate), CongestionControl::Dcqcn(constants)) => rate.on_sent(now, bytes, constants),
            (Self::Swift(window), _) => window.on_sent(now),
            _ => {}
        }
        self.pause(bytes)
    }
}

#[cfg(test)]
fn ack(to: u32, packets: u32, marked: u32, rtt: Option<Span>) -> AckSample {
    const MTU_BYTES: u32 = 1000;
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
