//! A server of metrics in the Prometheus text format, over HTTP. It never blocks; its owner polls it.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::event::PollFlags;

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 16;
/// Time limit for a request, and for taking the response: Prometheus itself waits for 10 s.
const REQUEST_TIMEOUT_NS: u64 = 1_000_000_000;
const RESPONSE_TIMEOUT_NS: u64 = 10_000_000_000;
/// Maximum length of a request, and number of its headers.
const REQUEST_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;

/// A connection of either kind.
trait Stream: Read + Write + AsFd + Send {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

struct Connection {
    stream: Box<dyn Stream>,
    phase: Phase,
}

enum Phase {
    /// The bytes of the request so far.
    Reading {
        request: Vec<u8>,
        deadline_ns: u64,
    },
    /// The request is for the metrics, which the owner has not rendered yet.
    Waiting {
        is_head: bool,
    },
    Writing {
        response: Vec<u8>,
        sent_bytes: usize,
        deadline_ns: u64,
    },
}

/// What a request is for.
enum Target {
    Metrics {
        is_head: bool,
    },
    /// Something that does not exist: status line and reason.
    Nothing(&'static str, &'static str),
}

/// Serves metrics at a unix socket and, if configured, at a TCP port.
pub struct MetricsServer {
    socket: UnixListener,
    port: Option<TcpListener>,
    connections: Vec<Connection>,
}

impl MetricsServer {
    /// Listens at a path, replacing an existing socket, and at a port.
    ///
    /// # Errors
    /// The error of the kernel, and the address.
    pub fn listen(path: &Path, port: Option<SocketAddr>) -> Result<Self, String> {
        let _ = std::fs::remove_file(path);
        let failed = |error: Error| format!("metrics at {}: {error}", path.display());
        let socket = UnixListener::bind(path).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let port = port.map(listen_at).transpose()?;
        Ok(Self { socket, port, connections: Vec::new() })
    }

    /// Returns the address of the port, if there is one.
    pub fn port_address(&self) -> Option<SocketAddr> {
        self.port.as_ref()?.local_addr().ok()
    }

    /// Changes the port, or stops listening at a port.
    ///
    /// # Errors
    /// The error of the kernel, and the address. The previous port then stays in use.
    pub fn set_port(&mut self, port: Option<SocketAddr>) -> Result<(), String> {
        self.port = port.map(listen_at).transpose()?;
        Ok(())
    }

    /// Returns the descriptors to poll. Listeners are left out while there are too many connections: they would stay
    /// readable.
    pub fn descriptors(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let connections = self.connections.iter().filter_map(|connection| {
            let flags = match connection.phase {
                Phase::Reading { .. } => PollFlags::IN,
                Phase::Waiting { .. } => return None,
                Phase::Writing { .. } => PollFlags::OUT,
            };
            Some((connection.stream.as_fd(), flags))
        });
        let listeners = [self.socket.as_fd()].into_iter().chain(self.port.as_ref().map(AsFd::as_fd));
        let is_full = self.connections.len() >= CONNECTIONS_MAX;
        listeners.filter(move |_| !is_full).map(|fd| (fd, PollFlags::IN)).chain(connections)
    }

    /// Returns the earliest deadline of a client that has not sent its request or not taken the response.
    pub fn due_ns(&self) -> Option<u64> {
        self.connections.iter().filter_map(|connection| connection.phase.deadline_ns()).min()
    }

    /// Accepts connections, reads requests and continues responses. Returns whether requests wait for
    /// [`MetricsServer::respond`].
    pub fn poll(&mut self, now_ns: u64) -> bool {
        while self.connections.len() < CONNECTIONS_MAX {
            let Some(stream) = self.accept() else { break };
            let phase = Phase::Reading { request: Vec::new(), deadline_ns: now_ns.saturating_add(REQUEST_TIMEOUT_NS) };
            self.connections.push(Connection { stream, phase });
        }
        self.connections.retain_mut(|connection| connection.poll(now_ns));
        self.connections.iter().any(|connection| matches!(connection.phase, Phase::Waiting { .. }))
    }

    /// Answers all waiting requests with the metrics in `text`. What a socket does not take now, later polls send.
    pub fn respond(&mut self, text: &str, now_ns: u64) {
        self.connections.retain_mut(|connection| match connection.phase {
            Phase::Waiting { is_head } => connection.respond("200 OK", text, is_head, now_ns),
            _ => true,
        });
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

impl Phase {
    fn deadline_ns(&self) -> Option<u64> {
        match self {
            Self::Reading { deadline_ns, .. } | Self::Writing { deadline_ns, .. } => Some(*deadline_ns),
            Self::Waiting { .. } => None,
        }
    }
}

impl Connection {
    /// Reads or writes what is possible. Returns whether the connection stays open.
    fn poll(&mut self, now_ns: u64) -> bool {
        let is_due = self.phase.deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns);
        match &mut self.phase {
            Phase::Reading { request, .. } => {
                let mut bytes = [0; REQUEST_BYTES_MAX];
                match self.stream.read(&mut bytes) {
                    Ok(0) => return false,
                    Ok(count) => request.extend_from_slice(&bytes[..count]),
                    Err(error) if is_temporary(&error) => return !is_due,
                    Err(_) => return false,
                }
                match parse(request) {
                    None => !is_due,
                    Some(Target::Metrics { is_head }) => {
                        self.phase = Phase::Waiting { is_head };
                        true
                    }
                    Some(Target::Nothing(status, reason)) => self.respond(status, reason, false, now_ns),
                }
            }
            Phase::Waiting { .. } => true,
            Phase::Writing { .. } => self.write() && !is_due,
        }
    }

    /// Starts the response. Returns whether the connection stays open.
    fn respond(&mut self, status: &str, text: &str, is_head: bool, now_ns: u64) -> bool {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\nContent-Length: \
             {}\r\n\r\n",
            text.len()
        );
        let body = if is_head { "" } else { text };
        let response = [head.as_bytes(), body.as_bytes()].concat();
        let deadline_ns = now_ns.saturating_add(RESPONSE_TIMEOUT_NS);
        self.phase = Phase::Writing { response, sent_bytes: 0, deadline_ns };
        self.write()
    }

    /// Writes what the socket takes. Returns whether some of the response is left.
    fn write(&mut self) -> bool {
        let Phase::Writing { response, sent_bytes, .. } = &mut self.phase else { return true };
        while *sent_bytes < response.len() {
            match self.stream.write(&response[*sent_bytes..]) {
                Ok(0) => return false,
                Ok(count) => *sent_bytes += count,
                Err(error) => return is_temporary(&error),
            }
        }
        false
    }
}

fn is_temporary(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Returns what a request is for; `None` while it is incomplete.
fn parse(bytes: &[u8]) -> Option<Target> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < REQUEST_BYTES_MAX => return None,
        Ok(httparse::Status::Partial) => {
            return Some(Target::Nothing("431 Request Header Fields Too Large", "the request is too long\n"));
        }
        Err(_) => return Some(Target::Nothing("400 Bad Request", "not an HTTP request\n")),
    }
    let path = request.path.and_then(|path| path.split('?').next());
    Some(match (request.method, path) {
        (Some("GET"), Some("/metrics")) => Target::Metrics { is_head: false },
        (Some("HEAD"), Some("/metrics")) => Target::Metrics { is_head: true },
        (_, Some("/metrics")) => Target::Nothing("405 Method Not Allowed\r\nAllow: GET, HEAD", "only GET and HEAD\n"),
        _ => Target::Nothing("404 Not Found", "the metrics are at /metrics\n"),
    })
}

fn listen_at(address: SocketAddr) -> Result<TcpListener, String> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error: Error| format!("metrics at {address}: {error}; give the node another address"))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn server() -> (tempfile::TempDir, MetricsServer, impl Fn() -> UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let metrics = MetricsServer::listen(&path, Some("127.0.0.1:0".parse().unwrap())).unwrap();
        (folder, metrics, move || UnixStream::connect(&path).unwrap())
    }

    fn answer(mut stream: impl Read + Write, metrics: &mut MetricsServer) -> String {
        assert!(!metrics.poll(0));
        // In two parts: a request may arrive in several segments.
        stream.write_all(b"GET /metr").unwrap();
        assert!(!metrics.poll(0));
        stream.write_all(b"ics?name=up HTTP/1.1\r\nHost: node\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond("up 1\n", 0);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn metrics_are_read_from_the_socket_and_the_port() {
        let (_folder, mut metrics, connect) = server();
        let port = metrics.port_address().unwrap();
        let texts = [answer(connect(), &mut metrics), answer(TcpStream::connect(port).unwrap(), &mut metrics)];
        for text in texts {
            assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nup 1\n"), "{text}");
        }
        assert_eq!(metrics.connections.len(), 0);
    }

    #[test]
    fn what_is_no_request_for_the_metrics_gets_an_error() {
        let (_folder, mut metrics, connect) = server();
        let long = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(REQUEST_BYTES_MAX));
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metrics/x HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\u{1}\u{2}\r\n\r\n", "400"),
            (&long, "431"),
        ] {
            let mut stream = connect();
            stream.write_all(request.as_bytes()).unwrap();
            for _ in 0..3 {
                assert!(!metrics.poll(0), "{request}");
            }
            let mut head = [0; 12];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(head, *format!("HTTP/1.1 {status}").as_bytes(), "{request}");
        }
        let mut stream = connect();
        stream.write_all(b"HEAD /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond("up 1\n", 0);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.contains("Content-Length: 5\r\n") && text.ends_with("\r\n\r\n"), "{text}");
    }

    #[test]
    fn a_response_larger_than_the_send_buffer_arrives_whole() {
        let (_folder, mut metrics, connect) = server();
        let body = "a line of metrics\n".repeat(1_000_000);
        let mut stream = connect();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond(&body, 0);
        assert!(metrics.descriptors().any(|(_, flags)| flags == PollFlags::OUT));
        let reader = thread::spawn(move || {
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text)
        });
        while !metrics.connections.is_empty() {
            metrics.poll(0);
            thread::yield_now();
        }
        let text = reader.join().unwrap().unwrap();
        assert!(text.ends_with(&format!("\r\n\r\n{body}")), "{} bytes of {}", text.len(), body.len());
    }

    #[test]
    fn a_client_that_sends_no_request_or_takes_no_response_is_dropped() {
        let (_folder, mut metrics, connect) = server();
        let mut silent = connect();
        metrics.poll(0);
        assert_eq!(metrics.due_ns(), Some(REQUEST_TIMEOUT_NS));
        metrics.poll(REQUEST_TIMEOUT_NS);
        assert_eq!((metrics.due_ns(), silent.read(&mut [0; 8]).unwrap()), (None, 0));
        let mut slow = connect();
        slow.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond(&"a".repeat(16 << 20), 0);
        assert!(!metrics.poll(RESPONSE_TIMEOUT_NS - 1) && metrics.due_ns() == Some(RESPONSE_TIMEOUT_NS));
        assert!(!metrics.poll(RESPONSE_TIMEOUT_NS) && metrics.connections.is_empty());
    }

    #[test]
    fn listeners_are_not_polled_while_there_are_too_many_connections() {
        let (_folder, mut metrics, connect) = server();
        let _silent: Vec<UnixStream> = (0..CONNECTIONS_MAX + 1).map(|_| connect()).collect();
        metrics.poll(0);
        assert_eq!(metrics.descriptors().count(), CONNECTIONS_MAX, "only the connections");
        metrics.poll(REQUEST_TIMEOUT_NS);
        metrics.poll(REQUEST_TIMEOUT_NS);
        assert_eq!(metrics.descriptors().count(), 3, "the accepted connection and both listeners");
    }
}
