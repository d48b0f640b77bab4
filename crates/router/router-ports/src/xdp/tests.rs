use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Duration;

use packet::ethernet::MacAddress;

use super::*;
use crate::netlink::Requests;
use crate::test_network::{TestNetwork, becomes_idle, host_address, port_name};

fn frames(port: &mut XdpPort, pool: &mut Pool) -> Vec<Vec<u8>> {
    let mut into = Vec::new();
    port.receive(pool, &mut into, 100).unwrap();
    let copy = |packet: &Packet| pool.bytes(packet).to_vec();
    let frames = into.iter().map(copy).collect();
    into.into_iter().for_each(|packet| pool.free(packet));
    frames
}

/// Returns all frames up to one that satisfies `is_it`; frames may be late.
fn frames_until(port: &mut XdpPort, pool: &mut Pool, is_it: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for _ in 0..1000 {
        all.extend(frames(port, pool));
        if all.iter().any(|frame| is_it(frame)) {
            return all;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the frame did not arrive: {all:02x?}");
}

#[test]
fn packets_to_the_node_reach_its_kernel_and_arp_reaches_the_router() {
    let Some(network) = TestNetwork::new("packets_to_the_node_reach_its_kernel", 1500) else { return };
    let test = || {
        let (own, unused) = ("10.7.0.9", "10.7.0.8");
        let interface = Interface::by_name(port_name(0)).unwrap();
        Requests::open().unwrap().add_address(interface.index, format!("{own}/24").parse().unwrap()).unwrap();
        let local = LocalAddresses::new();
        let mut port = XdpPort::open(&interface, &[], &local).unwrap();
        // Addresses may be added while the port is open.
        local.insert(own.parse().unwrap()).unwrap();
        assert!(port.is_copied() && port.mode() == Mode::Driver);
        let kernel_socket = UdpSocket::bind((own, 9)).unwrap();
        kernel_socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let hosts = network.hosts[0].within(|| UdpSocket::bind((host_address(0, false), 9)).unwrap()).unwrap();
        let mut buffer = [0; 10];
        hosts.send_to(b"in", (own, 9)).unwrap();
        let (length, from) = kernel_socket.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"in");
        kernel_socket.send_to(b"out", from).unwrap();
        hosts.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(hosts.recv(&mut buffer).unwrap(), 3);

        let mut pool = Pool::new(64, 2048, 64);
        let asks_for = |last: u8| move |frame: &[u8]| frame[12..14] == [8, 6] && frame[38..42] == [10, 7, 0, last];
        let received = frames_until(&mut port, &mut pool, asks_for(9));
        // The host's ARP request arrived; the answer is sent by the kernel.
        assert!(
            !received.iter().any(|frame| frame[12..14] == [0x08, 0x00]),
            "frames for the kernel arrived: {received:02x?}"
        );
        // Requests for unused addresses arrive too; packets to an address that the node no longer has are passed to the
        // router.
        local.remove(own.parse().unwrap()).unwrap();
        hosts.send_to(b"on", (own, 9)).unwrap();
        frames_until(&mut port, &mut pool, |frame| frame[12..14] == [8, 0] && frame.ends_with(b"on"));
        hosts.send_to(b"on", (unused, 9)).unwrap();
        frames_until(&mut port, &mut pool, asks_for(8));
    };
    network.node.within(test).unwrap();
}

/// Returns a frame of VLAN 7, which is the router's, or of 8, which is not.
fn tagged(to: MacAddress, id: u8, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let [a, b] = ethertype.to_be_bytes();
    [&to.0[..], &[2, 0, 0, 0, 0, 1], &[0x81, 0, 0x20, id, a, b], packet].concat()
}

/// The peer of the link is a TAP, which has the tags inside frames.
#[test]
fn frames_of_a_vlan_are_received_and_sent_with_their_tags() {
    let Some(namespace) = crate::namespace::for_test("frames_of_a_vlan_have_their_tags") else { return };
    let test = || {
        let mut line = crate::TunTap::open_tap("line0").unwrap();
        Requests::open().unwrap().set_up(line.interface()).unwrap();
        let interface = Interface::by_name("line0").unwrap();
        let local = LocalAddresses::new();
        local.insert("10.7.0.9".parse().unwrap()).unwrap();
        let mut port = XdpPort::open(&interface, &[7], &local).unwrap();
        let mut pool = Pool::new(64, 2048, 64);
        let mut write = |pool: &mut Pool, frame: &[u8]| {
            let mut queue = VecDeque::from([pool.alloc_copy(frame).unwrap()]);
            line.transmit(pool, &mut queue).unwrap();
        };
        // An address of the kernel has no meaning in the VLAN; broadcast ARP arrives outside the rings.
        let to_kernel = [&[0x45; 16][..], &[10, 7, 0, 9], &[0; 26]].concat();
        let arp = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &[0; 38]].concat();
        // A multicast listener query is sent to all nodes after a hop-by-hop header; reports of other hosts are not
        // received.
        let to_all = MacAddress([0x33, 0x33, 0, 0, 0, 1]);
        let listener = |kind: u8| {
            let header = [&[0x60, 0, 0, 0, 0, 32, 0, 1][..], &[0xfe; 32]].concat();
            tagged(to_all, 7, 0x86dd, &[&header[..], &[58, 0, 5, 2, 0, 0, 1, 0, kind], &[0; 23]].concat())
        };
        write(&mut pool, &listener(131));
        let wanted = [
            listener(130),
            tagged(interface.mac, 7, 0x0800, &to_kernel),
            tagged(interface.mac, 7, 0x0806, &arp),
            tagged(MacAddress::BROADCAST, 7, 0x0806, &arp),
        ];
        write(&mut pool, &tagged(interface.mac, 8, 0x0800, &to_kernel));
        wanted.iter().for_each(|frame| write(&mut pool, frame));
        let received = frames_until(&mut port, &mut pool, |frame| frame[..] == wanted[3]);
        for frame in &wanted {
            assert_eq!(received.iter().filter(|other| *other == frame).count(), 1, "{frame:02x?} in {received:02x?}");
        }
        assert!(!received.iter().any(|frame| frame[12..16] == [0x81, 0, 0x20, 8]), "{received:02x?}");
        assert!(!received.contains(&listener(131)), "{received:02x?}");

        let sent = tagged(MacAddress::BROADCAST, 7, 0x0806, &arp);
        let mut queue = VecDeque::from([pool.alloc_copy(&sent).unwrap()]);
        assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 1);
        let mut read = Vec::new();
        for _ in 0..1000 {
            port.may_sleep();
            line.receive(&mut pool, &mut read, 8).unwrap();
            if read.iter().any(|packet| pool.bytes(packet) == sent) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the frame was not sent");
    };
    namespace.within(test).unwrap();
}

#[test]
fn a_removed_interface_ends_the_port_and_one_that_is_down_drops_sent_frames() {
    let Some(network) = TestNetwork::new("a_removed_interface_ends_the_xdp_port", 1500) else { return };
    let test = || {
        let interface = Interface::by_name(port_name(0)).unwrap();
        let (mut requests, mut pool) = (Requests::open().unwrap(), Pool::new(8, 2048, 64));
        let mut port = XdpPort::open(&interface, &[], &LocalAddresses::new()).unwrap();
        let mut queue = VecDeque::from([pool.alloc_copy(&[2; 60]).unwrap()]);
        assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 1);
        assert!(becomes_idle(&mut port, &mut pool));
        requests.set_down(interface.index).unwrap();
        for _ in 0..2 {
            queue.push_back(pool.alloc_copy(&[2; 60]).unwrap());
            queue.push_back(pool.alloc_copy(&[2; 60]).unwrap());
            port.transmit(&mut pool, &mut queue).unwrap();
            assert!(queue.is_empty() && pool.available() == 8);
        }
        assert!(port.losses().transmit_refused > 0 && becomes_idle(&mut port, &mut pool));
        requests.set_up(interface.index).unwrap();
        queue.push_back(pool.alloc_copy(&[2; 60]).unwrap());
        assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 1);
        requests.remove_link(interface.index).unwrap();
        assert!(!port.may_sleep());
        let error = port.receive(&mut pool, &mut Vec::new(), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    };
    network.node.within(test).unwrap();
}
