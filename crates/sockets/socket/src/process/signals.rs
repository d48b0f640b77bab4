//! Signal handlers: which have run, because a wait that polls memory must end for a signal as one in the kernel does;
//! and their deferral while the library's state is inconsistent.
//!
//! The kernel enters the program's handlers through a *gate* of the preload library. The gate calls [`enter`], which
//! records the run and returns the address to continue at; without a signal this costs nothing. The program never sees
//! the gates: [`replace_handler`] reports the handlers that the program has set. Handlers of faults are entered by the
//! kernel directly, because a fault does not interrupt a wait. So are handlers that the program installs by a raw
//! system call; their runs are not recorded.
//!
//! A gate also *defers* a handler that would interrupt this thread in a critical section ([`without_handlers`]). This
//! costs nothing without a signal, whereas blocking and unblocking signals takes two system calls.

use crate::process::callback::Callback;
use crate::process::identity;
use crate::process::lock::Lock;
use crate::process::system;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};

/// Signals are numbered from 1 to this.
const SIGNAL_MAX: usize = 64;
/// What a thread does to itself, and whoever looks for the reason looks at the frames.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// What a handler is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerKind {
    /// The number of the signal.
    Plain = 0,
    /// With `SA_SIGINFO`: what the kernel knows of the signal, too.
    SigInfo = 1,
}

/// What a program wants to be called for a signal: the address, or one of the kernel's own small numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handler {
    /// How it is called.
    pub kind: HandlerKind,
    /// Where it is.
    pub address: usize,
}

type Handlers = [AtomicUsize; SIGNAL_MAX + 1];

/// The program's handlers, by kind and signal. They stay when the program takes them out: a signal may be on its way.
static HANDLERS: [Handlers; 2] = [const { [const { AtomicUsize::new(0) }; SIGNAL_MAX + 1] }; 2];
/// Where the kernel enters for a handler of each kind; 0 where the skin has no gates.
static GATES: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// One thread at a time changes the kernel's entry and what is behind it.
static CHANGES: Lock = Lock::new();

/// Runs of handlers in all threads.
static RUNS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What `RUNS` was at the last run in this thread.
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// The same, of a handler that ends waits.
    static LAST_INTERRUPTING: Cell<u64> = const { Cell::new(0) };
}

thread_local! {
    /// Changes, one inside the other, that this thread is in the middle of.
    static CRITICAL_DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The signals that were blocked when a handler was put off; all are since.
    static BLOCKED_BEFORE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A handler has been installed that the kernel forgets as it calls it: it cannot be put off.
static HAS_ONE_SHOT: AtomicBool = AtomicBool::new(false);

/// The program installs a handler with `SA_RESETHAND`.
pub fn note_one_shot() {
    HAS_ONE_SHOT.store(true, Ordering::Relaxed);
}

/// Runs `work` where no handler of the program's finds it half done.
#[inline]
pub fn without_handlers<R>(work: impl FnOnce() -> R) -> R {
    if load(&GATES[HandlerKind::Plain as usize]) == 0 || HAS_ONE_SHOT.load(Ordering::Relaxed) {
        return system::without_signals(work);
    }
    let begun = CRITICAL_DEPTH.get();
    CRITICAL_DEPTH.set(begun + 1);
    compiler_fence(Ordering::SeqCst);
    let result = work();
    compiler_fence(Ordering::SeqCst);
    CRITICAL_DEPTH.set(begun);
    compiler_fence(Ordering::SeqCst);
    if begun == 0
        && let Some(mask) = BLOCKED_BEFORE.take()
    {
        // What was put off is pending, and comes now.
        system::set_signal_mask(mask);
    }
    result
}

/// Has this thread let handlers in when it releases the locks of ours that it holds. `false`: it holds none.
static HOLDER_CHECK: Callback<fn() -> bool> = Callback::new();

/// Names the check for locks of ours: it has the calling thread let handlers in when it releases those that it holds,
/// and returns `false` where it holds none.
pub fn set_holder_check(defers: fn() -> bool) {
    HOLDER_CHECK.set(defers);
}

/// Has whoever holds a lock of ours in this thread let handlers in when it lets go. `false`: nobody does. A handler
/// that jumps out of the call that it has interrupted would leave the lock held for ever, and what it guards half done.
fn defers_for_holder() -> bool {
    HOLDER_CHECK.get().is_some_and(|defers| defers())
}

/// Whether handlers of this thread have been put off.
pub(crate) fn are_handlers_deferred() -> bool {
    BLOCKED_BEFORE.get().is_some()
}

/// Lets in what was put off for the holder of a lock, who has let go.
#[cold]
pub(crate) fn deliver_deferred_signals() {
    if CRITICAL_DEPTH.get() == 0
        && let Some(mask) = BLOCKED_BEFORE.take()
    {
        system::set_signal_mask(mask);
    }
}

/// Where a gate leads in the middle of a change: makes the signal pending again, with what the kernel has said of it,
/// and returns to the change with all signals blocked.
///
/// # Safety
/// The arguments are those that the kernel calls a handler with.
unsafe extern "C" fn defer(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    system::set_signal_mask(u64::MAX);
    // SAFETY: the kernel's, which has filled both; of the mask, its set is the beginning of libc's.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    // Where several handlers are put off at once, this runs last for the one that has interrupted the change itself.
    BLOCKED_BEFORE.set(Some(*mask));
    *mask = u64::MAX;
    // SAFETY: `info` is what the kernel has called this with.
    unsafe { system::send_to_this_thread(signal, info) };
}

/// A moment, to ask what has happened since.
#[derive(Debug, Clone, Copy)]
pub struct SignalCheckpoint(u64);

/// What has run in this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlersRun {
    /// No handler that anybody noted.
    None,
    /// Handlers with `SA_RESTART`.
    Restarting,
    /// A handler without.
    Interrupting,
}

impl SignalCheckpoint {
    /// Now.
    #[inline]
    pub fn now() -> Self {
        Self(RUNS.load(Ordering::Relaxed))
    }

    /// What has run in this thread since.
    #[inline]
    pub fn since(self) -> HandlersRun {
        if RUNS.load(Ordering::Relaxed) == self.0 { HandlersRun::None } else { self.since_in_this_thread() }
    }

    #[cold]
    fn since_in_this_thread(self) -> HandlersRun {
        match () {
            () if LAST_INTERRUPTING.get() > self.0 => HandlersRun::Interrupting,
            () if LAST.get() > self.0 => HandlersRun::Restarting,
            () => HandlersRun::None,
        }
    }

    /// Whether a call that the kernel has interrupted, as it does whatever the handler asks for, is to go on, because
    /// the handlers of the signals that came since ask for that.
    pub fn restarts(self) -> bool {
        match self.since() {
            HandlersRun::None => system::all_handlers_restart(),
            HandlersRun::Restarting => true,
            HandlersRun::Interrupting => false,
        }
    }
}

/// Names the gates: the kernel enters there instead of the program's handlers from now on.
pub fn set_gates(plain: usize, informed: usize) {
    GATES[HandlerKind::Plain as usize].store(plain, Ordering::Relaxed);
    GATES[HandlerKind::SigInfo as usize].store(informed, Ordering::Relaxed);
}

/// Has the mask of a call that waits in force while it is awake. Not where nobody notes which handlers run: there the
/// kernel alone can tell, and is asked under the mask now and then.
///
/// `began` becomes the moment from which on a handler interrupts the call: one that runs before the mask is in force
/// ran before the call, and one that the mask lets in, though it was kept out before, runs after.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn mask_while_polling(
    mask: *const libc::sigset_t,
    began: &mut SignalCheckpoint,
) -> Option<system::SignalMaskGuard> {
    if load(&GATES[HandlerKind::Plain as usize]) == 0 {
        return None;
    }
    // SAFETY: the caller's.
    unsafe { system::SignalMaskGuard::replace(mask, || *began = SignalCheckpoint::now()) }
}

/// A gate was entered for `signal`: notes it, and answers the address of the program's handler, or of what puts it off.
pub fn enter(signal: i32, kind: HandlerKind) -> usize {
    if CRITICAL_DEPTH.get() > 0 || defers_for_holder() {
        return defer as *const () as usize;
    }
    let run = RUNS.fetch_add(1, Ordering::Relaxed) + 1;
    LAST.set(run);
    if !system::handler_restarts(signal) {
        LAST_INTERRUPTING.set(run);
    }
    usize::try_from(signal).ok().and_then(|signal| HANDLERS[kind as usize].get(signal)).map_or(0, load)
}

fn load(word: &AtomicUsize) -> usize {
    word.load(Ordering::Acquire)
}

/// Changes what is called for `signal`. `in_kernel` gets the address to give to the kernel, answers whether it took it
/// and the handler it had before; that of the program behind it is returned.
pub fn replace_handler<R>(
    signal: i32,
    new: Option<Handler>,
    in_kernel: impl FnOnce(Option<usize>) -> (R, bool, Option<Handler>),
) -> (R, Option<Handler>) {
    system::without_signals(|| {
        let _guard = CHANGES.lock();
        let before = [HandlerKind::Plain, HandlerKind::SigInfo].map(|kind| program_handler(signal, kind));
        let gate = new.and_then(|new| install_behind_gate(signal, new));
        let (result, is_done, old) = in_kernel(gate.or(new.map(|new| new.address)));
        if let (Some(new), Some(_), false) = (new, gate, is_done) {
            HANDLERS[new.kind as usize][signal as usize].store(before[new.kind as usize], Ordering::Release);
        }
        let shown = old.map(|old| match before[old.kind as usize] {
            address if address != 0 && is_gate(old) => Handler { address, ..old },
            _ => old,
        });
        (result, shown)
    })
}

/// In the child of a fork: no other thread is here to end a change.
pub fn after_fork_in_child() {
    CHANGES.reset();
}

/// What an address is that stood alone, as `signal(2)` answers it.
pub fn handler_of_gate(address: usize) -> Option<Handler> {
    [HandlerKind::Plain, HandlerKind::SigInfo]
        .map(|kind| Handler { kind, address })
        .into_iter()
        .find(|&handler| is_gate(handler))
}

fn program_handler(signal: i32, kind: HandlerKind) -> usize {
    usize::try_from(signal).ok().and_then(|signal| HANDLERS[kind as usize].get(signal)).map_or(0, load)
}

fn is_gate(handler: Handler) -> bool {
    handler.address != 0 && handler.address == load(&GATES[handler.kind as usize])
}

/// `None`: the kernel is to enter the handler itself, if it is one.
fn install_behind_gate(signal: i32, new: Handler) -> Option<usize> {
    let is_handler = new.address != libc::SIG_DFL && new.address != libc::SIG_IGN && new.address != libc::SIG_ERR;
    let gate = load(&GATES[new.kind as usize]);
    let is_counted = is_handler && gate != 0 && !FAULTS.contains(&signal) && !identity::is_borrowed_memory();
    let place = HANDLERS[new.kind as usize].get(usize::try_from(signal).ok()?).filter(|_| is_counted)?;
    if !is_gate(new) {
        place.store(new.address, Ordering::Release);
    }
    Some(gate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_counts_in_the_thread_it_happened_in() {
        let began = SignalCheckpoint::now();
        assert_eq!(began.since(), HandlersRun::None);
        std::thread::scope(|scope| scope.spawn(|| enter(libc::SIGURG, HandlerKind::Plain)).join().unwrap());
        assert_eq!(began.since(), HandlersRun::None, "another thread's");
        // No handler is installed, so that there is nothing that asks for a restart.
        enter(libc::SIGURG, HandlerKind::Plain);
        assert_eq!(began.since(), HandlersRun::Interrupting);
        assert_eq!(SignalCheckpoint::now().since(), HandlersRun::None);
    }

    #[test]
    fn the_kernel_gets_the_gate_and_the_program_its_own_handler() {
        const PLAIN: usize = 0x1000;
        const INFORMED: usize = 0x2000;
        set_gates(PLAIN, INFORMED);
        identity::note_process();
        let plain = |address| Handler { kind: HandlerKind::Plain, address };
        let set = |new, old| replace_handler(libc::SIGWINCH, Some(new), |address| (address.unwrap(), true, Some(old)));
        assert_eq!(set(plain(7), plain(libc::SIG_DFL)), (PLAIN, Some(plain(libc::SIG_DFL))));
        let informed = Handler { kind: HandlerKind::SigInfo, address: 8 };
        assert_eq!(set(informed, plain(PLAIN)), (INFORMED, Some(plain(7))));
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7, "a signal that was on its way");
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::SigInfo), 8);
        let refused = replace_handler(libc::SIGWINCH, Some(plain(9)), |_| ((), false, None));
        assert_eq!(refused, ((), None));
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7);
        assert_eq!(set(plain(libc::SIG_IGN), Handler { address: INFORMED, ..informed }).1, Some(informed));
        assert_eq!(set(plain(PLAIN), plain(libc::SIG_IGN)).0, PLAIN, "what a program may have found by a system call");
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7);
        let fault = replace_handler(libc::SIGSEGV, Some(plain(7)), |address| (address, true, None));
        assert_eq!(fault.0, Some(7));
        set_gates(0, 0);
    }
}
