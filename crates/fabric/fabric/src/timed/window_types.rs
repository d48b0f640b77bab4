//! The types that timed windows wrap.

use crate::{Doorbell, Inbound, Link, Outbound, Slice};

/// The types that timed windows wrap. Every link has them. A holder of windows without a link, such as a program that
/// owns a part of one, implements the trait for a type of its own.
pub trait WindowTypes {
    /// This node's window.
    type Inbound: Inbound + Slice + Clone;
    /// The peer's window.
    type Outbound: Outbound + Slice + Clone;
    /// The doorbell that wakes the peer.
    type Doorbell: Doorbell + Clone;
}

impl<L: Link> WindowTypes for L {
    type Inbound = <L as Link>::Inbound;
    type Outbound = <L as Link>::Outbound;
    type Doorbell = <L as Link>::Doorbell;
}
