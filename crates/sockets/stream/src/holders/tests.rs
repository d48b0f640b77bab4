use super::*;
use std::collections::HashSet;

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

#[test]
fn a_hold_survives_its_encoding() {
    for hold in [Hold { index: 0, generation: 0 }, Hold { index: (SLOTS - 1) as u16, generation: 1023 }] {
        assert_eq!(Hold::from_bits(hold.to_bits()), hold);
        assert!(hold.to_bits() < 1 << Hold::BITS);
    }
}

#[test]
fn the_last_of_several_holders_takes_over() {
    let words = words(4);
    let slots = Slots(&words);
    let hold = slots.share(0).unwrap();
    assert!(slots.add(hold));
    assert!(!slots.is_sole(hold) && !slots.take_over(hold));
    slots.release(hold);
    assert!(!slots.is_sole(hold) && !slots.take_over(hold));
    slots.release(hold);
    assert!(slots.is_sole(hold) && slots.take_over(hold));
    assert!(!slots.is_sole(hold) && !slots.take_over(hold) && !slots.add(hold));
}

#[test]
fn a_slot_is_reused_and_its_old_holds_are_void() {
    let words = words(1);
    let slots = Slots(&words);
    let old = slots.share(0).unwrap();
    assert_eq!(slots.share(0), None);
    slots.release(old);
    slots.release(old);
    let new = slots.share(5).unwrap();
    assert_ne!(new, old);
    slots.release(old);
    assert!(!slots.add(old) && !slots.take_over(old));
    slots.release(new);
    assert!(slots.take_over(new));
}

#[test]
fn generations_wrap() {
    let words = words(1);
    let slots = Slots(&words);
    let holds = (0..2 << GENERATION_BITS).map(|_| {
        let hold = slots.share(0).expect("a free slot");
        slots.release(hold);
        slots.release(hold);
        hold
    });
    assert_eq!(holds.collect::<HashSet<_>>().len(), 1 << GENERATION_BITS);
}

#[test]
fn a_search_ends_after_some_probes() {
    let words = words(2 * PROBES_MAX);
    let slots = Slots(&words);
    (0..PROBES_MAX).for_each(|_| assert!(slots.share(0).is_some()));
    assert_eq!(slots.share(0), None);
    assert!(slots.share(PROBES_MAX).is_some());
}

#[test]
fn holds_of_this_process_are_in_shared_memory() {
    let hold = share().unwrap();
    assert!(is_any() && hold.add() && !hold.is_sole());
    hold.release();
    hold.release();
    assert!(hold.take_over());
}

#[test]
fn the_holds_of_a_process_that_was_killed_are_released_once() {
    let (words, states) = (words(4), words(3));
    let holds: Vec<Holds<1>> = (0..3).map(|_| [AtomicU64::new(0)]).collect();
    let (slots, processes) = (Slots(&words), Processes { states: &states, holds: &holds });
    let (own, child) = (processes.allocate().unwrap(), processes.allocate().unwrap());
    processes.begin(own);
    let hold = slots.share(0).unwrap();
    processes.add(own, hold.index);
    processes.add(child, hold.index);
    let search = |killed| {
        (0..3).for_each(|record| {
            processes.release_if(record, |record| record == killed, |index| slots.remove(index));
        });
    };
    search(child);
    assert!(!slots.is_sole(hold), "the child has not begun");
    processes.begin(child);
    search(usize::MAX);
    assert!(!slots.is_sole(hold), "nobody was killed");
    search(child);
    search(child);
    assert!(slots.is_sole(hold) && processes.remove(own, hold.index) && slots.take_over(hold));
    assert_eq!(processes.allocate(), Some(child));
}

/// What a process knows of a connection, in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Process {
    /// It does not exist yet.
    Unborn,
    /// It counts as a holder, and uses TCP.
    Holds(Hold),
    /// It has removed the hold from its record, and is about to release it. Then it may run another program.
    Releases { hold: Hold, runs: bool },
    /// It has found itself to be the sole holder.
    FoundSole(Hold),
    /// It has removed the hold from its record, and is about to take over.
    TakesOver(Hold),
    /// It is about to run another program, and has released its hold. The program may be run or not.
    Runs(Hold),
    /// It uses lanes.
    Alone,
    /// It is back from a failed `exec`, and uses TCP, uncounted.
    StaysOnTcp,
    /// It does not have the connection any more, and has ended or was killed.
    Gone,
}

const PROCESSES: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Model {
    /// One slot, so that it is reused soon.
    words: [u64; 1],
    states: [u64; PROCESSES],
    holds: [u64; PROCESSES],
    processes: [Process; PROCESSES],
    /// By process: its record.
    records: [usize; PROCESSES],
    /// Another connection, which has a slot now.
    other: Option<Hold>,
    /// Forks and other connections that are left, which bounds the search.
    steps: u8,
    /// A process was killed at a moment at which its hold stays counted.
    is_lost: bool,
}

type Step<'a> = dyn Fn(Slots<'_>, Processes<'_, 1>) -> Option<Process> + 'a;

impl Model {
    /// Calls `step` with memory in this state. Returns what it has returned, and the next state.
    fn with<R>(self, step: impl FnOnce(Slots<'_>, Processes<'_, 1>) -> R) -> (R, Self) {
        let (words, states) = (self.words.map(AtomicU64::new), self.states.map(AtomicU64::new));
        let holds = self.holds.map(|word| [AtomicU64::new(word)]);
        let result = step(Slots(&words), Processes { states: &states, holds: &holds });
        let words = words.map(AtomicU64::into_inner);
        let (states, holds) = (states.map(AtomicU64::into_inner), holds.map(|[word]| word.into_inner()));
        (result, Self { words, states, holds, ..self })
    }

    fn is_alive(&self, record: usize) -> bool {
        let is_gone = |process| matches!(process, Process::Gone | Process::Unborn);
        (0..PROCESSES).any(|index| self.records[index] == record && !is_gone(self.processes[index]))
    }

    fn forked(self, parent: usize, child: usize) -> Option<Self> {
        let own = self.records[parent];
        let (forked, mut next) = self.with(|slots, processes| {
            let hold = match self.processes[parent] {
                Process::Alone => slots.share(0).inspect(|hold| processes.add(own, hold.index))?,
                Process::Holds(hold) | Process::FoundSole(hold) if slots.add(hold) => hold,
                _ => return None,
            };
            let record = processes.allocate()?;
            processes.add(record, hold.index);
            Some((hold, record))
        });
        let (hold, record) = forked?;
        (next.processes[parent], next.processes[child]) = (Process::Holds(hold), Process::Holds(hold));
        (next.records[child], next.steps) = (record, self.steps - 1);
        Some(next)
    }

    /// Returns the state after another connection of the family has got a slot, or has ended.
    fn other_connection(self) -> Option<Self> {
        let (other, next) = self.with(|slots, _| match self.other {
            Some(hold) => {
                slots.release(hold);
                slots.release(hold);
                Some(None)
            }
            None => (self.steps > 0).then(|| slots.share(0)).flatten().map(Some),
        });
        let other = other?;
        Some(Self { other, steps: self.steps - u8::from(other.is_some()), ..next })
    }

    fn killed(self, index: usize) -> Self {
        let has_begun = self.states[self.records[index]] % 4 == 2;
        let is_recorded = match self.processes[index] {
            Process::Holds(_) | Process::FoundSole(_) => has_begun,
            Process::Releases { .. } | Process::TakesOver(_) => false,
            _ => true,
        };
        let mut next = self;
        next.processes[index] = Process::Gone;
        next.is_lost |= !is_recorded;
        next
    }

    /// Returns the states after one process has searched for those that were killed.
    fn searched(self) -> Self {
        let search = |slots: Slots<'_>, processes: Processes<'_, 1>| {
            let is_killed = |record| !self.is_alive(record);
            (0..PROCESSES).for_each(|record| processes.release_if(record, is_killed, |index| slots.remove(index)));
        };
        self.with(search).1
    }

    /// Returns the states that one step of one process leads to.
    fn next(self) -> Vec<Self> {
        let mut all = Vec::new();
        for (index, process) in self.processes.into_iter().enumerate() {
            if matches!(process, Process::Unborn | Process::Gone) {
                continue;
            }
            let record = self.records[index];
            let mut add = |step: &Step<'_>| {
                let (process, mut next) = self.with(step);
                if let Some(process) = process {
                    next.processes[index] = process;
                    all.push(next);
                }
            };
            match process {
                Process::Holds(hold) => {
                    add(&|slots, _| slots.is_sole(hold).then_some(Process::FoundSole(hold)));
                    for runs in [false, true] {
                        add(&|_, processes| {
                            processes.remove(record, hold.index);
                            Some(Process::Releases { hold, runs })
                        });
                    }
                }
                Process::Releases { hold, runs } => add(&|slots, _| {
                    slots.release(hold);
                    Some(if runs { Process::Runs(hold) } else { Process::Gone })
                }),
                Process::FoundSole(hold) => add(&|_, processes| {
                    processes.remove(record, hold.index);
                    Some(Process::TakesOver(hold))
                }),
                Process::TakesOver(hold) => add(&|slots, processes| {
                    if slots.take_over(hold) {
                        return Some(Process::Alone);
                    }
                    processes.add(record, hold.index);
                    Some(Process::Holds(hold))
                }),
                Process::Runs(hold) => add(&|slots, processes| {
                    if !slots.add(hold) {
                        return Some(Process::StaysOnTcp);
                    }
                    processes.add(record, hold.index);
                    Some(Process::Holds(hold))
                }),
                _ => {}
            }
            add(&|_, processes| {
                processes.begin(record);
                Some(process)
            });
            all.push(self.killed(index));
            all.push(self.searched());
            if self.steps > 0 {
                let unborn = self.processes.iter().position(|process| *process == Process::Unborn);
                all.extend(unborn.and_then(|child| self.forked(index, child)));
            }
        }
        all.extend(self.other_connection());
        all
    }

    fn check(&self) {
        let holders =
            |process: &&Process| matches!(process, Process::Holds(_) | Process::FoundSole(_) | Process::TakesOver(_));
        let alone = self.processes.iter().filter(|process| **process == Process::Alone).count();
        let others = self.processes.iter().filter(holders).count();
        assert!(alone <= 1 && (alone == 0 || others == 0), "{self:?}");
        let word = |hold: Hold| u64::from(hold.generation) << GENERATION_SHIFT | 2;
        assert!(self.other.is_none_or(|hold| self.words == [word(hold)]), "{self:?}");
        // One that is left finds that out, however the others have ended.
        let left: Vec<_> = self.processes.iter().filter(|it| !matches!(it, Process::Gone | Process::Unborn)).collect();
        if let ([Process::Holds(hold)], false) = (&left[..], self.is_lost) {
            assert!(self.searched().with(|slots, _| slots.is_sole(*hold)).0, "{self:?}");
        }
    }
}

/// Every order of forks, closes, kills, failed runs of programs, searches for killed processes and attempts to take
/// over in three processes: where one uses lanes, no other one counts as a holder, and nobody becomes one again.
#[test]
fn lanes_are_used_by_nobody_while_another_process_holds_the_connection() {
    let mut processes = [Process::Unborn; PROCESSES];
    processes[0] = Process::Alone;
    let first = Model {
        words: [0],
        states: [0; PROCESSES],
        holds: [0; PROCESSES],
        processes,
        records: [0; PROCESSES],
        other: None,
        steps: 6,
        is_lost: false,
    };
    let (_, first) = first.with(|_, processes| processes.allocate().map(|record| processes.begin(record)));
    let mut open = vec![first];
    let mut seen: HashSet<Model> = open.iter().copied().collect();
    let (mut taken_over, mut was_killed) = (0, 0);
    while let Some(model) = open.pop() {
        model.check();
        let is_alone = model.processes.contains(&Process::Alone);
        taken_over += usize::from(is_alone && model.processes[1] != Process::Unborn);
        was_killed += usize::from(is_alone && model.processes.contains(&Process::Gone));
        open.extend(model.next().into_iter().filter(|next| seen.insert(*next)));
    }
    assert!(taken_over > 10 && was_killed > 10, "{taken_over}, {was_killed} of {} states", seen.len());
}
