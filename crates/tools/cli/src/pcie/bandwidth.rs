//! `crosslane pcie bandwidth`: computes the bandwidth of a link for reads and writes.

use anyhow::Result;
use clap::Args;
use pcie::model::{Bandwidth, Model, ModelError};
use serde::Serialize;
use stats::{Align, Table};

use super::sizes::{Size, Sizes};
use super::{link, report};
use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane pcie bandwidth`.
#[derive(Args)]
pub struct Options {
    /// Transfer sizes: one, a list or a range, as in 64 or 64,8K or 64..1500 or 64..4K:64
    #[arg(long, value_name = "BYTES", default_value = "1,8,32,64,128,256,512,1K,1500,2K,4K")]
    size: Sizes,
    /// Offset of a transfer in its 4 KB page
    #[arg(long, value_name = "BYTES", default_value = "0")]
    offset: Size,
    /// Print JSON: an object for one size, an object with rows for several
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    link: link::Options,
}

/// Parameters that all rows share.
#[derive(Serialize)]
struct Parameters {
    offset_bytes: u64,
}

#[derive(Serialize)]
struct Row {
    size_bytes: u64,
    #[serde(flatten)]
    bandwidth: Bandwidth,
}

/// Prints the bandwidth of every size.
pub fn main(options: &Options) -> Result<()> {
    let model = options.link.model().map_err(WrongUse::of)?;
    let row = |size_bytes: &u64| {
        let bandwidth = model.bandwidth(*size_bytes, options.offset.0)?;
        Ok(Row { size_bytes: *size_bytes, bandwidth })
    };
    let rows: Vec<Row> =
        options.size.0.iter().map(row).collect::<Result<_, _>>().map_err(WrongUse::of::<ModelError>)?;
    if options.json {
        return report::print_json(&model, Parameters { offset_bytes: options.offset.0 }, &rows);
    }
    output::print(&text(options, &model, &rows))
}

fn text(options: &Options, model: &Model, rows: &[Row]) -> String {
    let heads = ["SIZE B", "WRITE Gb/s", "READ Gb/s", "READ+WRITE Gb/s, EACH"];
    let mut table = Table::new(&heads.map(|head| (head, Align::Right)));
    for Row { size_bytes, bandwidth } in rows {
        let gbps = [bandwidth.write_gbps, bandwidth.read_gbps, bandwidth.readwrite_gbps].map(report::gbps);
        table.row([size_bytes.to_string()].into_iter().chain(gbps).collect());
    }
    let at_offset = match options.offset.0 {
        0 => String::new(),
        offset => format!(" at offset {offset} of a page"),
    };
    format!("{}Maximum payload bandwidth of transfers{at_offset}:\n\n{}", report::describe(model), table.render())
}
