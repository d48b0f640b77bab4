//! Child processes that cannot outlive this one. Each is a process group, which is killed when its guard is dropped and
//! when this process receives a signal to stop.

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
/// Lines of stderr that an error shows: the cause is in the first ones, before a backtrace.
const STDERR_LINES_MAX: usize = 3;
/// Interval of polls for the exit of a child.
const EXIT_POLL: Duration = Duration::from_micros(500);
/// Longest wait for the end of a child's stderr after its exit.
const STDERR_DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of a cleanup command.
const CLEANUP_LIMIT: Duration = Duration::from_secs(30);
/// Base of the exit status of a program that signal N killed, as in shells: 128 + N.
const SIGNALLED: i32 = 128;

/// Process groups that are not reaped. Children are reaped under the lock, so that a number in the set is never that of
/// another process.
static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static SCRATCH: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static CLEANUPS: Mutex<BTreeMap<u64, CommandSpec>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs a handler: SIGINT, SIGTERM and SIGHUP kill every child and remove every scratch directory before they end
/// this process.
pub fn stop_children_on_signal() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = ignored_signals(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        match Signals::new(wanted) {
            Ok(mut signals) => drop(thread::spawn(move || signals.forever().next().map(exit_on))),
            Err(error) => eprintln!("crosslane: children may survive Ctrl-C: {error}"),
        }
    });
}

/// Returns the mask of ignored signals. These stay ignored, which `nohup` relies on.
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn exit_on(signal: i32) {
    // The locks are held until exit, so that no further child can start.
    let running = lock(&RUNNING);
    running.iter().for_each(|group| kill_group(*group));
    let scratch = lock(&SCRATCH);
    let cleanups = std::mem::take(&mut *lock(&CLEANUPS));
    cleanups.into_values().for_each(|command| drop(command.run()));
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

/// A directory that is removed with its contents on drop and on a signal.
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

/// A command and its additional environment variables.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    /// Program and arguments.
    pub arguments: Vec<OsString>,
    /// Variables to set for it.
    pub environment: Vec<(OsString, OsString)>,
}

impl CommandSpec {
    /// Returns the command.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.arguments[0]);
        command.args(&self.arguments[1..]).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs the command to its end. It takes no lock of this module, because the signal handler holds them.
    fn run(&self) -> Result<()> {
        let mut command = self.command();
        let written = command_line(&command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let deadline = Instant::now() + CLEANUP_LIMIT;
        loop {
            match child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("`{written}` failed ({status})"),
                None if Instant::now() >= deadline => {
                    let _ = child.kill();
                    bail!("`{written}` did not end within {} s", CLEANUP_LIMIT.as_secs());
                }
                None => thread::sleep(EXIT_POLL),
            }
        }
    }
}

/// A command that undoes an earlier one: it runs on drop and on a signal.
pub struct CleanupCommand(u64);

impl CleanupCommand {
    /// Registers a command.
    pub fn new(command: CommandSpec) -> Self {
        let mut cleanups = lock(&CLEANUPS);
        let number = cleanups.keys().last().map_or(0, |last| last + 1);
        cleanups.insert(number, command);
        Self(number)
    }
}

impl Drop for CleanupCommand {
    fn drop(&mut self) {
        let command = lock(&CLEANUPS).remove(&self.0);
        if let Some(Err(error)) = command.map(|command| command.run()) {
            eprintln!("crosslane: {error:#}");
        }
    }
}

/// A running child with its output. It is killed on drop.
pub struct ChildGuard {
    child: Child,
    command: String,
    lines: Receiver<String>,
    stderr_bytes: Arc<Mutex<Vec<u8>>>,
    stderr_reader: Option<JoinHandle<()>>,
    reaped: bool,
}

impl ChildGuard {
    /// Starts `command`, pinned to `core` if one is given.
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
                    // If the receiver is dropped, keep reading, because the child would block on a full pipe.
                    let _ = sender.send(line);
                }
            });
        }
        let stderr_bytes = Arc::default();
        let stderr_reader = child.stderr.take().map(|stderr| collect(stderr, Arc::clone(&stderr_bytes)));
        Ok(Self { child, command: written, lines, stderr_bytes, stderr_reader, reaped: false })
    }

    /// Returns the next line that `wanted` accepts and skips the lines before it.
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

    /// Does the same as [`ChildGuard::finish`] and keeps the guard, whose stderr can then be read.
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

    /// Returns an error of one line: the command, `what`, and the child's stderr.
    fn failure(&self, what: &str) -> anyhow::Error {
        anyhow!("`{}` {what}{}", self.command, self.stderr_summary())
    }

    /// Returns whether the child has ended and was reaped.
    pub fn has_ended(&self) -> bool {
        self.reaped
    }

    /// Returns what the child wrote to stderr, up to a limit.
    pub fn stderr_text(&self) -> String {
        // The last bytes may still be in the pipe, but a grandchild that holds the pipe open must not block this.
        let deadline = Instant::now() + STDERR_DRAIN_LIMIT;
        while self.reaped
            && !self.stderr_reader.as_ref().is_none_or(JoinHandle::is_finished)
            && Instant::now() < deadline
        {
            thread::sleep(EXIT_POLL);
        }
        String::from_utf8_lossy(&lock(&self.stderr_bytes)).into_owned()
    }

    /// Returns the child's stderr in one line with a colon before it; empty if it wrote nothing.
    pub fn stderr_summary(&self) -> String {
        let text = self.stderr_text();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return String::new();
        }
        let more = if lines.len() > STDERR_LINES_MAX { "; ..." } else { "" };
        format!(": {}{more}", lines[..lines.len().min(STDERR_LINES_MAX)].join("; "))
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

impl Drop for ChildGuard {
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

/// Runs `start` with this thread excluded from the cores of a measurement; the children that it starts inherit that. If
/// fewer than two other cores remain, `start` runs on any.
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

/// Runs `start` with this thread pinned to `core`; the children that it starts inherit that.
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

/// Returns a command as it could be typed in a shell.
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

    fn shell(script: &str) -> ChildGuard {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        ChildGuard::spawn(command, None).unwrap()
    }

    fn is_alive(pid: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
    }

    #[test]
    fn the_remaining_lines_are_returned() {
        let mut guard = shell("echo noise; echo ready 7; echo a; echo b");
        assert_eq!(guard.line(SOON, |line| line.starts_with("ready")).unwrap(), "ready 7");
        assert_eq!(guard.finish(SOON).unwrap(), ["a", "b"]);
    }

    #[test]
    fn a_failure_names_the_command_and_its_stderr() {
        let error = shell("echo 'no lane' >&2; exit 3").finish(SOON).unwrap_err().to_string();
        assert!(
            error.contains("/bin/sh -c") && error.contains("exit status: 3") && error.ends_with(": no lane"),
            "{error}"
        );
    }

    #[test]
    fn a_long_stderr_is_truncated_in_an_error() {
        let error =
            shell("for line in 1 2 3 4 5; do echo line $line >&2; done; exit 1").finish(SOON).unwrap_err().to_string();
        assert!(error.ends_with(": line 1; line 2; line 3; ..."), "{error}");
    }

    #[test]
    fn a_child_that_ends_early_is_an_error_without_a_timeout() {
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
    #[ignore = "started by a_signal_kills_the_children"]
    fn holds_a_child_until_a_signal() {
        stop_children_on_signal();
        let scratch = Scratch::new().unwrap();
        let mut guard = shell("echo $$; exec sleep 600");
        println!("\nholding {} {}", guard.line(SOON, |_| true).unwrap(), scratch.path().display());
        guard.finish(Duration::from_secs(600)).unwrap();
    }

    #[test]
    fn a_signal_kills_the_children() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process::tests::holds_a_child_until_a_signal", "--ignored", "--nocapture"]);
        let mut holder = ChildGuard::spawn(command, None).unwrap();
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
        let error = ChildGuard::spawn(Command::new("/nonexistent/probe"), None).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/probe`"), "{error:#}");
    }

    #[test]
    fn ignored_signals_are_read() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\n"), 1 << 12 | 1);
        assert_eq!(ignored_signals("SigIgn:\tnonsense"), 0);
    }

    #[test]
    fn a_pinned_child_has_one_core_and_the_parent_keeps_its_affinity() {
        let before = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU).find(|core| before.is_set(*core)).unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "grep Cpus_allowed_list /proc/self/status"]);
        let lines = ChildGuard::spawn(command, Some(core)).unwrap().finish(SOON).unwrap();
        assert_eq!(lines, [format!("Cpus_allowed_list:\t{core}")]);
        assert!(sched_getaffinity(None).unwrap() == before);
    }

    #[test]
    fn commands_are_quoted_as_in_a_shell() {
        let mut command = Command::new("redis-server");
        command.args(["--save", "", "it's"]);
        assert_eq!(command_line(&command), r"redis-server --save '' 'it'\''s'");
    }
}
