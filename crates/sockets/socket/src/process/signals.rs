//! Which signal handlers have run: a wait that looks at memory must end for a signal as one in the kernel does.
//!
//! The kernel enters the program's handlers through a *gate* of the skin, which asks [`enter`] where to go on. That
//! notes the run, and costs nothing where no signal comes. The program never sees the gates: [`change`] shows it the
//! handlers that it has set. Handlers of faults keep the kernel's entry, because a fault interrupts no wait; so does
//! what a program installs by a raw system call, whose runs nobody notes.
//!
//! A gate also *puts off* a handler that would interrupt this thread in the middle of a change ([`without_handlers`]):
//! that costs nothing where no signal comes, while blocking and unblocking signals takes two system calls.

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
pub enum Shape {
    /// The number of the signal.
    Plain = 0,
    /// With `SA_SIGINFO`: what the kernel knows of the signal, too.
    Informed = 1,
}

/// What a program wants to be called for a signal: the address, or one of the kernel's own small numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handler {
    /// How it is called.
    pub shape: Shape,
    /// Where it is.
    pub address: usize,
}

type Handlers = [AtomicUsize; SIGNAL_MAX + 1];

/// The program's handlers, by shape and signal. They stay when the program takes them out: a signal may be on its way.
static HANDLERS: [Handlers; 2] = [const { [const { AtomicUsize::new(0) }; SIGNAL_MAX + 1] }; 2];
/// Where the kernel enters for a handler of each shape; 0 where the skin has no gates.
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
    static CHANGES_BEGUN: Cell<u32> = const { Cell::new(0) };
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
    if load(&GATES[Shape::Plain as usize]) == 0 || HAS_ONE_SHOT.load(Ordering::Relaxed) {
        return system::without_signals(work);
    }
    let begun = CHANGES_BEGUN.get();
    CHANGES_BEGUN.set(begun + 1);
    compiler_fence(Ordering::SeqCst);
    let result = work();
    compiler_fence(Ordering::SeqCst);
    CHANGES_BEGUN.set(begun);
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
pub fn use_holder_check(puts_off: fn() -> bool) {
    HOLDER_CHECK.set(puts_off);
}

/// Has whoever holds a lock of ours in this thread let handlers in when it lets go. `false`: nobody does. A handler
/// that jumps out of the call that it has interrupted would leave the lock held for ever, and what it guards half done.
fn puts_off_for_holder() -> bool {
    HOLDER_CHECK.get().is_some_and(|puts_off| puts_off())
}

/// Whether handlers of this thread have been put off.
pub(crate) fn are_put_off() -> bool {
    BLOCKED_BEFORE.get().is_some()
}

/// Lets in what was put off for the holder of a lock, who has let go.
#[cold]
pub(crate) fn let_handlers_in() {
    if CHANGES_BEGUN.get() == 0
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
unsafe extern "C" fn put_off(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
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
pub struct Moment(u64);

/// What has run in this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// No handler that anybody noted.
    Nothing,
    /// Handlers with `SA_RESTART`.
    Restarting,
    /// A handler without.
    Interrupting,
}

impl Moment {
    /// Now.
    #[inline]
    pub fn now() -> Self {
        Self(RUNS.load(Ordering::Relaxed))
    }

    /// What has run in this thread since.
    #[inline]
    pub fn since(self) -> Since {
        if RUNS.load(Ordering::Relaxed) == self.0 { Since::Nothing } else { self.since_in_this_thread() }
    }

    #[cold]
    fn since_in_this_thread(self) -> Since {
        match () {
            () if LAST_INTERRUPTING.get() > self.0 => Since::Interrupting,
            () if LAST.get() > self.0 => Since::Restarting,
            () => Since::Nothing,
        }
    }

    /// Whether a call that the kernel has interrupted, as it does whatever the handler asks for, is to go on, because
    /// the handlers of the signals that came since ask for that.
    pub fn goes_on(self) -> bool {
        match self.since() {
            Since::Nothing => system::handlers_restart(),
            Since::Restarting => true,
            Since::Interrupting => false,
        }
    }
}

/// Names the gates: the kernel enters there instead of the program's handlers from now on.
pub fn use_gates(plain: usize, informed: usize) {
    GATES[Shape::Plain as usize].store(plain, Ordering::Relaxed);
    GATES[Shape::Informed as usize].store(informed, Ordering::Relaxed);
}

/// Has the mask of a call that waits in force while it is awake. Not where nobody notes which handlers run: there the
/// kernel alone can tell, and is asked under the mask now and then.
///
/// `began` becomes the moment from which on a handler interrupts the call: one that runs before the mask is in force
/// ran before the call, and one that the mask lets in, though it was kept out before, runs after.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn mask_while_awake(mask: *const libc::sigset_t, began: &mut Moment) -> Option<system::Masked> {
    if load(&GATES[Shape::Plain as usize]) == 0 {
        return None;
    }
    // SAFETY: the caller's.
    unsafe { system::Masked::by(mask, || *began = Moment::now()) }
}

/// A gate was entered for `signal`: notes it, and answers the address of the program's handler, or of what puts it off.
pub fn enter(signal: i32, shape: Shape) -> usize {
    if CHANGES_BEGUN.get() > 0 || puts_off_for_holder() {
        return put_off as *const () as usize;
    }
    let run = RUNS.fetch_add(1, Ordering::Relaxed) + 1;
    LAST.set(run);
    if !system::handler_restarts(signal) {
        LAST_INTERRUPTING.set(run);
    }
    usize::try_from(signal).ok().and_then(|signal| HANDLERS[shape as usize].get(signal)).map_or(0, load)
}

fn load(word: &AtomicUsize) -> usize {
    word.load(Ordering::Acquire)
}

/// Changes what is called for `signal`. `in_kernel` gets the address to give to the kernel, answers whether it took it
/// and the handler it had before; that of the program behind it is returned.
pub fn change<R>(
    signal: i32,
    new: Option<Handler>,
    in_kernel: impl FnOnce(Option<usize>) -> (R, bool, Option<Handler>),
) -> (R, Option<Handler>) {
    system::without_signals(|| {
        let _guard = CHANGES.lock();
        let before = [Shape::Plain, Shape::Informed].map(|shape| behind(signal, shape));
        let gate = new.and_then(|new| put_behind_gate(signal, new));
        let (result, is_done, old) = in_kernel(gate.or(new.map(|new| new.address)));
        if let (Some(new), Some(_), false) = (new, gate, is_done) {
            HANDLERS[new.shape as usize][signal as usize].store(before[new.shape as usize], Ordering::Release);
        }
        let shown = old.map(|old| match before[old.shape as usize] {
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
pub fn as_known(address: usize) -> Option<Handler> {
    [Shape::Plain, Shape::Informed]
        .map(|shape| Handler { shape, address })
        .into_iter()
        .find(|&handler| is_gate(handler))
}

fn behind(signal: i32, shape: Shape) -> usize {
    usize::try_from(signal).ok().and_then(|signal| HANDLERS[shape as usize].get(signal)).map_or(0, load)
}

fn is_gate(handler: Handler) -> bool {
    handler.address != 0 && handler.address == load(&GATES[handler.shape as usize])
}

/// `None`: the kernel is to enter the handler itself, if it is one.
fn put_behind_gate(signal: i32, new: Handler) -> Option<usize> {
    let is_handler = new.address != libc::SIG_DFL && new.address != libc::SIG_IGN && new.address != libc::SIG_ERR;
    let gate = load(&GATES[new.shape as usize]);
    let is_counted = is_handler && gate != 0 && !FAULTS.contains(&signal) && !identity::is_borrowed_memory();
    let place = HANDLERS[new.shape as usize].get(usize::try_from(signal).ok()?).filter(|_| is_counted)?;
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
        let began = Moment::now();
        assert_eq!(began.since(), Since::Nothing);
        std::thread::scope(|scope| scope.spawn(|| enter(libc::SIGURG, Shape::Plain)).join().unwrap());
        assert_eq!(began.since(), Since::Nothing, "another thread's");
        // No handler is installed, so that there is nothing that asks for a restart.
        enter(libc::SIGURG, Shape::Plain);
        assert_eq!(began.since(), Since::Interrupting);
        assert_eq!(Moment::now().since(), Since::Nothing);
    }

    #[test]
    fn the_kernel_gets_the_gate_and_the_program_its_own_handler() {
        const PLAIN: usize = 0x1000;
        const INFORMED: usize = 0x2000;
        use_gates(PLAIN, INFORMED);
        identity::note_process();
        let plain = |address| Handler { shape: Shape::Plain, address };
        let set = |new, old| change(libc::SIGWINCH, Some(new), |address| (address.unwrap(), true, Some(old)));
        assert_eq!(set(plain(7), plain(libc::SIG_DFL)), (PLAIN, Some(plain(libc::SIG_DFL))));
        let informed = Handler { shape: Shape::Informed, address: 8 };
        assert_eq!(set(informed, plain(PLAIN)), (INFORMED, Some(plain(7))));
        assert_eq!(enter(libc::SIGWINCH, Shape::Plain), 7, "a signal that was on its way");
        assert_eq!(enter(libc::SIGWINCH, Shape::Informed), 8);
        let refused = change(libc::SIGWINCH, Some(plain(9)), |_| ((), false, None));
        assert_eq!(refused, ((), None));
        assert_eq!(enter(libc::SIGWINCH, Shape::Plain), 7);
        assert_eq!(set(plain(libc::SIG_IGN), Handler { address: INFORMED, ..informed }).1, Some(informed));
        assert_eq!(set(plain(PLAIN), plain(libc::SIG_IGN)).0, PLAIN, "what a program may have found by a system call");
        assert_eq!(enter(libc::SIGWINCH, Shape::Plain), 7);
        let fault = change(libc::SIGSEGV, Some(plain(7)), |address| (address, true, None));
        assert_eq!(fault.0, Some(7));
        use_gates(0, 0);
    }
}
