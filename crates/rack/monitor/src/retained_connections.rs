//! Connections that outlive a proxy: the descriptors of the connections whose programs store into windows themselves.
//! While these are open, the program's socket stays connected.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use control::proxy::{
    Configuration, Handover, RetainedConnection, RetainedDescriptors, ToProxy, VERSION, send_retained,
};
use control::{Channel, ChannelError, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use crate::adopted_proxy::AdoptedProxy;

/// Maximum number of connections, far more than the windows of a rack have spans.
const RETAINED_MAX: usize = 16_384;
/// Limit for a proxy whose monitor has died to release its windows and hand over.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Retained connections by peer and span, which identify a connection.
#[derive(Debug, Default)]
pub struct RetainedConnections {
    connections: BTreeMap<(u8, u32), (RetainedConnection, RetainedDescriptors)>,
}

impl RetainedConnections {
    /// Takes over from the proxy of a monitor that has died. A proxy with a configuration that is compatible with
    /// `wanted` is adopted; otherwise its connections are returned, and it has released all windows or is dead.
    pub fn inherit(socket: &Path, wanted: Option<&Configuration>) -> (Self, Option<AdoptedProxy>) {
        let mut retained = Self::default();
        // Connecting fails if no proxy has outlived its monitor.
        let Ok(channel) = Channel::connect(socket) else { return (retained, None) };
        match retained.take_over(&channel, wanted, HANDOVER_TIMEOUT) {
            Ok(true) => match AdoptedProxy::of_channel(channel) {
                Ok(adopted) => return (retained, Some(adopted)),
                Err(error) => warn!("the proxy of the previous monitor has ended: {error}"),
            },
            Ok(false) if retained.connections.is_empty() => {}
            Ok(false) => {
                info!(
                    connections = retained.connections.len(),
                    "took over the connections of the previous monitor's proxy"
                )
            }
            Err(reason) => {
                warn!("killed the proxy of the previous monitor; its connections are reset: {reason}");
                retained.clear();
                kill_peer(&channel);
            }
        }
        (retained, None)
    }

    /// Returns whether the proxy is adopted. If not, all its retained connections have been received.
    fn take_over(
        &mut self,
        channel: &Channel,
        wanted: Option<&Configuration>,
        limit: Duration,
    ) -> Result<bool, String> {
        let deadline = Instant::now() + limit;
        loop {
            match channel.receive::<Handover>().map_err(|error| error.to_string())? {
                Received::Message(Handover { version: VERSION, configuration: Some(own), .. }, _) => {
                    let is_adopted = wanted.is_some_and(|wanted| own.is_compatible_with(wanted));
                    let request = if is_adopted { ToProxy::Adopt } else { ToProxy::Release };
                    channel.send(&request, &[]).map_err(|error| error.to_string())?;
                    if is_adopted {
                        return Ok(true);
                    }
                }
                Received::Message(Handover { version: VERSION, connections, .. }, descriptors) => {
                    self.deposit_all(connections, descriptors);
                }
                Received::Message(Handover { version, .. }, _) => {
                    return Err(format!("it is of another release (version {version}, here {VERSION})"));
                }
                Received::Ended => return Ok(false),
                Received::Nothing => {
                    let remaining = deadline.checked_duration_since(Instant::now()).ok_or("it does not respond")?;
                    let limit =
                        Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
                    let _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&limit));
                }
            }
        }
    }

    /// Adds connections with the descriptors that a message had for them.
    pub fn deposit_all(&mut self, connections: Vec<RetainedConnection>, descriptors: Vec<OwnedFd>) {
        for (connection, descriptors) in connections.into_iter().zip(RetainedDescriptors::of_message(descriptors)) {
            let key = (connection.peer, connection.span);
            if self.connections.len() < RETAINED_MAX || self.connections.contains_key(&key) {
                self.connections.insert(key, (connection, descriptors));
            }
        }
    }

    /// Removes a connection that has ended.
    pub fn withdraw(&mut self, peer: u8, span: u32) {
        self.connections.remove(&(peer, span));
    }

    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Closes all connections.
    pub fn clear(&mut self) {
        self.connections.clear();
    }

    /// Sends all connections to a proxy that starts.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send_all(&self, channel: &Channel) -> Result<(), ChannelError> {
        let all: Vec<(RetainedConnection, [BorrowedFd<'_>; 2])> =
            self.connections.values().map(|(connection, descriptors)| (*connection, descriptors.as_fds())).collect();
        send_retained(channel, &all, ToProxy::Retained)
    }
}

/// Kills the process at the other endpoint of the channel, and waits until its sockets are closed.
fn kill_peer(channel: &Channel) {
    let killed = rustix::net::sockopt::socket_peercred(channel).map(|credentials| credentials.pid);
    if killed.and_then(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL)).is_ok() {
        let limit = Timespec { tv_sec: HANDOVER_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(channel, PollFlags::HUP)], Some(&limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn connection(span: u32) -> RetainedConnection {
        RetainedConnection { peer: 1, span, number: 100 + span, ports: [40_000, 80] }
    }

    /// Returns the program's end of a connection, and the descriptors of the proxy's.
    fn ends() -> ([UnixStream; 2], [OwnedFd; 2]) {
        let [(socket, proxys), (bell, other)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        ([socket, bell], [proxys.into(), other.into()])
    }

    #[test]
    fn connections_are_sent_to_the_next_proxy_and_close_when_withdrawn() {
        let mut retained = RetainedConnections::default();
        let mut programs = Vec::new();
        for span in 0..450 {
            let (program, proxys) = ends();
            retained.deposit_all(vec![connection(span)], proxys.into());
            programs.push(program);
        }
        retained.withdraw(1, 7);
        retained.withdraw(2, 8);
        assert_eq!((retained.len(), programs[7][1].read(&mut [0]).unwrap()), (449, 0));
        let (own, proxys) = Channel::pair().unwrap();
        retained.send_all(&own).unwrap();
        retained.clear();
        let mut given = Vec::new();
        while let Received::Message(ToProxy::Retained(some), descriptors) = proxys.receive().unwrap() {
            given.extend(some.into_iter().zip(RetainedDescriptors::of_message(descriptors)));
        }
        assert!(given.iter().map(|(connection, _)| *connection).eq((0..450).filter(|span| *span != 7).map(connection)));
        for (connection, RetainedDescriptors { socket, bell }) in given {
            for (which, descriptor) in [socket, bell].into_iter().enumerate() {
                UnixStream::from(descriptor).write_all(&connection.span.to_le_bytes()).unwrap();
                let mut bytes = [0; 4];
                programs[connection.span as usize][which].read_exact(&mut bytes).unwrap();
                assert_eq!(u32::from_le_bytes(bytes), connection.span);
            }
        }
    }

    #[test]
    fn a_handover_is_accepted_from_the_same_release_only() {
        let _no_child = test_support::spawn::forbid();
        let (program, proxys) = ends();
        let (one, other) = Channel::pair().unwrap();
        let hand_over = |connections| Handover { version: VERSION, configuration: None, connections };
        send_retained(&one, &[(connection(3), proxys.each_ref().map(AsFd::as_fd))], hand_over).unwrap();
        drop((one, proxys));
        let mut retained = RetainedConnections::default();
        assert_eq!(retained.take_over(&other, None, HANDOVER_TIMEOUT), Ok(false));
        assert_eq!(retained.len(), 1);
        program[0].set_nonblocking(true).unwrap();
        assert!((&program[0]).read(&mut [0]).is_err(), "not at its end");

        let (one, other) = Channel::pair().unwrap();
        one.send(&Handover { version: VERSION + 1, ..hand_over(Vec::new()) }, &[]).unwrap();
        let refused = RetainedConnections::default().take_over(&other, None, HANDOVER_TIMEOUT).unwrap_err();
        assert!(refused.contains("another release"), "{refused}");
        assert!(
            RetainedConnections::default()
                .take_over(&other, None, Duration::ZERO)
                .unwrap_err()
                .contains("does not respond")
        );
    }
}
