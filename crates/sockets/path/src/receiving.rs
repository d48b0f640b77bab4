//! The direction that this end receives.

use crate::{Corrupt, EndWord, Failure, MoveNumber, ReceiverIo, Word};

/// The path of the direction that this end receives. The crate documentation has the table of transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Receiving {
    /// By TCP, by system calls that are the program's own.
    Plain {
        /// The last move, which has ended.
        last: MoveNumber,
    },
    /// By TCP, in a way that does not cross the beginning of the lane.
    Careful(Consent),
    /// By TCP, up to the known beginning of the lane.
    Capped(Begun),
    /// By the lane.
    Lane {
        /// The move.
        number: MoveNumber,
    },
    /// The lane is frozen, and the sender is about to say whether it has seen this.
    Freezing(Frozen),
    /// By TCP, behind bytes that were read in the lane.
    Skipping(Repeated),
}

/// A move to which this end has consented and that has not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Consent {
    number: MoveNumber,
    /// Number of bytes that this end has ever read from TCP.
    bytes_read: u64,
}

/// A move that has begun, whose lane is not entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Begun {
    number: MoveNumber,
    /// Number of bytes to read from TCP before the lane.
    bytes_left: u64,
}

/// A move that has ended, some bytes of which come by TCP once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Repeated {
    number: MoveNumber,
    /// Number of bytes to drop.
    bytes_left: u64,
}

/// The state in which the lane was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Frozen {
    /// See [`Receiving::Careful`].
    Careful(Consent),
    /// See [`Receiving::Capped`].
    Capped(Begun),
    /// See [`Receiving::Lane`].
    Lane {
        /// The move.
        number: MoveNumber,
    },
}

impl Frozen {
    fn number(self) -> MoveNumber {
        match self {
            Self::Careful(Consent { number, .. }) | Self::Capped(Begun { number, .. }) | Self::Lane { number } => {
                number
            }
        }
    }
}

impl From<Frozen> for Receiving {
    fn from(frozen: Frozen) -> Self {
        match frozen {
            Frozen::Careful(consent) => Self::Careful(consent),
            Frozen::Capped(begun) => Self::Capped(begun),
            Frozen::Lane { number } => Self::Lane { number },
        }
    }
}

impl Default for Receiving {
    fn default() -> Self {
        Self::Plain { last: MoveNumber::NONE }
    }
}

/// How the next bytes are to be received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveBy {
    /// By the program's own system call, unchanged.
    Kernel,
    /// From the kernel without blocking, at most this number of bytes (not 0); then call [`Receiving::note_read`].
    KernelUpTo(u64),
    /// From the lane; if it is empty, call [`Receiving::note_empty`].
    Lane,
    /// Not now: sleep until TCP is readable or the peer rings.
    Nothing,
}

impl Receiving {
    /// Returns how the next bytes are to be received. Consents to a move if the sender asks for one and `is_willing`.
    ///
    /// # Errors
    /// [`Failure`], here and below.
    pub fn prepare<I: ReceiverIo>(&mut self, is_willing: bool, io: &mut I) -> Result<ReceiveBy, Failure<I::Stop>> {
        match *self {
            Self::Plain { last } => {
                if is_willing {
                    self.consent(last, io)?;
                }
                if let Self::Careful(consent) = *self { self.poll(consent, io) } else { Ok(ReceiveBy::Kernel) }
            }
            Self::Careful(consent) => self.poll(consent, io),
            Self::Capped(begun) => Ok(self.read_up_to_lane(begun, io)?),
            Self::Lane { number } => Ok(self.leave_if_repeated(number, io)?),
            Self::Freezing(before) => self.settle(before, io),
            Self::Skipping(repeated) => Ok(self.skip(repeated, io)?),
        }
    }

    /// Consents to the first move before the sender asks for it. Has no effect after a move.
    pub fn consent_to_first<I: ReceiverIo>(&mut self, io: &mut I) -> Result<(), I::Stop> {
        if *self == Self::default() { self.consent_to(MoveNumber::NONE.next(), io) } else { Ok(()) }
    }

    /// Consents to a move if the sender asks for a new one.
    fn consent<I: ReceiverIo>(&mut self, last: MoveNumber, io: &mut I) -> Result<(), I::Stop> {
        let number = MoveNumber::from_word(io.load(Word::Ask)?);
        if number > last { self.consent_to(number, io) } else { Ok(()) }
    }

    /// Consents to a move if the kernel can tell how much was read.
    fn consent_to<I: ReceiverIo>(&mut self, number: MoveNumber, io: &mut I) -> Result<(), I::Stop> {
        let Some(bytes_read) = io.bytes_read()? else { return Ok(()) };
        io.store(Word::Ok, number.to_word())?;
        *self = Self::Careful(Consent { number, bytes_read });
        Ok(())
    }

    /// Looks whether the move has begun. The bytes that have arrived are counted first: those were sent before.
    fn poll<I: ReceiverIo>(&mut self, consent: Consent, io: &mut I) -> Result<ReceiveBy, Failure<I::Stop>> {
        let Consent { number, bytes_read } = consent;
        let bytes_available = io.bytes_available()?;
        // Until it has asked, the sender does not withdraw before it sends an urgent byte.
        if MoveNumber::from_word(io.load(Word::Ask)?) < number && io.has_urgent_byte()? {
            return Ok(if self.freeze(io)? { ReceiveBy::Kernel } else { ReceiveBy::Nothing });
        }
        // Before `Up`: a sender that has withdrawn this move does not begin it later.
        let withdrawn = MoveNumber::from_word(io.load(Word::Withdrawn)?);
        let up = io.load(Word::Up)?;
        if up == number.to_word() {
            let begins_at = io.begins_at()?;
            let corrupt = Failure::Corrupt(Corrupt { what: "the beginning of a lane", value: begins_at });
            let bytes_left = begins_at.checked_sub(bytes_read).ok_or(corrupt)?;
            let begun = Begun { number, bytes_left };
            *self = Self::Capped(begun);
            return Ok(self.read_up_to_lane(begun, io)?);
        }
        if up > number.to_word() {
            return Err(Failure::Corrupt(Corrupt { what: "a move without consent", value: up }));
        }
        if withdrawn >= number {
            *self = Self::Plain { last: number };
            return Ok(ReceiveBy::Kernel);
        }
        Ok(if bytes_available > 0 { ReceiveBy::KernelUpTo(bytes_available) } else { ReceiveBy::Nothing })
    }

    fn read_up_to_lane<I: ReceiverIo>(&mut self, begun: Begun, io: &mut I) -> Result<ReceiveBy, I::Stop> {
        if begun.bytes_left > 0 {
            return Ok(ReceiveBy::KernelUpTo(begun.bytes_left));
        }
        io.enter()?;
        *self = Self::Lane { number: begun.number };
        Ok(ReceiveBy::Lane)
    }

    /// Notes that bytes were read from the kernel, as [`ReceiveBy::KernelUpTo`] allowed.
    ///
    /// # Panics
    /// If it were more.
    pub fn note_read(&mut self, bytes: u64) {
        match self {
            Self::Careful(Consent { bytes_read, .. }) => *bytes_read += bytes,
            Self::Capped(Begun { bytes_left, .. }) => {
                *bytes_left = bytes_left.checked_sub(bytes).expect("no byte behind the beginning of the lane is read");
            }
            _ => {}
        }
    }

    /// Returns how the next bytes are to be received, now that the lane was found empty.
    pub fn note_empty<I: ReceiverIo>(&mut self, io: &mut I) -> Result<ReceiveBy, Failure<I::Stop>> {
        let Self::Lane { number } = *self else { return self.prepare(false, io) };
        let word = io.load(Word::Ended)?;
        let EndWord { number: ended, is_resent } = EndWord::from_word(word);
        if ended < number {
            return Ok(ReceiveBy::Nothing);
        }
        if ended > number || is_resent {
            return Err(Failure::Corrupt(Corrupt { what: "the end of a lane", value: word }));
        }
        match io.has_reached_end()? {
            Some(true) => Ok(self.leave(number, io)?),
            // Records that were published between the read and the load of the end.
            Some(false) => Ok(ReceiveBy::Lane),
            None => Err(Failure::Corrupt(Corrupt { what: "the position of the end of a lane", value: word })),
        }
    }

    /// Returns the number of the move if receives go by its lane.
    pub fn lane(&self) -> Option<MoveNumber> {
        if let Self::Lane { number } = *self { Some(number) } else { None }
    }

    /// Returns whether the next bytes are the first ones of a lane that was not entered.
    pub fn is_before_lane(&self) -> bool {
        matches!(self, Self::Capped(Begun { bytes_left: 0, .. }))
    }

    /// Returns the number of bytes to read from TCP before a lane that was not entered; `None` if there is none.
    pub fn bytes_before_lane(&self) -> Option<u64> {
        if let Self::Capped(Begun { bytes_left, .. }) = *self { Some(bytes_left) } else { None }
    }

    /// Returns the number of bytes to drop from TCP, once the lane is left.
    pub fn bytes_to_drop(&self) -> u64 {
        if let Self::Skipping(Repeated { bytes_left, .. }) = *self { bytes_left } else { 0 }
    }

    /// Leaves the lane if it has ended and everything unread in it has arrived by TCP.
    #[inline(always)]
    fn leave_if_repeated<I: ReceiverIo>(&mut self, number: MoveNumber, io: &mut I) -> Result<ReceiveBy, I::Stop> {
        let end = EndWord::from_word(io.load(Word::Ended)?);
        if end.number != number || end.is_resent {
            return Ok(ReceiveBy::Lane);
        }
        let (repeated, unread) = (io.bytes_repeated()?, io.bytes_unread()?);
        // A sender repeats nothing for a receiver that has said that it is closed.
        if unread > repeated || repeated > io.bytes_available()? {
            return Ok(ReceiveBy::Lane);
        }
        self.leave(number, io)
    }

    /// Leaves a lane that has ended, and of which everything unread follows on TCP.
    fn leave<I: ReceiverIo>(&mut self, number: MoveNumber, io: &mut I) -> Result<ReceiveBy, I::Stop> {
        let bytes_left = io.bytes_repeated()?.saturating_sub(io.bytes_unread()?);
        self.skip(Repeated { number, bytes_left }, io)
    }

    /// Drops what was read in the lane from TCP, as far as it has arrived.
    fn skip<I: ReceiverIo>(&mut self, repeated: Repeated, io: &mut I) -> Result<ReceiveBy, I::Stop> {
        let Repeated { number, bytes_left } = repeated;
        let dropped = if bytes_left > 0 { io.drop_bytes(bytes_left)? } else { 0 };
        let bytes_left = bytes_left.saturating_sub(dropped);
        *self =
            if bytes_left > 0 { Self::Skipping(Repeated { number, bytes_left }) } else { Self::Plain { last: number } };
        Ok(if bytes_left > 0 { ReceiveBy::Nothing } else { ReceiveBy::Kernel })
    }

    /// Leaves the lane, or withdraws a consent. Returns whether the socket has exactly what is unread, or will have, so
    /// that anyone who holds it may receive. Otherwise the sender is going back at this moment, or bytes are to be
    /// dropped that have not arrived: call this again soon. Ring the bell afterwards: the sender has to write to TCP
    /// what is unread.
    pub fn freeze<I: ReceiverIo>(&mut self, io: &mut I) -> Result<bool, Failure<I::Stop>> {
        let before = match *self {
            Self::Plain { .. } => return Ok(true),
            Self::Careful(consent) => Frozen::Careful(consent),
            Self::Capped(begun) => Frozen::Capped(begun),
            Self::Lane { number } => Frozen::Lane { number },
            Self::Freezing(_) | Self::Skipping(_) => return self.prepare(false, io).map(|by| by == ReceiveBy::Kernel),
        };
        let number = before.number();
        io.publish_cursor(matches!(before, Frozen::Lane { .. }))?;
        io.store(Word::Frozen, number.to_word())?;
        io.fence()?;
        if io.load(Word::Down)? != number.to_word() {
            *self = Self::Plain { last: number };
            return Ok(true);
        }
        *self = Self::Freezing(before);
        self.settle(before, io).map(|by| by == ReceiveBy::Kernel)
    }

    /// Finds out whether the sender has seen that the lane is frozen.
    fn settle<I: ReceiverIo>(&mut self, before: Frozen, io: &mut I) -> Result<ReceiveBy, Failure<I::Stop>> {
        let EndWord { number: ended, is_resent } = EndWord::from_word(io.load(Word::Ended)?);
        if ended < before.number() {
            return Ok(ReceiveBy::Nothing);
        }
        match before {
            Frozen::Lane { number } if !is_resent => Ok(self.leave(number, io)?),
            _ => {
                *self = Self::Plain { last: ended };
                Ok(ReceiveBy::Kernel)
            }
        }
    }

    /// Notes that the sender is gone, or has left the connection to somebody who does not know of lanes: no word will
    /// change any more. Returns how the next bytes are to be received; call it when there is nothing else to receive.
    /// Bytes to drop may still be on their way.
    pub fn note_peer_left<I: ReceiverIo>(&mut self, io: &mut I) -> Result<ReceiveBy, Failure<I::Stop>> {
        if let Self::Freezing(before) = *self {
            self.settle(before, io)?;
            if matches!(self, Self::Freezing(_)) {
                *self = before.into();
            }
            if let Self::Lane { .. } = *self {
                // It may have bytes that were not read while this end waited for the sender's word.
                return Ok(ReceiveBy::Lane);
            }
        }
        match *self {
            Self::Careful(consent) => {
                let by = self.poll(consent, io)?;
                if matches!(self, Self::Careful(_)) {
                    *self = Self::Plain { last: consent.number };
                    return Ok(ReceiveBy::Kernel);
                }
                Ok(by)
            }
            Self::Lane { number } => {
                let by = self.leave_if_repeated(number, io)?;
                if by != ReceiveBy::Lane {
                    return Ok(by);
                }
                let by = self.note_empty(io)?;
                if by == ReceiveBy::Nothing && matches!(self, Self::Lane { .. }) {
                    *self = Self::Plain { last: number };
                    return Ok(ReceiveBy::Kernel);
                }
                Ok(by)
            }
            _ => self.prepare(false, io),
        }
    }
}
