//! Counters of the proxies of a rack.

use control::proxy::PeerReport;
use serde::Serialize;
use stats::{Align, Table};

use crate::rack_choice::RackChoice;
use crate::rack_control;

/// Counters of the proxies of a rack file's nodes.
#[derive(Default)]
pub struct Proxies {
    pub links: Vec<ProxyReport>,
    /// Nodes whose monitors do not answer, with the errors.
    pub silent: Vec<(String, String)>,
}

/// Counters of a node's proxy for one link.
#[derive(Serialize)]
pub struct ProxyReport {
    node: String,
    peer: String,
    #[serde(flatten)]
    carried: PeerReport,
    /// Copies of each byte on this node, those of its programs included.
    copies_per_byte_sent: Option<f64>,
    copies_per_byte_received: Option<f64>,
    /// Mean number of frames published to the peer at once.
    frames_per_publish: Option<f64>,
}

impl Proxies {
    /// Asks the monitors of a rack's nodes; a rack directory has none.
    pub fn of(rack: &RackChoice) -> Self {
        let mut proxies = Self::default();
        let RackChoice::File(rack) = rack else { return proxies };
        for node in &rack.file.rack.nodes {
            match rack_control::status(&rack.run_dir.node(&node.name)) {
                Ok(None) => {}
                Ok(Some(status)) => proxies.links.extend(status.links.into_iter().map(|link| ProxyReport {
                    node: status.node.clone(),
                    peer: link.peer,
                    carried: link.carried,
                    copies_per_byte_sent: (link.carried.bytes_sent > 0).then_some(PeerReport::COPIES_PER_BYTE_SENT),
                    copies_per_byte_received: link.carried.copies_per_byte_received(),
                    frames_per_publish: link.carried.frames_per_publish(),
                })),
                Err(error) => proxies.silent.push((node.name.clone(), format!("{error:#}"))),
            }
        }
        proxies
    }

    /// Returns the counters as a table.
    pub fn describe(&self) -> String {
        let right = Align::Right;
        let mut table = Table::new(&[
            ("PROXY OF", Align::Left),
            ("TO", Align::Left),
            ("SENT", right),
            ("COPIES/B SENT", right),
            ("RECEIVED", right),
            ("COPIES/B RECEIVED", right),
            ("FRAMES", right),
            ("PER PUBLISH", right),
            ("STALLS", right),
            ("FULL", right),
            ("WOKEN", right),
            ("RANG PEER", right),
            ("RANG PROGRAMS", right),
        ]);
        let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        for link in &self.links {
            let carried = &link.carried;
            table.row(vec![
                link.node.clone(),
                link.peer.clone(),
                units::bytes(carried.bytes_sent),
                ratio(link.copies_per_byte_sent),
                units::bytes(carried.bytes_received),
                ratio(link.copies_per_byte_received),
                (carried.frames_sent + carried.frames_received).to_string(),
                ratio(link.frames_per_publish),
                carried.stalls.to_string(),
                carried.partitions_full.to_string(),
                carried.wakes.to_string(),
                carried.rings_peer.to_string(),
                carried.rings_local.to_string(),
            ]);
        }
        let mut text = if self.links.is_empty() { String::new() } else { format!("\n{}", table.render()) };
        self.silent.iter().for_each(|(node, error)| text += &format!("\nProxy of '{node}' omitted: {error}.\n"));
        text
    }
}
