//! The options that describe the modelled link and the arithmetic.

use clap::{Args, ValueEnum};
use pcie::link::{AddressWidth, Generation, Lanes, Link, ReadBoundary, TransferLimit};
use pcie::model::{CompletionSize, Mode, Model, ModelError};

/// A link and the arithmetic of its model; by default the link of the published measurements.
#[derive(Args)]
#[command(next_help_heading = "Link")]
#[group(skip)]
pub struct Options {
    /// Generation of PCIe, 1 to 7
    #[arg(long = "gen", value_name = "NUMBER", default_value_t = Link::PUBLISHED.generation)]
    generation: Generation,
    /// Number of lanes: 1, 2, 4, 8, 12, 16 or 32
    #[arg(long, value_name = "COUNT", default_value_t = Link::PUBLISHED.lanes)]
    lanes: Lanes,
    /// Maximum payload size, a power of two from 128 to 4096
    #[arg(long, value_name = "BYTES", default_value_t = Link::PUBLISHED.mps_bytes)]
    mps: TransferLimit,
    /// Maximum read request size, a power of two from 128 to 4096
    #[arg(long, value_name = "BYTES", default_value_t = Link::PUBLISHED.mrrs_bytes)]
    mrrs: TransferLimit,
    /// Address width, 32 or 64
    #[arg(long, value_name = "BITS", default_value_t = Link::PUBLISHED.address)]
    addr: AddressWidth,
    /// Read completion boundary, 64 or 128
    #[arg(long, value_name = "BYTES", default_value_t = Link::PUBLISHED.rcb_bytes)]
    rcb: ReadBoundary,
    /// Completions carry at most one read completion boundary, as from older root complexes, instead of the MPS
    #[arg(long)]
    rcb_chunks: bool,
    /// Packets carry an end-to-end checksum
    #[arg(long)]
    ecrc: bool,
    /// Arithmetic: that of the program published with pcie-bench, defects included, or that of the specification
    #[arg(long, value_enum, default_value_t = Arithmetic::Corrected)]
    mode: Arithmetic,
}

#[derive(Clone, Copy, ValueEnum)]
enum Arithmetic {
    Published,
    Corrected,
}

impl Options {
    /// Returns the link.
    pub fn link(&self) -> Link {
        Link {
            generation: self.generation,
            lanes: self.lanes,
            mps_bytes: self.mps,
            mrrs_bytes: self.mrrs,
            rcb_bytes: self.rcb,
            address: self.addr,
            ecrc: self.ecrc,
        }
    }

    /// Returns the model of the link.
    pub fn model(&self) -> Result<Model, ModelError> {
        let mode = match self.mode {
            Arithmetic::Published => Mode::Published,
            Arithmetic::Corrected => Mode::Corrected,
        };
        let completions = if self.rcb_chunks { CompletionSize::Rcb } else { CompletionSize::Mps };
        Model::new(mode, self.link(), completions)
    }
}
