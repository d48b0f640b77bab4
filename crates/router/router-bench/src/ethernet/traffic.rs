//! The source that sends frames, and the sink that counts or times those that arrive.

use std::collections::VecDeque;
use std::fs;
use std::hint::black_box;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use packet::ethernet::MacAddress;
use packet::{ipv4, ipv6};
use router::{Packet, Pool, Port};
use router_ports::{Interface, Namespace, PacketSocket};

use super::topology::{Destination, HOSTS, PORTS, within};
use super::{Error, VERSIONS, Version, system};
use crate::clock::{Allowance, TrialClock};
use crate::processor::pin_to_usable;

/// The largest number of frames sent in one call.
const BURST: usize = 64;
const BUFFER_BYTES: u16 = 2048;
/// A frame that has not arrived within this time counts as lost.
const ARRIVAL_TIMEOUT: Duration = Duration::from_millis(100);
/// The time that frames in flight at the end of a round have to arrive; it is repeated while frames arrive.
const SETTLING: Duration = Duration::from_millis(5);
const SETTLINGS_MAX: u32 = 20;
/// The length of the number in a timed frame: the bytes that the shortest IPv6 frame has after its headers.
const NUMBER_BYTES: usize = 6;
/// The longest time of an iteration of the source: several times what the kernel needs to carry a frame all the way.
const ALLOWANCE: Allowance = Allowance { iteration_ns: 10_000, packet_ns: 15_000 };
/// *Use for experimentation and testing* (RFC 3692): the shortest frame has no room for a transport header after the
/// IPv6 header.
const PROTOCOL_TEST: u8 = 253;

/// The traffic: frames of these lengths, used round robin, without check sequence, to all destinations of one family.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    pub version: Version,
    pub frame_bytes: &'a [usize],
}

/// The result of sending as fast as possible.
pub struct OverloadResult {
    pub arrived_mpps: f64,
    pub offered_mpps: f64,
}

/// The rate at which frames are sent, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct SendRate {
    pub frames_per_s: f64,
    pub trial: Duration,
    /// Whether the source makes up for the time of stalls.
    pub counts_stalls: bool,
}

/// The number of frames that were sent and that arrived at a rate.
pub struct PacedResult {
    /// Frames that were due.
    pub due: u64,
    /// Frames that were sent in time.
    pub sent: u64,
    pub arrived: u64,
    /// The longest stall, in ns.
    pub stall_ns_max: u64,
}

/// One frame for each destination of a family.
struct Frames {
    /// Frames in buffers of the maximum frame length.
    all: Vec<Frame>,
    next: usize,
}

struct Frame {
    bytes: Vec<u8>,
    /// The frame length for which the headers are set.
    fitted_bytes: usize,
}

/// The sender of frames.
pub struct Source {
    port: PacketSocket,
    pool: Pool,
    /// Frames for each family.
    frames: [Frames; 2],
    /// The number of frames sent, by which the next size is chosen.
    frames_sent: usize,
    number: u64,
}

/// The receiver of frames.
pub struct Sink {
    pub namespace: Namespace,
}

impl Source {
    pub fn open(namespace: Namespace, to: MacAddress, destinations: &[Destination]) -> Result<Source, Error> {
        let open = || -> Result<(PacketSocket, MacAddress), Error> {
            let interface = Interface::by_name(PORTS[0])?;
            let port = PacketSocket::open(&interface).map_err(system("a packet socket"))?;
            Ok((port, interface.mac))
        };
        let (port, mac) = within(&namespace, open)??;
        let frames = VERSIONS.map(|version| {
            let of_version = destinations.iter().map(|(_, address)| *address);
            let of_version = of_version.filter(|address| address.is_ipv6() == (version == Version::V6));
            Frames { all: of_version.map(|address| Frame::new(mac, to, address)).collect(), next: 0 }
        });
        Ok(Source { port, pool: Pool::new(BURST as u32, BUFFER_BYTES, 0), frames, frames_sent: 0, number: 0 })
    }

    /// Returns the next frame, to the next destination.
    fn next(&mut self, load: Load) -> Option<Packet> {
        let bytes = load.frame_bytes[self.frames_sent % load.frame_bytes.len()];
        let packet = self.pool.alloc_copy(self.frames[load.version as usize].next(bytes))?;
        self.frames_sent += 1;
        Some(packet)
    }

    /// Sends up to `frames` frames, [`BURST`] at most, and returns how many were sent. Frames for which the socket has
    /// no room are discarded.
    fn burst(&mut self, load: Load, frames: u64, queue: &mut VecDeque<Packet>) -> Result<u64, Error> {
        for _ in 0..frames.min(BURST as u64) {
            queue.extend(self.next(load));
        }
        let sent = self.port.transmit(&mut self.pool, queue).map_err(system("sending"))?;
        queue.drain(..).for_each(|packet| self.pool.free(packet));
        Ok(sent as u64)
    }

    /// Sends as fast as possible for `duration`.
    pub fn overload(&mut self, load: Load, duration: Duration, sink: &Sink) -> Result<OverloadResult, Error> {
        on_first(|| {
            let before = sink.received(load.version)?;
            let begun = Instant::now();
            let (mut queue, mut sent) = (VecDeque::with_capacity(BURST), 0);
            while begun.elapsed() < duration {
                sent += self.burst(load, BURST as u64, &mut queue)?;
            }
            let seconds = begun.elapsed().as_secs_f64();
            std::thread::sleep(SETTLING);
            let arrived = sink.received(load.version)? - before;
            let mpps = |frames: u64| frames as f64 / seconds / 1e6;
            Ok(OverloadResult { arrived_mpps: mpps(arrived), offered_mpps: mpps(sent) })
        })
    }

    /// Sends evenly at a rate.
    pub fn pace(&mut self, load: Load, pace: SendRate, sink: &Sink) -> Result<PacedResult, Error> {
        on_first(|| {
            let before = sink.received(load.version)?;
            let mut clock = TrialClock::new(pace.trial, ALLOWANCE, pace.counts_stalls);
            let (mut queue, mut sent, mut last) = (VecDeque::with_capacity(BURST), 0, 0);
            // A trial that was abandoned because of stalls counts with what was sent until then.
            while let Some(passed_ns) = clock.advance(last) {
                let due = (passed_ns as f64 * 1e-9 * pace.frames_per_s) as u64;
                last = if due > sent { self.burst(load, due - sent, &mut queue)? } else { 0 };
                sent += last;
                if clock.is_over(passed_ns) {
                    break;
                }
                std::hint::spin_loop();
            }
            let due = (pace.trial.as_secs_f64() * pace.frames_per_s) as u64;
            let arrived = sink.settle(load.version, before, sent)?;
            Ok(PacedResult { due, sent, arrived, stall_ns_max: clock.stalled_ns().1 })
        })
    }

    /// Sends frames one by one, each after the previous one has arrived or is lost.
    pub fn probe(&mut self, load: Load, count: usize, sink: &Sink) -> Result<Vec<Option<Duration>>, Error> {
        let open = || PacketSocket::open(&Interface::by_name(PORTS[1])?).map_err(system("a packet socket"));
        let mut receiver = within(&sink.namespace, open)??;
        on_first(|| (0..count).map(|_| self.probe_once(load, &mut receiver)).collect())
    }

    fn probe_once(&mut self, load: Load, receiver: &mut PacketSocket) -> Result<Option<Duration>, Error> {
        let Some(packet) = self.next(load) else { return Ok(None) };
        self.number += 1;
        let number = self.number.to_be_bytes();
        let (number, at) = (&number[number.len() - NUMBER_BYTES..], load.version.number_at());
        let range = at..at + NUMBER_BYTES;
        self.pool.bytes_mut(&packet)[range.clone()].copy_from_slice(number);
        let (mut queue, mut received) = (VecDeque::from([packet]), Vec::new());
        let begun = Instant::now();
        self.port.transmit(&mut self.pool, &mut queue).map_err(system("sending"))?;
        queue.drain(..).for_each(|packet| self.pool.free(packet));
        while begun.elapsed() < ARRIVAL_TIMEOUT {
            receiver.receive(&mut self.pool, &mut received, BURST).map_err(system("receiving"))?;
            let time = begun.elapsed();
            let is_it = |packet: &Packet| self.pool.bytes(packet).get(range.clone()) == Some(number);
            let has_arrived = received.iter().any(is_it);
            received.drain(..).for_each(|packet| self.pool.free(packet));
            if has_arrived {
                return Ok(Some(time));
            }
        }
        Ok(None)
    }
}

impl Sink {
    /// Returns how many of `sent` frames have arrived since the counter was `before`, after all have arrived or no more
    /// do.
    fn settle(&self, version: Version, before: u64, sent: u64) -> Result<u64, Error> {
        let mut arrived = self.received(version)? - before;
        for _ in 0..SETTLINGS_MAX {
            if arrived >= sent {
                break;
            }
            std::thread::sleep(SETTLING);
            let earlier = std::mem::replace(&mut arrived, self.received(version)? - before);
            if earlier == arrived {
                break;
            }
        }
        Ok(arrived)
    }

    /// Returns the number of packets of the family that the sink's kernel received and dropped for lack of a route.
    /// Neighbour discovery is not counted.
    fn received(&self, version: Version) -> Result<u64, Error> {
        let (path, find): (_, fn(&str) -> Option<u64>) = match version {
            Version::V4 => ("/proc/thread-self/net/snmp", received_v4),
            Version::V6 => ("/proc/thread-self/net/snmp6", received_v6),
        };
        let text = within(&self.namespace, || fs::read_to_string(path))?.map_err(system("counting what arrives"))?;
        find(&text).ok_or_else(|| system("counting what arrives")(std::io::ErrorKind::InvalidData.into()))
    }
}

/// Reads the counter from a line of names and a line of values, both beginning with `Ip:`. Only the source sends IPv4
/// to the sink.
fn received_v4(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = lines.next().zip(lines.next())?;
    let mut both = names.split_whitespace().zip(values.split_whitespace());
    both.find(|(name, _)| *name == "InReceives")?.1.parse().ok()
}

/// Reads the counter from lines of a name and a value.
fn received_v6(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("Ip6InNoRoutes"))?;
    value.trim().parse().ok()
}

/// Runs a closure on a separate thread on the first processor.
fn on_first<T: Send>(run: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let pinned = || {
            pin_to_usable(0);
            black_box(run())
        };
        scope.spawn(pinned).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Frames {
    /// Returns the next frame, with this length.
    fn next(&mut self, bytes: usize) -> &[u8] {
        let count = self.all.len();
        let frame = &mut self.all[self.next];
        self.next = (self.next + 1) % count;
        frame.fit(bytes);
        &frame.bytes[..bytes]
    }
}

impl Frame {
    /// Creates a UDP datagram without a checksum, or an IPv6 packet of an experimental protocol.
    fn new(from: MacAddress, to: MacAddress, destination: IpAddr) -> Frame {
        let mut bytes = [&to.0[..], &from.0].concat();
        match (HOSTS[0].map(|host| host.addr()), destination) {
            ([IpAddr::V4(source), _], IpAddr::V4(destination)) => {
                bytes.extend([0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0]);
                bytes.extend([source.octets(), destination.octets()].as_flattened());
                bytes.extend([0x40, 0, 0, 9, 0, 0, 0, 0]);
            }
            ([_, IpAddr::V6(source)], IpAddr::V6(destination)) => {
                bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, PROTOCOL_TEST, 64]);
                bytes.extend([source.octets(), destination.octets()].as_flattened());
            }
            _ => unreachable!("hosts have an address of each family, in this order"),
        }
        bytes.resize(14 + 1500, 0);
        Frame { bytes, fitted_bytes: 0 }
    }

    /// Sets the lengths in the headers, and the IPv4 header checksum.
    fn fit(&mut self, bytes: usize) {
        if std::mem::replace(&mut self.fitted_bytes, bytes) == bytes {
            return;
        }
        let (frame, packet_bytes) = (&mut self.bytes, bytes - 14);
        if frame[12] == 0x86 {
            frame[18..20].copy_from_slice(&((packet_bytes - ipv6::HEADER_BYTES) as u16).to_be_bytes());
            return;
        }
        frame[16..18].copy_from_slice(&(packet_bytes as u16).to_be_bytes());
        frame[38..40].copy_from_slice(&((packet_bytes - ipv4::HEADER_BYTES) as u16).to_be_bytes());
        if let Ok(mut packet) = ipv4::Packet::new_checked(&mut frame[14..]) {
            packet.fill_checksum();
        }
    }
}

impl Version {
    /// Returns the offset of the number in a frame of this family.
    fn number_at(self) -> usize {
        match self {
            Version::V4 => 14 + ipv4::HEADER_BYTES + 8,
            Version::V6 => 14 + ipv6::HEADER_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_both_families_are_valid_at_every_length() {
        let macs = [MacAddress([2; 6]), MacAddress([3; 6])];
        for destination in ["16.1.2.9", "3fff::9"].map(|text| text.parse().expect("an address")) {
            let mut frame = Frame::new(macs[0], macs[1], destination);
            for bytes in [60, 1514, 60, 590] {
                frame.fit(bytes);
                let packet = &frame.bytes[14..bytes];
                let (found, total): (IpAddr, usize) = if destination.is_ipv6() {
                    let view = ipv6::Packet::new_checked(packet).expect("a packet");
                    (view.destination().into(), view.total_bytes())
                } else {
                    let view = ipv4::Packet::new_checked(packet).expect("a packet");
                    assert!(view.verify_checksum());
                    (view.destination().into(), view.total_bytes())
                };
                assert_eq!((found, total), (destination, bytes - 14));
            }
        }
        assert!(VERSIONS.iter().all(|version| version.number_at() + NUMBER_BYTES <= 60));
    }

    #[test]
    fn arrived_packets_are_read_from_the_kernels_counters() {
        let snmp = "Ip: Forwarding InReceives InHdrErrors\nIp: 2 17 0\nIcmp: InMsgs\nIcmp: 3\n";
        assert_eq!(received_v4(snmp), Some(17));
        assert_eq!(received_v6("Ip6InReceives   \t9\nIp6InNoRoutes          \t5\n"), Some(5));
        assert_eq!((received_v4(""), received_v6("")), (None, None));
    }
}
