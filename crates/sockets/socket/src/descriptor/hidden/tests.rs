//! Tests of hidden descriptors.

use super::*;
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Serializes the tests that depend on numbers, which belong to the whole process.
fn serialize() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pipe() -> (OwnedFd, OwnedFd) {
    pipe_with(PipeFlags::CLOEXEC).unwrap()
}

fn inode(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

fn inode_at(number: RawFd) -> Option<u64> {
    // SAFETY: the call only reads, and fails for a closed number.
    rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok().map(|stat| stat.st_ino)
}

#[test]
fn a_hidden_descriptor_is_the_same_file_at_a_high_number_until_dropped() {
    let _serial = serialize();
    let (reader, _writer) = pipe();
    let (low, file) = (reader.as_raw_fd(), inode(&reader));
    let hidden = HiddenFd::hide(reader).unwrap();
    let number = hidden.raw();
    assert!(number as u64 >= first_number() && number != low);
    assert_eq!(inode(hidden.fd().unwrap()), file);
    assert!(is_hidden(number));
    assert!(rustix::io::fcntl_getfd(hidden.fd().unwrap()).unwrap().contains(FdFlags::CLOEXEC));
    drop(hidden);
    assert!(!is_hidden(number) || inode_at(number) != Some(file), "another test may have the number by now");
}

#[test]
fn an_unhidden_descriptor_keeps_its_number() {
    let _serial = serialize();
    let (read, _write) = pipe();
    let inode = inode(&read);
    let hidden = HiddenFd::hide(read).unwrap();
    let number = hidden.raw();
    let shown = hidden.unhide().unwrap();
    assert_eq!((shown.as_raw_fd(), is_hidden(number), inode_at(number)), (number, false, Some(inode)));
    drop(shown);
}

#[test]
fn other_numbers_are_not_hidden() {
    for number in [-1, i32::MIN, i32::MAX, 0, 1, 2, NUMBERS as i32] {
        assert!(!is_hidden(number), "{number}");
        assert_eq!(relocate(number), Ok(()));
    }
}

#[test]
fn a_program_can_take_a_hidden_number_and_the_owner_keeps_its_file() {
    let _serial = serialize();
    let (reader, writer) = pipe();
    let file = inode(&reader);
    let hidden = HiddenFd::hide(reader).unwrap();
    let number = hidden.raw();
    relocate(number).unwrap();
    assert_eq!(inode_at(number), Some(file), "the number stays taken until the program's dup2 replaces it");
    // SAFETY: `relocate` has released the number, which now belongs to this test.
    let mut programs = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::dup2(&writer, &mut programs).unwrap();
    assert!(!is_hidden(number));
    assert_ne!(hidden.raw(), number);
    assert!(is_hidden(hidden.raw()));
    assert_eq!(inode(hidden.fd().unwrap()), file);
    assert!(rustix::io::fcntl_getfd(hidden.fd().unwrap()).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn ranges_leave_hidden_numbers_out() {
    let _serial = serialize();
    let (reader, writer) = pipe();
    let (one, two) = (HiddenFd::hide(reader).unwrap(), HiddenFd::hide(writer).unwrap());
    for (first, last) in [(0, u32::MAX), (3, 9000), (one.raw() as u32, two.raw() as u32), (0, 5), (70_000, 70_001)] {
        let ranges: Vec<_> = visible_ranges(first, last).collect();
        let inside = |number: u32| ranges.iter().any(|(from, to)| (*from..=*to).contains(&number));
        assert!(!inside(one.raw() as u32) && !inside(two.raw() as u32));
        assert!(ranges.iter().all(|(from, to)| from <= to && *from >= first && *to <= last));
        for number in [0, 3, 5, 8999, 70_000, u32::MAX] {
            let ours = i32::try_from(number).is_ok_and(is_hidden);
            assert_eq!(inside(number), (first..=last).contains(&number) && !ours, "{number}");
        }
    }
    assert_eq!(visible_ranges(9, 8).count(), 0);
}

#[test]
fn threads_can_hide_and_drop_at_once() {
    let _serial = serialize();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let (reader, writer) = pipe();
                    let file = inode(&reader);
                    let hidden = HiddenFd::hide(reader).unwrap();
                    assert_eq!(inode(hidden.fd().unwrap()), file);
                    close(writer);
                }
            });
        }
    });
}

/// Runs in a process of its own, started by other tests, because limits affect all threads.
#[test]
fn child_of_other_tests() {
    let Some(step) = std::env::var_os("CROSSLANE_TEST_LIMIT") else { return };
    match step.to_str() {
        Some("small") => small_limit(),
        Some("above") => above_limit(),
        step => panic!("{step:?}"),
    }
}

fn run_child(step: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "descriptor::hidden::tests::child_of_other_tests", "--test-threads=1"]);
    command.env("CROSSLANE_TEST_LIMIT", step);
    command
}

fn named_memfd(name: &str) -> OwnedFd {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap()
}

fn small_limit() {
    let mut kept = Vec::new();
    let error = loop {
        match HiddenFd::hide(named_memfd("crosslane-many")) {
            Ok(hidden) => kept.push(hidden),
            Err(error) => break error,
        }
        assert!(kept.len() < 64);
    };
    assert_eq!(error, Errno::MFILE);
    assert!(kept.iter().map(HiddenFd::raw).all(|number| number < 64));
    assert!(kept.len() > 24, "lower numbers are used when the high ones are gone: {}", kept.len());
    drop(kept.pop());
    assert!(HiddenFd::hide(named_memfd("crosslane-many")).is_ok());
}

fn above_limit() {
    hide_above_limit();
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let hidden: Vec<_> = (0..70).map(|_| HiddenFd::hide(named_memfd("crosslane-above")).unwrap()).collect();
    assert!(hidden.iter().all(|fd| fd.raw() >= 64 && is_hidden(fd.raw())));
    assert_eq!(rustix::process::getrlimit(Resource::Nofile), limit, "the limit is raised for a moment only");
    let mut programs = Vec::new();
    while let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 0) {
        programs.push(fd);
    }
    assert_eq!(programs.last().map(AsRawFd::as_raw_fd), Some(63), "the program has all of its numbers");
}

#[test]
fn hidden_descriptors_take_no_number_of_a_program_with_a_higher_hard_limit() {
    let _serial = serialize();
    let mut command = run_child("above");
    limit_numbers(&mut command, 64);
    succeed(&mut command);
}

#[test]
fn a_small_limit_is_used_up_and_then_an_error() {
    let _serial = serialize();
    let mut command = run_child("small");
    limit_numbers(&mut command, 64);
    succeed(&mut command);
}

fn succeed(command: &mut std::process::Command) {
    let _child = test_support::spawn::lock();
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn limit_numbers(command: &mut std::process::Command, numbers: u64) {
    use std::os::unix::process::CommandExt;
    // SAFETY: the closure makes two raw system calls, which are allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let mut limit = rustix::process::getrlimit(Resource::Nofile);
            limit.current = Some(numbers);
            rustix::process::setrlimit(Resource::Nofile, limit).map_err(std::io::Error::from)
        });
    }
}
