//! What sends frames, and what counts or times those that arrive.

use std::collections::VecDeque;
use std::fs;
use std::hint::black_box;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use packet::ethernet::MacAddress;
use packet::{ipv4, ipv6};
use router::{Packet, Pool, Port};
use router_ports::{Interface, Namespace, PacketSocket};

use super::bed::{Destination, HOSTS, PORTS, pin, within};
use super::{Error, VERSIONS, Version, system};
use crate::clock::{Allowance, TrialClock};

/// Frames of one call.
const BURST: usize = 64;
const BUFFER_BYTES: u16 = 2048;
/// A frame that has not arrived by then is lost.
const PATIENCE: Duration = Duration::from_millis(100);
/// What is still under way when a round ends has this long to arrive; and again, as long as something does.
const SETTLING: Duration = Duration::from_millis(5);
const SETTLINGS_MAX: u32 = 20;
/// A frame's number, for those that are timed: as many bytes as the shortest frame of IPv6 has behind its headers.
const NUMBER_BYTES: usize = 6;
/// What a turn of the source takes at most: several times what the kernel needs for a frame all the way.
const ALLOWANCE: Allowance = Allowance { turn_ns: 10_000, packet_ns: 15_000 };
/// *Use for experimentation and testing* (RFC 3692): no header behind IPv6's, for which the shortest frame has no room.
const PROTOCOL_TEST: u8 = 253;

/// What is sent: frames of these lengths in turn, without check sequence, to all destinations of one family.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    pub version: Version,
    pub frame_bytes: &'a [usize],
}

/// What one round gave.
pub struct Round {
    pub arrived_mpps: f64,
    pub offered_mpps: f64,
}

/// How fast frames are sent, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub frames_per_s: f64,
    pub trial: Duration,
    /// Whether the source makes up for time that the machine took from it.
    pub counts_stalls: bool,
}

/// What became of them.
pub struct Paced {
    /// That were to be sent.
    pub due: u64,
    /// That were, in time.
    pub sent: u64,
    pub arrived: u64,
    /// The longest time that the machine took in one piece, in ns.
    pub stall_ns_max: u64,
}

/// One frame for each destination of a family.
struct Frames {
    /// Each as long as a frame can be.
    all: Vec<Frame>,
    at: usize,
}

struct Frame {
    bytes: Vec<u8>,
    /// What its headers say that it has.
    fitted_bytes: usize,
}

/// The sending end.
pub struct Source {
    port: PacketSocket,
    pool: Pool,
    /// By family.
    frames: [Frames; 2],
    /// Frames that were sent, for sizes to take turns.
    turns: usize,
    number: u64,
}

/// The receiving end.
pub struct Sink {
    namespace: Namespace,
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
            Frames { all: of_version.map(|address| Frame::new(mac, to, address)).collect(), at: 0 }
        });
        Ok(Source { port, pool: Pool::new(BURST as u32, BUFFER_BYTES, 0), frames, turns: 0, number: 0 })
    }

    /// The next frame, to the next destination.
    fn next(&mut self, load: Load) -> Option<Packet> {
        let bytes = load.frame_bytes[self.turns % load.frame_bytes.len()];
        let packet = self.pool.alloc_copy(self.frames[load.version as usize].next(bytes))?;
        self.turns += 1;
        Some(packet)
    }

    /// Sends so many frames, [`BURST`] at most. How many were sent: what the socket has no room for is given up.
    fn burst(&mut self, load: Load, frames: u64, queue: &mut VecDeque<Packet>) -> Result<u64, Error> {
        for _ in 0..frames.min(BURST as u64) {
            queue.extend(self.next(load));
        }
        let sent = self.port.transmit(&mut self.pool, queue).map_err(system("sending"))?;
        queue.drain(..).for_each(|packet| self.pool.free(packet));
        Ok(sent as u64)
    }

    /// Sends as fast as it goes for that long.
    pub fn overload(&mut self, load: Load, duration: Duration, sink: &Sink) -> Result<Round, Error> {
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
            Ok(Round { arrived_mpps: mpps(arrived), offered_mpps: mpps(sent) })
        })
    }

    /// Sends evenly.
    pub fn pace(&mut self, load: Load, pace: Pace, sink: &Sink) -> Result<Paced, Error> {
        on_first(|| {
            let before = sink.received(load.version)?;
            let mut clock = TrialClock::new(pace.trial, ALLOWANCE, pace.counts_stalls);
            let (mut queue, mut sent, mut last) = (VecDeque::with_capacity(BURST), 0, 0);
            // A trial that the machine stretched without end counts for what it was.
            while let Some(passed_ns) = clock.look(last) {
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
            Ok(Paced { due, sent, arrived, stall_ns_max: clock.stalled_ns().1 })
        })
    }

    /// Sends one by one, each when the one before has arrived or is lost.
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
        let place = at..at + NUMBER_BYTES;
        self.pool.bytes_mut(&packet)[place.clone()].copy_from_slice(number);
        let (mut queue, mut received) = (VecDeque::from([packet]), Vec::new());
        let begun = Instant::now();
        self.port.transmit(&mut self.pool, &mut queue).map_err(system("sending"))?;
        queue.drain(..).for_each(|packet| self.pool.free(packet));
        while begun.elapsed() < PATIENCE {
            receiver.receive(&mut self.pool, &mut received, BURST).map_err(system("receiving"))?;
            let time = begun.elapsed();
            let is_it = |packet: &Packet| self.pool.bytes(packet).get(place.clone()) == Some(number);
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

    /// How many of `sent` frames have arrived since there were `before`, once all have or no more come.
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

    /// Packets of the family that its kernel received for somebody else: those that were sent to be dropped here. What
    /// neighbours say to each other does not count.
    fn received(&self, version: Version) -> Result<u64, Error> {
        let (path, find): (_, fn(&str) -> Option<u64>) = match version {
            Version::V4 => ("/proc/thread-self/net/snmp", received_v4),
            Version::V6 => ("/proc/thread-self/net/snmp6", received_v6),
        };
        let text = within(&self.namespace, || fs::read_to_string(path))?.map_err(system("counting what arrives"))?;
        find(&text).ok_or_else(|| system("counting what arrives")(std::io::ErrorKind::InvalidData.into()))
    }
}

/// A line of names and one of values begin with `Ip:`. Nobody but the source sends IPv4 to the sink.
fn received_v4(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = lines.next().zip(lines.next())?;
    let mut both = names.split_whitespace().zip(values.split_whitespace());
    both.find(|(name, _)| *name == "InReceives")?.1.parse().ok()
}

/// A name and a value a line.
fn received_v6(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("Ip6InNoRoutes"))?;
    value.trim().parse().ok()
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

impl Frames {
    /// The next one, of that length.
    fn next(&mut self, bytes: usize) -> &[u8] {
        let count = self.all.len();
        let frame = &mut self.all[self.at];
        self.at = (self.at + 1) % count;
        frame.fit(bytes);
        &frame.bytes[..bytes]
    }
}

impl Frame {
    /// A UDP datagram without a checksum, or a packet of IPv6 for nobody's protocol.
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

    /// Sets lengths, and the checksum that covers one.
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
    /// Where a frame of it has its number.
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
    fn frames_of_both_families_are_intact_at_every_length() {
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
    fn what_arrives_is_read_from_the_kernels_counters() {
        let snmp = "Ip: Forwarding InReceives InHdrErrors\nIp: 2 17 0\nIcmp: InMsgs\nIcmp: 3\n";
        assert_eq!(received_v4(snmp), Some(17));
        assert_eq!(received_v6("Ip6InReceives   \t9\nIp6InNoRoutes          \t5\n"), Some(5));
        assert_eq!((received_v4(""), received_v6("")), (None, None));
    }
}
