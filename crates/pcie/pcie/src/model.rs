//! The protocol's arithmetic: what a link leaves for data, for transfers of any size and place.
//!
//! A transfer costs packets; a packet costs header, framing and checksums; the link itself costs acknowledgements,
//! credit updates and clock compensation. What is left for data is a bandwidth, an upper bound: nothing here waits.
//!
//! Source: Neugebauer et al., "Understanding PCIe performance for end host networking", SIGCOMM 2018, section 3, and
//! the program published with it, whose every figure [`Mode::Published`] repeats, defects included.
//! [`Mode::Corrected`] is what the specification says; `docs/pcie-model.md` lists the differences.

pub mod latency;
pub mod nic;
pub mod overhead;
pub mod split;

use std::fmt;
use std::ops::Add;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::link::{AddressWidth, FLIT_BYTES, FLIT_TLP_BYTES, Link};
use crate::tlp::{DLLP_BYTES, DW_BYTES, ECRC_BYTES, FRAMING_BYTES};
use overhead::Limits;
use split::Span;

/// The largest transfer that is modelled: beyond it nothing changes any more.
pub const SIZE_BYTES_MAX: u64 = 16 << 20;

/// Bytes of a completion's header.
const COMPLETION_HEADER_BYTES: u32 = 3 * DW_BYTES;

/// Whose arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The published program's, defects included.
    Published,
    /// The specification's.
    #[default]
    Corrected,
}

/// How much of a read one completion brings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompletionSize {
    /// As much as a packet may carry (MPS).
    #[default]
    Mps,
    /// One read completion boundary (RCB), as older root complexes do.
    Rcb,
}

/// What a device asks of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Requests go out, completions with data come back.
    Read,
    /// Data goes out.
    Write,
}

/// Bytes on the wire in both directions, framing included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the end that asks.
    pub sent_bytes: u64,
    /// To the end that asks.
    pub received_bytes: u64,
}

/// What a link leaves for transfers of one size, in 10^9 bits of data a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Writes alone.
    pub write_gbps: f64,
    /// Reads alone.
    pub read_gbps: f64,
    /// As many reads as writes: of each direction.
    pub readwrite_gbps: f64,
}

/// A link and a way to calculate it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    mode: Mode,
    link: Link,
    completions: CompletionSize,
}

/// A question that has no answer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ModelError {
    /// Nothing, or too much.
    #[error("a transfer of {0} bytes cannot be modelled; choose 1 to {SIZE_BYTES_MAX}")]
    Size(u64),
    /// Not inside a page.
    #[error("an offset of {0} bytes leaves the 4 KB page; choose 0 to 4095")]
    Offset(u64),
    /// The published model's transfers are all aligned.
    #[error("the published model has no offsets, but {0} was given; leave it out or choose the corrected mode")]
    PublishedOffset(u64),
    /// The published model's tables lack them.
    #[error("the published model has no links of 12 lanes; choose another width or the corrected mode")]
    PublishedLanes,
}

impl Model {
    /// The model of this link.
    ///
    /// # Errors
    /// When the mode does not know such links.
    pub fn new(mode: Mode, link: Link, completions: CompletionSize) -> Result<Self, ModelError> {
        if mode == Mode::Published && link.lanes.count() == 12 {
            return Err(ModelError::PublishedLanes);
        }
        Ok(Self { mode, link, completions })
    }

    /// Whose arithmetic it is.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The link.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// 10^9 bits a second of all lanes, line code deducted. From generation 6 on the line code costs nothing; the
    /// published model takes 242 of 256 bytes of a flit there.
    pub fn raw_gbps(&self) -> f64 {
        match self.mode {
            Mode::Published if self.link.generation.is_flit_mode() => 242.0 / 256.0 * self.link.raw_gbps(),
            _ => self.link.raw_gbps(),
        }
    }

    /// 10^9 bits a second that are left for packets.
    pub fn tlp_gbps(&self) -> f64 {
        let raw_gbps = self.raw_gbps();
        if self.is_flit_mode() {
            return raw_gbps * (1.0 - overhead::skip_share()) * f64::from(FLIT_TLP_BYTES) / f64::from(FLIT_BYTES);
        }
        // The limits are times of symbols on each lane; the published model takes them for bytes of the whole link.
        let (limits, symbols_bytes) = match self.mode {
            Mode::Published => (Limits::published(&self.link), 1.0),
            Mode::Corrected => (Limits::of(&self.link), f64::from(self.link.lanes.count())),
        };
        let share = |symbols: u32| f64::from(DLLP_BYTES) / (f64::from(symbols) * symbols_bytes);
        let shares = share(limits.ack_symbols) + share(limits.credit_symbols) + overhead::skip_share();
        raw_gbps - raw_gbps * shares
    }

    /// What the link leaves for transfers of `size_bytes` that begin `offset_bytes` into a page.
    ///
    /// # Errors
    /// For sizes and offsets that the mode cannot model.
    pub fn bandwidth(&self, size_bytes: u64, offset_bytes: u64) -> Result<Bandwidth, ModelError> {
        let span = self.span(size_bytes, offset_bytes)?;
        let (write, read) = (self.traffic(Access::Write, span), self.traffic(Access::Read, span));
        Ok(Bandwidth {
            write_gbps: self.data_gbps(size_bytes, write),
            read_gbps: self.data_gbps(size_bytes, read),
            readwrite_gbps: self.data_gbps(size_bytes, write + read),
        })
    }

    /// The data bandwidth when every `data_bytes` cost this traffic.
    pub fn data_gbps(&self, data_bytes: u64, traffic: Traffic) -> f64 {
        data_bytes as f64 * self.tlp_gbps() / traffic.sent_bytes.max(traffic.received_bytes) as f64
    }

    /// What to transfer, checked.
    ///
    /// # Errors
    /// For sizes and offsets that the mode cannot model.
    pub fn span(&self, size_bytes: u64, offset_bytes: u64) -> Result<Span, ModelError> {
        if !(1..=SIZE_BYTES_MAX).contains(&size_bytes) {
            return Err(ModelError::Size(size_bytes));
        }
        if offset_bytes >= crate::test::PAGE_BYTES {
            return Err(ModelError::Offset(offset_bytes));
        }
        if self.mode == Mode::Published && offset_bytes > 0 {
            return Err(ModelError::PublishedOffset(offset_bytes));
        }
        Ok(Span { address: offset_bytes, bytes: size_bytes })
    }

    /// What an access costs on the wire.
    pub fn traffic(&self, access: Access, span: Span) -> Traffic {
        match self.mode {
            Mode::Published => self.published_traffic(access, span.bytes),
            Mode::Corrected => self.corrected_traffic(access, span),
        }
    }

    /// Sizes divided by limits: no alignment, no double words, completions that ignore where requests end.
    fn published_traffic(&self, access: Access, bytes: u64) -> Traffic {
        let pieces = |limit_bytes: u32| bytes.div_ceil(u64::from(limit_bytes));
        let request_bytes = u64::from(self.packet_bytes(self.request_header_bytes()));
        let completion_bytes = u64::from(self.packet_bytes(COMPLETION_HEADER_BYTES));
        match access {
            Access::Write => {
                Traffic { sent_bytes: pieces(self.link.mps_bytes.bytes()) * request_bytes + bytes, received_bytes: 0 }
            }
            Access::Read => Traffic {
                sent_bytes: pieces(self.link.mrrs_bytes.bytes()) * request_bytes,
                received_bytes: pieces(self.completion_limit_bytes()) * completion_bytes + bytes,
            },
        }
    }

    /// Packet by packet.
    fn corrected_traffic(&self, access: Access, span: Span) -> Traffic {
        let rcb_bytes = self.link.rcb_bytes.bytes();
        match access {
            Access::Write => {
                let pieces = span.cut(self.link.mps_bytes.bytes());
                let sent_bytes = pieces.map(|piece| self.request_bytes(piece) + piece.dw_bytes()).sum();
                Traffic { sent_bytes, received_bytes: 0 }
            }
            Access::Read => span.cut(self.link.mrrs_bytes.bytes()).fold(Traffic::default(), |sum, request| {
                let pieces = request.completions(rcb_bytes, self.completion_limit_bytes());
                let received_bytes = pieces.map(|piece| self.completion_bytes(piece)).sum();
                sum + Traffic { sent_bytes: self.request_bytes(request), received_bytes }
            }),
        }
    }

    fn completion_limit_bytes(&self) -> u32 {
        match self.completions {
            CompletionSize::Mps => self.link.mps_bytes.bytes(),
            CompletionSize::Rcb => self.link.rcb_bytes.bytes(),
        }
    }

    /// A request without data. In flit mode byte enables have a double word of their own, sent where they say
    /// something.
    fn request_bytes(&self, span: Span) -> u64 {
        let has_byte_enables = self.is_flit_mode() && !span.is_dw_aligned();
        let enables_bytes = if has_byte_enables { DW_BYTES } else { 0 };
        u64::from(self.packet_bytes(self.request_header_bytes() + enables_bytes))
    }

    /// A completion with its data. In flit mode the two lowest bits of the address have a double word of their own,
    /// sent where they are not zero.
    fn completion_bytes(&self, span: Span) -> u64 {
        let has_lower_address = self.is_flit_mode() && !span.address.is_multiple_of(u64::from(DW_BYTES));
        let address_bytes = if has_lower_address { DW_BYTES } else { 0 };
        u64::from(self.packet_bytes(COMPLETION_HEADER_BYTES + address_bytes)) + span.dw_bytes()
    }

    fn request_header_bytes(&self) -> u32 {
        match self.link.address {
            AddressWidth::Bits32 => 3 * DW_BYTES,
            AddressWidth::Bits64 => 4 * DW_BYTES,
        }
    }

    /// A packet without data: its header, checksums and framing. Flits have a checksum and need no framing.
    fn packet_bytes(&self, header_bytes: u32) -> u32 {
        let framing_bytes = if self.is_flit_mode() { 0 } else { FRAMING_BYTES };
        let ecrc_bytes = if self.link.ecrc { ECRC_BYTES } else { 0 };
        framing_bytes + header_bytes + ecrc_bytes
    }

    /// Whether packets are calculated as parts of flits: the published model does not.
    fn is_flit_mode(&self) -> bool {
        self.mode == Mode::Corrected && self.link.generation.is_flit_mode()
    }
}

impl Traffic {
    /// The same seen from the other end.
    pub fn reversed(self) -> Self {
        Self { sent_bytes: self.received_bytes, received_bytes: self.sent_bytes }
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Published => "published",
            Self::Corrected => "corrected",
        })
    }
}

#[cfg(test)]
mod tests;
