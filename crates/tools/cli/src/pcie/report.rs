//! The output of the modelling commands. JSON is one object for one size, and an object with rows for several.

use anyhow::Result;
use pcie::link::Link;
use pcie::model::{Mode, Model};
use pcie::result::Provenance;
use serde::Serialize;

use crate::output;

/// The modelled link, the parameters of the command, and its results.
#[derive(Serialize)]
struct Report<'a, Parameters: Serialize, Row: Serialize> {
    provenance: Provenance,
    mode: Mode,
    link: &'a Link,
    raw_gbps: f64,
    tlp_gbps: f64,
    #[serde(flatten)]
    parameters: Parameters,
    #[serde(flatten)]
    rows: Rows<'a, Row>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Rows<'a, Row: Serialize> {
    One(&'a Row),
    Many { rows: &'a [Row] },
}

/// Prints results of the model as JSON, preceded by the link and the parameters that they share.
pub fn print_json(model: &Model, parameters: impl Serialize, rows: &[impl Serialize]) -> Result<()> {
    output::print_json(&Report {
        provenance: Provenance::Modelled,
        mode: model.mode(),
        link: model.link(),
        raw_gbps: model.raw_gbps(),
        tlp_gbps: model.tlp_gbps(),
        parameters,
        rows: if let [only] = rows { Rows::One(only) } else { Rows::Many { rows } },
    })
}

/// Returns the link and the arithmetic as text that precedes a table.
pub fn describe(model: &Model) -> String {
    let link = model.link();
    format!(
        "PCIe generation {} x{}, MPS {}, MRRS {}, RCB {}, {}-bit addresses{}\n\
         {:.3} Gb/s raw, {:.3} Gb/s for packets. All numbers are modelled, with {} arithmetic.\n",
        link.generation,
        link.lanes,
        link.mps_bytes,
        link.mrrs_bytes,
        link.rcb_bytes,
        link.address,
        if link.ecrc { ", ECRC" } else { "" },
        model.raw_gbps(),
        model.tlp_gbps(),
        model.mode(),
    )
}

/// Returns a bandwidth as text for a table.
pub fn gbps(gbps: f64) -> String {
    format!("{gbps:.3}")
}
