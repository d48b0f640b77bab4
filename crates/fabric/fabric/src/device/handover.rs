//! Passing a device to another process of the node: its description as text, its resources as descriptors.
//!
//! The receiving process trusts the sender. It checks everything all the same, as anything that arrives over a socket.

use super::error::{DeviceError, DeviceProblem};
use super::format::NodeSlot;
use super::interrupts::{Interrupts, PeerId};
use super::layout::DeviceLayout;
use super::memory::Caching;
use super::opened::OpenedMemory;
use super::pci::map_registers;
use super::state::Device;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

const TITLE: &str = "crosslane-device-2";

impl Device {
    /// What another process on this machine needs to [`take_over`](Device::take_over) the device, or to
    /// [update](Device::update_peers) what it knows of the peers. There may be more descriptors than one message on a
    /// socket carries (253).
    ///
    /// # Errors
    /// A descriptor could not be duplicated.
    pub fn hand_over(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), DeviceError> {
        let state = self.state();
        let failed = |errno: Errno| DeviceProblem::system("fcntl F_DUPFD_CLOEXEC")(errno).on_device(&state.name);
        let peers = state.interrupts.peer_eventfds.read().unwrap_or_else(PoisonError::into_inner);
        let registers = state.registers.as_ref();
        let connection = state.server.as_ref().filter(|_| state.shares_connection.load(Ordering::Relaxed));
        let connection = connection.map(|(stream, _)| &**stream);
        let layout = state.layout;
        let mut text = format!(
            "{TITLE}\n{} {} {}\n{} {} {}\n{} {} {} {}\n",
            state.own_slot,
            layout.nodes(),
            layout.window_bytes(),
            state.caching,
            state.offset_bytes,
            state.len_bytes,
            registers.map_or("-".to_owned(), |(_, offset_bytes)| offset_bytes.to_string()),
            u8::from(connection.is_some()),
            state.interrupts.own_eventfds.len(),
            peers.len(),
        );
        for (peer_id, eventfds) in peers.iter() {
            text.push_str(&format!("{peer_id} {}\n", eventfds.len()));
        }
        text.push_str(&state.name);
        let descriptors = [&state.descriptor].into_iter().chain(registers.map(|(file, _)| file)).chain(connection);
        let descriptors = descriptors.chain(&state.interrupts.own_eventfds).chain(peers.values().flatten());
        let duplicates: Result<Vec<OwnedFd>, Errno> =
            descriptors.map(|descriptor| fcntl_dupfd_cloexec(descriptor, 0)).collect();
        Ok((text.into_bytes(), duplicates.map_err(failed)?))
    }

    /// Opens the device that another process has handed over, to use windows and doorbells but not to train links.
    /// Rings from before do not wake this process: it polls the windows first.
    ///
    /// # Errors
    /// What was handed over is malformed, or cannot be mapped.
    pub fn take_over(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, DeviceError> {
        let Handover { own_slot, layout, opened } =
            Handover::parse(bytes, descriptors).map_err(|problem| problem.on_device("handed over"))?;
        let name = opened.name.clone();
        let layout_for = |len_bytes| layout.check_room(len_bytes).map(|()| layout);
        Self::map(opened, own_slot, None, layout_for).map_err(|problem| problem.on_device(&name))
    }

    /// Replaces what this process knows of the peers' doorbells by what the other process knows now.
    ///
    /// # Errors
    /// What was handed over is malformed, or belongs to another device.
    pub fn update_peers(&self, bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), DeviceError> {
        let state = self.state();
        let handover = Handover::parse(bytes, descriptors).map_err(|problem| problem.on_device(&state.name))?;
        if (&handover.opened.name, handover.own_slot, handover.layout) != (&state.name, state.own_slot, state.layout) {
            return Err(malformed("another device").on_device(&state.name));
        }
        let peers = handover.opened.interrupts.peer_eventfds.into_inner().unwrap_or_else(PoisonError::into_inner);
        let peer_ids: Vec<PeerId> = peers.keys().copied().collect();
        state.interrupts.replace_peers(peers);
        peer_ids.into_iter().for_each(|peer_id| state.interrupt_pending(peer_id));
        Ok(())
    }
}

/// What was handed over.
struct Handover {
    own_slot: NodeSlot,
    layout: DeviceLayout,
    opened: OpenedMemory,
}

fn malformed(found: &str) -> DeviceProblem {
    DeviceProblem::unsuitable(format!("what was handed over is {found}"), "start monitor and proxy from one build")
}

/// The words of one line.
struct Line<'a>(std::str::SplitAsciiWhitespace<'a>);

impl<'a> Line<'a> {
    fn word(&mut self) -> Result<&'a str, DeviceProblem> {
        self.0.next().ok_or_else(|| malformed("too short"))
    }

    fn number<T: FromStr>(&mut self) -> Result<T, DeviceProblem> {
        let word = self.word()?;
        word.parse().map_err(|_| malformed(&format!("'{}' instead of a number", word.escape_debug())))
    }
}

/// The descriptors, in order.
struct Descriptors(VecDeque<OwnedFd>);

impl Descriptors {
    fn one(&mut self) -> Result<OwnedFd, DeviceProblem> {
        self.0.pop_front().ok_or_else(|| malformed("short of descriptors"))
    }

    fn several(&mut self, count: usize) -> Result<Vec<OwnedFd>, DeviceProblem> {
        (0..count).map(|_| self.one()).collect()
    }
}

impl Handover {
    fn parse(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, DeviceProblem> {
        let text = std::str::from_utf8(bytes).map_err(|_| malformed("not UTF-8"))?;
        let mut rest = text;
        let mut line = || {
            let (line, after) = rest.split_once('\n').ok_or_else(|| malformed("too short"))?;
            rest = after;
            Ok(Line(line.split_ascii_whitespace()))
        };
        if line()?.word()? != TITLE {
            return Err(malformed("of another version"));
        }
        let mut rack = line()?;
        let own_slot = NodeSlot(rack.number()?);
        let layout = DeviceLayout::new(rack.number()?, rack.number()?)?;
        let mut memory = line()?;
        let caching = caching_of(memory.word()?)?;
        let (offset_bytes, len_bytes) = (memory.number()?, memory.number()?);
        let mut counts = line()?;
        let registers_offset = match counts.word()? {
            "-" => None,
            number => Some(number.parse().map_err(|_| malformed("without an offset of the registers"))?),
        };
        let connections: u8 = counts.number()?;
        let (own_count, peers): (usize, usize) = (counts.number()?, counts.number()?);
        let mut descriptors = Descriptors(descriptors.into());
        let descriptor = descriptors.one()?;
        let registers = registers_offset.map(|offset| descriptors.one().map(|file| (file, offset))).transpose()?;
        let kept_open = descriptors.several(usize::from(connections != 0))?;
        let mut interrupts = Interrupts { own_eventfds: descriptors.several(own_count)?, ..Interrupts::default() };
        let mut peer_eventfds = BTreeMap::<PeerId, Vec<OwnedFd>>::new();
        for _ in 0..peers {
            let mut peer = line()?;
            peer_eventfds.insert(peer.number()?, descriptors.several(peer.number()?)?);
        }
        interrupts.registers = registers.as_ref().map(map_registers).transpose()?;
        interrupts.peer_eventfds = peer_eventfds.into();
        if own_slot.0 >= layout.nodes() || !descriptors.0.is_empty() {
            return Err(malformed("inconsistent"));
        }
        // Only the process that opened the device has these two.
        let (lease_obstacle, server) = (None, None);
        let name = rest.to_owned();
        let opened = OpenedMemory {
            name,
            caching,
            descriptor,
            offset_bytes,
            len_bytes,
            lease_obstacle,
            interrupts,
            registers,
            server,
            kept_open,
        };
        Ok(Self { own_slot, layout, opened })
    }
}

fn caching_of(word: &str) -> Result<Caching, DeviceProblem> {
    let all = [Caching::Cached, Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent];
    all.into_iter().find(|caching| caching.to_string() == word).ok_or_else(|| malformed("of another kind of memory"))
}
