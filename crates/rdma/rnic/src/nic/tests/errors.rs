//! Every status of a completion, and the states of a queue pair.

use sim::{Span, Time};

use super::operations::profiles;
use super::pair::{MEMORY_BYTES, Pair, attributes};
use crate::nic::{NicError, NicEvent, NicProfile, TransportPolicy};
use crate::verbs::{
    AccessFlags, BindInfo, Completion, CompletionKind, CompletionStatus, DatagramDestination, LKey, NicAddress,
    QpAttributes, QpState, ReceiveRequest, RemoteBuffer, SendKind, WindowKind,
};
use crate::wire::{Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Service};

const NO_KEY: RKey = RKey(0xFFFF_FF00);

fn statuses(completions: &[Completion]) -> Vec<(u64, CompletionStatus)> {
    completions.iter().map(|completion| (completion.id, completion.status)).collect()
}

/// Executes two valid WRITEs around an invalid request, and checks what sender and receiver report, for each profile.
fn check_around(post: impl Fn(&mut Pair, [QpNumber; 2]), sender: CompletionStatus, receiver: &[CompletionStatus]) {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let valid = SendKind::Write(pair.remote(0, 0), None);
        pair.send(0, qps[0], 1, valid, 0, 5000);
        post(&mut pair, qps);
        pair.send(0, qps[0], 3, valid, 0, 5000);
        pair.run();
        let (ok, flushed) = (CompletionStatus::Success, CompletionStatus::Flushed);
        assert_eq!(statuses(&pair.completions[0]), [(1, ok), (2, sender), (3, flushed)], "{profile:?}");
        assert_eq!(pair.nics[0].query_qp(qps[0]).unwrap().state, QpState::Error);
        assert_eq!(pair.nics[0].poll_event(), Some(NicEvent::QpError(qps[0])));
        let received_statuses: Vec<_> = pair.completions[1].iter().map(|completion| completion.status).collect();
        assert_eq!(received_statuses, receiver, "{profile:?}");
        pair.send(0, qps[0], 4, valid, 0, 1);
        pair.run();
        assert_eq!(statuses(&pair.completions[0])[3..], [(4, flushed)], "a request posted in the error state");
    }
}

#[test]
fn a_message_longer_than_its_receive_request_fails_on_both_sides() {
    check_around(
        |pair, qps| {
            pair.receive(1, qps[1], 7, 0, 1999);
            pair.receive(1, qps[1], 8, 0, 1999);
            pair.send(0, qps[0], 2, SendKind::Send(None), 0, 2000);
        },
        CompletionStatus::RemoteInvalidRequest,
        &[CompletionStatus::LocalLength, CompletionStatus::Flushed],
    );
}

#[test]
fn a_receive_request_without_access_rights_fails_on_both_sides() {
    check_around(
        |pair, qps| {
            let mut request = ReceiveRequest { id: 7, local: pair.piece(1, 0, 100) };
            request.local[0].key = LKey(NO_KEY.0);
            pair.nics[1].post_recv(pair.now, qps[1], &request).unwrap();
            pair.send(0, qps[0], 2, SendKind::Send(None), 0, 100);
        },
        CompletionStatus::RemoteOperation,
        &[CompletionStatus::LocalProtection],
    );
}

#[test]
fn local_memory_without_access_rights_fails_locally() {
    for (kind, key) in [(SendKind::Send(None), LKey(NO_KEY.0)), (SendKind::Read(RemoteBuffer::default()), LKey(0))] {
        check_around(
            |pair, qps| {
                let mut request = pair.request(0, 2, kind, 0, 100);
                request.local[0].key = key;
                pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
            },
            CompletionStatus::LocalProtection,
            &[],
        );
    }
}

/// The operation of a request, and its length in bytes.
type RequestFor<'a> = dyn Fn(&Pair) -> (SendKind, u32) + 'a;

#[test]
fn remote_memory_without_access_rights_is_refused() {
    let end = MEMORY_BYTES as u64;
    let cases: [&RequestFor; 6] = [
        &|_| (SendKind::Write(RemoteBuffer { address: 0, key: NO_KEY }, None), 100),
        &|pair| (SendKind::Write(pair.remote(0, end - 4999), None), 5000),
        &|pair| (SendKind::Read(pair.remote(0, end - 1)), 2),
        &|pair| (SendKind::Read(pair.remote(0, u64::MAX)), 2),
        &|pair| (SendKind::FetchAdd { remote: pair.remote(0, end - 7), add: 1 }, 8),
        &|_| (SendKind::SendWithInvalidate(NO_KEY), 10),
    ];
    for case in cases {
        check_around(
            |pair, qps| {
                let (kind, bytes) = case(pair);
                if matches!(kind, SendKind::SendWithInvalidate(_)) {
                    let request = ReceiveRequest { id: 7, local: pair.piece(1, 0, 100) };
                    pair.nics[1].post_recv(pair.now, qps[1], &request).unwrap();
                }
                pair.send(0, qps[0], 2, kind, 0, bytes);
            },
            CompletionStatus::RemoteAccess,
            if matches!(
                case(&Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1)).0,
                SendKind::SendWithInvalidate(_)
            ) {
                &[CompletionStatus::Flushed]
            } else {
                &[]
            },
        );
    }
}

#[test]
fn a_misaligned_atomic_is_an_invalid_request() {
    check_around(
        |pair, qps| {
            let remote = pair.remote(0, 12);
            pair.send(0, qps[0], 2, SendKind::CompareSwap { remote, compare: 0, swap: 1 }, 0, 8);
        },
        CompletionStatus::RemoteInvalidRequest,
        &[],
    );
}

#[test]
fn access_rights_of_the_queue_pair_limit_those_of_the_key() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let none = QpAttributes { access: Some(AccessFlags::REMOTE_READ), ..QpAttributes::default() };
        pair.nics[1].modify_qp(pair.now, qps[1], QpState::ReadyToSend, &none).unwrap();
        let (read, write) = (SendKind::Read(pair.remote(0, 0)), SendKind::Write(pair.remote(0, 0), None));
        pair.send(0, qps[0], 1, read, 0, 3000);
        pair.send(0, qps[0], 2, write, 0, 10);
        pair.run();
        // The READ response arrives before the NAK, and is complete.
        let expected = [(1, CompletionStatus::Success), (2, CompletionStatus::RemoteAccess)];
        assert_eq!(statuses(&pair.completions[0]), expected, "{profile:?}");
    }
}

#[test]
fn a_window_grants_access_until_it_is_invalidated() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let window = pair.nics[1].allocate_window(pair.domains[1], WindowKind::Type2).unwrap();
        let access = AccessFlags::REMOTE_WRITE;
        let bind = BindInfo { region: pair.keys[1].0, address: 1000, bytes: 100, access, is_zero_based: true };
        let key = pair.nics[1].bind_window(qps[1], window, Some(window), &bind).unwrap();
        pair.receive(1, qps[1], 9, 0, 10);
        pair.nics[0].memory_mut().0[..8].fill(7);
        pair.send(0, qps[0], 1, SendKind::Write(RemoteBuffer { address: 92, key }, None), 0, 8);
        pair.send(0, qps[0], 2, SendKind::SendWithInvalidate(key), 0, 0);
        pair.run();
        let ok = CompletionStatus::Success;
        assert_eq!(statuses(&pair.completions[0]), [(1, ok), (2, ok)], "{profile:?}");
        assert_eq!(pair.completions[1][0].immediate, Some(Immediate::Invalidate(key)));
        assert_eq!(pair.nics[1].memory().0[1092..1100], [7; 8]);
        pair.send(0, qps[0], 3, SendKind::Write(RemoteBuffer { address: 0, key }, None), 0, 8);
        pair.run();
        assert_eq!(statuses(&pair.completions[0])[2..], [(3, CompletionStatus::RemoteAccess)]);
    }
}

#[test]
fn windows_are_bound_and_invalidated_by_requests_in_order() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        pair.impairments.loss = 0.1;
        let qps = pair.connect(Service::Rc);
        let window = pair.nics[1].allocate_window(pair.domains[1], WindowKind::Type2).unwrap();
        let chosen = RKey(window.0 ^ 0x55);
        let access = AccessFlags::REMOTE_WRITE;
        let bind = BindInfo { region: pair.keys[1].0, address: 1000, bytes: 100, access, is_zero_based: true };
        // The owner sends the key to the peer with a message that follows the bind.
        pair.receive(0, qps[0], 9, 0, 10);
        pair.send(1, qps[1], 1, SendKind::Send(None), 0, 10);
        pair.send(1, qps[1], 2, SendKind::BindWindow { window, chosen, bind }, 0, 0);
        pair.run();
        let write = SendKind::Write(RemoteBuffer { address: 0, key: chosen }, None);
        pair.send(0, qps[0], 3, write, 0, 100);
        pair.run();
        pair.send(1, qps[1], 4, SendKind::LocalInvalidate(chosen), 0, 0);
        pair.send(1, qps[1], 5, SendKind::Write(pair.remote(1, 0), None), 0, 5000);
        pair.run();
        pair.send(0, qps[0], 6, write, 0, 100);
        pair.run();
        let ok = CompletionStatus::Success;
        let own: Vec<_> = pair.completions[1].iter().map(|completion| (completion.kind, completion.status)).collect();
        let kinds = [CompletionKind::Send, CompletionKind::BindWindow, CompletionKind::LocalInvalidate];
        assert_eq!(own[..3], kinds.map(|kind| (kind, ok)), "{profile:?}");
        assert_eq!(own[3], (CompletionKind::Write, ok));
        let expected = [(9, ok), (3, ok), (6, CompletionStatus::RemoteAccess)];
        assert_eq!(statuses(&pair.completions[0])[..3], expected, "{profile:?}");
    }
}

#[test]
fn a_window_that_cannot_be_bound_fails_its_request() {
    check_around(
        |pair, qps| {
            let access = AccessFlags::REMOTE_WRITE;
            let bind = BindInfo { region: pair.keys[0].0, address: 0, bytes: 100, access, is_zero_based: false };
            pair.send(0, qps[0], 2, SendKind::BindWindow { window: NO_KEY, chosen: NO_KEY, bind }, 0, 0);
        },
        CompletionStatus::MemoryWindowBind,
        &[],
    );
}

/// An unknown key, and the key of a region.
#[test]
fn a_key_that_cannot_be_invalidated_fails_its_request() {
    check_around(
        |pair, qps| pair.send(0, qps[0], 2, SendKind::LocalInvalidate(NO_KEY), 0, 0),
        CompletionStatus::MemoryWindowBind,
        &[],
    );
    check_around(
        |pair, qps| pair.send(0, qps[0], 2, SendKind::LocalInvalidate(pair.keys[0].1), 0, 0),
        CompletionStatus::MemoryWindowBind,
        &[],
    );
}

#[test]
fn retries_are_exceeded_without_a_response() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        pair.drops = Box::new(|side, _, _| side == 1);
        let to = pair.remote(0, 0);
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 5000);
        pair.send(0, qps[0], 2, SendKind::Read(to), 0, 5000);
        pair.run();
        let expected = [(1, CompletionStatus::RetryExceeded), (2, CompletionStatus::Flushed)];
        assert_eq!(statuses(&pair.completions[0]), expected, "{profile:?}");
        // 1.05 ms by the attribute, eight times.
        let waited_ms = pair.now.ps() as f64 / 1e9;
        assert!((8.0..17.0).contains(&waited_ms), "{profile:?}: {waited_ms}");
    }
}

#[test]
fn a_receiver_that_is_not_ready_is_retried_as_often_as_configured() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let init = pair.qp_init(0, Service::Rc);
        let other = pair.qp_init(1, Service::Rc);
        let qps = [pair.nics[0].create_qp(&init).unwrap(), pair.nics[1].create_qp(&other).unwrap()];
        pair.bring_up_with(0, qps, Service::Rc, |steps| steps[2].rnr_retries = Some(2));
        pair.bring_up_with(1, [qps[1], qps[0]], Service::Rc, |_| {});
        pair.send(0, qps[0], 1, SendKind::Send(None), 0, 5000);
        pair.run();
        assert_eq!(statuses(&pair.completions[0]), [(1, CompletionStatus::ReceiverNotReadyExceeded)], "{profile:?}");
        assert_eq!(pair.nics[1].counters().rnr_naks_sent, 3, "{profile:?}");
    }
}

#[test]
fn a_receiver_that_becomes_ready_in_time_gets_the_message() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        pair.nics[0].memory_mut().0[..5000].fill(3);
        pair.send(0, qps[0], 1, SendKind::Send(None), 0, 5000);
        pair.run_until(Time::ZERO + Span::from_ns(50_000.0));
        assert!(pair.completions[0].is_empty());
        pair.receive(1, qps[1], 9, 100_000, 5000);
        pair.run();
        assert_eq!(statuses(&pair.completions[0]), [(1, CompletionStatus::Success)], "{profile:?}");
        assert!(pair.nics[1].memory().0[100_000..105_000].iter().all(|byte| *byte == 3));
    }
}

#[test]
fn a_mismatched_response_fails_the_request() {
    for policy in TransportPolicy::ALL {
        let mut pair = Pair::new(NicProfile::new(policy), 1);
        let qps = pair.connect(Service::Rc);
        pair.drops = Box::new(|side, _, _| side == 0); // the request never arrives
        let from = pair.remote(0, 0);
        pair.send(0, qps[0], 1, SendKind::Read(from), 0, 100);
        pair.run_until(Time::ZERO + Span::from_ns(1000.0));
        let mut forged = bare(Operation::ReadResponseOnly, qps[0], Psn::new(u32::MAX - 20));
        forged.payload_bytes = 99;
        forged.placement = Some(PlacementHeader { message: 0, packet: 0, sent: 0 });
        pair.nics[0].receive(pair.now, NicAddress(1), &forged, false, &[0; 99]);
        pair.poll();
        assert_eq!(statuses(&pair.completions[0]), [(1, CompletionStatus::BadResponse)], "{policy:?}");
    }
}

pub fn bare(operation: Operation, destination: QpNumber, psn: Psn) -> Header {
    Header::bare(Service::Rc, operation, destination, psn)
}

#[test]
fn requests_are_posted_only_in_states_that_allow_it() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1);
    let init = pair.qp_init(0, Service::Rc);
    let qp = pair.nics[0].create_qp(&init).unwrap();
    let send = pair.request(0, 1, SendKind::Send(None), 0, 10);
    let receive = ReceiveRequest { id: 1, local: pair.piece(0, 0, 10) };
    let steps = attributes(Service::Rc);
    let mut expected = vec![(false, false), (false, true), (false, true), (true, true)].into_iter();
    let mut check = |pair: &mut Pair| {
        let sends = pair.nics[0].post_send(pair.now, qp, &send).is_ok();
        let receives = pair.nics[0].post_recv(pair.now, qp, &receive).is_ok();
        assert_eq!(Some((sends, receives)), expected.next());
    };
    check(&mut pair);
    for (state, step) in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend].into_iter().zip(&steps) {
        pair.nics[0].modify_qp(pair.now, qp, state, step).unwrap();
        check(&mut pair);
    }
    let unknown = pair.nics[0].post_send(pair.now, QpNumber(99), &send);
    assert_eq!(unknown, Err(NicError::Unknown { what: "queue pair", number: 99 }));
    let again = pair.nics[0].modify_qp(pair.now, qp, QpState::Init, &steps[0]);
    assert!(matches!(again, Err(NicError::Transition(_))), "{again:?}");
    let mut init = pair.qp_init(0, Service::Rc);
    init.srq = Some(pair.nics[0].create_srq(8).unwrap());
    let shared = pair.nics[0].create_qp(&init).unwrap();
    pair.nics[0].modify_qp(pair.now, shared, QpState::Init, &steps[0]).unwrap();
    let refused = pair.nics[0].post_recv(pair.now, shared, &receive).unwrap_err();
    let text = "queue pair 3: it uses a shared receive queue; post to that queue";
    assert_eq!(refused.to_string(), text);
}

/// rdma_rxe and mlx5 complete these as IBV_WC_LOC_QP_OP_ERR: operations that the transport does not have, and READs
/// without initiator reads; and as IBV_WC_LOC_LEN_ERR: atomic operations of other than 8 bytes, and messages that are
/// longer than the port sends.
#[test]
fn an_unsupported_request_is_completed_with_its_error_and_the_rest_is_flushed() {
    let (operation, length) = (CompletionStatus::LocalQpOperation, CompletionStatus::LocalLength);
    let somewhere = RemoteBuffer { address: 0, key: NO_KEY };
    let datagram = DatagramDestination { to: NicAddress(1), qp: QpNumber(2), queue_key: 7 };
    let add = SendKind::FetchAdd { remote: somewhere, add: 1 };
    let local = SendKind::LocalInvalidate(NO_KEY);
    let send = SendKind::Send(None);
    let cases = [
        (Service::Rc, SendKind::Read(somewhere), 10, None, operation),
        (Service::Rc, add, 8, None, operation),
        (Service::Rc, local, 8, None, operation),
        (Service::Rc, send, 8, Some(datagram), operation),
        (Service::Uc, SendKind::Read(somewhere), 10, None, operation),
        (Service::Uc, SendKind::SendWithInvalidate(NO_KEY), 10, None, operation),
        (Service::Ud, SendKind::Write(somewhere, None), 10, Some(datagram), operation),
        (Service::Ud, add, 8, Some(datagram), operation),
        (Service::Ud, send, 10, None, operation),
        (Service::Ud, send, 1025, Some(datagram), length),
        (Service::Rc, send, (1 << 31) + 1, None, length),
    ];
    for profile in profiles() {
        for (service, kind, bytes, datagram, status) in cases {
            let mut pair = Pair::new(profile, 1);
            let inits = [0, 1].map(|side| pair.qp_init(side, service));
            let qps = [0, 1].map(|side: usize| pair.nics[side].create_qp(&inits[side]).unwrap());
            for side in 0..2 {
                // Without initiator reads.
                let none = |steps: &mut [QpAttributes; 3]| {
                    steps[2].initiator_reads_max = steps[2].initiator_reads_max.map(|_| 0);
                };
                pair.bring_up_with(side, [qps[side], qps[1 - side]], service, none);
            }
            let mut request = pair.request(0, 1, kind, 0, bytes);
            request.datagram = datagram;
            pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
            let valid = pair.request(0, 2, SendKind::Send(None), 0, 8);
            pair.nics[0].post_send(pair.now, qps[0], &valid).unwrap();
            pair.run();
            let expected = [(1, status), (2, CompletionStatus::Flushed)];
            assert_eq!(statuses(&pair.completions[0]), expected, "{service:?} {kind:?} {bytes} {profile:?}");
            let state = if service == Service::Rc { QpState::Error } else { QpState::SendQueueError };
            assert_eq!(pair.nics[0].query_qp(qps[0]).unwrap().state, state);
            assert_eq!(pair.nics[1].counters().received_packets, 0, "the peer receives nothing");
        }
    }
}

#[test]
fn an_atomic_operation_of_other_than_8_bytes_is_a_local_length_error() {
    for bytes in [0, 7, 16] {
        check_around(
            |pair, qps| {
                let remote = pair.remote(0, 0);
                pair.send(0, qps[0], 2, SendKind::FetchAdd { remote, add: 1 }, 0, bytes);
            },
            CompletionStatus::LocalLength,
            &[],
        );
    }
}

/// As in published tests of NICs: the sender reports a remote access error, and the receiver's request completes as
/// IBV_WC_LOC_ACCESS_ERR. A WRITE without immediate data leaves the receive requests to be flushed.
#[test]
fn a_write_with_immediate_data_to_forbidden_memory_fails_on_both_sides() {
    let (access, flushed) = (CompletionStatus::LocalAccess, CompletionStatus::Flushed);
    let post = |pair: &mut Pair, qp| (7..9).for_each(|id| pair.receive(1, qp, id, 0, 100));
    for (data, received_statuses) in [(Some(5), [access, flushed]), (None, [flushed, flushed])] {
        check_around(
            |pair, qps| {
                post(pair, qps[1]);
                let kind = SendKind::Write(RemoteBuffer { address: 0, key: NO_KEY }, data);
                pair.send(0, qps[0], 2, kind, 0, 100);
            },
            CompletionStatus::RemoteAccess,
            &received_statuses,
        );
    }
    let no_receive = |pair: &mut Pair, qps: [QpNumber; 2]| {
        let kind = SendKind::Write(RemoteBuffer { address: 0, key: NO_KEY }, Some(5));
        pair.receive(1, qps[1], 7, 0, 100);
        pair.send(0, qps[0], 2, kind, 0, 5000);
    };
    // The first of many packets is refused, before it is known that the last one has immediate data.
    check_around(no_receive, CompletionStatus::RemoteAccess, &[flushed]);
}

#[test]
fn an_unreliable_write_to_forbidden_memory_is_dropped_alone() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[2]), 1);
    let qps = pair.connect(Service::Uc);
    pair.receive(1, qps[1], 7, 0, 100);
    let (wrong, right) = (RemoteBuffer { address: 0, key: NO_KEY }, pair.remote(0, 0));
    pair.send(0, qps[0], 1, SendKind::Write(wrong, Some(5)), 0, 100);
    pair.send(0, qps[0], 2, SendKind::Write(right, Some(6)), 0, 100);
    pair.run();
    assert_eq!(statuses(&pair.completions[1]), [(7, CompletionStatus::Success)]);
    assert_eq!(pair.completions[1][0].immediate, Some(Immediate::Data(6)));
}

#[test]
fn an_unreliable_message_longer_than_its_receive_request_is_dropped_and_the_queue_pair_stays() {
    // 40 bytes of the memory for a datagram are for its header.
    for (service, bytes, fitting_bytes) in
        [(Service::Uc, 101, 99), (Service::Uc, 5000, 99), (Service::Ud, 61, 59), (Service::Ud, 1000, 59)]
    {
        let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[2]), 1);
        let qps = pair.connect(service);
        pair.receive(1, qps[1], 7, 0, 100);
        for (id, bytes) in [(1, bytes), (2, fitting_bytes)] {
            let mut request = pair.request(0, id, SendKind::Send(None), 0, bytes);
            let to = DatagramDestination { to: NicAddress(1), qp: qps[1], queue_key: 7 };
            request.datagram = (service == Service::Ud).then_some(to);
            pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
        }
        pair.run();
        assert_eq!(statuses(&pair.completions[1]), [(7, CompletionStatus::Success)], "{service:?}, {bytes} bytes");
        assert_eq!(pair.completions[1][0].bytes, 99);
        let status = pair.nics[1].query_qp(qps[1]).unwrap();
        assert_eq!((status.state, status.dropped_long), (QpState::ReadyToSend, 1), "{service:?}, {bytes} bytes");
        assert_eq!(pair.nics[1].counters().drop_long, 1);
        assert_eq!(pair.nics[1].poll_event(), None);
    }
}

#[test]
fn posting_to_a_full_queue_fails() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1);
    let mut inits = [pair.qp_init(0, Service::Rc), pair.qp_init(1, Service::Rc)];
    (inits[0].sends_max, inits[0].receives_max) = (2, 1);
    let qps = pair.connect_as(&inits);
    let send = pair.request(0, 1, SendKind::Send(None), 0, 10);
    let posted: Vec<_> = (0..3).map(|_| pair.nics[0].post_send(pair.now, qps[0], &send).is_ok()).collect();
    assert_eq!(posted, [true, true, false]);
    let receive = ReceiveRequest { id: 1, local: pair.piece(0, 0, 10) };
    let posted: Vec<_> = (0..2).map(|_| pair.nics[0].post_recv(pair.now, qps[0], &receive).is_ok()).collect();
    assert_eq!(posted, [true, false]);
}

#[test]
fn a_draining_queue_pair_finishes_started_requests_and_starts_none() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let write = SendKind::Write(pair.remote(0, 0), None);
        pair.send(0, qps[0], 1, write, 0, 100_000);
        pair.run_until(Time::ZERO + Span::from_ns(5000.0));
        let none = QpAttributes::default();
        pair.nics[0].modify_qp(pair.now, qps[0], QpState::SendQueueDrain, &none).unwrap();
        pair.send(0, qps[0], 2, write, 0, 10);
        pair.run();
        assert_eq!(statuses(&pair.completions[0]), [(1, CompletionStatus::Success)], "{profile:?}");
        assert_eq!(pair.nics[0].poll_event(), Some(NicEvent::Drained(qps[0])));
        assert_eq!(pair.nics[0].poll_event(), None, "reported once");
        pair.nics[0].modify_qp(pair.now, qps[0], QpState::ReadyToSend, &none).unwrap();
        pair.run();
        assert_eq!(pair.completions[0].len(), 2);
    }
}

#[test]
fn the_error_state_flushes_and_reset_clears() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let none = QpAttributes::default();
        for id in 0..3 {
            pair.receive(0, qps[0], id, 0, 100);
            pair.send(0, qps[0], 10 + id, SendKind::Send(None), 0, 5000);
        }
        pair.run_until(Time::ZERO + Span::from_ns(3000.0));
        pair.nics[0].modify_qp(pair.now, qps[0], QpState::Error, &none).unwrap();
        pair.run_until(pair.now + Span::from_ns(1e6));
        let flushed: Vec<_> = [10, 11, 12, 0, 1, 2].map(|id| (id, CompletionStatus::Flushed)).to_vec();
        assert_eq!(statuses(&pair.completions[0]), flushed, "{profile:?}");
        pair.nics[0].modify_qp(pair.now, qps[0], QpState::Reset, &none).unwrap();
        pair.nics[1].modify_qp(pair.now, qps[1], QpState::Reset, &none).unwrap();
        pair.completions = Default::default();
        pair.bring_up(0, qps[0], qps[1], Service::Rc);
        pair.bring_up(1, qps[1], qps[0], Service::Rc);
        pair.receive(1, qps[1], 5, 0, 10_000);
        pair.send(0, qps[0], 20, SendKind::Send(None), 0, 10_000);
        pair.run();
        assert_eq!(statuses(&pair.completions[0]), [(20, CompletionStatus::Success)], "{profile:?}");
        assert_eq!(statuses(&pair.completions[1]), [(5, CompletionStatus::Success)]);
    }
}

#[test]
fn a_failed_send_of_an_unreliable_queue_pair_keeps_its_receives() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1);
    let qps = pair.connect(Service::Uc);
    let mut request = pair.request(0, 1, SendKind::Send(None), 0, 100);
    request.local[0].key = LKey(NO_KEY.0);
    pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
    pair.receive(0, qps[0], 9, 0, 100);
    pair.run();
    assert_eq!(statuses(&pair.completions[0]), [(1, CompletionStatus::LocalProtection)]);
    assert_eq!(pair.nics[0].query_qp(qps[0]).unwrap().state, QpState::SendQueueError);
    pair.send(1, qps[1], 2, SendKind::Send(None), 0, 100);
    pair.run();
    assert_eq!(statuses(&pair.completions[0])[1..], [(9, CompletionStatus::Success)]);
    pair.nics[0].modify_qp(pair.now, qps[0], QpState::ReadyToSend, &QpAttributes::default()).unwrap();
    pair.send(0, qps[0], 3, SendKind::Send(None), 0, 100);
    pair.run();
    assert_eq!(statuses(&pair.completions[0])[2..], [(3, CompletionStatus::Success)]);
}

#[test]
fn an_unreliable_message_of_which_a_packet_is_lost_is_lost_as_a_whole() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[2]), 1);
    let qps = pair.connect(Service::Uc);
    pair.drops = Box::new(|side, number, _| side == 0 && number == 1);
    pair.receive(1, qps[1], 9, 100_000, 5000);
    pair.nics[0].memory_mut().0[..10_000].fill(1);
    pair.send(0, qps[0], 1, SendKind::Send(None), 0, 3000);
    pair.send(0, qps[0], 2, SendKind::Send(None), 5000, 4000);
    pair.run();
    assert_eq!(pair.completions[0].len(), 2);
    assert_eq!((pair.completions[1].len(), pair.completions[1][0].bytes), (1, 4000));
    assert!(pair.nics[1].memory().0[100_000..104_000].iter().all(|byte| *byte == 1));
}

#[test]
fn a_completion_queue_overflow_puts_its_queue_pairs_in_error() {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1);
    let mut inits = [pair.qp_init(0, Service::Rc), pair.qp_init(1, Service::Rc)];
    inits[0].send_cq = pair.nics[0].create_cq(2).unwrap();
    let qps = pair.connect_as(&inits);
    let write = SendKind::Write(pair.remote(0, 0), None);
    for id in 0..3 {
        pair.send(0, qps[0], id, write, 0, 10);
    }
    pair.run();
    assert_eq!(pair.nics[0].query_qp(qps[0]).unwrap().state, QpState::Error);
    assert_eq!(pair.nics[0].poll_event(), Some(NicEvent::CompletionQueueError(inits[0].send_cq)));
    let mut room = [Completion::default(); 4];
    assert_eq!(pair.nics[0].poll_cq(inits[0].send_cq, &mut room), Ok(2));
    assert!(pair.nics[0].poll_cq(inits[0].send_cq, &mut room).is_err());
}

#[test]
fn a_shared_receive_queue_reports_its_limit() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let srq = pair.nics[1].create_srq(8).unwrap();
        let mut inits = [pair.qp_init(0, Service::Rc), pair.qp_init(1, Service::Rc)];
        inits[1].srq = Some(srq);
        let qps = [pair.connect_as(&inits), pair.connect_as(&inits)];
        for id in 0..4 {
            let request = ReceiveRequest { id, local: pair.piece(1, 0, 100) };
            pair.nics[1].post_srq_recv(srq, &request).unwrap();
        }
        pair.nics[1].arm_srq(srq, 3).unwrap();
        for id in 0..4 {
            pair.send(0, qps[id as usize % 2][0], id, SendKind::Send(None), 0, 100);
        }
        pair.run();
        assert_eq!(pair.completions[1].len(), 4, "{profile:?}");
        assert_eq!(pair.nics[1].poll_event(), Some(NicEvent::SharedReceiveLimit(srq)));
        let busy = NicError::Busy { what: "shared receive queue", number: srq.0, users: 2 };
        assert_eq!(pair.nics[1].destroy_srq(srq), Err(busy));
    }
}

#[test]
fn a_fence_waits_for_the_reads_before_it() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        pair.nics[1].memory_mut().0[..3000].fill(5);
        let (read, write) = (SendKind::Read(pair.remote(0, 0)), SendKind::Write(pair.remote(0, 100_000), None));
        pair.send(0, qps[0], 1, read, 50_000, 3000);
        let mut request = pair.request(0, 2, write, 50_000, 3000);
        request.fence = true;
        pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
        pair.run();
        assert!(pair.nics[1].memory().0[100_000..103_000].iter().all(|byte| *byte == 5), "{profile:?}");
    }
}
