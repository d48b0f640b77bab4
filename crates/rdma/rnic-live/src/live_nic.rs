//! A NIC in real time: the engine, its packet I/O and a clock.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use rnic::nic::{CqNumber, HostMemory, Nic, NicError, NicProfile, ProfileError};
use rnic::verbs::{Completion, NicAddress, RcConnection};
use rnic::wire::{HEADER_BYTES_MAX, ICRC_BYTES, Operation, PACKET_BYTES_MAX, PAYLOAD_BYTES_MAX, Packet, QpNumber};
use sim::Time;
use thiserror::Error;
use wait::{Action, AdaptiveSpin, Spin};

use crate::packet_io::{PacketIo, PacketIoError, ReceivedPacket};

/// Most packets that a poll receives before it sends, and that it sends before it receives again.
const POLL_PACKETS_MAX: usize = 64;
/// The cost of a poll that finds nothing, in polls of a bare lane.
const POLLS_PER_POLL: u32 = 32;
/// The waits of all NICs of the process, as one site.
static WAITS: AdaptiveSpin = AdaptiveSpin::new();
const PS_PER_NS: u128 = 1000;

/// Why a live NIC cannot continue.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The packet I/O cannot continue.
    #[error(transparent)]
    PacketIo(#[from] PacketIoError),
    /// The NIC refused a verb.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// The NIC profile is invalid.
    #[error(transparent)]
    NicProfile(#[from] ProfileError),
}

/// Received packets dropped before they reached the engine. The engine counts its own drops in
/// [`rnic::nic::NicCounters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveDrops {
    /// Datagrams that are not a valid packet.
    pub drop_malformed: u64,
    /// Packets with a wrong checksum.
    pub drop_checksum: u64,
}

/// A NIC with its packet I/O. It makes progress only in [`LiveNic::poll`], which waiting for a completion calls.
///
/// One thread uses it at a time. A program that lets peers read and write its memory while it does something else gives
/// the NIC to a thread that calls [`LiveNic::run_until`].
pub struct LiveNic<W, M> {
    nic: Nic<M>,
    io: W,
    started: Instant,
    spins: bool,
    buffer: Box<[u8]>,
    /// A packet for which the packet I/O had no room: its destination and its range in the buffer.
    unsent: Option<(NicAddress, Range<usize>)>,
    /// Whether acknowledgements wait for the program's next call, and follow its requests.
    delays_acks: bool,
    /// Acknowledgements behind the requests of a call.
    acks: VecDeque<Ack>,
    drops: ReceiveDrops,
}

/// An acknowledgement that is ready to be sent.
struct Ack {
    to: NicAddress,
    packet: [u8; HEADER_BYTES_MAX + ICRC_BYTES],
    packet_bytes: usize,
}

impl<W: PacketIo, M: HostMemory<Payload = [u8]>> LiveNic<W, M> {
    /// Creates a NIC with this profile, host memory and packet I/O.
    ///
    /// # Errors
    /// When the profile is invalid.
    pub fn new(profile: NicProfile, memory: M, io: W, seed: u64) -> Result<Self, LiveError> {
        Ok(Self {
            nic: Nic::new(profile, memory, seed)?,
            io,
            started: Instant::now(),
            spins: true,
            // A payload is placed so that the longest headers fit before it.
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
            unsent: None,
            delays_acks: false,
            acks: VecDeque::new(),
            drops: ReceiveDrops::default(),
        })
    }

    /// Replaces the NIC by a new one without queue pairs, on the same packet I/O. Its time starts at 0 again, which
    /// lasts for 213 days.
    ///
    /// # Errors
    /// When the profile is invalid. The old NIC is then kept.
    pub fn replace_nic(&mut self, profile: NicProfile, memory: M, seed: u64) -> Result<(), LiveError> {
        self.nic = Nic::new(profile, memory, seed)?;
        (self.started, self.unsent) = (Instant::now(), None);
        self.acks.clear();
        Ok(())
    }

    /// Sets whether waits spin before they block, as [`wait::spin`] describes; they do at first.
    pub fn set_spins(&mut self, spins: bool) {
        self.spins = spins;
    }

    /// Sets whether acknowledgements of what completes a wait leave with the next call, behind the requests that the
    /// program has posted meanwhile: an answer then arrives sooner, and shares its datagram with the acknowledgement
    /// where the packet I/O segments. For programs that call again at once, as an event loop does. The peer of one that
    /// does something else first, or never calls again, sends once more or gives up.
    pub fn set_delayed_acks(&mut self, delays_acks: bool) {
        self.delays_acks = delays_acks;
    }

    /// Returns the time to pass to the engine.
    pub fn now(&self) -> Time {
        time(self.started.elapsed())
    }

    /// Returns the NIC.
    pub fn nic(&self) -> &Nic<M> {
        &self.nic
    }

    /// Returns the NIC, for verbs. Posted requests are processed by the next poll.
    pub fn nic_mut(&mut self) -> &mut Nic<M> {
        &mut self.nic
    }

    /// Returns the packet I/O.
    pub fn io(&self) -> &W {
        &self.io
    }

    /// Returns the packet I/O, for adding peers.
    pub fn io_mut(&mut self) -> &mut W {
        &mut self.io
    }

    /// Returns the number of received packets dropped before they reached the engine.
    pub fn receive_drops(&self) -> ReceiveDrops {
        self.drops
    }

    /// Sends packets of posted requests, handles received packets and due timers, and sends what results from them,
    /// above all acknowledgements; each up to a bound. Returns whether there was anything to do.
    ///
    /// # Errors
    /// When the packet I/O cannot continue.
    pub fn poll(&mut self) -> Result<bool, LiveError> {
        let now = self.now();
        let is_busy = self.poll_without_results(now)?;
        Ok(self.transmit_at(now)? | is_busy)
    }

    /// As [`LiveNic::poll`], but does not send what results from what was handled. The clock is read once a poll: five
    /// readings were a third of one that found nothing.
    fn poll_without_results(&mut self, now: Time) -> Result<bool, LiveError> {
        let mut is_busy = self.transmit_at(now)?;
        is_busy |= self.receive_packets(now)?;
        if self.nic.deadline().is_some_and(|due| due <= now) {
            self.nic.advance(now);
            is_busy = true;
        }
        Ok(is_busy)
    }

    fn receive_packets(&mut self, now: Time) -> Result<bool, LiveError> {
        for taken in 0..POLL_PACKETS_MAX {
            let Some(received) = self.io.receive()? else { return Ok(taken > 0) };
            match verify(&received) {
                Ok(packet) => {
                    self.nic.receive(now, received.from, packet.header(), received.is_marked, packet.payload());
                }
                Err(DropReason::Malformed) => self.drops.drop_malformed += 1,
                Err(DropReason::Checksum) => self.drops.drop_checksum += 1,
            }
        }
        Ok(true)
    }

    /// Sends packets of posted requests, up to a bound, without receiving any. Returns whether a packet was sent.
    ///
    /// # Errors
    /// When the packet I/O cannot continue.
    pub fn transmit(&mut self) -> Result<bool, LiveError> {
        self.transmit_at(self.now())
    }

    fn transmit_at(&mut self, now: Time) -> Result<bool, LiveError> {
        let mut sent = 0;
        while sent < POLL_PACKETS_MAX {
            if self.unsent.is_none() {
                self.unsent = self.next_packet(now)?;
            }
            let Some((to, range)) = self.unsent.clone() else { break };
            if !self.io.send(to, &self.buffer[range])? {
                break;
            }
            self.unsent = None;
            sent += 1;
        }
        self.io.flush()?;
        Ok(sent > 0)
    }

    /// Takes the next packet to send, and places it in the buffer.
    fn next_packet(&mut self, now: Time) -> Result<Option<(NicAddress, Range<usize>)>, LiveError> {
        while let Some((to, range, is_ack)) = self.next_of_engine(now)? {
            if !(is_ack && self.delays_acks && self.acks.len() < POLL_PACKETS_MAX) {
                return Ok(Some((to, range)));
            }
            let mut ack = Ack { to, packet: [0; HEADER_BYTES_MAX + ICRC_BYTES], packet_bytes: range.len() };
            ack.packet[..range.len()].copy_from_slice(&self.buffer[range]);
            self.acks.push_back(ack);
        }
        Ok(self.acks.pop_front().map(|ack| {
            let range = 0..ack.packet_bytes;
            self.buffer[range.clone()].copy_from_slice(&ack.packet[range.clone()]);
            (ack.to, range)
        }))
    }

    /// Takes the engine's next packet and completes its headers and checksum in the buffer. Returns whether it is an
    /// acknowledgement.
    fn next_of_engine(&mut self, now: Time) -> Result<Option<(NicAddress, Range<usize>, bool)>, LiveError> {
        let room = &mut self.buffer[HEADER_BYTES_MAX..HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX];
        let Some(outgoing) = self.nic.transmit(now, room) else { return Ok(None) };
        let header = outgoing.header;
        let first = HEADER_BYTES_MAX - header.header_bytes();
        let range = first..first + header.packet_bytes();
        let packet = &mut self.buffer[range.clone()];
        header.emit(packet).expect("the engine's headers are consistent");
        header.seal(packet, self.io.encapsulation(outgoing.to)?.as_ref());
        Ok(Some((outgoing.to, range, header.operation == Operation::Acknowledge)))
    }

    /// Blocks until a packet arrives, a timer is due, or `limit` has passed.
    ///
    /// # Errors
    /// When the packet I/O cannot continue.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), LiveError> {
        let due = self.nic.deadline().map(|due| Duration::from_nanos(due.since(self.now()).ps().div_ceil(1000)));
        let limit = due.into_iter().chain(limit).min();
        Ok(self.io.wait(limit)?)
    }

    /// Polls until `until` returns a value, which this returns, or until `limit` has passed, and then returns `None`.
    ///
    /// `until` is called after each poll. When there is nothing to do, the thread spins for a while, then blocks
    /// ([`wait::spin`]).
    ///
    /// # Errors
    /// When the packet I/O cannot continue or `until` fails.
    pub fn run_until<T>(
        &mut self,
        limit: Option<Duration>,
        mut until: impl FnMut(&mut Nic<M>) -> Result<Option<T>, NicError>,
    ) -> Result<Option<T>, LiveError> {
        let deadline = limit.map(|limit| self.started.elapsed().saturating_add(limit));
        let mut spin = Spin::with(&WAITS);
        loop {
            let elapsed = self.started.elapsed();
            let now = time(elapsed);
            let mut is_busy = self.poll_without_results(now)?;
            if !self.delays_acks {
                is_busy |= self.transmit_at(now)?;
            }
            if let Some(value) = until(&mut self.nic)? {
                return Ok(Some(value));
            }
            if self.delays_acks {
                is_busy |= self.transmit_at(now)?;
            }
            let left = deadline.map(|deadline| deadline.saturating_sub(elapsed));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            if is_busy {
                spin = Spin::with(&WAITS);
            } else if !self.spins || spin.iterate_by(POLLS_PER_POLL) == Action::Block {
                self.wait(left)?;
                spin = Spin::with(&WAITS);
            }
        }
    }

    /// Waits for completions for at most `limit`. Returns their number, 0 if there were none in time.
    ///
    /// # Errors
    /// When the packet I/O cannot continue or the completion queue cannot be polled.
    pub fn wait_completions(
        &mut self,
        cq: CqNumber,
        into: &mut [Completion],
        limit: Option<Duration>,
    ) -> Result<usize, LiveError> {
        let polled = self.run_until(limit, |nic| {
            let count = nic.poll_cq(cq, into)?;
            Ok((count > 0).then_some(count))
        })?;
        Ok(polled.unwrap_or(0))
    }

    /// Brings an RC queue pair from reset to ready-to-send.
    ///
    /// # Errors
    /// When it is in another state or of another service.
    pub fn connect(&mut self, qp: QpNumber, connection: &RcConnection) -> Result<(), LiveError> {
        let now = self.now();
        for (state, attributes) in connection.transitions() {
            self.nic.modify_qp(now, qp, state, &attributes)?;
        }
        Ok(())
    }
}

enum DropReason {
    Malformed,
    Checksum,
}

fn verify<'a>(received: &ReceivedPacket<'a>) -> Result<Packet<'a>, DropReason> {
    let packet = Packet::new_checked(received.packet).map_err(|_| DropReason::Malformed)?;
    let is_intact = match &received.encapsulation {
        None => true,
        Some(encapsulation) if received.has_identification => packet.is_intact(encapsulation),
        Some(encapsulation) => packet.is_intact_for_any_identification(encapsulation),
    };
    if is_intact { Ok(packet) } else { Err(DropReason::Checksum) }
}

fn time(elapsed: Duration) -> Time {
    // 2^64 ps are 213 days: after that, time stands still instead of going back.
    Time::from_ps(u64::try_from(elapsed.as_nanos() * PS_PER_NS).unwrap_or(u64::MAX))
}

/// RNR NAK timer of 0.64 ms (InfiniBand Architecture, table 46), a usual value of [`RcConnection::rnr_timer_code`].
pub const RNR_TIMER_CODE: u8 = 12;
/// A usual value of [`RcConnection::ack_timer_code`]: 4.096 us x 2^14, 67 ms, which perftest uses. Eight time-outs must
/// exceed any time for which the scheduler keeps the peer's thread from running: with 8 x 17 ms a connection failed
/// once.
pub const ACK_TIMER_CODE: u8 = 14;

const _: () = assert!(PACKET_BYTES_MAX == HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX + ICRC_BYTES);

#[cfg(test)]
mod tests {
    use rnic::nic::{ByteMemory, TransportPolicy};

    use super::*;
    use crate::UdpIo;

    #[test]
    fn replacing_the_nic_restarts_its_time() {
        const YEAR: Duration = Duration::from_secs(365 * 86_400);
        let profile = || NicProfile::new(TransportPolicy::GoBackN);
        let wire = UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut live = LiveNic::new(profile(), ByteMemory::new(4096), wire, 1).unwrap();
        live.started = live.started.checked_sub(YEAR).unwrap();
        assert_eq!(live.now(), Time::MAX);
        let domain = live.nic_mut().allocate_domain().unwrap();
        live.replace_nic(profile(), ByteMemory::new(4096), 2).unwrap();
        assert!(live.now() < time(YEAR / 2));
        assert_eq!(live.nic_mut().allocate_domain().unwrap(), domain, "the new NIC has no protection domain yet");
        assert!(!live.poll().unwrap());
    }
}
