use super::*;

const READS_MAX: u8 = 16;

/// The allowed transitions: one row for each current state, one column for each requested state, in the order of
/// [`QpState::ALL`].
const TRANSITIONS: [(Service, [&str; 7]); 3] = [
    (Service::Rc, ["RI-----", "RIr---E", "R--s--E", "R--sd-E", "R--sd-E", "R-----E", "R-----E"]),
    (Service::Uc, ["RI-----", "RIr---E", "R--s--E", "R--sd-E", "R--sd-E", "R--s--E", "R-----E"]),
    (Service::Ud, ["RI-----", "RIr---E", "R--s--E", "R--sd-E", "R--sd-E", "R--s--E", "R-----E"]),
];

fn all_attributes() -> QpAttributes {
    QpAttributes {
        partition_index: Some(0),
        port: Some(1),
        access: Some(AccessFlags::REMOTE_WRITE),
        queue_key: Some(0x1111_1111),
        path: Some(NicAddress(3)),
        mtu: Some(Mtu::B1024),
        destination: Some(QpNumber(5)),
        receive_psn: Some(Psn::new(9)),
        send_psn: Some(Psn::new(10)),
        responder_reads_max: Some(1),
        initiator_reads_max: Some(1),
        rnr_timer_code: Some(12),
        ack_timer_code: Some(14),
        retries: Some(7),
        rnr_retries: Some(7),
    }
}

/// Returns those of [`all_attributes`] that are in the set.
fn attributes(set: AttributeSet) -> QpAttributes {
    let all = all_attributes();
    let has = |attribute| set.contains(attribute);
    QpAttributes {
        partition_index: all.partition_index.filter(|_| has(AttributeSet::PARTITION_INDEX)),
        port: all.port.filter(|_| has(AttributeSet::PORT)),
        access: all.access.filter(|_| has(AttributeSet::ACCESS)),
        queue_key: all.queue_key.filter(|_| has(AttributeSet::QUEUE_KEY)),
        path: all.path.filter(|_| has(AttributeSet::PATH)),
        mtu: all.mtu.filter(|_| has(AttributeSet::MTU)),
        destination: all.destination.filter(|_| has(AttributeSet::DESTINATION)),
        receive_psn: all.receive_psn.filter(|_| has(AttributeSet::RECEIVE_PSN)),
        send_psn: all.send_psn.filter(|_| has(AttributeSet::SEND_PSN)),
        responder_reads_max: all.responder_reads_max.filter(|_| has(AttributeSet::RESPONDER_READS_MAX)),
        initiator_reads_max: all.initiator_reads_max.filter(|_| has(AttributeSet::INITIATOR_READS_MAX)),
        rnr_timer_code: all.rnr_timer_code.filter(|_| has(AttributeSet::RNR_TIMER_CODE)),
        ack_timer_code: all.ack_timer_code.filter(|_| has(AttributeSet::ACK_TIMER_CODE)),
        retries: all.retries.filter(|_| has(AttributeSet::RETRIES)),
        rnr_retries: all.rnr_retries.filter(|_| has(AttributeSet::RNR_RETRIES)),
    }
}

fn check(service: Service, from: QpState, to: QpState, set: AttributeSet) -> Result<(), TransitionError> {
    check_transition(QpNumber(1), service, from, to, &attributes(set), READS_MAX)
}

/// The attributes that each transition requires (IBA table 96).
fn required(service: Service, from: QpState, to: QpState) -> AttributeSet {
    use AttributeSet as A;
    match (from, to, service) {
        (QpState::Reset, QpState::Init, Service::Ud) => A::PARTITION_INDEX | A::PORT | A::QUEUE_KEY,
        (QpState::Reset, QpState::Init, _) => A::PARTITION_INDEX | A::PORT | A::ACCESS,
        (QpState::Init, QpState::ReadyToReceive, Service::Uc) => A::PATH | A::MTU | A::DESTINATION | A::RECEIVE_PSN,
        (QpState::Init, QpState::ReadyToReceive, Service::Rc) => {
            A::PATH | A::MTU | A::DESTINATION | A::RECEIVE_PSN | A::RESPONDER_READS_MAX | A::RNR_TIMER_CODE
        }
        (QpState::ReadyToReceive, QpState::ReadyToSend, Service::Rc) => {
            A::SEND_PSN | A::ACK_TIMER_CODE | A::RETRIES | A::RNR_RETRIES | A::INITIATOR_READS_MAX
        }
        (QpState::ReadyToReceive, QpState::ReadyToSend, _) => A::SEND_PSN,
        _ => A::empty(),
    }
}

fn every_pair(mut check: impl FnMut(Service, QpState, QpState, bool)) {
    for (service, rows) in TRANSITIONS {
        for (from, row) in QpState::ALL.into_iter().zip(rows) {
            for (to, mark) in QpState::ALL.into_iter().zip(row.chars()) {
                check(service, from, to, mark != '-');
            }
        }
    }
}

#[test]
fn transitions_are_those_of_the_verbs() {
    every_pair(|service, from, to, is_allowed| {
        let done = check(service, from, to, required(service, from, to));
        let refused = TransitionError::NotAllowed { qp: 1, service, from, to };
        assert_eq!(done, if is_allowed { Ok(()) } else { Err(refused) });
    });
}

#[test]
fn a_missing_required_attribute_is_refused() {
    every_pair(|service, from, to, is_allowed| {
        if !is_allowed {
            return;
        }
        let required = required(service, from, to);
        for left_out in required.iter() {
            let missing = left_out;
            assert_eq!(
                check(service, from, to, required - left_out),
                Err(TransitionError::Missing { qp: 1, from, to, missing })
            );
        }
    });
}

#[test]
fn an_attribute_that_is_neither_required_nor_optional_is_refused() {
    let mut refused = 0;
    every_pair(|service, from, to, is_allowed| {
        let Some(rule) = rule(service, from, to).filter(|_| is_allowed) else { return };
        assert!((rule.required & rule.optional).is_empty());
        for more in (AttributeSet::all() - rule.required).iter() {
            let done = check(service, from, to, rule.required | more);
            if rule.optional.contains(more) {
                assert_eq!(done, Ok(()), "{service:?} {from:?} {to:?} {more:?}");
            } else {
                let unwanted = more;
                assert_eq!(done, Err(TransitionError::Unwanted { qp: 1, from, to, unwanted }));
                refused += 1;
            }
        }
    });
    assert!(refused > 500, "{refused}");
}

#[test]
fn reset_and_error_take_no_attributes_and_psns_are_fixed_while_sending() {
    let fixed = AttributeSet::RECEIVE_PSN | AttributeSet::SEND_PSN | AttributeSet::DESTINATION | AttributeSet::MTU;
    every_pair(|service, from, to, is_allowed| {
        let Some(rule) = rule(service, from, to).filter(|_| is_allowed) else { return };
        if matches!(to, QpState::Reset | QpState::Error) {
            assert_eq!(rule, Rule::NOTHING);
        }
        if matches!(from, QpState::ReadyToSend | QpState::SendQueueDrain | QpState::SendQueueError) {
            assert!(!(rule.required | rule.optional).intersects(fixed), "{service:?} {from:?} {to:?}");
        }
    });
}

#[test]
fn errors_name_values_out_of_range() {
    let refuse = |change: &dyn Fn(&mut QpAttributes), from, to| {
        let mut attributes = attributes(required(Service::Rc, from, to));
        change(&mut attributes);
        let error = check_transition(QpNumber(1), Service::Rc, from, to, &attributes, READS_MAX).unwrap_err();
        error.to_string()
    };
    let (init, receive, send) = (QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend);
    for (change, from, to, text) in [
        (&|a: &mut QpAttributes| a.port = Some(2), QpState::Reset, init, "port cannot be 2; choose 1, the only one"),
        (
            &|a: &mut QpAttributes| a.partition_index = Some(1),
            QpState::Reset,
            init,
            "partition index cannot be 1; choose 0, the only one",
        ),
        (
            &|a: &mut QpAttributes| a.destination = Some(QpNumber(1 << 24)),
            init,
            receive,
            "destination cannot be 16777216; choose a number of 24 bits",
        ),
        (
            &|a: &mut QpAttributes| a.responder_reads_max = Some(17),
            init,
            receive,
            "responder reads cannot be 17; choose up to what the NIC offers",
        ),
        (&|a: &mut QpAttributes| a.retries = Some(8), receive, send, "retries cannot be 8; choose 0 to 7"),
        (&|a: &mut QpAttributes| a.rnr_retries = Some(8), receive, send, "RNR retries cannot be 8; choose 0 to 7"),
        (
            &|a: &mut QpAttributes| a.ack_timer_code = Some(32),
            receive,
            send,
            "ACK timer code cannot be 32; choose 0 to 31",
        ),
    ] as [(&dyn Fn(&mut QpAttributes), QpState, QpState, &str); 7]
    {
        assert_eq!(refuse(change, from, to), format!("queue pair 1: {text}"));
    }
}

#[test]
fn errors_name_the_attributes() {
    let error = check(Service::Ud, QpState::Reset, QpState::Init, AttributeSet::PORT).unwrap_err();
    let text = "queue pair 1: the transition from Reset to Init requires partition_index, queue_key; set it";
    assert_eq!(error.to_string(), text);
}

#[test]
fn mtus_are_those_of_the_infiniband_specification() {
    assert_eq!(Mtu::ALL.map(Mtu::bytes), [256, 512, 1024, 2048, 4096]);
}
