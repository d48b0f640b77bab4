//! The event loop of a thread that owns engines.
//!
//! The thread polls memory and the kernel, in this order:
//!
//! 1. **Engines** with a link, one after another: frames of the peer, then input of the programs, then frames to the
//!    peer. The events of an engine are handled right after it, because they come only with frames.
//! 2. **Delayed programs**, whose link may have greeted meanwhile; then engines that continue over TCP.
//! 3. **The kernel** (epoll): every [`POLLS_PER_KERNEL_POLL`] polls with progress, and as often as the spin policy asks
//!    while there is no progress. Commands come last, because a link that goes down takes connections with it to which
//!    other events of the same batch belong.
//!
//! Without progress the thread spins for a while ([`super::idle`]) and yields to other threads. It blocks when spinning
//! is not worthwhile any more: the engines ask programs and peers to ring, poll once more, and the thread blocks in the
//! kernel. Where a device has no doorbells, it blocks for short times that grow with the time without work, and polls
//! once after each.

use super::acceptor::Acceptor;
use super::coarse_clock::CoarseClock;
use super::command::{Command, CommandReceiver};
use super::engine_table::EngineTable;
use super::epoll_set::{EVENTS_MAX, EpollSet, EpollToken, token_of};
use super::failover::FailoverEngines;
use super::idle::IdlePolicy;
use super::opening::Opening;
use super::shared::Shared;
use crate::engine::PollOutcome;
use control::proxy::LinkLossPolicy;
use fabric::device::Vector;
use rustix::event::epoll;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use socket::process::clock::{now_ns, ticks};
use std::sync::Arc;
use stream::connection::Relay;
use wait::{Action, Spin};

/// Polls with progress between two polls of the kernel.
const POLLS_PER_KERNEL_POLL: u32 = 64;
/// Time between calls that return memory.
const RECLAIM_INTERVAL_NS: u64 = 200_000_000;
/// Loads that a poll of an idle engine makes, which the spin policy counts.
const LOADS_PER_ENGINE: u32 = 4;

/// A thread's event loop and everything that the thread owns.
pub(super) struct EventLoop {
    epoll: EpollSet,
    commands: CommandReceiver,
    acceptor: Acceptor,
    opening: Opening,
    engines: EngineTable,
    clock: CoarseClock,
    idle: IdlePolicy,
    /// When memory was last returned.
    reclaimed_ns: u64,
    is_over: bool,
}

impl EventLoop {
    /// Creates the loop of the thread `index`, which runs the engines of these plans.
    pub(super) fn new(
        shared: Arc<Shared>,
        index: usize,
        plans: Vec<usize>,
        commands: CommandReceiver,
    ) -> Result<Self, Errno> {
        let epoll = EpollSet::new()?;
        let failover = FailoverEngines::new(shared.setup.own_slot, shared.failover_address(index));
        let vector = Vector(u8::try_from(index + 1).map_err(|_| Errno::INVAL)?);
        epoll.add(&commands, EpollToken::Commands, EventFlags::IN)?;
        if let Some(listener) = failover.listener() {
            epoll.add(listener, EpollToken::FailoverListener, EventFlags::IN)?;
        }
        Ok(Self {
            epoll,
            commands,
            acceptor: Acceptor::new(Arc::clone(&shared)),
            opening: Opening::new(Arc::clone(&shared)),
            engines: EngineTable::new(shared, plans, vector, failover),
            clock: CoarseClock::default(),
            idle: IdlePolicy::new(),
            reclaimed_ns: 0,
            is_over: false,
        })
    }

    /// Runs until the proxy stops.
    pub(super) fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        while !self.is_over {
            if self.poll_while_busy(&mut events) {
                self.idle.note_work();
            }
            // A thread that has blocked without finding work does not spin again.
            if !self.idle.is_idle() && self.spin(&mut events) {
                continue;
            }
            if !self.engines.prepare_sleep(&self.epoll) || self.block(&mut events) {
                self.idle.note_work();
            }
        }
        self.engines.clear(&self.epoll);
        self.acceptor.clear();
        self.opening.clear();
    }

    /// Polls as long as there is progress. Returns whether there was any.
    fn poll_while_busy(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        for count in 1_u32.. {
            if count.is_multiple_of(POLLS_PER_KERNEL_POLL) {
                self.poll_kernel(events);
                self.engines.check_peers(&self.epoll);
            }
            if !self.poll_engines(ticks()) || self.is_over {
                return count > 1;
            }
        }
        true
    }

    /// Polls for as long as the spin policy allows. Returns whether there was progress.
    fn spin(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        let mut spin = Spin::of_server();
        if spin.blocks_immediately() {
            // CPU-bound threads hold the core, and the scheduler prefers threads that were blocked.
            self.engines.park_all();
            return false;
        }
        spin.note_poll();
        loop {
            let loads = (LOADS_PER_ENGINE * self.engines.count() as u32).max(1);
            match spin.iterate_by(loads) {
                Action::Poll => {}
                Action::PollKernel => {
                    if self.poll_kernel(events) {
                        return true;
                    }
                }
                Action::Block => return false,
            }
            let ticks = spin.note_poll();
            if self.poll_engines(ticks) {
                return true;
            }
        }
    }

    /// Blocks until the kernel has events, or for the time that the idle policy allows. Returns whether there were any.
    fn block(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        let limit = self.idle.block_limit(self.engines.link_state());
        self.epoll.block(&limit);
        let had_events = self.poll_kernel(events);
        self.engines.end_sleep();
        self.engines.check_peers(&self.epoll);
        self.reclaim();
        had_events
    }

    /// Returns memory that idle connections do not use, a few times a second.
    fn reclaim(&mut self) {
        if Relay::is_any_grown() && now_ns().saturating_sub(self.reclaimed_ns) >= RECLAIM_INTERVAL_NS {
            self.reclaimed_ns = now_ns();
            self.engines.reclaim();
        }
    }

    /// Polls all engines once, and yields if they ask for it. `ticks` is the processor's counter. Returns whether there
    /// was progress.
    fn poll_engines(&mut self, ticks: u64) -> bool {
        let now_ns = self.clock.now_ns(ticks);
        let is_oversubscribed = wait::is_core_shared();
        let mut total = PollOutcome::default();
        for index in self.engines.indexes() {
            let outcome = self.engines.poll_link(index, now_ns, is_oversubscribed, &self.epoll);
            total.should_yield |= outcome.should_yield;
            if outcome.progressed {
                total.progressed = true;
                self.opening.handle_events(&mut self.engines, index, &self.epoll);
            }
            self.engines.resume_awaiting(index, &self.epoll);
        }
        self.opening.open_delayed(&mut self.engines, &self.epoll);
        let (indexes, progressed) = self.engines.poll_failover(now_ns);
        total.progressed |= progressed;
        for index in indexes {
            total.progressed |= self.opening.handle_events(&mut self.engines, index, &self.epoll);
        }
        if total.should_yield {
            self.idle.yield_if_useful();
        }
        total.progressed
    }

    /// Handles the kernel's pending events, without blocking. Returns whether there were any.
    fn poll_kernel(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        self.epoll.fetch(events);
        let mut has_commands = false;
        for event in events.iter() {
            match token_of(event) {
                EpollToken::Commands => has_commands = true,
                EpollToken::Doorbell => self.engines.clear_doorbell(),
                EpollToken::Listener(number) => {
                    for program in self.acceptor.accept(number) {
                        self.opening.open(&mut self.engines, program, &self.epoll);
                    }
                }
                EpollToken::Endpoint { engine, key } => self.engines.endpoint_ready(engine, key),
                EpollToken::FailoverListener => self.engines.failover().accept(&self.epoll),
                EpollToken::FailoverHandshake(number) => self.engines.receive_failover_handshake(number, &self.epoll),
                EpollToken::FailoverSocket(index) => self.engines.failover().socket_ready(index as usize),
            }
        }
        if has_commands {
            self.execute_commands();
        }
        !events.is_empty()
    }

    fn execute_commands(&mut self) {
        self.commands.clear_wakeup();
        while let Some(command) = self.commands.next() {
            self.execute(command);
        }
    }

    fn execute(&mut self, command: Command) {
        let epoll = &self.epoll;
        match command {
            Command::Device(device) => self.engines.use_device(device, epoll),
            Command::LinkUp { peer, epoch } => self.engines.link_up(peer, epoch, epoll),
            Command::LinkDown { peer, policy, done } => {
                self.engines.link_down(peer, policy, epoll);
                let _ = done.send(());
            }
            Command::PeerGone { peer } => self.engines.link_down(peer, LinkLossPolicy::Reset, epoll),
            Command::AwaitLink(connections) => self.engines.await_link(connections),
            Command::ReleaseWindows { done } => {
                self.engines.release_windows(epoll);
                let _ = done.send(());
            }
            Command::ReleaseAndStop { done } => {
                let _ = done.send(self.engines.release_retained(epoll));
                self.stop();
            }
            Command::AddListener { peer, address, listener } => {
                self.acceptor.add_listener(peer, address, listener, epoll);
            }
            Command::RemoveListeners { address, done } => {
                self.acceptor.remove_listeners(address, epoll);
                let _ = done.send(());
            }
            Command::Report { done } => _ = done.send(self.engines.report()),
            Command::Stop => self.stop(),
        }
    }

    fn stop(&mut self) {
        self.is_over = true;
        self.engines.stop();
    }
}
