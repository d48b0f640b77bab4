//! A meeting of two processes.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{key_of, memory, offer, policy};
use meeting::bell::{Drained, drain, ring};
use meeting::{Accepting, Answer, Endpoint, Proposal, Role, Step};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The variable by which the test starts itself as the connecting process: its value is the listener's address.
const ADDRESS: &str = "CROSSLANE_MEETING_TEST_ADDRESS";

fn wait_readable(fds: &[std::os::fd::BorrowedFd<'_>]) {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    assert!(poll(&mut polled, Some(&Timespec { tv_sec: 30, tv_nsec: 0 })).unwrap() > 0, "nothing within 30 s");
}

/// The connecting process: meets, is rung, says so, and waits to be killed.
fn connect(address: &str) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(b"request").unwrap();
    socket.read_exact(&mut [0; 6]).unwrap(); // "answer": the other endpoint is announced.
    let endpoint = Endpoint::of(socket.as_fd(), Role::Connected).unwrap();
    let mut proposal = Proposal::connect(&key_of(1).into(), &endpoint, &policy()).unwrap();
    proposal.send(socket.as_fd(), &offer(&memory(), 1)).unwrap();
    wait_readable(&[proposal.descriptor().unwrap()]);
    let Answer::Met(met) = proposal.advance(socket.as_fd()) else { panic!("refused") };
    wait_readable(&[met.bell.as_fd()]);
    assert_eq!(drain(met.bell.as_fd()), Drained::Empty);
    println!("rung by {}", met.peer_pid);
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn two_processes_meet_and_each_sees_the_other_be_killed() {
    if let Ok(address) = std::env::var(ADDRESS) {
        return connect(&address);
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--nocapture", "two_processes_meet"])
        .env(ADDRESS, listener.local_addr().unwrap().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut socket = listener.accept().unwrap().0;
    socket.read_exact(&mut [0; 7]).unwrap();
    let endpoint = Endpoint::of(socket.as_fd(), Role::Accepted).unwrap();
    let mut accepting = Accepting::announce(&key_of(1).into(), socket.as_fd(), &endpoint, &policy()).unwrap();
    socket.write_all(b"answer").unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let (announced, caller) = accepting.descriptors();
        wait_readable(&[&[announced], caller.as_slice()].concat());
        match accepting.advance(socket.as_fd()) {
            Step::Proposed => break,
            step => assert!(step == Step::Waiting && Instant::now() < deadline, "{step:?}"),
        }
    }
    let met = accepting.accept(&offer(&memory(), 2)).unwrap();
    assert_eq!(met.peer_pid, child.id() as i32);
    ring(met.bell.as_fd()).unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let expected = format!("rung by {}", std::process::id());
    assert!(lines.map_while(Result::ok).any(|line| line.ends_with(&expected)));

    assert_eq!(drain(met.bell.as_fd()), Drained::Empty);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_readable(&[met.bell.as_fd()]);
    assert_eq!(drain(met.bell.as_fd()), Drained::HungUp);
}
