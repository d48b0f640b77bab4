//! Network namespaces without names: they last as long as somebody has them open.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// A network namespace. It goes, with its interfaces, when the last thread, socket and descriptor in it are gone.
#[derive(Debug)]
pub struct Namespace {
    fd: OwnedFd,
}

impl Namespace {
    /// A new one, with nothing but a loopback interface that is down. Needs `CAP_SYS_ADMIN`.
    pub fn new() -> io::Result<Namespace> {
        on_a_thread(|| {
            // SAFETY: the thread is new, runs nothing but this, and a network namespace is not memory or descriptors
            // that another thread could count on.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Namespace::of_thread()
        })
    }

    /// The calling thread's.
    pub fn of_thread() -> io::Result<Namespace> {
        Namespace::at(Path::new("/proc/thread-self/ns/net"))
    }

    /// The one that has a name: `ip netns` keeps them in `/run/netns`.
    pub fn at(path: &Path) -> io::Result<Namespace> {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Namespace { fd })
    }

    /// Runs something inside, on a thread of its own, and waits for it. What it opens there stays there.
    pub fn within<T: Send>(&self, run: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| {
            self.enter()?;
            Ok(run())
        })
    }

    /// As [`Namespace::within`], with a `/sys` that shows the namespace's interfaces, for this thread alone.
    pub fn within_with_sysfs<T: Send>(&self, run: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| {
            self.enter()?;
            // SAFETY: the thread is new and runs nothing but this; what it unshares is its view of file systems and of
            // its own directory and mask, which nobody else counts on.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
            Ok(run())
        })
    }

    /// Moves the calling thread inside, for good.
    pub fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))?)
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn on_a_thread<T: Send>(run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let result = thread::scope(|scope| scope.spawn(run).join());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// For tests: a new namespace, or a line that says why the test is not run.
#[cfg(test)]
pub(crate) fn for_test(name: &str) -> Option<Namespace> {
    match Namespace::new() {
        Ok(namespace) => Some(namespace),
        Err(error) => {
            println!("{name} is skipped: no network namespace of its own ({error}); run it as root");
            None
        }
    }
}
