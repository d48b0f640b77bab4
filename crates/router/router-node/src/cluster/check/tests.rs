use std::path::Path;

use router::{NodeId, PortId, Vlan};

use crate::cluster::{Balance, Batch, Cluster, ClusterFile, ClusterPaths, InterconnectKind, PortKind, example};

const TWO: &str = r#"version = 1

[[nodes]]
name = "a"
namespace = "a"
addresses = ["10.255.0.1"]

[[nodes.ports]]
device = "eth0"

[[nodes.ports]]
device = "tap0"
kind = "tap"
addresses = ["10.9.0.1/24", "fd00::1/64"]

[[nodes.routes]]
to = "10.8.0.0/16"
via = "10.9.0.2"
port = "tap0"

[[nodes]]
name = "b"

[[nodes.ports]]
device = "eth0"
kind = "af-packet"
mtu_bytes = 9000

[[nodes.ports]]
device = "eth0.7"
kind = "vlan"
parent = "eth0"
vlan = 7
addresses = ["10.7.0.1/24"]
"#;

fn parse(text: &str) -> Result<Cluster, String> {
    ClusterFile::parse("c.toml", text.as_bytes()).map(|file| file.cluster).map_err(|error| error.to_string())
}

#[test]
fn a_cluster_has_the_values_of_its_file() {
    let cluster = parse(TWO).unwrap();
    let (id, a) = cluster.node("a").unwrap();
    assert_eq!((id, a.port("tap0").unwrap().0), (NodeId(0), PortId(1)));
    assert_eq!(a.ports[1].kind, PortKind::Tap);
    assert_eq!(a.routes[0].via, Some("10.9.0.2".parse().unwrap()));
    let b = &cluster.nodes[1];
    assert_eq!(b.ports[0].mtu_bytes, Some(9000));
    assert_eq!(b.vlan(&b.ports[1]), Some(Vlan { parent: PortId(0), id: 7 }));
    assert_eq!((b.vlan(&b.ports[0]), b.vlans_of("eth0"), a.vlans_of("eth0")), (None, vec![7], vec![]));
    assert_eq!(cluster.interconnect.kind, InterconnectKind::Lane);
    assert_eq!((cluster.interconnect.batch, cluster.interconnect.balance), (Batch::Adaptive, Balance::Direct));
    assert_eq!(cluster.node("c"), None);
}

#[test]
fn the_example_is_valid() {
    for nodes in 2..=8 {
        assert_eq!(parse(&example(nodes)).unwrap().nodes.len(), usize::from(nodes));
    }
}

#[test]
fn different_files_have_different_digests_and_directories() {
    let (one, other) = (parse(TWO).unwrap(), parse(&TWO.replace("9000", "1500")).unwrap());
    assert_eq!(one.digest(), parse(TWO).unwrap().digest());
    assert_ne!(one.digest(), other.digest());
    let directory = |file: &str| ClusterPaths::new(Path::new("/base"), &one, Path::new(file)).directory;
    assert_eq!(directory("/a/c.toml"), directory("/a/c.toml"));
    assert_ne!(directory("/a/c.toml"), directory("/b/c.toml"));
}

/// An error is one line with the file, the position in it, the value, and the remedy.
#[test]
fn errors_name_line_key_value_and_remedy() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("version = 1", "version = 2", &["c.toml, line 1, version", "2", "this one reads 1", "router example"]),
        ("version = 1\n", "", &["c.toml, line 1, version: missing"]),
        ("name = \"b\"", "name = \"a\"", &["line 22", "nodes[1].name", "'a'", "nodes[0]", "own"]),
        ("name = \"b\"", "name = \"B!\"", &["nodes[1].name", "\"B!\"", "a to z"]),
        ("device = \"tap0\"", "device = \"eth0\"", &["line 12", "nodes[0].ports[1].device", "'eth0'", "once"]),
        ("device = \"tap0\"", "device = \"a/b\"", &["nodes[0].ports[1].device", "a/b", "interface"]),
        ("port = \"tap0\"", "port = \"tap1\"", &["line 19", "nodes[0].routes[0].port", "'tap1'", "eth0, tap0"]),
        ("to = \"10.8.0.0/16\"", "to = \"10.8.0.1/16\"", &["nodes[0].routes[0].to", "write '10.8.0.0/16'"]),
        ("to = \"10.8.0.0/16\"", "to = \"10.8/16\"", &["line 17", "nodes[0].routes[0].to", "10.8/16", "192.0.2.1/24"]),
        ("via = \"10.9.0.2\"", "via = \"fd00::2\"", &["nodes[0].routes[0].via", "'fd00::2'", "version of IP"]),
        ("via = \"10.9.0.2\"", "via = \"10.9.0.1\"", &["line 18", "nodes[0].routes[0].via", "'10.9.0.1'", "own"]),
        ("via = \"10.9.0.2\"", "via = \"127.0.0.1\"", &["nodes[0].routes[0].via", "'127.0.0.1'", "unicast"]),
        ("\"10.9.0.1/24\"", "\"10.9.0.255/24\"", &["nodes[0].ports[1].addresses", "'10.9.0.255'", "'10.9.0.0/24'"]),
        ("\"10.9.0.1/24\"", "\"10.9.0.0/24\"", &["nodes[0].ports[1].addresses", "'10.9.0.0'", "'10.9.0.0/24'"]),
        ("\"10.9.0.1/24\"", "\"10.9.0.1/0\"", &["nodes[0].ports[1].addresses", "'10.9.0.1'", "'0.0.0.0/0'"]),
        ("mtu_bytes = 9000", "mtu_bytes = 60", &["nodes[1].ports[0].mtu_bytes", "60", "68 to 9216"]),
        ("kind = \"af-packet\"", "kind = \"dpdk\"", &["line 26", "nodes[1].ports[0].kind", "dpdk", "af-xdp"]),
        (
            "kind = \"tap\"",
            "kind = \"auto\"",
            &["nodes[0].ports[1].addresses", "kernel's", "ip address add 10.9.0.1/24"],
        ),
        ("kind = \"tap\"", "kind = \"pcap\"", &["nodes[0].ports[1].input", "missing", "input.pcap"]),
        ("kind = \"tap\"", "kind = \"tap\"\ninput = \"x\"", &["nodes[0].ports[1].input", "pcap"]),
        ("\"10.255.0.1\"", "\"10.9.0.1\"", &["nodes[0].ports[1].addresses", "'10.9.0.1'", "twice"]),
        ("\"10.255.0.1\"", "\"224.0.0.1\"", &["nodes[0].addresses", "224.0.0.1", "unicast"]),
        ("\"10.255.0.1\"", "\"10.255\"", &["line 6", "nodes[0].addresses", "10.255", "192.0.2.1"]),
        ("name = \"b\"", "name = \"b\"\nnamespace = \"a\"", &["nodes[1].namespace", "'a'", "nodes[0]"]),
        ("vlan = 7", "vlan = 4095", &["line 33", "nodes[1].ports[1].vlan", "4095", "1 to 4094"]),
        ("vlan = 7\n", "", &["nodes[1].ports[1].vlan", "missing", "as in 7"]),
        (
            "parent = \"eth0\"",
            "parent = \"eth1\"",
            &["line 32", "nodes[1].ports[1].parent", "'eth1'", "before this one"],
        ),
        ("kind = \"tap\"", "kind = \"tap\"\nvlan = 3", &["nodes[0].ports[1].vlan", "3", "remove it", "\"vlan\""]),
        (
            "vlan = 7\n",
            "vlan = 7\n[[nodes.ports]]\ndevice = \"x\"\nkind = \"vlan\"\nparent = \"eth0\"\nvlan = 7\n",
            &["nodes[1].ports[2].vlan", "7 of 'eth0'", "'eth0.7'", "one port"],
        ),
        (
            "vlan = 7\n",
            "vlan = 7\n[[nodes.ports]]\ndevice = \"x\"\nkind = \"vlan\"\nparent = \"eth0.7\"\nvlan = 7\n",
            &["nodes[1].ports[2].parent", "'eth0.7'", "not an earlier port"],
        ),
        ("name = \"b\"", "name = \"b\"\nspeed = 3", &["line 23", "speed", "namespace"]),
        ("name = \"b\"", "name = \"b\"\ncontrol = \"192.0.2.1:1\"", &["nodes[0].control", "missing"]),
        ("name = \"b\"", "name = \"b\"\nfabric = \"192.0.2.1:1\"", &["nodes[1].fabric", "\"lane\"", "remove"]),
        ("\n[[nodes]]", "\n[interconnect]\nbatch = 33\n[[nodes]]", &["line 4", "interconnect.batch", "33", "1 to 32"]),
        ("\n[[nodes]]", "\n[interconnect]\nkind = \"rnic-udp\"\n[[nodes]]", &["nodes[0].fabric", "missing", "4791"]),
        ("\n[[nodes]]", "\n[interconnect]\ntiming = \"ntb\"\n[[nodes]]", &["interconnect.timing", "ntb", "window"]),
        ("\n[[nodes]]", "key = \"/k\"\n[[nodes]]", &["line 2, key", "'/k'", "control", "remove"]),
        ("\n[[nodes]]", "\n[timeouts]\nsilence_ns = 100\n[[nodes]]", &["timeouts.silence_ns", "100", "1 ms"]),
        (
            "\n[[nodes]]",
            "\n[timeouts]\nstale_routes_ns = \"60 ms\"\n[[nodes]]",
            &["timeouts.stale_routes_ns", "60000000 ns", "1 s to 1 h"],
        ),
        ("\n[[nodes]]", "\n[timeouts]\nsilence_ns = \"60 ms\"\n[[nodes]]", &["timeouts.silence_ns", "1000000000"]),
    ];
    for (found, replaced, words) in cases {
        let error = parse(&TWO.replacen(found, replaced, 1)).expect_err(replaced);
        assert!(!error.contains('\n') && error.starts_with("c.toml"), "{error}");
        for word in *words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
}

/// Two nodes on two machines.
const TWO_MACHINES: &str = r#"version = 1
key = "/etc/crosslane/office.key"

[interconnect]
kind = "rnic-udp"

[[nodes]]
name = "a"
control = "192.0.2.1:4700"
fabric = "192.0.2.1:4791"

[[nodes.ports]]
device = "eth1"

[[nodes]]
name = "b"
control = "192.0.2.2:4700"
fabric = "192.0.2.2:4791"

[[nodes.ports]]
device = "eth1"
"#;

#[test]
fn nodes_on_several_machines_need_a_key_whose_path_may_differ() {
    let cluster = parse(TWO_MACHINES).unwrap();
    assert_eq!(cluster.key.as_deref(), Some(Path::new("/etc/crosslane/office.key")));
    assert_eq!(cluster.digest(), parse(&TWO_MACHINES.replace("/etc/", "/root/")).unwrap().digest());
    assert_ne!(cluster.digest(), parse(&TWO_MACHINES.replace("eth1", "eth2")).unwrap().digest());
    let error = parse(&TWO_MACHINES.replace("key = \"/etc/crosslane/office.key\"\n", "")).unwrap_err();
    assert!(error.contains("key: missing") && error.contains("crosslane router key FILE"), "{error}");
    let error = parse(&TWO_MACHINES.replace("/etc/crosslane/", "")).unwrap_err();
    assert!(
        error.contains("line 2, key") && error.contains("'office.key'") && error.contains("absolute path"),
        "{error}"
    );
}

#[test]
fn a_cluster_has_two_to_eight_nodes() {
    let (first, _) = TWO.split_once("[[nodes]]\nname = \"b\"").unwrap();
    let error = parse(first).unwrap_err();
    assert!(error.contains("nodes: 1 nodes; a cluster has") && error.contains("2 to 8"), "{error}");
    assert!(parse(&example(9)).unwrap_err().contains("9 nodes"));
}
