//! A link to another node, as its monitor sees it: training, the control session, loss, and training again.
//!
//! ```text
//!   Waiting ──delay over, proxy has stopped──► Training ──both sides──► Up ──handshake──► open
//!      ▲                                          │                      │                 │
//!      └── lost: silence, malformed frame, the peer left, the proxy died ──────────────────┘
//! ```

use std::collections::VecDeque;

use control::proxy::LinkLossPolicy;
use fabric::{Doorbell, Epoch, Link, LinkState, Slice};
use lane::{Consumer, Layout, Producer};

use crate::session::{PeerMessage, Session, SessionError, SessionSettings};

/// The control lane: a small ring for low traffic, and a larger one.
const LAYOUT: Layout = Layout::packed(64, 256);
/// Maximum number of bytes read from the control lane in one step: about ninety queries, each of which reads a
/// directory. Other peers and programs are served between steps.
const READ_BYTES_MAX: usize = 2 << 10;
/// Training attempts after which the interval grows, because the peer may not run.
const TRAINING_FAST_ATTEMPTS: u32 = 100;
const TRAINING_FAST_INTERVAL_NS: u64 = 2_000_000;
const TRAINING_SLOW_INTERVAL_NS: u64 = 50_000_000;
/// Delay before a lost link is trained again, which doubles with each loss.
const RETRAIN_DELAY_NS_MIN: u64 = 5_000_000;
const RETRAIN_DELAY_NS_MAX: u64 = 1_000_000_000;
/// Poll interval of a link whose other monitor has died.
const RETAINED_POLL_NS: u64 = 50_000_000;
/// Interval of send attempts while the control lane is full.
const SEND_RETRY_NS: u64 = 1_000_000;

const _: () = assert!(LAYOUT.window_bytes() as u64 <= rack::CONTROL_PARTITION_BYTES);

/// An event on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The link is up, and the peer has completed the handshake.
    Up(Epoch),
    /// The link was up and is lost.
    Down(Epoch),
    /// A message of the peer.
    Message(PeerMessage),
}

struct Lanes<L: Link> {
    producer: Producer<L::Outbound, L::Inbound>,
    consumer: Consumer<L::Inbound, L::Outbound>,
    session: Session,
    /// The last step reached its limit, so that more bytes may be pending.
    has_unread: bool,
}

enum Phase<L: Link> {
    Waiting { until_ns: u64 },
    Training { attempts: u32, next_ns: u64 },
    Up(Box<Lanes<L>>),
}

/// The monitor's endpoint of a link.
pub struct Peer<L: Link> {
    link: L,
    settings: SessionSettings,
    phase: Phase<L>,
    /// Whether the proxy may still access the windows, so that they must not be trained.
    is_training_blocked: bool,
    retrain_delay_ns: u64,
    reason: Option<String>,
    /// How the proxy is to treat the connections of the link since its last loss.
    loss_policy: LinkLossPolicy,
    /// Whether the peer's proxy has published that it waits for another monitor.
    is_proxy_waiting: bool,
    /// Time before which a link with a silent peer is not polled.
    next_poll_ns: u64,
    ups: u64,
    events: VecDeque<Event>,
}

impl<L: Link> Peer<L> {
    /// Returns a link that is down and is trained in the first step.
    pub fn new(link: L, settings: SessionSettings) -> Self {
        let phase = Phase::Waiting { until_ns: 0 };
        let retrain_delay_ns = RETRAIN_DELAY_NS_MIN;
        let (reason, events) = (None, VecDeque::new());
        Self {
            link,
            settings,
            phase,
            is_training_blocked: false,
            retrain_delay_ns,
            reason,
            loss_policy: LinkLossPolicy::Reset,
            is_proxy_waiting: false,
            next_poll_ns: 0,
            ups: 0,
            events,
        }
    }

    /// Returns the state: `down`, `training` or `up`.
    pub fn state(&self) -> &'static str {
        match &self.phase {
            Phase::Waiting { .. } => "down",
            Phase::Up(lanes) if lanes.session.is_open() => "up",
            Phase::Training { .. } | Phase::Up(_) => "training",
        }
    }

    /// Returns whether connections can use the link.
    pub fn is_open(&self) -> bool {
        matches!(&self.phase, Phase::Up(lanes) if lanes.session.is_open())
    }

    /// Returns why the link is not up, or why it was lost last.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref().filter(|_| !self.is_open())
    }

    /// Returns how the proxy is to treat the connections that the link had when it was lost last.
    pub fn loss_policy(&self) -> LinkLossPolicy {
        self.loss_policy
    }

    /// Sets whether the peer's proxy retains its connections while its monitor is dead.
    pub fn set_proxy_waiting(&mut self, is_proxy_waiting: bool) {
        self.is_proxy_waiting = is_proxy_waiting;
    }

    /// Returns the current or last epoch.
    pub fn epoch(&self) -> Epoch {
        self.link.epoch()
    }

    /// Returns how often the link came up.
    pub fn ups(&self) -> u64 {
        self.ups
    }

    /// Returns the last round trip between the monitors in nanoseconds.
    pub fn round_trip_ns(&self) -> Option<u64> {
        match &self.phase {
            Phase::Up(lanes) => lanes.session.round_trip_ns(),
            _ => None,
        }
    }

    /// Returns the session with the peer while the link is open.
    pub fn session(&mut self) -> Option<&mut Session> {
        match &mut self.phase {
            Phase::Up(lanes) if lanes.session.is_open() => Some(&mut lanes.session),
            _ => None,
        }
    }

    /// Sets the settings of further sessions. A running session keeps its own.
    pub fn set_settings(&mut self, settings: SessionSettings) {
        self.settings = settings;
    }

    /// Prevents training while the proxy may access the windows of the link.
    pub fn block_training(&mut self, is_training_blocked: bool) {
        self.is_training_blocked = is_training_blocked;
    }

    /// Advances the state machine.
    pub fn step(&mut self, now_ns: u64) {
        match &mut self.phase {
            Phase::Waiting { until_ns } => {
                if now_ns >= *until_ns && !self.is_training_blocked {
                    self.phase = Phase::Training { attempts: 0, next_ns: now_ns };
                    self.train(now_ns);
                }
            }
            Phase::Training { next_ns, .. } => {
                if now_ns >= *next_ns || self.link.state() == LinkState::Up {
                    self.train(now_ns);
                }
            }
            Phase::Up(_) => self.exchange(now_ns),
        }
    }

    /// Returns when [`Peer::step`] has to be called next.
    pub fn due_ns(&self) -> u64 {
        match &self.phase {
            Phase::Waiting { .. } if self.is_training_blocked => u64::MAX,
            Phase::Waiting { until_ns } => *until_ns,
            Phase::Training { next_ns, .. } => *next_ns,
            Phase::Up(lanes) if lanes.has_unread => 0,
            Phase::Up(lanes) => lanes.session.due_ns().max(self.next_poll_ns),
        }
    }

    /// Returns the delay until the next send attempt, if bytes are waiting for room in the control lane.
    pub fn send_retry_ns(&self) -> Option<u64> {
        match &self.phase {
            Phase::Up(lanes) if lanes.session.has_unsent() => Some(SEND_RETRY_NS),
            _ => None,
        }
    }

    /// Returns the next event.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes the link down, and sends the reason to the peer if possible. Direct connections are retained.
    pub fn take_down(&mut self, reason: &str, now_ns: u64) {
        self.close(reason, LinkLossPolicy::RetainDirect, now_ns);
    }

    /// Takes the link down because this node shuts down. All connections are reset.
    pub fn shut_down(&mut self, reason: &str, now_ns: u64) {
        self.close(reason, LinkLossPolicy::Reset, now_ns);
    }

    fn close(&mut self, reason: &str, policy: LinkLossPolicy, now_ns: u64) {
        let was_open = self.is_open();
        self.loss_policy = policy;
        if let Phase::Up(lanes) = &mut self.phase {
            lanes.session.close(reason, policy == LinkLossPolicy::Reset);
            let _ = send(&mut lanes.producer, &mut lanes.session);
            self.link.doorbell().ring();
        }
        let epoch = self.link.epoch();
        self.link.take_down();
        self.link.doorbell().ring();
        self.phase = Phase::Waiting { until_ns: now_ns.saturating_add(self.retrain_delay_ns) };
        self.retrain_delay_ns = (2 * self.retrain_delay_ns).min(RETRAIN_DELAY_NS_MAX);
        self.reason = Some(reason.to_owned());
        if was_open {
            self.events.push_back(Event::Down(epoch));
        }
    }

    fn train(&mut self, now_ns: u64) {
        let Phase::Training { attempts, next_ns } = &mut self.phase else { return };
        *attempts = attempts.saturating_add(1);
        let often = *attempts <= TRAINING_FAST_ATTEMPTS;
        *next_ns = now_ns + if often { TRAINING_FAST_INTERVAL_NS } else { TRAINING_SLOW_INTERVAL_NS };
        let before = (self.link.state(), self.link.epoch());
        let state = self.link.train();
        if before != (state, self.link.epoch()) {
            self.link.doorbell().ring();
        }
        if state == LinkState::Up {
            self.phase = Phase::Up(Box::new(self.lanes(now_ns)));
            self.exchange(now_ns);
        }
    }

    fn lanes(&self, now_ns: u64) -> Lanes<L> {
        let bytes = rack::CONTROL_PARTITION_BYTES as usize;
        let (inbound, outbound) = (self.link.inbound().slice(0, bytes), self.link.outbound().slice(0, bytes));
        // Only the two monitors can write the lane, so the secret protects against nothing but bytes of an earlier
        // epoch.
        let secret = u64::from(self.link.epoch().0);
        Lanes {
            producer: Producer::new(outbound.clone(), inbound.clone(), LAYOUT, secret),
            consumer: Consumer::new(inbound, outbound, LAYOUT, secret),
            session: Session::new(self.settings.clone(), now_ns),
            has_unread: false,
        }
    }

    fn exchange(&mut self, now_ns: u64) {
        let has_peer_left = self.link.state() != LinkState::Up;
        let Phase::Up(lanes) = &mut self.phase else { return };
        let (mut messages, was_open) = (Vec::new(), lanes.session.is_open());
        // A peer may have sent the reason before it left.
        let received = receive(lanes, &mut messages, now_ns);
        let exchanged = received.and_then(|()| if has_peer_left { Ok(false) } else { transmit(lanes, now_ns) });
        let is_open = lanes.session.is_open();
        if is_open && !was_open {
            self.ups += 1;
            self.retrain_delay_ns = RETRAIN_DELAY_NS_MIN;
            self.events.push_back(Event::Up(self.link.epoch()));
        }
        self.events
            .extend(messages.into_iter().filter(|message| *message != PeerMessage::Handshake).map(Event::Message));
        match exchanged {
            Ok(_) if has_peer_left => self.close("the peer left the link", LinkLossPolicy::RetainAll, now_ns),
            Ok(true) => self.link.doorbell().ring(),
            Ok(false) => {}
            // The monitor is dead, and its proxy waits for another one for a limited time.
            Err(SessionError::Silent { .. } | SessionError::NotReading { .. }) if self.is_proxy_waiting => {
                self.next_poll_ns = now_ns.saturating_add(RETAINED_POLL_NS);
            }
            Err(error) => {
                let policy = if error.is_recoverable() { LinkLossPolicy::RetainDirect } else { LinkLossPolicy::Reset };
                self.close(&format!("node {}: {error}", self.settings.peer_name), policy, now_ns);
            }
        }
    }
}

fn receive<L: Link>(lanes: &mut Lanes<L>, messages: &mut Vec<PeerMessage>, now_ns: u64) -> Result<(), SessionError> {
    let mut buffer = [0; READ_BYTES_MAX];
    let mut read_bytes = 0;
    while read_bytes < READ_BYTES_MAX {
        let bytes = lanes.consumer.read(&mut buffer[read_bytes..]).map_err(corrupt)?;
        if bytes == 0 {
            break;
        }
        lanes.session.receive(&buffer[read_bytes..read_bytes + bytes], now_ns, messages)?;
        read_bytes += bytes;
    }
    lanes.has_unread = read_bytes == READ_BYTES_MAX;
    Ok(())
}

/// Sends pending frames. Returns whether the peer has to be woken.
fn transmit<L: Link>(lanes: &mut Lanes<L>, now_ns: u64) -> Result<bool, SessionError> {
    lanes.session.tick(now_ns)?;
    let sent_bytes = send(&mut lanes.producer, &mut lanes.session)?;
    Ok(sent_bytes > 0 || lanes.consumer.take_wake_request())
}

fn send<L>(producer: &mut L, session: &mut Session) -> Result<usize, SessionError>
where
    L: ControlSender,
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

/// The sending side of a control lane.
trait ControlSender {
    fn write_some(&mut self, bytes: &[u8]) -> Result<usize, SessionError>;
}

impl<O: fabric::Outbound, I: fabric::Inbound> ControlSender for Producer<O, I> {
    fn write_some(&mut self, bytes: &[u8]) -> Result<usize, SessionError> {
        self.write(bytes).map_err(corrupt)
    }
}

fn corrupt(found: lane::Corrupt) -> SessionError {
    SessionError::Malformed { what: found.what, value: found.value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::ListenerState;
    use fabric::Outbound;
    use fabric::heap::{self, HeapLink};
    use proptest::prelude::*;

    fn settings(own: &str, peer: &str) -> SessionSettings {
        SessionSettings { own_name: own.to_owned(), peer_name: peer.to_owned(), digest: 1, silence_ns: 1_000_000_000 }
    }

    fn pair() -> [Peer<HeapLink>; 2] {
        let (a, b) = heap::pair(rack::CONTROL_PARTITION_BYTES as usize);
        [Peer::new(a, settings("a", "b")), Peer::new(b, settings("b", "a"))]
    }

    /// Runs both until neither changes any more, and returns the events of each.
    fn settle(peers: &mut [Peer<HeapLink>; 2], now_ns: &mut u64) -> [Vec<Event>; 2] {
        let mut events = [Vec::new(), Vec::new()];
        for _ in 0..40 {
            for (peer, events) in peers.iter_mut().zip(&mut events) {
                peer.step(*now_ns);
                events.extend(std::iter::from_fn(|| peer.next_event()));
            }
            *now_ns += TRAINING_FAST_INTERVAL_NS;
        }
        events
    }

    #[test]
    fn a_link_comes_up_carries_messages_and_comes_up_again_after_a_loss() {
        let (mut peers, mut now_ns) = (pair(), 0);
        assert_eq!(settle(&mut peers, &mut now_ns), [vec![Event::Up(Epoch(1))], vec![Event::Up(Epoch(1))]]);
        let address = "127.77.0.2:80".parse().unwrap();
        peers[0].session().unwrap().query(address);
        assert_eq!(settle(&mut peers, &mut now_ns)[1], [Event::Message(PeerMessage::Query(address))]);
        peers[1].session().unwrap().respond(address, ListenerState::Listening);
        assert_eq!(
            settle(&mut peers, &mut now_ns)[0],
            [Event::Message(PeerMessage::Response(address, ListenerState::Listening))]
        );

        peers[0].take_down("a test", now_ns);
        let expected = vec![Event::Down(Epoch(1)), Event::Up(Epoch(2))];
        assert_eq!(settle(&mut peers, &mut now_ns), [expected.clone(), expected]);
        assert_eq!((peers[1].ups(), peers[1].state(), peers[1].reason()), (2, "up", None));
        assert!(peers[1].reason.as_deref().is_some_and(|reason| reason.ends_with("took the link down: a test")));
    }

    #[test]
    fn many_queries_are_read_in_bounded_steps_and_completely() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        let [querying, queried] = &mut peers;
        for port in 1..=300 {
            querying.session().unwrap().query(([127, 77, 0, 2], port).into());
        }
        let mut attempts = Vec::new();
        while attempts.iter().sum::<usize>() < 300 {
            querying.step(now_ns);
            queried.step(now_ns);
            attempts.push(std::iter::from_fn(|| queried.next_event()).count());
            assert!(attempts.len() < 100, "{attempts:?}");
            assert!(
                attempts.len() > 1 || queried.due_ns() == 0,
                "more bytes are pending, and no doorbell will be rung"
            );
        }
        assert!(attempts.iter().all(|queries| *queries < 100), "{attempts:?}");
    }

    #[test]
    fn a_link_is_not_trained_while_the_proxy_may_touch_it() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        peers[0].take_down("a test", now_ns);
        peers[0].block_training(true);
        assert_eq!(settle(&mut peers, &mut now_ns)[0], [Event::Down(Epoch(1))]);
        assert_eq!((peers[0].state(), peers[0].reason()), ("down", Some("a test")));
        peers[0].block_training(false);
        assert!(settle(&mut peers, &mut now_ns)[0].iter().any(|event| matches!(event, Event::Up(_))));
    }

    #[test]
    fn a_link_survives_the_peers_monitor_while_the_peers_proxy_waits() {
        let (mut peers, mut now_ns) = (pair(), 0);
        settle(&mut peers, &mut now_ns);
        let [own, _dead] = &mut peers;
        own.set_proxy_waiting(true);
        for _ in 0..8 {
            now_ns += own.settings.silence_ns / 4;
            own.step(now_ns);
        }
        assert_eq!((own.state(), own.next_event()), ("up", None));
        assert!(own.due_ns() > now_ns, "the link is not polled continuously");
        own.set_proxy_waiting(false);
        own.step(now_ns);
        assert_eq!((own.next_event(), own.loss_policy()), (Some(Event::Down(Epoch(1))), LinkLossPolicy::RetainDirect));
    }

    #[test]
    fn all_connections_are_retained_for_a_restarted_peer_and_reset_for_one_that_shut_down() {
        for (is_in_order, policy) in [(false, LinkLossPolicy::RetainAll), (true, LinkLossPolicy::Reset)] {
            let (mut peers, mut now_ns) = (pair(), 0);
            settle(&mut peers, &mut now_ns);
            let [own, other] = &mut peers;
            if is_in_order {
                other.shut_down("a test", now_ns);
            } else {
                other.link.take_down();
            }
            own.step(now_ns);
            assert_eq!((own.next_event(), own.loss_policy()), (Some(Event::Down(Epoch(1))), policy));
        }
    }

    #[test]
    fn a_link_with_another_rack_file_does_not_open() {
        let (a, b) = heap::pair(rack::CONTROL_PARTITION_BYTES as usize);
        let other = SessionSettings { digest: 2, ..settings("b", "a") };
        let (mut peers, mut now_ns) = ([Peer::new(a, settings("a", "b")), Peer::new(b, other)], 0);
        let events = settle(&mut peers, &mut now_ns);
        assert_eq!(events, [vec![], vec![]]);
        let reasons = peers.each_ref().map(|peer| peer.reason().unwrap_or_default().to_owned());
        assert!(reasons.iter().any(|reason| reason.contains("another rack file")), "{reasons:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn a_link_recovers_from_garbage_in_its_window(
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
