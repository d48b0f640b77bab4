//! One run of the client: its times, how it ended, and the end of its output.

use std::collections::VecDeque;
use std::io::{PipeReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Bytes of the client's output that are kept: its end.
const OUTPUT_BYTES_MAX: usize = 16 * 1024;
/// Lines of it that are shown.
const OUTPUT_LINES_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 300;

/// One run of the client.
pub struct Trial {
    /// From its start to its end, in seconds.
    pub wall_s: f64,
    /// User and system time of its processes, in seconds.
    pub cpu_s: f64,
    pub status: ExitStatus,
    /// The last lines of its output and its errors.
    pub output: Vec<String>,
}

impl Trial {
    /// Runs a command without input to its end, or until `stop` becomes readable.
    pub fn run(command: &mut Command, stop: &PipeReader) -> Result<Self> {
        let (mut reader, writer) = std::io::pipe().context("making a pipe for its output")?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
        let cpu_before_s = cpu_of_children_s()?;
        let started = Instant::now();
        let mut client = Group(command.spawn().context("cannot be run")?);
        // This side of the pipe would keep it open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut tail = Tail::default();
        let wall_s = tail.read_to_end_of(&client, &mut reader, stop, started)?;
        let status = client.0.wait().context("waiting for its end")?;
        Ok(Self { wall_s, cpu_s: cpu_of_children_s()? - cpu_before_s, status, output: tail.lines() })
    }
}

/// Returns the user and system time of all children that were waited for, and of their children.
fn cpu_of_children_s() -> Result<f64> {
    let usage: Usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("reading the processor time of the client")?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// A client in a process group of its own, which is killed on drop if the client still runs.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

/// The end of an output.
#[derive(Default)]
struct Tail(VecDeque<u8>);

impl Tail {
    /// Reads until the client has ended, and then what it has left in the pipe: its children may keep that open.
    /// Returns the time from the start to the end, in seconds.
    fn read_to_end_of(
        &mut self,
        client: &Group,
        reader: &mut PipeReader,
        stop: &PipeReader,
        started: Instant,
    ) -> Result<f64> {
        let end = pidfd_open(Pid::from_child(&client.0), PidfdFlags::empty()).context("watching it")?;
        let mut is_open = true;
        loop {
            let mut watched = vec![PollFd::new(&end, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            if is_open {
                watched.push(PollFd::new(&*reader, PollFlags::IN));
            }
            match poll(&mut watched, None) {
                Err(Errno::INTR) => continue,
                other => other.context("waiting for it")?,
            };
            let ready: Vec<bool> = watched.iter().map(|one| !one.revents().is_empty()).collect();
            if ready[1] {
                bail!("ended by a signal to crosslane compare; start it again");
            }
            if ready[0] {
                let wall_s = started.elapsed().as_secs_f64();
                rustix::io::ioctl_fionbio(&*reader, true).context("reading its output")?;
                while is_open && self.read(reader)? {}
                return Ok(wall_s);
            }
            is_open = is_open && (!ready[2] || self.read(reader)?);
        }
    }

    /// Reads once. Returns false at the end, and when a non-blocking pipe is empty.
    fn read(&mut self, reader: &mut PipeReader) -> Result<bool> {
        let mut buffer = [0; OUTPUT_BYTES_MAX];
        match reader.read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.0.extend(&buffer[..count]);
                self.0.drain(..self.0.len().saturating_sub(OUTPUT_BYTES_MAX));
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error).context("reading its output"),
        }
    }

    /// Returns the last lines as a terminal would show them: of a line that was written over, the last text.
    fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.lines().map(|line| line.rsplit('\r').find(|text| !text.trim().is_empty()).unwrap_or_default());
        let shown = |line: &str| -> String {
            let printable = line.trim_end().chars().map(|letter| if letter.is_control() { ' ' } else { letter });
            printable.take(LINE_CHARS_MAX).collect()
        };
        let lines: Vec<String> = lines.map(shown).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(OUTPUT_LINES_MAX)..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Trial> {
        let (stop, _writer) = std::io::pipe().unwrap();
        Trial::run(Command::new("sh").args(["-c", script]), &stop)
    }

    #[test]
    fn a_run_has_its_times_its_status_and_the_end_of_its_output() {
        let trial = shell("echo out; echo err >&2; exit 3").unwrap();
        assert_eq!(trial.output, ["out", "err"]);
        assert_eq!(trial.status.code(), Some(3));
        let busy = shell("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done").unwrap();
        assert!(busy.wall_s > 0.0 && busy.cpu_s > 0.0, "{} {}", busy.wall_s, busy.cpu_s);
    }

    #[test]
    fn of_much_output_the_last_lines_are_kept() {
        let trial = shell("i=0; while [ $i -lt 9000 ]; do i=$((i+1)); echo line $i; done").unwrap();
        assert_eq!(trial.output.len(), OUTPUT_LINES_MAX);
        assert_eq!(trial.output.last().unwrap(), "line 9000");
    }

    #[test]
    fn a_line_that_was_written_over_shows_its_last_text() {
        assert_eq!(
            shell(r"printf 'GET: 10\rGET: 20\r\n'; printf '\033[1mbold\n'").unwrap().output,
            ["GET: 20", " [1mbold"]
        );
    }

    #[test]
    fn a_child_that_outlives_the_client_does_not_delay_its_end() {
        let trial = shell("sleep 1000 & echo $!").unwrap();
        let pid: i32 = trial.output[0].parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        assert!(trial.status.success());
    }

    #[test]
    fn a_signal_ends_the_client() {
        let (stop, mut writer) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        let error = Trial::run(Command::new("sleep").arg("1000"), &stop).err().unwrap();
        assert!(format!("{error:#}").contains("ended by a signal"), "{error:#}");
    }
}
