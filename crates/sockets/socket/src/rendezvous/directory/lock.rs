//! The lock of an address in the rack directory, under which names are created and removed.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FlockOperation, Mode, SeekFrom, Timespec};
use rustix::io::Errno;

use super::listener_name::{ListenerName, MEMBERS_MAX};
use super::private::make_private;
use super::rack::{NAMES_MAX, Rack, read_names};
use crate::descriptor::hidden::close;

/// Maximum number of times that a directory is found removed just before its lock is acquired.
const REMOVALS_MAX: usize = 16;
/// Maximum number of attempts to acquire the lock of an address, a millisecond apart: its holder may be stopped.
const LOCK_TRIES_MAX: usize = 200;
const LOCK_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

impl Rack {
    /// Acquires the lock under which names at an address are created and removed.
    ///
    /// # Errors
    /// `BUSY` when another process holds it for longer than any does that is not stopped, and the errors of mkdir, open
    /// and flock.
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

    /// Acquires the lock of an address that has names.
    ///
    /// # Errors
    /// Those of [`Rack::lock`], and `NOENT` for an address without names.
    pub(super) fn lock_existing(&self, address: SocketAddr, tries: usize) -> Result<RackLock<'_>, Errno> {
        for _ in 0..REMOVALS_MAX {
            // The lock belongs to an open file description, which a forked child would share, so each lock opens its
            // own.
            let directory = self.open_directory(&address.to_string())?;
            let mut lock = RackLock { rack: self, address, directory: Some(directory), is_held: false };
            lock.acquire(tries)?;
            if lock.is_held {
                return Ok(lock);
            }
        }
        Err(Errno::BUSY)
    }

    /// Removes the name if no socket is behind it. Returns whether the name is free now.
    ///
    /// # Errors
    /// Those of [`Rack::lock`] and [`Rack::is_live`].
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.remove_if_stale_within(name, LOCK_TRIES_MAX)
    }

    /// Removes a stale name as [`Rack::remove_if_stale`] does, without waiting for the lock.
    ///
    /// # Errors
    /// Those of [`Rack::remove_if_stale`]; `BUSY` immediately.
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

/// The right to create and remove names at an address, until it is dropped.
#[derive(Debug)]
pub struct RackLock<'a> {
    pub(super) rack: &'a Rack,
    pub(super) address: SocketAddr,
    pub(super) directory: Option<OwnedFd>,
    /// Whether this is the lock of the directory that the address has now, and not of a removed one.
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

    /// Returns whether the directory is still that of the address: the previous holder may have removed it.
    fn is_current(&self) -> Result<bool, Errno> {
        let ours = rustix::fs::fstat(self.fd()?)?;
        let name = self.address.to_string();
        match rustix::fs::statat(self.rack.directory.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(current) => Ok((current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the name if no socket is behind it. Returns whether the name is free now.
    ///
    /// # Errors
    /// The errors of socket, connect and unlink.
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        match self.rack.is_live(name) {
            Ok(true) => Ok(false),
            // A symbolic link without a target also answers `NOENT`.
            Ok(false) | Err(Errno::NOENT) => match rustix::fs::unlinkat(self.fd()?, name.entry(), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(true),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Returns a free name for a listener on the address, after removing stale ones.
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

    /// Returns a free name in addition to those of all other listeners on the address. A listener that had the address
    /// alone becomes a member.
    ///
    /// # Errors
    /// `ADDRINUSE` when there are too many, and the errors of rename.
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

    /// Returns the names that are taken, after removing stale ones.
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

    /// Binds a socket to a free name. The rights of the directory alone decide which processes may connect, regardless
    /// of the program's umask.
    ///
    /// # Errors
    /// The errors of bind and chmod.
    pub fn bind(&self, socket: BorrowedFd<'_>, name: &ListenerName) -> Result<(), Errno> {
        rustix::net::bind(socket, &self.rack.address_of(name)?)?;
        rustix::fs::chmodat(self.fd()?, name.entry(), Mode::RUSR | Mode::WUSR, AtFlags::empty())
    }
}

impl Drop for RackLock<'_> {
    /// Releases the lock, and removes the directory if it holds no names.
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

/// The names of an address that have live listeners.
struct TakenNames {
    /// Whether a listener has the address alone.
    is_exclusive: bool,
    members: [bool; MEMBERS_MAX as usize],
}

impl TakenNames {
    fn free_member(&self, address: SocketAddr, v6_only: bool) -> Result<ListenerName, Errno> {
        let member = self.members.iter().position(|taken| !taken).ok_or(Errno::ADDRINUSE)?;
        Ok(ListenerName::new(address, v6_only, Some(member as u8)))
    }
}
