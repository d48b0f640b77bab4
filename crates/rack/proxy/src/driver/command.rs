//! Commands of the main thread to a thread that owns engines.

use super::awaiting_link::AwaitingLink;
use super::tcp_listener::TcpListener;
use super::wakeup::WakeupFd;
use control::proxy::{LinkLossPolicy, PeerReport, RetainedConnection, RetainedDescriptors};
use fabric::device::Device;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};

/// A command to a thread.
pub(super) enum Command {
    /// Use this device, or the same memory with the doorbells of another monitor.
    Device(Device),
    /// The link to a peer is up.
    LinkUp { peer: u8, epoch: u32 },
    /// The link to a peer is down.
    LinkDown { peer: u8, policy: LinkLossPolicy, done: mpsc::Sender<()> },
    /// Monitor and proxy of a peer have died.
    PeerGone { peer: u8 },
    /// Keep connections of an earlier proxy until their link is up.
    AwaitLink(Vec<AwaitingLink>),
    /// The monitor is gone: do not access windows any more.
    ReleaseWindows { done: mpsc::Sender<()> },
    /// As [`Command::ReleaseWindows`], then return the connections that another proxy can continue, and stop.
    ReleaseAndStop { done: mpsc::Sender<Vec<(RetainedConnection, RetainedDescriptors)>> },
    /// Accept programs at a listener that stands in for one of another node.
    AddListener { peer: u8, address: SocketAddr, listener: Arc<TcpListener> },
    /// Stop to accept at the listeners that stand in for an address.
    RemoveListeners { address: SocketAddr, done: mpsc::Sender<()> },
    /// Return the counters, by peer.
    Report { done: mpsc::Sender<Vec<(u8, PeerReport)>> },
    /// Stop.
    Stop,
}

/// The sending end of a thread's command queue.
pub(super) struct CommandSender {
    queue: mpsc::Sender<Command>,
    wakeup: Arc<WakeupFd>,
}

/// The receiving end of a thread's command queue. Its descriptor is readable when there are commands.
pub(super) struct CommandReceiver {
    queue: mpsc::Receiver<Command>,
    wakeup: Arc<WakeupFd>,
}

/// Creates a command queue.
pub(super) fn channel() -> Result<(CommandSender, CommandReceiver), Errno> {
    let (sender, receiver) = mpsc::channel();
    let wakeup = Arc::new(WakeupFd::new()?);
    let sender = CommandSender { queue: sender, wakeup: Arc::clone(&wakeup) };
    Ok((sender, CommandReceiver { queue: receiver, wakeup }))
}

impl CommandSender {
    /// Sends a command. A thread that has stopped receives none.
    pub(super) fn send(&self, command: Command) {
        if self.queue.send(command).is_ok() {
            self.wakeup.notify();
        }
    }
}

impl CommandReceiver {
    /// Makes the descriptor unreadable; call it before [`CommandReceiver::next`].
    pub(super) fn clear_wakeup(&self) {
        self.wakeup.clear();
    }

    pub(super) fn next(&self) -> Option<Command> {
        self.queue.try_recv().ok()
    }
}

impl AsFd for CommandReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}
