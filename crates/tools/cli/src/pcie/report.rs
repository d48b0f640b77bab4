//! What the modelling commands print: as JSON one object for one question, rows for several.

use anyhow::Result;
use pcie::link::Link;
use pcie::model::{Mode, Model};
use pcie::result::Provenance;
use serde::Serialize;

use crate::output;

/// What was asked of which link, and the answers.
#[derive(Serialize)]
struct Answer<'a, Question: Serialize, Row: Serialize> {
    provenance: Provenance,
    mode: Mode,
    link: &'a Link,
    raw_gbps: f64,
    tlp_gbps: f64,
    #[serde(flatten)]
    question: Question,
    #[serde(flatten)]
    rows: Rows<'a, Row>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Rows<'a, Row: Serialize> {
    One(&'a Row),
    Many { rows: &'a [Row] },
}

/// Prints answers that the model gave, with what they have in common before them.
pub fn print_json(model: &Model, question: impl Serialize, rows: &[impl Serialize]) -> Result<()> {
    output::print_json(&Answer {
        provenance: Provenance::Modelled,
        mode: model.mode(),
        link: model.link(),
        raw_gbps: model.raw_gbps(),
        tlp_gbps: model.tlp_gbps(),
        question,
        rows: if let [only] = rows { Rows::One(only) } else { Rows::Many { rows } },
    })
}

/// The link and the arithmetic, for the head of a table.
pub fn describe(model: &Model) -> String {
    let link = model.link();
    format!(
        "PCIe generation {} x{}, MPS {}, MRRS {}, RCB {}, {}-bit addresses{}\n\
         Of {:.3} Gb/s raw {:.3} are left for packets. All numbers are modelled, by {} arithmetic.\n",
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

/// A bandwidth for a table.
pub fn gbps(gbps: f64) -> String {
    format!("{gbps:.3}")
}
