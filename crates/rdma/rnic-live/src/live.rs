//! The engine in real time.

use std::time::{Duration, Instant};

use rnic::nic::{CqNumber, HostMemory, Nic, NicError, Profile, ProfileError};
use rnic::verbs::{Access, Address, Completion, Mtu, QpAttributes, QpState};
use rnic::wire::{HEADER_BYTES_MAX, ICRC_BYTES, PACKET_BYTES_MAX, PAYLOAD_BYTES_MAX, Packet, Psn, QpNumber};
use sim::Time;
use thiserror::Error;

use crate::wire::{Arrival, Wire, WireError};

/// Packets that a turn takes in, at most, before it sends; and that it sends before it looks again.
const TURN_PACKETS: usize = 64;
/// How long who waits for a completion looks on before it sleeps: some round trips, and less than a sleep costs.
const SPIN_DEFAULT: Duration = Duration::from_micros(50);
/// Looks between two yields of the processor.
const LOOKS_PER_YIELD: u32 = 16;
const PS_PER_NS: u128 = 1000;

/// Why a live NIC cannot go on.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The wire is of no use any more.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A verb that cannot be done.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// No such kind of NIC.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Packets that never reached the engine; its own drops are in [`rnic::nic::Counters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounters {
    /// Bytes that were no packet.
    pub drop_malformed: u64,
    /// Packets whose checksum was wrong.
    pub drop_checksum: u64,
}

/// A NIC on a wire. It does something whenever it is given a turn; whoever waits for a completion gives it turns.
///
/// One thread has it at a time. A program that lets peers read and write its memory while it does something else gives
/// it to a thread that calls [`Live::work`].
pub struct Live<W, M> {
    nic: Nic<M>,
    wire: W,
    began: Instant,
    spin: Duration,
    buffer: Box<[u8]>,
    /// A packet that found no room on the wire: to whom, and where it lies in the buffer.
    unsent: Option<(Address, std::ops::Range<usize>)>,
    counters: WireCounters,
}

impl<W: Wire, M: HostMemory<Payload = [u8]>> Live<W, M> {
    /// A NIC of this kind, with its host's memory, on a wire.
    ///
    /// # Errors
    /// When there can be no such NIC.
    pub fn new(profile: Profile, memory: M, wire: W, seed: u64) -> Result<Self, LiveError> {
        Ok(Self {
            nic: Nic::new(profile, memory, seed)?,
            wire,
            began: Instant::now(),
            spin: SPIN_DEFAULT,
            // A payload is put where the longest headers may stand before it.
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
            unsent: None,
            counters: WireCounters::default(),
        })
    }

    /// Begins anew with another NIC, of which nobody knows anything yet, on the same wire. Time is 0 again, and lasts
    /// for 213 days.
    ///
    /// # Errors
    /// When there can be no such NIC; it goes on with the one that it had.
    pub fn renew(&mut self, profile: Profile, memory: M, seed: u64) -> Result<(), LiveError> {
        self.nic = Nic::new(profile, memory, seed)?;
        (self.began, self.unsent) = (Instant::now(), None);
        Ok(())
    }

    /// Sets how long waiting looks on before it sleeps; nothing at all is fine.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// The time of the engine's calls.
    pub fn now(&self) -> Time {
        time(self.began.elapsed())
    }

    /// The NIC.
    pub fn nic(&self) -> &Nic<M> {
        &self.nic
    }

    /// The NIC, for verbs. What they begin goes on with the next turn.
    pub fn nic_mut(&mut self) -> &mut Nic<M> {
        &mut self.nic
    }

    /// The wire.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// The wire, for new peers.
    pub fn wire_mut(&mut self) -> &mut W {
        &mut self.wire
    }

    /// Packets that never reached the engine.
    pub fn counters(&self) -> WireCounters {
        self.counters
    }

    /// Sends what was posted, up to a bound, and looks at nothing that came. Says whether anything left.
    ///
    /// # Errors
    /// When the wire is of no use any more.
    pub fn transmit(&mut self) -> Result<bool, LiveError> {
        self.send()
    }

    /// Sends what was posted, takes in what came, does what is due, and sends what follows from that, acknowledgements
    /// above all; each up to a bound. Says whether there was anything.
    ///
    /// # Errors
    /// When the wire is of no use any more.
    pub fn turn(&mut self) -> Result<bool, LiveError> {
        let mut is_busy = self.send()?;
        is_busy |= self.take_in()?;
        let now = self.now();
        if self.nic.deadline().is_some_and(|due| due <= now) {
            self.nic.advance(now);
            is_busy = true;
        }
        is_busy |= self.send()?;
        Ok(is_busy)
    }

    fn take_in(&mut self) -> Result<bool, LiveError> {
        for taken in 0..TURN_PACKETS {
            let Some(arrival) = self.wire.receive()? else { return Ok(taken > 0) };
            match check(&arrival) {
                Ok(packet) => {
                    let now = time(self.began.elapsed());
                    self.nic.receive(now, arrival.from, packet.header(), arrival.is_marked, packet.payload());
                }
                Err(Dropped::Malformed) => self.counters.drop_malformed += 1,
                Err(Dropped::Checksum) => self.counters.drop_checksum += 1,
            }
        }
        Ok(true)
    }

    /// Whether anything left.
    fn send(&mut self) -> Result<bool, LiveError> {
        let mut sent = 0;
        while sent < TURN_PACKETS {
            if self.unsent.is_none() {
                self.unsent = self.next_packet()?;
            }
            let Some((to, range)) = self.unsent.clone() else { break };
            if !self.wire.send(to, &self.buffer[range])? {
                break;
            }
            self.unsent = None;
            sent += 1;
        }
        self.wire.flush()?;
        Ok(sent > 0)
    }

    /// The engine's next packet, whole.
    fn next_packet(&mut self) -> Result<Option<(Address, std::ops::Range<usize>)>, LiveError> {
        let now = self.now();
        let room = &mut self.buffer[HEADER_BYTES_MAX..HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX];
        let Some(outgoing) = self.nic.transmit(now, room) else { return Ok(None) };
        let header = outgoing.header;
        let first = HEADER_BYTES_MAX - header.header_bytes();
        let range = first..first + header.packet_bytes();
        let packet = &mut self.buffer[range.clone()];
        header.emit(packet).expect("the engine's headers go together");
        header.seal(packet, self.wire.datagram(outgoing.to)?.as_ref());
        Ok(Some((outgoing.to, range)))
    }

    /// Sleeps until something comes or is due, or for so long at most.
    ///
    /// # Errors
    /// When the wire is of no use any more.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), LiveError> {
        let due = self.nic.deadline().map(|due| Duration::from_nanos(due.since(self.now()).ps().div_ceil(1000)));
        let limit = due.into_iter().chain(limit).min();
        Ok(self.wire.wait(limit)?)
    }

    /// Works until `until` says that it is enough: it is asked after each turn in which something happened, and before
    /// each sleep. Without anything to do the thread looks on for a while, then sleeps.
    ///
    /// # Errors
    /// When the wire is of no use any more, or what `until` says.
    pub fn work<T>(
        &mut self,
        limit: Option<Duration>,
        mut until: impl FnMut(&mut Nic<M>) -> Result<Option<T>, NicError>,
    ) -> Result<Option<T>, LiveError> {
        let began = Instant::now();
        let mut idle_since: Option<Instant> = None;
        let mut looks = 0;
        loop {
            let is_busy = self.turn()?;
            if let Some(answer) = until(&mut self.nic)? {
                return Ok(Some(answer));
            }
            let now = Instant::now();
            let left = limit.map(|limit| limit.saturating_sub(now.duration_since(began)));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            if is_busy {
                idle_since = None;
                continue;
            }
            if now.duration_since(*idle_since.get_or_insert(now)) < self.spin {
                looks += 1;
                if looks % LOOKS_PER_YIELD == 0 {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            self.wait(left)?;
            idle_since = None;
        }
    }

    /// Waits for completions, for so long at most; gives how many there are, 0 when none came in time.
    ///
    /// # Errors
    /// When the wire or the completion queue is of no use any more.
    pub fn completions(
        &mut self,
        cq: CqNumber,
        into: &mut [Completion],
        limit: Option<Duration>,
    ) -> Result<usize, LiveError> {
        let polled = self.work(limit, |nic| {
            let count = nic.poll_cq(cq, into)?;
            Ok((count > 0).then_some(count))
        })?;
        Ok(polled.unwrap_or(0))
    }

    /// Brings a queue pair of RC from reset to ready-to-send.
    ///
    /// # Errors
    /// When it is in another state, or of another service.
    pub fn connect(&mut self, qp: QpNumber, connection: &Connection) -> Result<(), LiveError> {
        let now = self.now();
        for (state, attributes) in connection.steps() {
            self.nic.modify_qp(now, qp, state, &attributes)?;
        }
        Ok(())
    }
}

enum Dropped {
    Malformed,
    Checksum,
}

fn check<'a>(arrival: &Arrival<'a>) -> Result<Packet<'a>, Dropped> {
    let packet = Packet::new_checked(arrival.packet).map_err(|_| Dropped::Malformed)?;
    let is_intact = match &arrival.datagram {
        None => true,
        Some(datagram) if arrival.is_identified => packet.is_intact(datagram),
        Some(datagram) => packet.is_intact_for_any_identification(datagram),
    };
    if is_intact { Ok(packet) } else { Err(Dropped::Checksum) }
}

fn time(elapsed: Duration) -> Time {
    // 2^64 ps are 213 days: later, time stands still rather than go back.
    Time::from_ps(u64::try_from(elapsed.as_nanos() * PS_PER_NS).unwrap_or(u64::MAX))
}

/// What two ends of a reliable connection tell each other before, on a way of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Where the peer is.
    pub peer: Address,
    /// Its queue pair.
    pub destination: QpNumber,
    /// The number of its first packet.
    pub receive_psn: Psn,
    /// The number of this end's first packet.
    pub send_psn: Psn,
    /// The largest payload of a packet.
    pub mtu: Mtu,
    /// What the peer may do.
    pub access: Access,
    /// How long a policy without a patience of its own waits for an answer: 4.096 us x 2^code.
    pub ack_timer_code: u8,
}

/// READs and atomics at a time, each way.
const READS: u8 = 16;
/// 0.64 ms: IBA table 46.
const NOT_READY_TIMER_CODE: u8 = 12;
/// For [`Connection::ack_timer_code`]: 4.096 us x 2^14, 67 ms, as perftest asks for. Eight of them must outlast any
/// time for which a machine keeps the peer's thread from running: after 8 x 17 ms one was given up.
pub const ACK_TIMER_CODE: u8 = 14;
const RETRIES: u8 = 7;

impl Connection {
    fn steps(&self) -> [(QpState, QpAttributes); 3] {
        let init = QpAttributes {
            partition_index: Some(0),
            port: Some(1),
            access: Some(self.access),
            ..QpAttributes::default()
        };
        let receive = QpAttributes {
            path: Some(self.peer),
            mtu: Some(self.mtu),
            destination: Some(self.destination),
            receive_psn: Some(self.receive_psn),
            responder_reads_max: Some(READS),
            rnr_timer_code: Some(NOT_READY_TIMER_CODE),
            ..QpAttributes::default()
        };
        let send = QpAttributes {
            send_psn: Some(self.send_psn),
            initiator_reads_max: Some(READS),
            ack_timer_code: Some(self.ack_timer_code),
            retries: Some(RETRIES),
            rnr_retries: Some(RETRIES),
            ..QpAttributes::default()
        };
        [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)]
    }
}

const _: () = assert!(PACKET_BYTES_MAX == HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX + ICRC_BYTES);

#[cfg(test)]
mod tests {
    use rnic::nic::{ByteMemory, Policy};

    use super::*;
    use crate::Udp;

    #[test]
    fn time_that_has_ended_begins_anew_with_another_nic() {
        const YEAR: Duration = Duration::from_secs(365 * 86_400);
        let profile = || Profile::new(Policy::GoBackN);
        let wire = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut live = Live::new(profile(), ByteMemory::new(4096), wire, 1).unwrap();
        live.began = live.began.checked_sub(YEAR).unwrap();
        assert_eq!(live.now(), Time::MAX);
        let domain = live.nic_mut().allocate_domain().unwrap();
        live.renew(profile(), ByteMemory::new(4096), 2).unwrap();
        assert!(live.now() < time(YEAR / 2));
        assert_eq!(live.nic_mut().allocate_domain().unwrap(), domain, "of the one before nothing is left");
        assert!(!live.turn().unwrap());
    }
}
