//! `crosslane --version`: the release, what it has, and which other releases it works together with.

use std::sync::LazyLock;

use rack::Backend;
use rnic::nic::TransportPolicy;
use router_node::cluster::InterconnectKind;

use crate::{compare, explain, shared_rack, stat};

/// The text of `--version` after the program's name. `-V` prints its first line.
pub static LONG: LazyLock<String> = LazyLock::new(|| {
    let words = |words: &[&str]| words.join(", ");
    let backends = words(&Backend::ALL.iter().map(|backend| backend.as_str()).collect::<Vec<_>>());
    let transports = words(&TransportPolicy::ALL.map(TransportPolicy::name));
    let interconnects = words(&InterconnectKind::ALL.map(InterconnectKind::as_str));
    let (version, target) = (machine::VERSION, machine::TARGET);
    let (rack, cluster) = (rack::VERSION, router_node::cluster::VERSION);
    let (scenario, results) = (netsim::scenario::VERSION, pcie::result::SCHEMA);
    let (lane, page) = (segment::ends::LAYOUT_VERSION, stats_page::VERSION);
    let (device, monitor) = (fabric::device::VERSION, monitor::PROTOCOL_VERSION);
    let router = router_node::control::message::VERSION;
    let output = words(&[stat::SCHEMA, explain::SCHEMA, compare::SCHEMA, shared_rack::SCHEMA]);
    format!(
        "{version}\n\
         target: {target}\n\
         features: windows ({backends}), RDMA transports ({transports}), router interconnects ({interconnects})\n\
         files: rack {rack}, cluster {cluster}, scenario {scenario}, {results}\n\
         JSON output: {output}\n\
         programs and nodes connect if these are the same: lane {lane}, statistics {page}, device {device}, monitor \
         {monitor}, router {router}"
    )
});
