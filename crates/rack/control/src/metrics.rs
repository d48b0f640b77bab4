//! A server of metrics in the Prometheus text format, over HTTP. It never blocks; its owner polls it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Maximum number of readers, and the time limit for a reader's request.
const READERS_MAX: usize = 16;
const READER_TIMEOUT_NS: u64 = 1_000_000_000;
/// Bytes of a request that are read.
const REQUEST_BYTES: usize = 4096;

/// A connection of either kind.
trait Stream: Read + Write + AsFd + Send {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

/// Serves metrics at a unix socket and, if configured, at a TCP port.
pub struct MetricsServer {
    socket: UnixListener,
    port: Option<TcpListener>,
    readers: Vec<(Box<dyn Stream>, u64)>,
    requests: Vec<Box<dyn Stream>>,
}

impl MetricsServer {
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

    /// Accepts connections and reads requests. Returns whether requests wait for [`MetricsServer::respond`].
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

    /// Answers all requests with the metrics in `text`.
    pub fn respond(&mut self, text: &str) {
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
    listen().map_err(|error: std::io::Error| format!("metrics at {address}: {error}; give the node another address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(mut stream: impl Read + Write, metrics: &mut MetricsServer) -> String {
        assert!(!metrics.poll(0));
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        assert!(metrics.poll(0));
        metrics.respond("up 1\n");
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn metrics_are_read_from_the_socket_and_the_port() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = MetricsServer::listen(&path, Some("127.0.0.1:0".parse().unwrap())).unwrap();
        let port = metrics.port_address().unwrap();
        let texts = [
            answer(UnixStream::connect(&path).unwrap(), &mut metrics),
            answer(TcpStream::connect(port).unwrap(), &mut metrics),
        ];
        for text in texts {
            assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nup 1\n"), "{text}");
        }
    }

    #[test]
    fn a_reader_that_sends_no_request_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let mut metrics = MetricsServer::listen(&path, None).unwrap();
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
        let mut metrics = MetricsServer::listen(&path, None).unwrap();
        let _silent: Vec<UnixStream> = (0..READERS_MAX + 1).map(|_| UnixStream::connect(&path).unwrap()).collect();
        metrics.poll(0);
        assert_eq!(metrics.descriptors().count(), READERS_MAX, "only the readers");
        metrics.poll(READER_TIMEOUT_NS);
        metrics.poll(READER_TIMEOUT_NS);
        assert_eq!(metrics.descriptors().count(), 2, "the accepted reader and the listener");
    }
}
