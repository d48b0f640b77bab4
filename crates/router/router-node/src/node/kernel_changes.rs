//! Changes of the kernel's links, addresses, routes and neighbours, and their effects.

use router_ports::netlink::Change;
use tracing::{error, info, warn};

use super::effect::Effect;
use super::kernel_watch::KernelBatch;
use super::messages::Command;
use super::rejected_routes::{RejectReason, RejectedRoute};
use super::stale_routes::{StaleEvent, StaleOfProtocol};
use super::state::Node;

/// Maximum number of changes of this node's routes that are applied at once: some milliseconds.
const CHANGES_MAX: usize = 4096;

impl Node {
    /// Applies the next batch of changes.
    pub(super) fn handle_kernel_changes(&mut self) {
        let Some(KernelBatch { changes, resyncs, unreadable }) = self.kernel.next() else { return };
        match changes {
            Ok(changes) => changes.into_iter().for_each(|change| {
                // Which filters apply depends on these. There may be millions of routes.
                if let Change::Link(_) | Change::LinkGone(_) | Change::Address(_) | Change::AddressGone { .. } = change
                {
                    self.filters.note_readable();
                }
                self.local.apply_kernel_change(change);
            }),
            Err(error) => error!("netlink: {error}"),
        }
        self.close_changed_ports();
        self.netlink_resyncs = resyncs;
        if unreadable > std::mem::replace(&mut self.unreadable, unreadable) && unreadable.is_power_of_two() {
            warn!(unreadable, "netlink: a message cannot be parsed and is skipped; the kernel may be newer");
        }
    }

    /// Carries out the effects of all changes so far.
    pub(super) fn apply_all_effects(&mut self) {
        self.apply_effects();
        while self.local.has_more() {
            self.apply_effects();
        }
    }

    /// Carries out the effects of the changes so far, except those of some routes if there are very many.
    pub(super) fn apply_effects(&mut self) {
        for effect in self.local.take_effects() {
            match effect {
                Effect::ConfigurePort(port, config) => self.command(Command::ConfigurePort(port, config)),
                Effect::PinAdjacency(port, address) => self.command(Command::PinAdjacency(port, address)),
                Effect::UnpinAdjacency(adjacency) => self.command(Command::UnpinAdjacency(adjacency)),
                Effect::LearnNeighbour(port, address, mac) => self.command(Command::LearnNeighbour(port, address, mac)),
                Effect::AddLocalAddress(address) => {
                    if let Err(error) = self.local_addresses.insert(address) {
                        warn!(%address, "the ports cannot be given this local address: {error}");
                    }
                }
                Effect::RemoveLocalAddress(address) => {
                    if let Err(error) = self.local_addresses.remove(address) {
                        warn!(%address, "the ports cannot remove this local address: {error}");
                    }
                }
                Effect::RouteRejected(prefix, rejected) => self.log_rejected_route(prefix, rejected),
                Effect::StaleRoutes(event) => self.log_stale_routes(event),
            }
        }
        let changes = self.local.update_routes(CHANGES_MAX);
        self.table.change(self.settings.id(), changes);
        self.log_mtu_cuts();
    }

    fn log_stale_routes(&self, event: StaleEvent) {
        match event {
            StaleEvent::Kept(StaleOfProtocol { protocol, routes, until_ns }) => {
                let left_s = until_ns.saturating_sub(self.now_ns()).div_ceil(1_000_000_000);
                warn!(protocol, routes, "a routing daemon's routes have all vanished: they are kept for {left_s} s");
            }
            StaleEvent::Expired { protocol, routes } => {
                warn!(protocol, routes, "the kept routes did not come back in time and are removed");
            }
        }
    }

    /// Keeps the routes of restarting routing daemons as the cluster file says, unless the kernel forwards: it does not
    /// have them.
    pub(super) fn set_stale_routes(&mut self) {
        let kept_ns = self.settings.cluster.timeouts.stale_routes_ns as u64;
        self.local.set_stale_routes_ns(if self.filters.kernel_forwards() { 0 } else { kept_ns });
    }

    /// Logs a route that is not accepted as the kernel has it, unless its port is only being reopened.
    pub(super) fn log_rejected_route(&self, prefix: ipnet::IpNet, rejected: RejectedRoute) {
        let RejectReason::NoPort(interface) = rejected.reason else { return warn!("{}", rejected.line(prefix, "")) };
        let name = self.local.name_of(interface).unwrap_or("?");
        let mut ports = self.settings.node().ports.iter().zip(&self.ports);
        if !ports.any(|(port_config, state)| port_config.device == name && state.reopen_at_ns.is_some()) {
            // Such routes are normal where a node shares the network namespace of the machine.
            info!("{}", rejected.line(prefix, name));
        }
    }
}
