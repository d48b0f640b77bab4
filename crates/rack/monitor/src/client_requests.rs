//! Requests of clients: queries of programs, commands, and scrapes of metrics.

use std::net::SocketAddr;

use control::monitor::{Request, Response};
use control::proxy::ToProxy;
use socket::rack::monitor::ListenerResponse;
use stats_page::FallbackReason;
use tracing::info;

use crate::clients::ClientRequest;
use crate::metrics;
use crate::node_state::NodeState;

/// Limit for a status request to wait for the proxy's report.
const REPORT_TIMEOUT_NS: u64 = 100_000_000;

impl NodeState {
    /// Handles all requests that have arrived.
    pub(crate) fn serve_clients(&mut self, now_ns: u64) {
        self.clients.accept();
        let numbers: Vec<u64> = self.clients.descriptors().1.map(|(number, _)| number).collect();
        for number in numbers {
            match self.clients.next_request(number) {
                Ok(Some(ClientRequest::RemoteListener(address))) => self.query_listener(number, address, now_ns),
                Ok(Some(ClientRequest::Command(Request::Status))) => {
                    let is_requested = self.proxy.send(&ToProxy::Report);
                    self.status_waiters.push((number, if is_requested { now_ns + REPORT_TIMEOUT_NS } else { now_ns }));
                }
                Ok(Some(ClientRequest::Command(Request::Stop))) => {
                    info!("received a request to stop");
                    self.clients.respond(number, &Response::Stopping);
                    self.is_stopping = true;
                }
                Ok(None) => {}
                Err(gone) => self.listener_queries.forget(gone),
            }
        }
    }

    /// Handles a program's query for a listener of another node.
    fn query_listener(&mut self, client: u64, address: SocketAddr, now_ns: u64) {
        let slot = self.settings.remote_slot(address).and_then(|slot| {
            let is_usable = self.neighbours.is_open(slot) && self.proxy.is_ready();
            if is_usable { Ok(slot) } else { Err(FallbackReason::LinkDown) }
        });
        match slot {
            Ok(slot) => {
                let actions = self.listener_queries.query(client, slot, address, now_ns);
                self.execute(actions);
            }
            Err(reason) => self.clients.answer_query(client, ListenerResponse::Unavailable(reason)),
        }
    }

    /// Answers the clients whose status is due.
    pub(crate) fn send_status(&mut self, now_ns: u64) {
        if self.status_waiters.iter().all(|(_, deadline_ns)| *deadline_ns > now_ns) {
            return;
        }
        let (due, rest): (Vec<_>, Vec<_>) =
            self.status_waiters.iter().copied().partition(|(_, deadline)| *deadline <= now_ns);
        self.status_waiters = rest;
        let answer = Response::Status(Box::new(self.status()));
        due.into_iter().for_each(|(client, _)| self.clients.respond(client, &answer));
    }

    /// Answers the scrapes of metrics that have arrived.
    pub(crate) fn serve_metrics(&mut self, now_ns: u64) {
        if self.metrics.poll(now_ns) {
            let status = self.status();
            let programs = stats_page::reader::read_rack(&self.settings.node_run_dir().directory).ok();
            let programs = programs.as_ref().map(|programs| &programs.processes[..]);
            self.metrics.respond(&metrics::render(&status, programs), now_ns);
        }
    }
}
