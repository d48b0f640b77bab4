//! Distinguishes threads that hang from threads that wait for a CPU.
//!
//! A timeout cannot distinguish them soon enough: on an overloaded machine a healthy thread may wait longer than any
//! tolerable timeout. So this module uses what the kernel reports about a thread: whether it is runnable, and its CPU
//! time.
//!
//! * A **process** is stopped (SIGSTOP, a debugger) if it is in the stopped state in two samples and has not run in
//!   between.
//! * A process is **frozen** with its container if it has not run between two samples, and the kernel reports its
//!   control group as frozen at the second one.
//! * The **forwarding thread** hangs if one iteration takes too long and it has either run for most of that time (an
//!   endless loop), or not run at all without being runnable (it is blocked). It cannot be blocked by a lock whose
//!   holder waits for a CPU: the only other thread of the process is the one that takes the samples.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::cgroup_freezer::CgroupFreezer;

/// Interval between samples: a stop is detected by the third sample, a hang by the fifth.
pub const SAMPLE_INTERVAL_NS: u64 = 20_000_000;
/// Duration of one iteration of the forwarding thread after which it is examined: a thousand times the usual one.
const ITERATION_NS_MAX: u64 = 40_000_000;
/// CPU time of one iteration after which it counts as an endless loop.
const ITERATION_RUN_NS_MAX: u64 = 30_000_000;
/// Maximum length of a line of `stat` and `schedstat` in bytes.
const LINE_BYTES_MAX: usize = 1024;

/// The state of a thread (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Running, or waiting for a CPU.
    Runnable,
    /// Sleeping, interruptibly or not.
    Waiting,
    /// Stopped by a signal, or traced.
    Stopped,
    /// A zombie, or gone.
    Ended,
}

/// The state and the CPU time of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Its state.
    pub state: State,
    /// Its CPU time in nanoseconds.
    pub run_ns: u64,
}

/// The `/proc` files of a thread. They stay those of the same thread when its number is reused.
#[derive(Debug)]
pub struct Thread {
    stat: File,
    schedule: File,
}

impl Thread {
    /// Opens the main thread of a process; `None` if `/proc` does not show it.
    pub fn first_of(process: u32) -> Option<Self> {
        Self::at(&Path::new("/proc").join(format!("{process}/task/{process}")))
    }

    /// Opens a thread of this process.
    pub fn own(thread: u32) -> Option<Self> {
        Self::at(&Path::new("/proc/self/task").join(thread.to_string()))
    }

    fn at(folder: &Path) -> Option<Self> {
        let open = |name: &str| File::open(folder.join(name)).ok();
        Some(Self { stat: open("stat")?, schedule: open("schedstat")? })
    }

    /// Reads the state and the CPU time.
    pub fn sample(&self) -> ThreadSample {
        // Reads fail once the thread is gone.
        let state = line(&self.stat).map_or(State::Ended, |line| state(&line));
        let run_ns = line(&self.schedule).and_then(|line| line.split(' ').next()?.parse().ok());
        ThreadSample { state, run_ns: run_ns.unwrap_or(0) }
    }
}

/// Reads the contents of a one-line file.
fn line(file: &File) -> Option<String> {
    let mut bytes = [0; LINE_BYTES_MAX];
    let count = file.read_at(&mut bytes, 0).ok()?;
    Some(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

/// Parses the third field of `stat`. The second one is the name in parentheses, which may contain anything.
fn state(line: &str) -> State {
    match line.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('R') => State::Runnable,
        Some('T' | 't') => State::Stopped,
        Some('Z' | 'X') | None => State::Ended,
        Some(_) => State::Waiting,
    }
}

/// Detects that the process of another node is stopped or frozen.
#[derive(Debug)]
pub struct ProcessWatch {
    process: u32,
    thread: Thread,
    freezer: CgroupFreezer,
    previous: Option<ThreadSample>,
}

impl ProcessWatch {
    /// Watches a process of this machine; `None` if `/proc` does not show it.
    pub fn of(process: u32) -> Option<Self> {
        Some(Self { process, thread: Thread::first_of(process)?, freezer: CgroupFreezer::find(), previous: None })
    }

    /// Returns why the process cannot run, if that has not changed since the last call.
    pub fn halt_reason(&mut self) -> Option<&'static str> {
        let sample = self.thread.sample();
        halt_reason(&mut self.previous, sample, || self.freezer.is_frozen(self.process))
    }
}

/// A traced thread stops at each system call and resumes. Control groups are read only for a thread that has not run
/// since the last sample.
fn halt_reason(
    before: &mut Option<ThreadSample>,
    sample: ThreadSample,
    is_frozen: impl FnOnce() -> bool,
) -> Option<&'static str> {
    if before.replace(sample) != Some(sample) {
        return None;
    }
    match sample.state {
        State::Stopped => Some("its process is stopped"),
        State::Waiting if is_frozen() => Some("its container is frozen"),
        _ => None,
    }
}

/// The progress of the forwarding thread, which updates it with plain stores.
#[derive(Debug, Default)]
pub struct Heartbeat {
    /// Twice the number of the iteration; plus one while the thread is blocked.
    count: AtomicU64,
    /// Its thread ID; 0 before it runs.
    thread: AtomicU32,
}

impl Heartbeat {
    /// Registers the calling thread.
    pub fn begin(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Ordering::Release);
    }

    /// Records the start of an iteration.
    pub fn begin_iteration(&self) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store((count | 1).wrapping_add(1), Ordering::Relaxed);
    }

    /// Records that the thread blocks until the next iteration.
    pub fn sleep(&self) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store(count | 1, Ordering::Relaxed);
    }
}

/// A change detected by [`HangWatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangEvent {
    /// The thread hangs.
    Hung,
    /// The thread has resumed, after this number of nanoseconds.
    Resumed(u64),
}

/// Detects that the forwarding thread hangs.
#[derive(Debug)]
pub struct HangWatch {
    heartbeat: Arc<Heartbeat>,
    thread: Option<Thread>,
    iteration: Iteration,
    sampled_at_ns: u64,
    hung_since_ns: Option<u64>,
}

impl HangWatch {
    /// Watches the thread with this heartbeat.
    pub fn new(heartbeat: Arc<Heartbeat>) -> Self {
        Self { heartbeat, thread: None, iteration: Iteration::default(), sampled_at_ns: 0, hung_since_ns: None }
    }

    /// Returns when the next sample is due.
    pub fn due_ns(&self) -> u64 {
        self.sampled_at_ns + SAMPLE_INTERVAL_NS
    }

    /// Returns for how long the thread has been hung, if it is.
    pub fn hung_ns(&self, now_ns: u64) -> Option<u64> {
        self.hung_since_ns.map(|since_ns| now_ns.saturating_sub(since_ns))
    }

    /// Takes a sample if one is due. Returns a change.
    pub fn poll(&mut self, now_ns: u64) -> Option<HangEvent> {
        if now_ns < self.due_ns() {
            return None;
        }
        self.sampled_at_ns = now_ns;
        match (self.is_hung(now_ns), self.hung_ns(now_ns)) {
            (true, None) => {
                self.hung_since_ns = Some(now_ns);
                Some(HangEvent::Hung)
            }
            (false, Some(hung_ns)) => {
                self.hung_since_ns = None;
                Some(HangEvent::Resumed(hung_ns))
            }
            _ => None,
        }
    }

    fn is_hung(&mut self, now_ns: u64) -> bool {
        let count = self.heartbeat.count.load(Ordering::Relaxed);
        let thread = self.heartbeat.thread.load(Ordering::Acquire);
        if self.thread.is_none() && thread != 0 {
            self.thread = Thread::own(thread);
        }
        let thread = &self.thread;
        self.iteration.is_hung(now_ns, count, || thread.as_ref().map(Thread::sample))
    }
}

/// One iteration of the forwarding thread.
#[derive(Debug, Default)]
struct Iteration {
    count: u64,
    /// Time and sample when the iteration was first seen unchanged.
    first: Option<(u64, ThreadSample)>,
    /// Whether any sample was runnable.
    was_runnable: bool,
}

impl Iteration {
    fn is_hung(&mut self, now_ns: u64, count: u64, sample: impl FnOnce() -> Option<ThreadSample>) -> bool {
        let sleeps = count % 2 == 1;
        if sleeps || count != self.count {
            *self = Self { count, ..Self::default() };
            return false;
        }
        let Some(sample) = sample() else { return false };
        let (first_at_ns, first) = *self.first.get_or_insert((now_ns, sample));
        self.was_runnable |= sample.state == State::Runnable;
        let run_ns = sample.run_ns.saturating_sub(first.run_ns);
        let is_blocked = run_ns == 0 && !self.was_runnable;
        now_ns.saturating_sub(first_at_ns) >= ITERATION_NS_MAX && (run_ns >= ITERATION_RUN_NS_MAX || is_blocked)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Child, Stdio};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const MS: u64 = 1_000_000;

    fn sample(state: State, ran_ms: u64) -> Option<ThreadSample> {
        Some(ThreadSample { state, run_ns: ran_ms * MS })
    }

    /// Returns the verdicts for samples 20 ms apart of a thread that stays in one iteration.
    fn verdicts(count: u64, seen: &[Option<ThreadSample>]) -> Vec<bool> {
        let mut iteration = Iteration::default();
        iteration.is_hung(0, count, || panic!("no sample is taken of a new iteration"));
        seen.iter()
            .zip(1..)
            .map(|(sample, number)| iteration.is_hung(number * SAMPLE_INTERVAL_NS, count, || *sample))
            .collect()
    }

    #[test]
    fn a_thread_that_waits_for_a_cpu_does_not_hang_however_long() {
        assert_eq!(verdicts(4, &[sample(State::Runnable, 5); 100]), [false; 100]);
        // Neither does one that waited for a CPU between samples, and for something else at each of them.
        let seen: Vec<_> = (0..100).map(|sample_number| sample(State::Waiting, sample_number / 20)).collect();
        let mut seen_before = seen.clone();
        seen_before[0] = sample(State::Runnable, 0);
        assert!(!verdicts(4, &seen_before).contains(&true));
    }

    #[test]
    fn an_endless_loop_is_a_hang_by_its_cpu_time() {
        let seen: Vec<_> = (0..5).map(|sample_number| sample(State::Runnable, 20 * sample_number)).collect();
        assert_eq!(verdicts(4, &seen), [false, false, true, true, true]);
        let slowly: Vec<_> = (0..20).map(|sample_number| sample(State::Runnable, 2 * sample_number)).collect();
        assert_eq!(verdicts(4, &slowly).iter().position(|is_hung| *is_hung), Some(15), "it gets a tenth of the CPU");
    }

    #[test]
    fn a_blocked_thread_hangs_and_one_that_sleeps_or_iterates_does_not() {
        assert_eq!(verdicts(4, &[sample(State::Waiting, 7); 3]), [false, false, true]);
        assert_eq!(verdicts(5, &[None; 9]), [false; 9], "an odd count: it sleeps, and no sample is taken");
        let mut iteration = Iteration::default();
        let iterates_and_hangs =
            |count: u64| iteration.is_hung(count * SAMPLE_INTERVAL_NS, 2 * count, || sample(State::Waiting, 7));
        assert!(!(0..100).any(iterates_and_hangs));
    }

    #[test]
    fn without_a_sample_no_thread_hangs() {
        assert_eq!(verdicts(4, &[None; 9]), [false; 9]);
    }

    #[test]
    fn a_heartbeat_distinguishes_iterations_and_sleep() {
        let heartbeat = Heartbeat::default();
        let count = || heartbeat.count.load(Ordering::Relaxed);
        heartbeat.begin_iteration();
        assert_eq!(count(), 2);
        heartbeat.sleep();
        heartbeat.sleep();
        assert_eq!(count(), 3);
        heartbeat.begin_iteration();
        heartbeat.begin_iteration();
        assert_eq!(count(), 6);
    }

    #[test]
    fn the_state_is_parsed_whatever_the_threads_name_is() {
        for (line, expected) in [
            ("7 (a) R 1 2", State::Runnable),
            ("7 (b) R) S 1", State::Waiting),
            ("7 (c) T 1", State::Stopped),
            ("7 (c) t 1", State::Stopped),
            ("7 (d) Z 1", State::Ended),
            ("nonsense", State::Ended),
        ] {
            assert_eq!(state(line), expected, "{line}");
        }
    }

    #[test]
    fn a_traced_thread_that_runs_between_samples_is_not_stopped() {
        let mut before = None;
        let mut poll = |state, run_ns| {
            halt_reason(&mut before, ThreadSample { state, run_ns }, || panic!("the control group is not read"))
                .is_some()
        };
        assert!(!poll(State::Stopped, 1));
        assert!(!poll(State::Stopped, 2));
        assert!(poll(State::Stopped, 2));
        assert!(!poll(State::Waiting, 2));
        assert!(!poll(State::Stopped, 2));
    }

    #[test]
    fn a_thread_that_has_not_run_is_frozen_only_if_its_control_group_is() {
        let mut before = None;
        let mut poll =
            |state, run_ns, is_frozen| halt_reason(&mut before, ThreadSample { state, run_ns }, || is_frozen).is_some();
        assert!(!poll(State::Waiting, 1, true), "the first sample");
        assert!(!poll(State::Waiting, 2, true), "it has run in between");
        assert!(poll(State::Waiting, 2, true));
        assert!(!(0..1000).any(|_| poll(State::Waiting, 2, false)), "it is blocked, which may end");
        assert!(!poll(State::Runnable, 2, true));
        assert!(!poll(State::Runnable, 2, true), "it waits for a CPU");
    }

    struct Sleeper(Child);

    impl Sleeper {
        fn signal(&self, signal: Signal) {
            kill_process(Pid::from_child(&self.0), signal).unwrap();
        }

        /// Signals take effect when the process is scheduled next.
        fn wait_for(&self, watch: &mut ProcessWatch, halt_reason: Option<&str>) {
            let is_reached = (0..5000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                watch.halt_reason() == halt_reason
            });
            assert!(is_reached, "{:?}, and not {halt_reason:?}", watch.thread.sample());
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_counts_as_stopped_from_sigstop_to_sigcont_only() {
        let sleeper = Sleeper(test_support::spawn::sleeper(Stdio::null()));
        let mut watch = ProcessWatch::of(sleeper.0.id()).unwrap();
        assert!(!(0..20).any(|_| watch.halt_reason().is_some()));
        sleeper.signal(Signal::STOP);
        sleeper.wait_for(&mut watch, Some("its process is stopped"));
        sleeper.signal(Signal::CONT);
        sleeper.wait_for(&mut watch, None);
        drop(sleeper);
        assert_eq!((watch.halt_reason(), watch.thread.sample().state), (None, State::Ended));
    }

    /// A control group of version 2, removed on drop.
    struct Group(PathBuf);

    impl Group {
        /// Returns `None` if this machine does not allow one to be created.
        fn new() -> Option<Self> {
            let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
            let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
            let path = root.join(format!("crosslane-test-{}", std::process::id()));
            std::fs::create_dir(&path).ok()?;
            let group = Self(path);
            group.0.join("cgroup.freeze").exists().then_some(group)
        }

        fn write(&self, file: &str, text: &str) {
            std::fs::write(self.0.join(file), text).unwrap();
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            // The processes in the group may take a moment to exit.
            (0..1000).any(|_| {
                let is_gone = std::fs::remove_dir(&self.0).is_ok();
                std::thread::sleep(std::time::Duration::from_millis(u64::from(!is_gone)));
                is_gone
            });
        }
    }

    #[test]
    fn a_process_is_frozen_as_long_as_its_container_is() {
        let Some(group) = Group::new() else {
            eprintln!("skipped: cannot create a control group; needs root and version 2");
            return;
        };
        let sleeper = Sleeper(test_support::spawn::sleeper(Stdio::null()));
        group.write("cgroup.procs", &sleeper.0.id().to_string());
        let mut watch = ProcessWatch::of(sleeper.0.id()).unwrap();
        assert!(!(0..20).any(|_| watch.halt_reason().is_some()));
        group.write("cgroup.freeze", "1");
        sleeper.wait_for(&mut watch, Some("its container is frozen"));
        group.write("cgroup.freeze", "0");
        sleeper.wait_for(&mut watch, None);
    }

    #[test]
    fn an_endless_loop_is_detected_and_iterations_are_not() {
        use std::sync::atomic::AtomicBool;
        let (heartbeat, iterates, ends) =
            (Arc::new(Heartbeat::default()), AtomicBool::new(true), AtomicBool::new(false));
        let (mut watch, first) = (HangWatch::new(Arc::clone(&heartbeat)), std::time::Instant::now());
        let mut poll = || {
            std::thread::sleep(std::time::Duration::from_millis(5));
            watch.poll(first.elapsed().as_nanos() as u64)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                heartbeat.begin();
                while !ends.load(Ordering::Relaxed) {
                    if iterates.load(Ordering::Relaxed) {
                        heartbeat.begin_iteration();
                    }
                }
            });
            let before: Vec<_> = (0..20).filter_map(|_| poll()).collect();
            iterates.store(false, Ordering::Relaxed);
            let hangs = (0..6000).find_map(|_| poll());
            iterates.store(true, Ordering::Relaxed);
            let resumed = (0..6000).find_map(|_| poll());
            ends.store(true, Ordering::Relaxed);
            assert_eq!((before, hangs), (Vec::new(), Some(HangEvent::Hung)));
            assert!(matches!(resumed, Some(HangEvent::Resumed(hung_ns)) if hung_ns > 0), "{resumed:?}");
        });
    }
}
