//! Random schedules of loss, reordering, duplication and delay. With every policy, each message is delivered exactly
//! once, intact and completed in order, and memory that was returned to a program is not accessed.

use std::collections::VecDeque;
use std::time::Instant;

use sim::{Random, Span, Time};

use super::pair::{Impairments, Pair};
use crate::nic::fifo::pop_front_if;
use crate::nic::{CongestionControl, CostModel, Dcqcn, Dctcp, NicProfile, SrqNumber, Swift, Timely, TransportPolicy};
use crate::verbs::{Completion, CompletionKind, CompletionStatus, QpState, ReceiveRequest, SendKind};
use crate::wire::{Immediate, QpNumber, Service};

const MEMORY_BYTES: usize = 1 << 18;
/// For more queue pairs.
const MEMORY_BYTES_PAGED: usize = 1 << 20;
/// What a program writes over memory that was returned to it.
const OVERWRITTEN: u8 = 0xEE;
/// Number of schedules of each policy in CI. `./x exam` runs a million in total, or RNIC_SCHEDULES of each policy.
const SCHEDULES: u64 = 500;
const SCHEDULES_DEEP: u64 = 250_000;

const STEPS_MAX: u64 = 300_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    WriteImmediate,
    Read,
    FetchAdd,
    CompareSwap,
}

/// One message.
#[derive(Clone, Copy, Debug)]
struct Message {
    id: u64,
    kind: Kind,
    /// Address in the requester's memory.
    local: usize,
    /// Address in the responder's memory.
    remote: usize,
    bytes: usize,
}

/// One direction of a pair of queue pairs.
#[derive(Debug, Default)]
struct Stream {
    side: usize,
    pair: usize,
    to_post: VecDeque<(Time, Message)>,
    posted: VecDeque<Message>,
    /// Messages that consume receive requests, in order.
    expected_receives: VecDeque<Message>,
    atomic_address: usize,
    sum: u64,
    swapped: u64,
}

struct Schedule {
    wire: Pair,
    random: Random,
    qps: Vec<[QpNumber; 2]>,
    srqs: [Option<SrqNumber>; 2],
    streams: Vec<Stream>,
    /// Receive requests to post: when, on which side and pair, and the number of the request.
    receives: VecDeque<(Time, usize, usize, u64)>,
    /// Start of each side's unused memory.
    free: [usize; 2],
    receive_buffers: [Vec<(usize, usize)>; 2],
    overwritten: [Vec<(usize, usize)>; 2],
    checked: [usize; 2],
}

fn pattern(id: u64, byte: usize) -> u8 {
    (id as usize * 31 + byte * 7 + byte / 256) as u8
}

fn profile_of(policy: TransportPolicy, random: &mut Random) -> NicProfile {
    let mut profile = NicProfile::new(policy);
    if random.chance(0.4) {
        profile.costs = CostModel::modelled();
    }
    profile.mtu_bytes = [256, 256, 512, 1000][random.below(4) as usize];
    profile.window_packets = [4, 32, 512][random.below(3) as usize];
    profile.ack_packets = [1, 4, 16][random.below(3) as usize];
    profile.control_queue = [3, 64, 16_384][random.below(3) as usize];
    profile.scheduling.quantum_bytes = [1, 1000, 16_384][random.below(3) as usize];
    if let Some(pool) = &mut profile.pool {
        // Fewer contexts than queue pairs, and room for few parked packets.
        pool.contexts = [2, 3, 5][random.below(3) as usize];
        pool.ahead = 1 + random.below(u64::from(pool.contexts / 2)) as u32;
        pool.fetches = [1, 2, 8][random.below(3) as usize];
        pool.reads = [1, 4][random.below(2) as usize];
        pool.parked_packets = [1, 4, 64][random.below(3) as usize];
    }
    let (initial_bytes, bytes_max) = (5000, 100_000);
    profile.congestion = match random.below(8) {
        0 => CongestionControl::BdpWindow { bytes: 4000 },
        1 => CongestionControl::Dctcp(Dctcp::published(initial_bytes, bytes_max, 1000)),
        2 => CongestionControl::Swift(Swift {
            target: Span::from_ns(5000.0),
            ..Swift::htsim(1, initial_bytes, bytes_max)
        }),
        3 => CongestionControl::Dcqcn(Dcqcn::published(10_000_000_000)),
        4 => CongestionControl::Timely(Timely::scaled(10_000_000_000, 10_000_000_000)),
        5 => CongestionControl::Dcqcn(Dcqcn::scaled(10_000_000_000, 10_000_000_000)),
        _ => CongestionControl::None,
    };
    profile
}

fn impairments_of(random: &mut Random) -> Impairments {
    let mut sometimes = |bound: f64| if random.chance(0.3) { 0.0 } else { random.unit() * bound };
    Impairments {
        loss: sometimes(0.06),
        duplicate: sometimes(0.1),
        delayed: sometimes(0.4),
        delay_ns_max: sometimes(20_000.0),
        mark: sometimes(0.2),
        trim: sometimes(0.1),
    }
}

impl Schedule {
    fn new(policy: TransportPolicy, seed: u64) -> Self {
        let mut random = Random::new(seed, "schedule");
        let profile = profile_of(policy, &mut random);
        let is_paged = profile.pool.is_some();
        let memory_bytes = if is_paged { MEMORY_BYTES_PAGED } else { MEMORY_BYTES };
        let mut wire = Pair::with_memory(profile, seed, memory_bytes);
        wire.impairments = impairments_of(&mut random);
        let mut srqs = [None; 2];
        for (srq, nic) in srqs.iter_mut().zip(&mut wire.nics) {
            *srq = random.chance(0.3).then(|| nic.create_srq(4096).unwrap());
        }
        let pairs = 1 + random.below(if is_paged { 8 } else { 2 }) as usize;
        let qps = (0..pairs).map(|_| {
            let inits = [0, 1].map(|side: usize| {
                let mut init = wire.qp_init(side, Service::Rc);
                init.srq = srqs[side];
                init
            });
            wire.connect_as(&inits)
        });
        let qps = qps.collect();
        let mut schedule = Self {
            wire,
            random,
            qps,
            srqs,
            streams: Vec::new(),
            receives: VecDeque::new(),
            free: [0; 2],
            receive_buffers: [Vec::new(), Vec::new()],
            overwritten: [Vec::new(), Vec::new()],
            checked: [0; 2],
        };
        for side in 0..2 {
            for pair in 0..pairs {
                schedule.plan(side, pair);
            }
        }
        schedule.receives.make_contiguous().sort_unstable();
        schedule
    }

    fn take(&mut self, side: usize, bytes: usize) -> usize {
        let first = self.free[side].next_multiple_of(8);
        self.free[side] = first + bytes;
        assert!(self.free[side] <= self.wire.nics[side].memory().0.len(), "the plan exceeds the memory");
        first
    }

    /// Generates the messages from one side to the other.
    fn plan(&mut self, side: usize, pair: usize) {
        let mut stream = Stream { side, pair, ..Stream::default() };
        stream.atomic_address = self.take(1 - side, 16);
        let mut at = Time::ZERO;
        let bound = if self.qps.len() > 2 { 10 } else { 24 };
        for id in 0..self.random.below(bound) {
            if self.random.chance(0.2) {
                at += Span::from_ns(self.random.unit() * 30_000.0);
            }
            let kinds = [Kind::Send, Kind::Write, Kind::WriteImmediate, Kind::Read, Kind::FetchAdd, Kind::CompareSwap];
            let kind = kinds[self.random.below(6) as usize];
            let bound = [1, 64, 1024, 3000][self.random.below(4) as usize];
            let bytes = match kind {
                Kind::FetchAdd | Kind::CompareSwap => 8,
                _ => self.random.below(bound + 1) as usize,
            };
            let id = id + 1000 * (1 + side as u64) + 10_000 * pair as u64;
            let message = self.place_buffers(side, &stream, Message { id, kind, local: 0, remote: 0, bytes });
            if matches!(kind, Kind::Send | Kind::WriteImmediate) {
                self.plan_receive(1 - side, pair, at, bytes);
            }
            stream.to_post.push_back((at, message));
        }
        self.streams.push(stream);
    }

    fn place_buffers(&mut self, side: usize, stream: &Stream, message: Message) -> Message {
        let local = self.take(side, message.bytes);
        let remote = match message.kind {
            Kind::Send => 0,
            Kind::FetchAdd => stream.atomic_address,
            Kind::CompareSwap => stream.atomic_address + 8,
            _ => self.take(1 - side, message.bytes),
        };
        let (from, first) = if message.kind == Kind::Read { (1 - side, remote) } else { (side, local) };
        if !matches!(message.kind, Kind::FetchAdd | Kind::CompareSwap) {
            let memory = &mut self.wire.nics[from].memory_mut().0;
            for byte in 0..message.bytes {
                memory[first + byte] = pattern(message.id, byte);
            }
        }
        Message { local, remote, ..message }
    }

    /// Plans a receive request for a message, usually in time. Requests of a shared receive queue must fit any message.
    fn plan_receive(&mut self, side: usize, pair: usize, at: Time, bytes: usize) {
        let bytes = if self.srqs[side].is_some() { 3000 } else { bytes };
        let number = self.receive_buffers[side].len() as u64;
        let first = self.take(side, bytes);
        self.receive_buffers[side].push((first, bytes));
        let late = if self.random.chance(0.1) { self.random.unit() * 100_000.0 } else { 0.0 };
        let at = if self.random.chance(0.5) { Time::ZERO } else { at };
        // The requests of a queue are posted in the order of its messages.
        let before = self.receives.iter().rev().find(|(_, at_side, at_pair, _)| (*at_side, *at_pair) == (side, pair));
        let at = before.map_or(Time::ZERO, |(at, ..)| *at).max(at + Span::from_ns(late));
        self.receives.push_back((at, side, pair, number));
    }

    fn run(&mut self) {
        for _ in 0..STEPS_MAX {
            self.post();
            let stream = self.streams.iter().filter_map(|stream| stream.to_post.front()).map(|(at, _)| *at).min();
            let receive = self.receives.front().map(|(at, ..)| *at);
            let next = [stream, receive].into_iter().flatten().min();
            if !self.wire.step(next.unwrap_or(Time::MAX)) && next.is_none() {
                self.finish();
                return;
            }
            self.check();
        }
        panic!("still busy after {STEPS_MAX} steps, at {:?}", self.wire.now);
    }

    fn post(&mut self) {
        let now = self.wire.now;
        while let Some((_, side, pair, number)) = pop_front_if(&mut self.receives, |(at, ..)| *at <= now) {
            let (first, bytes) = self.receive_buffers[side][number as usize];
            let request = ReceiveRequest { id: number, local: self.wire.piece(side, first as u64, bytes as u32) };
            match self.srqs[side] {
                Some(srq) => self.wire.nics[side].post_srq_recv(srq, &request).unwrap(),
                None => self.wire.nics[side].post_recv(now, self.qps[pair][side], &request).unwrap(),
            }
        }
        for at in 0..self.streams.len() {
            while let Some((_, message)) = pop_front_if(&mut self.streams[at].to_post, |(due, _)| *due <= now) {
                self.post_message(at, message);
            }
        }
    }

    fn post_message(&mut self, at: usize, message: Message) {
        let stream = &mut self.streams[at];
        let (side, pair) = (stream.side, stream.pair);
        let remote = self.wire.remote(side, message.remote as u64);
        let kind = match message.kind {
            Kind::Send => SendKind::Send(message.id.is_multiple_of(2).then_some(message.id as u32)),
            Kind::Write => SendKind::Write(remote, None),
            Kind::WriteImmediate => SendKind::Write(remote, Some(message.id as u32)),
            Kind::Read => SendKind::Read(remote),
            Kind::FetchAdd => SendKind::FetchAdd { remote, add: message.id },
            Kind::CompareSwap => {
                // The value after all earlier requests.
                let before = stream.posted.iter().rev().find(|other| other.kind == Kind::CompareSwap);
                let compare = before.map_or(stream.swapped, |other| other.id);
                SendKind::CompareSwap { remote, compare, swap: message.id }
            }
        };
        if matches!(message.kind, Kind::Send | Kind::WriteImmediate) {
            stream.expected_receives.push_back(message);
        }
        stream.posted.push_back(message);
        let mut request = self.wire.request(side, message.id, kind, message.local as u64, message.bytes as u32);
        request.fence = message.id.is_multiple_of(7);
        self.wire.nics[side].post_send(self.wire.now, self.qps[pair][side], &request).unwrap();
    }

    /// Checks the completions since the last call.
    fn check(&mut self) {
        for side in 0..2 {
            while let Some(completion) = self.wire.completions[side].get(self.checked[side]).copied() {
                self.checked[side] += 1;
                assert_eq!(completion.status, CompletionStatus::Success, "{completion:?}");
                match completion.kind {
                    CompletionKind::Receive | CompletionKind::ReceiveWriteImmediate => {
                        self.check_received(side, &completion);
                    }
                    _ => self.check_sent(side, &completion),
                }
            }
        }
    }

    fn check_received(&mut self, side: usize, completion: &Completion) {
        let pair = self.qps.iter().position(|qps| qps[side] == completion.qp).unwrap();
        let stream = self.streams.iter_mut().find(|stream| stream.side != side && stream.pair == pair).unwrap();
        let message = stream.expected_receives.pop_front().expect("no further receive completion is expected");
        assert_eq!(completion.bytes as usize, message.bytes, "{message:?} {completion:?}");
        let data = Some(Immediate::Data(message.id as u32));
        if message.kind == Kind::Send {
            assert_eq!(completion.kind, CompletionKind::Receive);
            assert_eq!(completion.immediate, data.filter(|_| message.id.is_multiple_of(2)));
            let (first, room) = self.receive_buffers[side][completion.id as usize];
            self.intact(side, first, &message);
            self.overwrite(side, first, room);
        } else {
            assert_eq!((completion.kind, completion.immediate), (CompletionKind::ReceiveWriteImmediate, data));
            self.intact(side, message.remote, &message);
        }
    }

    fn check_sent(&mut self, side: usize, completion: &Completion) {
        let pair = self.qps.iter().position(|qps| qps[side] == completion.qp).unwrap();
        let stream = self.streams.iter_mut().find(|stream| stream.side == side && stream.pair == pair).unwrap();
        let message = stream.posted.pop_front().expect("no further request was posted");
        assert_eq!(completion.id, message.id, "completions out of order: {message:?} {completion:?}");
        let value = match message.kind {
            Kind::FetchAdd => {
                stream.sum += message.id;
                Some(stream.sum - message.id)
            }
            Kind::CompareSwap => Some(std::mem::replace(&mut stream.swapped, message.id)),
            _ => None,
        };
        if let Some(value) = value {
            let answer = &self.wire.nics[side].memory().0[message.local..message.local + 8];
            assert_eq!(answer, value.to_ne_bytes(), "atomic executed twice or out of order: {message:?}");
        }
        match message.kind {
            Kind::Read => self.intact(side, message.local, &message),
            Kind::Write | Kind::WriteImmediate => {
                self.intact(1 - side, message.remote, &message);
                self.overwrite(1 - side, message.remote, message.bytes);
            }
            Kind::Send | Kind::FetchAdd | Kind::CompareSwap => {}
        }
        // The memory is returned to the program: late responses and duplicates must not access it.
        self.overwrite(side, message.local, message.bytes);
    }

    fn intact(&self, side: usize, first: usize, message: &Message) {
        let memory = &self.wire.nics[side].memory().0[first..first + message.bytes];
        let is_intact = memory.iter().enumerate().all(|(at, byte)| *byte == pattern(message.id, at));
        assert!(is_intact, "{message:?} at {first}: {memory:?}");
    }

    fn overwrite(&mut self, side: usize, first: usize, bytes: usize) {
        self.wire.nics[side].memory_mut().0[first..first + bytes].fill(OVERWRITTEN);
        self.overwritten[side].push((first, bytes));
    }

    fn finish(&mut self) {
        self.check();
        for stream in &self.streams {
            assert!(stream.posted.is_empty(), "never completed: {:?}", stream.posted);
            assert!(stream.expected_receives.is_empty(), "never received: {:?}", stream.expected_receives);
            let memory = &self.wire.nics[1 - stream.side].memory().0;
            let word = |at: usize| u64::from_ne_bytes(*memory[at..].first_chunk().unwrap());
            assert_eq!(word(stream.atomic_address), stream.sum);
            assert_eq!(word(stream.atomic_address + 8), stream.swapped);
        }
        for side in 0..2 {
            for (first, bytes) in &self.overwritten[side] {
                let memory = &self.wire.nics[side].memory().0[*first..first + bytes];
                assert!(memory.iter().all(|byte| *byte == OVERWRITTEN), "accessed after it was returned: {first}");
            }
            for qps in &self.qps {
                let status = self.wire.nics[side].query_qp(qps[side]).unwrap();
                assert_eq!((status.state, status.sends), (QpState::ReadyToSend, 0));
                assert!(!status.is_slow, "the slow path kept a queue pair: {status:?}");
            }
        }
    }
}

/// Prints which schedule failed, if one panics.
struct ReportOnPanic(TransportPolicy, u64);

impl Drop for ReportOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed schedule: {:?}, seed {}; run it alone with RNIC_SEED={}", self.0, self.1, self.1);
        }
    }
}

/// Returns a number from an environment variable.
fn number_from_env(variable: &str) -> Option<u64> {
    let word = std::env::var(variable).ok()?;
    Some(word.parse().unwrap_or_else(|_| panic!("{variable}={word} is not a number; set one or unset it")))
}

fn run_schedules(policy: TransportPolicy, schedules: u64) {
    let alone = number_from_env("RNIC_SEED");
    let seeds = alone.map_or(0..schedules, |seed| seed..seed + 1);
    let mut fetched = 0;
    for seed in seeds {
        let _named = ReportOnPanic(policy, seed);
        let mut schedule = Schedule::new(policy, seed);
        schedule.wire.traces = alone.is_some();
        schedule.run();
        fetched += schedule.wire.nics.iter().map(|nic| nic.counters().contexts_fetched).sum::<u64>();
    }
    // A single schedule may fetch few contexts.
    let are_many = alone.is_some() || fetched > 20 * schedules;
    let is_paged = policy == TransportPolicy::SrnicPaged;
    assert!(if is_paged { are_many } else { fetched == 0 }, "{policy:?}: {fetched} contexts fetched");
}

#[test]
fn srnic_delivers_every_message_once_intact_and_in_order() {
    run_schedules(TransportPolicy::Srnic, SCHEDULES);
}

#[test]
fn srnic_with_a_pool_of_contexts_delivers_every_message_once_intact_and_in_order() {
    run_schedules(TransportPolicy::SrnicPaged, SCHEDULES);
}

#[test]
fn irn_delivers_every_message_once_intact_and_in_order() {
    run_schedules(TransportPolicy::Irn, SCHEDULES);
}

#[test]
fn go_back_n_delivers_every_message_once_intact_and_in_order() {
    run_schedules(TransportPolicy::GoBackN, SCHEDULES);
}

#[test]
fn connection_cache_delivers_every_message_once_intact_and_in_order() {
    run_schedules(TransportPolicy::ConnectionCache, SCHEDULES / 4);
}

#[test]
#[ignore = "a million schedules, minutes; in ./x exam"]
fn a_million_schedules_deliver_every_message_once_intact_and_in_order() {
    let schedules = number_from_env("RNIC_SCHEDULES").unwrap_or(SCHEDULES_DEEP);
    std::thread::scope(|scope| {
        for policy in TransportPolicy::ALL {
            scope.spawn(move || {
                let begun = Instant::now();
                run_schedules(policy, schedules);
                let us_each = begun.elapsed().as_secs_f64() * 1e6 / schedules as f64;
                println!("{policy:?}: {schedules} schedules, {us_each:.0} us each by the clock");
            });
        }
    });
}
