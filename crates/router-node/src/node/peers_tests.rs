use std::path::Path;

use super::*;
use crate::control::words::VERSION;

const LIMITS: Limits = Limits { beat_ns: 20_000_000, silence_ns: 10_000_000_000 };
const TURN_NS: u64 = 1_000_000;
/// After so many turns of both a test has failed.
const TURNS_MAX: u64 = 20_000;

/// Node 0 or 1 of a cluster of two, in one folder.
fn peers(folder: &Path, node: u8) -> Peers {
    let place = |node: u8| Place::Path(folder.join(node.to_string()));
    let own = Greeting { version: VERSION, digest: 7, node, incarnation: 100 + u64::from(node) };
    let places = (0..2).map(|node| (node.to_string(), place(node), 1)).collect();
    Peers::new(own, LIMITS, Listener::bind(&place(node), Vec::new()).unwrap(), places)
}

fn turn(peers: &mut Peers, now_ns: u64) {
    let own = Announcements::default();
    peers.note_readable(&vec![true; peers.descriptors().len()]);
    peers.turn(now_ns, &own);
    peers.speak(now_ns, &own);
}

/// Turns of both until that is so.
#[track_caller]
fn turn_until(nodes: &mut [Peers; 2], now_ns: &mut u64, is_so: impl Fn(&[Peers; 2]) -> bool) {
    for _ in 0..TURNS_MAX {
        *now_ns += TURN_NS;
        nodes.iter_mut().for_each(|node| turn(node, *now_ns));
        if is_so(nodes) {
            return;
        }
    }
    panic!("{nodes:#?}");
}

/// What each says of the other.
fn states(nodes: &[Peers; 2]) -> [&'static str; 2] {
    nodes.each_ref().map(|node| node.iter().next().unwrap().1.state())
}

fn other(peers: &Peers) -> &Peer {
    peers.iter().next().unwrap().1
}

#[test]
fn who_keeps_away_is_left_at_once_with_the_reason_and_met_when_it_comes() {
    let _no_child = crate::forks::none();
    let folder = tempfile::tempdir().unwrap();
    for held in [0, 1] {
        let mut nodes = [0, 1].map(|node| peers(folder.path(), node));
        let mut now_ns = 0;
        let are_met = |nodes: &[Peers; 2]| states(nodes) == ["joining"; 2];
        turn_until(&mut nodes, &mut now_ns, are_met);
        nodes[held].hold("its thread hangs", now_ns);
        turn(&mut nodes[1 - held], now_ns);
        assert_eq!(states(&nodes), ["down"; 2]);
        let reason = other(&nodes[1 - held]).reason.clone().unwrap();
        assert!(reason.contains("its thread hangs"), "{reason}");
        for _ in 0..3000 {
            now_ns += TURN_NS;
            nodes.iter_mut().for_each(|node| turn(node, now_ns));
            assert_eq!(states(&nodes), ["down"; 2]);
        }
        nodes[held].release();
        turn_until(&mut nodes, &mut now_ns, are_met);
        // What was tried meanwhile is not met before.
        assert_eq!(nodes.each_ref().map(|node| other(node).losses), [1, 1]);
    }
}

#[test]
fn who_was_away_meets_the_one_that_is_there_and_none_of_those_that_came_and_went() {
    let _no_child = crate::forks::none();
    let folder = tempfile::tempdir().unwrap();
    let away = peers(folder.path(), 0);
    for _ in 0..5 {
        turn(&mut peers(folder.path(), 1), TURN_NS);
    }
    let mut nodes = [away, peers(folder.path(), 1)];
    let mut now_ns = 0;
    turn_until(&mut nodes, &mut now_ns, |nodes| states(nodes) == ["joining"; 2]);
    let met = |news: &News| matches!(news, News::Met(_));
    assert_eq!(nodes.each_mut().map(|node| node.take_news().iter().filter(|news| met(news)).count()), [1, 1]);
    assert_eq!(nodes.each_ref().map(|node| other(node).losses), [0, 0]);
}

#[test]
fn a_refusal_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = peers(folder.path(), 0);
    node.refused("a reason".to_owned(), 1);
    node.refused("a reason".to_owned(), REFUSED_AGAIN_NS);
    assert_eq!(node.refused, Some(("a reason".to_owned(), 1)));
    node.refused("a reason".to_owned(), REFUSED_AGAIN_NS + 1);
    node.refused("another".to_owned(), REFUSED_AGAIN_NS + 2);
    assert_eq!(node.refused, Some(("another".to_owned(), REFUSED_AGAIN_NS + 2)));
}
