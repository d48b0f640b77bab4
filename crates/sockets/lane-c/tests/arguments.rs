//! Invalid arguments, and invalid segments of a peer, are refused with an errno.

#![allow(unsafe_code)] // The functions under test take raw pointers.

use crosslane_lane::*;
use libc::c_int;
use std::ffi::CString;
use std::ptr::{null, null_mut};

const IN: c_int = 1;
const OUT: c_int = 2;

/// Both sides of a new pair and its descriptor, which are closed on drop.
struct Pair {
    memfd: c_int,
    sides: [*mut Handle; 2],
}

impl Pair {
    fn new(ring_bytes: usize) -> Self {
        let memfd = crosslane_lane_create(ring_bytes);
        assert!(memfd >= 0, "create: {memfd}");
        Self { memfd, sides: [attach(memfd, 0).expect("side 0"), attach(memfd, 1).expect("side 1")] }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for side in self.sides {
            // SAFETY: `side` is a handle that `new` attached, and this is its last use.
            assert_eq!(unsafe { crosslane_lane_close(side) }, 0);
        }
        close(self.memfd);
    }
}

fn attach(memfd: c_int, side: c_int) -> Result<*mut Handle, c_int> {
    let mut lane = null_mut();
    // SAFETY: `lane` is a local variable, so its address is writable.
    match unsafe { crosslane_lane_attach(memfd, side, &raw mut lane) } {
        0 => Ok(lane),
        failure => {
            assert!(lane.is_null(), "a failure stores nothing");
            Err(failure)
        }
    }
}

fn close(descriptor: c_int) {
    // SAFETY: `descriptor` belongs to this test, and no owner closes it again.
    unsafe { libc::close(descriptor) };
}

fn write(lane: *mut Handle, bytes: &[u8]) -> isize {
    // SAFETY: `lane` is null or a handle of this test, which has one thread; a slice is readable for its length.
    unsafe { crosslane_lane_write(lane, bytes.as_ptr(), bytes.len()) }
}

fn read(lane: *mut Handle, bytes: &mut [u8]) -> isize {
    // SAFETY: `lane` is null or a handle of this test, which has one thread; the slice is writable for its length.
    unsafe { crosslane_lane_read(lane, bytes.as_mut_ptr(), bytes.len()) }
}

#[test]
fn rings_are_powers_of_two_within_bounds() {
    for ring_bytes in [0, 1, 256, 513, 3 << 10, 1 << 31, usize::MAX] {
        assert_eq!(crosslane_lane_create(ring_bytes), -libc::EINVAL, "{ring_bytes}");
    }
    for ring_bytes in [512, 4096, 8192, 1 << 30] {
        drop(Pair::new(ring_bytes));
    }
}

#[test]
fn descriptors_and_sides_that_are_not_of_a_pair_are_refused() {
    assert_eq!(attach(-1, 0), Err(-libc::EBADF));
    assert_eq!(attach(1 << 20, 0), Err(-libc::EBADF));
    let pair = Pair::new(4096);
    assert_eq!(attach(pair.memfd, 2), Err(-libc::EINVAL));
    assert_eq!(attach(pair.memfd, -1), Err(-libc::EINVAL));
    // SAFETY: a null pointer is allowed, and refused.
    assert_eq!(unsafe { crosslane_lane_attach(pair.memfd, 0, null_mut()) }, -libc::EINVAL);
    let path = CString::new("/dev/null").expect("no NUL");
    // SAFETY: `path` is a string that ends with NUL.
    let null_device = unsafe { libc::open(path.as_ptr(), libc::O_RDWR) };
    assert_eq!(attach(null_device, 0), Err(-libc::EINVAL));
    close(null_device);
}

/// Returns a memfd of `len_bytes` that starts with `words`, with `seals`.
fn forged(words: &[u64], len_bytes: i64, seals: c_int) -> c_int {
    let name = CString::new("forged").expect("no NUL");
    // SAFETY: system calls on a descriptor of this test; `name` ends with NUL, and `words` is readable for its size.
    unsafe {
        let memfd = libc::memfd_create(name.as_ptr(), libc::MFD_ALLOW_SEALING);
        assert_eq!(libc::ftruncate(memfd, len_bytes), 0);
        let head_bytes = size_of_val(words);
        assert_eq!(libc::pwrite(memfd, words.as_ptr().cast(), head_bytes, 0), head_bytes as isize);
        assert_eq!(libc::fcntl(memfd, libc::F_ADD_SEALS, seals), 0);
        memfd
    }
}

#[test]
fn a_segment_with_an_invalid_header_or_without_seals_is_refused() {
    const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let magic = u64::from_le_bytes(*b"crslane\x02");
    let (ring_bytes, secret, len_bytes) = (4096, 7, 4096 * 5);
    let attempt = |words: &[u64], len_bytes, seals| {
        let memfd = forged(words, len_bytes, seals);
        let result = attach(memfd, 0);
        close(memfd);
        if let Ok(lane) = result {
            // SAFETY: `lane` was attached above, and this is its last use.
            unsafe { crosslane_lane_close(lane) };
        }
        result.map(|_| ())
    };
    assert_eq!(attempt(&[magic, ring_bytes, secret], len_bytes, SEALS), Ok(()), "a valid header");
    assert_eq!(attempt(&[magic, ring_bytes, secret], len_bytes, 0), Err(-libc::EINVAL), "no seals");
    let invalid: [(&[u64], i64); 8] = [
        (&[magic + 1, ring_bytes, secret], len_bytes),
        (&[magic, ring_bytes * 2, secret], len_bytes),
        (&[magic, 0, secret], len_bytes),
        (&[magic, u64::MAX, secret], len_bytes),
        (&[magic, ring_bytes, 0], len_bytes),
        (&[magic, ring_bytes, secret], len_bytes - 4096),
        (&[magic, ring_bytes, secret], len_bytes + 4096),
        (&[magic, ring_bytes, secret], 64),
    ];
    for (words, len_bytes) in invalid {
        assert_eq!(attempt(words, len_bytes, SEALS), Err(-libc::EPROTO), "{words:x?} in {len_bytes} bytes");
    }
    assert_eq!(attempt(&[], 0, SEALS), Err(-libc::EINVAL), "empty");
}

#[test]
fn null_is_refused_everywhere() {
    let pair = Pair::new(4096);
    let lane = pair.sides[0];
    let invalid = -(libc::EINVAL as isize);
    assert_eq!(write(null_mut(), b"x"), invalid);
    assert_eq!(read(null_mut(), &mut [0]), invalid);
    // SAFETY: null pointers are allowed, and refused; `lane` is a handle of `pair`.
    unsafe {
        assert_eq!(crosslane_lane_write(lane, null(), 1), invalid);
        assert_eq!(crosslane_lane_read(lane, null_mut(), 1), invalid);
        assert_eq!(crosslane_lane_reserve(lane, 1, null_mut()), invalid);
        assert_eq!(crosslane_lane_peek(lane, null_mut()), invalid);
        assert_eq!(crosslane_lane_unread(null_mut()), invalid);
        let calls = [
            crosslane_lane_close(null_mut()),
            crosslane_lane_commit(null_mut(), 0),
            crosslane_lane_consume(null_mut(), 0),
            crosslane_lane_finish(null_mut()),
            crosslane_lane_ready(null_mut(), IN),
            crosslane_lane_wait(null_mut(), IN, 0),
            crosslane_lane_announce_sleep(null_mut(), IN),
            crosslane_lane_cancel_sleep(null_mut(), IN),
            crosslane_lane_take_wake_request(null_mut(), IN),
        ];
        assert_eq!(calls, [-libc::EINVAL; 9]);
    }
}

#[test]
fn lengths_and_events_out_of_range_are_refused() {
    let pair = Pair::new(4096);
    let [lane, peer] = pair.sides;
    let invalid = -(libc::EINVAL as isize);
    let mut byte = 0;
    let (mut room, mut chunk) = (null_mut(), null());
    // SAFETY: the handles are of `pair`, and the pointers of local variables. Lengths beyond `byte` are refused before
    // any access.
    unsafe {
        assert_eq!(crosslane_lane_write(lane, &raw const byte, usize::MAX), invalid);
        assert_eq!(crosslane_lane_read(lane, &raw mut byte, usize::MAX), invalid);
        assert_eq!(crosslane_lane_read(lane, &raw mut byte, 0), invalid);
        assert_eq!(crosslane_lane_reserve(lane, 0, &raw mut room), invalid);
        assert_eq!(crosslane_lane_commit(lane, 1), -libc::EINVAL, "nothing is reserved");
        assert_eq!(crosslane_lane_reserve(lane, 10, &raw mut room), 10);
        assert_eq!(crosslane_lane_commit(lane, 11), -libc::EINVAL, "more than is reserved");
        assert_eq!(crosslane_lane_commit(lane, 10), 0);
        assert_eq!(crosslane_lane_consume(peer, 1), -libc::EINVAL, "nothing is peeked");
        assert_eq!(crosslane_lane_peek(peer, &raw mut chunk), 10);
        assert_eq!(crosslane_lane_consume(peer, 11), -libc::EINVAL, "more than is peeked");
        assert_eq!(crosslane_lane_consume(peer, 4), 0);
        assert_eq!(crosslane_lane_consume(peer, 7), -libc::EINVAL, "more than is left of it");
        assert_eq!(crosslane_lane_unread(peer), 6);
        for events in [0, 4, -1] {
            assert_eq!(crosslane_lane_ready(lane, events), -libc::EINVAL);
            assert_eq!(crosslane_lane_wait(lane, events, 0), -libc::EINVAL);
        }
        assert_eq!(crosslane_lane_wait(lane, IN, -2), -libc::EINVAL);
    }
}

#[test]
fn bytes_cross_in_both_directions_each_ends_and_a_full_lane_is_not_ready() {
    let pair = Pair::new(4096);
    let [lane, peer] = pair.sides;
    let again = -(libc::EAGAIN as isize);
    let mut bytes = [0; 8192];
    assert_eq!(read(peer, &mut bytes), again);
    assert_eq!(write(lane, b""), 0);
    assert_eq!(write(lane, b"to side 1"), 9);
    assert_eq!(write(peer, b"to side 0"), 9);
    assert_eq!((read(peer, &mut bytes), &bytes[..9]), (9, &b"to side 1"[..]));
    assert_eq!((read(lane, &mut bytes), &bytes[..9]), (9, &b"to side 0"[..]));
    while write(lane, &[5; 100]) > 0 {}
    assert_eq!(write(lane, &[5; 100]), again);
    // SAFETY: the handles are of `pair`, which only this thread uses.
    unsafe {
        assert_eq!(crosslane_lane_wait(lane, OUT, 1), 0, "a timeout");
        assert_eq!(crosslane_lane_ready(peer, IN | OUT), IN | OUT);
        assert_eq!(crosslane_lane_finish(lane), 0);
        assert_eq!(crosslane_lane_finish(lane), 0);
    }
    assert_eq!(write(lane, b"x"), -(libc::EPIPE as isize));
    while read(peer, &mut bytes) > 0 {}
    assert_eq!(read(peer, &mut bytes), 0, "the end stays the end");
    let mut chunk = null();
    // SAFETY: `peer` is a handle of `pair`, which only this thread uses; `chunk` is a local variable.
    assert_eq!(unsafe { crosslane_lane_peek(peer, &raw mut chunk) }, 0);
    assert_eq!(write(peer, b"still open"), 10, "each direction ends on its own");
    assert_eq!(read(lane, &mut bytes), 10);
}

#[test]
fn a_wake_request_is_taken_once() {
    let pair = Pair::new(4096);
    let [lane, peer] = pair.sides;
    // SAFETY: the handles are of `pair`, which only this thread uses.
    unsafe {
        write(lane, b"x");
        assert_eq!(crosslane_lane_take_wake_request(lane, OUT), 0, "the peer does not sleep");
        read(peer, &mut [0]);
        assert_eq!(crosslane_lane_announce_sleep(peer, IN), 0);
        assert_eq!(crosslane_lane_ready(peer, IN), 0);
        write(lane, b"x");
        assert_eq!(crosslane_lane_take_wake_request(lane, OUT), 1);
        assert_eq!(crosslane_lane_take_wake_request(lane, OUT), 0);
        assert_eq!(crosslane_lane_announce_sleep(peer, IN), 0);
        assert_eq!(crosslane_lane_cancel_sleep(peer, IN), 0);
        assert_eq!(crosslane_lane_take_wake_request(lane, OUT), 0);

        while write(lane, &[5; 100]) > 0 {}
        assert_eq!(crosslane_lane_announce_sleep(lane, OUT), 0);
        assert_eq!(crosslane_lane_ready(lane, OUT), 0);
        read(peer, &mut [0; 8192]);
        assert_eq!(crosslane_lane_take_wake_request(peer, IN), 1);
        assert_eq!(crosslane_lane_ready(lane, OUT), OUT);
    }
}
