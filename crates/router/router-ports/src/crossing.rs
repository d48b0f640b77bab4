//! For tests: two hosts in namespaces of their own, and between them a node whose ports are under test.
//!
//! ```text
//!   host 0 ── veth ── port 0 [a thread that carries frames across] port 1 ── veth ── host 1
//! ```

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use packet::ethernet::{Frame, MacAddress};
use router::{Packet, Pool, Port, PortLosses};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::interface::Interface;
use crate::namespace::{self, Namespace};
use crate::netlink::{Requests, VethEnd};

/// How long nothing may come before a test has failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Frames that are taken at a time.
const BURST: usize = 64;

pub struct Crossing {
    pub hosts: [Namespace; 2],
    pub node: Namespace,
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

/// The name of a port's interface, the same in every namespace.
pub fn port_name(side: usize) -> &'static str {
    ["port0", "port1"][side]
}

impl Crossing {
    /// `None`, and a line that says why, where that cannot be had. `mtu_bytes` is of all interfaces.
    pub fn new(test: &str, mtu_bytes: u32) -> Option<Crossing> {
        let node = namespace::for_test(test)?;
        let hosts = [Namespace::new().unwrap(), Namespace::new().unwrap()];
        for (side, host) in hosts.iter().enumerate() {
            let connect = || {
                let mut requests = Requests::open().unwrap();
                let port = VethEnd { name: port_name(side), namespace: None, mac: Some(port_mac(side)) };
                let end = VethEnd { name: "host", namespace: Some(host_fd(host)), mac: Some(host_mac(side)) };
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
        Some(Crossing { hosts, node })
    }

    /// Runs `run` while what comes in at one port goes out at the other. What each port lost.
    pub fn while_carrying(&self, open: fn(usize) -> Box<dyn Port + Send>, run: impl FnOnce()) -> [PortLosses; 2] {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (opened, is_open) = std::sync::mpsc::channel();
            let is_over = &is_over;
            let carrier = scope.spawn(move || {
                let carry = move || {
                    let mut ports = [open(0), open(1)];
                    opened.send(()).unwrap();
                    carry(&mut ports, is_over);
                    [ports[0].losses(), ports[1].losses()]
                };
                self.node.within(carry).unwrap()
            });
            is_open.recv().expect("the ports were not opened");
            let ends = EndsWhenDropped(is_over);
            run();
            drop(ends);
            carrier.join().unwrap()
        })
    }

    /// Sends that many bytes by TCP from host 0 to host 1 and back, and checks each.
    pub fn stream(&self, is_v6: bool, bytes: usize) {
        let sent: Vec<u8> = (0..bytes).map(|n| (n * 31 + n / 251) as u8).collect();
        let listener = || TcpListener::bind(SocketAddr::new(host_address(1, is_v6), 7)).unwrap();
        let listener = self.hosts[1].within(listener).unwrap();
        let connect = || TcpStream::connect_timeout(&SocketAddr::new(host_address(1, is_v6), 7), PATIENCE);
        let mut near = self.hosts[0].within(connect).unwrap().unwrap();
        let (mut far, _) = listener.accept().unwrap();
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut received = vec![0; bytes];
                far.read_exact(&mut received).unwrap();
                assert!(received == sent, "bytes were changed on their way");
                far.write_all(&received).unwrap();
            });
            near.write_all(&sent).unwrap();
            let mut received = vec![0; bytes];
            near.read_exact(&mut received).unwrap();
            assert!(received == sent, "bytes were changed on their way back");
        });
    }

    /// Sends datagrams by UDP from host 0 to host 1, from empty to as long as an MTU of 1500 B lets them be.
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

    /// UDP sockets of both hosts, connected to each other.
    pub fn udp(&self, is_v6: bool) -> [UdpSocket; 2] {
        [0, 1].map(|side| {
            let connect = || {
                let socket = UdpSocket::bind(SocketAddr::new(host_address(side, is_v6), 7)).unwrap();
                socket.connect(SocketAddr::new(host_address(1 - side, is_v6), 7)).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket
            };
            self.hosts[side].within(connect).unwrap()
        })
    }
}

fn host_fd(namespace: &Namespace) -> std::os::fd::BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(namespace)
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

/// Waits until the kernel has noticed that the line works: what is sent before, on a busy machine, is dropped.
fn until_running(name: &str) {
    let state = || std::fs::read_to_string(format!("/sys/class/net/{name}/operstate")).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while state() != "up\n" {
        assert!(Instant::now() < deadline, "{name} is {}", state());
        thread::sleep(Duration::from_millis(1));
    }
    // The kernel says so a moment before it lets anything through, and takes no request in between.
    Requests::open().unwrap().set_up(Interface::by_name(name).unwrap().index).unwrap();
}

/// A test that fails does not leave its carrier running.
struct EndsWhenDropped<'a>(&'a AtomicBool);

impl Drop for EndsWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Until it is over; asleep when there is nothing to do.
fn carry(ports: &mut [Box<dyn Port + Send>; 2], is_over: &AtomicBool) {
    let mut pool = Pool::new(1024, 2048, 64);
    let mut queues: [VecDeque<Packet>; 2] = Default::default();
    let mut burst = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        for side in [0, 1] {
            ports[side].receive(&mut pool, &mut burst, BURST).unwrap();
            for packet in burst.drain(..) {
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
            // The time limit is for `is_over` alone.
            let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            poll(&mut wakes, Some(&limit)).unwrap();
        }
    }
}

/// Whether the port may sleep, once it has nothing more to say; hosts may still say something of themselves.
pub fn falls_asleep(port: &mut dyn Port, pool: &mut Pool) -> bool {
    let mut packets = Vec::new();
    (0..100).any(|_| {
        port.receive(pool, &mut packets, BURST).unwrap();
        packets.drain(..).for_each(|packet| pool.free(packet));
        port.may_sleep()
    })
}
