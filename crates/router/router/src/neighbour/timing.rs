//! Timers and limits: those of RFC 4861, section 10, and local ones.

use std::time::Duration;

/// Mean duration of state reachable; the actual one is random, 0.5 to 1.5 times as long.
pub(super) const REACHABLE_TIME: Duration = Duration::from_secs(30);

/// Interval of solicitations.
pub(super) const RETRANS_TIMER: Duration = Duration::from_secs(1);

/// Duration of state delay.
pub(super) const DELAY_FIRST_PROBE_TIME: Duration = Duration::from_secs(5);

/// Number of solicitations in state incomplete.
pub(super) const MULTICAST_SOLICIT_MAX: u8 = 3;

/// Number of solicitations in state probe.
pub(super) const UNICAST_SOLICIT_MAX: u8 = 3;

/// How long an unused neighbour stays in state stale before it is removed.
pub(super) const STALE_LIFETIME: Duration = Duration::from_secs(600);

/// Delay before a freed adjacency number is reused: longer than a packet takes between two nodes, and than the
/// withdrawal of a route takes.
pub(super) const ID_REUSE_DELAY: Duration = Duration::from_secs(2);
