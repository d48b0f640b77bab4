//! Records which signal handlers have run, because a wait that polls memory must end for a signal as a wait in the
//! kernel does, and defers handlers while the state of the library is inconsistent.
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
use crate::process::lock::Lock;
use crate::process::{identity, system};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};

/// Signals are numbered from 1 to this.
const SIGNAL_MAX: usize = 64;
/// Signals that a thread raises by its own fault. Debuggers and crash reporters that look for the cause unwind the
/// stack, which must not contain a gate.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// The arguments of a signal handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerKind {
    /// The number of the signal only.
    Plain = 0,
    /// Three arguments (`SA_SIGINFO`): number, `siginfo_t` and context.
    SigInfo = 1,
}

/// What a program has set for a signal: the address of a handler, or one of the kernel's small numbers such as
/// `SIG_IGN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handler {
    /// The arguments that it takes.
    pub kind: HandlerKind,
    /// Its address.
    pub address: usize,
}

type Handlers = [AtomicUsize; SIGNAL_MAX + 1];

/// The program's handlers, by kind and signal. An entry stays when the program removes its handler: a signal may
/// already be in delivery.
static HANDLERS: [Handlers; 2] = [const { [const { AtomicUsize::new(0) }; SIGNAL_MAX + 1] }; 2];
/// The address that the kernel enters for a handler of each kind; 0 without gates.
static GATES: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Serializes changes of the kernel's entry and of the handler behind it.
static CHANGES: Lock = Lock::new();

/// Number of handler runs in all threads.
static RUNS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The value of `RUNS` at the last run in this thread.
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// The value of `RUNS` at the last run, in this thread, of a handler that ends waits.
    static LAST_INTERRUPTING: Cell<u64> = const { Cell::new(0) };
}

thread_local! {
    /// Nesting depth of the critical sections that this thread is in.
    static CRITICAL_DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The signals that were blocked when a handler was deferred; all signals are blocked since.
    static BLOCKED_BEFORE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Whether a handler has been installed that the kernel resets before it calls it: such a handler cannot be deferred.
static HAS_ONE_SHOT: AtomicBool = AtomicBool::new(false);

/// Records that the program installs a handler with `SA_RESETHAND`.
pub fn note_one_shot() {
    HAS_ONE_SHOT.store(true, Ordering::Relaxed);
}

/// Runs `work` in a critical section: handlers of the program that would interrupt it run afterwards.
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
        // The deferred signals are pending, and are delivered now.
        system::set_signal_mask(mask);
    }
    result
}

/// The callback of [`set_holder_check`].
static HOLDER_CHECK: Callback<fn() -> bool> = Callback::new();

/// Sets the check for the library's locks. It returns whether the calling thread holds one, and if so has the thread
/// deliver deferred signals when it releases the lock.
pub fn set_holder_check(defers: fn() -> bool) {
    HOLDER_CHECK.set(defers);
}

/// Returns whether this thread holds a lock of the library, and if so has it deliver deferred signals when it releases
/// the lock. A handler that jumps out of the call that it has interrupted would leave the lock held forever and the
/// data behind it inconsistent.
fn defers_for_holder() -> bool {
    HOLDER_CHECK.get().is_some_and(|defers| defers())
}

/// Returns whether handlers of this thread have been deferred.
pub fn are_handlers_deferred() -> bool {
    BLOCKED_BEFORE.get().is_some()
}

/// Delivers the signals that were deferred because this thread held a lock, which it has released.
#[cold]
pub fn deliver_deferred_signals() {
    if CRITICAL_DEPTH.get() == 0
        && let Some(mask) = BLOCKED_BEFORE.take()
    {
        system::set_signal_mask(mask);
    }
}

/// Continues a gate in a critical section: makes the signal pending again, with its `siginfo_t`, and returns to the
/// critical section with all signals blocked.
///
/// # Safety
/// The arguments are those with which the kernel has called a handler with `SA_SIGINFO`; `info` may be null.
unsafe extern "C" fn defer(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    system::set_signal_mask(u64::MAX);
    // SAFETY: the kernel has filled `context`, which is this handler's alone; the kernel's signal set is the beginning
    // of libc's, so the first eight bytes of `uc_sigmask` are readable and writable as a `u64`.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    // If several handlers are deferred at once, this runs last for the one that has interrupted the critical section
    // itself.
    BLOCKED_BEFORE.set(Some(*mask));
    *mask = u64::MAX;
    // SAFETY: `info` is null or the structure that the kernel has passed to this handler.
    unsafe { system::send_to_this_thread(signal, info) };
}

/// A point in time, from which on handler runs can be checked.
#[derive(Debug, Clone, Copy)]
pub struct SignalCheckpoint(u64);

/// The handlers that have run in a thread since a [`SignalCheckpoint`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlersRun {
    /// No handler whose run was recorded.
    None,
    /// Handlers with `SA_RESTART` only.
    Restarting,
    /// A handler without `SA_RESTART`.
    Interrupting,
}

impl SignalCheckpoint {
    /// Returns the present point in time.
    #[inline]
    pub fn now() -> Self {
        Self(RUNS.load(Ordering::Relaxed))
    }

    /// Returns which handlers have run in this thread since.
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

    /// Returns whether a call that the kernel has interrupted is to be restarted, because the handlers that have run
    /// since ask for it. The calls in question are those that the kernel interrupts regardless of `SA_RESTART`.
    pub fn restarts(self) -> bool {
        match self.since() {
            HandlersRun::None => system::all_handlers_restart(),
            HandlersRun::Restarting => true,
            HandlersRun::Interrupting => false,
        }
    }
}

/// Sets the addresses of the gates, which the kernel enters instead of the program's handlers from now on.
pub fn set_gates(plain: usize, informed: usize) {
    GATES[HandlerKind::Plain as usize].store(plain, Ordering::Relaxed);
    GATES[HandlerKind::SigInfo as usize].store(informed, Ordering::Relaxed);
}

/// Sets the signal mask of a waiting call while it polls. Returns `None` without gates: then only the kernel knows
/// which handlers run, and the call asks it under the mask from time to time.
///
/// `began` becomes the checkpoint after which a handler interrupts the call: a handler that runs before the mask is set
/// ran before the call, and one that the new mask unblocks runs after it.
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
    // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
    unsafe { system::SignalMaskGuard::replace(mask, || *began = SignalCheckpoint::now()) }
}

/// Records that a gate was entered for `signal`. Returns the address to continue at: that of the program's handler, or
/// of the function that defers it.
pub fn enter(signal: i32, kind: HandlerKind) -> usize {
    if CRITICAL_DEPTH.get() > 0 || defers_for_holder() {
        return defer as *const () as usize;
    }
    let run = RUNS.fetch_add(1, Ordering::Relaxed) + 1;
    LAST.set(run);
    if !system::handler_restarts(signal) {
        LAST_INTERRUPTING.set(run);
    }
    program_handler(signal, kind)
}

fn load(word: &AtomicUsize) -> usize {
    word.load(Ordering::Acquire)
}

/// Changes the handler of `signal`. `in_kernel` gets the address to set in the kernel; it returns its result, whether
/// the kernel accepted the address, and the handler that the kernel had before. The second value returned here is the
/// program's handler behind that one.
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

/// In the child of a fork, releases the lock: a thread that held it does not exist here.
pub fn after_fork_in_child() {
    CHANGES.reset();
}

/// Returns the gate at an address, which `signal(2)` returns without its kind.
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

/// Stores a handler and returns the gate for the kernel to enter; `None` if the kernel is to get the address itself.
fn install_behind_gate(signal: i32, new: Handler) -> Option<usize> {
    let is_handler = new.address != libc::SIG_DFL && new.address != libc::SIG_IGN && new.address != libc::SIG_ERR;
    let gate = load(&GATES[new.kind as usize]);
    let is_counted = is_handler && gate != 0 && !FAULTS.contains(&signal) && !identity::is_borrowed_memory();
    let slot = HANDLERS[new.kind as usize].get(usize::try_from(signal).ok()?).filter(|_| is_counted)?;
    if !is_gate(new) {
        slot.store(new.address, Ordering::Release);
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
        assert_eq!(began.since(), HandlersRun::None, "it ran in another thread");
        // No handler is installed that asks for a restart.
        enter(libc::SIGURG, HandlerKind::Plain);
        assert_eq!(began.since(), HandlersRun::Interrupting);
        assert_eq!(SignalCheckpoint::now().since(), HandlersRun::None);
    }

    #[test]
    fn a_deferred_signal_whose_information_is_unknown_is_delivered_later() {
        static IS_DELIVERED: AtomicBool = AtomicBool::new(false);
        extern "C" fn handler(_: i32) {
            IS_DELIVERED.store(true, Ordering::Relaxed);
        }
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(libc::SIGUSR2, handler as *const () as usize) };
        // SAFETY: zeros are a valid context, with an empty signal set.
        let mut context: Box<libc::ucontext_t> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the context is this test's, and `info` may be null.
        unsafe { defer(libc::SIGUSR2, std::ptr::null_mut(), &raw mut *context) };
        assert!(are_handlers_deferred() && !IS_DELIVERED.load(Ordering::Relaxed));
        deliver_deferred_signals();
        assert!(!are_handlers_deferred() && IS_DELIVERED.load(Ordering::Relaxed));
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
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7, "a signal that was in delivery");
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::SigInfo), 8);
        let refused = replace_handler(libc::SIGWINCH, Some(plain(9)), |_| ((), false, None));
        assert_eq!(refused, ((), None));
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7);
        assert_eq!(set(plain(libc::SIG_IGN), Handler { address: INFORMED, ..informed }).1, Some(informed));
        assert_eq!(
            set(plain(PLAIN), plain(libc::SIG_IGN)).0,
            PLAIN,
            "a program may have read the gate by a system call"
        );
        assert_eq!(enter(libc::SIGWINCH, HandlerKind::Plain), 7);
        let fault = replace_handler(libc::SIGSEGV, Some(plain(7)), |address| (address, true, None));
        assert_eq!(fault.0, Some(7));
        set_gates(0, 0);
    }
}
