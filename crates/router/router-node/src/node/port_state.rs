//! The control thread's state of each port.

use router::Port;

use super::open_ports::OpenedInterface;

/// A port, as the forwarding thread owns it.
pub type BoxedPort = Box<dyn Port + Send>;

/// The state of a port.
#[derive(Default)]
pub struct PortState {
    pub kind: &'static str,
    pub fallback: Option<String>,
    /// The interface as it was when the port was opened; `None` while the port is being reopened.
    pub opened_interface: Option<OpenedInterface>,
    /// The logged error of the last attempt to reopen it.
    pub reopen_error: Option<String>,
    /// When to reopen it.
    pub reopen_at_ns: Option<u64>,
    /// A capture file that is not attached before all nodes are joined, or before this time.
    pub deferred: Option<(BoxedPort, u64)>,
    /// The logged reduction of the configured MTU.
    pub mtu_cut: Option<String>,
}
