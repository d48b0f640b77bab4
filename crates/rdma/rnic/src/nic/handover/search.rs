//! A model check of the handover: explores every interleaving of the wire, hardware, software and the two queues
//! between them, for a few packets with losses, duplicates and any order. The handover must lose nothing, execute
//! nothing twice, and end with hardware as owner.
//!
//! Hardware and software are the engine's own; the queues behave as the engine's. Each property is also tested against
//! a broken variant: without the comparison, and without software's cumulative PSN, the search must find a fault.

use std::collections::{HashSet, VecDeque};

use super::{HardwareReceiver, ReceiveVerdict, SoftwareReceiver};
use crate::wire::Psn;

/// PSN of the first packet, so that the search crosses the wraparound.
const FIRST: u32 = (1 << 24) - 2;
const WINDOW: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// Software takes the receive side back without comparing.
    NoCompare,
    /// Hardware ignores that actions are ordered.
    IgnoresOrder,
    /// Software uses hardware's cumulative PSN only at its first header.
    StalePsn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Command {
    Advance(u32),
    Return(u32),
}

/// One state of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Model {
    /// How often each packet is still to arrive.
    arrivals: Vec<u8>,
    hardware: HardwareReceiver,
    software: Option<SoftwareReceiver>,
    /// Headers on their way to software: the packet, and hardware's cumulative PSN.
    queue: VecDeque<(u32, u32)>,
    commands: VecDeque<Command>,
    /// Bit i: the payload of packet i was placed; software noted its action; the action was executed.
    placed: u32,
    waiting: u32,
    done: u32,
    /// All packets before this were reported to programs or to the peer, which may reuse their memory.
    reported: u32,
}

fn psn(packet: u32) -> Psn {
    Psn::new(FIRST).plus(packet)
}

fn packet(psn: Psn) -> u32 {
    psn.after(Psn::new(FIRST)).cast_unsigned()
}

impl Model {
    fn new(arrivals: &[u8]) -> Self {
        Self {
            arrivals: arrivals.to_vec(),
            hardware: HardwareReceiver::new(psn(0)),
            software: None,
            queue: VecDeque::new(),
            commands: VecDeque::new(),
            placed: 0,
            waiting: 0,
            done: 0,
            reported: 0,
        }
    }

    /// Returns all successor states.
    fn next(&self, rules: &Rules) -> Result<Vec<Self>, String> {
        let mut next = Vec::new();
        for arriving in 0..self.arrivals.len() as u32 {
            if self.arrivals[arriving as usize] > 0 {
                let mut model = self.clone();
                model.arrivals[arriving as usize] -= 1;
                model.arrive(arriving, rules)?;
                next.push(model);
            }
        }
        if !self.queue.is_empty() {
            let mut model = self.clone();
            model.process_header(rules);
            next.push(model);
        }
        if !self.commands.is_empty() {
            let mut model = self.clone();
            model.execute_command(rules)?;
            next.push(model);
        }
        Ok(next)
    }

    /// A packet arrives from the wire at hardware.
    fn arrive(&mut self, arriving: u32, rules: &Rules) -> Result<(), String> {
        match self.hardware.classify(psn(arriving), WINDOW) {
            ReceiveVerdict::Duplicate | ReceiveVerdict::BeyondWindow => {}
            ReceiveVerdict::InOrder => {
                self.place(arriving)?;
                self.execute(arriving, rules)?;
                self.hardware.accept();
            }
            ReceiveVerdict::SlowPath => {
                self.place(arriving)?;
                self.queue.push_back((arriving, packet(self.hardware.cumulative())));
                let is_ordered = rules.is_ordered(arriving) && rules.defect != Defect::IgnoresOrder;
                self.hardware.note_queued(psn(arriving), is_ordered);
            }
        }
        self.report()
    }

    /// Places a payload; a fault if a program may reuse the memory.
    fn place(&mut self, arriving: u32) -> Result<(), String> {
        if arriving < self.reported {
            return Err(format!("packet {arriving} was placed after the first {} were reported", self.reported));
        }
        self.placed |= 1 << arriving;
        Ok(())
    }

    /// Executes the action of a packet; a fault if it was executed before, or too early for an ordered action.
    fn execute(&mut self, packet_number: u32, rules: &Rules) -> Result<(), String> {
        let before = (1 << packet_number) - 1;
        if self.done >> packet_number & 1 == 1 {
            return Err(format!("packet {packet_number} was executed twice"));
        }
        if rules.is_ordered(packet_number) {
            let undone = before & rules.ordered & !self.done;
            let missing = before & !self.placed;
            if undone != 0 || missing != 0 {
                return Err(format!("packet {packet_number} was executed before {undone:b} and without {missing:b}"));
            }
        }
        self.done |= 1 << packet_number;
        Ok(())
    }

    /// Reports the cumulative PSN, which may happen at any time and cannot be taken back.
    fn report(&mut self) -> Result<(), String> {
        let cumulative = packet(self.hardware.cumulative());
        if cumulative < self.reported {
            return Err(format!("the cumulative PSN went back from {} to {cumulative}", self.reported));
        }
        let all = (1 << cumulative) - 1;
        if self.placed & all != all {
            return Err(format!("the cumulative PSN is {cumulative}, but only {:b} arrived", self.placed));
        }
        self.reported = cumulative;
        Ok(())
    }

    /// Software processes a header and issues commands.
    fn process_header(&mut self, rules: &Rules) {
        let Some((arrived, cumulative)) = self.queue.pop_front() else { return };
        let software = self.software.get_or_insert_with(|| SoftwareReceiver::new(psn(cumulative)));
        let cumulative = if rules.defect == Defect::StalePsn { software.expected() } else { psn(cumulative) };
        if software.accept(psn(arrived), cumulative) {
            self.waiting |= 1 << arrived;
        }
        let expected = packet(software.expected());
        self.commands.push_back(Command::Advance(expected));
        if software.is_complete() {
            self.commands.push_back(Command::Return(expected));
        }
    }

    fn execute_command(&mut self, rules: &Rules) -> Result<(), String> {
        match self.commands.pop_front() {
            Some(Command::Advance(expected)) => {
                self.hardware.advance_cumulative(psn(expected));
                let waiting = self.waiting;
                for ready in (0..expected).filter(|ready| waiting >> ready & 1 == 1) {
                    self.execute(ready, rules)?;
                }
                self.waiting &= !((1 << expected) - 1);
            }
            Some(Command::Return(expected)) => {
                let is_back = self.hardware.return_to_hardware(psn(expected));
                if !is_back && rules.defect == Defect::NoCompare && self.hardware.is_slow() {
                    self.hardware = HardwareReceiver::new(psn(expected));
                }
            }
            None => {}
        }
        self.report()
    }

    /// Checks the final state: everything is executed, and hardware owns the receive side.
    fn check_end(&self) -> Result<(), String> {
        let packets = self.arrivals.len() as u32;
        let is_back = !self.hardware.is_slow() && self.hardware.cumulative() == psn(packets);
        if self.done != (1 << packets) - 1 || !is_back {
            return Err(format!(
                "the search ended with {:b} of {packets} packets executed, {:?}",
                self.done, self.hardware
            ));
        }
        Ok(())
    }
}

/// The parameters of a search.
struct Rules {
    /// Bit i: packet i needs an ordered action.
    ordered: u32,
    defect: Defect,
}

impl Rules {
    fn is_ordered(&self, packet: u32) -> bool {
        self.ordered >> packet & 1 == 1
    }
}

/// Explores all reachable states; returns their number or a fault.
fn search(arrivals: &[u8], ordered: u32, defect: Defect) -> Result<usize, String> {
    let rules = Rules { ordered, defect };
    let mut seen = HashSet::new();
    let mut open = vec![Model::new(arrivals)];
    while let Some(model) = open.pop() {
        if seen.contains(&model) {
            continue;
        }
        let next = model.next(&rules)?;
        if next.is_empty() {
            model.check_end()?;
        }
        seen.insert(model);
        open.extend(next);
    }
    Ok(seen.len())
}

/// Searches every choice of packets with ordered actions.
fn search_all(arrivals: &[u8]) -> usize {
    let searched = (0..1 << arrivals.len()).map(|ordered| {
        search(arrivals, ordered, Defect::None).unwrap_or_else(|fault| panic!("{arrivals:?}, {ordered:b}: {fault}"))
    });
    searched.sum()
}

#[test]
fn every_interleaving_of_four_packets_and_duplicates_executes_each_once_in_order() {
    for arrivals in [[1, 1, 1, 1], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2], [2, 2, 1, 1]] {
        let states = search_all(&arrivals);
        assert!(states > 6000, "{arrivals:?}: {states}");
    }
}

#[test]
#[ignore = "millions of states; in ./x exam"]
fn every_interleaving_of_seven_packets_or_many_duplicates_executes_each_once_in_order() {
    for arrivals in [[1; 7].as_slice(), &[2, 2, 2, 2], &[2, 1, 2, 1, 1], &[1, 2, 1, 1, 1, 1]] {
        println!("{arrivals:?}: {} states", search_all(arrivals));
    }
}

/// Returns whether the search finds a fault for some choice of packets with ordered actions.
fn finds_fault(arrivals: &[u8], defect: Defect) -> bool {
    (0..1 << arrivals.len()).any(|ordered| search(arrivals, ordered, defect).is_err())
}

#[test]
fn without_the_comparison_the_search_finds_a_fault() {
    assert!(finds_fault(&[1, 1, 1, 1], Defect::NoCompare));
}

#[test]
fn hardware_that_ignores_ordered_actions_executes_them_too_early() {
    assert!(finds_fault(&[1, 1, 1, 1], Defect::IgnoresOrder));
}

#[test]
fn software_with_a_stale_cumulative_psn_never_returns_the_receive_side() {
    assert!(finds_fault(&[1, 1, 1, 1, 1], Defect::StalePsn));
}
