//! Limits of this process.

use rustix::process::{Resource, getrlimit};

/// Returns whether the address space of this process is limited. It gets no lanes then: each reserves the address range
/// of its largest size, and the peer may begin to use the lane at a time when this process has no range left.
pub fn is_address_space_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
}
