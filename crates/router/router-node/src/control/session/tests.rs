use super::*;
use crate::control::message::{AnnouncedHop, AnnouncedRoute, HOPS_MAX, MESSAGE_BYTES_MAX, Origin, RouteKind};
use ipnet::IpNet;
use proptest::prelude::*;

const TIMERS: SessionTimers = SessionTimers { keepalive_ns: 20, hold_ns: 80 };
const PORTS: [usize; 3] = [1, 2, 3];

fn hello(node: u8) -> Hello {
    Hello { version: VERSION, digest: 7, node, incarnation: 100 + u64::from(node), kept: None }
}

/// Node 2 has connected to node 1.
fn pair() -> (Session, Session) {
    let connected = Session::new(hello(2), Some(NodeId(1)), PORTS.to_vec(), TIMERS, 0);
    (connected, Session::new(hello(1), None, PORTS.to_vec(), TIMERS, 0))
}

fn established() -> (Session, Session) {
    let (mut two, mut one) = pair();
    let none = Announcements::default();
    greet(&mut two, &mut one, &none);
    assert_eq!(transfer(&mut two, &mut one, &none), [SessionEvent::RoutesBegin { is_continued: false }]);
    assert_eq!(transfer(&mut one, &mut two, &none), [SessionEvent::RoutesBegin { is_continued: false }]);
    (two, one)
}

/// Exchanges the hellos: the node that has accepted waits for that of the other one.
fn greet(two: &mut Session, one: &mut Session, own: &Announcements) {
    assert!(one.next_packet(0, own).is_none());
    let first = two.next_packet(0, own).unwrap().bytes;
    assert_eq!(one.receive(0, &first), Ok(SessionEvent::Hello { node: NodeId(2), incarnation: 102 }));
    let second = one.next_packet(0, own).unwrap().bytes;
    assert_eq!(two.receive(0, &second), Ok(SessionEvent::Hello { node: NodeId(1), incarnation: 101 }));
}

fn route(third: u16, hops: usize) -> (IpNet, AnnouncedRoute) {
    let prefix = format!("2001:db8:{third:x}::/48").parse().unwrap();
    let hops = vec![AnnouncedHop { port: u8::MAX, adjacency: u16::MAX }; hops];
    (prefix, AnnouncedRoute { metric: u32::MAX, origin: Origin::Kernel, kind: RouteKind::Unicast, hops })
}

#[test]
fn a_session_is_up_after_both_hellos() {
    let (two, one) = established();
    assert_eq!((two.peer(), one.peer()), (Some(NodeId(1)), Some(NodeId(2))));
}

#[test]
fn invalid_hellos_are_refused_with_the_reason() {
    let refused = |hello: Hello| pair().1.receive(0, &Message::Hello(hello).encode()).unwrap_err();
    assert_eq!(refused(Hello { version: 9, ..hello(2) }), ControlError::Version(9));
    assert_eq!(refused(Hello { digest: 8, ..hello(2) }), ControlError::ConfigMismatch);
    for node in [0, 1, 3, 200] {
        assert!(matches!(refused(hello(node)), ControlError::UnexpectedNode { found, .. } if found == node));
    }
    let (mut two, _) = pair();
    assert!(matches!(
        two.receive(0, &Message::Hello(hello(0)).encode()),
        Err(ControlError::UnexpectedNode { found: 0, .. })
    ));
}

#[test]
fn messages_before_the_hello_and_a_second_hello_are_refused() {
    let (_, mut one) = pair();
    assert!(matches!(one.receive(0, &Message::Keepalive.encode()), Err(ControlError::UnexpectedMessage(_))));
    let (mut two, _) = established();
    let again = Message::Hello(hello(1)).encode();
    assert!(matches!(two.receive(0, &again), Err(ControlError::UnexpectedMessage(_))));
}

#[test]
fn keepalives_are_sent_when_idle_and_the_hold_timer_ends_the_session() {
    let (mut two, mut one) = established();
    let none = Announcements::default();
    assert!(two.next_packet(19, &none).is_none());
    let keepalive = two.next_packet(20, &none).unwrap().bytes;
    assert!(two.next_packet(21, &none).is_none());
    assert_eq!(one.next_timer_ns(), 20);
    assert_eq!(one.receive(60, &keepalive), Ok(SessionEvent::Keepalive));
    assert!((80..140).step_by(20).all(|now_ns| one.check_hold_timer(now_ns).is_ok()));
    assert_eq!(one.check_hold_timer(139), Ok(()));
    assert_eq!(one.check_hold_timer(140), Err(ControlError::HoldTimerExpired(0)));
}

#[test]
fn a_pause_of_the_own_machine_does_not_end_the_session() {
    let (_, mut one) = established();
    assert_eq!(one.check_hold_timer(2_000_000_000), Ok(()));
    assert_eq!(one.next_timer_ns(), 20, "a keepalive is due");
    assert_eq!(one.check_hold_timer(4_000_000_000), Ok(()));
}

#[test]
fn a_connection_without_a_hello_times_out() {
    let (_, mut one) = pair();
    let mut now_ns = 0;
    while one.check_hold_timer(now_ns).is_ok() {
        now_ns = one.next_timer_ns();
    }
    assert_eq!(now_ns, HELLO_WAIT_NS_MAX);
}

#[test]
fn route_updates_fit_the_maximum_length_however_many_routes_there_are() {
    let (mut two, mut one) = established();
    let mut own = Announcements::default();
    for third in 0..2000 {
        let (prefix, announced) = route(third, HOPS_MAX);
        own.announce(prefix, &announced);
    }
    let mut received = Vec::new();
    while let Some(OutgoingPacket { bytes: packet, .. }) = two.next_packet(1, &own) {
        assert!(packet.len() <= MESSAGE_BYTES_MAX);
        match one.receive(1, &packet) {
            Ok(SessionEvent::RouteUpdate(changes)) => received.extend(changes),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((received.len(), two.advertised()), (2000, own.latest()));
    assert_eq!(one.received(), Some(KeptRoutes { incarnation: 102, change: own.latest() }));
    assert_eq!(received, own.changes_after(0, usize::MAX).0);
    own.withdraw(&route(5, 0).0);
    let withdrawal = two.next_packet(1, &own).unwrap().bytes;
    assert_eq!(
        one.receive(1, &withdrawal),
        Ok(SessionEvent::RouteUpdate(vec![RouteChange { prefix: route(5, 0).0, announced: None }]))
    );
}

/// Node 1 gets the packets that node 2 has to send, and returns what they contained.
fn transfer(two: &mut Session, one: &mut Session, own: &Announcements) -> Vec<SessionEvent> {
    let mut events = Vec::new();
    while let Some(packet) = two.next_packet(0, own) {
        events.push(one.receive(0, &packet.bytes).unwrap());
    }
    events
}

#[test]
fn a_session_that_is_opened_again_continues_with_the_changes_since() {
    let mut own = Announcements::default();
    (0..4).for_each(|third| _ = own.announce(route(third, 1).0, &route(third, 1).1));
    let (mut two, mut one) = pair();
    greet(&mut two, &mut one, &own);
    transfer(&mut two, &mut one, &own);
    let kept = one.received();
    assert_eq!(kept, Some(KeptRoutes { incarnation: 102, change: 4 }));
    own.withdraw(&route(2, 1).0);
    let again = |kept: Option<KeptRoutes>, own: &Announcements| {
        let (mut two, mut one) = pair();
        let first = two.next_packet(0, own).unwrap().bytes;
        one.receive(0, &first).unwrap();
        // Known only now.
        one.set_kept(kept);
        two.receive(0, &one.next_packet(0, own).unwrap().bytes).unwrap();
        transfer(&mut two, &mut one, own)
    };
    let withdrawal = RouteChange { prefix: route(2, 1).0, announced: None };
    let continued = [SessionEvent::RoutesBegin { is_continued: true }, SessionEvent::RouteUpdate(vec![withdrawal])];
    assert_eq!(again(kept, &own), continued);
    let is_from_the_beginning = |events: Vec<SessionEvent>| {
        let all = own.changes_after(0, usize::MAX).0;
        events == [SessionEvent::RoutesBegin { is_continued: false }, SessionEvent::RouteUpdate(all)]
    };
    assert!(is_from_the_beginning(again(None, &own)));
    // Of another run of the node, and of changes that it has not made.
    for (incarnation, change) in [(101, 4), (102, 6)] {
        assert!(is_from_the_beginning(again(Some(KeptRoutes { incarnation, change }), &own)));
    }
    // The withdrawal is forgotten.
    own.prune_withdrawn(5, 1);
    assert_eq!(again(kept, &own)[0], SessionEvent::RoutesBegin { is_continued: false });
}

#[test]
fn routes_without_their_beginning_or_out_of_order_are_refused() {
    let update = |change: u64| Message::RouteUpdate(Vec::new(), change).encode();
    let none = Announcements::default();
    let (mut two, mut one) = pair();
    greet(&mut two, &mut one, &none);
    assert!(matches!(one.receive(0, &update(1)), Err(ControlError::UnexpectedMessage(_))));
    let continued = Message::RoutesBegin(3).encode();
    assert!(matches!(one.receive(0, &continued), Err(ControlError::UnexpectedMessage(_))), "nothing was kept");
    let (_, mut one) = established();
    assert_eq!(one.receive(0, &update(2)), Ok(SessionEvent::RouteUpdate(Vec::new())));
    assert!(matches!(one.receive(0, &update(2)), Err(ControlError::Malformed(_))));
    let again = Message::RoutesBegin(0).encode();
    assert!(matches!(one.receive(0, &again), Err(ControlError::UnexpectedMessage(_))));
}

#[test]
fn invalid_routes_are_refused() {
    let good = AnnouncedHop { port: 2, adjacency: 3 };
    let change = |prefix: &str, hops: Vec<AnnouncedHop>| RouteChange {
        prefix: prefix.parse().unwrap(),
        announced: Some(AnnouncedRoute { metric: 1, origin: Origin::Kernel, kind: RouteKind::Unicast, hops }),
    };
    let receive = |change: RouteChange| established().1.receive(0, &Message::RouteUpdate(vec![change], 1).encode());
    assert!(receive(change("10.0.0.0/8", vec![good])).is_ok());
    assert!(receive(change("10.0.0.0/8", vec![AnnouncedHop { port: u8::MAX, ..good }])).is_ok());
    for invalid in [
        change("10.0.0.1/8", vec![good]),
        change("10.0.0.0/8", vec![AnnouncedHop { port: 3, ..good }]),
        change("10.0.0.0/8", vec![good; HOPS_MAX + 1]),
        change("10.0.0.0/8", Vec::new()),
    ] {
        assert!(matches!(receive(invalid), Err(ControlError::Route { .. })));
    }
}

#[test]
fn port_mtus_are_sent_once_per_change_and_bounded() {
    let (mut two, mut one) = established();
    let mut own = Announcements::default();
    own.set_mtus_bytes(vec![1500, 0, 9000]);
    let packet = two.next_packet(0, &own).unwrap().bytes;
    assert_eq!(one.receive(0, &packet), Ok(SessionEvent::PortMtus(vec![1500, 0, 9000])));
    own.set_mtus_bytes(vec![1500, 0, 9000]);
    assert!(two.next_packet(0, &own).is_none());
    own.set_mtus_bytes(vec![1500]);
    assert_eq!(
        one.receive(0, &two.next_packet(0, &own).unwrap().bytes),
        Ok(SessionEvent::PortMtus(vec![1500])),
        "the list may become shorter"
    );
    let too_many = Message::PortMtus(vec![1500; 4]).encode();
    assert!(matches!(one.receive(0, &too_many), Err(ControlError::Malformed(_))));
}

#[test]
fn setup_messages_are_sent_first_and_bounded() {
    let (mut two, mut one) = established();
    let mut own = Announcements::default();
    own.announce(route(1, 1).0, &route(1, 1).1);
    assert!((0..SETUPS_QUEUED_MAX).all(|_| two.queue_setup(vec![5; SETUP_BYTES_MAX], Vec::new())));
    assert!(!two.queue_setup(vec![1], Vec::new()));
    let packet = two.next_packet(0, &own).unwrap().bytes;
    assert_eq!(one.receive(0, &packet), Ok(SessionEvent::InterconnectSetup(vec![5; SETUP_BYTES_MAX])));
    // But not before the hello of the node that has accepted.
    let (mut two, mut one) = pair();
    one.receive(0, &two.next_packet(0, &own).unwrap().bytes).unwrap();
    assert!(one.queue_setup(vec![1], Vec::new()));
    let hello = one.next_packet(0, &own).unwrap().bytes;
    assert!(matches!(two.receive(0, &hello), Ok(SessionEvent::Hello { .. })));
}

#[test]
fn a_cease_message_has_a_bounded_reason() {
    let (_, mut one) = established();
    assert_eq!(one.receive(0, &Session::cease("stopped")), Err(ControlError::Ceased("stopped".to_owned())));
    let long = "ü".repeat(500);
    assert!(matches!(Message::decode(&Session::cease(&long)), Ok(Message::Cease(reason)) if reason.len() == 256));
}

proptest! {
    /// No packet causes a panic, and an accepted update is one that a node could have sent.
    #[test]
    fn arbitrary_bytes_are_refused_or_valid(packet in prop::collection::vec(any::<u8>(), 0..200)) {
        let (_, mut one) = established();
        if let Ok(SessionEvent::RouteUpdate(changes)) = one.receive(0, &packet) {
            prop_assert!(changes.iter().all(|change| change.check(PORTS[2]).is_ok()));
        }
    }

    #[test]
    fn a_truncated_or_modified_message_never_panics(cut in 0..64usize, at in 0..64usize, byte in any::<u8>()) {
        let (prefix, announced) = route(1, 2);
        let mut packet = Message::RouteUpdate(vec![RouteChange { prefix, announced: Some(announced) }], 1).encode();
        packet.truncate(cut);
        if let Some(found) = packet.get_mut(at) {
            *found = byte;
        }
        let _ = established().1.receive(0, &packet);
    }
}
