//! Tests of descriptors that are closed, duplicated, inherited or replaced while they are registered.

use super::*;

#[test]
fn a_closed_descriptor_leaves_the_set() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    send(peer.0, b"x").unwrap();
    drop(own);
    assert_eq!(epoll.now(), []);
    assert_eq!(epoll.set().with(|ready_list| ready_list.count()), 0);
}

#[test]
fn a_plain_socket_that_becomes_a_connection_stays_in_the_set() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    // As if `connect` had replaced a registered socket by the lifeline.
    epoll.set().with(|ready_list| ready_list.insert(Registration::new(own.fd(), Target::Stream, IN | OUT, 5)));
    REGISTERED.fetch_add(1, Ordering::Relaxed);
    adopt(own.fd(), own.0.0);
    assert_eq!(epoll.now(), [(OUT, 5)]);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.now(), [(IN | OUT, 5)]);
}

#[test]
fn closing_the_set_releases_its_connections() {
    let (own, peer) = own_and_peer();
    for _ in 0..3 {
        let epoll = Epoll::new();
        epoll.add(own.fd(), IN, 1);
        epoll.let_all_sleep();
        let second = rustix::io::dup(unsafe_borrow(epoll.0)).unwrap();
        epoll.set().add_descriptor(second.as_raw_fd());
        entry::set(second.as_raw_fd(), Entry::EpollSet(epoll.set()));
        send(peer.0, b"x").unwrap();
        let same = std::mem::ManuallyDrop::new(Epoll(second.as_raw_fd()));
        assert_eq!(same.now(), [(IN, 1)]);
        assert_eq!(read_all(own.0.0), 1);
        epoll.let_all_sleep();
        epoll.set().remove_descriptor(second.as_raw_fd());
        entry::set(second.as_raw_fd(), Entry::None);
    }
    assert!(own.0.0.consume_ring());
}

fn unsafe_borrow(fd: RawFd) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: the test keeps the descriptor open.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

/// Creates a second descriptor of a connection.
fn duplicate_of(own: &ProgramEndpoint) -> RawFd {
    // SAFETY: `own` keeps the descriptor open during the call.
    let copy = rustix::io::dup(unsafe { std::os::fd::BorrowedFd::borrow_raw(own.fd()) }).unwrap();
    let copy = std::os::fd::IntoRawFd::into_raw_fd(copy);
    own.0.0.add_descriptor(copy);
    entry::set(copy, Entry::Connection(own.0.0));
    copy
}

/// Does what the program's `close` does.
fn close_one(fd: RawFd, connection: &'static Connection) {
    entry::set(fd, Entry::None);
    forget(fd, connection);
    connection.remove_descriptor(fd);
    // SAFETY: the test opened the descriptor and does not use it again.
    unsafe { rustix::io::close(fd) };
}

#[test]
fn a_registration_outlives_its_descriptor_while_another_names_the_connection() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    let copy = duplicate_of(&own);
    epoll.add(copy, IN, 1);
    epoll.let_all_sleep();
    close_one(copy, own.0.0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        assert!(!epoll.set().with(|ready_list| ready_list.has_unwakeable));
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
    });
    // The remaining descriptor gets a registration of its own: the orphan cannot be woken for, but is still found.
    epoll.add(own.fd(), IN, 2);
    assert_eq!(epoll.now(), [(IN, 1), (IN, 2)]);
    assert_eq!(read_all(own.0.0), 1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        send(peer.0, b"y").unwrap();
        assert!(!waiter.join().unwrap().is_empty());
    });
    // A millisecond's poll may have found the orphan before the wakeup for the other registration arrived: as long as
    // there is something to report, the kernel is only polled from time to time.
    let began = std::time::Instant::now();
    while epoll.now() != [(IN, 1), (IN, 2)] {
        assert!(began.elapsed().as_nanos() < u128::from(HANG_NS), "{:?}", epoll.now());
    }
    let set = epoll.set();
    drop(own);
    assert_eq!(set.with(|ready_list| ready_list.count()), 0);
}

#[test]
fn a_number_that_returns_to_its_connection_finds_its_registration() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    let copy = duplicate_of(&own);
    epoll.add(copy, IN, 1);
    close_one(copy, own.0.0);
    assert_eq!(epoll.control(EPOLL_CTL_MOD, own.fd(), IN, 2), Err(Errno::NOENT));
    // Another thread may get the number in between.
    let again = duplicate_of(&own);
    if again == copy {
        assert_eq!(epoll.control(EPOLL_CTL_ADD, again, IN, 2), Err(Errno::EXIST));
        epoll.control(EPOLL_CTL_MOD, again, IN, 3).unwrap();
        send(peer.0, b"x").unwrap();
        assert_eq!(epoll.wait(), [(IN, 3)]);
        epoll.control(EPOLL_CTL_DEL, again, 0, 0).unwrap();
    }
    close_one(again, own.0.0);
}

#[test]
fn a_wait_that_continues_with_lanes_keeps_its_remaining_time() {
    let call = |timeout_ns| Call { epfd: -1, events: std::ptr::null_mut(), max: 1, timeout_ns, mask: std::ptr::null() };
    assert_eq!(call(Some(5_000_000)).after(1_900_000).timeout_ns, Some(4_000_000), "in whole milliseconds, as asked");
    assert_eq!(call(Some(5_000_001)).after(1_900_000).timeout_ns, Some(3_100_001));
    assert_eq!(call(Some(5_000_000)).after(9_000_000).timeout_ns, Some(0));
    assert_eq!(call(None).after(9_000_000).timeout_ns, None);
}

#[test]
fn a_process_that_inherits_a_set_registers_under_other_tokens() {
    let epoll = Epoll::new();
    let (kept, _peer) = own_and_peer();
    epoll.add(kept.fd(), IN, 1);
    let (first, _first_peer) = own_and_peer();
    let (second, _second_peer) = own_and_peer();
    let tokens = || {
        [&first, &second].map(|own| {
            epoll.add(own.fd(), IN, 2);
            epoll.set().with(|ready_list| ready_list.token(ready_list.find(own.fd()).unwrap()))
        })
    };
    let leave = || [&first, &second].map(|own| epoll.control(EPOLL_CTL_DEL, own.fd(), 0, 0).unwrap());
    epoll.add(first.fd(), IN, 2);
    epoll.control(EPOLL_CTL_DEL, first.fd(), 0, 0).unwrap();
    let before = tokens();
    leave();
    epoll.set().with(ReadyList::after_fork_in_child);
    let after = tokens();
    assert!(before.iter().all(|token| !after.contains(token)), "{before:x?} {after:x?}");
    leave();
}

/// The thread inside the set may wait for what the handler's thread holds.
#[test]
fn a_close_by_a_handler_whose_thread_holds_a_socket_is_deferred_to_the_thread_inside_the_set() {
    let (own, _peer) = own_and_peer();
    let epoll = Epoll::new();
    epoll.add(own.fd(), IN, 1);
    let Entry::EpollSet(set) = entry::get(epoll.0) else { panic!("no set") };
    let ((inside, is_inside), (go_on, goes_on)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let waiting = std::thread::spawn(move || {
        set.with(|_| {
            inside.send(()).unwrap();
            goes_on.recv_timeout(Duration::from_nanos(HANG_NS)).unwrap();
        });
    });
    is_inside.recv().unwrap();
    let registered = entry::get(own.fd());
    listener::inside_a_listener(|| {
        entry::set(own.fd(), Entry::None);
        forget(own.fd(), own.0.0);
    });
    go_on.send(()).unwrap();
    waiting.join().unwrap();
    entry::set(own.fd(), registered);
    assert_eq!(epoll.control(EPOLL_CTL_MOD, own.fd(), IN, 1), Err(Errno::NOENT));
}
