use proptest::prelude::*;
use sim::{Span, Time};

use super::*;
use crate::rate::LinkRate;
use crate::topology::{NetworkNode, SwitchId};

const EIGHT: HostNumbers = HostNumbers::Below(8);

fn flows(format: FlowFormat, text: &str) -> Result<Vec<Flow>, String> {
    parse_flows("a", text, format, &EIGHT).map_err(|error| error.to_string())
}

fn topology(format: TopologyFormat, text: &str) -> Result<ImportedTopology, String> {
    parse_topology("a", text, format).map_err(|error| error.to_string())
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, String>, expected: &str) {
    let error = result.unwrap_err();
    assert!(error.starts_with(expected) && !error.contains('\n') && error.contains(';'), "{error}");
}

#[test]
fn each_line_of_a_trace_is_a_flow() {
    for text in [
        "# comment\n\n1.5,0,7,64000\n0, 3, 2, 1\n",
        "start_us,from,to,bytes\n1.5,0,7,64000\n0, 3, 2, 1\n",
        "\u{feff}# comment\r\nStart_us, From, To, Bytes\r\n1.5,0,7,64000\r\n0,3,2,1",
    ] {
        let flows = flows(FlowFormat::Trace, text).unwrap();
        assert_eq!((flows.len(), flows[0].start, flows[0].to), (2, Time::from_ps(1_500_000), HostId(7)));
        assert_eq!((flows[1].from, flows[1].bytes), (HostId(3), 1));
    }
}

#[test]
fn an_invalid_trace_is_named_with_its_line() {
    for (text, expected) in [
        ("#\n1,2,3\n", "a, line 2: '1,2,3' is not a flow; write start_us,from,to,bytes as in 1.5,0,7,64000"),
        ("#\n-1,0,1,9\n", "a, line 2: '-1' is not a time in microseconds; write"),
        ("#\n1e300,0,1,9\n", "a, line 2: '1e300' is not a time in microseconds; write"),
        ("#\nnan,0,1,9\n0,0,1,9", "a, line 2: 'nan' is not a time in microseconds; write"),
        ("#\n1,x,1,9\n", "a, line 2: 'x' is not a host number; write"),
        ("#\n1,0,1,0\n", "a, line 2: '0' is not a positive size; write"),
        ("0,0,8,9\n", "a, line 1: there is no host 8; write a number from 0 to 7"),
        ("0,3,3,9\n", "a, line 1: host 3 sends to itself; name two hosts"),
        (
            "start_ns,src,dst,bytes\n0,0,1,9\n",
            "a, line 1: the header 'start_ns,src,dst,bytes' has other columns; write",
        ),
        ("0,0,1,9\nstart_us,from,to,bytes\n", "a, line 2: 'start_us' is not a time"),
        ("", "a: there is no flow; write one line start_us,from,to,bytes for each flow"),
        ("# only a comment\n", "a: there is no flow; write"),
        ("start_us,from,to,bytes\n", "a: there is no flow; write"),
    ] {
        assert_refused(flows(FlowFormat::Trace, text), expected);
    }
}

const NS3: &str =
    "5 2 4\n0 4\n1 0 100Gbps 1000ns 0.000000\n2 0 100Gbps 0.001ms 0\n3 4 25Gb/s 2us 0\n0 4 400Gbps 1us 0.01\n";

#[test]
fn a_topology_of_ns3_has_its_links_and_its_hosts_keep_their_numbers() {
    let imported = topology(TopologyFormat::Ns3, NS3).unwrap();
    assert_eq!((imported.topology.hosts(), imported.topology.switches()), (3, 2));
    assert_eq!(imported.hosts, HostNumbers::Listed(vec![1, 2, 3]));
    assert_eq!(imported.losses, [(3, 0.01)]);
    let third = imported.topology.links()[2];
    assert_eq!(third.ends, [NetworkNode::Host(HostId(2)), NetworkNode::Switch(SwitchId(1))]);
    assert_eq!((third.rate, third.delay), (LinkRate::from_gbps(25.0).unwrap(), Span::from_ns(2000.0)));
    assert_eq!(imported.topology.name(third.ends[1]), "4");
    let flows =
        parse_flows("f", "2\n1 3 3 100 200000000 2\n3 1 3 100 5 2.0000015\nignored", FlowFormat::Ns3, &imported.hosts);
    let flows = flows.unwrap();
    assert_eq!((flows.len(), flows[0].from, flows[0].to), (2, HostId(0), HostId(2)));
    assert_eq!((flows[1].bytes, flows[1].start), (5, Time::from_ps(2_000_001_500_000)));
    let switch = parse_flows("f", "1\n1 4 3 100 9 2", FlowFormat::Ns3, &imported.hosts).unwrap_err().to_string();
    assert_eq!(
        switch,
        "f, line 2: there is no host 4; write a number from 1 to 3 that is no switch of the topology file"
    );
}

#[test]
fn flows_of_conweaves_ns3_have_no_port() {
    // As its traffic_gen.py writes them: a space after the number, and nine decimals.
    let found = flows(FlowFormat::Ns3, "2 \n0 7 3 64000 2.000000123\n3 2 3 1 2.000001000\n").unwrap();
    assert_eq!((found.len(), found[0].to, found[0].bytes), (2, HostId(7), 64_000));
    assert_eq!(found[0].start, Time::from_ps(2_000_000_123_000));
    assert_eq!((found[1].from, found[1].bytes), (HostId(3), 1));
    // Line breaks have no meaning where the first flow's line has another number of fields.
    assert_eq!(flows(FlowFormat::Ns3, "1 0 7 3 100 64000\n2.0").unwrap()[0].bytes, 64_000);
    assert_eq!(flows(FlowFormat::Ns3, "1\n0 7 3\n100 64000 2.0\n").unwrap()[0].bytes, 64_000);
    assert_refused(
        flows(FlowFormat::Ns3, "2\n0 7 3 64000 2.0\n3 2 3 100 1 2.0\n"),
        "a, line 3: a flow of 6 fields after a first one without port; write",
    );
}

#[test]
fn an_invalid_file_of_ns3_is_named_with_its_line() {
    for (from, to, expected) in [
        ("5 2 4", "5 2 5", "a, line 6: the file ends before a node number; write 'a b rate delay error_rate'"),
        ("5 2 4", "5 6 4", "a, line 1: a number of switches of 6; at most 5"),
        ("5 2 4", "99999999 2 4", "a, line 1: a number of nodes of 99999999; at most 81920"),
        ("5 2 4", "x 2 4", "a, line 1: 'x' is not a number of nodes; write 'nodes switches links'"),
        ("0 4\n", "0 0\n", "a, line 2: switch 0 is listed twice; list it once"),
        ("0 4\n", "0 9\n", "a, line 2: there is no node 9; write a number from 0 to 4"),
        ("3 4 25", "3 7 25", "a, line 5: there is no node 7; write a number from 0 to 4"),
        ("25Gb/s", "25Gbit", "a, line 5: '25Gbit' is not a rate from 1Mbps to 10000Gbps; write"),
        ("2us", "2min", "a, line 5: '2min' is not a delay from 0ns to 1s; write"),
        ("0.01\n", "1.01\n", "a, line 6: '1.01' is not a share of packets from 0 to 1; write"),
        ("2 0 100", "1 0 100", "a: host 1 has 2 links; give each host exactly one"),
        ("0 4 400Gbps 1us 0.01\n", "0 4\n", "a, line 6: the file ends before a rate; write"),
    ] {
        assert!(NS3.contains(from), "{from}");
        assert_refused(topology(TopologyFormat::Ns3, &NS3.replacen(from, to, 1)), expected);
    }
    for (text, expected) in [
        ("", "a, line 1: the file ends before a number of flows; write"),
        ("0\n", "a: there is no flow; write their number, then"),
        ("2\n0 1 3 100 9 2\n", "a, line 2: the file ends before a host number; write"),
        ("1\n0 1 3 100 0 2\n", "a, line 2: '0' is not a positive size; write"),
        ("1\n0 1 3 100 9 -2\n", "a, line 2: '-2' is not a time in seconds; write"),
        (
            "2\n0 1 3 100 9 2\n0 1 4 100 9 2",
            "a, line 3: priority 4 after 3; switches have one data queue here, write 3",
        ),
        ("1\n0 8 3 100 9 2\n", "a, line 2: there is no host 8; write a number from 0 to 7"),
        ("-1\n", "a, line 1: '-1' is not a number of flows; write"),
    ] {
        assert_refused(flows(FlowFormat::Ns3, text), expected);
    }
}

#[test]
fn a_connection_matrix_of_htsim_is_read() {
    let text = "Nodes 8\nConnections 2\nTriggers 0\n# comment\n0 -> 7 id 1 start 1.5e6 size 2000000 # flow\n\
                3->2 start 0 size 1\n";
    let flows = flows(FlowFormat::Htsim, text).unwrap();
    assert_eq!((flows.len(), flows[0].start, flows[0].to), (2, Time::from_ps(1_500_000), HostId(7)));
    assert_eq!((flows[1].from, flows[1].bytes), (HostId(3), 1));
}

#[test]
fn an_invalid_connection_matrix_is_named_with_its_line() {
    for (text, expected) in [
        (
            "Nodes 8\nConnections 2\n0->7 start 0 size 9\n",
            "a, line 2: Connections 2, but 1 connections follow; write 1",
        ),
        ("Nodes 9\n0->7 start 0 size 9\n", "a, line 1: Nodes 9, but the topology has 8 hosts; write at most 8"),
        ("Nodes 4\n0->7 start 0 size 9\n", "a, line 2: there is no node 7; line 1 has 4, write a number below"),
        ("0->8 start 0 size 9\n", "a, line 1: there is no host 8; write a number from 0 to 7"),
        ("0->7 size 9\n", "a, line 1: the connection has no start; write 'from->to start ps size bytes'"),
        ("0->7 start 0\n", "a, line 1: the connection has no size above 0; write"),
        ("0->7 start 0 size\n", "a, line 1: '' is not a size; write"),
        ("0->7 start -1 size 9\n", "a, line 1: '-1' is not a time in picoseconds; write"),
        ("0->7 start 0 size 9 prio 1\n", "a, line 1: 'prio' is not modelled; remove it"),
        ("0->7 id 1 trigger 1 size 9\n", "a, line 1: 'trigger' is not modelled; remove it"),
        ("Triggers 1\ntrigger id 1 oneshot\n", "a, line 1: 'Triggers' is not modelled; remove it"),
        ("failure switch_type AGG switch_id 0 link_id 0\n", "a, line 1: 'failure' is not modelled; remove it"),
        ("0-7 start 0 size 9\n", "a, line 1: '0-7' is neither a count nor a connection; write"),
        ("->7 start 0 size 9\n", "a, line 1: '' is not a host number; write"),
        ("0->7 begin 0 size 9\n", "a, line 1: 'begin' is not a word of a connection; write"),
        ("Nodes 8\nConnections 0\n", "a: there is no flow; write one line"),
    ] {
        assert_refused(flows(FlowFormat::Htsim, text), expected);
    }
}

const HTSIM: &str = "# two pods\nNodes 8\nTiers 3\nPodsize 4\n\nTier 0\nDownlink_speed_Gbps 100\nRadix_Down 2\n\
                     Radix_Up 2\nDownlink_Latency_ns 1000\nOversubscribed 1\nTier 1\n\
                     Downlink_speed_Gbps 200\nRadix_Down 2\nRadix_Up 4\n\
                     Downlink_Latency_ns 500\nTier 2\nDownlink_speed_Gbps 100\nRadix_Down 4\nBundle 2\n\
                     Downlink_Latency_ns 1000\n";

#[test]
fn a_fat_tree_of_htsim_has_its_links_and_bundles() {
    let imported = topology(TopologyFormat::Htsim, HTSIM).unwrap();
    // 4 switches above hosts, 4 above those, and 4 cores; each pair of a second-tier switch and its core has two links.
    assert_eq!((imported.topology.hosts(), imported.topology.switches()), (8, 12));
    let links = imported.topology.links();
    assert_eq!((links.len(), links[8].delay, links[8].rate.gbps()), (8 + 8 + 16, Span::from_ns(500.0), 200.0));
    let cores_of = |agg: u32| {
        let of = links.iter().filter(|link| link.ends[0] == NetworkNode::Switch(SwitchId(agg)));
        of.map(|link| link.ends[1]).filter(|end| *end != link_end(0)).collect::<Vec<_>>()
    };
    let core = |number: u32| NetworkNode::Switch(SwitchId(8 + number));
    assert_eq!(cores_of(4), [core(0), core(0), core(2), core(2)]);
    assert_eq!(cores_of(7), [core(1), core(1), core(3), core(3)]);
    let leaf_spine = "Nodes 32\nTiers 2\nPodsize 32\nTier 0\nDownlink_speed_Gbps 100\nRadix_Down 8\nRadix_Up 2\n\
                      Downlink_Latency_ns 1000\nSwitch_Latency_ns 0\nOversubscribed 4\nTier 1\n\
                      Downlink_speed_Gbps 100\nRadix_Down 4\nDownlink_Latency_ns 1000\n";
    let imported = topology(TopologyFormat::Htsim, leaf_spine).unwrap();
    assert_eq!((imported.topology.switches(), imported.topology.links().len()), (6, 40));
}

fn link_end(host: u32) -> NetworkNode {
    NetworkNode::Host(HostId(host))
}

#[test]
fn an_invalid_fat_tree_is_named_with_its_line() {
    for (from, to, expected) in [
        ("Nodes 8\n", "", "a: Nodes is missing; write 'name value'"),
        ("Nodes 8\n", "Nodes 8\nNodes 8\n", "a, line 3: Nodes is given twice; give it once"),
        ("Nodes 8\n", "Nodes eight\n", "a, line 2: 'eight' is not a number; write"),
        ("Nodes 8\n", "Nodes 4000000000\n", "a: Nodes 4000000000; write 2 to 65536"),
        ("Podsize 4\n", "Podsize 3\n", "a: Nodes by Podsize: 8 is not a multiple of 3; make the tiers fit"),
        ("Podsize 4\n", "Podsize 0\n", "a: Nodes by Podsize: 8 is not a multiple of 0; make the tiers fit"),
        ("Tiers 3\n", "Tiers 4\n", "a: Tiers 4; write 2 or 3"),
        ("Tier 2\n", "Tier 3\n", "a, line 17: Tier 3; write Tier 0, 1 or 2"),
        ("Tier 2\n", "Tier 1\n", "a, line 17: Tier 1 is given twice; give it once"),
        ("Tier 0\n", "", "a, line 6: 'Downlink_speed_Gbps' comes before the first tier; write 'Tier 0'"),
        ("Oversubscribed 1\n", "Switch_Latency_ns 5\n", "a, line 11: Switch_Latency_ns is not modelled; write 0"),
        ("Oversubscribed 1\n", "Queue_Up 5\n", "a, line 11: Queue_Up is not modelled; remove it, and set buffer_bytes"),
        ("Oversubscribed 1\n", "Colour 5\n", "a, line 11: 'Colour' is not a property of a tier; remove it"),
        ("Radix_Down 4\n", "Radix_Down 8\n", "a: Radix_Down of tier 2 is 8; 4 fits the other lines"),
        ("Bundle 2\n", "Bundle 3\n", "a: Radix_Up of tier 1 by Bundle of tier 2: 4 is not a multiple of 3; make"),
        ("Bundle 2\n", "Bundle 0\n", "a, line 20: Bundle 0; write 1 to 512"),
    ] {
        assert!(HTSIM.contains(from), "{from}");
        assert_refused(topology(TopologyFormat::Htsim, &HTSIM.replacen(from, to, 1)), expected);
    }
}

#[test]
fn a_long_line_is_shortened_in_the_error() {
    let error = flows(FlowFormat::Trace, &"\u{7}x".repeat(500)).unwrap_err();
    assert!(error.len() < 400 && !error.contains('\u{7}'), "{error}");
}

const SEEDS: [&str; 5] = [
    "start_us,from,to,bytes\n1.5,0,7,64000\n",
    "2\n1 3 3 100 200000000 2\n3 1 3 100 5 2.0000015\n",
    "Nodes 8\nConnections 1\n0->7 id 1 start 1.5e6 size 2000000\n",
    NS3,
    HTSIM,
];

/// Parses a text in every format. Whatever is accepted must be usable.
fn parse_all(text: &str) {
    for format in [FlowFormat::Trace, FlowFormat::Ns3, FlowFormat::Htsim] {
        match parse_flows("a", text, format, &EIGHT) {
            Ok(flows) => assert!(!flows.is_empty() && flows.iter().all(|flow| flow.from != flow.to && flow.to.0 < 8)),
            Err(error) => assert!(!error.to_string().contains(['\n', '\r']), "{error}"),
        }
    }
    for format in [TopologyFormat::Ns3, TopologyFormat::Htsim] {
        match parse_topology("a", text, format) {
            Ok(imported) => assert!(imported.topology.hosts() >= 2),
            Err(error) => assert!(!error.to_string().contains(['\n', '\r']), "{error}"),
        }
    }
}

proptest! {
    #[test]
    fn random_bytes_are_accepted_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        parse_all(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn damaged_files_are_accepted_or_refused(
        seed in 0..SEEDS.len(),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), "[0-9.eE+\\->, \\n a-z\\-]{0,4}"), 1..4),
    ) {
        let mut text = SEEDS[seed].to_owned();
        for (at, with) in damage {
            let at = at.index(text.len());
            text.replace_range(at..(at + 1).min(text.len()), &with);
        }
        parse_all(&text);
    }
}
