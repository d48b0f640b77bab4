use std::io;

use super::*;
use crate::netlink::Requests;
use crate::test_network::{TestNetwork, becomes_idle, port_name};

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
