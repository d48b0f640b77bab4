//! The path of each direction of a connection: kernel TCP, or a lane in shared memory.
//!
//! A connection is a kernel TCP connection from connect to close. Once it proves busy, each direction may *move* its
//! bytes to a lane, and may go back to TCP at any byte. This crate decides when an end may send or receive by which of
//! the two, so that no byte is lost, duplicated or reordered. It does no I/O: [`Words`], [`SenderIo`] and
//! [`ReceiverIo`] load and store what the two ends publish to each other, and ask the kernel for its counts.
//!
//! # Words
//!
//! Each word has one writer. Numbers of moves only grow; 0 is none.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`Ask`](Word::Ask) | sender | the number of the move that it asks for |
//! | [`Ok`](Word::Ok) | receiver | the number of the move to which it has consented |
//! | `UpAt` | sender | number of bytes that it had written to TCP when the move began |
//! | [`Up`](Word::Up) | sender | the number of the move that has begun: what follows is in the lane |
//! | [`Withdrawn`](Word::Withdrawn) | sender | the number of the last move that it gave up before it began |
//! | [`Down`](Word::Down) | sender | the number of the move that it is about to end |
//! | [`Ended`](Word::Ended) | sender | the number of the move that has ended, and [how](EndWord) |
//! | [`Frozen`](Word::Frozen) | receiver | the number of the move whose lane it does not read any more |
//!
//! With `Up` the sender also publishes where in the ring the lane begins, with `Ended` where it ends and how many of
//! its bytes follow on TCP. With `Frozen` the receiver publishes up to where it has read.
//!
//! # Transitions of the sender
//!
//! | state | event | stores | next state | the send goes |
//! |---|---|---|---|---|
//! | `Tcp` | the connection is busy | `Ask = k` | `Asking` | by TCP |
//! | `Asking` | `Ok != k` | | | by TCP |
//! | `Asking` | `Ok = k`, `Frozen != k` | `UpAt`, `Up = k` | `Lane` | by the lane |
//! | `Asking` | `Frozen = k` | | `Tcp` | by TCP |
//! | `Asking` | goes back | `Withdrawn = k` | `Tcp` | |
//! | `Lane` | `Frozen != k` | | | by the lane |
//! | `Lane` | goes back, `Frozen != k` after a fence | `Down = k`, `Ended = k, repeated` | `Resending` | |
//! | `Lane` | `Frozen = k`, on the way to a send or back | `Down = k`, `Ended = k, resent` | `Resending` | |
//! | `Resending` | all that it knows to be unread in the lane was written to TCP | | `Tcp` | by TCP |
//!
//! # Transitions of the receiver
//!
//! | state | event | stores | next state | the receive goes |
//! |---|---|---|---|---|
//! | `Plain` | no new `Ask` | | | to the kernel, unchanged |
//! | `Plain` | a new `Ask = k`; `k = 1` without one | `Ok = k` | `Careful` | as there |
//! | `Careful` | `Ask < k`, and an urgent byte has arrived | | as it freezes | |
//! | `Careful` | `Up != k`, `n` bytes had arrived before | | | to the kernel, for at most `n` bytes |
//! | `Careful` | `Withdrawn >= k`, `Up != k` | | `Plain` | to the kernel |
//! | `Careful` | `Up = k` | | `Capped` | as there |
//! | `Capped` | bytes are left before `UpAt` | | | to the kernel, for at most these |
//! | `Capped` | none is left | | `Lane` | to the lane |
//! | `Lane` | `Ended = k, repeated`; its end is reached or all repeated bytes are here | | `Skipping` | nowhere yet |
//! | `Skipping` | what was read in the lane is received from TCP, and dropped | | `Plain` | to the kernel |
//! | all but `Plain` | freezes, `Down != k` after a fence | `Frozen = k` | `Plain` | to the kernel |
//! | all but `Plain` | freezes, `Down = k` | `Frozen = k` | `Freezing` | nowhere yet |
//! | `Freezing` | `Ended = k, resent` | | `Plain` | to the kernel |
//! | `Freezing` | `Ended = k, repeated`, the lane was entered | | `Skipping` | nowhere yet |
//! | `Freezing` | `Ended = k, repeated`, it was not | | `Plain` | to the kernel |
//!
//! # Why it holds
//!
//! **Consent.** A receiver that looks for `Up`, is preempted, and then receives from the kernel may cross the point
//! where the stream continues in the lane. So the sender begins a move only with consent, and a receiver that has
//! consented takes no byte of which it does not know that it was written before: it counts what has arrived, looks for
//! `Up` again, and receives at most that many bytes. The bytes counted were in the kernel before `Up` was loaded as
//! unchanged, and the sender writes to TCP again only after `Up`.
//!
//! A receiver may consent to the first move before the sender asks for it, so that the sender's next bytes use the
//! lane. A sender that has asked withdraws before it sends an urgent byte, which is not counted as others are. One that
//! has not may send it at any time, so the receiver looks for one, and then leaves the stream to the kernel.
//!
//! **Freezing.** A receiver can leave a lane at once, even if the sender never runs again before somebody else reads
//! the socket: the unread bytes are still in memory of the sender, which writes them to TCP when it finds `Frozen`.
//!
//! **Repeating.** A sender that goes back by itself also writes to TCP all that is unread in the lane, as far as it
//! knows. So TCP has the whole rest of the stream whenever neither direction is on a lane, and whoever gets the socket
//! may receive it. The receiver may have read more than the sender knows: it drops as many bytes from TCP as it has
//! read in the lane. It leaves the lane once TCP has all that is repeated. Until then it reads on in the lane, so that
//! nothing is lost if the sender dies.
//!
//! A receiver that freezes and a sender that goes back at the same time must agree on what TCP will have: what is
//! unread according to the one, or to the other. Each stores its word (`Down`, `Frozen`), passes a fence, and loads the
//! other's. So at least one of them sees the other. If the receiver does not see `Down`, the sender will see `Frozen`
//! before it writes to TCP. If it does, it waits for `Ended`, which says what the sender has seen.
//!
//! A sender that dies before it has written the rest to TCP takes that with it, unless the receiver is in the lane, or
//! still has the memory of the lane: as long as `Ended` is missing, nothing of the rest is in TCP.
//!
//! **Meeting anew.** Another process may take the place of an end, after a fork. The two that go on begin with new
//! words, and with machines in their initial states, once the sender is in `Tcp` or `Asking` and the receiver is
//! `Plain`: then TCP has the whole rest of the stream, and nobody loads the words of the meeting before.
//!
//! **Search.** `tests/search.rs` explores every interleaving of two ends step by step, with stores that are delayed as
//! long as the processor may, ends that crash between two steps, and a holder of the socket who knows nothing of all
//! this. Each of the rules above is left out once, and a wrong or missing byte is found.

mod receiving;
mod sending;

pub use receiving::{ReceiveBy, Receiving};
pub use sending::{SendBy, Sending};

/// The number of a move of one direction. Numbers only grow; [`MoveNumber::NONE`] comes before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveNumber(u64);

impl MoveNumber {
    /// No move.
    pub const NONE: Self = Self(0);

    /// Returns the number in a word that an end has published.
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns the word that publishes this number.
    pub fn to_word(self) -> u64 {
        self.0
    }

    fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The word [`Word::Ended`]: which move has ended, and what of its lane follows on TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndWord {
    /// The move that has ended.
    pub number: MoveNumber,
    /// The receiver had [frozen](Receiving::freeze) the lane: the bytes that it has not read follow on TCP. Otherwise
    /// those follow of which the sender does not know that they are read.
    pub is_resent: bool,
}

impl EndWord {
    /// Decodes a word that the sender has published.
    pub fn from_word(word: u64) -> Self {
        Self { number: MoveNumber(word >> 1), is_resent: word & 1 == 1 }
    }

    /// Returns the word that publishes this end.
    pub fn to_word(self) -> u64 {
        self.number.0 << 1 | u64::from(self.is_resent)
    }
}

/// The words that the two ends of a direction publish to each other; the crate documentation says what they mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the table of the crate documentation describes them")]
pub enum Word {
    Ask,
    Up,
    Withdrawn,
    Down,
    Ended,
    Ok,
    Frozen,
}

/// The words that both ends publish to each other.
///
/// All calls concern one direction, and the caller excludes other calls on the same end of it.
pub trait Words {
    /// Why a call may stop the machine. [`std::convert::Infallible`] in a program; in the search, that another end runs
    /// first.
    type Stop;

    /// Loads a word that the peer publishes, with acquire order.
    ///
    /// # Errors
    /// [`Words::Stop`], here and in all calls of the machines.
    fn load(&mut self, word: Word) -> Result<u64, Self::Stop>;

    /// Stores a word that this end publishes, with release order.
    fn store(&mut self, word: Word, value: u64) -> Result<(), Self::Stop>;

    /// Orders all earlier stores before all later loads.
    fn fence(&mut self) -> Result<(), Self::Stop>;
}

/// What a sender needs besides the words: the kernel's counts, and the lane.
pub trait SenderIo: Words {
    /// Returns the number of bytes that this end has ever written to TCP; `None` if the kernel cannot tell now.
    fn bytes_written(&mut self) -> Result<Option<u64>, Self::Stop>;

    /// Restarts the lane, and publishes where in the ring it begins and that `bytes_written` bytes come before it.
    fn publish_begin(&mut self, bytes_written: u64) -> Result<(), Self::Stop>;

    /// Completes all records, and publishes where in the ring the lane ends. The caller will write to TCP what the
    /// receiver has left: behind the position that it has published, if `is_frozen`; otherwise, what this end does not
    /// know to be read, and their number is published too.
    fn publish_end(&mut self, is_frozen: bool) -> Result<(), Self::Stop>;
}

/// What a receiver needs besides the words: the kernel's counts, and the lane.
pub trait ReceiverIo: Words {
    /// Returns the number of bytes that this end has ever read from TCP; `None` if the kernel cannot tell now.
    fn bytes_read(&mut self) -> Result<Option<u64>, Self::Stop>;

    /// Returns the number of bytes that have arrived by TCP and are unread.
    fn bytes_available(&mut self) -> Result<u64, Self::Stop>;

    /// Returns whether an urgent byte has arrived, which only the program's own calls can receive or pass.
    fn has_urgent_byte(&mut self) -> Result<bool, Self::Stop>;

    /// Returns the number of bytes that the sender had written to TCP when the move began.
    fn begins_at(&mut self) -> Result<u64, Self::Stop>;

    /// Begins to read the lane where the sender has published that it begins.
    fn enter(&mut self) -> Result<(), Self::Stop>;

    /// Returns whether everything before the published end of the lane is read; `None` if no record is unread before an
    /// end that is elsewhere, which no correct sender publishes.
    fn has_reached_end(&mut self) -> Result<Option<bool>, Self::Stop>;

    /// Returns the number of bytes of the lane that follow on TCP, as the sender has published with its end.
    fn bytes_repeated(&mut self) -> Result<u64, Self::Stop>;

    /// Returns the number of bytes that are unread in the lane, which has ended.
    fn bytes_unread(&mut self) -> Result<u64, Self::Stop>;

    /// Receives at most `bytes_max` bytes from TCP, without waiting, and drops them. Returns their number.
    fn drop_bytes(&mut self, bytes_max: u64) -> Result<u64, Self::Stop>;

    /// Publishes up to where in the lane this end has read; `has_entered` is false if it has not
    /// [entered](ReceiverIo::enter) the lane of this move.
    fn publish_cursor(&mut self, has_entered: bool) -> Result<(), Self::Stop>;
}

/// The peer published a word that no correct peer publishes there: the connection cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt {
    /// Which word was wrong.
    pub what: &'static str,
    /// The wrong value.
    pub value: u64,
}

impl std::fmt::Display for Corrupt {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "path: peer published {} {}: the connection is reset", self.what, self.value)
    }
}

impl std::error::Error for Corrupt {}

/// Why a step of a machine has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure<S> {
    /// The peer violated the protocol.
    Corrupt(Corrupt),
    /// The I/O stopped the machine, which is to be dropped.
    Stopped(S),
}

impl<S> From<S> for Failure<S> {
    fn from(stop: S) -> Self {
        Self::Stopped(stop)
    }
}

impl Failure<std::convert::Infallible> {
    /// Returns the violation, where nothing stops the machine.
    pub fn into_corrupt(self) -> Corrupt {
        match self {
            Self::Corrupt(corrupt) => corrupt,
            Self::Stopped(never) => match never {},
        }
    }
}
