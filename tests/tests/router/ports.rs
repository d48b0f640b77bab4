//! Ports of every kind on whole clusters: packet files, TAPs, VLANs; and changes of ports, routes and settings while
//! the nodes are up.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use packet::ethernet::{EtherType, MacAddress};
use packet::{Protocol, arp, icmpv4, ipv4, ipv6, ndisc};
use pcap_file::DataLink;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapReader, PcapWriter};
use router_ports::Namespace;
use rustix::process::Signal;
use serde_json::Value;
use system_tests::process::signal;
use system_tests::{Process, WAIT_MAX, paths, wait_until};

use crate::cluster::{Lab, PLAIN, joined_by};

const BROADCAST: MacAddress = MacAddress::BROADCAST;
const HOST_A: MacAddress = MacAddress([2, 0, 0, 0, 7, 1]);
const HOST_B: MacAddress = MacAddress([2, 0, 0, 0, 7, 2]);
const HOST_OF_VLAN: MacAddress = MacAddress([2, 0, 0, 0, 7, 3]);
const VLAN: u8 = 7;

fn v4(text: &str) -> Ipv4Addr {
    text.parse().expect("an address")
}

fn v6(text: &str) -> Ipv6Addr {
    text.parse().expect("an address")
}

fn frame(to: MacAddress, from: MacAddress, tag: Option<u8>, ethertype: EtherType, packet: &[u8]) -> Vec<u8> {
    let tag = tag.map_or(Vec::new(), |id| vec![0x81, 0, 0, id]);
    [&to.0[..], &from.0, &tag, &ethertype.0.to_be_bytes(), packet].concat()
}

fn arp_request(from: MacAddress, tag: Option<u8>, sender: &str, target: &str) -> Vec<u8> {
    let mut bytes = vec![0; arp::PACKET_BYTES];
    let (sender, target) = (v4(sender), v4(target));
    let operation = arp::Operation::Request;
    arp::Repr { operation, sender_mac: from, sender, target_mac: MacAddress::default(), target }.emit(&mut bytes);
    frame(BROADCAST, from, tag, EtherType::ARP, &bytes)
}

fn solicitation(from: MacAddress, source: &str, target: &str) -> Vec<u8> {
    let (source, target) = (v6(source), v6(target));
    let message = ndisc::Message::NeighbourSolicitation { target, source_mac: Some(from) };
    let mut payload = vec![0; ndisc::MESSAGE_BYTES_MAX];
    let destination = ndisc::solicited_node(target);
    let payload_bytes = message.emit(&mut payload, source, destination);
    let packet = packet_v6(source, destination, Protocol::ICMPV6, ndisc::HOP_LIMIT, &payload[..payload_bytes]);
    frame(MacAddress::from_multicast_v6(destination), from, None, EtherType::IPV6, &packet)
}

fn packet_v4(source: &str, destination: &str, protocol: Protocol, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ipv4::HEADER_BYTES];
    let header = ipv4::Repr {
        source: v4(source),
        destination: v4(destination),
        protocol,
        ttl,
        traffic_class: 0,
        identification: 77,
        do_not_fragment: false,
        payload_bytes: payload.len(),
    };
    header.emit(&mut bytes);
    [&bytes[..], payload].concat()
}

fn packet_v6(source: Ipv6Addr, destination: Ipv6Addr, next_header: Protocol, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ipv6::HEADER_BYTES];
    let payload_bytes = payload.len();
    let header =
        ipv6::Repr { source, destination, next_header, hop_limit, traffic_class: 0, flow_label: 0, payload_bytes };
    header.emit(&mut bytes);
    [&bytes[..], payload].concat()
}

/// A UDP datagram without a checksum from and to port 9, identified by its last byte.
fn datagram(mark: u8) -> Vec<u8> {
    vec![0, 9, 0, 9, 0, 12, 0, 0, b'u', b'd', b'p', mark]
}

fn write(path: &Path, frames: &[Vec<u8>]) {
    let header = PcapHeader { datalink: DataLink::ETHERNET, ..PcapHeader::default() };
    let mut writer = PcapWriter::with_header(File::create(path).expect("a file"), header).expect("a header");
    for frame in frames {
        let packet = PcapPacket::new(Duration::ZERO, frame.len() as u32, frame);
        writer.write_packet(&packet).expect("a packet");
    }
}

/// The frames of a file that contain IP packets, without neighbour discovery.
fn read(path: &Path) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(File::open(path).expect("a file")).expect("a file of packets");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.expect("a packet").data.into_owned());
    }
    let is_wanted = |frame: &Vec<u8>| {
        let at = if frame[12..14] == [0x81, 0] { 16 } else { 12 };
        let is_discovery = frame[at + 2] >> 4 == 6 && frame[at + 8] == Protocol::ICMPV6.0;
        frame[at..at + 2] != EtherType::ARP.0.to_be_bytes() && !is_discovery
    };
    frames.retain(is_wanted);
    frames.sort();
    frames
}

fn mac(port: &Value) -> MacAddress {
    let text = port["mac"].as_str().expect("a hardware address");
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).expect("a byte")).collect();
    MacAddress(bytes.try_into().expect("six bytes"))
}

const FILES: &str = r#"version = 1
name = "files"

[[nodes]]
name = "a"
namespace = "NAMESPACE-a"

[[nodes.ports]]
device = "file-a"
kind = "pcap"
input = "in-a.pcap"
output = "out-a.pcap"
addresses = ["10.1.0.1/24", "fd01::1/64"]

[[nodes]]
name = "b"
namespace = "NAMESPACE-b"

[[nodes.ports]]
device = "file-b"
kind = "pcap"
input = "in-b.pcap"
output = "out-b.pcap"
addresses = ["10.2.0.1/24", "fd02::1/64"]

[[nodes.ports]]
device = "file-b.7"
kind = "vlan"
parent = "file-b"
vlan = 7
addresses = ["10.7.0.1/24"]
"#;

/// A packet from host A, behind node a, as it arrives at node a.
fn from_a(to: &str, ttl: u8, mark: u8) -> Vec<u8> {
    packet_v4("10.1.0.2", to, Protocol::UDP, ttl, &datagram(mark))
}

fn from_a_v6(hops: u8) -> Vec<u8> {
    packet_v6(v6("fd01::2"), v6("fd02::2"), Protocol::UDP, hops, &datagram(6))
}

/// A packet from the host in the VLAN to host B, both behind node b.
fn from_vlan(ttl: u8) -> Vec<u8> {
    packet_v4("10.7.0.2", "10.2.0.2", Protocol::UDP, ttl, &datagram(5))
}

/// The frames that arrive at node a, which has this hardware address.
fn frames_to_a(router: MacAddress) -> Vec<Vec<u8>> {
    let message = icmpv4::Message::EchoRequest { identifier: 5, sequence: 6, data: b"here?" };
    let mut asked = vec![0; message.total_bytes()];
    message.emit(&mut asked);
    let asked = packet_v4("10.1.0.2", "10.1.0.1", Protocol::ICMP, 64, &asked);
    let to_router = |packet: &[u8]| frame(router, HOST_A, None, EtherType::IPV4, packet);
    vec![
        arp_request(HOST_A, None, "10.1.0.2", "10.1.0.1"),
        to_router(&asked),
        to_router(&from_a("10.2.0.2", 9, 1)),
        to_router(&from_a("10.7.0.2", 9, 2)),
        to_router(&from_a("10.2.0.2", 1, 3)),
        to_router(&from_a("10.99.0.1", 9, 4)),
        frame(router, HOST_A, None, EtherType::IPV6, &from_a_v6(9)),
    ]
}

/// The frames that arrive at node b; the last one is in an unknown VLAN.
fn frames_to_b(router: MacAddress) -> Vec<Vec<u8>> {
    vec![
        arp_request(HOST_B, None, "10.2.0.2", "10.2.0.1"),
        arp_request(HOST_OF_VLAN, Some(VLAN), "10.7.0.2", "10.7.0.1"),
        solicitation(HOST_B, "fd02::2", "fd02::1"),
        frame(router, HOST_OF_VLAN, Some(VLAN), EtherType::IPV4, &from_vlan(9)),
        frame(router, HOST_OF_VLAN, Some(8), EtherType::IPV4, &from_vlan(33)),
    ]
}

/// A cluster between two pairs of files: packets received by one node are sent by the other one, rewritten, in their
/// VLAN.
#[test]
fn packets_of_one_file_are_written_to_the_other_rewritten_and_tagged() {
    let Some(lab) = Lab::new("packets_of_one_file_are_written_to_the_other_rewritten_and_tagged", &["a", "b"]) else {
        return;
    };
    let path = |name: &str| lab.folder.join(name);
    write(&path("in-a.pcap"), &[]);
    write(&path("in-b.pcap"), &[]);
    lab.write(FILES);
    lab.up();
    let (router_a, router_b) = (mac(&lab.node(0)["ports"][0]), mac(&lab.node(1)["ports"][0]));
    assert_eq!(mac(&lab.node(1)["ports"][1]), router_b, "a VLAN has the address of its port");
    write(&path("more-a.pcap"), &frames_to_a(router_a));
    write(&path("more-b.pcap"), &frames_to_b(router_b));
    // Node b first, so that it knows its neighbours when packets for them arrive.
    for node in ["b", "a"] {
        let text = fs::read_to_string(lab.file()).expect("a file");
        let text = text.replace(&format!("in-{node}.pcap"), &format!("more-{node}.pcap"));
        fs::write(lab.file(), text.replace(&format!("out-{node}.pcap"), &format!("sent-{node}.pcap"))).expect("a file");
        let reload = lab.finish("reload", &["--node", node]).must_succeed();
        let output = format!("node {node}: port 'file-{node}': input: \"more-{node}.pcap\" instead of");
        assert!(reload.stdout.contains(&output), "{reload}");
    }
    let sent = |node: usize, port: usize| lab.node(node)["ports"][port]["traffic"]["sent_packets"].as_u64();
    // At a: the replies to ARP and to the echo request, and two errors. At b: three replies to neighbour requests, and
    // four packets; one of the replies and one of the packets are in the VLAN.
    wait_until("packets sent by node a", || sent(0, 0) >= Some(4));
    wait_until("packets sent by node b", || sent(1, 0) >= Some(7) && sent(1, 1) >= Some(2));
    let drops = lab.node(1)["ports"][0]["drops"].clone();
    assert_eq!(drops["unknown VLAN"], 1, "{drops}");
    lab.finish("down", &[]).must_succeed();

    let mut wanted = vec![
        frame(HOST_B, router_b, None, EtherType::IPV4, &from_a("10.2.0.2", 8, 1)),
        frame(HOST_OF_VLAN, router_b, Some(VLAN), EtherType::IPV4, &from_a("10.7.0.2", 8, 2)),
        frame(HOST_B, router_b, None, EtherType::IPV6, &from_a_v6(8)),
        frame(HOST_B, router_b, None, EtherType::IPV4, &from_vlan(8)),
    ];
    wanted.sort();
    assert_eq!(read(&path("sent-b.pcap")), wanted);
    replies_to_host_a_are_correct(&read(&path("sent-a.pcap")));
}

fn replies_to_host_a_are_correct(frames: &[Vec<u8>]) {
    let mut kinds: Vec<(u8, u8)> = frames.iter().map(|frame| (frame[34], frame[35])).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [(0, 0), (3, 0), (11, 0)], "a reply, no route, and time exceeded: {frames:02x?}");
    for frame in frames {
        let packet = ipv4::Packet::new_checked(&frame[14..]).expect("a packet");
        assert_eq!((packet.source(), packet.destination()), (v4("10.1.0.1"), v4("10.1.0.2")));
        assert!(packet.verify_checksum());
    }
}

const LIVE: &str = r#"version = 1
name = "live"

[[nodes]]
name = "a"
namespace = "NAMESPACE-a"

[[nodes.ports]]
device = "eth0"

[[nodes.ports]]
device = "tap0"
kind = "tap"
addresses = ["10.9.0.1/24", "fd09::1/64"]

[[nodes]]
name = "b"
namespace = "NAMESPACE-b"

[[nodes.ports]]
device = "eth0"
"#;

/// Waits until all addresses of a port of node a are in use, after duplicate address detection.
#[track_caller]
fn wait_for_addresses(lab: &Lab, port: usize) {
    let is_used = || {
        let port = &lab.node(0)["ports"][port];
        assert_eq!(port["addresses_duplicate"], Value::Array(Vec::new()), "{port}");
        port["addresses_tentative"] == Value::Array(Vec::new())
    };
    wait_until("addresses in use", is_used);
}

/// Changes the file and returns the output of a reload.
fn reload(lab: &Lab, text: &str) -> String {
    lab.write(text);
    lab.finish("reload", &[]).must_succeed().stdout
}

/// Namespace `h9` models a virtual machine that has the other end of the TAP.
#[test]
fn ports_routes_and_settings_change_while_packets_cross() {
    let namespaces = ["a", "b", "h1", "h2", "h9"];
    let Some(lab) = Lab::new("ports_routes_and_settings_change_while_packets_cross", &namespaces) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("a", "eth1"), ("h1", "eth1"), 3);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.write(LIVE);
    lab.up();
    lab.ip("a", &["link", "set", "tap0", "netns", &lab.namespace("h9")]);
    for words in [
        &["link", "set", "tap0", "up"][..],
        &["address", "add", "10.9.0.2/24", "dev", "tap0"],
        &["address", "add", "fd09::2/64", "dev", "tap0", "nodad"],
        &["route", "add", "default", "via", "10.9.0.1"],
        &["-6", "route", "add", "default", "via", "fd09::1"],
    ] {
        lab.ip("h9", words);
    }
    wait_for_addresses(&lab, 1);
    // The router's address there, an address behind it, from another host, and from programs of a node.
    for (from, to) in [
        ("h9", "10.9.0.1"),
        ("h9", "10.77.2.2"),
        ("h9", "fd77:2::2"),
        ("h2", "10.9.0.2"),
        ("h2", "10.9.0.1"),
        ("h2", "fd09::1"),
        ("a", "10.9.0.2"),
    ] {
        lab.ping(from, to).must_succeed();
    }
    a_reload_adds_and_removes_a_port(&lab);
    weights_of_the_kernels_routes_share_the_flows(&lab);
    what_cannot_change_is_refused_in_one_line(&lab);
    a_signal_reloads_too(&lab);
}

/// An interface that is removed and created again is a new one for the kernel, with addresses and routes before the
/// node has found it.
#[test]
fn a_device_that_is_created_again_brings_its_networks_and_routes() {
    let namespaces = ["a", "b", "h1", "h2"];
    let Some(lab) = Lab::new("a_device_that_is_created_again_brings_its_networks_and_routes", &namespaces) else {
        return;
    };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.write(PLAIN);
    lab.up();
    lab.ping("h1", "10.77.2.2").must_succeed();
    lab.ip("b", &["link", "del", "eth0"]);
    lab.wait_for_route("a", "10.77.2.2", None);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.ip("b", &["route", "add", "198.51.100.0/24", "via", "10.77.2.2"]);
    lab.wait_for_route("a", "10.77.2.200", Some("b"));
    lab.wait_for_route("a", "198.51.100.7", Some("b"));
    lab.ping("h1", "10.77.2.2").must_succeed();
    lab.ping("h1", "fd77:2::2").must_succeed();
}

/// A port attached by AF_XDP follows the hardware address and the MTU of its interface.
#[test]
fn a_port_follows_the_address_and_the_mtu_of_its_interface() {
    let namespaces = ["a", "b", "h1", "h2"];
    let Some(lab) = Lab::new("a_port_follows_the_address_and_the_mtu_of_its_interface", &namespaces) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    // A long packet is one record on a lane and several packets on the RDMA transport.
    for (kind, interconnect) in [("af-xdp", "lane"), ("af-packet", "rnic-lane")] {
        lab.write(&joined_by(interconnect).replace("\"eth0\"\n", &format!("\"eth0\"\nkind = \"{kind}\"\n")));
        lab.up();
        lab.ping("h1", "10.77.2.2").must_succeed();
        lab.ip("a", &["link", "set", "eth0", "address", "02:00:00:00:05:05"]);
        lab.ip("h1", &["neighbour", "flush", "dev", "eth0"]);
        wait_until("route by the new address", || lab.ping("h1", "10.77.2.2").status.success());
        for (at, mtu) in [("a", "3000"), ("b", "3000"), ("h1", "3000"), ("h2", "3000")] {
            lab.ip(at, &["link", "set", "eth0", "mtu", mtu]);
        }
        let long = || {
            // A path MTU reported just before the port followed would otherwise be cached for ten minutes.
            lab.ip("h1", &["route", "flush", "cache"]);
            let mut ping = lab.at("h1", paths::tool("ping"));
            Process::start(ping.args(["-n", "-c", "2", "-i", "0.2", "-w", "5", "-M", "do", "-s", "2900", "10.77.2.2"]))
        };
        wait_until("long packets", || long().wait(WAIT_MAX).status.success());
        lab.finish("down", &[]).must_succeed();
        for at in namespaces {
            lab.ip(at, &["link", "set", "eth0", "mtu", "1500"]);
        }
        lab.ip("a", &["link", "set", "eth0", "address", "02:00:00:00:05:04"]);
        lab.ip("h1", &["neighbour", "flush", "dev", "eth0"]);
    }
}

/// The kernel handles the frames of a bridge's member itself.
#[test]
fn a_port_that_joins_a_bridge_stays_closed_until_it_leaves() {
    let namespaces = ["a", "b", "h1", "h2"];
    let Some(lab) = Lab::new("a_port_that_joins_a_bridge_stays_closed_until_it_leaves", &namespaces) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.write(PLAIN);
    lab.ip("b", &["link", "add", "br0", "type", "bridge"]);
    lab.ip("b", &["link", "set", "eth0", "master", "br0"]);
    lab.finish("up", &[]).must_fail_in_one_line(2, &["interface 'eth0': it belongs to 'br0'"]);
    lab.ip("b", &["link", "set", "eth0", "nomaster"]);
    lab.up();
    lab.ping("h1", "10.77.2.2").must_succeed();
    lab.ip("b", &["link", "set", "eth0", "master", "br0"]);
    lab.wait_for_route("a", "10.77.2.2", None);
    lab.ip("b", &["link", "set", "eth0", "nomaster"]);
    lab.wait_for_route("a", "10.77.2.2", Some("b"));
    lab.ping("h1", "10.77.2.2").must_succeed();
}

/// Routes of `ip route` with a router on no network of the port, with a router of the other IP version, and of type
/// `throw`, which ends the lookup.
#[test]
fn routes_by_an_off_network_router_work_and_throw_routes_end_the_lookup() {
    let namespaces = ["a", "b", "h1", "h2"];
    let Some(lab) = Lab::new("routes_by_an_off_network_router_work", &namespaces) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    for (at, words) in [
        ("h2", "address add 203.0.113.9/32 dev eth0"),
        ("h2", "address add fd99::9/128 dev eth0 nodad"),
        ("h2", "address add 198.51.100.1/24 dev lo"),
        ("h2", "address add fd51::1/64 dev lo nodad"),
        ("b", "route add 198.51.100.0/24 via 203.0.113.9 dev eth0 onlink"),
        ("b", "-6 route add fd51::/64 via fd99::9 dev eth0 onlink"),
    ] {
        lab.ip(at, &words.split(' ').collect::<Vec<_>>());
    }
    lab.write(PLAIN);
    lab.up();
    for address in ["198.51.100.1", "fd51::1"] {
        lab.wait_for_route("a", address, Some("b"));
        lab.ping("h1", address).must_succeed();
    }
    routes_by_a_link_local_address_work(&lab);
    lab.ip("b", &["route", "add", "throw", "198.51.100.0/28"]);
    wait_until("throw route", || lab.routes("a", "198.51.100.1")[0]["kind"] == "throw");
    let finished = lab.ping("h1", "198.51.100.1");
    assert!(finished.stdout.contains("Destination Net Unreachable"), "{finished}");
    lab.ip("b", &["route", "del", "throw", "198.51.100.0/28"]);
    lab.wait_for_route("a", "198.51.100.1", Some("b"));
    lab.ping("h1", "198.51.100.1").must_succeed();
}

/// As with BGP unnumbered: the next hop, also of IPv4 routes, is the other router's link-local address.
fn routes_by_a_link_local_address_work(lab: &Lab) {
    lab.ip("h2", &["address", "add", "fe80::9/64", "dev", "eth0", "nodad"]);
    for (address, network, version) in [("192.0.2.1", "192.0.2.0/24", "-4"), ("fd92::1", "fd92::/64", "-6")] {
        lab.ip("h2", &[version, "address", "add", address, "dev", "lo"]);
        lab.ip("b", &[version, "route", "add", network, "via", "inet6", "fe80::9", "dev", "eth0"]);
        lab.wait_for_route("a", address, Some("b"));
        // Host h2 would also answer requests for the address itself, which would be adjacency 0.
        assert_ne!(lab.routes("a", address)[0]["hops"][0]["adjacency"], 0);
        lab.ping("h1", address).must_succeed();
        let neighbours = lab.node(1)["neighbours"].as_array().expect("neighbours").clone();
        assert!(neighbours.iter().any(|neighbour| neighbour["address"] == "fe80::9"), "{neighbours:#?}");
        lab.ip("b", &[version, "route", "del", network]);
        lab.wait_for_route("a", address, None);
    }
}

/// Port `eth1` is inserted before the TAP, which keeps its state under another number, and is removed again.
fn a_reload_adds_and_removes_a_port(lab: &Lab) {
    assert_eq!(reload(lab, LIVE), "node a: nothing has changed\nnode b: nothing has changed\n");
    let with_eth1 = LIVE.replacen("device = \"tap0\"", "device = \"eth1\"\n\n[[nodes.ports]]\ndevice = \"tap0\"", 1);
    let batch = with_eth1.replacen("\n[[nodes]]", "\n[interconnect]\nbatch = 4\n\n[[nodes]]", 1);
    let output = reload(lab, &batch);
    let wanted = "node a: interconnect.batch: 4 instead of adaptive\nnode a: port 'eth1' is new, by auto\nnode b: \
                  interconnect.batch: 4 instead of adaptive\n";
    assert_eq!(output, wanted);
    assert_eq!(lab.node(1)["batch"], "4");
    lab.wait_for_route("b", "10.77.3.2", Some("a"));
    lab.ping("h2", "10.77.3.2").must_succeed();
    lab.ping("h9", "10.77.3.2").must_succeed();
    lab.ping("h2", "10.9.0.2").must_succeed();
    assert_eq!(lab.routes("b", "10.9.0.2")[0]["hops"][0]["port"], "tap0");

    assert!(reload(lab, LIVE).contains("node a: port 'eth1' is gone\n"));
    lab.wait_for_route("b", "10.77.3.2", None);
    lab.ping("h9", "10.77.2.2").must_succeed();
    let address =
        LIVE.replace("10.9.0.1/24", "10.9.0.5/24") + "\n[[nodes.routes]]\nto = \"10.8.0.0/16\"\nport = \"eth0\"\n";
    let output = reload(lab, &address);
    let address_lines =
        "node a: port 'tap0': address 10.9.0.1/24 is gone\nnode a: port 'tap0': address 10.9.0.5/24 is new\n";
    assert!(output.starts_with(address_lines) && output.contains("node b: route to 10.8.0.0/16 by 'eth0'"), "{output}");
    wait_for_addresses(lab, 1);
    lab.ping("h9", "10.9.0.5").must_succeed();
    lab.wait_for_route("a", "10.8.1.1", Some("b"));
    reload(lab, &batch);
    lab.wait_for_route("a", "10.8.1.1", None);
}

/// Host h1 has two links to node a; the first must carry three quarters of the flows from h2 to a network behind h1.
fn weights_of_the_kernels_routes_share_the_flows(lab: &Lab) {
    const FLOWS: u16 = 400;
    lab.ip("h1", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    let first = ["nexthop", "via", "10.77.1.2", "weight", "3"];
    let second = ["nexthop", "via", "10.77.3.2", "weight", "1"];
    lab.ip("a", &[&["route", "add", "203.0.113.0/24"][..], &first, &second].concat());
    let weights = || {
        let routes = lab.routes("b", "203.0.113.1");
        let hops = routes.first().and_then(|route| route["hops"].as_array().cloned()).unwrap_or_default();
        hops.iter().map(|hop| (hop["port"].clone(), hop["weight"].clone())).collect::<Vec<_>>()
    };
    wait_until("route with weights", || weights() == [("eth0".into(), 3.into()), ("eth1".into(), 1.into())]);
    // Both next hops are resolved before, because few packets are queued for an unresolved one.
    lab.ping("h2", "10.77.1.2").must_succeed();
    lab.ping("h2", "10.77.3.2").must_succeed();
    let received = |device: &str| {
        let links: Value = serde_json::from_str(&lab.ip("h1", &["-j", "-s", "link", "show", device])).expect("JSON");
        links[0]["stats64"]["rx"]["packets"].as_u64().expect("a number")
    };
    let before = [received("eth0"), received("eth1")];
    let namespace = Namespace::at(&Path::new("/run/netns").join(lab.namespace("h2"))).expect("it is there");
    let send = || {
        for port in 20_000..20_000 + FLOWS {
            let socket = std::net::UdpSocket::bind(("0.0.0.0", port)).expect("a port");
            // An ICMP port unreachable may arrive meanwhile.
            let _ = socket.send_to(b"flow", (IpAddr::from([203, 0, 113, 1]), 9));
        }
    };
    namespace.within(send).expect("it can be entered");
    let arrived = || [received("eth0") - before[0], received("eth1") - before[1]];
    wait_until("packets of all flows", || arrived().iter().sum::<u64>() >= u64::from(FLOWS));
    let [first, second] = arrived();
    assert!(
        (FLOWS * 13 / 20..=FLOWS * 17 / 20).contains(&(first as u16)),
        "{first} and {second} of {FLOWS}, weights 3 and 1"
    );
    lab.ip("a", &["route", "del", "203.0.113.0/24"]);
    lab.wait_for_route("b", "203.0.113.1", None);
}

fn what_cannot_change_is_refused_in_one_line(lab: &Lab) {
    let kept = fs::read_to_string(lab.file()).expect("a file");
    let tap = "device = \"tap0\"";
    let cases: [(&str, String, &[&str]); 4] = [
        (
            "kind",
            kept.replace("batch = 4", "kind = \"window\"\nbatch = 8"),
            &["interconnect.kind", "\"lane\"", "restart"],
        ),
        (
            "device",
            kept.replace("device = \"eth1\"", "device = \"no1\""),
            &["nodes[0].ports[1].device", "'no1'", "ip link"],
        ),
        ("syntax", kept.replace("batch = 4", "batch = 40"), &["interconnect.batch", "40", "1 to 32"]),
        (
            "VLAN",
            kept.replacen(
                tap,
                &format!("device = \"x\"\nkind = \"vlan\"\nparent = \"eth1\"\nvlan = 0\n\n[[nodes.ports]]\n{tap}"),
                1,
            ),
            &["nodes[0].ports[2].vlan", "0 is not a VLAN identifier", "1 to 4094"],
        ),
    ];
    for (what, text, words) in cases {
        assert_ne!(text, kept, "{what}");
        fs::write(lab.file(), text).expect("a file");
        lab.finish("reload", &[]).must_fail_in_one_line(2, &[&["cluster.toml, line "][..], words].concat());
        fs::write(lab.file(), &kept).expect("a file");
        assert_eq!(lab.node(0)["batch"], "4", "a refused file changes nothing");
    }
    lab.ping("h2", "10.77.3.2").must_succeed();
}

fn a_signal_reloads_too(lab: &Lab) {
    let pid = lab.node(0)["pid"].as_u64().expect("up");
    let text = fs::read_to_string(lab.file()).expect("a file").replace("batch = 4", "batch = 9");
    fs::write(lab.file(), text).expect("a file");
    signal(pid, Signal::HUP);
    wait_until("other batch size", || lab.node(0)["batch"] == "9");
    assert_eq!(lab.node(0)["pid"], pid);
}
