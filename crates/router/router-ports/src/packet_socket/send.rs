//! Sending of frames to an interface, many with one system call.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool};
use rustix::net::sockopt;

use super::bind;
use crate::interface::InterfaceIndex;
use crate::offload::{LARGE_KINDS, VIRTIO_HEADER_BYTES, describe_large, link_bytes};
use crate::system::{checked, set_option};

/// The largest number of frames in one call.
const FRAMES_MAX: usize = 64;
/// The size of the kernel's queue of unsent frames.
const QUEUE_BYTES: usize = 8 << 20;
/// Large packets of a kind that are segmented here after the interface has refused one. Then one is offered again: its
/// offloads may have been switched on.
const SEGMENTED_AFTER_REFUSAL: u32 = 1000;

/// A socket that sends to an interface and receives nothing.
pub struct Sender {
    socket: OwnedFd,
    /// Large packets that are still segmented here, by kind.
    segmented: [u32; LARGE_KINDS],
    /// Frames that the interface refused.
    pub refused: u64,
}

/// What became of the frames at the front of the queue.
enum Sent {
    /// So many were sent, at least 1.
    Frames(usize),
    /// The first one is a large packet that must be segmented here.
    MustSegment,
}

impl Sender {
    pub fn open(interface: InterfaceIndex) -> io::Result<Sender> {
        let socket = super::socket()?;
        // Bypasses the queueing discipline: the router has its own queue. This path does not segment for an interface
        // without that offload.
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &1)?;
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1)?;
        if sockopt::set_socket_send_buffer_size_force(&socket, QUEUE_BYTES).is_err() {
            sockopt::set_socket_send_buffer_size(&socket, QUEUE_BYTES)?;
        }
        bind(&socket, interface, 0)?;
        Ok(Sender { socket, segmented: [0; LARGE_KINDS], refused: 0 })
    }

    /// Sends from the front of `from` until all is sent or the socket has no room. Large packets that the interface
    /// does not take are segmented. Frames that it refuses are freed and counted. Errors are those of the socket.
    pub fn send_all(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let before = from.len();
        let mut added = 0;
        while !from.is_empty() {
            let done = match self.send_batch(pool, from) {
                Ok(Sent::Frames(sent)) => sent,
                Ok(Sent::MustSegment) => {
                    added += self.segment_first(pool, from);
                    continue;
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => break,
                    Some(libc::ENODEV | libc::ENXIO | libc::EBADF) => return Err(error),
                    Some(libc::ENETDOWN) => self.refuse(),
                    // The interface has no segmentation, or its queue is full.
                    _ if from.front().is_some_and(|first| self.note_refusal(pool, first)) => continue,
                    // The queue of the interface is full, or the frame is too long: the other frames may be accepted.
                    _ => self.refuse(),
                },
            };
            from.drain(..done).for_each(|packet| pool.free(packet));
        }
        Ok((before + added).saturating_sub(from.len()))
    }

    fn refuse(&mut self) -> usize {
        self.refused += 1;
        1
    }

    /// Records that a packet was refused. Returns whether it is a large one, which is segmented now.
    fn note_refusal(&mut self, pool: &mut Pool, packet: &Packet) -> bool {
        let mut header = [0; VIRTIO_HEADER_BYTES];
        let kind = if packet.is_large() { describe(pool, packet, &mut header) } else { None };
        if let Some(kind) = kind {
            self.segmented[kind] = SEGMENTED_AFTER_REFUSAL;
        }
        kind.is_some()
    }

    /// Replaces the first packet, a large one, by its segments. Returns the number of added packets. Without a buffer,
    /// or if its headers are not consistent, the rest counts as refused.
    fn segment_first(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> usize {
        let Some(packet) = from.pop_front() else { return 0 };
        let segments = link_bytes(pool.bytes(&packet)).and_then(|link_bytes| pool.segments(&packet, link_bytes));
        let mut parts = Vec::new();
        if let Some(mut segments) = segments {
            while let Some(bytes) = segments.next_bytes() {
                match pool.alloc_segment(&packet, &mut segments, bytes) {
                    Some(segment) => parts.push(segment),
                    None => break,
                }
            }
            self.refused += u64::from(segments.next_bytes().is_some());
        } else {
            self.refused += 1;
        }
        pool.free(packet);
        let count = parts.len();
        parts.into_iter().rev().for_each(|part| from.push_front(part));
        count.saturating_sub(1)
    }

    /// Makes one system call.
    fn send_batch(&mut self, pool: &mut Pool, from: &VecDeque<Packet>) -> io::Result<Sent> {
        let mut headers = [[0; VIRTIO_HEADER_BYTES]; FRAMES_MAX];
        let mut count = 0;
        for (packet, header) in from.iter().zip(&mut headers) {
            if packet.is_large() {
                let Some(kind) = describe(pool, packet, header) else { break };
                if self.segmented[kind] > 0 {
                    self.segmented[kind] -= u32::from(count == 0);
                    break;
                }
            }
            count += 1;
        }
        if count == 0 {
            return Ok(Sent::MustSegment);
        }
        let mut parts = [[libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2]; FRAMES_MAX];
        for ((packet, header), parts) in from.iter().zip(&headers).zip(&mut parts).take(count) {
            let part = |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            *parts = [part(header), part(pool.bytes(packet))];
        }
        // SAFETY: an `mmsghdr` of zeroes is valid: a message without address, parts or control data.
        let mut messages: [libc::mmsghdr; FRAMES_MAX] = unsafe { std::mem::zeroed() };
        for (message, parts) in messages.iter_mut().zip(&mut parts) {
            message.msg_hdr.msg_iov = parts.as_mut_ptr();
            message.msg_hdr.msg_iovlen = parts.len() as _;
        }
        let (socket, flags) = (self.socket.as_raw_fd(), libc::MSG_DONTWAIT as _);
        // SAFETY: the array has at least `count` messages, each with two parts that refer to a header, which lives
        // until the call returns, and to a frame borrowed from the pool; the kernel only reads both.
        let sent = unsafe { libc::sendmmsg(socket, messages.as_mut_ptr(), count as u32, flags) };
        checked(sent).map(|sent| Sent::Frames(sent as usize))
    }
}

impl AsFd for Sender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Writes the header of a large packet, and stores its partial checksum. Returns its kind.
fn describe(pool: &mut Pool, packet: &Packet, header: &mut [u8; VIRTIO_HEADER_BYTES]) -> Option<usize> {
    let segment_bytes = packet.segment_bytes();
    let frame = pool.bytes_mut(packet);
    let link_bytes = link_bytes(frame)?;
    let (described, kind) = describe_large(frame, link_bytes, segment_bytes).ok()?;
    *header = described;
    Some(kind)
}
