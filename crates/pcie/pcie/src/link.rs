//! The parameters of a PCIe link: generation, width, and the limits that both ends have negotiated.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A generation of the specification, 1 to 7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Generation(u8);

/// The number of lanes of a link: 1, 2, 4, 8, 12, 16 or 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Lanes(u8);

/// A maximum size of payloads or read requests: a power of two from 128 to 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct TransferLimit(u32);

/// The read completion boundary: 64 or 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct ReadBoundary(u32);

/// Width of the addresses in memory requests, which have three or four double words of header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum AddressWidth {
    /// 32 bits, a header of three double words.
    Bits32,
    /// 64 bits, a header of four double words.
    #[default]
    Bits64,
}

/// Bytes of transaction layer packets in a flit of [`FLIT_BYTES`]: the other bytes are 6 of data link layer, 8 of CRC
/// and 6 of FEC (specification 6.0, section 4.2.3.4).
pub const FLIT_TLP_BYTES: u32 = 236;
/// Bytes of a flit.
pub const FLIT_BYTES: u32 = 256;

/// A link as its two ends have negotiated it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Generation of the specification, 1 to 7, which determines rate and encoding.
    pub generation: Generation,
    /// Number of lanes: 1, 2, 4, 8, 12, 16 or 32.
    pub lanes: Lanes,
    /// Maximum payload size (MPS) of a packet: a power of two from 128 to 4096.
    pub mps_bytes: TransferLimit,
    /// Maximum read request size (MRRS): a power of two from 128 to 4096.
    pub mrrs_bytes: TransferLimit,
    /// Read completion boundary (RCB): 64 or 128.
    #[serde(default)]
    pub rcb_bytes: ReadBoundary,
    /// Width of the addresses in requests: 32 or 64.
    #[serde(default, rename = "address_bits")]
    pub address: AddressWidth,
    /// Whether packets carry an end-to-end checksum of four bytes.
    #[serde(default)]
    pub ecrc: bool,
}

/// A value that no link can have.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LinkError {
    /// Not 1 to 7.
    #[error("PCIe generation {0} is not known; choose 1 to 7")]
    Generation(u8),
    /// Not a width of the specification.
    #[error("a link of {0} lanes does not exist; choose 1, 2, 4, 8, 12, 16 or 32")]
    Lanes(u8),
    /// Not a size of the specification.
    #[error("{0} bytes is not a payload or request limit; choose a power of two from 128 to 4096")]
    TransferLimit(u32),
    /// Not a boundary of the specification.
    #[error("{0} bytes is not a read completion boundary; choose 64 or 128")]
    ReadBoundary(u32),
    /// Not a width of the specification.
    #[error("addresses of {0} bits do not exist; choose 32 or 64")]
    AddressWidth(u8),
    /// Not a number.
    #[error("'{0}' is not a number; give one such as {1}")]
    NotANumber(String, &'static str),
}

impl Generation {
    /// The latest known generation.
    pub const LATEST: Self = Self(7);

    /// Returns the generation of this number.
    ///
    /// # Errors
    /// For numbers other than 1 to 7.
    pub fn new(number: u8) -> Result<Self, LinkError> {
        if (1..=Self::LATEST.0).contains(&number) { Ok(Self(number)) } else { Err(LinkError::Generation(number)) }
    }

    /// Returns the number, 1 to 7.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Returns the transfer rate of a lane, in 10^9 transfers a second: 2.5, 5, 8, 16, 32, 64 or 128.
    pub fn transfers_gtps(self) -> f64 {
        match self.0 {
            1 => 2.5,
            2 => 5.0,
            number => 8.0 * f64::from(1_u32 << (number - 3)),
        }
    }

    /// Returns whether packets are carried in flits of 256 bytes, which holds from generation 6 on.
    pub fn is_flit_mode(self) -> bool {
        self.0 >= 6
    }
}

impl Lanes {
    /// Returns a link width.
    ///
    /// # Errors
    /// For widths that the specification does not have.
    pub fn new(count: u8) -> Result<Self, LinkError> {
        if matches!(count, 1 | 2 | 4 | 8 | 12 | 16 | 32) { Ok(Self(count)) } else { Err(LinkError::Lanes(count)) }
    }

    /// Returns the number of lanes.
    pub fn count(self) -> u8 {
        self.0
    }
}

impl TransferLimit {
    /// All limits, smallest first.
    pub const ALL: [Self; 6] = [Self(128), Self(256), Self(512), Self(1024), Self(2048), Self(4096)];

    /// Returns a limit of this many bytes.
    ///
    /// # Errors
    /// For values other than a power of two from 128 to 4096.
    pub fn new(bytes: u32) -> Result<Self, LinkError> {
        let limit = Self(bytes);
        if Self::ALL.contains(&limit) { Ok(limit) } else { Err(LinkError::TransferLimit(bytes)) }
    }

    /// Returns the number of bytes.
    pub fn bytes(self) -> u32 {
        self.0
    }

    /// Returns its index in [`TransferLimit::ALL`].
    pub fn index(self) -> usize {
        (self.0.trailing_zeros() - Self::ALL[0].0.trailing_zeros()) as usize
    }
}

impl ReadBoundary {
    /// Returns a boundary of this many bytes.
    ///
    /// # Errors
    /// For values other than 64 and 128.
    pub fn new(bytes: u32) -> Result<Self, LinkError> {
        if matches!(bytes, 64 | 128) { Ok(Self(bytes)) } else { Err(LinkError::ReadBoundary(bytes)) }
    }

    /// Returns the number of bytes.
    pub fn bytes(self) -> u32 {
        self.0
    }
}

impl Default for ReadBoundary {
    /// Returns 64 bytes, the value of Intel's root complexes.
    fn default() -> Self {
        Self(64)
    }
}

impl AddressWidth {
    /// Returns the width of this many bits.
    ///
    /// # Errors
    /// For values other than 32 and 64.
    pub fn new(bits: u8) -> Result<Self, LinkError> {
        match bits {
            32 => Ok(Self::Bits32),
            64 => Ok(Self::Bits64),
            other => Err(LinkError::AddressWidth(other)),
        }
    }

    /// Returns 32 or 64.
    pub fn bits(self) -> u8 {
        match self {
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }
}

impl Link {
    /// The link of the published measurements: generation 3, eight lanes, MPS 256, MRRS 512, 64-bit addresses.
    pub const PUBLISHED: Self = Self {
        generation: Generation(3),
        lanes: Lanes(8),
        mps_bytes: TransferLimit(256),
        mrrs_bytes: TransferLimit(512),
        rcb_bytes: ReadBoundary(64),
        address: AddressWidth::Bits64,
        ecrc: false,
    };

    /// Returns the rate of all lanes in 10^9 bits a second, without the overhead of the line code, of which there is
    /// none from generation 6 on.
    pub fn raw_gbps(&self) -> f64 {
        let code_share = match self.generation.number() {
            1 | 2 => 8.0 / 10.0,
            3..=5 => 128.0 / 130.0,
            _ => 1.0,
        };
        code_share * self.generation.transfers_gtps() * f64::from(self.lanes.count())
    }
}

/// Implements the conversions for serde, for the command line and for printing.
macro_rules! as_number {
    ($type:ty, $number:ty, $new:path, $value:path, $example:literal) => {
        impl TryFrom<$number> for $type {
            type Error = LinkError;

            fn try_from(number: $number) -> Result<Self, LinkError> {
                $new(number)
            }
        }

        impl From<$type> for $number {
            fn from(value: $type) -> $number {
                $value(value)
            }
        }

        impl FromStr for $type {
            type Err = LinkError;

            fn from_str(text: &str) -> Result<Self, LinkError> {
                let number = text.parse().map_err(|_| LinkError::NotANumber(text.to_owned(), $example))?;
                $new(number)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                $value(*self).fmt(formatter)
            }
        }
    };
}

as_number!(Generation, u8, Generation::new, Generation::number, "3");
as_number!(Lanes, u8, Lanes::new, Lanes::count, "8");
as_number!(TransferLimit, u32, TransferLimit::new, TransferLimit::bytes, "256");
as_number!(ReadBoundary, u32, ReadBoundary::new, ReadBoundary::bytes, "64");
as_number!(AddressWidth, u8, AddressWidth::new, AddressWidth::bits, "64");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_double_from_the_third_generation_on() {
        let rates: Vec<f64> = (1..=7).map(|number| Generation::new(number).unwrap().transfers_gtps()).collect();
        assert_eq!(rates, [2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0]);
    }

    #[test]
    fn invalid_values_are_refused_with_value_and_remedy() {
        assert_eq!("8".parse::<Generation>(), Err(LinkError::Generation(8)));
        assert_eq!("3".parse::<Lanes>(), Err(LinkError::Lanes(3)));
        for bytes in [0, 64, 129, 300, 8192, u32::MAX] {
            assert_eq!(TransferLimit::new(bytes), Err(LinkError::TransferLimit(bytes)));
        }
        assert_eq!(ReadBoundary::new(256), Err(LinkError::ReadBoundary(256)));
        assert_eq!(AddressWidth::new(48), Err(LinkError::AddressWidth(48)));
        let text = "many".parse::<TransferLimit>().unwrap_err().to_string();
        assert!(text.contains("'many'") && text.contains("256"), "{text}");
    }

    #[test]
    fn the_index_of_a_limit_is_its_position_in_all() {
        for (index, limit) in TransferLimit::ALL.iter().enumerate() {
            assert_eq!(limit.index(), index);
        }
    }
}
