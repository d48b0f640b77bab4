//! Connections that have not proved busy: a few counters in the descriptor table, and nothing else.
//!
//! A connection is worth a lane once it has carried some requests. Both ends count them alike: a request begins where
//! the connecting end sends after it has received, or where the accepting end receives after it has sent. A stream in
//! one direction counts as a request for every [`TRANSFERS_PER_REQUEST`] transfers. The accepting end announces itself
//! after its third answer. The connecting end tries to meet it with its fourth request, then with its eighth, sixteenth
//! and so on: an attempt costs a few system calls, and the peer may never load this library. Both do so after they have
//! sent, so that the peer does not wait for it. The first attempt may come too early for the announcement; the
//! connecting end then tries once more when it has the answer, by which time the peer has announced itself. The
//! accepting end answers the proposal when it receives the fifth request, and the sixth uses the lane. The ends of a
//! TLS connection with one request do not meet: its handshake and the alert at its end count as one request each.

use crate::holders::Hold;
use meeting::Role;
use std::sync::atomic::{AtomicU32, Ordering};

/// Transfers in one direction that count as one request.
const TRANSFERS_PER_REQUEST: u32 = 8;
/// The request after whose answer the accepting end announces itself.
const ANNOUNCED_AT: u32 = 3;
/// The request with which the connecting end first proposes to meet.
const PROPOSED_AT: u32 = 4;
/// The first requests, in each of which an end that expects the other checks whether it is there.
const EAGER_REQUESTS: u32 = 8;
/// Transfers after which a process checks whether it is the only one that holds the connection.
const TRANSFERS_PER_CHECK: u64 = 16;

/// A transfer of bytes, as this end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// This end has sent.
    Sent,
    /// This end has received.
    Received,
}

/// What a transfer is the occasion for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// Nothing.
    None,
    /// To check whether the other end has answered or called.
    Check,
    /// To announce this end, or to propose to meet, depending on its role.
    Meet,
    /// To check whether other processes still hold the connection.
    Holders,
}

/// The counters of a connection, in one word.
///
/// From the lowest bit: the role (1 bit), the direction of the last transfer (2 bits), the number of transfers since
/// the direction has changed (4 bits), the number of requests (24 bits), the calls that send and that receive now
/// (8 bits each), a number that tells the connection from earlier ones with the same descriptor (13 bits), and whether
/// the connection was held at a fork, so that other processes may hold it (1 bit). As long as these do, direction,
/// transfers and requests do not matter. In their place are the [`Hold`] (24 bits), whether this process has released
/// it (1 bit), whether it never takes over (1 bit), and the number of transfers since the last check (4 bits).
///
/// Calls are counted while they are in the kernel because a direction must not move to a lane before they have
/// returned: they write or take bytes at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Young(u64);

const DIRECTION_SHIFT: u32 = 1;
const RUN_SHIFT: u32 = 3;
const REQUESTS_SHIFT: u32 = 7;
const REQUESTS_MAX: u32 = (1 << 24) - 1;
const SENDING_SHIFT: u32 = 31;
const RECEIVING_SHIFT: u32 = 39;
const NUMBER_SHIFT: u32 = 47;
const NUMBERS: u32 = 1 << 13;
const SHARED: u64 = 1 << 60;
const HOLD_SHIFT: u32 = 1;
const RELEASED: u64 = 1 << (HOLD_SHIFT + Hold::BITS);
const FINAL: u64 = RELEASED << 1;
const TRANSFERS_SHIFT: u32 = HOLD_SHIFT + Hold::BITS + 2;
const _: () = assert!(TRANSFERS_PER_CHECK << TRANSFERS_SHIFT <= 1 << SENDING_SHIFT, "the counter has its bits");
/// The bits that a transfer does not change.
const KEPT: u64 = u64::MAX << SENDING_SHIFT | 1;
/// The most calls that are counted in the kernel at once in one direction.
const CALLS_MAX: u32 = 0xff;

/// Connections so far.
static CONNECTIONS: AtomicU32 = AtomicU32::new(0);

impl Young {
    /// The bits of a word that counters use.
    pub const BITS: u32 = NUMBER_SHIFT + NUMBERS.trailing_zeros() + 1;

    /// Returns the counters of a new connection.
    pub fn new(role: Role) -> Self {
        Self(u64::from(matches!(role, Role::Accepted)) | new_number())
    }

    /// Decodes the counters from a word.
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns the counters as a word.
    pub const fn to_word(self) -> u64 {
        self.0
    }

    /// Returns the number that tells the connection from earlier ones with the same descriptor.
    pub const fn number(self) -> u32 {
        (self.0 >> NUMBER_SHIFT) as u32 % NUMBERS
    }

    /// Returns the number of calls that make such transfers in the kernel now.
    pub const fn calls(self, transfer: Transfer) -> u32 {
        (self.0 >> calls_shift(transfer)) as u32 & CALLS_MAX
    }

    /// Returns whether no call is in the kernel now.
    pub const fn is_idle(self) -> bool {
        self.calls(Transfer::Sent) == 0 && self.calls(Transfer::Received) == 0
    }

    /// Returns the connection that is held at a fork: other processes may hold it from now on.
    pub fn shared(self, hold: Hold) -> Self {
        Self(self.0 & KEPT | SHARED | hold.to_bits() << HOLD_SHIFT)
    }

    /// Returns what other processes that may hold the connection share with this one; `None` if there are none.
    pub fn hold(self) -> Option<Hold> {
        (self.0 & SHARED != 0).then(|| Hold::from_bits(self.0 >> HOLD_SHIFT))
    }

    /// Returns whether this process has released its hold.
    pub fn is_released(self) -> bool {
        self.0 & SHARED != 0 && self.0 & RELEASED != 0
    }

    /// Returns the connection with or without a hold of this process.
    pub fn with_released(self, is_released: bool) -> Self {
        Self(if is_released { self.0 | RELEASED } else { self.0 & !RELEASED })
    }

    /// Returns whether this process may use lanes once no other one holds the connection.
    pub fn may_take_over(self) -> bool {
        self.hold().is_some() && self.0 & (RELEASED | FINAL) == 0
    }

    /// Returns the connection of which this process is the only holder: its requests are counted from the beginning.
    pub fn taken_over(self) -> Self {
        Self(self.0 & KEPT & !SHARED)
    }

    /// Returns the connection in the child of a fork, in which no call of another thread exists. If calls were in the
    /// kernel, one may be of the thread that has forked, in a signal handler, and may go on in the child: this process
    /// never takes over then.
    pub fn in_child(self) -> Self {
        let is_final = if self.is_idle() { 0 } else { FINAL };
        let kept = ((1 << SENDING_SHIFT) - 1) | SHARED;
        Self(self.0 & kept | is_final | new_number())
    }

    /// Counts a call that begins to make a transfer. Returns `None` if there are too many, or if this process has
    /// released its hold.
    pub fn enter(self, transfer: Transfer) -> Option<Self> {
        (self.calls(transfer) < CALLS_MAX && !self.is_released())
            .then_some(Self(self.0.wrapping_add(1 << calls_shift(transfer))))
    }

    /// Counts the return of a call that was [counted](Young::enter).
    pub fn leave(self, transfer: Transfer) -> Self {
        debug_assert_ne!(self.calls(transfer), 0);
        Self(self.0.wrapping_sub(1 << calls_shift(transfer)))
    }

    /// Returns which end this is.
    pub const fn role(self) -> Role {
        if self.0 & 1 == 0 { Role::Connected } else { Role::Accepted }
    }

    /// Returns the number of requests so far.
    pub const fn requests(self) -> u32 {
        (self.0 >> REQUESTS_SHIFT) as u32 & REQUESTS_MAX
    }

    /// Counts a transfer, and returns what it is the occasion for.
    #[must_use]
    pub fn count(self, transfer: Transfer) -> (Self, Occasion) {
        if self.0 & SHARED != 0 {
            return self.count_shared();
        }
        let direction = match transfer {
            Transfer::Sent => 1,
            Transfer::Received => 2,
        };
        let begins_requests =
            matches!((self.role(), transfer), (Role::Connected, Transfer::Sent) | (Role::Accepted, Transfer::Received));
        let is_same = self.0 >> DIRECTION_SHIFT & 3 == direction;
        let run = if is_same { (self.0 >> RUN_SHIFT) as u32 % 16 + 1 } else { 0 };
        let is_request = if is_same { run == TRANSFERS_PER_REQUEST } else { begins_requests };
        let run = if run == TRANSFERS_PER_REQUEST { 0 } else { run };
        let requests = (self.requests() + u32::from(is_request)).min(REQUESTS_MAX);
        let (is_sent, is_connected) = (transfer == Transfer::Sent, self.role() == Role::Connected);
        // An accepting end looks for a proposal when it receives: the peer proposes while it waits for an answer.
        let is_second_try = is_connected && requests == PROPOSED_AT;
        let (may_meet, may_check) =
            if is_same { (is_request, is_request) } else { (is_sent || is_second_try, is_sent == is_connected) };
        let counters =
            direction << DIRECTION_SHIFT | u64::from(run) << RUN_SHIFT | u64::from(requests) << REQUESTS_SHIFT;
        let next = Self(self.0 & KEPT | counters);
        (next, self.occasion(requests, may_meet, may_check))
    }

    fn count_shared(self) -> (Self, Occasion) {
        let mask = (TRANSFERS_PER_CHECK - 1) << TRANSFERS_SHIFT;
        let transfers = self.0.wrapping_add(1 << TRANSFERS_SHIFT) & mask;
        let occasion = if transfers == 0 { Occasion::Holders } else { Occasion::None };
        (Self(self.0 & !mask | transfers), occasion)
    }

    fn occasion(self, requests: u32, may_meet: bool, may_check: bool) -> Occasion {
        let first = match self.role() {
            Role::Accepted => ANNOUNCED_AT,
            Role::Connected => PROPOSED_AT,
        };
        let is_doubled = requests.is_multiple_of(first) && (requests / first).is_power_of_two();
        // An accepting end finds nothing earlier.
        let is_awaited =
            requests > PROPOSED_AT && (requests < EAGER_REQUESTS || requests.is_multiple_of(EAGER_REQUESTS));
        match () {
            () if may_meet && is_doubled => Occasion::Meet,
            () if may_check && is_awaited => Occasion::Check,
            () => Occasion::None,
        }
    }
}

/// Returns the number of another connection, at its place.
fn new_number() -> u64 {
    u64::from(CONNECTIONS.fetch_add(1, Ordering::Relaxed) % NUMBERS) << NUMBER_SHIFT
}

const fn calls_shift(transfer: Transfer) -> u32 {
    match transfer {
        Transfer::Sent => SENDING_SHIFT,
        Transfer::Received => RECEIVING_SHIFT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of the transfers, from 1 on, that were an occasion of the given kind.
    fn occasions(role: Role, transfers: impl IntoIterator<Item = Transfer>, wanted: Occasion) -> Vec<usize> {
        let mut young = Young::new(role);
        let mut found = Vec::new();
        for (number, transfer) in transfers.into_iter().enumerate() {
            let (next, occasion) = young.count(transfer);
            young = next;
            assert_eq!(young.role(), role);
            if occasion == wanted {
                found.push(number + 1);
            }
        }
        found
    }

    fn requests(role: Role, count: usize) -> Vec<Transfer> {
        let one = match role {
            Role::Connected => [Transfer::Sent, Transfer::Received],
            Role::Accepted => [Transfer::Received, Transfer::Sent],
        };
        one.repeat(count)
    }

    #[test]
    fn an_accepting_end_announces_itself_after_its_third_answer() {
        let found = occasions(Role::Accepted, requests(Role::Accepted, 20), Occasion::Meet);
        assert_eq!(found, [6, 12, 24]);
    }

    #[test]
    fn a_connecting_end_proposes_with_its_fourth_request_and_its_answer_and_then_ever_more_rarely() {
        let found = occasions(Role::Connected, requests(Role::Connected, 30), Occasion::Meet);
        assert_eq!(found, [7, 8, 15, 31]);
    }

    #[test]
    fn one_request_in_many_pieces_is_no_occasion() {
        let pieces = [[Transfer::Sent; 3].as_slice(), &[Transfer::Received; 7]].concat();
        assert_eq!(occasions(Role::Connected, pieces.iter().copied(), Occasion::None).len(), pieces.len());
    }

    #[test]
    fn a_stream_in_one_direction_meets_too() {
        for role in [Role::Connected, Role::Accepted] {
            for transfer in [Transfer::Sent, Transfer::Received] {
                let found = occasions(role, [transfer; 40], Occasion::Meet);
                let latest = TRANSFERS_PER_REQUEST * PROPOSED_AT + 1;
                assert!(found[0] <= latest as usize, "{role:?} {transfer:?}: {found:?}");
            }
        }
    }

    #[test]
    fn an_announced_end_checks_often_at_first_and_rarely_later() {
        let found = occasions(Role::Accepted, requests(Role::Accepted, 100), Occasion::Check);
        assert_eq!(found[..4], [9, 11, 13, 15]);
        assert!(found.len() < 18, "{found:?}");
    }

    #[test]
    fn counters_do_not_overflow() {
        let mut young = Young::from_word((1 << SENDING_SHIFT) - 8);
        for _ in 0..100 {
            (young, _) = young.count(Transfer::Sent);
            (young, _) = young.count(Transfer::Received);
        }
        assert_eq!(young.requests(), REQUESTS_MAX);
    }

    #[test]
    fn calls_and_transfers_are_counted_apart() {
        let new = Young::new(Role::Accepted);
        let mut young = new;
        for calls in 0..CALLS_MAX {
            assert_eq!((young.calls(Transfer::Sent), young.calls(Transfer::Received)), (calls, 0));
            young = young.enter(Transfer::Sent).expect("a free place");
        }
        assert_eq!(young.enter(Transfer::Sent), None);
        young = young.enter(Transfer::Received).expect("a free place");
        (young, _) = young.count(Transfer::Received);
        assert_eq!((young.requests(), young.number(), young.role()), (1, new.number(), Role::Accepted));
        assert_eq!((young.calls(Transfer::Sent), young.calls(Transfer::Received)), (CALLS_MAX, 1));
        (0..CALLS_MAX).for_each(|_| young = young.leave(Transfer::Sent));
        assert_eq!(young.leave(Transfer::Received), new.count(Transfer::Received).0);
    }

    #[test]
    fn a_shared_connection_is_checked_every_sixteenth_transfer_and_keeps_its_calls() {
        let hold = Hold::from_bits(0x00ab_cdef);
        let young = Young::new(Role::Accepted).enter(Transfer::Received).expect("a free place");
        let mut shared = young.count(Transfer::Received).0.shared(hold);
        let mut checks = Vec::new();
        for number in 1..=48 {
            let (next, occasion) = shared.count(if number % 3 == 0 { Transfer::Sent } else { Transfer::Received });
            shared = next;
            assert_eq!((shared.hold(), shared.role(), shared.number()), (Some(hold), Role::Accepted, young.number()));
            assert_eq!((shared.calls(Transfer::Received), shared.calls(Transfer::Sent)), (1, 0));
            if occasion == Occasion::Holders {
                checks.push(number);
            }
        }
        assert_eq!(checks, [16, 32, 48]);
        assert!(shared.may_take_over());
        assert_eq!(shared.taken_over(), young);
        assert_eq!(young.hold(), None);
    }

    #[test]
    fn a_released_connection_has_no_calls_and_is_not_taken_over() {
        let shared = Young::new(Role::Connected).shared(Hold::from_bits(0));
        let released = shared.with_released(true);
        assert!(released.is_released() && !released.may_take_over() && released.hold().is_some());
        assert_eq!((released.enter(Transfer::Sent), released.enter(Transfer::Received)), (None, None));
        assert_eq!(released.with_released(false), shared);
    }

    #[test]
    fn the_child_of_a_fork_has_no_calls_of_its_parent() {
        let shared = Young::new(Role::Accepted).shared(Hold::from_bits(7));
        let child = shared.in_child();
        assert!(child.may_take_over() && child.is_idle() && child.hold() == shared.hold());
        assert_eq!(child.role(), Role::Accepted);
        assert_ne!(child.number(), shared.number());
        let child = shared.enter(Transfer::Sent).expect("a free place").in_child();
        assert!(child.is_idle() && child.hold() == shared.hold() && !child.may_take_over());
    }

    #[test]
    fn connections_have_different_numbers() {
        assert_ne!(Young::new(Role::Connected).number(), Young::new(Role::Connected).number());
    }
}
