//! A web server on a host of the demo.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use router_ports::Namespace;

/// TCP port of the server.
pub const PORT: u16 = 8080;
/// Size of the page that it serves.
pub const PAGE_BYTES: usize = 1 << 20;
/// Time limit for each read from a client and each write to it.
const CLIENT_LIMIT: Duration = Duration::from_secs(5);
/// Maximum size of a request.
const REQUEST_BYTES_MAX: usize = 4096;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A server thread, which ends when this is dropped.
pub struct Web {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Web {
    /// Starts a server of one page in a network namespace.
    pub fn serve(namespace: &Path) -> Result<Self> {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
        // A socket stays in the network namespace in which it was created.
        let listener = Namespace::at(namespace)?.within(|| TcpListener::bind(address))?;
        let listener = listener.with_context(|| format!("port {PORT} in {}", namespace.display()))?;
        listener.set_nonblocking(true).context("the web server's socket")?;
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_over);
        let serve = move || {
            while !stop.load(Ordering::Relaxed) {
                match listener.accept() {
                    // Errors of one client do not stop the server.
                    Ok((client, _)) => _ = answer(client),
                    Err(_) => std::thread::sleep(POLL_INTERVAL),
                }
            }
        };
        let thread = std::thread::Builder::new().name("web".to_owned()).spawn(serve).context("starting a thread")?;
        Ok(Self { is_over, thread: Some(thread) })
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(mut client: TcpStream) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(CLIENT_LIMIT))?;
    client.set_write_timeout(Some(CLIENT_LIMIT))?;
    let mut request = Vec::new();
    let mut some = [0; 512];
    while !request.ends_with(b"\r\n\r\n") && request.len() < REQUEST_BYTES_MAX {
        let bytes = client.read(&mut some)?;
        if bytes == 0 {
            return Ok(());
        }
        request.extend_from_slice(&some[..bytes]);
    }
    let head = format!("HTTP/1.0 200 OK\r\nContent-Length: {PAGE_BYTES}\r\nConnection: close\r\n\r\n");
    client.write_all(head.as_bytes())?;
    client.write_all(&page())
}

/// Returns the page: each 4-byte word holds its index, so that missing and duplicated bytes are detected.
pub fn page() -> Vec<u8> {
    (0..PAGE_BYTES as u32 / 4).flat_map(u32::to_le_bytes).collect()
}
