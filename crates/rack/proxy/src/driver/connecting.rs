//! Connects to servers of this node whose queue is full: the kernel tries again, as for any program, and the client
//! waits meanwhile.

use super::engine_table::EngineTable;
use super::epoll_set::EpollSet;
use super::shared::Shared;
use super::tcp_server::Connecting;
use crate::table::ConnectionKey;
use rustix::io::Errno;
use socket::process::clock::now_ns;

/// How long a server may leave a connect unanswered: a little less than a client waits for the verdict.
const LIMIT_NS: u64 = 4_500_000_000;
/// Time between checks.
const CHECK_NS: u64 = 1_000_000;

/// A connection that waits for its server.
struct Waiting {
    engine: usize,
    /// The epoch of the engine's link: a later one has other connections.
    epoch: u32,
    key: ConnectionKey,
    connecting: Connecting,
    since_ns: u64,
}

/// The connections of a thread that wait for their servers.
#[derive(Default)]
pub(super) struct ConnectingServers {
    all: Vec<Waiting>,
    checked_ns: u64,
}

impl ConnectingServers {
    /// Waits for the server of a connection.
    pub(super) fn add(
        &mut self,
        (engine, epoch): (usize, u32),
        key: ConnectionKey,
        connecting: Connecting,
        epoll: &EpollSet,
    ) -> Result<(), Errno> {
        epoll.add_socket(connecting.socket(), engine, key)?;
        self.all.push(Waiting { engine, epoch, key, connecting, since_ns: now_ns() });
        Ok(())
    }

    /// Answers the connections whose servers have answered, and those whose time is over.
    pub(super) fn check(&mut self, engines: &mut EngineTable, shared: &Shared, epoll: &EpollSet) {
        if self.all.is_empty() {
            return;
        }
        let now_ns = now_ns();
        if now_ns.saturating_sub(self.checked_ns) < CHECK_NS {
            return;
        }
        self.checked_ns = now_ns;
        for waiting in std::mem::take(&mut self.all) {
            let Waiting { engine, epoch, key, connecting, since_ns } = waiting;
            let Some(link) = engines.link(engine).filter(|link| link.epoch == epoch) else { continue };
            let answer = match connecting.advance(shared) {
                Ok(mut endpoint) => endpoint.watch(epoll, engine, key).map(|()| endpoint),
                Err((Errno::AGAIN, Some(connecting))) if now_ns.saturating_sub(since_ns) < LIMIT_NS => {
                    self.all.push(Waiting { engine, epoch, key, connecting: *connecting, since_ns });
                    continue;
                }
                Err((errno, _)) => Err(errno),
            };
            if let Some(engine) = link.engine() {
                engine.answer(key, answer.map_err(|errno| errno.raw_os_error() as u32));
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}
