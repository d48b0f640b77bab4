//! The proxy as a child process, which is started again whenever it ends.

use std::error::Error;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use control::proxy::{Configuration, FromProxy, Report, ToProxy, VERSION, send_device};
use control::{Channel, Received};
use fabric::device::Device;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, pidfd_send_signal};
use tracing::{info, warn};

use crate::adopted_proxy::AdoptedProxy;
use crate::retained_connections::RetainedConnections;

/// Delay before a proxy that failed early is started again, which doubles with each failure.
const RESTART_DELAY_NS_MIN: u64 = 50_000_000;
const RESTART_DELAY_NS_MAX: u64 = 5_000_000_000;
/// Run time after which a proxy counts as having started successfully.
const STABLE_NS: u64 = 10_000_000_000;

/// Limit for a killed proxy to end.
const KILL_TIMEOUT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Limit for a report, which needs an answer of all threads of the proxy on a machine that may be busy.
const REPORT_TIMEOUT_NS: u64 = 10_000_000_000;

/// The monitor's handle of its proxy.
pub struct ProxyChild {
    command: PathBuf,
    log: PathBuf,
    configuration: Configuration,
    running: Option<Running>,
    start_at_ns: u64,
    restart_delay_ns: u64,
    starts: u64,
    /// Connections that the next proxy continues.
    retained: RetainedConnections,
    /// The proxy of the previous monitor, if this monitor adopts it.
    adopted: Option<AdoptedProxy>,
    /// Time since when no proxy has been ready.
    lost_at_ns: Option<u64>,
    /// The proxy's last report.
    pub report: Report,
}

/// The process of a proxy.
enum Process {
    /// A child of this monitor.
    Child(Child),
    /// A child of another monitor, which this monitor cannot wait for: its process number and descriptor.
    Adopted(Pid, OwnedFd),
}

impl Process {
    fn id(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Adopted(pid, _) => pid.as_raw_nonzero().get() as u32,
        }
    }

    /// Kills the process and waits for its end. Returns the exit status, as far as it is known. A child that has ended
    /// by itself keeps its process number until it is waited for.
    fn end(&mut self) -> std::io::Result<String> {
        match self {
            Self::Child(child) => {
                let _ = child.kill();
                child.wait().map(|status| status.to_string())
            }
            Self::Adopted(_, process) => {
                let _ = pidfd_send_signal(&*process, Signal::KILL);
                let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&KILL_TIMEOUT))?;
                let late = || std::io::Error::other("a killed process that does not end");
                (ended > 0).then(|| "adopted".to_owned()).ok_or_else(late)
            }
        }
    }
}

struct Running {
    process: Process,
    channel: Channel,
    is_ready: bool,
    started_at_ns: u64,
    /// Time of the pending request for a report.
    report_requested_at_ns: Option<u64>,
}

impl ProxyChild {
    /// Returns a proxy to be started as `COMMAND proxy`, which writes to `log` and continues the retained connections.
    /// The first start adopts the given proxy instead, if there is one.
    pub fn new(
        command: PathBuf,
        log: PathBuf,
        configuration: Configuration,
        (retained, adopted): (RetainedConnections, Option<AdoptedProxy>),
    ) -> Self {
        Self {
            command,
            log,
            configuration,
            running: None,
            start_at_ns: 0,
            restart_delay_ns: RESTART_DELAY_NS_MIN,
            starts: 0,
            retained,
            adopted,
            lost_at_ns: Some(0),
            report: Report::default(),
        }
    }

    /// Returns the process number, and whether the proxy has mapped the device.
    pub fn process(&self) -> Option<(u32, bool)> {
        self.running.as_ref().map(|running| (running.process.id(), running.is_ready))
    }

    /// Returns whether the proxy accepts messages about links and listeners.
    pub fn is_ready(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.is_ready)
    }

    /// Returns the number of restarts.
    pub fn restarts(&self) -> u64 {
        self.starts.saturating_sub(1)
    }

    /// Returns the channel, for polling.
    pub fn channel(&self) -> Option<&Channel> {
        self.running.as_ref().map(|running| &running.channel)
    }

    /// Returns when [`ProxyChild::start`] has to be called next.
    pub fn due_ns(&self) -> Option<u64> {
        self.running.is_none().then_some(self.start_at_ns)
    }

    /// Starts the proxy if it does not run and its restart delay is over.
    pub fn start(&mut self, device: &Device, now_ns: u64) {
        self.drop_expired(now_ns);
        if self.running.is_some() || now_ns < self.start_at_ns {
            return;
        }
        self.starts += 1;
        let adopted = self.adopted.take();
        let (what, begun) = match adopted {
            Some(adopted) => ("the proxy of the previous monitor is adopted", self.adopt(adopted, device, now_ns)),
            None => ("proxy started", self.spawn(device, now_ns)),
        };
        match begun {
            Ok(running) => {
                info!(pid = running.process.id(), starts = self.starts, "{what}");
                self.running = Some(running);
            }
            Err(error) => {
                warn!("the proxy cannot be started: {error}");
                self.schedule_restart(now_ns);
            }
        }
    }

    /// Adopts another monitor's proxy. Messages before the device do not affect its connections.
    fn adopt(&self, adopted: AdoptedProxy, device: &Device, now_ns: u64) -> Result<Running, Box<dyn Error>> {
        let AdoptedProxy { pid, process, channel } = adopted;
        let process = Process::Adopted(pid, process);
        let running =
            Running { process, channel, is_ready: false, started_at_ns: now_ns, report_requested_at_ns: None };
        let Configuration { nodes, access, .. } = self.configuration.clone();
        running.channel.send(&ToProxy::Change { nodes, access }, &[])?;
        let (bytes, descriptors) = device.hand_over()?;
        send_device(&running.channel, bytes, &descriptors)?;
        Ok(running)
    }

    /// Resets retained connections if no proxy has become ready in time.
    fn drop_expired(&mut self, now_ns: u64) {
        let is_late = |lost_at_ns| now_ns.saturating_sub(lost_at_ns) > self.configuration.return_ns;
        if self.retained.len() > 0 && self.lost_at_ns.is_some_and(is_late) {
            warn!(connections = self.retained.len(), "no proxy became ready in time: retained connections are reset");
            self.retained.clear();
        }
    }

    fn spawn(&self, device: &Device, now_ns: u64) -> Result<Running, Box<dyn Error>> {
        let (own, childs) = Channel::pair()?;
        // Proxies of one monitor share a log.
        let is_first = self.starts == 1;
        let log = File::options().create(true).write(true).truncate(is_first).append(!is_first).open(&self.log)?;
        let mut command = Command::new(&self.command);
        // The channel is the proxy's standard input, so that its descriptor number needs no agreement.
        command.arg("proxy").stdin(childs.into_descriptor()).stdout(Stdio::null()).stderr(log);
        command.env("CROSSLANE_RACK", &self.configuration.rack_directory);
        let process = Process::Child(command.spawn()?);
        let running =
            Running { process, channel: own, is_ready: false, started_at_ns: now_ns, report_requested_at_ns: None };
        running.channel.send(&ToProxy::Configure(Box::new(self.configuration.clone())), &[])?;
        self.retained.send_all(&running.channel)?;
        let (bytes, descriptors) = device.hand_over()?;
        send_device(&running.channel, bytes, &descriptors)?;
        Ok(running)
    }

    fn schedule_restart(&mut self, now_ns: u64) {
        self.start_at_ns = now_ns.saturating_add(self.restart_delay_ns);
        self.restart_delay_ns = (2 * self.restart_delay_ns).min(RESTART_DELAY_NS_MAX);
    }

    /// Sends a message if the proxy is ready. Returns whether it was sent.
    pub fn send(&self, message: &ToProxy) -> bool {
        let Some(running) = self.running.as_ref().filter(|running| running.is_ready) else { return false };
        let sent = running.channel.send(message, &[]);
        if let Err(error) = &sent {
            warn!("sending {message:?} to the proxy: {error}");
        }
        sent.is_ok()
    }

    /// Requests a report unless one is pending. Returns false if one is overdue, which means that the proxy hangs.
    pub fn check_alive(&mut self, now_ns: u64) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| running.is_ready) else { return true };
        match running.report_requested_at_ns {
            Some(report_requested_at_ns) => now_ns.saturating_sub(report_requested_at_ns) <= REPORT_TIMEOUT_NS,
            None => {
                running.report_requested_at_ns = Some(now_ns);
                // A proxy that does not read its socket fails to report, too.
                let _ = running.channel.send(&ToProxy::Report, &[]);
                true
            }
        }
    }

    /// Updates nodes and access rules. Returns false if a running proxy could not be informed.
    pub fn reconfigure(&mut self, configuration: Configuration) -> bool {
        self.configuration = configuration;
        let Some(running) = &self.running else { return true };
        let Configuration { nodes, access, .. } = self.configuration.clone();
        let sent = running.channel.send(&ToProxy::Change { nodes, access }, &[]);
        if let Err(error) = &sent {
            warn!("sending the changed rack to the proxy: {error}");
        }
        sent.is_ok()
    }

    /// Sends changes of the device. Returns false if a running proxy could not be informed.
    pub fn renew(&self, device: &Device) -> bool {
        let Some(running) = &self.running else { return true };
        let renewed = device.hand_over().map_err(|error| error.to_string()).and_then(|(bytes, descriptors)| {
            let descriptors: Vec<OwnedFd> = descriptors;
            send_device(&running.channel, bytes, &descriptors).map_err(|error| error.to_string())
        });
        if let Err(error) = &renewed {
            warn!("sending new doorbells to the proxy: {error}");
        }
        renewed.is_ok()
    }

    /// Receives a message. Returns `None` if none is pending, and an error if the proxy has ended or violates the
    /// protocol.
    pub fn receive(&mut self) -> Result<Option<FromProxy>, String> {
        let Some(running) = &mut self.running else { return Ok(None) };
        match running.channel.receive::<FromProxy>() {
            Ok(Received::Message(FromProxy::Ready { version }, _)) if version != VERSION => {
                Err(format!("killed because it is of another release (version {version}, here {VERSION})"))
            }
            Ok(Received::Message(message, descriptors)) => {
                match &message {
                    FromProxy::Ready { .. } => (running.is_ready, self.lost_at_ns) = (true, None),
                    FromProxy::Report(report) => {
                        running.report_requested_at_ns = None;
                        self.report.clone_from(report);
                    }
                    FromProxy::Deposit(connection) => {
                        self.retained.deposit_all(vec![*connection], descriptors);
                    }
                    FromProxy::Deposits(all) => {
                        self.retained.deposit_all(all.clone(), descriptors);
                    }
                    FromProxy::Withdraw { peer, span } => self.retained.withdraw(*peer, *span),
                    _ => {}
                }
                Ok(Some(message))
            }
            Ok(Received::Nothing) => Ok(None),
            Ok(Received::Ended) => Err("by itself".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Kills the proxy and waits for its end, after which it accesses no memory. It is started again after a delay.
    pub fn end(&mut self, reason: &str, now_ns: u64) {
        let Some(running) = &mut self.running else { return };
        match running.process.end() {
            Ok(status) => warn!(%status, "the proxy has ended: {reason}; its log is {}", self.log.display()),
            Err(error) => warn!("waiting for the proxy: {error}"),
        }
        // Its last messages may be about retained connections.
        while matches!(self.receive(), Ok(Some(_))) {}
        let Some(running) = self.running.take() else { return };
        self.lost_at_ns.get_or_insert(now_ns);
        let started_at_ns = running.started_at_ns;
        self.report = Report::default();
        if now_ns.saturating_sub(started_at_ns) > STABLE_NS {
            self.restart_delay_ns = RESTART_DELAY_NS_MIN;
        }
        self.schedule_restart(now_ns);
    }
}

/// Ends and reaps a proxy even if sending its first messages failed.
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.channel.send(&ToProxy::Stop, &[]);
        let _ = self.process.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_proxy_kills_and_reaps_it() {
        let (channel, childs) = Channel::pair().unwrap();
        let child = test_support::spawn::sleeper(childs.into_descriptor().into());
        let process = std::path::Path::new("/proc").join(child.id().to_string());
        assert!(process.exists());
        drop(Running {
            process: Process::Child(child),
            channel,
            is_ready: false,
            started_at_ns: 0,
            report_requested_at_ns: None,
        });
        assert!(!process.exists(), "the process was not reaped");
    }
}
