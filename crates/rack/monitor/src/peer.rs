//! A link to another node as its monitor sees it: trained, talked over, lost and trained again.
//!
//! ```text
//!   Waiting ──pause over, proxy has stopped──► Training ──both ends──► Up ──hello──► open
//!      ▲                                          │                    │              │
//!      └────────────── lost: silence, nonsense, the peer left, the proxy died ────────┘
//! ```

use std::collections::VecDeque;

use control::proxy::Fate;
use fabric::{Doorbell, Epoch, Link, LinkState, Slice};
use lane::{Consumer, Layout, Producer};

use crate::session::{Said, Session, SessionError, Settings};

/// The control lane: a small ring that carries on while little is said, and a bigger one.
const LAYOUT: Layout = Layout::packed(64, 256);
/// Bytes taken from the control lane in one turn: some ninety questions, each a look at a directory. Then it is the
/// other peers' turn, and the programs'.
const TURN_BYTES_MAX: usize = 2 << 10;
/// Turns of training after which it is tried less often: the peer may not run at all.
const TRAINING_TURNS_OFTEN: u32 = 100;
const TRAINING_PAUSE_OFTEN_NS: u64 = 2_000_000;
const TRAINING_PAUSE_SELDOM_NS: u64 = 50_000_000;
/// How long a link rests after it was lost, the first time and at most.
const PAUSE_NS_MIN: u64 = 5_000_000;
const PAUSE_NS_MAX: u64 = 1_000_000_000;
/// How often a link is looked at whose other monitor is dead.
const KEPT_PAUSE_NS: u64 = 50_000_000;
/// While there is something to send and no room, the lane is looked at this often.
const ROOM_PAUSE_NS: u64 = 1_000_000;

const _: () = assert!(LAYOUT.window_bytes() as u64 <= rack::CONTROL_PARTITION_BYTES);

/// What happened on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is up, and the peer is who it should be.
    Up(Epoch),
    /// It was up and is lost.
    Down(Epoch),
    /// The peer said something.
    Said(Said),
}

struct Lanes<L: Link> {
    producer: Producer<L::Outbound, L::Inbound>,
    consumer: Consumer<L::Inbound, L::Outbound>,
    session: Session,
    /// The last turn ended at its bound.
    has_more: bool,
}

enum Phase<L: Link> {
    Waiting { until_ns: u64 },
    Training { turns: u32, next_ns: u64 },
    Up(Box<Lanes<L>>),
}

/// One end of a link, its monitor's.
pub struct Peer<L: Link> {
    link: L,
    settings: Settings,
    phase: Phase<L>,
    /// The proxy may still touch the windows: no training yet.
    is_held: bool,
    pause_ns: u64,
    reason: Option<String>,
    /// What becomes of what it carried, since it was lost last.
    fate: Fate,
    /// While the peer's monitor is silent: its proxy says that it waits for another one.
    is_kept: bool,
    /// Until when nothing has to be done for one that is kept.
    rests_until_ns: u64,
    ups: u64,
    events: VecDeque<Event>,
}

impl<L: Link> Peer<L> {
    /// A link that is down, to be trained at once.
    pub fn new(link: L, settings: Settings) -> Self {
        let phase = Phase::Waiting { until_ns: 0 };
        let pause_ns = PAUSE_NS_MIN;
        let (reason, events) = (None, VecDeque::new());
        Self {
            link,
            settings,
            phase,
            is_held: false,
            pause_ns,
            reason,
            fate: Fate::Over,
            is_kept: false,
            rests_until_ns: 0,
            ups: 0,
            events,
        }
    }

    /// The state in a word.
    pub fn state(&self) -> &'static str {
        match &self.phase {
            Phase::Waiting { .. } => "down",
            Phase::Up(lanes) if lanes.session.is_open() => "up",
            Phase::Training { .. } | Phase::Up(_) => "training",
        }
    }

    /// Whether connections can use it.
    pub fn is_open(&self) -> bool {
        matches!(&self.phase, Phase::Up(lanes) if lanes.session.is_open())
    }

    /// Why it is not up, or was not the last time.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref().filter(|_| !self.is_open())
    }

    /// What becomes of the connections that the link had when it was lost last.
    pub fn fate(&self) -> Fate {
        self.fate
    }

    /// Says whether the peer's proxy keeps its end of the link while its monitor is dead.
    pub fn set_kept(&mut self, is_kept: bool) {
        self.is_kept = is_kept;
    }

    /// The epoch it is in, or was in last.
    pub fn epoch(&self) -> Epoch {
        self.link.epoch()
    }

    /// How often it came up.
    pub fn ups(&self) -> u64 {
        self.ups
    }

    /// The last round trip between the monitors.
    pub fn round_trip_ns(&self) -> Option<u64> {
        match &self.phase {
            Phase::Up(lanes) => lanes.session.round_trip_ns(),
            _ => None,
        }
    }

    /// To say something to the peer; nobody while the link is not up.
    pub fn session(&mut self) -> Option<&mut Session> {
        match &mut self.phase {
            Phase::Up(lanes) if lanes.session.is_open() => Some(&mut lanes.session),
            _ => None,
        }
    }

    /// What sessions begin with from now on; one that goes on keeps what it began with.
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Keeps the link from being trained while the proxy may touch its windows.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Does what is to be done by now.
    pub fn step(&mut self, now_ns: u64) {
        match &mut self.phase {
            Phase::Waiting { until_ns } => {
                if now_ns >= *until_ns && !self.is_held {
                    self.phase = Phase::Training { turns: 0, next_ns: now_ns };
                    self.train(now_ns);
                }
            }
            Phase::Training { next_ns, .. } => {
                if now_ns >= *next_ns || self.link.state() == LinkState::Up {
                    self.train(now_ns);
                }
            }
            Phase::Up(_) => self.talk(now_ns),
        }
    }

    /// When [`Peer::step`] has something to do.
    pub fn due_ns(&self) -> u64 {
        match &self.phase {
            Phase::Waiting { .. } if self.is_held => u64::MAX,
            Phase::Waiting { until_ns } => *until_ns,
            Phase::Training { next_ns, .. } => *next_ns,
            Phase::Up(lanes) if lanes.has_more => 0,
            Phase::Up(lanes) => lanes.session.due_ns().max(self.rests_until_ns),
        }
    }

    /// How long to wait for room in the control lane, where something waits for it.
    pub fn wants_room_ns(&self) -> Option<u64> {
        match &self.phase {
            Phase::Up(lanes) if lanes.session.is_unsent() => Some(ROOM_PAUSE_NS),
            _ => None,
        }
    }

    /// What has happened.
    pub fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes the link down, and says why to the peer where it still listens. Both may come back to what they had.
    pub fn lose(&mut self, reason: &str, now_ns: u64) {
        self.leave(reason, Fate::DirectWait, now_ns);
    }

    /// As [`Peer::lose`], for good.
    pub fn end(&mut self, reason: &str, now_ns: u64) {
        self.leave(reason, Fate::Over, now_ns);
    }

    fn leave(&mut self, reason: &str, fate: Fate, now_ns: u64) {
        let was_open = self.is_open();
        self.fate = fate;
        if let Phase::Up(lanes) = &mut self.phase {
            lanes.session.bye(reason, fate == Fate::Over);
            let _ = send(&mut lanes.producer, &mut lanes.session);
            self.link.doorbell().ring();
        }
        let epoch = self.link.epoch();
        self.link.take_down();
        self.link.doorbell().ring();
        self.phase = Phase::Waiting { until_ns: now_ns.saturating_add(self.pause_ns) };
        self.pause_ns = (2 * self.pause_ns).min(PAUSE_NS_MAX);
        self.reason = Some(reason.to_owned());
        if was_open {
            self.events.push_back(Event::Down(epoch));
        }
    }

    fn train(&mut self, now_ns: u64) {
        let Phase::Training { turns, next_ns } = &mut self.phase else { return };
        *turns = turns.saturating_add(1);
        let often = *turns <= TRAINING_TURNS_OFTEN;
        *next_ns = now_ns + if often { TRAINING_PAUSE_OFTEN_NS } else { TRAINING_PAUSE_SELDOM_NS };
        let before = (self.link.state(), self.link.epoch());
        let state = self.link.train();
        if before != (state, self.link.epoch()) {
            self.link.doorbell().ring();
        }
        if state == LinkState::Up {
            self.phase = Phase::Up(Box::new(self.lanes(now_ns)));
            self.talk(now_ns);
        }
    }

    fn lanes(&self, now_ns: u64) -> Lanes<L> {
        let bytes = rack::CONTROL_PARTITION_BYTES as usize;
        let (inbound, outbound) = (self.link.inbound().slice(0, bytes), self.link.outbound().slice(0, bytes));
        // Nobody but the two monitors reaches the lane who could not spoil it anyway; the epoch keeps old bytes out.
        let secret = u64::from(self.link.epoch().0);
        Lanes {
            producer: Producer::new(outbound.clone(), inbound.clone(), LAYOUT, secret),
            consumer: Consumer::new(inbound, outbound, LAYOUT, secret),
            session: Session::new(self.settings.clone(), now_ns),
            has_more: false,
        }
    }

    fn talk(&mut self, now_ns: u64) {
        let is_left = self.link.state() != LinkState::Up;
        let Phase::Up(lanes) = &mut self.phase else { return };
        let (mut said, was_open) = (Vec::new(), lanes.session.is_open());
        // A peer that left may have said why.
        let heard = hear(lanes, &mut said, now_ns);
        let talked = heard.and_then(|()| if is_left { Ok(false) } else { speak(lanes, now_ns) });
        let is_open = lanes.session.is_open();
        if is_open && !was_open {
            self.ups += 1;
            self.pause_ns = PAUSE_NS_MIN;
            self.events.push_back(Event::Up(self.link.epoch()));
        }
        self.events.extend(said.into_iter().filter(|said| *said != Said::Hello).map(Event::Said));
        match talked {
            Ok(_) if is_left => self.leave("the peer left the link", Fate::AllWait, now_ns),
            Ok(true) => self.link.doorbell().ring(),
            Ok(false) => {}
            // Nobody is there to speak. Its proxy waits for another monitor, and not for ever.
            Err(SessionError::Silent { .. } | SessionError::Deaf { .. }) if self.is_kept => {
                self.rests_until_ns = now_ns.saturating_add(KEPT_PAUSE_NS);
            }
            Err(error) => {
                let fate = if error.may_return() { Fate::DirectWait } else { Fate::Over };
                self.leave(&format!("node {}: {error}", self.settings.peer), fate, now_ns);
            }
        }
    }
}

fn hear<L: Link>(lanes: &mut Lanes<L>, said: &mut Vec<Said>, now_ns: u64) -> Result<(), SessionError> {
    let mut buffer = [0; TURN_BYTES_MAX];
    let mut heard_bytes = 0;
    while heard_bytes < TURN_BYTES_MAX {
        let bytes = lanes.consumer.read(&mut buffer[heard_bytes..]).map_err(corrupt)?;
        if bytes == 0 {
            break;
        }
        lanes.session.receive(&buffer[heard_bytes..heard_bytes + bytes], now_ns, said)?;
        heard_bytes += bytes;
    }
    lanes.has_more = heard_bytes == TURN_BYTES_MAX;
    Ok(())
}

/// Sends what is to be sent; whether the peer has reason to look.
fn speak<L: Link>(lanes: &mut Lanes<L>, now_ns: u64) -> Result<bool, SessionError> {
    lanes.session.tick(now_ns)?;
    let sent_bytes = send(&mut lanes.producer, &mut lanes.session)?;
    Ok(sent_bytes > 0 || lanes.consumer.take_wake_request())
}

fn send<L>(producer: &mut L, session: &mut Session) -> Result<usize, SessionError>
where
    L: Write,
{
    let mut sent_bytes = 0;
    loop {
        let (some, _) = session.outbox().as_slices();
        if some.is_empty() {
            return Ok(sent_bytes);
        }
        let bytes = producer.write_some(some)?;
        if bytes == 0 {
            return Ok(sent_bytes);
        }
        session.outbox().drain(..bytes);
        sent_bytes += bytes;
    }
}

/// The sending end of a control lane.
trait Write {
    fn write_some(&mut self, bytes: &[u8]) -> Result<usize, SessionError>;
}

impl<O: fabric::Outbound, I: fabric::Inbound> Write for Producer<O, I> {
    fn write_some(&mut self, bytes: &[u8]) -> Result<usize, SessionError> {
        self.write(bytes).map_err(corrupt)
    }
}

fn corrupt(found: lane::Corrupt) -> SessionError {
    SessionError::Nonsense { what: found.what, value: found.value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Verdict;
    use fabric::Outbound;
    use fabric::heap::{self, HeapLink};
    use proptest::prelude::*;

    fn settings(own: &str, peer: &str) -> Settings {
        Settings { own: own.to_owned(), peer: peer.to_owned(), digest: 1, silence_ns: 1_000_000_000 }
    }

    fn pair() -> [Peer<HeapLink>; 2] {
        let (a, b) = heap::pair(rack::CONTROL_PARTITION_BYTES as usize);
        [Peer::new(a, settings("a", "b")), Peer::new(b, settings("b", "a"))]
    }

    /// Lets both work until neither has more to do for a while; what happened at each.
    fn settle(peers: &mut [Peer<HeapLink>; 2], now_ns: &mut u64) -> [Vec<Event>; 2] {
        let mut events = [Vec::new(), Vec::new()];
        for _ in 0..40 {
            for (peer, events) in peers.iter_mut().zip(&mut events) {
                peer.step(*now_ns);
                events.extend(std::iter::from_fn(|| peer.take_event()));
            }
            *now_ns += TRAINING_PAUSE_OFTEN_NS;
        }
        events
    }

    #[test]
    fn two_monitors_bring_a_link_up_talk_and_bring_it_up_again_after_it_was_lost() {
        let (mut peers, mut now_ns) = (pair(), 0);
        assert_eq!(settle(&mut peers, &mut now_ns), [vec![Event::Up(Epoch(1))], vec![Event::Up(Epoch(1))]]);
        let address = "127.77.0.2:80".parse().unwrap();
        peers[0].session().unwrap().query(address);
        assert_eq!(settle(&mut peers, &mut now_ns)[1], [Event::Said(Said::Query(address))]);
        peers[1].session().unwrap().answer(address, Verdict::Listening);
        assert_eq!(settle(&mut peers, &mut now_ns)[0], [Event::Said(Said::Answer(address, Verdict::Listening))]);

        peers[0].lose("a test", now_ns);
        let expected = vec![Event::Down(Epoch(1)), Event::Up(Epoch(2))];
        assert_eq!(settle(&mut peers, &mut now_ns), [expected.clone(), expected]);
        assert_eq!((peers[1].ups(), peers[1].state(), peers[1].reason()), (2, "up", None));
        assert!(peers[1].reason.as_deref().is_some_and(|reason| reason.ends_with("took the link down: a test")));
    }

    #[test]
    fn a_peer_that_asks_much_is_heard_in_turns_and_to_the_end() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        let [asking, asked] = &mut peers;
        for port in 1..=300 {
            asking.session().unwrap().query(([127, 77, 0, 2], port).into());
        }
        let mut turns = Vec::new();
        while turns.iter().sum::<usize>() < 300 {
            asking.step(now_ns);
            asked.step(now_ns);
            turns.push(std::iter::from_fn(|| asked.take_event()).count());
            assert!(turns.len() < 100, "{turns:?}");
            assert!(turns.len() > 1 || asked.due_ns() == 0, "there is more, and nobody rings for it");
        }
        assert!(turns.iter().all(|questions| *questions < 100), "{turns:?}");
    }

    #[test]
    fn a_link_is_not_trained_while_the_proxy_may_touch_it() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        peers[0].lose("a test", now_ns);
        peers[0].hold(true);
        assert_eq!(settle(&mut peers, &mut now_ns)[0], [Event::Down(Epoch(1))]);
        assert_eq!((peers[0].state(), peers[0].reason()), ("down", Some("a test")));
        peers[0].hold(false);
        assert!(settle(&mut peers, &mut now_ns)[0].iter().any(|event| matches!(event, Event::Up(_))));
    }

    #[test]
    fn a_link_whose_other_monitor_is_dead_is_kept_as_long_as_its_proxy_is_there_and_then_lost() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        let [own, _dead] = &mut peers;
        own.set_kept(true);
        now_ns += 2 * own.settings.silence_ns;
        own.step(now_ns);
        assert_eq!((own.state(), own.take_event()), ("up", None));
        assert!(own.due_ns() > now_ns, "nobody spins for the dead");
        own.set_kept(false);
        own.step(now_ns);
        assert_eq!((own.take_event(), own.fate()), (Some(Event::Down(Epoch(1))), Fate::DirectWait));
    }

    #[test]
    fn all_wait_for_a_peer_that_begins_anew_without_a_word_and_none_for_one_that_has_ended() {
        for (is_in_order, fate) in [(false, Fate::AllWait), (true, Fate::Over)] {
            let (mut peers, mut now_ns) = (pair(), 0);
            settle(&mut peers, &mut now_ns);
            let [own, other] = &mut peers;
            if is_in_order {
                other.end("a test", now_ns);
            } else {
                other.link.take_down();
            }
            own.step(now_ns);
            assert_eq!((own.take_event(), own.fate()), (Some(Event::Down(Epoch(1))), fate));
        }
    }

    #[test]
    fn another_rack_file_keeps_a_link_from_opening_and_says_so() {
        let (a, b) = heap::pair(rack::CONTROL_PARTITION_BYTES as usize);
        let other = Settings { digest: 2, ..settings("b", "a") };
        let (mut peers, mut now_ns) = ([Peer::new(a, settings("a", "b")), Peer::new(b, other)], 0);
        let events = settle(&mut peers, &mut now_ns);
        assert_eq!(events, [vec![], vec![]]);
        let reasons = peers.each_ref().map(|peer| peer.reason().unwrap_or_default().to_owned());
        assert!(reasons.iter().any(|reason| reason.contains("another rack file")), "{reasons:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn a_peer_that_writes_garbage_over_its_window_is_left_and_met_again(
            garbage in prop::collection::vec((0..4096_usize, any::<u64>()), 1..200)
        ) {
            let (a, b) = heap::pair(rack::CONTROL_PARTITION_BYTES as usize);
            let window = b.outbound();
            let (mut peers, mut now_ns) =
                ([Peer::new(a, settings("a", "b")), Peer::new(b, settings("b", "a"))], 0);
            settle(&mut peers, &mut now_ns);
            for (word, value) in garbage {
                window.write(8 * word, &value.to_le_bytes());
            }
            (0..200).for_each(|_| _ = settle(&mut peers, &mut now_ns));
            prop_assert_eq!(peers.each_ref().map(Peer::state), ["up"; 2]);
        }
    }
}
