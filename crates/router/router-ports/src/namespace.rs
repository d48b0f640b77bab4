//! Unnamed network namespaces, which exist while a descriptor refers to them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// `SO_NETNS_COOKIE` (`asm-generic/socket.h`); the library lacks it on some architectures.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// A network namespace. It is destroyed, with its interfaces, when the last thread, socket and descriptor that refer to
/// it are gone.
#[derive(Debug)]
pub struct Namespace {
    fd: OwnedFd,
}

impl Namespace {
    /// Creates a namespace with only a loopback interface that is down. Needs `CAP_SYS_ADMIN`.
    pub fn new() -> io::Result<Namespace> {
        on_a_thread(|| {
            // SAFETY: the thread is new and runs only this closure, and unsharing a network namespace affects neither
            // memory nor descriptors of other threads.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Namespace::of_thread()
        })
    }

    /// Returns the namespace of the calling thread.
    pub fn of_thread() -> io::Result<Namespace> {
        Namespace::at(Path::new("/proc/thread-self/ns/net"))
    }

    /// Opens a named namespace; `ip netns` keeps them in `/run/netns`.
    pub fn at(path: &Path) -> io::Result<Namespace> {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Namespace { fd })
    }

    /// Runs a closure inside the namespace, on a separate thread, and waits for it. Sockets that it opens stay in the
    /// namespace.
    pub fn within<T: Send>(&self, run: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| {
            self.enter()?;
            Ok(run())
        })
    }

    /// Like [`Namespace::within`], with a `/sys` that shows the namespace's interfaces to this thread alone.
    pub fn within_with_sysfs<T: Send>(&self, run: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| {
            self.enter()?;
            // SAFETY: the thread is new and runs only this closure; it unshares its view of file systems, its working
            // directory and its umask, on which no other thread depends.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
            Ok(run())
        })
    }

    /// Moves the calling thread into the namespace permanently.
    pub fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))?)
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the cookie of the calling thread's network namespace, a number that the kernel does not use again until the
/// machine is started anew (`SO_NETNS_COOKIE`, Linux 5.14).
pub(crate) fn cookie_of_thread() -> io::Result<u64> {
    let kind = rustix::net::SocketType::DGRAM;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::INET, kind, flags, None)?;
    crate::system::option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

fn on_a_thread<T: Send>(run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let result = thread::scope(|scope| scope.spawn(run).join());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// For tests: creates a namespace, or prints why the test is skipped.
#[cfg(test)]
pub(crate) fn for_test(name: &str) -> Option<Namespace> {
    match Namespace::new() {
        Ok(namespace) => Some(namespace),
        Err(error) => {
            println!("{name} is skipped: cannot create a network namespace ({error}); run it as root");
            None
        }
    }
}
