//! Metrics in Prometheus' text form, over HTTP on a unix socket and, where the rack file says so, on a port.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use control::monitor::Status;
use stats_page::DataPath as Way;
use stats_page::reader::{Process, Totals};

/// Readers at a time, at most; and how long each has for its request.
const READERS_MAX: usize = 16;
const READER_NS_MAX: u64 = 1_000_000_000;
/// Bytes of a request that are looked at.
const REQUEST_BYTES: usize = 4096;

/// A connection of either kind.
trait Stream: Read + Write + AsFd {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

/// Where metrics are read.
pub struct Metrics {
    socket: UnixListener,
    port: Option<TcpListener>,
    readers: Vec<(Box<dyn Stream>, u64)>,
    asking: Vec<Box<dyn Stream>>,
}

impl Metrics {
    /// Listens at a path, whatever lies there, and at a port.
    ///
    /// # Errors
    /// What the kernel says, and of what.
    pub fn listen(path: &Path, port: Option<SocketAddr>) -> Result<Self, String> {
        let _ = std::fs::remove_file(path);
        let failed = |error: std::io::Error| format!("metrics at {}: {error}", path.display());
        let socket = UnixListener::bind(path).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let port = port.map(listen_at).transpose()?;
        Ok(Self { socket, port, readers: Vec::new(), asking: Vec::new() })
    }

    /// Listens at another port, or at none.
    ///
    /// # Errors
    /// What the kernel says, and of what; then it listens where it did.
    pub fn set_port(&mut self, port: Option<SocketAddr>) -> Result<(), String> {
        self.port = port.map(listen_at).transpose()?;
        Ok(())
    }

    /// What to poll: not for newcomers while there is no room for them, who would be seen all the time.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let readers = self.readers.iter().map(|(stream, _)| stream.as_fd());
        let listeners = [self.socket.as_fd()].into_iter().chain(self.port.as_ref().map(AsFd::as_fd));
        listeners.filter(|_| self.readers.len() < READERS_MAX).chain(readers)
    }

    /// Whether somebody waits for an answer, and until when at most.
    pub fn due_ns(&self) -> Option<u64> {
        self.readers.iter().map(|(_, deadline_ns)| *deadline_ns).min()
    }

    /// Takes who has come; whether anybody has asked, and waits for [`Metrics::answer`].
    pub fn listen_turn(&mut self, now_ns: u64) -> bool {
        while self.readers.len() < READERS_MAX {
            let Some(stream) = self.accept() else { break };
            self.readers.push((stream, now_ns.saturating_add(READER_NS_MAX)));
        }
        for (mut stream, deadline_ns) in std::mem::take(&mut self.readers) {
            match stream.read(&mut [0; REQUEST_BYTES]) {
                Ok(bytes) if bytes > 0 => self.asking.push(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock && now_ns < deadline_ns => {
                    self.readers.push((stream, deadline_ns));
                }
                _ => {}
            }
        }
        !self.asking.is_empty()
    }

    /// Answers who has asked: the node's state, and what its programs say in their
    /// ledgers, unless those cannot be read.
    pub fn answer(&mut self, status: &Status, programs: Option<&[Process]>) {
        let mut text = render(status);
        if let Some(programs) = programs {
            render_programs(&mut text, &status.node, programs);
        }
        for mut stream in self.asking.drain(..) {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n";
            let answer = format!("{head}Content-Length: {}\r\n\r\n{text}", text.len());
            // A reader that takes less than a socket holds gets less: it is on this machine, and asks again.
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

type OfLink = fn(&control::monitor::Link) -> u64;

/// What a proxy counts of its own work on a link.
const PROXY_COUNTERS: [(&str, &str, OfLink); 10] = [
    ("crosslane_copied_bytes_total", "Copies that the proxy made, in bytes.", |link| link.carried.bytes_copied),
    ("crosslane_frames_sent_total", "Records in windows, sent.", |link| link.carried.frames_sent),
    ("crosslane_publishes_total", "Times that records were shown, some at once.", |link| link.carried.publishes),
    ("crosslane_flushes_total", "Waits until stores had arrived, before a sleep.", |link| link.carried.flushes),
    ("crosslane_frames_received_total", "Records in windows, received.", |link| link.carried.frames_received),
    ("crosslane_stalls_total", "Times that a connection's receiver took nothing.", |link| link.carried.stalls),
    ("crosslane_partitions_full_total", "Times that a partition was full.", |link| link.carried.partitions_full),
    ("crosslane_rings_peer_total", "Doorbells of peers that slept.", |link| link.carried.rings_peer),
    ("crosslane_rings_local_total", "Rings to programs that slept.", |link| link.carried.rings_local),
    ("crosslane_wakes_total", "Rings of programs that were heard.", |link| link.carried.wakes),
];

type OfProgram = fn(&Totals) -> u64;

/// What programs count, by what carries it. They take their counts with them when they end: sums of them may fall.
const PROGRAM_GAUGES: [(&str, &str, OfProgram); 3] = [
    ("crosslane_programs_connections", "Connections that programs have open.", |totals| totals.connections_open),
    ("crosslane_programs_sent_bytes", "Sent by the programs that run, so far.", |totals| totals.bytes_sent),
    ("crosslane_programs_received_bytes", "Received by the programs that run, so far.", |totals| totals.bytes_received),
];

/// The state as Prometheus reads it.
fn render(status: &Status) -> String {
    let mut text = String::new();
    let node = &status.node;
    let one = |text: &mut String, name: &str, kind: &str, help: &str, value: u64| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{node=\"{node}\"}} {value}");
    };
    one(&mut text, "crosslane_proxy_up", "gauge", "Whether the proxy has the device.", ready(status));
    one(
        &mut text,
        "crosslane_proxy_restarts_total",
        "counter",
        "Starts of the proxy but the first.",
        status.proxy_restarts,
    );
    one(&mut text, "crosslane_mirrors", "gauge", "Listeners of other nodes.", status.mirrors.len() as u64);
    one(&mut text, "crosslane_listeners", "gauge", "Listeners of this node.", status.listeners.len() as u64);
    if let Some(etcd) = &status.etcd {
        let held = u64::from(etcd.is_held);
        one(&mut text, "crosslane_etcd_up", "gauge", "Whether etcd answers.", u64::from(etcd.is_reached));
        one(&mut text, "crosslane_etcd_lease", "gauge", "Whether this monitor holds the node's lease.", held);
        one(&mut text, "crosslane_etcd_outages_total", "counter", "How often etcd stopped to answer.", etcd.outages);
        let taken = etcd.changes_taken;
        one(&mut text, "crosslane_etcd_changes_total", "counter", "Changes of the rack taken on.", taken);
        let left = etcd.restart_needed.len() as u64;
        one(&mut text, "crosslane_etcd_restart_needed", "gauge", "Changed keys that need down and up.", left);
    }
    let mut each = |name: &str, kind: &str, help: &str, value: OfLink| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for link in &status.links {
            let _ = writeln!(text, "{name}{{node=\"{node}\",peer=\"{}\"}} {}", link.peer, value(link));
        }
    };
    each("crosslane_link_up", "gauge", "Whether the link carries connections.", |link| u64::from(link.state == "up"));
    each("crosslane_link_ups_total", "counter", "How often the link came up.", |link| link.ups);
    each("crosslane_link_round_trip_ns", "gauge", "Last round trip of the monitors.", |link| {
        link.round_trip_ns.unwrap_or(0)
    });
    each("crosslane_connections", "gauge", "Connections over windows.", |link| link.carried.connections_open);
    each("crosslane_connections_total", "counter", "Connections so far.", |link| link.carried.connections_total);
    each("crosslane_direct_connections", "gauge", "Connections whose programs write windows themselves.", |link| {
        link.carried.direct_open
    });
    each("crosslane_direct_connections_total", "counter", "Such connections so far.", |link| link.carried.direct_total);
    each("crosslane_direct_held", "gauge", "Direct connections without a link.", |link| link.carried.direct_held);
    each("crosslane_direct_missed_total", "counter", "Connections that found no span, or could not map it.", |link| {
        link.carried.direct_missed
    });
    each("crosslane_sent_bytes_total", "counter", "Programs' bytes sent.", |link| link.carried.bytes_sent);
    each("crosslane_received_bytes_total", "counter", "Programs' bytes received.", |link| link.carried.bytes_received);
    each("crosslane_failover_connections", "gauge", "Connections of lost links, over kernel TCP.", |link| {
        link.carried.failover_open
    });
    each("crosslane_failover_connections_total", "counter", "Connections that have lost their link.", |link| {
        link.carried.failover_total
    });
    each("crosslane_failover_resets_total", "counter", "Of those, connections that were reset.", |link| {
        link.carried.failover_resets
    });
    each("crosslane_failover_sent_bytes_total", "counter", "Programs' bytes sent over kernel TCP.", |link| {
        link.carried.failover_bytes_sent
    });
    each("crosslane_failover_received_bytes_total", "counter", "Programs' bytes received over kernel TCP.", |link| {
        link.carried.failover_bytes_received
    });
    for (name, help, value) in PROXY_COUNTERS {
        each(name, "counter", help, value);
    }
    text
}

fn render_programs(text: &mut String, node: &str, programs: &[Process]) {
    let head = |text: &mut String, name: &str, help: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
    };
    let (name, running) = ("crosslane_programs", programs.len());
    head(text, name, "Programs that run as this node.");
    let _ = writeln!(text, "{name}{{node=\"{node}\"}} {running}");
    for (name, help, value) in PROGRAM_GAUGES {
        head(text, name, help);
        for way in [Way::Lane, Way::Window, Way::Kernel] {
            let sum = programs.iter().map(|program| value(program.totals(way))).fold(0, u64::wrapping_add);
            let _ = writeln!(text, "{name}{{node=\"{node}\",path=\"{}\"}} {sum}", way.name());
        }
    }
    let mut fallbacks = BTreeMap::new();
    for (reason, count) in programs.iter().flat_map(|program| &program.fallbacks) {
        let sum: &mut u64 = fallbacks.entry(reason).or_default();
        *sum = sum.wrapping_add(*count);
    }
    let name = "crosslane_programs_fallbacks";
    head(text, name, "Times that the programs that run found no lane or window and used kernel TCP.");
    for (reason, sum) in fallbacks {
        let _ = writeln!(text, "{name}{{node=\"{node}\",reason=\"{reason}\"}} {sum}");
    }
}

fn ready(status: &Status) -> u64 {
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
            mirrors: vec!["127.77.0.2:80".parse().unwrap()],
            etcd: Some(Default::default()),
        }
    }

    /// Two programs that have sent over windows, and one has used the kernel.
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
        assert!(!metrics.listen_turn(0));
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.listen_turn(0));
        metrics.answer(&status(), Some(&programs()));
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
    fn a_reader_that_never_asks_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = Metrics::listen(&path, None).unwrap();
        let mut silent = UnixStream::connect(&path).unwrap();
        metrics.listen_turn(0);
        assert_eq!(metrics.due_ns(), Some(READER_NS_MAX));
        metrics.listen_turn(READER_NS_MAX);
        assert_eq!((metrics.due_ns(), silent.read(&mut [0; 8]).unwrap()), (None, 0));
    }

    #[test]
    fn while_there_is_no_room_for_more_readers_newcomers_wake_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = Metrics::listen(&path, None).unwrap();
        let _silent: Vec<UnixStream> = (0..READERS_MAX + 1).map(|_| UnixStream::connect(&path).unwrap()).collect();
        metrics.listen_turn(0);
        assert_eq!(metrics.descriptors().count(), READERS_MAX, "the readers, and not the one who waits");
        metrics.listen_turn(READER_NS_MAX);
        metrics.listen_turn(READER_NS_MAX);
        assert_eq!(metrics.descriptors().count(), 2, "that one, and whoever comes");
    }
}
