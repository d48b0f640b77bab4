//! The protocol model: the bandwidth that a link leaves for data, for transfers of any size and alignment.
//!
//! A transfer is divided into packets. A packet has a header, framing and checksums; the link itself carries
//! acknowledgements, credit updates and clock compensation. The remaining bandwidth is an upper bound, because the
//! model has no waiting.
//!
//! Source: Neugebauer et al., "Understanding PCIe performance for end host networking", SIGCOMM 2018, section 3, and
//! the program published with it, all of whose figures [`Mode::Published`] reproduces, including its defects.
//! [`Mode::Corrected`] follows the specification; `docs/pcie-model.md` lists the differences.

pub mod latency;
pub mod nic;
pub mod overhead;
pub mod split;

use std::fmt;
use std::ops::Add;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::link::{AddressWidth, Link};
use crate::tlp::{DW_BYTES, ECRC_BYTES, FRAMING_BYTES};
use overhead::Limits;
use split::Span;

/// Largest transfer modelled; bandwidth does not change for larger ones.
pub const SIZE_BYTES_MAX: u64 = 16 << 20;

/// Size of a completion's header.
const COMPLETION_HEADER_BYTES: u32 = 3 * DW_BYTES;

/// Which formulas the model uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Those of the published program, including its defects.
    Published,
    /// Those of the specification.
    #[default]
    Corrected,
}

/// The size of the completions of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompletionSize {
    /// The largest payload of a packet (MPS).
    #[default]
    Mps,
    /// One read completion boundary (RCB), as with older root complexes.
    Rcb,
}

/// A memory access of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Sends requests and receives completions with data.
    Read,
    /// Sends data.
    Write,
}

/// Bytes on the wire in both directions, including framing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent by the requester.
    pub sent_bytes: u64,
    /// Bytes received by the requester.
    pub received_bytes: u64,
}

/// The bandwidth of a link for transfers of one size, in 10^9 bits of data per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Bandwidth of writes alone.
    pub write_gbps: f64,
    /// Bandwidth of reads alone.
    pub read_gbps: f64,
    /// Bandwidth in each direction of as many reads as writes.
    pub readwrite_gbps: f64,
}

/// A model of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    mode: Mode,
    link: Link,
    completions: CompletionSize,
}

/// Why something cannot be modelled.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ModelError {
    /// The size is 0 or too large.
    #[error("a transfer of {0} bytes cannot be modelled; choose 1 to {SIZE_BYTES_MAX}")]
    Size(u64),
    /// The offset is outside a page.
    #[error("an offset of {0} bytes is outside the 4 KB page; choose 0 to 4095")]
    Offset(u64),
    /// All transfers of the published model are aligned.
    #[error("the published model has no offsets, but {0} was given; leave it out or choose the corrected mode")]
    PublishedOffset(u64),
    /// The published model has no limits for links of 12 lanes.
    #[error("the published model has no links of 12 lanes; choose another width or the corrected mode")]
    PublishedLanes,
}

impl Model {
    /// Creates a model of this link.
    ///
    /// # Errors
    /// When the mode does not cover the link.
    pub fn new(mode: Mode, link: Link, completions: CompletionSize) -> Result<Self, ModelError> {
        if mode == Mode::Published && link.lanes.count() == 12 {
            return Err(ModelError::PublishedLanes);
        }
        Ok(Self { mode, link, completions })
    }

    /// Returns the mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the link.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns the rate of all lanes without the line code's overhead, in 10^9 bits per second. From generation 6 on
    /// the line code has no overhead; the published model uses 242 of 256 bytes of a flit instead.
    pub fn raw_gbps(&self) -> f64 {
        match self.mode {
            Mode::Published if self.link.generation.is_flit_mode() => 242.0 / 256.0 * self.link.raw_gbps(),
            _ => self.link.raw_gbps(),
        }
    }

    /// Returns the bandwidth left for transaction layer packets, in 10^9 bits per second.
    pub fn tlp_gbps(&self) -> f64 {
        self.raw_gbps()
            * match self.mode {
                // The published model takes symbol times of a lane for bytes of the whole link.
                Mode::Published => 1.0 - overhead::link_layer_share(Limits::published(&self.link), 1.0),
                Mode::Corrected => overhead::packets_share(&self.link),
            }
    }

    /// Returns the bandwidth for transfers of `size_bytes` that start `offset_bytes` into a page.
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

    /// Returns the data bandwidth if every `data_bytes` of data cause this traffic.
    pub fn data_gbps(&self, data_bytes: u64, traffic: Traffic) -> f64 {
        data_bytes as f64 * self.tlp_gbps() / traffic.sent_bytes.max(traffic.received_bytes) as f64
    }

    /// Returns the span of a transfer after checking its size and offset.
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

    /// Returns the bytes on the wire of an access.
    pub fn traffic(&self, access: Access, span: Span) -> Traffic {
        match self.mode {
            Mode::Published => self.published_traffic(access, span.bytes),
            Mode::Corrected => self.corrected_traffic(access, span),
        }
    }

    /// Divides sizes by limits, without alignment and double words; completions ignore the boundaries of requests.
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

    /// Sums up the traffic packet by packet.
    fn corrected_traffic(&self, access: Access, span: Span) -> Traffic {
        let rcb_bytes = self.link.rcb_bytes.bytes();
        match access {
            Access::Write => {
                let pieces = span.split(self.link.mps_bytes.bytes());
                let sent_bytes = pieces.map(|piece| self.request_bytes(piece) + piece.dw_bytes()).sum();
                Traffic { sent_bytes, received_bytes: 0 }
            }
            Access::Read => span.split(self.link.mrrs_bytes.bytes()).fold(Traffic::default(), |sum, request| {
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

    /// Returns the size of a request without data. In flit mode, byte enables take an additional double word, which is
    /// sent only if the transfer is not aligned to double words.
    fn request_bytes(&self, span: Span) -> u64 {
        let has_byte_enables = self.is_flit_mode() && !span.is_dw_aligned();
        let enables_bytes = if has_byte_enables { DW_BYTES } else { 0 };
        u64::from(self.packet_bytes(self.request_header_bytes() + enables_bytes))
    }

    /// Returns the size of a completion with its data. In flit mode, the two lowest bits of the address take an
    /// additional double word, which is sent only if they are not zero.
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

    /// Returns the size of a packet without data: header, checksums and framing. Flits have their own checksum and need
    /// no framing.
    fn packet_bytes(&self, header_bytes: u32) -> u32 {
        let framing_bytes = if self.is_flit_mode() { 0 } else { FRAMING_BYTES };
        let ecrc_bytes = if self.link.ecrc { ECRC_BYTES } else { 0 };
        framing_bytes + header_bytes + ecrc_bytes
    }

    /// Returns whether packets are modelled as parts of flits, which the published model does not do.
    fn is_flit_mode(&self) -> bool {
        self.mode == Mode::Corrected && self.link.generation.is_flit_mode()
    }
}

impl Traffic {
    /// Returns the traffic as seen from the other end.
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
