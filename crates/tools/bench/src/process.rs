//! Child processes that cannot outlive us: each is a process group, killed when its guard drops and when we are told
//! to stop.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use machine::CorePair;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const STDERR_BYTES_MAX: usize = 16 * 1024;
/// The cause comes first; a backtrace after it helps nobody here.
const SAID_LINES_MAX: usize = 3;
const EXIT_POLL: Duration = Duration::from_micros(500);
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long a command may take that undoes something.
const FAREWELL_LIMIT: Duration = Duration::from_secs(30);
/// The exit status of a program ended by signal N, as shells count: 128 + N.
const SIGNALLED: i32 = 128;

/// Process groups not yet reaped. Reaping happens under the lock, so a number in the set is never someone else's.
static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static SCRATCH: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static FAREWELLS: Mutex<BTreeMap<u64, Words>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, Ctrl-C, SIGTERM and SIGHUP kill every child and remove every scratch directory before they end this
/// process.
pub fn stop_children_on_signal() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = ignored_signals(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        match Signals::new(wanted) {
            Ok(mut signals) => drop(thread::spawn(move || signals.forever().next().map(end_by))),
            Err(error) => eprintln!("crosslane: children may survive Ctrl-C: {error}"),
        }
    });
}

/// What whoever started us wants ignored stays ignored: `nohup` means it.
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn end_by(signal: i32) {
    // The locks are kept to the end: no child may start any more.
    let running = lock(&RUNNING);
    running.iter().for_each(|group| kill_group(*group));
    let scratch = lock(&SCRATCH);
    let farewells = std::mem::take(&mut *lock(&FAREWELLS));
    farewells.into_values().for_each(|command| drop(command.run()));
    for directory in scratch.iter() {
        let _ = fs::remove_dir_all(directory);
    }
    std::process::exit(SIGNALLED + signal);
}

fn kill_group(group: u32) {
    if let Some(group) = i32::try_from(group).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// A directory removed with everything in it when it is dropped or we are told to stop.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    pub fn new() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("crosslane-bench-").tempdir();
        let directory =
            directory.with_context(|| format!("making a directory in {}", std::env::temp_dir().display()))?;
        lock(&SCRATCH).insert(directory.path().to_owned());
        Ok(Self(directory))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        lock(&SCRATCH).remove(self.path());
    }
}

/// A command and what it finds in its environment besides ours.
#[derive(Clone, Debug)]
pub struct Words {
    /// Program and arguments.
    pub words: Vec<OsString>,
    /// Set for it.
    pub environment: Vec<(OsString, OsString)>,
}

impl Words {
    /// The command.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs it to its end, in which the locks of this module are not used.
    fn run(&self) -> Result<()> {
        let mut command = self.command();
        let written = command_line(&command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let deadline = Instant::now() + FAREWELL_LIMIT;
        loop {
            match child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("`{written}` failed ({status})"),
                None if Instant::now() >= deadline => {
                    let _ = child.kill();
                    bail!("`{written}` did not end within {} s", FAREWELL_LIMIT.as_secs());
                }
                None => thread::sleep(EXIT_POLL),
            }
        }
    }
}

/// A command that undoes something: it runs when this is dropped, or when we are told to stop.
pub struct Farewell(u64);

impl Farewell {
    /// Of this command.
    pub fn new(command: Words) -> Self {
        let mut farewells = lock(&FAREWELLS);
        let number = farewells.keys().last().map_or(0, |last| last + 1);
        farewells.insert(number, command);
        Self(number)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let command = lock(&FAREWELLS).remove(&self.0);
        if let Some(Err(error)) = command.map(|command| command.run()) {
            eprintln!("crosslane: {error:#}");
        }
    }
}

/// A running child: its lines, its complaints, and its end.
pub struct Guard {
    child: Child,
    command: String,
    lines: Receiver<String>,
    complaints: Arc<Mutex<Vec<u8>>>,
    complaints_reader: Option<JoinHandle<()>>,
    reaped: bool,
}

impl Guard {
    /// Starts `command`, on `core` alone if one is given.
    pub fn spawn(mut command: Command, core: Option<usize>) -> Result<Self> {
        let written = command_line(&command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut running = lock(&RUNNING);
        let mut child = on_core(core, || command.spawn())?.with_context(|| format!("cannot start `{written}`"))?;
        running.insert(child.id());
        drop(running);
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // Nobody listens any more: keep reading, or the child would block on a full pipe.
                    let _ = sender.send(line);
                }
            });
        }
        let complaints = Arc::default();
        let complaints_reader = child.stderr.take().map(|stderr| collect(stderr, Arc::clone(&complaints)));
        Ok(Self { child, command: written, lines, complaints, complaints_reader, reaped: false })
    }

    /// The next line that `wanted` accepts; the lines before it are passed over.
    pub fn line(&mut self, timeout: Duration, mut wanted: impl FnMut(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if wanted(&line) => return Ok(line),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(self.failure(&format!("was not ready after {} s", timeout.as_secs())));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait(deadline)?;
                    return Err(self.failure(&format!("ended before it was ready ({status})")));
                }
            }
        }
    }

    /// Waits for a successful end and returns the remaining lines.
    pub fn finish(mut self, timeout: Duration) -> Result<Vec<String>> {
        self.complete(timeout)
    }

    /// As [`Guard::finish`], for whoever then asks what was [`Guard::said`].
    pub fn complete(&mut self, timeout: Duration) -> Result<Vec<String>> {
        let deadline = Instant::now() + timeout;
        let mut lines = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    return Err(self.failure(&format!("did not end within {} s", timeout.as_secs())));
                }
            }
        }
        let status = self.wait(deadline)?;
        if !status.success() {
            return Err(self.failure(&format!("failed ({status})")));
        }
        Ok(lines)
    }

    /// What became of the child, in one line that names its command and ends in what it said.
    fn failure(&self, what: &str) -> anyhow::Error {
        anyhow!("`{}` {what}{}", self.command, self.said())
    }

    /// Whether it has been waited for to its end.
    pub fn has_ended(&self) -> bool {
        self.reaped
    }

    /// What the child wrote to stderr, as far as it is kept.
    pub fn all_said(&self) -> String {
        // Its last words may still be in the pipe; a grandchild that holds the pipe open must not hold us.
        let deadline = Instant::now() + LAST_WORDS;
        while self.reaped
            && !self.complaints_reader.as_ref().is_none_or(JoinHandle::is_finished)
            && Instant::now() < deadline
        {
            thread::sleep(EXIT_POLL);
        }
        String::from_utf8_lossy(&lock(&self.complaints)).into_owned()
    }

    /// What the child wrote to stderr, on one line and with a colon before it; empty if it was silent.
    pub fn said(&self) -> String {
        let text = self.all_said();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return String::new();
        }
        let more = if lines.len() > SAID_LINES_MAX { "; ..." } else { "" };
        format!(": {}{more}", lines[..lines.len().min(SAID_LINES_MAX)].join("; "))
    }

    fn wait(&mut self, deadline: Instant) -> Result<ExitStatus> {
        loop {
            let mut running = lock(&RUNNING);
            if let Some(status) = self.child.try_wait().with_context(|| format!("waiting for `{}`", self.command))? {
                running.remove(&self.child.id());
                self.reaped = true;
                return Ok(status);
            }
            drop(running);
            if Instant::now() >= deadline {
                bail!("`{}` closed its output but did not end", self.command);
            }
            thread::sleep(EXIT_POLL);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        let mut running = lock(&RUNNING);
        kill_group(self.child.id());
        let _ = self.child.wait();
        running.remove(&self.child.id());
    }
}

fn collect(mut from: impl Read + Send + 'static, into: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut chunk = [0; 1024];
        while let Ok(count) = from.read(&mut chunk) {
            if count == 0 {
                return;
            }
            let mut kept = lock(&into);
            let room = STDERR_BYTES_MAX.saturating_sub(kept.len());
            kept.extend_from_slice(&chunk[..count.min(room)]);
        }
    })
}

/// Runs `start` with this thread off the cores of a measurement: what it starts inherits that. With fewer than two
/// other cores, `start` runs on any.
pub fn off_cores<T>(pair: Option<CorePair>, start: impl FnOnce() -> T) -> Result<T> {
    let before = sched_getaffinity(None).context("reading the CPU affinity")?;
    let mut others = before;
    for core in pair.into_iter().flat_map(|pair| [pair.server, pair.client]) {
        others.unset(core);
    }
    if others.count() < 2 {
        return Ok(start());
    }
    sched_setaffinity(None, &others).context("setting the CPU affinity")?;
    let started = start();
    sched_setaffinity(None, &before).context("restoring the CPU affinity")?;
    Ok(started)
}

/// Runs `start` with this thread on `core`: what it starts inherits that.
fn on_core<T>(core: Option<usize>, start: impl FnOnce() -> T) -> Result<T> {
    let Some(core) = core else { return Ok(start()) };
    let before = sched_getaffinity(None).context("reading the CPU affinity")?;
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only).with_context(|| format!("pinning a process to core {core}"))?;
    let started = start();
    sched_setaffinity(None, &before).context("restoring the CPU affinity")?;
    Ok(started)
}

/// A command as one could type it.
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Guard {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        Guard::spawn(command, None).unwrap()
    }

    fn is_alive(pid: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
    }

    #[test]
    fn lines_are_returned_up_to_the_end() {
        let mut guard = shell("echo noise; echo ready 7; echo a; echo b");
        assert_eq!(guard.line(SOON, |line| line.starts_with("ready")).unwrap(), "ready 7");
        assert_eq!(guard.finish(SOON).unwrap(), ["a", "b"]);
    }

    #[test]
    fn a_failure_names_the_command_and_what_it_said() {
        let error = shell("echo 'no lane' >&2; exit 3").finish(SOON).unwrap_err().to_string();
        assert!(
            error.contains("/bin/sh -c") && error.contains("exit status: 3") && error.ends_with(": no lane"),
            "{error}"
        );
    }

    #[test]
    fn a_talkative_failure_is_cut_short() {
        let error =
            shell("for line in 1 2 3 4 5; do echo line $line >&2; done; exit 1").finish(SOON).unwrap_err().to_string();
        assert!(error.ends_with(": line 1; line 2; line 3; ..."), "{error}");
    }

    #[test]
    fn a_child_that_ends_early_is_an_error_not_a_wait() {
        let error = shell("exit 0").line(SOON, |_| true).unwrap_err().to_string();
        assert!(error.contains("ended before it was ready"), "{error}");
    }

    #[test]
    fn a_child_that_never_ends_is_an_error_and_is_killed() {
        let error = shell("sleep 600").finish(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("did not end within"), "{error}");
    }

    #[test]
    fn dropping_a_guard_kills_grandchildren_too() {
        let mut guard = shell("sleep 600 & echo $!; wait");
        let grandchild = guard.line(SOON, |_| true).unwrap();
        assert!(is_alive(&grandchild));
        drop(guard);
        let deadline = Instant::now() + SOON;
        while is_alive(&grandchild) {
            assert!(Instant::now() < deadline, "process {grandchild} survived its guard");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    #[ignore = "started by a_signal_takes_the_children_along"]
    fn holds_a_child_until_told_to_stop() {
        stop_children_on_signal();
        let scratch = Scratch::new().unwrap();
        let mut guard = shell("echo $$; exec sleep 600");
        println!("\nholding {} {}", guard.line(SOON, |_| true).unwrap(), scratch.path().display());
        guard.finish(Duration::from_secs(600)).unwrap();
    }

    #[test]
    fn a_signal_takes_the_children_along() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process::tests::holds_a_child_until_told_to_stop", "--ignored", "--nocapture"]);
        let mut holder = Guard::spawn(command, None).unwrap();
        let line = holder.line(SOON, |line| line.starts_with("holding ")).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        assert!(is_alive(words[1]) && Path::new(words[2]).is_dir());
        let pid = Pid::from_raw(i32::try_from(holder.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        let status = holder.wait(Instant::now() + SOON).unwrap();
        assert_eq!(status.code(), Some(SIGNALLED + SIGTERM));
        let deadline = Instant::now() + SOON;
        while is_alive(words[1]) {
            assert!(Instant::now() < deadline, "process {} survived", words[1]);
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!Path::new(words[2]).exists());
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Guard::spawn(Command::new("/nonexistent/probe"), None).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/probe`"), "{error:#}");
    }

    #[test]
    fn ignored_signals_are_read() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\n"), 1 << 12 | 1);
        assert_eq!(ignored_signals("SigIgn:\tnonsense"), 0);
    }

    #[test]
    fn a_pinned_child_sees_one_core_and_we_keep_ours() {
        let before = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU).find(|core| before.is_set(*core)).unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "grep Cpus_allowed_list /proc/self/status"]);
        let lines = Guard::spawn(command, Some(core)).unwrap().finish(SOON).unwrap();
        assert_eq!(lines, [format!("Cpus_allowed_list:\t{core}")]);
        assert!(sched_getaffinity(None).unwrap() == before);
    }

    #[test]
    fn commands_are_written_as_one_would_type_them() {
        let mut command = Command::new("redis-server");
        command.args(["--save", "", "it's"]);
        assert_eq!(command_line(&command), r"redis-server --save '' 'it'\''s'");
    }
}
