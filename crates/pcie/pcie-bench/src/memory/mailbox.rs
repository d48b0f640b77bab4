//! A mailbox of one request between the core that models the device and the core that models the host.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::memory::window::Window;

/// Polls before the core is yielded.
const SPINS_MAX: u32 = 2_000;
/// Longest wait for a response: longer than any request takes on any machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A request to the host core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the whole window with a value.
    Fill(u8),
    /// Load the transfer that begins at this address.
    Load(u64),
}

/// An aligned line with a single writer.
#[repr(align(128))]
#[derive(Default)]
struct Line([AtomicU64; 2]);

/// The request line and the response line.
#[derive(Default)]
pub struct Mailbox {
    /// Sequence number of the request, and the encoded request.
    request: Line,
    /// Sequence number of the completed request, and the ticks it took.
    response: Line,
    closed: AtomicBool,
}

/// Ends the service of the host core when the device core returns, fails or panics.
pub struct CloseOnDrop<'a>(pub &'a Mailbox);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Release);
    }
}

impl Request {
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

impl Mailbox {
    /// Sends a request to the host core, waits for its completion, and returns the ticks it took there.
    ///
    /// # Errors
    /// The host core does not respond.
    pub fn call(&self, request: Request) -> Result<u64> {
        let number = self.response.0[0].load(Ordering::Relaxed) + 1;
        self.request.0[1].store(request.word(), Ordering::Relaxed);
        self.request.0[0].store(number, Ordering::Release);
        let deadline = Instant::now() + RESPONSE_TIMEOUT;
        while !spin_until(|| self.response.0[0].load(Ordering::Acquire) == number) {
            if Instant::now() > deadline || self.closed.load(Ordering::Acquire) {
                return Error::failed(
                    "memory: the core that models the host does not respond; check that no other program occupies it",
                );
            }
        }
        Ok(self.response.0[1].load(Ordering::Relaxed))
    }

    /// Executes requests until the device core has closed the mailbox.
    pub fn serve(&self, window: &Window, size_bytes: usize) {
        let mut buffer = vec![0; size_bytes];
        let mut done = 0;
        while !self.closed.load(Ordering::Acquire) {
            if !spin_until(|| self.request.0[0].load(Ordering::Acquire) != done) {
                continue;
            }
            done = self.request.0[0].load(Ordering::Acquire);
            let ticks = match Request::of_word(self.request.0[1].load(Ordering::Relaxed)) {
                Request::Fill(value) => Clock::interval(|| window.fill(value)),
                Request::Load(address) => Clock::interval(|| window.read(address, &mut buffer)),
            };
            self.response.0[1].store(ticks, Ordering::Relaxed);
            self.response.0[0].store(done, Ordering::Release);
        }
    }
}

/// Polls up to [`SPINS_MAX`] times, then yields the core once and polls again.
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
    use crate::memory::window::Pages;

    #[test]
    fn a_request_is_encoded_and_decoded_without_loss() {
        for request in [Request::Fill(0), Request::Fill(255), Request::Load(0), Request::Load(64 << 20)] {
            assert_eq!(Request::of_word(request.word()), request);
        }
    }

    #[test]
    fn the_host_executes_requests_until_the_device_closes_the_mailbox() {
        let (mailbox, window) = (Mailbox::default(), Window::map(4096, Pages::Base).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| mailbox.serve(&window, 64));
            let _close = CloseOnDrop(&mailbox);
            mailbox.call(Request::Fill(9)).unwrap();
            assert!(mailbox.call(Request::Load(128)).unwrap() > 0);
            mailbox.call(Request::Fill(5)).unwrap();
        });
        let mut last = [0];
        window.read(4095, &mut last);
        assert_eq!(last, [5]);
    }
}
