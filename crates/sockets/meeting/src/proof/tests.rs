use super::*;
use proptest::prelude::*;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A stream: what was written, how much of it was read.
#[derive(Default)]
struct Pipe {
    bytes: Vec<u8>,
    read: usize,
}

/// Two endpoints of a connection, or of two, with their provers.
struct World {
    /// From the connecting endpoint, and to it.
    pipes: [Pipe; 2],
    provers: [Prover; 2],
    bells: [OwnedFd; 2],
    progress: [Progress; 2],
    next: u8,
}

const CONNECTED: usize = 0;
const ACCEPTED: usize = 1;

impl World {
    fn new(before: [usize; 2]) -> Self {
        let pipes = before.map(|bytes| Pipe { bytes: vec![7; bytes], read: bytes / 2 });
        let counts = [counts(&pipes[0], &pipes[1]), counts(&pipes[1], &pipes[0])];
        let (a, b) = UnixStream::pair().unwrap();
        let bells = [OwnedFd::from(a), OwnedFd::from(b)];
        bells.iter().for_each(|bell| rustix::io::ioctl_fionbio(bell, true).unwrap());
        Self {
            pipes,
            provers: [
                Prover::new(Role::Connected, [1, 2], &counts[0]),
                Prover::new(Role::Accepted, [1, 2], &counts[1]),
            ],
            bells,
            progress: [Progress::Waiting; 2],
            next: 0,
        }
    }

    fn step(&mut self, end: usize) {
        if self.progress[end] == Progress::Waiting {
            let counts = counts(&self.pipes[end], &self.pipes[1 - end]);
            self.progress[end] = self.provers[end].advance(self.bells[end].as_fd(), || Some(counts));
        }
    }

    fn write(&mut self, end: usize, count: usize) {
        let bytes: Vec<u8> = (0..count).map(|_| self.next_byte()).collect();
        self.pipes[end].bytes.extend(&bytes);
        self.note(end, Stream::Sent, &bytes);
    }

    fn next_byte(&mut self) -> u8 {
        self.next = self.next.wrapping_mul(5).wrapping_add(17);
        self.next
    }

    fn read(&mut self, end: usize, count: usize) {
        let pipe = &mut self.pipes[1 - end];
        let bytes: Vec<u8> = pipe.bytes[pipe.read..].iter().copied().take(count).collect();
        pipe.read += bytes.len();
        if !bytes.is_empty() {
            self.note(end, Stream::Received, &bytes);
        }
    }

    fn note(&mut self, end: usize, stream: Stream, bytes: &[u8]) {
        if self.progress[end] == Progress::Waiting {
            let mut copy = |offset: usize, to: &mut [u8]| to.copy_from_slice(&bytes[offset..offset + to.len()]);
            self.provers[end].note(stream, bytes.len(), &mut copy);
        }
    }

    fn request(&mut self, bytes: usize) {
        for end in [CONNECTED, ACCEPTED] {
            self.write(end, bytes);
            self.step(end);
            self.read(1 - end, bytes);
            self.step(1 - end);
        }
    }
}

fn counts(sent: &Pipe, received: &Pipe) -> Counts {
    let (written, consumed) = (sent.bytes.len() as u64, received.read as u64);
    Counts { written, acked: written, received: consumed, consumed }
}

const BOTH: [Progress; 2] = [Progress::Proven; 2];

#[test]
fn two_requests_prove_it() {
    for bytes in [1, 14, 4096, 100_000] {
        let mut world = World::new([0, 0]);
        world.request(bytes);
        world.request(bytes);
        assert_eq!(world.progress, BOTH, "{bytes} bytes");
    }
}

#[test]
fn a_stream_in_one_direction_proves_it_however_far_its_ends_are_apart() {
    for from in [CONNECTED, ACCEPTED] {
        for (step, lag) in [(4096, 0), (4096, 1 << 18), (65536, 0), (65536, 1 << 20), (1 << 18, 0)] {
            let mut world = World::new([0, 0]);
            for _ in 0..TRANSFERS_MAX {
                world.write(from, step);
                world.step(from);
                let unread = world.pipes[from].bytes.len() - world.pipes[from].read;
                world.read(1 - from, unread.saturating_sub(lag));
                world.step(1 - from);
            }
            assert_eq!(world.progress, BOTH, "from {from}, {step} bytes at a time, {lag} behind");
        }
    }
}

#[test]
fn other_bytes_are_no_proof_at_either_endpoint() {
    for changed in [Stream::Sent, Stream::Received] {
        let mut world = World::new([0, 0]);
        let bytes = [5_u8; 64];
        for (end, stream) in [(CONNECTED, Stream::Sent), (ACCEPTED, Stream::Received), (ACCEPTED, Stream::Sent)] {
            let is_other = end == ACCEPTED && stream != changed;
            let seen = if is_other { [6_u8; 64] } else { bytes };
            world.note(end, stream, &seen);
        }
        world.pipes[0].bytes = bytes.to_vec();
        world.pipes[0].read = 64;
        world.pipes[1].bytes = bytes.to_vec();
        world.step(CONNECTED);
        world.step(ACCEPTED);
        world.step(CONNECTED);
        assert_eq!(world.progress[CONNECTED] == Progress::Proven, changed == Stream::Received, "{changed:?}");
    }
}

#[test]
fn a_claim_is_no_echo_and_of_another_meeting_nothing() {
    let mut world = World::new([0, 0]);
    world.write(CONNECTED, 32);
    world.step(CONNECTED);
    // The peer sends the claim back.
    let mut claim = [0; MESSAGE_BYTES];
    assert_eq!(rustix::io::read(&world.bells[ACCEPTED], &mut claim).unwrap(), MESSAGE_BYTES);
    claim[10] = 2;
    rustix::io::write(&world.bells[ACCEPTED], &claim).unwrap();
    world.step(CONNECTED);
    assert_eq!(world.progress[CONNECTED], Progress::Refused(Reason::NoProof));
    // The claim of another meeting, whose bytes are the same.
    let mut other = World::new([0, 0]);
    other.provers[ACCEPTED] = Prover::new(Role::Accepted, [1, 3], &Counts::default());
    other.write(CONNECTED, 32);
    other.read(ACCEPTED, 32);
    claim[10] = 1;
    rustix::io::write(&other.bells[CONNECTED], &claim).unwrap();
    other.step(ACCEPTED);
    assert_eq!(other.progress[ACCEPTED], Progress::Refused(Reason::NoProof));
}

#[test]
fn a_silent_peer_is_given_up() {
    let mut world = World::new([0, 0]);
    for _ in 0..=TRANSFERS_MAX {
        world.write(CONNECTED, 1);
        world.step(CONNECTED);
    }
    assert_eq!(world.progress[CONNECTED], Progress::Refused(Reason::NoProof));
}

#[test]
fn bytes_that_nobody_has_seen_delay_the_proof() {
    let mut world = World::new([0, 0]);
    world.write(CONNECTED, 10);
    world.provers[CONNECTED].note_missed();
    world.step(CONNECTED);
    // A transfer that was not noted at all.
    world.pipes[ACCEPTED].bytes.extend([1; 10]);
    for _ in 0..6 {
        world.request(20);
    }
    assert_eq!(world.progress, BOTH);
}

#[test]
fn a_connection_that_becomes_quiet_after_much_proves_it() {
    let mut world = World::new([0, 5047]);
    world.read(CONNECTED, 1);
    world.step(CONNECTED);
    world.step(ACCEPTED);
    world.write(ACCEPTED, 27_500);
    world.read(CONNECTED, 18_908);
    world.step(CONNECTED);
    world.write(ACCEPTED, 5014);
    world.step(ACCEPTED);
    world.read(CONNECTED, usize::MAX);
    for _ in 0..24 {
        world.request(20);
    }
    assert_eq!(world.progress, BOTH);
}

proptest! {
    #[test]
    fn two_endpoints_of_one_connection_prove_it_in_any_order(
        before in any::<[u16; 2]>().prop_map(|bytes| bytes.map(usize::from)),
        steps in prop::collection::vec((0..2_usize, any::<bool>(), prop_oneof![1..40_usize, 1..40_000_usize]), 0..60),
    ) {
        let mut world = World::new(before);
        for (end, is_write, count) in steps {
            if is_write { world.write(end, count) } else { world.read(end, count) }
            world.step(end);
            prop_assert!(!world.progress.iter().any(|it| matches!(it, Progress::Refused(_))), "{:?}", world.progress);
        }
        for end in [CONNECTED, ACCEPTED] {
            world.read(end, usize::MAX);
            world.step(end);
        }
        for _ in 0..24 {
            world.request(20);
        }
        prop_assert_eq!(world.progress, BOTH);
    }

    #[test]
    fn any_bytes_of_a_peer_are_refused_or_lead_to_nothing(
        role in prop_oneof![Just(Role::Connected), Just(Role::Accepted)],
        mut bytes in prop::collection::vec(any::<u8>(), 1..3 * MESSAGE_BYTES),
        kind in 0..5_u8,
        zeros in any::<bool>(),
    ) {
        let end = if role == Role::Connected { CONNECTED } else { ACCEPTED };
        let mut world = World::new([100, 100]);
        if zeros {
            bytes.iter_mut().for_each(|byte| *byte = 0);
        }
        if bytes.len() > 11 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..10].copy_from_slice(&VERSION.to_ne_bytes());
            bytes[10] = kind;
        }
        rustix::io::write(&world.bells[1 - end], &bytes).unwrap();
        for _ in 0..4 {
            world.write(end, 10);
            world.step(end);
        }
        prop_assert_ne!(world.progress[end], Progress::Proven);
    }
}
