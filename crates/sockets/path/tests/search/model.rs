//! Two ends of a direction, the memory between them, and the kernel.

use std::collections::{HashSet, VecDeque};

use path::{Failure, ReceiveBy, ReceiverIo, Receiving, SendBy, SenderIo, Sending, Word, Words};

/// Upper bounds of what the ends do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    pub bytes: u8,
    pub asks: u8,
    pub returns: u8,
    pub freezes: u8,
    /// Meetings after the first one, in each of which another process takes the place of one end.
    pub meetings: u8,
    /// Consents to the first move that the sender has not asked for.
    pub early_consents: u8,
}

/// The rules that the ends keep. Each is broken once, to show that the search finds it.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// A receiver that has consented takes only bytes that it has counted before.
    pub is_careful: bool,
    /// Fences order stores before loads.
    pub has_fences: bool,
    /// The sender loads `Frozen`.
    pub sees_frozen: bool,
    /// A receiver that has frozen the lane loads `Down`.
    pub waits_for_end: bool,
    /// The sender publishes how many bytes it has written to TCP.
    pub counts_written: bool,
    /// A sender that goes back by itself also writes to TCP what is unread in the lane.
    pub repeats: bool,
    /// A receiver drops what it has read in the lane and receives once more.
    pub drops: bool,
    /// A receiver that has frozen the lane reads there what a sender has left that died before it ended the move.
    pub reads_abandoned: bool,
    /// Ends that meet anew have left the lanes of the meeting before.
    pub leaves_lanes: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            is_careful: true,
            has_fences: true,
            sees_frozen: true,
            waits_for_end: true,
            counts_written: true,
            repeats: true,
            drops: true,
            reads_abandoned: true,
            leaves_lanes: true,
        }
    }
}

/// What the search has seen.
#[derive(Debug, Default)]
pub struct Explored {
    pub states: usize,
    pub moves_begun: usize,
    /// Consents to a move for which the sender had not asked.
    pub early_consents: usize,
    pub moves_ended: usize,
    pub resends: usize,
    pub settled: usize,
    pub replaced: usize,
    /// Bytes that were dropped.
    pub dropped: usize,
    /// Meetings after the first one.
    pub meetings: usize,
    /// Bytes of a dead sender that were read in a lane that was frozen.
    pub abandoned: usize,
}

/// A place in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Word(Word),
    /// Bytes written to TCP before the lane.
    BeginsAt,
    /// Position in the lane where the move begins.
    BeginsIn,
    /// Position in the lane where it ends.
    EndsIn,
    /// Position up to which the receiver has read, plus 1; 0 if it has not entered.
    Cursor,
    /// Number of bytes in the lane.
    Published,
    /// Position up to which the receiver is known to have read.
    Credit,
    /// Number of bytes of the lane that the sender has written to TCP by itself.
    Repeated,
}

const PLACES: usize = 14;

impl Place {
    fn index(self) -> usize {
        match self {
            Self::Word(word) => word as usize,
            Self::BeginsAt => 7,
            Self::BeginsIn => 8,
            Self::EndsIn => 9,
            Self::Cursor => 10,
            Self::Published => 11,
            Self::Credit => 12,
            Self::Repeated => 13,
        }
    }
}

/// One step of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Load(Place),
    Store(Place, u64),
    Fence,
    CountWritten,
    CountRead,
    CountAvailable,
    /// Positions are private: no other end runs in between, but the value is that of the moment.
    LanePosition,
    /// Where the sender's last move began.
    OwnBegin,
    WriteTcp,
    WriteLane,
    /// Writes to TCP what the lane has from this position on.
    Resend(u64),
    /// Receives at most this number of bytes from the kernel.
    Receive(u64),
    /// Receives at most this number of bytes from the kernel, and drops them.
    Drop(u64),
    ReadLane(u64),
}

/// What an end does in one call of its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    Send,
    Ask,
    GoBack,
    /// The bell has rung: the sender writes what the receiver has left.
    Answer,
    Receive,
    /// Consents to the first move, whether or not the sender has asked.
    Consent,
    /// As a receive, by an end that knows that the peer is gone.
    ReceiveRest,
    Freeze,
    /// Freezes, then leaves the socket to somebody who only knows the kernel.
    Replace,
}

/// An end: its machine at the beginning of its call, and the answers to the steps of the call so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct End<M> {
    machine: M,
    call: Option<Call>,
    answers: Vec<u64>,
    /// Stores that the other end does not see yet.
    delayed: VecDeque<(Place, u64)>,
    is_dead: bool,
}

impl<M: Default> End<M> {
    fn new() -> Self {
        Self { machine: M::default(), call: None, answers: Vec::new(), delayed: VecDeque::new(), is_dead: false }
    }
}

/// Who reads the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Reader {
    /// The receiver.
    End,
    /// Somebody who knows only the kernel.
    Stranger,
}

/// A state of the search.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    memory: [u64; PLACES],
    sender: End<Sending>,
    receiver: End<Receiving>,
    budget: Budget,
    reader: Reader,
    /// The number of the next byte to send, and of the first byte whose send has not returned.
    next_byte: u8,
    returned: u8,
    /// Bytes in the kernel, and the counts of all that was written and read.
    tcp: VecDeque<u8>,
    tcp_written: u64,
    tcp_read: u64,
    /// All that was ever written to the lane, as the sender knows it.
    lane: Vec<u8>,
    /// Where the sender's last move began.
    lane_begin: u64,
    /// The receiver's position in the lane.
    lane_read: u64,
    received: u8,
    /// The receiver has frozen the lane of the last move, and may have bytes to read there if the sender dies.
    is_requested: bool,
}

/// Runs a call again from its beginning with the answers so far; stops at the first step without one.
struct Replay<'a> {
    answers: &'a [u64],
    used: usize,
    rules: Rules,
    /// The position in the lane from which a sender that has ended a move writes to TCP.
    left: u64,
}

impl Replay<'_> {
    fn take(&mut self, step: Step) -> Result<u64, Step> {
        let answer = self.answers.get(self.used).copied().ok_or(step)?;
        self.used += 1;
        Ok(answer)
    }
}

impl Words for Replay<'_> {
    type Stop = Step;

    fn load(&mut self, word: Word) -> Result<u64, Step> {
        let value = self.take(Step::Load(Place::Word(word)))?;
        let is_overlooked =
            (word == Word::Frozen && !self.rules.sees_frozen) || (word == Word::Down && !self.rules.waits_for_end);
        Ok(if is_overlooked { 0 } else { value })
    }

    fn store(&mut self, word: Word, value: u64) -> Result<(), Step> {
        self.take(Step::Store(Place::Word(word), value)).map(|_| ())
    }

    fn fence(&mut self) -> Result<(), Step> {
        self.take(Step::Fence).map(|_| ())
    }
}

impl SenderIo for Replay<'_> {
    fn bytes_written(&mut self) -> Result<Option<u64>, Step> {
        let written = self.take(Step::CountWritten)?;
        Ok(Some(if self.rules.counts_written { written } else { written.saturating_sub(1) }))
    }

    fn publish_begin(&mut self, bytes_written: u64) -> Result<(), Step> {
        let position = self.take(Step::LanePosition)?;
        self.take(Step::Store(Place::BeginsIn, position))?;
        self.take(Step::Store(Place::BeginsAt, bytes_written)).map(|_| ())
    }

    fn publish_end(&mut self, is_frozen: bool) -> Result<(), Step> {
        let position = self.take(Step::LanePosition)?;
        self.take(Step::Store(Place::EndsIn, position))?;
        let begin = self.take(Step::OwnBegin)?;
        self.left = if is_frozen {
            match self.take(Step::Load(Place::Cursor))? {
                0 => begin,
                cursor => cursor - 1,
            }
        } else {
            let from = self.take(Step::Load(Place::Credit))?.max(begin);
            let from = if self.rules.repeats { from } else { position };
            self.take(Step::Store(Place::Repeated, position - from))?;
            from
        };
        Ok(())
    }
}

impl ReceiverIo for Replay<'_> {
    fn bytes_read(&mut self) -> Result<Option<u64>, Step> {
        self.take(Step::CountRead).map(Some)
    }

    fn bytes_available(&mut self) -> Result<u64, Step> {
        self.take(Step::CountAvailable)
    }

    fn has_urgent_byte(&mut self) -> Result<bool, Step> {
        Ok(false) // It would be one more reason to freeze.
    }

    fn publish_cursor(&mut self, has_entered: bool) -> Result<(), Step> {
        let position = self.take(Step::LanePosition)?;
        self.take(Step::Store(Place::Cursor, if has_entered { position + 1 } else { 0 })).map(|_| ())
    }

    fn begins_at(&mut self) -> Result<u64, Step> {
        self.take(Step::Load(Place::BeginsAt))
    }

    fn enter(&mut self) -> Result<(), Step> {
        let position = self.take(Step::Load(Place::BeginsIn))?;
        self.take(Step::ReadLane(position)).map(|_| ())
    }

    fn bytes_repeated(&mut self) -> Result<u64, Step> {
        self.take(Step::Load(Place::Repeated))
    }

    fn bytes_unread(&mut self) -> Result<u64, Step> {
        let end = self.take(Step::Load(Place::EndsIn))?;
        let position = self.take(Step::LanePosition)?;
        Ok(end.saturating_sub(position))
    }

    fn drop_bytes(&mut self, bytes_max: u64) -> Result<u64, Step> {
        if self.rules.drops { self.take(Step::Drop(bytes_max)) } else { Ok(bytes_max) }
    }

    fn has_reached_end(&mut self) -> Result<Option<bool>, Step> {
        let end = self.take(Step::Load(Place::EndsIn))?;
        let position = self.take(Step::LanePosition)?;
        Ok((position <= end).then_some(position == end))
    }
}

/// The position from which `ReadLane` reads on, instead of moving there.
const READ_ON: u64 = u64::MAX;

fn send(machine: &mut Sending, call: Call, io: &mut Replay) -> Result<(), Step> {
    let mut by = match call {
        Call::Ask => return machine.ask(io),
        Call::GoBack => machine.go_back(io)?,
        _ => machine.prepare(io)?,
    };
    if by == SendBy::Resend {
        io.take(Step::Resend(io.left))?;
        machine.note_resent();
        by = SendBy::Tcp;
    }
    match (call, by) {
        (Call::Send, SendBy::Tcp) => io.take(Step::WriteTcp).map(|_| ()),
        (Call::Send, SendBy::Lane) => io.take(Step::WriteLane).map(|_| ()),
        _ => Ok(()),
    }
}

fn receive(machine: &mut Receiving, call: Call, io: &mut Replay) -> Result<bool, Failure<Step>> {
    match call {
        Call::Freeze | Call::Replace => return machine.freeze(io),
        Call::Consent => return machine.consent_to_first(io).map(|()| true).map_err(Failure::Stopped),
        _ => {}
    }
    let mut by = machine.prepare(true, io)?;
    // Bounded: a call that finds nothing returns, like one that does not block.
    for _ in 0..4 {
        match by {
            ReceiveBy::Kernel => {
                io.take(Step::Receive(u64::MAX))?;
                return Ok(true);
            }
            ReceiveBy::KernelUpTo(bytes) => {
                let bytes = if io.rules.is_careful { bytes } else { u64::MAX };
                let read = io.take(Step::Receive(bytes))?;
                machine.note_read(read);
                return Ok(true);
            }
            ReceiveBy::Lane => {
                if io.take(Step::ReadLane(READ_ON))? > 0 {
                    return Ok(true);
                }
                by = machine.note_empty(io)?;
            }
            ReceiveBy::Nothing if call == Call::ReceiveRest => by = machine.note_peer_left(io)?,
            ReceiveBy::Nothing => return Ok(true),
        }
    }
    Ok(true)
}

impl World {
    pub fn new(budget: Budget) -> Self {
        Self {
            memory: [0; PLACES],
            sender: End::new(),
            receiver: End::new(),
            budget,
            reader: Reader::End,
            next_byte: 0,
            returned: 0,
            tcp: VecDeque::new(),
            tcp_written: 0,
            tcp_read: 0,
            lane: Vec::new(),
            lane_begin: 0,
            lane_read: 0,
            received: 0,
            is_requested: false,
        }
    }

    /// Returns the state in which another process has taken the place of one end, and has met the other one: both begin
    /// with new memory.
    fn meet_anew(&self, rules: Rules) -> Option<Self> {
        let sends_by_tcp = matches!(self.sender.machine, Sending::Tcp { .. } | Sending::Asking { .. });
        let receives_by_tcp = matches!(self.receiver.machine, Receiving::Plain { .. });
        let is_between_calls = self.sender.call.is_none() && self.receiver.call.is_none() && !self.sender.is_dead;
        if self.budget.meetings == 0 || !is_between_calls || !(sends_by_tcp && receives_by_tcp || !rules.leaves_lanes) {
            return None;
        }
        let (budget, tcp) = (Budget { meetings: self.budget.meetings - 1, ..self.budget }, self.tcp.clone());
        let (tcp_written, tcp_read, received) = (self.tcp_written, self.tcp_read, self.received);
        let (next_byte, returned) = (self.next_byte, self.returned);
        Some(Self { tcp, tcp_written, tcp_read, next_byte, returned, received, ..Self::new(budget) })
    }

    /// Receives what a dead sender has left in a lane that was frozen before it has ended the move.
    fn receive_abandoned(&mut self, seen: &mut Explored) -> Result<(), String> {
        let word = |word| self.memory[Place::Word(word).index()];
        let is_abandoned = word(Word::Frozen) == word(Word::Up) && word(Word::Ended) >> 1 < word(Word::Frozen);
        if !self.is_requested || !is_abandoned || !self.tcp.is_empty() {
            return Ok(());
        }
        let begin = match self.memory[Place::Cursor.index()] {
            0 => self.memory[Place::BeginsIn.index()],
            cursor => cursor - 1,
        };
        for position in begin..self.memory[Place::Published.index()] {
            self.receive_byte(self.lane[position as usize])?;
            seen.abandoned += 1;
        }
        Ok(())
    }

    pub fn is_on_tcp(&self) -> bool {
        matches!(self.sender.machine, Sending::Tcp { .. }) && matches!(self.receiver.machine, Receiving::Plain { .. })
    }

    fn receive_byte(&mut self, byte: u8) -> Result<(), String> {
        if byte != self.received {
            return Err(format!("received byte {byte} instead of {}", self.received));
        }
        self.received += 1;
        Ok(())
    }

    /// Receives from the kernel; returns the number of bytes.
    fn receive_from_kernel(&mut self, bytes_max: u64) -> Result<u64, String> {
        let mut read = 0;
        while read < bytes_max
            && let Some(byte) = self.tcp.pop_front()
        {
            self.receive_byte(byte)?;
            read += 1;
        }
        self.tcp_read += read;
        Ok(read)
    }

    fn write_tcp(&mut self, byte: u8) {
        self.tcp.push_back(byte);
        self.tcp_written += 1;
    }

    fn read_lane(&mut self, to: u64) -> Result<u64, String> {
        if to != READ_ON {
            self.lane_read = to;
            self.receiver.delayed.push_back((Place::Credit, to));
            return Ok(0);
        }
        if self.lane_read >= self.memory[Place::Published.index()] {
            return Ok(0);
        }
        let byte = self.lane[self.lane_read as usize];
        self.lane_read += 1;
        self.receiver.delayed.push_back((Place::Credit, self.lane_read));
        self.receive_byte(byte)?;
        Ok(1)
    }

    /// Receives from the kernel bytes that were received before.
    fn drop_from_kernel(&mut self, bytes_max: u64) -> Result<u64, String> {
        let mut dropped = 0;
        while dropped < bytes_max
            && let Some(byte) = self.tcp.pop_front()
        {
            if byte >= self.received {
                return Err(format!("dropped byte {byte}, which was not received"));
            }
            dropped += 1;
        }
        self.tcp_read += dropped;
        Ok(dropped)
    }

    /// Does a step of the sender; returns the answer, or `None` if delayed stores come first.
    fn do_as_sender(&mut self, step: Step, rules: Rules) -> Result<Option<u64>, String> {
        let is_ordered = self.sender.delayed.is_empty();
        Ok(Some(match step {
            Step::Load(place) => self.memory[place.index()],
            Step::Store(place, value) => {
                if place == Place::BeginsIn {
                    self.lane_begin = value;
                }
                self.sender.delayed.push_back((place, value));
                0
            }
            Step::Fence if rules.has_fences && !is_ordered => return Ok(None),
            Step::Fence => 0,
            // Whoever receives the bytes also sees what was stored before.
            Step::WriteTcp | Step::Resend(_) if !is_ordered => return Ok(None),
            Step::CountWritten => self.tcp_written,
            Step::LanePosition => self.lane.len() as u64,
            Step::WriteTcp => {
                self.write_tcp(self.next_byte);
                self.next_byte += 1;
                0
            }
            Step::WriteLane => {
                self.lane.push(self.next_byte);
                self.next_byte += 1;
                self.sender.delayed.push_back((Place::Published, self.lane.len() as u64));
                0
            }
            Step::OwnBegin => self.lane_begin,
            Step::Resend(from) => {
                let rest: Vec<u8> = self.lane[from as usize..].to_vec();
                rest.into_iter().for_each(|byte| self.write_tcp(byte));
                0
            }
            _ => unreachable!("{step:?} of a sender"),
        }))
    }

    /// Does a step of the receiver.
    fn do_as_receiver(&mut self, step: Step, rules: Rules) -> Result<Option<u64>, String> {
        Ok(Some(match step {
            Step::Load(place) => self.memory[place.index()],
            Step::Store(place, value) => {
                self.receiver.delayed.push_back((place, value));
                0
            }
            Step::Fence if rules.has_fences && !self.receiver.delayed.is_empty() => return Ok(None),
            Step::Fence => 0,
            Step::CountRead => self.tcp_read,
            Step::CountAvailable => self.tcp.len() as u64,
            Step::LanePosition => self.lane_read,
            Step::Receive(bytes_max) => self.receive_from_kernel(bytes_max)?,
            Step::Drop(bytes_max) => self.drop_from_kernel(bytes_max)?,
            Step::ReadLane(to) => self.read_lane(to)?,
            _ => unreachable!("{step:?} of a receiver"),
        }))
    }

    /// Makes the oldest delayed store of an end visible.
    fn flush_one(&mut self, is_sender: bool) -> bool {
        let delayed = if is_sender { &mut self.sender.delayed } else { &mut self.receiver.delayed };
        let Some((place, value)) = delayed.pop_front() else { return false };
        self.memory[place.index()] = value;
        true
    }

    fn flush(&mut self, is_sender: bool) {
        while self.flush_one(is_sender) {}
    }

    /// Advances the sender's call by one step. Returns `false` if it cannot now.
    fn advance_sender(&mut self, rules: Rules, seen: &mut Explored) -> Result<bool, String> {
        let Some(call) = self.sender.call else { return Ok(false) };
        let mut machine = self.sender.machine;
        let mut io = Replay { answers: &self.sender.answers, used: 0, rules, left: 0 };
        match send(&mut machine, call, &mut io) {
            Err(step) => {
                let Some(answer) = self.do_as_sender(step, rules)? else { return Ok(false) };
                self.sender.answers.push(answer);
                if let Step::Resend(_) = step {
                    seen.resends += 1;
                }
            }
            Ok(()) => {
                seen.moves_begun += usize::from(was_begun(self.sender.machine, machine));
                seen.moves_ended += usize::from(was_begun(machine, self.sender.machine));
                self.sender.machine = machine;
                self.sender.call = None;
                self.sender.answers.clear();
                self.returned = self.next_byte;
            }
        }
        Ok(true)
    }

    /// Advances the receiver's call by one step. Returns `false` if it cannot now.
    fn advance_receiver(&mut self, rules: Rules, seen: &mut Explored) -> Result<bool, String> {
        let Some(call) = self.receiver.call else { return Ok(false) };
        if self.reader == Reader::Stranger {
            self.receive_from_kernel(u64::MAX)?;
            self.receiver.call = None;
            return Ok(true);
        }
        let mut machine = self.receiver.machine;
        let mut io = Replay { answers: &self.receiver.answers, used: 0, rules, left: 0 };
        match receive(&mut machine, call, &mut io) {
            Err(Failure::Corrupt(corrupt)) => return Err(corrupt.to_string()),
            Err(Failure::Stopped(step)) => {
                let Some(answer) = self.do_as_receiver(step, rules)? else { return Ok(false) };
                self.receiver.answers.push(answer);
                if let Step::Drop(_) = step {
                    seen.dropped += answer as usize;
                }
            }
            Ok(is_released) => {
                if let Receiving::Freezing(_) = self.receiver.machine {
                    seen.settled += usize::from(!matches!(machine, Receiving::Freezing(_)));
                }
                let is_unasked = self.memory[Place::Word(Word::Ask).index()] == 0;
                seen.early_consents += usize::from(call == Call::Consent && is_unasked);
                if matches!(call, Call::Freeze | Call::Replace) && matches!(machine, Receiving::Plain { .. }) {
                    let had_lane = |machine| {
                        matches!(machine, Receiving::Careful(_) | Receiving::Capped(_) | Receiving::Lane { .. })
                    };
                    self.is_requested |= had_lane(self.receiver.machine);
                } else if !matches!(machine, Receiving::Plain { .. }) {
                    self.is_requested = false;
                }
                self.receiver.machine = machine;
                self.receiver.call = None;
                self.receiver.answers.clear();
                if call == Call::Replace && is_released {
                    self.reader = Reader::Stranger;
                    seen.replaced += 1;
                }
            }
        }
        Ok(true)
    }

    /// Returns the states in which an end that is between two calls begins one, or dies.
    fn begin_calls(&self) -> Vec<Self> {
        let mut next = Vec::new();
        let mut begin = |is_sender: bool, call: Call, spend: &dyn Fn(&mut Budget)| {
            let mut world = self.clone();
            spend(&mut world.budget);
            if is_sender {
                world.sender.call = Some(call)
            } else {
                world.receiver.call = Some(call)
            }
            next.push(world);
        };
        if self.sender.call.is_none() && !self.sender.is_dead {
            if self.budget.bytes > 0 {
                begin(true, Call::Send, &|budget| budget.bytes -= 1);
            }
            if self.budget.asks > 0 && self.sender.machine.may_ask() {
                begin(true, Call::Ask, &|budget| budget.asks -= 1);
            }
            if self.budget.returns > 0 {
                begin(true, Call::GoBack, &|budget| budget.returns -= 1);
            }
        }
        if self.receiver.call.is_none() {
            begin(false, if self.sender.is_dead { Call::ReceiveRest } else { Call::Receive }, &|_| {});
            if self.budget.early_consents > 0 && self.reader == Reader::End {
                begin(false, Call::Consent, &|budget| budget.early_consents -= 1);
            }
            if self.budget.freezes > 0 && self.reader == Reader::End && !self.sender.is_dead {
                begin(false, Call::Freeze, &|budget| budget.freezes -= 1);
                begin(false, Call::Replace, &|budget| budget.freezes -= 1);
            }
        }
        next
    }

    /// Returns the state in which the sender has died between two steps.
    fn kill_sender(&self) -> Option<Self> {
        if self.sender.is_dead || self.reader == Reader::Stranger {
            return None;
        }
        let mut world = self.clone();
        world.flush(true);
        world.sender.is_dead = true;
        world.sender.call = None;
        world.sender.answers.clear();
        Some(world)
    }

    /// Returns every state that can follow.
    fn next(&self, rules: Rules, seen: &mut Explored) -> Result<Vec<Self>, String> {
        let mut next = self.begin_calls();
        next.extend(self.kill_sender());
        let anew = self.meet_anew(rules);
        seen.meetings += usize::from(anew.is_some());
        next.extend(anew);
        for is_sender in [true, false] {
            let mut world = self.clone();
            if world.flush_one(is_sender) {
                next.push(world);
            }
            let mut world = self.clone();
            let advance = if is_sender { Self::advance_sender } else { Self::advance_receiver };
            if advance(&mut world, rules, seen)? {
                next.push(world);
            }
        }
        Ok(next)
    }

    /// Checks that everything sent arrives if both ends go on undisturbed.
    fn check_that_all_arrives(&self, rules: Rules, seen: &mut Explored) -> Result<(), String> {
        if self.sender.call.is_some() || self.receiver.call.is_some() {
            return Ok(());
        }
        let mut world = self.clone();
        let mut unseen = Explored::default();
        for _ in 0..2 * world.next_byte + 4 {
            world.flush(true);
            world.flush(false);
            if !world.sender.is_dead {
                world.sender.call = Some(Call::Answer);
                while world.advance_sender(rules, &mut unseen)? {
                    world.flush(true);
                }
            }
            world.receiver.call = Some(if self.sender.is_dead { Call::ReceiveRest } else { Call::Receive });
            while world.advance_receiver(rules, &mut unseen)? {
                world.flush(false);
            }
        }
        if self.sender.is_dead && rules.reads_abandoned {
            world.receive_abandoned(seen)?;
        }
        // A sender that dies when it has ended a move, and before it has written the rest to TCP, takes that with it.
        let frozen = self.memory[Place::Word(Word::Frozen).index()];
        let has_ended = self.memory[Place::Word(Word::Ended).index()] >> 1 >= frozen;
        let may_miss = self.sender.is_dead && frozen > 0 && has_ended;
        if world.received < self.returned && !may_miss {
            return Err(format!("only {} of {} bytes arrive", world.received, self.returned));
        }
        Ok(())
    }
}

/// Returns whether a move has begun between two states of a sender.
fn was_begun(before: Sending, after: Sending) -> bool {
    !matches!(before, Sending::Lane { .. }) && matches!(after, Sending::Lane { .. })
}

/// Visits every state that the two ends can reach.
///
/// # Errors
/// The first fault, with the state in which it shows.
pub fn explore(budget: Budget, rules: Rules) -> Result<Explored, String> {
    let mut seen = Explored::default();
    let mut known = HashSet::new();
    let mut open = vec![World::new(budget)];
    while let Some(world) = open.pop() {
        let fault = |fault: String| format!("{fault}, from {world:?}");
        world.check_that_all_arrives(rules, &mut seen).map_err(fault)?;
        for next in world.next(rules, &mut seen).map_err(fault)? {
            if known.insert(fingerprint(&next)) {
                open.push(next);
            }
        }
    }
    seen.states = known.len();
    Ok(seen)
}

/// Returns a 128-bit fingerprint of a state: with 10 million states, two of them have the same one with a probability
/// below 10^-24.
fn fingerprint(world: &World) -> u128 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        world.hash(&mut hasher);
        hasher.finish()
    };
    u128::from(half(1)) << 64 | u128::from(half(2))
}
