//! The lock of an address, under which names are made and removed.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FlockOperation, Mode, SeekFrom, Timespec};
use rustix::io::Errno;

use super::listener_name::{ListenerName, MEMBERS_MAX};
use super::private::make_private;
use super::rack::{NAMES_MAX, Rack, read_names};
use crate::descriptor::hidden::close;

/// How often a directory may have been removed just before its lock was taken.
const REMOVALS_MAX: usize = 16;
/// How often an address's lock is asked for, a millisecond apart, before doing without: its holder may be stopped.
const LOCK_TRIES_MAX: usize = 200;
const LOCK_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

impl Rack {
    /// Takes the lock under which names at an address are made and removed.
    ///
    /// # Errors
    /// `BUSY` when another process holds it for longer than any does unless it is stopped, and what mkdir, open and
    /// flock answer.
    pub fn lock(&self, address: SocketAddr) -> Result<RackLock<'_>, Errno> {
        let name = address.to_string();
        for _ in 0..REMOVALS_MAX {
            make_private(self.directory.fd()?, name.as_bytes())?;
            match self.lock_existing(address, LOCK_TRIES_MAX) {
                Err(Errno::NOENT) => {}
                outcome => return outcome,
            }
        }
        Err(Errno::BUSY)
    }

    /// As [`Rack::lock`], for an address that has names.
    ///
    /// # Errors
    /// As there, and `NOENT` for one that has none.
    pub(super) fn lock_existing(&self, address: SocketAddr, tries: usize) -> Result<RackLock<'_>, Errno> {
        for _ in 0..REMOVALS_MAX {
            // A lock belongs to an open file, and a forked child shares ours: so each taker opens its own.
            let directory = self.open_directory(&address.to_string())?;
            let mut lock = RackLock { rack: self, address, directory: Some(directory), is_held: false };
            lock.acquire(tries)?;
            if lock.is_held {
                return Ok(lock);
            }
        }
        Err(Errno::BUSY)
    }

    /// Removes the name if no socket stands behind it. Returns whether the name is free now.
    ///
    /// # Errors
    /// As [`Rack::lock`] and [`Rack::is_live`].
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.remove_if_stale_within(name, LOCK_TRIES_MAX)
    }

    /// As [`Rack::remove_if_stale`], for those who must not wait for the lock.
    ///
    /// # Errors
    /// As there; `BUSY` at once.
    pub fn try_remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.remove_if_stale_within(name, 1)
    }

    fn remove_if_stale_within(&self, name: &ListenerName, tries: usize) -> Result<bool, Errno> {
        match self.lock_existing(name.address, tries) {
            Ok(lock) => lock.remove_if_stale(name),
            Err(Errno::NOENT) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The right to make and remove names at an address, until dropped.
#[derive(Debug)]
pub struct RackLock<'a> {
    pub(super) rack: &'a Rack,
    pub(super) address: SocketAddr,
    pub(super) directory: Option<OwnedFd>,
    /// Whether this is the lock of the address, and not of a directory that it had before.
    pub(super) is_held: bool,
}

impl RackLock<'_> {
    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.directory.as_ref().map(AsFd::as_fd).ok_or(Errno::BADF)
    }

    pub(super) fn acquire(&mut self, tries: usize) -> Result<(), Errno> {
        for left in (0..tries).rev() {
            match rustix::fs::flock(self.fd()?, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    self.is_held = self.is_current()?;
                    return Ok(());
                }
                Err(Errno::WOULDBLOCK) if left > 0 => {
                    let _ = rustix::thread::nanosleep(&LOCK_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(error) => return Err(error),
            }
        }
        Err(Errno::BUSY)
    }

    /// Whether the directory is still the address's: the holder before may have removed it.
    fn is_current(&self) -> Result<bool, Errno> {
        let ours = rustix::fs::fstat(self.fd()?)?;
        let name = self.address.to_string();
        match rustix::fs::statat(self.rack.directory.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(current) => Ok((current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// As [`Rack::remove_if_stale`].
    ///
    /// # Errors
    /// What socket, connect and unlink answer.
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        match self.rack.is_live(name) {
            Ok(true) => Ok(false),
            // No such file may also be said of a link that leads nowhere.
            Ok(false) | Err(Errno::NOENT) => match rustix::fs::unlinkat(self.fd()?, name.entry(), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(true),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// A free name for a listener on the address, after stale ones have been removed.
    ///
    /// # Errors
    /// `ADDRINUSE` when a live listener does not share the address.
    pub fn free_name(&self, v6_only: bool, shared: bool) -> Result<ListenerName, Errno> {
        let taken = self.taken_names(v6_only)?;
        match shared {
            _ if taken.is_exclusive => Err(Errno::ADDRINUSE),
            true => taken.free_member(self.address, v6_only),
            false if taken.members.contains(&true) => Err(Errno::ADDRINUSE),
            false => Ok(ListenerName::new(self.address, v6_only, None)),
        }
    }

    /// A free name beside those of all others on the address: one that had it alone is a member from now on.
    ///
    /// # Errors
    /// `ADDRINUSE` when there are too many, and what rename answers.
    pub fn free_name_on_shared_socket(&self, v6_only: bool) -> Result<ListenerName, Errno> {
        let mut taken = self.taken_names(v6_only)?;
        if taken.is_exclusive {
            let exclusive = ListenerName::new(self.address, v6_only, None);
            let member = taken.free_member(self.address, v6_only)?;
            rustix::fs::renameat(self.fd()?, exclusive.entry(), self.fd()?, member.entry())?;
            member.member.into_iter().for_each(|member| taken.members[usize::from(member)] = true);
        }
        taken.free_member(self.address, v6_only)
    }

    /// The names that are taken, after stale ones have been removed.
    fn taken_names(&self, v6_only: bool) -> Result<TakenNames, Errno> {
        let plain = ListenerName::new(self.address, v6_only, None);
        let mut taken = TakenNames { is_exclusive: false, members: [false; MEMBERS_MAX as usize] };
        rustix::fs::seek(self.fd()?, SeekFrom::Start(0))?;
        let names = read_names(self.fd()?, self.address, NAMES_MAX)?;
        for name in names.iter().filter(|name| name.has_same_address(&plain)) {
            let gone = self.remove_if_stale(name)?;
            match name.member {
                _ if gone => {}
                Some(member) => taken.members[usize::from(member)] = true,
                None => taken.is_exclusive = true,
            }
        }
        Ok(taken)
    }

    /// Binds a socket to a free name. Only the directory's rights decide who may connect, whatever the program's umask
    /// is.
    ///
    /// # Errors
    /// What bind and chmod answer.
    pub fn bind(&self, socket: BorrowedFd<'_>, name: &ListenerName) -> Result<(), Errno> {
        rustix::net::bind(socket, &self.rack.address_of(name)?)?;
        rustix::fs::chmodat(self.fd()?, name.entry(), Mode::RUSR | Mode::WUSR, AtFlags::empty())
    }
}

impl Drop for RackLock<'_> {
    /// Removes the directory too if there are no names in it.
    fn drop(&mut self) {
        if self.is_held
            && let Ok(parent) = self.rack.directory.fd()
        {
            let _ = rustix::fs::unlinkat(parent, self.address.to_string(), AtFlags::REMOVEDIR);
        }
        if let Some(directory) = self.directory.take() {
            close(directory);
        }
    }
}

/// Which names of an address have live listeners.
struct TakenNames {
    /// The one of a listener that has the address alone.
    is_exclusive: bool,
    members: [bool; MEMBERS_MAX as usize],
}

impl TakenNames {
    fn free_member(&self, address: SocketAddr, v6_only: bool) -> Result<ListenerName, Errno> {
        let member = self.members.iter().position(|taken| !taken).ok_or(Errno::ADDRINUSE)?;
        Ok(ListenerName::new(address, v6_only, Some(member as u8)))
    }
}
