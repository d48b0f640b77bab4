//! A proof by the bytes of the connection: that the peer has seen what this endpoint sends, or has sent what it
//! receives, since the two have met.
//!
//! In another network namespace, the kernel does not tell who has a socket, and who has configured the addresses there.
//! So both endpoints keep the bytes that they send and receive for a few transfers, and compare a few of each stream by
//! a keyed hash, outside of the TCP connection. The key comes from the two random numbers of the meeting, so that no
//! hash is valid for another one, and a claim and its echo have different hashes.
//!
//! ```text
//! connecting endpoint                        accepting endpoint
//!   Claim: hashes of two samples, one of  ──►  compares them with what it has received and sent:
//!   what it has sent, one of what it has       ◄── Echo: its own hashes of the same samples; it has its proof
//!   received                                   ◄── Again: it has no longer, or not yet, what was claimed
//!   compares: it has its proof                 no: they differ, or it has waited in vain
//! ```
//!
//! A sample is the last part of what has passed. A receiver that has not got that far waits until the sample arrives.
//! An endpoint that does not have the bytes any more asks for a sample at a later position, which both then keep. Each
//! further request doubles the distance to that position, until the message arrives before the bytes do.
//!
//! What the proof cannot exclude: a relay that passes on each byte and configures exactly the same addresses, and a
//! peer that can guess the bytes. Both must be users whom the rules of the rack allow.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::SendFlags;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::bell;
use crate::counts::{Counts, Role};
use crate::message::{self, Kind, MESSAGE_BYTES};
use crate::reason::Reason;
use crate::receive::{discard, receive_bytes};

/// Most bytes of a sample.
const SAMPLE_BYTES_MAX: usize = 256;
/// Bytes of each stream that an endpoint keeps.
const TAIL_BYTES: usize = 16 << 10;
/// Maximum number of claims. Each later one is about bytes at twice the distance.
const CLAIMS_MAX: u32 = 8;
/// Number of transfers after which an endpoint checks whether a sample at a later position is worth waiting for.
const WAITS: u32 = 8;
/// A connection that carries less meanwhile is quiet: each endpoint has its last bytes for a while.
const QUIET_BYTES: u64 = TAIL_BYTES as u64 / 2;
/// Maximum number of transfers during which an endpoint waits for the other one.
const TRANSFERS_MAX: u32 = 256;

const MAGIC: [u8; 8] = *b"xl-bytes";
const VERSION: u16 = 1;

/// The two streams of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// What this endpoint sends.
    Sent,
    /// What this endpoint receives.
    Received,
}

/// The result of a step of a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes have to pass, or the peer has to answer.
    Waiting,
    /// The peer is the other endpoint.
    Proven,
    /// It is not, or has not shown it in time. This is final.
    Refused(Reason),
    /// The peer has refused, for a reason of its own. This is final.
    Declined(Reason),
}

/// The last bytes of a stream.
#[derive(Debug, Default)]
struct StreamTail {
    /// The number of bytes of the stream so far.
    position: u64,
    last: VecDeque<u8>,
    /// Bytes that are kept beyond that, from a position on.
    kept: Option<(u64, Vec<u8>)>,
}

impl StreamTail {
    fn at(position: u64) -> Self {
        Self { position, ..Self::default() }
    }

    /// Adds bytes, of which `copy` gives those behind an offset.
    fn append(&mut self, bytes: usize, copy: &mut dyn FnMut(usize, &mut [u8])) {
        if let Some((start, kept)) = &mut self.kept {
            let wanted = *start + kept.len() as u64;
            let offset = wanted.saturating_sub(self.position) as usize;
            if offset < bytes && kept.len() < SAMPLE_BYTES_MAX {
                let mut part = vec![0; (bytes - offset).min(SAMPLE_BYTES_MAX - kept.len())];
                copy(offset, &mut part);
                kept.extend(part);
            }
        }
        let mut tail = vec![0; bytes.min(TAIL_BYTES)];
        copy(bytes - tail.len(), &mut tail);
        self.last.extend(tail);
        self.last.drain(..self.last.len().saturating_sub(TAIL_BYTES));
        self.position += bytes as u64;
    }

    /// Keeps a sample from a position on, which has not passed yet or is still there.
    fn keep(&mut self, start: u64) {
        let known = self.copy(start..self.position.min(start + SAMPLE_BYTES_MAX as u64)).unwrap_or_default();
        self.kept = Some((start, known));
    }

    /// Returns the bytes of a range, if they are there.
    fn copy(&self, range: Range<u64>) -> Option<Vec<u8>> {
        let from = |start: u64, bytes: &mut dyn Iterator<Item = u8>, length: usize| {
            let skip = usize::try_from(range.start.checked_sub(start)?).ok()?;
            let count = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
            (skip.checked_add(count)? <= length).then(|| bytes.skip(skip).take(count).collect())
        };
        let of_last = || from(self.position - self.last.len() as u64, &mut self.last.iter().copied(), self.last.len());
        let of_kept = || {
            let (start, kept) = self.kept.as_ref()?;
            from(*start, &mut kept.iter().copied(), kept.len())
        };
        of_last().or_else(of_kept)
    }

    /// Returns the range of the best sample: what was to be kept, or the last bytes.
    fn sample(&self) -> Range<u64> {
        match &self.kept {
            Some((start, kept)) => *start..*start + kept.len() as u64,
            None => self.position - self.last.len().min(SAMPLE_BYTES_MAX) as u64..self.position,
        }
    }
}

/// A sample of a stream: where it is, and its keyed hash.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sample {
    range: Range<u64>,
    hash: [u8; 16],
}

/// Whether a message of samples is the connecting endpoint's or the accepting endpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Claim,
    Echo,
}

/// What an endpoint says. Streams are named as the connecting endpoint does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Message {
    Samples(Side, [Sample; 2]),
    /// The next claim is to be about the bytes of a stream from a position on.
    Again(Stream, u64),
}

/// What a comparison has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Equal,
    Different,
    /// The bytes have not arrived yet.
    Early,
    /// The bytes were not kept.
    Late,
}

/// One endpoint's side of the proof.
#[derive(Debug)]
pub struct Prover {
    role: Role,
    key: [u8; 16],
    /// What this endpoint sends and receives.
    tails: [StreamTail; 2],
    /// The claim that has no answer yet: of the connecting endpoint its own, with the bytes; of the accepting endpoint
    /// the peer's.
    open: Option<[Sample; 2]>,
    claimed: [Vec<u8>; 2],
    claims: u32,
    /// Transfers since a sample farther on is awaited.
    waits: u32,
    /// Bytes of both streams when that was last checked.
    passed: u64,
    transfers: u32,
    has_missed_bytes: bool,
}

impl Prover {
    /// Returns the side of an endpoint, whose next bytes follow those that it has counted. The secrets are those of the
    /// connecting and of the accepting endpoint.
    pub fn new(role: Role, secrets: [u64; 2], counts: &Counts) -> Self {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&secrets[0].to_ne_bytes());
        key[8..].copy_from_slice(&secrets[1].to_ne_bytes());
        let tails = [StreamTail::at(counts.written), StreamTail::at(counts.consumed)];
        let (open, claimed) = (None, [Vec::new(), Vec::new()]);
        Self { role, key, tails, open, claimed, claims: 0, waits: 0, passed: 0, transfers: 0, has_missed_bytes: false }
    }

    /// Notes bytes that have passed, of which `copy` gives those behind an offset.
    pub fn note(&mut self, stream: Stream, bytes: usize, copy: &mut dyn FnMut(usize, &mut [u8])) {
        self.transfers += 1;
        self.tails[stream as usize].append(bytes, copy);
    }

    /// Notes that bytes have passed of which nobody knows what they are, or in which order.
    pub fn note_missed(&mut self) {
        self.transfers += 1;
        self.has_missed_bytes = true;
    }

    /// Proceeds as far as is possible without blocking. `counts` are this endpoint's present counts, by which it knows
    /// whether it has seen all bytes.
    pub fn advance(&mut self, bell: BorrowedFd<'_>, counts: impl FnOnce() -> Option<Counts>) -> Progress {
        let progress = self.step(bell, counts);
        if let Progress::Refused(reason) = progress {
            bell::tell(bell, self.role, reason);
        }
        progress
    }

    fn step(&mut self, bell: BorrowedFd<'_>, counts: impl FnOnce() -> Option<Counts>) -> Progress {
        if self.transfers > TRANSFERS_MAX || self.claims > CLAIMS_MAX {
            return Progress::Refused(Reason::NoProof);
        }
        let received = match self.role {
            Role::Accepted if self.open.is_some() => None,
            Role::Connected if self.open.is_none() => None,
            _ => match receive(bell) {
                Ok(Received::Nothing) => return Progress::Waiting,
                Ok(Received::No(reason)) => return Progress::Declined(reason),
                Ok(Received::Message(message)) => Some(message),
                Err(reason) => return Progress::Refused(reason),
            },
        };
        let (answer, progress) = match self.role {
            Role::Connected => self.advance_connected(received, counts),
            Role::Accepted => self.advance_accepted(received, counts),
        };
        match answer.map_or(Ok(()), |answer| send(bell, &answer)) {
            Ok(()) => progress,
            // It may have said why.
            Err(Reason::Gone) => match receive(bell) {
                Ok(Received::No(reason)) => Progress::Declined(reason),
                _ => Progress::Refused(Reason::Gone),
            },
            Err(reason) => Progress::Refused(reason),
        }
    }

    fn advance_connected(
        &mut self,
        received: Option<Message>,
        counts: impl FnOnce() -> Option<Counts>,
    ) -> (Option<Message>, Progress) {
        match received {
            Some(Message::Samples(Side::Echo, echo)) => {
                let claimed = self.open.take().unwrap_or_else(|| [Sample::none(), Sample::none()]);
                let is_same = |index: usize| {
                    let range = claimed[index].range.clone();
                    !range.is_empty()
                        && echo[index] == self.hashed(Side::Echo, stream_at(index), range, &self.claimed[index])
                };
                // The peer may not have one of the two samples any more.
                let is_either = |index: usize| is_same(index) || echo[index] == Sample::none();
                let is_proof = (is_same(0) || is_same(1)) && is_either(0) && is_either(1);
                return (None, if is_proof { Progress::Proven } else { Progress::Refused(Reason::NoProof) });
            }
            Some(Message::Again(stream, position)) => {
                (self.open, self.waits, self.passed) = (None, 0, self.position_of_both());
                self.tails.iter_mut().for_each(|tail| tail.kept = None);
                let tail = &mut self.tails[stream as usize];
                // If that has passed long ago, the peer is far behind, and waits for what comes now.
                if tail.position <= position || tail.copy(position..tail.position).is_some() {
                    tail.keep(position);
                }
            }
            Some(Message::Samples(Side::Claim, _)) => {
                return (None, Progress::Refused(Reason::Malformed));
            }
            None => {}
        }
        (self.claim(counts), Progress::Waiting)
    }

    /// Returns how many bytes have passed in both directions.
    fn position_of_both(&self) -> u64 {
        self.tails[0].position + self.tails[1].position
    }

    /// Returns a claim if there are bytes for it.
    fn claim(&mut self, counts: impl FnOnce() -> Option<Counts>) -> Option<Message> {
        if self.tails.iter().any(|tail| tail.kept.as_ref().is_some_and(|(_, kept)| kept.is_empty())) {
            self.waits += 1;
            if self.waits.is_multiple_of(WAITS) {
                let passed = self.position_of_both();
                if passed.saturating_sub(std::mem::replace(&mut self.passed, passed)) < QUIET_BYTES {
                    // The connection has become quiet before that place: the peer has the last bytes.
                    self.tails.iter_mut().for_each(|tail| tail.kept = None);
                }
            }
        }
        let is_kept = self.tails.iter().any(|tail| tail.kept.is_some());
        let ranges = [0, 1].map(|index| {
            let tail = &self.tails[index];
            if is_kept && tail.kept.is_none() { tail.position..tail.position } else { tail.sample() }
        });
        if ranges.iter().all(Range::is_empty) || !self.has_seen_all(counts) {
            return None;
        }
        let copies = [0, 1].map(|index| self.tails[index].copy(ranges[index].clone()));
        let [Some(sent), Some(received)] = copies else { return None };
        let [of_sent, of_received] = ranges;
        let samples = [
            self.hashed(Side::Claim, Stream::Sent, of_sent, &sent),
            self.hashed(Side::Claim, Stream::Received, of_received, &received),
        ];
        self.claimed = [sent, received];
        self.open = Some(samples.clone());
        self.claims += 1;
        Some(Message::Samples(Side::Claim, samples))
    }

    fn advance_accepted(
        &mut self,
        received: Option<Message>,
        counts: impl FnOnce() -> Option<Counts>,
    ) -> (Option<Message>, Progress) {
        let malformed = (None, Progress::Refused(Reason::Malformed));
        let samples = match (received, self.open.take()) {
            (Some(Message::Samples(Side::Claim, samples)), _) => {
                self.claims += 1;
                samples
            }
            (Some(_), _) => return malformed,
            (None, Some(samples)) => samples,
            (None, None) => return (None, Progress::Waiting),
        };
        if samples[0].range.end > self.tails[Stream::Received as usize].position && self.is_awaited(&samples[0]) {
            self.open = Some(samples);
            return (None, Progress::Waiting);
        }
        if !self.has_seen_all(counts) {
            return (Some(self.again(&samples)), Progress::Waiting);
        }
        let found = [0, 1].map(|index| self.compare(stream_at(index), &samples[index]));
        if found.contains(&Found::Different) {
            return (None, Progress::Refused(Reason::NoProof));
        }
        if found.contains(&Found::Early) {
            for index in [0, 1] {
                // The tail that the stream of the peer has here is the other one.
                let tail = &mut self.tails[1 - index];
                if found[index] == Found::Early {
                    tail.keep(samples[index].range.start);
                }
            }
            self.open = Some(samples);
            return (None, Progress::Waiting);
        }
        if !found.contains(&Found::Equal) {
            let is_claim = found.contains(&Found::Late);
            return if is_claim { (Some(self.again(&samples)), Progress::Waiting) } else { malformed };
        }
        let echoes = [0, 1].map(|index| {
            let range = samples[index].range.clone();
            match self.tails[1 - index].copy(range.clone()) {
                Some(bytes) if found[index] == Found::Equal => self.hashed(Side::Echo, stream_at(index), range, &bytes),
                _ => Sample::none(),
            }
        });
        (Some(Message::Samples(Side::Echo, echoes)), Progress::Proven)
    }

    /// Compares a sample of a stream, as the connecting endpoint names it, with what this endpoint has.
    fn compare(&self, stream: Stream, sample: &Sample) -> Found {
        let Range { start, end } = sample.range;
        let tail = &self.tails[1 - stream as usize];
        if start == end {
            return Found::Nothing;
        }
        if let Some(bytes) = tail.copy(start..end) {
            let own = self.hashed(Side::Claim, stream, start..end, &bytes);
            return if own == *sample { Found::Equal } else { Found::Different };
        }
        let first = tail.position - tail.last.len() as u64;
        let is_kept = tail.kept.as_ref().is_some_and(|(from, _)| *from <= start);
        match stream {
            Stream::Sent if end > tail.position && (start >= first || is_kept) => Found::Early,
            // Nobody can have received what was not sent.
            Stream::Received if end > tail.position => Found::Different,
            _ => Found::Late,
        }
    }

    /// Returns whether a sample of what the peer has sent is kept when it arrives.
    fn is_awaited(&self, sample: &Sample) -> bool {
        let tail = &self.tails[Stream::Received as usize];
        tail.kept.as_ref().is_some_and(|(from, _)| *from == sample.range.start)
    }

    /// Asks for a sample farther on, of the stream that was claimed.
    fn again(&mut self, samples: &[Sample; 2]) -> Message {
        let stream = if samples[0].range.is_empty() { Stream::Received } else { Stream::Sent };
        let tail = &mut self.tails[1 - stream as usize];
        let position = tail.position + ((TAIL_BYTES as u64) << self.claims.min(CLAIMS_MAX));
        // The first further claim of a quiet connection needs no distance.
        let position = if self.claims <= 1 { tail.position } else { position };
        tail.keep(position);
        Message::Again(stream, position)
    }

    /// Returns whether the tails are complete, and begins them anew otherwise.
    fn has_seen_all(&mut self, counts: impl FnOnce() -> Option<Counts>) -> bool {
        let Some(counts) = counts() else { return false };
        let is_complete = !self.has_missed_bytes
            && (self.tails[0].position, self.tails[1].position) == (counts.written, counts.consumed);
        if !is_complete {
            self.tails = [StreamTail::at(counts.written), StreamTail::at(counts.consumed)];
            self.has_missed_bytes = false;
        }
        is_complete
    }

    /// Returns a sample with its hash. Streams are named as the connecting endpoint does.
    fn hashed(&self, side: Side, stream: Stream, range: Range<u64>, bytes: &[u8]) -> Sample {
        if range.is_empty() {
            return Sample::none();
        }
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(&[side as u8, stream as u8]);
        hasher.write(&range.start.to_ne_bytes());
        hasher.write(&range.end.to_ne_bytes());
        hasher.write(bytes);
        Sample { range, hash: hasher.finish128().as_u128().to_ne_bytes() }
    }
}

impl Sample {
    fn none() -> Self {
        Self { range: 0..0, hash: [0; 16] }
    }
}

fn stream_at(index: usize) -> Stream {
    if index == 0 { Stream::Sent } else { Stream::Received }
}

impl Message {
    /// Returns the bytes of the message: magic, version, kind, then for each of two samples its begin, its end and its
    /// hash, or the number of a stream and a position.
    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_ne_bytes());
        match self {
            Self::Samples(side, samples) => {
                bytes[10] = if *side == Side::Claim { 1 } else { 2 };
                for (part, sample) in bytes[16..80].chunks_exact_mut(32).zip(samples) {
                    part[..8].copy_from_slice(&sample.range.start.to_ne_bytes());
                    part[8..16].copy_from_slice(&sample.range.end.to_ne_bytes());
                    part[16..].copy_from_slice(&sample.hash);
                }
            }
            Self::Again(stream, position) => {
                bytes[10] = 3;
                bytes[16..24].copy_from_slice(&(*stream as u64).to_ne_bytes());
                bytes[24..32].copy_from_slice(&position.to_ne_bytes());
            }
        }
        bytes
    }

    fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
        if bytes[..8] != MAGIC || bytes[8..10] != VERSION.to_ne_bytes() {
            return None;
        }
        let sample = |at: usize| {
            let range = word(at)..word(at + 8);
            let is_valid = range.start <= range.end && range.end - range.start <= SAMPLE_BYTES_MAX as u64;
            let hash = std::array::from_fn(|index| bytes[at + 16 + index]);
            (is_valid && range.end < 1 << 62).then_some(Sample { range, hash })
        };
        match (bytes[10], word(16)) {
            (kind @ (1 | 2), _) => {
                let side = if kind == 1 { Side::Claim } else { Side::Echo };
                Some(Self::Samples(side, [sample(16)?, sample(48)?]))
            }
            (3, stream @ (0 | 1)) => {
                Some(Self::Again(stream_at(stream as usize), word(24))).filter(|_| word(24) < 1 << 62)
            }
            _ => None,
        }
    }
}

/// What was received.
enum Received {
    Nothing,
    Message(Message),
    /// The peer refuses, by a message of the meeting.
    No(Reason),
}

/// Receives a message, without blocking, in one system call. What follows it stays for the bell.
fn receive(bell: BorrowedFd<'_>) -> Result<Received, Reason> {
    let mut bytes = [0; MESSAGE_BYTES];
    match receive_bytes(bell, &mut bytes, &mut discard) {
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(errno) => Err(Reason::of_errno(errno)),
        Ok(received) if received.count == 0 => Err(Reason::Gone),
        Ok(received) if received.count < MESSAGE_BYTES => Err(Reason::Malformed),
        Ok(_) => match message::Message::parse(&bytes).map(|message| message.kind) {
            Ok(Kind::No(reason)) => Ok(Received::No(reason)),
            _ => Message::parse(&bytes).map(Received::Message).ok_or(Reason::Malformed),
        },
    }
}

fn send(bell: BorrowedFd<'_>, message: &Message) -> Result<(), Reason> {
    match rustix::net::send(bell, &message.encode(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(MESSAGE_BYTES) => Ok(()),
        Ok(_) => Err(Reason::System),
        Err(errno) => Err(Reason::of_errno(errno)),
    }
}

#[cfg(test)]
mod tests;
