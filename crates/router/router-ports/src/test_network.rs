//! Support for tests: two hosts in separate network namespaces, and between them a node whose ports are tested.
//!
//! ```text
//!   host 0 ── veth ── port 0 [a thread that forwards frames] port 1 ── veth ── host 1
//! ```

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use packet::ethernet::{Frame, MacAddress};
use router::{Packet, Pool, Port, PortLosses};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::interface::Interface;
use crate::namespace::{self, Namespace};
use crate::netlink::{Requests, VethEndpoint};

/// The time after which a test fails if nothing arrives.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest number of frames received in one call.
const BURST: usize = 64;

pub struct TestNetwork {
    pub hosts: [Namespace; 2],
    pub node: Namespace,
    /// Buffers for large packets of the forwarding thread.
    pub large_buffers: u32,
    /// Large packets that the forwarding thread has forwarded.
    pub large_packets: AtomicU64,
}

fn host_mac(side: usize) -> MacAddress {
    MacAddress([2, 0, 0, 0, 1, side as u8])
}

fn port_mac(side: usize) -> MacAddress {
    MacAddress([2, 0, 0, 0, 2, side as u8])
}

pub fn host_address(side: usize, is_v6: bool) -> IpAddr {
    let text = if is_v6 { format!("fd00:7::{}", side + 1) } else { format!("10.7.0.{}", side + 1) };
    text.parse().unwrap()
}

/// Returns the name of a port's interface, the same in every namespace.
pub fn port_name(side: usize) -> &'static str {
    ["port0", "port1"][side]
}

impl TestNetwork {
    /// Creates the network; all interfaces have an MTU of `mtu_bytes`. Prints the reason and returns `None` if
    /// namespaces cannot be created.
    pub fn new(test: &str, mtu_bytes: u32) -> Option<TestNetwork> {
        let node = namespace::for_test(test)?;
        let hosts = [Namespace::new().unwrap(), Namespace::new().unwrap()];
        for (side, host) in hosts.iter().enumerate() {
            let connect = || {
                let mut requests = Requests::open().unwrap();
                let port = VethEndpoint { name: port_name(side), namespace: None, mac: Some(port_mac(side)) };
                let end = VethEndpoint { name: "host", namespace: Some(host.as_fd()), mac: Some(host_mac(side)) };
                requests.add_veth(port, end).unwrap();
                let port = Interface::by_name(port_name(side)).unwrap();
                requests.set_mtu(port.index, mtu_bytes).unwrap();
                requests.set_up(port.index).unwrap();
            };
            node.within(connect).unwrap();
            host.within(|| set_up_host(side, mtu_bytes)).unwrap();
            node.within_with_sysfs(|| until_running(port_name(side))).unwrap();
            host.within_with_sysfs(|| until_running("host")).unwrap();
        }
        Some(TestNetwork { hosts, node, large_buffers: 0, large_packets: AtomicU64::new(0) })
    }

    /// Runs `run` while a thread forwards the frames of each port to the other, and returns the losses of both ports.
    pub fn while_forwarding(&self, open: fn(usize) -> Box<dyn Port + Send>, run: impl FnOnce()) -> [PortLosses; 2] {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (opened, is_open) = std::sync::mpsc::channel();
            let is_over = &is_over;
            let forwarder = scope.spawn(move || {
                let forward = move || {
                    let mut ports = [open(0), open(1)];
                    opened.send(()).unwrap();
                    self.forward(&mut ports, is_over);
                    [ports[0].losses(), ports[1].losses()]
                };
                self.node.within(forward).unwrap()
            });
            is_open.recv().expect("the ports were not opened");
            let stop_guard = StopGuard(is_over);
            run();
            drop(stop_guard);
            forwarder.join().unwrap()
        })
    }

    /// Forwards frames until `is_over` is set; blocks while there is nothing to do.
    fn forward(&self, ports: &mut [Box<dyn Port + Send>; 2], is_over: &AtomicBool) {
        let mut pool = Pool::with_large(1024, 2048, 64, self.large_buffers);
        let mut queues: [VecDeque<Packet>; 2] = Default::default();
        let mut burst = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            for side in [0, 1] {
                ports[side].receive(&mut pool, &mut burst, BURST).unwrap();
                for packet in burst.drain(..) {
                    self.large_packets.fetch_add(u64::from(packet.is_large()), Ordering::Relaxed);
                    let mut frame = Frame::new_checked(pool.bytes_mut(&packet)).unwrap();
                    frame.set_source(port_mac(1 - side));
                    frame.set_destination(host_mac(1 - side));
                    queues[1 - side].push_back(packet);
                }
                ports[1 - side].transmit(&mut pool, &mut queues[1 - side]).unwrap();
            }
            let is_idle = queues.iter().all(VecDeque::is_empty) && ports.iter_mut().all(|port| port.may_sleep());
            if is_idle {
                let mut wakes: Vec<PollFd> =
                    ports.iter().map(|port| PollFd::from_borrowed_fd(port.wakes().unwrap(), PollFlags::IN)).collect();
                // The timeout only serves to check `is_over`.
                let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                poll(&mut wakes, Some(&limit)).unwrap();
            }
        }
    }

    /// Sends `bytes` bytes over TCP from host 0 to host 1 and back, and checks each.
    pub fn stream(&self, is_v6: bool, bytes: usize) {
        let sent: Vec<u8> = (0..bytes).map(|n| (n * 31 + n / 251) as u8).collect();
        let listener = || TcpListener::bind(SocketAddr::new(host_address(1, is_v6), 7)).unwrap();
        let listener = self.hosts[1].within(listener).unwrap();
        let connect = || TcpStream::connect_timeout(&SocketAddr::new(host_address(1, is_v6), 7), TEST_TIMEOUT);
        let mut client = self.hosts[0].within(connect).unwrap().unwrap();
        let (mut server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            stream.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut received = vec![0; bytes];
                server.read_exact(&mut received).unwrap();
                assert!(received == sent, "bytes were changed in transit");
                server.write_all(&received).unwrap();
            });
            client.write_all(&sent).unwrap();
            let mut received = vec![0; bytes];
            client.read_exact(&mut received).unwrap();
            assert!(received == sent, "bytes were changed on the return path");
        });
    }

    /// Sends UDP datagrams from host 0 to host 1, from an empty one to the longest one for an MTU of 1500 B.
    pub fn datagrams(&self, is_v6: bool) {
        let [one, other] = self.udp(is_v6);
        for bytes in [0, 1, 22, 1000, 1452] {
            let sent: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
            one.send(&sent).unwrap();
            let mut received = [0; 2000];
            let length = other.recv(&mut received).unwrap();
            assert_eq!(&received[..length], &sent[..]);
        }
    }

    /// Returns UDP sockets of both hosts, connected to each other.
    pub fn udp(&self, is_v6: bool) -> [UdpSocket; 2] {
        [0, 1].map(|side| {
            let connect = || {
                let socket = UdpSocket::bind(SocketAddr::new(host_address(side, is_v6), 7)).unwrap();
                socket.connect(SocketAddr::new(host_address(1 - side, is_v6), 7)).unwrap();
                socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
                socket
            };
            self.hosts[side].within(connect).unwrap()
        })
    }
}

fn set_up_host(side: usize, mtu_bytes: u32) {
    let mut requests = Requests::open().unwrap();
    let host = Interface::by_name("host").unwrap().index;
    requests.set_mtu(host, mtu_bytes).unwrap();
    requests.set_up(host).unwrap();
    for (is_v6, bits) in [(false, 24), (true, 64)] {
        let network = ipnet::IpNet::new(host_address(side, is_v6), bits).unwrap();
        requests.add_address(host, network).unwrap();
        requests.add_neighbour(host, host_address(1 - side, is_v6), port_mac(side)).unwrap();
    }
}

/// Waits until the kernel has set the link up: frames that are sent earlier, on a busy machine, are dropped.
fn until_running(name: &str) {
    let state = || std::fs::read_to_string(format!("/sys/class/net/{name}/operstate")).unwrap();
    let deadline = Instant::now() + TEST_TIMEOUT;
    while state() != "up\n" {
        assert!(Instant::now() < deadline, "{name} is {}", state());
        thread::sleep(Duration::from_millis(1));
    }
    // The kernel reports the state slightly before it passes frames, and accepts no request in between.
    Requests::open().unwrap().set_up(Interface::by_name(name).unwrap().index).unwrap();
}

/// Stops the forwarding thread when it is dropped, also if the test fails.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns whether the port becomes idle after its pending frames, which may include frames of the hosts, have been
/// received.
pub fn becomes_idle(port: &mut dyn Port, pool: &mut Pool) -> bool {
    let mut packets = Vec::new();
    (0..100).any(|_| {
        port.receive(pool, &mut packets, BURST).unwrap();
        packets.drain(..).for_each(|packet| pool.free(packet));
        port.may_sleep()
    })
}
