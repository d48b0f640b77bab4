//! What sends frames, and what counts or times those that arrive.

use std::collections::VecDeque;
use std::fs;
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use packet::ethernet::MacAddress;
use packet::ipv4;
use router::{Packet, Pool, Port};
use router_ports::{Interface, Namespace, PacketSocket};

use super::bed::{HOSTS, PORTS, pin, within};
use super::{Error, system};

/// Frames of one call.
const BURST: usize = 64;
const BUFFER_BYTES: u16 = 2048;
/// A frame that has not arrived by then is lost.
const PATIENCE: Duration = Duration::from_millis(100);
/// What is still under way when a round ends has this long to arrive.
const SETTLING: Duration = Duration::from_millis(5);
/// Where a frame has its number: behind the headers of Ethernet, IPv4 and UDP.
const NUMBER_AT: usize = 14 + 20 + 8;

/// What one round gave.
pub struct Round {
    pub arrived_mpps: f64,
    pub offered_mpps: f64,
}

/// The sending end.
pub struct Source {
    port: PacketSocket,
    pool: Pool,
    /// One frame for each destination, as long as a frame can be.
    frames: Vec<Vec<u8>>,
    at: usize,
    number: u64,
}

/// The receiving end.
pub struct Sink {
    namespace: Namespace,
}

impl Source {
    pub fn open(namespace: Namespace, to: MacAddress, destinations: &[(Ipv4Net, Ipv4Addr)]) -> Result<Source, Error> {
        let open = || -> Result<(PacketSocket, MacAddress), Error> {
            let interface = Interface::by_name(PORTS[0])?;
            let port = PacketSocket::open(&interface).map_err(system("a packet socket"))?;
            Ok((port, interface.mac))
        };
        let (port, mac) = within(&namespace, open)??;
        let frames = destinations.iter().map(|(_, address)| frame(mac, to, *address)).collect();
        Ok(Source { port, pool: Pool::new(BURST as u32, BUFFER_BYTES, 0), frames, at: 0, number: 0 })
    }

    /// The next frame, to the next destination.
    fn next(&mut self, bytes: usize) -> Option<Packet> {
        let count = self.frames.len();
        let frame = &mut self.frames[self.at];
        self.at = (self.at + 1) % count;
        fit(frame, bytes);
        self.pool.copy_of(&frame[..bytes])
    }

    /// Sends as fast as it goes for that long.
    pub fn overload(&mut self, bytes: usize, duration: Duration, sink: &Sink) -> Result<Round, Error> {
        on_first(|| {
            let before = sink.received()?;
            let begun = Instant::now();
            let (mut queue, mut sent) = (VecDeque::with_capacity(BURST), 0);
            while begun.elapsed() < duration {
                while let Some(packet) = self.next(bytes) {
                    queue.push_back(packet);
                }
                sent += self.port.transmit(&mut self.pool, &mut queue).map_err(system("sending"))?;
                // What the socket had no room for is given up, or it would never be offered less than it takes.
                queue.drain(..).for_each(|packet| self.pool.free(packet));
            }
            let seconds = begun.elapsed().as_secs_f64();
            std::thread::sleep(SETTLING);
            let arrived = sink.received()? - before;
            let mpps = |frames: u64| frames as f64 / seconds / 1e6;
            Ok(Round { arrived_mpps: mpps(arrived), offered_mpps: mpps(sent as u64) })
        })
    }

    /// Sends one by one, each when the one before has arrived or is lost.
    pub fn probe(&mut self, bytes: usize, count: usize, sink: &Sink) -> Result<Vec<Option<Duration>>, Error> {
        let open = || PacketSocket::open(&Interface::by_name(PORTS[1])?).map_err(system("a packet socket"));
        let mut receiver = within(&sink.namespace, open)??;
        on_first(|| (0..count).map(|_| self.probe_once(bytes, &mut receiver)).collect())
    }

    fn probe_once(&mut self, bytes: usize, receiver: &mut PacketSocket) -> Result<Option<Duration>, Error> {
        let Some(packet) = self.next(bytes) else { return Ok(None) };
        self.number += 1;
        let number = self.number.to_be_bytes();
        self.pool.bytes_mut(&packet)[NUMBER_AT..NUMBER_AT + number.len()].copy_from_slice(&number);
        let (mut queue, mut received) = (VecDeque::from([packet]), Vec::new());
        let begun = Instant::now();
        self.port.transmit(&mut self.pool, &mut queue).map_err(system("sending"))?;
        queue.drain(..).for_each(|packet| self.pool.free(packet));
        while begun.elapsed() < PATIENCE {
            receiver.receive(&mut self.pool, &mut received, BURST).map_err(system("receiving"))?;
            let time = begun.elapsed();
            let is_it = |packet: &Packet| self.pool.bytes(packet).get(NUMBER_AT..NUMBER_AT + 8) == Some(&number[..]);
            let has_come = received.iter().any(is_it);
            received.drain(..).for_each(|packet| self.pool.free(packet));
            if has_come {
                return Ok(Some(time));
            }
        }
        Ok(None)
    }
}

impl Sink {
    pub fn open(namespace: Namespace) -> Result<Sink, Error> {
        Ok(Sink { namespace })
    }

    /// Frames that its interface has received.
    fn received(&self) -> Result<u64, Error> {
        let read = || fs::read_to_string("/proc/thread-self/net/dev");
        let text = within(&self.namespace, read)?.map_err(system("reading /proc/thread-self/net/dev"))?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix(PORTS[1])?.strip_prefix(':'));
        let packets = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        packets.ok_or_else(|| system("reading /proc/thread-self/net/dev")(std::io::ErrorKind::InvalidData.into()))
    }
}

/// Runs on the first processor, on a thread of its own.
fn on_first<T: Send>(run: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let pinned = || {
            pin(false);
            black_box(run())
        };
        scope.spawn(pinned).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A UDP datagram without a checksum, as long as can be.
fn frame(from: MacAddress, to: MacAddress, destination: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &[0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    frame.extend(HOSTS[0].addr().octets());
    frame.extend(destination.octets());
    frame.extend([0x40, 0, 0, 9, 0, 0, 0, 0]);
    frame.resize(14 + 1500, 0);
    frame
}

/// Sets lengths, and the checksum that covers one.
fn fit(frame: &mut [u8], bytes: usize) {
    let upper = (bytes - 14 - ipv4::HEADER_BYTES) as u16;
    frame[16..18].copy_from_slice(&((bytes - 14) as u16).to_be_bytes());
    frame[38..40].copy_from_slice(&upper.to_be_bytes());
    if let Ok(mut packet) = ipv4::Packet::new_checked(&mut frame[14..]) {
        packet.fill_checksum();
    }
}
