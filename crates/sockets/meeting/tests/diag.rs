//! What the kernel says of the other endpoint.

mod common;

use std::net::TcpListener;
use std::os::fd::AsFd;

use common::{Connection, own_uid};
use meeting::diag::{LookUp, look_up, look_up_peer};
use meeting::{Endpoint, Role, Tuple};

/// Returns whether this kernel and sandbox answer at all.
fn is_available() -> bool {
    let connection = Connection::v4();
    look_up(connection.endpoints().0.tuple).is_some()
}

#[test]
fn each_endpoint_finds_the_others_cookie_user_and_inode() {
    if !is_available() {
        return;
    }
    for (listening, destination) in [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("[::1]:0", "[::1]:0"),
        ("[::]:0", "127.0.0.1:0"),
        ("[::]:0", "[::ffff:127.0.0.1]:0"),
    ] {
        let connection = Connection::new(listening, destination);
        let (connected, accepted) = connection.endpoints();
        for (endpoint, other, socket) in
            [(connected, accepted, &connection.accepted), (accepted, connected, &connection.connected)]
        {
            let LookUp::Found(entry) = look_up_peer(&endpoint) else { panic!("{listening} {destination}") };
            let inode = rustix::fs::fstat(socket).unwrap().st_ino;
            assert_eq!((entry.cookie, entry.uid), (other.cookie, own_uid()));
            assert_eq!((u64::from(entry.inode), entry.state), (inode, 1));
            assert_eq!(look_up(other.tuple), Some(entry));
        }
    }
}

#[test]
fn a_listener_is_not_taken_for_an_endpoint() {
    if !is_available() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = Tuple::new(listener.local_addr().unwrap(), "127.0.0.1:1".parse().unwrap());
    assert_eq!(look_up(nobody), None, "the kernel answers with the listener");
    assert_eq!(look_up(nobody.reversed()), None);
}

#[test]
fn an_endpoint_that_is_not_accepted_yet_is_found_and_one_that_is_gone_is_not_connected() {
    if !is_available() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let endpoint = Endpoint::of(connected.as_fd(), Role::Connected).unwrap();
    let LookUp::Found(entry) = look_up_peer(&endpoint) else { panic!("in the queue of the listener") };
    assert!(entry.is_connected() && entry.inode == 0);
    drop(listener); // A reset, which ends this endpoint too: nothing tells that from a kernel without `tcp_diag`.
    assert_eq!(look_up_peer(&endpoint), LookUp::Unavailable);
}

#[test]
fn another_namespace_is_not_asked() {
    let connection = Connection::v4();
    let endpoint = connection.endpoints().0;
    if endpoint.netns_cookie == 0 {
        return; // Before Linux 5.14.
    }
    let moved = Endpoint { netns_cookie: endpoint.netns_cookie + 1, ..endpoint };
    assert_eq!(look_up_peer(&moved), LookUp::Unavailable);
}
