use std::io;
use std::net::IpAddr;
use std::sync::atomic::Ordering;

use super::*;
use crate::netlink::Requests;
use crate::test_network::{TestNetwork, becomes_idle, host_address, port_name};

fn open(side: usize) -> Box<dyn Port + Send> {
    Box::new(PacketSocket::open(&Interface::by_name(port_name(side)).unwrap()).unwrap())
}

#[test]
fn large_packets_and_partial_checksums_of_tcp_are_converted_to_wire_format() {
    let Some(network) = TestNetwork::new("large_packets_and_partial_checksums", 1500) else { return };
    let losses = network.while_forwarding(open, || {
        network.stream(false, 3_000_000);
        network.stream(true, 3_000_000);
    });
    assert_eq!(losses.map(|losses| losses.receive_unusable), [0, 0]);
    // A sent frame may find the host's queue full; TCP retransmits it.
}

#[test]
fn large_packets_cross_whole_into_a_pool_with_buffers_for_them() {
    let Some(mut network) = TestNetwork::new("large_packets_cross_whole", 1500) else { return };
    // One buffer: further large packets are segmented.
    for large_buffers in [64, 1] {
        network.large_buffers = large_buffers;
        let before = network.large_packets.load(Ordering::Relaxed);
        let losses = network.while_forwarding(open, || {
            network.stream(false, 3_000_000);
            network.stream(true, 3_000_000);
        });
        assert_eq!(losses.map(|losses| (losses.receive_unusable, losses.transmit_refused)), [(0, 0); 2]);
        assert!(network.large_packets.load(Ordering::Relaxed) > before, "none was whole");
    }
}

/// Returns a large TCP or UDP packet to host 0, with all flags that segmentation treats differently.
fn large_frame(is_v6: bool, is_udp: bool, payload_bytes: usize) -> Vec<u8> {
    let ends = [host_address(1, is_v6), host_address(0, is_v6)];
    let (protocol, header_bytes) = if is_udp { (17, 8) } else { (6, 20) };
    let upper_bytes = (header_bytes + payload_bytes) as u16;
    let mut packet = match ends {
        [IpAddr::V4(source), IpAddr::V4(destination)] => {
            let total = (upper_bytes + 20).to_be_bytes();
            let mut header = [&[0x45, 0][..], &total, &[0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0]].concat();
            header.extend([source.octets(), destination.octets()].concat());
            packet::ipv4::Packet::new_checked(&mut [&header[..], &vec![0; upper_bytes.into()]].concat()[..])
                .map(|mut packet| {
                    packet.fill_checksum();
                    header[10..12].copy_from_slice(&packet.checksum().to_be_bytes());
                })
                .unwrap();
            header
        }
        [IpAddr::V6(source), IpAddr::V6(destination)] => {
            let header = [&[0x60, 0, 0, 0][..], &upper_bytes.to_be_bytes(), &[protocol, 64]].concat();
            [&header[..], &source.octets(), &destination.octets()].concat()
        }
        mixed => panic!("{mixed:?}"),
    };
    packet.extend([0, 80, 0, 81]);
    match is_udp {
        true => packet.extend([upper_bytes.to_be_bytes(), [0, 0]].as_flattened()),
        // FIN, PSH, ACK, CWR.
        false => packet.extend([0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 1, 0x50, 0x99, 1, 0, 0, 0, 0, 0]),
    }
    packet.extend((0..payload_bytes).map(|at| (at * 7 + at / 256) as u8));
    packet
}

/// Passes a large packet to the kernel by a socket that does not bypass its segmentation.
fn send_to_be_segmented(interface: &Interface, frame: &mut [u8], segment_bytes: u16) {
    let sender = socket().unwrap();
    set_option(&sender, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1).unwrap();
    bind(&sender, interface.index, 0).unwrap();
    let (header, _) = crate::offload::describe_large(frame, 14, segment_bytes).unwrap();
    let parts = [io::IoSlice::new(&header), io::IoSlice::new(frame)];
    assert_eq!(rustix::io::writev(&sender, &parts), Ok(header.len() + frame.len()));
}

/// Receives the frames of the test, `wanted` of them. Frames of the hosts' own arrive too.
fn received(receiver: &mut PacketSocket, pool: &mut Pool, wanted: usize) -> Vec<Vec<u8>> {
    let (mut received, mut into) = (Vec::new(), Vec::new());
    for _ in 0..1000 {
        receiver.receive(pool, &mut into, 64).unwrap();
        for packet in into.drain(..) {
            assert!(!packet.is_large(), "the interface has no offloads");
            received.extend(Some(pool.bytes(&packet).to_vec()).filter(|frame| frame[6..12] == [2; 6]));
            pool.free(packet);
        }
        if received.len() >= wanted {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    received
}

/// For an interface without offloads, the port segments large packets as the kernel does.
#[test]
fn segments_are_those_of_the_kernel() {
    let Some(network) = TestNetwork::new("segments_are_those_of_the_kernel", 1500) else { return };
    let open_in = |namespace: &crate::Namespace, name: &str| {
        let open = || {
            crate::disable_offloads(name).unwrap();
            let interface = Interface::by_name(name).unwrap();
            (PacketSocket::open(&interface).unwrap(), interface)
        };
        namespace.within(open).unwrap()
    };
    let (mut receiver, host) = open_in(&network.hosts[0], "host");
    let (mut sender, port) = open_in(&network.node, port_name(0));
    let mut pool = Pool::with_large(256, 2048, 64, 4);
    for (is_v6, is_udp) in [(false, false), (true, false), (false, true), (true, true)] {
        let case = format!("IPv6 {is_v6}, UDP {is_udp}");
        let ethertype = if is_v6 { [0x86, 0xdd] } else { [0x08, 0] };
        let mut frame = [&host.mac.0[..], &[2; 6], &ethertype, &large_frame(is_v6, is_udp, 30_000)].concat();
        network.node.within(|| send_to_be_segmented(&port, &mut frame, 1000)).unwrap();
        let by_kernel = received(&mut receiver, &mut pool, 30);
        assert_eq!(by_kernel.len(), 30, "{case}");
        let mut packet = pool.alloc_large().unwrap();
        pool.resize(&mut packet, frame.len());
        pool.bytes_mut(&packet).copy_from_slice(&frame);
        assert!(pool.set_large(&mut packet, 14, 1000));
        let mut queue = VecDeque::from([packet]);
        sender.transmit(&mut pool, &mut queue).unwrap();
        assert!(received(&mut receiver, &mut pool, 30) == by_kernel, "{case}");
        assert_eq!((sender.losses().transmit_refused, queue.len(), pool.large_available()), (0, 0, 4), "{case}");
    }
}

#[test]
fn a_large_packet_in_a_vlan_keeps_its_tag() {
    let Some(network) = TestNetwork::new("a_large_packet_in_a_vlan", 1500) else { return };
    let open_in = |namespace: &crate::Namespace, name: &str| {
        let open = || {
            let interface = Interface::by_name(name).unwrap();
            (PacketSocket::open(&interface).unwrap(), interface.mac)
        };
        namespace.within(open).unwrap()
    };
    let ((mut sender, _), (mut receiver, mac)) =
        (open_in(&network.hosts[0], "host"), open_in(&network.node, port_name(0)));
    let mut pool = Pool::with_large(64, 2048, 64, 4);
    let frame = [&mac.0[..], &[2; 6], &[0x81, 0, 0x20, 7, 0x08, 0], &large_frame(false, false, 30_000)].concat();
    let mut packet = pool.alloc_large().unwrap();
    pool.resize(&mut packet, frame.len());
    pool.bytes_mut(&packet).copy_from_slice(&frame);
    assert!(pool.set_large(&mut packet, 18, 1000));
    sender.transmit(&mut pool, &mut VecDeque::from([packet])).unwrap();
    let mut into = Vec::new();
    for _ in 0..1000 {
        receiver.receive(&mut pool, &mut into, 64).unwrap();
        // Frames of the hosts' own arrive too.
        if let Some(packet) = into.drain(..).find(|packet| pool.bytes(packet)[6..12] == [2; 6]) {
            // The sender has stored a partial checksum.
            let (before, after) = (&frame[..18 + 20 + 16], &frame[18 + 20 + 18..]);
            let bytes = pool.bytes(&packet);
            assert!(bytes.starts_with(before) && bytes.ends_with(after) && bytes.len() == frame.len());
            assert_eq!((packet.segment_bytes(), sender.losses().transmit_refused), (1000, 0));
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("it did not arrive");
}

#[test]
fn a_large_packet_whose_headers_changed_is_refused_and_counted() {
    let Some(network) = TestNetwork::new("a_large_packet_whose_headers_changed", 1500) else { return };
    let test = || {
        let mut port = PacketSocket::open(&Interface::by_name(port_name(0)).unwrap()).unwrap();
        let mut pool = Pool::with_large(4, 2048, 64, 4);
        let frame = [&[2; 12][..], &[0x08, 0], &large_frame(false, false, 5000)].concat();
        let mut packet = pool.alloc_large().unwrap();
        pool.resize(&mut packet, frame.len());
        pool.bytes_mut(&packet).copy_from_slice(&frame);
        assert!(pool.set_large(&mut packet, 14, 1000));
        // The TCP header would end behind the packet.
        pool.resize(&mut packet, 14 + 20 + 19);
        let after = pool.alloc_copy(&[&[2; 12][..], &[0x08, 0, 0x45], &[0; 45]].concat()).unwrap();
        let mut queue = VecDeque::from([packet, after]);
        assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 2);
        assert_eq!((port.losses().transmit_refused, pool.large_available(), pool.available()), (1, 4, 4));
    };
    network.node.within(test).unwrap();
}

#[test]
fn datagrams_cross_and_a_sleeping_port_is_woken() {
    let Some(network) = TestNetwork::new("datagrams_cross", 1500) else { return };
    let losses = network.while_forwarding(open, || {
        for is_v6 in [false, true] {
            network.datagrams(is_v6);
        }
    });
    assert_eq!(losses, [PortLosses::default(); 2]);
}

#[test]
fn datagrams_of_a_sender_with_segmentation_offload_are_segmented() {
    let Some(network) = TestNetwork::new("datagrams_of_a_sender_with_segmentation_offload", 1500) else { return };
    network.while_forwarding(open, || {
        for is_v6 in [false, true] {
            let [one, other] = network.udp(is_v6);
            let segment: libc::c_int = 700;
            crate::system::set_option(&one, libc::SOL_UDP, libc::UDP_SEGMENT, &segment).unwrap();
            let sent: Vec<u8> = (0..2000).map(|n| (n / 7) as u8).collect();
            one.send(&sent).unwrap();
            for part in sent.chunks(700) {
                let mut received = [0; 2000];
                let length = other.recv(&mut received).unwrap();
                assert_eq!(&received[..length], part);
            }
        }
    });
}

#[test]
fn a_removed_interface_ends_the_port_and_one_that_is_down_does_not() {
    let Some(network) = TestNetwork::new("a_removed_interface", 1500) else { return };
    let test = || {
        let interface = Interface::by_name(port_name(0)).unwrap();
        let (mut requests, mut pool) = (Requests::open().unwrap(), Pool::new(8, 2048, 64));
        let mut port = PacketSocket::open(&interface).unwrap();
        requests.set_down(interface.index).unwrap();
        assert!(becomes_idle(&mut port, &mut pool));
        let mut frame = pool.alloc().unwrap();
        pool.resize(&mut frame, 60);
        let mut queue = VecDeque::from([frame]);
        assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 1);
        assert_eq!((port.losses().transmit_refused, pool.available()), (1, 8));
        assert_eq!(port.receive(&mut pool, &mut Vec::new(), 1).unwrap(), 0);
        requests.remove_link(interface.index).unwrap();
        assert!(!port.may_sleep());
        let error = port.receive(&mut pool, &mut Vec::new(), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    };
    network.node.within(test).unwrap();
}

#[test]
fn tags_that_the_kernel_stores_outside_frames_are_inserted() {
    let Some(network) = TestNetwork::new("tags_that_the_kernel_stores", 1500) else { return };
    let open_in = |namespace: &crate::Namespace, name: &str| {
        namespace.within(|| PacketSocket::open(&Interface::by_name(name).unwrap()).unwrap()).unwrap()
    };
    let mut sender = open_in(&network.hosts[0], "host");
    let mut receiver = open_in(&network.node, port_name(0));
    let mut pool = Pool::new(64, 2048, 64);
    let mac_of_port = || Interface::by_name(port_name(0)).unwrap().mac;
    let port_mac = network.node.within(mac_of_port).unwrap();
    let mut sent = Vec::new();
    for kind in [&[][..], &[0x81, 0, 0x20, 7], &[0x88, 0xa8, 0, 9], &[0x81, 0, 0, 0]] {
        sent.push([&port_mac.0[..], &[2; 6], kind, &[0x08, 0, 0x45], &[0xa5; 60]].concat());
    }
    let mut queue: VecDeque<Packet> = sent.iter().map(|frame| pool.alloc_copy(frame).unwrap()).collect();
    assert_eq!(sender.transmit(&mut pool, &mut queue).unwrap(), 4);
    // Frames of the hosts' own arrive too.
    let test_frames = |pool: &Pool, packets: &[Packet]| -> Vec<Vec<u8>> {
        packets.iter().map(|packet| pool.bytes(packet).to_vec()).filter(|frame| frame[6..12] == [2; 6]).collect()
    };
    let mut into = Vec::new();
    for _ in 0..1000 {
        receiver.receive(&mut pool, &mut into, 64).unwrap();
        if test_frames(&pool, &into).len() == sent.len() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(test_frames(&pool, &into), sent);
    into.drain(..).for_each(|packet| pool.free(packet));
    sender.receive(&mut pool, &mut into, 64).unwrap();
    assert!(test_frames(&pool, &into).is_empty(), "sent frames were received");
}

#[test]
fn frames_longer_than_a_slot_match_their_slots_after_the_interface_was_down() {
    let Some(network) = TestNetwork::new("frames_longer_than_a_slot", 1500) else { return };
    let node = |run: &mut (dyn FnMut(&mut Requests, &Interface) + Send)| {
        let on_port = || run(&mut Requests::open().unwrap(), &Interface::by_name(port_name(0)).unwrap());
        network.node.within(on_port).unwrap();
    };
    // The slots are for 1500 B, and longer frames follow.
    let mut receiver =
        network.node.within(|| PacketSocket::open(&Interface::by_name(port_name(0)).unwrap()).unwrap()).unwrap();
    let mut port_mac = None;
    node(&mut |requests, port| {
        requests.set_mtu(port.index, 9000).unwrap();
        port_mac = Some(port.mac);
    });
    let open_sender = || {
        let host = Interface::by_name("host").unwrap();
        Requests::open().unwrap().set_mtu(host.index, 9000).unwrap();
        PacketSocket::open(&host).unwrap()
    };
    let mut sender = network.hosts[0].within(open_sender).unwrap();
    let mut pool = Pool::new(64, 8192, 64);
    let frame = |mark: u8| [&port_mac.unwrap().0[..], &[2; 6], &[0x08, 0, 0x45], &[mark; 4000]].concat();
    let mut send = |pool: &mut Pool, mark| {
        let mut queue = VecDeque::from([pool.alloc_copy(&frame(mark)).unwrap()]);
        assert_eq!(sender.transmit(pool, &mut queue).unwrap(), 1);
    };
    send(&mut pool, 1);
    node(&mut |requests, port| {
        requests.set_down(port.index).unwrap();
        requests.set_up(port.index).unwrap();
    });
    send(&mut pool, 2);
    send(&mut pool, 3);
    let mut into = Vec::new();
    // Frames of the hosts' own arrive too.
    let marks = |pool: &Pool, packets: &[Packet]| -> Vec<(usize, u8)> {
        let frames = packets.iter().map(|packet| pool.bytes(packet)).filter(|frame| frame[6..12] == [2; 6]);
        frames.map(|frame| (frame.len(), frame[20])).collect()
    };
    for _ in 0..200 {
        receiver.receive(&mut pool, &mut into, 64).unwrap();
        if marks(&pool, &into).len() == 3 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(marks(&pool, &into), [(4015, 1), (4015, 2), (4015, 3)]);
    node(&mut |requests, port| requests.remove_link(port.index).unwrap());
    assert!(!receiver.may_sleep(), "the removal was not noticed after the interface was down");
}
