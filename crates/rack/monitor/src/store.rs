//! What is kept beyond a proxy: of each connection whose programs store into windows themselves, the far end of the
//! lifeline. As long as that is open, the program's own descriptor is as good as ever.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use control::proxy::{Configuration, HandOver, Kept, ToProxy, VERSION, send_kept};
use control::{Channel, ChannelError, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use crate::proxy_child::AdoptedProxy;

/// Connections at most: far more than the windows of a rack have spans.
const KEPT_MAX: usize = 16_384;
/// How long a proxy whose monitor has died may take to let go of its windows and hand over.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(5);

/// By peer and span: no two connections have one at a time.
#[derive(Debug, Default)]
pub struct Store {
    kept: BTreeMap<(u8, u32), (Kept, OwnedFd)>,
}

impl Store {
    /// What the proxy of a monitor that has died gives to its heir: itself, where it works as `wanted`, else what it
    /// has kept; it then has let go of all windows, or is dead.
    pub fn inherit(socket: &Path, wanted: Option<&Configuration>) -> (Self, Option<AdoptedProxy>) {
        let mut store = Self::default();
        // Nobody listens: no proxy has outlived its monitor.
        let Ok(channel) = Channel::connect(socket) else { return (store, None) };
        match store.take_over(&channel, wanted, HAND_OVER_LIMIT) {
            Ok(true) => match AdoptedProxy::behind(channel) {
                Ok(adopted) => return (store, Some(adopted)),
                Err(error) => warn!("the last monitor's proxy is gone: {error}"),
            },
            Ok(false) if store.kept.is_empty() => {}
            Ok(false) => info!(connections = store.kept.len(), "took over what the last monitor's proxy has kept"),
            Err(reason) => {
                warn!("the last monitor's proxy is killed, and what it has kept is lost: {reason}");
                store.clear();
                end_behind(&channel);
            }
        }
        (store, None)
    }

    /// Whether the proxy goes on for this monitor. If not, all that it has kept is here.
    fn take_over(
        &mut self,
        channel: &Channel,
        wanted: Option<&Configuration>,
        limit: Duration,
    ) -> Result<bool, String> {
        let deadline = Instant::now() + limit;
        loop {
            match channel.receive::<HandOver>().map_err(|error| error.to_string())? {
                Received::Message(HandOver { version: VERSION, configuration: Some(own), .. }, _) => {
                    let is_adopted = wanted.is_some_and(|wanted| own.can_become(wanted));
                    let wish = if is_adopted { ToProxy::Adopt } else { ToProxy::Part };
                    channel.send(&wish, &[]).map_err(|error| error.to_string())?;
                    if is_adopted {
                        return Ok(true);
                    }
                }
                Received::Message(HandOver { version: VERSION, kept, .. }, descriptors) => {
                    kept.into_iter().zip(descriptors).for_each(|(kept, lifeline)| self.deposit(kept, lifeline));
                }
                Received::Message(HandOver { version, .. }, _) => {
                    return Err(format!("it is of another release (version {version}, here {VERSION})"));
                }
                Received::Ended => return Ok(false),
                Received::Nothing => {
                    let left = deadline.checked_duration_since(Instant::now()).ok_or("it says nothing")?;
                    let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                    let _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&limit));
                }
            }
        }
    }

    /// Keeps a lifeline's end.
    pub fn deposit(&mut self, kept: Kept, lifeline: OwnedFd) {
        let place = (kept.peer, kept.span);
        if self.kept.len() < KEPT_MAX || self.kept.contains_key(&place) {
            self.kept.insert(place, (kept, lifeline));
        }
    }

    /// The connection is over.
    pub fn withdraw(&mut self, peer: u8, span: u32) {
        self.kept.remove(&(peer, span));
    }

    /// Connections.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Lets all of them end.
    pub fn clear(&mut self) {
        self.kept.clear();
    }

    /// Gives a proxy that starts what an earlier one had.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn give(&self, channel: &Channel) -> Result<(), ChannelError> {
        let all: Vec<(Kept, BorrowedFd<'_>)> =
            self.kept.values().map(|(kept, lifeline)| (*kept, lifeline.as_fd())).collect();
        send_kept(channel, &all, ToProxy::Kept)
    }
}

/// Kills who listens at the other end, and waits until its sockets are gone.
fn end_behind(channel: &Channel) {
    let killed = rustix::net::sockopt::socket_peercred(channel).map(|behind| behind.pid);
    if killed.and_then(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL)).is_ok() {
        let limit = Timespec { tv_sec: HAND_OVER_LIMIT.as_secs() as i64, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(channel, PollFlags::HUP)], Some(&limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn kept(span: u32) -> Kept {
        Kept { peer: 1, span, number: 100 + span }
    }

    /// A lifeline: the program's end, and the far one.
    fn lifeline() -> (UnixStream, OwnedFd) {
        let (program, far) = UnixStream::pair().unwrap();
        (program, far.into())
    }

    #[test]
    fn what_is_kept_is_given_to_the_next_proxy_and_ends_when_it_is_withdrawn() {
        let mut store = Store::default();
        let mut programs = Vec::new();
        for span in 0..450 {
            let (program, far) = lifeline();
            store.deposit(kept(span), far);
            programs.push(program);
        }
        store.withdraw(1, 7);
        store.withdraw(2, 8);
        assert_eq!((store.len(), programs[7].read(&mut [0]).unwrap()), (449, 0));
        let (own, proxys) = Channel::pair().unwrap();
        store.give(&own).unwrap();
        store.clear();
        let mut given = Vec::new();
        while let Received::Message(ToProxy::Kept(some), descriptors) = proxys.receive().unwrap() {
            given.extend(some.into_iter().zip(descriptors));
        }
        assert!(given.iter().map(|(kept, _)| *kept).eq((0..450).filter(|span| *span != 7).map(kept)));
        for (kept, far) in given {
            UnixStream::from(far).write_all(&kept.span.to_le_bytes()).unwrap();
            let mut bytes = [0; 4];
            programs[kept.span as usize].read_exact(&mut bytes).unwrap();
            assert_eq!(u32::from_le_bytes(bytes), kept.span);
        }
    }

    #[test]
    fn an_heir_takes_what_is_handed_over_and_nothing_of_another_release() {
        let _no_child = test_support::spawn::forbid();
        let (program, far) = lifeline();
        let (one, other) = Channel::pair().unwrap();
        let hand_over = |kept| HandOver { version: VERSION, configuration: None, kept };
        send_kept(&one, &[(kept(3), far.as_fd())], hand_over).unwrap();
        drop((one, far));
        let mut store = Store::default();
        assert_eq!(store.take_over(&other, None, HAND_OVER_LIMIT), Ok(false));
        assert_eq!(store.len(), 1);
        program.set_nonblocking(true).unwrap();
        assert!((&program).read(&mut [0]).is_err(), "not at its end");

        let (one, other) = Channel::pair().unwrap();
        one.send(&HandOver { version: VERSION + 1, ..hand_over(Vec::new()) }, &[]).unwrap();
        let refused = Store::default().take_over(&other, None, HAND_OVER_LIMIT).unwrap_err();
        assert!(refused.contains("another release"), "{refused}");
        assert!(Store::default().take_over(&other, None, Duration::ZERO).unwrap_err().contains("says nothing"));
    }
}
