//! Limits of this process: the descriptors that the library gives back where the program needs their numbers, and the
//! address space.

use crate::descriptor::hidden::release_all_optional;
use rustix::process::{Resource, getrlimit};

/// Returns whether the address space of this process is limited. It gets no lanes then: each reserves the address range
/// of its largest size, and the peer may begin to use the lane at a time when this process has no range left.
pub fn is_address_space_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
}

/// Runs `action`. If it failed because the program has no free descriptor number, closes the hidden descriptors that
/// are not required and runs it again.
pub fn retry_with_room<T, E>(
    action: impl Fn() -> Result<T, E>,
    lacks_descriptors: impl Fn(&E) -> bool,
) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) && release_all_optional() > 0 => action(),
        result => result,
    }
}
