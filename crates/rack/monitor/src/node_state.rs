//! The state of a node, and how its parts affect each other: the device, links, the proxy, and queries for listeners.

use std::net::SocketAddr;

use control::MetricsServer;
use control::proxy::ToProxy;
use fabric::Epoch;
use fabric::device::{Device, DeviceEvent};
use socket::rack::monitor::ListenerResponse;
use tracing::{error, info, warn};

use crate::clients::Clients;
use crate::error::MonitorError;
use crate::listener_queries::{Action, ListenerQueries};
use crate::neighbours::Neighbours;
use crate::peer::Event;
use crate::proxy_child::ProxyChild;
use crate::rack_subscription::RackSubscription;
use crate::registry::Registry;
use crate::session::{ListenerState, PeerMessage};
use crate::settings::MonitorSettings;

/// Limit for a proxy to stop using a lost link, after which it is killed.
const STOP_TIMEOUT_NS: u64 = 1_000_000_000;

/// The state of a node.
pub(crate) struct NodeState {
    pub(crate) settings: MonitorSettings,
    /// When the monitor started, in nanoseconds since the Unix epoch.
    pub(crate) started_at_ns: u64,
    pub(crate) device: Device,
    pub(crate) is_server_gone: bool,
    pub(crate) neighbours: Neighbours,
    pub(crate) clients: Clients,
    pub(crate) registry: Registry,
    pub(crate) listener_queries: ListenerQueries,
    pub(crate) proxy: ProxyChild,
    pub(crate) metrics: MetricsServer,
    /// The subscription to the rack in etcd, unless the rack is described by a file.
    pub(crate) subscription: Option<RackSubscription>,
    /// Clients that wait for the status, with the deadlines of their answers.
    pub(crate) status_waiters: Vec<(u64, u64)>,
    /// Why connections are forwarded by the proxies although the rack trusts programs with windows.
    pub(crate) direct_obstacle: Option<String>,
    pub(crate) is_stopping: bool,
}

/// The device and the links.
impl NodeState {
    /// Advances the state machine of each link, and handles its events.
    pub(crate) fn step_links(&mut self, now_ns: u64) {
        for index in 0..self.neighbours.len() {
            if self.settings.rack.is_coherent() {
                self.neighbours[index].check_heartbeat(&self.device, now_ns);
            }
            self.neighbours[index].peer.step(now_ns);
            self.handle_events(index, now_ns);
        }
        self.neighbours.announce(&self.proxy);
    }

    /// Handles changes of the device.
    ///
    /// # Errors
    /// The device's memory was truncated, and must not be accessed any more.
    pub(crate) fn check_device(&mut self, now_ns: u64) -> Result<(), MonitorError> {
        for change in self.device.poll()? {
            match change {
                DeviceEvent::PeerDoorbells => {
                    // Without the new doorbells, the proxy could not wake the peer.
                    if !self.proxy.renew(&self.device) {
                        self.end_proxy("killed because it did not accept new doorbells", now_ns);
                    }
                }
                DeviceEvent::HeaderRepaired => warn!("a node overwrote the header of the device; it was restored"),
                DeviceEvent::ServerGone => {
                    self.is_server_gone = true;
                    error!(
                        "the device server is gone: links remain, but no node can join; 'crosslane down', then 'up'"
                    );
                }
                DeviceEvent::NodesGone(slots) => {
                    for slot in slots {
                        self.proxy.send(&ToProxy::Gone { peer: slot.0 });
                        self.take_down(slot.0.into(), "its monitor and its proxy have ended", now_ns);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes the link to a peer down.
    fn take_down(&mut self, slot: usize, reason: &str, now_ns: u64) {
        let Some(index) = self.neighbours.index_of(slot) else { return };
        // A peer that shut down in order has sent its reason.
        self.neighbours[index].peer.step(now_ns);
        self.handle_events(index, now_ns);
        if self.neighbours[index].peer.state() != "down" {
            self.neighbours[index].peer.take_down(reason, now_ns);
        }
    }

    /// Takes a link down that the proxy cannot use any more, unless it has been trained again.
    pub(crate) fn reset_link(&mut self, slot: usize, epoch: Epoch, what: &str, now_ns: u64) {
        let is_current =
            self.neighbours.iter().any(|it| it.slot == slot && it.peer.epoch() == epoch && it.peer.is_open());
        if is_current {
            let reason = format!("node {} {what}", self.name(slot));
            self.take_down(slot, &reason, now_ns);
        }
    }

    /// Handles the events of a link.
    fn handle_events(&mut self, index: usize, now_ns: u64) {
        while let Some(event) = self.neighbours[index].peer.next_event() {
            let slot = self.neighbours[index].slot;
            match event {
                Event::Up(epoch) => info!(peer = self.name(slot), %epoch, "link up"),
                Event::Down(epoch) => self.link_is_down(index, epoch, now_ns),
                Event::Message(message) => self.handle_message(index, message),
            }
        }
    }

    fn link_is_down(&mut self, index: usize, epoch: Epoch, now_ns: u64) {
        let neighbour = &mut self.neighbours[index];
        let slot = neighbour.slot;
        let reason = neighbour.peer.reason().unwrap_or_default().to_owned();
        if neighbour.begin_stop(epoch, now_ns + STOP_TIMEOUT_NS) {
            let policy = neighbour.peer.loss_policy();
            if !self.proxy.send(&ToProxy::LinkDown { peer: slot as u8, epoch: epoch.0, policy }) {
                self.end_proxy("killed because it did not accept a message", now_ns);
            }
        }
        warn!(peer = self.name(slot), %epoch, "link down: {reason}");
        self.registry.forget(slot);
        let actions = self.listener_queries.link_down(slot);
        self.execute(actions);
    }

    fn handle_message(&mut self, index: usize, message: PeerMessage) {
        let slot = self.neighbours[index].slot;
        match message {
            PeerMessage::Handshake => {}
            PeerMessage::Query(address) => {
                let listener_state = self.listener_state(slot, address);
                if let Some(session) = self.neighbours[index].peer.session() {
                    session.respond(address, listener_state);
                }
            }
            PeerMessage::Response(address, listener_state) => {
                let is_published = listener_state == ListenerState::Listening
                    && self.settings.publishes(address.port())
                    && self.settings.remote_slot(address) == Ok(slot);
                let mut actions = self.listener_queries.peer_responded(slot, address, listener_state);
                if is_published {
                    actions.extend(self.listener_queries.announced(slot, address));
                }
                self.execute(actions);
            }
            PeerMessage::Withdraw(address) => {
                let actions = self.listener_queries.listener_withdrawn(slot, address);
                self.execute(actions);
            }
        }
    }

    /// Announces the listeners of this node to the nodes that publish them: as answers that they have not asked for.
    pub(crate) fn announce_listeners(&mut self) {
        let (own, node) = (self.settings.slot, self.settings.node().address);
        let publishers: Vec<usize> = (0..self.settings.rack.nodes.len())
            .filter(|slot| *slot != own && self.neighbours.is_open(*slot))
            .filter(|slot| *self.settings.rack.publish_of(&self.settings.rack.nodes[*slot]) != rack::Publish::Nothing)
            .collect();
        if publishers.is_empty() {
            return;
        }
        for port in self.registry.ports(node) {
            let address = SocketAddr::new(node, port);
            for &peer in &publishers {
                if self.settings.announces(peer, port)
                    && self.registry.is_news(peer, address)
                    && let Some(session) = self.neighbours.session(peer)
                {
                    session.respond(address, ListenerState::Listening);
                }
            }
        }
    }

    /// Returns the state of a listener for a peer. Only addresses of this node are answered.
    fn listener_state(&mut self, from: usize, address: SocketAddr) -> ListenerState {
        let own = self.settings.slot;
        if self.settings.rack.slot_of(address.ip()) != Some(own) {
            return ListenerState::NotListening;
        }
        if !self.settings.rack.allows(from, own, address.port()) {
            return ListenerState::Denied;
        }
        if self.registry.is_listening(from, address) { ListenerState::Listening } else { ListenerState::NotListening }
    }

    fn name(&self, slot: usize) -> &str {
        &self.settings.rack.nodes[slot].name
    }
}

/// The proxy.
impl NodeState {
    /// Kills a proxy that has not stopped using a lost link in time.
    pub(crate) fn check_stop_deadlines(&mut self, now_ns: u64) {
        if self.neighbours.is_stop_overdue(now_ns) {
            self.end_proxy("killed because it did not stop using a lost link", now_ns);
        }
    }

    /// Kills the proxy. Afterwards nothing accesses the windows, and links can be trained again.
    pub(crate) fn end_proxy(&mut self, reason: &str, now_ns: u64) {
        self.proxy.end(reason, now_ns);
        for index in 0..self.neighbours.len() {
            let neighbour = &mut self.neighbours[index];
            // The windows contain data of the dead proxy, which only a new epoch clears.
            if neighbour.proxy_ended() && neighbour.peer.is_open() {
                neighbour.peer.take_down("this node's proxy has ended", now_ns);
                self.handle_events(index, now_ns);
            }
        }
        let actions = self.listener_queries.proxy_gone();
        self.execute(actions);
    }
}

/// Queries for listeners.
impl NodeState {
    /// Executes the actions of the queries' state machine.
    pub(crate) fn execute(&mut self, actions: Vec<Action>) {
        for action in actions {
            let more = match action {
                Action::Ready(client) => {
                    self.clients.answer_query(client, ListenerResponse::Ready { node: self.settings.node().address });
                    Vec::new()
                }
                Action::Refuse(client, reason) => {
                    self.clients.answer_query(client, ListenerResponse::Unavailable(reason));
                    Vec::new()
                }
                Action::Query(slot, address) => self.query(slot, address),
                Action::Listen(slot, address) => {
                    let is_sent = self.proxy.send(&ToProxy::Listen { peer: slot as u8, address });
                    if is_sent { Vec::new() } else { self.listener_queries.listen_failed(address) }
                }
                Action::StopListening(address) => {
                    self.proxy.send(&ToProxy::StopListening { address });
                    Vec::new()
                }
            };
            self.execute(more);
        }
    }

    fn query(&mut self, slot: usize, address: SocketAddr) -> Vec<Action> {
        match self.neighbours.session(slot) {
            Some(session) => {
                session.query(address);
                Vec::new()
            }
            None => self.listener_queries.link_down(slot),
        }
    }
}
