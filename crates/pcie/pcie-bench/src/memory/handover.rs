//! The core that plays the host does what the one that plays the device asks, one job at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::memory::window::Window;

/// Looks before the core is lent to others.
const SPINS_MAX: u32 = 2_000;
/// Longer than any job on any machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// What the host is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Write the whole window with a value.
    Fill(u8),
    /// Load the transfer that begins here, and say how long that took.
    Load(u64),
}

/// A line that one side writes.
#[repr(align(128))]
#[derive(Default)]
struct Line([AtomicU64; 2]);

/// The two lines between the cores.
#[derive(Default)]
pub struct Handover {
    /// Number of the job, and the job.
    asked: Line,
    /// Number of the job done, and the ticks it took.
    answered: Line,
    closed: AtomicBool,
}

/// Ends the host's service, whatever way the device's side is left.
pub struct Closes<'a>(pub &'a Handover);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Release);
    }
}

impl Job {
    fn word(self) -> u64 {
        match self {
            Self::Fill(value) => u64::from(value) << 1 | 1,
            Self::Load(address) => address << 1,
        }
    }

    fn of_word(word: u64) -> Self {
        if word & 1 == 1 { Self::Fill((word >> 1) as u8) } else { Self::Load(word >> 1) }
    }
}

impl Handover {
    /// Hands a job to the host and waits for it: the ticks it took there.
    ///
    /// # Errors
    /// If the host's core does not get to it.
    pub fn ask(&self, job: Job) -> Result<u64> {
        let number = self.answered.0[0].load(Ordering::Relaxed) + 1;
        self.asked.0[1].store(job.word(), Ordering::Relaxed);
        self.asked.0[0].store(number, Ordering::Release);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while !spin_until(|| self.answered.0[0].load(Ordering::Acquire) == number) {
            if Instant::now() > deadline || self.closed.load(Ordering::Acquire) {
                return Error::failed("memory: the core that plays the host does not answer: is it given to others?");
            }
        }
        Ok(self.answered.0[1].load(Ordering::Relaxed))
    }

    /// Does jobs until the other side is gone.
    pub fn serve(&self, window: &Window, size_bytes: usize) {
        let mut buffer = vec![0; size_bytes];
        let mut done = 0;
        while !self.closed.load(Ordering::Acquire) {
            if !spin_until(|| self.asked.0[0].load(Ordering::Acquire) != done) {
                continue;
            }
            done = self.asked.0[0].load(Ordering::Acquire);
            let ticks = match Job::of_word(self.asked.0[1].load(Ordering::Relaxed)) {
                Job::Fill(value) => Clock::interval(|| window.fill(value)),
                Job::Load(address) => Clock::interval(|| window.read(address, &mut buffer)),
            };
            self.answered.0[1].store(ticks, Ordering::Relaxed);
            self.answered.0[0].store(done, Ordering::Release);
        }
    }
}

/// Looks a bounded number of times, then lets others have the core once.
fn spin_until(mut done: impl FnMut() -> bool) -> bool {
    for _ in 0..SPINS_MAX {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    std::thread::yield_now();
    done()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Pages;

    #[test]
    fn jobs_survive_the_word_they_travel_in() {
        for job in [Job::Fill(0), Job::Fill(255), Job::Load(0), Job::Load(64 << 20)] {
            assert_eq!(Job::of_word(job.word()), job);
        }
    }

    #[test]
    fn the_host_does_what_it_is_asked_and_ends_with_the_device() {
        let (handover, window) = (Handover::default(), Window::map(4096, Pages::Base).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| handover.serve(&window, 64));
            let _closes = Closes(&handover);
            handover.ask(Job::Fill(9)).unwrap();
            assert!(handover.ask(Job::Load(128)).unwrap() > 0);
            handover.ask(Job::Fill(5)).unwrap();
        });
        let mut last = [0];
        window.read(4095, &mut last);
        assert_eq!(last, [5]);
    }
}
