//! The ports of a node: opened, attached to the forwarding thread, reopened and closed.

use std::io;

use router::PortId;
use router_ports::Interface;
use tracing::{info, warn};

use super::error::NodeError;
use super::local_routes::OpenedPort;
use super::messages::Command;
use super::open_ports::{self, OpenPort};
use super::port_state::{BoxedPort, PortState};
use super::state::Node;
use super::status;
use crate::cluster::{PortKind, PortOfNode};

/// Interval between attempts to reopen a port whose device is gone.
const REOPEN_NS: u64 = 500_000_000;

impl Node {
    pub(super) fn open_all_ports(&mut self) -> Result<(), NodeError> {
        let node = self.settings.node().clone();
        let mut attached = Vec::new();
        for (index, port_config) in node.ports.iter().enumerate() {
            let OpenPort { port, config, interface, kind, fallback, opened_interface } = self.open(index)?;
            self.local.add_port(OpenedPort { interface, config }, port_config);
            if let Some(reason) = &fallback {
                warn!(port = port_config.device, "fell back to {kind}: {reason}");
            }
            info!(port = port_config.device, "opened by {kind}");
            let (port, deferred) = self.defer_capture_file(port_config, port);
            self.ports.push(PortState { kind, fallback, opened_interface, deferred, ..PortState::default() });
            attached.extend(port.map(|port| (index, port)));
        }
        self.local.set_static(&node);
        self.table.set_ports_without_kernel(node.ports_without_kernel());
        // Ports are attached last, so that the first packets find the configuration and the routes.
        self.apply_all_effects();
        self.attach_ports(attached);
        Ok(())
    }

    /// Attaches ports to the forwarding thread.
    pub(super) fn attach_ports(&self, ports: Vec<(usize, BoxedPort)>) {
        for (index, port) in ports {
            self.command(Command::AttachPort(PortId(index as u8), port));
        }
    }

    pub(super) fn open(&mut self, index: usize) -> Result<OpenPort, NodeError> {
        let (local, kernel_forwards) = (&self.local_addresses, self.filters.kernel_forwards());
        let params = self.settings.open_port_params(self.settings.node(), index, local, kernel_forwards);
        open_ports::open_port(&params, &mut self.sysctls)
    }

    /// Holds a capture file back until its packets can be forwarded. Other ports are attached at once.
    pub(super) fn defer_capture_file(
        &self,
        port_config: &PortOfNode,
        port: Option<BoxedPort>,
    ) -> (Option<BoxedPort>, Option<(BoxedPort, u64)>) {
        let until_ns = self.now_ns() + self.settings.cluster.timeouts.up_ns as u64;
        match port {
            Some(port) if port_config.kind == PortKind::Pcap => (None, Some((port, until_ns))),
            port => (port, None),
        }
    }

    /// Attaches capture files once all nodes are joined, or their timeout has expired.
    pub(super) fn attach_deferred(&mut self, now_ns: u64) {
        let all_joined = self.peers.iter().all(|(_, peer)| peer.is_joined);
        for index in 0..self.ports.len() {
            let is_due = |deferred: &mut (BoxedPort, u64)| all_joined || deferred.1 <= now_ns;
            if let Some((port, _)) = self.ports[index].deferred.take_if(is_due) {
                self.command(Command::AttachPort(PortId(index as u8), port));
            }
        }
    }

    pub(super) fn port_failed(&mut self, port: PortId, error: &io::Error, now_ns: u64) {
        if self.settings.node().ports[usize::from(port.0)].kind == PortKind::Pcap {
            // A reopened capture file would be read from its beginning.
            warn!(port = self.device(port), "closed; its capture files are not opened again: {error}");
            return;
        }
        warn!(port = self.device(port), "its device is gone: {error}");
        self.local.set_interface(port, None);
        self.ports[usize::from(port.0)].reopen_at_ns = Some(now_ns + REOPEN_NS);
    }

    /// Reopens ports whose device is gone or has changed. A device may return with another interface index, and its
    /// addresses and routes may have been reported before the port had that index. All kernel state is therefore
    /// applied again.
    pub(super) fn reopen_ports(&mut self, now_ns: u64) {
        let mut is_reopened = false;
        for index in 0..self.ports.len() {
            if self.ports[index].reopen_at_ns.is_none_or(|at_ns| now_ns < at_ns) {
                continue;
            }
            match self.open(index) {
                Ok(OpenPort { port, interface, kind, fallback, opened_interface, .. }) => {
                    info!(port = self.device(PortId(index as u8)), "reopened by {kind}");
                    let mtu_cut = self.ports[index].mtu_cut.take();
                    self.ports[index] = PortState { kind, fallback, opened_interface, mtu_cut, ..PortState::default() };
                    if let Some(port) = port {
                        self.command(Command::AttachPort(PortId(index as u8), port));
                    }
                    self.local.set_interface(PortId(index as u8), interface);
                    is_reopened = true;
                }
                Err(error) => self.reopen_later(index, &error, now_ns),
            }
        }
        if is_reopened {
            // Filters of an interface are found by its index.
            self.update_filters();
            self.kernel.all().into_iter().for_each(|change| self.local.apply_kernel_change(change));
        }
    }

    /// Schedules another attempt; until then, the port's routes are not announced. Each error is logged once; a missing
    /// device was logged before.
    fn reopen_later(&mut self, index: usize, error: &NodeError, now_ns: u64) {
        self.local.set_interface(PortId(index as u8), None);
        let has_device = Interface::by_name(&self.settings.node().ports[index].device).is_ok();
        let state = &mut self.ports[index];
        state.reopen_at_ns = Some(now_ns + REOPEN_NS);
        let fault = Some(error.to_string()).filter(|_| has_device);
        if state.reopen_error != fault {
            if let Some(fault) = &fault {
                warn!("a port stays closed and is retried: {fault}");
            }
            state.reopen_error = fault;
        }
    }

    /// Closes ports whose interface has changed in a way that they cannot follow. They are reopened when closed, as two
    /// ports cannot share an interface.
    pub(super) fn close_changed_ports(&mut self) {
        for index in 0..self.ports.len() {
            let port = PortId(index as u8);
            let Some(link) = self.local.link(port) else { continue };
            if self.ports[index].opened_interface.take_if(|opened| !opened.still_matches(link)).is_some() {
                let mac = link.mac.map_or_else(String::new, |mac| format!(" and address {mac}"));
                info!(port = self.device(port), "its interface has changed, now with MTU {}{mac}", link.mtu_bytes);
                self.close_to_reopen(index);
            }
        }
    }

    /// Closes a port, which is reopened when it is detached, or later if its number changes in between.
    pub(super) fn close_to_reopen(&mut self, index: usize) {
        self.ports[index].opened_interface = None;
        self.ports[index].reopen_at_ns = Some(self.now_ns() + REOPEN_NS);
        self.command(Command::DetachPort(PortId(index as u8)));
    }

    /// Returns a line for each port with an MTU below the one of the cluster file.
    pub(super) fn mtu_cuts(&self) -> Vec<String> {
        let ports = self.settings.node().ports.iter().zip(&self.ports);
        ports
            .filter_map(|(port_config, state)| {
                Some(format!("port '{}': {}", port_config.device, state.mtu_cut.as_ref()?))
            })
            .collect()
    }

    /// Logs each reduction of a configured MTU once.
    pub(super) fn log_mtu_cuts(&mut self) {
        for (index, (port_config, state)) in self.settings.node().ports.iter().zip(&mut self.ports).enumerate() {
            let cut = status::mtu_cut(port_config, self.local.port(PortId(index as u8)).mtu_bytes);
            if state.mtu_cut != cut {
                if let Some(cut) = &cut {
                    warn!(port = port_config.device, "{cut}");
                }
                state.mtu_cut = cut;
            }
        }
    }
}
