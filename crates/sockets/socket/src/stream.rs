//! TCP sockets of the program that have no lanes, or none yet.

use crate::descriptor::table::{Kind, Tracked};
use crate::options::OptionRecord;
use crate::process::background_connects::Counted;
use crate::process::pool::Pool;
use crate::process::shared::{Shared, remove_is_last};
use crate::rendezvous::RemoteConnect;
use stats_page::ConnectionSlot;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// What a TCP socket is before it is anything more, or when it stays with the kernel.
#[derive(Default)]
pub struct Stream {
    pub(crate) shared: Shared<StreamInner>,
}

// SAFETY: no other type names these kinds, and the fields of the struct have an alignment of 8.
unsafe impl Tracked for Stream {
    const KINDS: &'static [Kind] = &[Kind::Stream];
}

#[derive(Default)]
pub(crate) struct StreamInner {
    pub(crate) is_v6: bool,
    pub(crate) descriptors: Vec<RawFd>,
    pub(crate) options: OptionRecord,
    pub(crate) slot: Option<ConnectionSlot>,
    pub(crate) port_choice: PortChoice,
    /// A connect that waits in the background.
    pub(crate) pending: Option<PendingConnect>,
}

/// Who has chosen the port that a socket is bound to. The kernel does not know the ports of connections with lanes, and
/// chooses what one of them has.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum PortChoice {
    #[default]
    Program,
    Kernel,
    /// The kernel, and the program has asked which it is.
    KnownKernel,
}

pub(crate) static STREAMS: Pool<Stream> = Pool::new();

impl Stream {
    pub(crate) fn with<R>(&'static self, access: impl FnOnce(&mut StreamInner) -> R) -> R {
        self.shared.with(access, |fd| self.remove_descriptor(fd))
    }

    /// The program has closed one of its descriptors of the socket.
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

    /// Counts bytes that the kernel carried.
    pub fn count_sent(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_sent(bytes as u64)).is_some());
    }

    /// Counts bytes that the kernel carried.
    pub fn count_received(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_received(bytes as u64)).is_some());
    }
}

/// What a connect is to reach, and from where.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectTarget {
    pub destination: SocketAddr,
    /// What the socket was bound to before.
    pub bound: Option<SocketAddr>,
    pub port_choice: PortChoice,
    /// Whether it shares its address with others.
    pub shares: bool,
    /// The network namespace that the socket was made in.
    pub netns: u64,
}

/// One connect that waits.
pub(crate) struct PendingConnect {
    pub(crate) aim: ConnectTarget,
    pub(crate) advance: Advance,
    pub(crate) _counted: Counted,
}

/// Whose turn it is with a connect that waits.
pub(crate) enum Advance {
    /// Whoever looks next: with what is under way to another node, or to try from the beginning.
    Due(Option<Box<RemoteConnect>>),
    /// Somebody is looking.
    Running,
}
