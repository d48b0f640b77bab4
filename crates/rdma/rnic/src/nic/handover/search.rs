//! Every interleaving of the wire, hardware, software and the two queues between them, for a few packets with lost
//! ones, copies and any order: the hand-over loses nothing, does nothing twice, and comes back.
//!
//! Hardware and software are the engine's own; the queues are as the engine has them. Each fact stands beside what
//! breaks it: without the comparison, and without what software settles, the search must find a fault.

use std::collections::{HashSet, VecDeque};

use super::{HardwareReceiver, ReceiveVerdict, SoftwareReceiver};
use crate::wire::Psn;

/// Number of the first packet: the search crosses the wrap.
const FIRST: u32 = (1 << 24) - 2;
const WINDOW: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// Software takes a queue pair back without comparing.
    Blind,
    /// Hardware takes nothing to have an order.
    Careless,
    /// Software believes hardware's number at its first header only.
    Stubborn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Command {
    Advance(u32),
    Return(u32),
}

/// One state of everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    /// How often each packet is still to arrive.
    coming: Vec<u8>,
    hardware: HardwareReceiver,
    software: Option<SoftwareReceiver>,
    /// Headers on their way to software: number, and what hardware had settled.
    queue: VecDeque<(u32, u32)>,
    commands: VecDeque<Command>,
    /// Bit i: packet i's payload was placed; software noted what is to be done for it; that was done.
    placed: u32,
    waiting: u32,
    done: u32,
    /// All before this was told to programs or to the peer: its memory is theirs again.
    told: u32,
}

fn psn(packet: u32) -> Psn {
    Psn::new(FIRST).plus(packet)
}

fn packet(psn: Psn) -> u32 {
    psn.after(Psn::new(FIRST)).cast_unsigned()
}

impl World {
    fn new(coming: &[u8]) -> Self {
        Self {
            coming: coming.to_vec(),
            hardware: HardwareReceiver::new(psn(0)),
            software: None,
            queue: VecDeque::new(),
            commands: VecDeque::new(),
            placed: 0,
            waiting: 0,
            done: 0,
            told: 0,
        }
    }

    /// All states that may come next.
    fn next(&self, rules: &Rules) -> Result<Vec<Self>, String> {
        let mut next = Vec::new();
        for arriving in 0..self.coming.len() as u32 {
            if self.coming[arriving as usize] > 0 {
                let mut world = self.clone();
                world.coming[arriving as usize] -= 1;
                world.arrive(arriving, rules)?;
                next.push(world);
            }
        }
        if !self.queue.is_empty() {
            let mut world = self.clone();
            world.look(rules);
            next.push(world);
        }
        if !self.commands.is_empty() {
            let mut world = self.clone();
            world.obey(rules)?;
            next.push(world);
        }
        Ok(next)
    }

    /// A packet comes from the wire: hardware's turn.
    fn arrive(&mut self, arriving: u32, rules: &Rules) -> Result<(), String> {
        match self.hardware.classify(psn(arriving), WINDOW) {
            ReceiveVerdict::Duplicate | ReceiveVerdict::BeyondWindow => {}
            ReceiveVerdict::InOrder => {
                self.place(arriving)?;
                self.finish(arriving, rules)?;
                self.hardware.accept();
            }
            ReceiveVerdict::SlowPath => {
                self.place(arriving)?;
                self.queue.push_back((arriving, packet(self.hardware.cumulative())));
                let is_ordered = rules.is_ordered(arriving) && rules.flaw != Flaw::Careless;
                self.hardware.note_queued(psn(arriving), is_ordered);
            }
        }
        self.tell()
    }

    /// A payload is placed: never where a program may have its memory back.
    fn place(&mut self, arriving: u32) -> Result<(), String> {
        if arriving < self.told {
            return Err(format!("packet {arriving} was placed again after {} were told", self.told));
        }
        self.placed |= 1 << arriving;
        Ok(())
    }

    /// What is to be done for a packet is done: once, and if it has an order, after all before it.
    fn finish(&mut self, finished: u32, rules: &Rules) -> Result<(), String> {
        let before = (1 << finished) - 1;
        if self.done >> finished & 1 == 1 {
            return Err(format!("packet {finished} was done twice"));
        }
        if rules.is_ordered(finished) {
            let undone = before & rules.ordered & !self.done;
            let missing = before & !self.placed;
            if undone != 0 || missing != 0 {
                return Err(format!("packet {finished} was done before {undone:b} were, and without {missing:b}"));
            }
        }
        self.done |= 1 << finished;
        Ok(())
    }

    /// What hardware has settled may be told at any time, and is never taken back.
    fn tell(&mut self) -> Result<(), String> {
        let cumulative = packet(self.hardware.cumulative());
        if cumulative < self.told {
            return Err(format!("{} were settled, and now {cumulative}", self.told));
        }
        let all = (1 << cumulative) - 1;
        if self.placed & all != all {
            return Err(format!("{cumulative} were settled, of which only {:b} came", self.placed));
        }
        self.told = cumulative;
        Ok(())
    }

    /// Software takes a header from its queue, and commands.
    fn look(&mut self, rules: &Rules) {
        let Some((arrived, cumulative)) = self.queue.pop_front() else { return };
        let software = self.software.get_or_insert_with(|| SoftwareReceiver::new(psn(cumulative)));
        let cumulative = if rules.flaw == Flaw::Stubborn { software.expected() } else { psn(cumulative) };
        if software.accept(psn(arrived), cumulative) {
            self.waiting |= 1 << arrived;
        }
        let expected = packet(software.expected());
        self.commands.push_back(Command::Advance(expected));
        if software.is_complete() {
            self.commands.push_back(Command::Return(expected));
        }
    }

    fn obey(&mut self, rules: &Rules) -> Result<(), String> {
        match self.commands.pop_front() {
            Some(Command::Advance(expected)) => {
                self.hardware.advance_cumulative(psn(expected));
                let waiting = self.waiting;
                for ready in (0..expected).filter(|ready| waiting >> ready & 1 == 1) {
                    self.finish(ready, rules)?;
                }
                self.waiting &= !((1 << expected) - 1);
            }
            Some(Command::Return(expected)) => {
                let is_back = self.hardware.return_to_hardware(psn(expected));
                if !is_back && rules.flaw == Flaw::Blind && self.hardware.is_slow() {
                    self.hardware = HardwareReceiver::new(psn(expected));
                }
            }
            None => {}
        }
        self.tell()
    }

    /// When nothing can happen any more: all is done, and hardware has the queue pair.
    fn check_end(&self) -> Result<(), String> {
        let packets = self.coming.len() as u32;
        let is_back = !self.hardware.is_slow() && self.hardware.cumulative() == psn(packets);
        if self.done != (1 << packets) - 1 || !is_back {
            return Err(format!("ended with {:b} of {packets} done, {:?}", self.done, self.hardware));
        }
        Ok(())
    }
}

/// What is searched.
struct Rules {
    /// Bit i: something is to be done for packet i, in order.
    ordered: u32,
    flaw: Flaw,
}

impl Rules {
    fn is_ordered(&self, packet: u32) -> bool {
        self.ordered >> packet & 1 == 1
    }
}

/// Looks at every state that can be reached; how many, or what is wrong.
fn search(coming: &[u8], ordered: u32, flaw: Flaw) -> Result<usize, String> {
    let rules = Rules { ordered, flaw };
    let mut seen = HashSet::new();
    let mut open = vec![World::new(coming)];
    while let Some(world) = open.pop() {
        if seen.contains(&world) {
            continue;
        }
        let next = world.next(&rules)?;
        if next.is_empty() {
            world.check_end()?;
        }
        seen.insert(world);
        open.extend(next);
    }
    Ok(seen.len())
}

/// The same for every choice of packets that have an order.
fn search_all(coming: &[u8]) -> usize {
    let searched = (0..1 << coming.len()).map(|ordered| {
        search(coming, ordered, Flaw::None).unwrap_or_else(|fault| panic!("{coming:?}, {ordered:b}: {fault}"))
    });
    searched.sum()
}

#[test]
fn every_interleaving_of_four_packets_and_copies_ends_with_all_done_once_in_order() {
    for coming in [[1, 1, 1, 1], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2], [2, 2, 1, 1]] {
        let states = search_all(&coming);
        assert!(states > 6000, "{coming:?}: {states}");
    }
}

#[test]
#[ignore = "millions of states; in ./x exam"]
fn every_interleaving_of_seven_packets_or_many_copies_ends_with_all_done_once_in_order() {
    for coming in [[1; 7].as_slice(), &[2, 2, 2, 2], &[2, 1, 2, 1, 1], &[1, 2, 1, 1, 1, 1]] {
        println!("{coming:?}: {} states", search_all(coming));
    }
}

/// Whether some choice of packets that have an order leads to a fault.
fn is_found(coming: &[u8], flaw: Flaw) -> bool {
    (0..1 << coming.len()).any(|ordered| search(coming, ordered, flaw).is_err())
}

#[test]
fn without_the_comparison_packets_are_lost() {
    assert!(is_found(&[1, 1, 1, 1], Flaw::Blind));
}

#[test]
fn hardware_that_takes_back_what_has_an_order_does_it_too_early() {
    assert!(is_found(&[1, 1, 1, 1], Flaw::Careless));
}

#[test]
fn software_that_does_not_learn_how_far_hardware_went_alone_never_gives_back() {
    assert!(is_found(&[1, 1, 1, 1, 1], Flaw::Stubborn));
}
