//! For any history of connections, disconnections and reads, the messages that each client receives describe a possible
//! history.

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
/// Few enough that no queue is full.
const STEPS_MAX: usize = 80;

#[derive(Clone, Debug)]
enum Step {
    Connect,
    /// One of the connected clients disconnects.
    Disconnect(prop::sample::Index),
    /// One of them reads this number of messages.
    Read(prop::sample::Index, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        Just(Step::Connect),
        any::<prop::sample::Index>().prop_map(Step::Disconnect),
        (any::<prop::sample::Index>(), 0..20_usize).prop_map(|(index, messages)| Step::Read(index, messages)),
    ];
    prop::collection::vec(step, 1..STEPS_MAX)
}

/// A client, and the messages that it has received.
struct Listener {
    socket: UnixStream,
    id: u16,
    messages: usize,
    doorbells: BTreeMap<u16, u32>,
}

impl Listener {
    /// Reads a message. Returns whether connected was one.
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
        self.handle(i64::from_le_bytes(word), has_descriptor);
        true
    }

    fn handle(&mut self, word: i64, has_descriptor: bool) {
        let expected = [(0, false), (i64::from(self.id), false), (-1, true)];
        self.messages += 1;
        if let Some(expected) = expected.get(self.messages - 1) {
            return assert_eq!((word, has_descriptor), *expected);
        }
        let id = u16::try_from(word).expect("an ID");
        let doorbells = self.doorbells.entry(id).or_default();
        if has_descriptor {
            *doorbells += 1;
            assert!(*doorbells <= VECTORS, "client {id} was announced twice");
        } else {
            assert_eq!(*doorbells, VECTORS, "client {id} disconnected before all its doorbells were announced");
            assert_ne!(id, self.id, "a client was sent its own disconnection");
            self.doorbells.remove(&id);
        }
    }
}

proptest! {
    #[test]
    fn clients_receive_which_other_clients_are_connected(steps in steps()) {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let mut clients = Clients::new(memory, VECTORS);
        let mut connected: Vec<Listener> = Vec::new();
        for step in steps {
            match step {
                Step::Connect if clients.is_full() => {}
                Step::Connect => {
                    let (ours, socket) = UnixStream::pair().unwrap();
                    let (id, dropped) = clients.admit(ours.into()).unwrap();
                    prop_assert_eq!(dropped, []);
                    prop_assert!(connected.iter().all(|other| other.id != id), "{} is taken", id);
                    connected.push(Listener { socket, id, messages: 0, doorbells: BTreeMap::new() });
                }
                Step::Disconnect(index) if !connected.is_empty() => {
                    let gone = connected.swap_remove(index.index(connected.len()));
                    prop_assert_eq!(clients.remove(gone.id), []);
                }
                Step::Read(index, messages) if !connected.is_empty() => {
                    let index = index.index(connected.len());
                    let _ = (0..messages).find(|_| !connected[index].read());
                    clients.flush(connected[index].id).unwrap();
                }
                Step::Disconnect(_) | Step::Read(..) => {}
            }
        }
        let ids: BTreeSet<u16> = connected.iter().map(|listener| listener.id).collect();
        for listener in &mut connected {
            while listener.read() {
                clients.flush(listener.id).unwrap();
            }
            let known: BTreeSet<u16> = listener.doorbells.keys().copied().collect();
            prop_assert_eq!(&known, &ids, "the clients that {} knows", listener.id);
            prop_assert!(listener.doorbells.values().all(|doorbells| *doorbells == VECTORS));
        }
    }
}
