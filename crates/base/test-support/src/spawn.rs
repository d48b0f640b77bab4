//! Keeps tests that start programs apart from tests that rely on a closed descriptor being closed.
//!
//! Between `fork` and `exec` a child holds copies of all descriptors of its parent, so what a test closes in that time
//! (a listener, one end of a pipe) stays open until the `exec`. `cargo test` runs the tests of a crate as threads of
//! one process, so the two kinds of tests exclude each other by a lock of the process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static SPAWNING: RwLock<()> = RwLock::new(());

/// Returns a guard during whose lifetime no test starts a program.
pub fn forbid() -> RwLockReadGuard<'static, ()> {
    SPAWNING.read().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the guard that a test holds while it starts a program: from before the `fork` until the child has written
/// something or has exited, which shows that its `exec` is over.
pub fn lock() -> RwLockWriteGuard<'static, ()> {
    SPAWNING.write().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a program that sleeps for ten minutes, and returns after its `exec`.
///
/// # Panics
/// If the program does not start.
pub fn sleeper(stdin: Stdio) -> Child {
    let _spawning = lock();
    let mut command = Command::new("sh");
    command.args(["-c", "echo && exec sleep 600"]).stdin(stdin).stdout(Stdio::piped());
    let mut child = command.spawn().expect("sh starts");
    let mut line = String::new();
    let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
    assert_eq!((read.transpose().expect("sh writes a line"), line.as_str()), (Some(1), "\n"));
    child
}
