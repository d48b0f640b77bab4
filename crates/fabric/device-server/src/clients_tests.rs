//! Any history of coming, going and reading: what each client is told is a history that can have been.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::Clients;

const VECTORS: u32 = 2;
/// So few that no queue is full.
const STEPS_MAX: usize = 80;

#[derive(Clone, Debug)]
enum Step {
    Come,
    /// One of those that are there goes.
    Go(prop::sample::Index),
    /// One of them reads so many messages.
    Read(prop::sample::Index, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        Just(Step::Come),
        any::<prop::sample::Index>().prop_map(Step::Go),
        (any::<prop::sample::Index>(), 0..20_usize).prop_map(|(who, messages)| Step::Read(who, messages)),
    ];
    prop::collection::vec(step, 1..STEPS_MAX)
}

/// A client, and what it has been told.
struct Listener {
    socket: UnixStream,
    id: u16,
    messages: usize,
    doorbells: BTreeMap<u16, u32>,
}

impl Listener {
    /// Whether there was a message.
    fn read(&mut self) -> bool {
        let mut word = [0; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut word)], &mut control, RecvFlags::DONTWAIT) {
            Ok(received) => assert_eq!(received.bytes, word.len()),
            Err(Errno::AGAIN) => return false,
            Err(errno) => panic!("{errno}"),
        }
        let has_descriptor = control.drain().count() == 1;
        self.hear(i64::from_le_bytes(word), has_descriptor);
        true
    }

    fn hear(&mut self, word: i64, has_descriptor: bool) {
        let expected = [(0, false), (i64::from(self.id), false), (-1, true)];
        self.messages += 1;
        if let Some(expected) = expected.get(self.messages - 1) {
            return assert_eq!((word, has_descriptor), *expected);
        }
        let id = u16::try_from(word).expect("an id");
        let doorbells = self.doorbells.entry(id).or_default();
        if has_descriptor {
            *doorbells += 1;
            assert!(*doorbells <= VECTORS, "client {id} came while it was there");
        } else {
            assert_eq!(*doorbells, VECTORS, "client {id} went before it had come");
            assert_ne!(id, self.id, "a client is not told that it went");
            self.doorbells.remove(&id);
        }
    }
}

proptest! {
    #[test]
    fn what_clients_are_told_is_who_comes_and_goes(steps in steps()) {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let mut clients = Clients::new(memory, VECTORS);
        let mut there: Vec<Listener> = Vec::new();
        for step in steps {
            match step {
                Step::Come if clients.is_full() => {}
                Step::Come => {
                    let (ours, socket) = UnixStream::pair().unwrap();
                    let (id, dropped) = clients.admit(ours.into()).unwrap();
                    prop_assert_eq!(dropped, []);
                    prop_assert!(there.iter().all(|other| other.id != id), "{} is taken", id);
                    there.push(Listener { socket, id, messages: 0, doorbells: BTreeMap::new() });
                }
                Step::Go(who) if !there.is_empty() => {
                    let gone = there.swap_remove(who.index(there.len()));
                    prop_assert_eq!(clients.remove(gone.id), []);
                }
                Step::Read(who, messages) if !there.is_empty() => {
                    let who = who.index(there.len());
                    let _ = (0..messages).find(|_| !there[who].read());
                    clients.flush(there[who].id).unwrap();
                }
                Step::Go(_) | Step::Read(..) => {}
            }
        }
        let ids: BTreeSet<u16> = there.iter().map(|listener| listener.id).collect();
        for listener in &mut there {
            while listener.read() {
                clients.flush(listener.id).unwrap();
            }
            let known: BTreeSet<u16> = listener.doorbells.keys().copied().collect();
            prop_assert_eq!(&known, &ids, "what {} knows", listener.id);
            prop_assert!(listener.doorbells.values().all(|doorbells| *doorbells == VECTORS));
        }
    }
}
