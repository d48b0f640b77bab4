//! Opening connections between nodes: for accepted programs of this node, and for `Open` frames of peers.

use super::acceptor::AcceptedProgram;
use super::connecting::ConnectingServers;
use super::engine_table::EngineTable;
use super::epoll_set::EpollSet;
use super::link_engine::new_secret;
use super::open_payload::{self, OpenRequest, Secrets, SpanOffer};
use super::shared::Shared;
use super::tcp_endpoint::TcpEndpoint;
use super::tcp_listener::TcpClient;
use super::tcp_server::{Connecting, connect_tcp};
use crate::connection::OpenPayload;
use crate::engine::EngineEvent;
use crate::table::ConnectionKey;
use control::proxy::Access;
use fabric::device::Device;
use meeting::Tuple;
use rustix::io::Errno;
use socket::process::clock::now_ns;
use std::sync::Arc;

/// How long a program waits for both ends of a link that is up to greet: longer than a proxy takes to start, and
/// shorter than a program waits for its reply.
const GREETING_WAIT_NS: u64 = 2_000_000_000;
/// Bound on the protocol violations that a thread writes to its log.
const VIOLATIONS_LOGGED_MAX: u32 = 100;

/// Opens the connections of a thread.
pub(super) struct Opening {
    shared: Arc<Shared>,
    /// Programs that wait until the engines of their link have greeted.
    delayed: Vec<AcceptedProgram>,
    connecting: ConnectingServers,
    violations: u32,
}

impl Opening {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, delayed: Vec::new(), connecting: ConnectingServers::default(), violations: 0 }
    }

    /// Handles the events of an engine. Returns whether there were any.
    pub(super) fn handle_events(&mut self, engines: &mut EngineTable, index: usize, epoll: &EpollSet) -> bool {
        let mut had_any = false;
        while let Some((peer, engine)) = engines.engine(index) {
            let Some(event) = engine.next_event() else { break };
            had_any = true;
            match event {
                EngineEvent::Open { key, open_payload } => {
                    if let Some(answer) = self.connect(engines, index, peer, key, &open_payload, epoll) {
                        let answer = answer.map_err(|errno| errno.raw_os_error() as u32);
                        if let Some((_, engine)) = engines.engine(index) {
                            engine.answer(key, answer);
                        }
                    }
                }
                EngineEvent::Refused { local, errno } => self.refuse(local, errno),
                EngineEvent::Violation { number, what } => {
                    self.log_violation(peer, &format!("connection {:#x} is reset: {what}", number.0));
                }
            }
        }
        had_any
    }

    /// Connects to a server of this node on behalf of a program of a peer. Returns `None` without a device, and if the
    /// answer follows later.
    fn connect(
        &mut self,
        engines: &mut EngineTable,
        engine: usize,
        peer: u8,
        key: ConnectionKey,
        payload: &OpenPayload,
        epoll: &EpollSet,
    ) -> Option<Result<TcpEndpoint, Errno>> {
        let device = engines.device()?.clone();
        let request = open_payload::decode(payload);
        if !request.is_none_or(|request| is_admitted(&self.shared.access(), peer, &request)) {
            self.log_violation(peer, "opened without asking, what the access rules do not allow");
            return Some(Err(Errno::ACCESS));
        }
        let server =
            request.ok_or(Errno::PROTO).and_then(|request| connect_server(&self.shared, &device, peer, &request));
        let server = match server {
            Ok(connecting) => match connecting.advance(&self.shared) {
                Ok(endpoint) => Ok(endpoint),
                Err((Errno::AGAIN, Some(connecting))) => {
                    let epoch = engines.link(engine).map(|link| link.epoch).ok_or(Errno::AGAIN);
                    let added = epoch.and_then(|epoch| self.connecting.add((engine, epoch), key, *connecting, epoll));
                    return added.err().map(Err);
                }
                Err((errno, _)) => Err(errno),
            },
            Err(errno) => Err(errno),
        };
        Some(server.and_then(|mut endpoint| endpoint.watch(epoll, engine, key).map(|()| endpoint)))
    }

    /// The other node has no server for a program. If it has no listener, its remote listener here is closed.
    fn refuse(&self, local: TcpEndpoint, errno: u32) {
        let errno = i32::try_from(errno).ok().filter(|errno| (1..4096).contains(errno));
        let errno = errno.map_or(Errno::CONNREFUSED, Errno::from_raw_os_error);
        let address = local.destination();
        local.refuse(errno);
        if errno == Errno::CONNREFUSED
            && let Some(address) = address
        {
            self.shared.note_refused(address);
        }
    }

    /// Logs a protocol violation of a peer, up to a bound.
    fn log_violation(&mut self, peer: u8, what: &str) {
        self.violations = self.violations.saturating_add(1);
        if self.violations <= VIOLATIONS_LOGGED_MAX {
            eprintln!("crosslane proxy: node {peer}: {what}");
        }
    }

    /// Opens the connections of delayed programs whose links have greeted by now, and answers those whose servers have
    /// accepted them late.
    pub(super) fn open_delayed(&mut self, engines: &mut EngineTable, epoll: &EpollSet) {
        self.connecting.check(engines, &self.shared, epoll);
        if !self.delayed.is_empty() {
            std::mem::take(&mut self.delayed).into_iter().for_each(|program| self.open(engines, program, epoll));
        }
    }

    /// Opens a connection for a program, or delays it until the link has greeted.
    pub(super) fn open(&mut self, engines: &mut EngineTable, program: AcceptedProgram, epoll: &EpollSet) {
        let engine = engines.next_engine(program.peer);
        let is_greeting = engine.is_some_and(|index| engines.is_greeting(index));
        if is_greeting && now_ns().saturating_sub(program.since_ns) < GREETING_WAIT_NS {
            return self.delayed.push(program);
        }
        let AcceptedProgram { peer, client, .. } = program;
        let (endpoint, tuple, offer) = self.endpoint_of(peer, client, engines.device().filter(|_| engine.is_some()));
        let Some(engine) = engine else { return endpoint.refuse(Errno::NETUNREACH) };
        let nodes = [self.shared.setup.own_slot, peer].map(|slot| self.shared.address(slot));
        let Some(payload) = open_payload::encode(&tuple, nodes, offer) else {
            return endpoint.refuse(Errno::AFNOSUPPORT);
        };
        let Some(link) = engines.link(engine) else { return };
        let mut endpoint = Some(endpoint);
        link.open(payload, |key| {
            let mut endpoint = endpoint.take().expect("`open` calls it at most once");
            let _ = endpoint.watch(epoll, engine, key);
            endpoint
        });
        let errno = if link.is_greeting() { Errno::NETUNREACH } else { Errno::NOBUFS };
        if let Some(endpoint) = endpoint {
            endpoint.refuse(errno);
        }
    }

    /// Returns the proxy's endpoint for a program, its addresses as it sees them, and the span proposed for it, if the
    /// proxy has a device.
    fn endpoint_of(
        &self,
        peer: u8,
        client: TcpClient,
        device: Option<&Device>,
    ) -> (TcpEndpoint, Tuple, Option<SpanOffer>) {
        let TcpClient { relay, tuple, cookie, .. } = client;
        let pool = device.zip(self.shared.span_pool(peer)).filter(|_| relay.may_meet());
        let proposal = pool.and_then(|(device, pool)| pool.propose(device));
        let secrets = Secrets { to_acceptor: new_secret(), to_connector: new_secret() };
        let offer = proposal.as_ref().map(|it| SpanOffer { index: it.index(), secrets });
        let endpoint = TcpEndpoint::of_client(relay, tuple, cookie, Arc::clone(&self.shared.table));
        (endpoint.proposing(proposal, secrets), tuple, offer)
    }

    pub(super) fn clear(&mut self) {
        self.delayed.clear();
        self.connecting.clear();
    }
}

/// Returns whether the access rules of this node admit a connection of a peer. An honest node has asked before: its
/// monitor answers by the same rules.
fn is_admitted(access: &Access, peer: u8, request: &OpenRequest) -> bool {
    access.admits(peer, request.destination.port)
}

/// Connects to a server of this node, with the proposed span if that is free.
///
/// # Errors
/// The error number of the refusal.
fn connect_server(shared: &Shared, device: &Device, peer: u8, request: &OpenRequest) -> Result<Connecting, Errno> {
    let source = request.source.at_node(shared.address(peer)).filter(|source| source.port() != 0);
    let source = source.ok_or(Errno::ACCESS)?;
    let destination = request.destination.at_node(shared.address(shared.setup.own_slot)).ok_or(Errno::ACCESS)?;
    let connecting = connect_tcp(shared, peer, source, destination)?;
    let offer = request.offer.zip(shared.span_pool(peer));
    Ok(connecting.with_span(offer.and_then(|(offer, pool)| Some((pool.accept(device, offer.index)?, offer.secrets)))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::Rule;
    use std::net::SocketAddr;

    #[test]
    fn a_connection_that_a_peer_opens_without_asking_is_checked_against_the_rules() {
        let rules = vec![Rule { from: Some(2), ports: Some(vec![(80, 90)]), allows: false }];
        let access = Access { rules, allows_others: true };
        let to = |port: u16| {
            let peer = SocketAddr::from(([127, 77, 0, 1], port));
            let tuple = Tuple { local: "127.77.0.3:40000".parse().unwrap(), peer };
            let payload = open_payload::encode(&tuple, [None; 2], None).expect("IPv4");
            open_payload::decode(&payload).expect("a valid payload")
        };
        assert_eq!([79, 80, 90, 91].map(|port| is_admitted(&access, 2, &to(port))), [true, false, false, true]);
        assert!(is_admitted(&access, 1, &to(80)));
    }
}
