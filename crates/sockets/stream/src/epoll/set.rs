//! A set of the program that has members.

use super::members::{Member, Members};
use super::nested;
use super::registry::{self, Registration};
use crate::connection::{Connection, Left};
use crate::guarded::{Access, Guarded};
use crate::table::{self, Entry};
use libc::epoll_event;
use rustix::io::Errno;
use socket::descriptor::hidden::HiddenFd;
use socket::process::pool::Pool;
use socket::process::system::{count_or_error, raw_syscall};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering, fence};

/// The upper half of the data of a member's registration in the kernel; the lower half is the member's index. No
/// pointer of a program and no small number has it.
const MEMBER_TAG: u64 = 0xc1a7_5e7d << 32;
/// The events of a bell in the inner instance.
const BELL_EVENTS: u32 = (libc::EPOLLIN | libc::EPOLLET) as u32;
/// The data of the inner instance.
const INNER_DATA: u64 = 0xc1a7_5e7e << 32;
/// The data of the eventfd in the inner instance, by which a thread wakes sleepers.
const KICK_DATA: u64 = u64::MAX;

/// A set of the program that has, or had, connections with lanes as members.
#[derive(Default)]
pub struct EpollSet {
    pub(super) state: Guarded<State>,
    /// The program's descriptor.
    pub(super) epfd: AtomicI32,
    /// Threads that sleep in the kernel on this set.
    pub(super) sleepers: AtomicU32,
    pub(super) spin_history: ::wait::AdaptiveSpin,
    /// The set has had a member; until then, waits are the kernel's.
    has_had_members: AtomicBool,
}

/// What the lock of a set protects.
#[derive(Default)]
pub(super) struct State {
    /// The program's descriptors of the set.
    descriptors: Vec<RawFd>,
    pub members: Members,
    inner: Option<HiddenFd>,
    kick: Option<HiddenFd>,
    /// The lanes have filled the array of the last wait, so that the kernel comes first in the next one.
    pub kernel_first: bool,
    /// When the kernel was last asked, by the processor's clock.
    pub kernel_asked_ticks: u64,
}

/// What an event of the kernel is about.
pub(super) enum Source {
    /// A descriptor that the library does not serve.
    Program,
    /// A member, by its index.
    Member(u32),
    /// The inner instance.
    Inner,
}

static POOL: Pool<EpollSet> = Pool::new();

/// Calls `visit` with every set that has, or had, members. No lock is held then.
pub(super) fn for_each(visit: impl FnMut(&'static EpollSet)) {
    POOL.for_each(visit);
}

/// Returns the set of a descriptor, which gets members from now on; `None` if it is no epoll instance, or there is no
/// descriptor for an inner one.
pub(super) fn of(epfd: RawFd) -> Option<&'static EpollSet> {
    match table::get(epfd) {
        Entry::Set(set) => return Some(set),
        Entry::None => {}
        Entry::Young(_) | Entry::Connection(_) => return None,
    }
    if registry::is_split(epfd) {
        return None;
    }
    let set = POOL.take();
    set.has_had_members.store(false, Ordering::Relaxed);
    set.epfd.store(epfd, Ordering::Relaxed);
    let is_made = set.lock().is_some_and(|mut state| {
        *state = State { descriptors: vec![epfd], ..State::default() };
        state.ensure_inner(epfd).is_ok()
    });
    if is_made && table::insert(epfd, Entry::Set(set)) {
        return Some(set);
    }
    if let Some(mut state) = set.lock() {
        *state = State::default();
    }
    POOL.release(set);
    // Another thread may have made the set meanwhile.
    if let Entry::Set(set) = table::get(epfd) { Some(set) } else { None }
}

/// Returns the number by which the set of a descriptor is known.
pub(super) fn known_number(epfd: RawFd) -> RawFd {
    if let Entry::Set(set) = table::get(epfd) { set.epfd() } else { epfd }
}

/// Returns the set of a descriptor if it has, or had, members.
pub(super) fn with_members(epfd: RawFd) -> Option<&'static EpollSet> {
    match table::get(epfd) {
        Entry::Set(set) if set.has_had_members.load(Ordering::Acquire) => Some(set),
        _ => None,
    }
}

/// Notes that `new` is a duplicate of `old`, if that is a set without members: both have the same members later.
pub(super) fn note_duplicate(old: RawFd, new: RawFd) {
    if !registry::is_set(old) {
        return;
    }
    if let Some(set) = of(old) {
        set.add_descriptor(new);
        table::set(new, Entry::Set(set));
    } else {
        registry::split(old);
        registry::split(new);
    }
}

/// Performs `epoll_ctl(2)`.
pub(super) fn control_in_kernel(epfd: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Errno> {
    let mut event = epoll_event { events, u64: data };
    let arguments = [epfd as usize, operation as usize, fd as usize, (&raw mut event).expose_provenance()];
    // SAFETY: the event is a local.
    count_or_error(unsafe { raw_syscall(libc::SYS_epoll_ctl, arguments) }).map(|_| ())
}

fn hidden(fd: isize) -> Result<HiddenFd, Errno> {
    let number = count_or_error(fd)?;
    // SAFETY: the system call has just created the descriptor, which nothing else owns.
    HiddenFd::hide_within_table(unsafe { OwnedFd::from_raw_fd(number as RawFd) })
}

impl State {
    /// Returns the inner instance, which the program's one holds.
    fn ensure_inner(&mut self, epfd: RawFd) -> Result<RawFd, Errno> {
        if let Some(inner) = &self.inner {
            return Ok(inner.raw());
        }
        // SAFETY: the call takes no pointers.
        let inner = hidden(unsafe { raw_syscall(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize]) })?;
        control_in_kernel(epfd, libc::EPOLL_CTL_ADD, inner.raw(), libc::EPOLLIN as u32, INNER_DATA)?;
        Ok(self.inner.insert(inner).raw())
    }

    /// Wakes the threads that sleep on the set.
    pub fn kick(&mut self, epfd: RawFd) {
        if self.kick.is_none() {
            let Ok(inner) = self.ensure_inner(epfd) else { return };
            // SAFETY: the call takes no pointers.
            let made =
                unsafe { raw_syscall(libc::SYS_eventfd2, [0, (libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) as usize]) };
            let Ok(kick) = hidden(made) else { return };
            let _ = control_in_kernel(inner, libc::EPOLL_CTL_ADD, kick.raw(), libc::EPOLLIN as u32, KICK_DATA);
            self.kick = Some(kick);
        }
        if let Some(kick) = self.kick.as_ref().and_then(|kick| kick.fd().ok()) {
            let _ = rustix::io::write(kick, &1_u64.to_ne_bytes());
        }
    }

    /// Reads the rings of the members from the inner instance, and polls those that were rung for from now on. Returns
    /// their connections, which other sets may hold too: call [`EpollSet::pass_on`] without the lock.
    pub fn take_rings(&mut self, epfd: RawFd) -> Vec<&'static Connection> {
        const EVENTS: usize = 64;
        let mut rung = Vec::new();
        let Some(inner) = self.inner.as_ref().map(HiddenFd::raw) else { return rung };
        let mut events = [const { epoll_event { events: 0, u64: 0 } }; EVENTS];
        loop {
            let arguments = [inner as usize, events.as_mut_ptr().expose_provenance(), EVENTS, 0, 0, 0];
            // SAFETY: the array is a local of this length; there is no mask.
            let Ok(count) = count_or_error(unsafe { raw_syscall(libc::SYS_epoll_pwait, arguments) }) else {
                return rung;
            };
            for event in &events[..count] {
                match event.u64 {
                    KICK_DATA => {
                        if let Some(kick) = self.kick.as_ref().and_then(|kick| kick.fd().ok()) {
                            let _ = rustix::io::read(kick, &mut [0_u8; 8]);
                        }
                    }
                    index => rung.extend(self.answer(epfd, index as u32)),
                }
            }
            if count < EVENTS {
                return rung;
            }
        }
    }

    fn answer(&mut self, epfd: RawFd, index: u32) -> Option<&'static Connection> {
        let member = self.members.get(index)?;
        let (connection, fd) = (member.connection, member.fd);
        connection.answer_ring(fd);
        if connection.has_several_descriptors() {
            self.members.of_connection(connection).into_iter().for_each(|index| self.poll_member(epfd, index));
        } else {
            self.poll_member(epfd, index);
        }
        connection.has_several_watchers().then_some(connection)
    }

    /// Polls a member from now on, and has the kernel report what its lanes do not report any more: the peer may have
    /// frozen one.
    fn poll_member(&mut self, epfd: RawFd, index: u32) {
        self.members.make_hot(index);
        if self.members.get(index).is_some_and(|member| !member.is_removed()) {
            self.update_kernel(epfd, index);
        }
    }

    /// Makes the kernel report events of a member with `EPOLLONESHOT` again: it has reported none for the program.
    pub fn rearm(&mut self, epfd: RawFd, index: u32) {
        if let Some(member) = self.members.get(index) {
            member.in_kernel = 0;
        }
        self.update_kernel(epfd, index);
    }

    /// Puts into the kernel's registration of a member the events that its path requires. A member of which the kernel
    /// does not report room any more is polled from now on: it may have been parked while its sends used TCP, and then
    /// its peer does not know that somebody waits for room in the lane.
    pub fn update_kernel(&mut self, epfd: RawFd, index: u32) {
        let Some(member) = self.members.get(index) else { return };
        let wanted = member.kernel_events();
        if wanted == member.in_kernel || member.is_off() {
            return;
        }
        let loses_room = member.in_kernel & !wanted != 0;
        member.in_kernel = wanted;
        let fd = member.fd;
        let _ = control_in_kernel(epfd, libc::EPOLL_CTL_MOD, fd, wanted, MEMBER_TAG | u64::from(index));
        if loses_room {
            self.members.make_hot(index);
        }
    }
}

impl EpollSet {
    pub(super) fn epfd(&self) -> RawFd {
        self.epfd.load(Ordering::Relaxed)
    }

    pub(super) fn lock(&self) -> Option<Access<'_, State>> {
        self.state.lock()
    }

    /// Returns what an event of the kernel is about.
    pub(super) fn source(data: u64) -> Source {
        match data & (u64::MAX << 32) {
            MEMBER_TAG => Source::Member(data as u32),
            INNER_DATA if data == INNER_DATA => Source::Inner,
            _ => Source::Program,
        }
    }

    /// Makes a connection a member, in place of the program's registration of its descriptor.
    pub(super) fn adopt_member(&'static self, connection: &'static Connection, fd: RawFd, registration: Registration) {
        let Some(mut state) = self.lock() else { return };
        // Another thread may have changed or ended the registration since it was read. One that ends it from now on
        // removes the member.
        fence(Ordering::SeqCst);
        let mut now = registry::of(fd).into_iter();
        let Some(registration) = now.find(|it| it.epfd == registration.epfd) else { return };
        if let Some(index) = state.members.find(fd) {
            let is_watched = self.watch_new_bell(&mut state, connection, index);
            drop(state);
            if !is_watched {
                connection.leave_lanes(fd);
            }
            return;
        }
        let Some(index) = self.insert_member(&mut state, connection, fd, registration) else {
            return connection.leave_lanes(fd);
        };
        if state.members.get(index).is_some_and(|member| member.is_one_shot()) {
            // Only the kernel knows whether its event was reported. The program will say how to go on.
            state.members.await_change(index);
            connection.forbid_moves();
        } else if self.register_member(&mut state, libc::EPOLL_CTL_MOD, index).is_err() {
            registry::remove(fd, self.epfd());
        }
    }

    /// Registers a member anew as the program has asked: the kernel's registration may be the program's own.
    pub(super) fn register_again(&self, fd: RawFd, events: u32, data: u64) {
        let Some(mut state) = self.lock() else { return };
        if let Some(index) = state.members.find(fd)
            && let Some(member) = state.members.get(index)
        {
            member.change(events, data);
            // It fails if the registration has ended meanwhile, and then the member ends too.
            let _ = self.register_member(&mut state, libc::EPOLL_CTL_MOD, index);
        }
    }

    /// Returns whether a descriptor is a member.
    pub(super) fn has_member(&self, fd: RawFd) -> bool {
        self.lock().is_some_and(|state| state.members.find(fd).is_some())
    }

    /// Makes a connection a member as the program has asked. `None` if it cannot be one: then the kernel does it.
    pub(super) fn add_member(
        &'static self,
        connection: &'static Connection,
        fd: RawFd,
        registration: Registration,
    ) -> Option<Result<(), Errno>> {
        let mut state = self.lock()?;
        if state.members.find(fd).is_some() {
            return None;
        }
        match self.insert_member(&mut state, connection, fd, registration) {
            Some(index) => Some(self.register_member(&mut state, libc::EPOLL_CTL_ADD, index)),
            None => {
                drop(state);
                connection.leave_lanes(fd);
                None
            }
        }
    }

    /// Has the inner instance watch the bell of a member that has met its other end anew. Returns whether it does.
    fn watch_new_bell(&self, state: &mut State, connection: &'static Connection, index: u32) -> bool {
        let Ok(inner) = state.ensure_inner(self.epfd()) else { return false };
        if nested::is_watched_by_edges(self.epfd()) {
            return false;
        }
        let added = control_in_kernel(inner, libc::EPOLL_CTL_ADD, connection.bell(), BELL_EVENTS, index.into());
        state.members.make_hot(index);
        self.hand_over(state);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }

    /// Inserts a member, whose bell the inner instance watches from now on. `None` if that is impossible.
    fn insert_member(
        &'static self,
        state: &mut State,
        connection: &'static Connection,
        fd: RawFd,
        registration: Registration,
    ) -> Option<u32> {
        // The kernel does not let such a registration be changed.
        let is_fixed = registration.events & libc::EPOLLEXCLUSIVE as u32 != 0;
        if is_fixed || nested::is_watched_by_edges(self.epfd()) {
            return None;
        }
        let inner = state.ensure_inner(self.epfd()).ok()?;
        // Before the inner instance can report anything to a wait.
        self.has_had_members.store(true, Ordering::Release);
        let index = state.members.insert(Member::new(connection, fd, registration));
        // A second descriptor of the connection may have put the bell there before.
        match control_in_kernel(inner, libc::EPOLL_CTL_ADD, connection.bell(), BELL_EVENTS, index.into()) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(_) => {
                state.members.remove(index);
                return None;
            }
        }
        connection.note_watcher(self);
        Some(index)
    }

    /// Makes or replaces the kernel's registration of a member by one that the library recognizes.
    fn register_member(&self, state: &mut State, operation: i32, index: u32) -> Result<(), Errno> {
        let Some(member) = state.members.get(index) else { return Err(Errno::NOENT) };
        member.in_kernel = member.kernel_events();
        let (fd, events) = (member.fd, member.in_kernel);
        if let Err(error) = control_in_kernel(self.epfd(), operation, fd, events, MEMBER_TAG | u64::from(index)) {
            self.remove_at(state, index);
            return Err(error);
        }
        state.members.make_hot(index);
        self.hand_over(state);
        Ok(())
    }

    /// Returns whether somebody waits for the set in the kernel, or may.
    pub(super) fn is_awaited(&self) -> bool {
        let epfd = self.epfd();
        self.sleepers.load(Ordering::SeqCst) > 0 || registry::has_waiters(epfd) || registry::is_any(epfd)
    }

    /// Makes sure that whoever waits for the set in the kernel is woken for the members that this thread stops polling:
    /// threads that sleep on it, or on a set that holds it.
    pub(super) fn hand_over(&self, state: &mut State) {
        if self.is_awaited() && state.members.park_all() {
            state.kick(self.epfd());
        }
    }

    /// Adds or changes a member's registration as the program has asked. `None` if the descriptor has no member: then
    /// the kernel does it.
    pub(super) fn change_member(&self, is_add: bool, fd: RawFd, events: u32, data: u64) -> Option<Result<(), Errno>> {
        let mut state = self.lock()?;
        let index = state.members.find(fd)?;
        let member = state.members.get(index)?;
        if member.is_removed() != is_add {
            return Some(Err(if is_add { Errno::EXIST } else { Errno::NOENT }));
        }
        let connection = member.connection;
        let before = (member.events, member.data);
        member.change(events, data);
        if !(member.is_lazy() && member.is_known_to_kernel()) {
            let in_kernel = member.kernel_events();
            let tagged = MEMBER_TAG | u64::from(index);
            if let Err(error) = control_in_kernel(self.epfd(), libc::EPOLL_CTL_MOD, fd, in_kernel, tagged) {
                member.change(before.0, before.1);
                return Some(Err(error));
            }
            member.in_kernel = in_kernel;
        }
        if state.members.end_await(index) {
            connection.allow_moves();
        }
        state.members.make_hot(index);
        self.hand_over(&mut state);
        Some(Ok(()))
    }

    /// Removes a member's registration as the program has asked. `None` if the descriptor has no member.
    pub(super) fn end_member(&self, fd: RawFd) -> Option<Result<(), Errno>> {
        let mut state = self.lock()?;
        let index = state.members.find(fd)?;
        let member = state.members.get(index)?;
        if member.is_removed() {
            return Some(Err(Errno::NOENT));
        }
        if member.is_lazy() {
            state.members.note_removed(index);
            return Some(Ok(()));
        }
        let result = control_in_kernel(self.epfd(), libc::EPOLL_CTL_DEL, fd, 0, 0);
        self.remove_at(&mut state, index);
        Some(result)
    }

    /// Removes the member of a descriptor, if there is one.
    pub(super) fn remove_member(&self, fd: RawFd) {
        let Some(mut state) = self.lock() else { return };
        if let Some(index) = state.members.find(fd) {
            self.remove_at(&mut state, index);
        }
    }

    fn remove_at(&self, state: &mut State, index: u32) {
        let awaits_change = state.members.end_await(index);
        let Some(member) = state.members.remove(index) else { return };
        if awaits_change {
            member.connection.allow_moves();
        }
        let (bell, inner) = (member.connection.bell(), state.inner.as_ref().map_or(-1, HiddenFd::raw));
        if bell < 0 || inner < 0 {
            return;
        }
        let _ = match state.members.of_connection(member.connection).first() {
            None => control_in_kernel(inner, libc::EPOLL_CTL_DEL, bell, 0, 0),
            Some(other) => control_in_kernel(inner, libc::EPOLL_CTL_MOD, bell, BELL_EVENTS, (*other).into()),
        };
    }

    /// Notes that a descriptor of a connection is about to be closed. With the last one, the kernel removes all
    /// registrations of the connection, unless calls keep the socket open; otherwise it keeps that of this number.
    pub fn forget_descriptor(&'static self, connection: &'static Connection, fd: RawFd, left: Left) {
        if left != Left::Descriptors {
            if let Some(mut state) = self.lock() {
                for index in state.members.of_connection(connection) {
                    match left {
                        Left::Calls => self.finish_removal(&mut state, index),
                        Left::Descriptors | Left::Nothing => self.remove_at(&mut state, index),
                    }
                }
            }
            return;
        }
        let Some(mut state) = self.lock() else { return };
        let Some(index) = state.members.find(fd) else { return };
        if state.members.get(index).is_some_and(|member| member.is_removed()) {
            return self.finish_removal(&mut state, index);
        }
        drop(state);
        // Nobody can change the registration of a closed number, as the moves of a lane require.
        connection.leave_lanes(fd);
        if let Some(mut state) = self.lock()
            && let Some(index) = state.members.find(fd)
        {
            state.update_kernel(self.epfd(), index);
            state.members.note_closed_number(index);
        }
    }

    /// Removes from the kernel a registration that the program has removed before.
    pub(super) fn finish_removal(&self, state: &mut State, index: u32) {
        let Some(fd) = state.members.get(index).map(|member| member.fd) else { return };
        let _ = control_in_kernel(self.epfd(), libc::EPOLL_CTL_DEL, fd, 0, 0);
        self.remove_at(state, index);
    }

    /// Passes on rings to the other sets that hold the connections.
    pub(super) fn pass_on(&'static self, rung: Vec<&'static Connection>) {
        for connection in rung {
            connection.for_each_watcher(|set| {
                if !std::ptr::eq(set, self) {
                    set.poll_again(connection);
                }
            });
        }
    }

    /// Polls a connection again, because somebody else has taken a ring from its bell, or because what is an event has
    /// changed.
    pub fn poll_again(&'static self, connection: &Connection) {
        let Some(mut state) = self.lock() else { return };
        let indices = state.members.of_connection(connection);
        indices.into_iter().for_each(|index| state.poll_member(self.epfd(), index));
        self.hand_over(&mut state);
    }

    /// Updates the kernel's registrations after a connection has changed its path.
    pub fn note_path(&'static self, connection: &Connection) {
        let Some(mut state) = self.lock() else { return };
        for index in state.members.of_connection(connection) {
            if state.members.get(index).is_some_and(|member| member.is_removed()) {
                self.finish_removal(&mut state, index);
            } else {
                state.update_kernel(self.epfd(), index);
            }
        }
        self.hand_over(&mut state);
    }

    /// Makes visible in the kernel what the lanes have, for a wait on the set's descriptor itself.
    pub(super) fn show_to_kernel(&'static self) {
        let Some(mut state) = self.lock() else { return };
        let rung = state.take_rings(self.epfd());
        if state.members.park_all() {
            state.kick(self.epfd());
        }
        drop(state);
        self.pass_on(rung);
    }

    /// Notes that `fd` is a duplicate of the set's descriptor.
    pub fn add_descriptor(&self, fd: RawFd) {
        if let Some(mut state) = self.lock() {
            state.descriptors.push(fd);
        }
    }

    /// Notes that a descriptor of the set is about to be closed.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        let next = self.lock().and_then(|mut state| {
            state.descriptors.retain(|known| *known != fd);
            state.descriptors.first().copied()
        });
        match next {
            Some(next) => {
                let known = self.epfd.swap(next, Ordering::Relaxed);
                if known != next {
                    registry::rename_set(known, next);
                }
            }
            None => self.close(),
        }
    }

    fn close(&'static self) {
        registry::remove_set(self.epfd());
        if let Some(mut state) = self.lock() {
            for index in state.members.indices() {
                if let Some(member) = state.members.remove(index) {
                    member.connection.forget_watcher(self);
                }
            }
            *state = State::default();
        }
        POOL.release(self);
    }
}

/// Disarms a member's registration in the kernel. Errors and hang-ups cannot be disarmed; edge-triggered, they are
/// reported once at most, and the member is [off](Member::is_off) then.
pub(super) fn disarm(epfd: RawFd, fd: RawFd, index: u32) {
    let data = MEMBER_TAG | u64::from(index);
    let spent = (libc::EPOLLONESHOT | libc::EPOLLET) as u32;
    let _ = control_in_kernel(epfd, libc::EPOLL_CTL_MOD, fd, spent, data);
}

/// Prepares for a fork: nothing changes a set until [`after_fork_in_parent`] or [`after_fork_in_child`].
pub fn before_fork() {
    POOL.lock_around_fork().iter().for_each(|set| set.state.lock_before_fork());
}

/// Continues after a fork.
pub fn after_fork_in_parent() {
    POOL.all_during_fork().iter().for_each(|set| set.state.unlock_after_fork());
    POOL.unlock_after_fork();
}

/// Continues in the child. The kernel's instance and what it holds are the parent's as well, and its connections are on
/// TCP by now: the child asks the kernel alone, and translates the events of what was a member.
pub fn after_fork_in_child() {
    for set in POOL.all_during_fork() {
        set.state.reset_after_fork();
        set.sleepers.store(0, Ordering::Relaxed);
    }
    POOL.unlock_after_fork();
}

/// Returns whether this thread holds the lock of a set; if so, signal handlers are deferred until it releases it.
pub fn defers_handlers() -> bool {
    POOL.any(|set| set.state.defers_handlers())
}
