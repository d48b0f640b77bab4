//! Tests that start programs, and tests that count on what they close being closed.
//!
//! A child has all descriptors of its process until it has become another program: what a test closes meanwhile, be it
//! a listener, the end of a pipe or a name, stays open for a moment. So the ones wait for the others.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static CHILDREN: RwLock<()> = RwLock::new(());

/// As long as this is held no test starts a program.
pub(crate) fn none() -> RwLockReadGuard<'static, ()> {
    CHILDREN.read().unwrap_or_else(PoisonError::into_inner)
}

/// To be held from before a program is started until it has said something, or has ended.
pub(crate) fn one() -> RwLockWriteGuard<'static, ()> {
    CHILDREN.write().unwrap_or_else(PoisonError::into_inner)
}

/// A program that does nothing for ten minutes, and has become it.
#[allow(dead_code, reason = "not every crate whose tests have this file needs one")]
pub(crate) fn sleeper(input: Stdio) -> Child {
    let _child = one();
    let mut command = Command::new("sh");
    command.args(["-c", "echo && exec sleep 600"]).stdin(input).stdout(Stdio::piped());
    let mut child = command.spawn().expect("a program that sleeps");
    let mut line = String::new();
    let said = child.stdout.take().map(|said| BufReader::new(said).read_line(&mut line));
    assert_eq!((said.transpose().expect("its line"), line.as_str()), (Some(1), "\n"));
    child
}
