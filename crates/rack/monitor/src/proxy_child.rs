//! The proxy: a child that is started again whenever it ends.

use std::error::Error;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use control::proxy::{Configuration, FromProxy, Report, ToProxy, VERSION, send_device};
use control::{Channel, Received};
use fabric::device::Device;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};

use crate::store::Store;

/// How long to wait before starting a proxy again that lived shortly, the first time and at most.
const PAUSE_NS_MIN: u64 = 50_000_000;
const PAUSE_NS_MAX: u64 = 5_000_000_000;
/// A proxy that lived this long did not fail at the start.
const LIVED_NS: u64 = 10_000_000_000;

/// How long the kernel may take to end a killed proxy.
const END_LIMIT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// How long a proxy may take to report: all its threads have to answer for that, on a machine that may be busy.
const REPORT_NS_MAX: u64 = 10_000_000_000;

/// What the monitor knows of its proxy.
pub struct ProxyChild {
    command: PathBuf,
    log: PathBuf,
    configuration: Configuration,
    running: Option<Running>,
    start_at_ns: u64,
    pause_ns: u64,
    starts: u64,
    /// What the next proxy goes on with.
    store: Store,
    /// The last monitor's, which goes on for this one.
    adopted: Option<AdoptedProxy>,
    /// Since when there has been no proxy that works.
    lost_at_ns: Option<u64>,
    /// What it last reported.
    pub report: Report,
}

/// A proxy that has outlived the monitor that started it.
pub struct AdoptedProxy {
    pid: Pid,
    /// Readable once it has ended.
    process: OwnedFd,
    channel: Channel,
}

impl AdoptedProxy {
    /// Whoever listens at the other end.
    ///
    /// # Errors
    /// It has ended.
    pub fn behind(channel: Channel) -> Result<Self, Errno> {
        let pid = rustix::net::sockopt::socket_peercred(&channel)?.pid;
        Ok(Self { pid, process: pidfd_open(pid, PidfdFlags::empty())?, channel })
    }
}

/// A proxy's process.
enum Process {
    /// This monitor has started it.
    Own(Child),
    /// Another one has; who waits for it there is not this monitor's business.
    Adopted(Pid, OwnedFd),
}

impl Process {
    fn id(&self) -> u32 {
        match self {
            Self::Own(child) => child.id(),
            Self::Adopted(pid, _) => pid.as_raw_nonzero().get() as u32,
        }
    }

    /// It may have ended by itself; the kernel keeps its number until it was waited for. How it has ended, as far as is
    /// known.
    fn end(&mut self) -> std::io::Result<String> {
        match self {
            Self::Own(child) => {
                let _ = child.kill();
                child.wait().map(|status| status.to_string())
            }
            Self::Adopted(_, process) => {
                let _ = pidfd_send_signal(&*process, Signal::KILL);
                let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&END_LIMIT))?;
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
    /// Since when a report is due that was asked for to see whether it works.
    asked_at_ns: Option<u64>,
}

impl ProxyChild {
    /// A proxy that is to be started: `COMMAND proxy`, which writes to `log`, and goes on with what is in `store`.
    /// Instead of starting one, it first goes on with what `store` has `adopted`.
    pub fn new(
        command: PathBuf,
        log: PathBuf,
        configuration: Configuration,
        (store, adopted): (Store, Option<AdoptedProxy>),
    ) -> Self {
        Self {
            command,
            log,
            configuration,
            running: None,
            start_at_ns: 0,
            pause_ns: PAUSE_NS_MIN,
            starts: 0,
            store,
            adopted,
            lost_at_ns: Some(0),
            report: Report::default(),
        }
    }

    /// Its process, and whether it has the device.
    pub fn process(&self) -> Option<(u32, bool)> {
        self.running.as_ref().map(|running| (running.process.id(), running.is_ready))
    }

    /// Whether it can be told of links and listeners.
    pub fn is_ready(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.is_ready)
    }

    /// How often it was started again.
    pub fn restarts(&self) -> u64 {
        self.starts.saturating_sub(1)
    }

    /// Its channel, to poll.
    pub fn channel(&self) -> Option<&Channel> {
        self.running.as_ref().map(|running| &running.channel)
    }

    /// When [`ProxyChild::start`] has something to do.
    pub fn due_ns(&self) -> Option<u64> {
        self.running.is_none().then_some(self.start_at_ns)
    }

    /// Starts it if it is time to.
    pub fn start(&mut self, device: &Device, now_ns: u64) {
        self.end_late(now_ns);
        if self.running.is_some() || now_ns < self.start_at_ns {
            return;
        }
        self.starts += 1;
        let adopted = self.adopted.take();
        let (what, begun) = match adopted {
            Some(adopted) => ("the last monitor's proxy goes on", self.go_on(adopted, device, now_ns)),
            None => ("proxy started", self.spawn(device, now_ns)),
        };
        match begun {
            Ok(running) => {
                info!(pid = running.process.id(), starts = self.starts, "{what}");
                self.running = Some(running);
            }
            Err(error) => {
                warn!("no proxy yet: {error}");
                self.rest(now_ns);
            }
        }
    }

    /// With another monitor's proxy. What it is told before the device changes nothing of what it has.
    fn go_on(&self, adopted: AdoptedProxy, device: &Device, now_ns: u64) -> Result<Running, Box<dyn Error>> {
        let AdoptedProxy { pid, process, channel } = adopted;
        let process = Process::Adopted(pid, process);
        let running = Running { process, channel, is_ready: false, started_at_ns: now_ns, asked_at_ns: None };
        let Configuration { nodes, access, .. } = self.configuration.clone();
        running.channel.send(&ToProxy::Change { nodes, access }, &[])?;
        let (bytes, descriptors) = device.hand_over()?;
        send_device(&running.channel, bytes, &descriptors)?;
        Ok(running)
    }

    /// What was kept for a proxy that does not come is not kept for ever.
    fn end_late(&mut self, now_ns: u64) {
        let is_late = |lost_at_ns| now_ns.saturating_sub(lost_at_ns) > self.configuration.return_ns;
        if self.store.len() > 0 && self.lost_at_ns.is_some_and(is_late) {
            warn!(connections = self.store.len(), "no proxy has come: what programs have in windows is reset");
            self.store.clear();
        }
    }

    fn spawn(&self, device: &Device, now_ns: u64) -> Result<Running, Box<dyn Error>> {
        let (own, childs) = Channel::pair()?;
        // One log a monitor: what its earlier proxies said stays in it.
        let is_first = self.starts == 1;
        let log = File::options().create(true).write(true).truncate(is_first).append(!is_first).open(&self.log)?;
        let mut command = Command::new(&self.command);
        // The channel is the proxy's standard input: a descriptor that needs no agreement on its number.
        command.arg("proxy").stdin(childs.into_descriptor()).stdout(Stdio::null()).stderr(log);
        command.env("CROSSLANE_RACK", &self.configuration.rack_directory);
        let process = Process::Own(command.spawn()?);
        let running = Running { process, channel: own, is_ready: false, started_at_ns: now_ns, asked_at_ns: None };
        running.channel.send(&ToProxy::Configure(self.configuration.clone()), &[])?;
        self.store.give(&running.channel)?;
        let (bytes, descriptors) = device.hand_over()?;
        send_device(&running.channel, bytes, &descriptors)?;
        Ok(running)
    }

    fn rest(&mut self, now_ns: u64) {
        self.start_at_ns = now_ns.saturating_add(self.pause_ns);
        self.pause_ns = (2 * self.pause_ns).min(PAUSE_NS_MAX);
    }

    /// Tells it something; whether it could be told. Only once it is ready, but for the device.
    pub fn tell(&self, message: &ToProxy) -> bool {
        let Some(running) = self.running.as_ref().filter(|running| running.is_ready) else { return false };
        let told = running.channel.send(message, &[]);
        if let Err(error) = &told {
            warn!("the proxy does not take {message:?}: {error}");
        }
        told.is_ok()
    }

    /// Asks for a report, unless one is due; `false` when it has been for too long: the proxy hangs.
    pub fn is_working(&mut self, now_ns: u64) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| running.is_ready) else { return true };
        match running.asked_at_ns {
            Some(asked_at_ns) => now_ns.saturating_sub(asked_at_ns) <= REPORT_NS_MAX,
            None => {
                running.asked_at_ns = Some(now_ns);
                // One whose socket is full hangs too, as will be seen.
                let _ = running.channel.send(&ToProxy::Report, &[]);
                true
            }
        }
    }

    /// Goes on with a configuration in which nodes have joined, or rules are others; `false` when a proxy that runs
    /// does not know it now.
    pub fn reconfigure(&mut self, configuration: Configuration) -> bool {
        self.configuration = configuration;
        let Some(running) = &self.running else { return true };
        let Configuration { nodes, access, .. } = self.configuration.clone();
        let told = running.channel.send(&ToProxy::Change { nodes, access }, &[]);
        if let Err(error) = &told {
            warn!("the proxy cannot be told of the changed rack: {error}");
        }
        told.is_ok()
    }

    /// Hands over what has changed of the device; `false` when a proxy that runs does not know it now.
    pub fn renew(&self, device: &Device) -> bool {
        let Some(running) = &self.running else { return true };
        let renewed = device.hand_over().map_err(|error| error.to_string()).and_then(|(bytes, descriptors)| {
            let descriptors: Vec<OwnedFd> = descriptors;
            send_device(&running.channel, bytes, &descriptors).map_err(|error| error.to_string())
        });
        if let Err(error) = &renewed {
            warn!("the proxy cannot be told of new bells: {error}");
        }
        renewed.is_ok()
    }

    /// What it says; `None` when there is nothing, an error when it has ended or makes no sense.
    pub fn hear(&mut self) -> Result<Option<FromProxy>, String> {
        let Some(running) = &mut self.running else { return Ok(None) };
        match running.channel.receive::<FromProxy>() {
            Ok(Received::Message(FromProxy::Ready { version }, _)) if version != VERSION => {
                Err(format!("killed, for it is of another release (version {version}, here {VERSION})"))
            }
            Ok(Received::Message(message, descriptors)) => {
                match &message {
                    FromProxy::Ready { .. } => (running.is_ready, self.lost_at_ns) = (true, None),
                    FromProxy::Report(report) => {
                        running.asked_at_ns = None;
                        self.report.clone_from(report);
                    }
                    FromProxy::Deposit(kept) => {
                        descriptors.into_iter().for_each(|lifeline| self.store.deposit(*kept, lifeline));
                    }
                    FromProxy::Deposits(all) => {
                        let all = all.iter().zip(descriptors);
                        all.for_each(|(kept, lifeline)| self.store.deposit(*kept, lifeline));
                    }
                    FromProxy::Withdraw { peer, span } => self.store.withdraw(*peer, *span),
                    _ => {}
                }
                Ok(Some(message))
            }
            Ok(Received::Nothing) => Ok(None),
            Ok(Received::Ended) => Err("by itself".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Ends it for good, so that it touches nothing any more. It is started again after a pause.
    pub fn end(&mut self, reason: &str, now_ns: u64) {
        let Some(running) = &mut self.running else { return };
        match running.process.end() {
            Ok(status) => warn!(%status, "the proxy has ended: {reason}; its log is {}", self.log.display()),
            Err(error) => warn!("waiting for the proxy: {error}"),
        }
        // What it said last is of connections.
        while matches!(self.hear(), Ok(Some(_))) {}
        let Some(running) = self.running.take() else { return };
        self.lost_at_ns.get_or_insert(now_ns);
        let started_at_ns = running.started_at_ns;
        self.report = Report::default();
        if now_ns.saturating_sub(started_at_ns) > LIVED_NS {
            self.pause_ns = PAUSE_NS_MIN;
        }
        self.rest(now_ns);
    }
}

/// Also one that could not be told what to do is ended and waited for.
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
    fn a_proxy_that_is_given_up_is_ended_and_waited_for() {
        let (channel, childs) = Channel::pair().unwrap();
        let child = test_support::spawn::sleeper(childs.into_descriptor().into());
        let process = std::path::Path::new("/proc").join(child.id().to_string());
        assert!(process.exists());
        drop(Running { process: Process::Own(child), channel, is_ready: false, started_at_ns: 0, asked_at_ns: None });
        assert!(!process.exists(), "a process that nobody has waited for is still there");
    }
}
