//! The event loop of a node's control thread. Its steps are methods of the modules that handle each kind of event.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use router::NodeId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{error, info, warn};

use super::error::NodeError;
use super::interconnect_clock::InterconnectClock;
use super::liveness::HangEvent;
use super::messages::Command;
use super::peers::PeerUpdate;
use super::route_table::ROUTES_MAX;
use super::state::Node;
use crate::control::{ControlError, RouteChange};

/// Nice value of the control thread: it uses little CPU time, and other nodes depend on its keepalives.
const NICENESS: i32 = -10;
/// How often filters whose changes are not reported are looked for, and the longest sleep of the control thread.
const FILTERS_POLL_NS: u64 = 1_000_000_000;
/// Index of the first polled descriptor that belongs to the sessions with other nodes, after four others.
const PEERS_AT: usize = 4;
/// How long the forwarding thread may hang before the node ends: it is not expected to recover.
const HANG_NS_MAX: u64 = 10_000_000_000;
/// Number of routes whose memory is worth the time that returning it takes.
const ROUTES_MANY: usize = 1 << 16;
/// Maximum number of withdrawals that all nodes have received and that are forgotten at once.
const PRUNED_MAX: usize = 1 << 14;

impl Node {
    /// Runs until a command stops the node, or `stop` becomes readable. Reloads the cluster file whenever `reload`
    /// becomes readable.
    ///
    /// # Errors
    /// Returns the error that ended the node.
    pub fn run(mut self, stop: BorrowedFd<'_>, reload: BorrowedFd<'_>) -> Result<(), NodeError> {
        // Without the permission, keepalives may be late on a busy machine.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
        let name = &self.settings.node().name;
        info!(node = name, cluster = self.settings.cluster.name, "node started");
        self.set_stale_routes();
        let mut done = Ok(());
        while !self.is_stopping && done.is_ok() {
            let has_more = self.poll_once();
            done = self.check_thread();
            if !self.is_stopping && done.is_ok() {
                self.sleep([stop, reload], has_more);
            }
        }
        self.end();
        done
    }

    /// Runs one iteration. Returns whether more work is pending.
    fn poll_once(&mut self) -> bool {
        let now_ns = self.now_ns();
        self.check_forwarding_hang(now_ns);
        self.restart_interconnect(now_ns);
        self.peers.poll(now_ns, self.local.announcements());
        self.handle_peer_updates();
        self.handle_reports(now_ns);
        self.handle_kernel_changes();
        self.local.poll_stale_routes(now_ns);
        self.watch_filters();
        self.reopen_ports(now_ns);
        self.attach_deferred(now_ns);
        self.apply_effects();
        let has_more = self.table.process(now_ns) | self.peers.has_more() | self.local.has_more();
        self.peers.send(now_ns, self.local.announcements());
        self.handle_peer_updates();
        if let Some(advertised) = self.peers.advertised_to_all(now_ns) {
            self.local.announcements_mut().prune_withdrawn(advertised, PRUNED_MAX);
        }
        self.serve_requests();
        if !has_more {
            self.return_memory();
        }
        has_more
    }

    /// Returns memory to the system once most of many routes are gone.
    fn return_memory(&mut self) {
        let (v4, v6) = self.table.routes();
        self.routes_max = self.routes_max.max(v4 + v6);
        if self.routes_max > ROUTES_MANY && v4 + v6 < self.routes_max / 2 {
            self.routes_max = v4 + v6;
            router_ports::free_memory::return_to_system();
        }
    }

    fn check_thread(&mut self) -> Result<(), NodeError> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(NodeError::ForwardingEnded);
        }
        let hung_ns = self.hang.hung_ns(self.now_ns()).unwrap_or(0);
        if hung_ns < HANG_NS_MAX { Ok(()) } else { Err(NodeError::ForwardingHung(hung_ns / 1_000_000_000)) }
    }

    /// Closes all sessions while the forwarding thread hangs: other nodes would send packets that are not forwarded.
    fn check_forwarding_hang(&mut self, now_ns: u64) {
        match self.hang.poll(now_ns) {
            Some(HangEvent::Hung) => {
                error!("the forwarding thread hangs: sessions are closed until it resumes");
                self.peers.hold("its forwarding thread hangs", now_ns);
            }
            Some(HangEvent::Resumed(hung_ns)) => {
                let hung_ms = hung_ns / 1_000_000;
                warn!("the forwarding thread has resumed after {hung_ms} ms: sessions are opened again");
                self.release_peers();
            }
            None => {}
        }
    }

    /// Restarts the interconnect before its clock overflows, every 106 days, and opens the sessions again. That takes
    /// some milliseconds.
    fn restart_interconnect(&mut self, now_ns: u64) {
        if now_ns < self.interconnect_restart_at_ns || self.hang.hung_ns(now_ns).is_some() {
            return;
        }
        self.interconnect_restart_at_ns = now_ns + InterconnectClock::NS_MAX;
        self.peers.hold("its interconnect restarts", now_ns);
        self.handle_peer_updates();
        self.command(Command::RestartInterconnect);
        self.release_peers();
    }

    /// Lets sessions be opened again, unless nothing is forwarded.
    fn release_peers(&mut self) {
        if !self.filters.is_closed() {
            self.peers.release();
        }
    }

    fn handle_peer_updates(&mut self) {
        for update in self.peers.take_updates() {
            match update {
                PeerUpdate::Up(node) => {
                    // Its routes are used once it has answered over the interconnect.
                    self.table.set_reachable(node, false);
                    // The node with the lower number makes the offer.
                    if node > self.settings.id() {
                        self.command(Command::OfferInterconnect(node));
                    }
                }
                PeerUpdate::Down(node) => {
                    self.command(Command::RemovePeer(node));
                    self.table.suspend_node(node);
                }
                PeerUpdate::PortMtus(node, mtus_bytes) => self.command(Command::SetRemoteMtus(node, mtus_bytes)),
                PeerUpdate::RoutesBegin(node, true) => self.table.resume_node(node),
                PeerUpdate::RoutesBegin(node, false) | PeerUpdate::Forget(node) => self.table.forget_node(node),
                PeerUpdate::Routes(node, changes) => self.change_routes(node, changes),
                PeerUpdate::Offer(node, offer) => self.command(Command::AcceptOffer(node, offer)),
                PeerUpdate::Params(node, params) => self.command(Command::FinishOffer(node, params)),
            }
        }
    }

    /// Applies changes of another node's routes.
    fn change_routes(&mut self, node: NodeId, changes: Vec<RouteChange>) {
        self.table.change(node, changes);
        if self.table.routes_of(node) > ROUTES_MAX {
            let now_ns = self.now_ns();
            self.peers.peer_down(node, &ControlError::TooManyRoutes(ROUTES_MAX).to_string(), now_ns);
        }
    }

    /// Blocks until a descriptor is ready or a timer is due.
    fn sleep(&mut self, [stop, reload]: [BorrowedFd<'_>; 2], has_more: bool) {
        let now_ns = self.now_ns();
        let reopen_ns = self.ports.iter().filter_map(|port| port.reopen_at_ns).min().unwrap_or(u64::MAX);
        let deferred_ns = self.ports.iter().filter_map(|port| port.deferred.as_ref()).map(|(_, at_ns)| *at_ns).min();
        let due_ns =
            self.peers.due_ns().min(reopen_ns).min(deferred_ns.unwrap_or(u64::MAX)).min(now_ns + FILTERS_POLL_NS);
        let due_ns = due_ns.min(self.hang.due_ns()).min(self.interconnect_restart_at_ns);
        let due_ns =
            [self.metrics.due_ns(), self.local.stale_routes_due_ns()].into_iter().flatten().fold(due_ns, u64::min);
        let left_ns = if has_more { 0 } else { due_ns.saturating_sub(now_ns) };
        let own: [_; PEERS_AT] = [stop, self.reports_notifier.as_fd(), self.kernel.wakes(), reload];
        let mut descriptors = Vec::from(own.map(|fd| (fd, PollFlags::IN)));
        descriptors.extend(self.peers.descriptors());
        let clients_at = descriptors.len();
        descriptors.extend(self.clients.descriptors());
        let filters_at = descriptors.len();
        descriptors.extend(self.filters.wakes().map(|fd| (fd, PollFlags::IN)));
        let metrics_at = descriptors.len();
        descriptors.extend(self.metrics.descriptors());
        let mut polled: Vec<PollFd<'_>> =
            descriptors.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        let timeout = Timespec::try_from(Duration::from_nanos(left_ns)).expect("a second at most");
        // An interrupted call is treated as a timeout.
        let _ = poll(&mut polled, Some(&timeout));
        let readable: Vec<bool> = polled.iter().map(|fd| !fd.revents().difference(PollFlags::OUT).is_empty()).collect();
        let [must_stop, _, _, must_reload]: [bool; PEERS_AT] = std::array::from_fn(|at| readable[at]);
        self.is_stopping |= must_stop;
        self.peers.note_readable(&readable[PEERS_AT..clients_at]);
        if readable[clients_at..filters_at].contains(&true) {
            self.clients.note_readable();
        }
        // Some kinds of filters report no changes.
        let is_filters_due = self.filters_polled_at_ns + FILTERS_POLL_NS <= now_ns;
        if readable[filters_at..metrics_at].contains(&true) || is_filters_due {
            self.filters_polled_at_ns = now_ns;
            self.filters.note_readable();
        }
        if must_reload && !self.is_stopping {
            // Several signals result in one reload.
            let _ = rustix::io::read(reload, &mut [0; 64]);
            self.reload_by_signal();
        }
    }

    /// Closes the sessions, stops the forwarding thread, and removes routes and sockets.
    fn end(&mut self) {
        self.peers.send_cease("stopped");
        let is_hung = self.hang.hung_ns(self.now_ns()).is_some();
        if !is_hung {
            self.command(Command::Stop);
        }
        // A thread that hangs ends with the process.
        if let Some(thread) = self.thread.take_if(|_| !is_hung) {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
        self.table.clean_up();
        let paths = self.settings.node_paths();
        for path in [paths.socket(), paths.peers_socket(), paths.metrics_socket()] {
            let _ = std::fs::remove_file(path);
        }
        info!("node ended");
    }
}
