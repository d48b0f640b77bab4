//! What the kernel reports of other processes.

use crate::descriptor::hidden::close;
use crate::process::system::{for_each_line, read_text};
use rustix::fs::{Mode, OFlags, RawDir};
use std::ffi::CStr;
use std::fmt::Write;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

/// What the threads of a process do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    /// There is no such process, or all its threads have ended.
    Dead,
    /// A thread is stopped: by a signal, a debugger, or the freezer of its cgroup.
    Stopped,
    /// A thread runs or can run, or is in a page fault.
    Runs,
    /// All threads sleep in system calls.
    Sleeps,
}

/// Returns what the threads of a process of this PID namespace do.
pub(crate) fn activity_of(process: i32) -> Activity {
    let Some(threads) = open_folder(process, "task") else { return Activity::Dead };
    let mut activity = Activity::Dead;
    for_each_name(&threads, |thread| {
        let state = thread_state(process, thread);
        activity = match (state, activity) {
            (Some(b'T' | b't'), _) | (_, Activity::Stopped) => Activity::Stopped,
            (Some(b'R' | b'D'), _) | (_, Activity::Runs) => Activity::Runs,
            (Some(b'Z' | b'X') | None, other) => other,
            _ => Activity::Sleeps,
        };
    });
    close(threads);
    if activity == Activity::Sleeps && is_frozen(process) { Activity::Stopped } else { activity }
}

/// Returns whether a process of this PID namespace has the socket with this inode open. `false` where this process may
/// not see that.
pub(crate) fn has_socket(process: i32, inode: u64) -> bool {
    let wanted = Text::<32>::format(format_args!("socket:[{inode}]"));
    let Some(descriptors) = open_folder(process, "fd") else { return false };
    let mut is_found = false;
    for_each_name(&descriptors, |name| {
        let mut room = [MaybeUninit::<u8>::uninit(); 64];
        let link = rustix::fs::readlinkat_raw(&descriptors, name, &mut room);
        is_found |= link.is_ok_and(|(link, _)| *link == *wanted.bytes());
    });
    close(descriptors);
    is_found
}

/// Returns whether the cgroup of a process is frozen (version 2; version 1 shows it in the threads' states).
#[inline(never)] // The path is on the stack of this function alone.
fn is_frozen(process: i32) -> bool {
    let groups = Text::<64>::format(format_args!("/proc/{process}/cgroup"));
    let mut events = Text::<512>::format(format_args!(""));
    let Some(groups) = groups.as_c_str() else { return false };
    for_each_line(groups, &mut |line| {
        if let Some(group) = line.strip_prefix("0::") {
            events = Text::format(format_args!("/sys/fs/cgroup{group}/cgroup.events"));
        }
    });
    let Some(events) = events.as_c_str() else { return false };
    let mut is_frozen = false;
    for_each_line(events, &mut |line| is_frozen |= line == "frozen 1");
    is_frozen
}

/// Returns the letter by which the kernel names the state of a thread.
fn thread_state(process: i32, thread: &CStr) -> Option<u8> {
    let mut text = [0; 128];
    let path = Text::<64>::format(format_args!("/proc/{process}/task/{}/stat", thread.to_str().ok()?));
    let stat = read_text(path.as_c_str()?, &mut text)?;
    // The name before it may contain any character.
    stat.rsplit_once(") ")?.1.bytes().next()
}

fn open_folder(process: i32, name: &str) -> Option<OwnedFd> {
    let path = Text::<64>::format(format_args!("/proc/{process}/{name}"));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path.as_c_str()?, flags, Mode::empty()).ok()
}

/// Calls `visit` with the names in a folder, except for those of the folder itself and its parent.
fn for_each_name(folder: &OwnedFd, mut visit: impl FnMut(&CStr)) {
    let mut buffer = [MaybeUninit::<u8>::uninit(); 512];
    let mut entries = RawDir::new(folder, &mut buffer);
    while let Some(Ok(entry)) = entries.next() {
        if !entry.file_name().to_bytes().starts_with(b".") {
            visit(entry.file_name());
        }
    }
}

/// A text of at most `N` bytes without allocation: a lock may be taken in a signal handler.
struct Text<const N: usize> {
    bytes: [u8; N],
    len_bytes: usize,
}

impl<const N: usize> Text<N> {
    /// Formats a text, which is empty if it would be too long.
    fn format(arguments: std::fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; N], len_bytes: 0 };
        if text.write_fmt(arguments).is_err() {
            text.len_bytes = 0;
        }
        text
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }

    /// Returns the text as a path.
    fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_with_nul(self.bytes.get(..=self.len_bytes)?).ok()
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, part: &str) -> std::fmt::Result {
        let end = self.len_bytes + part.len();
        // One byte stays for the end of a path.
        if end >= N {
            return Err(std::fmt::Error);
        }
        self.bytes[self.len_bytes..end].copy_from_slice(part.as_bytes());
        self.len_bytes = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::system::inode_of;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Stdio};

    fn send(child: &Child, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
    }

    fn await_activity(child: &Child, wanted: Activity) {
        while activity_of(child.id() as i32) != wanted {
            std::thread::yield_now();
        }
    }

    #[test]
    fn sleeping_stopped_and_ended_processes_are_told_apart() {
        use rustix::process::Signal;
        let mut child = test_support::spawn::sleeper(Stdio::null());
        await_activity(&child, Activity::Sleeps);
        send(&child, Signal::STOP);
        await_activity(&child, Activity::Stopped);
        send(&child, Signal::CONT);
        await_activity(&child, Activity::Sleeps);
        send(&child, Signal::KILL);
        await_activity(&child, Activity::Dead); // Not reaped yet.
        child.wait().unwrap();
        assert_eq!(activity_of(child.id() as i32), Activity::Dead);
        let own = std::process::id() as i32;
        assert_eq!(activity_of(own), Activity::Runs, "this thread");
    }

    #[test]
    fn the_process_that_has_a_socket_open_is_known() {
        let (one, two) = UnixStream::pair().unwrap();
        let own = std::process::id() as i32;
        let [first, second] = [&one, &two].map(|socket| inode_of(socket.as_raw_fd()).unwrap());
        assert_eq!((has_socket(own, first), has_socket(own, second)), (true, true));
        drop(two);
        assert_eq!((has_socket(own, first), has_socket(own, second)), (true, false));
        assert!(!has_socket(i32::MAX, first));
    }
}
