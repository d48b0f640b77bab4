//! Connections in the windows without a link, and what keeps them beyond the link, the proxy and the monitor.
//!
//! | what ends | who keeps the lifeline's end | until |
//! |---|---|---|
//! | the link | the thread that had the connection | it is up again, or `return_ns` are over |
//! | the proxy | the monitor, a duplicate ([`control::proxy::FromProxy::Deposit`]) | the next proxy runs |
//! | the monitor | the proxy, which goes on | another monitor has come for it ([`Heirs`]), or `return_ns` are over |
//!
//! When proxy and monitor end at once, the lifelines do too, and the programs see a reset.

use super::DriverError;
use super::direct::ProgramEnd;
use crate::{LocalEndpoint, SuspendedConnection};
use control::proxy::{Configuration, Handover, RetainedConnection, ToProxy, VERSION, send_retained};
use control::{Channel, Received, peer_uid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Monitors that wait to be served; more than one only where one has died.
const BACKLOG: i32 = 16;
/// How long a monitor that has come may take to say what it wants.
const ANSWER_LIMIT: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// A connection that waits for a link.
#[derive(Debug)]
pub(super) struct HeldEnd {
    pub peer: u8,
    /// Which engine of the link has it.
    pub place: usize,
    pub held: SuspendedConnection<ProgramEnd>,
}

impl HeldEnd {
    /// What the next monitor gets.
    pub(super) fn into_kept(self) -> Option<(RetainedConnection, OwnedFd)> {
        match self.held.local {
            ProgramEnd::Direct(end) => end.into_kept(self.held.number),
            ProgramEnd::Carried(_) => None,
        }
    }
}

/// Those of one thread.
#[derive(Debug, Default)]
pub(super) struct HeldEnds(Vec<HeldEnd>);

impl HeldEnds {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn extend(&mut self, ends: impl IntoIterator<Item = HeldEnd>) {
        self.0.extend(ends);
    }

    /// Those that are meant are not held any more.
    pub(super) fn take(&mut self, is_meant: impl Fn(&HeldEnd) -> bool) -> Vec<HeldEnd> {
        let (taken, rest) = std::mem::take(&mut self.0).into_iter().partition(is_meant);
        self.0 = rest;
        taken
    }

    pub(super) fn reset(&mut self, is_meant: impl Fn(&HeldEnd) -> bool) {
        self.take(is_meant).into_iter().for_each(|end| end.held.local.reset());
    }

    /// How many wait, by peer: each once.
    pub(super) fn peers(&self) -> impl Iterator<Item = u8> {
        self.0.iter().map(|end| end.peer)
    }
}

/// Where the next monitor comes when this proxy's has died.
#[derive(Debug)]
pub(super) struct Heirs {
    listener: OwnedFd,
    path: PathBuf,
}

impl Heirs {
    /// Listens at `path`. What lies there is an earlier proxy's, which has ended: its monitor has waited for that, and
    /// has the node's lock.
    pub(super) fn listen(path: &Path) -> Result<Self, DriverError> {
        let listener = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            match rustix::fs::unlink(path) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            bind(&listener, &SocketAddrUnix::new(path)?)?;
            listen(&listener, BACKLOG)?;
            Ok(listener)
        };
        let failed = |errno| DriverError::Rack { path: path.display().to_string(), errno };
        Ok(Self { listener: listener().map_err(failed)?, path: path.to_owned() })
    }

    /// A monitor that comes within `limit`, and what it wants, after it was told what this proxy works by.
    pub(super) fn next(&self, limit: Timespec, configuration: &Configuration) -> Option<(Channel, Wish)> {
        let _ = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&limit));
        let heir = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()?;
        let heir = is_own_user(&heir).then(|| Channel::new(heir))?;
        let configuration = Some(Box::new(configuration.clone()));
        let told = heir.send(&Handover { version: VERSION, configuration, connections: Vec::new() }, &[]);
        // One that only looked who listens here is gone already.
        told.ok().and_then(|()| wish_of(&heir)).map(|wish| (heir, wish))
    }
}

/// What a monitor that has come wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// That this proxy goes on for it.
    Adopt,
    /// That it gives what it has, and ends.
    Part,
}

fn wish_of(heir: &Channel) -> Option<Wish> {
    let _ = poll(&mut [PollFd::new(heir, PollFlags::IN)], Some(&ANSWER_LIMIT));
    match heir.receive::<ToProxy>() {
        Ok(Received::Message(ToProxy::Adopt, _)) => Some(Wish::Adopt),
        Ok(Received::Message(ToProxy::Release, _)) => Some(Wish::Part),
        _ => None,
    }
}

impl Drop for Heirs {
    /// As long as this proxy lives, nobody else listens there.
    fn drop(&mut self) {
        let _ = rustix::fs::unlink(&self.path);
    }
}

fn is_own_user(heir: &OwnedFd) -> bool {
    let own_uid = rustix::process::geteuid().as_raw();
    peer_uid(heir).is_ok_and(|uid| uid == own_uid || uid == 0)
}

/// Gives everything to a monitor. What it does not take ends with this proxy.
pub(super) fn hand_over(heir: &Channel, kept: &[(RetainedConnection, OwnedFd)]) {
    let kept: Vec<(RetainedConnection, BorrowedFd<'_>)> =
        kept.iter().map(|(kept, lifeline)| (*kept, lifeline.as_fd())).collect();
    let sent =
        send_retained(heir, &kept, |connections| Handover { version: VERSION, configuration: None, connections });
    if let Err(error) = &sent {
        eprintln!("crosslane proxy: who came for what is kept did not take it: {error}");
    }
}
