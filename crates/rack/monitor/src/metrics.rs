//! Metrics in the Prometheus text format, over HTTP on a unix socket and, if configured, on a TCP port.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use control::monitor::Status;
use stats_page::DataPath;
use stats_page::reader::{Process, Totals};

/// Maximum number of readers, and the time limit for a reader's request.
const READERS_MAX: usize = 16;
const READER_TIMEOUT_NS: u64 = 1_000_000_000;
/// Bytes of a request that are read.
const REQUEST_BYTES: usize = 4096;

/// A connection of either kind.
trait Stream: Read + Write + AsFd {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

/// Serves metrics.
pub struct Metrics {
    socket: UnixListener,
    port: Option<TcpListener>,
    readers: Vec<(Box<dyn Stream>, u64)>,
    requests: Vec<Box<dyn Stream>>,
}

impl Metrics {
    /// Listens at a path, replacing an existing socket, and at a port.
    ///
    /// # Errors
    /// The error of the kernel, and the address.
    pub fn listen(path: &Path, port: Option<SocketAddr>) -> Result<Self, String> {
        let _ = std::fs::remove_file(path);
        let failed = |error: std::io::Error| format!("metrics at {}: {error}", path.display());
        let socket = UnixListener::bind(path).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let port = port.map(listen_at).transpose()?;
        Ok(Self { socket, port, readers: Vec::new(), requests: Vec::new() })
    }

    /// Changes the port, or stops listening at a port.
    ///
    /// # Errors
    /// The error of the kernel, and the address. The previous port then stays in use.
    pub fn set_port(&mut self, port: Option<SocketAddr>) -> Result<(), String> {
        self.port = port.map(listen_at).transpose()?;
        Ok(())
    }

    /// Returns the descriptors to poll. Listeners are left out while there are too many readers: they would stay
    /// readable.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let readers = self.readers.iter().map(|(stream, _)| stream.as_fd());
        let listeners = [self.socket.as_fd()].into_iter().chain(self.port.as_ref().map(AsFd::as_fd));
        listeners.filter(|_| self.readers.len() < READERS_MAX).chain(readers)
    }

    /// Returns the earliest deadline of a reader that has not sent its request.
    pub fn due_ns(&self) -> Option<u64> {
        self.readers.iter().map(|(_, deadline_ns)| *deadline_ns).min()
    }

    /// Accepts connections and reads requests. Returns whether requests wait for [`Metrics::respond`].
    pub fn poll(&mut self, now_ns: u64) -> bool {
        while self.readers.len() < READERS_MAX {
            let Some(stream) = self.accept() else { break };
            self.readers.push((stream, now_ns.saturating_add(READER_TIMEOUT_NS)));
        }
        for (mut stream, deadline_ns) in std::mem::take(&mut self.readers) {
            match stream.read(&mut [0; REQUEST_BYTES]) {
                Ok(bytes) if bytes > 0 => self.requests.push(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock && now_ns < deadline_ns => {
                    self.readers.push((stream, deadline_ns));
                }
                _ => {}
            }
        }
        !self.requests.is_empty()
    }

    /// Answers all requests with the node's status and, unless they cannot be read, the statistics pages of its
    /// programs.
    pub fn respond(&mut self, status: &Status, programs: Option<&[Process]>) {
        let mut text = render(status);
        if let Some(programs) = programs {
            render_programs(&mut text, &status.node, programs);
        }
        for mut stream in self.requests.drain(..) {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n";
            let answer = format!("{head}Content-Length: {}\r\n\r\n{text}", text.len());
            // The response is truncated if the socket's send buffer is full. Readers are local and repeat their
            // requests.
            let _ = stream.write(answer.as_bytes());
        }
    }

    fn accept(&self) -> Option<Box<dyn Stream>> {
        if let Ok((stream, _)) = self.socket.accept() {
            stream.set_nonblocking(true).ok()?;
            return Some(Box::new(stream));
        }
        let (stream, _) = self.port.as_ref()?.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(Box::new(stream))
    }
}

fn listen_at(address: SocketAddr) -> Result<TcpListener, String> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error: std::io::Error| {
        format!("metrics at {address}: {error}; give the node another address in the rack file")
    })
}

type LinkValue = fn(&control::monitor::Link) -> u64;

/// Metrics of each link: name, type, help and value.
const LINK_METRICS: [(&str, &str, &str, LinkValue); 26] = [
    ("crosslane_link_up", "gauge", "Whether the link carries connections.", |link| u64::from(link.state == "up")),
    ("crosslane_link_ups_total", "counter", "Number of times that the link came up.", |link| link.ups),
    ("crosslane_link_round_trip_ns", "gauge", "Last round trip of the monitors.", |link| {
        link.round_trip_ns.unwrap_or(0)
    }),
    ("crosslane_connections", "gauge", "Connections over windows.", |link| link.carried.connections_open),
    ("crosslane_connections_total", "counter", "Connections since the start.", |link| link.carried.connections_total),
    ("crosslane_direct_connections", "gauge", "Open direct connections.", |link| link.carried.direct_open),
    ("crosslane_direct_connections_total", "counter", "Direct connections since the start.", |link| {
        link.carried.direct_total
    }),
    ("crosslane_direct_held", "gauge", "Direct connections without a link.", |link| link.carried.direct_held),
    ("crosslane_direct_missed_total", "counter", "Connections that found no span, or could not map it.", |link| {
        link.carried.direct_missed
    }),
    ("crosslane_sent_bytes_total", "counter", "Payload bytes sent.", |link| link.carried.bytes_sent),
    ("crosslane_received_bytes_total", "counter", "Payload bytes received.", |link| link.carried.bytes_received),
    ("crosslane_failover_connections", "gauge", "Connections of lost links, over kernel TCP.", |link| {
        link.carried.failover_open
    }),
    ("crosslane_failover_connections_total", "counter", "Connections that have lost their link.", |link| {
        link.carried.failover_total
    }),
    ("crosslane_failover_resets_total", "counter", "Of those, connections that were reset.", |link| {
        link.carried.failover_resets
    }),
    ("crosslane_failover_sent_bytes_total", "counter", "Payload bytes sent over kernel TCP.", |link| {
        link.carried.failover_bytes_sent
    }),
    ("crosslane_failover_received_bytes_total", "counter", "Payload bytes received over kernel TCP.", |link| {
        link.carried.failover_bytes_received
    }),
    ("crosslane_copied_bytes_total", "counter", "Bytes copied by the proxy.", |link| link.carried.bytes_copied),
    ("crosslane_frames_sent_total", "counter", "Frames sent in windows.", |link| link.carried.frames_sent),
    ("crosslane_publishes_total", "counter", "Publishes of frames.", |link| link.carried.publishes),
    ("crosslane_flushes_total", "counter", "Waits until stores had arrived, before blocking.", |link| {
        link.carried.flushes
    }),
    ("crosslane_frames_received_total", "counter", "Frames received in windows.", |link| link.carried.frames_received),
    ("crosslane_stalls_total", "counter", "Times that a connection's receiver had no room.", |link| {
        link.carried.stalls
    }),
    ("crosslane_partitions_full_total", "counter", "Times that a partition was full.", |link| {
        link.carried.partitions_full
    }),
    ("crosslane_rings_peer_total", "counter", "Doorbells rung for blocked peers.", |link| link.carried.rings_peer),
    ("crosslane_rings_local_total", "counter", "Wake-ups of blocked programs.", |link| link.carried.rings_local),
    ("crosslane_wakes_total", "counter", "Wake-ups by programs.", |link| link.carried.wakes),
];

type ProgramValue = fn(&Totals) -> u64;

/// Sums of the programs' counters, by data path. They are gauges, because they fall when programs end.
const PROGRAM_GAUGES: [(&str, &str, ProgramValue); 3] = [
    ("crosslane_programs_connections", "Open connections of programs.", |totals| totals.connections_open),
    ("crosslane_programs_sent_bytes", "Bytes sent by running programs.", |totals| totals.bytes_sent),
    ("crosslane_programs_received_bytes", "Bytes received by running programs.", |totals| totals.bytes_received),
];

/// Formats the status in the Prometheus text format.
fn render(status: &Status) -> String {
    let mut text = String::new();
    let node = &status.node;
    for (name, kind, help, value) in node_metrics(status) {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{node=\"{node}\"}} {value}");
    }
    for (name, kind, help, value) in LINK_METRICS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for link in &status.links {
            let _ = writeln!(text, "{name}{{node=\"{node}\",peer=\"{}\"}} {}", link.peer, value(link));
        }
    }
    text
}

/// Returns the metrics of the node: name, type, help and value.
fn node_metrics(status: &Status) -> Vec<(&'static str, &'static str, &'static str, u64)> {
    let (remote, local) = (status.remote_listeners.len() as u64, status.listeners.len() as u64);
    let mut metrics = vec![
        ("crosslane_proxy_up", "gauge", "Whether the proxy has the device.", is_proxy_ready(status)),
        ("crosslane_proxy_restarts_total", "counter", "Restarts of the proxy.", status.proxy_restarts),
        ("crosslane_mirrors", "gauge", "Remote listeners at which the proxy listens.", remote),
        ("crosslane_listeners", "gauge", "Listeners of this node.", local),
    ];
    if let Some(etcd) = &status.etcd {
        let (up, lease) = (u64::from(etcd.is_reached), u64::from(etcd.holds_lease));
        let restart_needed = etcd.restart_needed.len() as u64;
        metrics.extend([
            ("crosslane_etcd_up", "gauge", "Whether etcd answers.", up),
            ("crosslane_etcd_lease", "gauge", "Whether this monitor holds the node's lease.", lease),
            ("crosslane_etcd_outages_total", "counter", "Times that etcd became unreachable.", etcd.outages),
            ("crosslane_etcd_changes_total", "counter", "Changes of the rack that were applied.", etcd.changes_applied),
            (
                "crosslane_etcd_restart_needed",
                "gauge",
                "Changed keys that need a restart of the nodes.",
                restart_needed,
            ),
        ]);
    }
    metrics
}

fn render_programs(text: &mut String, node: &str, programs: &[Process]) {
    let head = |text: &mut String, name: &str, help: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
    };
    let (name, running) = ("crosslane_programs", programs.len());
    head(text, name, "Running programs of this node.");
    let _ = writeln!(text, "{name}{{node=\"{node}\"}} {running}");
    for (name, help, value) in PROGRAM_GAUGES {
        head(text, name, help);
        for path in [DataPath::Lane, DataPath::Window, DataPath::Kernel] {
            let sum = programs.iter().map(|program| value(program.totals(path))).fold(0, u64::wrapping_add);
            let _ = writeln!(text, "{name}{{node=\"{node}\",path=\"{}\"}} {sum}", path.name());
        }
    }
    let mut fallbacks = BTreeMap::new();
    for (reason, count) in programs.iter().flat_map(|program| &program.fallbacks) {
        let sum: &mut u64 = fallbacks.entry(reason).or_default();
        *sum = sum.wrapping_add(*count);
    }
    let name = "crosslane_programs_fallbacks";
    head(text, name, "Connections of running programs that fell back to kernel TCP, by reason.");
    for (reason, sum) in fallbacks {
        let _ = writeln!(text, "{name}{{node=\"{node}\",reason=\"{reason}\"}} {sum}");
    }
}

fn is_proxy_ready(status: &Status) -> u64 {
    u64::from(status.proxy.is_some_and(|proxy| proxy.is_ready))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::monitor::{Link, Proxy};

    fn status() -> Status {
        Status {
            node: "a".to_owned(),
            address: "127.77.0.1".parse().unwrap(),
            pid: 1,
            started_at_ns: 0,
            device: String::new(),
            rack_digest: String::new(),
            timing: None,
            partitions: Vec::new(),
            direct: None,
            proxy: Some(Proxy { pid: 2, is_ready: true }),
            proxy_restarts: 3,
            links: vec![Link {
                peer: "b".to_owned(),
                address: "127.77.0.2".parse().unwrap(),
                state: "up".to_owned(),
                reason: None,
                epoch: 4,
                ups: 2,
                round_trip_ns: Some(1500),
                carried: control::proxy::PeerReport { bytes_copied: 300, ..Default::default() },
            }],
            listeners: Vec::new(),
            remote_listeners: vec!["127.77.0.2:80".parse().unwrap()],
            etcd: Some(Default::default()),
        }
    }

    /// Returns two programs that have sent over windows, one of which has also used the kernel path.
    fn programs() -> [Process; 2] {
        let sent = |bytes_sent| Totals { bytes_sent, ..Totals::default() };
        [([("no_listener", 2)].into(), 5), (Default::default(), 7)].map(|(fallbacks, bytes)| Process {
            pid: 1,
            program: "redis-server".to_owned(),
            node: None,
            started_at_ns: 0,
            connections: Vec::new(),
            listeners: Vec::new(),
            lane: sent(0),
            kernel: sent(1),
            window: sent(bytes),
            connections_unlisted: 0,
            lane_memory_bytes: 0,
            lane_memory_bytes_max: 0,
            fallbacks,
        })
    }

    fn answer(mut stream: impl Read + Write, metrics: &mut Metrics) -> String {
        assert!(!metrics.poll(0));
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond(&status(), Some(&programs()));
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn metrics_are_read_from_the_socket_and_the_port() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = Metrics::listen(&path, Some("127.0.0.1:0".parse().unwrap())).unwrap();
        let port = metrics.port.as_ref().unwrap().local_addr().unwrap();
        let texts = [
            answer(UnixStream::connect(&path).unwrap(), &mut metrics),
            answer(TcpStream::connect(port).unwrap(), &mut metrics),
        ];
        for text in texts {
            for line in [
                "HTTP/1.1 200 OK",
                "crosslane_link_up{node=\"a\",peer=\"b\"} 1",
                "crosslane_proxy_restarts_total{node=\"a\"} 3",
                "# TYPE crosslane_link_ups_total counter",
                "crosslane_etcd_up{node=\"a\"} 0",
                "crosslane_copied_bytes_total{node=\"a\",peer=\"b\"} 300",
                "crosslane_programs{node=\"a\"} 2",
                "crosslane_programs_sent_bytes{node=\"a\",path=\"window\"} 12",
                "crosslane_programs_fallbacks{node=\"a\",reason=\"no_listener\"} 2",
            ] {
                assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
            }
        }
    }

    #[test]
    fn a_reader_that_sends_no_request_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = Metrics::listen(&path, None).unwrap();
        let mut silent = UnixStream::connect(&path).unwrap();
        metrics.poll(0);
        assert_eq!(metrics.due_ns(), Some(READER_TIMEOUT_NS));
        metrics.poll(READER_TIMEOUT_NS);
        assert_eq!((metrics.due_ns(), silent.read(&mut [0; 8]).unwrap()), (None, 0));
    }

    #[test]
    fn listeners_are_not_polled_while_there_are_too_many_readers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = Metrics::listen(&path, None).unwrap();
        let _silent: Vec<UnixStream> = (0..READERS_MAX + 1).map(|_| UnixStream::connect(&path).unwrap()).collect();
        metrics.poll(0);
        assert_eq!(metrics.descriptors().count(), READERS_MAX, "only the readers");
        metrics.poll(READER_TIMEOUT_NS);
        metrics.poll(READER_TIMEOUT_NS);
        assert_eq!(metrics.descriptors().count(), 2, "the accepted reader and the listener");
    }
}
