//! The endpoint of a connection in windows, as the proxy of its node sees it.

use crate::segment::Segment;
use crate::split_endpoint;
use crate::words::{LEFT_SILENTLY, OwnState, PeerStatus};
use fabric::Inbound;
use volmem::sync::Ordering;

/// The endpoint of a connection in windows, as the proxy of its node sees it. The proxy tells the program through it
/// what happened to the other endpoint.
#[derive(Debug)]
pub struct Endpoint<I> {
    span: I,
    has_local_page: bool,
}

impl<I: Inbound> Endpoint<I> {
    /// The endpoint in a span of this node's window.
    pub fn new(span: I) -> Self {
        let is_span = [false, true].map(Segment::window_bytes).contains(&span.len_bytes());
        assert!(is_span, "a connection's span of a window of {} bytes", span.len_bytes());
        Self { span, has_local_page: false }
    }

    /// As [`Endpoint::new`], for a program whose own state is in a local page.
    pub fn with_local_page(span: I) -> Self {
        Self { has_local_page: true, ..Self::new(span) }
    }

    /// Returns whether the program has set its endpoint up, which means that a server has accepted the connection.
    pub fn is_attached(&self) -> bool {
        if self.has_local_page {
            return split_endpoint::is_attached(&self.span);
        }
        self.span.load_u64(OwnState::Attached as usize, Ordering::Acquire) == 1
    }

    /// Notes that the other program's last descriptor is closed, and that it will not store any more.
    pub fn note_left(&self) {
        if self.has_local_page {
            return split_endpoint::note_left(&self.span);
        }
        if self.span.load_u64(PeerStatus::Closed as usize, Ordering::Acquire) == 0 {
            self.span.store_u64(PeerStatus::Closed as usize, LEFT_SILENTLY, Ordering::Release);
        }
    }

    /// Notes that the connection was reset.
    pub fn note_reset(&self) {
        if self.has_local_page {
            return split_endpoint::note_reset(&self.span);
        }
        self.span.store_u64(PeerStatus::Reset as usize, 1, Ordering::Release);
        self.span.store_u64(PeerStatus::Closed as usize, LEFT_SILENTLY, Ordering::Release);
    }
}
