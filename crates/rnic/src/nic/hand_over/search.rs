//! Every interleaving of the wire, hardware, software and the two queues between them, for a few packets with lost
//! ones, copies and any order: the hand-over loses nothing, does nothing twice, and comes back.
//!
//! Hardware and software are the engine's own; the queues are as the engine has them. Each fact stands beside what
//! breaks it: without the comparison, and without what software settles, the search must find a fault.

use std::collections::{HashSet, VecDeque};

use super::{Hardware, Software, Verdict};
use crate::wire::Psn;

/// Number of the first packet: the search crosses the wrap.
const FIRST: u32 = (1 << 24) - 2;
const WINDOW: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// Software takes a queue pair back without comparing.
    Blind,
    /// Hardware forgets to note the newest header that it queued.
    Forgetful,
    /// Software believes hardware's number at its first header only.
    Stubborn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Command {
    Settle(u32),
    GiveBack(u32),
}

/// One state of everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    /// How often each packet is still to arrive.
    coming: Vec<u8>,
    hardware: Hardware,
    software: Option<Software>,
    /// Headers on their way to software: number, and what hardware had settled.
    queue: VecDeque<(u32, u32)>,
    commands: VecDeque<Command>,
    /// How many packets were done, by whom, in order.
    done: u32,
    /// Packets whose payload was placed.
    placed: u32,
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
            hardware: Hardware::new(psn(0)),
            software: None,
            queue: VecDeque::new(),
            commands: VecDeque::new(),
            done: 0,
            placed: 0,
        }
    }

    /// All states that may come next.
    fn next(&self, flaw: Flaw) -> Result<Vec<Self>, String> {
        let mut next = Vec::new();
        for arriving in 0..self.coming.len() as u32 {
            if self.coming[arriving as usize] > 0 {
                let mut world = self.clone();
                world.coming[arriving as usize] -= 1;
                world.arrive(arriving, flaw)?;
                next.push(world);
            }
        }
        if !self.queue.is_empty() {
            let mut world = self.clone();
            world.look(flaw);
            next.push(world);
        }
        if !self.commands.is_empty() {
            let mut world = self.clone();
            world.obey(flaw)?;
            next.push(world);
        }
        Ok(next)
    }

    /// A packet comes from the wire: hardware's turn.
    fn arrive(&mut self, arriving: u32, flaw: Flaw) -> Result<(), String> {
        match self.hardware.judge(psn(arriving), WINDOW) {
            Verdict::Past | Verdict::Beyond => {}
            Verdict::InOrder => {
                self.place(arriving)?;
                self.hardware.take();
                self.finish(arriving)?;
            }
            Verdict::Queue => {
                self.place(arriving)?;
                self.queue.push_back((arriving, packet(self.hardware.settled())));
                let before = self.hardware;
                self.hardware.queued(psn(arriving));
                if flaw == Flaw::Forgetful && before.is_slow() {
                    self.hardware = before;
                }
            }
        }
        Ok(())
    }

    /// A payload is placed: never one whose message a program may have back.
    fn place(&mut self, arriving: u32) -> Result<(), String> {
        if arriving < self.done {
            return Err(format!("packet {arriving} was placed again after {} were done", self.done));
        }
        self.placed |= 1 << arriving;
        Ok(())
    }

    fn finish(&mut self, finished: u32) -> Result<(), String> {
        if finished != self.done {
            return Err(format!("packet {finished} was done when it was {}'s turn", self.done));
        }
        if self.placed >> finished & 1 == 0 {
            return Err(format!("packet {finished} was done, but never came"));
        }
        self.done += 1;
        Ok(())
    }

    /// Software takes a header from its queue, and commands.
    fn look(&mut self, flaw: Flaw) {
        let Some((arrived, settled)) = self.queue.pop_front() else { return };
        let software = self.software.get_or_insert_with(|| Software::new(psn(settled)));
        let settled = if flaw == Flaw::Stubborn { software.expected() } else { psn(settled) };
        software.take(psn(arrived), settled);
        let expected = packet(software.expected());
        self.commands.push_back(Command::Settle(expected));
        if software.is_whole() {
            self.commands.push_back(Command::GiveBack(expected));
        }
    }

    fn obey(&mut self, flaw: Flaw) -> Result<(), String> {
        match self.commands.pop_front() {
            Some(Command::Settle(expected)) => {
                self.hardware.settle(psn(expected));
                while self.done < packet(self.hardware.settled()) {
                    self.finish(self.done)?;
                }
            }
            Some(Command::GiveBack(expected)) => {
                let is_back = self.hardware.give_back(psn(expected));
                if !is_back && flaw == Flaw::Blind && self.hardware.is_slow() {
                    self.hardware = Hardware::new(psn(expected));
                }
            }
            None => {}
        }
        Ok(())
    }

    /// When nothing can happen any more: all is done, and hardware has the queue pair.
    fn check_end(&self) -> Result<(), String> {
        let packets = self.coming.len() as u32;
        let is_back = self.hardware == Hardware::new(psn(packets));
        if self.done != packets || !is_back {
            return Err(format!("ended with {} of {packets} done, {:?}", self.done, self.hardware));
        }
        Ok(())
    }
}

/// Looks at every state that can be reached; how many, or what is wrong.
fn search(coming: &[u8], flaw: Flaw) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut open = vec![World::new(coming)];
    while let Some(world) = open.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        let next = world.next(flaw)?;
        if next.is_empty() {
            world.check_end()?;
        }
        open.extend(next);
    }
    Ok(seen.len())
}

#[test]
fn every_interleaving_of_four_packets_and_copies_ends_with_all_done_once_in_order() {
    for coming in [[1, 1, 1, 1], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2], [2, 2, 1, 1]] {
        let states = search(&coming, Flaw::None).unwrap_or_else(|fault| panic!("{coming:?}: {fault}"));
        assert!(states > 400, "{coming:?}: {states}");
    }
}

#[test]
fn every_interleaving_of_six_packets_ends_with_all_done_once_in_order() {
    let states = search(&[1; 6], Flaw::None).unwrap_or_else(|fault| panic!("{fault}"));
    assert!(states > 10_000, "{states}");
}

#[test]
#[ignore = "millions of states; in ./x exam"]
fn every_interleaving_of_eight_packets_and_many_copies_ends_with_all_done_once_in_order() {
    for coming in [[1; 8].as_slice(), &[2, 2, 2, 2, 1], &[2, 1, 2, 1, 1, 1]] {
        let states = search(coming, Flaw::None).unwrap_or_else(|fault| panic!("{coming:?}: {fault}"));
        println!("{coming:?}: {states} states");
    }
}

#[test]
fn without_the_comparison_packets_are_lost() {
    assert!(search(&[1, 1, 1, 1], Flaw::Blind).is_err());
}

#[test]
fn hardware_that_forgets_what_it_queued_never_takes_a_queue_pair_back() {
    assert!(search(&[1, 1, 1, 1], Flaw::Forgetful).is_err());
}

#[test]
fn software_that_does_not_learn_how_far_hardware_went_alone_never_gives_back() {
    assert!(search(&[1, 1, 1, 1, 1], Flaw::Stubborn).is_err());
}
