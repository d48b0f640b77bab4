use rnic::nic::TransportPolicy;

use super::*;
use crate::topology::TopologyPreset;

const GOOD: &str = r#"version = 1
[topology]
kind = "leaf-spine"
leaves = 2
hosts_per_leaf = 4
spines = 2
host_gbps = 100
leaf_gbps = 400
[workload]
kind = "poisson"
distribution = "web-search"
load = 0.5
duration = "1 ms"
"#;

fn error(text: &str) -> String {
    let error = Scenario::parse("a.toml", text).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn omitted_keys_have_the_published_values() {
    let scenario = Scenario::parse("a.toml", GOOD).unwrap();
    assert_eq!((scenario.network.topology.hosts(), scenario.seed), (8, 1));
    assert_eq!(scenario.network.switches, crate::switch::SwitchConfig::default());
    assert_eq!(scenario.transport, TransportConfig::default());
    assert!(!scenario.flows.is_empty() && scenario.network.impairments.is_empty());
}

#[test]
fn every_table_is_read() {
    let text = r#"version = 1
seed = 7
until = "20 ms"
[topology]
kind = "graph"
hosts = ["a", "b", "c"]
switches = ["s", "t"]
lines = [
    { ends = ["a", "s"], gbps = 100 }, { ends = ["b", "s"], gbps = 100, delay = "2 us" },
    { ends = ["s", "t"], gbps = 40 }, { ends = ["t", "c"], gbps = 100 },
]
[switches]
buffer_bytes = "4 MiB"
pfc = true
spreading = "spray"
[lines]
between = "switches"
bursts = { to_bad = 0.001, to_good = 0.1, loss_bad = 0.5 }
reorder = 0.01
reorder_delay = "10 us"
[workload]
kind = "incast"
senders = 2
bytes = "64 KiB"
[transport]
policy = "go-back-n"
mtu_bytes = 4096
congestion = "dcqcn"
"#;
    let scenario = Scenario::parse("a.toml", text).unwrap();
    assert_eq!((scenario.flows.len(), scenario.network.impairments.len()), (2, 2));
    assert_eq!(scenario.transport.policy, TransportPolicy::GoBackN);
    assert!(scenario.network.switches.pfc.is_some());
    let preset =
        "version = 1\n[topology]\nkind = \"preset\"\npreset = \"leaf-spine-256\"\n[workload]\nkind = \"permutation\"\n";
    assert_eq!(Scenario::parse("a.toml", preset).unwrap().network.topology, TopologyPreset::LeafSpine256.topology());
}

#[test]
fn errors_name_file_line_key_value_and_remedy() {
    for (from, to, expected) in [
        (
            "load = 0.5",
            "load = 1.5",
            "a.toml, line 12, workload.load: '1.5' is not a load; write more than 0 and at most 1 of a host's rate",
        ),
        (
            "version = 1",
            "version = 2",
            "a.toml, line 1, version: '2' is not a version that this release reads; write 1",
        ),
        ("leaves = 2", "leaves = 0", "a.toml, line 2, topology: leaves 0; take at least 1"),
        (
            "host_gbps = 100",
            "host_gbps = -1",
            "a.toml, line 2, topology: host_gbps is -1; write Gb/s from 0.001 to 10000",
        ),
        ("spines = 2\n", "", "a.toml, line 2, topology: spines is missing; this kind of topology needs it"),
        ("load = 0.5\n", "", "a.toml, line 9, workload: load is missing; this kind of workload needs it"),
        (
            "\"1 ms\"",
            "\"1 mm\"",
            "a.toml, line 13, workload.duration: '1 mm' is not a time; write nanoseconds as in 290 or \"0.29 us\"",
        ),
        (
            "[workload]",
            "[lines]\nloss = 1.1\n[workload]",
            "a.toml, line 10, lines.loss: '1.1' is not a probability; write a number from 0 to 1",
        ),
        (
            "[workload]",
            "[transport]\nmtu_bytes = 9000\n[workload]",
            "a.toml, line 10, transport.mtu_bytes: '9000' is not an MTU; write bytes from 256 to 4096",
        ),
        (
            "[workload]",
            "[switches]\npfc = true\nbuffer_bytes = 9\n[workload]",
            "a.toml, line 9, switches: a buffer of 9 B",
        ),
        ("\"poisson\"", "\"incast\"\nsenders = 8", "a.toml, line 9, workload: 8 senders among 8 hosts; take 1 to 7"),
        (
            "[workload]",
            "[switches]\necn_preset = \"dctcp\"\necn_kmin_bytes = 300001\n[workload]",
            "a.toml, line 9, switches: ecn_kmin_bytes is 300001, above ecn_kmax_bytes, 300000; write at most",
        ),
        (
            "[workload]",
            "[switches]\necn_preset = \"red\"\n[workload]",
            "a.toml, line 10, switches.ecn_preset: unknown variant `red`, expected one of `dcqcn`, `dcqcn-paper`",
        ),
        (
            "[workload]",
            "[transport.dcqcn]\ngain = 0.5\n[workload]",
            "a.toml, transport: the table dcqcn has no effect with congestion = \"dctcp\"; write congestion",
        ),
        ("duration = \"1 ms\"", "duration = \"1e6 s\"", "a.toml, line 9, workload: about "),
        (
            "web-search",
            "web",
            "a.toml, line 11, workload.distribution: web: there is no such distribution; name one of cache-follower",
        ),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let error = error(&GOOD.replace(from, to));
        assert!(error.starts_with(expected), "{error}\n{expected}");
    }
}

#[test]
fn a_rate_of_pcie_is_read_and_one_out_of_range_is_refused() {
    let of = |gbps| GOOD.replace("[workload]", &format!("[transport]\npcie_gbps = {gbps}\n[workload]"));
    assert_eq!(Scenario::parse("a.toml", &of("400")).unwrap().transport.pcie_gbps, Some(400.0));
    let expected = "a.toml, line 10, transport.pcie_gbps: '0' is not a rate in range; write Gb/s from 1 to 4000";
    assert_eq!(error(&of("0")), expected);
}

#[test]
fn invalid_graphs_are_refused() {
    let with = |lines: &str| {
        let head = "version = 1\n[topology]\nkind = \"graph\"\nhosts = [\"a\", \"b\"]\nswitches = [\"s\"]\n";
        error(&format!("{head}lines = [{lines}]\n[workload]\nkind = \"permutation\"\n"))
    };
    let line = |a, b| format!("{{ ends = [\"{a}\", \"{b}\"], gbps = 1 }},");
    assert_eq!(
        with(&line("a", "x")),
        "a.toml, line 2, topology: link end 'x' is neither in hosts nor in switches; add it to one of them"
    );
    assert_eq!(with(&line("a", "s")), "a.toml, line 2, topology: host b has 0 links; give each host exactly one");
    let unreachable = "version = 1\n[topology]\nkind = \"graph\"\nhosts = [\"a\", \"b\"]\nswitches = [\"s\", \"t\"]\n\
                       lines = [{ ends = [\"a\", \"s\"], gbps = 1 }, { ends = [\"b\", \"t\"], gbps = 1 }]\n\
                       [workload]\nkind = \"permutation\"\n";
    assert_eq!(
        error(unreachable),
        "a.toml, line 2, topology: host b cannot be reached from host a; link their switches"
    );
}

#[test]
fn a_run_ends_a_second_after_the_last_start_and_times_that_no_run_reaches_are_refused() {
    let scenario = Scenario::parse("a.toml", GOOD).unwrap();
    let last = scenario.flows.last().unwrap().start;
    assert_eq!(scenario.until, last + Span::from_ns(1e9));
    for (from, to, expected) in [
        ("version = 1", "version = 1\nuntil = 1e300", "line 2, until: 1e300 ns is too long; write at most 1000000 s"),
        ("leaf_gbps = 400", "leaf_gbps = 400\ndelay = \"1e9 s\"", "1e18 ns is too long; write"),
        ("duration = \"1 ms\"", "duration = \"1e9 s\"", "1e18 ns is too long; write"),
        ("[workload]", "[lines]\nreorder_delay = \"1e9 s\"\n[workload]", "1e18 ns is too long; write"),
    ] {
        let error = error(&GOOD.replacen(from, to, 1));
        assert!(error.contains(expected), "{error}");
    }
}
