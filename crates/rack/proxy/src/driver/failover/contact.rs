//! What the two proxies of a link tell each other, while it is up, to find and recognize each other after its loss.

use crate::driver::tcp_endpoint::TcpEndpoint;
use crate::engine::DetachedEngine;
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

/// A random number that only the two proxies of a link know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::driver) struct FailoverToken(pub(super) [u64; 2]);

impl FailoverToken {
    /// Returns a random token that is not zero, or `None` if the kernel has no random numbers.
    pub(super) fn new() -> Option<Self> {
        let mut bytes = [0; 16];
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        let half = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        (filled == Ok(bytes.len())).then(|| Self([half(0) | 1, half(8)]))
    }

    /// Compares two tokens in constant time.
    pub(super) fn is(&self, other: &Self) -> bool {
        let difference = (self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1]);
        std::hint::black_box(difference) == 0
    }
}

/// Identifies an engine of a link at both nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::driver) struct EngineId {
    /// The other node's slot.
    pub(in crate::driver) peer: u8,
    /// The epoch of the link in which the engine began.
    pub(in crate::driver) epoch: u32,
    /// The index of the engine's plan, which is the same at both nodes.
    pub(in crate::driver) plan: usize,
}

/// How a node's proxy is found and recognized after the loss of the link: words in the greeting line of its engine.
#[derive(Debug, Clone, Copy)]
pub(in crate::driver) struct FailoverContact {
    /// The port at which its proxy listens; 0 if it does not.
    pub(super) port: u16,
    pub(in crate::driver) token: FailoverToken,
}

impl FailoverContact {
    /// Offsets of the words in the greeting line, after the secret.
    const OFFSETS: [usize; 3] = [8, 16, 24];

    /// Stores the contact. The secret, which announces it to the peer, is stored afterwards.
    pub(in crate::driver) fn store<O: Outbound>(&self, window: &O) {
        let words = [u64::from(self.port), self.token.0[0], self.token.0[1]];
        for (offset, word) in Self::OFFSETS.into_iter().zip(words) {
            window.store_u64(offset, word, Ordering::Relaxed);
        }
        window.fence();
    }

    /// Loads the peer's contact, which is hostile. Returns `None` if there is none.
    pub(in crate::driver) fn load<I: Inbound>(window: &I) -> Option<Self> {
        let [port, first, second] = Self::OFFSETS.map(|offset| window.load_u64(offset, Ordering::Relaxed));
        let port = u16::try_from(port).ok()?;
        (first != 0).then_some(Self { port, token: FailoverToken([first, second]) })
    }
}

/// An engine that has lost its link, and both nodes' contacts.
pub(in crate::driver) struct LostEngine {
    pub(in crate::driver) id: EngineId,
    pub(in crate::driver) local: FailoverContact,
    pub(in crate::driver) remote: FailoverContact,
    pub(in crate::driver) detached: DetachedEngine<TcpEndpoint>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_random_and_differ_in_any_bit() {
        let [one, other] = [FailoverToken::new().unwrap(), FailoverToken::new().unwrap()];
        assert!(one.is(&one) && !one.is(&other));
        assert!(!one.is(&FailoverToken([one.0[0], one.0[1] ^ 1 << 63])));
    }
}
