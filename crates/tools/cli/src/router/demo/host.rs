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

/// Where it listens.
pub const PORT: u16 = 8080;
/// Bytes of the page that it has.
pub const PAGE_BYTES: usize = 1 << 20;
/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a request at most.
const REQUEST_BYTES_MAX: usize = 4096;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The server; it ends when this is dropped.
pub struct Web {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Web {
    /// Serves one page in a namespace.
    pub fn serve(namespace: &Path) -> Result<Self> {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
        // A socket belongs to the namespace that it was made in, whoever has it.
        let listener = Namespace::at(namespace)?.within(|| TcpListener::bind(address))?;
        let listener = listener.with_context(|| format!("port {PORT} in {}", namespace.display()))?;
        listener.set_nonblocking(true).context("the web server's socket")?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let serve = move || {
            while !ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    // A client that goes away is its own affair.
                    Ok((client, _)) => _ = answer(client),
                    Err(_) => std::thread::sleep(LOOK_EVERY),
                }
            }
        };
        let thread = std::thread::Builder::new().name("web".to_owned()).spawn(serve).context("a thread")?;
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
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
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

/// What it has: bytes that tell their places, so that one that is missing or doubled is seen.
pub fn page() -> Vec<u8> {
    (0..PAGE_BYTES as u32 / 4).flat_map(u32::to_le_bytes).collect()
}
