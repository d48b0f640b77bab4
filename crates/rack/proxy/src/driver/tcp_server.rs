//! Connecting by TCP to the servers of this node on behalf of programs of other nodes.

use super::open_payload::Secrets;
use super::shared::Shared;
use super::source_ports::SourcePort;
use super::span_pool::SpanAcceptance;
use super::tcp_endpoint::TcpEndpoint;
use super::tcp_listener::own_uid;
use meeting::{Role, diag};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket_with, sockopt};
use socket::process::blocking;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use stream::connection::Relay;

/// A connect to a server of this node.
#[derive(Debug)]
pub(super) struct Connecting {
    socket: OwnedFd,
    source: SourcePort,
    /// The ports of the client and of the server.
    ports: [u16; 2],
    /// The span that was accepted for the connection, and the secrets of its lanes.
    span: Option<Box<(SpanAcceptance, Secrets)>>,
}

impl Connecting {
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sets the span that was accepted for the connection.
    pub(super) fn with_span(self, span: Option<(SpanAcceptance, Secrets)>) -> Self {
        Self { span: span.map(Box::new), ..self }
    }

    /// Returns the endpoint once the server's kernel has accepted the connection.
    ///
    /// # Errors
    /// `AGAIN`, with the connect, if that has not answered: the server's queue is full, and the kernel tries again.
    /// Otherwise the error of the connect.
    pub(super) fn advance(self, shared: &Shared) -> Result<TcpEndpoint, (Errno, Option<Box<Self>>)> {
        if blocking::poll_now(self.socket.as_raw_fd(), libc::POLLOUT) == 0 {
            return Err((Errno::AGAIN, Some(Box::new(self))));
        }
        sockopt::socket_error(&self.socket).and_then(|error| error).map_err(|errno| (errno, None))?;
        let relay = Relay::new(self.socket, Role::Connected, shared.meeting_key());
        Ok(TcpEndpoint::of_server(relay, self.ports, self.source).with_span(self.span.map(|span| *span)))
    }
}

/// Connects to the server that listens at an address of this node, for a client of the node in slot `peer`.
///
/// # Errors
/// `CONNREFUSED` without a server of this user, and the errors of the kernel.
pub(super) fn connect_tcp(
    shared: &Shared,
    peer: u8,
    client: SocketAddr,
    server: SocketAddr,
) -> Result<Connecting, Errno> {
    let at = SocketAddr::new(address_here(shared, server.ip()), server.port());
    // A server that listens only at the loopback address is not one of the node.
    let asked = if server.is_ipv4() { server } else { at };
    let listener = diag::look_up_listener(asked).ok_or(Errno::CONNREFUSED)?;
    if listener.uid != own_uid() && !shared.setup.is_published() {
        return Err(Errno::CONNREFUSED);
    }
    let (socket, source) = shared.source_ports.bind(at.ip())?;
    shared.table.set_client(source.port, peer, client.port(), server.port());
    match connect(&socket, &at) {
        Ok(()) | Err(Errno::INPROGRESS) => {
            Ok(Connecting { socket, source, ports: [client.port(), server.port()], span: None })
        }
        Err(errno) => Err(errno),
    }
}

/// Returns where a server of this node is reached: at the node's address, or if that is not one of this machine, at the
/// loopback address, where servers answer that listen at all addresses.
fn address_here(shared: &Shared, node: IpAddr) -> IpAddr {
    if shared.has_address.get().is_none() && is_own(node) {
        let _ = shared.has_address.set(());
    }
    if shared.has_address.get().is_some() { node } else { Ipv4Addr::LOCALHOST.into() }
}

/// Returns whether an address is one of this machine.
pub(super) fn is_own(ip: IpAddr) -> bool {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::DGRAM, rustix::net::SocketFlags::CLOEXEC, None);
    socket.is_ok_and(|socket| bind(&socket, &SocketAddr::new(ip, 0)).is_ok())
}
