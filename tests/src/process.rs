//! Programs that end with their guard.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tempfile::TempDir;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A program in its own process group. Dropping it kills the group and waits for the program.
pub struct Process {
    child: Child,
    name: String,
    outputs: TempDir,
    reaped: Option<ExitStatus>,
}

/// A program that has ended, or that was killed when its time was over.
#[derive(Debug)]
pub struct Finished {
    /// The command line.
    pub name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Whether it was killed because its time was over.
    pub timed_out: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Process {
    /// Starts a program without input.
    pub fn start(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    /// Starts a program whose input the caller writes.
    pub fn start_with_input(command: &mut Command) -> (Self, ChildStdin) {
        let mut process = Self::start_with(command, Stdio::piped());
        let input = process.child.stdin.take().expect("a piped input");
        (process, input)
    }

    /// Starts a program whose standard input is a socket.
    pub fn start_on(command: &mut Command, socket: OwnedFd) -> Self {
        Self::start_with(command, socket.into())
    }

    fn start_with(command: &mut Command, input: Stdio) -> Self {
        let name = describe(command);
        let outputs = tempfile::tempdir().expect("a folder for outputs");
        let file = |file: &str| File::create(outputs.path().join(file)).expect("a file for outputs");
        command.stdin(input).stdout(file("stdout")).stderr(file("stderr")).process_group(0);
        let child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        Self { child, name, outputs, reaped: None }
    }

    /// Process ID, which is also the ID of the group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The processor time that it has used, in steps of 10 ms; zero once it has ended.
    pub fn processor_time(&self) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // The name of the program, which may contain blanks, ends with the last parenthesis.
        let fields = text.rsplit(") ").next().unwrap_or_default().split(' ');
        let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        Duration::from_millis(10 * ticks)
    }

    /// Its standard output until now.
    pub fn stdout(&self) -> String {
        self.output("stdout")
    }

    /// Its standard error until now.
    pub fn stderr(&self) -> String {
        self.output("stderr")
    }

    fn output(&self, file: &str) -> String {
        let bytes = fs::read(self.output_path(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn output_path(&self, file: &str) -> PathBuf {
        self.outputs.path().join(file)
    }

    /// Whether it is running. An ended program stays a zombie, so that the ID of its group is not used again.
    pub fn is_running(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        self.reaped.is_none() && matches!(waitid(WaitId::Pid(self.group()), options), Ok(None))
    }

    /// Waits until a fact about the running program holds; panics if it ends first or the time is over.
    pub fn wait_until(&self, what: &str, limit: Duration, mut holds: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + limit;
        while !holds(self) {
            let why = if !self.is_running() {
                "it ended"
            } else if Instant::now() > deadline {
                "time is over"
            } else {
                thread::sleep(POLL_INTERVAL);
                continue;
            };
            panic!("{}: waited for {what}: {why}\n{}{}", self.name, self.stdout(), self.stderr());
        }
    }

    /// Waits for its end, or kills it when the time is over.
    pub fn wait(self, limit: Duration) -> Finished {
        self.wait_while(limit, || {})
    }

    /// As [`Process::wait`], calling `poll` repeatedly meanwhile.
    pub fn wait_while(mut self, limit: Duration, mut poll: impl FnMut()) -> Finished {
        let deadline = Instant::now() + limit;
        let mut timed_out = false;
        while self.is_running() && !timed_out {
            poll();
            thread::sleep(POLL_INTERVAL);
            timed_out = Instant::now() > deadline;
        }
        self.finish(timed_out)
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        self::signal(self.pid(), signal);
    }

    /// Sends SIGTERM, and kills it if it does not end within the limit.
    pub fn stop(self, limit: Duration) -> Finished {
        let _ = rustix::process::kill_process(self.group(), Signal::TERM);
        self.wait(limit)
    }

    fn finish(&mut self, timed_out: bool) -> Finished {
        let status = self.end();
        Finished { name: self.name.clone(), status, timed_out, stdout: self.stdout(), stderr: self.stderr() }
    }

    fn group(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Kills the rest of the group, then reaps the leader: in this order the ID cannot belong to another group.
    fn end(&mut self) -> ExitStatus {
        if let Some(status) = self.reaped {
            return status;
        }
        let _ = kill_process_group(self.group(), Signal::KILL);
        let status = self.child.wait().unwrap_or_else(|error| panic!("{}: {error}", self.name));
        self.reaped = Some(status);
        status
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

impl Finished {
    /// Exit code; `None` after a signal.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Panics unless it exited with 0 by itself.
    #[track_caller]
    pub fn must_succeed(self) -> Self {
        assert!(self.status.success() && !self.timed_out, "{self}");
        self
    }

    /// Panics unless it exited with this code by itself.
    #[track_caller]
    pub fn must_exit_with(self, code: i32) -> Self {
        assert!(self.code() == Some(code) && !self.timed_out, "want exit code {code}: {self}");
        self
    }

    /// Panics unless it exited with this code and one line of `crosslane` on standard error that contains these words.
    #[track_caller]
    pub fn must_fail_in_one_line(self, code: i32, words: &[&str]) -> Self {
        self.must_exit_with(code).must_print_one_line(words)
    }

    /// Panics unless it printed one line of `crosslane` on standard error that contains these words.
    #[track_caller]
    pub fn must_print_one_line(self, words: &[&str]) -> Self {
        const LINE_CHARS_MAX: usize = 500;
        let text = self.stderr.trim_end();
        assert_eq!(text.lines().count(), 1, "want one line: {self}");
        assert!(text.starts_with("crosslane: ") && text.len() <= LINE_CHARS_MAX, "{self}");
        words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is missing: {self}"));
        self
    }
}

/// Sends a signal to a running process, by its number.
#[track_caller]
pub fn signal(pid: impl Into<u64>, signal: Signal) {
    let pid = Pid::from_raw(pid.into() as i32).expect("a process");
    rustix::process::kill_process(pid, signal).expect("it runs");
}

/// A process that is stopped until this is dropped.
pub struct Stopped(u64);

impl Stopped {
    /// Stops a running process, by its number.
    #[track_caller]
    pub fn new(pid: impl Into<u64>) -> Self {
        let pid = pid.into();
        signal(pid, Signal::STOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = match (self.timed_out, self.code(), self.status.signal()) {
            (true, _, _) => "was killed after its time was over".to_owned(),
            (_, Some(code), _) => format!("exited with {code}"),
            (_, _, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
        };
        write!(f, "{} {how}\n--- stdout\n{}--- stderr\n{}", self.name, tail(&self.stdout), tail(&self.stderr))
    }
}

/// The last lines of an output.
fn tail(text: &str) -> String {
    const LINES_MAX: usize = 60;
    let lines: Vec<&str> = text.lines().collect();
    let skipped = lines.len().saturating_sub(LINES_MAX);
    let mark = if skipped > 0 { format!("... {skipped} lines\n") } else { String::new() };
    mark + &lines[skipped..].iter().map(|line| format!("{line}\n")).collect::<String>()
}

fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_guard_ends_the_whole_group() {
        let process = Process::start(Command::new("sh").args(["-c", "sleep 1000 & echo $!; wait"]));
        process.wait_until("the child's number", crate::WAIT_MAX, |process| process.stdout().ends_with('\n'));
        let stat = format!("/proc/{}/stat", process.stdout().trim());
        assert!(fs::metadata(&stat).is_ok());
        drop(process);
        crate::wait_until("end", || fs::read_to_string(&stat).map_or(true, |text| text.contains(") Z ")));
    }

    #[test]
    fn a_program_that_never_ends_is_killed_and_reported() {
        let finished = Process::start(Command::new("sleep").arg("1000")).wait(Duration::from_millis(50));
        assert!(finished.timed_out);
        assert_eq!(finished.status.signal(), Some(9));
    }

    #[test]
    fn a_finished_program_returns_its_outputs() {
        let finished = Process::start(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]));
        let finished = finished.wait(crate::WAIT_MAX).must_exit_with(3);
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
    }
}
