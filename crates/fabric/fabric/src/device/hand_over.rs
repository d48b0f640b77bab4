//! Giving the device to another process: what it is as text, what it is made of as descriptors.
//!
//! The other process trusts this one. What does not fit is refused all the same, as anything else that came over a
//! socket.

use super::bell::{Identity, Kicks, duplicates};
use super::pci::map_registers;
use super::{Caching, Device, DeviceError, Found, Layout, Problem, Slot};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

const TITLE: &str = "crosslane-device-2";

impl Device {
    /// What another process on this machine needs to [`Device::take_over`] the device, or to
    /// [`renew`](Device::renew) what it knows of it. There may be more descriptors than one message on a socket
    /// carries (253).
    ///
    /// # Errors
    /// A descriptor could not be duplicated.
    pub fn hand_over(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), DeviceError> {
        let inner = self.inner();
        let failed = |errno: Errno| Problem::system("fcntl F_DUPFD_CLOEXEC")(errno).of(&inner.name);
        let peers = inner.kicks.peers.read().unwrap_or_else(PoisonError::into_inner);
        let registers = inner.registers.as_ref();
        let place = inner.server.as_ref().filter(|_| inner.shares_place.load(Ordering::Relaxed));
        let place = place.map(|(stream, _)| &**stream);
        let layout = inner.layout;
        let mut text = format!(
            "{TITLE}\n{} {} {}\n{} {} {}\n{} {} {} {}\n",
            inner.own,
            layout.nodes(),
            layout.window_bytes(),
            inner.caching,
            inner.offset_bytes,
            inner.len_bytes,
            registers.map_or("-".to_owned(), |(_, offset_bytes)| offset_bytes.to_string()),
            u8::from(place.is_some()),
            inner.kicks.own.len(),
            peers.len(),
        );
        for (identity, bells) in peers.iter() {
            text.push_str(&format!("{identity} {}\n", bells.len()));
        }
        text.push_str(&inner.name);
        let descriptors = [&inner.descriptor].into_iter().chain(registers.map(|(file, _)| file)).chain(place);
        let descriptors = duplicates(descriptors.chain(&inner.kicks.own).chain(peers.values().flatten()));
        Ok((text.into_bytes(), descriptors.map_err(failed)?))
    }

    /// The device as another process has handed it over: for using windows and bells, not for training. Rings from
    /// before are not this process's: it looks at the windows first.
    ///
    /// # Errors
    /// What was handed over makes no sense, or cannot be mapped.
    pub fn take_over(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, DeviceError> {
        let parts = Parts::read(bytes, descriptors).map_err(|it| it.of("handed over"))?;
        let name = parts.found.name.clone();
        let Parts { own, layout, found } = parts;
        let layout_of = |len_bytes| layout.check_room(len_bytes).map(|()| layout);
        Self::map(found, own, None, layout_of).map_err(|it| it.of(&name))
    }

    /// What the other process knows by now of the peers' bells.
    ///
    /// # Errors
    /// What was handed over makes no sense, or is another device's.
    pub fn renew(&self, bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), DeviceError> {
        let inner = self.inner();
        let parts = Parts::read(bytes, descriptors).map_err(|it| it.of(&inner.name))?;
        if (&parts.found.name, parts.own, parts.layout) != (&inner.name, inner.own, inner.layout) {
            return Err(nonsense("another device").of(&inner.name));
        }
        let peers = parts.found.kicks.peers.into_inner().unwrap_or_else(PoisonError::into_inner);
        let identities: Vec<Identity> = peers.keys().copied().collect();
        inner.kicks.replace(peers);
        identities.into_iter().for_each(|identity| inner.catch_up(identity));
        Ok(())
    }
}

/// What was handed over.
struct Parts {
    own: Slot,
    layout: Layout,
    found: Found,
}

fn nonsense(found: &str) -> Problem {
    Problem::unfit(format!("what was handed over is {found}"), "start monitor and proxy from one build")
}

/// The numbers of one line.
struct Line<'a>(std::str::SplitAsciiWhitespace<'a>);

impl<'a> Line<'a> {
    fn word(&mut self) -> Result<&'a str, Problem> {
        self.0.next().ok_or_else(|| nonsense("too short"))
    }

    fn number<T: FromStr>(&mut self) -> Result<T, Problem> {
        let word = self.word()?;
        word.parse().map_err(|_| nonsense(&format!("'{}' for a number", word.escape_debug())))
    }
}

/// The descriptors, in order.
struct Descriptors(VecDeque<OwnedFd>);

impl Descriptors {
    fn one(&mut self) -> Result<OwnedFd, Problem> {
        self.0.pop_front().ok_or_else(|| nonsense("short of descriptors"))
    }

    fn several(&mut self, count: usize) -> Result<Vec<OwnedFd>, Problem> {
        (0..count).map(|_| self.one()).collect()
    }
}

impl Parts {
    fn read(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, Problem> {
        let text = std::str::from_utf8(bytes).map_err(|_| nonsense("no text"))?;
        let mut rest = text;
        let mut line = || {
            let (line, after) = rest.split_once('\n').ok_or_else(|| nonsense("too short"))?;
            rest = after;
            Ok(Line(line.split_ascii_whitespace()))
        };
        if line()?.word()? != TITLE {
            return Err(nonsense("of another version"));
        }
        let mut seat = line()?;
        let own = Slot(seat.number()?);
        let layout = Layout::new(seat.number()?, seat.number()?)?;
        let mut memory = line()?;
        let caching = caching_of(memory.word()?)?;
        let (offset_bytes, len_bytes) = (memory.number()?, memory.number()?);
        let mut counts = line()?;
        let registers_offset = match counts.word()? {
            "-" => None,
            number => Some(number.parse().map_err(|_| nonsense("without registers"))?),
        };
        let places: u8 = counts.number()?;
        let (own_bells, peers): (usize, usize) = (counts.number()?, counts.number()?);
        let mut descriptors = Descriptors(descriptors.into());
        let descriptor = descriptors.one()?;
        let registers = registers_offset.map(|offset| descriptors.one().map(|file| (file, offset))).transpose()?;
        let keepers = descriptors.several(usize::from(places != 0))?;
        let mut kicks = Kicks { own: descriptors.several(own_bells)?, ..Kicks::default() };
        let mut bells = BTreeMap::<Identity, Vec<OwnedFd>>::new();
        for _ in 0..peers {
            let mut peer = line()?;
            bells.insert(peer.number()?, descriptors.several(peer.number()?)?);
        }
        kicks.registers = registers.as_ref().map(map_registers).transpose()?;
        kicks.peers = bells.into();
        if own.0 >= layout.nodes() || !descriptors.0.is_empty() {
            return Err(nonsense("not of one piece"));
        }
        let name = rest.to_owned();
        let (lending_obstacle, server) = (None, None); // The business of who has opened it.
        let found = Found {
            name,
            caching,
            descriptor,
            offset_bytes,
            len_bytes,
            lending_obstacle,
            kicks,
            registers,
            server,
            keepers,
        };
        Ok(Self { own, layout, found })
    }
}

fn caching_of(word: &str) -> Result<Caching, Problem> {
    let all = [Caching::Cached, Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent];
    all.into_iter().find(|caching| caching.to_string() == word).ok_or_else(|| nonsense("memory of another kind"))
}
