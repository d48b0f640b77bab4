//! An endpoint in windows that are not ordinary memory: where compare-and-exchange does not work, as on the BAR of a
//! PCI device, or where caches may hold stale lines, as for a CXL device that is not coherent.
//!
//! The windows then only hold what the nodes write for each other. The endpoint's own state and its cursors are in the
//! local page, in a memfd shared by the processes that hold the endpoint. That page is laid out like any endpoint; the
//! window holds the lines that others write.
//!
//! ```text
//! line of the endpoint    local page        window
//!   0 to 2                  own state         -
//! 3                       own state         attached: from the program to its node's proxy
//! 4                       own state         reset, closed: from the proxy to the program
//!   5                       reset             status: written by the peer
//!   6, 7 and 9, 10          -                 words of both lanes: written by the peer
//!   8, 11, 12               cursors           -
//! ```
//!
//! Therefore no line has two writers, and no line is written and read through different caches of one node: its program
//! and its proxy share the caches.
//!
//! Where the memory is not coherent, each node clears what it writes, in its own window and in the other one, before it
//! announces that it uses the span, so that the other node finds it clear. Elsewhere the accepting node clears both
//! windows, because the other node may use them as its own memory and may have left state in them.

use crate::layout::{ENDPOINT_BYTES, WINDOW_LAYOUT};
use crate::segment::{receiver_state, sender_state};
use crate::words::{LEFT_SILENTLY, OwnState, PeerStatus};
use fabric::{Inbound, Memory, MemoryInbound, MemoryOutbound, Outbound};
use lane::{Consumer, Producer};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES as LINE, Region};

const WORD_BYTES: usize = size_of::<u64>();
const ATTACHED: usize = OwnState::Attached as usize;
const RESET_BY_PROXY: usize = 4 * LINE;
const CLOSED_BY_PROXY: usize = RESET_BY_PROXY + WORD_BYTES;
/// Lines of a window's endpoint that its own node writes, as a bit set.
const LINES_OF_NODE: u64 = 1 << (ATTACHED / LINE) | 1 << (RESET_BY_PROXY / LINE);
/// Lines that the peer writes, as a bit set.
const LINES_OF_PEER: u64 = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 9 | 1 << 10;

const _: () = assert!(PeerStatus::Reset as usize / LINE == 5 && PeerStatus::GiveWay as usize / LINE == 5);
const _: () = assert!(WINDOW_LAYOUT.forward_offset == 6 * LINE && WINDOW_LAYOUT.back_offset == 9 * LINE);
const _: () = assert!(ENDPOINT_BYTES == 13 * LINE);

/// The sender of a lane whose cursor is in the local page.
pub type LocalPageSenderOf<M> = Producer<MemoryOutbound<M>, MemoryInbound<M>>;
/// The receiver of a lane whose cursor is in the local page.
pub type LocalPageReceiverOf<M> = Consumer<MemoryInbound<M>, MemoryOutbound<M>>;

/// Both spans of an endpoint, and its local page.
#[derive(Debug)]
pub(crate) struct SplitEndpoint<M> {
    inbound: MemoryInbound<M>,
    outbound: MemoryOutbound<M>,
    page: Region,
}

impl<M: Memory> SplitEndpoint<M> {
    /// `page` is the part of the local page that holds the endpoint's words.
    pub(crate) fn new(inbound: M, outbound: M, page: Region) -> Self {
        assert_eq!(page.len_bytes(), ENDPOINT_BYTES, "an endpoint");
        Self { inbound: MemoryInbound::new(inbound), outbound: MemoryOutbound::new(outbound), page }
    }

    pub(crate) fn sender(&self, secret: u64) -> LocalPageSenderOf<M> {
        let own = sender_state(&self.page);
        Producer::with_state(self.outbound.clone(), self.inbound.clone(), own, WINDOW_LAYOUT, secret)
    }

    pub(crate) fn receiver(&self, secret: u64) -> LocalPageReceiverOf<M> {
        let own = receiver_state(&self.page);
        Consumer::with_state(self.inbound.clone(), self.outbound.clone(), own, WINDOW_LAYOUT, secret)
    }

    /// Tells this node's proxy that the program uses its span.
    pub(crate) fn attach(&self) {
        store_own(&self.inbound, ATTACHED, 1);
    }

    /// Loads a word that the peer or, in its place, this node's proxy has written. The proxy's word is loaded first,
    /// because it is written after the peer's.
    pub(crate) fn status(&self, word: PeerStatus) -> u64 {
        let by_proxy = match word {
            PeerStatus::Reset => self.inbound.load_u64(RESET_BY_PROXY, Ordering::Acquire),
            PeerStatus::Closed => self.inbound.load_u64(CLOSED_BY_PROXY, Ordering::Acquire),
            PeerStatus::Attached | PeerStatus::GiveWay => 0,
            PeerStatus::Urgent => return 0, // Not in windows.
        };
        self.inbound.invalidate(word as usize, WORD_BYTES);
        match self.inbound.load_u64(word as usize, Ordering::Acquire) {
            0 => by_proxy,
            by_peer => by_peer,
        }
    }

    /// Stores a word for the peer, behind everything that was sent. It has arrived when this returns, because the
    /// program may end next.
    pub(crate) fn publish(&self, word: PeerStatus, value: u64) {
        self.outbound.fence();
        self.outbound.store_u64(word as usize, value, Ordering::Release);
        self.outbound.flush();
    }
}

/// For this node's proxy: returns whether the program uses its span.
pub(crate) fn is_attached(span: &impl Inbound) -> bool {
    span.load_u64(ATTACHED, Ordering::Acquire) == 1
}

/// For this node's proxy: notes that the other program is gone.
pub(crate) fn note_left(span: &impl Inbound) {
    store_own(span, CLOSED_BY_PROXY, LEFT_SILENTLY);
}

/// For this node's proxy: notes that the connection was reset.
pub(crate) fn note_reset(span: &impl Inbound) {
    store_own(span, RESET_BY_PROXY, 1);
    store_own(span, CLOSED_BY_PROXY, LEFT_SILENTLY);
}

/// Stores a word for another process of this node, which may load it at once.
fn store_own(span: &impl Inbound, word: usize, value: u64) {
    span.store_u64(word, value, Ordering::Release);
    volmem::store_fence(); // For write-combined memory.
}

/// Clears what this node writes in its own span and in the other one, while no program of the node uses them.
pub(crate) fn clean(inbound: &impl Inbound, outbound: &impl Outbound) {
    for word in words_of(LINES_OF_NODE) {
        inbound.store_u64(word, 0, Ordering::Relaxed);
    }
    for word in words_of(LINES_OF_PEER) {
        outbound.store_u64(word, 0, Ordering::Relaxed);
    }
    volmem::store_fence();
    outbound.flush();
}

fn words_of(lines: u64) -> impl Iterator<Item = usize> {
    (0..ENDPOINT_BYTES).step_by(WORD_BYTES).filter(move |word| is_in(*word, lines))
}

/// Returns whether `offset` is in one of the given lines of the endpoint.
fn is_in(offset: usize, lines: u64) -> bool {
    offset < ENDPOINT_BYTES && lines >> (offset / LINE) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Segment;
    use fabric::test_support::non_coherent::{CacheBehavior, NonCoherentMemory, OmittedStep};

    /// One of two linked nodes with incoherent caches: its spans, and the program there.
    struct Node {
        inbound: NonCoherentMemory,
        outbound: NonCoherentMemory,
    }

    impl Node {
        fn pair(habits: CacheBehavior) -> [Self; 2] {
            NonCoherentMemory::windows(Segment::WINDOW_BYTES, habits)
                .map(|(inbound, outbound)| Self { inbound, outbound })
        }

        fn proxys(&self) -> MemoryInbound<NonCoherentMemory> {
            MemoryInbound::new(self.inbound.clone())
        }

        fn clean(&self) {
            clean(&self.proxys(), &MemoryOutbound::new(self.outbound.clone()));
        }

        fn program(&self) -> SplitEndpoint<NonCoherentMemory> {
            SplitEndpoint::new(self.inbound.clone(), self.outbound.clone(), Region::heap(ENDPOINT_BYTES))
        }
    }

    const WORDS: [PeerStatus; 4] = [PeerStatus::Reset, PeerStatus::Closed, PeerStatus::Attached, PeerStatus::GiveWay];

    /// Uses spans of an earlier connection, which their nodes clear in some order. Returns `false` if a stale word was
    /// found or a stored word did not arrive.
    fn connection(nodes: &[Node; 2], number: u64) -> bool {
        let order = if number.is_multiple_of(2) { [0, 1] } else { [1, 0] };
        order.into_iter().for_each(|node| nodes[node].clean());
        let programs = nodes.each_ref().map(Node::program);
        let says_nothing = |end: &SplitEndpoint<NonCoherentMemory>| WORDS.iter().all(|word| end.status(*word) == 0);
        let is_new = programs.iter().all(says_nothing) && nodes.iter().all(|node| !is_attached(&node.proxys()));
        let carries = [(0, 1), (1, 0)].into_iter().all(|(from, to)| {
            let secret = number * 2 + from as u64 + 1;
            carries(&programs[from], &programs[to], secret)
        });
        programs.iter().for_each(|end| end.publish(PeerStatus::Attached, 1));
        programs.iter().for_each(SplitEndpoint::attach);
        let are_there = programs.iter().all(|end| end.status(PeerStatus::Attached) == 1)
            && nodes.iter().all(|node| is_attached(&node.proxys()));
        is_new && carries && are_there && ends(nodes, &programs, number)
    }

    /// Sends messages of one line and of several, until both rings were in use, then finishes. Flushes give every store
    /// the time to arrive.
    fn carries(from: &SplitEndpoint<NonCoherentMemory>, to: &SplitEndpoint<NonCoherentMemory>, secret: u64) -> bool {
        let (mut sender, mut receiver) = (from.sender(secret), to.receiver(secret));
        let mut is_whole = !receiver.may_have_data() && !receiver.is_finished();
        for len_bytes in [1, 48, 49, 5_000, 20_000, 3] {
            let sent: Vec<u8> = (0..len_bytes).map(|at| (at as u64 + secret) as u8).collect();
            is_whole &= sender.write(&sent) == Ok(len_bytes);
            from.outbound.flush();
            let mut received = vec![0; len_bytes];
            is_whole &= receiver.read(&mut received) == Ok(len_bytes) && received == sent;
        }
        sender.finish();
        from.outbound.flush();
        is_whole && receiver.is_finished()
    }

    /// Closes one side, in an orderly way or not, with the proxy's report to the other side.
    fn ends(nodes: &[Node; 2], programs: &[SplitEndpoint<NonCoherentMemory>; 2], number: u64) -> bool {
        let [one, other] = programs;
        match number % 3 {
            0 => {
                one.publish(PeerStatus::Closed, 1);
                note_left(&nodes[1].proxys());
                other.status(PeerStatus::Closed) == 1 && other.status(PeerStatus::Reset) == 0
            }
            1 => {
                note_left(&nodes[1].proxys());
                other.status(PeerStatus::Closed) == LEFT_SILENTLY && other.status(PeerStatus::Reset) == 0
            }
            _ => {
                note_reset(&nodes[1].proxys());
                other.status(PeerStatus::Closed) == LEFT_SILENTLY && other.status(PeerStatus::Reset) == 1
            }
        }
    }

    #[test]
    fn spans_serve_one_connection_after_the_other_whatever_caches_keep() {
        for seed in 0..20 {
            let nodes = Node::pair(CacheBehavior::spontaneous(seed));
            assert!((0..6).all(|number| connection(&nodes, number)), "seed {seed}");
        }
        let quiet = Node::pair(CacheBehavior::explicit());
        assert!((0..6).all(|number| connection(&quiet, number)));
    }

    #[test]
    fn lines_that_are_not_written_back_or_not_dropped_are_missed() {
        for omission in [OmittedStep::WriteBack, OmittedStep::Invalidate] {
            let nodes = Node::pair(CacheBehavior::explicit().without(omission));
            assert!(!(0..6).all(|number| connection(&nodes, number)), "{omission:?}");
        }
    }

    #[test]
    fn every_line_of_a_windows_endpoint_has_one_writer_at_most() {
        assert_eq!(LINES_OF_NODE & LINES_OF_PEER, 0);
        assert!(WORDS.iter().all(|word| is_in(*word as usize, LINES_OF_PEER)));
    }
}
