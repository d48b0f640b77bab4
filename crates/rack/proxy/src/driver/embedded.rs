//! A proxy inside somebody else's loop: one thread's share of it, without the thread.
//!
//! Everything is as in a proxy of its own: the engines over the partitions of a device, programs' segments and
//! lifelines, the turns of [`Owner`] with the clock, the manners and the looks at the kernel between them. Two things
//! are not. Whoever embeds it calls [`Embedded::turn`], again and again: it never sleeps. And there is no monitor: the
//! link is trained here ([`Embedded::train`]), nobody talks over the control partition, and listeners of other nodes
//! are named by whoever embeds it.

use super::owner::{Command, Looked, Owner};
use super::to_monitor::ToMonitor;
use super::{BACKLOG, DriverError, Shared, new_bell, threads_of};
use crate::Counters;
use control::proxy::{Configuration, FromProxy};
use control::{Channel, Received};
use fabric::device::{Device, DeviceLink, Slot};
use fabric::{Link, LinkState};
use rustix::event::epoll;
use rustix::io::Errno;
use socket::rendezvous::listen_for_far;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use wait::Spin;

/// A proxy of one thread that has none.
pub struct Embedded {
    shared: Arc<Shared>,
    owner: Owner,
    commands: mpsc::Sender<Command>,
    bell: Arc<OwnedFd>,
    link: DeviceLink,
    is_up: bool,
    /// What a monitor would read.
    said: Channel,
    events: Vec<epoll::Event>,
    /// The wait that it is in; none while there is something to do.
    wait: Option<Spin>,
    /// Turns in a row with something to do.
    turns: u32,
}

impl Embedded {
    /// The proxy of a node, by what its monitor would tell it, with a link to one peer.
    ///
    /// # Errors
    /// What keeps it from running; `Order` where the configuration asks for more than one thread.
    pub fn new(setup: Configuration, device: &Device, peer: u8) -> Result<Self, DriverError> {
        let (to_monitor, said) = Channel::pair()?;
        let shared = Arc::new(Shared::new(setup, Arc::new(ToMonitor::new(to_monitor)))?);
        shared.check_room(device)?;
        let mut threads = threads_of(&shared.places);
        let (Some((_, places)), true) = (threads.pop(), threads.is_empty()) else {
            return Err(DriverError::Order("partitions for several threads"));
        };
        let (commands, orders) = mpsc::channel();
        let bell = Arc::new(new_bell().map_err(DriverError::Thread)?);
        let owner = Owner::new(Arc::clone(&shared), 0, places, orders, Arc::clone(&bell));
        let owner = owner.map_err(DriverError::Thread)?;
        let link = device.link(Slot(peer));
        let (events, wait, turns) = (Vec::with_capacity(super::owner::EVENTS_MAX), None, 0);
        let embedded = Self { shared, owner, commands, bell, link, is_up: false, said, events, wait, turns };
        embedded.order(Command::Device(device.clone()));
        Ok(embedded)
    }

    /// A step towards a link that is up; whether it is, and this end knows that the other one has begun too. Turns are
    /// to be taken meanwhile.
    pub fn train(&mut self) -> bool {
        if !self.is_up {
            self.is_up = self.link.train() == LinkState::Up;
            if self.is_up {
                self.order(Command::LinkUp { peer: self.link.peer().0, epoch: self.link.epoch().0 });
            }
        }
        self.owner.has_begun()
    }

    /// Stands in for a listener of the peer.
    ///
    /// # Errors
    /// What binding it or listening answers.
    pub fn mirror(&mut self, address: SocketAddr) -> Result<(), Errno> {
        let listener = Arc::new(listen_for_far(&self.shared.rack, address, BACKLOG)?);
        self.order(Command::Mirror { peer: self.link.peer().0, address, listener });
        Ok(())
    }

    /// A turn as the proxy's own thread takes it while it is awake, and all that is between two of them. Where that
    /// thread would sleep, this is as if it had woken up at once. Says whether there was something to do.
    pub fn turn(&mut self) -> bool {
        let Self { owner, events, wait, turns, .. } = self;
        match wait {
            None => {
                *turns = turns.wrapping_add(1);
                let had_any = owner.work_once(*turns, events);
                if !had_any {
                    let mut spin = owner.begin_to_look();
                    spin.note_poll();
                    (*turns, *wait) = (0, Some(spin));
                }
                had_any
            }
            Some(spin) => {
                let looked = owner.look_once(spin, events);
                if looked != Looked::Nothing {
                    *wait = None;
                }
                if looked == Looked::IsTired {
                    owner.look_after_sleep(events);
                }
                looked == Looked::Found
            }
        }
    }

    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.owner.connections()
    }

    /// What the engines have done.
    pub fn counters(&self) -> Counters {
        self.owner.counters()
    }

    /// The first thing that a monitor would have been told of a link that cannot be used, if there is any.
    pub fn complaint(&self) -> Option<String> {
        while let Ok(Received::Message(message, _)) = self.said.receive() {
            match message {
                FromProxy::Broken { what, .. } => return Some(format!("the peer {what}")),
                FromProxy::Left { .. } => return Some("the peer has left".to_owned()),
                _ => {}
            }
        }
        None
    }

    fn order(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}
