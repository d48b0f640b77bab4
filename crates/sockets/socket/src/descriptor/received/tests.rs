use super::*;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use std::io::IoSlice;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

fn send(socket: &OwnedFd, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RIGHTS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    assert_eq!(rustix::net::sendmsg(socket, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()), Ok(1));
}

/// Receives what is there, and returns the descriptors.
fn receive_all(socket: &OwnedFd) -> (Received, Vec<OwnedFd>) {
    let mut bytes = [0_u8; 16];
    let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    let mut fds = Vec::new();
    // SAFETY: the only span is a local array.
    let received = unsafe { receive(socket.as_raw_fd(), &spans, 0, |fd| fds.push(fd)) };
    (received.unwrap(), fds)
}

/// Returns a TCP socket whose last close waits for a minute.
fn lingering() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).unwrap();
    socket
}

#[test]
fn all_descriptors_that_a_message_can_carry_are_received() {
    let _no_child = test_support::spawn::forbid();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    let (ours, theirs) = pair();
    send(&theirs, &vec![writer.as_fd(); RIGHTS_MAX]);
    drop(writer);
    let (received, fds) = receive_all(&ours);
    assert_eq!((received, fds.len()), (Received { bytes: 1, has_rights: true, is_cut: false }, RIGHTS_MAX));
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Err(Errno::AGAIN), "a writer is left");
    fds.into_iter().for_each(discard);
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "the end of the pipe: no writer is left");
}

#[test]
fn a_socket_that_arrives_does_not_linger() {
    let (ours, theirs) = pair();
    let socket = lingering();
    send(&theirs, &[ours.as_fd(), socket.as_fd()]);
    let (_, fds) = receive_all(&ours);
    assert_eq!((fds.len(), sockopt::socket_linger(&socket)), (2, Ok(None)));
}
#[test]
fn a_socket_in_the_queue_of_a_discarded_one_does_not_linger() {
    let socket = lingering();
    let (inner, inner_peer) = pair();
    send(&inner_peer, &[socket.as_fd()]);
    let (outer, outer_peer) = pair();
    send(&outer_peer, &[inner.as_fd()]);
    drop(inner);
    discard(outer);
    assert_eq!(sockopt::socket_linger(&socket), Ok(None));
}
