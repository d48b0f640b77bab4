//! The state of the control thread.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::JoinHandle;
use std::time::Instant;

use ::control::MetricsServer;
use router::PortId;
use router_ports::{InterfaceIndex, LocalAddresses, Sysctls};

use super::clients::Clients;
use super::error::NodeError;
use super::filters::Filters;
use super::kernel_watch::KernelWatch;
use super::liveness::HangWatch;
use super::local_routes::LocalRoutes;
use super::messages::{Command, Notifier, Report};
use super::peers::Peers;
use super::port_state::PortState;
use super::renumbering::PortRenumbering;
use super::route_table::RouteTable;
use super::settings::NodeSettings;

/// A node of a cluster.
pub struct Node {
    pub(super) settings: NodeSettings,
    pub(super) begun: Instant,
    pub(super) started_at_ns: u64,
    pub(super) peers: Peers,
    pub(super) clients: Clients,
    pub(super) metrics: MetricsServer,
    /// Whether requests for metrics wait for a snapshot.
    pub(super) awaits_metrics: bool,
    pub(super) kernel: KernelWatch,
    pub(super) filters: Filters,
    pub(super) local: LocalRoutes,
    pub(super) table: RouteTable,
    pub(super) ports: Vec<PortState>,
    pub(super) renumbering: PortRenumbering,
    pub(super) slow_path: InterfaceIndex,
    pub(super) local_addresses: LocalAddresses,
    pub(super) commands: SyncSender<Command>,
    pub(super) commands_notifier: Arc<Notifier>,
    pub(super) reports: Receiver<Report>,
    pub(super) reports_notifier: Arc<Notifier>,
    pub(super) thread: Option<JoinHandle<()>>,
    pub(super) hang: HangWatch,
    /// When to restart the interconnect.
    pub(super) interconnect_restart_at_ns: u64,
    /// The error that ends the node.
    pub(super) fault: Option<NodeError>,
    /// Packets dropped because the process had been suspended.
    pub(super) stale_packets: u64,
    pub(super) netlink_resyncs: u64,
    /// Number of netlink messages that could not be parsed.
    pub(super) unreadable: u64,
    pub(super) filters_polled_at_ns: u64,
    /// The most routes since memory was last returned to the system.
    pub(super) routes_max: usize,
    pub(super) is_tracing: bool,
    pub(super) is_stopping: bool,
    /// Settings that are restored when the node ends.
    pub(super) sysctls: Sysctls,
    /// The PID file, locked as long as the node lives.
    pub(super) _pid: File,
}

impl Node {
    pub(super) fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// Sends a command to the forwarding thread. The channel drains quickly: that thread never waits for this one.
    pub(super) fn command(&self, command: Command) {
        // A send error means that the thread has ended, which each iteration checks.
        let _ = self.commands.send(command);
        self.commands_notifier.notify();
    }

    pub(super) fn device(&self, port: PortId) -> &str {
        self.settings.node().ports.get(usize::from(port.0)).map_or("kernel", |port| &port.device)
    }
}
