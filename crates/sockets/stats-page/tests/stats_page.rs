//! Tests of pages written as programs do and read as `crosslane stat` does, including forks, kills and full file
//! systems.
#![allow(unsafe_code)]

use std::fs;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::{Barrier, Mutex, MutexGuard};

use proptest::prelude::*;
use stats_page::reader::{PageError, Process, Snapshot, decode, read_foreign_rack, read_rack};
use stats_page::{
    CLOSED_RECORDS, ConnectionSlot, DataPath, FallbackReason, NewConnection, PageConfig, Role, SLOTS, StatsPage,
};

fn rack() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn stats_in(rack: &Path) -> &'static StatsPage {
    StatsPage::create(&PageConfig { rack, node: stats_page::node_address("b").map(Into::into), program: b"tested" })
}

fn connection(path: DataPath, fd: i32) -> NewConnection {
    let local: SocketAddr = "127.77.0.2:40000".parse().unwrap();
    let peer: SocketAddr = "[2001:db8::1]:6379".parse().unwrap();
    NewConnection { path, role: Role::Connect, fd, local: Some(local), peer: Some(peer), reason: None }
}

fn only_process(rack: &Path) -> Process {
    let Snapshot { mut processes, unreadable, .. } = read_rack(rack).unwrap();
    assert_eq!(unreadable, []);
    assert_eq!(processes.len(), 1, "{processes:?}");
    processes.remove(0)
}

fn process_of(rack: &Path, pid: u32) -> Process {
    read_rack(rack).unwrap().processes.into_iter().find(|process| process.pid == pid).expect("the pid has a page")
}

/// Serializes tests that fork and tests that wait for the end of a lock: a forked child holds the locks of all files
/// that any test has open.
static FORKS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    FORKS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs `child` in a forked process. Returns its pid after it has exited with status 0, which it does if `child`
/// returns true.
fn in_child(child: impl FnOnce() -> bool) -> u32 {
    // SAFETY: the child only runs the test's own code and ends with `_exit`, so that it never returns into the harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `pid` is a child of this process, and `status` is a local variable.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed or was killed, wait status {status:#x}");
    pid.unsigned_abs()
}

#[test]
fn what_kernel_tcp_carries_of_a_connection_with_a_lane_counts_as_by_the_kernel() {
    let rack = rack();
    let stats = stats_in(rack.path());
    let lane = stats.open_connection(&connection(DataPath::Lane, 7));
    lane.add_sent(100);
    lane.add_by_tcp(30, 4);
    lane.set_sends_on_tcp(true);
    let bytes = |process: &stats_page::reader::Process| {
        let [lane, kernel] = [process.lane, process.kernel].map(|it| (it.bytes_sent, it.bytes_received));
        (lane, kernel)
    };
    let process = only_process(rack.path());
    let first = &process.connections[0];
    assert_eq!((first.bytes_sent, first.tcp_bytes_sent, first.tcp_bytes_received), (100, 30, 4));
    assert!(first.sends_on_tcp && !first.receives_on_tcp);
    assert_eq!(bytes(&process), ((100, 0), (30, 4)));
    lane.close();
    assert_eq!(bytes(&only_process(rack.path())), ((100, 0), (30, 4)), "after the end");
    let again = stats.open_connection(&connection(DataPath::Lane, 7));
    let process = only_process(rack.path());
    assert_eq!((process.connections[0].tcp_bytes_sent, process.connections[0].sends_on_tcp), (0, false));
    again.close();
}

#[test]
fn a_reader_sees_what_was_written() {
    let rack = rack();
    let stats = stats_in(rack.path());
    assert!(stats.is_published());
    let lane = stats.open_connection(&connection(DataPath::Lane, 7));
    // The last reason, whose number is the largest.
    let reason = FallbackReason::ALL.last().copied();
    let by_kernel = NewConnection { role: Role::Accept, reason, ..connection(DataPath::Kernel, 8) };
    let kernel = stats.open_connection(&by_kernel);
    lane.add_sent(100);
    lane.add_sent(20);
    lane.add_received(5);
    lane.count_sleep();
    lane.count_wake();
    lane.count_wake();
    kernel.add_received(1 << 40);
    stats.count_fallback(FallbackReason::NoAnswer);
    stats.count_fallback(FallbackReason::NoAnswer);

    let process = only_process(rack.path());
    assert_eq!((process.pid, process.program.as_str()), (std::process::id(), "tested"));
    assert_eq!(process.node, stats_page::node_address("b").map(Into::into));
    assert_eq!(process.fallbacks.into_iter().collect::<Vec<_>>(), [("no_answer", 2)]);
    let [first, second] = &process.connections[..] else { panic!("{:?}", process.connections) };
    assert_eq!((first.fd, first.path, first.role, first.inherited), (7, DataPath::Lane, Role::Connect, false));
    assert_eq!(first.local.unwrap().to_string(), "127.77.0.2:40000");
    assert_eq!(first.peer.unwrap().to_string(), "[2001:db8::1]:6379");
    assert_eq!((first.bytes_sent, first.messages_sent, first.bytes_received, first.messages_received), (120, 2, 5, 1));
    assert_eq!((first.sleeps, first.wakes), (1, 2));
    assert_eq!(
        (second.fd, second.path, second.role, second.bytes_received),
        (8, DataPath::Kernel, Role::Accept, 1 << 40)
    );
    assert_eq!((first.reason, second.reason), (None, reason));

    lane.set_fd(9);
    lane.set_addresses(None, None);
    kernel.close();
    let process = only_process(rack.path());
    let [first] = &process.connections[..] else { panic!("{:?}", process.connections) };
    assert_eq!((first.fd, first.local, first.peer), (9, None, None));
    assert_eq!(
        (process.kernel.connections_total, process.kernel.connections_open, process.kernel.bytes_received),
        (1, 0, 1 << 40)
    );
}

#[test]
fn files_and_folders_are_the_users_own() {
    let rack = rack();
    let deeper = rack.path().join("deeper");
    assert!(!stats_in(&deeper).is_published() && !deeper.exists(), "a page does not create the rack directory");
    fs::DirBuilder::new().mode(0o700).create(&deeper).unwrap();
    stats_in(&deeper);
    for (path, mode) in
        [("", 0o700), ("v1", 0o700), ("v1/stat", 0o700), (&format!("v1/stat/{}", std::process::id()), 0o600)]
    {
        let found = fs::metadata(deeper.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{path}");
    }
}

#[test]
fn a_folder_others_can_write_to_is_not_used() {
    let rack = rack();
    fs::create_dir(rack.path().join("v1")).unwrap();
    fs::set_permissions(rack.path().join("v1"), fs::Permissions::from_mode(0o777)).unwrap();
    let stats = stats_in(rack.path());
    assert!(!stats.is_published());
    stats.open_connection(&connection(DataPath::Lane, 3)).add_sent(1);
    assert!(!rack.path().join("v1/stat").exists());
}

#[test]
fn threads_lose_no_counts_and_share_no_slots() {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 400;
    let rack = rack();
    let stats = stats_in(rack.path());
    let live: Vec<ConnectionSlot> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let mut held: Vec<ConnectionSlot> = Vec::new();
                    for round in 0..ROUNDS {
                        let slot = stats.open_connection(&connection(DataPath::Lane, (thread * ROUNDS + round) as i32));
                        (0..3).for_each(|_| slot.add_sent(thread + 1));
                        slot.add_received(7);
                        held.push(slot);
                        if round % 3 != 0 {
                            held.swap_remove((round as usize * 7) % held.len()).close();
                        }
                    }
                    held
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let process = only_process(rack.path());
    assert_eq!(process.lane.connections_total, THREADS * ROUNDS);
    assert_eq!(process.lane.bytes_sent, (1..=THREADS).sum::<u64>() * ROUNDS * 3);
    assert_eq!(process.lane.bytes_received, THREADS * ROUNDS * 7);
    assert_eq!(process.connections.len(), live.len());
    let mut fds: Vec<i32> = process.connections.iter().map(|connection| connection.fd).collect();
    fds.sort_unstable();
    fds.dedup();
    assert_eq!(fds.len(), live.len(), "two connections wrote to one slot");
}

#[test]
fn the_bytes_of_a_connection_that_gets_another_slot_count_once() {
    let rack = rack();
    let stats = stats_in(rack.path());
    let before = stats.open_connection(&connection(DataPath::Kernel, 7));
    before.add_sent(100);
    let lane = stats.open_connection(&connection(DataPath::Lane, 7));
    lane.add_by_tcp(100, 0);
    before.forget_bytes();
    before.close();
    assert_eq!(only_process(rack.path()).kernel.bytes_sent, 100);
    lane.close();
    assert_eq!(only_process(rack.path()).kernel.bytes_sent, 100);
}

#[test]
fn the_connections_closed_last_are_recorded() {
    let rack = rack();
    let stats = stats_in(rack.path());
    let open = |fd| stats.open_connection(&connection(DataPath::Lane, fd));
    let lane = open(7);
    lane.add_sent(100);
    lane.add_received(20);
    lane.count_sleep();
    lane.add_by_tcp(3, 4);
    assert_eq!(only_process(rack.path()).closed, [], "while it is open");
    let before = only_process(rack.path()).connections.remove(0);
    lane.close();
    let replaced = open(8);
    replaced.note_replaced();
    replaced.close();
    let process = only_process(rack.path());
    let [closed] = &process.closed[..] else { panic!("{:?}", process.closed) };
    assert_eq!(closed.connection, before);
    assert!(closed.closed_at_ns >= before.opened_at_ns);
    // Of more connections than there are records, the last ones are kept, the last one first.
    for fd in 0..CLOSED_RECORDS as i32 + 5 {
        open(fd).close();
    }
    let fds: Vec<i32> = only_process(rack.path()).closed.iter().map(|closed| closed.connection.fd).collect();
    assert_eq!(fds, (5..CLOSED_RECORDS as i32 + 5).rev().collect::<Vec<_>>());
}

#[test]
fn threads_that_close_connections_at_once_record_whole_ones() {
    const EACH: u64 = 5_000;
    let rack = rack();
    let stats = stats_in(rack.path());
    let together = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let together = &together;
            scope.spawn(move || {
                together.wait();
                for number in 0..EACH {
                    let slot = stats.open_connection(&connection(DataPath::Lane, (thread * EACH + number) as i32));
                    slot.add_sent(thread * EACH + number);
                    slot.add_received(thread * EACH + number);
                }
            });
        }
    });
    let closed = only_process(rack.path()).closed;
    assert!(!closed.is_empty() && closed.len() <= CLOSED_RECORDS);
    for closed in closed {
        let number = closed.connection.fd as u64;
        assert_eq!((closed.connection.bytes_sent, closed.connection.bytes_received), (number, number), "{closed:?}");
    }
}

#[test]
fn a_child_has_no_record_of_what_its_parent_closed() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    stats.open_connection(&connection(DataPath::Lane, 7)).add_sent(1);
    let inherited = stats.open_connection(&connection(DataPath::Lane, 8));
    let parent = std::process::id();
    in_child(|| {
        stats.forked_child();
        inherited.add_sent(5);
        drop(inherited);
        // What a child counts makes its page a file.
        stats.count_fallback(FallbackReason::NoAnswer);
        let child = process_of(rack.path(), std::process::id());
        let fds: Vec<i32> = child.closed.iter().map(|closed| closed.connection.fd).collect();
        fds == [8] && child.closed[0].connection.inherited
    });
    // The parent's own, which ended with the closure, has not what the child has sent.
    let closed = process_of(rack.path(), parent).closed;
    let found: Vec<_> = closed.iter().map(|it| (it.connection.fd, it.connection.bytes_sent)).collect();
    assert_eq!(found, [(8, 0), (7, 1)]);
}

#[test]
fn one_kernel_connection_may_be_counted_by_many_threads() {
    const SENDS: u64 = 200_000;
    let rack = rack();
    let slot = stats_in(rack.path()).open_connection(&connection(DataPath::Kernel, 3));
    let together = Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                together.wait();
                (0..SENDS).for_each(|_| slot.add_sent(3));
            });
        }
    });
    let found = &only_process(rack.path()).connections[0];
    assert_eq!((found.bytes_sent, found.messages_sent), (4 * SENDS * 3, 4 * SENDS));
}

#[test]
fn a_full_table_still_counts() {
    let rack = rack();
    let stats = stats_in(rack.path());
    let slots: Vec<ConnectionSlot> =
        (0..SLOTS + 5).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd as i32))).collect();
    slots.iter().for_each(|slot| slot.add_sent(2));
    let process = only_process(rack.path());
    assert_eq!((process.connections.len(), process.connections_unlisted), (SLOTS, 5));
    assert_eq!(process.lane.bytes_sent, (SLOTS as u64 + 5) * 2);
    drop(slots);
    let process = only_process(rack.path());
    assert_eq!((process.connections.len(), process.lane.connections_open), (0, 0));
    assert_eq!((process.lane.bytes_sent, process.lane.connections_total), ((SLOTS as u64 + 5) * 2, SLOTS as u64 + 5));
}

#[test]
fn a_page_is_removed_only_after_its_writer_has_exited() {
    let _alone = alone();
    let rack = rack();
    let gone = stats_in(rack.path());
    let kept = stats_in(rack.path());
    kept.count_fallback(FallbackReason::PortRule);
    assert_eq!(read_rack(rack.path()).unwrap().processes.len(), 2, "a second owner of the pid uses another name");
    // SAFETY: `gone` is not used again.
    unsafe { gone.vanish() };
    let snapshot = read_rack(rack.path()).unwrap();
    assert_eq!((snapshot.processes.len(), snapshot.stale_removed), (1, 1));
    assert_eq!(snapshot.processes[0].fallbacks["port_rule"], 1);
    assert_eq!(fs::read_dir(rack.path().join("v1/stat")).unwrap().count(), 1);

    let again = stats_in(rack.path());
    assert!(again.is_published());
    again.remove();
    kept.remove();
    kept.remove();
    assert_eq!(fs::read_dir(rack.path().join("v1/stat")).unwrap().count(), 0);
}

#[test]
fn a_folder_that_keeps_pages_has_those_of_all_programs_that_ended() {
    let _alone = alone();
    let rack = rack();
    let folder = rack.path().join("v1/stat");
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700 | stats_page::KEEP_PAGES)).unwrap();
    // More than the number of processes of which one sweeps.
    let mut pids: Vec<u32> = (0..20)
        .map(|_| {
            in_child(|| {
                stats_in(rack.path()).count_fallback(FallbackReason::PortRule);
                true
            })
        })
        .collect();
    pids.sort_unstable();
    for _ in 0..2 {
        let snapshot = read_rack(rack.path()).unwrap();
        assert_eq!(snapshot.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), pids);
        assert!(snapshot.processes.iter().all(|process| process.fallbacks["port_rule"] == 1));
    }
    // As a program that calls exec does: its pid has a page already.
    let pid = in_child(|| {
        let first = stats_in(rack.path());
        // SAFETY: `first` is not used again.
        unsafe { first.vanish() };
        stats_in(rack.path()).is_published()
    });
    let snapshot = read_rack(rack.path()).unwrap();
    assert_eq!(snapshot.processes.iter().filter(|process| process.pid == pid).count(), 2);
}

#[test]
fn a_killed_programs_page_is_stale_and_its_name_can_be_used_again() {
    let _alone = alone();
    let rack = rack();
    let stat = rack.path().join("v1/stat");
    let mut ready = [0; 2];
    // SAFETY: `ready` has room for both descriptors.
    assert_eq!(unsafe { libc::pipe(ready.as_mut_ptr()) }, 0);
    // SAFETY: the child only runs the code below and never returns.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        stats_in(rack.path()).count_fallback(FallbackReason::NoAnswer);
        // SAFETY: these system calls take valid arguments; closing all other descriptors, as daemons do, must not end
        // the lock.
        unsafe {
            (3..1024).filter(|fd| *fd != ready[1]).for_each(|fd| {
                libc::close(fd);
            });
            libc::write(ready[1], b"!".as_ptr().cast(), 1);
            loop {
                libc::pause();
            }
        }
    }
    let mut byte = 0u8;
    // SAFETY: `byte` is a local variable of one byte.
    assert_eq!(unsafe { libc::read(ready[0], (&raw mut byte).cast(), 1) }, 1);
    assert_eq!(process_of(rack.path(), pid.unsigned_abs()).fallbacks["no_answer"], 1);
    // SAFETY: `pid` is a child of this process that has not been waited for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert!(stat.join(pid.to_string()).exists());
    assert_eq!(read_foreign_rack(rack.path()).unwrap(), Snapshot::default(), "stays");
    assert_eq!(read_rack(rack.path()).unwrap(), Snapshot { stale_removed: 1, ..Snapshot::default() });
    assert!(!stat.join(pid.to_string()).exists());
}

#[test]
fn a_forked_child_writes_to_a_page_of_its_own() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let inherited = stats.open_connection(&connection(DataPath::Lane, 5));
    let closed_before = stats.open_connection(&connection(DataPath::Lane, 6));
    inherited.add_sent(1000);
    closed_before.close();
    stats.count_fallback(FallbackReason::AccessDenied);
    let before = only_process(rack.path());
    let child = in_child(|| {
        stats.forked_child();
        inherited.add_sent(1);
        inherited.add_received(2);
        let own = stats.open_connection(&connection(DataPath::Kernel, 6));
        own.add_sent(30);
        let mine = process_of(rack.path(), std::process::id());
        let [first, second] = &mine.connections[..] else { return false };
        stats.is_published()
            && (first.fd, first.inherited, first.bytes_sent, first.bytes_received) == (5, true, 1, 2)
            && (second.fd, second.inherited, second.bytes_sent) == (6, false, 30)
            && first.peer == before.connections[0].peer
            && (mine.lane.connections_total, mine.lane.connections_open, mine.kernel.connections_total) == (0, 1, 1)
            && mine.fallbacks.is_empty()
            && mine.program == "tested"
    });
    let snapshot = read_rack(rack.path()).unwrap();
    assert_eq!(snapshot.processes, [before], "the child wrote into its parent's page");
    assert_eq!(snapshot.stale_removed, 1, "the page of child {child} is stale");
}

#[test]
fn a_connection_that_the_parent_closes_at_once_stays_open_in_the_child() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let mut handed_on = std::mem::ManuallyDrop::new(stats.open_connection(&connection(DataPath::Lane, 5)));
    in_child(|| {
        // Closes a connection in the test's page, like a parent that closes it before its child has run.
        in_child(|| {
            // SAFETY: this process exits without using the value again.
            unsafe { std::mem::ManuallyDrop::drop(&mut handed_on) };
            only_process(rack.path()).connections.is_empty()
        });
        stats.forked_child();
        handed_on.add_sent(3);
        let own = stats.open_connection(&connection(DataPath::Lane, 6));
        own.add_sent(30);
        let mine = process_of(rack.path(), std::process::id());
        let seen: Vec<_> = mine.connections.iter().map(|open| (open.fd, open.inherited, open.bytes_sent)).collect();
        assert_eq!(seen, [(5, true, 3), (6, false, 30)]);
        assert_eq!((mine.lane.connections_open, mine.lane.bytes_sent), (2, 33));
        // SAFETY: this process drops the value only here.
        unsafe { std::mem::ManuallyDrop::drop(&mut handed_on) };
        let left = process_of(rack.path(), std::process::id());
        (left.lane.connections_open, left.lane.bytes_sent) == (1, 33)
    });
}

#[test]
fn a_child_of_a_child_closes_what_it_inherited() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let slots: Vec<ConnectionSlot> =
        (0..200).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
    in_child(|| {
        stats.forked_child();
        in_child(|| {
            stats.forked_child();
            slots.iter().for_each(|slot| slot.add_sent(1));
            for slot in slots {
                slot.close();
            }
            let again: Vec<ConnectionSlot> =
                (0..300).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
            let mine = process_of(rack.path(), std::process::id());
            let mut fds: Vec<i32> = mine.connections.iter().map(|connection| connection.fd).collect();
            fds.sort_unstable();
            drop(again);
            mine.lane.bytes_sent == 200 && fds == (0..300).collect::<Vec<_>>()
        }) > 0
    });
}

#[test]
fn a_child_without_a_usable_rack_counts_in_private_memory() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let slot = stats.open_connection(&connection(DataPath::Lane, 5));
    let page = rack.path().join(format!("v1/stat/{}", std::process::id()));
    let before = fs::read(&page).unwrap();
    in_child(|| {
        fs::set_permissions(rack.path().join("v1/stat"), fs::Permissions::from_mode(0o777)).unwrap();
        stats.forked_child();
        slot.add_sent(1);
        let _more: Vec<ConnectionSlot> =
            (0..100).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
        !stats.is_published()
    });
    assert!(fs::read(&page).unwrap() == before, "the child wrote into its parent's page");
}

#[test]
fn a_child_without_memory_for_a_page_does_not_write_into_its_parents_page() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    // Only the child closes it.
    let slot = std::mem::ManuallyDrop::new(stats.open_connection(&connection(DataPath::Lane, 5)));
    slot.add_sent(1);
    let before = only_process(rack.path());
    in_child(|| {
        // The current size, without room for another page.
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let limit = libc::rlimit { rlim_cur: pages * 4096, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: `limit` is a local variable; the call only changes the child's own limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        stats.forked_child();
        slot.add_sent(1000);
        stats.count_fallback(FallbackReason::NoAnswer);
        let unlisted = stats.open_connection(&connection(DataPath::Lane, 6));
        unlisted.add_sent(7);
        unlisted.close();
        std::mem::ManuallyDrop::into_inner(slot).close();
        let again = stats.open_connection(&connection(DataPath::Lane, 7));
        again.add_received(1);
        !stats.is_published()
    });
    assert_eq!(only_process(rack.path()), before, "the child wrote into its parent's page");
}

#[test]
fn slots_closed_before_a_fork_are_free_in_the_child() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let fill = || -> Vec<ConnectionSlot> {
        (0..SLOTS).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd as i32))).collect()
    };
    let mut slots = fill();
    let kept = slots.split_off(SLOTS - 100);
    drop(slots);
    in_child(|| {
        stats.forked_child();
        drop(kept);
        let _again = fill();
        let mine = process_of(rack.path(), std::process::id());
        mine.connections_unlisted == 0 && mine.connections.len() == SLOTS
    });
}

#[test]
fn a_file_that_took_the_pages_name_is_left_alone() {
    let rack = rack();
    let stats = stats_in(rack.path());
    let page = rack.path().join(format!("v1/stat/{}", std::process::id()));
    fs::remove_file(&page).unwrap();
    fs::write(&page, "another file").unwrap();
    stats.remove();
    assert_eq!(fs::read_to_string(&page).unwrap(), "another file");
}

#[test]
fn a_file_size_limit_does_not_kill_the_program() {
    let _alone = alone();
    let rack = rack();
    in_child(|| {
        let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
        // SAFETY: `limit` is a local variable; the call only changes the child's own limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        let stats = stats_in(rack.path());
        stats.open_connection(&connection(DataPath::Lane, 1)).add_sent(1);
        !stats.is_published()
    });
}

/// Mounts a tmpfs of `bytes` over `place`, visible to the calling process only. Returns false where the machine does
/// not allow it.
fn mount_small_tmpfs(place: &Path, bytes: usize) -> bool {
    let place = std::ffi::CString::new(place.to_str().unwrap()).unwrap();
    let options = std::ffi::CString::new(format!("size={bytes},mode=700")).unwrap();
    // SAFETY: system calls of a single-threaded child, with strings that outlive them.
    unsafe {
        let uid = libc::getuid();
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            if libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) != 0 {
                return false;
            }
            if fs::write("/proc/self/uid_map", format!("0 {uid} 1")).is_err() {
                return false;
            }
        }
        let private = libc::MS_REC | libc::MS_PRIVATE;
        libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()) == 0
            && libc::mount(c"tmpfs".as_ptr(), place.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()) == 0
    }
}

#[test]
fn a_full_file_system_hides_the_page_and_disturbs_nothing() {
    let _alone = alone();
    let rack = rack();
    in_child(|| {
        if !mount_small_tmpfs(rack.path(), 4096) {
            eprintln!("skipped: this machine lets no test mount a tmpfs");
            return true;
        }
        let stats = stats_in(rack.path());
        let slots: Vec<ConnectionSlot> =
            (0..100).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
        slots.iter().for_each(|slot| slot.add_sent(1));
        let left: Vec<_> = fs::read_dir(rack.path().join("v1/stat")).unwrap().collect();
        !stats.is_published() && left.is_empty()
    });
}

#[test]
fn a_file_system_that_fills_up_costs_only_the_listing() {
    let _alone = alone();
    let rack = rack();
    in_child(|| {
        if !mount_small_tmpfs(rack.path(), 256 * 1024) {
            eprintln!("skipped: this machine lets no test mount a tmpfs");
            return true;
        }
        let stats = stats_in(rack.path());
        let mut filler = fs::File::create(rack.path().join("filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
        let slots: Vec<ConnectionSlot> =
            (0..100).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
        slots.iter().for_each(|slot| slot.add_sent(1));
        let full = only_process(rack.path());
        drop(filler);
        fs::remove_file(rack.path().join("filler")).unwrap();
        let more: Vec<ConnectionSlot> =
            (0..100).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
        let roomy = only_process(rack.path());
        drop(more);
        stats.is_published()
            && full.connections_unlisted > 0
            && full.lane.bytes_sent == 100
            && roomy.connections.len() == full.connections.len() + 100
    });
}

#[test]
fn unexpected_files_in_the_folder_are_reported_or_ignored() {
    let _alone = alone();
    let rack = rack();
    let stats = stats_in(rack.path());
    let stat = rack.path().join("v1/stat");
    let held: Vec<fs::File> = [("901", &b"short"[..]), ("902", &[0xff; 5000][..]), ("903", &[][..])]
        .into_iter()
        .map(|(name, contents)| {
            fs::write(stat.join(name), contents).unwrap();
            let file = fs::File::open(stat.join(name)).unwrap();
            // SAFETY: `file` keeps the descriptor open.
            assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
            file
        })
        .collect();
    fs::write(stat.join("notes.txt"), "ignored").unwrap();
    fs::create_dir(stat.join("904")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", stat.join("905")).unwrap();
    let fifo = std::ffi::CString::new(stat.join("906").to_str().unwrap()).unwrap();
    // SAFETY: `fifo` is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);

    let snapshot = read_rack(rack.path()).unwrap();
    assert_eq!(snapshot.processes.len(), 1);
    let mut names: Vec<&str> = snapshot.unreadable.iter().map(|page| page.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["901", "902", "903", "904", "905", "906"]);
    assert_eq!(snapshot.stale_removed, 0);
    drop(held);
    assert_eq!(read_rack(rack.path()).unwrap().stale_removed, 3);
    assert!(stats.is_published());
}

#[test]
fn a_missing_rack_is_an_empty_one() {
    assert_eq!(read_rack(Path::new("/nonexistent/rack")).unwrap(), Snapshot::default());
}

#[test]
fn the_name_of_this_program_is_known() {
    let mut buffer = [0; 64];
    let name = stats_page::own_program_name(&mut buffer);
    assert_eq!(name, fs::read("/proc/self/comm").unwrap().trim_ascii_end());
}

fn some_page() -> Vec<u8> {
    let rack = rack();
    let stats = stats_in(rack.path());
    let _slots: Vec<ConnectionSlot> = (0..3).map(|fd| stats.open_connection(&connection(DataPath::Lane, fd))).collect();
    let page = fs::read(rack.path().join(format!("v1/stat/{}", std::process::id())));
    // Pages of other tests with the same pid are in other rack directories, so that this page has no suffix.
    let page = page.unwrap();
    page[..header_bytes(&page) + 16 * 256].to_vec()
}

/// Returns the length of a page's header, which the header has.
fn header_bytes(page: &[u8]) -> usize {
    u32::from_ne_bytes(page[12..16].try_into().unwrap()) as usize
}

#[test]
fn invalid_pages_are_refused_with_their_error() {
    let _alone = alone();
    let page = some_page();
    assert_eq!(decode(&page).unwrap().connections.len(), 3);
    assert_eq!(decode(&page[..100]), Err(PageError::Short { bytes: 100 }));
    assert_eq!(decode(&page[..header_bytes(&page)]).unwrap().connections.len(), 0);
    let with = |at: usize, value: u8| {
        let mut changed = page.clone();
        changed[at] = value;
        decode(&changed)
    };
    assert_eq!(with(0, 0), Err(PageError::NotAPage));
    assert_eq!(with(8, 99), Err(PageError::Version { found: 99 }));
    assert_eq!(with(17, 99), Err(PageError::Layout));
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_harm(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..400),
        length in any::<prop::sample::Index>(),
    ) {
        let mut page = some_page();
        for (at, value) in edits {
            let at = at.index(page.len());
            page[at] = value;
        }
        let length = length.index(page.len() + 1);
        if let Ok(process) = decode(&page[..length]) {
            prop_assert!(process.closed.len() <= CLOSED_RECORDS);
            prop_assert!(process.connections.len() <= 16);
            prop_assert!(!process.program.chars().any(char::is_control));
        }
    }

    #[test]
    fn totals_follow_any_history(
        operations in prop::collection::vec((0u8..4, any::<prop::sample::Index>(), 0u64..1 << 40), 1..200),
    ) {
        let rack = rack();
        let stats = stats_in(rack.path());
        let mut open: Vec<(ConnectionSlot, u64, u64)> = Vec::new();
        let mut sent = [0u64; 2];
        let mut opened = [0u64; 2];
        for (operation, which, bytes) in operations {
            if operation == 0 || open.is_empty() {
                let path = if bytes % 2 == 0 { DataPath::Lane } else { DataPath::Kernel };
                opened[path as usize] += 1;
                open.push((stats.open_connection(&connection(path, opened.iter().sum::<u64>() as i32)), 0, 0));
                continue;
            }
            let at = which.index(open.len());
            match operation {
                1 => open.swap_remove(at).0.close(),
                2 => {
                    open[at].0.add_sent(bytes);
                    open[at].1 += bytes;
                    sent[open[at].0.path() as usize] += bytes;
                }
                _ => {
                    open[at].0.add_received(bytes);
                    open[at].2 += bytes;
                }
            }
        }
        let process = only_process(rack.path());
        prop_assert_eq!([process.lane.bytes_sent, process.kernel.bytes_sent], sent);
        prop_assert_eq!([process.lane.connections_total, process.kernel.connections_total], opened);
        let mut found: Vec<_> = process.connections.iter().map(|line| (line.bytes_sent, line.bytes_received)).collect();
        let mut expected: Vec<_> = open.iter().map(|(_, sent, received)| (*sent, *received)).collect();
        found.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(found, expected);
        // SAFETY: the slots are forgotten below, and nothing else uses the page.
        unsafe { stats.vanish() };
        open.into_iter().for_each(|(slot, ..)| std::mem::forget(slot));
    }
}
