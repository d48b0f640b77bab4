//! Urgent bytes, as far as the suite of socket semantics does not show them.

use super::*;
use crate::connection::readiness::EdgeCounters;
use crate::connection::urgent::URGENT_PASSED_MAX;

fn send_urgent(connection: &'static Connection, byte: u8) -> Result<usize, Errno> {
    let span = [libc::iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 }];
    // SAFETY: the span is a byte that outlives the call.
    unsafe { connection.send_urgent(&span, MessageFlags::default()) }
}

#[test]
fn a_receive_passes_a_bounded_number_of_urgent_bytes_and_the_next_one_finds_the_rest() {
    let (one, two) = pair(true);
    for _ in 0..URGENT_PASSED_MAX + 10 {
        assert_eq!(send_urgent(one.0, b'!'), Ok(1));
    }
    assert_eq!(send(one.0, b"x"), Ok(1));
    assert_eq!(two.0.readiness(libc::POLLIN), libc::POLLIN);
    let before = two.0.edges(EdgeCounters::default());
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Err(Errno::AGAIN));
    assert_eq!(two.0.readiness(libc::POLLIN), libc::POLLIN);
    assert!(two.0.edges(before).has_event_since(before, libc::POLLIN), "another event for edge-triggered watchers");
    assert_eq!((receive(two.0, &mut bytes), bytes[0]), (Ok(1), b'x'));
}
