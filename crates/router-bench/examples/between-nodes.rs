//! Interconnects alone, to which the whole benchmark comes after its tables, core and Ethernet.
//! `between-nodes rnic_lanes rnic_udp` prints what `crosslane bench router --json` says of them, and the adaptive
//! policy beside the best fixed one over each of them.

use std::error::Error;

use router_bench::interconnect::{AdaptiveRow, adaptive_rows, kinds, name};
use router_bench::report::{BetweenNodes, between_nodes};
use router_node::interconnect::Kind;
use serde::Serialize;

#[derive(Serialize)]
struct Answer {
    interconnect: &'static str,
    adaptive: Vec<AdaptiveRow>,
    #[serde(flatten)]
    found: BetweenNodes,
}

fn kind(word: &str) -> Result<Kind, String> {
    let all = kinds();
    let found = all.iter().find(|kind| name(**kind) == word);
    found.copied().ok_or_else(|| format!("'{word}' is no interconnect; try {}", all.map(name).join(", ")))
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.is_empty() {
        return Err(format!("usage: between-nodes INTERCONNECT...: {}", kinds().map(name).join(", ")).into());
    }
    let mut answers = Vec::new();
    for kind in words.iter().map(|word| kind(word)).collect::<Result<Vec<_>, _>>()? {
        let found = between_nodes(&[kind], false, &mut |step| eprintln!("{step}"))?;
        answers.push(Answer { interconnect: name(kind), adaptive: adaptive_rows(&found.loads), found });
    }
    println!("{}", serde_json::to_string_pretty(&answers)?);
    Ok(())
}
