//! TCP sockets of the program that are not connections with lanes, or not yet.

use crate::descriptor::table::{Kind, Tracked};
use crate::options::OptionRecord;
use crate::process::background_connects::Counted;
use crate::process::pool::Pool;
use crate::process::shared::{Shared, remove_is_last};
use crate::rendezvous::RemoteConnect;
use stats_page::ConnectionSlot;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// A TCP socket before it is connected or listening, or while the kernel carries its bytes.
#[derive(Default)]
pub struct Stream {
    pub(crate) shared: Shared<StreamInner>,
}

// SAFETY: no other type has this kind, and the struct is aligned to 8 bytes because it has fields of that alignment.
unsafe impl Tracked for Stream {
    const KINDS: &'static [Kind] = &[Kind::Stream];
}

#[derive(Default)]
pub(crate) struct StreamInner {
    pub(crate) is_v6: bool,
    pub(crate) descriptors: Vec<RawFd>,
    pub(crate) options: OptionRecord,
    pub(crate) slot: Option<ConnectionSlot>,
    /// The row of `crosslane stat` for a listener without lanes.
    pub(crate) listener_slot: Option<ConnectionSlot>,
    pub(crate) port_choice: PortChoice,
    /// A connect that waits in the background.
    pub(crate) pending: Option<PendingConnect>,
}

/// How the port that a socket is bound to was chosen. The kernel does not know the ports of connections with lanes, and
/// may choose one of those.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum PortChoice {
    #[default]
    Program,
    Kernel,
    /// The kernel chose it, and the program has asked for the number.
    KnownKernel,
}

pub(crate) static STREAMS: Pool<Stream> = Pool::new();

impl Stream {
    pub(crate) fn with<R>(&'static self, access: impl FnOnce(&mut StreamInner) -> R) -> R {
        self.shared.with(access, |fd| self.remove_descriptor(fd))
    }

    /// Notes that the program has closed one of its descriptors of the socket.
    pub(crate) fn remove_descriptor(&'static self, fd: RawFd) {
        if self.shared.defers_close(fd) {
            return;
        }
        let last =
            self.with(|inner| remove_is_last(&mut inner.descriptors, fd).then(|| std::mem::take::<StreamInner>(inner)));
        if last.is_some() {
            drop(last);
            STREAMS.release(self);
        }
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&'static self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with(|inner| access(&mut inner.options))
    }

    /// Counts bytes that the kernel has sent.
    pub fn count_sent(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_sent(bytes as u64)).is_some());
    }

    /// Counts bytes that the kernel has received.
    pub fn count_received(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_received(bytes as u64)).is_some());
    }
}

/// The destination and source of a connect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectTarget {
    pub destination: SocketAddr,
    /// The address that the socket was bound to before.
    pub bound: Option<SocketAddr>,
    pub port_choice: PortChoice,
    /// Whether the socket may share its address with others.
    pub shares: bool,
    /// The network namespace that the socket was created in.
    pub netns: u64,
}

/// A connect that waits in the background.
pub(crate) struct PendingConnect {
    pub(crate) target: ConnectTarget,
    pub(crate) advance: Advance,
    pub(crate) _counted: Counted,
}

/// Whether a background connect can be advanced.
pub(crate) enum Advance {
    /// By the next thread: it continues a connect to another node, or starts again.
    Due(Option<Box<RemoteConnect>>),
    /// Not now: a thread is advancing it.
    Running,
}
