//! Programs' queries for listeners of other nodes, and the remote listener proxies that result: a state machine without
//! I/O.
//!
//! ```text
//!   absent ──query──► Queried ──Listening──► Opening ──listening──► Ready ──withdrawn, refused, link down──► absent
//!                        └────── NotListening, Denied, timeout ─────────────────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::net::SocketAddr;

use stats_page::FallbackReason;

use crate::session::ListenerState;

/// Maximum number of programs that wait for an answer.
const WAITERS_MAX: usize = 1024;
/// Maximum number of remote listeners.
const LISTENERS_MAX: usize = 4096;

/// Identifier of the client that queries: the monitor's number of its connection.
pub type ClientId = u64;
/// Slot of a peer.
pub type PeerSlot = usize;

/// An action for the caller to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the program that the proxy listens.
    Ready(ClientId),
    /// Tell the program that there is no listener to use.
    Refuse(ClientId, FallbackReason),
    /// Query the peer.
    Query(PeerSlot, SocketAddr),
    /// Let the proxy listen.
    Listen(PeerSlot, SocketAddr),
    /// Let the proxy stop listening.
    StopListening(SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queried,
    Opening,
    Ready,
}

#[derive(Debug)]
struct RemoteListener {
    peer: PeerSlot,
    state: State,
    queried_at_ns: u64,
}

#[derive(Debug)]
struct Waiter {
    client: ClientId,
    address: SocketAddr,
    deadline_ns: u64,
}

/// The queries and remote listeners of a node.
#[derive(Debug)]
pub struct ListenerQueries {
    listeners: BTreeMap<SocketAddr, RemoteListener>,
    waiters: Vec<Waiter>,
    timeout_ns: u64,
}

impl ListenerQueries {
    /// Returns an empty set. Each query is answered within `timeout_ns`.
    pub fn new(timeout_ns: u64) -> Self {
        Self { listeners: BTreeMap::new(), waiters: Vec::new(), timeout_ns }
    }

    /// Returns the addresses of other nodes at which the proxy listens.
    pub fn ready(&self) -> impl Iterator<Item = SocketAddr> {
        self.listeners.iter().filter(|(_, listener)| listener.state == State::Ready).map(|(address, _)| *address)
    }

    /// Handles a program's query for a listener of `peer`.
    pub fn query(&mut self, client: ClientId, peer: PeerSlot, address: SocketAddr, now_ns: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        match self.listeners.get(&address) {
            Some(listener) if listener.state == State::Ready => return vec![Action::Ready(client)],
            Some(_) => {}
            None if self.listeners.len() >= LISTENERS_MAX => {
                return vec![Action::Refuse(client, FallbackReason::ResourceLimit)];
            }
            None => {
                self.listeners.insert(address, RemoteListener { peer, state: State::Queried, queried_at_ns: now_ns });
                actions.push(Action::Query(peer, address));
            }
        }
        if self.waiters.len() >= WAITERS_MAX {
            actions.push(Action::Refuse(client, FallbackReason::ResourceLimit));
        } else {
            let deadline_ns = now_ns.saturating_add(self.timeout_ns);
            self.waiters.push(Waiter { client, address, deadline_ns });
        }
        actions
    }

    /// Handles a response of a peer. A response to no query is ignored.
    pub fn peer_responded(&mut self, peer: PeerSlot, address: SocketAddr, state: ListenerState) -> Vec<Action> {
        let listener = self.listeners.get_mut(&address);
        let Some(listener) = listener.filter(|listener| listener.peer == peer && listener.state == State::Queried)
        else {
            return Vec::new();
        };
        let reason = match state {
            ListenerState::Listening => {
                listener.state = State::Opening;
                return vec![Action::Listen(peer, address)];
            }
            ListenerState::NotListening => FallbackReason::NoListener,
            ListenerState::Denied => FallbackReason::AccessDenied,
        };
        self.listeners.remove(&address);
        self.refuse(reason, |waiter| waiter.address == address)
    }

    /// Handles the announcement of a listener that this node publishes, and that no program has asked for.
    pub fn announced(&mut self, peer: PeerSlot, address: SocketAddr) -> Vec<Action> {
        if self.listeners.contains_key(&address) || self.listeners.len() >= LISTENERS_MAX {
            return Vec::new();
        }
        self.listeners.insert(address, RemoteListener { peer, state: State::Opening, queried_at_ns: 0 });
        vec![Action::Listen(peer, address)]
    }

    /// Handles the proxy's report that it listens.
    pub fn listening(&mut self, address: SocketAddr) -> Vec<Action> {
        let opening = self.listeners.get_mut(&address).filter(|listener| listener.state == State::Opening);
        let Some(listener) = opening else { return Vec::new() };
        listener.state = State::Ready;
        let clients = self.take(|waiter| waiter.address == address);
        clients.into_iter().map(Action::Ready).collect()
    }

    /// Handles the proxy's report that it cannot listen.
    pub fn listen_failed(&mut self, address: SocketAddr) -> Vec<Action> {
        if self.listeners.get(&address).is_none_or(|listener| listener.state == State::Queried) {
            return Vec::new();
        }
        self.listeners.remove(&address);
        self.refuse(FallbackReason::ProxyCannotListen, |waiter| waiter.address == address)
    }

    /// Handles the report of `peer` that its listener is gone.
    pub fn listener_withdrawn(&mut self, peer: PeerSlot, address: SocketAddr) -> Vec<Action> {
        if self.listeners.get(&address).is_none_or(|listener| listener.peer != peer || listener.state == State::Queried)
        {
            return Vec::new();
        }
        self.listeners.remove(&address);
        let mut actions = vec![Action::StopListening(address)];
        actions.extend(self.refuse(FallbackReason::NoListener, |waiter| waiter.address == address));
        actions
    }

    /// Handles the proxy's report that the peer refused a connection: the listener is gone.
    pub fn refused(&mut self, address: SocketAddr) -> Vec<Action> {
        let peer = self.listeners.get(&address).map(|listener| listener.peer);
        peer.map_or_else(Vec::new, |peer| self.listener_withdrawn(peer, address))
    }

    /// Handles the loss of the link with `peer`.
    pub fn link_down(&mut self, peer: PeerSlot) -> Vec<Action> {
        self.drop_listeners(|listener| listener.peer == peer)
    }

    /// Closes listeners that the access rules no longer allow, by slot and port.
    pub fn restrict(&mut self, is_allowed: impl Fn(PeerSlot, u16) -> bool) -> Vec<Action> {
        let denied = |(address, listener): (&SocketAddr, &RemoteListener)| {
            let is_known = listener.state != State::Queried && !is_allowed(listener.peer, address.port());
            is_known.then_some((*address, listener.peer))
        };
        let denied: Vec<(SocketAddr, PeerSlot)> = self.listeners.iter().filter_map(denied).collect();
        denied.into_iter().flat_map(|(address, peer)| self.listener_withdrawn(peer, address)).collect()
    }

    /// Sets the time limit of further queries.
    pub fn set_timeout(&mut self, timeout_ns: u64) {
        self.timeout_ns = timeout_ns;
    }

    /// Handles the end of the proxy, which closes all its listeners.
    pub fn proxy_gone(&mut self) -> Vec<Action> {
        let actions = self.drop_listeners(|_| true);
        actions.into_iter().filter(|action| !matches!(action, Action::StopListening(_))).collect()
    }

    /// Expires queries.
    pub fn tick(&mut self, now_ns: u64) -> Vec<Action> {
        let actions = self.refuse(FallbackReason::LinkDown, |waiter| waiter.deadline_ns <= now_ns);
        // If the peer has not answered, the next program's query is sent again.
        let timeout_ns = self.timeout_ns;
        let is_late = |listener: &RemoteListener| {
            listener.state == State::Queried && listener.queried_at_ns + timeout_ns <= now_ns
        };
        self.listeners.retain(|_, listener| !is_late(listener));
        actions
    }

    /// Returns when [`ListenerQueries::tick`] has to be called next.
    pub fn due_ns(&self) -> Option<u64> {
        self.waiters.iter().map(|waiter| waiter.deadline_ns).min()
    }

    /// Removes the queries of a client that has disconnected.
    pub fn forget(&mut self, client: ClientId) {
        self.waiters.retain(|waiter| waiter.client != client);
    }

    fn drop_listeners(&mut self, is_lost: impl Fn(&RemoteListener) -> bool) -> Vec<Action> {
        let lost: Vec<(SocketAddr, State)> = self
            .listeners
            .iter()
            .filter(|(_, listener)| is_lost(listener))
            .map(|(address, listener)| (*address, listener.state))
            .collect();
        let mut actions = Vec::new();
        for (address, state) in lost {
            self.listeners.remove(&address);
            if state != State::Queried {
                actions.push(Action::StopListening(address));
            }
            actions.extend(self.refuse(FallbackReason::LinkDown, |waiter| waiter.address == address));
        }
        actions
    }

    fn refuse(&mut self, reason: FallbackReason, matches: impl Fn(&Waiter) -> bool) -> Vec<Action> {
        self.take(matches).into_iter().map(|client| Action::Refuse(client, reason)).collect()
    }

    fn take(&mut self, matches: impl Fn(&Waiter) -> bool) -> Vec<ClientId> {
        let (matching, rest) = std::mem::take(&mut self.waiters).into_iter().partition(matches);
        self.waiters = rest;
        let matching: Vec<Waiter> = matching;
        matching.into_iter().map(|waiter| waiter.client).collect()
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
    fn a_peer_is_queried_once_and_all_clients_are_answered_when_the_proxy_listens() {
        let mut queries = ListenerQueries::new(100);
        assert_eq!(queries.query(1, 5, at(80), 0), [Action::Query(5, at(80))]);
        assert_eq!(queries.query(2, 5, at(80), 1), []);
        assert_eq!(queries.peer_responded(5, at(80), ListenerState::Listening), [Action::Listen(5, at(80))]);
        assert_eq!(queries.query(3, 5, at(80), 2), []);
        assert_eq!(queries.listening(at(80)), [1, 2, 3].map(Action::Ready));
        assert_eq!(queries.query(4, 5, at(80), 3), [Action::Ready(4)]);
        assert_eq!(queries.listener_withdrawn(5, at(80)), [Action::StopListening(at(80))]);
        assert_eq!(queries.query(5, 5, at(80), 4), [Action::Query(5, at(80))]);
    }

    #[test]
    fn a_response_without_a_query_is_ignored() {
        let mut queries = ListenerQueries::new(100);
        assert_eq!(queries.peer_responded(5, at(80), ListenerState::Listening), []);
        queries.query(1, 5, at(80), 0);
        assert_eq!(queries.peer_responded(6, at(80), ListenerState::Listening), []);
        assert_eq!(queries.listener_withdrawn(6, at(80)), []);
        assert_eq!(queries.listening(at(80)), [], "not requested yet");
    }

    #[test]
    fn an_announced_listener_is_opened_once_and_answers_later_queries() {
        let mut queries = ListenerQueries::new(100);
        assert_eq!(queries.announced(5, at(80)), [Action::Listen(5, at(80))]);
        assert_eq!(queries.announced(5, at(80)), []);
        assert_eq!(queries.query(1, 5, at(80), 0), []);
        assert_eq!(queries.listening(at(80)), [Action::Ready(1)]);
        assert_eq!(queries.listener_withdrawn(5, at(80)), [Action::StopListening(at(80))]);
    }

    #[test]
    fn each_refusal_has_its_reason() {
        use FallbackReason::{AccessDenied, LinkDown, NoListener, ProxyCannotListen};
        let queried = || {
            let mut queries = ListenerQueries::new(100);
            queries.query(1, 5, at(80), 0);
            queries
        };
        assert_eq!(queried().peer_responded(5, at(80), ListenerState::NotListening), [Action::Refuse(1, NoListener)]);
        assert_eq!(queried().peer_responded(5, at(80), ListenerState::Denied), [Action::Refuse(1, AccessDenied)]);
        assert_eq!(queried().link_down(5), [Action::Refuse(1, LinkDown)]);
        assert_eq!(queried().link_down(6), []);
        assert_eq!(queried().proxy_gone(), [Action::Refuse(1, LinkDown)]);
        let mut late = queried();
        assert_eq!(late.tick(99), []);
        assert_eq!(late.tick(100), [Action::Refuse(1, LinkDown)]);
        assert_eq!(late.query(2, 5, at(80), 101), [Action::Query(5, at(80))]);
        let mut opening = queried();
        opening.peer_responded(5, at(80), ListenerState::Listening);
        assert_eq!(opening.listen_failed(at(80)), [Action::Refuse(1, ProxyCannotListen)]);
    }

    #[test]
    fn only_listeners_that_the_rules_no_longer_allow_are_closed() {
        let mut queries = ListenerQueries::new(100);
        for port in [80, 81, 82] {
            queries.query(port.into(), 5, at(port), 0);
        }
        for port in [80, 81] {
            queries.peer_responded(5, at(port), ListenerState::Listening);
            queries.listening(at(port));
        }
        assert_eq!(queries.restrict(|_, _| true), []);
        // A pending query is checked when it is answered.
        assert_eq!(queries.restrict(|peer, port| peer == 5 && port == 81), [Action::StopListening(at(80))]);
        assert_eq!(queries.ready().collect::<Vec<_>>(), [at(81)]);
    }

    /// The events that can occur, in any order.
    #[derive(Clone, Debug)]
    enum Step {
        Query(u16, PeerSlot),
        Response(PeerSlot, u16, bool),
        Listening(u16),
        ListenFailed(u16),
        Withdrawn(PeerSlot, u16),
        LinkDown(PeerSlot),
        ProxyGone,
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (port, peer) = (0..4_u16, 0..3_usize);
        let step = prop_oneof![
            4 => (port.clone(), peer.clone()).prop_map(|(port, peer)| Step::Query(port, peer)),
            4 => (peer.clone(), port.clone(), any::<bool>())
                .prop_map(|(peer, port, yes)| Step::Response(peer, port, yes)),
            3 => port.clone().prop_map(Step::Listening),
            1 => port.clone().prop_map(Step::ListenFailed),
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
        fn every_program_is_answered_once(steps in steps()) {
            let (mut queries, mut now_ns, mut client) = (ListenerQueries::new(100), 0, 0);
            let mut answered = std::collections::BTreeMap::<ClientId, u32>::new();
            let mut count = |actions: Vec<Action>| for action in actions {
                if let Action::Ready(client) | Action::Refuse(client, _) = action {
                    *answered.entry(client).or_default() += 1;
                }
            };
            for step in steps {
                count(match step {
                    Step::Query(port, peer) => {
                        client += 1;
                        queries.query(client, peer, at(port), now_ns)
                    }
                    Step::Response(peer, port, listening) => {
                        let state = if listening { ListenerState::Listening } else { ListenerState::NotListening };
                        queries.peer_responded(peer, at(port), state)
                    }
                    Step::Listening(port) => queries.listening(at(port)),
                    Step::ListenFailed(port) => queries.listen_failed(at(port)),
                    Step::Withdrawn(peer, port) => queries.listener_withdrawn(peer, at(port)),
                    Step::LinkDown(peer) => queries.link_down(peer),
                    Step::ProxyGone => queries.proxy_gone(),
                    Step::Wait(ns) => {
                        now_ns += ns;
                        queries.tick(now_ns)
                    }
                });
            }
            count(queries.tick(now_ns + 100));
            prop_assert_eq!(queries.due_ns(), None);
            prop_assert_eq!(answered.len() as u64, client);
            prop_assert!(answered.values().all(|times| *times == 1), "{:?}", answered);
        }
    }
}
