//! Programs' questions for listeners of other nodes, and the mirrors that answer them: a state machine without I/O.
//!
//! ```text
//!   nothing ──ask──► Asked ──Listening──► Making ──made──► Ready ──withdrawn, refused, link down──► nothing
//!                      └────── Nobody, Denied, late ──────────────────────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::net::SocketAddr;

use stats_page::FallbackReason;

use crate::session::Verdict;

/// Programs that wait at a time, at most.
const WAITING_MAX: usize = 1024;
/// Listeners of other nodes that are known at a time, at most.
const MIRRORS_MAX: usize = 4096;

/// Who asked: the monitor's number for the connection.
pub type Client = u64;
/// A peer's place in the rack.
pub type Peer = usize;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the program that the mirror is there.
    Ready(Client),
    /// Tell the program that there is nothing to be had.
    No(Client, FallbackReason),
    /// Ask the peer.
    Query(Peer, SocketAddr),
    /// Have the proxy listen.
    Mirror(Peer, SocketAddr),
    /// Have the proxy stop listening.
    Unmirror(SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Making,
    Ready,
}

#[derive(Debug)]
struct Mirror {
    peer: Peer,
    state: State,
    asked_at_ns: u64,
}

#[derive(Debug)]
struct Waiting {
    client: Client,
    address: SocketAddr,
    deadline_ns: u64,
}

/// All questions and mirrors of a node.
#[derive(Debug)]
pub struct Questions {
    mirrors: BTreeMap<SocketAddr, Mirror>,
    waiting: Vec<Waiting>,
    patience_ns: u64,
}

impl Questions {
    /// None yet. Each question is answered within `patience_ns`.
    pub fn new(patience_ns: u64) -> Self {
        Self { mirrors: BTreeMap::new(), waiting: Vec::new(), patience_ns }
    }

    /// Where the proxy listens in the place of other nodes.
    pub fn ready(&self) -> impl Iterator<Item = SocketAddr> {
        self.mirrors.iter().filter(|(_, mirror)| mirror.state == State::Ready).map(|(address, _)| *address)
    }

    /// A program asks for a listener of `peer`.
    pub fn ask(&mut self, client: Client, peer: Peer, address: SocketAddr, now_ns: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        match self.mirrors.get(&address) {
            Some(mirror) if mirror.state == State::Ready => return vec![Action::Ready(client)],
            Some(_) => {}
            None if self.mirrors.len() >= MIRRORS_MAX => {
                return vec![Action::No(client, FallbackReason::ResourceLimit)];
            }
            None => {
                self.mirrors.insert(address, Mirror { peer, state: State::Asked, asked_at_ns: now_ns });
                actions.push(Action::Query(peer, address));
            }
        }
        if self.waiting.len() >= WAITING_MAX {
            actions.push(Action::No(client, FallbackReason::ResourceLimit));
        } else {
            let deadline_ns = now_ns.saturating_add(self.patience_ns);
            self.waiting.push(Waiting { client, address, deadline_ns });
        }
        actions
    }

    /// A peer answers. What it was not asked is ignored.
    pub fn answered(&mut self, peer: Peer, address: SocketAddr, verdict: Verdict) -> Vec<Action> {
        let mirror = self.mirrors.get_mut(&address);
        let Some(mirror) = mirror.filter(|mirror| mirror.peer == peer && mirror.state == State::Asked) else {
            return Vec::new();
        };
        let reason = match verdict {
            Verdict::Listening => {
                mirror.state = State::Making;
                return vec![Action::Mirror(peer, address)];
            }
            Verdict::Nobody => FallbackReason::NoListener,
            Verdict::Denied => FallbackReason::AccessDenied,
        };
        self.mirrors.remove(&address);
        self.refuse(reason, |waiting| waiting.address == address)
    }

    /// The proxy listens.
    pub fn made(&mut self, address: SocketAddr) -> Vec<Action> {
        let making = self.mirrors.get_mut(&address).filter(|mirror| mirror.state == State::Making);
        let Some(mirror) = making else { return Vec::new() };
        mirror.state = State::Ready;
        let clients = self.take(|waiting| waiting.address == address);
        clients.into_iter().map(Action::Ready).collect()
    }

    /// The proxy cannot listen.
    pub fn not_made(&mut self, address: SocketAddr) -> Vec<Action> {
        if self.mirrors.get(&address).is_none_or(|mirror| mirror.state == State::Asked) {
            return Vec::new();
        }
        self.mirrors.remove(&address);
        self.refuse(FallbackReason::ProxyCannotListen, |waiting| waiting.address == address)
    }

    /// The listener is gone, as `peer` says.
    pub fn withdrawn(&mut self, peer: Peer, address: SocketAddr) -> Vec<Action> {
        if self.mirrors.get(&address).is_none_or(|mirror| mirror.peer != peer || mirror.state == State::Asked) {
            return Vec::new();
        }
        self.mirrors.remove(&address);
        let mut actions = vec![Action::Unmirror(address)];
        actions.extend(self.refuse(FallbackReason::NoListener, |waiting| waiting.address == address));
        actions
    }

    /// The other node refused a connection, as the proxy says: its listener is gone.
    pub fn refused(&mut self, address: SocketAddr) -> Vec<Action> {
        let peer = self.mirrors.get(&address).map(|mirror| mirror.peer);
        peer.map_or_else(Vec::new, |peer| self.withdrawn(peer, address))
    }

    /// The link with `peer` is down.
    pub fn link_down(&mut self, peer: Peer) -> Vec<Action> {
        self.drop_mirrors(|mirror| mirror.peer == peer)
    }

    /// Mirrors that the access rules do not allow any more, by slot and port.
    pub fn restrict(&mut self, is_allowed: impl Fn(Peer, u16) -> bool) -> Vec<Action> {
        let denied = |(address, mirror): (&SocketAddr, &Mirror)| {
            let is_known = mirror.state != State::Asked && !is_allowed(mirror.peer, address.port());
            is_known.then_some((*address, mirror.peer))
        };
        let denied: Vec<(SocketAddr, Peer)> = self.mirrors.iter().filter_map(denied).collect();
        denied.into_iter().flat_map(|(address, peer)| self.withdrawn(peer, address)).collect()
    }

    /// How long a question may take from now on.
    pub fn set_patience(&mut self, patience_ns: u64) {
        self.patience_ns = patience_ns;
    }

    /// The proxy is gone, and all its listeners with it.
    pub fn proxy_gone(&mut self) -> Vec<Action> {
        let actions = self.drop_mirrors(|_| true);
        actions.into_iter().filter(|action| !matches!(action, Action::Unmirror(_))).collect()
    }

    /// Lets time pass.
    pub fn tick(&mut self, now_ns: u64) -> Vec<Action> {
        let actions = self.refuse(FallbackReason::LinkDown, |waiting| waiting.deadline_ns <= now_ns);
        // An answer that never came is asked for again by the next program.
        let patience_ns = self.patience_ns;
        let is_late = |mirror: &Mirror| mirror.state == State::Asked && mirror.asked_at_ns + patience_ns <= now_ns;
        self.mirrors.retain(|_, mirror| !is_late(mirror));
        actions
    }

    /// When [`Questions::tick`] has something to do.
    pub fn due_ns(&self) -> Option<u64> {
        self.waiting.iter().map(|waiting| waiting.deadline_ns).min()
    }

    /// A client that is gone wants no answer.
    pub fn forget(&mut self, client: Client) {
        self.waiting.retain(|waiting| waiting.client != client);
    }

    fn drop_mirrors(&mut self, is_lost: impl Fn(&Mirror) -> bool) -> Vec<Action> {
        let lost: Vec<(SocketAddr, State)> = self
            .mirrors
            .iter()
            .filter(|(_, mirror)| is_lost(mirror))
            .map(|(address, mirror)| (*address, mirror.state))
            .collect();
        let mut actions = Vec::new();
        for (address, state) in lost {
            self.mirrors.remove(&address);
            if state != State::Asked {
                actions.push(Action::Unmirror(address));
            }
            actions.extend(self.refuse(FallbackReason::LinkDown, |waiting| waiting.address == address));
        }
        actions
    }

    fn refuse(&mut self, reason: FallbackReason, is_meant: impl Fn(&Waiting) -> bool) -> Vec<Action> {
        self.take(is_meant).into_iter().map(|client| Action::No(client, reason)).collect()
    }

    fn take(&mut self, is_meant: impl Fn(&Waiting) -> bool) -> Vec<Client> {
        let (meant, rest) = std::mem::take(&mut self.waiting).into_iter().partition(is_meant);
        self.waiting = rest;
        let meant: Vec<Waiting> = meant;
        meant.into_iter().map(|waiting| waiting.client).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 77, 0, 2], port))
    }

    #[test]
    fn a_question_goes_to_the_peer_once_and_all_who_ask_are_answered_when_the_mirror_is_there() {
        let mut questions = Questions::new(100);
        assert_eq!(questions.ask(1, 5, at(80), 0), [Action::Query(5, at(80))]);
        assert_eq!(questions.ask(2, 5, at(80), 1), []);
        assert_eq!(questions.answered(5, at(80), Verdict::Listening), [Action::Mirror(5, at(80))]);
        assert_eq!(questions.ask(3, 5, at(80), 2), []);
        assert_eq!(questions.made(at(80)), [1, 2, 3].map(Action::Ready));
        assert_eq!(questions.ask(4, 5, at(80), 3), [Action::Ready(4)]);
        assert_eq!(questions.withdrawn(5, at(80)), [Action::Unmirror(at(80))]);
        assert_eq!(questions.ask(5, 5, at(80), 4), [Action::Query(5, at(80))]);
    }

    #[test]
    fn what_a_peer_was_not_asked_is_ignored() {
        let mut questions = Questions::new(100);
        assert_eq!(questions.answered(5, at(80), Verdict::Listening), []);
        questions.ask(1, 5, at(80), 0);
        assert_eq!(questions.answered(6, at(80), Verdict::Listening), []);
        assert_eq!(questions.withdrawn(6, at(80)), []);
        assert_eq!(questions.made(at(80)), [], "not asked for yet");
    }

    #[test]
    fn each_refusal_has_its_reason() {
        use FallbackReason::{AccessDenied, LinkDown, NoListener, ProxyCannotListen};
        let asked = || {
            let mut questions = Questions::new(100);
            questions.ask(1, 5, at(80), 0);
            questions
        };
        assert_eq!(asked().answered(5, at(80), Verdict::Nobody), [Action::No(1, NoListener)]);
        assert_eq!(asked().answered(5, at(80), Verdict::Denied), [Action::No(1, AccessDenied)]);
        assert_eq!(asked().link_down(5), [Action::No(1, LinkDown)]);
        assert_eq!(asked().link_down(6), []);
        assert_eq!(asked().proxy_gone(), [Action::No(1, LinkDown)]);
        let mut late = asked();
        assert_eq!(late.tick(99), []);
        assert_eq!(late.tick(100), [Action::No(1, LinkDown)]);
        assert_eq!(late.ask(2, 5, at(80), 101), [Action::Query(5, at(80))]);
        let mut making = asked();
        making.answered(5, at(80), Verdict::Listening);
        assert_eq!(making.not_made(at(80)), [Action::No(1, ProxyCannotListen)]);
    }

    #[test]
    fn what_the_rules_do_not_allow_any_more_is_withdrawn_and_nothing_else() {
        let mut questions = Questions::new(100);
        for port in [80, 81, 82] {
            questions.ask(port.into(), 5, at(port), 0);
        }
        for port in [80, 81] {
            questions.answered(5, at(port), Verdict::Listening);
            questions.made(at(port));
        }
        assert_eq!(questions.restrict(|_, _| true), []);
        // What is only asked for is judged when it is answered.
        assert_eq!(questions.restrict(|peer, port| peer == 5 && port == 81), [Action::Unmirror(at(80))]);
        assert_eq!(questions.ready().collect::<Vec<_>>(), [at(81)]);
    }

    /// What can happen, in any order.
    #[derive(Clone, Debug)]
    enum Step {
        Ask(u16, Peer),
        Answer(Peer, u16, bool),
        Made(u16),
        NotMade(u16),
        Withdrawn(Peer, u16),
        LinkDown(Peer),
        ProxyGone,
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (port, peer) = (0..4_u16, 0..3_usize);
        let step = prop_oneof![
            4 => (port.clone(), peer.clone()).prop_map(|(port, peer)| Step::Ask(port, peer)),
            4 => (peer.clone(), port.clone(), any::<bool>())
                .prop_map(|(peer, port, yes)| Step::Answer(peer, port, yes)),
            3 => port.clone().prop_map(Step::Made),
            1 => port.clone().prop_map(Step::NotMade),
            1 => (peer.clone(), port).prop_map(|(peer, port)| Step::Withdrawn(peer, port)),
            1 => peer.prop_map(Step::LinkDown),
            1 => Just(Step::ProxyGone),
            2 => (0..150_u64).prop_map(Step::Wait),
        ];
        prop::collection::vec(step, 0..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_happens_every_program_is_answered_once(steps in steps()) {
            let (mut questions, mut now_ns, mut client) = (Questions::new(100), 0, 0);
            let mut answered = std::collections::BTreeMap::<Client, u32>::new();
            let mut count = |actions: Vec<Action>| for action in actions {
                if let Action::Ready(client) | Action::No(client, _) = action {
                    *answered.entry(client).or_default() += 1;
                }
            };
            for step in steps {
                count(match step {
                    Step::Ask(port, peer) => {
                        client += 1;
                        questions.ask(client, peer, at(port), now_ns)
                    }
                    Step::Answer(peer, port, true) => questions.answered(peer, at(port), Verdict::Listening),
                    Step::Answer(peer, port, false) => questions.answered(peer, at(port), Verdict::Nobody),
                    Step::Made(port) => questions.made(at(port)),
                    Step::NotMade(port) => questions.not_made(at(port)),
                    Step::Withdrawn(peer, port) => questions.withdrawn(peer, at(port)),
                    Step::LinkDown(peer) => questions.link_down(peer),
                    Step::ProxyGone => questions.proxy_gone(),
                    Step::Wait(ns) => {
                        now_ns += ns;
                        questions.tick(now_ns)
                    }
                });
            }
            count(questions.tick(now_ns + 100));
            prop_assert_eq!(questions.due_ns(), None);
            prop_assert_eq!(answered.len() as u64, client);
            prop_assert!(answered.values().all(|times| *times == 1), "{:?}", answered);
        }
    }
}
