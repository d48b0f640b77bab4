//! Times of RFC 4861, section 10, and of our own.

use std::time::Duration;

/// How long an answer is good for, on average: drawn from half of it to one and a half.
pub(super) const REACHABLE_TIME: Duration = Duration::from_secs(30);

/// From one ask to the next.
pub(super) const RETRANS_TIMER: Duration = Duration::from_secs(1);

/// From the first packet that is sent to a stale neighbour to the first ask.
pub(super) const DELAY_FIRST_PROBE_TIME: Duration = Duration::from_secs(5);

/// How often a neighbour that was never heard is asked.
pub(super) const MULTICAST_SOLICIT_MAX: u8 = 3;

/// How often one that was heard before is asked.
pub(super) const UNICAST_SOLICIT_MAX: u8 = 3;

/// How long a neighbour that nobody sends to is remembered.
pub(super) const STALE_LIFETIME: Duration = Duration::from_secs(600);

/// How long an adjacency's number rests before another neighbour gets it: longer than a packet is under way between
/// two nodes, and than it takes to withdraw a route.
pub(super) const ID_REUSE_DELAY: Duration = Duration::from_secs(2);
