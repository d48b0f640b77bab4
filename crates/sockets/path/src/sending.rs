//! The direction that this end sends.

use crate::{EndWord, MoveNumber, SenderIo, Word};

/// The path of the direction that this end sends. The crate documentation has the table of transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sending {
    /// By TCP.
    Tcp {
        /// The last move, which has ended.
        last: MoveNumber,
    },
    /// By TCP, until the receiver consents to a move.
    Asking {
        /// The move.
        number: MoveNumber,
    },
    /// By the lane.
    Lane {
        /// The move.
        number: MoveNumber,
    },
    /// By TCP, once all that is unread in the lane is written to TCP.
    Resending {
        /// The move, which has ended.
        number: MoveNumber,
    },
}

impl Default for Sending {
    fn default() -> Self {
        Self::Tcp { last: MoveNumber::NONE }
    }
}

/// How the next bytes are to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendBy {
    /// By TCP.
    Tcp,
    /// By the lane.
    Lane,
    /// Not yet: first write to TCP what is unread in the lane, then call [`Sending::note_resent`].
    Resend,
}

impl Sending {
    /// Returns whether this end sends by TCP and may [ask](Sending::ask) for a move.
    pub fn may_ask(self) -> bool {
        matches!(self, Self::Tcp { .. })
    }

    /// Asks the receiver to consent to a move. Has no effect unless this end [may ask](Sending::may_ask).
    ///
    /// # Errors
    /// [`crate::Words::Stop`], here and below.
    pub fn ask<I: SenderIo>(&mut self, io: &mut I) -> Result<(), I::Stop> {
        if let Self::Tcp { last } = *self {
            let number = last.next();
            io.store(Word::Ask, number.to_word())?;
            *self = Self::Asking { number };
        }
        Ok(())
    }

    /// Returns how the next bytes are to be sent. Begins a move to which the receiver has consented, and ends one that
    /// it has frozen.
    pub fn prepare<I: SenderIo>(&mut self, io: &mut I) -> Result<SendBy, I::Stop> {
        match *self {
            Self::Tcp { .. } => Ok(SendBy::Tcp),
            Self::Asking { number } => self.begin_if_consented(number, io),
            Self::Lane { number } if io.load(Word::Frozen)? == number.to_word() => self.end(number, io),
            Self::Lane { .. } => Ok(SendBy::Lane),
            Self::Resending { .. } => Ok(SendBy::Resend),
        }
    }

    fn begin_if_consented<I: SenderIo>(&mut self, number: MoveNumber, io: &mut I) -> Result<SendBy, I::Stop> {
        if io.load(Word::Ok)? != number.to_word() {
            return Ok(SendBy::Tcp);
        }
        if io.load(Word::Frozen)? == number.to_word() {
            *self = Self::Tcp { last: number };
            return Ok(SendBy::Tcp);
        }
        let Some(bytes_written) = io.bytes_written()? else { return Ok(SendBy::Tcp) };
        io.publish_begin(bytes_written)?;
        io.store(Word::Up, number.to_word())?;
        *self = Self::Lane { number };
        Ok(SendBy::Lane)
    }

    /// Goes back to TCP, and returns how the next bytes are to be sent. Ring the bell afterwards if the receiver
    /// sleeps.
    pub fn go_back<I: SenderIo>(&mut self, io: &mut I) -> Result<SendBy, I::Stop> {
        match *self {
            Self::Tcp { .. } => Ok(SendBy::Tcp),
            Self::Asking { number } => {
                // The receiver loads this before `Up`: it then knows that the move will not begin.
                io.store(Word::Withdrawn, number.to_word())?;
                *self = Self::Tcp { last: number };
                Ok(SendBy::Tcp)
            }
            Self::Lane { number } => self.end(number, io),
            Self::Resending { .. } => Ok(SendBy::Resend),
        }
    }

    fn end<I: SenderIo>(&mut self, number: MoveNumber, io: &mut I) -> Result<SendBy, I::Stop> {
        io.store(Word::Down, number.to_word())?;
        io.fence()?;
        let is_resent = io.load(Word::Frozen)? == number.to_word();
        io.publish_end(is_resent)?;
        io.store(Word::Ended, EndWord { number, is_resent }.to_word())?;
        *self = Self::Resending { number };
        Ok(SendBy::Resend)
    }

    /// Notes that everything that is unread in the lane was written to TCP.
    pub fn note_resent(&mut self) {
        if let Self::Resending { number } = *self {
            *self = Self::Tcp { last: number };
        }
    }
}
