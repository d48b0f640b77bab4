//! Handles the requests of commands.

use std::os::fd::AsFd;

use router::Filter;
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use super::capture::{Capture, CaptureSettings};
use super::fib_query;
use super::messages::Command;
use super::state::Node;
use crate::management::{CHANGES_SHOWN_MAX, CaptureQuery, ROUTES_MAX, Request, Response, TraceQuery};

/// Size of the pipe of a capture.
const PIPE_BYTES: usize = 1 << 20;

impl Node {
    pub(super) fn serve_requests(&mut self) {
        for (number, request) in self.clients.requests() {
            match request {
                Request::Status => {
                    self.request_snapshot();
                    self.clients.request_status(number);
                }
                Request::Fib(query) => self.clients.stream_routes(number, fib_query::prefixes(&self.table, query)),
                Request::Trace(query) => self.trace(number, query),
                Request::Capture(query) => self.capture(number, query),
                Request::Reload { is_trial } => {
                    let response = match self.reload(is_trial) {
                        Ok(changes) => Response::Reloaded { changes: shortened(changes) },
                        Err(fault) => Response::InvalidConfig { fault },
                    };
                    self.clients.respond(number, &response);
                }
                Request::Stop => {
                    self.clients.respond(number, &Response::Stopping);
                    self.is_stopping = true;
                }
            }
        }
        if self.metrics.poll(self.now_ns()) && !self.awaits_metrics {
            self.request_snapshot();
            self.awaits_metrics = true;
        }
        let (table, cluster) = (&self.table, &self.settings.cluster);
        self.clients.continue_route_streams(ROUTES_MAX, |prefixes, is_last| {
            let routes = prefixes.iter().filter_map(|prefix| fib_query::route(table, cluster, *prefix)).collect();
            Response::Fib { routes, is_last }
        });
        if self.is_tracing && !self.clients.is_tracing() {
            self.is_tracing = false;
            self.command(Command::Trace(None));
        }
    }

    fn capture(&mut self, number: u64, query: CaptureQuery) {
        let settings = match self.capture_settings(query) {
            Ok(settings) => settings,
            Err(reason) => return self.clients.respond(number, &Response::Refused { reason }),
        };
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (read, write) = match pipe.and_then(|(read, write)| {
            rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
            Ok((read, write))
        }) {
            Ok(pipe) => pipe,
            Err(error) => {
                let reason = format!("a pipe for the capture: {error}; end other programs");
                return self.clients.respond(number, &Response::Refused { reason });
            }
        };
        // The default of 64 KiB is a fraction of a millisecond of traffic. A user without the right keeps it.
        let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE_BYTES);
        self.clients.respond_with(number, &Response::Capturing, read.as_fd());
        self.command(Command::Capture(Box::new(Capture::new(settings, write))));
    }

    fn capture_settings(&self, query: CaptureQuery) -> Result<CaptureSettings, String> {
        let node = self.settings.node();
        let Some((port, of_node)) = node.port(&query.port) else {
            let ports: Vec<&str> = node.ports.iter().map(|port| port.device.as_str()).collect();
            return Err(format!("there is no port '{}'; choose one of {}", query.port, ports.join(", ")));
        };
        if let Some(parent) = &of_node.parent {
            let own = &query.port;
            return Err(format!("'{own}' is a VLAN; capture at its parent '{parent}', whose frames have the tags"));
        }
        let (device, node) = (query.port, node.name.clone());
        let CaptureQuery { frame_bytes_max, frames_max, .. } = query;
        Ok(CaptureSettings { port, device, node, frame_bytes_max, frames_max })
    }

    /// Requests the counters of the forwarding thread, unless they are on their way.
    fn request_snapshot(&self) {
        if !self.clients.is_status_requested() && !self.awaits_metrics {
            self.command(Command::Snapshot);
        }
    }

    pub(super) fn trace(&mut self, number: u64, query: TraceQuery) {
        if !self.clients.trace(number) {
            let reason = "another command is tracing this node; end it, or wait until it ends".to_owned();
            return self.clients.respond(number, &Response::Refused { reason });
        }
        let TraceQuery { source, destination, protocol, port, packets_max } = query;
        let protocol = protocol.map(packet::Protocol);
        let filter = Filter { source, destination, protocol, transport_port: port, packets_max };
        self.command(Command::Trace(Some(filter)));
        self.is_tracing = true;
        self.clients.respond(number, &Response::Traced(Vec::new()));
    }
}

/// Truncates the list to the maximum of a response.
fn shortened(mut changes: Vec<String>) -> Vec<String> {
    let count = changes.len();
    if count > CHANGES_SHOWN_MAX {
        changes.truncate(CHANGES_SHOWN_MAX);
        changes.push(format!("and {} more; see the log", count - CHANGES_SHOWN_MAX));
    }
    changes
}
