//! Handles the reports of the forwarding thread.

use packet::ethernet::MacAddress;
use router::{Event, NodeId, TracedStep};
use tracing::{info, warn};

use super::messages::{Command, REPORTS_MAX, Report};
use super::metrics;
use super::state::Node;
use super::status;
use crate::management::{Response, STEPS_MAX};

impl Node {
    pub(super) fn handle_reports(&mut self, now_ns: u64) {
        self.reports_notifier.drain();
        for _ in 0..REPORTS_MAX {
            let Ok(report) = self.reports.try_recv() else { return };
            match report {
                Report::AdjacencyPinned(port, address, adjacency) => {
                    if adjacency.is_none() {
                        warn!(port = self.device(port), %address, "the neighbour table has no room for this gateway");
                    }
                    self.local.adjacency_pinned(port, address, adjacency);
                }
                Report::TransitSet(path) => self.transit_set(path),
                Report::NeighbourEvents(events) => events.into_iter().for_each(|event| self.neighbour(event)),
                Report::AllNeighbours(all) => {
                    let known = all.iter().filter(|neighbour| neighbour.is_confirmed);
                    self.local.replace_neighbours(known.map(|known| (known.port, known.address, known.adjacency)));
                }
                Report::Traced(steps) => self.send_trace_steps(&steps),
                Report::Snapshot(snapshot) => {
                    let status = self.status(&snapshot);
                    if std::mem::take(&mut self.awaits_metrics) {
                        self.metrics.respond(&metrics::render(&status), now_ns);
                    }
                    self.clients.respond_status(&Response::Status(Box::new(status)));
                }
                Report::PeerRemoved(node) => self.peers.removed(node, now_ns),
                Report::PeerFailed(node) => {
                    self.peers.peer_down(node, "it violated the interconnect's protocol", now_ns)
                }
                Report::PeerUnanswered(node) => {
                    let hold_ms = self.settings.cluster.hold_ns() as u64 / 1_000_000;
                    let reason =
                        format!("its forwarding does not answer: no acknowledgement of packets in {hold_ms} ms");
                    self.peers.peer_down(node, &reason, now_ns);
                }
                Report::PeerAnswered(node) => self.peer_answered(node),
                Report::PortFailed(port, error, closed) => {
                    drop(closed);
                    if let Some(port) = self.renumbering.current(port) {
                        self.port_failed(port, &error, now_ns);
                    }
                }
                Report::PortsRenumbered(ports) => {
                    drop(ports);
                    self.renumbering.acknowledge();
                }
                Report::PortDetached(port, closed) => {
                    drop(closed);
                    if let Some(port) = self.renumbering.current(port) {
                        self.ports[usize::from(port.0)].reopen_at_ns = Some(now_ns);
                    }
                }
                Report::InterconnectRestarted(Ok(())) => info!("the interconnect was restarted"),
                Report::InterconnectRestarted(Err(error)) => self.fault = Some(error.into()),
                Report::Suspended(suspended_ns, packets) => {
                    let suspended_ms = suspended_ns / 1_000_000;
                    warn!("the process was stopped for {suspended_ms} ms: {packets} waiting packets are dropped");
                    self.stale_packets += packets as u64;
                }
                Report::Offered(..) | Report::Accepted(..) | Report::Finished(..) => {
                    self.handle_join_report(report, now_ns)
                }
            }
        }
    }

    pub(super) fn send_trace_steps(&mut self, steps: &[TracedStep]) {
        let names: Vec<&str> = self.settings.cluster.nodes.iter().map(|node| node.name.as_str()).collect();
        for chunk in steps.chunks(STEPS_MAX) {
            let step = |step| status::traced_step(step, &names, |port| self.device(port).to_owned());
            let response = Response::Traced(chunk.iter().map(step).collect());
            self.clients.send_trace_steps(&response);
        }
    }

    /// Continues to connect the interconnect to another node.
    pub(super) fn handle_join_report(&mut self, report: Report, now_ns: u64) {
        let (Report::Offered(node, _) | Report::Accepted(node, _) | Report::Finished(node, _)) = &report else {
            return;
        };
        let node = *node;
        // Reports about an earlier session are ignored.
        if !self.peers.peer(node).is_some_and(|peer| peer.is_current()) {
            return;
        }
        let done = match report {
            Report::Offered(_, Ok(offer)) => {
                self.peers.offer(node, offer, now_ns);
                return;
            }
            Report::Accepted(_, Ok(params)) => {
                self.peers.accept_offer(node, params, now_ns);
                Ok(())
            }
            Report::Finished(_, done) => done,
            Report::Offered(_, Err(error)) | Report::Accepted(_, Err(error)) => Err(error),
            _ => return,
        };
        match done {
            Ok(()) => {
                if let Some(peer) = self.peers.peer(node).filter(|peer| !peer.is_joined) {
                    peer.reason = Some("its forwarding has not answered yet".to_owned());
                }
            }
            Err(error) => self.peers.peer_down(node, &format!("interconnect not connected: {error}"), now_ns),
        }
    }

    /// Sends packets to another node from now on: the path to it works.
    fn peer_answered(&mut self, node: NodeId) {
        let Some(peer) = self.peers.peer(node).filter(|peer| peer.is_current()) else { return };
        info!(node = peer.name, "joined");
        (peer.is_joined, peer.reason) = (true, None);
        self.table.set_reachable(node, true);
        self.command(Command::SetNodeUp(node, true));
    }

    pub(super) fn neighbour(&mut self, event: Event) {
        match event {
            Event::NeighbourUp { port, address, adjacency } => self.local.neighbour_up(port, address, adjacency),
            Event::NeighbourDown { port, address, .. } => self.local.neighbour_down(port, address),
            Event::Duplicate { port, address, mac } => {
                let (port, host) = (self.device(port), holder(mac));
                warn!(
                    port,
                    "address {address} is not used: {host} has it too; configure another address on one of them"
                );
            }
            Event::Conflict { port, address, mac } => {
                let (port, host) = (self.device(port), holder(mac));
                warn!(port, "address {address} is also used by {host}; configure another address on one of them");
            }
        }
    }
}

fn holder(mac: Option<MacAddress>) -> String {
    mac.map_or("another host".to_owned(), |mac| mac.to_string())
}
