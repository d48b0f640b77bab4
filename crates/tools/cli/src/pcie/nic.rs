//! `crosslane pcie nic`: computes the throughput of a network card over a link.

use std::path::Path;
use std::str::FromStr;

use anyhow::Result;
use clap::Args;
use pcie::model::nic::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, NicBandwidth, NicModel};
use pcie::model::{Mode, Model, ModelError};
use serde::Serialize;
use stats::{Align, Table};

use super::sizes::{Size, Sizes};
use super::{link, report};
use crate::output;
use crate::wrong_use::WrongUse;

/// Range of Ethernet rates that `--sustain` accepts.
const RATE_GBPS_MIN: f64 = 0.001;
const RATE_GBPS_MAX: f64 = 100_000.0;

/// Options of `crosslane pcie nic`.
#[derive(Args)]
pub struct Options {
    /// Cards: simple, kernel, dpdk, mlx5-kernel, mlx5-dpdk, mlx5-mprq, or a file in the same format
    /// (docs/pcie-model.md) such as ./mine.toml
    #[arg(long, value_name = "NAME|PATH", value_delimiter = ',', default_values = NicModel::built_in_names())]
    nic: Vec<Card>,
    /// Packet sizes, without the 4 bytes of the Ethernet checksum: one, a list or a range
    #[arg(long, value_name = "BYTES", default_value = "60,64,128,256,512,1024,1514")]
    size: Sizes,
    /// Offset of a packet in its 4 KB page
    #[arg(long, value_name = "BYTES", default_value = "0")]
    offset: Size,
    /// Print instead the smallest frame size from which the card sustains this Ethernet rate in both directions
    #[arg(long, value_name = "GBPS", value_parser = parse_rate, conflicts_with_all = ["size", "offset"])]
    sustain: Option<f64>,
    /// The largest frame that --sustain considers, checksum included
    #[arg(long, value_name = "BYTES", default_value = "1518", requires = "sustain")]
    frame_max: Size,
    /// Print JSON: an object for one card and size, an object with rows for several
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    link: link::Options,
}

#[derive(Clone)]
struct Card(NicModel);

impl FromStr for Card {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(nic) = NicModel::built_in(text) {
            return Ok(Self(nic));
        }
        if !text.ends_with(".toml") && !text.contains('/') {
            let names: Vec<&str> = NicModel::built_in_names().collect();
            let names = names.join(", ");
            return Err(format!("'{text}' is not a known card; choose {names} or a file such as ./mine.toml"));
        }
        NicModel::read(Path::new(text)).map(Self).map_err(|error| error.to_string())
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok();
    rate.filter(|gbps| (RATE_GBPS_MIN..=RATE_GBPS_MAX).contains(gbps))
        .ok_or_else(|| format!("'{text}' is not a rate of 0.001 to 100000 Gb/s; write it as in 100 or 2.5"))
}

/// Prints the bandwidth of every card and size, or the smallest frames.
pub fn main(options: &Options) -> Result<()> {
    let model = options.link.model().map_err(WrongUse::of)?;
    match options.sustain {
        None => print_bandwidths(options, &model),
        Some(line_gbps) => print_smallest_frames(options, &model, line_gbps),
    }
}

/// Parameters that all rows share.
#[derive(Serialize)]
struct Parameters {
    offset_bytes: u64,
}

#[derive(Serialize)]
struct Row<'a> {
    nic: &'a str,
    size_bytes: u64,
    #[serde(flatten)]
    bandwidth: NicBandwidth,
}

impl<'a> Row<'a> {
    fn of(nic: &'a NicModel, model: &Model, size_bytes: u64, offset_bytes: u64) -> Result<Self, ModelError> {
        Ok(Self { nic: &nic.name, size_bytes, bandwidth: nic.bandwidth(model, size_bytes, offset_bytes)? })
    }
}

fn print_bandwidths(options: &Options, model: &Model) -> Result<()> {
    let rows: Result<Vec<Row>, ModelError> = (options.nic.iter())
        .flat_map(|Card(nic)| options.size.0.iter().map(move |size_bytes| (nic, *size_bytes)))
        .map(|(nic, size_bytes)| Row::of(nic, model, size_bytes, options.offset.0))
        .collect();
    let rows = rows.map_err(WrongUse::of)?;
    if options.json {
        return report::print_json(model, Parameters { offset_bytes: options.offset.0 }, &rows);
    }
    let mut table = Table::new(&[
        ("CARD", Align::Left),
        ("PACKET B", Align::Right),
        ("BIDIRECTIONAL Gb/s, EACH", Align::Right),
        ("TRANSMIT Gb/s", Align::Right),
        ("RECEIVE Gb/s", Align::Right),
    ]);
    for Row { nic, size_bytes, bandwidth } in &rows {
        let gbps = [bandwidth.bidirectional_gbps, bandwidth.tx_gbps, bandwidth.rx_gbps].map(report::gbps);
        table.row([(*nic).to_owned(), size_bytes.to_string()].into_iter().chain(gbps).collect());
    }
    output::print(&format!("{}Maximum packet throughput:\n\n{}", report::describe(model), table.render()))
}

/// Parameters that all rows share.
#[derive(Serialize)]
struct FrameParameters {
    sustain_gbps: f64,
    frame_bytes_max: u64,
}

#[derive(Serialize)]
struct FrameRow<'a> {
    nic: &'a str,
    /// `None` if no frame size sustains the rate.
    smallest_frame_bytes: Option<u64>,
}

impl<'a> FrameRow<'a> {
    fn of(nic: &'a NicModel, model: &Model, line_gbps: f64, frame_bytes_max: u64) -> Result<Self, ModelError> {
        let smallest_frame_bytes = nic.smallest_frame(model, line_gbps, frame_bytes_max)?;
        Ok(Self { nic: &nic.name, smallest_frame_bytes })
    }
}

fn print_smallest_frames(options: &Options, model: &Model, line_gbps: f64) -> Result<()> {
    let frame_bytes_max = options.frame_max.0;
    if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&frame_bytes_max) {
        let range = format!("{FRAME_BYTES_MIN} to {FRAME_BYTES_MAX}");
        let what = format!("--frame-max {frame_bytes_max} is not an Ethernet frame size; choose {range}");
        return Err(WrongUse::of(what).into());
    }
    let rows = options.nic.iter().map(|Card(nic)| FrameRow::of(nic, model, line_gbps, frame_bytes_max));
    let rows: Vec<FrameRow> = rows.collect::<Result<_, _>>()?;
    if options.json {
        return report::print_json(model, FrameParameters { sustain_gbps: line_gbps, frame_bytes_max }, &rows);
    }
    let mut table = Table::new(&[("CARD", Align::Left), ("SMALLEST FRAME B", Align::Right)]);
    for FrameRow { nic, smallest_frame_bytes } in &rows {
        let frame = smallest_frame_bytes.map_or_else(|| "none".to_owned(), |bytes| bytes.to_string());
        table.row(vec![(*nic).to_owned(), frame]);
    }
    output::print(&format!(
        "{}Smallest frame size, up to {frame_bytes_max} bytes, from which {line_gbps} Gb/s are sustained in both \
         directions.\n\
         Frame sizes include the checksum of 4 bytes, which does not cross PCIe; {}.\n\n{}",
        report::describe(model),
        match model.mode() {
            Mode::Published => "the published program adds 20 bytes to the rest of each frame on the wire",
            Mode::Corrected => "each needs 20 bytes more on the wire (preamble 8, gap 12)",
        },
        table.render()
    ))
}
