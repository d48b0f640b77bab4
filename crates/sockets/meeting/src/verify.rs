//! Whether a peer that has sent a message is the other endpoint of the connection.
//!
//! The keyed name has brought the two together. What it does not show: that the peer is of a user whom this process
//! trusts, and that its TCP socket is the other endpoint *now*. A **stale pair** has the same addresses: the reset of
//! an earlier connection was lost, and its port was used again, for a connection that a packet filter leads elsewhere.
//! The survivor of the earlier one and an endpoint of the later one then find each other, in state ESTABLISHED, and
//! even look-ups of the kernel confirm both cookies. Their bytes do not fit.
//!
//! # Byte counts
//!
//! For the stream from X to Y, at any moment: `acked(X) <= received(Y) <= written(X)`. A byte is acknowledged after Y's
//! kernel has received it, and received after X has written it. All counts only grow, so a smaller count may be read
//! earlier and a larger one later. Let `theirs` be the counts in the peer's message, `before` this endpoint's counts,
//! read before the peer made its message, and `after` its counts, read after the message has arrived:
//!
//! | inequality | stream | because |
//! |---|---|---|
//! | `before.received <= theirs.written` | from the peer | received before it was counted as written |
//! | `theirs.acked <= after.received` | from the peer | acknowledged, so received by then |
//! | `before.acked <= theirs.received` | to the peer | acknowledged before, so received by then |
//! | `theirs.received <= after.written` | to the peer | received, so written by then |
//!
//! The window is tight on the connecting side: `before` is read for the proposal, the peer's counts after it has read
//! the proposal, `after` when its answer has arrived. The accepting side's `before` is that of its announcement,
//! because nothing else is known to precede the proposal; the connecting side, which may still refuse, makes up for it.
//!
//! Two histories of the same number of bytes in both directions cannot be told apart. They part with the next bytes,
//! so a direction must compare again when it moves to a lane: the receiver's count with the sender's.
//!
//! # Cookies
//!
//! Where the kernel answers, the socket with the reversed addresses must be connected, have the cookie that the message
//! states, and belong to the peer's user. That stops a process that claims the connection of another user's process,
//! and each endpoint that has been replaced meanwhile.
//!
//! # Other users and network namespaces
//!
//! In a rack that several users share, the kernel has to answer ([`Evidence::Proof`]). A socket of the same network
//! namespace that was made by the peer's user is the peer's. Otherwise, the peer must prove it by the bytes of the
//! connection ([`proof`](crate::proof)): its process may have changed its user since; and of another network namespace,
//! in which the peer may have configured any addresses, the kernel says only which socket is there.
//!
//! # User namespaces
//!
//! In a user namespace that has numbers only for some users (`PrivateUsers=` of systemd, containers with a range of
//! their own), the kernel tells a process nothing about the others. There, each endpoint states its user, and its
//! message has an authentication code under a key that only programs of the two users can read ([`UserKeys`]). The code
//! covers both users, so that it is of no use towards a third; that of an answer covers the secret of the proposal. An
//! endpoint that does not see its peer's user tells nothing to a peer without the code. That the peer is the other
//! endpoint, the bytes prove.

use std::os::fd::BorrowedFd;

use crate::counts::Counts;
use crate::diag::{self, LookUp};
use crate::endpoint::Endpoint;
use crate::message::{Message, StatedUser};
use crate::reason::Reason;

/// Who may be met.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Whether a peer of a user, by `SO_PEERCRED`, may be met at an endpoint; otherwise why not. In a user namespace,
    /// the kernel reports users without a number there as the overflow user (`user_namespaces(7)`), who must not be
    /// allowed, but may be [`PeerUser::Hidden`].
    pub admits: fn(u32, &Endpoint) -> Result<PeerUser, Reason>,
    /// What has to show that the peer is the other endpoint.
    pub evidence: Evidence,
    /// How programs of several users know each other where the kernel does not tell the peer's user.
    pub keys: Option<UserKeys>,
}

/// The user of a peer, as far as the kernel tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerUser {
    /// A user, by the number in this process's user namespace.
    Known(u32),
    /// A user without a number there. The peer must state which, and show by the authentication code of its message
    /// that it has the key of that user and of this process's.
    Hidden,
}

/// Keys that only programs of two users have.
#[derive(Clone, Copy, Debug)]
pub struct UserKeys {
    /// The user of this process, by its number on the machine.
    pub own: u32,
    /// Returns the key of this process's user and of another one, by its number on the machine.
    pub key: fn(u32) -> Result<UserKey, Reason>,
    /// Whether a peer of a user, by its number on the machine, may be met at an endpoint; otherwise why not.
    pub admits: fn(u32, &Endpoint) -> Result<(), Reason>,
}

/// A key of two users.
pub type UserKey = [u8; 16];

/// The user of a peer with whom this process's user has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partner {
    pub(crate) user: u32,
    pub(crate) key: UserKey,
}

impl Policy {
    /// Returns a message of this endpoint, which states its user. A partner sees that it comes from one of its users.
    pub(crate) fn stated(&self, message: Message, partner: Option<Partner>, answered: u64) -> Message {
        let user = self.keys.map(|keys| StatedUser { number: keys.own, mac: None });
        let message = Message { user, ..message };
        partner.map_or(message, |Partner { user, key }| message.with_mac(&key, user, answered))
    }

    /// Returns the partner whom a connecting endpoint meets in a user's directory.
    ///
    /// # Errors
    /// [`Reason::Unmapped`] and others, if the kernel does not tell the peer's user and there is no key.
    pub(crate) fn partner_of_directory(&self, user: Option<u32>, peer: PeerUser) -> Result<Option<Partner>, Reason> {
        let other = self.keys.zip(user).filter(|(keys, user)| *user != keys.own);
        let partner = other.ok_or(Reason::Unmapped);
        let partner = partner.and_then(|(keys, user)| (keys.key)(user).map(|key| Partner { user, key }));
        self.required_if_hidden(partner, peer)
    }

    /// Returns the partner who has sent a proposal.
    ///
    /// # Errors
    /// Why it is none, if the kernel does not tell the peer's user: nothing may be told to it then.
    pub(crate) fn partner_of_proposal(
        &self,
        message: &Message,
        peer: PeerUser,
        endpoint: &Endpoint,
    ) -> Result<Option<Partner>, Reason> {
        let with_mac = message.user.filter(|user| user.mac.is_some()).zip(self.keys).ok_or(Reason::Unmapped);
        let partner = with_mac.and_then(|(StatedUser { number, .. }, keys)| {
            let key = (keys.key)(number)?;
            if !message.has_mac(&key, keys.own, 0) {
                return Err(Reason::User);
            }
            if peer == PeerUser::Hidden {
                (keys.admits)(number, endpoint)?;
            }
            Ok(Partner { user: number, key })
        });
        self.required_if_hidden(partner, peer)
    }

    /// Checks that an answer is the partner's, if the kernel does not tell the peer's user.
    pub(crate) fn check_answer(
        &self,
        message: &Message,
        peer: PeerUser,
        partner: Option<Partner>,
        own_secret: u64,
    ) -> Result<(), Reason> {
        let is_partners = self.keys.zip(partner).is_some_and(|(keys, Partner { user, key })| {
            message.user.is_some_and(|stated| stated.number == user) && message.has_mac(&key, keys.own, own_secret)
        });
        if peer != PeerUser::Hidden || is_partners { Ok(()) } else { Err(Reason::Unmapped) }
    }

    fn required_if_hidden(&self, partner: Result<Partner, Reason>, peer: PeerUser) -> Result<Option<Partner>, Reason> {
        match peer {
            PeerUser::Hidden => partner.map(Some),
            PeerUser::Known(_) => Ok(partner.ok()),
        }
    }
}

/// What has to show that a peer is the other endpoint of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The byte counts.
    Counts,
    /// Also a look-up of the peer's socket, if the kernel answers. It takes five system calls.
    LookUp,
    /// The look-up, and the bytes of the connection unless the look-up is a proof.
    Proof,
}

/// What else has to show that a peer is the other endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Nothing.
    Complete,
    /// The bytes of the connection.
    NeedsProof,
}

/// This endpoint's counts around a message of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Counts read before the peer made the message.
    pub before: Counts,
    /// Counts read after the message had arrived.
    pub after: Counts,
}

/// Decides whether a message comes from the other endpoint of a connection.
///
/// # Errors
/// [`Reason::Role`], [`Reason::Namespace`], [`Reason::Counts`], [`Reason::Cookie`], [`Reason::User`],
/// [`Reason::NoLookUp`].
pub fn verify(
    endpoint: &Endpoint,
    window: &Window,
    message: &Message,
    look_up: LookUp,
    (peer, evidence): (PeerUser, Evidence),
) -> Result<Trust, Reason> {
    if message.role != endpoint.role.opposite() {
        return Err(Reason::Role);
    }
    let (ours, theirs) = (endpoint.netns_cookie, message.netns_cookie);
    let is_here = ours == 0 || theirs == 0 || ours == theirs;
    if !is_here && evidence != Evidence::Proof {
        return Err(Reason::Namespace);
    }
    if !fits(window, &message.counts) {
        return Err(Reason::Counts);
    }
    match look_up {
        LookUp::Unavailable if evidence == Evidence::Proof => Err(Reason::NoLookUp),
        LookUp::Unavailable => Ok(Trust::Complete),
        LookUp::Nothing => Err(Reason::Cookie),
        LookUp::Found(entry) if !entry.is_connected() || entry.cookie != message.cookie => Err(Reason::Cookie),
        LookUp::Found(entry) if is_here && PeerUser::Known(entry.uid) == peer => Ok(Trust::Complete),
        LookUp::Found(_) if evidence == Evidence::Proof => Ok(Trust::NeedsProof),
        LookUp::Found(_) => Err(Reason::User),
    }
}

/// Looks up the peer of a message: in the endpoint's network namespace if the peer is in it too, and otherwise by the
/// socket that it has passed.
pub(crate) fn look_up(
    endpoint: &Endpoint,
    message: &Message,
    passed: Option<BorrowedFd<'_>>,
    evidence: Evidence,
) -> LookUp {
    let through = |cookie| passed.map_or(LookUp::Unavailable, |it| diag::look_up_through(it, endpoint, cookie));
    match evidence {
        Evidence::Counts => LookUp::Unavailable,
        Evidence::LookUp => diag::look_up_peer(endpoint),
        Evidence::Proof if message.netns_cookie != endpoint.netns_cookie => through(message.netns_cookie),
        Evidence::Proof => match diag::look_up_peer(endpoint) {
            // A sandbox may deny this process such sockets.
            LookUp::Unavailable => through(endpoint.netns_cookie),
            found => found,
        },
    }
}

/// Returns whether a peer with the counts `theirs` can be the other endpoint.
pub fn fits(window: &Window, theirs: &Counts) -> bool {
    let Window { before, after } = window;
    before.received <= theirs.written
        && theirs.acked <= after.received
        && before.acked <= theirs.received
        && theirs.received <= after.written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Role;
    use crate::diag::Entry;
    use crate::message::{Kind, Memory};
    use crate::tuple::Tuple;
    use proptest::prelude::*;

    /// A stream with what its writer and its reader count.
    #[derive(Clone, Copy, Debug, Default)]
    struct Stream {
        written: u64,
        received: u64,
        acked: u64,
        consumed: u64,
    }

    impl Stream {
        /// Lets each count grow as far as it may, by a share of 256 parts.
        fn advance(&mut self, [write, receive, acknowledge, consume]: [u8; 4]) {
            let part = |from: u64, to: u64, share: u8| from + (to - from) * u64::from(share) / 255;
            self.written += u64::from(write);
            self.received = part(self.received, self.written, receive);
            self.acked = part(self.acked, self.received, acknowledge);
            self.consumed = part(self.consumed, self.received, consume);
        }
    }

    fn counts(outgoing: &Stream, incoming: &Stream) -> Counts {
        let (written, acked) = (outgoing.written, outgoing.acked);
        Counts { written, acked, received: incoming.received, consumed: incoming.consumed }
    }

    proptest! {
        #[test]
        fn the_counts_of_two_endpoints_of_one_connection_fit_at_any_moment(
            steps in prop::collection::vec(any::<[[u8; 4]; 2]>(), 1..40),
            moments in any::<[prop::sample::Index; 3]>(),
        ) {
            let (mut to, mut from) = (Stream::default(), Stream::default());
            let (mut ours, mut theirs) = (vec![counts(&to, &from)], vec![counts(&from, &to)]);
            for [a, b] in steps {
                to.advance(a);
                from.advance(b);
                ours.push(counts(&to, &from));
                theirs.push(counts(&from, &to));
            }
            let mut moments = moments.map(|index| index.index(ours.len()));
            moments.sort_unstable();
            let window = Window { before: ours[moments[0]], after: ours[moments[2]] };
            prop_assert!(fits(&window, &theirs[moments[1]]));
        }

        #[test]
        fn a_stale_peer_fits_only_if_its_bytes_are_those_of_the_other_endpoint(
            ours in any::<[u16; 2]>().prop_map(|words| words.map(u64::from)),
            theirs in any::<[u16; 2]>().prop_map(|words| words.map(u64::from)),
        ) {
            // Nothing is under way: the pairs that a lost reset leaves behind are quiet.
            let quiet = |[written, received]: [u64; 2]| {
                Counts { written, acked: written, received, consumed: received }
            };
            let window = Window { before: quiet(ours), after: quiet(ours) };
            let is_true_pair = ours == [theirs[1], theirs[0]];
            prop_assert_eq!(fits(&window, &quiet(theirs)), is_true_pair);
        }
    }

    const COUNTS: Counts = Counts { written: 500, acked: 500, received: 300, consumed: 300 };
    const THEIRS: Counts = Counts { written: 300, acked: 300, received: 500, consumed: 400 };
    const ENTRY: Entry = Entry { cookie: 22, uid: 1000, state: 1, inode: 5, unread_bytes: 0 };

    fn decide(change: impl FnOnce(&mut Endpoint, &mut Message, &mut Window), look_up: LookUp) -> Result<(), Reason> {
        let trust = decide_by(change, look_up, Evidence::LookUp)?;
        assert_eq!(trust, Trust::Complete);
        Ok(())
    }

    fn endpoint() -> Endpoint {
        let tuple = Tuple::new("127.0.0.1:80".parse().unwrap(), "127.0.0.1:50000".parse().unwrap());
        Endpoint { tuple, role: Role::Accepted, cookie: 21, netns_cookie: 7 }
    }

    fn proposal() -> Message {
        Message {
            kind: Kind::Proposal,
            role: Role::Connected,
            cookie: 22,
            netns_cookie: 7,
            counts: THEIRS,
            memory: Memory::own(4096, 1),
            wants_proof: false,
            user: None,
        }
    }

    fn decide_by(
        change: impl FnOnce(&mut Endpoint, &mut Message, &mut Window),
        look_up: LookUp,
        evidence: Evidence,
    ) -> Result<Trust, Reason> {
        let (mut endpoint, mut message) = (endpoint(), proposal());
        let mut window = Window { before: COUNTS, after: COUNTS };
        change(&mut endpoint, &mut message, &mut window);
        verify(&endpoint, &window, &message, look_up, (PeerUser::Known(1000), evidence))
    }

    #[test]
    fn a_peer_whose_user_the_kernel_hides_has_to_show_the_key_of_the_user_that_it_states() {
        let key = |user: u32| if user == 33 { Ok([1; 16]) } else { Err(Reason::Unmapped) };
        let admits = |user, _: &Endpoint| if user == 33 { Ok(()) } else { Err(Reason::NoRule) };
        let keys = Some(UserKeys { own: 999, key, admits });
        let policy = Policy { admits: |uid, _| Ok(PeerUser::Known(uid)), evidence: Evidence::Proof, keys };
        let (known, hidden) = (PeerUser::Known(33), PeerUser::Hidden);
        let partner = Partner { user: 33, key: [1; 16] };
        let (endpoint, proposal) = (endpoint(), Message { user: None, ..proposal() });
        let stated = |number| Message { user: Some(StatedUser { number, mac: None }), ..proposal };
        for (message, peer, expected) in [
            (proposal, known, Ok(None)),
            (proposal, hidden, Err(Reason::Unmapped)),
            (stated(33), hidden, Err(Reason::Unmapped)),
            (stated(33).with_mac(&[1; 16], 999, 0), known, Ok(Some(partner))),
            (stated(33).with_mac(&[1; 16], 999, 0), hidden, Ok(Some(partner))),
            (stated(33).with_mac(&[2; 16], 999, 0), known, Ok(None)),
            (stated(33).with_mac(&[2; 16], 999, 0), hidden, Err(Reason::User)),
            (stated(33).with_mac(&[1; 16], 998, 0), hidden, Err(Reason::User)),
            (stated(34).with_mac(&[1; 16], 999, 0), hidden, Err(Reason::Unmapped)),
        ] {
            assert_eq!(policy.partner_of_proposal(&message, peer, &endpoint), expected, "{message:?} {peer:?}");
        }
        let of_directory = |user, peer| policy.partner_of_directory(user, peer);
        assert_eq!(of_directory(Some(33), hidden), Ok(Some(partner)));
        assert_eq!(of_directory(Some(34), hidden), Err(Reason::Unmapped));
        assert_eq!((of_directory(Some(34), known), of_directory(Some(999), known)), (Ok(None), Ok(None)));
        let check = |message: Message, peer| policy.check_answer(&message, peer, Some(partner), 7);
        assert_eq!(check(stated(33).with_mac(&[1; 16], 999, 7), hidden), Ok(()));
        for answer in [stated(33).with_mac(&[1; 16], 999, 8), stated(34).with_mac(&[1; 16], 999, 7), stated(33)] {
            assert_eq!((check(answer, hidden), check(answer, known)), (Err(Reason::Unmapped), Ok(())), "{answer:?}");
        }
    }

    #[test]
    fn in_a_shared_rack_the_kernel_or_the_bytes_prove_who_the_peer_is() {
        let shared =
            |change: fn(&mut Message), look_up| decide_by(|_, message, _| change(message), look_up, Evidence::Proof);
        let found = LookUp::Found;
        let elsewhere: fn(&mut Message) = |message| message.netns_cookie = 8;
        assert_eq!(shared(|_| {}, found(ENTRY)), Ok(Trust::Complete));
        assert_eq!(shared(|_| {}, found(Entry { uid: 0, ..ENTRY })), Ok(Trust::NeedsProof), "it was root's at first");
        assert_eq!(shared(elsewhere, found(ENTRY)), Ok(Trust::NeedsProof), "any user can make such a socket there");
        assert_eq!(shared(elsewhere, found(Entry { cookie: 23, ..ENTRY })), Err(Reason::Cookie));
        for change in [|_: &mut Message| {}, elsewhere] {
            assert_eq!(shared(change, LookUp::Unavailable), Err(Reason::NoLookUp));
            assert_eq!(shared(change, LookUp::Nothing), Err(Reason::Cookie));
            assert_eq!(shared(change, found(Entry { state: 10, ..ENTRY })), Err(Reason::Cookie));
        }
    }

    #[test]
    fn each_inequality_refuses_a_stale_pair() {
        for look_up in [LookUp::Unavailable, LookUp::Found(ENTRY)] {
            assert_eq!(decide(|_, _, _| {}, look_up), Ok(()));
            let forged: [fn(&mut Counts); 4] = [
                |counts| counts.written -= 1,
                |counts| counts.acked += 1,
                |counts| counts.received -= 1,
                |counts| counts.received += 1,
            ];
            for forge in forged {
                assert_eq!(decide(|_, message, _| forge(&mut message.counts), look_up), Err(Reason::Counts));
            }
        }
        let grown = |_: &mut Endpoint, message: &mut Message, window: &mut Window| {
            (message.counts.acked, message.counts.received, message.counts.written) = (310, 520, 330);
            (window.after.received, window.after.written) = (310, 520);
        };
        assert_eq!(decide(grown, LookUp::Unavailable), Ok(()), "bytes passed between the three moments");
    }

    #[test]
    fn role_namespace_cookie_state_and_user_are_those_of_the_other_endpoint() {
        let unavailable = LookUp::Unavailable;
        assert_eq!(decide(|_, message, _| message.role = Role::Accepted, unavailable), Err(Reason::Role));
        assert_eq!(decide(|_, message, _| message.netns_cookie = 8, unavailable), Err(Reason::Namespace));
        assert_eq!(decide(|_, message, _| message.netns_cookie = 0, unavailable), Ok(()));
        assert_eq!(decide(|_, _, _| {}, LookUp::Nothing), Err(Reason::Cookie));
        for (entry, expected) in [
            (Entry { cookie: 23, ..ENTRY }, Err(Reason::Cookie)),
            (Entry { state: 10, ..ENTRY }, Err(Reason::Cookie)),
            (Entry { state: 6, ..ENTRY }, Err(Reason::Cookie)),
            (Entry { uid: 1001, ..ENTRY }, Err(Reason::User)),
            (Entry { state: 8, ..ENTRY }, Ok(())),
        ] {
            assert_eq!(decide(|_, _, _| {}, LookUp::Found(entry)), expected, "{entry:?}");
        }
    }
}
