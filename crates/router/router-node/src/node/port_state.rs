//! What a node remembers of each of its ports.

use router::Port;

use super::open_ports::OpenedInterface;

/// A port, as the forwarding thread owns it.
pub type BoxedPort = Box<dyn Port + Send>;

/// What is remembered of a port.
#[derive(Default)]
pub struct PortState {
    pub kind: &'static str,
    pub fallback: Option<String>,
    /// What its interface was when it was opened; nothing while it is being opened again.
    pub opened_interface: Option<OpenedInterface>,
    /// RejectReason it could not be opened again, as the log was told.
    pub reopen_error: Option<String>,
    /// When to look for its device again, once that is gone.
    pub reopen_at_ns: Option<u64>,
    /// Files of packets begin when all nodes have met, or at this moment.
    pub waiting: Option<(BoxedPort, u64)>,
    /// What the log was told of an MTU that the port does not carry.
    pub mtu_cut: Option<String>,
}
