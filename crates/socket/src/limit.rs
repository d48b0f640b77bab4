//! Descriptors of our own when the program has used up its limit.
//!
//! A program at its limit still connects and listens with the kernel's TCP, which needs no further descriptor. A lane
//! needs a few, so the soft limit is raised towards the hard one for as long as it takes to get them; hidden ones then
//! stay above the program's limit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{BorrowedFd, RawFd};

/// Descriptors that one connection or listener needs at most beyond the program's.
const SPARE: u64 = 16;

/// Limits up to here are asked whether they leave a number free.
const SMALL_LIMIT: u64 = 1024;

struct Raised(Rlimit);

impl Drop for Raised {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

fn raise() -> Option<Raised> {
    let limit = getrlimit(Resource::Nofile);
    let raised = limit.current?.saturating_add(SPARE).min(limit.maximum.unwrap_or(u64::MAX));
    setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit }).ok()?;
    Some(Raised(limit))
}

/// Runs `action`, and once more above the program's limit if it failed for lack of descriptors; where that cannot be
/// raised, hidden ones that can be spared make room.
pub fn above_when_needed<T, E>(
    action: impl Fn() -> Result<T, E>,
    lacks_descriptors: impl Fn(&E) -> bool,
) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) => {
            let _raised = raise();
            sparing(action, lacks_descriptors)
        }
        result => result,
    }
}

/// Runs `action`, which cannot be tried twice, above the program's limit if `newest`, the lowest number that was free,
/// is close to it.
pub fn above_when_near<R>(newest: RawFd, action: impl FnOnce() -> R) -> R {
    // Below a small limit our own hidden descriptors may stand between the newest and the limit.
    let is_near = getrlimit(Resource::Nofile)
        .current
        .is_some_and(|limit| newest as u64 + SPARE >= limit || limit <= SMALL_LIMIT && !has_another(newest));
    let _raised = is_near.then(raise);
    action()
}

fn has_another(fd: RawFd) -> bool {
    // SAFETY: the caller's new descriptor.
    rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 0).map(crate::descriptors::close).is_ok()
}

/// Runs `action`; if it failed because the program has no number left, gives up what hidden descriptors can be spared
/// and runs it once more.
pub fn sparing<T, E>(action: impl Fn() -> Result<T, E>, lacks_descriptors: impl Fn(&E) -> bool) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) && crate::descriptors::release_all_optional() > 0 => action(),
        result => result,
    }
}
