//! Paths from the processor of one host into the memory of another, for links that are modelled by times and not packet
//! by packet: the duration of posted writes and of reads, and their rate.

use sim::{Random, Span};
use thiserror::Error;

use super::packets;
use super::parameters::WireParameters;
use super::wire::{Wire, packet_gbps};
use crate::link::{AddressWidth, Generation, Lanes, Link, LinkError, ReadBoundary, TransferLimit};

/// Share of link layer packets and skip symbols in both directions: corrected arithmetic of the published model at
/// Gen3, MPS 256.
const DLLP_SHARE: f64 = 0.0129;

/// A path between two hosts.
#[derive(Clone, Debug)]
pub struct Path {
    link: Link,
    wire: Wire,
    write_one_way: Span,
    read_round_trip: Span,
}

/// Why there is no such path.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PathError {
    /// The name is not one of [`Path::NAMES`].
    #[error("path '{0}' is not known; choose gen3x16, gen4x16, gen5x16, gen6x16 or ntb")]
    Unknown(String),
    /// The link does not exist.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Parameters of a path.
struct PathModel {
    name: &'static str,
    generation: u8,
    lanes: u8,
    mps_bytes: u32,
    /// Time from a store until a load on the other host returns it, without the time of the packet.
    write_ns: f64,
    /// Time from a load to its data, without the time of the packets.
    read_ns: f64,
}

/// Modelled: a posted write crosses root complex, link, switch and root complex. A root complex takes half of the
/// published round trips after subtraction of memory, 2 x 60 ns of link and 150 ns of device. The switch takes 110 ns
/// (data sheets of Gen3 to Gen5 switches: 105 to 115 ns), and in generation 6 forward error correction adds some 10 ns
/// for each hop. `ntb` is published: a posted write through a non-transparent bridge takes about 500 ns one way (HCIS
/// 2019); a read crosses the bridge twice and adds the time of memory.
const MODELS: [PathModel; 5] = [
    PathModel { name: "gen3x16", generation: 3, lanes: 16, mps_bytes: 256, write_ns: 440.0, read_ns: 960.0 },
    PathModel { name: "gen4x16", generation: 4, lanes: 16, mps_bytes: 256, write_ns: 430.0, read_ns: 940.0 },
    PathModel { name: "gen5x16", generation: 5, lanes: 16, mps_bytes: 512, write_ns: 430.0, read_ns: 940.0 },
    PathModel { name: "gen6x16", generation: 6, lanes: 16, mps_bytes: 512, write_ns: 450.0, read_ns: 980.0 },
    PathModel { name: "ntb", generation: 3, lanes: 8, mps_bytes: 256, write_ns: 500.0, read_ns: 1080.0 },
];

impl Path {
    /// Names of all paths.
    pub const NAMES: [&'static str; 5] = ["gen3x16", "gen4x16", "gen5x16", "gen6x16", "ntb"];

    /// Returns the path of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, PathError> {
        let row = MODELS.iter().find(|row| row.name == name).ok_or_else(|| PathError::Unknown(name.to_owned()))?;
        let link = Link {
            generation: Generation::new(row.generation)?,
            lanes: Lanes::new(row.lanes)?,
            mps_bytes: TransferLimit::new(row.mps_bytes)?,
            mrrs_bytes: TransferLimit::new(512)?,
            rcb_bytes: ReadBoundary::default(),
            address: AddressWidth::Bits64,
            ecrc: false,
        };
        let parameters = WireParameters {
            up_dllp_share: DLLP_SHARE,
            down_dllp_share: DLLP_SHARE,
            latency_ns: 0.0,
            acknowledge_ns: 0.0,
            replay_timer_ns: 0.0,
            replay_buffer_bytes: u32::MAX,
            bit_error_rate: 0.0,
        };
        let wire = Wire::new(&link, &parameters, DLLP_SHARE, Random::new(0, name));
        let (write_one_way, read_round_trip) = (Span::from_ns(row.write_ns), Span::from_ns(row.read_ns));
        Ok(Self { link, wire, write_one_way, read_round_trip })
    }

    /// Returns the narrowest link of the path.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns the highest rate of packets on the link, in 10^9 bits a second.
    pub fn packet_gbps(&self) -> f64 {
        packet_gbps(&self.link, DLLP_SHARE)
    }

    /// Returns how long a posted write of this many bytes occupies the link.
    pub fn write_busy(&self, bytes: u32) -> Span {
        let mps = self.link.mps_bytes.bytes();
        let packet = |bytes| self.wire.duration(self.wire.bytes_of(&packets::write(&self.link, 0, bytes)));
        let whole = packet(mps) * u64::from(bytes / mps);
        if bytes.is_multiple_of(mps) { whole } else { whole + packet(bytes % mps) }
    }

    /// Returns the time from a posted write of this many bytes until the other host sees the last of them.
    pub fn write(&self, bytes: u32) -> Span {
        self.write_one_way + self.write_busy(bytes)
    }

    /// Returns the time from a read of this many bytes until the last of them arrives.
    pub fn read(&self, bytes: u32) -> Span {
        let mrrs = self.link.mrrs_bytes.bytes();
        let request = self.wire.duration(self.wire.bytes_of(&packets::read(&self.link, 0, mrrs, 0)));
        let mps = self.link.mps_bytes.bytes();
        let packet =
            |bytes| self.wire.duration(self.wire.bytes_of(&packets::completion(&self.link, 0, bytes, bytes, 0)));
        let rest = if bytes.is_multiple_of(mps) { Span::ZERO } else { packet(bytes % mps) };
        self.read_round_trip + request * u64::from(bytes.div_ceil(mrrs)) + packet(mps) * u64::from(bytes / mps) + rest
    }

    /// Returns the payload rate that the path sustains with posted writes of this size, in 10^9 bits a second.
    pub fn write_gbps(&self, bytes: u32) -> f64 {
        f64::from(bytes) * 8.0 / self.write_busy(bytes).ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_path_and_other_names_are_refused() {
        assert_eq!(Path::NAMES, MODELS.map(|row| row.name));
        for name in Path::NAMES {
            assert!(Path::named(name).unwrap().packet_gbps() > 60.0, "{name}");
        }
        let error = Path::named("gen9x16").unwrap_err().to_string();
        assert!(error.contains("gen9x16") && error.contains("gen5x16"), "{error}");
    }

    #[test]
    fn a_write_through_a_bridge_takes_half_a_microsecond() {
        let path = Path::named("ntb").unwrap();
        let (small, large) = (path.write(64).ns(), path.write(4096).ns());
        assert!((small - 511.3).abs() < 0.1, "500 ns and 88 bytes at 62.2 Gb/s, not {small}");
        assert!((large - 500.0 - 16.0 * path.write_busy(256).ns()).abs() < 1e-6);
        assert!(path.read(64) > path.write(64) + path.write(64), "a read crosses twice");
    }

    #[test]
    fn rates_double_with_each_generation() {
        let gbps = |name| Path::named(name).unwrap().write_gbps(4096);
        assert!((gbps("gen4x16") / gbps("gen3x16") - 2.0).abs() < 0.001);
        assert!(gbps("gen6x16") > 1.9 * gbps("gen5x16"));
    }
}
